"""Finds the events between two states of the queue. Pure."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Final, Literal
from urllib.parse import urlencode

import msgspec

from stoker.actions.notify import Tone
from stoker.actions.subscription import parse_subscription
from stoker.queue.explanation import spoken
from stoker.queue.groups import Group
from stoker.queue.model import HEARD_WITHIN, Attempt, AttemptDetails, Job, NotifyUrl, Worker, WorkerGpu
from stoker.rules.rule import RuleWarning
from stoker.status.job_text import one_line, quoted_label, short_label
from stoker.status.machines import worker_home
from stoker.units import capitalized

EventKind = Literal[
    "failed",
    "stopped",
    "warned",
    "succeeded",
    "cancelled",
    "group-done",
    "queue-empty",
    "gpu-unknown",
    "gpu-quarantined",
    "worker-gone",
]
Turn = Literal["happened", "began", "over"]

# Older events are not reported, for example after a long outage.
MAX_AGE: Final = 3600.0
# The cause is written shortly after the outcome.
CAUSE_WITHIN: Final = 2.0
# After a longer gap, heartbeats were missed: no worker counts as lost until new ones could have arrived.
MAX_GAP: Final = 30.0
_MAX_NAME: Final = 80
_MAX_REASON: Final = 500
_MAX_JOBS: Final = 3

# The subject of a lasting condition: a GPU by host and uuid, or a worker.
_Subject = tuple[str, str]
# The events of each word of `--notify`. A final stop by a rule is also a failure. Cancelled jobs are reported only
# here.
_KINDS_OF: Final[Mapping[str, frozenset[EventKind]]] = {
    "end": frozenset({"failed", "succeeded", "cancelled"}),
    "failed": frozenset({"failed"}),
    "succeeded": frozenset({"succeeded"}),
    "stopped": frozenset({"stopped"}),
    "warned": frozenset({"warned"}),
    "done": frozenset({"group-done"}),
}
_ALL_GPUS: Final = "*"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    kind: EventKind
    key: str
    """Identical in every process."""
    name: str
    """Its subject, for a list."""
    message: str
    path: str = "/"
    """The path of the page with details."""
    hint: str = "stoker top"
    """The command that shows details."""
    turn: Turn = "happened"
    """`began` and `over` for a lasting condition, each sent once."""
    tone: Tone | None = None
    """The tone, if it differs within the kind of event."""
    at: float = math.inf
    """When it happened, by the database's clock; infinite for current conditions."""
    wanted: tuple[str, ...] = ()
    """The `--notify` entries of its job or group."""
    to: str = ""
    """The recipient's URL, a secret; empty for the URLs of `[notify]`."""

    def __repr__(self) -> str:
        return f"<Event {self.kind} {self.name!r} {self.turn}{' to one URL' if self.to else ''}>"


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the queue from which events are derived."""

    now: float
    """By the database's clock."""
    ended: Sequence[Job] = ()
    """Recent failures, successes if reported, and the last ended job, newest first."""
    done: Sequence[tuple[Group, float]] = ()
    """Groups whose last job has recently ended, with the time."""
    retried: Mapping[str, Job] = {}
    """Jobs that are retried, by the attempt that has ended."""
    causes: Mapping[str, AttemptDetails] = {}
    """Causes of ended attempts, if known."""
    unfinished: bool = True
    """Whether any job runs, waits or is held."""
    workers: Sequence[Worker] = ()
    running: Sequence[tuple[Attempt, Job]] = ()
    urls: Sequence[NotifyUrl] = ()
    """URLs from the page, with their events."""


