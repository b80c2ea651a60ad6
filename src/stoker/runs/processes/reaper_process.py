"""The reaper: the process between the supervisor and the job, which adopts every orphan of the job.

It collects the job and its orphans and reports to the supervisor. If the supervisor is killed, it stops the job. It
leads its own session, out of reach of terminals and of kills of the job's process group. It can write the job's output
to a file, because it outlives the supervisor. After the complete end of a job, it can start the next.
"""

import contextlib
import marshal
import math
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from stoker.logs.writer import LogWriter
from stoker.procfs import Identity, close_inherited_descriptors, identify, stat
from stoker.runs.processes.cgroup import Cgroup
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.spawn import CannotStartError, Program, spawn, start
from stoker.runs.processes.syscalls import become_subreaper, boot_clock, set_name, set_parent_death_signal
from stoker.runs.processes.termination import stop
from stoker.runs.processes.tree import ProcessScan, ProcessTree

# Messages to the supervisor, of fixed size: a kind and two numbers.
STARTED, FAILED, ENDED, STOPPED, EMPTY, DEADLINE_PASSED = range(6)
MESSAGE: Final = struct.Struct("=Bqq")
# Requests: exit, start the following job, keep it, start the one that was kept with the following deadline, or set the
# following deadline. The end of the pipe without an exit request means that the supervisor died.
EXIT: Final = b"x"
START: Final = b"s"
PREPARE: Final = b"p"
GO: Final = b"g"
DEADLINE: Final = b"d"
TIME: Final = struct.Struct("=d")
# On the fast path: the `id` of the request to start, and the deadline.
FAST_START: Final = struct.Struct("=16sd")
_LENGTH: Final = struct.Struct("=I")
_CHUNK: Final = 65536
# A job that prints endlessly must not keep its reaper from other work.
_MOST_CHUNKS: Final = 16
# With a deadline, waits take this share of the remaining time: a suspended supervisor is continued long before the
# deadline, even after a suspend of the machine.
_WAIT_SHARE: Final = 0.2
_SHORTEST_WAIT: Final = 2.0
# Less than the gap between looks that restarts the windows of rules.
_LONGEST_WAIT: Final = 20.0
# In milliseconds. The log of a job is opened after this, unless it prints or ends before.
_STARTED_WITHIN: Final = 1
REAPER_NAME: Final = "stoker-reaper"
# A plain number: the flags of an enum take as long to combine as the message takes to send.
_SEND_FLAGS: Final = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
# The kernel sends it when the supervisor dies. It also continues a suspended reaper.
_SUPERVISOR_DIED: Final = signal.SIGCONT


class OrphanStop(NamedTuple):
    """The stop of a job after its supervisor was killed, for its record."""

    status: int | None
    """The job's wait status; None if it could not be stopped."""
    survivors: tuple[str, ...]
    words: str
    about: str = ""
    """The directory of its record."""
    ended_before: bool = False
    """The command had exited before the stop."""


class LaunchRequest(NamedTuple):
    """A program to start, and how to stop it if the supervisor is killed."""

    program: Program
    signum: int
    grace: float
    about: str = ""
    log: str | None = None
    """The file for its output, if the reaper keeps output."""
    log_limit: int = 0
    deadline: float | None = None
    """The new deadline; None keeps the last one."""
    id: bytes = b""
    """The name of the request on the fast path: 16 bytes; empty if only the supervisor may start it."""
    success: bytes = b""
    """The report of a success on the fast path; empty if only the supervisor may report it."""

    def to_bytes(self, kind: bytes = START) -> bytes:
        """Encodes the request. Both ends are forks of one process, so they agree on the format."""
        command, environment, *rest, mask = self.program
        # marshal accepts plain integers, not enums.
        words = tuple(command), dict(environment), *rest, tuple(map(int, mask))
        body = marshal.dumps((words, int(self.signum), *self[2:]))
        return kind + _LENGTH.pack(len(body)) + body

    @classmethod
    def from_bytes(cls, body: bytes) -> "LaunchRequest":
        words, *rest = marshal.loads(body)  # noqa: S302 - written by this program
        return cls(Program(*words), *rest)


