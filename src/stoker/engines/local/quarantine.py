"""GPUs out of rotation: those with a fault that needs a reset, and those on which jobs fail.

Pure: no clock and no I/O. A GPU comes back when a person releases it or the machine reboots. A driver that stops
reporting the fault proves nothing.
"""

import re
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

import msgspec

from stoker.gpus.faults import last_known, new_faults, standing_faults
from stoker.gpus.model import DeviceHealth, Gpu, Look, Unknown, known
from stoker.gpus.quarantine import Entries, QuarantinedGpu

# A program that cannot use its GPU fails while it loads its model.
RIGHT_AFTER_START: Final = 60.0
# Failures further apart are unrelated.
_TOGETHER_WITHIN: Final = 3600.0
_FAILED_JOBS: Final = "jobs failed on it"
# A job that meets faults again and again may cause them, and must not take down one GPU after another.
MOST_EXCUSES: Final = 2
# Exit codes of a wrong command.
_WRONG_COMMAND: Final = frozenset({2, 126, 127})
# Messages of drivers and frameworks about a bad GPU.
_GPU_ERROR: Final = re.compile(
    r"(?:CUDA|HIP) error: [^\n]{1,80}"
    r"|(?:cuda|hip)Error[A-Z]\w+"
    r"|uncorrectable (?:ECC|NVLink) error"
    r"|GPU has fallen off the bus"
    r"|GPU is lost"
    r"|no (?:CUDA|ROCm)-capable device"
    r"|CUDA-capable device\(s\) is/are busy or unavailable"
    r"|Unable to determine the device handle",
    re.IGNORECASE,
)
# Errors that programs cause on healthy GPUs, as message text and as error name.
_PROGRAM_ERROR: Final = re.compile(
    r"out of memory|memory ?allocation|illegal ?(?:memory )?(?:access|address)|assert|no kernel image|NoKernelImage"
    r"|invalid|unsupported|insufficient|not supported|not permitted|misaligned|peer access"
    r"|launch out of resources|too many resources",
    re.IGNORECASE,
)


class JobEnd(NamedTuple):
    """The end of a job, as evidence about its GPUs."""

    job: str
    program: str
    """User and program. Jobs with the same value may fail for the same reason."""
    gpus: tuple[str, ...]
    """Uuids."""
    at: float
    """On the clock of the looks."""
    lasted: float
    failed: bool
    """The command itself failed: it was not stopped, cancelled, preempted or lost."""
    exit_code: int | None = None
    output: str = ""
    """The end of its output."""


class _StartFailure(NamedTuple):
    end: JobEnd
    suspects: frozenset[str]
    """Its GPUs on which no job has succeeded since."""


