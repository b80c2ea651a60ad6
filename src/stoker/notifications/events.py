"""What people are told of: from one look at the queue to the next, which events happened. No clock, no I/O."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from stoker.queue.explanation import spoken
from stoker.queue.model import HEARD_WITHIN, Attempt, Job, Worker, WorkerGpu
from stoker.status.job_text import in_a_sentence, on_one_line, shortened
from stoker.status.machines import home_of

Kind = Literal["failed", "idle-stopped", "queue-empty", "gpu-unknown", "worker-gone"]
Turn = Literal["happened", "began", "over"]

# What happened while nobody was there to tell it is told so much later at the most.
YOUNG: Final = 3600.0
# What became of an attempt is written a moment after its outcome; so long is waited for it.
AFTERWORD: Final = 2.0
# Who has not looked for so long has missed heartbeats, and must not take workers for gone before it has heard some.
LONGEST_BLINK: Final = 30.0
# A page of reasons is for the page.
_LONGEST_NAME: Final = 80
_LONGEST_REASON: Final = 500
_MOST_JOBS: Final = 3

# A thing that lasts, and stays one thing when its worker is restarted: a GPU by its host and uuid, or a worker.
_Subject = tuple[str, str]
_ALL_GPUS: Final = "*"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to tell."""

    kind: Kind
    key: str
    """The same in every process that sees it."""
    name: str
    """What it is about, for a list of several."""
    sentence: str
    path: str
    """Of the page that says more."""
    hint: str
    """The command that says more."""
    turn: Turn = "happened"
    """`began` and `over` for what lasts: told once until it is over, and then that it is."""


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What one look finds, as far as events are made of it."""

    now: float
    """By the database's clock."""
    ended: Sequence[Job] = ()
    """Those that failed lately, and the last that ended at all; newest first."""
    retried: Mapping[str, Job] = {}
    """Jobs that run or wait again, by an attempt at them that has ended lately."""
    causes: Mapping[str, str] = {}
    """How attempts ended, as far as that is known by now."""
    unfinished: bool = True
    """Whether any job runs, waits or is held."""
    workers: Sequence[Worker] = ()
    running: Sequence[tuple[Attempt, Job]] = ()


class News:
    """Remembers what was seen before."""

    def __init__(self, kinds: Collection[str], unknown_after: float) -> None:
        self._kinds = frozenset(kinds)
        self._unknown_after = unknown_after
        self._seen: dict[str, float] = {}
        self._emptied = 0.0
        self._watching = 0.0
        self._looked: float | None = None
        self._unknown: dict[_Subject, float] = {}
        """Since when, by the first look that found it so: the clocks of workers may be wrong."""
        self._fine: set[_Subject] = set()
        self._bad: set[_Subject] = set()
        """What was told to last, or found to have been told."""

    def of(self, sight: Sight) -> list[Event]:
        """What happened since the look before; in the first look, also what is younger than an hour."""
        if self._looked is None or sight.now - self._looked > LONGEST_BLINK:
            self._watching = sight.now
        self._looked = sight.now
        found = [*self._jobs(sight), *self._emptiness(sight), *self._gpus(sight), *self._workers(sight)]
        fresh = [event for event in found if event.kind in self._kinds and event.key not in self._seen]
        self._seen |= {event.key: sight.now for event in fresh if event.turn == "happened"}
        # Twice as long as anything is found in the queue.
        self._seen = {key: at for key, at in self._seen.items() if sight.now - at < 2 * YOUNG}
        return fresh

    # Jobs

    def _jobs(self, sight: Sight) -> Iterator[Event]:
        for job in reversed(sight.ended):
            if job.state != "failed" or job.ended is None or sight.now - job.ended > YOUNG:
                continue
            if is_unexplained(job, sight):
                continue
            if sight.causes.get(_attempt(job)) == "idle" and "idle-stopped" in self._kinds:
                yield _idle_stopped(job, _attempt(job))
            else:
                yield _failed(job)
        for attempt, job in sight.retried.items():
            if sight.causes.get(attempt) == "idle":
                yield _idle_stopped(job, attempt)

    def _emptiness(self, sight: Sight) -> Iterator[Event]:
        last = max(sight.ended, key=lambda job: job.ended or 0.0, default=None)
        ended = last.ended if last is not None and last.ended is not None else 0.0
        if last is None or sight.unfinished or ended <= self._emptied or sight.now - ended > YOUNG:
            return
        self._emptied = ended
        what = "was cancelled" if last.state == "cancelled" else last.state
        yield Event(
            kind="queue-empty",
            key=f"queue-empty:{_attempt(last)}:{ended:.0f}",
            name="the queue",
            sentence=f"The queue is empty: the last job to end was {_name(last)}, which {what}.",
            path="/",
            hint="stoker list",
        )

    # What lasts

    def _gpus(self, sight: Sight) -> Iterator[Event]:
        workers = there(sight)
        found = _gpus_of(workers)
        for worker in workers:
            if worker.view.absent and (worker.host, _ALL_GPUS) not in found:
                self._unknown.pop((worker.host, _ALL_GPUS), None)
        for subject, (worker, gpu) in found.items():
            if _is_unknown(worker, gpu):
                self._fine.discard(subject)
                since = self._unknown.setdefault(subject, sight.now)
                if subject not in self._bad and sight.now - since >= self._unknown_after:
                    self._bad.add(subject)
                    yield _unreadable(subject, worker, gpu, sight.now - since)
            else:
                self._unknown.pop(subject, None)
                if self._is_news(subject):
                    yield _readable(subject, worker, gpu)

    def _workers(self, sight: Sight) -> Iterator[Event]:
        for worker in sight.workers:
            subject = (worker.id, "")
            silent = sight.now - worker.seen
            if worker.is_there(sight.now):
                if self._is_news(subject):
                    yield _heard_again(worker)
                continue
            self._fine.discard(subject)
            watched = sight.now - self._watching > HEARD_WITHIN
            if watched and silent <= YOUNG and subject not in self._bad and not _has_left(worker, sight):
                self._bad.add(subject)
                jobs = [job for attempt, job in sight.running if attempt.worker == worker.id]
                yield _gone(worker, silent, jobs)

    def _is_news(self, subject: _Subject) -> bool:
        """Whether that it is fine may be news: also at first sight, for others may have told that it is not."""
        if subject in self._fine:
            return False
        self._fine.add(subject)
        self._bad.discard(subject)
        return True


