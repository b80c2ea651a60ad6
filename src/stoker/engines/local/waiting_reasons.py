"""Explains why a job waits: `waits for 2 GPUs with 20 GiB: GPU 0 is used by alice's python (pid 4242), …`."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, assert_never

from stoker.engines.engine import Reservation
from stoker.engines.local.capacity import (
    Busy,
    Free,
    Held,
    MemoryTaken,
    Obstacle,
    OtherModel,
    OutOfRotation,
    Stopping,
    TooSmall,
    UnreadableGpu,
    UsedByOthers,
)
from stoker.engines.local.host_capacity import HostTaken, HostTooSmall, NotForThisMachine
from stoker.engines.local.placement import (
    CannotFit,
    CpuSlotsTaken,
    NoGpusSeen,
    NotEnoughGpus,
    WaitingReason,
)
from stoker.units import format_memory, format_percent, list_all, memory_formatter, name_some

Amount: TypeAlias = Callable[[int], str]
"""Formats all amounts of memory in a sentence in one unit."""


def why_waiting(reason: WaitingReason) -> str:
    """The predicate of a sentence about the job, without a full stop."""
    if isinstance(reason, NotForThisMachine | HostTooSmall | HostTaken):
        return _of_host(reason)
    match reason:
        case NotEnoughGpus(memory=memory, obstacles=obstacles):
            amount = memory_formatter(memory or reason.card_memory or 0, _compared(obstacles))
            return f"waits for {_wanted(reason, amount)}: {_by_gpu(obstacles, amount)}"
        case CannotFit(memory=memory):
            amount = memory_formatter(reason.card_memory or memory or 0, (reason.largest,))
            there = _what_there_is(reason, amount)
            return f"can never start on this machine: it asks for {_wanted(reason, amount)}, {there}"
        case NoGpusSeen(problem=problem):
            return f"waits for {_wanted(reason)}: the GPUs of this machine cannot be read ({problem})"
        case CpuSlotsTaken(at_once=0):
            return "can never start on this machine: it takes no jobs without a GPU"
        case CpuSlotsTaken(at_once=at_once):
            running = "1 is running" if at_once == 1 else f"{at_once} are running"
            return f"waits for another job without a GPU to end: {running}, the limit of this machine"
        case _:
            assert_never(reason)


def _of_host(reason: NotForThisMachine | HostTooSmall | HostTaken) -> str:
    match reason:
        case NotForThisMachine():
            return f"is not for this machine: {_why_not_here(reason)}"
        case HostTooSmall():
            return f"can never start on this machine: it asks for {_too_much(reason)}"
        case HostTaken():
            return f"waits for {_taken(reason)}"


def describe_obstacle(obstacle: Obstacle) -> str:
    """The predicate of a sentence about one GPU: `is used by alice's python (pid 4242)`."""
    return _predicate(obstacle, format_memory).one


class _Predicate(NamedTuple):
    """Singular and plural of a predicate."""

    one: str
    several: str


def _compared(obstacles: Sequence[tuple[int, Obstacle]]) -> Iterator[int]:
    """The amounts that people compare with the request."""
    for _, obstacle in obstacles:
        if isinstance(obstacle, TooSmall):
            yield obstacle.usable
        elif isinstance(obstacle, Held) and obstacle.left is not None:
            yield obstacle.left


def _by_gpu(obstacles: Sequence[tuple[int, Obstacle]], amount: Amount) -> str:
    """Groups GPUs with the same obstacle."""
    indices: dict[_Predicate, list[int]] = {}
    for index, obstacle in obstacles:
        indices.setdefault(_predicate(obstacle, amount), []).append(index)
    return ", ".join(
        f"GPU {gpus[0]} {predicate.one}"
        if len(gpus) == 1
        else f"GPUs {list_all([str(gpu) for gpu in gpus])} {predicate.several}"
        for predicate, gpus in indices.items()
    )


def _predicate(obstacle: Obstacle, amount: Amount) -> _Predicate:
    match obstacle:
        case OutOfRotation(reason=reason):
            predicate = _being(f"out of rotation ({reason})")
        case UsedByOthers(processes=processes):
            predicate = _being(f"used by {name_some(processes)}")
        case UnreadableGpu(reason=reason):
            predicate = _Predicate(f"cannot be read ({reason})", f"cannot be read ({reason})")
        case OtherModel(name=name):
            predicate = _being(f"of another model ({name})")
        case TooSmall(usable=usable):
            predicate = _having(f"only {amount(usable)}")
        case Busy(peak=peak, free_below=free_below):
            predicate = _being(
                f"{format_percent(peak)} busy (free below {format_percent(free_below)}) with no process seen there"
            )
        case MemoryTaken(used=used):
            predicate = _having(f"{format_memory(used)} in use by no process that is seen")
        case Held():
            predicate = _held(obstacle, amount)
        case Stopping(jobs=jobs):
            predicate = _being(f"being freed ({_jobs(jobs)} {'is' if len(jobs) == 1 else 'are'} stopping)")
        case Reservation(job=job, wanted=wanted, ready=ready):
            count = "1 GPU" if wanted == 1 else f"{wanted} GPUs"
            predicate = _being(f"reserved for job {job} ({count}, has {len(ready)})")
        case Free():
            predicate = _being("free")
        case _:
            assert_never(obstacle)
    return predicate


def _held(obstacle: Held, amount: Amount) -> _Predicate:
    if obstacle.left is not None:
        left = f"{amount(obstacle.left)} left beside {_jobs(obstacle.jobs)}"
        until = "" if obstacle.frees_in is None else f", more in at most {_rounded_up(obstacle.frees_in)}"
        return _having(f"{left}{until}")
    if obstacle.frees_in is not None:
        until = f"in at most {_rounded_up(obstacle.frees_in)}"
        return _Predicate(f"frees {until}", f"free {until}")
    return _being(f"held by {_jobs(obstacle.jobs)}")


def _being(what: str) -> _Predicate:
    return _Predicate(f"is {what}", f"are {what}")


def _having(what: str) -> _Predicate:
    return _Predicate(f"has {what}", f"have {what}")


def _wanted(reason: CannotFit | NoGpusSeen | NotEnoughGpus, amount: Amount = format_memory) -> str:
    """`2 GPUs of model a100 or h100, each of at least 40 GiB, with 20 GiB`."""
    count = "a GPU" if reason.gpus == 1 else f"{reason.gpus} GPUs"
    model = "" if reason.model is None else f" of model {' or '.join(reason.model.split('|'))}"
    card = "" if reason.card_memory is None else f" of at least {amount(reason.card_memory)}"
    memory = "" if reason.memory is None else f" with {amount(reason.memory)}"
    return f"{count}{model}{card}{memory}"


def _why_not_here(reason: NotForThisMachine) -> str:
    if reason.machine is not None:
        return f"it asks for {reason.machine}"
    if reason.excluded:
        return f"it excludes {reason.name}"
    labels = "label" if len(reason.labels) == 1 else "labels"
    return f"it asks for the {labels} {list_all(reason.labels)}, which this machine does not have"


def _too_much(reason: HostTooSmall) -> str:
    parts = []
    if reason.cpus > reason.cpus_here:
        parts.append(f"{_cpus(reason.cpus)}, and there are only {reason.cpus_here}")
    if reason.ram > reason.ram_here:
        amount = memory_formatter(reason.ram, (reason.ram_here,))
        parts.append(f"{amount(reason.ram)} of RAM, and there are only {amount(reason.ram_here)}")
    return "; and for ".join(parts)


def _taken(reason: HostTaken) -> str:
    """`8 CPUs: 4 are free, the others are promised to running jobs`."""
    amount = memory_formatter(reason.ram, (reason.ram_free,))
    cpus, ram = _cpus(reason.cpus), f"{amount(reason.ram)} of RAM"
    if reason.reserved_for is not None:
        wanted = list_all([what for what, asked in ((cpus, reason.cpus), (ram, reason.ram)) if asked])
        return f"{wanted}: job {reason.reserved_for} comes first, and what is free is reserved for it"
    parts = []
    if reason.cpus > reason.cpus_free:
        parts.append(f"{cpus}: {reason.cpus_free} of this machine are not promised to running jobs")
    if reason.ram > reason.ram_free:
        parts.append(f"{ram}: {amount(reason.ram_free)} of this machine are not promised to running jobs")
    return "; and for ".join(parts)


def _cpus(count: int) -> str:
    return "1 CPU" if count == 1 else f"{count} CPUs"


def _what_there_is(reason: CannotFit, amount: Amount) -> str:
    if reason.gpus_here == 0:
        return "and there is none"
    here = "there is only 1" if reason.gpus_here == 1 else f"there are only {reason.gpus_here}"
    if reason.gpus_here < reason.gpus:
        return f"and {here}"
    if reason.other_models:
        return f"and those here are {list_all(reason.other_models)}"
    if reason.large_enough:
        can = "can give that much" if reason.model is None else "are so" if reason.large_enough > 1 else "is so"
        return f"and only {reason.large_enough} of the {reason.gpus_here} here {can}"
    if reason.card_memory is not None and reason.memory is None:
        return f"and the largest has {amount(reason.largest)}"
    return f"and the largest can give {amount(reason.largest)}"


def _jobs(jobs: Sequence[str]) -> str:
    return f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {name_some(jobs)}"


def _rounded_up(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h`, `1 h 20 min`, `2 days`: rounded up, for "at most"."""

    if seconds <= 90:
        return f"{max(1, math.ceil(seconds))} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{math.ceil(minutes / (24 * 60))} days"
