"""What every engine must do under a worker: run, stop, survive the worker's death at every step, adopt and report.

`scripted` is registered from outside: an engine is a module with `OPTIONS` and `create`, and a line in the registry.
"""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import wait_for
from tests.support.work_site import PATIENCE, RunningWorker, WorkSite

ENGINES = ("local", "scripted", "slurm")
ROOT = Path(__file__).parents[2]

# Registers the engine, and kills the worker's process at one place the first time it gets there.
_PRELUDE = """
import os, signal, sys
from pathlib import Path

sys.path.insert(0, {root!r})
from stoker.cli import main
from stoker.engines import ENGINES
from stoker.queue.attempts import Attempts
from stoker.engines.attempt import AttemptRecord
from stoker.worker.loop import WorkerLoop
from stoker.worker.scheduler import Scheduler

ENGINES["scripted"] = "tests.support.scripted_engine"
died = Path(os.environ["STOKER_HOME"]) / "died"
worker = os.getpid()

def die():
    if os.getpid() == worker and not died.exists():
        died.touch()
        os.kill(worker, signal.SIGKILL)

def dying(owner, name, *, after):
    really = getattr(owner, name)
    def dies(*arguments, **options):
        if not after:
            die()
        answer = really(*arguments, **options)
        if after and answer is not False:
            die()
        return answer
    setattr(owner, name, dies)

{fault}
sys.argv = sys.argv[1:]
sys.exit(main())
"""

FAULTS = {
    "after the claim": "dying(Attempts, 'take_head', after=True)",
    "after the start": "dying(Scheduler, '_start', after=True)",
    "before the result is delivered": "dying(Attempts, 'complete', after=False)",
    "before the result is acknowledged": "dying(Attempts, 'complete', after=True)",
    "before the attempt is marked as delivered": "dying(AttemptRecord, 'delivered', after=False)",
}


class EngineSite:
    """A work site whose workers use one engine."""

    def __init__(self, site: WorkSite, engine: str, cluster: SlurmCluster | None = None) -> None:
        self.site = site
        self._cluster = cluster
        self.engine = engine
        self.home = site.home
        self._runs = site.directory / "runs"

    def work(self, *arguments: str, fault: str = "") -> RunningWorker:
        code = _PRELUDE.format(root=str(ROOT), fault=fault)
        return self.site.work("--engine", self.engine, *arguments, prefix=(sys.executable, "-c", code))

    def submit(self, command: str = "exit 0", **asked: object) -> str:
        """A job that notes each of its runs, and runs until its flag file exists."""
        return self.site.submit(f"echo run >> runs; {self.site.until('flag')}; echo last line; {command}", **asked)

    def runs(self) -> int:
        return len(self._runs.read_text().splitlines()) if self._runs.exists() else 0

    def wait_until_running(self) -> None:
        wait_for(lambda: self.runs() > 0, named="the start of the job")

    def create_flag(self) -> None:
        self.site.create_flag("flag")

    def outcomes(self, job: str) -> list[str | None]:
        return [attempt.outcome for attempt in self.site.store.attempts.of(job)]

    def log(self, job: str) -> str:
        return self.site.store.logs.read(self.site.last_attempt(job).id)

    def finish(self) -> None:
        """A worker that runs until nothing is left."""
        worker = self.work("--until-empty")
        assert worker.process.wait(timeout=PATIENCE) == 0, worker.said

    def cut_off(self) -> None:
        """From now on the engine cannot find out what became of its attempts."""
        if self._cluster is not None:
            self._cluster.stop_controller()
        else:
            (self.home / "unreachable").touch()

    def reconnect(self) -> None:
        if self._cluster is not None:
            self._cluster.start_controller()
        else:
            (self.home / "unreachable").unlink()

    def wait_until_it_cannot_tell(self, worker: RunningWorker) -> None:
        if self._cluster is not None:
            worker.wait_until_it_says("Slurm does not answer")
        else:
            wait_for((self.home / "asked").exists, named="a search that fails")

    def wait_until_delivered(self) -> None:
        """The last of a log follows the outcome; a worker that is stopped in between leaves it to the next one."""
        wait_for(lambda: not list((self.home / "attempts").glob("*/attempt.json")), named="the last of the logs")

    def assert_nothing_left(self) -> None:
        self.wait_until_delivered()
        wait_for(lambda: not self.site.processes(), named="the end of all processes")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, site: WorkSite) -> EngineSite:
    cluster: SlurmCluster | None = None
    if request.param == "slurm":
        cluster = request.getfixturevalue("cluster")
        assert cluster is not None
        site.environment |= cluster.environment()
        # Each node has its own simulated GPUs.
        del site.environment["STOKER_GPUS"]
    return EngineSite(site, request.param, cluster)


