"""For tests: one made-up GPU whose memory is the resident memory of the processes that say so in their environment.

A program that really allocates can so be measured where there is no GPU. Nothing is refused: what does not fit is only
seen not to.
"""

import os
import time
from pathlib import Path
from typing import Final

from stoker.errors import BadInputError
from stoker.gpus.model import NOT_SUPPORTED, Gpu, Look, Process, Reading, Unknown
from stoker.gpus.processes import ProcessCache
from stoker.procfs import read_stat
from stoker.units import parse_memory

# Who has it in its environment uses the GPU. It is read as it was when the program began.
MARK: Final = b"STOKER_RSS_GPU=0"
UUID: Final = "GPU-55500000-0000-4000-8000-000000000000"
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def parse_size(argument: str) -> int:
    """The memory of the GPU of `rss:8GiB`."""
    if not argument:
        raise BadInputError("'rss' needs the memory of its GPU: write it like rss:8GiB")
    return parse_memory(argument)


def open_source(root: Path, argument: str) -> "ResidentMemory":
    """The source of `rss:ARGUMENT`."""
    return ResidentMemory(root, parse_size(argument))


class ResidentMemory:
    """The `Source`. Memory that processes share, such as after a fork, counts for each of them."""

    name = "rss"

    def __init__(self, root: Path, total: int) -> None:
        self._proc = root / "proc"
        self._people = ProcessCache(root, pids_from="proc")
        self._total = total
        untold = Unknown(NOT_SUPPORTED)
        self._gpu = Gpu(UUID, 0, "Resident memory", "sim", untold, total, untold)
        self._looked = time.monotonic()

    def look(self) -> Look:
        now = time.monotonic()
        span, self._looked = now - self._looked, now
        self._people.refresh()
        processes = tuple(self._processes())
        used = sum(process.memory for process in processes if isinstance(process.memory, int))
        untold = Unknown(NOT_SUPPORTED)
        reading = Reading(
            UUID, span, untold, min(used, self._total), self._total, untold, untold, untold, untold, processes, untold
        )
        return Look(self.name, now, time.time(), (self._gpu,), (reading,))

    def close(self) -> None:
        self._people.close()

    def _processes(self) -> list[Process]:
        found = []
        untold = Unknown(NOT_SUPPORTED)
        for process in self._proc.glob("[0-9]*"):
            try:
                if MARK not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                stat = read_stat(str(process / "stat"))
            except (OSError, ValueError):
                continue  # somebody else's, or gone
            resident = stat.resident_pages * _PAGE
            found.append(self._people.process(int(process.name), resident, untold))
        return found
