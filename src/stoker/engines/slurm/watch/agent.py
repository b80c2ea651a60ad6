"""The agent in a step beside a job, one per node: looks at the job's GPUs and prints reports.

`srun … python -m stoker.engines.slurm.watch.agent EVERY`. It exits when its input closes, when nobody reads its output,
or when it gets no input for minutes, so that a dead watcher leaves nothing behind in users' jobs.
"""

import os
import select
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from stoker.engines.slurm.step import frames
from stoker.gpus.model import JobProgress, Look, Unknown, known
from stoker.gpus.prober import Prober, Sampler
from stoker.gpus.source import AbsentError
from stoker.gpus.visible import visible_gpus
from stoker.presence.ignoring import SHIPPED, is_ignored
from stoker.procfs import Identity, identify
from stoker.runs.processes.usage import UsageMeter
from stoker.units import parse_positive_duration

# The watcher writes a line every half minute.
LONELY_AFTER: Final = 600.0
_LOWEST_PRIORITY: Final = 19


class Report(msgspec.Struct, frozen=True, array_like=True):
    """One node's view of the job."""

    node: str
    look: Look
    supervised: bool = False
    """A `stoker run` already watches the job."""


class JobProcesses:
    """Finds the processes of a Slurm job on this node, outside this step, by their environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Two clusters may share a machine and use the same job ids.
        names = ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME")
        self._job = {f"{name}={environment[name]}".encode() for name in names if name in environment}
        self._step = f"SLURM_STEP_ID={environment.get('SLURM_STEP_ID', '')}".encode()
        self._known: dict[Identity, tuple[bool, bool]] = {}
        """For each process, whether it belongs to the job, and whether a `stoker run` watches it."""

    def scan(self) -> tuple[set[Identity], bool]:
        """The live processes of the job, and whether a `stoker run` watches one of them."""
        user = os.geteuid()
        seen: dict[Identity, tuple[bool, bool]] = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            try:
                if user not in (0, entry.stat().st_uid):
                    continue
                who = identify(int(entry.name))
                if who is not None:
                    seen[who] = self._known.get(who) or self._read(entry.path)
            except OSError:
                continue
        self._known = seen
        members = {who for who, (belongs, _supervised) in seen.items() if belongs}
        return members, any(supervised for _belongs, supervised in seen.values())

    def _read(self, directory: str) -> tuple[bool, bool]:
        variables = (Path(directory) / "environ").read_bytes().split(b"\0")
        belongs = bool(self._job) and self._job.issubset(variables) and self._step not in variables
        return belongs, belongs and any(variable.startswith(b"STOKER_RUN=") for variable in variables)


class Agent:
    """Sends a report per look, until the watcher is gone."""

    def __init__(self, every: float, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._node = environment.get("SLURMD_NODENAME", "")
        deadline = parse_positive_duration(environment.get("STOKER_DEADLINE") or "5s")
        self._prober = Prober(environment.get("STOKER_GPUS") or "auto", deadline=deadline)
        self._sampler = Sampler(self._prober, every)
        self._processes = JobProcesses(environment)
        self._meter = UsageMeter()
        self._heard = time.monotonic()

    def run(self) -> None:
        try:
            while self._wait():
                look = self._step()
                if look is not None:
                    self._send(look)
        finally:
            self._prober.leave()

    def _wait(self) -> bool:
        """Waits for the next look; False if the agent must exit."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        if self._sampler.fileno() >= 0:
            poll.register(self._sampler.fileno(), select.POLLIN)
        wait = max(min(self._sampler.due(), self._heard + LONELY_AFTER) - time.monotonic(), 0.0)
        for descriptor, _event in poll.poll(wait * 1000 + 1):
            if descriptor == 0:
                if not os.read(0, 4096):
                    return False
                self._heard = time.monotonic()
        return time.monotonic() < self._heard + LONELY_AFTER

    def _step(self) -> Look | None:
        try:
            return self._sampler.step()
        except AbsentError as absent:
            return Look(self._prober.spec, time.monotonic(), time.time(), (), (), problem=Unknown(str(absent)))

    def _send(self, look: Look) -> None:
        own = {gpu.uuid for gpu in visible_gpus(look.gpus, self._environment)}
        readings = tuple(reading for reading in look.readings if reading.uuid in own)
        members, supervised = self._processes.scan()
        usage = self._meter.measure(look.at, members)
        pids = {
            process.pid
            for reading in readings
            if known(reading.processes)
            for process in reading.processes
            if process.is_identified and not (known(process.name) and is_ignored(SHIPPED, process.name))
        }
        seen = msgspec.structs.replace(
            look,
            gpus=tuple(gpu for gpu in look.gpus if gpu.uuid in own),
            readings=readings,
            job=JobProgress(cpu=usage.cpu, io=usage.io, pids=tuple(sorted(pids))),
        )
        for line in frames(self._node, msgspec.json.encode(Report(self._node, seen, supervised))):
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def main() -> None:
    os.nice(_LOWEST_PRIORITY)
    try:
        Agent(float(sys.argv[1]), os.environ).run()
    except BrokenPipeError:
        os._exit(0)  # nobody reads the rest of the buffer


if __name__ == "__main__":
    main()
