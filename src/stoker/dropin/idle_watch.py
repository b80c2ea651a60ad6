"""The watch of `gpu_idle_timeout`: looks go in, its log lines come out, and after some look the idle GPUs."""

import logging
import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from stoker.gpus.model import Look, known
from stoker.gpus.prober import LONGEST_WAIT
from stoker.rules.policy import GAP_ALLOWANCE, GAP_LOOKS, LOOK_TAKES, longest_unseen
from stoker.rules.samples import Sample, SampleGatherer, SamplesRule
from stoker.streams import ERROR, emit

PROGRAM: Final = "gpu_idle_timeout"


class Numbers(NamedTuple):
    """The rule as it is given on the command line."""

    threshhold_percentage: int
    sample_freq: int
    num_samples: int
    delay_samples: int
    all_or_any: Literal["all", "any"]

    @property
    def window(self) -> int:
        return self.sample_freq * self.num_samples


class IdleWatch:
    """Knows no clock: every look that it is given is one `look_every` after the one before, the first at the start."""

    def __init__(self, numbers: Numbers, log: logging.Logger, look_takes: float = LOOK_TAKES) -> None:
        """`look_takes`: how long a look may take, the prober's deadline."""
        self._numbers = numbers
        self._log = log
        # Looks between samples where these are far apart: the driver remembers sixteen seconds.
        self._looks_per_sample = math.ceil(numbers.sample_freq / LONGEST_WAIT)
        self.look_every = numbers.sample_freq / self._looks_per_sample
        longest_gap = self.look_every * GAP_LOOKS + GAP_ALLOWANCE
        self._gatherer = SampleGatherer(longest_gap, longest_unseen(self.look_every, look_takes))
        self._rule = SamplesRule(numbers.threshhold_percentage, numbers.num_samples, numbers.all_or_any)
        self._looks = 0
        self._unknown: dict[str, str] = {}

    def announce(self) -> None:
        threshhold, frequency, samples, delay, _ = self._numbers
        self._log.info(
            "Starting GPU idle watcher: threshhold_percentage=%d%%, sample_freq=%d, num_samples=%d, delay_samples=%d, "
            "window_size=%d",
            threshhold,
            frequency,
            samples,
            delay,
            self._numbers.window,
        )

    def observe(self, look: Look) -> tuple[str, ...]:
        """The uuids of the idle GPUs when it is time to act; none otherwise."""
        self._gatherer.add(look)
        samples, between = divmod(self._looks, self._looks_per_sample)
        self._looks += 1
        if between:
            return ()
        sample = self._gatherer.take()
        if samples == 0:
            return ()  # the look at the start: what was before it is not the command's doing
        if samples < self._numbers.delay_samples:
            left = (self._numbers.delay_samples - samples) * self._numbers.sample_freq
            self._log.info("waiting for delay samples. %d seconds left", left)
            return ()
        self._log_readings(sample)
        return self._rule.observe(sample.percents)

    def idle_in_words(self, idle: Sequence[str]) -> str:
        threshhold, window = self._numbers.threshhold_percentage, self._numbers.window
        return (
            f"usage for {self._numbers.all_or_any} GPUs: {list(idle)} was below threshhold {threshhold}% "
            f"for last {window} seconds."
        )

    @property
    def window(self) -> float:
        """Seconds."""
        return float(self._numbers.window)

    def start_again(self) -> None:
        """Nothing that was seen counts any more."""
        self._rule = SamplesRule(
            self._numbers.threshhold_percentage, self._numbers.num_samples, self._numbers.all_or_any
        )

    def _log_readings(self, sample: Sample) -> None:
        unknown: dict[str, str] = {"": sample.problem} if sample.problem else {}
        for uuid, percent in sample.percents.items():
            if known(percent):
                self._log.debug("%s usage %d%%", uuid, percent)
            else:
                unknown[f"{uuid} "] = percent.reason
        for prefix, reason in unknown.items():
            # Told when it begins and when its reason changes; every time only to whoever wants every reading.
            level = logging.DEBUG if self._unknown.get(prefix) == reason else logging.WARNING
            self._log.log(level, "%susage unknown: %s", prefix, reason)
        self._unknown = unknown


class _GuardedHandler(logging.Handler):
    """Writes to stderr, where that is possible."""

    def emit(self, record: logging.LogRecord) -> None:
        emit(ERROR, f"{self.format(record)}\n")


def open_log(*, debug: bool) -> logging.Logger:
    """The log on stderr, with lines as the original writes them."""
    handler = _GuardedHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s: %(levelname)s: {PROGRAM}: %(message)s"))
    log = logging.Logger(PROGRAM, logging.DEBUG if debug else logging.INFO)
    log.addHandler(handler)
    return log
