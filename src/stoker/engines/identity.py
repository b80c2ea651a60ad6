"""The place of a worker on this machine: one at a time, with a name that its next start still knows."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import struct
import time
from pathlib import Path
from typing import Final

from stoker.engines.local.attempt_spec import AttemptRecord
from stoker.errors import StokerError
from stoker.paths import open_privately, private_directory
from stoker.procfs import boot_id
from stoker.queue import Attempt
from stoker.runs.record import Records

# Enough to look back over weeks; the queue keeps the end of every output anyway.
MOST_ATTEMPTS: Final = 1000
OLDEST_ATTEMPT: Final = 60 * 86400.0
# Short jobs fill a disk between two looks at the clock: after so many new attempts, the old ones are forgotten.
CLUTTER: Final = 100
# Workers that were refused, between two rounds of tidying.
_MOST_VISITORS: Final = 1000


class WorkerIdentity:
    """The state directory, as far as it is this worker's."""

    def __init__(self, directory: Path) -> None:
        """Raises StokerError when another worker is at home here. A home may be shared by machines, a worker not."""
        self.directory = directory
        self.host = socket.gethostname()
        self.boot = boot_id()
        # As one dictionary: every question to `os.environ` translates names and values anew.
        self.surroundings = dict(os.environ)
        self._made = 0
        try:
            self._door = self._shut_door()
            private_directory(directory / "attempts")
            self._lock = open_privately(directory / f"worker-{self.host}.lock", os.O_RDWR | os.O_CREAT)
            self._take()
        except OSError as error:
            raise StokerError(
                f"no worker can be at home in {directory}: {error.strerror} (STOKER_HOME names another place)"
            ) from None

    def _shut_door(self) -> socket.socket | None:
        """Keeps other workers of this user out also when somebody deletes the directory, and with it the lock.

        The name of a socket that is in no directory, for this path. None where such sockets may not be made.
        """
        place = hashlib.sha256(os.fsencode(os.path.realpath(self.directory))).hexdigest()[:32]
        name = f"\0stoker-worker-{os.getuid()}-{place}"
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            door.bind(name)
            door.listen(_MOST_VISITORS)
        except OSError as error:
            door.close()
            if error.errno == errno.EADDRINUSE and (other := _worker_behind(name)) is not None:
                raise self._taken(other) from None
            return None
        return door

    def _taken(self, other: int | str) -> StokerError:
        return StokerError(
            f"another worker (pid {other}) is at home in {self.directory}: stop it first, "
            "or give this one a STOKER_HOME and --gpus of its own"
        )

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._lock, 100, 0).decode(errors="replace").strip().split(" ")[-1]
            raise self._taken(other) from None
        known = os.pread(self._lock, 100, 0).decode(errors="replace").split(" ")[0].strip()
        self.key = known if known.isalnum() else os.urandom(4).hex()
        line = f"{self.key} {os.getpid()}\n".encode()
        # In place, so that a disk that is full does not cost the key. Without one on disk a worker works all the same.
        with contextlib.suppress(OSError):
            os.pwrite(self._lock, line, 0)
            os.ftruncate(self._lock, len(line))
        self.worker = f"{self.key}-{os.urandom(4).hex()}"

    def is_own(self, worker: str) -> bool:
        """Whether this is the id of a worker that was at home here, at this or an earlier start."""
        return worker.startswith(f"{self.key}-")

    def holds(self, attempt: Attempt) -> bool:
        """Whether it was given to an attendant, by whatever version of Stoker, and its outcome is not delivered."""
        return AttemptRecord(self.place_of(attempt)).is_assigned()

    def place_of(self, attempt: Attempt) -> Path:
        """The directory of an attempt that was started here."""
        return self.directory / "attempts" / f"{attempt.job}-{attempt.number}"

    def new_record(self, attempt: Attempt) -> AttemptRecord:
        """An empty directory for what is started now. Raises StokerError."""
        self._made += 1
        return AttemptRecord(Records(self.directory, "attempts").create(f"{attempt.job}-{attempt.number}").directory)

    @property
    def is_cluttered(self) -> bool:
        """Whether so many attempts were made since the last `tidy` that it is time for the next."""
        return self._made >= CLUTTER

    def tidy(self) -> None:
        """Forgets attempts that are too many or too old. What the queue does not have yet is never touched."""
        self._made = 0
        self._dismiss_visitors()
        too_old = time.time() - OLDEST_ATTEMPT
        try:
            with os.scandir(self.directory / "attempts") as entries:
                found = sorted(
                    ((entry.stat().st_mtime, entry.path) for entry in entries if entry.is_dir()), reverse=True
                )
        except OSError:
            return  # somebody has deleted it, or is about to
        for place, (changed, path) in enumerate(found):
            is_superfluous = place >= MOST_ATTEMPTS or changed < too_old
            # One that was delivered, or that never began.
            if is_superfluous and not AttemptRecord(Path(path)).is_assigned():
                shutil.rmtree(path, ignore_errors=True)

    def _dismiss_visitors(self) -> None:
        """They have seen that somebody is there, and are gone; the next must find room."""
        if self._door is not None:
            with contextlib.suppress(OSError):
                while True:
                    self._door.accept()[0].close()

    def leave(self) -> None:
        os.close(self._lock)
        if self._door is not None:
            self._door.close()


def _worker_behind(name: str) -> int | None:
    """The pid of this user's worker that has the socket of this name; anybody could have made one."""
    with contextlib.closing(
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    ) as visitor:
        try:
            visitor.connect(name)
        except OSError:
            return None
        pid, user, _group = struct.unpack("3i", visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid) if user == os.getuid() else None
