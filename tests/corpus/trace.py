"""Labelled traces by class: what each is, where it was reported, and from when on a stop would be right."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, Literal, NamedTuple

from stoker.gpus.model import Look, Trust
from tests.corpus.boards import WHOLE, Board
from tests.corpus.player import Identity, Moment, play
from tests.corpus.script import Draw, Listing, Sampling, Script, Setting

Label = Literal["healthy", "idle", "stalled", "unknown"]
Half = Literal["tuning", "held-out"]
LABELS: Final[tuple[Label, ...]] = ("healthy", "idle", "stalled", "unknown")
HALVES: Final[tuple[Half, ...]] = ("tuning", "held-out")
SEED: Final = 14


class TraceClass(NamedTuple):
    """Traces that differ only by chance."""

    name: str
    label: Label
    words: str
    """What happens, in a sentence."""
    source: str
    """Where such a case was reported; `common` for what every operator knows."""
    build: Callable[[Draw], Script]
    traces: int


class Trace:
    """One job on one machine, seen for some hours. Looks are made when they are asked for, always the same."""

    def __init__(self, of: TraceClass, number: int, seed: int) -> None:
        self.of = of
        self.id = f"{of.name}/{number:02d}"
        self.half: Half = "tuning"
        """Rules may be tuned on this half; the other one only measures them."""
        self._seed = f"{seed}:{self.id}"

    @cached_property
    def script(self) -> Script:
        return self.of.build(Draw(self._seed))

    @cached_property
    def _identity(self) -> Identity:
        draw = Draw(f"{self._seed}:identity")
        first = draw.pid()
        # Ranks are forked one after the other by a launcher, which holds no GPU itself.
        return Identity(
            tuple(first + rank * draw.count(1, 3) for rank in range(1, self.setting.used + 1)), draw.between(500, 4e6)
        )

    @property
    def label(self) -> Label:
        return self.of.label

    @property
    def setting(self) -> Setting:
        return self.script.setting

    @property
    def board(self) -> Board:
        return self.setting.board

    @property
    def user(self) -> str:
        return self.setting.user

    @property
    def pids(self) -> frozenset[int]:
        """The job's processes. In a container, where the driver's pids mean nothing, none of them is listed."""
        return frozenset(self._identity.pids)

    @property
    def begun(self) -> float:
        """When the job was started, on the clock of its looks."""
        return self._identity.begun

    @property
    def ended(self) -> float:
        return self.begun + self.script.now

    @property
    def from_when(self) -> float | None:
        """The moment from which a stop is right. None: it never is."""
        since = self.script.from_when
        return None if since is None or self.label in {"healthy", "unknown"} else self.begun + since

    def moments(self) -> Iterator[Moment]:
        """The looks, and what was true then."""
        return play(self.script, self._identity, f"{self._seed}:looks")

    def looks(self) -> Iterator[Look]:
        return (moment.look for moment in self.moments())


_CLASSES: Final[dict[str, TraceClass]] = {}


def trace_class(
    label: Label, words: str, source: str, count: int
) -> Callable[[Callable[[Draw], Script]], Callable[[Draw], Script]]:
    """Registers a function that writes the script of a trace; its name is the name of the class."""

    def register(build: Callable[[Draw], Script]) -> Callable[[Draw], Script]:
        name = build.__name__.replace("_", "-")
        _CLASSES[name] = TraceClass(name, label, words, source, build, count)
        return build

    return register


def trace_classes() -> tuple[TraceClass, ...]:
    return tuple(_CLASSES.values())


def corpus(seed: int = SEED) -> tuple[Trace, ...]:
    """All traces. Every class has as many in one half as in the other, at most one more."""
    found: list[Trace] = []
    for of in _CLASSES.values():
        traces = [Trace(of, number, seed) for number in range(of.traces)]
        by_hash = sorted(traces, key=lambda trace: hashlib.sha256(trace.id.encode()).digest())
        for place, trace in enumerate(by_hash):
            trace.half = HALVES[place % 2]
        found += traces
    return tuple(found)


_EVERY: Final[dict[Sampling, tuple[float, ...]]] = {
    "buffered": (5.0, 10.0, 15.0, 30.0, 30.0, 30.0),
    "momentary": (15.0, 30.0, 60.0, 60.0),
    "means": (20.0, 30.0, 60.0),
}
_SAMPLINGS: Final[tuple[Sampling, ...]] = (*(("buffered",) * 7), "momentary", "momentary", "means")
_LISTINGS: Final[tuple[Listing, ...]] = (*(("shares",) * 7), "no shares", "no shares", "foreign")
STEPS: Final[tuple[Trust, ...]] = ("call", "log", "log", "log", "events")
"""Where steps are seen; most people have a log."""
ANY_TRUST: Final[tuple[Trust, ...]] = (*STEPS, "log", "checkpoint", "output", "none")


def setting(
    draw: Draw,
    boards: Sequence[Board] = WHOLE,
    *,
    gpus: Sequence[int] = (1, 1, 2, 4, 8),
    spare: Sequence[int] = (0, 0, 0, 1, 2),
    trusts: Sequence[Trust] = ANY_TRUST,
    samplings: Sequence[Sampling] = _SAMPLINGS,
    listings: Sequence[Listing] = _LISTINGS,
    every: float | None = None,
    seen: bool = True,
) -> Setting:
    """Draws a machine. `gpus`: how many the job may use; `spare`: how many others the machine may have."""
    board = draw.one_of(boards)
    used = draw.one_of(gpus)
    sampling = draw.one_of(samplings)
    if board.slice or board.vendor != "nvidia":
        sampling = "means"
    if board.family == "gb10":
        used = min(used, 1)
    more = 0 if board.family == "gb10" else draw.one_of(spare)
    apart = draw.one_of(_EVERY[sampling]) if every is None else every
    if used + more > 2:
        apart = max(apart, 30.0)
    if used + more > 4:
        apart = max(apart, 60.0)
    return Setting(board, used + more, used, apart, sampling, draw.one_of(listings), draw.one_of(trusts), seen)
