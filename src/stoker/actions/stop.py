"""The action `stop PID`: ends a process and its descendants, never a later process with the same pid."""

import os
import signal
import time
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Final, NamedTuple

from stoker.actions.action import Action, ActionError, Facts
from stoker.procfs import Identity, identify, is_alive, read_stat, stat, user_name
from stoker.runs.processes.syscalls import share_file
from stoker.runs.processes.termination import PATIENCE, Termination, TerminationOutcome
from stoker.runs.processes.tree import ProcessScan


class Stop(Action):
    """Stops the process that has this pid when watching starts."""

    affects = "processes"

    def __init__(self, pid: int, *, grace: float) -> None:
        self.patience = grace + STOP_PATIENCE
        self._pid = pid
        self._grace = grace
        self._tree: ForeignTree | None = None
        self._name = ""

    def describe(self) -> str:
        name = f" ({self._name})" if self._name else ""
        return f"stop process {self._pid}{name} and everything it started"

    def prepare(self) -> tuple[str, ...]:
        process = identify(self._pid)
        if process is None or not is_alive(process):
            raise ActionError(f"there is no process {self._pid} to stop")
        if self._pid == os.getpid():
            raise ActionError(f"process {self._pid} is the watcher itself: use the action 'exit'")
        try:
            os.kill(self._pid, 0)
        except PermissionError:
            raise ActionError(
                f"process {self._pid} belongs to {_owner(self._pid)} and may not be stopped from here: run as that "
                "user or as root"
            ) from None
        except ProcessLookupError:
            raise ActionError(f"there is no process {self._pid} to stop") from None
        found = stat(self._pid)
        self._name = found.name if found else ""
        self._tree = ForeignTree(process)
        self._tree.track()
        return ()

    def track(self) -> None:
        if self._tree is not None:
            self._tree.track()

    def targets(self) -> Set[Identity]:
        return self._tree.members if self._tree is not None else frozenset()

    def act(self, facts: Facts) -> None:  # noqa: ARG002 - a signal has no reason
        if self._tree is None or not self._tree.scan_processes().processes:
            return  # it has ended, and its pid may be reused
        outcome = stop_tree(self._tree, self._grace)
        if outcome.survivors:
            raise ActionError(f"process {self._pid} was not stopped completely: {outcome.in_words()}")


def _owner(pid: int) -> str:
    try:
        return user_name(Path(f"/proc/{pid}").stat().st_uid)
    except OSError:
        return "another user"


# The kernel reports no event when processes end that are not our children.
_LOOK_EVERY: Final = 0.05
# The maximum duration of a stop besides its grace period.
STOP_PATIENCE: Final = PATIENCE + 5.0
# In a tree that forks constantly, no two scans agree: after this many it counts as unsettled.
_MOST_SCANS: Final = 20
# Fields of /proc/PID/stat, counted as in `procfs`: the addresses of the stack, of the arguments and of the environment.
_LAYOUT: Final = (25, 45, 47)
# Without randomization, stacks are at the top, and layouts identify nothing.
_TOP_OF_STACKS: Final = 0x7FFFFF000000
_INIT: Final = 1
_STREAMS: Final = (0, 1, 2)

StackLayout = tuple[int, ...]


class SeenProcess(NamedTuple):
    """One process in a scan."""

    identity: Identity
    parent: int
    group: int
    session: int
    layout: StackLayout | None
    """None if it is unreadable or not random."""


