"""The fork server: a warm process, forked before the worker has connections, that forks a shim on demand.

It imports everything that a shim needs. Shims are detached: they outlive the fork server and the worker.

When the worker is killed, the fork server stays while jobs run. If shim and reaper of a job are killed as well, it
kills the rest of the job, with or without a new worker.
"""

import contextlib
import errno
import gc
import importlib
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from stoker.engines.attempt import UNDELIVERED, AttemptResult
from stoker.engines.local.attempts import LocalAttempt
from stoker.engines.local.prepared import PreparedAttempt
from stoker.engines.local.record import AttemptProcesses, ShimChannel, ShimReady
from stoker.engines.local.shim import run_attempts
from stoker.errors import StokerError
from stoker.procfs import user_name
from stoker.queue import warm_up
from stoker.runs.processes.syscalls import set_name

# The kernel keeps 15 bytes of a name.
FORK_SERVER_NAME: Final = "stoker-forksrv"
_FORK: Final = b"f"
_LEAVE: Final = b"l"
_KILLED: Final = "the process that starts jobs was killed: start `stoker work` again"
# Modules that shims import lazily, to start, stop and explain jobs and to deliver results.
_NEEDED: Final = (
    "hashlib",
    "shutil",
    "subprocess",
    "stoker.actions.perform",
    "stoker.fit.oom",
    "stoker.logs.steps",
    "stoker.runs.postmortem.report",
    "stoker.engines.local.attempts",
    "stoker.engines.delivery",
    "stoker.engines.worktree",
)
# It exits at once, unless it is suspended or forking.
_LEAVES_WITHIN: Final = 2.0
_LEAVE_POLL: Final = 0.005
# The delay before another try to fork on a machine short of processes or memory.
_FORK_EVERY: Final = 0.5
# The interval of checks for unsupervised jobs.
_WATCH_EVERY: Final = 2.0


class ForkServer:
    """The worker's end: requests shims, and receives a connection to each."""

    def __init__(self, queue: str | None, home: Path) -> None:
        """Forks: call it in a single-threaded process without connections. `queue`: where results go."""
        gc.freeze()
        try:
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            self._pid = os.fork()
        except OSError as error:
            raise StokerError(f"the fork server cannot be started: {(error.strerror or '').lower()}") from None
        if self._pid == 0:
            mine.close()
            _serve(its, queue, home)
        its.close()
        # Set on the socket itself: `recv_fds` of Python 3.11 ignores flags.
        mine.setblocking(False)
        self._connection = mine
        self.expected = 0
        """The number of requested shims that have not arrived."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when a shim arrives."""
        return self._connection.fileno()

    def order(self) -> None:
        """Requests a shim, which `receive` returns later."""
        try:
            self._connection.send(_FORK, socket.MSG_NOSIGNAL)
        except OSError:
            raise StokerError(_KILLED) from None
        self.expected += 1

    def receive(self) -> ShimChannel | None:
        """The connection to a new shim, if one has arrived. Raises OSError if file descriptors run out."""
        try:
            data, descriptors, _flags, _address = socket.recv_fds(self._connection, 16, 1)
        except BlockingIOError:
            return None
        if not data:
            raise StokerError(_KILLED)
        self.expected -= 1
        if not descriptors:
            # The kernel has closed the connection, so its shim exits.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return ShimChannel(socket.socket(fileno=descriptors[0]), is_new=True)

    def close(self) -> None:
        """Ends the fork server. Shims with an attempt stay; idle ones exit when their connections close."""
        with contextlib.suppress(OSError):
            self._connection.send(_LEAVE, socket.MSG_NOSIGNAL)
        self._connection.close()
        # A suspended process must be continued to exit.
        os.kill(self._pid, signal.SIGCONT)
        ends = time.monotonic() + _LEAVES_WITHIN
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > ends:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return
            time.sleep(_LEAVE_POLL)


