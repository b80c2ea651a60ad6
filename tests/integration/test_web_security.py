"""The gate around the page: the table of what is refused, by plain requests and by a real server."""

import asyncio
import contextlib
import re
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import HTMLResponse
from starlette.types import Message, Receive, Scope, Send

from stoker.web.app import with_middleware
from stoker.web.auth.authentication import local_path
from stoker.web.auth.key_file import User
from stoker.web.auth.requests import refuse
from stoker.web.config import Config
from stoker.web.middleware.limits import MAX_IDLE, MAX_TOKEN_STREAMS, StreamLimits, WholeBody
from stoker.web.problems import install
from tests.support.guarded_site import Site, served, site_of
from tests.support.waiting import wait_for

HTML = {"Accept": "text/html"}
FROM_HERE = {"Sec-Fetch-Site": "same-origin"}
MIB = 1024 * 1024


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return site_of(Config(queue=None, home=tmp_path / "home"))


# Who may


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/metrics", "/live", "/anything", "/login/session"])
def test_program_without_token_gets_401(site: Site, path: str) -> None:
    answer = site.ask("GET", path)
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert "Bearer TOKEN" in answer.json()["detail"]


def test_browser_without_token_gets_the_login_form_and_returns_to_its_target(site: Site) -> None:
    answer = site.ask("GET", "/jobs?tag=%22%3E%3Cscript%3E", headers=HTML)
    assert answer.status_code == 401
    assert 'name="token"' in answer.text
    assert 'value="/jobs?tag=%22%3E%3Cscript%3E"' in answer.text
    assert "data-check" in answer.text
    assert "<script>" not in answer.text


def test_request_without_token_changes_nothing(site: Site) -> None:
    assert site.ask("POST", "/api/v1/jobs", content="rm -rf").status_code == 401
    assert site.ask("POST", "/api/v1/jobs", content="rm", headers={"Cookie": "stoker-7865=guess"}).status_code == 403
    answer = site.ask("POST", "/api/v1/jobs", content="rm", headers={"Cookie": "stoker-7865=guess"} | FROM_HERE)
    assert answer.status_code == 401
    assert site.done == []


def test_wrong_token_is_refused_in_form_and_header(site: Site) -> None:
    site.keys.first()
    assert site.ask("POST", "/login", data={"token": "stk_wrong"}).status_code == 401
    page = site.ask("POST", "/login", data={"token": "stk_wrong", "next": "/jobs"}, headers=HTML)
    assert page.status_code == 401
    assert "is invalid" in page.text
    assert 'value="/jobs"' in page.text
    assert "set-cookie" not in page.headers
    assert site.ask("GET", "/api/v1/jobs", headers={"Authorization": "Bearer stk_wrong"}).status_code == 401


def test_login_exchanges_the_token_for_an_http_only_cookie(site: Site) -> None:
    secret = site.keys.first().secret
    answer = site.ask("POST", "/login", data={"token": secret, "next": "/jobs"}, headers=HTML)
    assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")
    cookie = answer.headers["set-cookie"]
    name, *flags = cookie.split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(flags)
    assert "Secure" not in flags
    assert name.startswith("stoker-7865=")
    assert secret not in cookie
    assert site.ask("GET", "/", headers={"Cookie": name} | HTML).text == "hello operator"


@pytest.mark.parametrize(
    ("config", "base"),
    [
        ({}, "https://localhost:7865"),
        ({"url": "https://stoker.example.org"}, "http://stoker.example.org"),
    ],
    ids=["TLS of its own", "a proxy's"],
)
def test_cookie_is_secure_with_tls(tmp_path: Path, config: dict[str, str], base: str) -> None:
    site = site_of(Config(queue=None, home=tmp_path / "home", url=config.get("url", "")))
    answer = site.ask("POST", "/login", data={"token": site.keys.first().secret}, base=base)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-stoker-7865=")
    assert cookie.endswith("; Secure")
    named = {"Cookie": cookie.partition(";")[0]}
    assert site.ask("GET", "/", headers=named | HTML, base=base).status_code == 200
    # Past the proxy, without TLS, it counts for nothing.
    assert site.ask("GET", "/", headers=named | HTML, base="http://192.0.2.1:7865").status_code == 401


