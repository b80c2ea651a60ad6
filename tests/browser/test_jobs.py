"""The list of jobs on a phone: find one of five thousand, change many at once, in few taps; and the keyboard."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, expect

from stoker.queue import JobSpec, Store, init_queue
from tests.support.browser import Screen, screen
from tests.support.page_site import PageSite, page_site
from tests.support.queue_jobs import end, states
from tests.support.waiting import wait_for

FAILED = 12


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    with init_queue(postgres_url) as opened:
        yield opened


@pytest.fixture
def site(postgres_url: str) -> Iterator[PageSite]:
    with page_site("serve", "--port", "0", "--queue", postgres_url) as started:
        yield started


class Taps:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def on(self, what: Locator) -> None:
        what.tap()
        self.count += 1


def test_timed_tasks_on_a_phone(browser: Browser, store: Store, site: PageSite) -> None:
    store.jobs.submit([JobSpec(command="true", name=f"vit-{number:04}", hold=True) for number in range(5000)])
    night = store.jobs.submit([JobSpec(command="false", name=f"night-{number}") for number in range(FAILED)])
    for job in night:
        end(store, job)
    with screen(browser, "phone") as shown:
        page = shown.page
        page.goto(f"{site.address}/login#{site.token}")
        expect(page.locator("#section-health")).to_contain_text("failed")
        _twelve_of_5000_on_the_overview(shown)
        _find_one_of_5000(shown)
        page.goto(site.address)
        _retry_all_failed_of_last_night(shown, store, night)
        _select_two_and_undo(shown, store, night)
        _sorted_saved_and_mistaken(shown, site)
        _held_tagged_moved_and_undone(shown, store, site)
        _keyboard(shown, site)


def _twelve_of_5000_on_the_overview(shown: Screen) -> None:
    waiting = shown.page.locator("#section-waiting")
    expect(waiting.locator("li.job").filter(visible=True)).to_have_count(12)
    waiting.get_by_role("link", name="All 5000 waiting jobs").tap()
    expect(shown.page.locator("tbody tr").first).to_contain_text("vit-4999")
    # Most of the screen is for jobs.
    top = shown.page.locator("tbody tr").first.bounding_box()
    assert top is not None
    assert top["y"] < 844 * 0.4
    shown.page.go_back()


def _find_one_of_5000(shown: Screen) -> None:
    taps, page = Taps(), shown.page
    taps.on(page.get_by_role("link", name="Jobs", exact=True))
    taps.on(page.get_by_role("searchbox", name="Search jobs"))
    page.keyboard.type("t-3141")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="vit-3141")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(1)
    assert taps.count <= 2
    shown.look_over("jobs-1-found")


def _retry_all_failed_of_last_night(shown: Screen, store: Store, night: list[str]) -> None:
    taps, page = Taps(), shown.page
    taps.on(page.locator("#section-health").get_by_role("link", name=re.compile("failed in the last 24 h")).first)
    taps.on(page.locator("#menu-bulk summary"))
    shown.look_over("jobs-2-actions")
    taps.on(page.locator("#menu-bulk").get_by_role("button", name="Retry"))
    expect(page.get_by_text(f"{FAILED} jobs queued again")).to_be_visible()
    assert taps.count <= 4
    assert set(states(store, *night)) == {"queued"}


def _select_two_and_undo(shown: Screen, store: Store, night: list[str]) -> None:
    page = shown.page
    page.get_by_role("link", name="Jobs", exact=True).tap()
    page.get_by_role("searchbox").fill("night")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Select", exact=True).tap()
    for name in ("night-3", "night-4"):
        page.get_by_label(f"Select {name}", exact=True).check()
    expect(page.get_by_text("Actions for 2 selected")).to_be_visible()
    shown.look_over("jobs-3-selected")
    page.locator("#menu-bulk summary").tap()
    page.locator("#menu-bulk").get_by_role("button", name="Cancel…").tap()
    page.get_by_role("dialog").get_by_role("button", name="Cancel 2").tap()
    expect(page.get_by_role("row", name="night-4")).to_contain_text("cancelled")
    assert [states(store, job) for job in night[2:6]] == [["queued"], ["cancelled"], ["cancelled"], ["queued"]]
    page.get_by_role("button", name="Undo").tap()
    expect(page.get_by_role("row", name="night-4")).to_contain_text("queued")


def _held_tagged_moved_and_undone(shown: Screen, store: Store, site: PageSite) -> None:
    """All that match a search, each with its undo."""
    page = shown.page
    page.goto(f"{site.address}/jobs?q=night state:queued,held")
    expect(page.locator("tbody tr")).to_have_count(FAILED)
    jobs = [job.id for job in store.jobs.find(("queued",), limit=FAILED)]

    def act(action: str, said: str) -> None:
        page.locator("#menu-bulk summary").tap()
        page.locator("#menu-bulk").get_by_role("button", name=action, exact=True).tap()
        if action.endswith("…"):
            expect(page.get_by_role("dialog").get_by_label("Tag")).to_be_focused()
            page.keyboard.type("redo")
            shown.look_over("jobs-4-tag")
            page.keyboard.press("Enter")
        expect(page.get_by_text(said, exact=True)).to_be_visible()

    def undo() -> None:
        page.locator("#toasts").get_by_role("button", name="Undo").last.tap()

    act("Hold", f"{FAILED} jobs held")
    assert set(states(store, *jobs)) == {"held"}
    act("Release", f"{FAILED} jobs released")
    undo()
    wait_for(lambda: set(states(store, *jobs)) == {"held"})
    page.reload()
    act("Tag…", f"{FAILED} jobs tagged redo")
    assert {store.jobs.get(job).tags for job in jobs} == {("redo",)}
    undo()
    wait_for(lambda: {store.jobs.get(job).tags for job in jobs} == {()})
    first = store.jobs.find(("held",), order="queue", limit=1)[0].id
    assert first not in jobs
    page.reload()
    act("Move to the front", f"{FAILED} jobs moved first")
    assert store.jobs.find(("held",), order="queue", limit=1)[0].id in jobs
    undo()
    wait_for(lambda: store.jobs.find(("held",), order="queue", limit=1)[0].id == first)


def _sorted_saved_and_mistaken(shown: Screen, site: PageSite) -> None:
    page = shown.page
    page.get_by_label("Sort by").select_option("name")
    expect(page).to_have_url(re.compile(r"q=night&sort=name"))
    expect(page.locator("tbody tr").first).to_contain_text("night-0")
    page.get_by_role("button", name="Save search").tap()
    page.get_by_role("link", name="Jobs", exact=True).tap()
    page.locator("#saved").get_by_role("link", name="night").tap()
    expect(page.locator("tbody tr")).to_have_count(FAILED)
    page.goto(f"{site.address}/jobs?q=colour:red")
    expect(page.get_by_role("alert")).to_contain_text("Jobs cannot be searched by 'colour'")
    expect(page.get_by_role("searchbox")).to_have_value("colour:red")
    shown.forgive("422")


def _keyboard(shown: Screen, site: PageSite) -> None:
    page = shown.page
    page.goto(f"{site.address}/jobs?q=night&sort=name")
    page.bring_to_front()  # on a busy machine, a new document does not always get the focus of its window
    rows = page.locator("tbody th a")
    expect(rows).to_have_count(FAILED)
    for key in "jjk":
        page.keyboard.press(key)
    expect(rows.nth(0)).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_text("this help")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("jk?x")
    expect(page.get_by_role("searchbox")).to_have_value(re.compile("jk\\?x"))
    # The same on the overview; `/` leads to the search.
    page.goto(site.address)
    page.bring_to_front()
    expect(page.locator("#section-ended")).to_be_attached()
    page.keyboard.press("j")
    expect(page.locator("main .job h3 a").filter(visible=True).first).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_text("this help")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
