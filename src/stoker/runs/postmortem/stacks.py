"""The Python stacks of the processes of a run, read by py-spy within a deadline.

py-spy reads the memory of another process, so it also works on a process that hangs.
"""

import contextlib
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from stoker.gpus.model import Maybe, Unknown
from stoker.runs.postmortem.processes import answers_in_time, cannot_be_paused, has_ended

# Each reads the symbols of a whole interpreter: more at once only take processors from the job.
AT_ONCE: Final = 4
# It takes milliseconds, a second on a loaded machine: after this it waits for a thread that cannot be paused.
PATIENCE: Final = 3.0
# Enough for a hundred threads of a hundred frames.
MOST_OUTPUT: Final = 2**20
MOST_THREADS: Final = 256
# The innermost frames show where it waits; the rest of an endless recursion adds nothing.
MOST_FRAMES: Final = 60
# How long to wait for a killed py-spy.
REAP: Final = 0.5

NOT_PYTHON: Final = "not a Python process"
NOT_INSTALLED: Final = "py-spy is not installed: pip install 'stoker[report]'"
ENDED: Final = "the process ended before it could be read"
TIMED_OUT: Final = "py-spy could not read it in time"
NO_TIME_LEFT: Final = "there was no time left to read it"

_THREAD: Final = re.compile(r'Thread (?P<id>\S+) \((?P<status>[^)]*)\)(?:: "(?P<name>.*)")?')
_FRAME: Final = re.compile(r"    (?P<function>.+) \((?P<file>.*):(?P<line>\d+)\)")
# The part of a path that only says where Python and its packages are installed.
_INSTALLED: Final = re.compile(
    r".*/(?:lib(?:64)?/python\d[^/]*/(?:(?:site|dist)-packages/)?|(?:site|dist)-packages/|python\d+\.zip/)"
)
# Where a child of `multiprocessing` begins, whichever way it was started.
_BEGINNING: Final = re.compile(r"\b_bootstrap .*/multiprocessing/process\.py$")
_DENIED: Final = re.compile(r"permission denied|operation not permitted|os error (?:1|13)\b", re.IGNORECASE)
_UNSUPPORTED: Final = re.compile(
    r"unsupported version|failed to find python version|failed to find a python interpreter|interpreter.*not found"
    r"|failed to get .*interpreter|failed to copy PyInterpreterState",
    re.IGNORECASE,
)
_NO_PAUSE: Final = re.compile(r"failed to suspend", re.IGNORECASE)


class Frame(msgspec.Struct, frozen=True):
    """One call on a stack."""

    function: str
    file: str
    line: int

    @property
    def own(self) -> bool:
        """Whether it is user code: neither of Python nor of an installed package."""
        return not self.file.startswith("<") and not _INSTALLED.search(self.file)

    @property
    def short_file(self) -> str:
        """The file without the directory of the installation: `torch/utils/data/dataloader.py`."""
        return _INSTALLED.split(self.file)[-1]


class Thread(msgspec.Struct, frozen=True):
    """One thread of a Python process, with its innermost call first."""

    name: str
    status: str
    """`idle`, `active` or `active+gil`, as py-spy sees it."""
    frames: tuple[Frame, ...]
    cut: int = 0
    """How many outer frames were left out."""


class Stack(msgspec.Struct, frozen=True):
    """The threads of one process, the main one first, or why they are unknown."""

    pid: int
    threads: Maybe[tuple[Thread, ...]]


def never() -> bool:
    return False


