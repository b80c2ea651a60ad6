"""Explains the state of a job, above all why it does not run: for `why`, `list`, `show` and the page."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from stoker.queue.fields import State
from stoker.queue.model import ENDED, Attempt, Job, Worker
from stoker.rules.rule import RuleWarning
from stoker.units import about_when, clock_time, format_memory, list_all, memory_formatter, name_some, ordinal

if TYPE_CHECKING:
    from stoker.queue.store import Store

DeadEnd: TypeAlias = Sequence[tuple[str, State]]
ReasonKind = Literal[
    "running",
    "pending",
    "stopping",
    "silent",
    "warned",
    "ended",
    "held",
    "never",
    "after",
    "begin",
    "retry",
    "full",
    "paused",
    "no worker",
    "too large",
    "workers paused",
    "waits",
    "next",
]

# Waits that end by themselves.
_IN_LINE: Final[frozenset[ReasonKind]] = frozenset({"waits", "next", "after", "full", "begin", "retry"})
_TURN: Final = "waits for its turn: "
# An estimate is shown if it is this many seconds after the earliest possible start.
_NOTABLE_DELAY: Final = 60.0
# Counting reads each job, and nobody needs the exact number beyond this.
MOST_AHEAD: Final = 1000
_MOST_NAMES: Final = 3
# Separates the details per GPU: `waits for 2 GPUs: GPU 0 is held by job 0a1b2c3d, GPUs 1 and 2 are free`.
_BY_GPU: Final = re.compile(r": (?=GPUs? \d)")
# Reports of a worker about a job that it will never start.
NEVER_HERE: Final = ("can never start", "is not for this machine")
# An id in a sentence with the job's state, outside backticks, which enclose commands to copy.
_ID_IN_TEXT: Final = re.compile(r"(?<![`\w-])([0-9a-f]{8})(?![`\w-])(?: \(([a-z]+)\))?")
_COMMAND_IN_TEXT: Final = re.compile(r"(`[^`]*`)")
# A requested time and the queue's may differ by this, since clocks may have been set.
_CLOCK_TOLERANCE: Final = 60.0


class Estimate(NamedTuple):
    """The estimated start of a queued job; see `status.forecast`."""

    at: float
    at_latest: bool = False
    """It may be sooner: at best the time limit of an earlier job is known."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a queued job in line, and its estimated start."""

    place: int
    """1 for the next job."""
    starts: float | None = None
    """Seconds since the epoch; None if that would be a guess."""
    at_latest: bool = False
    """It may start sooner."""


class Why(msgspec.Struct, frozen=True):
    """The explanation of a job's state."""

    kind: ReasonKind
    word: str
    """Text after the state in a table; often empty."""
    reason: str
    """A short predicate about the job, without capital and full stop."""
    details: tuple[str, ...] = ()
    """Details per machine and GPU, if any."""
    forecast: Forecast | None = None
    """The forecast of a queued job, unless it cannot start or more than a thousand jobs come first."""


class QueueContext(msgspec.Struct, frozen=True, kw_only=True):
    """The state of queue and workers, which explains the states of jobs."""

    now: float
    """The database's clock."""
    paused: bool = False
    workers: Sequence[Worker] = ()
    running: Mapping[str, Attempt] = {}
    """Running attempts by job."""
    capped: Mapping[str, tuple[int, int]] = {}
    """Running jobs and cap of each active group with a cap."""

    def there(self) -> list[Worker]:
        """The workers whose last heartbeat is recent."""
        return [worker for worker in self.workers if worker.is_there(self.now)]

    def warning_of(self, job: str) -> RuleWarning | None:
        """The current warning about a running job, if its worker is alive."""
        attempt = self.running.get(job)
        if attempt is None:
            return None
        return next((w.view.warnings.get(attempt.id) for w in self.there() if w.id == attempt.worker), None)

    def why_pending(self, attempt: Attempt) -> str:
        """The worker's report on why the cluster manager has not started it."""
        worker = next((known for known in self.there() if known.id == attempt.worker), None)
        return worker.view.waiting.get(attempt.job, "") if worker is not None else ""

    def host_of(self, worker: str) -> str | None:
        return next((known.host for known in self.workers if known.id == worker), None)


