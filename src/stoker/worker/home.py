"""The place of a worker on this machine: one at a time, with a name that its next start still knows."""

import fcntl
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Final

from stoker.errors import StokerError
from stoker.places import open_privately, private_directory
from stoker.procfs import boot_id
from stoker.queue import Attempt
from stoker.worker.assignment import AttemptRecord

# Enough to look back over weeks; the queue keeps the end of every output anyway.
MOST_ATTEMPTS: Final = 1000
OLDEST_ATTEMPT: Final = 60 * 86400.0


class Home:
    """The state directory, as far as it is this worker's."""

    def __init__(self, directory: Path) -> None:
        """Raises StokerError when another worker is at home here. A home may be shared by machines, a worker not."""
        self.directory = directory
        self.host = socket.gethostname()
        self.boot = boot_id()
        # As one dictionary: every question to `os.environ` translates names and values anew.
        self.surroundings = dict(os.environ)
        try:
            private_directory(directory / "attempts")
            self._lock = open_privately(directory / f"worker-{self.host}.lock", os.O_RDWR | os.O_CREAT)
            self._take()
        except OSError as error:
            raise StokerError(
                f"no worker can be at home in {directory}: {error.strerror} (STOKER_HOME names another place)"
            ) from None

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._lock, 100, 0).decode(errors="replace").strip().split(" ")[-1]
            raise StokerError(
                f"another worker (pid {other}) is at home in {self.directory}: stop it first, "
                "or give this one a STOKER_HOME and --gpus of its own"
            ) from None
        known = os.pread(self._lock, 100, 0).decode(errors="replace").split(" ")[0].strip()
        self.key = known if known.isalnum() else os.urandom(4).hex()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{self.key} {os.getpid()}\n".encode(), 0)
        self.worker = f"{self.key}-{os.urandom(4).hex()}"

    def is_own(self, worker: str) -> bool:
        """Whether this is the id of a worker that was at home here, at this or an earlier start."""
        return worker.startswith(f"{self.key}-")

    def holds(self, attempt: Attempt) -> bool:
        """Whether it was given to an attendant, by whatever version of Stoker, and its outcome is not delivered."""
        return AttemptRecord(self.directory / "attempts" / f"{attempt.job}-{attempt.number}").is_assigned()

    def tidy(self) -> None:
        """Forgets attempts that are too many or too old. What the queue does not have yet is never touched."""
        too_old = time.time() - OLDEST_ATTEMPT
        with os.scandir(self.directory / "attempts") as entries:
            found = sorted(((entry.stat().st_mtime, entry.path) for entry in entries if entry.is_dir()), reverse=True)
        for place, (changed, path) in enumerate(found):
            is_superfluous = place >= MOST_ATTEMPTS or changed < too_old
            # One that was delivered, or that never began.
            if is_superfluous and not AttemptRecord(Path(path)).is_assigned():
                shutil.rmtree(path, ignore_errors=True)

    def leave(self) -> None:
        os.close(self._lock)