def test_program_authenticates_every_request_by_token(site: Site) -> None:
    assert site.ask("POST", "/api/v1/jobs", content="train", headers=site.bearer()).status_code == 200
    assert site.done == ["train"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "BREW"])
def test_viewer_cannot_make_changes(site: Site, method: str) -> None:
    cookie = site.login("viewer")
    for headers in (cookie | FROM_HERE, site.bearer("viewer")):
        answer = site.ask(method, "/api/v1/jobs", headers=headers)
        assert answer.status_code == 403
        assert "is read-only" in answer.json()["detail"]
    assert site.done == []
    assert site.ask("GET", "/api/v1/jobs", headers=cookie).status_code == 200


def test_viewer_who_sends_a_form_gets_an_error_page(site: Site) -> None:
    answer = site.ask("POST", "/submit", headers=site.login("viewer") | FROM_HERE | HTML)
    assert answer.status_code == 403
    assert "<code>stoker tokens add</code>" in answer.text


def test_logout_ends_the_session_and_removes_the_cookie(site: Site) -> None:
    cookie, other = site.login(), site.login()
    answer = site.ask("POST", "/logout", headers=cookie | FROM_HERE)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert site.ask("GET", "/", headers=cookie).status_code == 401
    assert site.ask("GET", "/", headers=other).status_code == 200


def test_second_login_ends_the_old_session_of_the_device(site: Site) -> None:
    cookie = site.login()
    site.login(headers=cookie | FROM_HERE)
    assert len(site.keys.sessions()) == 1


