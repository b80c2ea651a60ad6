"""Where the Python processes of a run are in their code, asked from outside with py-spy, within a deadline.

py-spy reads the memory of another process: no cooperation is needed, so a process that hangs can be asked too.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from stoker.gpus.model import Maybe, Unknown
from stoker.runs.postmortem.processes import answers_in_time, cannot_be_paused, has_ended

# Each reads the symbols of a whole interpreter: more of them at once only take the job's processors away.
AT_ONCE: Final = 4
# It takes milliseconds, a second on a loaded machine: what needs longer waits for a thread that cannot be paused.
PATIENCE: Final = 3.0
# A hundred threads of a hundred frames; what is beyond is cut off.
MOST_OUTPUT: Final = 2**20
MOST_THREADS: Final = 256
# The innermost frames say where it waits; the rest of an endless recursion says nothing more.
MOST_FRAMES: Final = 60
# How long to wait for a killed py-spy.
REAP: Final = 0.5

NOT_PYTHON: Final = "not a Python process"
NOT_INSTALLED: Final = "py-spy is not installed: pip install 'stoker[report]'"
ENDED: Final = "the process ended before it could be asked"
TIMED_OUT: Final = "it did not let itself be read in time"
NO_TIME_LEFT: Final = "there was no time left to ask it"

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
        """Whether it is of the person's own code, neither Python's nor an installed package's."""
        return not self.file.startswith("<") and not _INSTALLED.search(self.file)

    @property
    def short_file(self) -> str:
        """The file as a person would name it: `torch/utils/data/dataloader.py`."""
        return _INSTALLED.split(self.file)[-1]


class Thread(msgspec.Struct, frozen=True):
    """One thread of a Python process: where it is, the innermost call first."""

    name: str
    status: str
    """`idle`, `active` or `active+gil`, as py-spy sees it."""
    frames: tuple[Frame, ...]
    cut: int = 0
    """How many outer frames were left out."""


class Stack(msgspec.Struct, frozen=True):
    """The threads of one process, the main one first, or why they are not known."""

    pid: int
    threads: Maybe[tuple[Thread, ...]]


def never() -> bool:
    return False


def collect_stacks(
    pids: Sequence[int], *, deadline: float, enough: Callable[[], bool] = never, proc: str = "/proc"
) -> list[Stack]:
    """A stack for each pid, in this order, in at most `deadline` seconds (and a moment to clear up).

    `enough` is asked every tenth of a second: once it says so, what is there by then is returned.
    """
    ends = time.monotonic() + deadline
    objections = answers_in_time(lambda pid: _objection(proc, pid), pids)
    answers = {pid: objection for pid, objection in objections.items() if objection is not None}
    python = [pid for pid in pids if pid in objections and pid not in answers]
    program = find_py_spy()
    if program is None:
        found: _Answers = dict.fromkeys(python, Unknown(NOT_INSTALLED))
    else:
        with contextlib.closing(_Round(program, python, ends, proc)) as asking:
            while asking.goes_on() and not enough():
                asking.step()
        found = asking.answers
    hangs = Unknown("the process hangs in the kernel and does not let itself be recognised")
    return [Stack(pid, found.get(pid) or answers.get(pid, hangs)) for pid in pids]


def find_py_spy() -> str | None:
    """The one installed with this Stoker, else the first on PATH."""
    places = (str(Path(sys.executable).parent), *filter(None, os.get_exec_path()))
    return shutil.which("py-spy", path=":".join(places))


def parse_dump(text: str) -> tuple[Thread, ...]:
    """The threads in what `py-spy dump` printed; lines that are neither a thread nor a frame are passed over."""
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
    """The frames belong to the last thread that was begun."""
    if found:
        own = frames[: _beginning(frames)]
        kept = tuple(own[:MOST_FRAMES])
        found[-1] = msgspec.structs.replace(found[-1], frames=kept, cut=len(own) - len(kept))


def _beginning(frames: Sequence[Frame]) -> int:
    """How many frames are the process's own: a forked child has the calls of its parent below them."""
    places = (place for place, frame in enumerate(frames, 1) if _BEGINNING.search(f"{frame.function} {frame.file}"))
    return next(places, len(frames))


_Answers: TypeAlias = dict[int, Maybe[tuple[Thread, ...]]]


class _Asking:
    """One py-spy at work."""

    def __init__(self, program: str, pid: int, *, pausing: bool) -> None:
        self.target = pid
        self.pausing = pausing
        self.begun = time.monotonic()
        self.said = bytearray()
        self.answers, output = os.pipe()
        arguments = [program, "dump", "--full-filenames", "--pid", str(pid)]
        try:
            self.pid = os.posix_spawn(
                program,
                arguments if pausing else [*arguments, "--nonblocking"],
                {**os.environ, "RUST_BACKTRACE": "0", "NO_COLOR": "1"},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
                setsid=True,  # A Ctrl-C is for the job.
                setsigmask=(),
            )
        except OSError:
            os.close(self.answers)
            raise
        finally:
            os.close(output)

    def read(self) -> bool:
        """Takes what it has said; whether that is all."""
        chunk = os.read(self.answers, 2**16)
        self.said += chunk
        return not chunk or len(self.said) > MOST_OUTPUT

    def text(self) -> str:
        return self.said.decode(errors="replace")

    def end(self) -> None:
        """Makes sure that it is gone. Its exit code is not read: it may have been collected elsewhere."""
        os.close(self.answers)
        ends = time.monotonic() + REAP
        with contextlib.suppress(ChildProcessError):
            # Signalled only while it is seen to be our own uncollected child: no other process can have its pid then.
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0 and time.monotonic() < ends:
                os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.002)