def is_unexplained(job: Job, sight: Sight) -> bool:
    """Whether how it failed is not known, and may be in a moment."""
    known = job.state != "failed" or job.ended is None or sight.causes.get(_attempt(job))
    return not known and sight.now - (job.ended or 0.0) < AFTERWORD


def there(sight: Sight) -> list[Worker]:
    return [worker for worker in sight.workers if worker.is_there(sight.now)]


def _has_left(worker: Worker, sight: Sight) -> bool:
    """It said goodbye, or another one was started in its place."""
    home = (worker.host, home_of(worker.id))
    return worker.view.left or any(
        (other.host, home_of(other.id)) == home and other.started >= worker.seen for other in there(sight)
    )


def _gpus_of(workers: Sequence[Worker]) -> dict[_Subject, tuple[Worker, WorkerGpu | None]]:
    """Each GPU with who tells of it; of several workers the one that can read it. Without a GPU: the whole machine,
    unless it has none."""
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


# Words: whole sentences, without anything that a chat would take for markup.


def _failed(job: Job) -> Event:
    code = f" with exit code {job.exit_code}" if job.exit_code else ""
    return Event(
        kind="failed",
        key=_ended(_attempt(job)),
        name=shortened(job, _LONGEST_NAME),
        sentence=f"Job {_name(job)} failed{code}{_because(job.reason)}.",
        path=f"/jobs/{job.id}",
        hint=f"stoker show {job.id}",
    )


def _idle_stopped(job: Job, attempt: str) -> Event:
    again = "" if job.state == "failed" else " It will be tried again."
    return Event(
        kind="idle-stopped",
        key=_ended(attempt),
        name=shortened(job, _LONGEST_NAME),
        sentence=f"Job {_name(job)} was stopped because its GPUs stayed idle{_because(job.reason)}.{again}",
        path=f"/jobs/{job.id}",
        hint=f"stoker show {job.id}",
    )


def _unreadable(subject: _Subject, worker: Worker, gpu: WorkerGpu | None, seconds: float) -> Event:
    reason = _because(gpu.note if gpu is not None and gpu.note else worker.view.problem or "")
    name = _gpu_name(worker, gpu)
    return Event(
        kind="gpu-unknown",
        key=f"gpu-unknown:{subject[0]}:{subject[1]}",
        name=name,
        sentence=f"{_capital(name)} could not be read for {spoken(seconds)}{reason}.",
        path="/",
        hint="stoker top",
        turn="began",
    )


def _readable(subject: _Subject, worker: Worker, gpu: WorkerGpu | None) -> Event:
    name = _gpu_name(worker, gpu)
    return Event(
        kind="gpu-unknown",
        key=f"gpu-unknown:{subject[0]}:{subject[1]}",
        name=name,
        sentence=f"{_capital(name)} can be read again.",
        path="/",
        hint="stoker top",
        turn="over",
    )


def _gone(worker: Worker, silent: float, jobs: Sequence[Job]) -> Event:
    names = some([_name(job) for job in jobs], _MOST_JOBS)
    had = f" It had {'a job' if len(jobs) == 1 else f'{len(jobs)} jobs'}: {names}." if jobs else ""
    return Event(
        kind="worker-gone",
        key=f"worker-gone:{worker.id}",
        name=on_one_line(worker.host),
        sentence=f"The worker on {on_one_line(worker.host)} has not been heard of for {spoken(silent)}.{had}",
        path="/",
        hint="stoker top",
        turn="began",
    )


def _heard_again(worker: Worker) -> Event:
    return Event(
        kind="worker-gone",
        key=f"worker-gone:{worker.id}",
        name=on_one_line(worker.host),
        sentence=f"The worker on {on_one_line(worker.host)} is heard of again.",
        path="/",
        hint="stoker top",
        turn="over",
    )


def some(names: Sequence[str], most: int) -> str:
    """`a, b, c and 9 others`."""
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} others"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _attempt(job: Job) -> str:
    """What ended; a job that was cancelled before it started had no attempt."""
    return job.attempt or job.id


def _ended(attempt: str) -> str:
    """One key however it is told: that its GPUs were idle may be known only after it was told as failed."""
    return f"ended:{attempt}"


def _name(job: Job) -> str:
    return in_a_sentence(job, _LONGEST_NAME)


def _gpu_name(worker: Worker, gpu: WorkerGpu | None) -> str:
    return f"{f'GPU {gpu.index}' if gpu is not None else 'all GPUs'} of {on_one_line(worker.host)}"


def _because(reason: str) -> str:
    shown = on_one_line(reason[:_LONGEST_REASON]).rstrip(". ")
    return f": {shown}" if shown else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
