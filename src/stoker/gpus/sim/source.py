"""Reads a simulated machine as through a driver: samples, energy, processes, faults."""

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from stoker.gpus.model import (
    NOT_SUPPORTED,
    DeviceHealth,
    Gpu,
    Look,
    Process,
    Reading,
    Unknown,
    Utilization,
)
from stoker.gpus.processes import ProcessCache
from stoker.gpus.sim.faults import ABSENT, Fault, faulty_gpu, faulty_reading, read_faults
from stoker.gpus.sim.load import Totals, Use
from stoker.gpus.sim.machine import LoadFile, SimMachine

# NVIDIA's driver keeps a hundred samples of utilization, about six per second.
SAMPLE: Final = 1 / 6
MOST_SAMPLES: Final = 100
LONGEST_SPAN: Final = MOST_SAMPLES * SAMPLE
# The power of a mid-sized board when idle, and its limit.
IDLE_WATTS: Final = 20.0
LIMIT_WATTS: Final = 350.0
# Its SM clock when idle and at work; an idle board drops to the first within a second.
IDLE_MHZ: Final = 210.0
BOOST_MHZ: Final = 1740.0
HEALTHY: Final = DeviceHealth((), uncorrected=0, needs_reset=False, remapping_failed=False)
# Its temperatures, and the seconds for most of a change, as with air cooling.
COOL: Final = 30.0
HOT: Final = 80.0
WARMING: Final = 45.0

UseKey = tuple[int, int, int]
"""Pid, start time and number of the use."""
Uses = Mapping[UseKey, Use]


def span_of(since: float, now: float) -> float:
    """The seconds that the samples since the previous look cover; older ones are overwritten."""
    return min(max(0.0, now - since), LONGEST_SPAN)


def shares(uses: Uses, start: float, end: float) -> list[Totals]:
    """The used share of the GPU per sample, at most 1 for all processes together."""
    length = end - start
    if length <= 0:
        start, length = end - SAMPLE, SAMPLE
    count = max(1, min(MOST_SAMPLES, round(length / SAMPLE)))
    edges = [start + length * number / count for number in range(count)] + [end]
    samples = [Totals()] * count
    for use in uses.values():
        totals = [use.totals(edge) for edge in edges]
        samples = [
            sample + (after - before) for sample, before, after in zip(samples, totals[:-1], totals[1:], strict=True)
        ]
    width = length / count
    return [
        Totals(_share(sample.work / width), _share(sample.effort / width), _share(sample.traffic / width))
        for sample in samples
    ]


def _share(value: float) -> float:
    # Differences of long totals carry noise in the last digits, which no driver would show.
    return round(min(1.0, max(0.0, value)), 6)


def utilization(samples: list[Totals]) -> Utilization:
    return _summary([sample.work for sample in samples])


def memory_activity(samples: list[Totals]) -> Utilization:
    return _summary([sample.traffic for sample in samples])


def _summary(values: list[float]) -> Utilization:
    return Utilization(max(values), round(math.fsum(values) / len(values), 6), len(values))


def watts(samples: list[Totals]) -> float:
    """The mean power over the samples."""
    return IDLE_WATTS + (LIMIT_WATTS - IDLE_WATTS) * _mean_effort(samples)


def _mean_effort(samples: list[Totals]) -> float:
    return math.fsum(sample.effort for sample in samples) / len(samples)


class SimMeter:
    """The energy counter and the thermometer of one GPU, which continue between looks."""

    def __init__(self, opened: float) -> None:
        self.joules = 0.0
        self.celsius: float | None = None
        """None before the first look."""
        self._at = opened
        self._totals: dict[UseKey, Totals] = {}

    def advance(self, uses: Uses, now: float) -> None:
        """Advances both to now, by the use since the last call."""
        elapsed = now - self._at
        if elapsed > 0:
            recent = span_of(self._at, now)
            effort = recent * _mean_effort(shares(uses, now - recent, now))
            if elapsed > recent:
                effort += self._effort_until(uses, now - recent)
            self.joules += IDLE_WATTS * elapsed + (LIMIT_WATTS - IDLE_WATTS) * effort
            self._warm(effort / elapsed, elapsed)
        self._at = now
        self._totals = {key: use.totals(now) for key, use in uses.items()}

    def _effort_until(self, uses: Uses, end: float) -> float:
        """The effort from the last call until `end`, which totals cover beyond the samples."""
        effort = 0.0
        for key, use in uses.items():
            begun = Totals() if use.start >= self._at else self._totals.get(key) or use.totals(self._at)
            effort += (use.totals(end) - begun).effort
        return min(max(0.0, effort), end - self._at)

    def _warm(self, effort: float, elapsed: float) -> None:
        goal = COOL + (HOT - COOL) * effort
        if self.celsius is None:
            self.celsius = goal
        else:
            self.celsius = goal + (self.celsius - goal) * math.exp(-elapsed / WARMING)


# The span of the first look, which has no previous one.
FIRST_SPAN: Final = 1.0
# The delay until a hanging look notices that the fault was cleared.
HANG_POLL: Final = 0.05


def open_source(
    root: Path,  # noqa: ARG001 - the signature of a source's factory
    argument: str,
    environment: Mapping[str, str] = os.environ,
) -> "SimulatedSource":
    """Opens the source of `sim:ARGUMENT`."""
    return SimulatedSource(SimMachine.find(argument, environment))


