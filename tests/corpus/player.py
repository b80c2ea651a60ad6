"""Turns a script into looks, as a source and a supervisor would have made them."""

import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from stoker.gpus.model import DeviceHealth, Gpu, JobProgress, Look, Maybe, Pipes, Process, Reading, Unknown, Utilization
from tests.corpus.boards import Board
from tests.corpus.script import Fault, Guest, Load, Script, Segment

GIB: Final = 2**30
# How many samples the driver takes; a watcher empties the buffer before it is full, however seldom it judges.
SAMPLES_PER_SECOND: Final = 6
# Readings that differ only by noise, of which one is taken at each look.
_VARIANTS: Final = 10
_WALL: Final = 1_790_000_000.0
_HEALTHY: Final = DeviceHealth((), 0, False, False)
_NO_PIPES: Final = Unknown("only reported by Hopper and newer GPUs")
_NOT_SUPPORTED: Final = Unknown("not supported by this GPU")
_NOT_FOR_SLICES: Final = Unknown("not supported for MIG devices")
_NO_SHARES: Final = Unknown("the driver does not report it per process")
_ELSEWHERE: Final = Unknown("the process is not in this pid namespace")
_HIDDEN: Final = Unknown("the driver did not allow it: insufficient permissions")
_NO_ENERGY: Final = Unknown("not recorded")
_REASONS: Final = {"idle": ("idle",), "none": ()}


class Moment(NamedTuple):
    """A look, and what was true then, whether or not anybody could see it."""

    look: Look
    step: float | None
    """When the last step was done, on the clock of the look."""
    line: float | None
    """When the last line was printed."""
    collective_since: float | None
    """Since when a collective of PyTorch has been pending."""


class Identity(NamedTuple):
    """Whose trace it is: the pids of the job by GPU, and the clock."""

    pids: tuple[int, ...]
    begun: float


def play(script: Script, identity: Identity, seed: str) -> Iterator[Moment]:
    """The looks of a script in order."""
    return _Player(script, identity, random.Random(seed)).moments()


class _Window(NamedTuple):
    """What lies between two looks."""

    parts: list[tuple[Segment, float]]
    """Segments with the seconds that each of them takes of it."""
    cpu: float
    io: float


