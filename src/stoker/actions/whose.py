"""Selects the processes that a watch judges: those that its actions would end, a user's, or everyone's."""

import pwd
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Final, Protocol

from stoker.actions.action import Action
from stoker.actions.stop import SeenProcess, own_processes, scan_machine
from stoker.errors import BadInputError
from stoker.gpus.model import JobProgress, Look, Process, known
from stoker.presence.ignoring import SHIPPED, is_ignored
from stoker.procfs import Identity, is_alive, user_name
from stoker.runs.processes.usage import ProcessUsage, UsageMeter

MINE: Final = "mine"
ALL: Final = "all"
_ROOT: Final = "root"
_KTHREADD: Final = 2

Meter = Callable[[float, Set[Identity]], ProcessUsage]
"""Measures CPU activity, given the time and the processes that the driver lists on GPUs."""


class JudgedProcesses(Protocol):
    """The processes that count for a watch."""

    def counts(self, process: Process) -> bool:
        """Whether this process counts on a GPU. Unidentified processes count."""

    def on_cpu(self, listed: Set[Identity]) -> Set[Identity]:
        """Processes whose CPU time and I/O count; `listed`: those that the driver lists on a GPU."""

    def conditions(self) -> list[str]:
        """A description; empty for everyone's."""


def judged_processes(whose: str | None, actions: Sequence[Action], user: str) -> JudgedProcesses:
    """`whose`: `mine`, `all` or a user's name; None: the default for the actions. `user`: the watching user."""
    if whose is None:
        affecting = [action for action in actions if action.affects != "nothing"]
        if affecting and all(action.affects == "processes" for action in affecting):
            return _Targets(affecting)
        if user == _ROOT or any(action.affects == "machine" for action in affecting):
            return _Everyone()
        return _OfUser(user)
    if whose == ALL:
        return _Everyone()
    if whose == MINE:
        return _OfUser(user)
    if not whose.isdigit():
        try:
            pwd.getpwnam(whose)
        except KeyError:
            raise BadInputError(f"--whose {whose}: there is no such user here: write mine, all or a user") from None
    return _OfUser(whose)


class _Targets(JudgedProcesses):
    """The processes that the actions would end."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions

    def counts(self, process: Process) -> bool:
        if not known(process.started):
            return True
        identity = Identity(process.pid, process.started)
        return any(identity in action.targets() for action in self._actions)

    def on_cpu(self, listed: Set[Identity]) -> Set[Identity]:
        return frozenset(listed).union(*(action.targets() for action in self._actions))

    def conditions(self) -> list[str]:
        return ["only what would be stopped is judged"]


class _Everyone(JudgedProcesses):
    """All processes except display servers and monitors, which always use the GPU. On the CPU, processes that used a
    GPU count, with their descendants and sessions: the next process of a script prepares data before it uses a GPU.
    While there are none, all processes of these users count.
    """

    def __init__(self) -> None:
        self._members: Set[Identity] = frozenset()
        """Processes that used a GPU, or are related to one that did, and lived at the previous look."""
        self._sessions: set[int] = set()

    def counts(self, process: Process) -> bool:
        return not (known(process.name) and is_ignored(SHIPPED, process.name))

    def conditions(self) -> list[str]:
        return []

    def on_cpu(self, listed: Set[Identity]) -> Set[Identity]:
        seen = scan_machine()
        own = own_processes(seen)
        others = {pid: one for pid, one in seen.items() if pid not in own}
        members = {pid for pid, one in others.items() if one.identity in self._members or one.identity in listed}
        self._sessions |= {others[pid].session for pid in members if others[pid].session}
        # A session number is not reused while a process has it.
        self._sessions &= {one.session for one in others.values()}
        members |= {pid for pid, one in others.items() if one.session in self._sessions}
        while fresh := {pid for pid, one in others.items() if one.parent in members and pid not in members}:
            members |= fresh
        if not members:
            return {
                one.identity for pid, one in others.items() if not _is_kernel_thread(one) and self._counts_user(pid)
            }
        self._members = {others[pid].identity for pid in members}
        return self._members

    def _counts_user(self, pid: int) -> bool:  # noqa: ARG002 - everyone's count
        return True


class _OfUser(_Everyone):
    """One user's processes. Until one of them has used a GPU, processes of root and of users without a name here count
    too: the user may work in a container started by a daemon.
    """

    def __init__(self, user: str) -> None:
        super().__init__()
        self._user = user
        self._seen = False

    def counts(self, process: Process) -> bool:
        if not super().counts(process):
            return False
        if not known(process.user):
            return True
        if process.user == self._user:
            self._seen = True
            return True
        return not self._seen and (process.user == _ROOT or process.user.isdigit())

    def _counts_user(self, pid: int) -> bool:
        try:
            return user_name(Path(f"/proc/{pid}").stat().st_uid) == self._user
        except OSError:
            return False

    def conditions(self) -> list[str]:
        return [f"only processes of {self._user} are judged"]


def _is_kernel_thread(one: SeenProcess) -> bool:
    return one.session == 0 and one.parent == _KTHREADD


def progress_of(judged: JudgedProcesses, look: Look, meter: Meter) -> JobProgress:
    """The CPU activity of the counted processes: a watcher sees no steps."""
    listed = {
        Identity(process.pid, process.started)
        for reading in look.readings
        if known(reading.processes)
        for process in reading.processes
        if known(process.started) and judged.counts(process)
    }
    usage = meter(look.at, listed)
    return JobProgress(cpu=usage.cpu, io=usage.io, pids=tuple(sorted(process.pid for process in listed)))


class ProcessMeter:
    """CPU activity of the counted processes between two looks."""

    def __init__(self, judged: JudgedProcesses) -> None:
        self._judged = judged
        self._meter = UsageMeter()
        self._measured: Set[Identity] = frozenset()

    def __call__(self, at: float, listed: Set[Identity]) -> ProcessUsage:
        before, self._measured = self._measured, self._judged.on_cpu(listed)
        if any(is_alive(who) for who in before - self._measured):
            # The meter would keep measuring processes that no longer count.
            self._meter = UsageMeter()
        return self._meter.measure(at, self._measured)