class SimulatedSource:
    """The `Source` of a simulated machine, which it does not change."""

    name = "sim"

    def __init__(
        self,
        machine: SimMachine,
        *,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.machine = machine
        self._clock = machine.clock
        self._wall = wall
        self._sleep = sleep
        self._process_cache = ProcessCache(machine.root, pids_from="proc")
        self._meters = tuple(SimMeter(self._clock()) for _ in machine.gpus)
        self._looked: float | None = None
        self._living: dict[tuple[int, int], LoadFile] = {}
        """The live loads at the previous look."""

    def look(self) -> Look:
        faults = self._past_hangs()
        now = self._clock()
        if isinstance(faults, Unknown):
            return self._failed(now, faults.reason)
        if any(fault.kind == "absent" for fault in faults):
            return self._failed(now, ABSENT)
        try:
            loads = self.machine.loads()
        except OSError as error:
            return self._failed(now, f"{self.machine.loads_directory} cannot be read: {error.strerror}")
        readings = self._readings(loads, now)
        return Look(
            self.name,
            now,
            self._wall(),
            tuple(faulty_gpu(gpu, faults) for gpu in self.machine.gpus),
            tuple(faulty_reading(gpu, one, faults) for gpu, one in zip(self.machine.gpus, readings, strict=True)),
        )

    def close(self) -> None:
        self._process_cache.close()

    def _past_hangs(self) -> tuple[Fault, ...] | Unknown:
        """Blocks while a fault makes looks hang, and returns the other faults."""
        began = self._clock()
        while True:
            now = self._clock()
            faults = read_faults(self.machine, now)
            if isinstance(faults, Unknown):
                return faults
            ends = [
                math.inf if fault.seconds is None else began + fault.seconds for fault in faults if fault.kind == "hang"
            ]
            left = max(ends, default=now) - now
            if left <= 0:
                return faults
            self._sleep(min(left, HANG_POLL))

    def _failed(self, now: float, reason: str) -> Look:
        return Look(self.name, now, self._wall(), (), (), problem=Unknown(reason))

    def _readings(self, loads: tuple[LoadFile, ...], now: float) -> list[Reading]:
        since = now - FIRST_SPAN if self._looked is None else self._looked
        span = span_of(since, now)
        uses = self._uses(loads)
        self._looked = now
        self._living = {found.identity: found for found in loads if found.alive}
        self._process_cache.refresh()
        broken = next((found.path.name for found in loads if found.alive and found.load is None), None)
        readings = []
        for gpu, meter in zip(self.machine.gpus, self._meters, strict=True):
            here = {key: use for key, use in uses.items() if use.gpu == gpu.index}
            meter.advance(here, now)
            if broken is None:
                readings.append(self._reading(gpu, meter, loads, here, now, span))
            else:
                # The GPUs of this process are unknown, so none can be called idle.
                readings.append(Reading.unknown(gpu.uuid, f"the simulated load {broken} cannot be read", span=span))
        return readings

    def _uses(self, loads: tuple[LoadFile, ...]) -> Uses:
        """The uses that may have used a GPU since the previous look, including ended ones.

        A killed process counts for the whole span in which it died, since the moment is unknown. A suspended process
        does nothing from the look that finds it suspended until the look that finds it running.
        """
        known = self._living | {found.identity: found for found in loads}
        uses = {}
        for identity, found in known.items():
            before = self._living.get(identity)
            if found.stopped and before is not None and before.stopped:
                continue
            for use in found.load.uses if found.load else ():
                if found.alive or before is not None or use.ended is not None:
                    uses[*identity, use.number] = use
        return uses

    def _reading(
        self, gpu: Gpu, meter: SimMeter, loads: tuple[LoadFile, ...], uses: Uses, now: float, span: float
    ) -> Reading:
        samples = shares(uses, now - span, now)
        total = self.machine.shape.memory
        resting = samples[-1].work == 0
        return Reading(
            uuid=gpu.uuid,
            span=span,
            utilization=utilization(samples),
            memory_used=min(self.machine.held(gpu.index, loads), total),
            memory_total=total,
            power=round(watts(samples), 3),
            power_limit=LIMIT_WATTS,
            energy=round(meter.joules, 3),
            temperature=float(round(COOL if meter.celsius is None else meter.celsius)),
            processes=self._processes(gpu, loads, uses, now, span),
            pipes=Unknown(NOT_SUPPORTED),
            memory_activity=memory_activity(samples),
            sm_clock=IDLE_MHZ if resting else BOOST_MHZ,
            throttling=("idle",) if resting else (),
            health=HEALTHY,
        )

    def _processes(
        self, gpu: Gpu, loads: tuple[LoadFile, ...], uses: Uses, now: float, span: float
    ) -> tuple[Process, ...]:
        processes = []
        for found in loads:
            present = [use for use in found.present_uses() if use.gpu == gpu.index]
            if present:
                own = {key: use for key, use in uses.items() if key[:2] == found.identity}
                samples = shares(own, now - span, now)
                processes.append(
                    self._process_cache.process(
                        found.identity[0],
                        sum(use.held() for use in present),
                        utilization(samples).mean,
                        memory_activity(samples).mean,
                    )
                )
        return tuple(processes)
