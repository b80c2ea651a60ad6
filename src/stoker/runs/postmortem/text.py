"""Text parts of a report: escaped Markdown, process tree, stacks, and a chart narrow enough for a phone."""

import math
import re
from collections.abc import Container, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from stoker.gpus.model import Look, Maybe, Unknown, known
from stoker.logs.terminal import plain_line, plain_text
from stoker.masking import masked_command
from stoker.runs.postmortem.causes import CHILD, JOIN, cause_of, own_call, waits_for_work
from stoker.runs.postmortem.facts import RunFacts
from stoker.runs.postmortem.processes import ProcessInfo
from stoker.runs.postmortem.stacks import Frame, Thread
from stoker.units import format_duration, format_memory, format_percent, list_all

# Markdown

# An underscore inside a word is not markup, and file names are easier to read without backslashes.
_MARKUP: Final = re.compile(r"[\\`*\[\]<>~|]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
# The start of a line that would make it a heading or a list.
_FIRST: Final = re.compile(r"^(?:(\d{1,9})(?=[.)](?: |$))|(?=[#+=-]))")
_TICKS: Final = re.compile("`+")
_SHORTEST_FENCE: Final = 3


def prose(text: str) -> str:
    """Escapes part of a sentence, on one line."""
    return _FIRST.sub(r"\g<1>\\", _MARKUP.sub(r"\\\g<0>", plain_line(text)))


def code(text: str) -> str:
    """Formats a name or command in a sentence, on one line."""
    shown = plain_line(text)
    if not shown:
        return "(empty)"
    ticks = "`" * (_longest_run(shown) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def block(text: str) -> str:
    """Formats verbatim lines, with fences that none of them can close."""
    shown = plain_text(text).strip("\n")
    fence = "`" * max(_longest_run(shown) + 1, _SHORTEST_FENCE)
    return f"{fence}text\n{shown}\n{fence}"


def listed(words: list[str], most: int = 8) -> str:
    """`a`, `a and b`, `a, b and c`, `a, b and 5 more`."""
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return list_all(words) if words else ""


def clipped(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 1]}…"


def _longest_run(text: str) -> int:
    return max(map(len, _TICKS.findall(text)), default=0)


# Processes and stacks

# Wider lines scroll sideways on a phone; this width still shows the script's name.
TREE_WIDTH: Final = 60
FRAME_WIDTH: Final = 90
# Limits for a run of a thousand processes; the rest is counted.
MOST_PROCESSES: Final = 40
MOST_GROUPS: Final = 8
MOST_THREADS: Final = 6
MOST_OTHERS: Final = 12
# The innermost calls show where it waits, outer user code shows why.
INNERMOST: Final = 12
OWN: Final = 6

# The outermost calls of all threads and child processes, which are not informative.
_OUTERMOST: Final = frozenset({
    ("threading.py", "run"), ("threading.py", "_bootstrap_inner"), ("threading.py", "_bootstrap"),
    ("multiprocessing/process.py", "run"), ("multiprocessing/process.py", "_bootstrap"),
    ("multiprocessing/spawn.py", "_main"), ("multiprocessing/spawn.py", "spawn_main"), ("<string>", "<module>"),
})  # fmt: skip


def process_tree(facts: RunFacts) -> str:
    """One row for each process, children below their parents."""
    rows = [_row(process, depth, facts.spec.directory) for process, depth in _nested(facts.processes)]
    shown = ["    PID S   CPU  MEM  COMMAND", *rows[:MOST_PROCESSES]]
    if len(rows) > MOST_PROCESSES:
        shown.append(f"… and {len(rows) - MOST_PROCESSES} more")
    return "\n".join(shown)


def stacks_as_markdown(facts: RunFacts, suspects: Sequence[int] = ()) -> str:
    """A part per distinct stack, then a line per process without a stack.

    Suspects come first, then the most informative stacks.
    """
    groups = sorted(_groups(facts), key=lambda group: set(group[1]).isdisjoint(suspects))
    parts = [_group(facts, threads, pids) for threads, pids in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        rest = sum(len(pids) for _, pids in groups[MOST_GROUPS:])
        parts.append(f"… and {rest} more processes.")
    others = list(_others(facts))
    if len(others) > MOST_OTHERS:
        others = [*others[:MOST_OTHERS], f"- … and {len(others) - MOST_OTHERS} more"]
    if others:
        parts.append("\n".join([*(["### Without a stack", ""] if groups else []), *others]))
    return "\n\n".join(parts) or "No process was left."


def where_it_was(facts: RunFacts) -> Iterator[str]:
    """`load (data.py:17)` for each distinct position of a main thread in user code."""
    seen: set[str] = set()
    on_gpus = facts.pids_on_gpus()
    for threads, pids in _groups(facts):
        if on_gpus and on_gpus.isdisjoint(pids) and cause_of(threads[0]) in (CHILD, JOIN):
            continue  # it only waits for the processes on the GPUs
        frame = own_call(threads[0])
        if frame and (place := shown_frame(frame, facts.spec.directory)) not in seen:
            seen.add(place)
            yield place


def shown_frame(frame: Frame, directory: str) -> str:
    """`load (data.py:17)`, with the file relative to the directory of the run."""
    file = frame.short_file
    if frame.own and directory and PurePosixPath(file).is_relative_to(directory):
        file = str(PurePosixPath(file).relative_to(directory))
    return f"{frame.function} ({file}:{frame.line})"


def _nested(processes: Sequence[ProcessInfo]) -> Iterator[tuple[ProcessInfo, int]]:
    """Each process with its depth in the tree."""
    pids = {process.pid for process in processes}
    children: dict[int, list[ProcessInfo]] = {}
    roots = [process for process in processes if process.parent not in pids or process.parent == process.pid]
    for process in processes:
        if process not in roots:
            children.setdefault(process.parent, []).append(process)
    # Parents are read at different times and may even form a cycle, whose processes become roots.
    waiting = [(process, 0) for process in reversed([*roots, *processes])]
    seen: set[int] = set()
    while waiting:
        process, depth = waiting.pop()
        if process.pid not in seen:
            seen.add(process.pid)
            yield process, depth
            waiting += [(child, depth + 1) for child in reversed(children.get(process.pid, []))]


def _row(process: ProcessInfo, depth: int, directory: str) -> str:
    indent = f"{' ' * (min(depth, 8) - 1)}└ " if depth else ""
    command = _short_command(process.command, directory) if known(process.command) else f"[{plain_line(process.name)}]"
    memory = format_memory(process.memory).replace(" ", "").removesuffix("iB").removesuffix("B")
    columns = f"{process.pid:>7} {plain_line(process.state)} {format_duration(process.cpu):>5} {memory:>4}"
    return clipped(f"{columns}  {indent}{command}", TREE_WIDTH)


def _short_command(command: str, directory: str) -> str:
    """The command without directories: `python train.py`."""
    program, _, arguments = plain_line(masked_command(command)).partition(" ")
    shown = f"{program.rpartition('/')[2]} {arguments}".rstrip()
    return shown.replace(f" {directory.rstrip('/')}/", " ") if directory.rstrip("/") else shown


def _groups(facts: RunFacts) -> list[tuple[tuple[Thread, ...], list[int]]]:
    """Groups processes by stack: those on GPUs first, then the most informative."""
    groups: dict[object, tuple[tuple[Thread, ...], list[int]]] = {}
    for stack in facts.stacks:
        if known(stack.threads) and stack.threads:
            same = tuple((thread.name, thread.frames) for thread in stack.threads)
            groups.setdefault(same, (stack.threads, []))[1].append(stack.pid)
    on_gpus = facts.pids_on_gpus()
    return sorted(groups.values(), key=lambda group: (on_gpus.isdisjoint(group[1]), _rank(group[0][0])))


def _rank(thread: Thread) -> tuple[bool, bool, bool]:
    return waits_for_work(thread), own_call(thread) is None, cause_of(thread) is None


def _group(facts: RunFacts, threads: Sequence[Thread], pids: Sequence[int]) -> str:
    processes = [process for pid in pids if (process := facts.process(pid))]
    states = list(dict.fromkeys(process.in_words() for process in processes))
    lines = [f"### {_heading(pids, processes)}", ""]
    if states:
        lines += [f"In the kernel: {prose('; or '.join(states[:2]))}.", ""]
    return "\n".join([*lines, block("\n".join(_threads(threads, facts.spec.directory)))])


def _heading(pids: Sequence[int], processes: Sequence[ProcessInfo]) -> str:
    names = list(dict.fromkeys(process.name for process in processes))
    named = f" ({code(clipped(plain_line(names[0]), 30))})" if len(names) == 1 else ""
    if len(pids) == 1:
        return f"Process {pids[0]}{named}"
    return f"{len(pids)} processes{named}: {listed([str(pid) for pid in pids])}"


def _threads(threads: Sequence[Thread], directory: str) -> Iterator[str]:
    """The main thread, then the others, grouped by stack."""
    same: dict[tuple[Frame, ...], list[Thread]] = {}
    for thread in threads[1:]:
        same.setdefault(thread.frames, []).append(thread)
    others = sorted(same.values(), key=lambda alike: (alike[0].status == "idle", own_call(alike[0]) is None))
    shown = [[threads[0]], *others]
    for alike in shown[:MOST_THREADS]:
        yield _thread_names(alike)
        yield from _calls(alike[0], directory)
    if rest := sum(len(alike) for alike in shown[MOST_THREADS:]):
        yield f"… and {rest} more threads"


def _thread_names(alike: Sequence[Thread]) -> str:
    names = listed([plain_line(thread.name) or "unnamed thread" for thread in alike], most=3)
    return f"{names} ({plain_line(alike[0].status)})" if len(alike) == 1 else f"{len(alike)} threads: {names}"


def _calls(thread: Thread, directory: str) -> Iterator[str]:
    """The innermost calls, and marked calls in user code."""
    frames = list(thread.frames)
    while len(frames) > 1 and _is_outermost(frames[-1]):
        frames.pop()
    own = [place for place, frame in enumerate(frames) if frame.own][:OWN]
    kept = sorted({*range(min(INNERMOST, len(frames))), *own})
    for before, place in zip([-1, *kept], kept, strict=False):
        if place > before + 1:
            yield f"  … {place - before - 1} more"
        mark = ">" if frames[place].own else " "
        yield clipped(f"{mark} {plain_line(shown_frame(frames[place], directory))}", FRAME_WIDTH)
    if rest := len(frames) - 1 - max(kept, default=len(frames) - 1) + thread.cut:
        yield f"  … {rest} more"


def _is_outermost(frame: Frame) -> bool:
    return (frame.short_file, frame.function.rpartition(".")[2]) in _OUTERMOST


def _others(facts: RunFacts) -> Iterator[str]:
    """The processes without a stack, with reasons."""
    reasons = {stack.pid: _reason(stack.threads) for stack in facts.stacks}
    for pid in dict.fromkeys([*(process.pid for process in facts.processes), *reasons]):
        reason = reasons.get(pid, "it was not read")
        if reason is None:
            continue
        process = facts.process(pid)
        about = f" ({code(process.name)}): {prose(process.in_words())};" if process else ":"
        yield f"- {pid}{about} {prose(reason)}"


def _reason(threads: object) -> str | None:
    if isinstance(threads, Unknown):
        return threads.reason
    return None if threads else "none of its threads runs Python"


# The chart

# The width of a code block on a phone held upright.
WIDTH: Final = 40
# The lowest block means exactly zero.
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_UNKNOWN: Final = "?"
# Room for ` 100%` after the bars.
_CAPTION: Final = 5


class Sample(NamedTuple):
    """The activity of one GPU in the `span` seconds before a moment."""

    at: float
    """Monotonic seconds."""
    span: float
    peak: Maybe[float]
    """The peak utilization between 0 and 1."""


def series_of(looks: Sequence[Look], only: Container[str] | None = None) -> list[tuple[str, list[Sample]]]:
    """`GPU 0` and its samples, for each GPU (of these uuids), by index."""
    indices = {gpu.uuid: gpu.index for look in looks for gpu in look.gpus if only is None or gpu.uuid in only}
    samples: dict[str, list[Sample]] = {uuid: [] for uuid in sorted(indices, key=lambda uuid: (indices[uuid], uuid))}
    before: float | None = None
    for look in looks:
        since = look.at - before if before is not None else 0.0
        before = look.at
        by_uuid = {reading.uuid: reading for reading in look.readings}
        for uuid, of_gpu in samples.items():
            if reading := by_uuid.get(uuid):
                peak = reading.utilization.peak if known(reading.utilization) else reading.utilization
                of_gpu.append(Sample(look.at, reading.span or since, peak))
            elif look.problem:
                of_gpu.append(Sample(look.at, since, look.problem))
    return [(f"GPU {indices[uuid]}", of_gpu) for uuid, of_gpu in samples.items()]


def chart(series: Sequence[tuple[str, Sequence[Sample]]], window: float, *, below: float | None = None) -> str:
    """The peak in each part of the `window` seconds before the last sample, as block characters."""
    last = max((sample.at for _, samples in series for sample in samples), default=None)
    if last is None:
        return "no readings"
    room = max(len(label) for label, _ in series)
    columns = WIDTH - room - 1 - _CAPTION
    lines = []
    for label, samples in series:
        bins = _bins(samples, last - window, window / columns, columns)
        bars = "".join(_mark(values, below) for values in bins)
        peak = _peak([value for values in bins for value in values])
        lines.append(f"{label:<{room}} {bars}{_caption(peak):>{_CAPTION}}")
    begin = f"{format_duration(window)} before"
    notes = ["on the right: the peak"]
    if below is not None:
        notes.append(f"idle: below {format_percent(below)}")
    if any(_UNKNOWN in line for line in lines):
        notes.append("?: could not be read")
    return "\n".join([*lines, f"{'':<{room}} {begin}{'the end':>{columns - len(begin)}}", *notes])


def _bins(samples: Sequence[Sample], begin: float, width: float, columns: int) -> list[list[Maybe[float]]]:
    bins: list[list[Maybe[float]]] = [[] for _ in range(columns)]
    for sample in samples:
        ended = (sample.at - begin) / width
        if ended <= 0:
            continue
        # A look at the very end of a column belongs to that column, not to the next.
        last = min(math.ceil(ended), columns) - 1
        # It also counts in earlier columns that it covers at least by half; less would smear a peak over two.
        first = min(math.ceil(max(ended - sample.span / width, 0.0) - 0.5), last)
        for place in range(first, last + 1):
            bins[place].append(sample.peak)
    return bins


def _mark(values: Sequence[Maybe[float]], below: float | None) -> str:
    """The character of a column. A column that is partly unknown and otherwise idle is unknown."""
    peak = _peak(values)
    if peak is None:
        return _UNKNOWN if values else " "
    is_idle = peak < below if below is not None else peak == 0
    if is_idle and not all(map(known, values)):
        return _UNKNOWN
    return _BLOCKS[math.ceil(peak * (len(_BLOCKS) - 1))]


def _peak(values: Sequence[Maybe[float]]) -> float | None:
    return max((value for value in values if known(value)), default=None)


def _caption(peak: float | None) -> str:
    """The peak of the whole window, without rounding small values to zero."""
    if peak is None:
        return _UNKNOWN
    return "<1%" if 0 < peak < 0.005 else format_percent(peak)
