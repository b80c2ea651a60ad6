"""The scene of a hang as text: the tree of processes, and where each one was in its code and in the kernel."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from stoker.gpus.model import Unknown, known
from stoker.masking import masked_command
from stoker.runs.postmortem.causes import cause_of, own_call, waits_for_work
from stoker.runs.postmortem.facts import RunFacts
from stoker.runs.postmortem.hints import shown_frame
from stoker.runs.postmortem.markdown import block, clipped, code, listed, prose
from stoker.runs.postmortem.process_info import ProcessInfo
from stoker.runs.postmortem.stacks import Frame, Thread
from stoker.runs.transcript import one_line
from stoker.units import format_duration, format_memory

# Wider lines scroll sideways on a phone; this still shows the script's name.
TREE_WIDTH: Final = 60
FRAME_WIDTH: Final = 90
# A run of a thousand processes is told by these; the rest is counted.
MOST_MEMBERS: Final = 40
MOST_GROUPS: Final = 8
MOST_THREADS: Final = 6
MOST_OTHERS: Final = 12
# The innermost calls say where it waits, the person's own ones further out say why.
INNERMOST: Final = 12
OWN: Final = 6

# How every thread and every child process begins: it says nothing about the program.
_BEGINNINGS: Final = frozenset({
    ("threading.py", "run"), ("threading.py", "_bootstrap_inner"), ("threading.py", "_bootstrap"),
    ("multiprocessing/process.py", "run"), ("multiprocessing/process.py", "_bootstrap"),
    ("multiprocessing/spawn.py", "_main"), ("multiprocessing/spawn.py", "spawn_main"), ("<string>", "<module>"),
})  # fmt: skip


def process_tree(facts: RunFacts) -> str:
    """One row for each process, children below their parents."""
    rows = [_row(process, depth, facts.directory) for process, depth in _nested(facts.processes)]
    shown = ["    PID S   CPU  MEM  COMMAND", *rows[:MOST_MEMBERS]]
    if len(rows) > MOST_MEMBERS:
        shown.append(f"… and {len(rows) - MOST_MEMBERS} more")
    return "\n".join(shown)


def stacks_as_markdown(facts: RunFacts) -> str:
    """A part for each different stack, the most telling first, then a line for every process without one."""
    groups = _groups(facts)
    parts = [_group(facts, threads, pids) for threads, pids in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        rest = sum(len(pids) for _, pids in groups[MOST_GROUPS:])
        parts.append(f"… and {rest} more processes.")
    others = list(_others(facts))
    if len(others) > MOST_OTHERS:
        others = [*others[:MOST_OTHERS], f"- … and {len(others) - MOST_OTHERS} more"]
    if others:
        parts.append("\n".join([*(["### Without a stack", ""] if groups else []), *others]))
    return "\n\n".join(parts) or "No process was there to ask."


def where_it_was(facts: RunFacts) -> Iterator[str]:
    """`load (data.py:17)`, for each different place of the person's own code in which a main thread was."""
    seen: set[str] = set()
    for threads, _ in _groups(facts):
        frame = own_call(threads[0])
        if frame and (place := shown_frame(frame, facts.directory)) not in seen:
            seen.add(place)
            yield place


def _nested(processes: Sequence[ProcessInfo]) -> Iterator[tuple[ProcessInfo, int]]:
    """Each process with its depth below the first."""
    pids = {process.pid for process in processes}
    children: dict[int, list[ProcessInfo]] = {}
    roots = [process for process in processes if process.parent not in pids or process.parent == process.pid]
    for process in processes:
        if process not in roots:
            children.setdefault(process.parent, []).append(process)
    # Read at different moments, parents may even form a circle: whoever is in one is listed as a root.
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
    command = _short_command(process.command, directory) if known(process.command) else f"[{one_line(process.name)}]"
    memory = format_memory(process.memory).replace(" ", "").removesuffix("iB").removesuffix("B")
    columns = f"{process.pid:>7} {one_line(process.state)} {format_duration(process.cpu):>5} {memory:>4}"
    return clipped(f"{columns}  {indent}{command}", TREE_WIDTH)


