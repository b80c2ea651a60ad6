"""Logs and charts on a phone: find a line of a long log, go back to its beginning, read what GPUs and jobs did."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, expect

from stoker.logs.reader import attempt_directory
from stoker.paths import private_directory
from stoker.queue import JobSpec, Store, Usage, View, WorkerGpu, init_queue
from stoker.queue.driver import Parameters
from stoker.queue.model import GpuUse
from tests.support.attempts import HOST, WORKER, be_there, run, start, submit
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


def test_each_attempt_has_its_log_to_read_follow_and_download(
    browser: Browser, site: PageSite, home: Path, store: Store
) -> None:
    (job,) = submit(store, "train", retries=1)
    write_log(home, store, job, ["first attempt", "ValueError: it diverged"])
    store.jobs.retry([job])
    second = attempt_directory(home, start(store, job, "GPU-0"))
    private_directory(second)
    (second / "output").write_text("second attempt\n")
    with screen(browser, "phone", color_scheme="dark") as shown:
        come_in(shown, site, job)
        page = shown.page
        log = page.get_by_role("log")
        expect(log).to_contain_text("second attempt")
        with (second / "output").open("a") as file:
            file.write("step=1 loss=2.0\n")
        expect(log).to_contain_text("step=1 loss=2.0")
        shown.look_over("31-second-attempt")
        page.get_by_label("Attempt").select_option("1")
        expect(log).to_contain_text("ValueError: it diverged")
        expect(log).not_to_contain_text("second attempt")
        with page.expect_download() as coming:
            page.get_by_role("link", name="Download").tap()
        assert Path(coming.value.path()).read_text() == "first attempt\nValueError: it diverged\n"
    store.attempts.finish(store.attempts.of(job)[-1].id, "succeeded", 0)


def test_start_is_foretold_and_a_machine_is_paused_on_a_phone(browser: Browser, site: PageSite, store: Store) -> None:
    for name in submit(store, *(f"foretold --seed {seed}" for seed in range(3))):
        run(store, name, "succeeded", 0)
        store._driver.fetch_text("UPDATE stoker_jobs SET started = ended - 600 WHERE id = :id", {"id": name})
    card = WorkerGpu(uuid="GPU-0", index=0, name="A100", state="job", since=1.0)
    store.workers.heartbeat(WORKER, HOST, View(gpus=(card,)))
    runs, *waits = submit(store, *(f"foretold --seed {seed}" for seed in range(3, 6)), priority=9)
    start(store, runs, "GPU-0")
    with screen(browser, "phone") as shown:
        come_in(shown, site, waits[1])
        page = shown.page
        expect(page.locator("#section-summary")).to_contain_text("2nd in line, starts in about 20 min")
        page.get_by_role("link", name="Overview").tap()
        expect(page.locator(f"#waiting-{waits[1]}")).to_contain_text("2nd in line, starts in about 20 min")
        shown.look_over("32-foretold")
        page.get_by_label(f"More for {HOST}").tap()
        page.get_by_role("button", name=f"Pause this machine {HOST}").tap()
        expect(page.locator("#section-machines").get_by_text("paused", exact=True)).to_be_visible()
        page.get_by_label(f"More for {HOST}").tap()
        page.get_by_role("button", name=f"Resume this machine {HOST}").tap()
        expect(page.locator("#section-machines").get_by_text("paused", exact=True)).not_to_be_visible()
    store.jobs.cancel(waits)
    store.attempts.finish(store.attempts.of(runs)[-1].id, "succeeded", 0)


def test_curves_of_a_job_and_of_a_group_on_a_phone(browser: Browser, site: PageSite, home: Path, store: Store) -> None:
    jobs = store.jobs.submit(
        [
            JobSpec(
                command="train", name=f"night lr={rate}", group="rates", metrics=("loss",) if rate == "1e-3" else ()
            )
            for rate in ("1e-3", "1e-4")
        ]
    )
    for number, job in enumerate(jobs, 1):
        write_log(home, store, job, [f"step={step} loss={number / (1 + step):.5f} lr=1" for step in range(200)])
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
        # Only what was asked for; its last value and the last lines are on top.
        expect(page.get_by_role("img", name="lr by step")).to_have_count(0)
        expect(page.locator("#section-summary .job-figures")).to_have_text("loss 0.005")
        expect(page.get_by_label("The last lines of the output")).to_contain_text("step=199 loss=0.00500 lr=1")
        shown.look_over("23-curves")

        page.get_by_role("link", name="Compare the group").click()
        expect(page.get_by_role("img", name="lr=1e-3: 0.005 at step 199 · lr=1e-4: 0.01 at step 199")).to_be_visible()
        expect(page.get_by_role("link", name="lr=1e-4")).to_be_visible()
        values = page.locator("[data-figure=loss] .curve-value")
        expect(values).to_have_text(["lr=1e-3: 0.005 at step 199", "lr=1e-4: 0.01 at step 199"])
        page.locator("[data-figure=loss] .u-over").tap()
        expect(values.nth(1)).to_have_text(re.compile(r"^lr=1e-4: 0\.0\d+ at step (?!199)\d+$"))
        shown.look_over("24-compare")
        page.emulate_media(color_scheme="dark")
        page.get_by_label("Jobs to compare").fill("night lr=1e-3, nobody")
        page.get_by_role("button", name="Compare").click()
        expect(page.locator(".note.bad")).to_contain_text("nobody")
        shown.look_over("25-compare-unknown")


def test_gpu_and_job_over_an_hour_a_day_and_a_week_on_a_phone(browser: Browser, site: PageSite, store: Store) -> None:
    be_there(store, gpus=16)
    first, second = submit(store, "resnet", "bert --lr 1e-3", gpus=1)
    write_days(store, first, second)
    with screen(browser, "phone") as shown:
        shown.watch_requests(site.address)
        shown.page.goto(f"{site.address}/login#{site.token}")
        page = shown.page
        page.get_by_role("link", name="History of GPU 3 on gpu-box").tap()
        expect(page.get_by_role("heading", name="GPU 3 on gpu-box")).to_be_visible()
        use = page.get_by_role("img", name=re.compile("^Utilization: "))
        expect(use.locator("canvas")).to_be_visible()
        expect(use).to_have_accessible_name("Utilization: 80 % on average, 80 % at most")
        expect(page.get_by_role("link", name=re.compile("^bert"))).to_be_visible()
        expect(page.get_by_role("link", name=re.compile("^resnet"))).not_to_be_visible()
        page.get_by_role("button", name="24 h").tap()
        expect(page.get_by_role("link", name=re.compile("^resnet"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("^Power: .* W at most"))).to_be_visible()
        shown.look_over("27-gpu-day")

        page.emulate_media(color_scheme="dark")
        page.get_by_role("button", name="7 d").tap()
        expect(use).to_have_accessible_name(re.compile("100 % at most"))
        box = use.locator(".u-over").bounding_box()
        assert box is not None
        values = page.locator("[data-figure=utilization] .curve-values")
        page.touchscreen.tap(box["x"] + box["width"] * 0.985, box["y"] + box["height"] / 2)
        expect(values).to_contain_text(re.compile(r"^\w.*: 80 %, at most 80 % · bert --lr 1e-3$"))
        # All charts show the same moment.
        expect(page.locator("[data-figure=power] .curve-values")).to_contain_text("W, at most")
        # A gap is unknown, and not zero.
        page.touchscreen.tap(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
        expect(values).to_contain_text(re.compile(r": unknown$"))
        shown.look_over("28-gpu-week")

        page.get_by_role("link", name=re.compile("^resnet")).tap()
        run = page.get_by_role("img", name="Utilization: 50 % on average, 50 % at most")
        expect(run.locator("canvas")).to_be_visible()
        expect(page.get_by_role("button", name="Whole run")).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_role("button", name="24 h")).not_to_be_visible()
        page.get_by_role("button", name="1 h").tap()
        expect(page.locator(".usage")).not_to_have_attribute("aria-busy", "true")
        run.locator(".u-over").tap()
        expect(page.locator("[data-figure=utilization] .curve-values")).to_contain_text("50 % · attempt 1")
        shown.look_over("29-job-use")

        page.goto(f"{site.address}/jobs/{second}")
        expect(page.get_by_role("img", name="Utilization: GPU 3: 80 % on average")).to_be_visible()
        expect(page.locator(".curve-key li")).to_have_text(["GPU 3", "GPU 4"])
        shown.look_over("30-job-of-two")


def write_days(store: Store, first: str, second: str) -> None:
    """A GPU over four days, with a gap until three days ago; one job of three hours, and one that runs."""
    now = store.clock()
    attempt = start(store, first, "GPU-3")
    assert store.attempts.finish(attempt.id, "succeeded", 0)
    running = start(store, second, "GPU-3", "GPU-4")
    spans = {attempt.id: (now - 8 * 3600, now - 5 * 3600), running.id: (now - 4 * 3600, None)}
    for name, (began, ended) in spans.items():
        times: Parameters = {"id": name, "began": began, "ended": ended}
        store._driver.fetch_text("UPDATE stoker_attempts SET started = :began, ended = :ended WHERE id = :id", times)
    rows = []
    for back in [*range(60 * 76), *range(6 * 1440, 7 * 1440)]:
        minute, hours = int(now // 60) - back, back / 60
        use = (
            0.5 if 4.9 < hours < 8.1 else 0.8 if hours < 4.1 else 0.0 if hours < 24 else 0.5 + 0.5 * (minute % 97) / 96
        )
        seconds: dict[GpuUse, float] = {"job" if use else "free": 60.0}
        rows.append(
            Usage(
                host=HOST,
                gpu="GPU-3",
                minute=minute,
                seconds=seconds,
                utilization=use,
                memory=int(use * 70 * 2**30),
                power=60 + 300 * use,
            )
        )
    beside = [msgspec.structs.replace(row, gpu="GPU-4", utilization=0.3) for row in rows[:120]]
    store.usage.write([*rows, *beside])


def test_running_jobs_come_first_and_folded_machines_stay_folded(
    browser: Browser, site: PageSite, store: Store
) -> None:
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
    assert store.logs.write(attempt.id, "\n".join(lines[-100:]) + "\n", is_last=True)