class EventDetector:
    """Compares each state with the previous ones."""

    def __init__(self, kinds: Collection[str], unknown_after: float, urls: Collection[str] = ()) -> None:
        """`urls` and `kinds`: those of `[notify]`."""
        self._kinds = frozenset(kinds)
        self._urls = frozenset(urls)
        self._unknown_after = unknown_after
        self._seen: dict[str, float] = {}
        self._emptied_at = 0.0
        self._watching_since = 0.0
        self._polled: float | None = None
        self._unknown: dict[_Subject, float] = {}
        """The start, by the first state that shows it: clocks of workers may be wrong."""
        self._ok: set[_Subject] = set()
        self._reported: set[_Subject] = set()
        """Conditions reported as begun."""

    def detect(self, state: QueueState) -> list[Event]:
        """The events since the previous state; of the first state, those of the last hour."""
        if self._polled is None or state.now - self._polled > MAX_GAP:
            self._watching_since = state.now
        self._polled = state.now
        others = [
            *(_done(group, ended) for group, ended in state.done),
            *_warnings(state),
            *self._queue_empty(state),
            *self._gpus(state),
            *self._quarantines(state),
            *self._workers(state),
        ]
        found = [*self._jobs(state), *((event,) for event in others)]
        addressed = [event for alternatives in found for event in self._addressed(alternatives, state.urls)]
        fresh = [event for event in addressed if event.key not in self._seen]
        self._seen |= {event.key: state.now for event in fresh if event.turn == "happened"}
        # Twice as long as an event can be found in the queue.
        self._seen = {key: at for key, at in self._seen.items() if state.now - at < 2 * MAX_AGE}
        return fresh

    def _addressed(self, alternatives: Sequence[Event], urls: Sequence[NotifyUrl]) -> Iterator[Event]:
        """The event for the URLs of `[notify]` and for each other subscribed URL. `alternatives` are kinds of the same
        event, the most specific first.
        """
        first, kinds = alternatives[0], {event.kind for event in alternatives}
        wanted = [parse_subscription(entry) for entry in first.wanted]
        wishes = [one for one in wanted if kinds & _KINDS_OF[one.when]]
        for_all = any(not one.url for one in wishes)
        general = _first_of(alternatives, self._kinds) or (first if for_all and self._urls else None)
        if general is not None:
            yield general
        others = {
            one.url: event
            for one in urls
            if first.at > one.added and (event := _first_of(alternatives, one.events) or (first if for_all else None))
        } | {one.url: first for one in wishes if one.url}
        for url, event in others.items():
            if general is None or url not in self._urls:
                # A separate key: processes with other settings of [notify] may have sent the event elsewhere.
                key = f"{event.key}>{sha256(url.encode()).hexdigest()[:16]}"
                yield msgspec.structs.replace(event, to=url, key=key)

    # Jobs

    def _jobs(self, state: QueueState) -> Iterator[tuple[Event, ...]]:
        for job in reversed(state.ended):
            if job.ended is None or state.now - job.ended > MAX_AGE:
                continue
            if job.state in ("succeeded", "cancelled"):
                what = "succeeded" if job.state == "succeeded" else "was cancelled"
                yield (_ended(job.state, job, _attempt(job), f"Job {_name(job)} {what}."),)
            if job.state != "failed" or awaits_cause(job, state):
                continue
            if _is_by_rule(state, _attempt(job)):
                yield _stopped(job, _attempt(job)), _failed(job)
            else:
                yield (_failed(job),)
        for attempt, job in state.retried.items():
            if _is_by_rule(state, attempt):
                yield (_stopped(job, attempt),)

    def _queue_empty(self, state: QueueState) -> Iterator[Event]:
        last = max(state.ended, key=lambda job: job.ended or 0.0, default=None)
        ended = last.ended if last is not None and last.ended is not None else 0.0
        if last is None or state.unfinished or ended <= self._emptied_at or state.now - ended > MAX_AGE:
            return
        self._emptied_at = ended
        what = "was cancelled" if last.state == "cancelled" else last.state
        yield Event(
            kind="queue-empty",
            key=f"queue-empty:{_attempt(last)}:{ended:.0f}",
            name="the queue",
            message=f"The queue is empty: the last job to end was {_name(last)}, which {what}.",
            hint="stoker list",
        )

    # Lasting conditions

    def _gpus(self, state: QueueState) -> Iterator[Event]:
        workers = live_workers(state)
        found = _gpus_of(workers)
        for worker in workers:
            if worker.view.absent and (worker.host, _ALL_GPUS) not in found:
                self._unknown.pop((worker.host, _ALL_GPUS), None)
        for subject, (worker, gpu) in found.items():
            if gpu is not None and gpu.quarantine:
                continue  # reported as such
            if _is_unknown(worker, gpu):
                self._ok.discard(subject)
                since = self._unknown.setdefault(subject, state.now)
                if subject not in self._reported and state.now - since >= self._unknown_after:
                    self._reported.add(subject)
                    yield _unreadable(subject, worker, gpu, state.now - since)
            else:
                self._unknown.pop(subject, None)
                if self._recovered(subject):
                    yield _gpu_event(subject, "over", worker, gpu, "can be read again")

    def _quarantines(self, state: QueueState) -> Iterator[Event]:
        for (host, uuid), (worker, gpu) in _gpus_of(live_workers(state)).items():
            if gpu is None:
                continue
            subject = (host, f"quarantine of {uuid}")
            if not gpu.quarantine:
                if self._recovered(subject):
                    yield _quarantine_event(worker, gpu, "over", "is in rotation again")
                continue
            self._ok.discard(subject)
            if subject not in self._reported:
                self._reported.add(subject)
                yield _quarantine_event(worker, gpu, "began", f"is out of rotation{_reason(gpu.quarantine)}")

    def _workers(self, state: QueueState) -> Iterator[Event]:
        for worker in state.workers:
            subject = (worker.id, "")
            silent = state.now - worker.seen
            if worker.is_there(state.now):
                if self._recovered(subject):
                    yield _worker_event(worker, "over", "is back.")
                continue
            self._ok.discard(subject)
            watched = state.now - self._watching_since > HEARD_WITHIN
            if watched and silent <= MAX_AGE and subject not in self._reported and not _has_left(worker, state):
                self._reported.add(subject)
                jobs = [job for attempt, job in state.running if attempt.worker == worker.id]
                yield _lost(worker, silent, jobs)

    def _recovered(self, subject: _Subject) -> bool:
        """Whether the condition may be over; also in the first state, because another process may have reported it."""
        if subject in self._ok:
            return False
        self._ok.add(subject)
        self._reported.discard(subject)
        return True


