"""The next attempt is prepared while a job runs: it starts once, when it was claimed, and leaves nothing otherwise."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.engines.local.record import LocalAttemptRecord, LocalAttemptSpec
from stoker.procfs import is_alive
from stoker.queue import init_queue
from stoker.runs.processes.tree import send
from tests.support.attempt_processes import kill_both, kill_reaper, kill_shim
from tests.support.waiting import wait_for
from tests.support.work_site import PATIENCE, RunningWorker, WorkSite

ROOT = Path(__file__).parents[2]
ONE = ("--cpu-jobs", "1")


class PreparedSite:
    """A worker with one slot: one job runs until it may end, and the next one is prepared."""

    def __init__(self, site: WorkSite) -> None:
        self.site = site
        self.first = site.submit(site.until("flag"))
        self.next = self.submit("next")
        self._place = site.home / f"prepared-{socket.gethostname()}"

    def submit(self, name: str, **asked: object) -> str:
        """A job that notes that it runs."""
        return self.site.submit(f"echo {name} $STOKER_ATTEMPT >> notes", **asked)

    def work(self, fault: str = "") -> RunningWorker:
        prefix = (sys.executable, "-c", _PRELUDE.format(root=str(ROOT), fault=fault)) if fault else ()
        return self.site.work(*ONE, prefix=prefix)

    def wait_until_prepared(self, job: str | None = None) -> LocalAttemptSpec:
        def prepared() -> LocalAttemptSpec | None:
            specs = [LocalAttemptRecord(place).attempt_spec() for place in self._directories()]
            return next((spec for spec in specs if spec is not None and spec.job == (job or self.next)), None)

        return wait_for(prepared, deadline=PATIENCE, named="the preparation of the next attempt")

    def _directories(self) -> list[Path]:
        return list(self._place.iterdir()) if self._place.exists() else []

    def end_first(self) -> None:
        self.site.create_flag("flag")

    @property
    def notes(self) -> list[str]:
        notes = self.site.directory / "notes"
        return notes.read_text().splitlines() if notes.exists() else []

    def outcomes(self, job: str) -> list[str | None]:
        return [attempt.outcome for attempt in self.site.store.attempts.of(job)]

    def finish(self) -> None:
        """Ends the first job, and waits until a worker finds nothing left to do."""
        self.end_first()
        self.site.wait_until(self.first, "succeeded")
        self.site.wait_until(self.next, "succeeded")

    def wait_until_gone(self, spec: LocalAttemptSpec) -> None:
        processes = spec.processes
        wait_for(lambda: not is_alive(processes.shim) and not is_alive(processes.reaper), named="the end of its shim")

    def assert_no_directory(self) -> None:
        wait_for(lambda: self._directories() == [], named="that nothing of it is left on disk")


_PRELUDE = """
import os, signal, sys
sys.path.insert(0, {root!r})
from stoker.cli import main
from stoker.engines.local.engine import LocalEngine
from stoker.engines.local.prepared import PreparedAttempt
from stoker.engines.local.record import ShimChannel
from stoker.queue.attempts import Attempts

worker = os.getpid()

def dies_after(owner, name):
    really = getattr(owner, name)
    def dies(*arguments, **options):
        answer = really(*arguments, **options)
        if os.getpid() == worker:
            os.kill(worker, signal.SIGKILL)
        return answer
    setattr(owner, name, dies)