def _serve(connection: socket.socket, queue: str | None, home: Path) -> None:
    """The body of the fork server's process; never returns."""
    try:
        os.setsid()
        set_name(FORK_SERVER_NAME)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Each step is retried: a shortage of resources may pass.
        for step in (_redirect_streams, lambda: _import_all(queue)):
            while not _succeeds(step):
                if _hangs_up_within(connection, _FORK_EVERY):
                    return
        has_worker = False
        while (message := _next_order(connection)) == _FORK:
            has_worker = True
            while not _fork_shim(connection):
                if _hangs_up_within(connection, _FORK_EVERY):
                    break
        if has_worker and message != _LEAVE:
            connection.close()
            _watch_over(home)
    finally:
        os._exit(0)


def _next_order(connection: socket.socket) -> bytes:
    """The worker's next request; empty if it was killed."""
    try:
        return connection.recv(16)
    except ConnectionResetError:
        # It ended with shims unread. Its own messages can still be read.
        return connection.recv(16)


def _succeeds(step: Callable[[], None]) -> bool:
    try:
        step()
    except OSError:
        return False
    return True


def _redirect_streams() -> None:
    """Closes the inherited output: a pipe that reads it must see EOF when the worker ends, not the last job."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if os.environ.get("STOKER_DEBUG") else (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)


def _watch_over(home: Path) -> None:
    """Kills unsupervised jobs of a killed worker, until all its jobs have ended."""
    from stoker.engines.local.attempts import unsupervised

    watched = {path.parent.name for path in home.glob(f"attempts/*/{UNDELIVERED}")}
    while watched:
        with contextlib.suppress(OSError):
            watched -= unsupervised(home, watched)
        time.sleep(_WATCH_EVERY)


def _import_all(queue: str | None) -> None:
    """Imports everything that shims and reapers may ever need, once for all of them.

    An upgrade replaces Stoker's files while jobs run. A process with modules of both versions could neither deliver a
    result nor renew a lease.
    """
    for module in _NEEDED:
        importlib.import_module(module)
    user_name(os.getuid())  # loads the name service modules
    with contextlib.suppress(StokerError):  # the worker reports it
        warm_up(queue)


def _fork_shim(connection: socket.socket) -> bool:
    """Forks a shim; False if that fails now."""
    try:
        workers_end, shims_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError:
        return False
    with workers_end, shims_end:
        gc.freeze()
        try:
            pid = os.fork()
        except OSError:
            return False
        if pid == 0:
            _detach_shim(connection, workers_end, shims_end)
        shims_end.close()
        if os.waitpid(pid, 0)[1] != 0:
            return False
        with contextlib.suppress(OSError):  # the worker has ended, and the shim exits with it
            socket.send_fds(connection, [_FORK], [workers_end.fileno()], socket.MSG_NOSIGNAL)
    return True


def _hangs_up_within(connection: socket.socket, seconds: float) -> bool:
    """True if the worker ends within this time."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # POLLHUP is always reported
    return bool(poll.poll(seconds * 1000))


