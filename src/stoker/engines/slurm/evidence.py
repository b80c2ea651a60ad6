"""What became of an attempt, from what Slurm says and what its directory shows. Pure: no clock and no I/O.

Each of the two witnesses may be away, late or wrong for a while:

- Slurm forgets jobs minutes after their end, restarts, times out, and reports a node as failed whose processes go on.
- The directory shows nothing of a job that still waits, and nothing more of one whose node is cut off.

An attempt has ended when its shim says so. It is lost only when both agree, or after a silence as long as the lease:
by then the shim has stopped the job by itself.
"""

import re
from typing import Final, NamedTuple

from stoker.engines.attempt import TIME_LIMIT, AttemptResult, result_of
from stoker.engines.slurm.record import INTERRUPTED, Owner
from stoker.runs.plan import IDLE_EXIT_CODE
from stoker.runs.record import Status

# Requeued jobs, too: Slurm starts them again.
WAITING: Final = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
ACTIVE: Final = WAITING | {
    "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT",
}  # fmt: skip
# Why Slurm holds a job that it could not start, in the words of its versions. What a person holds is left alone.
_HELD_BY_SLURM: Final = ("launch failed requeued held", "retrieval failed requeued held", "JobHoldMaxRequeue")
# The controller has lost the node: what ran there may still run.
_CUT_OFF: Final = frozenset({"NODE_FAIL", "BOOT_FAIL"})
# A network file system shows changes this late.
LAG: Final = 10.0
# Answers of Slurm in a row without a job that it should know: a single one proves nothing.
ANSWERS: Final = 2
# From Slurm's start of a job to the first sign of its shim, where the file system is slow.
_BEGINS_WITHIN: Final = 30.0
# A job that ends this often before its shim begins is at fault itself.
_MOST_FAILED_STARTS: Final = 3

# What the node's slurmstepd prints into the job's output, also where the state of the job does not say it.
_OUT_OF_MEMORY: Final = re.compile(r"slurmstepd\S*: error: .*(exceeded.* memory limit|oom[-_ ]kill)", re.IGNORECASE)
_TOO_LONG: Final = AttemptResult("failed", IDLE_EXIT_CODE, "it had run for as long as Slurm allows", TIME_LIMIT)
# The result of a job that Slurm ended in this state.
_BY_STATE: Final = {
    "CANCELLED": AttemptResult("cancelled", None, "it was cancelled in Slurm"),
    "PREEMPTED": AttemptResult("preempted", None, "Slurm needed its place for another job"),
    "TIMEOUT": _TOO_LONG,
    "DEADLINE": _TOO_LONG,
    "OUT_OF_MEMORY": AttemptResult("failed", 137, "Slurm killed it: it used more RAM than it had asked for", "oom"),
    # The shim ends with the code of the job, also when the disk does not take its result.
    "COMPLETED": AttemptResult("succeeded", 0, ""),
}


class Evidence(NamedTuple):
    """All that is known of an attempt now."""

    status: Status
    result: AttemptResult | None
    """As its shim wrote it."""
    owner: Owner | None
    state: str | None
    """Slurm's state of the job; None when it did not answer, or does not know the job."""
    reason: str = ""
    """Slurm's code for why the job waits."""
    had_node: bool = False
    """Whether Slurm has started the job on a node."""
    by_mistake: bool = False
    """Whether the worker has cancelled another attempt's job with the same id, and may have met this one."""
    answers_without: int = 0
    """Complete answers of Slurm in a row without the job."""
    submitted: bool = True
    """Whether Slurm ever had the job."""
    silent_for: float = 0.0
    """Seconds since the shim, or that of another node of the job, last gave a sign of life."""
    ended_for: float = 0.0
    """Seconds since Slurm first reported the end of the job, or did not know it."""
    running_for: float = 0.0
    """Seconds since Slurm first said that the job runs."""
    failed_starts: int = 0
    """Attempts at the same job directly before this one that Slurm had, and that no shim began."""
    lease: float = 600.0
    heartbeat: float = 10.0
    printed: str = ""
    """The last of what Slurm, or the shim itself, printed."""
    requeue_at_limit: bool = False
    """Whether it goes back to the queue when its time is over."""
    open_nodes: tuple[str, ...] = ()
    """Other nodes of the job whose shims have begun and not written an end."""

    @property
    def is_forgotten(self) -> bool:
        return self.answers_without >= ANSWERS

    @property
    def is_over(self) -> bool:
        """Whether Slurm has ended the job, or does not know it any more."""
        return self.is_forgotten or (self.state is not None and self.state not in ACTIVE)

    @property
    def is_held(self) -> bool:
        """Whether Slurm itself will never start the job again, and only a person could release it."""
        return self.state in WAITING and any(code in self.reason.replace("_", " ") for code in _HELD_BY_SLURM)

    @property
    def never_comes(self) -> bool:
        """Whether the shim of a job that runs, as Slurm says, must have been lost: its node crashed meanwhile."""
        return self.state == "RUNNING" and self.running_for >= max(self.lease, _BEGINS_WITHIN)

    @property
    def is_quiet(self) -> bool:
        """Whether a shim that still ran would have given a sign of life."""
        return self.silent_for >= 3 * self.heartbeat + LAG and self.ended_for >= LAG