{fault}
sys.argv = sys.argv[1:]
sys.exit(main())
"""


@pytest.fixture
def postgres_site(tmp_path: Path, postgres_url: str) -> Iterator[WorkSite]:
    with init_queue(postgres_url) as store, contextlib.closing(WorkSite(tmp_path, store, queue=postgres_url)) as site:
        yield site


@pytest.fixture
def prepared(site: WorkSite) -> PreparedSite:
    return PreparedSite(site)


@pytest.mark.parametrize("database", ["site", "postgres_site"])
def test_claimed_attempt_is_the_prepared_one_and_runs_once(request: pytest.FixtureRequest, database: str) -> None:
    prepared = PreparedSite(request.getfixturevalue(database))
    worker = prepared.work()
    spec = prepared.wait_until_prepared()
    assert prepared.notes == [], "nothing of it runs before it is claimed"
    assert prepared.outcomes(prepared.next) == []
    prepared.finish()
    (attempt,) = prepared.site.store.attempts.of(prepared.next)
    assert (attempt.id, attempt.outcome, attempt.number) == (spec.attempt, "succeeded", 1)
    assert prepared.notes == ["next 1"]
    prepared.assert_no_directory()
    assert worker.stop() == 0
    wait_for(lambda: not prepared.site.processes(), named="the end of all processes")


def test_one_job_after_another_is_prepared(prepared: PreparedSite) -> None:
    jobs = [prepared.next, *(prepared.submit(f"job{number}") for number in range(20))]
    prepared.work()
    prepared.wait_until_prepared()
    prepared.finish()
    for job in jobs:
        prepared.site.wait_until(job, "succeeded")
    assert prepared.notes == ["next 1", *(f"job{number} 1" for number in range(20))]
    prepared.assert_no_directory()


def test_job_with_a_gpu_is_prepared_for_that_of_an_equal_one(site: WorkSite) -> None:
    first = site.submit(site.until("flag"), gpus=2)
    job = site.submit("echo $CUDA_VISIBLE_DEVICES >> gpus", gpus=2)
    worker = site.work()
    place = site.home / f"prepared-{socket.gethostname()}"
    wait_for(lambda: [*place.glob("*/attempt.json")], deadline=PATIENCE, named="its preparation")
    site.create_flag("flag")
    site.wait_until(first, "succeeded")
    site.wait_until(job, "succeeded")
    assert (site.directory / "gpus").read_text() == f"{site.uuid(0)},{site.uuid(1)}\n"
    assert [attempt.outcome for attempt in site.store.attempts.of(job)] == ["succeeded"]
    assert worker.stop() == 0


# Processes that are killed


def test_prepared_attempt_ends_with_its_worker_and_the_next_worker_removes_it(prepared: PreparedSite) -> None:
    worker = prepared.work()
    spec = prepared.wait_until_prepared()
    worker.kill()
    prepared.wait_until_gone(spec)
    prepared.end_first()
    assert prepared.notes == []
    prepared.work()
    prepared.finish()
    assert prepared.notes == ["next 1"]
    assert prepared.outcomes(prepared.next) == ["succeeded"]
    prepared.assert_no_directory()


@pytest.mark.parametrize("kill", [kill_shim, kill_reaper, kill_both])
def test_job_whose_prepared_processes_are_killed_runs_once(prepared: PreparedSite, kill: Callable[..., None]) -> None:
    prepared.work()
    kill(prepared.wait_until_prepared().processes)
    prepared.finish()
    assert len(prepared.notes) == 1
    assert [outcome for outcome in prepared.outcomes(prepared.next) if outcome != "requeued"] == ["succeeded"]
    prepared.assert_no_directory()


def test_job_whose_reaper_was_killed_after_its_success_stays_a_success(site: WorkSite) -> None:
    """The supervisor knows only that its reaper was killed, and says so in a second result."""
    first, job = site.submit(site.until("flag")), site.submit(f"touch began; {site.until('second')}")
    worker = site.work(*ONE, prefix=(sys.executable, "-c", _PRELUDE.format(root=str(ROOT), fault=_KILLS_REAPERS)))
    place = site.home / f"prepared-{socket.gethostname()}"
    (file,) = wait_for(lambda: [*place.glob("*/attempt.json")], deadline=PATIENCE, named="the preparation")
    spec = LocalAttemptRecord(file.parent).attempt_spec()
    assert spec is not None
    site.create_flag("flag")
    site.wait_until(first, "succeeded")
    wait_for((site.directory / "began").exists, deadline=PATIENCE, named="the start of the job")
    # It finds both results at once.
    worker.process.send_signal(signal.SIGSTOP)
    site.create_flag("second")
    record = LocalAttemptRecord(site.home / "attempts" / f"{job}-1")
    wait_for(lambda: record.status().state == "ended", deadline=PATIENCE, named="the end of the job")
    assert not is_alive(spec.processes.reaper)
    assert "was killed" in record.status().reason
    worker.process.send_signal(signal.SIGCONT)
    site.wait_until(job, "succeeded")
    assert [attempt.outcome for attempt in site.store.attempts.of(job)] == ["succeeded"]


_KILLS_REAPERS = """
from stoker.runs.processes.reaper_process import ReaperProcess
really = ReaperProcess._has_reported_success
def reported(self):
    if answer := really(self):
        os.kill(os.getpid(), signal.SIGKILL)
    return answer