def _short_command(command: str, directory: str) -> str:
    """Without the folders that a person knows anyway: `python train.py`."""
    program, _, arguments = one_line(masked_command(command)).partition(" ")
    shown = f"{program.rpartition('/')[2]} {arguments}".rstrip()
    return shown.replace(f" {directory.rstrip('/')}/", " ") if directory.rstrip("/") else shown


def _groups(facts: RunFacts) -> list[tuple[tuple[Thread, ...], list[int]]]:
    """Processes with the same stacks together, the most telling first."""
    groups: dict[object, tuple[tuple[Thread, ...], list[int]]] = {}
    for stack in facts.stacks:
        if known(stack.threads) and stack.threads:
            same = tuple((thread.name, thread.frames) for thread in stack.threads)
            groups.setdefault(same, (stack.threads, []))[1].append(stack.pid)
    return sorted(groups.values(), key=lambda group: _dullness(group[0][0]))


def _dullness(thread: Thread) -> tuple[bool, bool, bool]:
    return waits_for_work(thread), own_call(thread) is None, cause_of(thread) is None


def _group(facts: RunFacts, threads: Sequence[Thread], pids: Sequence[int]) -> str:
    processes = [process for pid in pids if (process := facts.process(pid))]
    doing = list(dict.fromkeys(process.in_words() for process in processes))
    lines = [f"### {_heading(pids, processes)}", ""]
    if doing:
        lines += [f"In the kernel: {prose('; or '.join(doing[:2]))}.", ""]
    return "\n".join([*lines, block("\n".join(_threads(threads, facts.directory)))])


def _heading(pids: Sequence[int], processes: Sequence[ProcessInfo]) -> str:
    names = list(dict.fromkeys(process.name for process in processes))
    named = f" ({code(clipped(one_line(names[0]), 30))})" if len(names) == 1 else ""
    if len(pids) == 1:
        return f"Process {pids[0]}{named}"
    return f"{len(pids)} processes{named}: {listed([str(pid) for pid in pids])}"


def _threads(threads: Sequence[Thread], directory: str) -> Iterator[str]:
    """The main thread, then the others, those with the same calls together."""
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
    names = listed([one_line(thread.name) or "a thread without a name" for thread in alike], most=3)
    return f"{names} ({one_line(alike[0].status)})" if len(alike) == 1 else f"{len(alike)} threads: {names}"


def _calls(thread: Thread, directory: str) -> Iterator[str]:
    """The innermost calls and the person's own ones, which are marked."""
    frames = list(thread.frames)
    while len(frames) > 1 and _is_beginning(frames[-1]):
        frames.pop()
    own = [place for place, frame in enumerate(frames) if frame.own][:OWN]
    kept = sorted({*range(min(INNERMOST, len(frames))), *own})
    for before, place in zip([-1, *kept], kept, strict=False):
        if place > before + 1:
            yield f"  … {place - before - 1} more"
        mark = ">" if frames[place].own else " "
        yield clipped(f"{mark} {one_line(shown_frame(frames[place], directory))}", FRAME_WIDTH)
    if rest := len(frames) - 1 - max(kept, default=len(frames) - 1) + thread.cut:
        yield f"  … {rest} more"


def _is_beginning(frame: Frame) -> bool:
    return (frame.short_file, frame.function.rpartition(".")[2]) in _BEGINNINGS


def _others(facts: RunFacts) -> Iterator[str]:
    """What is known of the processes of which there is no stack, and why there is none."""
    reasons = {stack.pid: _reason(stack.threads) for stack in facts.stacks}
    for pid in _in_order([*(process.pid for process in facts.processes), *reasons]):
        reason = reasons.get(pid, "it was not asked")
        if reason is None:
            continue
        process = facts.process(pid)
        about = f" ({code(process.name)}): {prose(process.in_words())};" if process else ":"
        yield f"- {pid}{about} {prose(reason)}"


def _reason(threads: object) -> str | None:
    if isinstance(threads, Unknown):
        return threads.reason
    return None if threads else "it has no threads that run Python"


def _in_order(pids: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(pids))
