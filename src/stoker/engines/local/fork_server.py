"""Where attendants come from: a warm process that forks one whenever the worker wants another.

A worker has connections to a database, which no fork survives well. The nursery is forked before it has any, with
everything imported that an attendant needs. Attendants are nobody's children: they outlive the nursery and the worker.

When the worker was killed, the nursery stays as long as its jobs run: should both that look after one be killed as
well, it stops what they leave, whether another worker comes or not.
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

from stoker.engines.local.attempt_spec import undelivered
from stoker.engines.local.messages import ShimChannel
from stoker.engines.local.shim import run_and_leave
from stoker.errors import StokerError
from stoker.queue import warm_up
from stoker.runs.processes.syscalls import set_name

_ANOTHER: Final = b"a"
_LEAVE: Final = b"l"
# Besides what the attendant imports at its top: how jobs are started, stopped and explained, and outcomes delivered.
_NEEDED: Final = (
    "subprocess",
    "stoker.fit.oom",
    "stoker.runs.postmortem.report",
    "stoker.engines.local.adoption",
    "stoker.engines.delivery",
    "stoker.engines.local.worktree",
)
# It leaves at once, unless somebody stopped it or it is in the middle of a fork.
_LEAVES_WITHIN: Final = 2.0
_LEAVE_POLL: Final = 0.005
# Between two tries to fork, on a machine that is short of processes or memory.
_FORK_EVERY: Final = 0.5
# Between two looks whether anything is left of jobs that nobody looks after.
_WATCH_EVERY: Final = 2.0


class ForkServer:
    """The worker's side: asks for attendants, and gets a line to each."""

    def __init__(self, queue: str | None, home: Path) -> None:
        """For a process of one thread, without connections that a fork would break. `queue`: where outcomes go."""
        gc.freeze()
        try:
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            self._pid = os.fork()
        except OSError as error:
            raise StokerError(f"no process that starts jobs can be started: {(error.strerror or '').lower()}") from None
        if self._pid == 0:
            mine.close()
            _rear(its, queue, home)
        its.close()
        # Said of the line itself: Python 3.11 does not pass flags on when descriptors are received.
        mine.setblocking(False)
        self._line = mine
        self._ordered = 0

    def fileno(self) -> int:
        """Readable when an attendant has come."""
        return self._line.fileno()

    @property
    def expected(self) -> int:
        """How many have been asked for and have not come yet."""
        return self._ordered

    def order(self) -> None:
        """Asks for another one; it comes by `receive`."""
        try:
            self._line.send(_ANOTHER, socket.MSG_NOSIGNAL)
        except OSError:
            raise StokerError("the process that starts jobs was killed: start `stoker work` again") from None
        self._ordered += 1

    def receive(self) -> ShimChannel | None:
        """The line to one that has come, if any. Raises OSError when there is no descriptor left for it."""
        try:
            data, descriptors, _flags, _address = socket.recv_fds(self._line, 16, 1)
        except BlockingIOError:
            return None
        if not data:
            raise StokerError("the process that starts jobs was killed: start `stoker work` again")
        self._ordered -= 1
        if not descriptors:
            # The kernel has closed the line, and whoever is at its other end leaves.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return ShimChannel(socket.socket(fileno=descriptors[0]))

    def close(self) -> None:
        """Attendants that have a job stay; whoever has none leaves when its line is closed."""
        with contextlib.suppress(OSError):
            self._line.send(_LEAVE, socket.MSG_NOSIGNAL)
        self._line.close()
        # Should somebody have stopped it, it cannot leave.
        os.kill(self._pid, signal.SIGCONT)
        ends = time.monotonic() + _LEAVES_WITHIN
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > ends:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return
            time.sleep(_LEAVE_POLL)


def _rear(line: socket.socket, queue: str | None, home: Path) -> None:
    """The life of the nursery: never returns."""
    try:
        os.setsid()
        set_name("stoker-nursery")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # One after the other, each until it is done: a machine that is short of something now may not be so later.
        for act in (_be_quiet, lambda: _learn(queue)):
            while not _succeeds(act):
                if _hangs_up_within(line, _FORK_EVERY):
                    return
        has_worker = False
        while (order := line.recv(16)) == _ANOTHER:
            has_worker = True
            while not _fork_one(line):
                if _hangs_up_within(line, _FORK_EVERY):
                    break
        if has_worker and order != _LEAVE:
            line.close()
            _watch_over(home)
    finally:
        os._exit(0)


def _succeeds(act: Callable[[], None]) -> bool:
    try:
        act()
    except OSError:
        return False
    return True


def _be_quiet() -> None:
    """Whoever reads what the worker says must see its end when the worker ends, not when the last job does."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if os.environ.get("STOKER_DEBUG") else (0, 1, 2):
        os.dup2(quiet, descriptor)
    if quiet > 2:
        os.close(quiet)


def _watch_over(home: Path) -> None:
    """The worker was killed: stays until nothing is left of its jobs, or of whoever looks after them."""
    from stoker.engines.local.adoption import unsupervised

    watched = {record.id for record, _ in undelivered(home)}
    while watched:
        with contextlib.suppress(OSError):
            watched -= unsupervised(home, watched)
        time.sleep(_WATCH_EVERY)


def _learn(queue: str | None) -> None:
    """Loads what attendants and reapers may need in all their lives, once, and shared by all of them.

    An upgrade replaces Stoker's files while jobs run: who loaded half of it from the old files and half from the new
    ones could not bring an outcome to the queue, nor renew a lease.
    """
    for module in _NEEDED:
        importlib.import_module(module)
    with contextlib.suppress(StokerError):  # the worker itself says what is wrong with it
        warm_up(queue)


def _fork_one(line: socket.socket) -> bool:
    """False when that cannot be done now."""
    try:
        workers, attendants = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError:
        return False
    with workers, attendants:
        gc.freeze()
        try:
            pid = os.fork()
        except OSError:
            return False
        if pid == 0:
            _leave_nursery(line, workers, attendants)
        attendants.close()
        if os.waitpid(pid, 0)[1] != 0:
            return False
        socket.send_fds(line, [b"a"], [workers.fileno()], socket.MSG_NOSIGNAL)
    return True


def _hangs_up_within(line: socket.socket, seconds: float) -> bool:
    """Whether the worker leaves within this time."""
    poll = select.poll()
    poll.register(line.fileno(), 0)  # a hang-up is told of in any case
    return bool(poll.poll(seconds * 1000))


def _leave_nursery(line: socket.socket, workers: socket.socket, attendants: socket.socket) -> None:
    """Forks once more, so that the attendant has no parent that could end."""
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            line.close()
            workers.close()
            run_and_leave(attendants)
        code = 0
    finally:
        os._exit(code)
