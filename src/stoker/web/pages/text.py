"""Texts about jobs and machines that stay true while time passes."""

from collections import Counter
from typing import Final, Literal

from stoker.errors import BadInputError
from stoker.queue.explanation import Why
from stoker.queue.model import GpuUse, Job
from stoker.rules.registry import conditions, in_words, policies_of
from stoker.status.model import GpuCard, Machine
from stoker.units import format_memory

# How a machine's GPUs are summed up, in the order in which people ask.
_STATES: Final[dict[GpuUse | Literal["kept"], str]] = {
    "job": "at jobs",
    "background": "background",
    "somebody": "others",
    "kept": "kept",
    "free": "free",
    "unknown": "unknown",
}
# What is added to a reason though it holds for the whole queue: the page says that once, above it.
_BESIDES: Final = "; besides, "


def reason(job: Job, why: Why) -> str:
    """Why it waits. What names a command for a terminal is left out where the page has a button for it."""
    if why.kind == "held":
        return f"held: {job.reason}" if job.reason not in {"", "held"} else "held until somebody releases it"
    if why.kind == "paused":
        return "the queue is paused"
    if why.kind == "no worker":
        return "no worker is there"
    if why.kind == "workers paused":
        return why.reason.partition(":")[0]
    return why.reason.partition(_BESIDES)[0]


def took(job: Job) -> float | None:
    """How many seconds it ran."""
    if job.started is None or job.ended is None or job.ended < job.started:
        return None
    return job.ended - job.started


def because(job: Job) -> str:
    """Why it ended so, where its state does not say it all."""
    code = f"exit code {job.exit_code}" if job.exit_code not in {None, 0} else ""
    sentence = job.reason if job.reason not in {"", job.state} else ""
    if not code or code in sentence:
        return sentence
    return f"{sentence} ({code})" if sentence else code


def rules(job: Job) -> str:
    """When it is stopped because of what its GPUs do."""
    if job.gpus == 0:
        return "none: it has no GPU"
    try:
        policies = policies_of(job.policy)
    except BadInputError:
        return "one that this version does not know"
    if not policies:
        return "never stopped for that"
    return ", ".join([in_words(policies), *conditions(policies)])


def filled(gpu: GpuCard) -> float | None:
    """How much of its memory is in use, as a fraction of 1."""
    if gpu.memory_used is None or not gpu.memory_total:
        return None
    return min(1.0, gpu.memory_used / gpu.memory_total)


def hours_told(hours: float) -> str:
    """`0 h`, `12 min`, `3.5 h`, `1,204 h`: a morning after the first night is no zero."""
    minutes = round(hours * 60)
    if minutes < 60:
        return f"{minutes} min" if minutes else "0 h"
    return f"{hours:.1f}".removesuffix(".0") + " h" if hours < 10 else f"{hours:,.0f} h"


def in_use(gpu: GpuCard) -> str:
    """`61 of 80 GiB`."""
    if gpu.memory_used is None or not gpu.memory_total:
        return "unknown" if gpu.memory_used is None else format_memory(gpu.memory_used)
    size = 2**30 if gpu.memory_total >= 2**30 else 2**20
    amount = gpu.memory_used / size
    whole = amount >= 10 or amount == 0 or size == 2**20
    return (
        f"{amount:.0f} of {format_memory(gpu.memory_total)}"
        if whole
        else f"{amount:.1f} of {format_memory(gpu.memory_total)}"
    )


def tally(machine: Machine) -> str:
    """`8 GPUs: 6 at jobs, 2 free`."""
    if not machine.gpus:
        return "no GPUs"
    counts = Counter("kept" if gpu.kept_for else gpu.state for gpu in machine.gpus)
    parts = ", ".join(f"{counts[doing]} {label}" for doing, label in _STATES.items() if counts[doing])
    return f"{len(machine.gpus)} {'GPU' if len(machine.gpus) == 1 else 'GPUs'}: {parts}"