ReaperProcess._has_reported_success = reported
"""


def test_suspended_prepared_shim_is_continued_when_its_attempt_is_claimed(prepared: PreparedSite) -> None:
    prepared.work()
    assert send(prepared.wait_until_prepared().processes.shim, signal.SIGSTOP)
    prepared.finish()
    assert prepared.notes == ["next 1"]
    assert prepared.outcomes(prepared.next) == ["succeeded"]


@pytest.mark.parametrize(
    ("fault", "outcomes"),
    [
        ("dies_after(LocalEngine, '_prepare')", ["succeeded"]),
        ("dies_after(Attempts, 'complete')", ["requeued", "succeeded"]),
        ("dies_after(PreparedAttempt, '_give_name')", ["lost", "succeeded"]),
        ("dies_after(ShimChannel, 'can_order_start')", ["lost", "succeeded"]),
        ("ShimChannel.order_start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)", ["succeeded"]),
        ("dies_after(PreparedAttempt, 'begin')", ["succeeded"]),
    ],
    ids=[
        "after-the-preparation",
        "after-the-claim",
        "before-the-shim-knows",
        "shim-knows-nothing",
        "reaper-knows-nothing",
        "after-the-start",
    ],
)
def test_worker_killed_after_preparation_loses_and_repeats_no_job(
    prepared: PreparedSite, fault: str, outcomes: list[str]
) -> None:
    worker = prepared.work(fault)
    if "_prepare" not in fault:
        prepared.wait_until_prepared()
        prepared.end_first()
    assert worker.process.wait(timeout=PATIENCE) == -signal.SIGKILL, worker.said
    prepared.work()
    prepared.finish()
    assert len(prepared.notes) == 1
    assert prepared.outcomes(prepared.next) == outcomes
    assert prepared.outcomes(prepared.first) == ["succeeded"]
    prepared.assert_no_directory()


def test_prepared_claim_with_a_lost_answer_is_requeued_under_a_new_id(
    prepared: PreparedSite,
) -> None:
    prepared.work(_LOST_ANSWER)
    spec = prepared.wait_until_prepared()
    prepared.finish()
    assert prepared.notes == ["next 2"]
    attempts = prepared.site.store.attempts.of(prepared.next)
    assert [attempt.outcome for attempt in attempts] == ["requeued", "succeeded"]
    assert attempts[0].id == spec.attempt != attempts[1].id
    assert prepared.outcomes(prepared.first) == ["succeeded"]
    prepared.wait_until_gone(spec)
    prepared.assert_no_directory()


_LOST_ANSWER = """
from stoker.queue import QueueAwayError
complete, lost = Attempts.complete, []
def loses(self, *arguments, **options):
    answer = complete(self, *arguments, **options)
    if answer.claimed is not None and not lost:
        lost.append(answer)
        raise QueueAwayError("the connection was closed")
    return answer
