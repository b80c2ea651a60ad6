"""A harmless hang on two GPUs, which compares their counters during work and during the hang.

The ranks run under `stoker run` without rules, so that no process survives.
"""

import contextlib
import os
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from stoker.errors import StokerError
from stoker.gpus.model import Gpu, JobProgress, Look, Maybe, Reading, Unknown, known
from stoker.gpus.prober import Prober
from stoker.presence.ignoring import SHIPPED, is_ignored
from stoker.rules.rule import DEFAULT_BELOW
from stoker.rules.scope import JobScope
from stoker.rules.score import first_stop
from stoker.rules.stalled import StalledPolicy
from stoker.runs.processes.syscalls import set_parent_death_signal

STEPS: Final = 40
RANKS: Final = 2
# Covers loading PyTorch and the first collective.
START_PATIENCE: Final = 180.0
# The time for the command to exit.
GRACE: Final = 5.0
_LONGEST_WORK: Final = 20.0
# An unlisted program's context takes more.
_FREE_MEMORY: Final = 2 * 2**30
_STEP: Final = re.compile(r"step (\d+)/")
_WITH: Final = re.compile(r"with (PyTorch .*)")


class Times(NamedTuple):
    """The durations of the parts in seconds."""

    hang: float

    @property
    def work(self) -> float:
        return min(_LONGEST_WORK, self.hang / 3)

    @property
    def step(self) -> float:
        return self.work / STEPS

    @property
    def every(self) -> float:
        """The interval of looks."""
        return min(1.0, self.work / 8)

    @property
    def limit(self) -> float:
        """The time limit of the command, in case this process dies."""
        return START_PATIENCE + self.work + self.hang + 60.0


class Shown(NamedTuple):
    """The values of one counter of one GPU in one phase."""

    median: float
    lowest: float
    highest: float


class Measured(NamedTuple):
    """One counter by rank."""

    name: str
    unit: str
    working: tuple[Maybe[Shown], ...]
    hung: tuple[Maybe[Shown], ...]


class HangTest(NamedTuple):
    """The result."""

    gpus: tuple[Gpu, ...]
    """In the order of ranks."""
    power_limit: Maybe[float]
    libraries: str
    """`PyTorch 2.9.1, NCCL 2.27.5`; empty for simulated GPUs."""
    looks_working: int
    looks_hung: int
    counters: tuple[Measured, ...]
    is_seen: bool
    """The stalled rule detects the hang with a window of half its duration."""


def free_gpus(look: Look) -> tuple[Gpu, ...]:
    """The unused GPUs, without MIG slices, between which collectives do not work."""
    pairs = zip(look.gpus, look.readings, strict=True)
    return tuple(gpu for gpu, reading in pairs if gpu.parent is None and _is_free(reading))


def _is_free(reading: Reading) -> bool:
    used, processes = reading.utilization, reading.processes
    if not known(used) or used.peak >= DEFAULT_BELOW:
        return False
    if known(processes):
        return all(known(one.name) and is_ignored(SHIPPED, one.name) for one in processes)
    return known(reading.memory_used) and reading.memory_used < _FREE_MEMORY


def run_hang_test(
    prober: Prober,
    gpus: Sequence[Gpu],
    command: Sequence[str],
    environment: Mapping[str, str],
    times: Times,
    user: str,
    report: Callable[[str], None],
) -> HangTest:
    """Runs the command, which prints `step N/…`, and observes the GPUs until it has hung long enough."""
    with _Ranks(command, environment) as ranks:
        report("the ranks start")
        looks: list[Look] = []
        ends: float | None = None
        gives_up = time.monotonic() + START_PATIENCE + times.work
        while ends is None or time.monotonic() < ends:
            time.sleep(times.every)
            look = prober.look()
            looks.append(msgspec.structs.replace(look, job=_progress(look, gpus, ranks)))
            if ranks.ended:
                raise StokerError(f"the ranks ended before they hung: {ranks.last_words}")
            if ends is None and ranks.steps >= STEPS:
                ends = time.monotonic() + times.hang
                report(f"the ranks hang: this takes another {times.hang:.0f} s")
            if ends is None and time.monotonic() > gives_up:
                raise StokerError(f"the ranks did not make {STEPS} steps in time: {ranks.last_words}")
    return _result(gpus, looks, ranks, times, user)


def _progress(look: Look, gpus: Sequence[Gpu], ranks: "_Ranks") -> JobProgress:
    wanted = {gpu.uuid for gpu in gpus}
    pids = {
        process.pid
        for reading in look.readings
        if reading.uuid in wanted and known(reading.processes)
        for process in reading.processes
        if not (known(process.name) and is_ignored(SHIPPED, process.name))
    }
    return JobProgress(ranks.steps, ranks.stepped_at, "call", pids=tuple(sorted(pids)))


