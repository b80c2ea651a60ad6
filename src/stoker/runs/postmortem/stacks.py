"""Python stacks of a run's processes, read by py-spy within a deadline.

py-spy reads the memory of another process, so it works on a hung one, too.
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

# The limit of parallel py-spy processes, each of which reads the symbols of an interpreter and takes CPU from the job.
AT_ONCE: Final = 4
# py-spy takes milliseconds, or a second on a loaded machine. If it takes longer, it waits for a thread that cannot be
# paused.
PATIENCE: Final = 3.0
# Enough for 100 threads of 100 frames.
MOST_OUTPUT: Final = 2**20
MOST_THREADS: Final = 256
# The innermost frames show where it waits; outer frames of an endless recursion add nothing.
MOST_FRAMES: Final = 60
# The wait for a killed py-spy.
REAP: Final = 0.5

NOT_PYTHON: Final = "not a Python process"
NOT_INSTALLED: Final = "py-spy is not installed: pip install 'stoker[report]'"
ENDED: Final = "the process ended before it could be read"
TIMED_OUT: Final = "py-spy could not read it in time"
NO_TIME_LEFT: Final = "there was no time left to read it"

_THREAD: Final = re.compile(r'Thread (?P<id>\S+) \((?P<status>[^)]*)\)(?:: "(?P<name>.*)")?')
_FRAME: Final = re.compile(r"    (?P<function>.+) \((?P<file>.*):(?P<line>\d+)\)")
# The installation prefix of a path.
_INSTALLED: Final = re.compile(
    r".*/(?:lib(?:64)?/python\d[^/]*/(?:(?:site|dist)-packages/)?|(?:site|dist)-packages/|python\d+\.zip/)"
)
# The first own frame of a `multiprocessing` child, with any start method.
_BEGINNING: Final = re.compile(r"\b_bootstrap .*/multiprocessing/process\.py$")
_DENIED: Final = re.compile(r"permission denied|operation not permitted|os error (?:1|13)\b", re.IGNORECASE)
_UNSUPPORTED: Final = re.compile(
    r"unsupported version|failed to find python version|failed to find a python interpreter|interpreter.*not found"
    r"|failed to get .*interpreter|failed to copy PyInterpreterState",
    re.IGNORECASE,
)
_NO_PAUSE: Final = re.compile(r"failed to suspend", re.IGNORECASE)


class Frame(msgspec.Struct, frozen=True):
    """A call on a stack."""

    function: str
    file: str
    line: int

    @property
    def own(self) -> bool:
        """True for user code, outside Python and installed packages."""
        return not self.file.startswith("<") and not _INSTALLED.search(self.file)

    @property
    def short_file(self) -> str:
        """The file without the installation directory: `torch/utils/data/dataloader.py`."""
        return _INSTALLED.split(self.file)[-1]


class Thread(msgspec.Struct, frozen=True):
    """A thread of a Python process, innermost call first."""

    name: str
    status: str
    """`idle`, `active` or `active+gil`, according to py-spy."""
    frames: tuple[Frame, ...]
    cut: int = 0
    """The number of omitted outer frames."""


class Stack(msgspec.Struct, frozen=True):
    """The threads of a process, main thread first, or why they are unknown."""

    pid: int
    threads: Maybe[tuple[Thread, ...]]


def never() -> bool:
    return False


def collect_stacks(
    pids: Sequence[int], *, deadline: float, enough: Callable[[], bool] = never, proc: str = "/proc"
) -> list[Stack]:
    """The stacks of these pids, in order, within `deadline` seconds plus a moment to clean up.

    `enough` is called ten times a second, and ends the collection by returning True.
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
    """The py-spy installed with Stoker, or the first in PATH."""
    places = (str(Path(sys.executable).parent), *filter(None, os.get_exec_path()))
    return shutil.which("py-spy", path=":".join(places))


def parse_dump(text: str) -> tuple[Thread, ...]:
    """Parses the output of `py-spy dump`, ignoring unknown lines."""
    found: list[Thread] = []
    frames: list[Frame] = []
    # Skips the command line before the version, which may contain anything.
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
    """Adds the frames to the last thread."""
    if found:
        own = frames[: _beginning(frames)]
        kept = tuple(own[:MOST_FRAMES])
        found[-1] = msgspec.structs.replace(found[-1], frames=kept, cut=len(own) - len(kept))


def _beginning(frames: Sequence[Frame]) -> int:
    """The number of own frames: a forked child also has those of its parent."""
    places = (place for place, frame in enumerate(frames, 1) if _BEGINNING.search(f"{frame.function} {frame.file}"))
    return next(places, len(frames))


_Answers: TypeAlias = dict[int, Maybe[tuple[Thread, ...]]]


class _PySpy:
    """A py-spy process that reads one target."""

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
            start_new_session=True,  # Ctrl-C must not reach it
        )

    def fileno(self) -> int:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        return self._process.stdout.fileno()

    def read(self) -> bool:
        """Reads available output. True at its end."""
        chunk = os.read(self.fileno(), 2**16)
        self.output += chunk
        return not chunk or len(self.output) > MOST_OUTPUT

    def end(self) -> str:
        """Kills it if it still runs, and returns its output."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self.output.decode(errors="replace")


class _Readers:
    """Reads several targets, a few at a time."""

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
        """Retries without pausing: for a hung process the result is the same."""
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
    """True if the interpreter is loaded as a library."""
    try:
        with Path(f"{proc}/{pid}/maps").open("rb") as maps:
            return any(b"libpython" in line for line in maps)
    except OSError:
        return False


def _failure(text: str, proc: str) -> Unknown:
    """Why py-spy failed, from its output."""
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
