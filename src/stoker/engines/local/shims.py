"""The fork server: a warm process, forked before the worker has connections, that forks a shim on demand.

Everything that a shim needs is imported there. Shims have no parent: they outlive the fork server and the worker.

When the worker is killed, the fork server stays while its jobs run: if shim and reaper of one are killed as well, it
kills what they leave, whether or not another worker is started.
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
# Besides what the shim imports at its top: how jobs are started, stopped and explained, and results delivered.
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
# It leaves at once, unless it is suspended or in the middle of a fork.
_LEAVES_WITHIN: Final = 2.0
_LEAVE_POLL: Final = 0.005
# Between two tries to fork, on a machine that is short of processes or memory.
_FORK_EVERY: Final = 0.5
# Between two looks for jobs that are no longer supervised.
_WATCH_EVERY: Final = 2.0


class ForkServer:
    """The worker's end: orders shims, and receives a connection to each."""

    def __init__(self, queue: str | None, home: Path) -> None:
        """For a process of one thread, without connections that a fork would break. `queue`: where results go."""
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
        # Set on the socket itself: Python 3.11 does not pass flags on when descriptors are received.
        mine.setblocking(False)
        self._connection = mine
        self.expected = 0
        """How many shims were ordered and have not come yet."""

    def fileno(self) -> int:
        """Readable when a shim has come."""
        return self._connection.fileno()

    def order(self) -> None:
        """Orders a shim; it comes by `receive`."""
        try:
            self._connection.send(_FORK, socket.MSG_NOSIGNAL)
        except OSError:
            raise StokerError(_KILLED) from None
        self.expected += 1

    def receive(self) -> ShimChannel | None:
        """The connection to a shim that has come, if any. Raises OSError when there is no descriptor left for it."""
        try:
            data, descriptors, _flags, _address = socket.recv_fds(self._connection, 16, 1)
        except BlockingIOError:
            return None
        if not data:
            raise StokerError(_KILLED)
        self.expected -= 1
        if not descriptors:
            # The kernel has closed the connection, and the shim at its other end leaves.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return ShimChannel(socket.socket(fileno=descriptors[0]))

    def close(self) -> None:
        """Shims with an attempt stay; the others leave when their connections are closed."""
        with contextlib.suppress(OSError):
            self._connection.send(_LEAVE, socket.MSG_NOSIGNAL)
        self._connection.close()
        # A suspended process cannot leave.
        os.kill(self._pid, signal.SIGCONT)
        ends = time.monotonic() + _LEAVES_WITHIN
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > ends:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return
            time.sleep(_LEAVE_POLL)


def _serve(connection: socket.socket, queue: str | None, home: Path) -> None:
    """The fork server's process: never returns."""
    try:
        os.setsid()
        set_name(FORK_SERVER_NAME)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Each until it succeeds: a machine that is short of something now may not be later.
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
    """What the worker asks for; empty when it was killed."""
    try:
        return connection.recv(16)
    except ConnectionResetError:
        # It ended before it had received every shim. What it sent before that is still to be read.
        return connection.recv(16)


def _succeeds(step: Callable[[], None]) -> bool:
    try:
        step()
    except OSError:
        return False
    return True


def _redirect_streams() -> None:
    """A reader of the worker's output must see its end when the worker ends, not when the last job does."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if os.environ.get("STOKER_DEBUG") else (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)


def _watch_over(home: Path) -> None:
    """The worker was killed: stays until nothing of its jobs is left unsupervised."""
    from stoker.engines.local.attempts import unsupervised

    watched = {path.parent.name for path in home.glob(f"attempts/*/{UNDELIVERED}")}
    while watched:
        with contextlib.suppress(OSError):
            watched -= unsupervised(home, watched)
        time.sleep(_WATCH_EVERY)


def _import_all(queue: str | None) -> None:
    """Loads what shims and reapers may ever need, once, and shared by all of them.

    An upgrade replaces Stoker's files while jobs run: a process that loaded half of it from the old files and half from
    the new ones could neither deliver a result nor renew a lease.
    """
    for module in _NEEDED:
        importlib.import_module(module)
    user_name(os.getuid())  # loads what looks up users
    with contextlib.suppress(StokerError):  # the worker reports what is wrong with it
        warm_up(queue)


def _fork_shim(connection: socket.socket) -> bool:
    """False when that cannot be done now."""
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
        with contextlib.suppress(OSError):  # the worker is gone, and so is the shim
            socket.send_fds(connection, [_FORK], [workers_end.fileno()], socket.MSG_NOSIGNAL)
    return True


def _hangs_up_within(connection: socket.socket, seconds: float) -> bool:
    """Whether the worker leaves within this time."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # a hang-up is reported in any case
    return bool(poll.poll(seconds * 1000))


