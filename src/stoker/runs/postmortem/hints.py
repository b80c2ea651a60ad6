"""What a person should do next, concluded from the facts: the most telling first."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from stoker.gpus.model import Unknown, known
from stoker.logs.terminal import plain_line
from stoker.runs.postmortem.causes import CAUSES, COLLECTIVE, EXIT, LOADER, PERSON, cause_of, own_call, waits_for_work
from stoker.runs.postmortem.facts import RunFacts
from stoker.runs.postmortem.processes import ProcessInfo
from stoker.runs.postmortem.stacks import NOT_INSTALLED, NOT_PYTHON, Thread
from stoker.runs.postmortem.text import clipped, code, listed, prose, shown_frame
from stoker.units import format_memory

# What a person reads on a phone before giving up.
MOST_HINTS: Final = 5
_LINE_END: Final = "\n"
_BY_SIGNAL: Final = (
    "Or run it with `PYTHONFAULTHANDLER=1` and `stoker run --signal ABRT`: then Python prints them itself."
)

_TERMINAL: Final = re.compile(r"^(?:read|select|pselect6) of /dev/(?:pts/|tty|console)")
_PROMPT: Final = re.compile(
    r"(?:\(Pdb\+*\)|ipdb>|>>>|\[y/n\]\??:?|\(y/n\)\??:?|\(yes/no\)\??:?|password:|press enter.*)$", re.IGNORECASE
)
_GPU_DRIVER: Final = re.compile(r"nvidia|nv_|rm_|uvm|amdgpu|kfd|i915|\bxe_|drm", re.IGNORECASE)
_FILE_SYSTEM: Final = re.compile(
    r"nfs|rpc_|fuse|ceph|lustre|ll_|cifs|smb|ext4|xfs|btrfs|io_schedule|folio|page|jbd2|wait_on_", re.IGNORECASE
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_UNINDENTED: Final = re.compile(r"^(?!\[\w+\]:?\s\s)\S[^\n]*", re.MULTILINE)


class Hint(NamedTuple):
    """One conclusion, and what follows from it."""

    title: str
    """Plain text, a sentence without its full stop, or a question."""
    steps: tuple[str, ...]
    """Markdown, a sentence or two each."""


class _Options(NamedTuple):
    """Option names where the job was started: `submit` and `edit` use other names than `run`."""

    delay: str
    limit: str
    never: str


_OF_RUN: Final = _Options(delay="`--after`", limit="`--max-time`", never="`--dry-run` to only see a report")
_OF_SUBMIT: Final = _Options(delay="`--idle-after`", limit="`--time-limit`", never="`--idle off` to never stop it")


class _Clue(NamedTuple):
    """Words in the output that say what went wrong."""

    words: re.Pattern[str]
    title: str
    step: str


_CLUES: Final = (
    _Clue(
        re.compile(r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE),
        "Its output speaks of memory that ran out",
        "Use a smaller batch, or find who else holds memory on the GPU: `stoker gpus`.",
    ),
    _Clue(
        re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE),
        "Its output speaks of a full disk",
        "`df -h` shows which; `/dev/shm` and `/tmp` count too.",
    ),
    _Clue(
        re.compile(r"bus error|unable to open shared memory|insufficient shared memory", re.IGNORECASE),
        "Its output speaks of shared memory that ran out",
        "Give the container more of it (`--shm-size=16g` or `--ipc=host`), or use fewer data loader workers.",
    ),
    _Clue(
        re.compile(r"NCCL (?:WARN|error)|collective operation timeout|NCCL.*timed? ?out", re.IGNORECASE),
        "Its output speaks of trouble between the ranks (NCCL)",
        "Look at the first rank that complained: the others only wait for it.",
    ),
    _Clue(
        re.compile(r"\bXid\b|uncorrectable ECC|CUDA error|illegal memory access|fallen off the bus", re.IGNORECASE),
        "Its output speaks of an error of the GPU",
        "`dmesg | grep -i xid` says whether the GPU is at fault; `CUDA_LAUNCH_BLOCKING=1` finds the line otherwise.",
    ),
)


def hints(facts: RunFacts) -> list[Hint]:
    """At most a handful, the most telling first; never none."""
    found = [hint for rule in _RULES for hint in rule(facts)]
    return found[:MOST_HINTS] or [_nothing_telling(facts)]


def options_of(facts: RunFacts) -> _Options:
    return _OF_RUN if facts.job is None else _OF_SUBMIT


def _again_with(facts: RunFacts, options: str) -> Iterator[str]:
    """How a queued job is given other options: it is changed, and queued again."""
    if facts.job is not None:
        job = plain_line(facts.job)
        yield f"{code(f'stoker edit {job} {options}')}, then {code(f'stoker retry {job}')}."


def _left_behind(facts: RunFacts) -> Iterator[Hint]:
    if facts.left:
        named = tuple(f"{prose(each)}" for each in facts.left[:4])
        yield Hint(
            "Something of it is still there",
            (*named, "Look again in a minute with `stoker gpus`; what stays may need an administrator or a reboot."),
        )


def _blocked(facts: RunFacts) -> Iterator[Hint]:
    blocked = [process for process in facts.processes if process.blocked or process.state == "D"]
    if not blocked or not facts.quiet:
        return
    where = " ".join(part for process in blocked for part in (process.place, process.call) if known(part))
    if _GPU_DRIVER.search(where):
        step = "It waits for the GPU driver: `dmesg | grep -i -e xid -e nvrm`; the GPU may need a reset or a reboot."
    elif _FILE_SYSTEM.search(where):
        step = (
            "It waits for a file system that is slow or gone: check the mounts (`df` hangs on a dead one) and the disk."
        )
    else:
        step = "Mostly that is the GPU driver (`dmesg | grep -i xid`) or a network file system (`df` hangs too)."
    yield Hint("It is blocked in the kernel", (f"{_named(blocked)}: if that lasts, not even SIGKILL ends it.", step))


def _paused(facts: RunFacts) -> Iterator[Hint]:
    paused = [process for process in facts.processes if process.state == "T"]
    if paused:
        yield Hint(
            "It was paused from outside",
            (f"{_named(paused)} got SIGSTOP or Ctrl-Z; `kill -CONT` or `fg` lets such a process go on.",),
        )


def _waits_for_a_person(facts: RunFacts) -> Iterator[Hint]:
    at_terminal = [m for m in facts.processes if known(m.call) and _TERMINAL.search(m.call)]
    last_lines = [text.rstrip().rpartition(_LINE_END)[2] for text in facts.words()]
    question = next((line for line in last_lines if _PROMPT.search(plain_line(line))), None)
    in_debugger = any(cause_of(thread) is PERSON for _, thread in facts.main_threads())
    if not (at_terminal or question or in_debugger):
        return
    steps = [f"{_named(at_terminal)} reads from the terminal."] if at_terminal else []
    if question:
        steps.append(f"Its last output is a question: {code(clipped(plain_line(question), 80))}.")
    yield Hint(PERSON.title, (*steps, *PERSON.steps))


def _in_its_code(facts: RunFacts) -> Iterator[Hint]:
    """What the stacks say, one hint for each cause that was found. A program that works may be anywhere, too."""
    if not facts.quiet:
        return
    working = [(pid, thread) for pid, thread in facts.main_threads() if not waits_for_work(thread)]
    for cause in CAUSES:
        found = [(pid, thread) for pid, thread in working if cause_of(thread) is cause]
        if not found or cause is PERSON:
            continue
        steps = [*_places(facts, found), *(step.format(delay=options_of(facts).delay) for step in cause.steps)]
        if cause is EXIT and any(_TRACEBACK in text for text in facts.words()):
            steps[-len(cause.steps)] = "Its output has an error: the main program may have ended by it."
        if cause is COLLECTIVE:
            steps[:0] = _other_ranks(facts, working)
        if cause is LOADER:
            steps[:0] = _loader_workers(facts, working)
        yield Hint(cause.title, tuple(steps))


def _by_system_call(facts: RunFacts) -> Iterator[Hint]:
    """For stacks that say nothing: C code does not show on them, but what it asks the kernel for does."""
    if not facts.quiet:
        return
    unclear = [
        (pid, thread)
        for pid, thread in facts.main_threads()
        if not waits_for_work(thread) and cause_of(thread) is None and not _is_active(thread)
    ]
    for pid, thread in unclear[:1]:
        process = facts.process(pid)
        call = process.call if process else Unknown("it is not known")
        place = tuple(_places(facts, [(pid, thread)]))
        if not known(call):
            continue
        if call in ("clock_nanosleep", "nanosleep"):
            yield Hint("It sleeps", (*place, "Is it waiting for something that never comes?"))
        elif call == "futex":
            step = "If that line calls the GPU, the GPU does not answer; if it takes a lock, somebody else holds it."
            yield Hint("It waits for a lock or for a call that does not return", (*place, step))
        elif call.endswith("a socket"):
            step = "At the other end is another process, here or across the network: look whether it is alive."
            yield Hint("It waits on a socket", (*place, step))
        elif call.startswith(("epoll", "poll", "ppoll", "select", "pselect")):
            step = "That may be the network, another process or a timer: look at the other stacks and the last output."
            yield Hint("It waits for something from outside to happen", (*place, step))


def _in_its_output(facts: RunFacts) -> Iterator[Hint]:
    for clue in _CLUES:
        for text in facts.words():
            if match := clue.words.search(text):
                before, after = text[: match.end()], text[match.end() :]
                line = f"{before.rpartition(_LINE_END)[2]}{after.partition(_LINE_END)[0]}"
                yield Hint(clue.title, (code(clipped(plain_line(line), 120)), clue.step))
                return
    for text in facts.words():
        if _TRACEBACK in text:
            # The lines of a traceback are indented; the first that is not says what was wrong.
            error = _UNINDENTED.search(text.rpartition(_TRACEBACK)[2])
            last = code(clipped(plain_line(error[0]), 120)) if error else "It is at the end of this page."
            yield Hint(
                "Its last output has an error in it",
                (last, "If others go on after one process failed, they wait for it for ever: begin with this error."),
            )
            return


def _never_on_a_gpu(facts: RunFacts) -> Iterator[Hint]:
    if facts.stopped_quiet and _was_on_no_gpu(facts):
        yield Hint(
            "It never used a GPU",
            (
                "Ask the program whether it sees one: `python -c 'import torch; print(torch.cuda.is_available())'`.",
                "Usual causes: a build without CUDA, a wrong `CUDA_VISIBLE_DEVICES`, `device='cpu'`.",
                f"If it only prepares for long: a longer {options_of(facts).delay}.",
            ),
        )


def _holds_memory(facts: RunFacts) -> Iterator[Hint]:
    own = {process.pid for process in facts.processes}
    held = [
        (gpu.index, sum(p.memory for p in reading.processes if p.pid in own and known(p.memory)))
        for gpu, reading in facts.last_readings()
        if known(reading.processes)
    ]
    holding = [f"{format_memory(amount)} on GPU {index}" for index, amount in held if amount]
    if facts.stopped_quiet and holding:
        yield Hint(
            "It holds GPU memory and computes nothing",
            (f"It holds {listed(holding)}: it did reach the GPU, so neither the build nor the device is wrong.",),
        )


def _works_on_the_cpu(facts: RunFacts) -> Iterator[Hint]:
    active = [pid for pid, thread in facts.main_threads() if _is_active(thread)]
    running = [process for process in facts.processes if process.state == "R" or process.pid in active]
    if facts.stopped_quiet and running:
        found = [(pid, thread) for pid, thread in facts.main_threads() if pid in active]
        yield Hint(
            "It was working on the CPU, so it may not hang at all",
            (
                *_places(facts, found),
                f"{_named(running)} was running at the end.",
                "If that is meant to take so long: `stoker snooze 1h` before it, or a longer `--for`.",
            ),
        )


def _without_stacks(facts: RunFacts) -> Iterator[Hint]:
    reasons = [stack.threads.reason for stack in facts.stacks if isinstance(stack.threads, Unknown)]
    telling = [reason for reason in reasons if reason != NOT_PYTHON]
    if not telling or any(True for _ in facts.main_threads()):
        return
    if NOT_INSTALLED in telling:
        yield Hint(
            "Where it hung in its code is not known",
            ("`pip install 'stoker[report]'` brings py-spy, and the next report has the Python stacks.",),
        )
        return
    yield Hint(
        "Where it hung in its code is not known",
        (
            f"{prose(telling[0][:1].upper() + telling[0][1:])}.",
            *([_BY_SIGNAL] if facts.job is None else []),
        ),
    )


def _on_purpose(facts: RunFacts) -> Iterator[Hint]:
    if facts.verdict is not None:
        yield Hint(
            "Was it quiet on purpose?",
            (
                "From within the job: `stoker snooze 30m` before a quiet stretch.",
                f"For the whole run: a longer `--for`, or {options_of(facts).never}.",
                *_again_with(facts, "--for 2h"),
            ),
        )


def _too_long(facts: RunFacts) -> Iterator[Hint]:
    if facts.ending == "time limit":
        yield Hint(
            "It needed more time than it was given",
            (
                f"Go on from its last checkpoint, or give it more with {options_of(facts).limit}.",
                *_again_with(facts, "--time-limit 24h"),
            ),
        )


def _killed_from_outside(facts: RunFacts) -> Iterator[Hint]:
    if facts.ending == "exited" and re.search(r"SIGKILL|\b137\b", facts.exit):
        yield Hint(
            "It was killed from outside",
            ("Mostly that is the kernel, out of memory: `dmesg | grep -i -e oom -e 'killed process'` names it.",),
        )
    elif facts.ending == "supervisor killed":
        yield Hint("Stoker itself was killed", ("Nothing is wrong with the job: start it again.",))


def _nothing_telling(facts: RunFacts) -> Hint:
    if facts.ending == "exited":
        return Hint("Nothing here says why it ended", ("Its own output and its exit code are all there is.",))
    return Hint("Nothing here calls for anything", ("Start it again when you like.",))


def _places(facts: RunFacts, found: Sequence[tuple[int, Thread]]) -> Iterator[str]:
    """`pid 101 is in train.py:30 (main)`: the person's own lines, each once."""
    lines: dict[str, list[str]] = {}
    for pid, thread in found:
        if frame := own_call(thread) or (thread.frames[0] if thread.frames else None):
            lines.setdefault(shown_frame(frame, facts.directory), []).append(str(pid))
    for place, pids in list(lines.items())[:3]:
        yield f"It is in {code(clipped(place, 100))} ({_pids(pids)})."


