"""The life of a reaper: the process between the supervisor and the job, which adopts every orphan of the job.

It waits for the job's end and for its orphans, and tells the supervisor. When the supervisor is killed it stops the job
itself, so that nothing runs unwatched. It sits in a session of its own, so that neither a terminal nor a kill of the
job's process group reaches it. Where the job's output is kept it is the one that writes it down: it outlives the
supervisor. When nothing is left of one job it can be given the next.
"""

import contextlib
import marshal
import math
import os
import select
import signal
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from stoker.logs.writer import LogWriter
from stoker.procfs import Identity, close_inherited_descriptors, identify, stat
from stoker.runs.processes.cgroup import Cgroup
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.spawn import CannotStartError, Program, spawn, start
from stoker.runs.processes.syscalls import become_subreaper, boot_clock, hear_of_death_of_parent, set_name
from stoker.runs.processes.termination import stop
from stoker.runs.processes.tree import ProcessScan, ProcessTree

# What is told to the supervisor, each as one message of fixed size: a kind and two numbers.
STARTED, FAILED, ENDED, STOPPED, EMPTY, DEADLINE_PASSED = range(6)
MESSAGE: Final = struct.Struct("=Bqq")
# The orders: leave, begin the job that follows, or keep jobs until the moment that follows and no longer. The end of
# the pipe without one means that the supervisor died.
RELEASE: Final = b"r"
BEGIN: Final = b"b"
HOLD: Final = b"h"
MOMENT: Final = struct.Struct("=d")
_LENGTH: Final = struct.Struct("=I")
_CHUNK: Final = 65536
# A job that prints without end must not keep its reaper from everything else.
_MOST_CHUNKS: Final = 16
# While a job may be kept for a time only: its supervisor may have been stopped, and the machine may have slept.
_LONGEST_WAIT: Final = 2.0
REAPER_NAME: Final = "stoker-reaper"
# What the kernel sends when the supervisor dies: this one makes also a reaper go on that somebody had stopped.
_BEREAVED: Final = signal.SIGCONT


class OrphanStop(NamedTuple):
    """What is told to whoever writes down that the supervisor was killed."""

    status: int | None
    """The job's wait status; None when it could not be stopped."""
    survivors: tuple[str, ...]
    words: str
    about: str = ""
    """What the supervisor said the job is: the directory of its record."""
    ended_before: bool = False
    """Whether the job had ended by itself before anything was stopped."""


class LaunchRequest(NamedTuple):
    """What a reaper is given to start."""

    program: Program
    signum: int
    """How to stop it, and with how much grace, should the supervisor be killed."""
    grace: float
    about: str = ""
    log: str | None = None
    """The file that keeps its output, where the reaper was made to keep some."""
    log_limit: int = 0

    def order(self) -> bytes:
        """As it goes through the pipe. Both ends are the same program, so they agree on the format."""
        command, environment, *rest, mask = self.program
        # Signals and the like are more than numbers to Python, but not to the pipe.
        words = tuple(command), dict(environment), *rest, tuple(map(int, mask))
        body = marshal.dumps((words, int(self.signum), *self[2:]))
        return BEGIN + _LENGTH.pack(len(body)) + body

    @classmethod
    def from_order(cls, body: bytes) -> "LaunchRequest":
        words, *rest = marshal.loads(body)  # noqa: S302 - written by this very program
        return cls(Program(*words), *rest)


class ReaperSetup(NamedTuple):
    """What a reaper lives with."""

    supervisor: int
    orders: int
    report: int
    cgroup: Cgroup | None
    orphaned: Callable[[OrphanStop], None] | None
    output: tuple[int, int] | None
    """Both ends of the pipe that the jobs write to."""


