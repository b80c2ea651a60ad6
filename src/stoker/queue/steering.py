"""Operations of people on jobs, with their wording: the verbs of the command line, the page and the API."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stoker.errors import BadInputError
from stoker.queue.fields import FIELDS, State
from stoker.queue.model import Job, Place, Side
from stoker.queue.store import Store


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """An operation on jobs."""

    name: str
    done: str
    """The past participle."""
    effect: str = ""
    """The effect on a job, if `done` does not say it all."""
    effect_on_running: str = ""
    """The effect on a running job, if that differs."""
    among: tuple[State, ...]
    """The states that a selection by tag, or of all jobs, includes."""
    obstacles: Mapping[State, str]
    """Why it is impossible in these states."""
    excluded: Mapping[str, str] = {}
    """Why it is impossible for these jobs, by id."""
    objection: Callable[[Job], str | None] = lambda _job: None
    """Why it is impossible for a job because of its fields, in any state."""
    apply: Callable[[Store, list[str]], dict[str, str]]
    """Performs it in one transaction. Returns the effect on each changed job."""

    def obstacle(self, job: Job, now: float) -> str | None:
        """Why it is impossible for this job now; None if it is possible."""
        if self.name == "retry" and job.state == "queued" and job.not_before > now:
            return None  # ends the backoff
        return self.excluded.get(job.id) or self.obstacles.get(job.state) or self.objection(job)

    def expected(self, job: Job) -> str:
        """The effect on a job."""
        return (job.state == "running" and self.effect_on_running) or self.effect or self.done


def why_not_any_more(store: Store, name: str, verb: Verb) -> str:
    """The reason of a lost race: the job's new state."""
    try:
        return verb.obstacle(store.jobs.get(name), store.clock()) or "somebody else has just changed it"
    except BadInputError:
        return "it has just been deleted"


def moving(place: Place) -> Verb:
    """Moves waiting jobs within their priority."""
    return _move(f"moved {place}", lambda store, ids: store.jobs.move(ids, place))


def moving_beside(neighbour: str, side: Side) -> Verb:
    """Moves jobs next to another waiting job, with its priority."""
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
    """Adds or removes a tag of jobs in any state."""
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
    # Retrying a whole sweep means its failed jobs, not days of successful GPU time.
    among=("failed", "cancelled"),
    obstacles={
        "running": "it is running",
        "held": "it is held (`stoker release` lets it start)",
        "queued": "it waits in the queue already",
    },
    apply=lambda store, ids: dict.fromkeys(store.jobs.retry(ids), "queued again"),
)

# The undo of cancelling a held job. If it were queued and then held, it could start in between.
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
    """Why there is nothing to pause or resume."""
    return "it is paused already" if paused else "it was not paused"