class Quarantine:
    """Maintains the GPUs out of rotation, from looks and ends of jobs."""

    def __init__(self, boot: str) -> None:
        self._boot = boot
        self._entries: dict[str, QuarantinedGpu] = {}
        self._health: dict[str, DeviceHealth] = {}
        self._gpus: dict[str, Gpu] = {}
        self._faulted: dict[str, float] = {}
        """When each GPU last showed a fault, on the clock of the looks."""
        self._failures: list[_StartFailure] = []
        self._excused: dict[str, int] = {}
        """The number of excuses per job."""
        self.unwritten: dict[str, QuarantinedGpu | None] = {}
        """Changes that the file lacks; None removes an entry."""

    @property
    def out_of_rotation(self) -> dict[str, QuarantinedGpu]:
        """By uuid."""
        return {uuid: entry for uuid, entry in self._entries.items() if not entry.released}

    def load(self, entries: Entries, at: float, wall: float) -> None:
        """Loads the file's entries: people and other workers may have changed them."""
        for uuid, entry in entries.items():
            if uuid not in self._faulted and entry.faults:
                # An earlier worker has seen this fault.
                self._faulted[uuid] = at - max(0.0, wall - entry.since)
        self._entries = changed(entries, self.unwritten)

    # Readings

    def observe(self, look: Look) -> None:
        """Processes a look. Unknown values change nothing."""
        for gpu, reading in zip(look.gpus, look.readings, strict=True):
            self._gpus[gpu.uuid] = gpu
            if known(reading.health):
                self._observe(gpu.uuid, reading.health, look)

    def _observe(self, uuid: str, health: DeviceHealth, look: Look) -> None:
        before, entry = self._health.get(uuid), self._entries.get(uuid)
        self._health[uuid] = health if before is None else last_known(before, health)
        standing = standing_faults(health)
        accepted = () if entry is None else entry.faults
        fresh = () if before is None else new_faults(before, health)
        found = tuple(dict.fromkeys((*fresh, *(fault for fault in standing if fault not in accepted))))
        if found:
            self._faulted[uuid] = look.at
            if entry is None or entry.released:
                self._take_out(uuid, " and ".join(found), tuple(dict.fromkeys((*found, *standing))), look.wall)
            elif not set(found) <= set(accepted):
                faults = tuple(dict.fromkeys((*accepted, *found)))
                self._set(uuid, msgspec.structs.replace(entry, faults=faults))
        elif entry is not None and entry.released:
            self._forget_accepted(uuid, entry, health, standing)

    def _forget_accepted(
        self, uuid: str, entry: QuarantinedGpu, health: DeviceHealth, standing: tuple[str, ...]
    ) -> None:
        """Drops accepted faults that a reset has cleared, so that they count again."""
        if any(isinstance(value, Unknown) for value in health[1:]):
            return
        left = tuple(fault for fault in entry.faults if fault in standing)
        if not left:
            self._set(uuid, None)
        elif left != entry.faults:
            self._set(uuid, msgspec.structs.replace(entry, faults=left))

    def _take_out(self, uuid: str, reason: str, faults: tuple[str, ...], wall: float) -> None:
        index = self._gpus[uuid].index if uuid in self._gpus else -1
        entry = QuarantinedGpu(index=index, reason=reason, since=wall, boot=self._boot, faults=faults)
        self._set(uuid, entry)

    def _set(self, uuid: str, entry: QuarantinedGpu | None) -> None:
        self.unwritten[uuid] = entry
        self._entries = changed(self._entries, {uuid: entry})

    # Jobs

    def job_ended(self, end: JobEnd, wall: float) -> None:
        """Processes the end of a job. A GPU on which different programs fail right after the start is taken out.

        Failures of a single program prove nothing, nor do failures of different programs on different GPUs: then the
        driver, the container or a library is at fault. So this takes out at most one GPU of a machine.
        """
        if not end.gpus:
            return
        error = gpu_error(end)
        if error is None:
            if end.exit_code == 0 or (end.failed and end.lasted > RIGHT_AFTER_START):
                self._clear(end.gpus)
            return
        recent = [one for one in self._failures if end.at - one.end.at <= _TOGETHER_WITHIN]
        self._failures = [*recent, _StartFailure(end, frozenset(end.gpus))]
        suspects = frozenset.intersection(*(one.suspects for one in self._failures))
        other = next((one.end for one in self._failures if one.end.program != end.program), None)
        is_other_out = any(_FAILED_JOBS in entry.faults for entry in self.out_of_rotation.values())
        if other is None or len(suspects) != 1 or is_other_out:
            return
        (uuid,) = suspects
        self._failures = []
        self._faulted[uuid] = end.at
        if uuid not in self.out_of_rotation:
            reason = f"jobs {other.job} and {end.job} failed on it right after their start: {error}"
            self._take_out(uuid, reason, (_FAILED_JOBS,), wall)

    def _clear(self, gpus: Collection[str]) -> None:
        """Clears GPUs on which a job ran well."""
        left = [one._replace(suspects=one.suspects.difference(gpus)) for one in self._failures]
        self._failures = [one for one in left if one.suspects]

    def failed_during(self, gpus: Collection[str], since: float) -> str | None:
        """The first of these GPUs that is out of rotation and has shown a fault since then."""
        out = self.out_of_rotation
        return next((uuid for uuid in gpus if uuid in out and self._faulted.get(uuid, since - 1.0) >= since), None)

    def excuse(self, job: str, gpus: Collection[str], since: float) -> str | None:
        """The GPU that made a job fail which ran since then; None without one, or after too many excuses."""
        uuid = self.failed_during(gpus, since)
        if uuid is None or self._excused.get(job, 0) >= MOST_EXCUSES:
            return None
        self._excused[job] = self._excused.get(job, 0) + 1
        return uuid


def changed(entries: Entries, changes: Mapping[str, QuarantinedGpu | None]) -> dict[str, QuarantinedGpu]:
    """The entries with these changes applied; None removes one."""
    merged = {**entries, **changes}
    return {uuid: entry for uuid, entry in merged.items() if entry is not None}


def gpu_error(end: JobEnd) -> str | None:
    """The GPU error that a job printed when it failed right after its start."""
    if not end.failed or end.lasted > RIGHT_AFTER_START or end.exit_code in _WRONG_COMMAND:
        return None
    found = [match[0].strip() for match in _GPU_ERROR.finditer(end.output)]
    # The first error is the cause; later ones follow from it.
    return found[0] if found and not _PROGRAM_ERROR.search(found[0]) else None


_SCRIPT: Final = re.compile(r"(?<!\S)\S+\.(?:py|sh|R|jl|lua|ipynb)(?![\w.])")
_MODULE: Final = re.compile(r"(?<!\S)-m[ =]([\w.]+)")


def program_of(command: str) -> str:
    """The script or module of a command without its options, such as `train.py`, or the first word."""
    if script := _SCRIPT.search(command):
        return script[0].rpartition("/")[2]
    if module := _MODULE.search(command):
        return module[1]
    return next(iter(command.split()), "")
