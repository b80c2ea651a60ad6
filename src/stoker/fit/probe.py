"""Runs a command at one batch size under a reaper, and samples its memory until it stops growing."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

from stoker.fit.measurements import MemoryTracker, Plateau, Rates
from stoker.fit.model import ProbeFailedError, ProbeOptions
from stoker.gpus.model import Look
from stoker.gpus.prober import Prober, Sampler
from stoker.logs.writer import LogWriter
from stoker.runs.loop import CommandHandler, CommandLoop, helpers_of
from stoker.runs.processes.reaper import Failed, Program, Reaper, exit_code, launch

# Memory peaks of a training last for a forward pass: tenths of a second.
LOOK_EVERY: Final = 0.1
# A probe has nothing to save; this is for programs that clean up.
GRACE: Final = 5.0
# A dead helper is restarted within a second. A longer gap may hide the peak.
LONGEST_GAP: Final = 3.0
# In the environment of every process of a probe, so that a program can skip what only a real run should do.
PROBE_TAGS: Final = {"STOKER_PROBE": "1", "STOKER_FIT_PROBE": "1"}
_LOG_LIMIT: Final = 16 * 2**20
# Tracebacks of all other ranks follow the message of the rank that ran out of memory.
_TAIL: Final = 256 * 1024
_CHUNK: Final = 65536

ProbeEnding = Literal["exited", "flat", "until", "time", "ceiling"]


class ProbeSetup(NamedTuple):
    """The common settings of a fit's probes."""

    prober: Prober
    environment: Mapping[str, str]
    directory: str | None
    limits: ProbeOptions
    expected: frozenset[str]
    """The uuids of the GPUs that the command should use."""
    ceiling: int | None
    """The limit in bytes on a GPU, above which the probe is stopped at once, since it takes memory of others."""
    check: Callable[[], None]
    """Called ten times a second; raises to abort the fit."""


class ProbeReport(NamedTuple):
    """The result of a probe."""

    ending: ProbeEnding
    code: int | None
    """Its exit code, if it exited by itself."""
    seconds: float
    output: str
    """The end of its output."""


class Probe(CommandHandler[tuple[ProbeEnding, int | None]]):
    """A single run. No process of it is left when `run` returns or raises."""

    def __init__(self, setup: ProbeSetup, command: tuple[str, ...], log: Path, before: Look, rates: Rates) -> None:
        self._setup = setup
        self._command = command
        self._before = before
        self._rates = rates
        self._log = LogWriter(log, _LOG_LIMIT)
        self._tail = ""
        self._until = setup.limits.pattern()
        self._unfinished = ""
        self._matched: float | None = None
        self._plateau = Plateau(setup.limits.flat_for)
        self._flat = False
        self._begun = time.monotonic()
        self._seen = self._begun

    def run(self) -> tuple[ProbeReport, MemoryTracker]:
        """Raises ProbeFailedError if it could not be started or watched, OSError for lack of resources."""
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
            loop = CommandLoop(self, reaper, sampler=Sampler(self._setup.prober, LOOK_EVERY))
            # An aborted probe has nothing to save, and its lease may have ended.
            cleanup.callback(loop.stop, signal.SIGTERM, 0.0)
            self._memory = MemoryTracker(self._before, self._setup.expected, reaper.owns)
            ending, code = loop.run()
            seconds = time.monotonic() - self._begun
            # Above the ceiling it takes memory that others need.
            loop.stop(signal.SIGTERM, 0.0 if ending == "ceiling" else GRACE)
            self._read_output()
        return ProbeReport(ending, code, seconds, self._tail), self._memory

    def _launch(self, output: int) -> Reaper:
        environment = {**self._setup.environment, **PROBE_TAGS}
        program = Program(self._command, environment, self._setup.directory, output, session=True)
        prober = self._setup.prober
        return launch(program, signum=signal.SIGTERM, grace=GRACE, helpers=lambda: helpers_of(prober))

    # Events of the loop

    def descriptors(self) -> tuple[int, ...]:
        return (self._output,)

    def due(self) -> float:
        return time.monotonic() + LOOK_EVERY

    def on_tick(self) -> tuple[ProbeEnding, None] | None:
        self._setup.check()
        self._read_output()
        return self._enough()

    def on_start_failed(self, failed: Failed) -> None:
        if failed.transient:
            raise OSError(failed.errno, failed.why)  # a shortage of the machine, not of this size
        raise ProbeFailedError(f"cannot run {self._command[0]!r}: {failed.why}", exit_code=failed.exit_code)

    def on_reaper_killed(self) -> None:
        raise ProbeFailedError("the probe was stopped because its reaper was killed from outside")

    def on_exit(self, status: int) -> tuple[ProbeEnding, int]:
        return "exited", exit_code(status)

    def on_look(self, look: Look) -> tuple[ProbeEnding, None] | None:
        reason = self._memory.see(look) if look.problem is None else look.problem.reason
        if reason is None:
            self._seen = look.at
            self._plateau.see(look.at, self._memory.peak, self._rates.steps_seen, self._memory.works)
            # Only observed memory counts: it may have grown while this process was delayed.
            self._flat = self._plateau.reached(look.at, self._rates.steps_seen)
        elif look.at - self._seen > LONGEST_GAP:
            raise ProbeFailedError(f"the memory of the probe could not be watched: {reason}")
        return self._enough()

    def _enough(self) -> tuple[ProbeEnding, None] | None:
        if self._setup.ceiling is not None and self._memory.peak > self._setup.ceiling:
            return "ceiling", None
        if self._matched is not None and self._seen > self._matched and self._memory.peak:
            return "until", None
        if self._until is None and self._flat:
            return "flat", None
        return ("time", None) if time.monotonic() - self._begun >= self._setup.limits.seconds else None

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