class _Player:
    def __init__(self, script: Script, identity: Identity, rng: random.Random) -> None:
        self._script = script
        self._setting = script.setting
        self._identity = identity
        self._random = rng
        self._progress = _Progress(script)
        self._readings = _Readings(script, identity, rng)
        self._gpus = tuple(_gpu(script.setting.board, index) for index in range(script.setting.gpus))
        self._name = {"buffered": "nvml", "momentary": "nvidia-smi", "means": "drm"}[script.setting.sampling]
        self._place = 0
        self._into = 0.0
        """Seconds of the segment at `_place` that are over."""

    def moments(self) -> Iterator[Moment]:
        setting, rng = self._setting, self._random
        end = sum(segment.seconds for segment in self._script.segments)
        before, now = 0.0, rng.uniform(0.2, 1.0)
        while now < end:
            fault = self._fault(now)
            if fault is None or fault.kind != "gap":
                window = self._advance(before, now)
                yield self._moment(before, now, window, fault)
                before = now
            now += setting.every * rng.uniform(0.995, 1.02)

    def _moment(self, before: float, now: float, window: _Window, fault: Fault | None) -> Moment:
        at = self._identity.begun + now
        readings = self._readings.at(before, now, window.parts)
        if not 0.5 < (now - before) / self._setting.every < 1.5:
            # The first look, and one after a gap.
            readings = tuple(msgspec.structs.replace(reading, span=now - before) for reading in readings)
        progress = self._progress
        look = Look(
            self._name,
            at,
            _WALL + at,
            self._gpus,
            readings,
            job=self._job(window),
        )
        shift = self._identity.begun
        return Moment(
            look if fault is None else _failed(look, fault),
            None if progress.step is None else shift + progress.step,
            None if progress.line is None else shift + progress.line,
            None if progress.collective is None else shift + progress.collective,
        )

    def _advance(self, before: float, now: float) -> _Window:
        segments = self._script.segments
        left = now - before
        parts: list[tuple[Segment, float]] = []
        cpu = io = 0.0
        begun = before
        while left > 0 and self._place < len(segments):
            segment = segments[self._place]
            take = min(left, segment.seconds - self._into)
            if take > 0:
                parts.append((segment, take))
                cpu += segment.cpu * take
                io += segment.io * take
            self._into += take
            ends = self._into >= segment.seconds
            self._progress.pass_through(segment, begun, take, ends=ends)
            begun += take
            left -= take
            if ends:
                self._place += 1
                self._into = 0.0
        span = max(now - before, 1e-9)
        return _Window(parts, cpu / span, io / span)

    def _job(self, window: _Window) -> JobProgress:
        """A supervisor always knows which of the listed processes are the job's."""
        listed = self._readings.listed(window.parts[-1][0]) if window.parts else ()
        if not self._setting.seen:
            return JobProgress(pids=listed)
        rng = self._random
        steps, since = self._progress.seen()
        return JobProgress(
            steps,
            None if since is None else self._identity.begun + since,
            self._setting.trust if steps is not None else "none",
            max(window.cpu * rng.uniform(0.9, 1.1), 0.0),
            window.io * rng.uniform(0.6, 1.4),
            listed,
        )

    def _fault(self, now: float) -> Fault | None:
        return next((fault for fault in self._script.faults if fault.begun <= now < fault.ended), None)


class _Progress:
    """Counts steps, lines and checkpoints."""

    def __init__(self, script: Script) -> None:
        self._trust = script.setting.trust
        self._steps = self._lines = self._saves = self._events = 0
        self.step: float | None = None
        self.line: float | None = None
        self._saved: float | None = None
        self._event: float | None = None
        self.collective: float | None = None

    def pass_through(self, segment: Segment, begun: float, seconds: float, *, ends: bool) -> None:
        until = begun + seconds
        self._steps, self.step = _ticks(self._steps, self.step, segment.step_every, begun, until)
        self._lines, self.line = _ticks(self._lines, self.line, segment.line_every, begun, until)
        self._events, self._event = _ticks(self._events, self._event, segment.telemetry_every, begun, until)
        if ends and segment.ends_step:
            self._steps += 1
            self._lines += 1
            self.step = self.line = until
        if ends and segment.saves:
            self._saves += 1
            self._saved = until
        if not segment.collective:
            self.collective = None
        elif self.collective is None:
            self.collective = begun

    def seen(self) -> tuple[int | None, float | None]:
        """The count that this trust is about, and when it last grew. None before the first."""
        if self._trust == "output":
            return (self._lines, self.line) if self._lines else (None, None)
        if self._trust == "checkpoint":
            return (self._saves, self._saved) if self._saves else (None, None)
        if self._trust == "none":
            return None, None
        if self._trust == "events" and self._event is not None:
            return self._steps + self._events, max(self._event, self.step or 0.0)
        return (self._steps, self.step) if self._steps else (None, None)


def _ticks(count: int, last: float | None, every: float, begun: float, until: float) -> tuple[int, float | None]:
    """How often something happened that happens every so often, and when it did last."""
    origin = begun if last is None else max(last, begun - every)
    passed = int((until - origin) / every)
    return (count + passed, origin + passed * every) if passed > 0 else (count, last)