def _warnings(state: QueueState) -> Iterator[Event]:
    views = {worker.id: worker.view for worker in live_workers(state)}
    for attempt, job in state.running:
        warning = views[attempt.worker].warnings.get(attempt.id) if attempt.worker in views else None
        if warning is not None:
            yield _warned(job, attempt, warning, state.now)


def _first_of(alternatives: Sequence[Event], kinds: Collection[str]) -> Event | None:
    return next((event for event in alternatives if event.kind in kinds), None)


def _is_by_rule(state: QueueState, attempt: str) -> bool:
    cause = state.causes.get(attempt)
    return cause is not None and bool(cause.rule)


def awaits_cause(job: Job, state: QueueState) -> bool:
    """Whether the cause of the failure may still arrive."""
    known = job.state != "failed" or job.ended is None or state.causes.get(_attempt(job))
    return not known and state.now - (job.ended or 0.0) < CAUSE_WITHIN


def live_workers(state: QueueState) -> list[Worker]:
    return [worker for worker in state.workers if worker.is_there(state.now)]


def _has_left(worker: Worker, state: QueueState) -> bool:
    """Whether the worker stopped regularly, or was restarted."""
    home = (worker.host, worker_home(worker.id))
    return worker.view.left or any(
        (other.host, worker_home(other.id)) == home and other.started >= worker.seen for other in live_workers(state)
    )


def _gpus_of(workers: Sequence[Worker]) -> dict[_Subject, tuple[Worker, WorkerGpu | None]]:
    """Each GPU with the worker that reports it, preferably one that can read it. None means all GPUs of a machine."""
    found: dict[_Subject, tuple[Worker, WorkerGpu | None]] = {}
    for worker in workers:
        for gpu in worker.view.gpus if worker.view.absent else (None, *worker.view.gpus):
            subject = (worker.host, gpu.uuid if gpu is not None else _ALL_GPUS)
            if subject not in found or _is_unknown(*found[subject]):
                found[subject] = (worker, gpu)
    return found


def _is_unknown(worker: Worker, gpu: WorkerGpu | None) -> bool:
    if gpu is not None:
        return gpu.state == "unknown" or gpu.unread_since is not None
    return worker.view.problem is not None and not worker.view.gpus


# Texts


def _failed(job: Job) -> Event:
    code = f" with exit code {job.exit_code}" if job.exit_code else ""
    return _ended("failed", job, _attempt(job), f"Job {_name(job)} failed{code}{_reason(job.reason)}.")


def _stopped(job: Job, attempt: str) -> Event:
    again = "" if job.state == "failed" else " It will be tried again."
    return _ended("stopped", job, attempt, f"Job {_name(job)} was stopped{_reason(job.reason)}.{again}")


