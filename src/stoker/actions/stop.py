"""The action `stop PID`: ends one process and all that it started, and nobody who got its number later."""

import os
import pwd
from pathlib import Path

from stoker.actions.action import Action, ActionError, Facts, Tracking
from stoker.actions.tree import STOP_PATIENCE, ForeignTree, stop_tree
from stoker.procfs import identify, is_alive
from stoker.runs.processes.tree import describe


class Stop(Action, Tracking):
    """The process is the one that has this pid when the watching starts."""

    def __init__(self, pid: int, *, grace: float) -> None:
        self.patience = grace + STOP_PATIENCE
        self._pid = pid
        self._grace = grace
        self._tree: ForeignTree | None = None
        self._name = ""

    def describe(self) -> str:
        name = f" ({self._name})" if self._name else ""
        return f"stop process {self._pid}{name} and all that it started"

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
        told = describe(process)
        self._name = told.name if told else ""
        self._tree = ForeignTree(process)
        self._tree.track()
        return ()

    def track(self) -> None:
        if self._tree is not None:
            self._tree.track()

    def act(self, facts: Facts) -> None:  # noqa: ARG002 - a signal has no reason
        if self._tree is None or not self._tree.scan_processes().processes:
            return  # it ended by itself, and its number may be somebody else's by now
        outcome = stop_tree(self._tree, self._grace)
        if outcome.survivors:
            raise ActionError(f"process {self._pid} was not stopped completely: {outcome.in_words()}")


def _owner(pid: int) -> str:
    try:
        return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
    except (OSError, KeyError):
        return "another user"