class Needs:
    """Unfinished dependencies of queued jobs, direct and indirect, and jobs that can never start."""

    def __init__(self, edges: Iterable[tuple[str, str, State]] = ()) -> None:
        """Each edge has a job, a job that it waits for, and the state of the latter."""
        self._of: dict[str, dict[str, State]] = {}
        waiting: dict[str, list[str]] = {}
        for job, needed, state in edges:
            self._of.setdefault(job, {})[needed] = state
            waiting.setdefault(needed, []).append(job)
        # A breadth-first search from failed jobs gives each affected job its shortest path.
        failed = (needed for needs in self._of.values() for needed, state in needs.items() if state in ENDED)
        reached = dict.fromkeys(failed, "")
        self._way = reached
        line = deque(reached)
        while line:
            needed = line.popleft()
            for job in waiting.get(needed, ()):
                if job not in reached:
                    reached[job] = needed
                    line.append(job)

    def of(self, job: str) -> dict[str, State]:
        """The direct dependencies of a job."""
        return self._of.get(job, {})

    def dead_end(self, job: str) -> DeadEnd:
        """The path from the job to a failed dependency, which is last; empty if there is none."""
        way: list[tuple[str, State]] = []
        while needed := self._way.get(job):
            way.append((needed, self._of[job][needed]))
            job = needed
        return tuple(way)


NO_NEEDS: Final = Needs()


def explain(
    job: Job, context: QueueContext, needs: Needs = NO_NEEDS, ahead: int = 0, estimate: Estimate | None = None
) -> Why:
    """Explains a job's state. `needs`: its unfinished dependencies. `ahead`: the number of queued jobs before it."""
    if job.state == "running":
        return _running(job, context)
    if job.state in ENDED:
        return _ended(job, context.now)
    if job.state == "held":
        return _held(job)
    why = _waiting(job, context, needs) or _obstacle(context) or _on_workers(job, context.there(), ahead)
    never = all(_word_of(worker, job.id).startswith(NEVER_HERE) for worker in context.there())
    if why.kind in _IN_LINE and ahead < MOST_AHEAD and not never and _obstacle(context) is None:
        starts, at_latest = estimate or (None, False)
        forecast = Forecast(place=ahead + 1, starts=None if starts is None else round(starts), at_latest=at_latest)
        why = _with_forecast(why, forecast, max(context.now, job.not_before), context.now)
    if (before := _attempt_before(job)) and before not in why.reason:
        return replace(why, reason=f"{why.reason}; {before}")
    return why


def _with_forecast(why: Why, forecast: Forecast, ready: float, now: float) -> Why:
    """Adds `3rd in line, starts in about 40 min`. `ready`: the earliest possible start."""
    says_when = why.kind in {"begin", "retry", "next"} and (forecast.starts or 0.0) < ready + _NOTABLE_DELAY
    if says_when or (forecast.starts is None and forecast.place == 1):
        return replace(why, forecast=forecast)
    place = "next in line" if forecast.place == 1 else f"{ordinal(forecast.place)} in line"
    when = "" if forecast.starts is None else about_when(forecast.starts, now)
    when += " at the latest" if when and forecast.at_latest else ""
    starts = f"starts {when}" if when else ""
    if why.kind not in {"waits", "next"}:
        place = ""  # it is not in line yet
    said = ", ".join(filter(None, (place, starts)))
    word = ", ".join(filter(None, (why.word or place, when)))
    if why.reason.startswith(_TURN):
        return replace(why, word=word, reason=f"{_TURN}{said}", forecast=forecast)
    if why.kind == "next":
        said = starts
    return replace(why, word=word, reason="; ".join(filter(None, (why.reason, said))), forecast=forecast)


def _waiting(job: Job, context: QueueContext, known: Needs) -> Why | None:
    """The job's own reason to wait, independent of queue and workers."""
    if way := known.dead_end(job.id):
        return _never(job, way)
    if needs := known.of(job.id):
        return _and_besides(_after(needs), context)
    if job.not_before > context.now and job.begin is not None and abs(job.begin - job.not_before) <= _CLOCK_TOLERANCE:
        return _and_besides(_begin(job, context.now), context)
    if job.not_before > context.now:
        return _and_besides(_retry(job, context.now), context)
    number, at_most = context.capped.get(job.group, (0, 1))
    if number >= at_most:
        full = f"its group {job.group} already runs {number} of at most {at_most}"
        return _and_besides(Why("full", "group is full", full), context)
    return None


