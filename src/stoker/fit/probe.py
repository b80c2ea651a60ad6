"""One run of a command at one size, under a reaper, watched ten times a second, until it has shown enough."""

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from stoker.errors import BadInputError
from stoker.fit.memory import MemoryTracker, Plateau
from stoker.fit.model import ProbeFailedError
from stoker.fit.rates import Rates
from stoker.gpus.model import Look
from stoker.gpus.prober import Prober, Sampler
from stoker.runs.loop import helpers_of
from stoker.runs.output import OutputLog
from stoker.runs.processes.reaper import Ended, Failed, Program, Reaper, ReaperKilled, exit_code, launch
from stoker.runs.processes.termination import stop

# Peaks of training last for a forward pass: tenths of a second.
LOOK_EVERY: Final = 0.1
# A probe has nothing to save: this is for programs that clean up after themselves.
GRACE: Final = 5.0
# A helper that died is there again within a second. What could not be watched for longer may have hidden the peak.
LONGEST_GAP: Final = 3.0
# Every process of a probe has these in its environment, so that a program can leave out what only a real run should do.
MARKS: Final = {"STOKER_PROBE": "1", "STOKER_FIT_PROBE": "1"}
_LOG_LIMIT: Final = 16 * 2**20
# The message of the one rank that ran out of memory is followed by the tracebacks of all others.
_TAIL: Final = 256 * 1024
_CHUNK: Final = 65536

Ending = Literal["by itself", "flat", "until", "time", "ceiling"]


class ProbeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When a probe has shown enough."""

    seconds: float = 120.0
    """At the latest."""
    flat_for: float = 20.0
    """When its memory has stayed for so long, where its output tells of no steps."""
    until: str | None = None
    """When its output matches this regular expression, and then not before."""

    def pattern(self) -> re.Pattern[str] | None:
        if self.until is None:
            return None
        try:
            return re.compile(self.until)
        except re.error as error:
            raise BadInputError(f"--probe-until {self.until!r} is not a regular expression: {error}") from None


class Stage(NamedTuple):
    """What all probes of a fit have in common."""

    prober: Prober
    environment: Mapping[str, str]
    directory: str | None
    limits: ProbeOptions
    expected: frozenset[str]
    """The GPUs, by uuid, that the command is expected to use."""
    ceiling: int | None
    """Bytes on a GPU above which it takes from others what is theirs, and is stopped at once."""
    check: Callable[[], None]
    """Called ten times a second; raises when somebody wants it all to end."""


class ProbeReport(NamedTuple):
    """What one probe showed."""

    ending: Ending
    code: int | None
    """Its exit code, where it ended by itself."""
    seconds: float
    output: str
    """The end of what it printed."""


class Probe:
    """Runs once. Nothing that it started is left when `run` returns or raises."""

    def __init__(self, stage: Stage, command: tuple[str, ...], log: Path, before: Look, rates: Rates) -> None:
        self._stage = stage
        self._command = command
        self._before = before
        self._rates = rates
        self._log = OutputLog(log, _LOG_LIMIT)
        self._tail = ""
        self._until = stage.limits.pattern()
        self._unfinished = ""
        self._matched: float | None = None
        self._plateau = Plateau(stage.limits.flat_for)
        self._flat = False
        self._begun = time.monotonic()
        self._seen = self._begun

    def run(self) -> tuple[ProbeReport, MemoryTracker]:
        """Raises ProbeFailedError when it could not be started or watched, OSError when the machine is in trouble."""
        output, end = os.pipe()
        os.set_blocking(output, False)
        with contextlib.ExitStack() as goodbye:
            goodbye.callback(self._log.close)
            goodbye.callback(os.close, output)
            try:
                reaper = self._launch(end)
            finally:
                os.close(end)
            goodbye.callback(reaper.close)
            # When somebody wants it all to end: a probe has nothing to save, and its lease may be over.
            goodbye.callback(_take_down, reaper, 0.0)
            watch = MemoryTracker(self._before, self._stage.expected, reaper.owns)
            ending, code = self._follow(reaper, output, watch)
            seconds = time.monotonic() - self._begun
            # One that takes what others need has no time to go.
            _take_down(reaper, 0.0 if ending == "ceiling" else GRACE)
            self._read(output)
        return ProbeReport(ending, code, seconds, self._tail), watch

    def _launch(self, output: int) -> Reaper:
        environment = {**self._stage.environment, **MARKS}
        program = Program(self._command, environment, self._stage.directory, output, session=True)
        prober = self._stage.prober
        return launch(program, signum=signal.SIGTERM, grace=GRACE, helpers=lambda: helpers_of(prober))

    def _follow(self, reaper: Reaper, output: int, watch: MemoryTracker) -> tuple[Ending, int | None]:
        sampler = Sampler(self._stage.prober, LOOK_EVERY)
        while True:
            self._stage.check()
            self._read(output)
            if (code := self._hear(reaper)) is not None:
                return "by itself", code
            self._look(sampler, watch)
            if (ending := self._enough(watch)) is not None:
                return ending, None
            _wait(sampler, reaper.fileno(), output)

    def _hear(self, reaper: Reaper) -> int | None:
        while (event := reaper.next_event()) is not None:
            if isinstance(event, Failed) and event.transient:
                raise OSError(event.errno, event.why)  # the machine's trouble, which no size can help
            if isinstance(event, Failed):
                raise ProbeFailedError(f"cannot run {self._command[0]!r}: {event.why}", exit_code=event.exit_code)
            if isinstance(event, ReaperKilled):
                raise ProbeFailedError("the process that guards the probe was killed from outside, so it was stopped")
            if isinstance(event, Ended):
                return exit_code(event.status)
        return None

    def _look(self, sampler: Sampler, watch: MemoryTracker) -> None:
        look = sampler.step()
        if look is None:
            return
        reason = watch.see(look) if look.problem is None else look.problem.reason
        if reason is None:
            self._seen = look.at
            self._plateau.see(look.at, watch.peak, self._rates.steps_seen, watch.works)
            # By what was seen: memory that no look has followed since, while this process was held up, may have grown.
            self._flat = self._plateau.reached(look.at, self._rates.steps_seen)
        elif look.at - self._seen > LONGEST_GAP:
            raise ProbeFailedError(f"the memory of the probe could not be watched: {reason}")

    def _enough(self, watch: MemoryTracker) -> Ending | None:
        now = time.monotonic()
        if self._stage.ceiling is not None and watch.peak > self._stage.ceiling:
            return "ceiling"
        if self._matched is not None and self._seen > self._matched and watch.peak:
            return "until"
        if self._until is None and self._flat:
            return "flat"
        return "time" if now - self._begun >= self._stage.limits.seconds else None

    def _read(self, output: int) -> None:
        """Whatever it printed since."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, _CHUNK):
                self._log.write(data)
                text = data.decode(errors="replace")
                self._tail = (self._tail + text)[-_TAIL:]
                self._rates.feed(text, time.monotonic())
                self._match(text)

    def _match(self, text: str) -> None:
        if self._until is None or self._matched is not None:
            return
        # A progress bar returns to the beginning of its line.
        *lines, self._unfinished = re.split(r"[\r\n]", self._unfinished + text)
        if any(map(self._until.search, [*lines, self._unfinished])):
            self._matched = time.monotonic()
        self._unfinished = self._unfinished[-_CHUNK:]


def _take_down(reaper: Reaper, grace: float = GRACE) -> None:
    reaper.update()
    if not reaper.empty:
        stop(reaper, signal.SIGTERM, grace, first=reaper.job if reaper.status is None else None)


def _wait(sampler: Sampler, *descriptors: int) -> None:
    poll = select.poll()
    for descriptor in (*descriptors, sampler.fileno()):
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
    poll.poll(min(max(sampler.due() - time.monotonic(), 0.0), LOOK_EVERY) * 1000)
