"""The life of a guardian: the process between the supervisor and the job, which adopts every orphan of the job.

It waits for the job's end and for its orphans, and tells the supervisor. When the supervisor is killed it stops the job
itself, so that nothing runs unwatched. It sits in a session of its own, so that neither a terminal nor a kill of the
job's process group reaches it.
"""

import contextlib
import os
import select
import signal
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from stoker.runs.cgroup import Cgroup
from stoker.runs.ladder import stop
from stoker.runs.processes import Census, identify, stat
from stoker.runs.signals import SignalStream
from stoker.runs.spawn import CannotStartError, Program, start
from stoker.runs.syscalls import become_subreaper, hear_of_death_of_parent, set_name
from stoker.runs.tree import Offspring

# What is told to the supervisor, each as one message of fixed size: a kind and two numbers.
STARTED, FAILED, ENDED, STOPPED, EMPTY = range(5)
MESSAGE: Final = struct.Struct("=Bqq")
# The only order there is. The end of the pipe without it means that the supervisor died.
RELEASE: Final = b"r"
# What the kernel sends when the supervisor dies: this one makes also a guardian go on that somebody had stopped.
_BEREAVED: Final = signal.SIGCONT


class Aftermath(NamedTuple):
    """What is told to whoever writes down that the supervisor was killed."""

    status: int | None
    """The job's wait status; None when it could not be stopped."""
    survivors: tuple[str, ...]
    words: str


class Charge(NamedTuple):
    """What a guardian is given to do."""

    program: Program
    supervisor: int
    orders: int
    report: int
    cgroup: Cgroup | None
    signum: int
    grace: float
    orphaned: Callable[[Aftermath], None] | None


class Keeper:
    """The guardian itself, in its own process, from fork to exit."""

    def __init__(self, charge: Charge) -> None:
        self._charge = charge
        self._signals = SignalStream([signal.SIGCHLD, _BEREAVED])
        self._tree = Offspring(os.getpid(), charge.cgroup)
        self._job = 0
        self._status: int | None = None
        self.empty = False
        self._talking = True
        os.set_blocking(charge.orders, False)
        self._room = select.poll()
        self._room.register(charge.report, select.POLLOUT)

    def keep(self) -> None:
        """Starts the job and stays until it is released, or until the supervisor died and nothing is left."""
        set_name("stoker-guard")
        become_subreaper()
        hear_of_death_of_parent(_BEREAVED)
        try:
            # In between: the job belongs to the supervisor's session, with its terminal, and this process to none.
            self._job = start(self._charge.program, self._charge.cgroup, withdraw=os.setsid)
        except CannotStartError as error:
            self._tell(FAILED, error.stage, error.number)
            return
        self._close_all_but_own()
        # It cannot be gone: nobody else collects it.
        who = identify(self._job)
        self._tell(STARTED, self._job, who.started if who else 0)
        self._watch()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._signals.fileno(), select.POLLIN)
        poll.register(self._charge.orders, select.POLLIN)
        # It stays also when nothing is left: a supervisor that is killed before it wrote that down needs it still.
        while True:
            self.attend()
            # The pipe says both, but somebody else may hold its other end: the parent cannot be held.
            bereft = os.getppid() != self._charge.supervisor
            if bereft or self._charge.orders in dict(poll.poll()):
                break
        if self._released():
            # Whoever just ended would otherwise be a zombie on the supervisor's hands.
            self.attend()
        else:
            self._orphaned()

    def _released(self) -> bool:
        try:
            return os.read(self._charge.orders, 1) == RELEASE
        except BlockingIOError:
            return False

    def _orphaned(self) -> None:
        self._talking = False
        job = identify(self._job) if self._status is None else None
        outcome = stop(self, self._charge.signum, self._charge.grace, first=job)
        self.attend()
        if self._charge.cgroup is not None:
            self._charge.cgroup.remove()
        if self._charge.orphaned is not None:
            self._charge.orphaned(Aftermath(self._status, outcome.survivors, outcome.in_words()))

    # What a ladder needs

    def census(self) -> Census:
        return self._tree.census()

    def kill(self) -> bool:
        return self._tree.kill()

    def fileno(self) -> int:
        return self._signals.fileno()

    def attend(self) -> None:
        """Collects every child that ended and tells what matters of it."""
        self._signals.read()
        while not self.empty:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                # Orphans come here, so no child means nobody at all.
                self.empty = True
                self._tell(EMPTY)
                return
            if pid == 0:
                return
            if pid == self._job and self._status is None:
                self._tell_of_job(status)

    def _tell_of_job(self, status: int) -> None:
        if os.WIFCONTINUED(status):
            self._continue_supervisor()
        elif not os.WIFSTOPPED(status):
            self._status = status
            self._tell(ENDED, status)
        # Such a message may be lost, the others may not: it must never be the one that fills the pipe.
        elif self._room.poll(0):
            self._tell(STOPPED, os.WSTOPSIG(status))

    def _continue_supervisor(self) -> None:
        """Whatever makes the job go on makes its supervisor go on, should both have been stopped: it is to watch."""
        job = stat(self._job)
        supervisor = stat(self._charge.supervisor)
        stopped_alone = job and job.state != "T" and supervisor and supervisor.state == "T"
        if stopped_alone and os.getppid() == self._charge.supervisor:
            os.kill(self._charge.supervisor, signal.SIGCONT)

    def _tell(self, kind: int, first: int = 0, second: int = 0) -> None:
        if self._talking:
            try:
                os.write(self._charge.report, MESSAGE.pack(kind, first, second))
            except BrokenPipeError:
                self._talking = False  # The supervisor is gone, as the other pipe is about to tell.

    def _close_all_but_own(self) -> None:
        """Pipes of the supervisor and its caller must come to their end when those let go, not when this one does."""
        own = {0, 1, 2, self._charge.orders, self._charge.report, self._signals.fileno()}
        # Listed, not counted through: in containers the limit of open files can be a thousand million.
        with os.scandir("/proc/self/fd") as entries:
            opened = {int(entry.name) for entry in entries}
        for descriptor in opened - own:
            with contextlib.suppress(OSError):
                os.close(descriptor)  # One was that of the listing.