def test_logout_ends_live_streams(site: Site) -> None:
    cookie = site.login()

    async def listened() -> None:
        sent = asyncio.Event()

        async def overheard(scope: Scope, receive: Receive, send: Send) -> None:
            async def told(message: Message) -> None:
                await send(message)
                if message.get("body"):
                    sent.set()

            await site.app(scope, receive, told)

        # The transport gives an answer when it is over: without the gate, this one never is.
        transport = httpx.ASGITransport(overheard, client=("192.0.2.7", 4000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:7865") as client:
            live = asyncio.create_task(client.get("/live", headers=cookie))
            await asyncio.wait_for(sent.wait(), 60.0)
            assert not live.done()
            await client.post("/logout", headers=cookie | FROM_HERE)
            answer = await asyncio.wait_for(live, 60.0)
            assert answer.text.startswith("data: news")

    asyncio.run(listened())


def test_stream_limit_of_a_viewer_ends_only_own_streams(site: Site) -> None:
    operator, viewer = site.bearer(), site.bearer("viewer")

    async def crowded() -> None:
        transport = httpx.ASGITransport(site.app, client=("192.0.2.7", 4000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:7865") as client:
            first = asyncio.create_task(client.get("/live", headers=operator))
            await asyncio.sleep(0)
            many = [asyncio.create_task(client.get("/live", headers=viewer)) for _ in range(MAX_TOKEN_STREAMS + 10)]
            async with asyncio.timeout(60):
                ended = await asyncio.gather(*many[:10])
                # They end as answers do that are whole.
                assert {answer.text.partition("\n")[0] for answer in ended} == {"data: news"}
                assert (await client.get("/", headers=operator)).status_code == 200
            assert not any(one.done() for one in [first, *many[10:]])
            for one in (first, *many):
                one.cancel()

    asyncio.run(crowded())


def test_stream_limit_of_viewers_leaves_room_for_operators() -> None:
    async def crowded() -> list[bool]:
        streams = StreamLimits(max_per_token=5, max_of_viewers=6)
        whose = ["op", *["a"] * 4, *["b"] * 3, "c"]
        tasks = [asyncio.create_task(asyncio.sleep(600)) for _ in whose]
        for name, task in zip(whose, tasks, strict=True):
            streams.begin(User("operator" if name == "op" else "viewer", name, None, name), task)
        await asyncio.sleep(0)
        cancelled = [task.cancelled() for task in tasks]
        for task in tasks:
            task.cancel()
        return cancelled

    # Whoever has most makes room: the two oldest of the first.
    assert asyncio.run(crowded()) == [False, True, True, False, False, False, False, False, False]


def test_merged_stream_counts_each_of_its_streams() -> None:
    async def crowded() -> list[bool]:
        streams, viewer = StreamLimits(max_per_token=5), User("viewer", "a", None, "a")
        tasks = [asyncio.create_task(asyncio.sleep(600)) for _ in range(3)]
        for parts, task in zip((2, 3, 2), tasks, strict=True):
            streams.begin(viewer, task, parts)
        await asyncio.sleep(0)
        cancelled = [task.cancelled() for task in tasks]
        for task in tasks:
            task.cancel()
        return cancelled

    assert asyncio.run(crowded()) == [True, False, False]


def test_responses_are_compressed_and_events_are_flushed_at_once(site: Site) -> None:
    headers = site.bearer()
    with served(site.app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:
        with client.stream("GET", "/live", timeout=60) as live:
            assert live.headers["content-encoding"] == "gzip"
            assert "Accept-Encoding" in live.headers["vary"]
            # It never ends: each event is on its way before the next.
            assert next(live.iter_text()).startswith("data: news")
        plain = client.stream("GET", "/live", headers={"Accept-Encoding": "identity"}, timeout=60)
        with plain as live:
            assert "content-encoding" not in live.headers
            assert next(live.iter_raw()).startswith(b"data: news")


def test_unreadable_token_file_refuses_logins_without_showing_its_path(site: Site) -> None:
    headers = site.bearer()
    site.keys.path.chmod(0o644)
    answer = wait_for(
        lambda: found if (found := site.ask("GET", "/api/v1/jobs", headers=headers)).status_code != 200 else None
    )
    assert answer.status_code == 503
    assert "`stoker tokens` shows the error" in answer.text
    assert str(site.keys.path) not in answer.text


@pytest.mark.parametrize(
    ("wanted", "led_to"),
    [
        ("/jobs/7?x=1", "/jobs/7?x=1"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/a\\..\\b", "/"),
        ("https://evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("/\t/evil.example", "/"),
        ("/login?next=/", "/"),
        ("", "/"),
    ],
)
def test_login_never_redirects_to_another_site(wanted: str, led_to: str) -> None:
    assert local_path(wanted) == led_to


# Other sites


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://other.localhost:7865"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost:9999"},
        {"Origin": "https://localhost:7865"},
        {"Origin": "null"},
        {},
    ],
    ids=str,
)
def test_form_of_another_site_is_refused(site: Site, headers: dict[str, str]) -> None:
    cookie = site.login()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = site.ask("POST", "/api/v1/jobs", content="command=evil", headers=cookie | form | headers)
    assert answer.status_code == 403
    assert site.done == []
    answer = site.ask("POST", "/logout", headers=cookie | headers)
    assert answer.status_code == 403
    assert site.ask("GET", "/", headers=cookie).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {"Origin": "http://localhost:7865"}],
    ids=str,
)
def test_form_of_the_page_is_accepted(site: Site, headers: dict[str, str]) -> None:
    answer = site.ask("POST", "/api/v1/jobs", content="train", headers=site.login() | headers)
    assert answer.status_code == 200
    assert site.done == ["train"]


def test_public_address_behind_a_proxy_counts_as_same_origin(tmp_path: Path) -> None:
    site = site_of(Config(queue=None, home=tmp_path / "home", url="https://stoker.example.org"))
    cookie = site.login(base="http://stoker.example.org")
    for origin, status in (("https://stoker.example.org", 200), ("https://evil.example.org", 403)):
        headers = cookie | {"Origin": origin}
        answer = site.ask("POST", "/api/v1/jobs", content="", headers=headers, base="http://stoker.example.org")
        assert answer.status_code == status


def test_login_from_another_site_is_refused(site: Site) -> None:
    secret = site.keys.first().secret
    answer = site.ask("POST", "/login", data={"token": secret}, headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def test_basic_authentication_does_not_replace_a_token(site: Site) -> None:
    headers = site.login() | {"Authorization": "Basic c3Rva2VyOng=", "Sec-Fetch-Site": "cross-site"}
    assert site.ask("POST", "/api/v1/jobs", headers=headers).status_code == 403


def test_preflights_and_websockets_are_refused(site: Site) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = site.ask("OPTIONS", "/api/v1/jobs", headers=asked)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]
    upgrade = {"Connection": "Upgrade", "Upgrade": "WebSocket"}
    assert site.ask("GET", "/live", headers=site.login() | upgrade).status_code == 400


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:7865", "localhost.evil.example", "127.0.0.1.evil.example", "2130706433", "<b>", ""],
)
def test_foreign_host_name_is_refused(site: Site, host: str) -> None:
    headers = site.login() | HTML | {"Host": host}
    answer = site.ask("GET", "/", headers=headers)
    assert answer.status_code == 421
    assert "hello" not in answer.text
    assert "<b>" not in answer.text
    assert site.ask("GET", "/healthz", headers={"Host": host}).status_code == 421


def test_refusal_of_a_host_name_explains_how_to_allow_it(site: Site) -> None:
    answer = site.ask("GET", "/", headers={"Host": "gpu.lab.example:7865"})
    assert "`--name gpu.lab.example`" in answer.json()["detail"]


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1:7865", "192.168.1.20", "[::1]:7865", "[fe80::1]",
     socket.gethostname(), f"{socket.gethostname().partition('.')[0]}.local", "gpu.lab.example.", "stoker.example.org"],
)  # fmt: skip
def test_host_names_of_this_machine_and_ip_addresses_are_accepted(tmp_path: Path, host: str) -> None:
    config = Config(queue=None, home=tmp_path, names=("GPU.lab.example",), url="https://stoker.example.org/x")
    assert site_of(config).ask("GET", "/healthz", headers={"Host": host}).status_code == 200


