"""Compares the ranks of a distributed job, to find those that the others wait for. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from stoker.gpus.model import Look, Reading, known
from stoker.gpus.nvidia import RESET_XIDS
from stoker.runs.postmortem.causes import cause_of, library_calls
from stoker.runs.postmortem.facts import RunFacts
from stoker.runs.postmortem.processes import RankNumber
from stoker.runs.postmortem.stacks import Frame, Thread
from stoker.runs.postmortem.text import clipped, code, listed, prose, shown_frame
from stoker.units import capitalized, format_percent

Pattern = Literal["gone", "failed", "elsewhere", "different", "uneven", "behind", "together", "unclear"]
"""The difference between ranks, strongest first: a process is gone, its GPU has failed, it is not in the collective,
the collectives differ, its GPU is unused, it is behind; `together`: all are in the same call."""

# A process that was seen on a GPU only once is transient, such as a health check.
LEAST_LOOKS: Final = 2
# A GPU at or above the first value spins in a collective; one below the second has not entered it.
SPINS_FROM: Final = 0.95
STILL_BELOW: Final = 0.05
# `stoker.step()` reports a step within this many seconds.
_REPORTED_WITHIN: Final = 1.0
_MOST_GROUPS: Final = 6
_PLACE_WIDTH: Final = 100

# Unambiguous names. Those of the next pattern count only in a library for collectives.
_COLLECTIVE: Final = re.compile(r"^(?:\w+\.)*_?(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)\w*$")
_IN_A_LIBRARY: Final = re.compile(
    r"^(?:\w+\.)*_?(?:broadcast|barrier|monitored_barrier|reduce|gather|scatter|i?send|i?recv|batch_isend_irecv)"
    r"\w*$"
)
_LIBRARY: Final = re.compile(r"^(?:torch/distributed/|deepspeed/comm/|horovod/|mpi4py/|jax/experimental/multihost)")
# Calls that wait for the GPU, on which collectives run.
_WAITS_FOR_GPU: Final = re.compile(
    r"^(?:\S*\.)?(?:synchronize|wait|backward|_?run_backward|_engine_run_backward) torch/(?!distributed/|utils/data/)"
)


class Rank(NamedTuple):
    """A process of the job on a GPU."""

    pid: int
    gpu: str = ""
    """`GPU 3`."""
    number: int | None = None
    is_gone: bool = False
    trouble: str = ""
    """A known problem of its GPU; empty without one."""
    utilization: float | None = None
    """The mean utilization of its GPU at the last look."""
    thread: Thread | None = None
    """Its most informative thread."""
    steps: int | None = None
    node: str = ""
    """Its machine, in a multi-node job."""

    def __str__(self) -> str:
        if self.number is None:
            return f"the process on {self.gpu} (pid {self.pid})" if self.gpu else f"process {self.pid}"
        return f"rank {self.number} ({self.gpu})" if self.gpu else f"rank {self.number}"


class Comparison(NamedTuple):
    """The result of comparing ranks."""

    pattern: Pattern
    sentences: tuple[str, ...]
    """Findings in Markdown, strongest first."""
    suspects: tuple[int, ...] = ()
    """The pids of the ranks that the others wait for."""
    suspect_nodes: tuple[str, ...] = ()
    """The machine of each suspect."""

    def suspects_on(self, node: str) -> tuple[int, ...]:
        """The suspects on this machine."""
        return tuple(pid for pid, place in zip(self.suspects, self.suspect_nodes, strict=True) if place == node)


class _Place(NamedTuple):
    """The position of a rank in its code."""

    collective: str
    """The name of its collective, if any."""
    waits_for_gpu: bool
    line: str
    """`main (train.py:30)`."""

    def __str__(self) -> str:
        if self.collective:
            return f"{code(self.collective)}, called in {code(self.line)}"
        return f"{code(self.line)}, waiting for its GPU" if self.waits_for_gpu else code(self.line)


def compare(
    ranks: Sequence[Rank], *, total: int | None = None, directory: str = "", blur: float = 0.0
) -> Comparison | None:
    """Compares ranks; None for fewer than two.

    `total`: the number of ranks on all machines, if known. `blur`: a difference of steps up to this is meaningless.
    """
    if len(ranks) < 2:
        return None
    found = _Comparing(ranks, total, directory, blur)
    found.compare()
    suspects = [(rank.pid, rank.node) for rank in found.suspects]
    return Comparison(
        found.pattern,
        tuple(found.sentences),
        tuple(pid for pid, _node in suspects),
        tuple(node for _pid, node in suspects),
    )


class _Comparing:
    """Collects findings; the first one sets the pattern and the suspects."""

    def __init__(self, ranks: Sequence[Rank], total: int | None, directory: str, blur: float) -> None:
        self.pattern: Pattern = "unclear"
        self.sentences: list[str] = []
        self.suspects: list[Rank] = []
        self._ranks = ranks
        self._live = [rank for rank in ranks if not rank.is_gone]
        self._total = total
        self._blur = blur
        self._places = {rank: _place(rank.thread, directory) for rank in self._live if rank.thread is not None}

    def compare(self) -> None:
        self._gone()
        self._failed()
        self._elsewhere()
        self._stacks()
        self._utilization()
        self._steps()

    def _note(self, pattern: Pattern, sentence: str, suspects: Iterable[Rank] = ()) -> None:
        self.sentences.append(sentence)
        if self.pattern in {"unclear", "together"}:
            self.pattern = pattern
        self.suspects += [rank for rank in suspects if rank not in self.suspects]

    def _gone(self) -> None:
        gone = [rank for rank in self._ranks if rank.is_gone]
        if gone:
            one = len(gone) == 1
            ended = "its process has ended" if one else "their processes have ended"
            wait = ", and the others wait for it" if one else ", and the others wait for them"
            self._note("gone", f"**{_subject(gone)} {'is' if one else 'are'} gone**: {ended}{wait}.", gone)

    def _failed(self) -> None:
        for rank in (rank for rank in self._live if rank.trouble):
            self._note("failed", f"**The GPU of {rank} has failed**: {prose(rank.trouble)}.", [rank])

    def _elsewhere(self) -> None:
        if not any(place.collective for place in self._places.values()):
            return
        away = {rank: place for rank, place in self._places.items() if not (place.collective or place.waits_for_gpu)}
        for place, ranks in _grouped(away):
            one = len(ranks) == 1
            cause = cause_of(ranks[0].thread) if ranks[0].thread is not None else None
            does = f" ({_lowered(cause.title)})" if cause is not None else ""
            self._note(
                "elsewhere",
                f"**{_subject(ranks)} {'is' if one else 'are'} not in the collective** that the others wait in, but in "
                f"{place}{does}.",
                ranks,
            )

    def _stacks(self) -> None:
        waiting = {rank: place for rank, place in self._places.items() if place.collective}
        groups = _grouped(waiting or self._places)
        if not groups:
            return
        if len(groups) == 1:
            self._same(*groups[0])
            return
        if waiting:
            names = {place.collective for place, _ in groups}
            differ = "are in different collectives" if len(names) > 1 else "call the same collective in different lines"
            self._note("different", f"**The ranks {differ}**: these never complete.")
        for place, ranks in groups[:_MOST_GROUPS]:
            self.sentences.append(f"{_subject(ranks)}: {place}.")
        if rest := sum(len(ranks) for _, ranks in groups[_MOST_GROUPS:]):
            self.sentences.append(f"{rest} more ranks are elsewhere.")

    def _same(self, place: _Place, ranks: Sequence[Rank]) -> None:
        if len(ranks) < len(self._ranks):
            verb = "is" if len(ranks) == 1 else "are"
            self.sentences.append(f"{_subject(ranks)} {verb} in {place}.")
            return
        both = "Both" if len(ranks) == 2 else f"All {len(ranks)}"
        is_blamed = self.pattern != "unclear"
        self._note("together", f"{both} ranks are in {place}.")
        if is_blamed or not place.collective:
            return
        if self._total is not None and self._total > len(ranks):
            self.sentences.append(
                f"The job has {self._total} ranks, and {len(ranks)} of them run here: the missing one is on another"
                " machine."
            )
        else:
            self.sentences.append(
                "No rank is missing: the collective itself does not complete, because of a mismatch of shapes or"
                " groups, or because of the connection between the GPUs."
            )

    def _utilization(self) -> None:
        spin = [rank for rank in self._live if rank.utilization is not None and rank.utilization >= SPINS_FROM]
        still = [rank for rank in self._live if rank.utilization is not None and rank.utilization < STILL_BELOW]
        if spin and still:
            has = "has" if len(still) == 1 else "have"
            self._note(
                "uneven",
                f"{_subject(spin)}: {_mean(spin)} used; {_names(still)}: {_mean(still)}. **{_subject(still)} {has} not"
                f" entered the collective** that the others wait in, or {has} left it.",
                () if self.suspects else still,
            )

    def _steps(self) -> None:
        counted = {rank: rank.steps for rank in self._live if rank.steps is not None}
        most = max(counted.values(), default=0)
        behind = [rank for rank, steps in counted.items() if steps < most - self._blur]
        if behind and len(behind) <= len(counted) / 2:
            least = min(counted[rank] for rank in behind)
            verb = "is" if len(behind) == 1 else "are"
            self._note(
                "behind",
                f"**{_subject(behind)} {verb} behind**: {least} steps, while the others made {most}.",
                () if self.suspects else behind,
            )


def _place(thread: Thread, directory: str) -> _Place:
    found = _collective(thread)
    outside = thread.frames if found is None else thread.frames[thread.frames.index(found) + 1 :]
    frame = next((frame for frame in outside if frame.own), None) or next(iter(thread.frames), None)
    line = clipped(shown_frame(frame, directory), _PLACE_WIDTH) if frame is not None else "a call without a name"
    waits = any(_WAITS_FOR_GPU.search(f"{call.function} {call.short_file}") for call in library_calls(thread))
    return _Place(collective_of(thread), waits, line)


def collective_of(thread: Thread) -> str:
    """The innermost collective on a stack, if any."""
    found = _collective(thread)
    return found.function.rpartition(".")[2] if found is not None else ""


def _collective(thread: Thread) -> Frame | None:
    """The frame of the innermost collective. Outer library frames do not count: wrapped models always have them."""
    inner = library_calls(thread)
    for frame in (*inner, *(frame for frame in thread.frames if frame.own)):
        in_library = not frame.own and bool(_LIBRARY.match(frame.short_file))
        if _COLLECTIVE.match(frame.function) or (in_library and _IN_A_LIBRARY.match(frame.function)):
            return frame
    return next((frame for frame in inner if _LIBRARY.match(frame.short_file)), None)


def _grouped(places: Mapping[Rank, _Place]) -> list[tuple[_Place, list[Rank]]]:
    """Groups ranks by position, smallest group first, since it is the odd one out."""
    groups: dict[_Place, list[Rank]] = {}
    for rank, place in places.items():
        groups.setdefault(place, []).append(rank)
    return sorted(groups.items(), key=lambda group: len(group[1]))


def _subject(ranks: Sequence[Rank]) -> str:
    return capitalized(_names(ranks))


def _names(ranks: Sequence[Rank]) -> str:
    """`rank 3 (GPU 3)`, `ranks 0-2 and 5`, `the processes on GPU 0 and GPU 1`."""
    if len(ranks) == 1:
        return str(ranks[0])
    numbers = sorted(rank.number for rank in ranks if rank.number is not None)
    if len(numbers) == len(ranks):
        return f"ranks {listed(list(_ranges(numbers)))}"
    if all(rank.gpu for rank in ranks):
        return f"the processes on {listed([rank.gpu for rank in ranks])}"
    return f"processes {listed([str(rank.pid) for rank in ranks])}"


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """`0-2`, `5`."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place < len(numbers) and numbers[place] == numbers[place - 1] + 1:
            continue
        first, last = numbers[start], numbers[place - 1]
        if last - first >= 2:
            yield f"{first}-{last}"
        else:
            yield from map(str, numbers[start:place])
        start = place


