"""A full disk and exhausted processes or descriptors may cost records and time, never a job."""

import errno
import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from stoker.engines.identity import MOST_ATTEMPTS, TIDY_AFTER, WorkerIdentity
from stoker.procfs import is_alive
from stoker.queue import Attempt
from tests.support.attempt_processes import processes_of, processes_of_attempt, record_of
from tests.support.waiting import wait_for
from tests.support.work_site import RunningWorker, WorkSite, troubled


def begin_trouble(site: WorkSite) -> None:
    (site.home / "trouble").touch()


def end_trouble(site: WorkSite) -> None:
    (site.home / "trouble").unlink()


def wait_for_failure(site: WorkSite) -> None:
    wait_for((site.home / "failed").exists, named="the first failure")


def outcomes(site: WorkSite, job: str) -> list[str | None]:
    return [attempt.outcome for attempt in site.store.attempts.of(job)]


def work(site: WorkSite, trouble: str, *arguments: str) -> RunningWorker:
    """A worker whose home is in trouble from the start."""
    site.home.mkdir(exist_ok=True)
    begin_trouble(site)
    return site.work(*arguments, prefix=troubled(trouble))


# After the start


def test_full_disk_after_the_start_loses_the_record_but_not_the_job(site: WorkSite) -> None:
    job = site.submit(f"echo begun; {site.until('flag')}; exit 3", retries=1, backoff=3600.0)
    trouble = "\n".join(
        f"failing({name!r}, errno.ENOSPC)"
        for name in ("pathlib.Path.write_bytes", "stoker.engines.local.record.LocalAttemptRecord.listen")
    )
    worker = work(site, trouble)
    wait_for(lambda: site.output(job).exists() and "begun" in site.output(job).read_text(), named="the start")
    wait_for_failure(site)
    supervisors, record = processes_of_attempt(site, job), record_of(site, job)
    assert is_alive(supervisors.shim)
    assert is_alive(supervisors.reaper)
    assert outcomes(site, job) == [None]
    end_trouble(site)
    wait_for((record.directory / "socket").exists, named="that the next worker finds the way")
    worker.kill()
    worker = site.work(prefix=troubled(""))
    worker.wait_until_it_says("found 1 job that an earlier worker had started")
    site.create_flag("flag")
    wait_for(lambda: outcomes(site, job) == ["failed"], named="the outcome")
    assert "begun" in site.output(job).read_text()
    # The record is whole again, too.
    wait_for(lambda: record.status().exit_code == 3)
    assert record.spec().id == record.id


def test_outcome_reaches_the_queue_although_the_disk_is_full(site: WorkSite) -> None:
    job = site.submit(f"echo begun; {site.until('flag')}")
    worker = work(site, "failing('pathlib.Path.write_bytes', errno.ENOSPC)")
    wait_for(lambda: site.output(job).exists() and "begun" in site.output(job).read_text(), named="the start")
    supervisors = processes_of_attempt(site, job)
    worker.kill()
    site.create_flag("flag")
    site.wait_until(job, "succeeded")
    wait_for(lambda: not is_alive(supervisors.shim))
    assert outcomes(site, job) == ["succeeded"]


# At the start


NO_PROCESSES = (
    "import stoker.runs.processes.reaper_process; stoker.runs.processes.reaper_process.spawn = lambda program: None"
)


@pytest.mark.parametrize(
    ("number", "words"),
    [("EAGAIN", "no more processes are allowed here"), ("EMFILE", "too many files are open")],
)
def test_job_is_returned_uncounted_when_the_machine_lacks_resources(site: WorkSite, number: str, words: str) -> None:
    job = site.submit(("true",), on_loss="hold")
    worker = work(site, f"{NO_PROCESSES}\nfailing('stoker.runs.processes.spawn._fork', errno.{number})")
    said = site.wait_for_why(job, "can start jobs again|retry")
    assert words in said
    assert outcomes(site, job)[0] == "requeued"
    end_trouble(site)
    site.wait_until(job, "succeeded")
    assert set(outcomes(site, job)[:-1]) == {"requeued"}
    assert worker.said.count(words) == 1, worker.said


def test_start_on_a_full_disk_is_undone_and_loses_no_job(site: WorkSite) -> None:
    job = site.submit(("true",), on_loss="hold")
    worker = work(site, "failing('stoker.engines.attempt.AttemptRecord.write_attempt', errno.ENOSPC)")
    site.wait_for_why(job, "No space left on device")
    assert not list((site.home / "attempts").iterdir())
    assert site.job(job).state == "queued"
    end_trouble(site)
    site.wait_until(job, "succeeded")
    assert set(outcomes(site, job)[:-1]) == {"requeued"}
    assert worker.said.count("No space left") == 1, worker.said


