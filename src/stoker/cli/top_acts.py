"""What the keys of `stoker top` do to a job or the queue: each gives the sentence that tells the result."""

from typing import TYPE_CHECKING, Final

from stoker.errors import BadInputError, StokerError
from stoker.queue.explanation import clock_time
from stoker.queue.provenance import login_name
from stoker.queue.steering import CANCEL, HOLD, RELEASE, RETRY, Verb, label, moving, why_not_any_more
from stoker.status.job_text import on_one_line
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.queue import Store

# Long enough for a validation or a meal; who needs longer has `stoker snooze`.
SNOOZE_SECONDS: Final = 1800.0

VERBS: Final[dict[str, Verb]] = {"c": CANCEL, "r": RETRY, "u": moving("up"), "d": moving("down")}


def act(store: "Store", key: str, job: str) -> str:
    """Does to a job what the key stands for."""
    try:
        if key == "s":
            return _snooze(store, job)
        if key == "h":
            return _steer(store, RELEASE if store.job(job).state == "held" else HOLD, job)
        return _steer(store, VERBS[key], job)
    except StokerError as error:
        return on_one_line(f"nothing was done: {error}")


def turn_queue(store: "Store") -> str:
    """Pauses it, or lets it go on."""
    try:
        if store.paused():
            store.resume()
            return "the queue goes on"
        store.pause()
    except StokerError as error:
        return on_one_line(f"nothing was done: {error}")
    return "the queue is paused: nothing more is started, and what runs goes on; p lets it go on"


def _steer(store: "Store", verb: Verb, name: str) -> str:
    job = store.job(name)
    called = on_one_line(label(job.id, job.name))
    obstacle = verb.obstacle(job, store.clock())
    if obstacle is None:
        if became := verb.apply(store, [job.id]).get(job.id):
            return f"{called}: {became}"
        obstacle = why_not_any_more(store, job.id, verb)
    return f"{called} was not {verb.done}: {obstacle}"


def _snooze(store: "Store", name: str) -> str:
    job = store.job(name)
    if job.state != "running" or job.attempt is None:
        raise BadInputError("only a job that runs can be left alone")
    called = on_one_line(label(job.id, job.name))
    if not store.snooze(job.attempt, SNOOZE_SECONDS, login_name()):
        return f"{called} has just ended"
    now = store.clock()
    return (
        f"{called} is left alone for {format_duration(SNOOZE_SECONDS)}, until {clock_time(now + SNOOZE_SECONDS, now)}"
    )
