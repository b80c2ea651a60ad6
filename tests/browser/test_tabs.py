"""Many tabs at once: a browser has six connections to one server, and those that nobody looks at must not keep them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from stoker.queue import JobSpec, init_queue
from tests.support.browser import screen
from tests.support.page_site import PageSite, page_site
from tests.support.waiting import wait_for

TABS = 7
# Without a screen the browser calls every page visible, so this says otherwise.
UNSEEN = """
window.isUnseen = true;
Object.defineProperty(Document.prototype, 'hidden', {get: () => window.isUnseen});
Object.defineProperty(Document.prototype, 'visibilityState', {get: () => window.isUnseen ? 'hidden' : 'visible'});
window.look = (seen) => { window.isUnseen = !seen; document.dispatchEvent(new Event('visibilitychange')); };
"""
OPEN = "SharedSource.open.size"
# Not every browser of a phone has shared workers.
ALONE = "delete window.SharedWorker;"


@pytest.fixture
def jobs() -> list[str]:
    """They run here, and have printed a line."""
    with init_queue() as store:
        ids = store.jobs.submit([JobSpec(command="train", name=f"train {number}") for number in range(TABS)])
        for job in ids:
            assert store.attempts.claim([job], "w", [], 600.0) is not None
            _output(job).parent.mkdir(parents=True)
            _output(job).write_text("epoch 1\n")
    return ids


@pytest.fixture
def site(jobs: list[str]) -> Iterator[PageSite]:
    with page_site("serve", "--port", "0") as started:
        yield started


def test_tabs_that_nobody_looks_at_leave_the_connections_to_the_others(
    browser: Browser, site: PageSite, jobs: list[str]
) -> None:
    with screen(browser, "desk") as shown:
        page = shown.page
        page.goto(f"{site.address}/login#{site.token}")
        expect(page.locator("#health-headline")).to_be_visible()
        page.goto("about:blank")
        behind = [_tab(page, f"{site.address}/jobs/{job}") for job in jobs]
        for tab in behind:
            tab.wait_for_load_state("domcontentloaded")
        assert [tab.evaluate(OPEN) for tab in behind] == [0] * TABS
        page.goto(f"{site.address}/jobs/{jobs[0]}")
        expect(page.get_by_role("log")).to_contain_text("epoch 1")
        behind[1].evaluate("look(true)")
        expect(behind[1].get_by_role("log")).to_have_text("epoch 1")
        _comes_back(behind[1], _output(jobs[1]))
        assert shown.complaints == []


def test_many_windows_that_are_looked_at_share_one_connection(
    browser: Browser, site: PageSite, jobs: list[str]
) -> None:
    with screen(browser, "desk") as shown:
        page = shown.page
        page.goto(f"{site.address}/login#{site.token}")
        expect(page.locator("#health-headline")).to_be_visible()
        windows = [page.context.new_page() for _ in jobs]
        for window, job in zip(windows, jobs, strict=True):
            window.goto(f"{site.address}/jobs/{job}")
        for window in windows:
            expect(window.get_by_role("log")).to_have_text("epoch 1")
        for job in jobs:
            with _output(job).open("a") as file:
                file.write("epoch 2\n")
        alone = page.context.new_page()
        alone.add_init_script(ALONE)
        alone.goto(f"{site.address}/jobs/{jobs[0]}")
        windows.append(alone)
        for window in windows:
            expect(window.get_by_role("log").locator(".log-line")).to_have_text(["epoch 1", "epoch 2"])
        with init_queue() as store:
            for job in jobs:
                store.jobs.set_link(store.attempts.of(job)[0].id, "https://wandb.ai/news")
        for window in windows:
            expect(window.locator("#section-summary a[href='https://wandb.ai/news']")).to_be_visible()
        # The overview and each job, and of each job the log.
        assert [window.evaluate(OPEN) for window in (page, *windows)] == [1, *[2] * (TABS + 1)]
        assert shown.complaints == []


def _comes_back(tab: Page, output: Path) -> None:
    """Left for a while, it gives back what it has; then it goes on where it was."""
    _has_open(tab, 2)
    # From here on the test sets its clock: a slow machine must not make the pause longer.
    tab.clock.install()
    tab.clock.pause_at(time.time() + 20)
    tab.evaluate("look(false)")
    tab.clock.fast_forward(9_000)
    assert tab.evaluate(OPEN) == 2
    tab.clock.fast_forward(2_000)
    assert tab.evaluate(OPEN) == 0
    with output.open("a") as file:
        file.write("epoch 2\n")
    tab.clock.resume()
    tab.evaluate("look(true)")
    expect(tab.get_by_role("log").locator(".log-line")).to_have_text(["epoch 1", "epoch 2"])
    assert tab.evaluate("[...SharedSource.open.values()].some(one => one.where.includes('/log/live?after='))")
    _has_open(tab, 2)


def _has_open(tab: Page, streams: int) -> None:
    wait_for(lambda: tab.evaluate(OPEN) == streams, named=f"{streams} streams")


def _tab(beside: Page, address: str) -> Page:
    tab = beside.context.new_page()
    tab.add_init_script(UNSEEN)
    tab.goto(address, wait_until="commit")
    return tab


def _output(job: str) -> Path:
    return Path(os.environ["STOKER_HOME"]) / "attempts" / f"{job}-1" / "output"
