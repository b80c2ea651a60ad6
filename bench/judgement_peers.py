"""When other tools would have stopped a job: their rules as documented, as pure functions over samples of a trace.

gpu_idle_timeout and GPU Sentinel are not here: Stoker has their rules, as `samples` and `sentinel`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

MINUTE: Final = 60.0
HOUR: Final = 3600.0


class Device(NamedTuple):
    """What a tool reads of one GPU of the job. None: it cannot be read."""

    peak: float | None
    mean: float | None
    power_share: float | None
    """Power as a share of the limit."""
    memory: int
    processes: int


class Sample(NamedTuple):
    """One moment of a job, with what only a tool inside of it could see."""

    at: float
    devices: tuple[Device, ...]
    """Empty: the machine could not be read."""
    step: float | None
    """When the last step was done."""
    line: float | None
    collective_since: float | None


class Job(NamedTuple):
    """What a peer is given of a trace."""

    begun: float
    samples: Sequence[Sample]
    sends_heartbeats: bool
    """Whether it is a training loop, into which heartbeats can be built."""
    alone: bool
    """Whether nobody else computes on its GPUs."""


Stop = float | None
"""When the tool stops the job."""


def job_defense_shield(job: Job) -> Stop:
    """Any GPU at exactly 0 % in every sample of the first 120 minutes, or of any 300 minutes."""
    for at, zero_for in _stretches(job, lambda device: device.peak == 0):
        if zero_for >= 300 * MINUTE or (at - job.begun >= 120 * MINUTE and zero_for >= at - job.begun - MINUTE):
            return at
    return None


def gpu_pruner(job: Job) -> Stop:
    """Any GPU whose known samples of the last 30 minutes were all 0, once the pod is 35 minutes old."""
    return _any_below(job, 30 * MINUTE, 35 * MINUTE, lambda device: device.peak == 0)


def dstack(job: Job) -> Stop:
    """`min_gpu_utilization: 10, time_window: 1h`: any GPU with all its known samples below; holes are not seen."""
    return _any_below(job, HOUR, HOUR, lambda device: device.mean is not None and device.mean < 0.1)


def gpu_reaper(job: Job) -> Stop:
    """Enforced, with the stage `cancel` after 4 h: all GPUs below 15 % for 20 minutes, no compute at all, no holes."""
    if not job.alone:
        return None
    since: float | None = None
    last = job.begun
    for sample in job.samples:
        gap, last = sample.at - last, sample.at
        # `starved`, low but not zero, is never cancelled.
        breach = bool(sample.devices) and all(device.peak == 0 for device in sample.devices)
        if not breach or gap > 3 * MINUTE:
            since = None
        elif since is None:
            since = sample.at
        found = since is not None and sample.at - since >= 20 * MINUTE + 4 * HOUR
        if found and sample.at - job.begun >= 15 * MINUTE:
            return sample.at
    return None


def slurm_gpu_idle_killer(job: Job) -> Stop:
    """The defaults of its code: no compute process, at most 5 % and 200 MiB on all GPUs in 10 polls a minute apart."""
    idle = 0
    polled = job.begun
    for sample in job.samples:
        if sample.at - polled < MINUTE:
            continue
        polled = sample.at
        is_idle = bool(sample.devices) and all(
            not device.processes and device.mean is not None and device.mean <= 0.05 and device.memory <= 600 * 2**20
            for device in sample.devices
        )
        idle = idle + 1 if is_idle else 0
        if idle >= 10:
            return sample.at
    return None


def no_output(job: Job) -> Stop:
    """15 minutes without a line of output."""
    return next((s.at for s in job.samples if s.at - (job.begun if s.line is None else s.line) >= 15 * MINUTE), None)


def nccl_watchdog(job: Job) -> Stop:
    """PyTorch ends the job when a collective has been pending for 10 minutes."""
    since = ((sample.at, sample.collective_since) for sample in job.samples)
    return next((at for at, begun in since if begun is not None and at - begun >= 10 * MINUTE), None)


def nvrx_heartbeats(job: Job) -> Stop:
    """NVRx's launcher: 60 minutes until the first heartbeat, 45 minutes between two; one is sent with each step."""
    if not job.sends_heartbeats:
        return None
    for sample in job.samples:
        late = sample.at - job.begun >= 60 * MINUTE if sample.step is None else sample.at - sample.step >= 45 * MINUTE
        if late:
            return sample.at
    return None


def low_power_at_full_utilization(job: Job) -> Stop:
    """Any GPU at 100 % and below 30 % of its power limit for 10 minutes."""

    def hollow(device: Device) -> bool:
        is_full = device.mean is not None and device.mean >= 0.99
        return is_full and device.power_share is not None and device.power_share < 0.3

    return next((at for at, length in _stretches(job, hollow) if length >= 10 * MINUTE), None)


PEERS: Final[dict[str, Callable[[Job], Stop]]] = {
    "job_defense_shield (120/300 min)": job_defense_shield,
    "gpu-pruner": gpu_pruner,
    "dstack, 10 % for 1 h": dstack,
    "gpu-reaper (enforced, cancel 4 h)": gpu_reaper,
    "slurm_gpu_idle_killer": slurm_gpu_idle_killer,
    "15 min without output": no_output,
    "PyTorch's NCCL watchdog": nccl_watchdog,
    "NVRx heartbeats (in-process)": nvrx_heartbeats,
    "100 % and below 30 % of the limit, 10 min": low_power_at_full_utilization,
}


def _stretches(job: Job, matches: Callable[[Device], bool]) -> Iterator[tuple[float, float]]:
    """For each sample, for how long the GPU for which it has been true the longest has matched without a break."""
    since: dict[int, float] = {}
    for sample in job.samples:
        there = {place for place, device in enumerate(sample.devices) if matches(device)}
        since = {place: since.get(place, sample.at) for place in there}
        if since:
            yield sample.at, sample.at - min(since.values())


def _any_below(job: Job, window: float, age: float, matches: Callable[[Device], bool]) -> Stop:
    """Any GPU that matched in all of its known samples in the window, at least one; unknown ones are passed over."""
    broken: dict[int, float] = {}
    matched: dict[int, float] = {}
    for sample in job.samples:
        for place, device in enumerate(sample.devices):
            if device.peak is None:
                continue
            if matches(device):
                matched[place] = sample.at
            else:
                broken[place] = sample.at
        if sample.at - job.begun < age:
            continue
        begins = sample.at - window
        if any(broken.get(place, job.begun - 1) < begins <= last for place, last in matched.items()):
            return sample.at
    return None
