"""The processes of a run in /proc, and what they wait for in the kernel.

Reading a command line takes a lock of the process, and blocks if that hangs in a driver. Threads read it, and are
abandoned if they are late.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from stoker.gpus.model import Maybe, Unknown, known
from stoker.procfs import read_stat
from stoker.runs.processes.tree import state_in_words

T = TypeVar("T")

# Reading a command line takes microseconds, unless a hung process holds the lock.
LATE: Final = 0.5
# Time is counted in these steps, so that a pause of the whole machine does not count.
_STEP: Final = 0.05
# The limit of a command line, since some programs have megabytes of arguments.
MOST_COMMAND: Final = 4096
# The limit of threads read per process, to stay within milliseconds.
MOST_THREADS: Final = 512

_EXPLAINED: Final = {
    "D": "often the GPU driver or a file system",
    "T": "SIGCONT resumes it",
    "Z": "its parent has not collected it",
}
_FROZEN: Final = ("freezer", "refrigerator")
_ENDED: Final = frozenset("ZX")
_CANNOT_BE_PAUSED: Final = frozenset("DTt")

# System calls in which hung programs wait, by number.
_CALLS: Final[dict[str, dict[int, str]]] = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 16: "ioctl", 17: "pread64", 19: "readv", 20: "writev", 23: "select",
        34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg",
        47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 128: "rt_sigtimedwait", 130: "rt_sigsuspend",
        202: "futex", 208: "io_getevents", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat",
        270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4", 426: "io_uring_enter",
    },
    "aarch64": {
        4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 63: "read",
        64: "write", 65: "readv", 66: "writev", 67: "pread64", 72: "pselect6", 73: "ppoll", 82: "fsync", 95: "waitid",
        98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 133: "rt_sigsuspend", 137: "rt_sigtimedwait",
        202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4",
        260: "wait4", 426: "io_uring_enter",
    },
}  # fmt: skip
_ON_A_FILE: Final = frozenset({
    "read", "write", "ioctl", "pread64", "readv", "writev", "connect", "accept", "accept4", "sendto", "recvfrom",
    "sendmsg", "recvmsg", "fcntl", "flock", "fsync",
})  # fmt: skip
_SELECTS: Final = frozenset({"select", "pselect6"})


# Variables of torchrun, Open MPI, MPICH and Slurm: rank, local rank, number of ranks. Slurm's come last, since programs
# inherit them from a task.
_RANK_VARIABLES: Final = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("LOCAL_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)
# The kernel allows a few megabytes of variables.
_MOST_ENVIRONMENT: Final = 2**20
_MOST_DIGITS: Final = 9


class RankNumber(msgspec.Struct, frozen=True):
    """The rank of a process in a distributed job, from its environment."""

    number: int
    local: int | None = None
    """The local rank on its machine."""
    total: int | None = None
    """The number of ranks of the job."""


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a run at one moment, identified by pid and start time."""

    pid: int
    parent: int
    started: int
    """Start time in clock ticks since boot, field 22 of /proc/PID/stat."""
    state: str
    """The kernel's letter: R, S, D, T, Z and so on."""
    name: str
    command: Maybe[str]
    cpu: float
    """CPU seconds so far, user and system."""
    threads: int
    memory: int
    """Resident bytes."""
    blocked: int = 0
    """The number of its threads in uninterruptible sleep."""
    place: Maybe[str] = Unknown("the kernel does not show it")
    """The kernel function in which a blocked thread waits, or otherwise the main thread."""
    call: Maybe[str] = Unknown("the kernel does not show it")
    """That thread's system call with its file: `read of /dev/pts/3`."""
    rank: RankNumber | None = None

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    def in_words(self) -> str:
        """`sleeping in futex (futex_do_wait)`."""
        return f"{self._state_in_words()}{self._where_in_words()}"

    def _state_in_words(self) -> str:
        if known(self.place) and any(word in self.place for word in _FROZEN):
            return "frozen by its cgroup"
        if self.blocked and self.threads > 1:
            return f"{self.blocked} of its {self.threads} threads {_explained('D')}"
        return _explained(self.state)

    def _where_in_words(self) -> str:
        if known(self.call):
            return f" in {self.call} ({self.place})" if known(self.place) else f" in {self.call}"
        return f" in {self.place}" if known(self.place) else ""


def _explained(state: str) -> str:
    words = state_in_words(state)
    return f"{words} ({_EXPLAINED[state]})" if state in _EXPLAINED else words


def read_processes(pids: Iterable[int], *, proc: str = "/proc") -> list[ProcessInfo]:
    """The processes with these pids, in order, except those that have ended."""
    processes = [process for pid in pids if (process := _read_process(proc, pid))]
    read = answers_in_time(
        lambda pid: (read_command(pid, proc=proc), read_rank(pid, proc=proc)), [process.pid for process in processes]
    )
    hangs = Unknown("the process hangs in the kernel and cannot be read")
    found = []
    for process in processes:
        command, rank = read.get(process.pid, (hangs, None))
        found.append(msgspec.structs.replace(process, command=command, rank=rank))
    return found


