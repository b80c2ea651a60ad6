"""Ensures one filler per GPU on a machine, across users and state directories.

A claim is an abstract Unix socket named after the GPU's uuid. It needs no world-writable directory, nobody can delete
it, and the kernel drops it with the process. Containers with another network namespace do not see it.
"""

import contextlib
import hashlib
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stoker.errors import StokerError
from stoker.fill.config import FillConfig
from stoker.gpus.model import Gpu
from stoker.gpus.sim.machine import SimMachine, is_simulated
from stoker.gpus.visible import select_gpus
from stoker.procfs import user_name

# A just forked reaper keeps the claims of a killed filler for a moment.
KILLED_LATELY: Final = 0.5
_BETWEEN_TRIES: Final = 0.05
# struct ucred: pid, uid, gid.
_CREDENTIALS: Final = struct.Struct("=iII")
_BACKLOG: Final = 128


class Claims:
    """The claims of this process and its forks, until the last of them ends or closes them."""

    def __init__(self, machine: str = "") -> None:
        """`machine`: distinguishes simulated machines with the same uuids; empty for the real machine."""
        self._machine = machine
        self._held: dict[str, socket.socket] = {}

    def take(self, gpus: Sequence[Gpu]) -> None:
        """Claims these GPUs, too. Raises StokerError with the holder if one is taken."""
        ends = time.monotonic() + KILLED_LATELY
        for gpu in gpus:
            while gpu.uuid not in self._held:
                claim = _claim(self._name(gpu.uuid))
                if claim is not None:
                    self._held[gpu.uuid] = claim
                elif time.monotonic() < ends:
                    time.sleep(_BETWEEN_TRIES)
                else:
                    holder = _holder(self._name(gpu.uuid))
                    raise StokerError(
                        f"GPU {gpu.index} is being filled already{holder}: a GPU has one filler at a time"
                    )

    def descriptors(self) -> list[int]:
        return [claim.fileno() for claim in self._held.values()]

    def close(self) -> None:
        """Releases the claims, unless a fork of this process holds them."""
        for claim in self._held.values():
            claim.close()
        self._held.clear()

    def _name(self, uuid: str) -> str:
        scope = f":{hashlib.sha256(self._machine.encode()).hexdigest()[:16]}" if self._machine else ""
        return f"\0stoker-fill:{uuid}{scope}"


def machine_of(spec: str, root: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The machine id for `Claims`, from the source."""
    if is_simulated(spec):
        return str(SimMachine.find(spec, environment).directory.resolve())
    return "" if root == Path("/") else str(root.resolve())


def gpus_to_fill(config: FillConfig, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs of all programs in the configuration."""
    found: dict[str, Gpu] = {}
    for program in config.programs:
        chosen = select_gpus(gpus, program.gpus)
        found |= {gpu.uuid: gpu for gpu in chosen}
    return list(found.values())


def _claim(name: str) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(name)
        claim.listen(_BACKLOG)  # lets others query this process by SO_PEERCRED
    except OSError:
        claim.close()
        return None
    return claim


def _holder(name: str) -> str:
    """The holder of a claim, as part of a sentence; empty if unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        asking.connect(name)
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _gid = _CREDENTIALS.unpack(credentials)
        return f" by {user_name(uid)} (pid {pid})" if pid else f" by {user_name(uid)}"
    return ""