def _other_ranks(facts: RunFacts, working: Sequence[tuple[int, Thread]]) -> Iterator[str]:
    elsewhere = [(pid, thread) for pid, thread in working if cause_of(thread) not in (COLLECTIVE, LOADER)]
    for pid, thread in elsewhere[:3]:
        if frame := own_call(thread):
            yield f"**pid {pid} is somewhere else**: in {code(clipped(shown_frame(frame, facts.directory), 100))}."


def _loader_workers(facts: RunFacts, working: Sequence[tuple[int, Thread]]) -> Iterator[str]:
    workers = [(pid, thread) for pid, thread in working if any("_worker_loop" in f.function for f in thread.frames)]
    fetching = [(pid, thread) for pid, thread in workers if any("_utils/fetch" in f.file for f in thread.frames)]
    if workers and not fetching:
        yield (
            f"All {len(workers)} data loader workers wait for work while the program waits for data: one was probably"
            " killed (memory?). A `timeout` on the loader makes that an error."
        )
    elif fetching:
        yield f"{len(fetching)} of {len(workers)} data loader workers are inside the dataset's own code."
        yield from _places(facts, fetching)


def _was_on_no_gpu(facts: RunFacts) -> bool:
    """Whether it can be said that it was on none: a reading that does not tell may hide the one time that it was."""
    own = {process.pid for process in facts.processes}
    if facts.used or not own or not facts.looks or any(look.note or look.problem for look in facts.looks):
        return False
    for look in facts.looks:
        for reading in look.readings:
            if not known(reading.processes):
                return False
            # A pid that cannot be matched to a process here may be the run's.
            if any(process.pid in own or not known(process.started) for process in reading.processes):
                return False
    return True


def _is_active(thread: Thread) -> bool:
    return thread.status.startswith("active")


def _named(processes: Sequence[ProcessInfo]) -> str:
    return listed([f"{code(process.name)} (pid {process.pid})" for process in processes], most=3)


def _pids(pids: list[str]) -> str:
    return f"pid {pids[0]}" if len(pids) == 1 else f"{len(pids)} processes: {listed(pids, most=6)}"


_RULES: Final[tuple[Callable[[RunFacts], Iterator[Hint]], ...]] = (
    _left_behind, _blocked, _paused, _waits_for_a_person, _in_its_code, _by_system_call, _in_its_output,
    _killed_from_outside, _never_on_a_gpu, _works_on_the_cpu, _holds_memory, _without_stacks, _too_long, _on_purpose,
)  # fmt: skip
