"""Reads a simulated machine as a driver would let it be read: samples, energy, processes, faults."""

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Final

from stoker.gpus.model import NOT_SUPPORTED, Gpu, Look, Process, Reading, Unknown
from stoker.gpus.processes import ProcessCache
from stoker.gpus.sim.faults import ABSENT, Fault, faulty_gpu, faulty_reading, read_faults
from stoker.gpus.sim.machine import LoadFile, SimMachine
from stoker.gpus.sim.meter import COOL, LIMIT_WATTS, SimMeter, Uses, shares, span_of, utilization, watts

# What the first look speaks for: there is no look before it.
FIRST_SPAN: Final = 1.0
# How soon a look that hangs notices that the fault was cleared.
HANG_POLL: Final = 0.05


def open_source(argument: str, environment: Mapping[str, str] = os.environ) -> "SimulatedSource":
    """The source of `sim:ARGUMENT`."""
    return SimulatedSource(SimMachine.find(argument, environment))


class SimulatedSource:
    """The `Source` of a simulated machine. It changes nothing there: any number of them may look."""

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
        self._people = ProcessCache(machine.root, pids_from="proc")
        self._meters = tuple(SimMeter(self._clock()) for _ in machine.gpus)
        self._looked: float | None = None
        self._living: dict[tuple[int, int], LoadFile] = {}
        """Those of the look before."""

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
        self._people.close()

    def _past_hangs(self) -> tuple[Fault, ...] | Unknown:
        """The faults that are left when those that block a look have let go of this one."""
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
        self._people.refresh()
        broken = next((found.path.name for found in loads if found.alive and found.load is None), None)
        readings = []
        for gpu, meter in zip(self.machine.gpus, self._meters, strict=True):
            here = {key: use for key, use in uses.items() if use.gpu == gpu.index}
            meter.advance(here, now)
            if broken is None:
                readings.append(self._reading(gpu, meter, loads, here, now, span))
            else:
                # Nobody can tell which GPUs its process uses, so none can be called idle.
                readings.append(Reading.unknown(gpu.uuid, f"the simulated load {broken} cannot be read", span=span))
        return readings

    def _uses(self, loads: tuple[LoadFile, ...]) -> Uses:
        """The uses that may have asked something of a GPU since the look before, be they over or not.

        A process that was killed counts for all of the stretch in which it died: when in it, nobody knows.
        One that is stopped does nothing from the look that found it so until the look that finds it running.
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
        )

    def _processes(
        self, gpu: Gpu, loads: tuple[LoadFile, ...], uses: Uses, now: float, span: float
    ) -> tuple[Process, ...]:
        processes = []
        for found in loads:
            present = [use for use in found.present_uses() if use.gpu == gpu.index]
            if present:
                own = {key: use for key, use in uses.items() if key[:2] == found.identity}
                share = utilization(shares(own, now - span, now)).mean
                processes.append(self._people.process(found.identity[0], sum(use.held() for use in present), share))
        return tuple(processes)
