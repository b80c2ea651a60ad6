"""One run of a command at one size, under a reaper, watched ten times a second, until it has shown enough."""

import contextlib
import os
import re
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
from stoker.logs.writer import LogWriter
from stoker.runs.loop import CommandHandler, CommandLoop, helpers_of
from stoker.runs.processes.reaper import Failed, Program, Reaper, exit_code, launch

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


class Probe(CommandHandler[tuple[Ending, int | None]]):
    """Runs once. Nothing that it started is left when `run` returns or raises."""

    def __init__(self, stage: Stage, command: tuple[str, ...], log: Path, before: Look, rates: Rates) -> None:
        self._stage = stage
        self._command = command
        self._before = before
        self._rates = rates
        self._log = LogWriter(log, _LOG_LIMIT)
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
        self._output, end = os.pipe()
        os.set_blocking(self._output, False)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._log.close)
            cleanup.callback(os.close, self._output)
            try:
                reaper = self._launch(end)
            finally:
                os.close(end)
            cleanup.callback(reaper.close)
            loop = CommandLoop(self, reaper, sampler=Sampler(self._stage.prober, LOOK_EVERY))
            # When the fit is called off: a probe has nothing to save, and its lease may be over.
            cleanup.callback(loop.stop, signal.SIGTERM, 0.0)
            self._memory = MemoryTracker(self._before, self._stage.expected, reaper.owns)
            ending, code = loop.run()
            seconds = time.monotonic() - self._begun
            # Above the ceiling it takes memory that others need.
            loop.stop(signal.SIGTERM, 0.0 if ending == "ceiling" else GRACE)
            self._read_output()
        return ProbeReport(ending, code, seconds, self._tail), self._memory

    def _launch(self, output: int) -> Reaper:
        environment = {**self._stage.environment, **MARKS}
        program = Program(self._command, environment, self._stage.directory, output, session=True)
        prober = self._stage.prober
        return launch(program, signum=signal.SIGTERM, grace=GRACE, helpers=lambda: helpers_of(prober))

    # Events of the loop

    def descriptors(self) -> tuple[int, ...]:
        return (self._output,)

    def due(self) -> float:
        return time.monotonic() + LOOK_EVERY

    def on_tick(self) -> tuple[Ending, None] | None:
        self._stage.check()
        self._read_output()
        return self._enough()

    def on_start_failed(self, failed: Failed) -> None:
        if failed.transient:
            raise OSError(failed.errno, failed.why)  # the machine's trouble, which no size can help
        raise ProbeFailedError(f"cannot run {self._command[0]!r}: {failed.why}", exit_code=failed.exit_code)

    def on_reaper_killed(self) -> None:
        raise ProbeFailedError("the probe was stopped because its reaper was killed from outside")

    def on_exit(self, status: int) -> tuple[Ending, int]:
        return "by itself", exit_code(status)

    def on_look(self, look: Look) -> tuple[Ending, None] | None:
        reason = self._memory.see(look) if look.problem is None else look.problem.reason
        if reason is None:
            self._seen = look.at
            self._plateau.see(look.at, self._memory.peak, self._rates.steps_seen, self._memory.works)
            # Only what was seen counts: memory may have grown unseen while this process was held up.
            self._flat = self._plateau.reached(look.at, self._rates.steps_seen)
        elif look.at - self._seen > LONGEST_GAP:
            raise ProbeFailedError(f"the memory of the probe could not be watched: {reason}")
        return self._enough()

    def _enough(self) -> tuple[Ending, None] | None:
        if self._stage.ceiling is not None and self._memory.peak > self._stage.ceiling:
            return "ceiling", None
        if self._matched is not None and self._seen > self._matched and self._memory.peak:
            return "until", None
        if self._until is None and self._flat:
            return "flat", None
        return ("time", None) if time.monotonic() - self._begun >= self._stage.limits.seconds else None

    def _read_output(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, _CHUNK):
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
