"""The state directory, `$STOKER_HOME` or the XDG state directory, and its privacy.

Commands, environments and logs contain secrets. Every file that Stoker creates is readable only by its owner from the
first byte, regardless of the umask, which is passed on to the user's job.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final

from stoker.errors import StokerError

# Stoker's files in the state directory. A directory with other files keeps its mode; only Stoker's files are made
# private.
_OWN: Final = re.compile(
    r"(queue\.db|\.?(tokens|fits|machines|fill-.+|kept-.+|quarantine-.+)\.json|(access|page|work)\.log"
    r"|(worker|fill|quarantine)-.+\.lock)([.-].+)?|prepared-.+|runs|attempts|snapshots|probes|sim|demo|gpus|slurm-watch"
)
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def state_home(environment: Mapping[str, str] = os.environ) -> Path:
    if home := environment.get("STOKER_HOME"):
        return Path(home)
    base = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or _home()) / ".local/state"
    return Path(base) / "stoker"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise StokerError("this user has no home directory: STOKER_HOME names a place for Stoker's state") from None


def private_directory(path: Path) -> None:
    """Creates the directory and its parents with mode 0700. Existing ones keep their mode."""
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        private_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise


def open_privately(path: str | Path, flags: int) -> int:
    """Opens a descriptor; a new file has mode 0600. Also usable as an `opener` for `open`."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def private_file(path: Path, mode: str = "wb") -> IO[Any]:
    """`open`, but a new file has mode 0600."""
    return open(path, mode, opener=open_privately)


def write_atomically(path: str | Path, content: bytes, *, private: bool = True, sync: bool = False) -> os.stat_result:
    """Replaces the file atomically: readers see the old or the new content. Raises OSError. `private`: mode 0600,
    regardless of the umask. `sync`: flush to disk before the replacement.
    """
    directory, name = os.path.split(path)
    fresh = f"{directory}/.{name}.{os.getpid()}" if directory else f".{name}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    mode = 0o600 if private else 0o666
    try:
        descriptor = os.open(fresh, flags, mode)
    except FileExistsError:
        os.unlink(fresh)  # noqa: PTH108 - left by a process with this pid that was killed
        descriptor = os.open(fresh, flags, mode)
    try:
        try:
            if private:
                os.fchmod(descriptor, mode)
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
            if sync:
                os.fsync(descriptor)
            written = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        os.replace(fresh, path)  # noqa: PTH105 - between two jobs, where Path takes its time
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)  # noqa: PTH108
        raise
    return written


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Like `shutil.rmtree`, whose module loads all compression modules; most supervisors never remove anything."""
    import shutil

    shutil.rmtree(path, ignore_errors=ignore_errors)


def try_lock(descriptor: int) -> bool:
    """Locks the file exclusively; returns False if another process has the lock."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def tighten_home(home: Path) -> str | None:
    """Makes the state directory and Stoker's files in it private; returns a message if others had access."""
    home = home.resolve()
    try:
        names = os.listdir(home)  # noqa: PTH208 - names are all that is needed
    except OSError:
        return None
    own = [name for name in names if _OWN.fullmatch(name)]
    # The page refuses a token file that others could read until the user replaces it.
    changed = tighten(
        [
            *([home] if len(own) == len(names) else []),
            *(home / name for name in sorted(own) if name != "tokens.json"),
        ]
    )
    return _access_taken(changed)


def tighten_queue(path: Path) -> str | None:
    """The same for a SQLite queue, unless others may write to it: it is then shared on purpose."""
    path = path.resolve()
    with contextlib.suppress(OSError):
        if not stat.S_IMODE(path.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
            return _access_taken(tighten(path.with_name(f"{path.name}{end}") for end in ("", "-wal", "-shm")))
    return None


def tighten(paths: Iterable[Path]) -> list[Path]:
    """Removes the permissions of others; returns the changed paths. Skips files of other users."""
    changed = []
    for path in paths:
        with contextlib.suppress(OSError):
            found = path.lstat()
            # A sticky directory, such as /tmp, is shared.
            is_own = found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX
            if found.st_mode & _OTHERS and is_own and not stat.S_ISLNK(found.st_mode):
                path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
                changed.append(path)
    return changed


def may_be_read_by_others(found: os.stat_result) -> bool:
    """Whether others may read the file. A group with the owner's number counts as private."""
    return bool(found.st_mode & stat.S_IROTH or (found.st_mode & stat.S_IRGRP and found.st_gid != found.st_uid))


def _access_taken(changed: list[Path]) -> str | None:
    if not changed:
        return None
    more = f" and {len(changed) - 1} more there" if len(changed) > 1 else ""
    return f"other users had access to {changed[0]}{more}: now only you do"


def is_there(path: str | Path) -> bool:
    """`Path.exists`, but False instead of PermissionError inside a directory that this user may not enter."""
    return os.path.exists(path)  # noqa: PTH110 - see above


def is_directory(path: str | Path) -> bool:
    """`Path.is_dir`, but False instead of PermissionError inside a directory that this user may not enter."""
    return os.path.isdir(path)  # noqa: PTH112 - see above
