"""Coming in with a real browser: by a link, by a link from elsewhere, and by hand."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from stoker.web.config import Config, own_address
from tests.support.browser import screen
from tests.support.guarded_site import Site, served, site_of


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return site_of(Config(queue=None, home=tmp_path / "home"))


@contextmanager
def another_site(html: str) -> Iterator[str]:
    """A page of somebody else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class has it
            pass

    # A thread for each connection: browsers open some beforehand, and say nothing on them.
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_login_link_logs_in_and_leaves_no_token_in_the_address(site: Site, browser: Browser) -> None:
    secret = site.keys.first().secret
    with served(site.app) as port, screen(browser, "phone") as phone:
        page = phone.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(f"{request.url} {request.headers.get('referer', '')}"))
        page.goto(f"http://localhost:{port}/login#{secret}")
        expect(page.get_by_text("hello operator")).to_be_visible()
        assert page.url == f"http://localhost:{port}/"
        assert not [address for address in asked if secret in address.replace(f"/login#{secret}", "")]
        assert page.evaluate("document.cookie") == ""
        assert secret not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
        page.go_back()
        assert page.url == "about:blank", "the link is still in the history"
    assert secret not in "\n".join(site.log)


def test_link_from_a_mail_opens_its_target_on_a_logged_in_device(site: Site, browser: Browser) -> None:
    with served(site.app) as port, screen(browser, "phone") as phone:
        page = phone.page
        page.goto(f"http://localhost:{port}/login#{site.keys.first().secret}")
        expect(page.get_by_text("hello operator")).to_be_visible()
        with another_site(f'<a href="http://localhost:{port}/form?from=mail">the job failed</a>') as mail:
            page.goto(mail)
            page.get_by_text("the job failed").click()
            expect(page.get_by_role("button", name="Submit")).to_be_visible()
        assert page.url == f"http://localhost:{port}/form?from=mail"


def test_login_form_redirects_to_the_requested_page(site: Site, browser: Browser) -> None:
    with served(site.app) as port, screen(browser, "phone") as phone:
        page = phone.page
        page.goto(f"http://localhost:{port}/form?x=1")
        page.get_by_label("Token").fill("stk_wrong")
        # A browser complains of every 401; of this one last, and not always before it shows the page.
        with page.expect_console_message(lambda message: message.location["url"].endswith("/login")):
            page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("is invalid")
        phone.forgive("status of 401")
        phone.look_over("login")
        page.get_by_label("Token").fill(site.keys.first().secret)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("button", name="Submit")).to_be_visible()
        assert page.url == f"http://localhost:{port}/form?x=1"


def test_forms_work_over_plain_http_except_from_other_sites(site: Site, browser: Browser) -> None:
    """Without TLS, browsers do not say `Sec-Fetch-Site`: the origin is all there is."""
    with served(site.app, host=own_address()) as port, screen(browser, "phone") as phone:
        page, address = phone.page, f"http://{own_address()}:{port}"
        page.goto(f"{address}/login#{site.keys.first().secret}")
        expect(page.get_by_text("hello operator")).to_be_visible()
        page.goto(f"{address}/form")
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_text("done")).to_be_visible()
        assert len(site.done) == 1
        with another_site(f'<form method="post" action="{address}/api/v1/jobs"><button>Win</button></form>') as evil:
            page.goto(evil)
            page.get_by_role("button", name="Win").click()
            expect(page.get_by_text("another site")).to_be_visible()
        assert len(site.done) == 1