# What an answer lets a browser do


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/nowhere", 404),
        ("GET", "/broken", 500),
        ("DELETE", "/", 405),
        ("GET", "/live2", 404),
    ],
)
def test_every_response_has_security_headers(site: Site, method: str, path: str, status: int) -> None:
    answer = site.ask(method, path, headers=site.bearer())
    assert answer.status_code == status
    assert_guarded(answer)
    assert answer.headers["cache-control"] == "no-store"
    assert "strict-transport-security" not in answer.headers


def assert_guarded(answer: httpx.Response) -> None:
    headers = answer.headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "camera=()" in headers["permissions-policy"]


def test_refusals_have_security_headers(site: Site) -> None:
    for answer in (
        site.ask("GET", "/api/v1/jobs"),
        site.ask("GET", "/", headers=HTML),
        site.ask("GET", "/", headers={"Host": "evil.example"}),
        site.ask("POST", "/", headers={"Content-Length": str(10 * MIB)}),
    ):
        assert answer.status_code >= 400
        assert_guarded(answer)


def test_browsers_may_cache_public_files_only(site: Site) -> None:
    assert site.ask("GET", "/static/thing.css").headers["cache-control"] == "public, max-age=60"
    assert site.ask("GET", "/login").headers["cache-control"] == "no-store"


def test_hsts_is_sent_with_tls_on_the_default_port_only(site: Site) -> None:
    alone = site.ask("GET", "/healthz", base="https://localhost")
    assert "max-age=" in alone.headers["strict-transport-security"]
    # On one port of several, it would forbid the others.
    assert "strict-transport-security" not in site.ask("GET", "/healthz", base="https://localhost:7865").headers


# Too much, too slow, too often


def test_large_body_is_refused_by_declared_and_actual_length(site: Site) -> None:
    headers = site.bearer()
    answer = site.ask("POST", "/api/v1/jobs", content=b"x" * (10 * MIB), headers=headers)
    assert answer.status_code == 413
    assert "1,024 KiB" in answer.json()["detail"]

    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(160):
            yield b"x" * (64 * 1024)

    assert site.ask("POST", "/api/v1/jobs", content=in_pieces(), headers=headers).status_code == 413
    assert site.ask("POST", "/api/v1/jobs", content=b"x" * MIB, headers=headers).status_code == 200
    assert [len(text) for text in site.done] == [MIB]


def test_body_limit_is_small_without_authentication(site: Site) -> None:
    assert site.ask("POST", "/login", data={"token": "x" * 20_000}).status_code == 413


