"""The rule seam: `Observation` in, `Verdict` out. A `Policy` holds the settings of one rule."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from stoker.errors import BadInputError
from stoker.gpus.model import JobProgress, Maybe, Process, Reading, Unknown
from stoker.units import format_duration, format_percent, parse_fraction, parse_length

# Below one percent the driver saw no work; a job with any work at all is left alone.
DEFAULT_BELOW: Final = 0.01
DEFAULT_EVERY: Final = 5.0
DEFAULT_WARN_AT: Final = 0.5
# Looks this many intervals apart leave a gap, which restarts the window.
GAP_LOOKS: Final = 3
# A look may take its whole deadline without missing anything.
GAP_ALLOWANCE: Final = 10.0
# The default limit of a look: the prober's deadline.
LOOK_TAKES: Final = 5.0

Effect = Literal["none", "warn", "act"]
"""The effect of a verdict: none, a warning to people, or actions."""
Stored = dict[str, str | int | float | bool | None]
"""The flat form of policies in a job: values that differ from defaults. `{"idle": False}` turns a rule off."""


class Activity(NamedTuple):
    """The activity of one GPU before a look, as far as it counts for the job."""

    uuid: str
    label: str
    """Its name for people: `GPU 0`."""
    span: float
    """The seconds before the look that the utilization covers."""
    peak: Maybe[float]
    """The peak utilization; on a shared GPU only the job's part."""
    reading: Reading | None = None
    """The reading of the whole device: mean utilization, power, memory, pipes, processes. None if it is not listed."""
    processes: tuple[Process, ...] = ()
    """The job's processes on this GPU, with their activity."""


UNSEEN: Final = JobProgress()


class Observation(NamedTuple):
    """The input of rules. Times are monotonic seconds of one clock."""

    at: float
    activities: Sequence[Activity]
    problem: str | None = None
    """Why the whole machine could not be read."""
    progress: JobProgress = UNSEEN

    @property
    def unknown(self) -> list[tuple[str, str]]:
        """Label and reason of each unreadable GPU."""
        return [(a.label, a.peak.reason) for a in self.activities if isinstance(a.peak, Unknown)]


class Verdict(NamedTuple):
    """The answer of a rule to an observation. Only the effect `act` leads to actions."""

    kind: str
    """`waiting`, `arming`, `busy`, `unknown`, or the rule's finding, such as `idle`. An open set."""
    reason: str
    """The evidence: `GPU 0 stayed below 1% for 30m`. No capital, no full stop."""
    effect: Effect = "none"
    cause: str = ""
    """The problem of the job, for a title: `its GPUs stayed idle`."""
    quiet: bool = False
    """The job did no work on its GPUs. Only then the report searches for what it waited for."""
    hang: bool = False
    """Its GPUs were fully used without work: the job hangs, and the report compares its ranks."""
    since: float | None = None
    """The start of the stretch that counts for the window."""
    progress: float = 0.0
    """The elapsed share of the window, 0 to 1."""
    left: float = 0.0
    """Seconds until the rule acts if nothing changes; meaningful while `progress` is above 0."""
    is_paused: bool = False
    """The window is only paused, and continues later."""
    gpus: tuple[str, ...] = ()
    """The uuids of the GPUs whose window is complete."""
    evidence: tuple[str, ...] = ()
    """Lines of evidence for the report."""
    rule: str = ""
    """The registered name of the rule; the judge fills it in."""


class RuleWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A warning about a running job."""

    rule: str
    """The registered name of the rule."""
    word: str
    """The text of a badge after the job's name: `may hang`."""
    reason: str
    """The rule's reason at the start of the warning."""
    at: float
    """The start of the warning in seconds since the epoch."""
    acts_at: float | None = None
    """When the job is stopped if nothing changes; None if the rule only warns."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a rule. `every` and `warn_at` are shared by all rules of a run."""

    every: float = DEFAULT_EVERY
    """The interval of looks in seconds."""
    warn_at: float | None = DEFAULT_WARN_AT
    """The share of the window after which people are warned."""

    @property
    def window(self) -> float:
        """The time for which a condition must hold before the rule acts."""
        raise NotImplementedError

    @property
    def below(self) -> float:
        """The utilization below which a GPU is shown and counted as unused."""
        return DEFAULT_BELOW

    @property
    def longest_gap(self) -> float:
        return self.every * GAP_LOOKS + GAP_ALLOWANCE

    def check(self) -> None:
        """Raises `BadInputError` for invalid settings."""
        if self.warn_at is not None and not 0 < self.warn_at < 1:
            raise BadInputError("--warn-at must be between 0% and 100% of the window")

    def check_gpus(self, count: int) -> None:
        """Raises `BadInputError` if the rule can never act with this number of GPUs."""

    def in_words(self) -> str:
        """A description: `all GPUs below 1% for 30m`."""
        raise NotImplementedError

    def conditions(self) -> list[str]:
        """Descriptions of further conditions."""
        return []


class Rule(Protocol):
    """A state machine over observations. Pure: it has no clock."""

    def observe(self, observation: Observation) -> Verdict:
        """The verdict at `observation.at`."""

    def due(self) -> float | None:
        """When the rule acts if nothing changes, to take a look then; None if that is unforeseeable."""

    def snooze(self, until: float) -> None:
        """Ignores everything before `until`, since a person expects the job to be quiet."""

    def rearm(self, at: float) -> None:
        """Starts over after the rule has acted. It acts again only after a use of one of the GPUs."""


class Option(NamedTuple):
    """A command-line option for a field of a rule's policy."""

    flag: str
    field: str
    type_name: str
    """`duration`, `percentage`, …"""
    parse: Callable[[str], Any]
    metavar: str
    help: str
    show: Callable[[Any], str] = str
    """Formats the default for the help."""


def duration_option(flag: str, field: str, text: str, show: Callable[[Any], str] = format_duration) -> Option:
    return Option(flag, field, "duration", parse_length, "DURATION", text, show)


def percentage_option(flag: str, field: str, text: str, show: Callable[[Any], str] = format_percent) -> Option:
    return Option(flag, field, "percentage", parse_fraction, "PERCENT", text, show)


def longest_unseen(every: float, look_takes: float) -> float:
    """The longest time between two looks that the later one may leave uncovered.

    Two momentary samples are one interval apart, plus a look that takes all its time.
    """
    return every + look_takes
