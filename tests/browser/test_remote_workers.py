"""A page for workers on other machines: what they told a PostgreSQL queue is all that there is to show."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, expect

from stoker.fit.model import Fitted, ProbeOutcome
from stoker.logs.reader import LogChunk
from stoker.queue import JobSpec, Store, init_queue
from stoker.queue.model import AttemptDetails, Usage, View, WorkerGpu
from tests.support.browser import screen
from tests.support.command import stoker
from tests.support.page_site import PageSite, page_site
from tests.support.sheets_server import KEY, SheetsServer
from tests.support.waiting import wait_for

GIB = 2**30
SCRIPT = "<script>alert(1)</script>"
PROBES = (
    ProbeOutcome(size=8, outcome="fits", peak=4 * GIB, seconds=5.0),
    ProbeOutcome(size=40, outcome="fits", peak=8 * GIB, seconds=5.0),
    ProbeOutcome(size=300, outcome="oom", seconds=2.0),
)
FITTED = Fitted(size=128, fixed=3.0 * GIB, slope=GIB / 8, predicted=19 * GIB, limit=20 * GIB, observations=PROBES)


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    with init_queue(postgres_url) as opened:
        yield opened


@pytest.fixture
def site(postgres_url: str) -> Iterator[PageSite]:
    with page_site("serve", "--port", "0", "--queue", postgres_url) as started:
        yield started


def test_everything_that_a_machine_elsewhere_told_is_shown(
    browser: Browser, store: Store, site: PageSite, postgres_url: str, tmp_path: Path
) -> None:
    running, hung = _a_machine_at_work(store)
    _feed_a_sheet(postgres_url, tmp_path)
    with screen(browser, "phone") as shown:
        page = shown.page
        shown.watch_requests(site.address)
        page.goto(f"{site.address}/login#{site.token}")
        machine = page.locator("#section-machines")
        expect(machine.get_by_text("gpu-far", exact=True)).to_be_visible()
        expect(machine.locator(".chart canvas").first).to_be_visible()
        expect(page.locator("#section-running").get_by_text("42%")).to_be_visible()
        expect(page.locator("#section-waiting").get_by_text(f"echo {SCRIPT}")).to_be_visible()
        shown.look_over("elsewhere-1-overview")
        page.goto(f"{site.address}/jobs/{running}")
        first = _lend(store, running, b"", "epoch 1")
        expect(page.get_by_role("log")).to_contain_text(f"{SCRIPT} epoch 1")
        expect(page.get_by_role("log").locator(".a-fg-2, .a-fg-10, [class*=a-fg]").first).to_have_text("green")
        _lend(store, running, first, "epoch 2")
        expect(page.get_by_role("log")).to_contain_text("epoch 2")
        expect(page.get_by_role("log")).to_contain_text("epoch 1")
        shown.look_over("elsewhere-2-log")
        page.goto(f"{site.address}/jobs/{hung}")
        page.get_by_text("Full report").click()
        expect(page.locator(".report-text")).to_contain_text(f"{SCRIPT} in all_reduce")
        expect(page.locator("#section-fit canvas").first).to_be_visible()
        expect(page.locator("#section-fit")).to_contain_text("128")
        shown.look_over("elsewhere-3-report-and-fit")


def _a_machine_at_work(store: Store) -> tuple[str, str]:
    """The ids of a job that runs there and of one that was stopped for hanging."""
    gpus = (
        WorkerGpu(uuid="GPU-0", index=0, name="H100", memory_total=80 * GIB, memory_used=40 * GIB, utilization=0.9,
                  state="job", since=time.time() - 60),
        WorkerGpu(uuid="GPU-1", index=1, name="H100", note="the GPU is lost", since=time.time() - 60),
    )  # fmt: skip
    store.workers.heartbeat("far-1", "gpu-far", View(gpus=gpus))
    minute = int(time.time() // 60)
    store.usage.write(
        [
            Usage(host="gpu-far", gpu="GPU-0", minute=minute - ago, seconds={"job": 60.0}, utilization=0.9, memory=GIB)
            for ago in range(1, 40)
        ]
    )
    running, hung = store.jobs.submit(
        [JobSpec(command="train", name="runs far away"), JobSpec(command="hang", name="hung")]
    )
    stopped = store.attempts.claim([hung], "far-1", ["GPU-0"], 600.0)
    assert stopped is not None
    store.attempts.finish(stopped.id, "failed", 124, "GPU 0 stayed below 1% for 30m")
    report = f"# Stopped\n\n{SCRIPT} in all_reduce\n"
    store.attempts.write_details(
        stopped.id, AttemptDetails(cause="idle", rule="idle", report=report, fit=msgspec.to_builtins(FITTED))
    )
    assert store.attempts.claim([running], "far-1", ["GPU-0"], 600.0) is not None
    store.logs.write(_attempt(store, running), _output("epoch 1"))
    return running, hung


def _output(words: str) -> str:
    return f"{SCRIPT} {words} \x1b[32mgreen\x1b[0m\n 42%|████      | 42/100 [00:42<00:58, 1.00it/s]"


def _lend(store: Store, job: str, before: bytes, words: str) -> bytes:
    """As the worker does that has the output, once somebody wants it: one line more, and the bar behind it."""
    attempt = _attempt(store, job)
    wait_for(lambda: attempt in {wanted.attempt for wanted in store.logs.stream_requests()}, named="a wish to read it")
    line, bar = _output(words).encode().splitlines(keepends=True)
    lent = LogChunk(edition="1", start=len(before), finished=line, unfinished=bar)
    assert store.logs.write_chunk(attempt, lent)
    return before + line


def _attempt(store: Store, job: str) -> str:
    return store.attempts.of(job)[-1].id


def _feed_a_sheet(url: str, directory: Path) -> None:
    with SheetsServer().listening() as server:
        with server.lock:
            server.sheet["C3"] = f"echo {SCRIPT}"
        credentials = str(server.credentials(directory / "credentials.json"))
        words = ["sheet", KEY, "--credentials", credentials, "--queue", url, "--once", "--directory", "/"]
        assert stoker("feed", *words, environment=server.environment).code == 0
