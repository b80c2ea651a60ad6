"""Infers the state of an attempt from Slurm's answers and from its directory. Pure: no clock and no I/O.

Both sources may be unavailable, late or wrong for a while:

- Slurm forgets jobs minutes after their end, restarts, times out, and reports a node as failed while its processes run.
- The directory shows nothing of a pending job, and no changes of one whose node is cut off.

An attempt has ended when its shim says so. It is lost only if both sources agree, or after a silence as long as the
lease: by then the shim has stopped the job itself.
"""

import re
from typing import Final, NamedTuple

from stoker.engines.attempt import TIME_LIMIT, AttemptResult, result_of
from stoker.engines.slurm.record import INTERRUPTED, Owner
from stoker.runs.plan import IDLE_EXIT_CODE
from stoker.runs.record import Status

# Includes requeued jobs, which Slurm starts again.
WAITING: Final = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
ACTIVE: Final = WAITING | {
    "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT",
}  # fmt: skip
# Reasons of jobs that Slurm holds after a failed start, in several versions. Jobs held by a person are left alone.
_HELD_BY_SLURM: Final = ("launch failed requeued held", "retrieval failed requeued held", "JobHoldMaxRequeue")
# The controller has lost the node, but its processes may still run.
_CUT_OFF: Final = frozenset({"NODE_FAIL", "BOOT_FAIL"})
# The delay after which a network file system shows changes.
LAG: Final = 10.0
# A job counts as forgotten after this many answers without it; a single one proves nothing.
ANSWERS: Final = 2
# The first heartbeat of a shim may come this long after Slurm's start of the job, on a slow file system.
_BEGINS_WITHIN: Final = 30.0
# A job that ends this often before its shim starts is at fault itself.
_MOST_FAILED_STARTS: Final = 3

# The message of slurmstepd in the job's output, which may be the only sign of running out of memory.
_OUT_OF_MEMORY: Final = re.compile(r"slurmstepd\S*: error: .*(exceeded.* memory limit|oom[-_ ]kill)", re.IGNORECASE)
_TOO_LONG: Final = AttemptResult("failed", IDLE_EXIT_CODE, "it had run for as long as Slurm allows", TIME_LIMIT)
# Results by the final state of the Slurm job.
_BY_STATE: Final = {
    "CANCELLED": AttemptResult("cancelled", None, "it was cancelled in Slurm"),
    "PREEMPTED": AttemptResult("preempted", None, "Slurm needed its place for another job"),
    "TIMEOUT": _TOO_LONG,
    "DEADLINE": _TOO_LONG,
    "OUT_OF_MEMORY": AttemptResult("failed", 137, "Slurm killed it: it used more RAM than it had asked for", "oom"),
    # The shim exits with the job's code even if the disk refuses the result.
    "COMPLETED": AttemptResult("succeeded", 0, ""),
}


class Evidence(NamedTuple):
    """Everything known about an attempt now."""

    status: Status
    result: AttemptResult | None
    """The result that its shim wrote."""
    owner: Owner | None
    state: str | None
    """Slurm's state of the job; None if Slurm did not answer or does not know the job."""
    reason: str = ""
    """Slurm's code for why the job waits."""
    had_node: bool = False
    """Slurm has started the job on a node."""
    by_mistake: bool = False
    """Nobody asked for the cancellation: the worker has cancelled another attempt's job with the same id, and may have
    hit this one; or Slurm had forgotten that the job runs."""
    answers_without: int = 0
    """The number of consecutive complete answers without the job."""
    submitted: bool = True
    """Slurm has ever had the job."""
    silent_for: float = 0.0
    """Seconds since the last heartbeat of any of its shims."""
    ended_for: float = 0.0
    """Seconds since Slurm first reported the job's end, or did not list it."""
    running_for: float = 0.0
    """Seconds since Slurm first reported the job as running."""
    failed_starts: int = 0
    """The number of directly preceding attempts that Slurm had and no shim took."""
    lease: float = 600.0
    heartbeat: float = 10.0
    printed: str = ""
    """The end of the output of Slurm and of the shim itself."""
    requeue_at_limit: bool = False
    """The job is requeued at its time limit."""
    nodes: int = 1
    """On how many nodes the job runs."""
    open_nodes: tuple[str, ...] = ()
    """Other nodes whose shims have started and not reported their end."""

    @property
    def is_forgotten(self) -> bool:
        return self.answers_without >= ANSWERS

    @property
    def is_over(self) -> bool:
        """True if Slurm has ended or forgotten the job."""
        return self.is_forgotten or (self.state is not None and self.state not in ACTIVE)

    @property
    def is_held(self) -> bool:
        """True if Slurm holds the job after a failed start, so that only a person can release it."""
        return self.state in WAITING and any(code in self.reason.replace("_", " ") for code in _HELD_BY_SLURM)

    @property
    def never_comes(self) -> bool:
        """True if Slurm reports the job as running but its shim must be lost, as after a crash of the node."""
        return self.state == "RUNNING" and self.running_for >= max(self.lease, _BEGINS_WITHIN)

    @property
    def is_quiet(self) -> bool:
        """True if a running shim would have sent a heartbeat by now."""
        return self.silent_for >= 3 * self.heartbeat + LAG and self.ended_for >= LAG


