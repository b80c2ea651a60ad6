"""What people do to jobs, and the words for it: the verbs of the command line, of the page and of the API."""

from collections.abc import Callable
from typing import Final

import msgspec

from stoker.errors import BadInputError
from stoker.queue.fields import State
from stoker.queue.model import Job, Place, Side
from stoker.queue.store import Store


class Verb(msgspec.Struct, frozen=True):
    """One way to steer jobs."""

    name: str
    done: str
    """The participle: a job was not …"""
    among: tuple[State, ...]
    """The states that a choice by tag, or of all, means."""
    obstacle: Callable[[Job, float], str | None]
    """Why it cannot be done to this job at this time; None when it can."""
    expected: Callable[[Job], str]
    """What becomes of a job to which it can be done."""
    apply: Callable[[Store, list[str]], dict[str, str]]
    """Does it in one transaction; what became of each job that was changed."""


def label(name: str, called: str) -> str:
    """A job's id with what people call it."""
    return f"{name} ({called})" if called else name


def it_ended(job: Job) -> str | None:
    """That it has ended, as a reason; None when it has not."""
    match job.state:
        case "succeeded" | "failed":
            return f"it has already {job.state}"
        case "cancelled":
            return "it is already cancelled"
    return None


def why_not_any_more(store: Store, name: str, verb: Verb) -> str:
    """Somebody was faster: the reason is what the job is now."""
    try:
        return verb.obstacle(store.jobs.get(name), store.clock()) or "somebody else has just changed it"
    except BadInputError:
        return "it has just been forgotten"


def moving(place: Place) -> Verb:
    """Among the jobs of the same priority that wait."""
    return _move(f"moved {place}", lambda store, ids: store.jobs.move(ids, place))


def moving_beside(neighbour: str, side: Side) -> Verb:
    """To another job that waits, whose priority it takes."""
    return _move(f"moved {side} {neighbour}", lambda store, ids: store.jobs.move_beside(ids, neighbour, side))


def _move(words: str, move: Callable[[Store, list[str]], list[str]]) -> Verb:
    return Verb(
        name="move",
        done="moved",
        among=("queued", "held"),
        obstacle=lambda job, _now: "it is running" if job.state == "running" else it_ended(job),
        expected=lambda _job: words,
        apply=lambda store, ids: dict.fromkeys(move(store, ids), words),
    )


def _cancelled(store: Store, ids: list[str]) -> dict[str, str]:
    did = store.jobs.cancel(ids)
    return dict.fromkeys(did.cancelled, "cancelled") | dict.fromkeys(did.asked, "asked to stop")


def _why_no_retry(job: Job, now: float) -> str | None:
    match job.state:
        case "running":
            return "it is running"
        case "held":
            return "it is held (`stoker release` lets it start)"
        case "queued" if job.not_before <= now:
            return "it waits in the queue already"
    return None


def _why_no_hold(job: Job, _now: float) -> str | None:
    match job.state:
        case "held":
            return "it is held already"
        case "running":
            return "it is running (`stoker cancel` stops it)"
    return it_ended(job)


def _why_no_release(job: Job, _now: float) -> str | None:
    match job.state:
        case "queued":
            return "it is not held"
        case "running":
            return "it is not held, it is running"
    return it_ended(job)


CANCEL: Final = Verb(
    name="cancel",
    done="cancelled",
    among=("queued", "held", "running"),
    obstacle=lambda job, _now: it_ended(job),
    expected=lambda job: "asked to stop" if job.state == "running" else "cancelled",
    apply=_cancelled,
)

RETRY: Final = Verb(
    name="retry",
    done="queued again",
    # Retrying a whole sweep means the jobs that went wrong, not the days of GPU time that went well.
    among=("failed", "cancelled"),
    obstacle=_why_no_retry,
    expected=lambda _job: "queued again",
    apply=lambda store, ids: dict.fromkeys(store.jobs.retry(ids), "queued again"),
)

# How the cancelling of a job that was held is taken back: queued again, it could start before it is held.
REINSTATE: Final = Verb(
    name="reinstate",
    done="held again",
    among=("cancelled",),
    obstacle=lambda job, _now: None if job.state == "cancelled" else "it is not cancelled",
    expected=lambda _job: "held again",
    apply=lambda store, ids: dict.fromkeys(store.jobs.reinstate(ids), "held again"),
)

HOLD: Final = Verb(
    name="hold",
    done="held",
    among=("queued",),
    obstacle=_why_no_hold,
    expected=lambda _job: "held",
    apply=lambda store, ids: dict.fromkeys(store.jobs.hold(ids), "held"),
)

RELEASE: Final = Verb(
    name="release",
    done="released",
    among=("held",),
    obstacle=_why_no_release,
    expected=lambda _job: "released",
    apply=lambda store, ids: dict.fromkeys(store.jobs.release(ids), "released"),
)


def already(paused: bool) -> str:
    """Why there is nothing to pause, or to resume."""
    return "it is paused already" if paused else "it was not paused"
