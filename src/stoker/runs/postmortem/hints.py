"""Derives hints on what to do next from the facts, most informative first."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from stoker.gpus.model import Unknown, known
from stoker.logs.terminal import plain_line
from stoker.runs.postmortem.causes import (
    CAUSES,
    CHILD,
    COLLECTIVE,
    EXIT,
    INPUT,
    JOIN,
    LOADER,
    OUTPUT_CAUSES,
    cause_of,
    own_call,
    waits_for_work,
)
from stoker.runs.postmortem.facts import RunFacts
from stoker.runs.postmortem.processes import ProcessInfo
from stoker.runs.postmortem.ranks import Pattern, compare_ranks
from stoker.runs.postmortem.stacks import NOT_INSTALLED, NOT_PYTHON, Thread
from stoker.runs.postmortem.text import clipped, code, listed, prose, shown_frame
from stoker.units import capitalized, format_memory

# As many as people read on a phone.
MOST_HINTS: Final = 5
_LINE_END: Final = "\n"
_BY_SIGNAL: Final = (
    "Or run it with `PYTHONFAULTHANDLER=1` and `stoker run --signal ABRT`: Python then prints its stacks itself."
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
    """A conclusion with its next steps."""

    title: str
    """Plain text: a sentence without its full stop, or a question."""
    steps: tuple[str, ...]
    """One or two sentences each, in Markdown."""


class _Options(NamedTuple):
    """The names of options, which differ between `run` and `submit`."""

    delay: str
    limit: str
    never: str


_OF_RUN: Final = _Options(delay="`--after`", limit="`--max-time`", never="`--dry-run` to only report")
_OF_SUBMIT: Final = _Options(delay="`--idle-after`", limit="`--time-limit`", never="`--idle off` to never stop it")


def hints(facts: RunFacts) -> list[Hint]:
    """One to `MOST_HINTS` hints."""
    found = [hint for rule in _RULES for hint in rule(facts)]
    return found[:MOST_HINTS] or [_no_hint(facts)]


def options_of(facts: RunFacts) -> _Options:
    return _OF_RUN if facts.job is None else _OF_SUBMIT


def _again_with(facts: RunFacts, options: str) -> Iterator[str]:
    """The commands that edit a queued job and queue it again."""
    if facts.job is not None:
        job = plain_line(facts.job)
        yield f"{code(f'stoker edit {job} {options}')}, then {code(f'stoker retry {job}')}."


def _left_behind(facts: RunFacts) -> Iterator[Hint]:
    if facts.status.left:
        named = tuple(f"{prose(each)}" for each in facts.status.left[:4])
        yield Hint(
            "Not all of it is gone",
            (*named, "Check again in a minute with `stoker gpus`; what remains may need an administrator or a reboot."),
        )


def _blocked(facts: RunFacts) -> Iterator[Hint]:
    blocked = [process for process in facts.processes if process.blocked or process.state == "D"]
    if not blocked or not facts.did_no_work:
        return
    where = " ".join(part for process in blocked for part in (process.place, process.call) if known(part))
    if _GPU_DRIVER.search(where):
        step = "It waits for the GPU driver: `dmesg | grep -i -e xid -e nvrm`; the GPU may need a reset or a reboot."
    elif _FILE_SYSTEM.search(where):
        step = (
            "It waits for a file system that is slow or gone: check the mounts (`df` hangs on a dead one) and the disk."
        )
    else:
        step = "Usually the cause is the GPU driver (`dmesg | grep -i xid`) or a network file system (`df` hangs too)."
    yield Hint("It is blocked in the kernel", (f"{_named(blocked)}: if this lasts, not even SIGKILL ends it.", step))


def _paused(facts: RunFacts) -> Iterator[Hint]:
    paused = [process for process in facts.processes if process.state == "T"]
    if paused:
        yield Hint(
            "It was suspended from outside",
            (f"{_named(paused)} got SIGSTOP or Ctrl-Z; `kill -CONT` or `fg` resumes a suspended process.",),
        )


def _waits_for_input(facts: RunFacts) -> Iterator[Hint]:
    at_terminal = [process for process in facts.processes if known(process.call) and _TERMINAL.search(process.call)]
    last_lines = [text.rstrip().rpartition(_LINE_END)[2] for text in facts.job_outputs()]
    prompt = next((line for line in last_lines if _PROMPT.search(plain_line(line))), None)
    in_debugger = any(cause_of(thread) is INPUT for _, thread in facts.main_threads())
    if not (at_terminal or prompt or in_debugger):
        return
    steps = [f"{_named(at_terminal)} reads from the terminal."] if at_terminal else []
    if prompt:
        steps.append(f"Its last output is a prompt: {code(clipped(plain_line(prompt), 80))}.")
    yield Hint(INPUT.title, (*steps, *INPUT.steps))


# Hints on a hang, by the difference between ranks.
_HANGS: Final[dict[Pattern, Hint]] = {
    "gone": Hint(
        "A rank is gone, and the others wait for it forever",
        (
            "Look for its error first: in the last output below, or in the log of that rank.",
            "`dmesg -T | grep -i -e xid -e 'killed process'` shows whether a GPU or a lack of memory ended it.",
        ),
    ),
    "failed": Hint(
        "A GPU of the job has failed",
        (
            "`dmesg -T | grep -i xid` shows why. It does nothing more until it is reset or the machine is rebooted.",
            "Continue from the last checkpoint on other GPUs.",
        ),
    ),
    "elsewhere": Hint(
        "One rank keeps the others waiting",
        (
            "Its stack comes first below: the cause is there, not in the collective.",
            "Common causes: unequal numbers of batches, slow data for one rank, a collective under `if rank == 0`.",
        ),
    ),
    "different": Hint(
        "The ranks have called different collectives",
        (
            "All ranks must call the same ones in the same order: look for branches on the rank or on data.",
            "`TORCH_DISTRIBUTED_DEBUG=DETAIL` turns the first mismatch into an error.",
        ),
    ),
    "uneven": Hint(
        "Some ranks have not entered the collective",
        ("Compare the stacks of the ranks below: the cause is where those with an unused GPU are.",),
    ),
    "behind": Hint(
        "Some ranks are behind",
        ("Compare the stacks of the ranks below: the cause is where those with fewer steps are.",),
    ),
}
_HANG: Final = Hint(
    "A collective does not complete",
    ("Common causes: a rank on another machine, shapes or groups that do not match, the connection between GPUs.",),
)
_NEXT_TIME: Final = (
    "Next time, `NCCL_DEBUG=INFO` and `TORCH_NCCL_TRACE_BUFFER_SIZE=2000` (PyTorch's flight recorder) show which"
    " collective each rank was in."
)


def _hangs(facts: RunFacts) -> Iterator[Hint]:
    if facts.stopped_as_hung:
        ranks = compare_ranks(facts)
        pattern: Pattern = "unclear" if ranks is None else ranks.pattern
        hint = _HANGS.get(pattern, _HANG)
        yield hint if pattern in {"gone", "failed"} else Hint(hint.title, (*hint.steps, _NEXT_TIME))


def _in_its_code(facts: RunFacts) -> Iterator[Hint]:
    """One hint per cause found in the stacks, unless the GPUs were busy: the stack of a busy program proves nothing."""
    if not facts.did_no_work:
        return
    working = _without_launchers(
        facts, [(pid, thread) for pid, thread in facts.main_threads() if not waits_for_work(thread)]
    )
    for cause in CAUSES:
        found = [(pid, thread) for pid, thread in working if cause_of(thread) is cause]
        if not found or cause is INPUT or (cause is COLLECTIVE and facts.stopped_as_hung):
            continue
        steps = [*_places(facts, found), *(step.format(delay=options_of(facts).delay) for step in cause.steps)]
        if cause is EXIT and any(_TRACEBACK in text for text in facts.job_outputs()):
            steps[-len(cause.steps)] = "Its output contains an error, which may have ended the main program."
        if cause is COLLECTIVE:
            steps[:0] = _other_ranks(facts, working)
        if cause is LOADER:
            steps[:0] = _loader_workers(facts, working)
        yield Hint(cause.title, tuple(steps))


def _without_launchers(facts: RunFacts, working: Sequence[tuple[int, Thread]]) -> list[tuple[int, Thread]]:
    """Leaves out processes that only wait for those on the GPUs."""
    on_gpus = facts.pids_on_gpus()
    if not any(cause_of(thread) for pid, thread in working if pid in on_gpus) and not facts.stopped_as_hung:
        return list(working)
    return [(pid, thread) for pid, thread in working if pid in on_gpus or cause_of(thread) not in (CHILD, JOIN)]


def _by_system_call(facts: RunFacts) -> Iterator[Hint]:
    """Hints for stacks without a known cause: they lack C code, but the system call is known."""
    if not facts.did_no_work:
        return
    unclear = [
        (pid, thread)
        for pid, thread in facts.main_threads()
        if not waits_for_work(thread) and cause_of(thread) is None and not _is_active(thread)
    ]
    for pid, thread in unclear[:1]:
        process = facts.process(pid)
        call = process.call if process else Unknown("it was not read")
        place = tuple(_places(facts, [(pid, thread)]))
        if not known(call):
            continue
        if call in ("clock_nanosleep", "nanosleep"):
            yield Hint("It is sleeping", (*place, "Check whether it waits for something that never happens."))
        elif call == "futex":
            step = "If that line uses the GPU, the GPU does not respond; if it takes a lock, another thread holds it."
            yield Hint("It is waiting for a lock or for a call that does not return", (*place, step))
        elif call.endswith("a socket"):
            step = "The other end is another process, here or across the network: check that it is alive."
            yield Hint("It is waiting on a socket", (*place, step))
        elif call.startswith(("epoll", "poll", "ppoll", "select", "pselect")):
            step = "That may be the network, another process or a timer: look at the other stacks and the last output."
            yield Hint("It is waiting for an external event", (*place, step))


def _in_its_output(facts: RunFacts) -> Iterator[Hint]:
    for cause in OUTPUT_CAUSES:
        for text in facts.job_outputs():
            if match := cause.pattern.search(text):
                before, after = text[: match.end()], text[match.end() :]
                line = f"{before.rpartition(_LINE_END)[2]}{after.partition(_LINE_END)[0]}"
                yield Hint(cause.title, (code(clipped(plain_line(line), 120)), *cause.steps))
                return
    for text in facts.job_outputs():
        if _TRACEBACK in text:
            # A traceback is indented; the first unindented line has the error.
            error = _UNINDENTED.search(text.rpartition(_TRACEBACK)[2])
            last = code(clipped(plain_line(error[0]), 120)) if error else "It is quoted at the end of this page."
            yield Hint(
                "Its last output contains an error",
                (
                    last,
                    "If one process fails and the others continue, they wait for it forever: start with this error.",
                ),
            )
            return


def _never_on_a_gpu(facts: RunFacts) -> Iterator[Hint]:
    if facts.stopped_as_idle and _was_on_no_gpu(facts):
        yield Hint(
            "It never used a GPU",
            (
                "Check whether the program sees one: `python -c 'import torch; print(torch.cuda.is_available())'`.",
                "Common causes: a build without CUDA, a wrong `CUDA_VISIBLE_DEVICES`, `device='cpu'`.",
                f"If it only takes long to prepare, use a longer {options_of(facts).delay}.",
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
    if facts.stopped_as_idle and holding:
        yield Hint(
            "It holds GPU memory but computes nothing",
            (f"It holds {listed(holding)}: it reached the GPU, so neither the build nor the device is wrong.",),
        )


def _works_on_the_cpu(facts: RunFacts) -> Iterator[Hint]:
    active = [pid for pid, thread in facts.main_threads() if _is_active(thread)]
    running = [process for process in facts.processes if process.state == "R" or process.pid in active]
    if facts.stopped_as_idle and running:
        found = [(pid, thread) for pid, thread in facts.main_threads() if pid in active]
        yield Hint(
            "It was working on the CPU, so it may not be hanging",
            (
                *_places(facts, found),
                f"{_named(running)} was running at the end.",
                "If that is expected to take so long, use `stoker snooze 1h` before it, or a longer `--for`.",
            ),
        )


def _without_stacks(facts: RunFacts) -> Iterator[Hint]:
    reasons = [stack.threads.reason for stack in facts.stacks if isinstance(stack.threads, Unknown)]
    failures = [reason for reason in reasons if reason != NOT_PYTHON]
    if not failures or any(True for _ in facts.main_threads()):
        return
    if NOT_INSTALLED in failures:
        yield Hint(
            "Where it hung in its code is unknown",
            ("`pip install 'stoker[report]'` installs py-spy: the next report then has Python stacks.",),
        )
        return
    yield Hint(
        "Where it hung in its code is unknown",
        (
            f"{prose(capitalized(failures[0]))}.",
            *([_BY_SIGNAL] if facts.job is None else []),
        ),
    )


def _on_purpose(facts: RunFacts) -> Iterator[Hint]:
    if facts.stopped_as_hung:
        yield Hint(
            "Was it working all the same?",
            (
                "Call `stoker.step()` once in each step of the loop: its progress is then certain.",
                "From within the job: `stoker snooze 30m` before a phase in which ranks wait for long.",
                "For the whole run: a longer `--stalled-for`, or `--stalled off` to never stop it for this.",
                *_again_with(facts, "--stalled-for 4h"),
            ),
        )
    elif facts.verdict is not None:
        yield Hint(
            "Was it idle on purpose?",
            (
                "From within the job: `stoker snooze 30m` before an idle phase.",
                f"For the whole run: a longer `--for`, or {options_of(facts).never}.",
                *_again_with(facts, "--for 2h"),
            ),
        )


def _too_long(facts: RunFacts) -> Iterator[Hint]:
    if facts.status.ending == "time limit":
        yield Hint(
            "It needed more time than its limit",
            (
                f"Continue from its last checkpoint, or raise the limit with {options_of(facts).limit}.",
                *_again_with(facts, "--time-limit 24h"),
            ),
        )


def _killed_from_outside(facts: RunFacts) -> Iterator[Hint]:
    if facts.status.ending == "exited" and re.search(r"SIGKILL|\b137\b", facts.exit):
        yield Hint(
            "It was killed from outside",
            ("Usually by the kernel, out of memory: `dmesg | grep -i -e oom -e 'killed process'` shows it.",),
        )
    elif facts.status.ending == "supervisor killed":
        yield Hint("Stoker itself was killed", ("The job is not at fault: start it again.",))


def _no_hint(facts: RunFacts) -> Hint:
    if facts.status.ending == "exited":
        return Hint("Nothing here shows why it ended", ("Its output and its exit code are all that is known.",))
    return Hint("Nothing needs to be done", ("Start it again when you like.",))


def _places(facts: RunFacts, found: Sequence[tuple[int, Thread]]) -> Iterator[str]:
    """`It is in main (train.py:30) (pid 101).` for each distinct line of user code."""
    lines: dict[str, list[str]] = {}
    for pid, thread in found:
        if frame := own_call(thread) or (thread.frames[0] if thread.frames else None):
            lines.setdefault(shown_frame(frame, facts.spec.directory), []).append(str(pid))
    for place, pids in list(lines.items())[:3]:
        yield f"It is in {code(clipped(place, 100))} ({_pids(pids)})."


def _other_ranks(facts: RunFacts, working: Sequence[tuple[int, Thread]]) -> Iterator[str]:
    elsewhere = [(pid, thread) for pid, thread in working if cause_of(thread) not in (COLLECTIVE, LOADER)]
    for pid, thread in elsewhere[:3]:
        if frame := own_call(thread):
            yield f"**pid {pid} is elsewhere**: in {code(clipped(shown_frame(frame, facts.spec.directory), 100))}."


def _loader_workers(facts: RunFacts, working: Sequence[tuple[int, Thread]]) -> Iterator[str]:
    workers = [(pid, thread) for pid, thread in working if any("_worker_loop" in f.function for f in thread.frames)]
    fetching = [(pid, thread) for pid, thread in workers if any("_utils/fetch" in f.file for f in thread.frames)]
    if workers and not fetching:
        yield (
            f"All {len(workers)} data loader workers wait for work while the program waits for data: one was probably"
            " killed (out of memory?). A `timeout` on the loader turns that into an error."
        )
    elif fetching:
        yield f"{len(fetching)} of {len(workers)} data loader workers are in the dataset's code."
        yield from _places(facts, fetching)


def _was_on_no_gpu(facts: RunFacts) -> bool:
    """True if it certainly used no GPU. Incomplete readings may hide a use."""
    own = {process.pid for process in facts.processes}
    if facts.status.used or not own or not facts.looks or any(look.note or look.problem for look in facts.looks):
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
    _left_behind, _hangs, _blocked, _paused, _waits_for_input, _in_its_code, _by_system_call, _in_its_output,
    _killed_from_outside, _never_on_a_gpu, _works_on_the_cpu, _holds_memory, _without_stacks, _too_long, _on_purpose,
)  # fmt: skip