class Void(NamedTuple):
    """No shim has taken the attempt. If the worker takes it, none ever will, and this is the result."""

    result: AttemptResult


class Fence(NamedTuple):
    """A shim may still run somewhere. The worker orders it to stop, and concludes nothing yet."""

    reason: str


Conclusion = AttemptResult | Void | Fence | None
"""None: it waits, runs, or is undecided."""


def conclude(seen: Evidence) -> Conclusion:
    """The conclusion from the evidence."""
    if seen.owner is None:
        is_over = seen.is_held or seen.never_comes or (seen.is_over and seen.ended_for >= LAG)
        return Void(_never_began(seen)) if is_over else None
    if seen.owner.is_void:
        return _never_began(seen)
    if seen.result is not None or seen.status.state == "ended":
        if _may_run_elsewhere(seen):
            return Fence("Slurm has ended the job.") if seen.is_over and seen.state is not None else None
        return _after_end(seen)
    return _without_end(seen, seen.owner)


def _may_run_elsewhere(seen: Evidence) -> bool:
    """True if another node may still run its part after the first has ended: until Slurm has ended the job there, or
    its lease has expired."""
    if not seen.open_nodes or seen.silent_for >= seen.lease:
        return False
    return not seen.is_over or seen.state is None or seen.state in _CUT_OFF or not seen.is_quiet


def _without_end(seen: Evidence, owner: Owner) -> Conclusion:
    """Concludes from a record without an end: the shim runs, was killed, or is cut off."""
    if seen.state in WAITING and not seen.is_held:
        return None  # Slurm requeued it, and its next shim waits until the earlier one has ended
    slurm_says_how = seen.is_over and seen.state is not None and seen.state not in _CUT_OFF
    if slurm_says_how and seen.is_quiet:
        return _ended_by_slurm(seen, "its supervisor was killed")
    if seen.silent_for >= seen.lease:
        where = f" on {owner.host}" if owner.host else ""
        return _ended_by_slurm(seen, f"it gave no sign of life{where} for as long as its lease")
    if not seen.is_over:
        return None
    if seen.state is None:
        return None  # a shim with heartbeats keeps running: Slurm's answer may be wrong
    return Fence("Slurm has ended the job." if slurm_says_how else "Slurm has lost the node of the job.")


def _after_end(seen: Evidence) -> Conclusion:
    """Concludes from a record with an end. An interrupted run continues if Slurm restarts the job."""
    result = seen.result or result_of(seen.status, seen.requeue_at_limit)
    if seen.result is None and seen.nodes > 1 and result.outcome == "succeeded" and seen.state != "COMPLETED":
        # The reaper writes this end of the first node's command when its shim is killed, and knows no other node.
        result = AttemptResult("lost", None, "its supervisor was killed before the job had ended on all nodes")
    if seen.result is not None and seen.status.ending not in INTERRUPTED:
        return result
    # Without a result, the shim was killed, or is restarting the job with a smaller batch.
    if seen.is_over:
        if seen.status.ending in INTERRUPTED and seen.state is not None:
            return _ended_by_slurm(seen, result.reason)
        return result if seen.result is not None or seen.is_quiet or seen.is_forgotten else None
    if seen.is_held or (seen.state not in WAITING and seen.silent_for >= seen.lease):
        return result
    return None


def _ended_by_slurm(seen: Evidence, otherwise: str) -> AttemptResult:
    """The result of an attempt when the state of the Slurm job is the only evidence."""
    state = seen.state
    if state in {None, "FAILED"} and _OUT_OF_MEMORY.search(seen.printed):
        state = "OUT_OF_MEMORY"
    # A person's scancel signals the shim first. A controller after a crash kills forgotten jobs with the same state.
    if state == "CANCELLED" and (seen.by_mistake or seen.status.ending == "supervisor killed"):
        state = None
    found = _BY_STATE.get(state or "")
    if found is not None and found.cause == TIME_LIMIT and seen.requeue_at_limit:
        return AttemptResult("requeued", None, found.reason, TIME_LIMIT)
    return found or AttemptResult("lost", None, "its node failed" if seen.state in _CUT_OFF else otherwise)


def _never_began(seen: Evidence) -> AttemptResult:
    """The result of an attempt that no shim has taken."""
    if seen.state == "CANCELLED" and not seen.had_node and not seen.by_mistake:
        return AttemptResult("cancelled", None, "it was cancelled in Slurm before it began")
    if seen.state in {"DEADLINE", "TIMEOUT"}:
        return AttemptResult("failed", IDLE_EXIT_CODE, "Slurm ended it before it began: its time was over", TIME_LIMIT)
    if seen.is_held:
        why = "Slurm could not start it on its node, and held it"
    elif not seen.submitted:
        why = "it had not reached Slurm"
    elif seen.never_comes:
        why = "Slurm says that it runs, but it gives no sign of life on its node"
    elif seen.state in {None, "PREEMPTED", "CANCELLED"} or seen.state in _CUT_OFF:
        # A failed launch on a node also cancels the job.
        why = "Slurm ended it before it began"
    else:
        why = "Slurm started it, but Stoker did not run on the node"
        if seen.failed_starts + 1 >= _MOST_FAILED_STARTS:
            return AttemptResult("failed", 125, why, "start")
    return AttemptResult("requeued", None, why)