def read_command(pid: int, *, proc: str = "/proc") -> Maybe[str]:
    """The command line, separated by spaces. Blocks while a hung process holds the lock of its memory."""
    try:
        arguments = _read(f"{proc}/{pid}/cmdline", MOST_COMMAND)
    except OSError:
        return Unknown("it cannot be read")
    if not arguments:
        return Unknown("it has none")
    return arguments.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def read_rank(pid: int, *, proc: str = "/proc") -> RankNumber | None:
    """The rank in its environment, if any. Blocks like `read_command`."""
    try:
        text = _read(f"{proc}/{pid}/environ", _MOST_ENVIRONMENT)
    except OSError:
        return None
    wanted = {os.fsencode(name) for names in _RANK_VARIABLES for name in names}
    pairs = (variable.partition(b"=") for variable in text.split(b"\0"))
    numbers = {
        os.fsdecode(name): int(value)
        for name, _, value in pairs
        if name in wanted and value.isdigit() and len(value) <= _MOST_DIGITS
    }
    for number, local, total in _RANK_VARIABLES:
        if number in numbers:
            return RankNumber(numbers[number], numbers.get(local), numbers.get(total))
    return None


def answers_in_time(ask: Callable[[int], T], pids: Iterable[int]) -> dict[int, T]:
    """Calls `ask(pid)` for each pid in threads. Late answers are left out, and cost `LATE` seconds in total."""
    answers: dict[int, T] = {}

    def answer(pid: int) -> None:
        answers[pid] = ask(pid)

    started: list[threading.Thread] = []
    for pid in pids:
        thread = threading.Thread(target=answer, args=(pid,), name=f"reader of {pid}", daemon=True)
        with contextlib.suppress(RuntimeError):  # the machine may be out of threads
            thread.start()
            started.append(thread)
    left = LATE
    for thread in started:
        while thread.is_alive() and left > 0:
            begun = time.monotonic()
            thread.join(min(_STEP, left))
            left -= min(time.monotonic() - begun, _STEP)
    return dict(answers)


def cannot_be_paused(pid: int, *, proc: str = "/proc") -> bool:
    """True if a debugger that pauses all threads of this process would block."""
    return any(state in _CANNOT_BE_PAUSED for _, state in _thread_states(proc, pid))


def has_ended(pid: int, *, proc: str = "/proc") -> bool:
    """True if it is a zombie or gone."""
    try:
        return read_stat(f"{proc}/{pid}/stat").state in _ENDED
    except (OSError, ValueError):
        return True


def _read_process(proc: str, pid: int) -> ProcessInfo | None:
    folder = f"{proc}/{pid}"
    try:
        stat = read_stat(f"{folder}/stat")
    except (OSError, ValueError):
        return None
    blocked = [thread for thread, letter in _thread_states(proc, pid) if letter == "D"]
    source = f"{folder}/task/{blocked[0]}" if blocked else folder
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessInfo(
        pid=pid,
        parent=stat.parent,
        started=stat.started,
        state=stat.state,
        name=stat.name,
        command=Unknown("it was not read"),
        cpu=stat.cpu_ticks / ticks,
        threads=stat.threads,
        memory=max(stat.resident_pages, 0) * os.sysconf("SC_PAGE_SIZE"),
        blocked=len(blocked),
        place=_place(source),
        call=_call(source, folder),
    )


def _thread_states(proc: str, pid: int) -> list[tuple[str, str]]:
    """Id and state letter of each thread, main thread first."""
    found: list[tuple[str, str]] = []
    try:
        threads = [entry.name for entry in os.scandir(f"{proc}/{pid}/task")]
    except OSError:
        return found
    for thread in sorted(threads, key=lambda thread: (thread != str(pid), len(thread), thread))[:MOST_THREADS]:
        try:
            found.append((thread, read_stat(f"{proc}/{pid}/task/{thread}/stat").state))
        except (OSError, ValueError):
            continue  # it has just ended
    return found


def _place(folder: str) -> Maybe[str]:
    try:
        function = _read(f"{folder}/wchan", 256).decode(errors="replace").strip()
    except OSError:
        return Unknown("the kernel does not show it")
    return (
        function
        if function not in ("", "0")
        else Unknown("it waits in no kernel function, or this user may not see it")
    )


def _call(folder: str, process: str) -> Maybe[str]:
    try:
        number, *arguments = _read(f"{folder}/syscall", 256).decode(errors="replace").split()
    except (OSError, ValueError):
        return Unknown("this user may not see it")
    if not number.isdigit():
        return Unknown("it is not in a system call")  # `running`, or -1 after a fault
    name = _CALLS.get(os.uname().machine, {}).get(int(number), f"system call {number}")
    first = _number(arguments[0]) if arguments else None
    if name in _SELECTS and first == 1:
        return f"{name} of {_target(process, 0)}"  # nfds is 1, so it waits for standard input alone
    return f"{name} of {_target(process, first)}" if name in _ON_A_FILE and first is not None else name


def _number(hexadecimal: str) -> int | None:
    try:
        return int(hexadecimal, 16)
    except ValueError:
        return None


def _target(process: str, descriptor: int) -> str:
    """The target of a descriptor. The link is not followed, since the file system may hang."""
    try:
        target = str(Path(f"{process}/fd/{descriptor}").readlink())
    except OSError:
        return f"descriptor {descriptor}"
    kind = target.partition(":[")[0]
    # Omits the numbers of pipes and sockets.
    shown = {"pipe": "a pipe", "socket": "a socket"}.get(kind, target)
    return f"{shown} (its standard input)" if descriptor == 0 else shown


def _read(path: str, most: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)