def test_job_runs_and_its_result_and_log_reach_the_queue(engine: EngineSite) -> None:
    good, bad = engine.submit(), engine.submit("exit 3")
    engine.create_flag()
    engine.finish()
    assert (engine.outcomes(good), engine.outcomes(bad)) == (["succeeded"], ["failed"])
    assert engine.site.last_attempt(bad).exit_code == 3
    assert engine.log(good).endswith("last line\n")
    engine.assert_nothing_left()


def test_job_that_can_never_start_is_reported(engine: EngineSite) -> None:
    job = engine.site.submit("true", gpus=64)
    worker = engine.work()
    reported = wait_for(lambda: [w.view.waiting[job] for w in engine.site.store.workers.all() if job in w.view.waiting])
    assert "can never start" in reported[0]
    assert worker.stop() == 0
    engine.finish()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda name: name.replace(" ", "-"))
def test_worker_killed_at_any_step_neither_loses_nor_repeats_a_job(engine: EngineSite, fault: str) -> None:
    job = engine.submit()
    if "result" in fault or "delivered" in fault:
        engine.create_flag()
    worker = engine.work(fault=FAULTS[fault])
    assert worker.process.wait(timeout=PATIENCE) == -signal.SIGKILL, worker.said
    engine.create_flag()
    engine.finish()
    wait_for(lambda: engine.site.job(job).state == "succeeded")
    assert [outcome for outcome in engine.outcomes(job) if outcome != "requeued"] == ["succeeded"]
    assert ("requeued" in engine.outcomes(job)) == (fault == "after the claim")
    assert engine.runs() == 1
    assert engine.log(job).endswith("last line\n")
    engine.assert_nothing_left()


_ONE_AT_A_TIME = {"local": ("--cpu-jobs", "1"), "scripted": ("--slots", "1"), "slurm": ()}


def test_worker_killed_after_outcome_and_claim_loses_and_repeats_no_job(engine: EngineSite) -> None:
    """Both were written in one statement: the next worker finds a claim of which nothing was started."""
    jobs = [engine.submit(), engine.submit()]
    engine.create_flag()
    worker = engine.work(*_ONE_AT_A_TIME[engine.engine], fault=FAULTS["before the result is acknowledged"])
    assert worker.process.wait(timeout=PATIENCE) == -signal.SIGKILL, worker.said
    if engine.engine == "local":  # the others may have claimed both before
        assert [attempt.job for attempt in engine.site.store.attempts.running()] == jobs[1:]
    engine.finish()
    for job in jobs:
        wait_for(lambda job=job: engine.site.job(job).state == "succeeded", named="the success of both")  # type: ignore[misc]
        assert [outcome for outcome in engine.outcomes(job) if outcome != "requeued"] == ["succeeded"]
    assert engine.runs() == 2
    engine.assert_nothing_left()


# The scheduler's part of a preparation; one worker is killed after it, the other after the claim.
_PREPARED = """
prepare = Scheduler.prepare
def prepares(self, store):
    prepare(self, store)
    if self._prepared:
        (died.parent / "prepared").touch()
Scheduler.prepare = prepares
"""


