"""Starts the user's command as a shell would, and explains a failure."""

import contextlib
import errno
import os
import signal
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from stoker.paths import is_directory
from stoker.runs.processes.cgroup import Cgroup
from stoker.runs.processes.syscalls import fork_into_cgroup

# The codes of GNU timeout and env: launcher failed, command not executable, command not found.
OWN_FAILURE: Final = 125
_NOT_EXECUTABLE: Final = 126
_NOT_FOUND: Final = 127

# The stage of a failure, by position on the wire.
_DIRECTORY, _SEARCH, _EXECUTE, _INTERPRETER, _OTHER = range(5)
_OUTCOME: Final = struct.Struct("=ii")
_GO: Final = b"g"

# The PATH of a shell without the variable.
_DEFAULT_PATH: Final = "/bin:/usr/bin"
_WORDS: Final = {
    errno.ENOENT: "there is no such file",
    errno.ENOEXEC: "it is not a program for this machine",
    errno.EISDIR: "it is a directory",
    errno.EACCES: "it may not be executed (chmod +x allows it)",
    errno.E2BIG: "its arguments and environment are too long",
}
# Shortages of the machine, which may pass in a moment.
_SHORTAGES: Final = {
    errno.EAGAIN: "no more processes are allowed here",
    errno.ENOMEM: "the machine is out of memory",
    errno.EMFILE: "too many files are open",
    errno.ENFILE: "too many files are open on this machine",
}
# Python ignores these, which other programs do not expect.
_IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)
# A shell reads this much to tell a script from a foreign binary.
_SCRIPT_PROBE: Final = 80


class Program(NamedTuple):
    """A program to start."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str | None = None
    """None for the current directory."""
    output: int | None = None
    """A descriptor for both standard output and error; None for the caller's."""
    session: bool = False
    """It leads a new session without a terminal."""
    mask: Collection[int] = ()
    """The blocked signals at its start: `SignalStream.original`."""


class Failed(NamedTuple):
    """A failed start."""

    errno: int
    exit_code: int
    """127 not found, 126 found but not runnable, 125 anything else."""
    why: str
    """Fits after "cannot run 'x': "."""
    transient: bool = False
    """The machine lacked resources: the command may start later or elsewhere."""


class CannotStartError(Exception):
    """A failed start, with stage and errno; `failure` explains it."""

    def __init__(self, stage: int, number: int) -> None:
        super().__init__(stage, number)
        self.stage = stage
        self.number = number


def start(program: Program, cgroup: Cgroup | None, after_fork: Callable[[], None]) -> int:
    """Starts a child process, inside the cgroup if any, and returns its pid.

    `after_fork` is called in this process, after the fork and before the exec.
    """
    try:
        return _start(program, cgroup, after_fork)
    except OSError as error:
        raise CannotStartError(_OTHER, error.errno or errno.EINVAL) from error


def spawn(program: Program) -> int | None:
    """Starts a child process with vfork; None on failure, which `start` then explains.

    For a single-threaded process, and a program with its own session and output. It takes a tenth of a millisecond even
    on a busy machine, where a fork of Python takes several.
    """
    if program.output is None:
        return None
    try:
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if program.directory is not None:
            os.chdir(program.directory)
        return os.posix_spawn(
            next(path for path in _candidates(program) if os.access(path, os.X_OK) and not is_directory(path)),
            list(program.command),
            program.environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, program.output, 1), (os.POSIX_SPAWN_DUP2, program.output, 2)],
            setsid=True,
            setsigmask=program.mask,
            setsigdef=_IGNORED_BY_PYTHON,
        )
    except (OSError, ValueError, NotImplementedError, StopIteration):
        return None
    finally:
        os.fchdir(here)
        os.close(here)


def failure(stage: int, number: int) -> Failed:
    """Explains a failed start."""
    if number in _SHORTAGES:
        return Failed(number, OWN_FAILURE, _SHORTAGES[number], transient=True)
    why = os.strerror(number).lower()
    if stage == _DIRECTORY:
        return Failed(number, OWN_FAILURE, f"the directory to run it in cannot be entered ({why})")
    if stage == _OTHER:
        return Failed(number, OWN_FAILURE, why)
    words = {
        _SEARCH: "there is no such command",
        _INTERPRETER: "the interpreter that it names does not exist",
    }
    missing = number == errno.ENOENT and stage != _INTERPRETER
    return Failed(number, _NOT_FOUND if missing else _NOT_EXECUTABLE, words.get(stage) or _WORDS.get(number, why))


