"""The settings on a phone: messages, links for viewers, and notifications of the browser."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from stoker.queue import JobSpec, Store, init_queue
from tests.support.browser import screen
from tests.support.http_receiver import Receiver
from tests.support.page_site import PageSite, page_site
from tests.support.queue_jobs import end
from tests.support.waiting import wait_for


@pytest.fixture
def queue() -> Iterator[Store]:
    with init_queue() as store:
        yield store


@pytest.fixture
def site(queue: Store) -> Iterator[PageSite]:
    with page_site("serve", "--port", "0") as started:
        yield started


def test_messages_and_viewer_links_are_set_up_on_a_phone(browser: Browser, site: PageSite, queue: Store) -> None:
    with screen(browser, "phone", color_scheme="light") as shown, Receiver().listening() as hook:
        page = shown.page
        page.goto(f"{site.address}/login#{site.token}")
        expect(page.locator("#health-headline")).to_be_visible()
        page.get_by_label("Menu").click()
        page.get_by_role("link", name="Settings").click()
        page.get_by_label("apprise URL").fill(f"json://127.0.0.1:{hook.port}/s3cret?cto=60&rto=60")
        page.get_by_label("Name", exact=True).fill("my phone")
        page.get_by_label("A job succeeded").check()
        page.get_by_label("The queue is empty").uncheck()
        page.get_by_role("button", name="Add", exact=True).click()
        added = page.locator("#settings li", has_text="my phone")
        expect(added).to_contain_text("json://***")
        assert "s3cret" not in page.content()
        _messages_arrive(page, queue, hook)
        added.get_by_text("Events").click()
        added.get_by_label("A job succeeded").uncheck()
        added.get_by_role("button", name="Save").click()
        expect(added).not_to_contain_text("warned, succeeded")
        page.emulate_media(color_scheme="dark")
        page.get_by_label("Name of a new viewer").fill("lab screen")
        page.get_by_role("button", name="Make a viewer link").click()
        link = page.locator("#link-text")
        expect(link).to_contain_text(f"{site.address}/login#stk_")
        code = page.locator("#link-qr svg").bounding_box()
        assert code is not None and code["width"] == code["height"] > 200  # noqa: PT018 - of one thing
        shown.look_over("20-viewer-link")
        address = link.get_attribute("href") or ""
        page.get_by_role("button", name="Close", exact=True).last.click()
        shown.look_over("21-settings")
        viewer = browser.new_context()
        try:
            window = viewer.new_page()
            window.goto(address)
            expect(window.locator("#health-headline")).to_be_visible()
            window.goto(f"{site.address}/settings")
            expect(window.get_by_role("heading", name="This browser")).to_be_visible()
            expect(window.get_by_role("heading", name="Messages")).not_to_be_visible()
            page.get_by_role("button", name="Revoke… lab screen").click()
            page.get_by_role("button", name="Revoke it").click()
            expect(page.get_by_text("lab screen: revoked, 1 device logged out")).to_be_visible()
            window.reload()
            expect(window.get_by_label("Token")).to_be_visible()
        finally:
            viewer.close()
        page.get_by_role("button", name="Remove… my phone").click()
        page.get_by_role("button", name="Remove it").click()
        expect(added).to_have_count(0)
        assert queue.notices.urls() == []


def _messages_arrive(page: Page, queue: Store, hook: Receiver) -> None:
    page.get_by_role("button", name="Send a test message").click()
    expect(page.get_by_text("A test message was sent")).to_be_visible()
    (job,) = queue.jobs.submit([JobSpec(command="x", name="train")])
    end(queue, job, "succeeded")
    wait_for(lambda: len(hook.asked) > 1, named="the message")
    assert [one.json()["title"] for one in hook.asked] == ["Stoker: a test", "Stoker: job succeeded: train"]


SHOWN = """async () => {
  const registration = await navigator.serviceWorker.getRegistration('/static/');
  return (await registration?.getNotifications() ?? []).map((one) => [one.title, one.data.path]);
}"""


def shown_in(page: Page) -> list[list[str]]:
    found: list[list[str]] = page.evaluate(SHOWN)
    return sorted(found)


def _mark_group(page: Page, site: PageSite, queue: Store) -> None:
    queue.jobs.submit([JobSpec(command="x", group="night")] * 2)
    page.goto(site.address)
    menu = page.get_by_label("More for night")
    menu.click()
    page.get_by_role("button", name="Notify me when all of night are done").click()
    expect(page.locator("#section-groups")).to_contain_text("a message when done")
    assert queue.groups.get("night").notify == ("done",)


def test_browser_with_several_windows_is_notified_once(browser: Browser, site: PageSite, queue: Store) -> None:
    with screen(browser, "phone") as shown:
        page = shown.page
        page.context.grant_permissions(["notifications"], origin=site.address)
        page.goto(f"{site.address}/login#{site.token}")
        expect(page.locator("#health-headline")).to_be_visible()
        page.goto(f"{site.address}/settings")
        page.get_by_role("button", name="Notify me in this browser").click()
        expect(page.get_by_text("On: keep a page open")).to_be_visible()
        other = page.context.new_page()
        other.goto(f"{site.address}/jobs")
        jobs = queue.jobs.submit([JobSpec(command="x", name=name) for name in ("marked", "other", "broken")])
        page.goto(f"{site.address}/jobs/{jobs[0]}")
        page.get_by_role("button", name="Notify me").click()
        expect(page.get_by_role("button", name="Do not notify me")).to_be_visible()
        assert queue.jobs.get(jobs[0]).notify == ("end",)
        _mark_group(page, site, queue)
        end(queue, jobs[0], "succeeded")
        end(queue, jobs[1], "succeeded")
        end(queue, jobs[2])
        wanted = [
            ["Stoker: job failed: broken", f"/jobs/{jobs[2]}"],
            ["Stoker: job succeeded: marked", f"/jobs/{jobs[0]}"],
        ]
        wait_for(lambda: shown_in(page) == wanted, named="both notifications")
        shown.look_over("22-notify-me")
        assert shown_in(other) == wanted


def test_browser_without_notification_permission_shows_the_reason(browser: Browser, site: PageSite) -> None:
    with screen(browser, "phone") as shown:
        page = shown.page
        page.add_init_script("Object.defineProperty(Notification, 'permission', {get: () => 'denied'});")
        page.goto(f"{site.address}/login#{site.token}")
        expect(page.locator("#health-headline")).to_be_visible()
        page.goto(f"{site.address}/settings")
        expect(page.get_by_text("This browser does not allow notifications of this page")).to_be_visible()
        expect(page.get_by_role("button", name="Notify me in this browser")).not_to_be_visible()
        page.add_init_script("Object.defineProperty(window, 'isSecureContext', {get: () => false});")
        page.reload()
        expect(page.get_by_text("only of pages with https")).to_be_visible()
        shown.look_over("23-no-notifications")
