"""The action `exec`: a command line, with the facts in variables and a time limit."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import Final

from stoker.actions.action import Action, ActionError, Facts
from stoker.actions.stop import STOP_PATIENCE, ForeignTree, stop_tree
from stoker.procfs import Identity, identify
from stoker.program import find_program, run_program
from stoker.units import format_duration

# systemd's variables are for the watcher, not for its commands.
_WATCHER_ONLY: Final = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})
# Between SIGTERM and SIGKILL for a late command: enough to remove a temporary file.
LATE_GRACE: Final = 2.0
_CHECK_TIMEOUT: Final = 10.0
# After SIGKILL a process ends as soon as it is scheduled, unless it hangs in a driver.
_REAP_PATIENCE: Final = 5.0
# A first word that must be a program name: no assignment, expansion or grouping.
_NAME: Final = re.compile(r"[A-Za-z0-9_./+-]+")


class Exec(Action):
    """Runs `sh -c` in a new session, with the output passed through."""

    def __init__(
        self, line: str, *, timeout: float, environment: Mapping[str, str], late_grace: float = LATE_GRACE
    ) -> None:
        """A command that exceeds `timeout` gets SIGTERM, and SIGKILL after `late_grace`."""
        self.patience = timeout + late_grace + STOP_PATIENCE
        self._late_grace = late_grace
        self._line = line
        self._timeout = timeout
        self._environment = {name: value for name, value in environment.items() if name not in _WATCHER_ONLY}
        self._starting = threading.Lock()
        self._cancelled = False
        self._running: Identity | None = None

    def describe(self) -> str:
        return f"run `{self._line}`"

    def prepare(self) -> tuple[str, ...]:
        shell = find_program("sh", self._environment)
        if shell is None:
            raise ActionError("exec needs a shell, and there is no sh on PATH")
        parsed = run_program((shell, "-n", "-c", self._line), self._environment, _CHECK_TIMEOUT)
        if parsed.code != 0:
            raise ActionError(f"the shell does not understand the command of exec: {parsed.complaint}")
        name = _first_word(self._line)
        if name is None:
            return ()
        known = run_program((shell, "-c", 'command -v "$1"', "sh", name), self._environment, _CHECK_TIMEOUT)
        if known.code != 0:
            raise ActionError(f"the command of exec cannot be run: there is no {name} here")
        return ()

    def act(self, facts: Facts) -> None:
        child = self._start(facts)
        try:
            code = child.wait(self._timeout)
        except subprocess.TimeoutExpired:
            _end(child, self._late_grace)
            raise ActionError(
                f"the command of exec was ended because it took longer than {format_duration(self._timeout)}"
            ) from None
        finally:
            self._running = None
        if code < 0:
            raise ActionError(f"the command of exec was ended by {_signal_name(-code)}")
        if code:
            raise ActionError(f"the command of exec ended with code {code}")

    def _start(self, facts: Facts) -> "subprocess.Popen[bytes]":
        with self._starting:
            if self._cancelled:
                raise ActionError("the command of exec was not started: the watcher ends")
            try:
                child = subprocess.Popen(
                    ("sh", "-c", self._line),
                    env={**self._environment, **facts.environment()},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise ActionError(f"the command of exec could not be started: {error.strerror}") from None
            self._running = identify(child.pid)
            return child

    def cancel(self) -> None:
        # Do not interrupt between the start of the command and reading its identity.
        with self._starting:
            self._cancelled = True
            running = self._running
        if running is not None:
            stop_tree(ForeignTree(running), 0.0)


def _end(child: "subprocess.Popen[bytes]", grace: float) -> None:
    """Ends the command and its descendants. Our child keeps its pid until we wait for it."""
    process = identify(child.pid)
    if process is not None:
        stop_tree(ForeignTree(process), grace)
    # Orphans from before the first scan are still in its process group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_REAP_PATIENCE)


def _first_word(line: str) -> str | None:
    """The program that the line begins with, if it is a plain word."""
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    return words[0] if words and line.startswith(words[0]) and _NAME.fullmatch(words[0]) else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
