"""Every simulated hang is noticed by `stoker run` and by the worker, and the report says what a person would say."""

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from stoker.gpus.sim.ranks import HANGS, Hang
from stoker.queue import Attempt
from tests.support.command import stoker, stoker_command
from tests.support.page_site import PageSite
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

PATIENCE = 100.0
# Long enough for a few looks at steps, and short windows after that. On a busy machine training may begin late.
TRAIN = ("sim", "train", "--step", "40ms", "--hang-after", "120")
SOON = (
    "--for",
    "3s",
    "--after",
    "0s",
    "--unused-for",
    "60s",
    "--stalled-for",
    "3s",
    "--every",
    "250ms",
    "--grace",
    "1s",
)


class Expected(NamedTuple):
    """What a report must say."""

    ending: str
    title: str
    evidence: tuple[str, ...]
    advice: str
    """The first one."""


HUNG = "# Stopped: it hangs: its GPUs are fully used without doing work"
BOTH_WAIT = "Both ranks are in `all_reduce`, called in "
EXPECTED: dict[Hang, Expected] = {
    "nccl": Expected(
        "stalled", HUNG, ("- GPU 1: 100% used", "- No step for ", BOTH_WAIT), "A collective does not complete"
    ),
    "livelock": Expected("stalled", HUNG, ("- No step for ", BOTH_WAIT), "A collective does not complete"),
    "rank-dead": Expected(
        "stalled",
        HUNG,
        ("- **Rank 1 (GPU {last}) is gone**", "- Rank 0 (GPU {first}) is in `all_reduce`"),
        "A rank is gone, and the others wait for it forever",
    ),
    "gpu-lost": Expected(
        "stalled",
        HUNG,
        ("- GPU {last}: it reported a fatal error", "- **The GPU of rank 1 (GPU {last}) has failed**", BOTH_WAIT),
        "A GPU of the job has failed",
    ),
    "loader": Expected(
        "idle",
        "# Stopped: its GPUs stayed idle",
        ("Both ranks are in `_next_batch",),
        "It is waiting for data from another thread or process",
    ),
}


def assert_explains(report: str, hang: Hang, first: int = 0) -> None:
    expected = EXPECTED[hang]
    assert report.startswith(expected.title), report
    evidence, _, rest = report.partition("## What to do next")
    for line in expected.evidence:
        assert line.format(first=first, last=first + 1) in evidence, report
    assert rest.strip().startswith(f"1. **{expected.advice}.**"), report


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[dict[Hang, "subprocess.Popen[str]"]]:
    """A `stoker run` of each hang, all at once on machines of their own."""
    started: dict[Hang, subprocess.Popen[str]] = {}
    for hang in HANGS:
        home = tmp_path / hang
        home.mkdir(mode=0o700)
        environment = {"STOKER_HOME": str(home), "STOKER_GPUS": f"sim:2@{home / 'gpus'}"}
        with (home / "output").open("wb") as output:
            started[hang] = subprocess.Popen(
                [stoker_command(), "run", *SOON, "--", stoker_command(), *TRAIN, "--hang", hang, "--report-steps"],
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
            )
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_run_stops_every_hang_and_says_why(runs: dict[Hang, "subprocess.Popen[str]"], tmp_path: Path) -> None:
    for hang, process in runs.items():
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 124, (hang, said)
        (run,) = stoker("runs", "--json", environment={"STOKER_HOME": str(tmp_path / hang)}).json()
        expected = EXPECTED[hang].ending
        assert (run["ending"], run["stopped_by"], run["exit_code"]) == (expected, expected, 124)
        assert run["report"] is not None, said
        assert_explains(Path(run["report"]).read_text(), hang)
        if expected == "stalled":
            assert "the job made no step for" in run["reason"]
            assert "seen by calls of stoker.step()" in Path(run["report"]).read_text()


def _ended_attempt(site: WorkSite, job: str) -> Attempt | None:
    return next((attempt for attempt in site.store.attempts.of(job) if attempt.outcome is not None), None)


def test_queued_jobs_that_hang_are_stopped_and_shown_on_the_page(site: WorkSite) -> None:
    site.environment["STOKER_GPUS"] = f"sim:{2 * len(HANGS)}"
    policy = {"window": 3.0, "after": 0.0, "stalled_window": 3.0, "every": 0.25}
    jobs = {
        hang: site.submit(f"stoker {' '.join(TRAIN)} --hang {hang}", name=hang, gpus=2, policy=policy) for hang in HANGS
    }
    site.work()
    page = PageSite("serve", "--port", "0", environment=site.environment)
    try:
        with page.client() as client:
            for hang, job in jobs.items():
                # A job whose GPU has failed starts again elsewhere.
                outcome = "requeued" if hang == "gpu-lost" else "failed"
                attempt = wait_for(partial(_ended_attempt, site, job), deadline=PATIENCE, named=f"the end of {hang}")
                assert attempt.outcome == outcome, (hang, attempt.reason)
                details = wait_for(partial(site.store.attempts.details, attempt.id), named=f"the report on {hang}")
                assert (details.cause, details.rule) == (EXPECTED[hang].ending,) * 2
                assert_explains(details.report, hang, first=int(attempt.gpus[0][-2:]))
                shown = client.get(f"/jobs/{job}", headers={"Accept": "text/html"}).text
                assert f"stopped: {EXPECTED[hang].ending}" in shown
                assert "Why this is a hang" in shown or hang == "loader"
            site.stoker("cancel", jobs["gpu-lost"])
    finally:
        page.end()


def test_queued_job_that_may_hang_is_warned_of_everywhere(site: WorkSite) -> None:
    policy = {"stalled_window": 600.0, "every": 0.25, "warn_at": 0.002}
    job = site.submit(f"stoker {' '.join(TRAIN)} --hang nccl", name="bert", gpus=2, policy=policy)
    site.work()
    why = site.wait_for_why(job, "may hang")
    assert "may hang: GPU 0 and GPU 1 have been fully used without doing work for" in why
    assert "it is stopped in 10 min, unless it works or is snoozed" in why
    assert "may hang" in site.stoker("list").out
    page = PageSite("serve", "--port", "0", environment=site.environment)
    try:
        with page.client() as client:
            for path in ("/", f"/jobs/{job}"):
                shown = client.get(path, headers={"Accept": "text/html"}).text
                assert '<span class="pill attention">may hang</span>' in shown
                assert "unless it works or is snoozed" in shown
    finally:
        page.end()
    site.stoker("cancel", job)