def _running(job: Job, context: QueueContext) -> Why:
    attempt = context.running.get(job.id)
    running = _pending(attempt, context) if job.is_pending else _since(job, attempt, context)
    if attempt is not None and attempt.lease_expires < context.now:
        silent = spoken(context.now - attempt.lease_expires)
        return Why(
            "silent", "no heartbeat", f"{running}, but its worker let its lease end {silent} ago and may be gone"
        )
    if job.cancel_requested is not None:
        ago = spoken(context.now - job.cancel_requested)
        return Why("stopping", "stopping", f"{running}, and a stop was requested {ago} ago")
    if (warning := context.warning_of(job.id)) is not None:
        return Why("warned", warning.word, f"{running}, and {_warned(warning, context.now)}")
    return Why("pending" if job.is_pending else "running", "", running)


def _since(job: Job, attempt: Attempt | None, context: QueueContext) -> str:
    where = f" {_where(attempt, context)}" if attempt is not None else ""
    since = job.started if job.started is not None else context.now
    return f"running since {clock_time(since, context.now)} ({spoken(context.now - since)}){where}"


def _pending(attempt: Attempt | None, context: QueueContext) -> str:
    """`waits in Slurm: jobs of higher priority come first; it is Slurm job 4711`."""
    known = f"; it is {attempt.where}" if attempt is not None and attempt.where else ""
    why = context.why_pending(attempt) if attempt is not None else ""
    return f"{why or 'waits in the queue of its cluster'}{known}"


def _warned(warning: RuleWarning, now: float) -> str:
    """`may hang: GPU 0 …; it is stopped in 12 min, unless that changes`."""
    if warning.acts_at is None:
        return f"{warning.word}: {warning.reason}"
    ahead = f"it is stopped in {spoken(warning.acts_at - now)}, unless it works or is snoozed"
    return f"{warning.word}: {warning.reason}; {ahead}"


def _where(attempt: Attempt, context: QueueContext) -> str:
    if attempt.where:
        return f"as {attempt.where}"
    worker = next((known for known in context.workers if known.id == attempt.worker), None)
    host = worker.host if worker is not None else f"worker {attempt.worker}"
    if not attempt.gpus:
        return f"on {host} without a GPU"
    names = gpu_names(attempt.gpus, worker)
    return f"on {host}, {'GPU' if len(names) == 1 else 'GPUs'} {list_all(names)}"


def gpu_names(uuids: Sequence[str], worker: Worker | None) -> list[str]:
    """The indices of these GPUs, or their uuids if no worker reports them."""
    indices = {gpu.uuid: str(gpu.index) for gpu in worker.view.gpus} if worker is not None else {}
    return [indices.get(uuid, uuid) for uuid in uuids]


def _ended(job: Job, now: float) -> Why:
    ended = job.ended if job.ended is not None else now
    took = f" after {spoken(ended - job.started)}" if job.started is not None and job.started <= ended else ""
    code = f" with exit code {job.exit_code}" if job.exit_code not in {None, 0} else ""
    because = f": {job.reason}" if job.reason and job.reason != job.state else ""
    return Why("ended", "", f"{job.state} {spoken(now - ended)} ago{took}{code}{because}")


def _held(job: Job) -> Why:
    because = f" because {job.reason}" if job.reason not in {"", "held"} else ""
    word = "lost" if because and job.on_loss == "hold" else ""
    return Why("held", word, f"held{because}: `stoker release {job.id}` lets it start")


def _never(job: Job, way: DeadEnd) -> Why:
    """Explains a failed dependency, direct or indirect."""
    *between, (failed, state) = way
    shown = [name for name, _ in between[:_MOST_NAMES]]
    chain = "".join(f" {name}, which comes after" for name in shown)
    more = f" {len(between) - len(shown)} others, the last of them after" if len(between) > len(shown) else ""
    became = "was cancelled" if state == "cancelled" else state
    cure = f"`stoker retry {failed}` tries that again, `stoker cancel {job.id}` gives this one up"
    reason = f"can never start: it comes after{chain}{more} {failed}, which {became}; {cure}"
    return Why("never", f"after {failed}, {state}", reason)


def _after(needs: Mapping[str, State]) -> Why:
    which = name_some([f"{name} ({state})" for name, state in needs.items()])
    jobs = "job" if len(needs) == 1 else "jobs"
    more = f" and {len(needs) - 1} more" if len(needs) > 1 else ""
    return Why("after", f"after {next(iter(needs))}{more}", f"waits for {jobs} {which}")


def _begin(job: Job, now: float) -> Why:
    at, wait = clock_time(job.not_before, now), spoken(job.not_before - now, up=True)
    again = "" if job.every is None else f", and recurs: {job.every}"
    word = f"begins {at}" if job.every is None else f"next {at}"
    return Why("begin", word, f"begins at {at}, in {wait}{again}")


