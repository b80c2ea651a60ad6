"""Processes found by a mark in their environment: whatever parent or session they have now, they were born with it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stoker.runs.processes.scan import Identity, identify, send, stat

# A tree that forks while it is being killed is killed again; one that outruns this many is not caught so.
_MOST_SWEEPS: Final = 100
# A killed process is taken apart in milliseconds, and can be seen until then.
_BETWEEN_SWEEPS: Final = 0.01


def marked(name: str, value: str) -> list[Identity]:
    """All that live with this variable in their environment, as far as that may be read. Raises OSError."""
    mark = f"{name}={value}".encode(errors="surrogateescape")
    return [who for who, environment in environments() if mark in environment]


def kill_all(find: Callable[[], list[Identity]]) -> bool:
    """Kills whom `find` finds, and what they start meanwhile; False when somebody is still there. Raises OSError."""
    for _ in range(_MOST_SWEEPS):
        left = find()
        if not left:
            return True
        for who in left:
            send(who, signal.SIGKILL)
        time.sleep(_BETWEEN_SWEEPS)
    return False


def environments() -> Iterator[tuple[Identity, list[bytes]]]:
    """Every process with its environment, as far as that may be read.

    Raises OSError when there is no descriptor or memory to look: nobody found then does not mean that nobody is there.
    """
    for name in os.listdir("/proc"):  # noqa: PTH208 - one call
        if name.isdigit():
            environment = _environment(int(name))
            if environment and (who := identify(int(name))) is not None:
                yield who, environment


def is_kept(who: Identity, *names: str) -> bool:
    """Whether one of its ancestors has such a name; also when that could not be told."""
    current = who.pid
    while current > 1:
        found = stat(current)
        if found is None:
            return True  # somebody ended just now: the next look will tell
        if found.name in names:
            return True
        current = found.parent
    return False


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []  # gone, or somebody else's
