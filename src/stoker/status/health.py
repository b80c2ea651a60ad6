"""Health: a headline and a list of issues, worst first. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from stoker.gpus.model import is_model
from stoker.gpus.report import BUSY_FROM
from stoker.queue.explanation import ReasonKind, spoken
from stoker.queue.fields import State
from stoker.queue.model import Failure, Job, WorkerGpu, is_host
from stoker.status.job_text import quoted_label
from stoker.status.machines import HIDDEN_AFTER, worker_home
from stoker.status.model import Health, HealthIssue, Level, Machine, RunningJob, WaitingJob
from stoker.units import capitalized, format_memory, name_some

# Older failures are no longer an issue.
RECENT: Final = 86400.0
# A driver reset or a busy machine is shorter.
_UNKNOWN_FOR: Final = 180.0
# Starting a job takes seconds, and so does freeing a GPU.
_COULD_RUN_FOR: Final = 60.0
# GPUs are free for a moment between two jobs.
_FREE_FOR: Final = 10.0
# Fits on two lines of a phone.
_LONGEST_NAME: Final = 40
_WORK: Final = frozenset({"job", "background", "somebody"})


class HealthInputs(msgspec.Struct, frozen=True, kw_only=True):
    now: float
    paused: bool = False
    counts: Mapping[State, int] = {}
    machines: Sequence[Machine] = ()
    running: Sequence[RunningJob] = ()
    waiting: Sequence[WaitingJob] = ()
    failed: Job | None = None
    """The newest failure within `RECENT` that was not dismissed."""
    failures: int = 0
    """Their number."""
    stopped: Job | None = None
    """The same for jobs that a rule stopped."""
    stops: int = 0
    stopped_for: str = ""
    """The kind of the verdict, such as `idle`; empty if unknown."""


def assess(facts: HealthInputs) -> Health:
    return _summed_up([*_bad(facts), *_attention(facts)], facts.machines, facts.running)


def without_queue(health: Health, away: str) -> Health:
    """Adds that the queue is unreachable: an old answer must not look current."""
    return _summed_up([HealthIssue(level="bad", message=capitalized(away)), *health.points], (), ())


def _summed_up(points: Sequence[HealthIssue], machines: Sequence[Machine], running: Sequence[RunningJob]) -> Health:
    """The points are sorted, worst first."""
    bad = sum(point.level == "bad" for point in points)
    if not points:
        return Health(level="good", headline=_all_is_well(machines, running))
    return Health(level="bad" if bad else "attention", headline=_headline(points, bad), points=tuple(points))


def _headline(points: Sequence[HealthIssue], bad: int) -> str:
    others = len(points) - bad
    if len(points) == 1:
        return points[0].message
    if not bad:
        return f"{others} things need attention"
    wrong = "1 thing is wrong" if bad == 1 else f"{bad} things are wrong"
    return f"{wrong}, {others} more {'needs' if others == 1 else 'need'} attention" if others else wrong


def _all_is_well(machines: Sequence[Machine], running: Sequence[RunningJob]) -> str:
    cards = [card for machine in machines if machine.there for card in machine.gpus]
    clusters = sorted({machine.cluster for machine in machines if machine.there and machine.cluster})
    if clusters and not cards:
        return _all_is_well_on(clusters, running)
    readable = [card for card in cards if not _is_unread(card)]
    used = sum(card.state in _WORK and not _is_orphaned(card) for card in readable)
    free = sum(card.state == "free" for card in readable)
    if cards and not readable:
        return "All is well so far: no GPU can be read at the moment"
    if not used:
        return f"All is well: {_gpus(free)} {_is(free)} ready" if free else "All is well"
    if used == len(cards):
        return "All is well: the GPU is in use" if used == 1 else f"All is well: all {used} GPUs are in use"
    return f"All is well: {used} of {len(cards)} GPUs {_is(used)} in use"


def _all_is_well_on(clusters: Sequence[str], running: Sequence[RunningJob]) -> str:
    """`All is well: 3 jobs run on hpc, 12 are pending`. Other jobs of a cluster do not concern this queue."""
    pending = sum(item.job.is_pending for item in running)
    runs = len(running) - pending
    where = name_some(clusters)
    waits = f"{_jobs(pending)} {_is(pending)} pending on {where}" if not runs else f"{pending} {_is(pending)} pending"
    parts = [f"{_jobs(runs)} {'runs' if runs == 1 else 'run'} on {where}"] if runs else []
    parts += [waits] if pending else []
    return f"All is well: {', '.join(parts)}" if parts else f"All is well: {where} is there"


# Bad


def _bad(facts: HealthInputs) -> Iterator[HealthIssue]:
    lost = [machine for machine in facts.machines if _is_lost(machine, facts)]
    for machine in lost:
        count = sum(_runs_on(job, machine) for job in facts.running)
        jobs = f" while {_jobs(count)} ran there" if count else ""
        ago = spoken(facts.now - machine.seen)
        yield HealthIssue(level="bad", message=f"{machine.host} has been silent for {ago}{jobs}", host=machine.host)
    queued = facts.counts.get("queued", 0)
    if queued and not any(machine.there for machine in facts.machines):
        yield HealthIssue(level="bad", message=f"{_jobs_wait(queued)}, and no worker is there")
    for machine in facts.machines:
        yield from _unreadable(machine, facts.now)
    if queued:
        yield from _orphaned(facts, "bad")
    for job in facts.running:
        if job.why.kind == "silent" and not any(_runs_on(job, machine) for machine in lost):
            message = f"{_name(job.job)} on {job.host} has not been seen for too long"
            yield HealthIssue(level="bad", message=message, job=job.job.id, host=job.host)


def _is_lost(machine: Machine, facts: HealthInputs) -> bool:
    """Whether it disappeared: it did not stop regularly, and was seen today or has jobs."""
    if machine.there or machine.left:
        return False
    return facts.now - machine.seen <= HIDDEN_AFTER or any(_runs_on(job, machine) for job in facts.running)


def _runs_on(job: RunningJob, machine: Machine) -> bool:
    return job.attempt is not None and worker_home(job.attempt.worker) == worker_home(machine.worker)


def _unreadable(machine: Machine, now: float) -> Iterator[HealthIssue]:
    if not machine.there or machine.absent:
        return
    unread = [
        (card, now - _unread_since(card, machine)) for card in machine.gpus if _is_unread(card) and not card.quarantine
    ]
    unknown = [(card, lasted) for card, lasted in unread if lasted >= _UNKNOWN_FOR]
    if machine.problem is not None and now - machine.started >= _UNKNOWN_FOR and (unknown or not machine.gpus):
        what = f"the cluster {machine.cluster}" if machine.cluster else "its GPUs"
        message = f"{machine.host} cannot read {what}: {machine.problem}"
        yield HealthIssue(level="bad", message=message, host=machine.host)
    elif unknown:
        which = f"GPU {unknown[0][0].index}" if len(unknown) == 1 else _gpus(len(unknown))
        shortest = spoken(min(lasted for _card, lasted in unknown))
        has = "has" if len(unknown) == 1 else "have"
        message = f"{which} of {machine.host} {has} been unreadable for {shortest}"
        yield HealthIssue(level="bad", message=message, host=machine.host)


def _orphaned(facts: HealthInputs, level: Level) -> Iterator[HealthIssue]:
    """Memory without a visible process, left by a crashed job or a container, blocks the GPU."""
    queued = facts.counts.get("queued", 0)
    while_waiting = f", while {_jobs_wait(queued)}" if queued else ""
    for machine in facts.machines:
        if not machine.there:
            continue
        for card in machine.gpus:
            if _is_orphaned(card) and _lasts(card, machine, facts.now, _COULD_RUN_FOR):
                held = format_memory(card.memory_used or 0)
                message = f"GPU {card.index} of {machine.host} has {held} in use by no visible process{while_waiting}"
                yield HealthIssue(level=level, message=message, host=machine.host)


def _is_orphaned(card: WorkerGpu) -> bool:
    """Whether it holds memory without a visible process, and does nothing."""
    unseen = card.state == "somebody" and not card.user and bool(card.memory_used)
    return unseen and card.utilization is not None and card.utilization < BUSY_FROM


# Attention


def _attention(facts: HealthInputs) -> Iterator[HealthIssue]:
    yield from _quarantined(facts)
    yield from _failures(facts)
    yield from _warned(facts)
    if not facts.counts.get("queued", 0):
        yield from _orphaned(facts, "attention")
    yield from _stuck(facts)
    yield from _pauses(facts)
    yield from _free(facts)


def _quarantined(facts: HealthInputs) -> Iterator[HealthIssue]:
    for machine in facts.machines:
        for card in machine.gpus if machine.there else ():
            if card.quarantine:
                message = f"GPU {card.index} of {machine.host} is out of rotation ({card.quarantine})"
                yield HealthIssue(level="attention", message=message, host=machine.host)


def _failures(facts: HealthInputs) -> Iterator[HealthIssue]:
    if facts.failed is not None:
        name = _name(facts.failed)
        several = f"{_jobs(facts.failures)} failed in the last 24 h, last {name}"
        yield _failure("failed", facts.failed, facts.failures, f"{name} failed", several)
    if facts.stopped is not None:
        name = _name(facts.stopped)
        # One word, as on its badge: the whole reason, which the job shows, would fill a phone.
        one = f"{name} was stopped{f': {facts.stopped_for}' if facts.stopped_for else ' by a rule'}"
        several = f"{_jobs(facts.stops)} were stopped by a rule in the last 24 h, last {name}"
        yield _failure("stopped", facts.stopped, facts.stops, one, several)


def _failure(kind: Failure, last: Job, count: int, one: str, several: str) -> HealthIssue:
    """One failure links to its job, several to the list."""
    message, job = (several, None) if count > 1 else (one, last.id)
    return HealthIssue(level="attention", message=message, job=job, failure=kind, until=last.ended)


def _warned(facts: HealthInputs) -> Iterator[HealthIssue]:
    for item in facts.running:
        if item.why.kind == "warned" and item.warning is not None:
            # The job says why.
            message = f"{_name(item.job)} on {item.host} {item.warning.word}"
            yield HealthIssue(level="attention", message=message, job=item.job.id, host=item.host)


def _stuck(facts: HealthInputs) -> Iterator[HealthIssue]:
    yield from _about("never", facts.waiting, "can never start", "can never start")
    yield from _about(
        "too large", facts.waiting, "asks for more than any machine has", "ask for more than any machine has"
    )
    # A job held by a person has no reason.
    lost = [waiting for waiting in facts.waiting if waiting.job.reason not in {"", "held"}]
    yield from _about("held", lost, "is held: lost with its machine", "are held: lost with their machine")


def _about(kind: ReasonKind, waiting: Sequence[WaitingJob], one: str, several: str) -> Iterator[HealthIssue]:
    """One issue for all waiting jobs with this kind of reason."""
    jobs = [item.job for item in waiting if item.why.kind == kind]
    if jobs:
        more = len(jobs) - 1
        who = f"{_name(jobs[0])} and {_jobs(more, 'other ')} {several}" if more else f"{_name(jobs[0])} {one}"
        yield HealthIssue(level="attention", message=who, job=jobs[0].id)


def _pauses(facts: HealthInputs) -> Iterator[HealthIssue]:
    queued = facts.counts.get("queued", 0)
    if not queued:
        return
    if facts.paused:
        yield HealthIssue(level="attention", message=f"The queue is paused while {_jobs_wait(queued)}")
        return
    for machine in facts.machines:
        if machine.there and machine.paused:
            message = f"{machine.host} is paused while {_jobs_wait(queued)}"
            yield HealthIssue(level="attention", message=message, host=machine.host)


def _free(facts: HealthInputs) -> Iterator[HealthIssue]:
    queued, held = facts.counts.get("queued", 0), facts.counts.get("held", 0)
    if not any(machine.there for machine in facts.machines):
        if not queued:
            yield HealthIssue(level="attention", message="No worker is there: `stoker work` starts one")
        return
    if queued and not facts.paused:
        yield from _could_run(facts)
    free = sum(len(_free_cards(machine, facts.now, _FREE_FOR)) for machine in facts.machines)
    if free and not queued:
        what = "Only held jobs are left" if held else "The queue is empty"
        message = f"{what}: {_gpus(free)} {'has' if free == 1 else 'have'} nothing to do"
        yield HealthIssue(level="attention", message=message)


def _could_run(facts: HealthInputs) -> Iterator[HealthIssue]:
    """The first job that waits despite apparent room for it."""
    free = {machine.host: _free_cards(machine, facts.now, _COULD_RUN_FOR) for machine in facts.machines}
    for waiting in facts.waiting:
        job = waiting.job
        # Only a worker knows whether its CPUs, RAM and machine suit the job.
        if job.nodes > 1 or job.cpus is not None or job.ram is not None or job.machine or job.labels:
            continue
        if waiting.why.kind not in {"waits", "next"} or facts.now - max(job.submitted, job.not_before) < _COULD_RUN_FOR:
            continue
        for host, cards in free.items():
            if any(is_host(host, name) for name in job.exclude_machines):
                continue
            if 0 < job.gpus <= sum(_is_large_enough(card, job) for card in cards):
                message = f"{_name(job)} waits though {_gpus(len(cards))} {_is(len(cards))} free on {host}"
                yield HealthIssue(level="attention", message=message, job=job.id, host=host)
                return


def _is_large_enough(card: WorkerGpu, job: Job) -> bool:
    if job.gpu_model is not None and not is_model(card.name, job.gpu_model):
        return False
    asked = max(job.memory or 0, job.gpu_memory or 0)
    return card.memory_total is None or card.memory_total >= asked


def _free_cards(machine: Machine, now: float, seconds: float) -> list[WorkerGpu]:
    if not machine.there or machine.paused:
        return []
    free = [card for card in machine.gpus if card.state == "free" and not card.kept_for and not _is_unread(card)]
    return [card for card in free if _lasts(card, machine, now, seconds)]


def _lasts(card: WorkerGpu, machine: Machine, now: float, seconds: float) -> bool:
    return now - _since(card, machine) >= seconds


def _is_unread(card: WorkerGpu) -> bool:
    """A GPU with a job may be unreadable too."""
    return card.state == "unknown" or card.unread_since is not None


def _unread_since(card: WorkerGpu, machine: Machine) -> float:
    return _since(card, machine) if card.unread_since is None else max(card.unread_since, machine.started)


def _since(card: WorkerGpu, machine: Machine) -> float:
    """Not before the start of the worker, regardless of its clock."""
    return machine.started if card.since is None else max(card.since, machine.started)


# Texts


def _name(job: Job) -> str:
    return quoted_label(job, _LONGEST_NAME)


def _jobs(count: int, which: str = "") -> str:
    return f"1 {which}job" if count == 1 else f"{count} {which}jobs"


def _jobs_wait(count: int) -> str:
    return "1 job waits" if count == 1 else f"{count} jobs wait"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