@pytest.mark.parametrize("name", ["local", "scripted"])
@pytest.mark.parametrize("fault", ["dying(Attempts, 'complete', after=True)", ""], ids=["killed-after-claim", "killed"])
def test_attempt_that_was_prepared_runs_once_although_the_worker_is_killed(
    site: WorkSite, name: str, fault: str
) -> None:
    engine = EngineSite(site, name)
    first = engine.submit()
    second = site.submit("echo second >> notes")
    worker = engine.work(*_ONE_AT_A_TIME[name], fault=_PREPARED + fault)
    wait_for((engine.home / "prepared").exists, deadline=PATIENCE, named="the preparation of the second job")
    assert not (site.directory / "notes").exists()
    if fault:
        engine.create_flag()
        assert worker.process.wait(timeout=PATIENCE) == -signal.SIGKILL, worker.said
    else:
        worker.kill()
        engine.create_flag()
    engine.finish()
    assert (site.directory / "notes").read_text() == "second\n"
    assert [engine.outcomes(job)[-1] for job in (first, second)] == ["succeeded", "succeeded"]
    assert engine.outcomes(second)[:-1] == (["requeued"] if fault else [])
    engine.assert_nothing_left()


@pytest.mark.parametrize("name", ["local", "scripted"])
def test_job_that_is_edited_after_its_preparation_runs_as_edited(site: WorkSite, name: str) -> None:
    engine = EngineSite(site, name)
    engine.submit()
    second = site.submit("echo second >> notes")
    worker = engine.work(*_ONE_AT_A_TIME[name], fault=_PREPARED)
    wait_for((engine.home / "prepared").exists, deadline=PATIENCE, named="the preparation of the second job")
    site.store.jobs.edit(second, {"command": "echo edited >> notes"})
    engine.create_flag()
    site.wait_until(second, "succeeded")
    assert (site.directory / "notes").read_text() == "edited\n"
    assert worker.stop() == 0


def test_attempt_of_an_earlier_worker_is_adopted_and_can_be_stopped(engine: EngineSite) -> None:
    job = engine.submit()
    worker = engine.work()
    engine.wait_until_running()
    worker.kill()
    worker = engine.work()
    worker.wait_until_it_says("found 1 job that an earlier worker had started")
    engine.site.store.jobs.cancel([job])
    engine.site.wait_until(job, "cancelled")
    assert engine.outcomes(job) == ["cancelled"]
    engine.wait_until_delivered()
    assert worker.stop() == 0
    engine.assert_nothing_left()


@pytest.mark.parametrize("fault", ["after the claim", "after the start"])
def test_attempt_of_unknown_state_is_neither_lost_nor_run_again(engine: EngineSite, fault: str) -> None:
    job = engine.submit()
    worker = engine.work(fault=FAULTS[fault])
    assert worker.process.wait(timeout=PATIENCE) == -signal.SIGKILL, worker.said
    engine.cut_off()
    worker = engine.work(fault=_CANNOT_LOOK)
    engine.wait_until_it_cannot_tell(worker)
    other = engine.site.submit("true")
    worker.ready()
    assert engine.outcomes(job) == [None]
    assert engine.outcomes(other) == [], "nothing is started before all attempts are known"
    engine.reconnect()
    engine.create_flag()
    engine.site.wait_until(job, "succeeded")
    engine.site.wait_until(other, "succeeded")
    assert engine.runs() == 1
    assert worker.stop() == 0


# For the local engine: no descriptors to look for processes, or to list a directory.
_CANNOT_LOOK = """
import errno
from stoker.engines.local import attempts

def cannot_look(really):
    def looks(*arguments, **options):
        if (died.parent / "unreachable").exists():
            (died.parent / "asked").touch()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really(*arguments, **options)
    return looks

for name in ("find_orphans", "has_shim"):
    setattr(attempts, name, cannot_look(getattr(attempts, name)))

from stoker.worker.loop import WorkerLoop
search = WorkerLoop._search
def searches(self):
    search(self)
    (died.parent / "asked").touch()
WorkerLoop._search = searches
"""


