"""The identity of a worker: one per home and machine, with a key that survives restarts."""

import contextlib
import errno
import hashlib
import os
import shutil
import socket
import struct
import time
from pathlib import Path
from typing import Final

from stoker.engines.attempt import AttemptRecord
from stoker.engines.code import tidy_archives
from stoker.errors import StokerError
from stoker.paths import open_privately, private_directory, try_lock
from stoker.procfs import boot_id
from stoker.queue import Attempt
from stoker.runs.record import Records

# Enough for weeks; the queue keeps the end of every log anyway.
MOST_ATTEMPTS: Final = 1000
OLDEST_ATTEMPT: Final = 60 * 86400.0
# Short jobs fill a disk within minutes, so old attempts are removed after this many new ones.
TIDY_AFTER: Final = 100
# A live supervisor removes the code of its job within this time.
_CODE_REMOVED_WITHIN: Final = 3600.0
# This many refused workers can read this worker's pid; the lock refuses the rest.

_BACKLOG: Final = 1000


class WorkerIdentity:
    """The worker's state directory, held exclusively, with the directories of its attempts."""

    def __init__(self, directory: Path) -> None:
        """Raises StokerError if another worker of this machine uses it. Workers of other machines may share it."""
        self.directory = directory
        self.host = socket.gethostname()
        self.boot = boot_id()
        # A plain dictionary: every lookup in `os.environ` decodes again.
        self.environment = dict(os.environ)
        self._created = 0
        try:
            self._guard = self._bind_guard()
            private_directory(directory / "attempts")
            self._lock = open_privately(directory / f"worker-{self.host}.lock", os.O_RDWR | os.O_CREAT)
            self._take_lock()
        except OSError as error:
            raise StokerError(
                f"no worker can run in {directory}: {error.strerror} (STOKER_HOME names another directory)"
            ) from None

    def _bind_guard(self) -> socket.socket | None:
        """An abstract socket named after the path. It excludes other workers even if the lock file is deleted.

        None if the machine has no such sockets.
        """
        path = hashlib.sha256(os.fsencode(os.path.realpath(self.directory))).hexdigest()[:32]
        name = f"\0stoker-worker-{os.getuid()}-{path}"
        guard = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            guard.bind(name)
            guard.listen(_BACKLOG)
        except OSError as error:
            guard.close()
            if error.errno == errno.EADDRINUSE and (other := _worker_behind(name)) is not None:
                raise self._taken(other) from None
            return None
        return guard

    def _taken(self, other: int | str) -> StokerError:
        return StokerError(
            f"another worker (pid {other}) runs in {self.directory}: stop it first, "
            "or give this one another STOKER_HOME and other --gpus"
        )

    def _take_lock(self) -> None:
        is_free = try_lock(self._lock)
        known, _, other = os.pread(self._lock, 100, 0).decode(errors="replace").strip().partition(" ")
        if not is_free:
            raise self._taken(other)
        self.key = known if known.isalnum() else os.urandom(4).hex()
        line = f"{self.key} {os.getpid()}\n".encode()
        # Written in place: a full disk must not lose the key. The worker also runs without a key on disk.
        with contextlib.suppress(OSError):
            os.pwrite(self._lock, line, 0)
            os.ftruncate(self._lock, len(line))
        self.worker = f"{self.key}-{os.urandom(4).hex()}"

    def is_own(self, worker: str) -> bool:
        """True for the ids of this worker from this or an earlier start."""
        return worker.startswith(f"{self.key}-")

    def directory_of(self, job: str, number: int) -> Path:
        """The directory of a local attempt."""
        return self.directory / "attempts" / f"{job}-{number}"

    def create_directory(self, attempt: Attempt) -> Path:
        """Creates an empty directory for a new attempt. Raises StokerError."""
        self._created += 1
        return Records(self.directory, "attempts").create(f"{attempt.job}-{attempt.number}").directory

    @property
    def prepared(self) -> Path:
        """Where the directory of an attempt is before the attempt is claimed."""
        return self.directory / f"prepared-{self.host}"

    @property
    def needs_tidying(self) -> bool:
        return self._created >= TIDY_AFTER

    def tidy(self) -> None:
        """Removes surplus and old attempts that are delivered.

        It also removes code that a killed supervisor left in newer ones.
        """
        self._created = 0
        tidy_archives(self.directory)
        too_old, left_behind = time.time() - OLDEST_ATTEMPT, time.time() - _CODE_REMOVED_WITHIN
        try:
            with os.scandir(self.directory / "attempts") as entries:
                newest_first = sorted(
                    ((entry.stat().st_mtime, entry.path) for entry in entries if entry.is_dir()), reverse=True
                )
        except OSError:
            return  # the directory was deleted
        for index, (changed, path) in enumerate(newest_first):
            if changed >= left_behind and index < MOST_ATTEMPTS:
                continue
            if AttemptRecord(Path(path)).has_attempt():
                continue
            if index >= MOST_ATTEMPTS or changed < too_old:
                shutil.rmtree(path, ignore_errors=True)
            else:
                for code in Path(path).glob("code*"):
                    shutil.rmtree(code, ignore_errors=True)

    def leave(self) -> None:
        os.close(self._lock)
        if self._guard is not None:
            self._guard.close()


def _worker_behind(name: str) -> int | None:
    """The pid of this user's worker that owns the socket. Other users can bind the same name."""
    with contextlib.closing(
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    ) as client:
        try:
            client.connect(name)
        except OSError:
            return None
        pid, user, _group = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid) if user == os.getuid() else None
