"""The page in a real browser, from the first link to logging out, at the size of a phone and of a desk."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, expect

from tests.support.browser import SIZES, Screen, screen
from tests.support.page_site import PageSite, page_site, stop_jobs
from tests.support.waiting import wait_for

# Armed by its work: however long it takes to start, it is not stopped before it hangs.
HANGS = {"window": 1.0, "below": 0.05, "after": 0.0, "every": 0.5, "arm_above": 0.05}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PageSite]:
    with page_site("up", "--port", "0", STOKER_GPUS=f"sim:2@{tmp_path}/gpus") as started:
        yield started
        stop_jobs(tmp_path / "stoker-home")


@pytest.mark.parametrize("size", SIZES)
def test_login_link_submit_and_follow_a_job_to_its_end(browser: Browser, site: PageSite, size: str) -> None:
    with screen(browser, size, color_scheme="light") as shown, site.client() as api:
        shown.watch_requests(site.address)
        _come_in(shown, site)
        shown.look_over("1-first-look")
        hung = _submitted(api, "hung", _train("--hang-at", 10), policy=HANGS)
        _submit(shown)
        _watch_it_run(shown)
        _follow_its_log(shown)
        wait_for(lambda: _state(api, hung) == "failed", named="the stop of the job that hangs")
        # Both GPUs have work that ends when it is told to: until then the others wait, however long all this takes.
        beside = _submitted(api, "beside", _train("--epochs", 50))
        waiting = [_submitted(api, f"waits {letter}", _train("--epochs", 50)) for letter in "abc"]
        wait_for(lambda: _state(api, beside) == "running", named="the start of the second job")
        _reorder(shown, api, beside, waiting)
        _cancel_one_that_waits_and_undo_it(shown, api, waiting[1])
        api.post(f"/api/v1/jobs/{beside}/cancel").raise_for_status()
        wait_for(lambda: _state(api, waiting[2]) == "running", named="the turn of the first that waits")
        _cancel_one_that_runs(shown, api, waiting[2])
        _read_the_report(shown, api, hung)
        _see_all_jobs_in_the_dark(shown, api)
        _log_out(shown, site)


def test_hang_is_warned_of_and_explained_on_a_phone(browser: Browser, site: PageSite) -> None:
    with screen(browser, "phone") as shown, site.client() as api:
        _come_in(shown, site)
        policy = {"stalled_window": 10.0, "every": 0.25, "warn_at": 0.1}
        train = _train("--hang", "rank-dead", "--hang-after", 120, "--step", "40ms")
        hung = _submitted(api, "bert", train, gpus=2, policy=policy)
        running = shown.page.locator("#section-running")
        expect(running.get_by_text("may hang", exact=True)).to_be_visible()
        expect(running.get_by_text("the process on GPU 1 is gone")).to_contain_text("unless it works or is snoozed")
        shown.look_over("10-may-hang")
        wait_for(lambda: _state(api, hung) == "failed", named="the stop of the job that hangs")
        expect(shown.page.locator("#health-headline")).to_have_text("bert was stopped: stalled")
        shown.page.goto(str(api.base_url.join(f"/jobs/{hung}")))
        expect(shown.page.get_by_text("stopped: stalled").first).to_be_visible()
        shown.page.get_by_text("Full report").click()
        report = shown.page.locator(".report-text")
        expect(report.get_by_role("heading", name="Why this is a hang")).to_be_visible()
        expect(report).to_contain_text("Rank 1 (GPU 1) is gone: its process has ended")
        report.get_by_role("heading", name="Why this is a hang").scroll_into_view_if_needed()
        shown.look_over("11-hang-report")


def test_page_is_updated_after_the_phone_slept(browser: Browser, site: PageSite) -> None:
    with screen(browser, "phone") as shown, site.client() as api:
        _come_in(shown, site)
        api.post("/api/v1/queue/pause").raise_for_status()
        expect(shown.page.get_by_text("The queue is paused: no more jobs start.")).to_be_visible()
        shown.page.context.set_offline(True)
        _submitted(api, "while asleep", "true")
        api.post("/api/v1/queue/resume").raise_for_status()
        wait_for(lambda: api.get("/api/v1/status").json()["counts"].get("succeeded") == 1)
        shown.page.context.set_offline(False)
        ended = shown.page.locator("#section-ended")
        expect(ended.get_by_text("while asleep")).to_be_visible()
        expect(shown.page.get_by_text("The queue is paused: no more jobs start.")).not_to_be_visible()


def test_sweep_is_one_card_and_is_cancelled_in_two_taps(browser: Browser, site: PageSite) -> None:
    with screen(browser, "phone") as shown, site.client() as api:
        train = f": {{seed}}; exec {_train('--epochs', 50)}"
        body = {"command": train, "directory": "/tmp", "sweep": {"seed": "1..15"}, "name": "night"}
        api.post("/api/v1/jobs", json={**body, "group": "night", "at_most": 1}).raise_for_status()
        wait_for(lambda: api.get("/api/v1/groups/night").json()["counts"].get("running") == 1)
        shown.page.goto(f"{site.address}/login#{site.token}")
        card = shown.page.locator("#section-groups .group")
        expect(card).to_contain_text("0 of 15 done, 1 running · at most 1 at once")
        expect(shown.page.locator("#section-waiting")).to_contain_text("All that waits is in the groups above.")
        card.get_by_text("Running and waiting").first.click()
        expect(card.get_by_role("link", name="night seed=15")).to_be_visible()
        shown.look_over("12-group")
        card.get_by_label("More for night").click()
        card.get_by_role("button", name="At most 2 at once").click()
        expect(card).to_contain_text("2 running · at most 2 at once")
        shown.page.reload()
        taps = 0
        for button in (card.get_by_role("button", name="Cancel all"), shown.page.locator("dialog .danger-now")):
            button.click()
            taps += 1
        wait_for(lambda: api.get("/api/v1/groups/night").json()["counts"] == {"cancelled": 15}, named="the end of all")
        assert taps <= 3
        expect(card).not_to_be_visible()
        row = shown.page.locator("#section-ended .ended-group")
        row.locator("summary").first.click()
        expect(row).to_contain_text("its last 15 jobs: 15 cancelled")
        expect(row.get_by_role("link", name="night seed=15")).to_be_visible()
        shown.look_over("13-group-ended")
        row.get_by_role("link", name="All jobs of night").click()
        expect(shown.page.locator("tbody tr")).to_have_count(15)
        shown.page.go_back()
        undo = api.post("/api/v1/groups/night/retry").json()["undo"]
        assert len(undo["body"]["jobs"]) == 15
        api.request(undo["method"], undo["path"], json=undo["body"]).raise_for_status()


def test_viewer_sees_everything_without_buttons(browser: Browser, site: PageSite, tmp_path: Path) -> None:
    from stoker.web.auth.keys import Keys

    token = Keys(tmp_path / "stoker-home").add("guest", "viewer").secret
    with screen(browser, "phone") as shown, site.client() as api:
        job = _submitted(api, "seen", _train("--epochs", 50))
        wait_for(lambda: api.get(f"/api/v1/jobs/{job}").json()["state"] == "running")
        shown.page.goto(f"{site.address}/login#{token}")
        expect(shown.page.locator("#section-running").get_by_role("link", name="seen", exact=True)).to_be_visible()
        assert shown.page.locator("#main").get_by_role("button").count() == 0
        assert shown.page.get_by_role("link", name="Submit").count() == 0
        shown.look_over("9-viewer")


def _come_in(shown: Screen, site: PageSite) -> None:
    shown.page.goto(f"{site.address}/login#{site.token}")
    expect(shown.page.locator("#health-headline")).to_be_visible()
    assert shown.page.url == f"{site.address}/"
    shown.page.go_back()
    assert site.token not in shown.page.url
    shown.page.goto(site.address)
    expect(shown.page.get_by_text("These GPUs are simulated")).to_be_visible()


def _submit(shown: Screen) -> None:
    shown.page.get_by_role("link", name="Submit").first.click()
    with shown.page.expect_console_message(lambda message: "status of 422" in message.text):
        shown.page.get_by_role("button", name="Submit").click()
    expect(shown.page.get_by_text("Nothing was submitted")).to_be_visible()
    shown.forgive("status of 422")  # the browser's own note of a form that was refused
    shown.page.get_by_label("Command").fill(_train("--epochs", 50, "--steps", 400, "--step", "50ms"))
    shown.page.get_by_label("Directory").fill("/")
    shown.page.get_by_label("Name", exact=True).first.fill("from the page <script>alert(1)</script>")
    shown.look_over("2-submit")
    shown.page.get_by_role("button", name="Submit").click()
    expect(shown.page.get_by_text("from the page <script>").first).to_be_visible()


def _watch_it_run(shown: Screen) -> None:
    shown.page.get_by_role("link", name="Overview").first.click()
    running = _running_from_the_page(shown)
    expect(running.get_by_role("link", name=re.compile("^from the page"))).to_be_visible()
    bar = running.get_by_role("progressbar").first
    expect(bar).to_be_visible()
    before = _value(bar)
    wait_for(lambda: _value(bar) != before, named="a progress bar that moves")
    shown.look_over("3-running")


def _running_from_the_page(shown: Screen) -> Locator:
    """Another one may run beside it."""
    return shown.page.locator("#section-running [id^=running-]", has_text="from the page")


def _value(bar: Locator) -> float:
    return float(bar.evaluate("one => one.value ?? one.getAttribute('aria-valuenow') ?? 0"))


def _follow_its_log(shown: Screen) -> None:
    _running_from_the_page(shown).get_by_role("link", name="Log").first.click()
    log = shown.page.get_by_role("log")
    expect(log.get_by_text("training", exact=True)).to_be_visible()
    expect(log).to_contain_text("it/s, loss=")
    assert log.evaluate("one => one.textContent.split('Epoch 1/50').length - 1") == 1  # a bar is one line
    shown.look_over("4-log")


def _reorder(shown: Screen, api: httpx.Client, beside: str, waiting: list[str]) -> None:
    shown.page.goto(str(api.base_url))
    # What stands above the queue has its size once it has its bar.
    expect(shown.page.locator(f"#running-{beside}").get_by_role("progressbar")).to_be_visible()
    grip, goal = shown.page.locator(f"#grip-{waiting[2]}"), shown.page.locator(f"#waiting-{waiting[0]}")
    mouse = shown.page.mouse
    grip.hover(position={"x": 20, "y": 20})
    mouse.down()
    # While a finger is on it, nothing moves that it does not move.
    expect(shown.page.locator(".sorting")).to_be_visible()
    start, end = grip.bounding_box(), goal.bounding_box()
    assert start is not None
    assert end is not None
    for step in range(1, 6):
        mouse.move(start["x"] + 20, start["y"] + 20 + (end["y"] + 4 - start["y"] - 20) * step / 5)
    shown.look_over("5-dragging")
    mouse.up()
    wait_for(lambda: _order(api) == [waiting[2], waiting[0], waiting[1]], named="the new order")
    expect(shown.page.locator("[data-queue] > li").first).to_have_attribute("id", f"waiting-{waiting[2]}")
    expect(shown.page.locator(f"#waiting-{waiting[1]}")).to_contain_text("3rd in line")


def _order(api: httpx.Client) -> list[str]:
    return [item["job"]["id"] for item in api.get("/api/v1/status").json()["waiting"]]


def _cancel_one_that_waits_and_undo_it(shown: Screen, api: httpx.Client, job: str) -> None:
    menu = shown.page.locator(f"#menu-{job}")
    menu.locator("summary").click()
    shown.look_over("6-menu")
    menu.get_by_role("button", name="Cancel").click()
    told = shown.page.locator("#toasts > *", has_text=re.compile("cancelled", re.IGNORECASE))
    told.hover()  # so it stays
    wait_for(lambda: _state(api, job) == "cancelled")
    told.get_by_role("button", name="Undo").click()
    wait_for(lambda: _state(api, job) == "queued")
    expect(shown.page.locator(f"#waiting-{job}")).to_be_visible()


def _cancel_one_that_runs(shown: Screen, api: httpx.Client, job: str) -> None:
    shown.page.locator(f"#running-{job}").get_by_role("button", name="Cancel").click()
    asked = shown.page.get_by_role("dialog")
    expect(asked).to_be_visible()
    shown.look_over("7-asks-once")
    assert _state(api, job) == "running"
    asked.get_by_role("button", name=re.compile("^(Stop|Cancel) the job")).click()
    wait_for(lambda: _state(api, job) == "cancelled", named="the end of the job")


def _read_the_report(shown: Screen, api: httpx.Client, hung: str) -> None:
    shown.page.goto(str(api.base_url.join(f"/jobs/{hung}")))
    expect(shown.page.get_by_role("heading", name="What happened")).to_be_visible()
    shown.page.get_by_text("Full report").click()
    expect(shown.page.locator(".report-text")).to_contain_text("_all_reduce_that_never_returns")
    shown.look_over("8-report")


def _see_all_jobs_in_the_dark(shown: Screen, api: httpx.Client) -> None:
    shown.page.emulate_media(color_scheme="dark")
    shown.page.get_by_role("link", name="Jobs").first.click()
    expect(shown.page.get_by_role("link", name="hung").first).to_be_visible()
    newcomer = shown.page.get_by_role("row", name="newcomer")
    job = _submitted(api, "newcomer", "true", hold=True)
    expect(newcomer).to_contain_text("held")
    api.post(f"/api/v1/jobs/{job}/cancel").raise_for_status()
    expect(newcomer).to_contain_text("cancelled")
    shown.look_over("9-jobs-dark")
    shown.page.get_by_role("link", name="Overview").first.click()
    expect(shown.page.locator("#section-ended").get_by_role("link", name="hung")).to_be_visible()
    shown.look_over("9-overview-dark")


def _log_out(shown: Screen, site: PageSite) -> None:
    shown.page.get_by_label("Menu", exact=True).click()
    shown.page.get_by_role("button", name="Log out").click()
    expect(shown.page.get_by_role("heading", name="Log in")).to_be_visible()
    shown.look_over("9-logged-out")
    shown.page.goto(site.address)
    expect(shown.page.get_by_role("heading", name="Log in")).to_be_visible()
    assert shown.page.locator("#health-headline").count() == 0


def _submitted(api: httpx.Client, name: str, command: str, **asked: Any) -> str:
    made = api.post("/api/v1/jobs", json={"command": command, "name": name, "directory": "/", **asked})
    assert made.status_code == 201, made.text
    return str(made.json()["jobs"][0]["id"])


def _state(api: httpx.Client, job: str) -> str:
    return str(api.get(f"/api/v1/jobs/{job}").json()["state"])


def _train(*options: object) -> str:
    return shlex.join([sys.executable, "-P", "-m", "stoker.cli", "sim", "train", *map(str, options)])