class _Round:
    """Asks several processes, a few at a time."""

    def __init__(self, program: str, pids: Sequence[int], ends: float, proc: str) -> None:
        self.answers: _Answers = {}
        self._program = program
        self._waiting = deque(pids)
        self._ends = ends
        # Time must be left to ask a second time, in the other way.
        self._patience = min(PATIENCE, (ends - time.monotonic()) / 3)
        self._proc = proc
        self._asking: dict[int, _Asking] = {}
        self._poll = select.poll()

    def goes_on(self) -> bool:
        return bool(self._waiting or self._asking) and time.monotonic() < self._ends

    def step(self) -> None:
        while self._waiting and len(self._asking) < AT_ONCE:
            pid = self._waiting.popleft()
            self._ask(pid, pausing=not cannot_be_paused(pid, proc=self._proc))
        left = min(self._ends - time.monotonic(), 0.1)
        for descriptor, _ in self._poll.poll(max(left, 0.0) * 1000):
            if self._asking[descriptor].read():
                self._answered(self._dismiss(descriptor))
        now = time.monotonic()
        for descriptor in [d for d, asking in self._asking.items() if now - asking.begun > self._patience]:
            self._again(self._dismiss(descriptor), Unknown(TIMED_OUT))

    def close(self) -> None:
        for descriptor in list(self._asking):
            self.answers[self._dismiss(descriptor).target] = Unknown(TIMED_OUT)
        self.answers.update(dict.fromkeys(self._waiting, Unknown(NO_TIME_LEFT)))

    def _ask(self, pid: int, *, pausing: bool) -> None:
        try:
            asking = _Asking(self._program, pid, pausing=pausing)
        except OSError as error:
            self.answers[pid] = Unknown(f"py-spy could not be started: {error.strerror}")
            return
        self._asking[asking.answers] = asking
        self._poll.register(asking.answers, select.POLLIN)

    def _dismiss(self, descriptor: int) -> _Asking:
        self._poll.unregister(descriptor)
        asking = self._asking.pop(descriptor)
        asking.end()
        return asking

    def _answered(self, asking: _Asking) -> None:
        text = asking.text()
        threads = parse_dump(text)
        if threads:
            self.answers[asking.target] = threads
        elif has_ended(asking.target, proc=self._proc):
            self.answers[asking.target] = Unknown(ENDED)
        elif _NO_PAUSE.search(text):
            self._again(asking, _failure(text, self._proc))
        else:
            self.answers[asking.target] = _failure(text, self._proc)

    def _again(self, asking: _Asking, failure: Unknown) -> None:
        """What cannot be paused is read while it goes on: for a process that hangs that is as good."""
        if asking.pausing:
            self._ask(asking.target, pausing=False)
        else:
            self.answers[asking.target] = failure


def _objection(proc: str, pid: int) -> Unknown | None:
    """Why py-spy has no business with this process; None when it is a Python process."""
    if has_ended(pid, proc=proc):
        return Unknown(ENDED)
    try:
        name = Path(f"{proc}/{pid}/exe").readlink().name
    except PermissionError:
        return Unknown(_denied_in_words(proc))
    except OSError:
        return Unknown(ENDED)
    return None if re.match(r"python\d*", name) or _has_python_inside(proc, pid) else Unknown(NOT_PYTHON)


def _has_python_inside(proc: str, pid: int) -> bool:
    """Whether the interpreter is loaded as a library, as in programs that bring their own."""
    try:
        with Path(f"{proc}/{pid}/maps").open("rb") as maps:
            return any(b"libpython" in line for line in maps)
    except OSError:
        return False


def _failure(text: str, proc: str) -> Unknown:
    """Why py-spy failed, from what it printed."""
    if _DENIED.search(text):
        return Unknown(_denied_in_words(proc))
    if _UNSUPPORTED.search(text):
        return Unknown("py-spy does not know this version of Python (pip install -U py-spy brings the newest)")
    error = re.search(r"^Error: (.+)$", text, re.MULTILINE)
    said = error[1] if error else next((line for line in text.splitlines() if line.strip()), "")
    return Unknown(f"py-spy failed: {said.strip()[:200]}" if said else "py-spy ended without a word")


def _denied_in_words(proc: str) -> str:
    """Why reading another process's memory is forbidden here, and who can allow it."""
    denied = "no permission to read its memory"
    try:
        scope = Path(f"{proc}/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        scope = "0"
    if scope == "3":
        return f"{denied}: kernel.yama.ptrace_scope is 3, which forbids it to everybody until the next boot"
    if scope in ("1", "2"):
        return (
            f"{denied}: kernel.yama.ptrace_scope is {scope}; an administrator allows it with"
            " sysctl kernel.yama.ptrace_scope=0, or run Stoker as root (in a container also with"
            " --cap-add SYS_PTRACE)"
        )
    return f"{denied}: it is another user's, or this container lacks a right (start it with --cap-add SYS_PTRACE)"