def _warned(job: Job, attempt: Attempt, warning: RuleWarning, now: float) -> Event:
    ahead = ""
    # A rule that never acts may repeat its warning about a job: report it once.
    key = f"warned:{attempt.id}:{warning.rule}"
    if warning.acts_at is not None:
        ahead = f" It is stopped in {spoken(warning.acts_at - now)}, unless it works or is snoozed."
        key = f"{key}:{warning.at:.0f}"
    return Event(
        kind="warned",
        key=key,
        name=short_label(job, _MAX_NAME),
        message=f"Job {_name(job)} {warning.word}{_reason(warning.reason)}.{ahead}",
        path=f"/jobs/{job.id}",
        hint=f"stoker show {job.id}",
        wanted=job.notify,
    )


def _ended(kind: EventKind, job: Job, attempt: str, message: str) -> Event:
    return Event(
        kind=kind,
        # One key for both kinds: the stop by a rule may become known after the failure was reported.
        key=f"ended:{attempt}",
        name=short_label(job, _MAX_NAME),
        message=message,
        path=f"/jobs/{job.id}",
        hint=f"stoker show {job.id}",
        at=math.inf if job.ended is None else job.ended,
        wanted=job.notify,
    )


def _done(group: Group, ended: float) -> Event:
    counts = [(state, group.counts.get(state, 0)) for state in ("succeeded", "failed", "cancelled")]
    told = ", ".join(f"{number} {state}" for state, number in counts if number)
    name = one_line(group.name)[:_MAX_NAME]
    return Event(
        kind="group-done",
        # When a group is done again after a retry, that is a new event.
        key=f"group-done:{group.name}:{ended:.3f}",
        name=name,
        message=f"All {group.total} jobs of {name} have ended: {told}.",
        path=f"/jobs?{urlencode({'q': f'group:{_quoted(group.name)}'})}",
        hint=f"stoker show '{name}'",
        at=ended,
        wanted=group.notify,
        tone="failure" if group.counts.get("failed") else "warning" if group.counts.get("cancelled") else "success",
    )


def _quoted(name: str) -> str:
    """As a search takes it."""
    return '"{}"'.format(name.replace('"', ""))


def _gpu_event(subject: _Subject, turn: Turn, worker: Worker, gpu: WorkerGpu | None, what: str) -> Event:
    name = f"{f'GPU {gpu.index}' if gpu is not None else 'all GPUs'} of {one_line(worker.host)}"
    key = f"gpu-unknown:{subject[0]}:{subject[1]}"
    return Event(kind="gpu-unknown", key=key, name=name, message=f"{capitalized(name)} {what}.", turn=turn)


def _unreadable(subject: _Subject, worker: Worker, gpu: WorkerGpu | None, seconds: float) -> Event:
    reason = _reason(gpu.note if gpu is not None and gpu.note else worker.view.problem or "")
    return _gpu_event(subject, "began", worker, gpu, f"could not be read for {spoken(seconds)}{reason}")


def _quarantine_event(worker: Worker, gpu: WorkerGpu, turn: Turn, what: str) -> Event:
    name = f"GPU {gpu.index} of {one_line(worker.host)}"
    key = f"gpu-quarantined:{worker.host}:{gpu.uuid}"
    return Event(kind="gpu-quarantined", key=key, name=name, message=f"{name} {what}.", turn=turn, hint="stoker gpus")


def _worker_event(worker: Worker, turn: Turn, what: str) -> Event:
    host = one_line(worker.host)
    key = f"worker-gone:{worker.id}"
    return Event(kind="worker-gone", key=key, name=host, message=f"The worker on {host} {what}", turn=turn)


def _lost(worker: Worker, silent: float, jobs: Sequence[Job]) -> Event:
    names = listed([_name(job) for job in jobs], _MAX_JOBS)
    had = f" It had {'a job' if len(jobs) == 1 else f'{len(jobs)} jobs'}: {names}." if jobs else ""
    return _worker_event(worker, "began", f"has not been seen for {spoken(silent)}.{had}")


def listed(names: Sequence[str], most: int) -> str:
    """`a, b, c and 9 others`."""
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} others"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _attempt(job: Job) -> str:
    """Its last attempt; its own id if it was cancelled before it started."""
    return job.attempt or job.id


def _name(job: Job) -> str:
    return quoted_label(job, _MAX_NAME)


def _reason(reason: str) -> str:
    shown = one_line(reason[:_MAX_REASON]).rstrip(". ")
    return f": {shown}" if shown else ""