def _mean(ranks: Sequence[Rank]) -> str:
    known_values = [rank.utilization for rank in ranks if rank.utilization is not None]
    return format_percent(sum(known_values) / len(known_values))


def _lowered(title: str) -> str:
    return title[:1].lower() + title[1:]


# From the facts of a run


def compare_ranks(facts: RunFacts) -> Comparison | None:
    """Compares the ranks of a run; None for fewer than two processes on GPUs."""
    nodes = [facts, *(one.facts for one in facts.others if one.facts is not None)]
    totals = [process.rank.total for one in nodes for process in one.processes if process.rank is not None]
    total = max((each for each in totals if each is not None), default=None)
    # A process with many steps per second reports only some of them.
    lasted = max((facts.status.ended or 0.0) - facts.spec.started, 1.0)
    blur = max((each.steps for one in nodes for each in one.steps), default=0) / lasted * _REPORTED_WITHIN
    ranks = [rank for one in nodes for rank in ranks_of(one)]
    if len({rank.number for rank in ranks}) < len(ranks):
        ranks = [rank._replace(number=None) for rank in ranks]  # the numbers are local to each machine
    return compare(ranks, total=total, directory=facts.spec.directory, blur=blur if blur >= 1 else 0.0)


def ranks_of(facts: RunFacts) -> list[Rank]:
    """The job's processes on GPUs, including ended ones, in the order of GPUs."""
    alive = {process.pid: process for process in facts.processes if not process.ended}
    labels, seen = _seen_on_gpus(facts.looks, frozenset(alive))
    last = {reading.uuid: reading for reading in facts.looks[-1].readings} if facts.looks else {}
    threads = {stack.pid: _telling(stack.threads) for stack in facts.stacks if known(stack.threads) and stack.threads}
    progress = facts.status.progress
    steps = {one.pid: one.steps for one in progress.ranks} if progress is not None else {}
    # The files of the ranks are newer than the status.
    steps |= {one.pid: one.steps for one in facts.steps}
    found: dict[int, Rank] = {}
    for uuid, counts in seen.items():
        here = [pid for pid in counts if pid in alive]
        gone = [pid for pid, looks in counts.items() if pid not in alive and looks >= LEAST_LOOKS]
        # A process that replaced another is the same rank.
        for pid in here or gone[-1:]:
            if pid not in found:
                reading = last.get(uuid)
                found[pid] = Rank(
                    pid,
                    labels[uuid],
                    is_gone=not here,
                    trouble="" if not here else _trouble(reading),
                    utilization=_mean_of(reading),
                    thread=threads.get(pid),
                    steps=steps.get(pid),
                )
    told = {one.pid: RankNumber(one.rank) for one in facts.steps if one.rank is not None}
    told |= {pid: process.rank for pid, process in alive.items() if process.rank is not None}
    ranks = _numbered(list(found.values()), told)
    if not facts.node:
        return ranks
    return [rank._replace(gpu=f"{rank.gpu} of {facts.node}", node=facts.node) for rank in ranks]