def _detach_shim(connection: socket.socket, workers_end: socket.socket, shims_end: socket.socket) -> None:
    """Forks again to detach the shim from the fork server. Never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            connection.close()
            workers_end.close()
            run_attempts(shims_end)
        code = 0
    except BaseException:  # noqa: BLE001 - the fork must neither continue as its parent nor fail silently
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


# One idle shim for the next job and one for the job after it.
SPARE: Final = 2
# The limit of shims forked in advance when many jobs start at once. Some stay unused if other workers take the jobs.
_MOST_AHEAD: Final = 16
# A shim gets ready within milliseconds, even on a busy machine.
_PATIENCE: Final = 10.0
_POLL: Final = 0.2
# The delay after a shim that failed to get ready.
_AFTER_FAILURE: Final = 1.0
# A shim is free again this soon after its result, unless it has code to remove.
_RETURNS_WITHIN: Final = 0.5
# Surplus shims stay this long after the last start, so that a stream of short jobs needs no forks.
_EXCESS_KEPT: Final = 5.0


class ShimPool:
    """The shims of a worker: idle ones, new ones, and those with an attempt."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._idle: dict[ShimChannel, AttemptProcesses] = {}
        self._prepared: PreparedAttempt | None = None
        self._no_orders_until = -math.inf
        self._wanted = 0
        """The number of jobs about to start."""
        self._taken_at = -math.inf
        self._new: set[ShimChannel] = set()
        """Shims that have not reported ready yet."""
        self.attempts: dict[str, LocalAttempt] = {}
        """Attempts by id, until they are delivered."""

    def running(self) -> list[LocalAttempt]:
        """Attempts without a final result."""
        return [one for one in self.attempts.values() if one.result is None or one.provisional]

    def descriptors(self) -> Iterator[int]:
        yield self._fork_server.fileno()
        for channel in (*self._idle, *self._new):
            yield channel.fileno()
        if self._prepared is not None:
            yield self._prepared.channel.fileno()
        for attempt in self.attempts.values():
            if attempt.channel is not None:
                yield attempt.channel.fileno()
                yield attempt.channel.reaper_fileno()
            elif attempt.reaper_exit >= 0:
                yield attempt.reaper_exit

    def due(self) -> float:
        """The monotonic time when `receive` is due at the latest."""
        excess = self._taken_at + _EXCESS_KEPT if len(self._idle) > self._most_idle() else math.inf
        return min((excess, *(one.retry_at for one in self.attempts.values())))

    def prepare(self, jobs: int) -> None:
        """Requests shims for jobs that are about to start, so that forking overlaps with claiming."""
        self._wanted = jobs
        with contextlib.suppress(StokerError):  # the next call of `replenish` raises it again
            self.replenish()

    def replenish(self, *, besides_returning: bool = False) -> None:
        """Requests shims for the next jobs, and closes surplus ones. Raises StokerError.

        `besides_returning`: does not count shims that are about to be free.
        """
        moment = time.monotonic()
        if moment >= self._no_orders_until:
            coming = len(self._new) + self._fork_server.expected
            if not besides_returning:
                coming += len(self._returning(moment))
            ready = len(self._idle) + (self._prepared is not None)
            missing = max(SPARE, min(self._wanted, _MOST_AHEAD)) - ready - coming
            for _ in range(missing):
                self._fork_server.order()
        if moment >= self._taken_at + _EXCESS_KEPT:
            for channel in list(self._idle)[self._most_idle() :]:
                del self._idle[channel]
                channel.close()

    def _most_idle(self) -> int:
        return max(SPARE * 2, self._wanted)

    def _returning(self, moment: float) -> list[LocalAttempt]:
        """Ended attempts whose shims are about to be free."""
        return [
            one
            for one in self.attempts.values()
            if one.result is not None and one.channel is not None and moment < one.ended_at + _RETURNS_WITHIN
        ]

    # The attempt that is prepared

    def idle(self) -> tuple[ShimChannel, AttemptProcesses] | None:
        """A shim that waits for an attempt, if there is one."""
        return next(reversed(self._idle.items()), None)

    @property
    def prepared(self) -> PreparedAttempt | None:
        return self._prepared

    def hold_prepared(self, prepared: PreparedAttempt) -> None:
        """Its shim is no longer idle. One that was held before is to be released first."""
        del self._idle[prepared.channel]
        self._prepared = prepared

    def release_prepared(self) -> PreparedAttempt | None:
        """The caller starts it or throws it away."""
        prepared, self._prepared = self._prepared, None
        return prepared

    def take(self) -> tuple[ShimChannel, AttemptProcesses]:
        """Takes an idle shim, after waiting for one if necessary. Raises StokerError if none comes."""
        self._taken_at = time.monotonic()
        ends = self._taken_at + _PATIENCE
        if self._wanted > len(self._idle):
            self.replenish()
        while True:
            while self._idle:
                channel, processes = self._idle.popitem()
                if channel.receive() is None and channel.open:
                    self._wanted = max(self._wanted - 1, 0)
                    return channel, processes
                channel.close()
            if time.monotonic() > ends:
                # The next call must not wait for a hung shim again.
                for channel in self._new:
                    channel.close()
                self._new.clear()
                raise StokerError("no process for it came up: the machine is out of processes or memory, or suspended")
            self._await_one()

    def receive(self, readable: Collection[int]) -> list[LocalAttempt]:
        """Handles messages of shims. Returns attempts with a new result."""
        if self._fork_server.fileno() in readable:
            self._receive_new()
        for channel in [one for one in (*self._idle, *self._new) if one.fileno() in readable]:
            self._receive_from_idle(channel)
        prepared = self._prepared
        if prepared is not None and prepared.channel.fileno() in readable:
            prepared.channel.receive()
            if not prepared.channel.open:
                self._prepared = None
                prepared.discard()
        ended = []
        for attempt in list(self.attempts.values()):
            connection, before = attempt.channel, attempt.result
            if connection is not None and connection.reaper_fileno() in readable:
                # Before what the shim says: it may be ready for another attempt.
                self._receive_report(attempt, connection)
            if connection is not None and connection.fileno() in readable:
                self._receive_from(attempt, connection)
            elif attempt.reaper_exit in readable:
                attempt.conclude()
            elif attempt.retry_at <= time.monotonic():
                attempt.connect()
            if attempt.result is not None and before is None:
                ended.append(attempt)
        return ended

    @staticmethod
    def _receive_report(attempt: LocalAttempt, connection: ShimChannel) -> None:
        report = connection.receive_report()
        if isinstance(report, AttemptResult):
            attempt.result = attempt.result or report

    def _receive_from(self, attempt: LocalAttempt, connection: ShimChannel) -> None:
        while (message := connection.receive()) is not None:
            if isinstance(message, AttemptResult):
                # A second one comes if the reaper was killed after it had reported the success.
                attempt.result = attempt.result or message
            elif isinstance(message, ShimReady):
                # The attempt is complete on disk.
                self._idle[connection] = message.processes
                attempt.channel = None
                break
        if not connection.open:
            attempt.lose_shim()

    def acknowledge(self) -> None:
        """Acknowledges recorded results, which frees their shims."""
        for attempt in self.attempts.values():
            attempt.send_acknowledgement()

    def close(self) -> None:
        """Idle shims exit; the others continue."""
        self.acknowledge()
        if (prepared := self.release_prepared()) is not None:
            prepared.discard()
        for channel in (*self._idle, *self._new):
            channel.close()
        self._fork_server.close()

    def _await_one(self) -> None:
        """Waits a moment for a shim to arrive, get ready or become free."""
        self.acknowledge()
        returning = {
            one.channel: one
            for one in self._returning(time.monotonic())
            if one.channel is not None and one.recorded  # others are not acknowledged yet
        }
        # A returning shim may be stuck in its last attempt, so new ones are requested, too.
        self.replenish(besides_returning=not returning)
        poll = select.poll()
        poll.register(self._fork_server.fileno(), select.POLLIN)
        for channel in (*self._new, *returning):
            poll.register(channel.fileno(), select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(_POLL * 1000)}
        for channel, attempt in returning.items():
            if channel.fileno() in readable:
                self._receive_from(attempt, channel)
        if self._fork_server.fileno() in readable:
            self._receive_new()
        for channel in [one for one in self._new if one.fileno() in readable]:
            self._receive_from_idle(channel)

    def _receive_new(self) -> None:
        try:
            while (channel := self._fork_server.receive()) is not None:
                self._new.add(channel)
        except OSError:
            self._no_orders_until = time.monotonic() + _AFTER_FAILURE

    def _receive_from_idle(self, channel: ShimChannel) -> None:
        message = channel.receive()
        if isinstance(message, ShimReady):
            self._new.discard(channel)
            self._idle[channel] = message.processes
        elif not channel.open:
            if channel in self._new:
                # It failed to get ready for lack of resources, and the next one would fail as well.
                self._no_orders_until = time.monotonic() + _AFTER_FAILURE
            self._new.discard(channel)
            self._idle.pop(channel, None)
            channel.close()
