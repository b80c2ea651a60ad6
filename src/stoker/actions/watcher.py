"""The loop of `stoker watch`: look, judge, log changes, act in order, then exit or start over."""

import contextlib
import functools
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final

import msgspec

from stoker.actions.action import (
    ACTION_FAILED,
    Action,
    Facts,
    RunningAction,
    facts_of,
    log_to_stderr,
)
from stoker.actions.systemd import ServiceManager
from stoker.actions.whose import JudgedProcesses, Meter, progress_of
from stoker.errors import BadInputError
from stoker.gpus.model import Look, Unknown
from stoker.gpus.prober import LONGEST_WAIT, Prober, Sampler
from stoker.gpus.source import AbsentError
from stoker.rules.judge import Judge
from stoker.rules.rule import Observation, Policy, Verdict
from stoker.rules.scope import MachineScope

# GNU timeout's exit code for a command that was stopped.
ACTED: Final = 124
_SIGNALLED: Final = 128
# Time limit for a message that is not an action.
_MESSAGE_TIMEOUT: Final = 60.0


class WatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `stoker watch` besides rules and GPUs."""

    actions: tuple[Action, ...]
    host: str
    repeat: bool = False
    dry_run: bool = False
    idle_exit_code: int = ACTED

    def in_words(self) -> str:
        return ", then ".join(action.describe() for action in self.actions)


class Watched:
    """The watched GPUs, chosen and checked at the first readable look, and whose processes count."""

    def __init__(
        self,
        chosen: str,
        policies: Sequence[Policy],
        environment: Mapping[str, str],
        judged: JudgedProcesses,
        meter: Meter,
    ) -> None:
        self._chosen = chosen
        self._policies = policies
        self._judged = judged
        self._meter = meter
        self._scope = MachineScope(chosen, environment, judged.counts)
        self._checked = False

    def conditions(self) -> list[str]:
        """Whose processes count, in words."""
        return self._judged.conditions()

    def observe(self, look: Look) -> Observation:
        """Raises `BadInputError` at the first readable look for an impossible choice."""
        progress = progress_of(self._judged, look, self._meter)
        observation = self._scope.observe(msgspec.structs.replace(look, job=progress))
        if not self._checked and look.problem is None:
            self._checked = True
            if not observation.activities:
                raise BadInputError(f"--gpus {self._chosen}: there is no such GPU here")
            for policy in self._policies:
                policy.check_gpus(len(observation.activities))
        return observation


_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Wakeup:
    """A pipe for an event loop, written to by signals and by finished actions. Signals ignored at the start (nohup, a
    shell's `&`) stay ignored.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal that requested the watcher's end."""
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before: dict[signal.Signals, Any] = {}
        self._before_descriptor = -1

    def __enter__(self) -> "Wakeup":
        # Otherwise a signal just before the loop sleeps would go unnoticed until its next wake-up.
        self._before_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before_descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # The pipe stays open: an abandoned action may still write to it.

    def fileno(self) -> int:
        return self._reader

    def wake(self) -> None:
        """Safe from any thread. A full pipe wakes the loop as well."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
        self.wake()


class Watcher:
    """One `poll` for everything: a hung driver, command or server delays nothing else."""

    def __init__(
        self,
        prober: Prober,
        watched: Watched,
        policies: Sequence[Policy],
        options: WatchOptions,
        service: ServiceManager,
        *,
        log: Callable[[str], None] = log_to_stderr,
    ) -> None:
        begun = time.monotonic()
        self._prober = prober
        self._watched = watched
        self._options = options
        self._service = service
        self._log = log
        self._judge = Judge(policies, begun, options.in_words(), look_takes=prober.deadline, dry_run=options.dry_run)
        self._sampler = Sampler(prober, self._judge.every, first=min(self._judge.every, LONGEST_WAIT))
        self._wakeup = Wakeup()
        self._code: int | None = None
        self._pending: deque[Action] = deque()
        self._facts: Facts | None = None
        self._action: Action | None = None
        self._running: RunningAction | None = None
        self._messages: list[RunningAction] = []
        self._failed = False

    def run(self, first: Look) -> int:
        """Watches from this first look on; returns the exit code."""
        with self._wakeup:
            self._log(self._in_words([activity.label for activity in self._watched.observe(first).activities]))
            self._service.ready(f"watching: {self._judge.in_words()}")
            self._take(first)
            while self._code is None:
                self._wait()
                self._round()
            self._service.stopping()
        return self._code

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup.fileno(), select.POLLIN)
        due = [message.deadline for message in self._messages]
        if (ping := self._service.keep_alive(time.monotonic())) is not None:
            due.append(ping)
        if self._running is not None:
            due.append(self._running.deadline)
        else:
            due.append(self._sampler.due())
            if self._sampler.fileno() >= 0:
                poll.register(self._sampler.fileno(), select.POLLIN)
        # Rounded up: a sleep that ends a fraction of a millisecond early would be repeated.
        poll.poll(max(min(due) - time.monotonic(), 0.0) * 1000 + 1)

    def _round(self) -> None:
        self._wakeup.clear()
        self._read_messages()
        if self._wakeup.signal is not None:
            self._end_by_signal(self._wakeup.signal)
        elif self._running is not None:
            if self._running.over:
                self._finish_action(self._running)
        elif (look := self._step()) is not None:
            self._take(look)

    def _step(self) -> Look | None:
        try:
            return self._sampler.step()
        except AbsentError as absent:
            # It existed at the start: a driver unloaded meanwhile is unknown, not idle.
            return Look(self._prober.spec, time.monotonic(), time.time(), (), (), problem=Unknown(str(absent)))

    def _take(self, look: Look) -> None:
        for action in self._options.actions:
            action.track()
        judgement = self._judge.observe(self._watched.observe(look))
        verdict = judgement.verdict
        for message in judgement.messages:
            self._log(message.text)
            if message.urgent and not self._options.dry_run:
                self._send_messages(message.text)
        self._service.status(f"{verdict.kind}: {verdict.reason}")
        if judgement.fired:
            self._fire(verdict, look.at)
        else:
            self._sampler.no_later_than(self._judge.due())

    # Acting

    def _fire(self, verdict: Verdict, at: float) -> None:
        if self._options.dry_run:
            self._conclude()
            return
        self._facts = facts_of(verdict, self._judge.policies, at, self._options.host)
        self._pending.extend(self._options.actions)
        self._begin_next_action()

    def _begin_next_action(self) -> None:
        if not self._pending or self._facts is None:
            self._conclude()
            return
        action, facts = self._pending.popleft(), self._facts
        self._log(f"now: {action.describe()}")
        self._service.status(f"acting: {action.describe()}")
        self._action = action
        self._running = RunningAction(functools.partial(action.act, facts), action.patience, self._wakeup.wake)

    def _finish_action(self, running: RunningAction) -> None:
        if running.failure is not None:
            self._failed = True
            self._log(f"failed: {running.failure}")
        self._action = self._running = None
        self._begin_next_action()

    def _conclude(self) -> None:
        if not self._options.repeat:
            self._code = ACTION_FAILED if self._failed else self._options.idle_exit_code
            return
        now = time.monotonic()
        self._judge.rearm(now)
        self._failed = False
        self._log("watching again")

    def _end_by_signal(self, number: int) -> None:
        if self._action is not None:
            self._action.cancel()
        self._code = _SIGNALLED + number

    # Messages that are not actions

    def _send_messages(self, text: str) -> None:
        for action in self._options.actions:
            if action.sends_messages:
                sending = functools.partial(action.send_message, self._options.host, text)
                self._messages.append(RunningAction(sending, _MESSAGE_TIMEOUT, self._wakeup.wake))

    def _read_messages(self) -> None:
        over = [message for message in self._messages if message.over]
        self._messages = [message for message in self._messages if message not in over]
        for message in over:
            if message.failure is not None:
                self._log(message.failure)

    # Words

    def _in_words(self, labels: Sequence[str]) -> str:
        which = ", ".join(labels) if labels else "GPUs that cannot be read yet"
        conditions = [*self._watched.conditions(), *self._judge.conditions()]
        if self._options.repeat:
            conditions.append("repeatedly")
        if self._options.dry_run:
            conditions.append("dry run: nothing is done")
        more = f" ({'; '.join(conditions)})" if conditions else ""
        return f"watching {which}: {self._judge.in_words()}, then {self._options.in_words()}{more}"