class ReaperProcess:
    """The reaper itself, in its own process, from fork to exit."""

    def __init__(self, setup: ReaperSetup) -> None:
        self._setup = setup
        self._signals = SignalStream([signal.SIGCHLD, _BEREAVED])
        self._tree = ProcessTree(os.getpid(), setup.cgroup)
        self._request: LaunchRequest | None = None
        self._job = 0
        self._status: int | None = None
        self.empty = True
        self._deadline = math.inf
        self._connected = True
        self._queued_events = b""
        self._withdrawn = False
        # Who is moved out later, by a stop, is given no other job.
        self._is_inside = setup.cgroup is None
        self._log: LogWriter | None = None
        self._room = select.poll()
        self._room.register(setup.report, select.POLLOUT)
        # Readable when a child ended or the job printed something.
        self._happenings = select.epoll()
        self._happenings.register(self._signals.fileno(), select.EPOLLIN)
        if setup.output is not None:
            os.set_blocking(setup.output[0], False)
            self._happenings.register(setup.output[0], select.EPOLLIN)

    def run(self) -> None:
        """Starts jobs and stays until it is released, or until the supervisor died and nothing is left."""
        set_name(REAPER_NAME)
        become_subreaper()
        hear_of_death_of_parent(_BEREAVED)
        if self._setup.output is not None:
            self._close_inherited()
            self._move_in()
        while (order := self._next_order()) == BEGIN:
            self._begin(LaunchRequest.from_order(self._rest_of_order()))
        if order == RELEASE:
            # Whoever just ended would otherwise be a zombie on the supervisor's hands.
            self.update()
        elif self._request is not None:
            self._orphaned(self._request)
        else:
            self._leave_cgroup()

    def _begin(self, request: LaunchRequest) -> None:
        self._request, self._status, self.empty = request, None, False
        program = request.program
        if boot_clock() >= self._deadline:
            # The order was under way for so long that another may run the job by now.
            self.empty, self._request = True, None
            self._queue_event(DEADLINE_PASSED)
            self._queue_event(EMPTY)
            self._flush()
            return
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._setup.output is not None and request.log is not None:
            self._log = LogWriter(request.log, request.log_limit)
            program = program._replace(output=self._setup.output[1])
        try:
            self._job = self._start(program)
        except CannotStartError as error:
            self.empty = True
            self._request = None
            self._queue_event(FAILED, error.stage, error.number)
            self._flush()
            return
        if self._setup.output is None:
            # Not before: the job may have been given one of the supervisor's descriptors.
            self._close_inherited()
        self._queue_event(STARTED, self._job, self._started(self._job))
        self._flush()

    def _started(self, pid: int) -> int:
        """When it started, in ticks. It cannot be gone, since nobody else collects it; 0 when that cannot be read."""
        with contextlib.suppress(OSError):
            who = identify(pid)
            return who.started if who else 0
        return 0

    def _start(self, program: Program) -> int:
        if program.session and program.output is not None and self._is_inside:
            self._withdraw()
            if (pid := spawn(program)) is not None:
                return pid
        # In between: the job belongs to the supervisor's session, with its terminal, and this process to none.
        return start(program, self._setup.cgroup, withdraw=self._withdraw)

    def _move_in(self) -> None:
        """Lives in the cgroup of its jobs: they are then born there, however they are started."""
        if self._setup.cgroup is not None:
            with contextlib.suppress(OSError):
                self._setup.cgroup.add(os.getpid())
                self._is_inside = True

    def _withdraw(self) -> None:
        if not self._withdrawn:
            self._withdrawn = True
            os.setsid()

    def _next_order(self) -> bytes:
        """Looks after the job until there is one; nothing when the supervisor died."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        poll.register(self._setup.orders, select.POLLIN)
        # It stays also when nothing is left: a supervisor that is killed before it wrote that down needs it still.
        while True:
            self.update()
            # The pipe says both, but somebody else may hold its other end: the parent cannot be held.
            if os.getppid() != self._setup.supervisor:
                return b""
            if self._setup.orders in dict(poll.poll(self._timeout())):
                order = os.read(self._setup.orders, 1)
                if order != HOLD:
                    return order
                (self._deadline,) = MOMENT.unpack(self._read_exactly(MOMENT.size))
            elif self._deadline < math.inf:
                self._rouse_supervisor()
                self._end_in_time()

    def _timeout(self) -> float | None:
        """In milliseconds, for a poll."""
        if self._deadline == math.inf:
            return None
        left = _LONGEST_WAIT if self.empty else max(self._deadline - boot_clock(), 0.0)
        return min(left, _LONGEST_WAIT) * 1000 + 1

    def _rouse_supervisor(self) -> None:
        """One that is stopped neither renews a lease nor brings an outcome."""
        with contextlib.suppress(OSError):
            supervisor = stat(self._setup.supervisor)
            if supervisor is not None and supervisor.state == "T" and os.getppid() == self._setup.supervisor:
                os.kill(self._setup.supervisor, signal.SIGCONT)

    def _end_in_time(self) -> None:
        """Another may run the job from now on, and the supervisor, which should have stopped it, has not."""
        if not self.empty and boot_clock() >= self._deadline:
            self._deadline = math.inf
            self._queue_event(DEADLINE_PASSED)
            self._flush()
            stop(self, signal.SIGKILL, 0.0)

    def _rest_of_order(self) -> bytes:
        (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
        return self._read_exactly(length)

    def _read_exactly(self, size: int) -> bytes:
        """Waits for it: who sends an order sends all of it, or dies, and then the pipe comes to its end."""
        parts = bytearray()
        while len(parts) < size:
            part = os.read(self._setup.orders, size - len(parts))
            if not part:
                os._exit(0)
            parts += part
        return bytes(parts)

    def _orphaned(self, request: LaunchRequest) -> None:
        self._connected = False
        self.update()  # the job may have ended while this process was held up
        ended_before = self._status is not None
        job = None if ended_before else Identity(self._job, self._started(self._job))
        outcome = stop(self, request.signum, request.grace, first=job)
        self.update()
        self._leave_cgroup()
        if self._setup.orphaned is not None:
            words = outcome.in_words()
            self._setup.orphaned(OrphanStop(self._status, outcome.survivors, words, request.about, ended_before))

    def _leave_cgroup(self) -> None:
        """Nobody else is left to remove it."""
        if self._setup.cgroup is not None:
            self._setup.cgroup.evict(os.getpid())
            self._setup.cgroup.remove()

    # What a termination needs

    def scan_processes(self) -> ProcessScan:
        return self._tree.scan_processes()

    def kill(self) -> bool:
        return self._tree.kill()

    def fileno(self) -> int:
        return self._happenings.fileno()

    def update(self) -> None:
        """Writes down what the job printed, collects every child that ended and tells what matters of it."""
        self._signals.read()
        self._write_down(_MOST_CHUNKS)
        while not self.empty:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                # Orphans come here, so no child means nobody at all: what is in the pipe now is the last of it.
                while self._write_down(_MOST_CHUNKS):
                    pass
                self.empty = True
                self._queue_event(EMPTY)
                break
            if pid == 0:
                break
            if pid == self._job and self._status is None:
                self._report_job(status)
        self._flush()

    def _report_job(self, status: int) -> None:
        if os.WIFCONTINUED(status):
            with contextlib.suppress(OSError):
                self._continue_supervisor()
        elif not os.WIFSTOPPED(status):
            self._status = status
            self._queue_event(ENDED, status)
        # Such a message may be lost, the others may not: it must never be the one that fills the pipe.
        elif self._room.poll(0):
            self._queue_event(STOPPED, os.WSTOPSIG(status))

    def _write_down(self, most: int) -> bool:
        """Moves output from the pipe to its file; whether there may be more."""
        if self._setup.output is None:
            return False
        for _ in range(most):
            try:
                data = os.read(self._setup.output[0], _CHUNK)
            except BlockingIOError:
                return False
            if self._log is not None:
                self._log.write(data)
        return True

    def _continue_supervisor(self) -> None:
        """Whatever makes the job go on makes its supervisor go on, should both have been stopped: it is to watch."""
        job = stat(self._job)
        supervisor = stat(self._setup.supervisor)
        stopped_alone = job and job.state != "T" and supervisor and supervisor.state == "T"
        if stopped_alone and os.getppid() == self._setup.supervisor:
            os.kill(self._setup.supervisor, signal.SIGCONT)

    def _queue_event(self, kind: int, first: int = 0, second: int = 0) -> None:
        self._queued_events += MESSAGE.pack(kind, first, second)

    def _flush(self) -> None:
        """What belongs together is told together: most jobs end and leave nothing behind in the same moment."""
        told, self._queued_events = self._queued_events, b""
        if told and self._connected:
            try:
                os.write(self._setup.report, told)
            except BrokenPipeError:
                self._connected = False  # The supervisor is gone, as the other pipe is about to tell.

    def _close_inherited(self) -> None:
        """Pipes of the supervisor and its caller must come to their end when those let go, not when this one does."""
        own = self._setup.orders, self._setup.report, self._signals.fileno(), self.fileno()
        with contextlib.suppress(OSError):  # no descriptor is left to list them by: a job matters more
            close_inherited_descriptors((*own, *(self._setup.output or ())))