def _start(program: Program, cgroup: Cgroup | None, after_fork: Callable[[], None]) -> int:
    with contextlib.ExitStack() as pipes:
        wait, go = _pipe(pipes)
        outcomes, report = _pipe(pipes)
        pid = _fork(cgroup)
        if pid == 0:
            os.close(go)
            _become(program, wait, report)
        after_fork()
        os.write(go, _GO)
        os.close(report)
        # The exec of the command closes the other end.
        outcome = os.read(outcomes, _OUTCOME.size)
    if outcome:
        os.waitpid(pid, 0)
        raise CannotStartError(*_OUTCOME.unpack(outcome))
    return pid


def _pipe(until: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        until.callback(_close, end)
    return ends


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)  # already closed


def _fork(cgroup: Cgroup | None) -> int:
    if cgroup is not None:
        try:
            descriptor = os.open(cgroup.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return fork_into_cgroup(descriptor)
            finally:
                os.close(descriptor)
        # Without clone3, in an old kernel or a sandbox, the child enters the cgroup itself.
        except OSError:
            pass
    pid = os.fork()
    if pid == 0 and cgroup is not None:
        _enter(cgroup)
    return pid


def _become(program: Program, wait: int, report: int) -> NoReturn:
    """The child process between fork and exec."""
    stage = _OTHER
    try:
        if os.read(wait, 1) != _GO:
            raise CannotStartError(_OTHER, errno.ESRCH)  # the reaper died
        if program.session:
            os.setsid()
        if program.output is not None:
            os.dup2(program.output, 1)
            os.dup2(program.output, 2)
        stage = _DIRECTORY
        if program.directory is not None:
            os.chdir(program.directory)
        stage = _EXECUTE
        _restore_signals(program.mask)
        _execute(program)
    except CannotStartError as error:
        os.write(report, _OUTCOME.pack(error.stage, error.number))
    except OSError as error:
        os.write(report, _OUTCOME.pack(stage, error.errno or errno.EINVAL))
    except ValueError:
        # A NUL in an argument, or an equals sign in the name of a variable.
        os.write(report, _OUTCOME.pack(stage, errno.EINVAL))
    finally:
        os._exit(OWN_FAILURE)


def _enter(cgroup: Cgroup) -> None:
    try:
        cgroup.add(os.getpid())
    except OSError:
        return  # tracking by descent still works


def _restore_signals(mask: Collection[int]) -> None:
    """Restores signals that Python changed. Those ignored by the caller (nohup) stay ignored."""
    # From now on, Ctrl-C ends the child.
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _execute(program: Program) -> NoReturn:
    if "/" in program.command[0]:
        _try(program.command[0], program)
        raise CannotStartError(_EXECUTE, errno.ENOENT)
    refused: CannotStartError | None = None
    for path in _candidates(program):
        try:
            _try(path, program)
        except CannotStartError as error:
            # A file without permission does not hide a later one in PATH.
            if error.number not in (errno.EACCES, errno.EISDIR):
                raise
            # Like a shell, ignores files in directories without permission.
            if os.path.lexists(path):
                refused = refused or error
    raise refused or CannotStartError(_SEARCH, errno.ENOENT)


def _candidates(program: Program) -> list[str]:
    """The possible paths of the program, in order."""
    name = program.command[0]
    if "/" in name:
        return [name]
    return [f"{directory or '.'}/{name}" for directory in program.environment.get("PATH", _DEFAULT_PATH).split(":")]


def _try(path: str, program: Program) -> None:
    """Executes this file. Returns if it does not exist."""
    try:
        os.execve(path, list(program.command), program.environment)  # noqa: S606 - a person's own command
    except (FileNotFoundError, NotADirectoryError):
        if os.path.lexists(path):
            raise CannotStartError(_INTERPRETER, errno.ENOENT) from None
    except PermissionError:
        raise CannotStartError(_EXECUTE, errno.EISDIR if is_directory(path) else errno.EACCES) from None
    except OSError as error:
        if error.errno != errno.ENOEXEC or _looks_binary(path):
            raise CannotStartError(_EXECUTE, error.errno or errno.EINVAL) from None
        # Like every shell, runs a script without a #! line by sh.
        os.execve("/bin/sh", ["sh", path, *program.command[1:]], program.environment)  # noqa: S606 - as above


def _looks_binary(path: str) -> bool:
    with Path(path).open("rb") as file:
        return b"\0" in file.read(_SCRIPT_PROBE).partition(b"\n")[0]