def _retry(job: Job, now: float) -> Why:
    wait = spoken(job.not_before - now, up=True)
    before = _attempt_before(job)
    because = f", after {before}" if before else ""
    return Why("retry", f"retry in {wait}", f"waits until its retry in {wait}{because}")


def _attempt_before(job: Job) -> str:
    """The end of its last attempt; empty if a person has requested another run since."""
    if not job.attempts or (job.exit_code is None and not job.reason):
        return ""
    code = f" with exit code {job.exit_code}" if job.exit_code is not None else ""
    because = f": {job.reason}" if job.reason else ""
    return f"attempt {job.attempts} ended{code}{because}"


def _and_besides(why: Why, context: QueueContext) -> Why:
    """Adds an obstacle that would remain after this wait."""
    obstacle = _obstacle(context)
    if obstacle is None:
        return why
    return replace(why, reason=f"{why.reason}; besides, {obstacle.reason}")


def _obstacle(context: QueueContext) -> Why | None:
    """An obstacle for all jobs."""
    if context.paused:
        return Why("paused", "", "the queue is paused: `stoker resume` lets jobs start")
    there = context.there()
    if not there:
        return Why("no worker", "", f"no worker is there{_last_heard(context)}: `stoker work` starts one")
    if all(worker.paused for worker in there):
        hosts = sorted({worker.host for worker in there})
        paused = f"the worker on {hosts[0]} is" if len(there) == 1 else f"all workers (on {name_some(hosts)}) are"
        cure = f"`stoker resume --worker {hosts[0]}` lets jobs start there"
        return Why("workers paused", "", f"{paused} paused: {cure}")
    return None


def _last_heard(context: QueueContext) -> str:
    if not context.workers:
        return ", and none ever was"
    last = max(context.workers, key=lambda worker: worker.seen)
    return f" (the last was seen {spoken(context.now - last.seen)} ago, on {last.host})"


def _on_workers(job: Job, there: Sequence[Worker], ahead: int) -> Why:
    if too_large := _too_large(job, there):
        return too_large
    said = [(worker.host, _word_of(worker, job.id)) for worker in there]
    keeper = next((worker for worker in there if job.kept is not None and worker.id == job.kept.worker), None)
    if keeper is not None or any(job.id in worker.view.waiting for worker in there):
        reasons = tuple(f"on {host}: {word}" for host, word in said if word)
        if keeper is None:
            return _with_details(Why("waits", "", in_short(said), reasons))
        has = len(job.kept.gpus) if job.kept is not None else 0
        return _with_details(Why("waits", f"has {has} of {_count(job.gpus)}", _kept(job, keeper), reasons))
    if ahead:
        many = f"at least {ahead}" if ahead >= MOST_AHEAD else str(ahead)
        jobs = "1 other job comes" if ahead == 1 else f"{many} other jobs come"
        return Why("waits", "", f"{_TURN}{jobs} first")
    problems = "".join(f"; on {host}: {word}" for host, word in said if word)
    return Why("next", "", f"waits for a worker to look at it: it is next{problems}")


def _with_details(why: Why) -> Why:
    """Drops details that only repeat the reason."""
    return replace(why, details=()) if why.details == (why.reason,) else why


def in_short(said: Iterable[tuple[str, str]]) -> str:
    """`waits for 2 GPUs on gpu-box`: reports of workers by host, without details per GPU.

    Machines that can never run the job are left out if another can.
    """
    hosts: dict[str, list[str]] = {}
    for host, word in said:
        if word:
            hosts.setdefault(_BY_GPU.split(word, maxsplit=1)[0], []).append(host)
    possible = {word: on for word, on in hosts.items() if not word.startswith(NEVER_HERE)} or hosts
    return "; ".join(
        f"{word} on {_hosts(on)}" if word.startswith("waits") and ": " not in word else f"on {_hosts(on)}: {word}"
        for word, on in possible.items()
    )


def _hosts(hosts: Sequence[str]) -> str:
    return list_all(hosts) if len(hosts) <= _MOST_NAMES else f"{len(hosts)} machines"


def _kept(job: Job, keeper: Worker) -> str:
    """`GPUs are kept for it on gpu-box (2 GPUs, has 1: GPU 0)`."""
    names = gpu_names(job.kept.gpus, keeper) if job.kept is not None else []
    which = f": {'GPU' if len(names) == 1 else 'GPUs'} {list_all(names)}" if names else ""
    return f"GPUs are kept for it on {keeper.host} ({_count(job.gpus)}, has {len(names)}{which})"