def _seen_on_gpus(looks: Sequence[Look], alive: frozenset[int]) -> tuple[dict[str, str], dict[str, dict[int, int]]]:
    """The label of each GPU, and the number of looks with each process of the job on it."""
    labels: dict[str, str] = {}
    seen: dict[str, dict[int, int]] = {}
    for look in looks:
        own = alive.union(look.job.pids if look.job is not None else ())
        for gpu, reading in zip(look.gpus, look.readings, strict=True):
            labels[gpu.uuid] = f"GPU {gpu.index}"
            for process in reading.processes if known(reading.processes) else ():
                if process.pid in own:
                    counts = seen.setdefault(gpu.uuid, {})
                    counts[process.pid] = counts.get(process.pid, 0) + 1
    return labels, seen


def _telling(threads: Sequence[Thread]) -> Thread:
    """The thread in a collective, or the main thread."""
    return next((thread for thread in threads if collective_of(thread)), threads[0])


def _trouble(reading: Reading | None) -> str:
    if reading is None:
        return "the driver does not list it any more"
    if known(reading.health) and (fatal := RESET_XIDS.intersection(reading.health.xids)):
        return f"the driver reported XID {min(fatal)}"
    return "" if known(reading.utilization) else reading.utilization.reason


def _mean_of(reading: Reading | None) -> float | None:
    return reading.utilization.mean if reading is not None and known(reading.utilization) else None


def _numbered(ranks: Sequence[Rank], told: Mapping[int, RankNumber]) -> list[Rank]:
    """The ranks with their numbers, if these are distinct. Ended processes get the missing numbers."""
    known_ranks = {rank.pid: told[rank.pid] for rank in ranks if rank.pid in told}
    numbers = {pid: rank.number for pid, rank in known_ranks.items()}
    is_complete = all(rank.pid in numbers for rank in ranks if not rank.is_gone)
    if not is_complete or len(set(numbers.values())) < len(numbers) or not numbers:
        return list(ranks)
    gone = [rank.pid for rank in ranks if rank.pid not in numbers]
    first = min(rank.number - rank.local if rank.local is not None else 0 for rank in known_ranks.values())
    missing = sorted(set(range(first, first + len(ranks))) - set(numbers.values()))
    if len(missing) == len(gone):
        numbers |= dict(zip(gone, missing, strict=True))
    return [rank._replace(number=numbers.get(rank.pid)) for rank in ranks]
