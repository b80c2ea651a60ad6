"""The load of a process on simulated GPUs: phases, scripts of phases, and totals over time. No clock, no I/O.

All readings are differences of running totals (`work`, `effort`, `traffic`), so that looks after a second and after a
day cost the same and miss no burst.
"""

import math
from typing import Annotated, Final, Literal

import msgspec

from stoker.errors import BadInputError
from stoker.units import format_duration, format_percent, parse_duration, parse_fraction

PhaseKind = Literal["busy", "idle", "spin", "burst"]
# Checked when a file is read, since a manually edited file must not stop a reader.
_Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Bytes = Annotated[int, msgspec.Meta(ge=0)]

# A training at full load; also the default of `stoker sim load`.
DEFAULT_UTILIZATION: Final = 0.9
# The memory traffic of a training per unit of utilization: 30 to 60 % was seen at full load.
TRAFFIC: Final = 0.5
# A deadlocked collective spins on a few SMs without computing or using memory: such boards drew 5 to 15 % of the range
# between idle and limit while reporting 100 %.
SPIN_POWER: Final = 0.12
# A reader may look back as far as a driver's buffer reaches (100 samples at 6 Hz); what ended before that is
# folded into the running totals.
HISTORY: Final = 20.0

_FORMS: Final[dict[PhaseKind, str]] = {
    "busy": "busy 90% 30s",
    "idle": "idle 20s",
    "spin": "spin 60s",
    "burst": "burst 80% 0.5s/10s 60s",
}


class Phase(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stretch of constant load."""

    kind: PhaseKind
    seconds: _Seconds | None = None
    """None for endless."""
    utilization: _Fraction = 0.0
    power: _Fraction = 0.0
    """The power as a share of the range between the board's idle draw and its limit."""
    traffic: _Fraction = 0.0
    """The share of time with device memory access."""
    burst: _Seconds | None = None
    """For `burst` only: the active seconds at the start of every `period`."""
    period: _Seconds | None = None

    @property
    def length(self) -> float:
        return math.inf if self.seconds is None else self.seconds

    def active(self, elapsed: float) -> float:
        """The active seconds within the first `elapsed` seconds of the phase."""
        if self.burst is None or self.period is None:
            return elapsed
        whole, rest = divmod(elapsed, self.period)
        return whole * self.burst + min(rest, self.burst)

    def __str__(self) -> str:
        words: list[str] = [self.kind]
        if self.kind in ("busy", "burst"):
            words.append(format_percent(self.utilization))
        if self.burst is not None and self.period is not None:
            words.append(f"{_exactly(self.burst)}/{_exactly(self.period)}")
        if self.seconds is not None:
            words.append(_exactly(self.seconds))
        return " ".join(words)


def _exactly(seconds: float) -> str:
    """Formats a duration without rounding a short one to zero."""
    return f"{seconds:g}s" if seconds < 10 else format_duration(seconds)


def busy(
    utilization: float = DEFAULT_UTILIZATION, seconds: float | None = None, *, power: float | None = None
) -> Phase:
    """Steady work; power is proportional unless given."""
    share = utilization if power is None else power
    return Phase("busy", seconds, _fraction(utilization), _fraction(share), utilization * TRAFFIC)


def idle(seconds: float | None = None) -> Phase:
    return Phase("idle", seconds)


def spin(seconds: float | None = None, *, power: float = SPIN_POWER) -> Phase:
    """100 % utilization without computation or memory traffic: the signature of a deadlocked collective."""
    return Phase("spin", seconds, 1.0, _fraction(power))


def burst(utilization: float, active: float, period: float, seconds: float | None = None) -> Phase:
    """Short periodic work, like a server with few requests."""
    if not 0 < active <= period:
        raise BadInputError(
            f"a burst of {format_duration(active)} does not fit into every {format_duration(period)}: "
            "write it like 0.5s/10s"
        )
    return Phase(
        "burst", seconds, _fraction(utilization), utilization, utilization * TRAFFIC, burst=active, period=period
    )


def _fraction(value: float) -> float:
    if not 0 <= value <= 1:
        raise BadInputError(f"{value:g} is out of range: a utilization or a share of power is between 0 and 1")
    return value


def parse_phase(text: str) -> Phase:
    """Parses a phase: `busy 90% 30s`, `idle`, `burst 80% 0.5s/10s 60s`.

    The order after the kind is free; percentages need their %; without a duration the phase is endless.
    """
    kind, *words = text.split() or [""]
    if kind not in _FORMS:
        raise BadInputError(f"{text!r} is not a phase of a load: it begins with {', '.join(_FORMS)}")
    percents = [parse_fraction(word) for word in words if word.endswith("%")]
    rhythms = [word for word in words if "/" in word]
    durations = [parse_duration(word) for word in words if not word.endswith("%") and "/" not in word]
    most_percents, most_rhythms = int(kind in ("busy", "burst")), int(kind == "burst")
    if len(percents) > most_percents or len(rhythms) != most_rhythms or len(durations) > 1:
        raise BadInputError(f"{text!r} is not a phase of a load: write it like {_FORMS[kind]!r}")
    seconds = durations[0] if durations else None
    if seconds == 0:
        raise BadInputError(f"{text!r} lasts no time: leave the phase out or give it a duration")
    utilization = percents[0] if percents else DEFAULT_UTILIZATION
    match kind:
        case "busy":
            return busy(utilization, seconds)
        case "idle":
            return idle(seconds)
        case "spin":
            return spin(seconds)
        case _:
            active, _, period = rhythms[0].partition("/")
            return burst(utilization, parse_duration(active), parse_duration(period), seconds)


class Totals(msgspec.Struct, frozen=True):
    """Running totals, in seconds of a fully used GPU."""

    work: float = 0.0
    """Work that the driver counts as utilization."""
    effort: float = 0.0
    """Work that draws power."""
    traffic: float = 0.0
    """Work that the driver counts as utilization of the memory controller."""

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.work + other.work, self.effort + other.effort, self.traffic + other.traffic)

    def __sub__(self, other: "Totals") -> "Totals":
        return Totals(self.work - other.work, self.effort - other.effort, self.traffic - other.traffic)

    def __mul__(self, times: float) -> "Totals":
        return Totals(self.work * times, self.effort * times, self.traffic * times)


