"""Actions: an action describes itself, is checked at the start, and acts on a verdict."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from typing import Final, Literal

import msgspec

from stoker.errors import StokerError
from stoker.procfs import Identity
from stoker.rules.registry import fired_in_words
from stoker.rules.rule import Policy, Verdict
from stoker.streams import ERROR, emit
from stoker.units import format_duration

# GNU timeout's exit code for its own failure.
ACTION_FAILED: Final = 125


class ActionError(StokerError):
    """An action cannot work, or failed."""

    exit_code = ACTION_FAILED


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts at the time of the action."""

    kind: str
    """The kind of the verdict."""
    cause: str
    """The problem, for a title: `its GPUs stayed idle`."""
    reason: str
    """`GPU 0 and GPU 1 stayed below 1% for 30m`."""
    rule: str
    """The rules in words: `all GPUs below 1% for 30m`."""
    gpus: tuple[str, ...]
    """The uuids of the GPUs that the verdict is about."""
    seconds: float
    """How long the condition has lasted."""
    host: str

    def environment(self) -> dict[str, str]:
        """The facts as variables for a command."""
        return {
            "STOKER_EVENT": self.kind,
            "STOKER_REASON": self.reason,
            "STOKER_RULE": self.rule,
            "STOKER_GPUS_IDLE": ",".join(self.gpus),
            "STOKER_IDLE_SECONDS": f"{self.seconds:.0f}",
            "STOKER_HOST": self.host,
        }


def facts_of(verdict: Verdict, policies: Sequence[Policy], at: float, host: str) -> Facts:
    """The data of a verdict and its rule."""
    return Facts(
        kind=verdict.kind,
        cause=verdict.cause,
        reason=verdict.reason,
        rule=fired_in_words(policies, verdict) if policies else verdict.reason,
        gpus=verdict.gpus,
        seconds=at - verdict.since if verdict.since is not None else 0.0,
        host=host,
    )


class Action(ABC):
    """One response to a verdict."""

    patience: float
    """Seconds after which `act` counts as failed and the next action begins."""
    affects: Literal["nothing", "processes", "machine", "unknown"] = "unknown"
    """Describes what it ends; `processes`: its targets."""
    sends_messages = False
    """Whether it can also send warnings and reports of readings that stay unknown."""

    @abstractmethod
    def describe(self) -> str:
        """What it does: `stop process 4242`."""

    def prepare(self) -> tuple[str, ...]:
        """Called once at the start. Raises `ActionError` if the action could not work later; returns warnings."""
        return ()

    @abstractmethod
    def act(self, facts: Facts) -> None:
        """Acts and waits for the end of the action. Runs outside the main thread. Raises `ActionError` on failure."""

    def track(self) -> None:  # noqa: B027 - most actions have nothing to track
        """Called at every look. Takes milliseconds and never raises."""

    def targets(self) -> Set[Identity]:
        """The processes that it would end, as found by `track`."""
        return frozenset()

    def cancel(self) -> None:  # noqa: B027 - most actions start nothing that could outlive the watcher
        """Called when the watcher ends while `act` runs in another thread."""

    def send_message(self, host: str, text: str) -> None:
        """Raises `ActionError` if the message was not sent."""
        raise NotImplementedError


def log_to_stderr(message: str) -> None:
    emit(ERROR, f"stoker: {message}\n")


class RunningAction:
    """Runs `work` once in a thread. After `patience` the thread is abandoned and ends with the process."""

    def __init__(self, work: Callable[[], None], patience: float, done: Callable[[], None]) -> None:
        """`done` is called from the thread when the work has ended."""
        self._work = work
        self._done = done
        self._finished = threading.Event()
        self._patience = patience
        self._failure: str | None = None
        self.deadline = time.monotonic() + patience
        threading.Thread(target=self._run, name="action", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._finished.is_set() or time.monotonic() >= self.deadline

    @property
    def failure(self) -> str | None:
        """The reason of the failure, after the end."""
        if not self._finished.is_set():
            return f"it did not end within {format_duration(self._patience)}"
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
