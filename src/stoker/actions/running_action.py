"""One action under way in a thread of its own, so that the watcher stays awake to signals and to its watchdog."""

import threading
import time
from collections.abc import Callable

from stoker.actions.action import ActionError
from stoker.units import format_duration


class RunningAction:
    """Runs `work` once. A deed that outlasts its patience is left behind: its thread ends with the process."""

    def __init__(self, work: Callable[[], None], patience: float, done: Callable[[], None]) -> None:
        """`done` is called from the thread when the work is over."""
        self._work = work
        self._done = done
        self._finished = threading.Event()
        self._patience = patience
        self._failure: str | None = None
        self.deadline = time.monotonic() + patience
        threading.Thread(target=self._run, name="deed", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._finished.is_set() or time.monotonic() >= self.deadline

    @property
    def failure(self) -> str | None:
        """Why it failed, once it is over."""
        if not self._finished.is_set():
            return f"it was not over after {format_duration(self._patience)}"
        return self._failure

    def _run(self) -> None:
        try:
            self._work()
        except ActionError as error:
            self._failure = str(error)
        except Exception as error:  # noqa: BLE001 - a defect in one action must not keep the others from being done
            self._failure = f"internal error: {type(error).__name__}: {error}"
        self._finished.set()
        self._done()