def test_shim_that_cannot_read_its_attempt_reports_it_to_this_worker_and_the_next(site: WorkSite) -> None:
    job = site.submit(("true",), on_loss="hold")
    work(
        site,
        "failing('stoker.engines.local.record.StartAttempt.attempt_spec', errno.EMFILE, caller='run_attempts')",
    )
    wait_for(lambda: outcomes(site, job)[:1] == ["requeued"], named="that it is given back")
    end_trouble(site)
    assert record_of(site, job).status().ending == "not started"
    site.wait_until(job, "succeeded")


def test_failed_fork_before_the_job_is_retried(site: WorkSite) -> None:
    job = site.submit(("true",))
    worker = work(site, "failing('os.fork', errno.EAGAIN, caller='_fork_shim')")
    wait_for_failure(site)
    end_trouble(site)
    site.wait_until(job, "succeeded")
    assert worker.process.poll() is None
    assert outcomes(site, job) == ["succeeded"]


def test_failed_fork_without_a_worker_is_retried_and_the_job_continues(site: WorkSite) -> None:
    job = site.submit(f"echo begun; {site.until('flag')}")
    # In `DetachedDelivery.__init__`: how a supervisor without a worker reaches the queue.
    worker = work(site, "failing('os.fork', errno.EAGAIN, caller='__init__')", "--lease", "6s", "--grace", "1s")
    end_trouble(site)
    wait_for(lambda: site.output(job).exists() and "begun" in site.output(job).read_text(), named="the start")
    record = record_of(site, job)
    begin_trouble(site)
    worker.kill()
    wait_for_failure(site)
    before = site.last_attempt(job).lease_expires
    end_trouble(site)
    wait_for(lambda: site.last_attempt(job).lease_expires > before, named="that its lease is renewed")
    assert processes_of(record)
    site.create_flag("flag")
    site.wait_until(job, "succeeded")
    assert outcomes(site, job) == ["succeeded"]


# Ending and tidying


def test_worker_with_a_suspended_fork_server_ends_on_request(site: WorkSite) -> None:
    worker = site.work().ready()

    def ready() -> int | None:
        # While the fork server forks, its child has its name for a moment.
        processes = site.processes()
        servers = [pid for pid, name in processes.items() if name == "stoker-forksrv"]
        return servers[0] if (list(processes.values()).count("stoker-shim"), len(servers)) == (2, 1) else None

    fork_server = wait_for(ready, named="two shims that are ready")
    os.kill(fork_server, signal.SIGSTOP)
    assert worker.stop() == 0


def test_home_full_of_short_jobs_is_cleaned_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.engines.identity.MOST_ATTEMPTS", 20)
    home = WorkerIdentity(tmp_path)
    for number in range(20 + 2 * TIDY_AFTER):
        home.create_directory(
            Attempt(id="", job=f"{number:08x}", worker="", number=1, gpus=(), started=0, lease_expires=0)
        )
        if home.needs_tidying:
            home.tidy()
    home.leave()
    assert 20 <= len(list((tmp_path / "attempts").iterdir())) <= 20 + TIDY_AFTER


def test_code_of_a_killed_supervisor_is_removed_when_its_attempt_is_over(tmp_path: Path) -> None:
    home = WorkerIdentity(tmp_path)
    for name in ("over", "recent", "undelivered"):
        (tmp_path / "attempts" / name / "code" / "part").mkdir(parents=True)
    (tmp_path / "attempts" / "undelivered" / "attempt.json").touch()
    old = time.time() - 4000
    for name in ("over", "undelivered"):
        os.utime(tmp_path / "attempts" / name, (old, old))
    home.tidy()
    home.leave()
    assert [path.name for path in (tmp_path / "attempts").iterdir() if not (path / "code").exists()] == ["over"]


def test_attempts_that_never_started_are_cleaned_up(tmp_path: Path) -> None:
    home = WorkerIdentity(tmp_path)
    for number in range(MOST_ATTEMPTS + 2):
        (tmp_path / "attempts" / str(number)).mkdir()
    kept = tmp_path / "attempts" / "0"
    (kept / "attempt.json").touch()
    old = time.time() - 3600
    for name in ("0", "1"):
        os.utime(tmp_path / "attempts" / name, (old, old))
    home.tidy()
    home.leave()
    assert kept.exists()
    assert len(list((tmp_path / "attempts").iterdir())) == MOST_ATTEMPTS + 1


def test_worker_keeps_its_id_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which its next start knows what was claimed and never started."""
    home = WorkerIdentity(tmp_path)
    home.leave()
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        second = WorkerIdentity(tmp_path)
        second.leave()
    third = WorkerIdentity(tmp_path)
    third.leave()
    assert second.is_own(home.worker)
    assert third.is_own(home.worker)