def test_attempt_with_expired_lease_is_stopped_and_its_result_refused(engine: EngineSite) -> None:
    job = engine.submit("exit 0", retries=0)
    worker = engine.work("--lease", "5s", "--grace", "0.5s")
    engine.wait_until_running()
    (attempt,) = engine.site.store.attempts.of(job)
    assert engine.site.store.attempts.finish(attempt.id, "lost", None, "another worker swept it")
    worker.wait_until_it_says(rf"{job}: lost after .*too late: the queue had given the job up")
    assert engine.outcomes(job)[0] == "lost"
    assert engine.site.store.attempts.of(job)[0].reason == "another worker swept it"
    engine.site.store.jobs.cancel([job])
    engine.site.wait_until(job, "cancelled")
    engine.wait_until_delivered()
    assert worker.stop() == 0


def test_stop_racing_with_exit_leaves_one_outcome(engine: EngineSite) -> None:
    jobs = [engine.submit() for _ in range(2)]
    worker = engine.work()
    wait_for(lambda: engine.runs() == 2)
    engine.create_flag()
    engine.site.store.jobs.cancel(jobs)
    for job in jobs:
        engine.site.wait_until(job, "succeeded", "cancelled")
        assert engine.outcomes(job) in (["succeeded"], ["cancelled"])
    engine.wait_until_delivered()
    assert worker.stop() == 0
    engine.assert_nothing_left()


def test_attempts_keep_running_when_the_worker_ends(engine: EngineSite) -> None:
    job = engine.submit()
    worker = engine.work()
    engine.wait_until_running()
    assert worker.stop() == 0
    assert "1 job continues" in worker.said
    engine.create_flag()
    engine.finish()
    engine.site.wait_until(job, "succeeded")
    assert (engine.outcomes(job), engine.runs()) == (["succeeded"], 1)


# The registry and the options


def test_leases_are_as_long_as_the_engine_says(site: WorkSite) -> None:
    engine = EngineSite(site, "scripted")
    job = engine.submit()
    long_leases = "from tests.support.scripted_engine import ScriptedEngine\nScriptedEngine.lease = 86400.0"

    def lease_expires() -> float:
        return site.last_attempt(job).lease_expires

    worker = engine.work("--lease", "6s", "--grace", "1s", fault=long_leases)
    engine.wait_until_running()
    claimed = lease_expires()
    assert 80000.0 < claimed - site.store.clock() <= 86400.0
    wait_for(lambda: lease_expires() > claimed, named="a renewal in the period of the worker's option")
    engine.create_flag()
    site.wait_until(job, "succeeded")
    engine.wait_until_delivered()
    assert worker.stop() == 0


def test_worker_reports_the_name_of_its_engine(engine: EngineSite) -> None:
    worker = engine.work()
    wait_for(lambda: len(engine.site.store.workers.all()) == 1, named="a heartbeat")
    assert [one.view.engine for one in engine.site.store.workers.all()] == [engine.engine]
    assert worker.stop() == 0


def test_unknown_engine_is_refused(site: WorkSite) -> None:
    done = site.stoker("work", "--engine", "clowder")
    assert (done.code, done.err) == (2, "stoker: there is no engine 'clowder': choose local or slurm\n")


def test_options_are_those_of_the_chosen_engine(site: WorkSite) -> None:
    help_of = {}
    for name in ENGINES:
        worker = EngineSite(site, name).work("--help")
        assert worker.process.wait(timeout=PATIENCE) == 0, worker.said
        help_of[name] = worker.said
    assert "--slots-per-gpu" in help_of["local"]
    assert not re.search(r"--slots\b(?!-)", help_of["local"])
    assert re.search(r"--slots\b(?!-)", help_of["scripted"])
    assert "--cpu-jobs" not in help_of["scripted"]


def test_engine_is_chosen_by_the_environment(site: WorkSite) -> None:
    site.environment["STOKER_ENGINE"] = "clowder"
    assert "there is no engine 'clowder'" in site.stoker("work", "--until-empty").err