class FastPath(NamedTuple):
    """The reaper's own connection to the worker. Between two jobs it saves two wake-ups of the supervisor.

    Either the supervisor or the reaper decides how a job has ended: the one that reads the eventfd `outcome` first. The
    reaper reads it when the command has exited with 0 and left no process behind, the supervisor before it stops a job.
    """

    worker: socket.socket
    """Brings `FAST_START` and takes `LaunchRequest.success`."""
    outcome: int


class ReaperSetup(NamedTuple):
    """The descriptors and settings that a reaper inherits."""

    supervisor: int
    requests: int
    report: int
    cgroup: Cgroup | None
    orphaned: Callable[[OrphanStop], None] | None
    output: tuple[int, int] | None
    """Both ends of the pipe for the jobs' output."""
    fast_path: FastPath | None


class ReaperProcess:
    """The reaper inside its own process, from fork to exit."""

    def __init__(self, setup: ReaperSetup) -> None:
        self._setup = setup
        self._signals = SignalStream([signal.SIGCHLD, _SUPERVISOR_DIED])
        self._tree = ProcessTree(os.getpid(), setup.cgroup)
        self._fast_path = setup.fast_path
        self._prepared: LaunchRequest | None = None
        self._request: LaunchRequest | None = None
        self._job = 0
        self._status: int | None = None
        self.empty = True
        self._deadline = math.inf
        self._connected = True
        self._queued_events = b""
        self._has_session = False
        # A reaper that a stop has moved out of the cgroup gets no other job.
        self._is_inside = setup.cgroup is None
        self._log: LogWriter | None = None
        self._unopened: tuple[str, int] | None = None
        """File and limit of a log that is not opened yet."""
        self._writable = select.poll()
        self._writable.register(setup.report, select.POLLOUT)
        # Readable when a child ends or the job prints.
        self._epoll = select.epoll()
        self._epoll.register(self._signals.fileno(), select.EPOLLIN)
        if setup.output is not None:
            os.set_blocking(setup.output[0], False)
            self._epoll.register(setup.output[0], select.EPOLLIN)

    def run(self) -> None:
        """Runs jobs until it is released, or until the supervisor has died and the job has ended."""
        set_name(REAPER_NAME)
        become_subreaper()
        set_parent_death_signal(_SUPERVISOR_DIED)
        if self._setup.output is not None:
            self._close_inherited()
            self._enter_cgroup()
        while (kind := self._next_request()) in (START, PREPARE, GO):
            if kind == GO:
                (deadline,) = TIME.unpack(self._read_exactly(TIME.size))
                self._start_prepared(deadline)
                continue
            request = LaunchRequest.from_bytes(self._read_request())
            self._prepared = request if kind == PREPARE else None
            if kind == START:
                self._start_job(request)
        self._open_log()
        if kind == EXIT:
            # Otherwise the supervisor would inherit zombies.
            self.update()
        elif self._request is not None:
            self._orphaned(self._request)
        else:
            self._leave_cgroup()

    def _start_prepared(self, deadline: float) -> None:
        """Starts the prepared request, unless the other path has started it."""
        request, self._prepared = self._prepared, None
        if request is not None:
            self._start_job(request._replace(deadline=deadline))

    def _start_job(self, request: LaunchRequest) -> None:
        self._request, self._status, self.empty = request, None, False
        program = request.program
        if request.deadline is not None:
            self._deadline = request.deadline
        if boot_clock() >= self._deadline:
            # The request arrived so late that another machine may already run the job.
            self.empty, self._request = True, None
            self._queue_event(DEADLINE_PASSED)
            self._queue_event(EMPTY)
            self._flush()
            return
        self._open_log()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._setup.output is not None and request.log is not None:
            self._unopened = request.log, request.log_limit
            program = program._replace(output=self._setup.output[1])
        try:
            pid: int | None = None
            if program.session and program.output is not None and self._is_inside:
                self._leave_session()
                pid = spawn(program)
            # Leaving between fork and exec keeps the job, but not this process, in the supervisor's session.
            self._job = pid or start(program, self._setup.cgroup, after_fork=self._leave_session)
        except CannotStartError as error:
            self.empty = True
            self._request = None
            self._queue_event(FAILED, error.stage, error.number)
            self._flush()
            return
        if self._setup.output is None:
            # Not earlier: the job may inherit a descriptor of the supervisor.
            self._close_inherited()
        self._queue_event(STARTED, self._job, self._started(self._job))
        self._flush()

    def _open_log(self) -> None:
        """When something was printed, or nothing else is to be done: the start and a quick end come first."""
        if self._unopened is not None:
            self._log, self._unopened = LogWriter(*self._unopened), None

    def _started(self, pid: int) -> int:
        """The start time of a child in ticks; 0 if unreadable. The child exists until this process collects it."""
        with contextlib.suppress(OSError):
            who = identify(pid)
            return who.started if who else 0
        return 0

    def _enter_cgroup(self) -> None:
        """Enters the cgroup of its jobs, so that they start inside it."""
        if self._setup.cgroup is not None:
            with contextlib.suppress(OSError):
                self._setup.cgroup.add(os.getpid())
                self._is_inside = True

    def _leave_session(self) -> None:
        if not self._has_session:
            self._has_session = True
            os.setsid()

    def _next_request(self) -> bytes:
        """Handles the job until the next request; empty if the supervisor has died."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        poll.register(self._setup.requests, select.POLLIN)
        if self._fast_path is not None:
            poll.register(self._fast_path.worker.fileno(), select.POLLIN)
        # Waits even after the job: if the supervisor is killed before it records the end, the reaper does so.
        while True:
            self.update()
            # Another process may hold the other end of the pipe, so EOF alone is unreliable.
            if os.getppid() != self._setup.supervisor:
                return b""
            if self._unopened is not None and not poll.poll(_STARTED_WITHIN):
                self._open_log()
            ready = dict(poll.poll(self._timeout()))
            if self._setup.requests in ready:
                kind = os.read(self._setup.requests, 1)
                if kind != DEADLINE:
                    return kind
                (self._deadline,) = TIME.unpack(self._read_exactly(TIME.size))
            elif self._fast_path is not None and self._fast_path.worker.fileno() in ready:
                if not self._take_fast_start(self._fast_path):
                    poll.unregister(self._fast_path.worker.fileno())
                    self._close_fast_path()
            elif self._deadline < math.inf:
                self._continue_stopped_supervisor()
                self._enforce_deadline()

    def _take_fast_start(self, fast_path: FastPath) -> bool:
        """Handles an order of the worker, which may come late; False if the worker has ended."""
        try:
            order = fast_path.worker.recv(FAST_START.size, socket.MSG_DONTWAIT)
        except OSError:
            order = b""
        if len(order) < FAST_START.size:
            return False
        name, deadline = FAST_START.unpack(order)
        if self._prepared is not None and self._prepared.id == name:
            self._start_prepared(deadline)
        return True

    def _close_fast_path(self) -> None:
        if self._fast_path is not None:
            self._fast_path.worker.close()
            self._fast_path = None

    def _timeout(self) -> float | None:
        """The timeout of `poll` in milliseconds."""
        if self._deadline == math.inf:
            return None
        left = max(self._deadline - boot_clock(), 0.0)
        wait = min(max(left * _WAIT_SHARE, _SHORTEST_WAIT), _LONGEST_WAIT)
        return (wait if self.empty else min(wait, left)) * 1000 + 1

    def _continue_stopped_supervisor(self) -> None:
        """Continues a suspended supervisor, which could neither renew the lease nor deliver the outcome."""
        with contextlib.suppress(OSError):
            supervisor = stat(self._setup.supervisor)
            if supervisor is not None and supervisor.state == "T" and os.getppid() == self._setup.supervisor:
                os.kill(self._setup.supervisor, signal.SIGCONT)

    def _enforce_deadline(self) -> None:
        """Kills a job at its deadline, after which another machine may run it."""
        if not self.empty and boot_clock() >= self._deadline:
            self._deadline = math.inf
            self._queue_event(DEADLINE_PASSED)
            self._flush()
            stop(self, signal.SIGKILL, 0.0)

    def _read_request(self) -> bytes:
        (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
        return self._read_exactly(length)

    def _read_exactly(self, size: int) -> bytes:
        """Reads all bytes. The sender writes the whole request, or dies and closes the pipe."""
        parts = bytearray()
        while len(parts) < size:
            part = os.read(self._setup.requests, size - len(parts))
            if not part:
                os._exit(0)
            parts += part
        return bytes(parts)

    def _orphaned(self, request: LaunchRequest) -> None:
        self._connected = False
        self._close_fast_path()
        self.update()  # the job may have just ended
        ended_before = self._status is not None
        job = None if ended_before else Identity(self._job, self._started(self._job))
        outcome = stop(self, request.signum, request.grace, first=job)
        self.update()
        self._leave_cgroup()
        if self._setup.orphaned is not None:
            words = outcome.in_words()
            self._setup.orphaned(OrphanStop(self._status, outcome.survivors, words, request.about, ended_before))

    def _leave_cgroup(self) -> None:
        """Removes the cgroup, which no other process would."""
        if self._setup.cgroup is not None:
            self._setup.cgroup.evict(os.getpid())
            self._setup.cgroup.remove()

    # For `Termination`

    def scan_processes(self) -> ProcessScan:
        return self._tree.scan_processes()

    def kill(self) -> bool:
        return self._tree.kill()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def update(self) -> None:
        """Writes the job's output to its file, collects ended children and reports events."""
        self._signals.read()
        self._write_output(_MOST_CHUNKS)
        while not self.empty:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                # Orphans are adopted, so without children no process is left: the pipe has the last output.
                while self._write_output(_MOST_CHUNKS):
                    pass
                self.empty = True
                self._queue_event(EMPTY, self._has_reported_success())
                break
            if pid == 0:
                break
            if pid == self._job and self._status is None:
                self._report_job(status)
        self._flush()

    def _has_reported_success(self) -> bool:
        """Reports a success on the fast path, if the supervisor has not decided to stop the job."""
        fast_path, request = self._fast_path, self._request
        if fast_path is None or request is None or not request.success or self._status != 0:
            return False
        try:
            os.eventfd_read(fast_path.outcome)
        except BlockingIOError:
            return False
        try:
            fast_path.worker.send(request.success, _SEND_FLAGS)
        except OSError:
            os.eventfd_write(fast_path.outcome, 1)
            return False
        return True

    def _report_job(self, status: int) -> None:
        if os.WIFCONTINUED(status):
            with contextlib.suppress(OSError):
                self._continue_supervisor()
        elif not os.WIFSTOPPED(status):
            self._status = status
            self._queue_event(ENDED, status)
        # Unlike the others, this message may be lost, and must never fill the pipe.
        elif self._writable.poll(0):
            self._queue_event(STOPPED, os.WSTOPSIG(status))

    def _write_output(self, most: int) -> bool:
        """Moves output from the pipe to its file. True if there may be more."""
        if self._setup.output is None:
            return False
        for _ in range(most):
            try:
                data = os.read(self._setup.output[0], _CHUNK)
            except BlockingIOError:
                return False
            self._open_log()
            if self._log is not None:
                self._log.write(data)
        return True

    def _continue_supervisor(self) -> None:
        """Continues a supervisor that was suspended with its job, after the job was continued."""
        job = stat(self._job)
        supervisor = stat(self._setup.supervisor)
        stopped_alone = job and job.state != "T" and supervisor and supervisor.state == "T"
        if stopped_alone and os.getppid() == self._setup.supervisor:
            os.kill(self._setup.supervisor, signal.SIGCONT)

    def _queue_event(self, kind: int, first: int = 0, second: int = 0) -> None:
        self._queued_events += MESSAGE.pack(kind, first, second)

    def _flush(self) -> None:
        """Sends queued messages in one write: the end of a job usually leaves no processes."""
        events, self._queued_events = self._queued_events, b""
        if events and self._connected:
            try:
                os.write(self._setup.report, events)
            except BrokenPipeError:
                self._connected = False  # the supervisor has ended

    def _close_inherited(self) -> None:
        """Closes inherited descriptors, which would keep pipes of the supervisor and its caller open."""
        own = [self._setup.requests, self._setup.report, self._signals.fileno(), self.fileno()]
        if self._fast_path is not None:
            own += [self._fast_path.worker.fileno(), self._fast_path.outcome]
        with contextlib.suppress(OSError):  # no descriptor is left to list them
            close_inherited_descriptors((*own, *(self._setup.output or ())))
