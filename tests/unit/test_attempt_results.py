"""What the end of a run means for its attempt, and that of an attempt for its job."""

from pathlib import Path
from typing import Any

import pytest

from stoker.engines.attempt import AttemptResult, result_of
from stoker.queue.attempts import MOST_REQUEUES_AT_LIMIT, consequence
from stoker.queue.model import Job
from stoker.runs.record import RunProgress, Status

LIMIT = "It had run for 1h, which was its time limit."
NO_PROGRESS = RunProgress(steps=0, since=0.0, trust="none")
OUTPUT = RunProgress(steps=3, since=0.0, trust="output")


def ended(ending: Any, code: int | None = None, **more: Any) -> Status:
    return Status(state="ended", ending=ending, exit_code=code, **more)


def a_job(**fields: Any) -> Job:
    given: dict[str, Any] = {"command": "true", "retries": 2, "retries_left": 2}
    return Job(
        **(given | fields),
        id="0123abcd", state="running", position=0.0, submitted=0.0, started=0.0, ended=None, not_before=0.0,
        attempts=1, attempt="a1", exit_code=None, reason="", link="", cancel_requested=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (ended("exited", 0), AttemptResult("succeeded", 0, "")),
        (ended("exited", 75), AttemptResult("failed", 75, "", "exit")),
        (ended("idle", 124, rule="idle", reason="Idle."), AttemptResult("failed", 124, "Idle", "idle")),
        (ended("time limit", 124, reason=LIMIT), AttemptResult("failed", 124, LIMIT[:-1], "time-limit")),
        (ended("could not start", 127, reason="No."), AttemptResult("failed", 127, "No", "start")),
        (ended(None), AttemptResult("lost", None, "its supervisor was killed", "lost")),
    ],
)
def test_result_has_the_cause_of_a_failure(status: Status, result: AttemptResult) -> None:
    assert result_of(status) == result


def test_lack_of_memory_is_found_in_the_output_and_by_what_the_kernel_killed(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_text("torch.cuda.OutOfMemoryError: CUDA out of memory\n")
    assert result_of(ended("exited", 1), output=output).cause == "oom"
    assert result_of(ended("exited", 137), kills=1) == AttemptResult(
        "failed", 137, "it was killed for lack of RAM", "oom"
    )
    assert result_of(ended("exited", 137)).cause == "exit"
    output.write_text("ValueError\n")
    assert result_of(ended("exited", 1), output=output).cause == "exit"


def test_job_without_any_progress_is_not_requeued_at_its_limit() -> None:
    at_limit = AttemptResult("requeued", None, LIMIT[:-1], "time-limit")
    for progress in (None, OUTPUT):  # what is not watched is not known to stand still
        assert result_of(ended("time limit", 124, reason=LIMIT, progress=progress), True) == at_limit
    stuck = result_of(ended("time limit", 124, reason=LIMIT, progress=NO_PROGRESS), True)
    assert (stuck.outcome, stuck.cause) == ("failed", "time-limit")
    assert stuck.reason.endswith("it made no progress: it is not requeued")


def test_requeues_at_the_limit_use_no_retry_and_have_an_end() -> None:
    job = a_job(requeue_at_limit=True)
    again = consequence(job, "requeued", "limit", 5, "time-limit")
    assert (again.state, again.retries_left, again.delay) == ("queued", 2, 0.0)
    last = consequence(job, "requeued", "limit", MOST_REQUEUES_AT_LIMIT, "time-limit")
    assert (last.state, last.reason) == ("failed", f"limit, for the {MOST_REQUEUES_AT_LIMIT}th time")
    assert consequence(job, "requeued", "disk full", 3).delay > 0.0


@pytest.mark.parametrize(
    ("retry_on", "outcome", "cause", "code", "state", "left"),
    [
        ((), "failed", "exit", 1, "queued", 1),
        ((), "failed", "stalled", 124, "queued", 1),
        (("exit:75",), "failed", "exit", 75, "queued", 1),
        (("exit:75",), "failed", "exit", 1, "failed", 2),
        (("exit:124",), "failed", "idle", 124, "failed", 2),
        (("exit",), "failed", "exit", 1, "queued", 1),
        (("exit",), "failed", "oom", 1, "queued", 1),
        (("exit:1",), "failed", "oom", 1, "queued", 1),
        (("oom", "stalled"), "failed", "stalled", 124, "queued", 1),
        (("time-limit",), "failed", "time-limit", 124, "queued", 1),
        (("oom",), "lost", "lost", None, "queued", 2),
        (("lost",), "lost", "", None, "queued", 1),
        (("start",), "failed", "start", 125, "queued", 1),
        # A cluster would refuse it again.
        ((), "failed", "refused", 125, "failed", 2),
        (("start", "exit", "exit:125"), "failed", "refused", 125, "failed", 2),
    ],
)
def test_only_the_listed_ends_use_a_retry(
    retry_on: tuple[str, ...], outcome: Any, cause: str, code: int | None, state: str, left: int
) -> None:
    found = consequence(a_job(retry_on=retry_on), outcome, "", 1, cause, code)
    assert (found.state, found.retries_left) == (state, left)
    assert consequence(a_job(retry_on=("lost",), retries_left=0), "lost", "", 1).state == "failed"