def test_token_guessing_is_throttled_and_valid_tokens_pass(site: Site) -> None:
    secret = site.keys.first().secret
    device = site.login()
    statuses = [site.ask("POST", "/login", data={"token": f"stk_{n}"}).status_code for n in range(12)]
    assert statuses == [401] * 10 + [429] * 2
    stopped = site.ask("POST", "/login", data={"token": "stk_wrong"}, headers=HTML)
    assert stopped.status_code == 429
    assert 0 < int(stopped.headers["retry-after"]) <= 30
    assert "Too many wrong tokens" in stopped.text
    # A header about the address is anybody's invention.
    elsewhere = {"X-Forwarded-For": "203.0.113.9"}
    assert site.ask("POST", "/login", data={"token": "stk_wrong"}, headers=elsewhere).status_code == 429
    # Somebody else at this address has sent the wrong ones: the owner comes in all the same.
    assert site.ask("POST", "/login", data={"token": secret}).status_code == 200
    assert site.ask("GET", "/", headers=device).status_code == 200


def test_simultaneous_token_guessing_is_throttled(site: Site) -> None:
    site.keys.first()

    async def burst() -> list[int]:
        transport = httpx.ASGITransport(site.app, client=("192.0.2.7", 4000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:7865") as client:
            tries = (client.post("/login", data={"token": f"stk_{number}"}) for number in range(40))
            return sorted(answer.status_code for answer in await asyncio.gather(*tries))

    assert asyncio.run(burst()) == [401] * 10 + [429] * 30


def test_login_form_with_extra_fields_is_refused(site: Site) -> None:
    many = {f"field{number}": "x" for number in range(11)}
    answer = site.ask("POST", "/login", data=many)
    assert answer.status_code == 400
    assert answer.json()["detail"] == "The form has more than 10 fields."
    assert site.ask("POST", "/login", data=many, headers=HTML).status_code == 400


@pytest.mark.parametrize("path", ["/api/x", "/metrics", "/healthz", "/static/x.css", "/jobs"])
def test_authentication_and_pages_agree_on_requests_of_browsers(site: Site, path: str) -> None:
    app = FastAPI()
    install(app, lambda _request, status, *_: HTMLResponse("a page", status))
    answer = Site(app, site.config, site.keys, [], []).ask("GET", path, headers=HTML)
    scope = {"type": "http", "path": path, "method": "GET", "headers": [(b"accept", b"text/html")]}
    refused = refuse(scope, site.config, 404, "no")
    assert answer.headers["content-type"] == refused.headers["content-type"]
    assert ("html" in refused.headers["content-type"]) == (path == "/jobs")


def test_token_guessing_by_header_is_throttled(site: Site) -> None:
    secret = site.keys.first().secret
    wrong = [{"Authorization": f"Bearer stk_{number}"} for number in range(11)]
    assert [site.ask("GET", "/", headers=headers).status_code for headers in wrong] == [401] * 10 + [429]
    answer = site.ask("GET", "/", headers=wrong[0])
    assert int(answer.headers["retry-after"]) > 0
    assert site.ask("GET", "/", headers={"Authorization": f"Bearer {secret}"}).status_code == 200
    # People who mistype a token are not kept out by a program with an old one.
    assert site.ask("POST", "/login", data={"token": "stk_mistyped"}).status_code == 401


# What is written down


def test_access_log_names_users_and_contains_no_secret(site: Site) -> None:
    secret = site.keys.first().secret
    cookie = site.login()
    program = site.bearer()
    site.ask("GET", f"/?token={secret}", headers=cookie)
    site.ask("GET", f"/login/{secret}", headers=program)
    site.ask("POST", "/login", data={"token": secret, "next": f"/{secret}"})
    site.ask("GET", "/a%0ab%1b[31m%20c", headers={"User-Agent": secret})
    written = "\n".join(site.log)
    assert secret not in written
    assert cookie["Cookie"].partition("=")[2] not in written
    assert program["Authorization"].partition(" ")[2] not in written
    words = [line.split(" ") for line in site.log]
    assert [line[1:6] for line in words] == [
        ["192.0.2.7", "operator", "POST", "/login", "200"],
        ["192.0.2.7", "operator", "GET", "/", "200"],
        ["192.0.2.7", "operator\\x20of\\x20a\\x20program", "GET", "/login/stk_…", "404"],
        ["192.0.2.7", "operator", "POST", "/login", "200"],
        ["192.0.2.7", "-", "GET", "/a\\x0ab\\x1b[31m\\x20c", "401"],
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line[0]) for line in words)
    assert all(re.fullmatch(r"\d+ms", line[6]) for line in words)


def test_internal_error_is_logged_as_500(site: Site) -> None:
    site.ask("GET", "/broken", headers=site.bearer())
    assert " GET /broken 500 " in site.log[-1]


def test_unwritable_access_log_blocks_nobody(tmp_path: Path) -> None:
    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    config = Config(queue=None, home=tmp_path)
    site = site_of(config)
    assert (
        Site(with_middleware(site.app, config, site.keys, full), config, site.keys, [], [])
        .ask("GET", "/healthz")
        .is_success
    )


# A real server


def let_go(slow: Mapping[str, socket.socket]) -> set[str]:
    """Sends a letter now and then with each, until the server has had enough: of which that was so."""
    ends = time.monotonic() + 30
    gone: set[str] = set()
    while len(gone) < len(slow) and time.monotonic() < ends:
        time.sleep(0.02)
        for how in slow.keys() - gone:
            try:
                if how != "silent":
                    slow[how].sendall(b"x")
                if not slow[how].recv(65536, socket.MSG_DONTWAIT):
                    gone.add(how)
            except BlockingIOError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                gone.add(how)
    return gone


def asked(port: int) -> httpx.Response | None:
    """None when the server let go of the connection before the question was sent."""
    with contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError):
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=60)
    return None


