"""Since when each GPU does what it does, for people who look from elsewhere.

No clock and no I/O: whoever tells says when it was.
"""

from typing import NamedTuple

import msgspec

from stoker.queue.model import Doing, WorkerGpu


class _Stay(NamedTuple):
    doing: Doing
    whom: str
    jobs: tuple[str, ...]
    since: float


class Occupancy:
    """Remembers what was told of each GPU last."""

    def __init__(self) -> None:
        self._stays: dict[str, _Stay] = {}

    def dated(self, gpu: WorkerGpu, wall: float) -> WorkerGpu:
        """The same with its `since`: it does what it did before, or has just begun to. `wall`: since the epoch."""
        stay = self._stays.get(gpu.uuid)
        if stay is None or stay[:3] != (gpu.doing, gpu.whom, gpu.jobs):
            stay = self._stays[gpu.uuid] = _Stay(gpu.doing, gpu.whom, gpu.jobs, wall)
        return msgspec.structs.replace(gpu, since=stay.since)