class ForeignTree:
    """A process and its descendants. Orphans stay members. This process and its children are never members, even as
    descendants: a script may request its own end.
    """

    def __init__(self, root: Identity) -> None:
        self._root = root
        self.members = {root}
        """All members ever found."""
        self._layouts: set[StackLayout] = set()
        """Memory layouts that began with a member."""

    def scan_processes(self) -> ProcessScan:
        before: list[Identity] = []
        for attempt in range(_MOST_SCANS):
            seen = scan_machine()
            self._grow(seen)
            living = [one.identity for one in seen.values() if one.identity in self.members]
            if attempt and living == before:
                return ProcessScan(living, settled=True)
            before = living
        return ProcessScan(before, settled=False)

    def track(self) -> None:
        """Adds current descendants: some can be recognized only while their parents live."""
        self._grow(scan_machine())

    def kill(self) -> bool:
        """There is no cgroup to kill."""
        return False

    def _grow(self, seen: dict[int, SeenProcess]) -> None:
        streams = self._streams(seen)
        while True:
            living = {pid for pid, one in seen.items() if one.identity in self.members}
            own = own_processes(seen, living)
            self._learn_layouts(seen, living)
            fresh = {
                one.identity
                for pid, one in seen.items()
                if pid not in living
                and pid not in own
                and (self._came(one, living, seen) or self._holds(streams, one, seen))
            }
            if not fresh:
                return
            self.members |= fresh

    def _came(self, one: SeenProcess, living: set[int], seen: dict[int, SeenProcess]) -> bool:
        if one.parent in living or one.session in living:
            return True
        # A shell puts the commands of a pipeline into one group; they are children of the shell.
        if one.group in living and one.parent != seen[one.group].parent:
            return True
        return one.layout is not None and one.layout in self._layouts

    def _streams(self, seen: dict[int, SeenProcess]) -> list[int]:
        """The standard streams that the first process does not share with the process that started it."""
        root = seen.get(self._root.pid)
        if root is None or root.identity != self._root or root.parent not in seen or root.parent == _INIT:
            return []
        others = _descriptors(root.parent)
        return [
            stream
            for stream in _STREAMS
            if others and not any(share_file(self._root.pid, root.parent, stream, other) for other in others)
        ]

    def _holds(self, streams: list[int], one: SeenProcess, seen: dict[int, SeenProcess]) -> bool:
        """Whether an orphan has such a stream."""
        if not streams or one.identity.started < self._root.started or one.parent == seen[self._root.pid].parent:
            return False
        return any(share_file(self._root.pid, one.identity.pid, stream, stream) for stream in streams)

    def _learn_layouts(self, seen: dict[int, SeenProcess], living: set[int]) -> None:
        """A layout that differs from the parent's belongs to this process and does not come from a fork. The layout of
        an orphan's adoptive parent is not compared.
        """
        for pid in living:
            one = seen[pid]
            parent = seen.get(one.parent)
            adopted = one.identity == self._root and one.parent == _INIT
            if one.layout and parent and parent.layout and parent.layout != one.layout and not adopted:
                self._layouts.add(one.layout)


def stop_tree(tree: ForeignTree, grace: float) -> TerminationOutcome:
    """Sends SIGTERM, waits for the grace period, sends SIGKILL; without a grace period SIGKILL at once. Blocks until
    done."""
    termination = Termination(tree, signum=signal.SIGTERM if grace > 0 else signal.SIGKILL, grace=grace)
    while not termination.step():
        time.sleep(min(termination.timeout(), _LOOK_EVERY))
    return termination.outcome()


def scan_machine() -> dict[int, SeenProcess]:
    """All living processes, by pid."""
    seen: dict[int, SeenProcess] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            found = read_stat(f"/proc/{entry.name}/stat")
        except (OSError, ValueError):
            continue
        if not found.is_zombie:
            seen[found.pid] = SeenProcess(
                found.identity, found.parent, found.group, found.session, _layout(found.fields)
            )
    return seen


def _layout(fields: list[bytes]) -> StackLayout | None:
    if len(fields) <= max(_LAYOUT):
        return None
    layout = tuple(int(fields[place]) for place in _LAYOUT)
    return layout if all(layout) and layout[0] < _TOP_OF_STACKS else None


def _descriptors(pid: int) -> list[int]:
    """Empty if unreadable."""
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


def own_processes(seen: Mapping[int, SeenProcess], members: Set[int] = frozenset()) -> set[int]:
    """This process and its descendants, except members and their descendants."""
    found = {os.getpid()}
    while fresh := {pid for pid, one in seen.items() if one.parent in found and pid not in found | members}:
        found |= fresh
    return found