class Script(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence of phases from a start time, optionally repeated."""

    start: float
    """Monotonic seconds."""
    phases: Annotated[tuple[Phase, ...], msgspec.Meta(min_length=1)]
    repeat: bool = False

    @property
    def cycle(self) -> float:
        return math.fsum(phase.length for phase in self.phases)

    @property
    def end(self) -> float:
        return math.inf if self.repeat else self.start + self.cycle

    def totals(self, at: float) -> Totals:
        """Running totals from the start of the script until `at`."""
        cycles, elapsed = self._position(at)
        total = self._within(elapsed)
        return total + self._within(self.cycle) * cycles if cycles else total

    def _position(self, at: float) -> tuple[int, float]:
        """The number of completed cycles at a moment, and the position in the current one."""
        elapsed = max(0.0, at - self.start)
        cycle = self.cycle
        if self.repeat and 0 < cycle < math.inf:
            cycles, rest = divmod(elapsed, cycle)
            return int(cycles), rest
        return 0, min(elapsed, cycle)

    def _within(self, elapsed: float) -> Totals:
        """Totals of the first `elapsed` seconds of one cycle."""
        total = Totals()
        for phase in self.phases:
            if elapsed <= 0:
                break
            active = phase.active(min(elapsed, phase.length))
            total += Totals(phase.utilization, phase.power, phase.traffic) * active
            elapsed -= phase.length
        return total

    def phase_at(self, at: float) -> Phase | None:
        """The phase at a moment; None before the start and after the end."""
        if not self.start <= at < self.end:
            return None
        _, elapsed = self._position(at)
        for phase in self.phases:
            if elapsed < phase.length:
                return phase
            elapsed -= phase.length
        # Rounding can put the end of a cycle slightly beyond its last phase.
        return self.phases[-1]


class Use(msgspec.Struct, frozen=True, omit_defaults=True):
    """The memory and load of one process on one GPU, from attaching to detaching."""

    number: int
    """The number among the uses of one process."""
    gpu: int
    """The index within the machine, regardless of the process's own numbering."""
    start: float
    memory: _Bytes = 0
    context: _Bytes = 0
    """Held from attaching to detaching, like a CUDA context."""
    scripts: tuple[Script, ...] = ()
    """In order; each one lasts until the next starts."""
    before: Totals = Totals()
    """The totals of older scripts, which are no longer listed."""
    ended: float | None = None

    def held(self) -> int:
        return 0 if self.ended is not None else self.memory + self.context

    def totals(self, at: float) -> Totals:
        """Running totals since the process attached."""
        until = at if self.ended is None else min(at, self.ended)
        total = self.before
        for script, replaced in self._stretches():
            total += script.totals(min(until, replaced))
        return total

    def phase_at(self, at: float) -> Phase | None:
        """The phase on the GPU at a moment, if any."""
        for script, replaced in self._stretches():
            if script.start <= at < replaced and (self.ended is None or at < self.ended):
                return script.phase_at(at)
        return None

    def _stretches(self) -> list[tuple[Script, float]]:
        replaced = [script.start for script in self.scripts[1:]]
        return list(zip(self.scripts, [*replaced, math.inf], strict=True)) if self.scripts else []

    def with_script(self, script: Script) -> "Use":
        """The use with a new script; scripts older than the history are folded into the totals."""
        kept = [*self.scripts, script]
        before = self.before
        while len(kept) > 1 and kept[1].start < script.start - HISTORY:
            oldest = kept.pop(0)
            before += oldest.totals(kept[0].start)
        return msgspec.structs.replace(self, scripts=tuple(kept), before=before)


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """The load of one process on the machine, identified by pid and start time, never by pid alone."""

    pid: int
    started: int
    uses: tuple[Use, ...] = ()

    def lately(self, now: float) -> "Load":
        """The load without uses that ended before the history."""
        kept = (use for use in self.uses if use.ended is None or 0 <= now - use.ended <= HISTORY)
        return msgspec.structs.replace(self, uses=tuple(kept))

    def with_use(self, use: Use) -> "Load":
        """The load with this use added, or replacing the one with the same number."""
        others = (one for one in self.uses if one.number != use.number)
        return msgspec.structs.replace(self, uses=tuple(sorted((*others, use), key=lambda one: one.number)))