class Void(NamedTuple):
    """No shim has begun. If the worker gets hold of the attempt, none ever will, and this is the result."""

    result: AttemptResult


class Fence(NamedTuple):
    """A shim may still run somewhere: it is ordered to stop, and nothing is concluded yet."""

    reason: str


Conclusion = AttemptResult | Void | Fence | None
"""None: it waits, runs, or cannot be judged now."""


def conclude(seen: Evidence) -> Conclusion:
    """What follows from the evidence."""
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
    """Whether another node may still run its part, although the first has ended: until Slurm has ended the job there,
    or the other's own lease is over."""
    if not seen.open_nodes or seen.silent_for >= seen.lease:
        return False
    return not seen.is_over or seen.state is None or seen.state in _CUT_OFF or not seen.is_quiet


def _without_end(seen: Evidence, owner: Owner) -> Conclusion:
    """The record has no end: the shim works, was killed, or is cut off."""
    if seen.state in WAITING and not seen.is_held:
        return None  # it was requeued, and its next shim waits until the earlier one is gone
    slurm_says_how = seen.is_over and seen.state is not None and seen.state not in _CUT_OFF
    if slurm_says_how and seen.is_quiet:
        return _ended_by_slurm(seen, "its supervisor was killed")
    if seen.silent_for >= seen.lease:
        where = f" on {owner.host}" if owner.host else ""
        return _ended_by_slurm(seen, f"it gave no sign of life{where} for as long as its lease")
    if not seen.is_over:
        return None
    if seen.state is None:
        return None  # a shim that gives signs of life goes on: Slurm's answer may be wrong, and its end says more
    return Fence("Slurm has ended the job." if slurm_says_how else "Slurm has lost the node of the job.")


def _after_end(seen: Evidence) -> Conclusion:
    """The record has an end. A run that was interrupted goes on if Slurm starts the job again."""
    result = seen.result or result_of(seen.status, seen.requeue_at_limit)
    if seen.result is not None and seen.status.ending not in INTERRUPTED:
        return result
    # Without a result, the shim may start the job again with a smaller batch, or was killed.
    if seen.is_over:
        if seen.status.ending in INTERRUPTED and seen.state is not None:
            return _ended_by_slurm(seen, result.reason)
        return result if seen.result is not None or seen.is_quiet or seen.is_forgotten else None
    if seen.is_held or (seen.state not in WAITING and seen.silent_for >= seen.lease):
        return result
    return None


def _ended_by_slurm(seen: Evidence, otherwise: str) -> AttemptResult:
    """The result of an attempt whose job ended in this state, with no other sign of how."""
    state = seen.state
    if state in {None, "FAILED"} and _OUT_OF_MEMORY.search(seen.printed):
        state = "OUT_OF_MEMORY"
    # A person's scancel asks the shim first. A controller that crashed kills what it has forgotten, and says the same.
    if state == "CANCELLED" and (seen.by_mistake or seen.status.ending == "supervisor killed"):
        state = None
    found = _BY_STATE.get(state or "")
    if found is not None and found.cause == TIME_LIMIT and seen.requeue_at_limit:
        return AttemptResult("requeued", None, found.reason, TIME_LIMIT)
    return found or AttemptResult("lost", None, "its node failed" if seen.state in _CUT_OFF else otherwise)


def _never_began(seen: Evidence) -> AttemptResult:
    """The result of an attempt that no shim has begun."""
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
        # A node that cannot launch a job cancels it, too.
        why = "Slurm ended it before it began"
    else:
        why = "Slurm started it, but Stoker did not run on the node"
        if seen.failed_starts + 1 >= _MOST_FAILED_STARTS:
            return AttemptResult("failed", 125, why, "start")
    return AttemptResult("requeued", None, why)
