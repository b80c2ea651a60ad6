"""The source `rss:8GiB`: one GPU whose memory is the resident memory of processes with a tag in the environment.

It measures programs that really allocate on machines without a GPU. Allocations never fail.
"""

import os
import time
from pathlib import Path
from typing import Final

from stoker.gpus.model import NOT_SUPPORTED, Gpu, Look, Process, Reading, Unknown
from stoker.gpus.processes import ProcessCache
from stoker.gpus.source import SourceEntry, register
from stoker.procfs import read_stat
from stoker.units import parse_memory

# A process with this in its initial environment uses the GPU.
TAG: Final = b"STOKER_RSS_GPU=0"
UUID: Final = "GPU-55500000-0000-4000-8000-000000000000"
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def open_source(root: Path, argument: str) -> "ResidentMemory":
    """The source of `rss:ARGUMENT`."""
    return ResidentMemory(root, parse_memory(argument))


class ResidentMemory:
    """The `Source`. Memory that processes share, such as after a fork, counts for each of them."""

    name = "rss"

    def __init__(self, root: Path, total: int) -> None:
        self._proc = root / "proc"
        self._process_cache = ProcessCache(root, pids_from="proc")
        self._total = total
        unreported = Unknown(NOT_SUPPORTED)
        self._gpu = Gpu(UUID, 0, "Resident memory", "sim", unreported, total, unreported)
        self._looked = time.monotonic()

    def look(self) -> Look:
        now = time.monotonic()
        span, self._looked = now - self._looked, now
        self._process_cache.refresh()
        processes = tuple(self._processes())
        used = sum(process.memory for process in processes if isinstance(process.memory, int))
        unreported = Unknown(NOT_SUPPORTED)
        reading = Reading(
            UUID,
            span,
            unreported,
            min(used, self._total),
            self._total,
            unreported,
            unreported,
            unreported,
            unreported,
            processes,
            *(unreported,) * 5,
        )
        return Look(self.name, now, time.time(), (self._gpu,), (reading,))

    def close(self) -> None:
        self._process_cache.close()

    def _processes(self) -> list[Process]:
        found = []
        unreported = Unknown(NOT_SUPPORTED)
        for process in self._proc.glob("[0-9]*"):
            try:
                if TAG not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                stat = read_stat(str(process / "stat"))
            except (OSError, ValueError):
                continue  # of another user, or ended
            resident = stat.resident_pages * _PAGE
            found.append(self._process_cache.process(int(process.name), resident, unreported))
        return found


register(SourceEntry("rss", f"{__name__}:open_source", "resident memory as a GPU's", check="stoker.units:parse_memory"))