class _Ranks:
    """The running command and its output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.steps = 0
        self.began_at: float | None = None
        self.stepped_at: float | None = None
        self.libraries = ""
        self.last_words = "it printed nothing"
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C goes to this process, which then stops the command.
            start_new_session=True,
            preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),  # noqa: PLW1509 - one system call
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if match := _STEP.match(line):
                self.steps, self.stepped_at = int(match[1]), time.monotonic()
                self.began_at = self.began_at or self.stepped_at
            elif match := _WITH.match(line):
                self.libraries = match[1].strip()
            elif line.strip():
                self.last_words = line.strip()

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        # `stoker run` stops its tree itself. If it is stuck, it is killed, and its reaper stops the tree.
        try:
            self._process.wait(GRACE * 2 + 10)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(5.0)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _result(gpus: Sequence[Gpu], looks: Sequence[Look], ranks: _Ranks, times: Times, user: str) -> HangTest:
    began, hung_at = ranks.began_at or 0.0, ranks.stepped_at or 0.0
    # A look covers the time since the previous one, so the first look of each phase covers both.
    working = [look for look in looks if began + times.every < look.at <= hung_at]
    hung = [look for look in looks if look.at > hung_at + 2 * times.every]
    readings = {phase: [_readings(found, gpu) for gpu in gpus] for phase, found in (("w", working), ("h", hung))}
    counters = tuple(
        Measured(
            name,
            unit,
            tuple(_shown(map(value, own)) for own in readings["w"]),
            tuple(_shown(map(value, own)) for own in readings["h"]),
        )
        for name, unit, value in _COUNTERS
    )
    policy = StalledPolicy(every=times.every, window=times.hang / 2)
    chosen = [_narrowed(look, gpus) for look in looks]
    stop = first_stop(chosen, [policy], JobScope({}, user), looks[0].at)
    limits = [reading.power_limit for reading in readings["h"][0]]
    return HangTest(
        tuple(gpus),
        limits[-1] if limits else Unknown("there was no look"),
        ranks.libraries,
        len(working),
        len(hung),
        counters,
        stop.at is not None,
    )


def _narrowed(look: Look, gpus: Sequence[Gpu]) -> Look:
    wanted = {gpu.uuid for gpu in gpus}
    pairs = [pair for pair in zip(look.gpus, look.readings, strict=True) if pair[0].uuid in wanted]
    return msgspec.structs.replace(
        look, gpus=tuple(gpu for gpu, _ in pairs), readings=tuple(reading for _, reading in pairs)
    )


def _readings(looks: Sequence[Look], gpu: Gpu) -> list[Reading]:
    return [reading for look in looks for reading in look.readings if reading.uuid == gpu.uuid]


def _shown(values: Iterable[Maybe[float]]) -> Maybe[Shown]:
    found = list(values)
    numbers = [value for value in found if known(value)]
    if numbers:
        return Shown(statistics.median(numbers), min(numbers), max(numbers))
    return next((value for value in found if isinstance(value, Unknown)), Unknown("there was no look"))


def _pipe(name: str) -> Callable[[Reading], Maybe[float]]:
    return lambda reading: getattr(reading.pipes, name) if known(reading.pipes) else reading.pipes


def _utilization(reading: Reading) -> Maybe[float]:
    return reading.utilization.mean if known(reading.utilization) else reading.utilization


def _memory_activity(reading: Reading) -> Maybe[float]:
    return reading.memory_activity.mean if known(reading.memory_activity) else reading.memory_activity


def _of_processes(field: str) -> Callable[[Reading], Maybe[float]]:
    def value(reading: Reading) -> Maybe[float]:
        if not known(reading.processes):
            return reading.processes
        if not reading.processes:
            return Unknown("no process is listed")
        shares: list[Maybe[float]] = [getattr(process, field) for process in reading.processes]
        return sum(share for share in shares if known(share)) if all(map(known, shares)) else shares[0]

    return value


_COUNTERS: Final[tuple[tuple[str, str, Callable[[Reading], Maybe[float]]], ...]] = (
    ("utilization", "%", _utilization),
    ("memory activity", "%", _memory_activity),
    ("power", "W", lambda reading: reading.power),
    ("SM clock", "MHz", lambda reading: reading.sm_clock),
    ("temperature", "°C", lambda reading: reading.temperature),
    ("SM (GPM)", "%", _pipe("sm")),
    ("tensor (GPM)", "%", _pipe("tensor")),
    ("DRAM (GPM)", "%", _pipe("dram")),
    ("PCIe (GPM)", "MB/s", _pipe("pcie")),
    ("NVLink (GPM)", "MB/s", _pipe("nvlink")),
    ("process: utilization", "%", _of_processes("utilization")),
    ("process: memory activity", "%", _of_processes("memory_activity")),
)