class _Readings:
    """Makes readings, and keeps those that differ only by noise."""

    def __init__(self, script: Script, identity: Identity, rng: random.Random) -> None:
        self._setting = script.setting
        self._guests = script.guests
        self._pids = identity.pids
        self._random = rng
        self._pools: dict[tuple[int, tuple[float, ...]], list[tuple[Reading, ...]]] = {}
        self._kept: list[tuple[Load, ...]] = []
        """So that no identity of loads is used twice."""
        self._listed: dict[int, tuple[int, ...]] = {}
        self._ticks = rng.randint(10_000, 10_000_000)
        self._held: dict[tuple[int, float], int] = {}

    def at(self, before: float, now: float, parts: Sequence[tuple[Segment, float]]) -> tuple[Reading, ...]:
        if self._setting.sampling == "momentary":
            shares = tuple(guest.share_of(now, now) for guest in self._guests)
            return self._variant(parts[-1][0].loads, shares)
        shares = tuple(guest.share_of(before, now) for guest in self._guests)
        loads = parts[0][0].loads
        if len(parts) == 1 or all(segment.loads is loads for segment, _ in parts):
            if all(share in {0.0, 1.0} for share in shares):
                return self._variant(loads, shares)
            return self._make(loads, shares, self._working(now))
        return self._make(_mixed(parts), shares, self._working(now))

    def _working(self, now: float) -> tuple[bool, ...]:
        """Which of the guests work at the moment of the look: one that came and went is not in the list."""
        return tuple(guest.share_of(now, now) > 0 for guest in self._guests)

    def listed(self, segment: Segment) -> tuple[int, ...]:
        """The pids of the job that the driver lists."""
        if self._setting.listing in {"foreign", "hidden"}:
            return ()
        key = id(segment.loads)
        if key not in self._listed:
            self._listed[key] = tuple(
                pid for pid, load in zip(self._pids, segment.loads, strict=False) if load.held > 0
            )
        return self._listed[key]

    def _variant(self, loads: tuple[Load, ...], shares: tuple[float, ...]) -> tuple[Reading, ...]:
        pool = self._pools.get((id(loads), shares))
        if pool is None:
            pool = self._pools[id(loads), shares] = []
            self._kept.append(loads)
        if len(pool) < _VARIANTS:
            pool.append(self._make(loads, shares, [share > 0 for share in shares]))
            return pool[-1]
        return pool[int(self._random.random() * _VARIANTS)]

    def _make(self, loads: Sequence[Load], shares: Sequence[float], working: Sequence[bool]) -> tuple[Reading, ...]:
        return tuple(self._reading(index, load, shares, working) for index, load in enumerate(loads))

    def _reading(self, index: int, load: Load, shares: Sequence[float], working: Sequence[bool]) -> Reading:
        setting, rng, board = self._setting, self._random, self._setting.board
        guests = [(guest, share) for guest, share in zip(self._guests, shares, strict=True) if index in guest.gpus]
        there = {guest.pid for guest, works in zip(self._guests, working, strict=True) if guest.resident or works}
        listed = [(guest, share) for guest, share in guests if guest.pid in there]
        own = _noisy(load.utilization, rng)
        used = own
        watts = load.watts
        memory = load.memory * rng.uniform(0.8, 1.2)
        peak = load.peak
        for guest, share in guests:
            theirs = _noisy(guest.utilization, rng) * share
            used = 1 - (1 - used) * (1 - theirs)
            watts += guest.watts * share * rng.uniform(0.9, 1.1)
            memory = min(memory + guest.memory * share, 1.0)
            if share:
                peak = max(peak, min(1.0, guest.utilization * 1.4 + 0.01))
        held = load.held + sum(guest.held for guest, _ in listed)
        utilization: Maybe[Utilization] = self._utilization(used, max(peak, used))
        power = min(watts * rng.gauss(1.0, 0.015), board.limit * 1.02) if board.limit else watts * rng.gauss(1.0, 0.02)
        pipes = self._pipes(load, guests, used) if board.pipes else _NO_PIPES
        if board.slice:
            utilization = Utilization(used, used, 0) if board.pipes else _NOT_FOR_SLICES
        total = board.memory * GIB
        is_idle = used == 0.0
        return Reading(
            uuid=_uuid(board, index),
            span=setting.every,
            utilization=utilization,
            memory_used=_NOT_SUPPORTED if board.family == "gb10" else int(min(held + 0.5, board.memory) * GIB),
            memory_total=_NOT_SUPPORTED if board.family == "gb10" else total,
            power=_NOT_FOR_SLICES if board.slice else round(max(power, 1.0), 1),
            power_limit=_NOT_FOR_SLICES if board.slice else board.limit or _NOT_SUPPORTED,
            energy=_NO_ENERGY,
            temperature=float(round(30 + 50 * (power / (board.limit or 120)) + rng.uniform(-2, 2))),
            processes=self._processes(index, load, own, listed),
            pipes=pipes,
            memory_activity=self._memory_activity(memory),
            sm_clock=_NOT_FOR_SLICES if board.slice else float(round(self._clock(load, held, is_idle=is_idle))),
            throttling=load.throttling or _REASONS["idle" if is_idle else "none"],
            health=_NOT_SUPPORTED if board.vendor != "nvidia" else _HEALTHY,
        )

    def _clock(self, load: Load, held: float, *, is_idle: bool) -> float:
        low, high = self._setting.board.clocks
        if "hardware thermal" in load.throttling or "power cap" in load.throttling:
            return high * self._random.uniform(0.55, 0.8)
        if is_idle and (held == 0 or self._setting.board.family in {"geforce", "turing"}):
            return low
        return high * self._random.uniform(0.97, 1.0)

    def _utilization(self, mean: float, peak: float) -> Utilization:
        sampling = self._setting.sampling
        if sampling == "momentary":
            seen = round(mean if mean in {0.0, 1.0} else min(max(self._random.gauss(mean, 0.4 * mean), 0.0), 1.0), 2)
            return Utilization(seen, seen, 1)
        if sampling == "means":
            return Utilization(mean, mean, 0)
        samples = int(SAMPLES_PER_SECOND * self._setting.every)
        top = max(round(peak, 2), 0.01) if mean else 0.0
        return Utilization(max(top, mean), mean, samples)

    def _memory_activity(self, memory: float) -> Maybe[Utilization]:
        board, sampling = self._setting.board, self._setting.sampling
        if board.slice:
            return _NOT_FOR_SLICES
        if board.memory_counter == "absent":
            return _NOT_SUPPORTED
        if board.memory_counter == "stuck":
            memory = 0.0
        if sampling != "buffered":
            seen = round(min(memory, 1.0), 2)
            return Utilization(seen, seen, 1)
        samples = int(SAMPLES_PER_SECOND * self._setting.every)
        if memory < 0.005:
            # Whole percents: what is less than half of one shows as a sample of 1 % now and then.
            peak = 0.01 if self._random.random() < memory * 100 else 0.0
            return Utilization(peak, peak / samples, samples)
        return Utilization(min(round(memory * 1.15 + 0.005, 2), 1.0), min(memory, 1.0), samples)

    def _pipes(self, load: Load, guests: Sequence[tuple[Guest, float]], used: float) -> Pipes:
        rng = self._random
        extra = sum(guest.utilization * share for guest, share in guests)
        moved = sum(guest.memory * share for guest, share in guests)
        noise = rng.uniform(0.9, 1.1)
        return Pipes(
            used,
            min(load.sm * noise + extra * 0.4, 1.0),
            min(load.tensor * noise + extra * 0.1, 1.0),
            min(load.dram * noise + moved, 1.0),
            load.link * 0.2 * noise,
            load.link * 0.8 * noise,
        )

    def _processes(
        self, index: int, load: Load, own: float, guests: Sequence[tuple[Guest, float]]
    ) -> Maybe[tuple[Process, ...]]:
        listing = self._setting.listing
        if listing == "hidden":
            return _HIDDEN
        found = []
        if load.held > 0 and index < len(self._pids):
            found.append(self._process(self._pids[index], "python", self._setting.user, load.held, own, load.memory))
        for guest, share in guests if listing != "own" else ():
            busy, moved = guest.utilization * share, guest.memory * share
            found.append(self._process(guest.pid, guest.name, guest.user, guest.held, busy, moved))
        return tuple(found)

    def _process(self, pid: int, name: str, user: str, held: float, used: float, moved: float) -> Process:
        listing, board = self._setting.listing, self._setting.board
        shares = listing in {"shares", "own"} and not board.slice
        utilization: Maybe[float] = round(used, 2) if shares else _NO_SHARES
        memory: Maybe[float] = round(moved, 2) if shares and board.memory_counter == "alive" else _NO_SHARES
        if listing == "foreign":
            return Process(pid, _ELSEWHERE, _ELSEWHERE, _ELSEWHERE, int(held * GIB), _NO_SHARES, _NO_SHARES)
        return Process(pid, self._ticks + pid, name, user, int(held * GIB), utilization, memory)