def _word_of(worker: Worker, job: str) -> str:
    if worker.paused:
        return "the worker is paused"
    return worker.view.waiting.get(job) or worker.view.problem or ""


def _too_large(job: Job, there: Sequence[Worker]) -> Why | None:
    """Explains a request larger than any machine.

    A worker that cannot read its GPUs may have enough, a cluster decides itself, and workers without any GPU report
    that themselves.
    """
    blind = any(worker.view.problem or worker.view.cluster for worker in there)
    blind = blind or all(worker.view.absent for worker in there)
    if not job.gpus or blind:
        return None
    amount: Callable[[int], str] = format_memory
    largest = max(there, key=lambda worker: len(worker.view.gpus))
    most = len(largest.view.gpus)
    if most < job.gpus:
        has = f"no worker has more than {most} ({largest.host})" if most else "no worker has any"
    elif job.memory is not None and max(_large_enough(worker, job.memory) for worker in there) < job.gpus:
        sizes = [gpu.memory_total or 0 for worker in there for gpu in worker.view.gpus]
        amount = memory_formatter(job.memory, (max(sizes),))
        small = max(sizes) < job.memory
        has = f"the largest anywhere has {amount(max(sizes))}" if small else "no worker has that many of this size"
    else:
        return None
    wanted = _count(job.gpus) if job.memory is None else f"{_count(job.gpus)} with {amount(job.memory)}"
    cure = f"it starts when a worker with more is there, or when `stoker edit {job.id}` asks for less"
    return Why("too large", "too large", f"cannot start: it asks for {wanted}, and {has}; {cure}")


def _large_enough(worker: Worker, memory: int) -> int:
    """The number of its GPUs with at least this much memory, including GPUs of unknown size."""
    return sum(gpu.memory_total is None or gpu.memory_total >= memory for gpu in worker.view.gpus)


def spoken(seconds: float, *, up: bool = False) -> str:
    """`20 s`, `12 min`, `3 h`, `1 h 20 min`, `2 days`; `up` rounds up."""
    whole = max(0, int(-(-seconds // 1) if up else round(seconds)))
    if whole <= 90:
        return f"{whole} s"
    minutes = -(-whole // 60) if up else round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{round(minutes / (24 * 60))} days"


def _count(gpus: int) -> str:
    return "a GPU" if gpus == 1 else f"{gpus} GPUs"


def read_context(store: "Store") -> QueueContext:
    """The state of queue and workers now."""
    return QueueContext(
        now=store.clock(),
        paused=store.paused(),
        workers=tuple(store.workers.all()),
        running={attempt.job: attempt for attempt in store.attempts.running()},
        capped=store.groups.running(),
    )


def with_names(store: "Store", reasons: Sequence[Why]) -> list[Why]:
    """Adds names before ids: `waits for job train (0a1b2c3d, running)`."""
    found = [_ids_in(reason) for reason in reasons]
    names = store.jobs.names(name for ids in found for name in ids)
    return [_named(reason, names) if ids and names else reason for reason, ids in zip(reasons, found, strict=True)]


def _ids_in(reason: Why) -> list[str]:
    return [name for text in (reason.reason, *reason.details) for name, _state in _ID_IN_TEXT.findall(text)]


def _named(reason: Why, names: Mapping[str, str]) -> Why:
    """Adds names before ids, and replaces ids in the word for a table."""
    word = _ID_IN_TEXT.sub(lambda found: _one_line(names.get(found[1], found[1])), reason.word)
    return replace(
        reason,
        word=word,
        reason=named_text(reason.reason, names),
        details=tuple(named_text(detail, names) for detail in reason.details),
    )


def named_text(text: str, names: Mapping[str, str]) -> str:
    """The text with names before ids, except in commands to copy."""

    def title(found: re.Match[str]) -> str:
        name, state = names.get(found[1]), f", {found[2]}" if found[2] else ""
        return f"{_one_line(name)} ({found[1]}{state})" if name else found[0]

    return "".join(
        part if part.startswith("`") else _ID_IN_TEXT.sub(title, part) for part in _COMMAND_IN_TEXT.split(text)
    )


def _one_line(name: str) -> str:
    return name if name.isprintable() else "".join(letter if letter.isprintable() else " " for letter in name)


def needs_of(store: "Store", job: Job) -> Needs:
    """The unfinished dependencies of a queued job."""
    return store.jobs.needs_of([job.id] if job.state == "queued" else [])