def _detach_shim(connection: socket.socket, workers_end: socket.socket, shims_end: socket.socket) -> None:
    """Forks once more, so that the shim has no parent that could end. Never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            connection.close()
            workers_end.close()
            run_attempts(shims_end)
        code = 0
    except BaseException:  # noqa: BLE001 - it must not go on as its parent, and not fail silently
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


# One for the next job, and one for the job after it: while the first starts, another is forked.
SPARE: Final = 2
# When many jobs start at once, as many shims are forked ahead: jobs that another worker takes leave some unused.
_MOST_AHEAD: Final = 16
# A shim is ready within milliseconds, also on a busy machine.
_PATIENCE: Final = 10.0
_POLL: Final = 0.2
# Between a shim that could not get ready and the next order.
_AFTER_FAILURE: Final = 1.0
# A shim whose result is known is free for the next job within this, unless it has code to remove.
_RETURNS_WITHIN: Final = 0.5
# Shims that are too many stay this long after the last start: while short jobs come and go, none is forked.
_EXCESS_KEPT: Final = 5.0


class ShimPool:
    """Knows by every connection which shim is at its other end."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._idle: dict[ShimChannel, AttemptProcesses] = {}
        self._no_orders_until = -math.inf
        self._wanted = 0
        """How many jobs are about to start."""
        self._taken_at = -math.inf
        self._new: set[ShimChannel] = set()
        """Shims that have not sent yet that they are ready."""
        self.attempts: dict[str, LocalAttempt] = {}
        """By id, until the queue has everything of them."""

    def running(self) -> list[LocalAttempt]:
        """The attempts without a result, or with one that may still change."""
        return [one for one in self.attempts.values() if one.result is None or one.provisional]

    def descriptors(self) -> Iterator[int]:
        yield self._fork_server.fileno()
        for channel in (*self._idle, *self._new):
            yield channel.fileno()
        for attempt in self.attempts.values():
            if attempt.channel is not None:
                yield attempt.channel.fileno()
            elif attempt.reaper_exit >= 0:
                yield attempt.reaper_exit

    def due(self) -> float:
        """When `receive` is to be called at the latest, in monotonic seconds."""
        excess = self._taken_at + _EXCESS_KEPT if len(self._idle) > self._most_idle() else math.inf
        return min((excess, *(one.retry_at for one in self.attempts.values())))

    def prepare(self, jobs: int) -> None:
        """Has shims forked for jobs that are about to start, while the first of them are claimed."""
        self._wanted = jobs
        with contextlib.suppress(StokerError):  # the next call of `replenish` raises it again
            self.replenish()

    def replenish(self, *, besides_returning: bool = False) -> None:
        """Orders shims for the next jobs, and closes those that are too many. Raises StokerError.

        `besides_returning`: although some are about to be free.
        """
        moment = time.monotonic()
        if moment >= self._no_orders_until:
            coming = len(self._new) + self._fork_server.expected
            if not besides_returning:
                coming += len(self._returning(moment))
            missing = max(SPARE, min(self._wanted, _MOST_AHEAD)) - len(self._idle) - coming
            for _ in range(missing):
                self._fork_server.order()
        if moment >= self._taken_at + _EXCESS_KEPT:
            for channel in list(self._idle)[self._most_idle() :]:
                del self._idle[channel]
                channel.close()

    def _most_idle(self) -> int:
        return max(SPARE * 2, self._wanted)

    def _returning(self, moment: float) -> list[LocalAttempt]:
        """Attempts whose shims are about to be free."""
        return [
            one
            for one in self.attempts.values()
            if one.result is not None and one.channel is not None and moment < one.ended_at + _RETURNS_WITHIN
        ]

    def take(self) -> tuple[ShimChannel, AttemptProcesses]:
        """A shim that is ready, waiting for one if necessary. Raises StokerError when none comes."""
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
                # A shim that hangs must not be waited for the next time too.
                for channel in self._new:
                    channel.close()
                self._new.clear()
                raise StokerError("no process for it came up: the machine is out of processes or memory, or suspended")
            self._await_one()

    def receive(self, readable: Collection[int]) -> list[LocalAttempt]:
        """Handles what the shims sent; the attempts whose result has become known."""
        if self._fork_server.fileno() in readable:
            self._receive_new()
        for channel in [one for one in (*self._idle, *self._new) if one.fileno() in readable]:
            self._receive_from_idle(channel)
        ended = []
        for attempt in list(self.attempts.values()):
            connection, before = attempt.channel, attempt.result
            if connection is not None and connection.fileno() in readable:
                self._receive_from(attempt, connection)
            elif attempt.reaper_exit in readable:
                attempt.conclude()
            elif attempt.retry_at <= time.monotonic():
                attempt.connect()
            if attempt.result is not None and before is None:
                ended.append(attempt)
        return ended

    def _receive_from(self, attempt: LocalAttempt, connection: ShimChannel) -> None:
        while (message := connection.receive()) is not None:
            if isinstance(message, AttemptResult):
                attempt.result = message
            elif isinstance(message, ShimReady):
                # The attempt is complete on disk.
                self._idle[connection] = message.processes
                attempt.channel = None
                break
        if not connection.open:
            attempt.lose_shim()

    def acknowledge(self) -> None:
        """Tells shims that the queue has their results: they become free."""
        for attempt in self.attempts.values():
            attempt.send_acknowledgement()

    def close(self) -> None:
        """Shims without an attempt leave; the others go on."""
        self.acknowledge()
        for channel in (*self._idle, *self._new):
            channel.close()
        self._fork_server.close()

    def _await_one(self) -> None:
        """Waits a moment for a shim to come, to get ready, or to be free again."""
        self.acknowledge()
        returning = {
            one.channel: one
            for one in self._returning(time.monotonic())
            if one.channel is not None and one.recorded  # the others are not acknowledged yet
        }
        # One that cannot leave its last attempt must not be waited for alone.
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
                # It could not get ready: the machine is short of something, and the next one would fail as well.
                self._no_orders_until = time.monotonic() + _AFTER_FAILURE
            self._new.discard(channel)
            self._idle.pop(channel, None)
            channel.close()
