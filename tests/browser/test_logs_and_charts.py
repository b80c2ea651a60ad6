"""Logs and charts on a phone: find a line of a long log, go back to its beginning, read what GPUs and jobs did."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from stoker.logs.reader import attempt_directory
from stoker.paths import private_directory
from stoker.queue import JobSpec, Store, init_queue
from tests.support.attempts import be_there, run, submit
from tests.support.browser import Screen, screen
from tests.support.page_site import PageSite, page_site
from tests.support.waiting import wait_for

LINES = 30_000
NEEDLE = 12_345
# From the top of the overview on a phone.
ORDER = ("health", "running", "machines", "waiting", "ended", "hours")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("charts")


@pytest.fixture(scope="module")
def store(home: Path) -> Iterator[Store]:
    with init_queue(str(home / "queue.db")) as opened:
        yield opened


@pytest.fixture(scope="module")
def site(home: Path, store: Store) -> Iterator[PageSite]:
    with page_site("serve", "--port", "0", STOKER_HOME=str(home), STOKER_GPUS="sim:2") as started:
        yield started


def test_log_is_searched_and_scrolled_back_on_a_phone(
    browser: Browser, site: PageSite, home: Path, store: Store
) -> None:
    waits, printed = submit(store, "later", "train")
    write_long_log(home, store, printed)
    with screen(browser, "phone", color_scheme="dark") as shown:
        come_in(shown, site, waits)
        page = shown.page
        expect(page.get_by_text("The job has not started, so there is no log yet.")).to_contain_text(
            "No worker is there"
        )
        expect(page.get_by_role("log")).not_to_be_visible()
        expect(page.get_by_role("button", name="Errors")).not_to_be_visible()
        shown.look_over("20-not-started")

        page.goto(f"{site.address}/jobs/{printed}#job-log")
        log = page.get_by_role("log")
        expect(log.get_by_text("ValueError: it diverged")).to_be_in_viewport()
        page.get_by_label("Text to find").fill("NEEDLE in")
        page.get_by_label("Text to find").press("Enter")
        expect(page.get_by_text("1 of 1 · line 12,345")).to_be_visible()
        expect(log.get_by_text(f"step {NEEDLE - 1} needle in a haystack")).to_be_in_viewport()
        shown.look_over("21-found")

        page.get_by_role("button", name="Errors").click()
        expect(page.get_by_text("1 of 2 · line 29,991")).to_be_visible()
        page.get_by_label("Next match").click()
        expect(page.get_by_text("2 of 2 · line 30,000")).to_be_visible()
        expect(log.get_by_text("ValueError: it diverged")).to_be_in_viewport()

        page.get_by_label("Text to find").fill(":1")
        page.get_by_label("Text to find").press("Enter")
        expect(log.get_by_text("step 0 loss=2.0", exact=True)).to_be_in_viewport()
        # Scrolling down from there brings the next lines, and back up to the same ones.
        rows = log.locator(".log-line")
        before = rows.count()
        log.evaluate("one => { one.scrollTop = one.scrollHeight; }")
        wait_for(lambda: rows.count() > before, named="the lines after the first")
        expect(log.get_by_text(f"step {before} loss=", exact=False)).to_have_count(1)

        page.get_by_role("button", name="To the end").click()
        expect(log.get_by_text("ValueError: it diverged")).to_be_in_viewport()
        wait_for(lambda: rows.count() == 1000, named="the last lines")
        log.evaluate("one => { one.scrollTop = 0; }")
        wait_for(lambda: rows.count() > 1000, named="the lines before")
        expect(page.get_by_text("of the log: scroll up for those before")).to_be_visible()
        assert page.evaluate("document.querySelector('.log-screen').scrollTop") > 0
        shown.look_over("22-scrolled-back")


def test_curves_of_a_job_and_of_a_group_on_a_phone(browser: Browser, site: PageSite, home: Path, store: Store) -> None:
    jobs = store.jobs.submit([JobSpec(command="train", name=f"lr {rate}", group="rates") for rate in ("1e-3", "1e-4")])
    for number, job in enumerate(jobs, 1):
        write_log(home, store, job, [f"step={step} loss={number / (1 + step):.5f}" for step in range(200)])
    with screen(browser, "phone") as shown:
        come_in(shown, site, jobs[0])
        page = shown.page
        chart = page.get_by_role("img", name="loss by step: 0.005 at step 199")
        expect(chart.locator("canvas")).to_be_visible()
        box = chart.locator(".u-over").bounding_box()
        assert box is not None
        # Values where a finger is.
        page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(page.locator(".curve-values")).to_contain_text(re.compile(r"^step (?!199)\d+: 0\.0"))
        shown.look_over("23-curves")

        page.get_by_role("link", name="Compare the group").click()
        expect(page.get_by_role("img", name="lr 1e-3: 0.005 at step 199 · lr 1e-4: 0.01 at step 199")).to_be_visible()
        expect(page.get_by_role("link", name="lr 1e-4")).to_be_visible()
        shown.look_over("24-compare")
        page.emulate_media(color_scheme="dark")
        page.get_by_label("Jobs to compare").fill("lr 1e-3, nobody")
        page.get_by_role("button", name="Compare").click()
        expect(page.locator(".note.bad")).to_contain_text("nobody")
        shown.look_over("25-compare-unknown")


def test_what_runs_comes_first_and_a_folded_machine_stays_so(browser: Browser, site: PageSite, store: Store) -> None:
    be_there(store, gpus=16)
    with screen(browser, "phone") as shown:
        shown.watch_requests(site.address)
        shown.page.goto(f"{site.address}/login#{site.token}")
        page = shown.page
        machine = page.locator("details.machine")
        expect(machine).to_have_attribute("open", "")
        tops = [page.locator(f"#section-{name}").evaluate("one => one.getBoundingClientRect().top") for name in ORDER]
        assert tops == sorted(tops)
        machine.locator("summary").first.click()
        expect(machine).not_to_have_attribute("open", "")
        page.reload()
        expect(machine).not_to_have_attribute("open", "")
        be_there(store, gpus=15)
        expect(page.get_by_text("15 GPUs").first).to_be_visible()
        expect(machine).not_to_have_attribute("open", "")
        shown.look_over("26-folded")


def come_in(shown: Screen, site: PageSite, job: str) -> None:
    shown.watch_requests(site.address)
    shown.page.goto(f"{site.address}/login#{site.token}")
    expect(shown.page.locator("#health-headline")).to_be_visible()
    shown.page.goto(f"{site.address}/jobs/{job}")


def write_long_log(home: Path, store: Store, job: str) -> None:
    lines = [f"step {number} loss={2.0 - number / LINES:.4}" for number in range(LINES)]
    lines[NEEDLE - 1] = f"step {NEEDLE - 1} needle in a haystack"
    lines[-10] = "\x1b[31mTraceback (most recent call last):\x1b[0m"
    lines[-1] = "ValueError: it diverged"
    write_log(home, store, job, lines)


def write_log(home: Path, store: Store, job: str, lines: list[str]) -> None:
    attempt = run(store, job, "failed", 1)
    place = attempt_directory(home, attempt)
    private_directory(place)
    (place / "output").write_text("\n".join(lines) + "\n")
