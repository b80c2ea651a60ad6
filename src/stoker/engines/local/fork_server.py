"""The fork server: a warm process, forked before the worker has connections, that forks a shim on demand.

Everything that a shim needs is imported there. Shims have no parent: they outlive the fork server and the worker.

When the worker is killed, the fork server stays while its jobs run: if shim and reaper of one are killed as well, it
kills what they leave, whether or not another worker is started.
"""

import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stoker.engines.local.messages import ShimChannel
from stoker.engines.local.record import undelivered
from stoker.engines.local.shim import run_and_leave
from stoker.errors import StokerError
from stoker.queue import warm_up
from stoker.runs.processes.syscalls import set_name

# The kernel keeps 15 bytes of a name.
FORK_SERVER_NAME: Final = "stoker-forksrv"
_FORK: Final = b"f"
_LEAVE: Final = b"l"
_KILLED: Final = "the process that starts jobs was killed: start `stoker work` again"
# Besides what the shim imports at its top: how jobs are started, stopped and explained, and results delivered.
_NEEDED: Final = (
    "subprocess",
    "stoker.fit.oom",
    "stoker.runs.postmortem.report",
    "stoker.engines.local.adoption",
    "stoker.engines.delivery",
    "stoker.engines.local.worktree",
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
        self._ordered = 0

    def fileno(self) -> int:
        """Readable when a shim has come."""
        return self._connection.fileno()

    @property
    def expected(self) -> int:
        """How many shims were ordered and have not come yet."""
        return self._ordered

    def order(self) -> None:
        """Orders a shim; it comes by `receive`."""
        try:
            self._connection.send(_FORK, socket.MSG_NOSIGNAL)
        except OSError:
            raise StokerError(_KILLED) from None
        self._ordered += 1

    def receive(self) -> ShimChannel | None:
        """The connection to a shim that has come, if any. Raises OSError when there is no descriptor left for it."""
        try:
            data, descriptors, _flags, _address = socket.recv_fds(self._connection, 16, 1)
        except BlockingIOError:
            return None
        if not data:
            raise StokerError(_KILLED)
        self._ordered -= 1
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
        while (message := connection.recv(16)) == _FORK:
            has_worker = True
            while not _fork_shim(connection):
                if _hangs_up_within(connection, _FORK_EVERY):
                    break
        if has_worker and message != _LEAVE:
            connection.close()
            _watch_over(home)
    finally:
        os._exit(0)


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
    from stoker.engines.local.adoption import unsupervised

    watched = {record.id for record, _ in undelivered(home)}
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
        socket.send_fds(connection, [_FORK], [workers_end.fileno()], socket.MSG_NOSIGNAL)
    return True


def _hangs_up_within(connection: socket.socket, seconds: float) -> bool:
    """Whether the worker leaves within this time."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # a hang-up is reported in any case
    return bool(poll.poll(seconds * 1000))


def _detach_shim(connection: socket.socket, workers_end: socket.socket, shims_end: socket.socket) -> None:
    """Forks once more, so that the shim has no parent that could end."""
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            connection.close()
            workers_end.close()
            run_and_leave(shims_end)
        code = 0
    finally:
        os._exit(code)
