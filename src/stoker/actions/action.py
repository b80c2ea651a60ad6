"""What every action can do: describe itself, refuse at the start what could not work later, and act."""

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

import msgspec

from stoker.errors import StokerError
from stoker.rules.rule import Verdict
from stoker.units import format_duration

# As with GNU timeout: Stoker itself failed, whatever the GPUs did.
ACTION_FAILED: Final = 125


class ActionError(StokerError):
    """An action that cannot be done, or could not: one sentence."""

    exit_code = ACTION_FAILED


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at the moment of acting."""

    kind: str
    """The kind of the verdict."""
    cause: str
    """What is wrong, for a title: `its GPUs stayed idle`."""
    reason: str
    """`GPU 0 and GPU 1 stayed below 1% for 30m`."""
    rule: str
    """The rules in words: `all GPUs below 1% for 30m`."""
    gpus: tuple[str, ...]
    """The uuids of the GPUs that the verdict is about."""
    seconds: float
    """For how long it has been so."""
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


def facts_of(verdict: Verdict, rule: str, at: float, host: str) -> Facts:
    return Facts(
        kind=verdict.kind,
        cause=verdict.cause,
        reason=verdict.reason,
        rule=rule,
        gpus=verdict.gpus,
        seconds=at - verdict.since if verdict.since is not None else 0.0,
        host=host,
    )


class Action(Protocol):
    """One thing to do when GPUs are idle. Implementations say that they are one by inheriting from it."""

    patience: float
    """Seconds after which the watcher stops waiting for `act`, calls it failed and goes on to the next action."""

    def describe(self) -> str:
        """What it does, as the end of a sentence that begins with "it will"."""
        ...

    def prepare(self) -> tuple[str, ...]:
        """Called once, at the start. Raises `ActionError` for what would not work later.

        What it returns are sentences that a person should read beforehand.
        """
        ...

    def act(self, facts: Facts) -> None:
        """Does it, and waits for it. Runs outside the main thread. Raises `ActionError` when it did not work."""
        ...


@runtime_checkable
class Lasting(Protocol):
    """An action that starts something which would be left running when the watcher is told to end meanwhile."""

    def abandon(self) -> None:
        """Takes it back. Called while `act` is under way in another thread."""
        ...


@runtime_checkable
class Tracking(Protocol):
    """An action that must know what happened since the watching began."""

    def track(self) -> None:
        """Called at every look. Takes milliseconds, and never raises."""
        ...


@runtime_checkable
class Messenger(Protocol):
    """An action that can also tell people what is not an idle verdict: a warning, readings that stay unknown."""

    def tell(self, host: str, sentence: str) -> None:
        """Raises `ActionError` when it did not work."""
        ...


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