SLOW = {
    "silent": b"",
    "head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "body": b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\ntoken=",
    "body after the answer": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n",
    "second head": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nX-Slow: ",
}


def test_slow_request_heads_are_disconnected_and_block_nobody(site: Site) -> None:
    with served(site.app, head_seconds=0.4, body_seconds=0.5) as port, contextlib.ExitStack() as crowd:
        slow = {how: crowd.enter_context(socket.create_connection(("127.0.0.1", port))) for how in SLOW}
        for how, client in slow.items():
            # On a busy machine even this may have come too late: then it is let go as one that was silent.
            with contextlib.suppress(ConnectionError):
                client.sendall(SLOW[how])
        assert wait_for(lambda: asked(port)).status_code == 200
        assert let_go(slow) == set(SLOW), "some are kept for ever"


def test_slow_body_is_refused_with_a_message(site: Site) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the body is not complete")

    with (
        served(WholeBody(app, site.config, seconds=0.2)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=60) as slow,
    ):
        slow.sendall(b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nx")
        with slow.makefile("rb") as answer:
            told = answer.read()
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.2 s" in told


def test_client_that_does_not_read_is_disconnected() -> None:
    gone = threading.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        leaving = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        gone.set()

    with served(endless, read_seconds=0.3) as port, socket.create_connection(("127.0.0.1", port)) as deaf:
        deaf.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert gone.wait(30), "a client that reads nothing is kept for ever"


def test_idle_connections_block_nobody(site: Site) -> None:
    # They would be let go by and by for their silence too: here it is not for that.
    with served(site.app, head_seconds=600.0) as port, contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(MAX_IDLE + 20)]
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=60).status_code == 200
        ends = select.poll()
        for client in silent:
            ends.register(client, select.POLLRDHUP)
        wait_for(lambda: len(ends.poll(0)) >= 20, named="the oldest leaving")


def test_large_body_over_a_real_connection_is_refused(site: Site) -> None:
    headers = site.bearer()
    with (
        served(site.app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client,
    ):
        assert client.post("/api/v1/jobs", content=b"x" * (10 * MIB)).status_code == 413
        pieces = (b"x" * 65536 for _ in range(160))
        assert client.post("/api/v1/jobs", content=pieces).status_code == 413
        assert client.post("/api/v1/jobs", content=b"train").status_code == 200
    assert site.done == ["train"]