Attempts.complete = loses
"""


# Changes of the queue meanwhile


def test_job_that_was_edited_after_its_preparation_runs_as_edited(prepared: PreparedSite) -> None:
    prepared.work()
    spec = prepared.wait_until_prepared()
    prepared.site.store.jobs.edit(prepared.next, {"command": "echo edited $STOKER_ATTEMPT >> notes"})
    prepared.finish()
    assert prepared.notes == ["edited 1"]
    assert prepared.outcomes(prepared.next) == ["succeeded"]
    prepared.wait_until_gone(spec)
    prepared.assert_no_directory()


def test_environment_that_was_edited_after_the_preparation_counts(prepared: PreparedSite) -> None:
    prepared.work()
    prepared.wait_until_prepared()
    prepared.site.store.jobs.edit(prepared.next, {"environment": {"STOKER_ATTEMPT_NOTE": "x", "PATH": "/usr/bin:/bin"}})
    job = prepared.submit("other")
    prepared.finish()
    prepared.site.wait_until(job, "succeeded")
    assert prepared.notes == ["next 1", "other 1"]


@pytest.mark.parametrize("change", ["cancel", "hold", "move"])
def test_prepared_job_that_may_not_start_any_more_gives_way_to_another(prepared: PreparedSite, change: str) -> None:
    job = prepared.submit("other")
    prepared.work()
    prepared.wait_until_prepared()
    jobs = prepared.site.store.jobs
    if change == "move":
        jobs.move([prepared.next], "last")
    else:
        {"cancel": jobs.cancel, "hold": jobs.hold}[change]([prepared.next])
    prepared.end_first()
    prepared.site.wait_until(job, "succeeded")
    if change == "move":
        prepared.finish()
        assert prepared.notes == ["other 1", "next 1"]
    else:
        assert prepared.notes == ["other 1"]
        assert prepared.outcomes(prepared.next) == []


def test_prepared_job_that_another_worker_claimed_runs_once(prepared: PreparedSite, tmp_path: Path) -> None:
    prepared.work()
    prepared.wait_until_prepared()
    queue = {"STOKER_QUEUE": str(prepared.site.home / "queue.db")}
    other = prepared.site.work(*ONE, home=tmp_path / "other-home", environment=queue)
    prepared.site.wait_until(prepared.next, "succeeded")
    last = prepared.submit("last")
    prepared.site.wait_until(last, "succeeded")
    assert other.stop() == 0
    prepared.finish()
    assert prepared.notes == ["next 1", "last 1"]


def test_more_urgent_job_starts_before_the_prepared_one(prepared: PreparedSite) -> None:
    prepared.work()
    spec = prepared.wait_until_prepared()
    urgent = prepared.submit("urgent", priority=5)
    prepared.wait_until_gone(spec)
    prepared.finish()
    prepared.site.wait_until(urgent, "succeeded")
    assert prepared.notes == ["urgent 1", "next 1"]
    prepared.assert_no_directory()


def test_cap_of_a_group_holds_for_what_was_prepared(site: WorkSite) -> None:
    """The cap is lowered when the next job of the group is prepared: another one has its turn."""
    first = site.submit(site.until("flag"), group="sweep", at_most=2)
    second = site.submit(site.until("second"), group="sweep")
    third = site.submit("echo third >> notes", group="sweep")
    worker = site.work("--cpu-jobs", "2")
    wait_for(lambda: len(site.store.attempts.running()) == 2, deadline=PATIENCE, named="two running jobs")
    site.store.groups.cap("sweep", 1)
    site.create_flag("flag")
    site.wait_until(first, "succeeded")
    other = site.submit("echo other >> notes")
    site.wait_until(other, "succeeded")
    assert site.store.attempts.of(third) == []
    site.create_flag("second")
    site.wait_until(second, "succeeded")
    site.wait_until(third, "succeeded")
    assert (site.directory / "notes").read_text().splitlines() == ["other", "third"]
    assert worker.stop() == 0


def test_job_that_needs_more_than_a_plain_start_is_not_prepared(site: WorkSite) -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", site.directory, *words], check=True, capture_output=True, text=True).stdout

    git("init")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "code")
    first = site.submit(site.until("flag"))
    pinned = site.submit("pwd", pin=True, commit=git("rev-parse", "HEAD").strip())
    code = _PRELUDE.format(root=str(ROOT), fault="dies_after(LocalEngine, '_prepare')")
    worker = site.work(*ONE, prefix=(sys.executable, "-c", code))
    wait_for(site.store.attempts.running, deadline=PATIENCE, named="the first job")
    site.create_flag("flag")
    site.wait_until(first, "succeeded")
    site.wait_until(pinned, "succeeded")
    assert worker.stop() == 0
