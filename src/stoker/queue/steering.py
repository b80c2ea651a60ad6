"""What people do to jobs, and the words for it: the verbs of the command line, of the page and of the API."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stoker.errors import BadInputError
from stoker.queue.fields import FIELDS, State
from stoker.queue.model import Job, Place, Side
from stoker.queue.store import Store


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """One way to steer jobs."""

    name: str
    done: str
    """The participle: a job was not …"""
    effect: str = ""
    """What becomes of a job, if that is more than `done`."""
    effect_on_running: str = ""
    """The same for a running job, if that differs."""
    among: tuple[State, ...]
    """The states that a choice by tag, or of all, means."""
    obstacles: Mapping[State, str]
    """Why it cannot be done to a job in this state."""
    excluded: Mapping[str, str] = {}
    """Why it cannot be done to these jobs, by their ids."""
    objection: Callable[[Job], str | None] = lambda _job: None
    """Why it cannot be done to a job in any state, by the job's fields."""
    apply: Callable[[Store, list[str]], dict[str, str]]
    """Does it in one transaction; what became of each job that was changed."""

    def obstacle(self, job: Job, now: float) -> str | None:
        """Why it cannot be done to this job at this time; None when it can."""
        if self.name == "retry" and job.state == "queued" and job.not_before > now:
            return None  # it waits for its back-off
        return self.excluded.get(job.id) or self.obstacles.get(job.state) or self.objection(job)

    def expected(self, job: Job) -> str:
        """What becomes of a job to which it can be done."""
        return (job.state == "running" and self.effect_on_running) or self.effect or self.done


def why_not_any_more(store: Store, name: str, verb: Verb) -> str:
    """The reason after somebody else was faster: what the job is now."""
    try:
        return verb.obstacle(store.jobs.get(name), store.clock()) or "somebody else has just changed it"
    except BadInputError:
        return "it has just been deleted"


def moving(place: Place) -> Verb:
    """Among the waiting jobs of the same priority."""
    return _move(f"moved {place}", lambda store, ids: store.jobs.move(ids, place))


def moving_beside(neighbour: str, side: Side) -> Verb:
    """To another waiting job, whose priority it takes."""
    return _move(f"moved {side} {neighbour}", lambda store, ids: store.jobs.move_beside(ids, neighbour, side))


def _move(effect: str, move: Callable[[Store, list[str]], list[str]]) -> Verb:
    return Verb(
        name="move",
        done="moved",
        effect=effect,
        among=("queued", "held"),
        obstacles={**_HAS_ENDED, "running": "it is running"},
        apply=lambda store, ids: dict.fromkeys(move(store, ids), effect),
    )


def tagging(tag: str, *, remove: bool = False) -> Verb:
    """Adds a tag to jobs in any state, or removes it."""
    FIELDS["tags"].kind.check((tag,))
    done = f"without the tag {tag}" if remove else f"tagged {tag}"
    same = "it does not have this tag" if remove else "it has this tag already"
    return Verb(
        name="untag" if remove else "tag",
        done=done,
        among=("queued", "held", "running", "succeeded", "failed", "cancelled"),
        obstacles={},
        objection=lambda job: same if (tag in job.tags) is not remove else None,
        apply=lambda store, ids: dict.fromkeys(store.jobs.tag(ids, tag, remove=remove), done),
    )


def _cancel(store: Store, ids: list[str]) -> dict[str, str]:
    did = store.jobs.cancel(ids)
    return dict.fromkeys(did.cancelled, "cancelled") | dict.fromkeys(did.asked, "asked to stop")


_HAS_ENDED: Final[Mapping[State, str]] = {
    "succeeded": "it has already succeeded",
    "failed": "it has already failed",
    "cancelled": "it is already cancelled",
}

CANCEL: Final = Verb(
    name="cancel",
    done="cancelled",
    effect_on_running="asked to stop",
    among=("queued", "held", "running"),
    obstacles=_HAS_ENDED,
    apply=_cancel,
)

RETRY: Final = Verb(
    name="retry",
    done="queued again",
    # Retrying a whole sweep means the jobs that went wrong, not the days of GPU time that went well.
    among=("failed", "cancelled"),
    obstacles={
        "running": "it is running",
        "held": "it is held (`stoker release` lets it start)",
        "queued": "it waits in the queue already",
    },
    apply=lambda store, ids: dict.fromkeys(store.jobs.retry(ids), "queued again"),
)

# The undo of cancelling a held job: queued again, it could start before it is held.
REINSTATE: Final = Verb(
    name="reinstate",
    done="held again",
    among=("cancelled",),
    obstacles=dict.fromkeys(("queued", "held", "running", "succeeded", "failed"), "it is not cancelled"),
    apply=lambda store, ids: dict.fromkeys(store.jobs.reinstate(ids), "held again"),
)

HOLD: Final = Verb(
    name="hold",
    done="held",
    among=("queued",),
    obstacles={
        **_HAS_ENDED,
        "held": "it is held already",
        "running": "it is running (`stoker cancel` stops it)",
    },
    apply=lambda store, ids: dict.fromkeys(store.jobs.hold(ids), "held"),
)

RELEASE: Final = Verb(
    name="release",
    done="released",
    among=("held",),
    obstacles={**_HAS_ENDED, "queued": "it is not held", "running": "it is not held, it is running"},
    apply=lambda store, ids: dict.fromkeys(store.jobs.release(ids), "released"),
)


def already(paused: bool) -> str:
    """Why there is nothing to pause, or to resume."""
    return "it is paused already" if paused else "it was not paused"