def _noisy(mean: float, rng: random.Random) -> float:
    """What one look shows of a steady level. 0 and 100 % stay what they are."""
    if mean <= 0.0 or mean >= 0.999:
        return max(min(mean, 1.0), 0.0)
    return min(max(rng.gauss(mean, 0.25 * mean * (1 - mean) + 0.002), 0.001), 1.0)


def _mixed(parts: Sequence[tuple[Segment, float]]) -> list[Load]:
    """The loads of several segments between two looks as one."""
    span = sum(seconds for _, seconds in parts)
    mixed = []
    for index in range(len(parts[0][0].loads)):
        loads = [(segment.loads[index], seconds / span) for segment, seconds in parts]
        last = loads[-1][0]
        mixed.append(
            Load(
                sum(load.utilization * share for load, share in loads),
                max(load.peak for load, _ in loads),
                sum(load.watts * share for load, share in loads),
                sum(load.memory * share for load, share in loads),
                sum(load.sm * share for load, share in loads),
                sum(load.tensor * share for load, share in loads),
                sum(load.dram * share for load, share in loads),
                sum(load.link * share for load, share in loads),
                last.held,
                last.throttling,
            )
        )
    return mixed


def _failed(look: Look, fault: Fault) -> Look:
    why = Unknown(fault.reason)
    if fault.kind == "absent":
        return Look(look.source, look.at, look.wall, (), (), why, job=look.job)
    if fault.kind == "look":
        readings = tuple(Reading.unknown(gpu.uuid, fault.reason) for gpu in look.gpus)
        return Look(look.source, look.at, look.wall, look.gpus, readings, why, job=look.job)
    if fault.kind == "gone":
        kept = [place for place in range(len(look.gpus)) if place != fault.gpu]
        gpus = tuple(look.gpus[place] for place in kept)
        return Look(look.source, look.at, look.wall, gpus, tuple(look.readings[place] for place in kept), job=look.job)
    if fault.kind == "clock":
        return msgspec.structs.replace(look, wall=look.wall - 86_400)
    lost = Reading.unknown(look.gpus[fault.gpu].uuid, fault.reason, span=look.readings[fault.gpu].span)
    readings = tuple(lost if place == fault.gpu else reading for place, reading in enumerate(look.readings))
    return Look(look.source, look.at, look.wall, look.gpus, readings, job=look.job)


def _uuid(board: Board, index: int) -> str:
    return f"{'MIG' if board.slice else 'GPU'}-{index:08d}-{board.family}"


def _gpu(board: Board, index: int) -> Gpu:
    parent = f"GPU-{index:08d}-parent" if board.slice else None
    bus = f"0000:{index + 0x11:02x}:00.0"
    return Gpu(_uuid(board, index), index, board.name, board.vendor, index, board.memory * GIB, bus, parent)
