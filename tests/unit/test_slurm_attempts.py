"""What the worker reads of attempts on Slurm in their directories."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from stoker.engines.attempt import CANCELLED, AttemptResult, result_of
from stoker.engines.slurm.answers import SlurmJob
from stoker.engines.slurm.attempts import SlurmAttempt
from stoker.engines.slurm.evidence import conclude
from stoker.engines.slurm.record import VOID, Owner, SlurmAttemptRecord, SlurmAttemptSpec
from stoker.runs.plan import Plan
from stoker.runs.record import Status


def attempt(directory: Path, number: int) -> SlurmAttempt:
    place = directory / f"job-{number}"
    place.mkdir()
    spec = SlurmAttemptSpec(
        attempt=f"attempt{number}",
        job="job",
        number=number,
        queue="/nowhere/queue.db",
        plan=Plan(command=("true",), grace=30.0),
        environment={},
        lease=600.0,
        lease_until=0.0,
        log_limit=1000,
        started=time.time(),
        kill_wait=30.0,
    )
    return SlurmAttempt(SlurmAttemptRecord(place), spec, submitting=False)


def slurm_job(number: int, state: str, nodes: str = "") -> SlurmJob:
    return SlurmJob(
        id=number, state=state, reason="", comment="", name="", nodes=nodes, node_count=1, partition="", user="",
        submitted=None, start=None, end=None, time_limit=None, gres="",
    )  # fmt: skip


def test_only_attempts_in_a_row_that_slurm_had_and_no_shim_began_are_failed_starts(tmp_path: Path) -> None:
    first, refused, began, second, third, last = (attempt(tmp_path, number) for number in range(1, 7))
    for one in (first, began, second, third):
        one.record.write_submitted(7)
    for one in (first, refused, second, third):
        one.record.take(VOID)
    began.record.take(Owner(7, host="node1"))
    assert [one._failed_starts() for one in (refused, began, second, third, last)] == [1, 0, 0, 1, 2]


def test_next_worker_knows_that_slurm_had_launched_a_job_that_it_took_back(tmp_path: Path) -> None:
    first = attempt(tmp_path, 1)
    first.hear(slurm_job(7, "RUNNING", nodes="node1"))
    next_one = SlurmAttempt(first.record, first.spec, submitting=False)
    next_one.hear(slurm_job(7, "CANCELLED"))
    assert (next_one.slurm_job, next_one._evidence().had_node) == (7, True)
    waited = attempt(tmp_path, 2)
    waited.hear(slurm_job(8, "PENDING"))
    waited.hear(slurm_job(8, "CANCELLED"))
    assert not waited._evidence().had_node


@pytest.mark.parametrize(
    ("began", "ended", "started", "outcome"),
    [
        (3, None, 1, "cancelled"),
        (3, 20, 1, "cancelled"),
        # Slurm started it again while its shim ran: it had forgotten the first start, and nobody has cancelled it.
        (3, None, 10, "lost"),
        (3, 11, 10, "lost"),
        # It was requeued when its first start had ended, and cancelled before its second shim had begun.
        (3, 5, 10, "cancelled"),
        # The clocks of Slurm and of the file system differ by as much as they like; whole seconds decide nothing.
        (3, None, 4, "cancelled"),
    ],
)
def test_job_that_slurm_cancels_since_it_had_forgotten_its_start_is_lost(
    tmp_path: Path, began: int, ended: int | None, started: int, outcome: str
) -> None:
    one = attempt(tmp_path, 1)
    one.record.write_attempt(one.spec)
    one.record.take(Owner(7, host="node1"))
    one.record.write_status(Status() if ended is None else Status(state="ended", ending="machine", reason="Slurm did."))
    for name, seconds in (("attempt.json", 0), ("owner.json", began), ("status.json", ended or began)):
        os.utime(one.record.directory / name, (5000 + seconds, 5000 + seconds))
    listed = slurm_job(7, "CANCELLED", nodes="node1")
    one.hear(msgspec.structs.replace(listed, submitted=100.0, start=100.0 + started))
    one._read()
    result = conclude(one._evidence()._replace(silent_for=1000.0, ended_for=1000.0))
    assert isinstance(result, AttemptResult)
    assert result.outcome == outcome


def test_job_that_lived_between_two_answers_of_slurm_has_its_node_and_its_start(tmp_path: Path) -> None:
    short = attempt(tmp_path, 1)
    short.hear(slurm_job(7, "PENDING"))
    short.look()
    assert (short.pending, short.where) == (True, "Slurm job 7")
    short.record.take(Owner(7, host="node2"))
    short.record.write_status(Status(state="ended", ending="exited", exit_code=0))
    short.record.write_result(AttemptResult("succeeded", 0, ""))
    short.look()
    assert (short.pending, short.where) == (False, "Slurm job 7 on node2")
    assert short.began is not None


def test_reason_of_a_cancelled_attempt_does_not_repeat_its_outcome(tmp_path: Path) -> None:
    waits, given_up = attempt(tmp_path, 1), attempt(tmp_path, 2)
    waits.stop("cancelled", CANCELLED)
    assert waits.result == AttemptResult("cancelled", None, "")
    given_up.stop("lease", "The queue had given the job up.")
    assert given_up.result == AttemptResult("lost", None, "The queue had given the job up.")
    ended = Status(state="ended", ending="cancelled", reason=CANCELLED)
    assert result_of(ended) == AttemptResult("cancelled", None, "")
