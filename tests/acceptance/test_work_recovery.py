"""Jobs while their worker, supervisor, reaper or database is killed."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.engines.identity import WorkerIdentity
from stoker.errors import BadInputError
from stoker.gpus.recording import RecordingReader
from stoker.procfs import read_stat
from stoker.queue import QueueAwayError, init_queue
from stoker.runs.processes.tree import send
from tests.support.attempt_processes import (
    kill_both,
    kill_job,
    kill_reaper,
    kill_shim,
    processes_of,
    processes_of_attempt,
    record_of,
)
from tests.support.job_journal import JobJournal
from tests.support.postgres import PostgresServer
from tests.support.waiting import wait_for
from tests.support.work_site import PATIENCE, RunningWorker, WorkSite

# For a job that ends when the test says so: what is to happen to it first may take its time on a busy machine.
LONG = 100.0
# The shortest that a worker accepts, near enough, so that a test need not wait long for its end.
SHORT_LEASE = ("--lease", "6s", "--grace", "1s")


@pytest.fixture
def journal(tmp_path: Path) -> JobJournal:
    return JobJournal(tmp_path / "journal")


@pytest.fixture
def postgres_site(tmp_path: Path, mortal_url: str) -> Iterator[WorkSite]:
    with init_queue(mortal_url) as store, contextlib.closing(WorkSite(tmp_path, store, queue=mortal_url)) as site:
        yield site


@pytest.fixture(params=["sqlite", "postgres"])
def any_site(request: pytest.FixtureRequest) -> WorkSite:
    """On both databases."""
    found: WorkSite = request.getfixturevalue("site" if request.param == "sqlite" else "postgres_site")
    return found


def wait_for_start(journal: JobJournal, worker: RunningWorker) -> None:
    try:
        wait_for(journal.has_started, deadline=PATIENCE, named="the start of the job")
    except AssertionError as error:
        error.add_note(worker.said)
        raise


def bring_back(server: PostgresServer, site: WorkSite) -> None:
    server.start()
    with contextlib.suppress(QueueAwayError):
        site.store.paused()  # the test's own connection was lost too


def let_second_end(journal: JobJournal) -> None:
    wait_for(lambda: journal.has_started(2), named="the second attempt")
    journal.let_end()


def wait_for_log(site: WorkSite, job: str, lines: list[str]) -> None:
    """The last output is delivered after the outcome."""
    attempt = site.last_attempt(job).id
    wait_for(lambda: site.store.logs.read(attempt).splitlines() == lines, named=f"all of {lines[-3:]} in the log")


def outcomes(site: WorkSite, job: str) -> list[str | None]:
    return [attempt.outcome for attempt in site.store.attempts.of(job)]


def test_job_survives_its_killed_worker_and_is_adopted_by_the_next(any_site: WorkSite, journal: JobJournal) -> None:
    job = any_site.submit(journal.command(LONG, 7))
    worker = any_site.work()
    wait_for_start(journal, worker)
    worker.kill()
    worker = any_site.work("--until-empty")
    worker.wait_until_it_says("found 1 job that an earlier worker had started")
    wait_for(lambda: len(journal.printed(1)) > 20)
    journal.let_end()
    assert worker.process.wait(timeout=PATIENCE) == 0
    assert f"{job}: failed" in worker.said
    found = any_site.job(job)
    assert (found.state, found.exit_code, journal.attempts()) == ("failed", 7, [1])
    printed = journal.printed(1)
    assert any_site.store.logs.read(any_site.last_attempt(job).id).splitlines() == printed
    assert any_site.output(job).read_text().splitlines() == printed


def test_outcome_reaches_the_queue_without_a_worker(any_site: WorkSite, journal: JobJournal) -> None:
    link = "https://wandb.ai/a/b/runs/c"
    job = any_site.submit(f"echo {link}; {journal.command(LONG)}; exit 7")
    worker = any_site.work()
    wait_for_start(journal, worker)
    worker.kill()
    wait_for(lambda: len(journal.printed(1)) > 20)
    journal.let_end()
    found = any_site.wait_until(job, "failed")
    assert found.exit_code == 7
    wait_for(lambda: any_site.job(job).link == link, named="the link")
    wait_for_log(any_site, job, [link, *journal.printed(1)])
    wait_for(lambda: not any_site.processes(), named="the end of all that looked after the job")


def test_jobs_share_a_gpu_helper_and_stay_watched_when_it_and_the_worker_are_killed(site: WorkSite) -> None:
    jobs = [site.submit(site.until("end"), gpus=1, policy={"every": 0.2}) for _ in range(2)]
    worker = site.work()
    (helper,) = wait_for_helper_of(site, jobs)
    os.kill(helper, signal.SIGKILL)
    (helper,) = wait_for_helper_of(site, jobs, instead_of=helper)
    worker.kill()
    os.kill(helper, signal.SIGKILL)
    # There is nobody left to start it but the supervisors of the jobs.
    wait_for_helper_of(site, jobs, instead_of=helper)
    site.create_flag("end")
    for job in jobs:
        found = site.wait_until(job, "succeeded")
        assert [one.number for one in site.store.attempts.of(found.id)] == [1]
    wait_for(lambda: not site.processes(), named="the end of all that looked after the jobs")


def wait_for_helper_of(site: WorkSite, jobs: list[str], instead_of: int = 0) -> list[int]:
    """The GPU helpers, once both jobs are seen by one and there is no other."""
    before = {job: good_looks(site, job) for job in jobs}

    def watched() -> list[int]:
        helpers = [pid for pid, name in site.processes().items() if name == "stoker-gpus" and pid != instead_of]
        seen = all(good_looks(site, job) > before[job] + 5 for job in jobs)
        return helpers if seen and len(helpers) == 1 else []

    return wait_for(watched, deadline=PATIENCE, named="looks at both jobs by one helper")


def good_looks(site: WorkSite, job: str) -> int:
    try:
        return sum(look.problem is None for look in RecordingReader(site.output(job).with_name("readings")))
    except BadInputError:
        return 0


@pytest.mark.parametrize(("on_loss", "becomes"), [("retry", "succeeded"), ("hold", "held")])
def test_job_of_a_killed_supervisor_is_stopped_and_retried_or_held(
    site: WorkSite, journal: JobJournal, on_loss: str, becomes: str
) -> None:
    job = site.submit(journal.command(LONG), on_loss=on_loss)
    worker = site.work()
    wait_for_start(journal, worker)
    kill_shim(processes_of_attempt(site, job))
    if on_loss == "retry":
        let_second_end(journal)
    site.wait_until(job, becomes)
    worker.stop()
    assert outcomes(site, job) == (["lost", "succeeded"] if on_loss == "retry" else ["lost"])
    assert not journal.overlaps()
    assert not any(entry.word == "end" for entry in journal.entries() if entry.attempt == 1)


def test_terminated_supervisor_stops_its_job_which_is_retried(site: WorkSite, journal: JobJournal) -> None:
    job = site.submit(journal.command(LONG))
    worker = site.work()
    wait_for_start(journal, worker)
    kill_shim(processes_of_attempt(site, job), signal.SIGTERM)
    let_second_end(journal)
    site.wait_until(job, "succeeded")
    worker.stop()
    assert outcomes(site, job) == ["lost", "succeeded"]
    assert "SIGTERM" in site.store.attempts.of(job)[0].reason
    assert not journal.overlaps()


@pytest.mark.parametrize("with_worker", [True, False], ids=["with a worker", "without one"])
def test_job_of_a_killed_reaper_is_stopped_without_losing_output(
    site: WorkSite, journal: JobJournal, with_worker: bool
) -> None:
    job = site.submit(journal.command(LONG), on_loss="hold")
    worker = site.work()
    wait_for_start(journal, worker)
    if not with_worker:
        worker.kill()
    # What the job prints from now on stays in the pipe.
    assert send(processes_of_attempt(site, job).reaper, signal.SIGSTOP)
    before = len(journal.printed(1))
    wait_for(lambda: len(journal.printed(1)) > before + 5)
    kill_reaper(processes_of_attempt(site, job))
    site.wait_until(job, "held")
    assert outcomes(site, job) == ["lost"]
    wait_for(lambda: record_of(site, job).attempt_spec() is None, named="the last of the output")
    log = site.store.logs.read(site.last_attempt(job).id)
    assert [line for line in log.splitlines() if line.startswith("attempt")] == journal.printed(1)


def test_job_is_killed_without_another_worker_when_worker_shim_and_reaper_are_killed(
    site: WorkSite, journal: JobJournal
) -> None:
    job = site.submit(f"setsid {journal.command(LONG, deaf=True)} & sleep {LONG}")
    worker = site.work()
    wait_for_start(journal, worker)
    worker.kill()
    kill_both(processes_of_attempt(site, job))
    wait_for(lambda: processes_of(record_of(site, job)) == [], named="the end of what is left of the job")
    wait_for(lambda: not site.processes(), named="the end of everything")
    assert site.job(job).state == "running"


@pytest.mark.parametrize("worker_lives", [True, False], ids=["the worker sees it", "the next worker finds it"])
def test_job_whose_shim_and_reaper_are_killed_is_stopped_before_the_next_attempt(
    site: WorkSite, journal: JobJournal, worker_lives: bool
) -> None:
    job = site.submit(f"setsid {journal.command(LONG, deaf=True)} & sleep {LONG}", on_loss="hold")
    worker = site.work()
    wait_for_start(journal, worker)
    if not worker_lives:
        worker.kill()
    record = record_of(site, job)
    left = processes_of(record)
    assert len(left) >= 2
    kill_both(processes_of_attempt(site, job))
    if not worker_lives:
        worker = site.work()
    site.wait_until(job, "held")
    assert processes_of(record) == []
    worker.stop()
    assert outcomes(site, job) == ["lost"]


def test_job_with_deleted_files_continues_and_does_not_run_twice(site: WorkSite, journal: JobJournal) -> None:
    job = site.submit(journal.command(LONG, 7))
    worker = site.work()
    wait_for_start(journal, worker)
    worker.kill()
    shutil.rmtree(site.home / "attempts")
    worker = site.work()
    site.wait_until(site.submit("true"), "succeeded")
    journal.let_end()
    assert site.wait_until(job, "failed").exit_code == 7
    worker.stop()
    assert (outcomes(site, job), journal.attempts()) == (["failed"], [1])


def test_job_of_a_suspended_supervisor_can_be_cancelled(site: WorkSite, journal: JobJournal) -> None:
    job = site.submit(journal.command(LONG))
    worker = site.work()
    wait_for_start(journal, worker)
    assert send(processes_of_attempt(site, job).shim, signal.SIGSTOP)
    site.store.jobs.cancel([job])
    site.wait_until(job, "cancelled")
    assert processes_of(record_of(site, job)) == []
    worker.stop()


def is_zombie(pid: int) -> bool:
    return read_stat(f"/proc/{pid}/stat").fields[0] == b"Z"


def test_end_during_a_suspended_reaper_counts_after_its_supervisor_is_killed(
    site: WorkSite, journal: JobJournal
) -> None:
    job = site.submit(journal.command(LONG))
    wait_for_start(journal, site.work())
    processes = processes_of_attempt(site, job)
    assert send(processes.reaper, signal.SIGSTOP)
    journal.let_end()
    # Its last words come before its exit: the suspended reaper then has a zombie as its only child.
    children = Path(f"/proc/{processes.reaper.pid}/task/{processes.reaper.pid}/children")
    wait_for(lambda: all(is_zombie(int(pid)) for pid in children.read_text().split()), named="the end of the job")
    kill_shim(processes)
    site.wait_until(job, "succeeded")
    assert journal.attempts() == [1]


def test_job_with_expired_lease_is_stopped_before_it_starts_again(site: WorkSite, journal: JobJournal) -> None:
    job = site.submit(journal.command(LONG, deaf=True))
    worker = site.work(*SHORT_LEASE)
    wait_for_start(journal, worker)
    assert site.store.attempts.finish(site.last_attempt(job).id, "lost", None, "its worker did not renew its lease")
    wait_for(lambda: journal.has_started(2), named="the second attempt")
    journal.let_end()
    site.wait_until(job, "succeeded")
    assert journal.overlaps() == []


def test_claim_of_a_worker_killed_before_the_start_is_released_at_once(any_site: WorkSite, journal: JobJournal) -> None:
    home = WorkerIdentity(any_site.home)
    job = any_site.submit(journal.command(0.1), on_loss="hold")
    assert any_site.store.attempts.claim([job], home.worker, [], 600.0) is not None
    home.leave()
    assert "stoker" not in any_site.work_until_empty().err
    assert outcomes(any_site, job) == ["requeued", "succeeded"]
    assert journal.attempts() == [2]


@pytest.mark.parametrize(("on_loss", "becomes"), [("retry", "succeeded"), ("hold", "held")])
def test_job_interrupted_by_a_reboot_is_retried_or_held(
    site: WorkSite, journal: JobJournal, on_loss: str, becomes: str
) -> None:
    job = site.submit(journal.command(LONG), on_loss=on_loss)
    worker = site.work()
    wait_for_start(journal, worker)
    worker.kill()
    _restart_machine(site, job)
    journal.let_end()
    site.work_until_empty()
    assert site.job(job).state == becomes
    assert outcomes(site, job)[0] == "lost"
    assert "restarted" in site.store.attempts.of(job)[0].reason


def _restart_machine(site: WorkSite, job: str) -> None:
    """Everything of the job dies at once, and the numbers of processes mean something else from then on."""
    kill_both(processes_of_attempt(site, job))
    record = record_of(site, job)
    kill_job(record)
    attempt_spec = record.attempt_spec()
    assert attempt_spec is not None
    myself = (1, 1)
    processes = msgspec.structs.replace(attempt_spec.processes, shim=myself, reaper=myself)
    record.write_attempt(msgspec.structs.replace(attempt_spec, boot="another", processes=processes))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_suspended_worker_leaves_its_jobs_to_the_next(site: WorkSite, journal: JobJournal, how: signal.Signals) -> None:
    job = site.submit(journal.command(LONG))
    worker = site.work()
    wait_for_start(journal, worker)
    worker.process.send_signal(how)
    assert worker.process.wait(timeout=PATIENCE) == 0
    assert "1 job continues: the next `stoker work` here finds it again" in worker.said
    assert site.job(job).state == "running"
    journal.let_end()
    site.work_until_empty()
    assert (outcomes(site, job), journal.attempts()) == (["succeeded"], [1])


def test_second_worker_in_the_same_home_is_refused(site: WorkSite) -> None:
    first = site.work().ready()
    second = site.stoker("work", "--until-empty")
    assert second.code == 1
    assert re.fullmatch(rf"stoker: another worker \(pid {first.process.pid}\) runs in .*\n", second.err)
    assert first.stop() == 0


def test_outcome_of_a_job_arrives_after_a_database_outage(
    postgres_site: WorkSite, mortal_server: PostgresServer, journal: JobJournal
) -> None:
    site = postgres_site
    job = site.submit(journal.command(LONG, 7))
    worker = site.work()
    wait_for_start(journal, worker)
    mortal_server.kill()
    journal.let_end()
    wait_for(lambda: any(entry.word == "end" for entry in journal.entries()), named="the end of the job")
    worker.wait_until_it_says("jobs continue, retrying")
    bring_back(mortal_server, site)
    worker.wait_until_it_says("the queue is back")
    assert site.wait_until(job, "failed").exit_code == 7
    after = JobJournal(journal.path.with_name("after"))
    site.wait_until(site.submit(after.command(0.1)), "succeeded")
    assert worker.stop() == 0
    assert worker.said.count("retrying") == worker.said.count("the queue is back") == 1
    assert journal.attempts() == [1]


def test_outcome_of_a_job_without_worker_arrives_after_a_database_outage(
    postgres_site: WorkSite, mortal_server: PostgresServer, journal: JobJournal
) -> None:
    site = postgres_site
    job = site.submit(journal.command(LONG, 7))
    worker = site.work()
    wait_for_start(journal, worker)
    worker.kill()
    mortal_server.kill_hard()
    journal.let_end()
    wait_for(lambda: any(entry.word == "end" for entry in journal.entries()), named="the end of the job")
    bring_back(mortal_server, site)
    assert site.wait_until(job, "failed").exit_code == 7
    wait_for_log(site, job, journal.printed(1))


def test_worker_waits_for_an_unreachable_database_at_startup(
    postgres_site: WorkSite, mortal_server: PostgresServer, journal: JobJournal
) -> None:
    site = postgres_site
    job = site.submit(journal.command(0.1))
    mortal_server.kill()
    worker = site.work()
    worker.wait_until_it_says("retrying")
    bring_back(mortal_server, site)
    site.wait_until(job, "succeeded")
    assert worker.stop() == 0


def test_job_without_a_reachable_queue_is_stopped_before_its_lease_expires(
    postgres_site: WorkSite, mortal_server: PostgresServer, journal: JobJournal
) -> None:
    site = postgres_site
    job = site.submit(journal.command(LONG, deaf=True), on_loss="hold")
    worker = site.work(*SHORT_LEASE)
    wait_for_start(journal, worker)
    worker.kill()
    mortal_server.kill()
    wait_for(lambda: processes_of(record_of(site, job)) == [], named="the end of the job")
    bring_back(mortal_server, site)
    # Read only now: until the database went away, the lease may have been renewed.
    assert journal.entries()[-1].wall_time < site.last_attempt(job).lease_expires
    site.wait_until(job, "held")
    assert "could not be reached" in site.last_attempt(job).reason


def test_claim_with_a_lost_response_is_requeued_after_the_outage(
    postgres_site: WorkSite, mortal_server: PostgresServer
) -> None:
    site = postgres_site
    worker = site.work("--cpu-jobs", "0").ready()
    (myself,) = wait_for(site.store.workers.all, named="the worker's first word")
    job = site.submit("true")
    assert site.store.attempts.claim([job], myself.id, [], 600.0) is not None
    mortal_server.kill()
    worker.wait_until_it_says("retrying")
    bring_back(mortal_server, site)
    site.wait_until(job, "queued")
    assert outcomes(site, job) == ["requeued"]
    assert worker.stop() == 0
