"""The status file for `stoker fill status`: the state of every slot and its GPU-hours so far."""

import contextlib
import os
import time
from pathlib import Path

import msgspec

from stoker.errors import StokerError
from stoker.paths import open_privately, private_directory, try_lock, write_atomically


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A program on its GPUs."""

    program: str
    gpus: tuple[str, ...]
    """Uuids."""
    indices: tuple[int, ...]
    state: str
    """waiting, running or stopping."""
    why: str
    since: float
    """The start of the state in seconds since the epoch."""
    pid: int | None = None
    reaper: tuple[int, int] | None = None
    """Pid and start time of its reaper."""
    gpu_hours: float = 0.0
    """The total of this program, over all starts of the filler."""
    preemptions: int = 0


class FillStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All slots of a machine."""

    host: str
    pid: int
    started: int
    """The filler's start time in clock ticks since boot, which identifies it together with the pid."""
    boot: str
    written: float
    config: str
    owner: str
    """`stoker fill`, `stoker work` or `gpu_mon`."""
    veto: str | None = None
    """Why no program may run now."""
    notes: tuple[str, ...] = ()
    slots: tuple[SlotStatus, ...] = ()


class StatusFile:
    """The file with the `FillStatus`."""

    def __init__(self, home: Path, host: str) -> None:
        self.path = home / f"fill-{host}.json"

    def read(self) -> FillStatus | None:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=FillStatus)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, status: FillStatus) -> None:
        """Writes the status. A full disk does not affect programs."""
        with contextlib.suppress(OSError):
            write_atomically(self.path, msgspec.json.format(msgspec.json.encode(status), indent=1) + b"\n")


def lock(home: Path, host: str, patience: float = 0.0) -> int:
    """Makes this process the only filler of this home on the machine, as long as the descriptor is open.

    `patience`: seconds to wait for a filler that is ending.
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