def collect_stacks(
    pids: Sequence[int], *, deadline: float, enough: Callable[[], bool] = never, proc: str = "/proc"
) -> list[Stack]:
    """A stack for each pid, in this order, in at most `deadline` seconds and a moment to clean up.

    `enough` is called every tenth of a second: when it returns True, the rest is left out.
    """
    ends = time.monotonic() + deadline
    checked = answers_in_time(lambda pid: _why_not_python(proc, pid), pids)
    answers = {pid: reason for pid, reason in checked.items() if reason is not None}
    python = [pid for pid in pids if pid in checked and pid not in answers]
    program = find_py_spy()
    if program is None:
        found: _Answers = dict.fromkeys(python, Unknown(NOT_INSTALLED))
    else:
        with contextlib.closing(_Readers(program, python, ends, proc)) as readers:
            while readers.goes_on() and not enough():
                readers.step()
        found = readers.answers
    hangs = Unknown("the process hangs in the kernel and cannot be read")
    return [Stack(pid, found.get(pid) or answers.get(pid, hangs)) for pid in pids]


def find_py_spy() -> str | None:
    """The one installed with Stoker, else the first on PATH."""
    places = (str(Path(sys.executable).parent), *filter(None, os.get_exec_path()))
    return shutil.which("py-spy", path=":".join(places))


def parse_dump(text: str) -> tuple[Thread, ...]:
    """The threads in the output of `py-spy dump`; other lines are ignored."""
    found: list[Thread] = []
    frames: list[Frame] = []
    # Before the line with the version comes the command line, which may be anything.
    for line in text[max(text.find("\nPython v"), 0) :].splitlines():
        if match := _THREAD.fullmatch(line):
            _close(found, frames)
            frames = []
            found.append(Thread(match["name"] or "", match["status"], ()))
        elif found and (match := _FRAME.fullmatch(line)):
            frames.append(Frame(match["function"], match["file"], int(match["line"])))
    _close(found, frames)
    found.sort(key=lambda thread: thread.name != "MainThread")
    return tuple(found[:MOST_THREADS])


def _close(found: list[Thread], frames: list[Frame]) -> None:
    """The frames belong to the last thread."""
    if found:
        own = frames[: _beginning(frames)]
        kept = tuple(own[:MOST_FRAMES])
        found[-1] = msgspec.structs.replace(found[-1], frames=kept, cut=len(own) - len(kept))


def _beginning(frames: Sequence[Frame]) -> int:
    """How many frames belong to this process: a forked child also has the calls of its parent."""
    places = (place for place, frame in enumerate(frames, 1) if _BEGINNING.search(f"{frame.function} {frame.file}"))
    return next(places, len(frames))


_Answers: TypeAlias = dict[int, Maybe[tuple[Thread, ...]]]


