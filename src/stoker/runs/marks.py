"""Processes found by a mark in their environment: whatever parent or session they have now, they were born with it."""

import os
import signal
import time
from pathlib import Path
from typing import Final

from stoker.runs.processes import Identity, identify, send

# A tree that forks while it is being killed is killed again; one that outruns this many is not caught so.
_MOST_SWEEPS: Final = 100
# A killed process is taken apart in milliseconds, and can be seen until then.
_BETWEEN_SWEEPS: Final = 0.01


def marked(name: str, value: str) -> list[Identity]:
    """All that live with this variable in their environment, as far as that may be read."""
    mark = f"{name}={value}".encode(errors="surrogateescape")
    return [who for who in _everyone() if mark in _environment(who.pid)]


def kill_marked(name: str, value: str) -> int:
    """Kills them, and what they start meanwhile; how many there were."""
    killed: set[Identity] = set()
    for _ in range(_MOST_SWEEPS):
        left = marked(name, value)
        if not left:
            break
        for who in left:
            send(who, signal.SIGKILL)
        killed.update(left)
        time.sleep(_BETWEEN_SWEEPS)
    return len(killed)


def _everyone() -> list[Identity]:
    return [who for name in os.listdir("/proc") if name.isdigit() and (who := identify(int(name)))]  # noqa: PTH208 - one call


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # gone, or somebody else's
