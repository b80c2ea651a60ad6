"""What the worker concludes from Slurm's answers and an attempt's directory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engines.attempt import AttemptResult
from stoker.engines.slurm.evidence import ACTIVE, ANSWERS, LAG, WAITING, Evidence, Fence, Void, conclude
from stoker.engines.slurm.record import VOID, Owner
from stoker.runs.record import Status

OWNER = Owner(7, 0, "node1")
RUNNING = Status(state="running")
LEASE = 600.0
LONG = 2 * LEASE

statuses = st.sampled_from(
    [
        Status(),
        RUNNING,
        Status(state="stopping"),
        Status(state="ended", ending="exited", exit_code=0),
        Status(state="ended", ending="machine"),
        Status(state="ended", ending="supervisor killed"),
    ]
)
ended_states = st.sampled_from(
    ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "NEW_STATE"]
)
states = st.one_of(st.none(), st.sampled_from(sorted(ACTIVE)), ended_states)
durations = st.floats(0, 3 * LEASE)


def seen(status: Status = RUNNING, **more: object) -> Evidence:
    return Evidence(**({"status": status, "result": None, "owner": OWNER, "state": "RUNNING"} | more))  # type: ignore[arg-type]


def result(outcome: str, code: int | None = None) -> AttemptResult:
    return AttemptResult(outcome, code, "why")  # type: ignore[arg-type]


# What ends an attempt


def test_result_of_the_shim_takes_precedence_over_slurm() -> None:
    ended = Status(state="ended", ending="exited", exit_code=3)
    for state in (None, "RUNNING", "FAILED", "NODE_FAIL", "PENDING"):
        assert conclude(seen(ended, result=result("failed", 3), state=state)) == result("failed", 3)


@pytest.mark.parametrize(
    ("nodes", "code", "state", "outcome"),
    [
        (1, 0, "FAILED", "succeeded"),
        (2, 0, "FAILED", "lost"),
        (2, 0, "NODE_FAIL", "lost"),
        (2, 0, None, "lost"),
        # The shim itself ended with this code, and the disk did not take its result.
        (2, 0, "COMPLETED", "succeeded"),
        # A failure on one node is that of the whole job.
        (2, 3, "FAILED", "failed"),
    ],
)
def test_end_on_the_first_node_is_no_success_of_several_when_its_supervisor_was_killed(
    nodes: int, code: int, state: str | None, outcome: str
) -> None:
    ended = Status(state="ended", ending="exited", exit_code=code)
    quiet = {"silent_for": LONG, "ended_for": LONG, "answers_without": ANSWERS if state is None else 0}
    found = conclude(seen(ended, nodes=nodes, state=state, **quiet))
    assert isinstance(found, AttemptResult)
    assert found.outcome == outcome
    running = conclude(seen(ended, nodes=nodes, state="RUNNING", silent_for=LONG))
    assert isinstance(running, AttemptResult)
    assert (running.outcome == "lost") == (nodes > 1 and code == 0)


@pytest.mark.parametrize(
    ("printed", "outcome"),
    [
        (
            "slurmstepd-node1: error: StepId=1.batch exceeded memory limit (223371264 > 62914560), being killed",
            "failed",
        ),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.batch. Some of your processes may", "failed"),
        ("slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-18T10:28:05 ***", "lost"),
        ("the model exceeded its memory limit", "lost"),
    ],
)
def test_job_killed_for_its_memory_is_no_loss(printed: str, outcome: str) -> None:
    found = conclude(seen(state="FAILED", silent_for=LONG / 4, ended_for=LAG, printed=f"before\n{printed}\nafter"))
    assert isinstance(found, AttemptResult)
    assert (found.outcome, found.exit_code) == (outcome, 137 if outcome == "failed" else None)
    # Also with a lease that is shorter than the silence.
    late = conclude(seen(state="FAILED", silent_for=LONG, printed=printed))
    assert isinstance(late, AttemptResult)
    assert late.outcome == outcome
    # Also when Slurm has forgotten the job meanwhile.
    forgotten = conclude(seen(state=None, answers_without=ANSWERS, silent_for=LONG, printed=printed))
    assert isinstance(forgotten, AttemptResult)
    assert forgotten.outcome == outcome
    # What Slurm's state says counts more.
    cancelled = conclude(seen(state="CANCELLED", silent_for=LONG / 4, ended_for=LAG, printed=printed))
    assert isinstance(cancelled, AttemptResult)
    assert cancelled.outcome == "cancelled"


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("CANCELLED", "cancelled"),
        ("PREEMPTED", "preempted"),
        ("TIMEOUT", "failed"),
        ("OUT_OF_MEMORY", "failed"),
        ("NODE_FAIL", "lost"),
        ("FAILED", "lost"),
    ],
)
def test_interrupted_run_ends_as_slurm_says(state: str, outcome: str) -> None:
    interrupted = Status(state="ended", ending="machine", reason="Slurm asked it to end.")
    found = conclude(seen(interrupted, result=result("lost"), state=state))
    assert isinstance(found, AttemptResult)
    assert found.outcome == outcome


@pytest.mark.parametrize("state", sorted(WAITING))
def test_requeued_job_continues_the_same_attempt(state: str) -> None:
    interrupted = Status(state="ended", ending="machine")
    assert conclude(seen(interrupted, result=result("lost"), state=state, silent_for=LONG)) is None
    assert conclude(seen(RUNNING, state=state, silent_for=LONG)) is None


def test_batch_size_that_ran_out_of_memory_is_no_end_while_the_shim_lives() -> None:
    failed = Status(state="ended", ending="exited", exit_code=1)
    assert conclude(seen(failed, state="RUNNING")) is None


# What is never concluded


def test_single_answer_without_the_job_proves_nothing() -> None:
    for owner in (None, OWNER):
        assert conclude(seen(owner=owner, state=None, answers_without=ANSWERS - 1, ended_for=LONG)) is None


def test_unreachable_controller_proves_nothing_about_a_waiting_job() -> None:
    assert conclude(seen(Status(), owner=None, state=None, silent_for=LONG, ended_for=LONG)) is None


def test_failed_node_is_fenced_and_given_up_only_after_the_lease() -> None:
    assert isinstance(conclude(seen(state="NODE_FAIL", silent_for=LEASE / 2, ended_for=LEASE / 2)), Fence)
    found = conclude(seen(state="NODE_FAIL", silent_for=LEASE, ended_for=LEASE))
    assert isinstance(found, AttemptResult)
    assert found.outcome == "lost"


def test_submission_that_never_arrived_is_requeued_only_by_its_new_owner() -> None:
    found = conclude(seen(Status(), owner=None, state=None, submitted=False, answers_without=ANSWERS, ended_for=LAG))
    assert isinstance(found, Void)
    assert found.result.outcome == "requeued"


def test_job_that_slurm_never_lets_begin_is_not_tried_for_ever() -> None:
    def outcome(before: int) -> str:
        found = conclude(seen(Status(), owner=None, state="FAILED", ended_for=LAG, failed_starts=before))
        assert isinstance(found, Void)
        return found.result.outcome

    assert [outcome(before) for before in (0, 1, 2)] == ["requeued", "requeued", "failed"]


@pytest.mark.parametrize("reason", ["launch failed requeued held", "launch_failed_requeued_held", "JobHoldMaxRequeue"])
def test_job_that_slurm_holds_after_a_failed_launch_is_given_up(reason: str) -> None:
    found = conclude(seen(Status(), owner=None, state="PENDING", reason=reason))
    assert isinstance(found, Void)
    assert found.result.outcome == "requeued"
    interrupted = Status(state="ended", ending="machine")
    assert conclude(seen(interrupted, result=result("lost"), state="PENDING", reason=reason)) == result("lost")
    assert conclude(seen(RUNNING, state="PENDING", reason=reason)) is None, "its node may still run it"
    found = conclude(seen(RUNNING, state="PENDING", reason=reason, silent_for=LEASE))
    assert isinstance(found, AttemptResult)
    assert found.outcome == "lost"


def test_job_whose_node_crashed_before_the_shim_began_is_given_up_after_the_lease() -> None:
    assert conclude(seen(Status(), owner=None, running_for=LEASE - 1)) is None
    found = conclude(seen(Status(), owner=None, running_for=LEASE))
    assert isinstance(found, Void)
    assert found.result.outcome == "requeued"
    assert conclude(seen(Status(), owner=None, running_for=10, lease=8.0)) is None, "Python may take long to start"


def test_only_a_job_that_waited_was_cancelled_by_a_person() -> None:
    """A node that cannot launch a job, as when its disk is full, asks the controller to cancel it."""

    def outcome(**more: bool) -> str:
        found = conclude(seen(Status(), owner=None, state="CANCELLED", ended_for=LAG, **more))
        assert isinstance(found, Void)
        return found.result.outcome

    assert outcome() == "cancelled"
    assert outcome(had_node=True) == "requeued"
    assert outcome(by_mistake=True) == "requeued"


def test_job_that_a_crashed_controller_killed_was_not_cancelled_by_a_person() -> None:
    def outcome(ending: str, **more: bool) -> str:
        found = conclude(seen(Status(state="ended", ending=ending), result=result("lost"), state="CANCELLED", **more))
        assert isinstance(found, AttemptResult)
        return found.outcome

    assert outcome("machine") == "cancelled"
    assert outcome("supervisor killed") == "lost"
    assert outcome("machine", by_mistake=True) == "lost"


def test_job_that_a_person_holds_is_left_alone() -> None:
    assert conclude(seen(Status(), owner=None, state="PENDING", reason="JobHeldUser", ended_for=LONG)) is None


def test_live_shim_counts_even_if_slurm_does_not_know_its_job() -> None:
    assert conclude(seen(state=None, answers_without=100, silent_for=LEASE - 1, ended_for=LONG)) is None


@given(statuses, states, st.integers(0, 5), durations, durations)
def test_attempt_is_lost_only_after_its_lease_or_when_slurm_has_ended_it(
    status: Status, state: str | None, without: int, silent: float, ended: float
) -> None:
    found = conclude(
        seen(status, state=state, answers_without=without if state is None else 0, silent_for=silent, ended_for=ended)
    )
    if isinstance(found, AttemptResult) and found.outcome == "lost" and silent < LEASE:
        assert state not in ACTIVE
        assert state is not None or without >= ANSWERS


@given(states, st.integers(0, 5), durations, durations)
def test_attempt_that_may_have_begun_is_never_requeued(
    state: str | None, without: int, silent: float, ended: float
) -> None:
    found = conclude(seen(state=state, answers_without=without, silent_for=silent, ended_for=ended))
    assert not isinstance(found, Void)
    assert not (isinstance(found, AttemptResult) and found.outcome == "requeued")


@given(states, st.integers(0, 5), durations)
def test_void_attempt_has_a_result_at_once(state: str | None, without: int, ended: float) -> None:
    found = conclude(seen(Status(), owner=VOID, state=state, answers_without=without, ended_for=ended))
    assert isinstance(found, AttemptResult)


# Several nodes


@pytest.mark.parametrize("ending", ["exited", "cancelled", "node lost", "machine", "supervisor killed"])
def test_end_on_the_first_node_waits_for_the_others(ending: str) -> None:
    def ended(state: str | None, **more: object) -> Evidence:
        status = Status(state="ended", ending=ending, exit_code=0)
        written = None if ending == "supervisor killed" else result("lost")
        return seen(status, result=written, state=state, open_nodes=("node1",), **more)

    quiet = {"silent_for": LEASE / 2, "ended_for": LEASE / 2}
    for state in (None, "RUNNING", "COMPLETING", "PENDING"):
        assert conclude(ended(state)) is None
    # What is cut off may run until its lease is over.
    assert conclude(ended(None, answers_without=ANSWERS, **quiet)) is None
    assert isinstance(conclude(ended("NODE_FAIL", **quiet)), Fence)
    for state in ("FAILED", "CANCELLED", "COMPLETED"):
        assert isinstance(conclude(ended(state)), Fence)
        assert isinstance(conclude(ended(state, **quiet)), AttemptResult), "Slurm has ended it on all nodes"
    assert isinstance(conclude(ended("FAILED", silent_for=LEASE)), AttemptResult)
