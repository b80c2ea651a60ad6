"""The file in which a worker lists its reserved GPUs and their jobs, for `stoker gpus`.

`stoker gpus` must answer at once even while the queue is away, so it reads this file and not the queue.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from stoker.procfs import read_stat


class ReservedGpusFile:
    """The reservations of one worker. A failure to write them affects no job."""

    def __init__(self, directory: Path, host: str) -> None:
        self._path = _path(directory, host)
        self._written: Mapping[str, str] | None = None

    def write(self, gpus: Mapping[str, str]) -> None:
        """Writes a text for each reserved GPU, by uuid, such as `reserved for job 0a1b2c3d (2 GPUs, has 1)`."""
        if gpus == self._written:
            return
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            if gpus:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump({"pid": os.getpid(), "started": _started(os.getpid()), "gpus": gpus}, file)
            self._written = dict(gpus)


def reserved_gpus(directory: Path, host: str) -> dict[str, str]:
    """The entries of this machine's worker; empty if it does not run."""
    try:
        found = json.loads(_path(directory, host).read_text(encoding="utf-8"))
        if _started(found["pid"]) != found["started"]:
            return {}
        return {str(uuid): str(text) for uuid, text in found["gpus"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _path(directory: Path, host: str) -> Path:
    return directory / f"kept-{host}.json"


def _started(pid: int) -> int:
    return read_stat(f"/proc/{int(pid)}/stat").started
