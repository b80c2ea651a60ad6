"""The judging of `gpu_idle_timeout`: looks go in, its log lines and a verdict come out."""

import logging
import math
from typing import Final

from stoker.gpus.model import Look, known
from stoker.gpus.prober import LONGEST_WAIT
from stoker.rules.rule import LOOK_TAKES, Verdict
from stoker.rules.samples import Sample, SamplesPolicy, SamplesRule
from stoker.rules.scope import DeviceScope
from stoker.streams import ERROR, emit

PROGRAM: Final = "gpu_idle_timeout"


def look_distance(sample_freq: int) -> float:
    """Seconds between looks: several per sample where these are far apart, as the driver remembers sixteen seconds."""
    return sample_freq / math.ceil(sample_freq / LONGEST_WAIT)


class IdleWatch:
    """Each look comes one `policy.every` after the previous one, the first at the start."""

    def __init__(self, policy: SamplesPolicy, log: logging.Logger, look_takes: float = LOOK_TAKES) -> None:
        """`look_takes`: how long a look may take, the prober's deadline."""
        self.policy = policy
        self._log = log
        self._scope = DeviceScope()
        self._rule = SamplesRule(policy, look_takes=look_takes)
        self._unknown: dict[str, str] = {}

    def announce(self) -> None:
        self._log.info(
            "Starting GPU idle watcher: threshhold_percentage=%d%%, sample_freq=%d, num_samples=%d, delay_samples=%d, "
            "window_size=%d",
            self.policy.threshold,
            self.policy.sample_freq,
            self.policy.num_samples,
            self.policy.delay_samples,
            self.policy.window,
        )

    def observe(self, look: Look) -> Verdict:
        verdict = self._rule.observe(self._scope.observe(look))
        if verdict.kind == "arming":
            self._log.info(verdict.reason)
        if self._rule.sample is not None:
            self._log_readings(self._rule.sample)
        return verdict

    def start_again(self, at: float) -> None:
        """Nothing that was seen counts any more."""
        self._rule.rearm(at)

    def _log_readings(self, sample: Sample) -> None:
        unknown: dict[str, str] = {"": sample.problem} if sample.problem else {}
        for uuid, percent in sample.percents.items():
            if known(percent):
                self._log.debug("%s usage %d%%", uuid, percent)
            else:
                unknown[f"{uuid} "] = percent.reason
        for prefix, reason in unknown.items():
            # Logged when it begins and when its reason changes; with --debug every time.
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
