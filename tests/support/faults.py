"""Faults of one machine's kernel and clocks, for the Stoker processes that `Faults.environment` was given to.

`faults.c` is preloaded into them. What fails, and how far the clocks are off, is in a file that all of them map: it
changes under processes that run.
"""

import enum
import mmap
import struct
from pathlib import Path
from typing import Final

from tests.support.compiled import compiled

RULES: Final = 10
_CLOCKS: Final = struct.Struct("=qqQQ")
_RULE: Final = struct.Struct("=IIiIQ16s216s")
_ACTIVE: Final = struct.Struct("=I")
_SECOND: Final = 10**9


class Call(enum.IntFlag):
    """Families of calls; the same numbers as in faults.c."""

    OPEN = 1
    WRITE = 2
    SYNC = 4
    READ = 8
    NAME = 16
    SOCKET = 32
    HANDLE = 64
    FORK = 128


class Faults:
    """The faults of one machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(_CLOCKS.size + RULES * _RULE.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._wall = 0.0
        self._suspended = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process one of this machine's."""
        return {
            "LD_PRELOAD": str(compiled("faults", "-shared", "-fPIC", "-ldl")),
            "CHAOS_FAULTS": str(self._path),
        }

    def inject(
        self, number: int, calls: Call, error: int, chance: float = 1.0, *, path: str = "", role: str = ""
    ) -> None:
        """From now on these calls fail, in the processes of this name and for paths that begin so, if any is given.

        With ENOENT only files that are younger than two seconds are missing. A negative `error` is a delay in
        milliseconds.
        """
        place = _CLOCKS.size + number * _RULE.size
        rule = _RULE.pack(0, calls, error, round(chance * 1e6), 0, role.encode(), path.encode())
        self._memory[place : place + _RULE.size] = rule
        _ACTIVE.pack_into(self._memory, place, 1)

    def withdraw(self, number: int) -> int:
        """From now on they do not; how many have failed."""
        place = _CLOCKS.size + number * _RULE.size
        _ACTIVE.pack_into(self._memory, place, 0)
        return int(_RULE.unpack_from(self._memory, place)[4])

    @property
    def wall(self) -> float:
        """How far the time of day is ahead."""
        return self._wall

    def step_wall(self, seconds: float) -> None:
        """Sets the clock."""
        self._wall += seconds
        self._set_clocks()

    def sleep(self, seconds: float) -> None:
        """The clocks of the machine show a suspend of that many seconds."""
        self._suspended += seconds
        self._set_clocks()

    def _set_clocks(self) -> None:
        struct.pack_into("=qq", self._memory, 0, round(self._wall * _SECOND), round(self._suspended * _SECOND))
