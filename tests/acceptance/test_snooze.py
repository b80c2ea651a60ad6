"""`stoker snooze` of jobs of the queue; what it does to runs is in the tests of `stoker run`."""

import os
import time
from pathlib import Path

import pytest

from stoker.paths import state_home
from stoker.procfs import boot_id, read_stat
from stoker.queue import Attempt, Store, init_queue
from stoker.runs.record import Record, Records, Spec, Status
from tests.support.attempts import start, submit
from tests.support.command import stoker


@pytest.fixture
def elsewhere(queue: Store) -> Attempt:
    """An attempt at a job with a name that runs on another machine."""
    (job,) = submit(queue, "train", name="resnet")
    return start(queue, job)


@pytest.fixture
def here(elsewhere: Attempt) -> Record:
    """The record of that attempt on this machine, with this process as its supervisor."""
    return running(Records(state_home(), "attempts").create(f"{elsewhere.job}-{elsewhere.number}"))


def running(record: Record) -> Record:
    record.write_spec(spec_of(record, supervisor_started=read_stat("/proc/self/stat").started))
    record.write_status(Status(state="running"))
    return record


def spec_of(record: Record, supervisor_started: int) -> Spec:
    return Spec(
        id=record.id,
        command=("train",),
        directory="/",
        host="here",
        user="alice",
        boot=boot_id(),
        supervisor=os.getpid(),
        supervisor_started=supervisor_started,
        started=time.time(),
        policy={},
        rule="all GPUs below 1% for 30m",
        gpus="job",
        dry_run=False,
    )


def names_of(attempt: Attempt) -> tuple[str, str, str]:
    return attempt.job, attempt.job[:6], "resnet"


def test_remote_job_is_snoozed_through_the_queue(queue: Store, elsewhere: Attempt) -> None:
    for name in names_of(elsewhere):
        done = stoker("snooze", "30m", name)
        assert done.code == 0, done.err
        assert done.out.startswith(f"job resnet ({elsewhere.job}) is snoozed for 30m, until ")
        wish = queue.attempts.requests([elsewhere.id]).snoozed[elsewhere.id]
        assert 1700.0 < wish.seconds <= 1800.0
        done = stoker("snooze", "--end", name)
        assert (done.code, done.out) == (0, f"job resnet ({elsewhere.job}) is watched again\n")
        assert queue.attempts.snoozes() == {}


def test_worker_records_who_snoozed_the_job(queue: Store, elsewhere: Attempt) -> None:
    assert stoker("snooze", "1h", "resnet", environment={"LOGNAME": "alice"}).code == 0
    assert queue.attempts.requests([elsewhere.id]).snoozed[elsewhere.id].by == "alice"


def test_local_job_is_snoozed_in_its_record(queue: Store, elsewhere: Attempt, here: Record) -> None:
    for name in (*names_of(elsewhere), here.id):
        done = stoker("snooze", "30m", name)
        assert done.code == 0, done.err
        snooze = here.snooze()
        assert snooze is not None
        assert snooze.wall > time.time() + 1700.0
        assert stoker("snooze", "--end", environment={"STOKER_RUN": name}).code == 0
        assert here.snooze() is None
    assert queue.attempts.requests([elsewhere.id]).snoozed == {}


def test_remote_retry_is_snoozed_when_the_local_attempt_has_ended(
    queue: Store, elsewhere: Attempt, here: Record
) -> None:
    here.write_status(Status(state="ended"))
    queue.attempts.finish(elsewhere.id, "preempted", None)
    again = start(queue, elsewhere.job)
    assert stoker("snooze", "5m", elsewhere.job).code == 0
    assert list(queue.attempts.snoozes()) == [again.id]
    assert here.snooze() is None


def test_job_that_does_not_run_cannot_be_snoozed(queue: Store, elsewhere: Attempt) -> None:
    (waits,) = submit(queue, "waits")
    queue.attempts.finish(elsewhere.id, "failed", 1)
    for job, name in ((waits, "waits"), (elsewhere.job, "resnet")):
        done = stoker("snooze", "5m", job)
        assert (done.code, done.out) == (2, "")
        assert done.err == f"stoker: job {name} ({job}) is not running: there is nothing to snooze\n"


def test_unknown_id_is_refused(queue: Store) -> None:
    submit(queue, "a", "b", name="twins")
    for name, words in (
        ("nobody", ["there is no run 'nobody' here", "there is no job 'nobody'"]),
        ("twins", ["fits several jobs"]),
    ):
        done = stoker("snooze", "5m", name)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert all(word in done.err for word in words)


def test_job_name_takes_precedence_over_a_local_run_prefix(queue: Store) -> None:
    mine = running(Records(state_home(), "attempts").create("a1b2c3d4-1"))
    (job,) = submit(queue, "train", name="a")
    attempt = start(queue, job)
    done = stoker("snooze", "30m", "a")
    assert done.out.startswith(f"job a ({job}) is snoozed for 30m, until "), done.err
    assert list(queue.attempts.snoozes()) == [attempt.id]
    submit(queue, "train", name="a")
    done = stoker("snooze", "30m", "a")
    assert (done.code, done.out) == (2, "")
    assert "'a' fits several jobs" in done.err
    assert mine.snooze() is None


def test_queue_option_selects_jobs_of_that_queue(queue: Store, tmp_path: Path) -> None:
    other = str(tmp_path / "other.db")
    init_queue(other).close()
    mine = running(Records(state_home(), "attempts").create("a1b2c3d4-1"))
    for name in ("a1b2", mine.id):
        done = stoker("snooze", "30m", name, "--queue", other)
        assert (done.code, done.out) == (2, "")
        assert f"there is no job {name!r} in {other}" in done.err
    assert mine.snooze() is None
    assert queue.attempts.snoozes() == {}


def test_id_unknown_to_the_queue_is_looked_up_locally() -> None:
    """Also without a queue; an ambiguous id snoozes nothing."""
    mine = running(Records(state_home()).create("a1b2c3d4"))
    done = stoker("snooze", "30m", "a1")
    assert done.out.startswith("run a1b2c3d4 is snoozed for 30m, until "), done.err
    twin = running(Records(state_home(), "attempts").create("a1ffffff-12"))
    done = stoker("snooze", "--end", "a1")
    assert (done.code, done.out) == (2, "")
    assert done.err == "stoker: 'a1' fits 2 runs (a1ffffff-12, a1b2c3d4): write more of it\n"
    # Another attempt at the same job is another thing.
    assert stoker("snooze", "30m", "a1ffffff-1").code == 2
    assert mine.snooze() is not None
    assert twin.snooze() is None


def test_missing_queue_is_reported() -> None:
    done = stoker("snooze", "5m", "nobody", environment={"STOKER_QUEUE": "postgresql://nobody@127.0.0.1:1/nowhere"})
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "there is no run 'nobody' here" in done.err
    assert "cannot be reached" in done.err


@pytest.mark.parametrize(
    ("words", "result"),
    [
        ([], "for how long?"),
        (["soon", "resnet"], "is not a duration"),
        (["0s", "resnet"], "greater than zero"),
        (["30m"], "which run? Write its id after the duration"),
        (["--end"], "which run? Write its id after --end"),
        (["30m", "a", "b"], "one run at a time"),
    ],
)
def test_invalid_input_is_refused_in_one_sentence(words: list[str], result: str) -> None:
    done = stoker("snooze", *words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert result in done.err