class _PySpy:
    """One py-spy that reads one process."""

    def __init__(self, program: str, target: int, *, pausing: bool) -> None:
        self.target = target
        self.pausing = pausing
        self.started = time.monotonic()
        self.output = bytearray()
        arguments = [program, "dump", "--full-filenames", "--pid", str(target)]
        self._process = subprocess.Popen(
            arguments if pausing else [*arguments, "--nonblocking"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RUST_BACKTRACE": "0", "NO_COLOR": "1"},
            start_new_session=True,  # a Ctrl-C is for the job
        )

    def fileno(self) -> int:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        return self._process.stdout.fileno()

    def read(self) -> bool:
        """Reads what it has printed; whether that is all."""
        chunk = os.read(self.fileno(), 2**16)
        self.output += chunk
        return not chunk or len(self.output) > MOST_OUTPUT

    def end(self) -> str:
        """Kills it if it still runs, and returns what it printed."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self.output.decode(errors="replace")


class _Readers:
    """Reads several processes, a few at a time."""

    def __init__(self, program: str, pids: Sequence[int], ends: float, proc: str) -> None:
        self.answers: _Answers = {}
        self._program = program
        self._waiting = deque(pids)
        self._ends = ends
        # Leaves time for a second try without pausing.
        self._patience = min(PATIENCE, (ends - time.monotonic()) / 3)
        self._proc = proc
        self._running: dict[int, _PySpy] = {}
        self._poll = select.poll()

    def goes_on(self) -> bool:
        return bool(self._waiting or self._running) and time.monotonic() < self._ends

    def step(self) -> None:
        while self._waiting and len(self._running) < AT_ONCE:
            pid = self._waiting.popleft()
            self._start(pid, pausing=not cannot_be_paused(pid, proc=self._proc))
        left = min(self._ends - time.monotonic(), 0.1)
        for descriptor, _ in self._poll.poll(max(left, 0.0) * 1000):
            if self._running[descriptor].read():
                self._finish(*self._end(descriptor))
        now = time.monotonic()
        for descriptor in [d for d, reader in self._running.items() if now - reader.started > self._patience]:
            self._retry(self._end(descriptor)[0], Unknown(TIMED_OUT))

    def close(self) -> None:
        for descriptor in list(self._running):
            self.answers[self._end(descriptor)[0].target] = Unknown(TIMED_OUT)
        self.answers.update(dict.fromkeys(self._waiting, Unknown(NO_TIME_LEFT)))

    def _start(self, pid: int, *, pausing: bool) -> None:
        try:
            reader = _PySpy(self._program, pid, pausing=pausing)
        except OSError as error:
            self.answers[pid] = Unknown(f"py-spy could not be started: {error.strerror}")
            return
        self._running[reader.fileno()] = reader
        self._poll.register(reader, select.POLLIN)

    def _end(self, descriptor: int) -> tuple[_PySpy, str]:
        self._poll.unregister(descriptor)
        reader = self._running.pop(descriptor)
        return reader, reader.end()

    def _finish(self, reader: _PySpy, text: str) -> None:
        if threads := parse_dump(text):
            self.answers[reader.target] = threads
        elif has_ended(reader.target, proc=self._proc):
            self.answers[reader.target] = Unknown(ENDED)
        elif _NO_PAUSE.search(text):
            self._retry(reader, _failure(text, self._proc))
        else:
            self.answers[reader.target] = _failure(text, self._proc)

    def _retry(self, reader: _PySpy, failure: Unknown) -> None:
        """A process that cannot be paused is read while it runs: if it hangs, the result is the same."""
        if reader.pausing:
            self._start(reader.target, pausing=False)
        else:
            self.answers[reader.target] = failure


def _why_not_python(proc: str, pid: int) -> Unknown | None:
    """Why py-spy cannot read this process; None for a Python process."""
    if has_ended(pid, proc=proc):
        return Unknown(ENDED)
    try:
        name = Path(f"{proc}/{pid}/exe").readlink().name
    except PermissionError:
        return Unknown(_denied(proc))
    except OSError:
        return Unknown(ENDED)
    return None if re.match(r"python\d*", name) or _has_python_inside(proc, pid) else Unknown(NOT_PYTHON)


def _has_python_inside(proc: str, pid: int) -> bool:
    """Whether the interpreter is loaded as a library."""
    try:
        with Path(f"{proc}/{pid}/maps").open("rb") as maps:
            return any(b"libpython" in line for line in maps)
    except OSError:
        return False


def _failure(text: str, proc: str) -> Unknown:
    """Why py-spy failed, from what it printed."""
    if _DENIED.search(text):
        return Unknown(_denied(proc))
    if _UNSUPPORTED.search(text):
        return Unknown("py-spy does not support this version of Python (try pip install -U py-spy)")
    error = re.search(r"^Error: (.+)$", text, re.MULTILINE)
    message = error[1] if error else next((line for line in text.splitlines() if line.strip()), "")
    return Unknown(f"py-spy failed: {message.strip()[:200]}" if message else "py-spy ended without a message")


def _denied(proc: str) -> str:
    """Why reading another process's memory is forbidden here, and who can allow it."""
    denied = "no permission to read its memory"
    try:
        scope = Path(f"{proc}/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        scope = "0"
    if scope == "3":
        return f"{denied}: kernel.yama.ptrace_scope is 3, which forbids it until the next boot"
    if scope in ("1", "2"):
        return f"{denied}: kernel.yama.ptrace_scope is {scope}; an administrator can set it to 0"
    return f"{denied}: it belongs to another user, or this container needs --cap-add SYS_PTRACE"
