"""The status file that `stoker fill status` reads: the state of every slot and the GPU-hours it had so far."""

import contextlib
import os
import time
from pathlib import Path

import msgspec

from stoker.errors import StokerError
from stoker.paths import open_privately, private_directory, try_lock, write_atomically


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One program on its GPUs."""

    program: str
    gpus: tuple[str, ...]
    """Uuids."""
    indices: tuple[int, ...]
    state: str
    """waiting, running or stopping."""
    why: str
    since: float
    """Seconds since the epoch."""
    pid: int | None = None
    reaper: tuple[int, int] | None = None
    """Pid and start time of its reaper."""
    gpu_hours: float = 0.0
    """Given to this program so far, over all starts of the filler."""
    preemptions: int = 0


class FillStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All slots of one machine."""

    host: str
    pid: int
    started: int
    """Start time of the filler in clock ticks since boot: with its pid, its identity."""
    boot: str
    written: float
    config: str
    owner: str
    """`stoker fill`, `stoker work` or `gpu_mon`."""
    veto: str | None = None
    """Why nothing may run at all now."""
    notes: tuple[str, ...] = ()
    slots: tuple[SlotStatus, ...] = ()


class StatusFile:
    """The file that `FillStatus` is written to."""

    def __init__(self, home: Path, host: str) -> None:
        self.path = home / f"fill-{host}.json"

    def read(self) -> FillStatus | None:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=FillStatus)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, status: FillStatus) -> None:
        """A full disk loses the status, never a program."""
        with contextlib.suppress(OSError):
            write_atomically(self.path, msgspec.json.format(msgspec.json.encode(status), indent=1) + b"\n")


def lock(home: Path, host: str, patience: float = 0.0) -> int:
    """Makes this process the only filler of this home on the machine; the descriptor holds it.

    `patience`: how many seconds to wait for one that is ending.
    """
    try:
        private_directory(home)
        descriptor = open_privately(home / f"fill-{host}.lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise StokerError(
            f"{home} cannot be written: {error.strerror} (set STOKER_HOME to another directory)"
        ) from None
    ends = time.monotonic() + patience
    while not try_lock(descriptor):
        if time.monotonic() < ends:
            time.sleep(0.05)
            continue
        other = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "?"
        os.close(descriptor)
        raise StokerError(f"the GPUs here are being filled already (pid {other}): `stoker fill status` shows by whom")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
