"""The rule seam: `Observation` in, `Verdict` out. A `Policy` holds the settings of one rule."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from stoker.errors import BadInputError
from stoker.gpus.model import JobProgress, Maybe, Process, Reading, Unknown
from stoker.units import format_duration, format_percent, parse_fraction, parse_length

# Below one whole percent nothing ran that the driver could see: a job that does anything at all is left alone.
DEFAULT_BELOW: Final = 0.01
DEFAULT_EVERY: Final = 5.0
DEFAULT_WARN_AT: Final = 0.5
# Looks this many times further apart than `every` leave a gap: the window starts again.
GAP_LOOKS: Final = 3
# One look may take its whole deadline without having missed anything.
GAP_ALLOWANCE: Final = 10.0
# How long a look may take by default: the deadline of a prober.
LOOK_TAKES: Final = 5.0

Effect = Literal["none", "warn", "act"]
"""What a verdict asks for: nothing, a warning to people, or the actions."""
Stored = dict[str, str | int | float | bool | None]
"""Policies as a job keeps them: what differs from the defaults, flat. `{"idle": False}` turns a rule off."""


class Activity(NamedTuple):
    """What one GPU did in the stretch of time before a look, as far as it counts for the job."""

    uuid: str
    label: str
    """What people call it: `GPU 0`."""
    span: float
    """Seconds before the look that the utilization speaks for."""
    peak: Maybe[float]
    """The highest utilization; on a shared GPU only the job's part of it."""
    reading: Reading | None = None
    """What the whole device did: mean utilization, power and its limit, memory, pipes, processes. None: not listed."""
    processes: tuple[Process, ...] = ()
    """The processes of the job on this GPU, with what each of them did."""


UNSEEN: Final = JobProgress()


class Observation(NamedTuple):
    """Everything a rule may judge by. Times are monotonic seconds of one clock."""

    at: float
    activities: Sequence[Activity]
    problem: str | None = None
    """Why the machine as a whole could not be read."""
    progress: JobProgress = UNSEEN

    @property
    def unknown(self) -> list[tuple[str, str]]:
        """Label and reason of each GPU that could not be read."""
        return [(a.label, a.peak.reason) for a in self.activities if isinstance(a.peak, Unknown)]


class Verdict(NamedTuple):
    """What a rule says after an observation. Only one with the effect `act` leads to actions."""

    kind: str
    """`waiting`, `arming`, `busy`, `unknown`, or what the rule found: `idle`, … An open set."""
    reason: str
    """The evidence: `GPU 0 stayed below 1% for 30m`. No capital, no full stop."""
    effect: Effect = "none"
    cause: str = ""
    """What is wrong with the job, for a title: `its GPUs stayed idle`."""
    quiet: bool = False
    """Whether the job did no work on its GPUs: only then does a report look for what it waited for."""
    hang: bool = False
    """Whether its GPUs were fully used all the same: the job hangs, and the report compares its ranks."""
    since: float | None = None
    """When the stretch that counts for the window began."""
    progress: float = 0.0
    """The share of the window that is over, 0 to 1."""
    left: float = 0.0
    """Seconds until the rule acts if nothing changes; meaningful while `progress` is above 0."""
    is_paused: bool = False
    """Whether the window only pauses, and goes on where it was when this is over."""
    gpus: tuple[str, ...] = ()
    """The uuids of the GPUs for which the whole window has passed."""
    evidence: tuple[str, ...] = ()
    """What speaks for the verdict, line by line, for the report."""
    rule: str = ""
    """The registered name of the rule; the judge fills it in."""


class RuleWarning(msgspec.Struct, frozen=True, kw_only=True):
    """What people are warned of while a job runs."""

    rule: str
    """The registered name of the rule."""
    word: str
    """For a badge, after the job's name: `may hang`."""
    reason: str
    """As the rule said it at that moment."""
    at: float
    """When the warning began, in seconds since the epoch."""
    acts_at: float | None = None
    """When the job is stopped if nothing changes; None: the rule only warns."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a rule. `every` and `warn_at` are shared by all rules of a run."""

    every: float = DEFAULT_EVERY
    """Seconds between looks."""
    warn_at: float | None = DEFAULT_WARN_AT
    """The share of the window after which people are warned."""

    @property
    def window(self) -> float:
        """How long the rule needs to see the same thing before it acts."""
        raise NotImplementedError

    @property
    def below(self) -> float:
        """The utilization under which a GPU is drawn and counted as unused."""
        return DEFAULT_BELOW

    @property
    def longest_gap(self) -> float:
        return self.every * GAP_LOOKS + GAP_ALLOWANCE

    def check(self) -> None:
        """Raises `BadInputError` for settings that cannot work."""
        if self.warn_at is not None and not 0 < self.warn_at < 1:
            raise BadInputError("--warn-at must be between 0% and 100% of the window")

    def check_gpus(self, count: int) -> None:
        """Raises `BadInputError` if the rule could never act on this many GPUs."""

    def in_words(self) -> str:
        """`all GPUs below 1% for 30m`."""
        raise NotImplementedError

    def conditions(self) -> list[str]:
        """What else must be the case before the rule acts, in words."""
        return []


class Rule(Protocol):
    """A state machine over observations. Pure: it has no clock."""

    def observe(self, observation: Observation) -> Verdict:
        """The verdict at `observation.at`."""

    def due(self) -> float | None:
        """When the rule acts if nothing changes, so that a look is taken at that moment. None: not foreseeable."""

    def snooze(self, until: float) -> None:
        """Nothing before `until` counts: a person expects the job to be quiet."""

    def rearm(self, at: float) -> None:
        """Starts over after the rule has acted. It acts again only for GPUs of which one was used since."""


class Option(NamedTuple):
    """One command-line option of a rule, for a field of its policy."""

    flag: str
    field: str
    type_name: str
    """`duration`, `percentage`, …"""
    parse: Callable[[str], Any]
    metavar: str
    help: str
    show: Callable[[Any], str] = str
    """The default as the help shows it."""


def duration_option(flag: str, field: str, text: str, show: Callable[[Any], str] = format_duration) -> Option:
    return Option(flag, field, "duration", parse_length, "DURATION", text, show)


def percentage_option(flag: str, field: str, text: str, show: Callable[[Any], str] = format_percent) -> Option:
    return Option(flag, field, "percentage", parse_fraction, "PERCENT", text, show)


def longest_unseen(every: float, look_takes: float) -> float:
    """How much of the time between two looks the later one may leave out.

    Between two momentary samples lie one distance and a look that took all of its time.
    """
    return every + look_takes
