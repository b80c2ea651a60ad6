"""The event loop around one command: reaper, signals, GPU readings and timers in one `poll`.

A hung driver delays only readings. A `CommandHandler` adds what differs between commands.
"""

import math
import select
import time
from collections.abc import Container, Iterable
from typing import Generic, TypeVar

from stoker.gpus.model import Look
from stoker.gpus.prober import Prober, Sampler
from stoker.runs.processes.reaper import DeadlinePassed, Ended, Failed, Reaper, ReaperKilled, Started, Stopped
from stoker.runs.processes.signals import DoublePress, Received, SignalStream
from stoker.runs.processes.termination import TerminationOutcome, stop

T = TypeVar("T")


class CommandHandler(Generic[T]):
    """Handles the events of one command. The first hook that returns a result ends the loop."""

    def descriptors(self) -> Iterable[int]:
        """Further file descriptors to wait for."""
        return ()

    def due(self) -> float:
        """The monotonic time when `on_tick` is due at the latest."""
        return math.inf

    def on_started(self) -> None:
        """Called when the command has started."""

    def on_start_failed(self, failed: Failed) -> T | None:
        """Called in every round after a failed start, until it returns a result."""
        raise NotImplementedError

    def on_exit(self, status: int) -> T | None:
        """Called in every round after the command has exited with this wait status, until it returns a result."""
        raise NotImplementedError

    def on_reaper_killed(self) -> T | None:
        raise NotImplementedError

    def on_deadline_passed(self) -> T | None:
        """Called when the deadline of `Reaper.set_deadline` passes."""
        return None

    def on_suspended(self, signum: int) -> None:
        """Called when a job-control signal has suspended the command."""

    def on_signal(self, received: Received) -> T | None:  # noqa: ARG002 - overridden
        """Called for a signal to this process. Without a result, the signal is forwarded to the command."""
        return None

    def on_second_interrupt(self) -> T | None:
        """Called when Ctrl-C is pressed twice in a row."""
        return None

    def on_look(self, look: Look) -> T | None:
        raise NotImplementedError

    def on_look_failed(self, error: Exception) -> T | None:
        """Called when taking or handling a look fails."""
        raise error

    def on_tick(self) -> T | None:
        """Called in every round."""
        return None

    def on_error(self, error: Exception) -> None:
        """Called when a hook or the loop itself fails."""
        raise error


class CommandLoop(Generic[T]):
    """The loop: `run()` returns after the command; another event loop can call `step()` instead."""

    def __init__(
        self,
        handler: CommandHandler[T],
        reaper: Reaper,
        *,
        signals: SignalStream | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._handler = handler
        self._reaper = reaper
        self._signals = signals
        self._sampler = sampler
        self._double_press = DoublePress()
        self._failed: Failed | None = None

    def run(self) -> T:
        while True:
            try:
                if (result := self._step(self._wait())) is not None:
                    return result
            except Exception as error:  # noqa: BLE001 - the handler decides
                self._handler.on_error(error)

    def step(self) -> T | None:
        """Handles all events without waiting."""
        return self._step(None)

    def _step(self, readable: Container[int] | None) -> T | None:
        """`readable`: the readable descriptors; None if unknown."""
        result: T | None = None
        if self._signals is not None and (readable is None or self._signals.fileno() in readable):
            result = self._handle_signals(self._signals)
        if result is None:
            result = self._handle_reaper_events(may_read=readable is None or self._reaper.fileno() in readable)
        if result is None:
            result = self._handler.on_tick()
        if result is None and self._sampler is not None:
            result = self._sample(self._sampler)
        return result

    def stop(self, signum: int, grace: float, *, has_signal: bool = False) -> TerminationOutcome:
        """Stops the command and all its processes, and waits for that. Ctrl-C ends the grace.

        `has_signal`: the command already has the signal.
        """
        self._reaper.cancel_start()
        first = self._reaper.job if self._reaper.status is None else None
        return stop(self._reaper, signum, grace, first=first, has_signal=has_signal, hurry=self._signals)

    def _wait(self) -> Container[int]:
        """Waits for an event or a due time. Returns the readable descriptors."""
        poll = select.poll()
        poll.register(self._reaper.fileno(), select.POLLIN)
        for descriptor in self._handler.descriptors():
            poll.register(descriptor, select.POLLIN)
        if self._signals is not None:
            poll.register(self._signals.fileno(), select.POLLIN)
        due = self._handler.due()
        if self._sampler is not None:
            due = min(due, self._sampler.due())
            if self._sampler.fileno() >= 0:
                poll.register(self._sampler.fileno(), select.POLLIN)
        ready = poll.poll(None if due == math.inf else max(due - time.monotonic(), 0) * 1000)
        return [descriptor for descriptor, _events in ready]

    def _handle_signals(self, signals: SignalStream) -> T | None:
        for received in signals.read():
            result = self._handler.on_signal(received)
            if result is None and self._double_press.is_second(received):
                result = self._handler.on_second_interrupt()
            if result is not None:
                return result
            # A terminal signals the whole foreground group, so the command already has the signal.
            if not received.from_kernel and not is_from_job(received, self._reaper):
                self._reaper.signal(received.signal)
        return None

    def _handle_reaper_events(self, *, may_read: bool) -> T | None:
        """`may_read`: there may be an event."""
        result: T | None = None
        while may_read and result is None and (event := self._reaper.next_event()) is not None:
            match event:
                case Failed():
                    self._failed = event
                    break
                case Ended():
                    break
                case Started():
                    self._handler.on_started()
                case Stopped(signum):
                    self._handler.on_suspended(signum)
                case DeadlinePassed():
                    result = self._handler.on_deadline_passed()
                case ReaperKilled():
                    result = self._handler.on_reaper_killed()
        # Events come once, but their handling may fail and is then retried in the next round.
        if result is None and self._failed is not None:
            result = self._handler.on_start_failed(self._failed)
        elif result is None and self._reaper.status is not None:
            result = self._handler.on_exit(self._reaper.status)
        return result

    def _sample(self, sampler: Sampler) -> T | None:
        try:
            look = sampler.step()
            return None if look is None else self._handler.on_look(look)
        except Exception as error:  # noqa: BLE001 - the handler decides
            return self._handler.on_look_failed(error)


def is_from_job(received: Received, reaper: Reaper) -> bool:
    """True if the job itself sent this signal. An undeterminable sender counts as foreign."""
    try:
        return reaper.owns(received.sender)
    except OSError:
        return False


def helpers_of(prober: Prober) -> tuple[int, ...]:
    """Children of this process that do not belong to the job."""
    return prober.children
