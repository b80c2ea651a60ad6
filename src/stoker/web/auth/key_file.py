"""Users, and the private file with their tokens and device sessions."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from stoker.errors import StokerError
from stoker.paths import open_privately, private_directory, try_lock, write_atomically

# A writer holds the lock for milliseconds; a suspended one must not block the page.
_LOCK_TIMEOUT: Final = 3.0
_RETRY_INTERVAL: Final = 0.02


Role = Literal["viewer", "operator"]


class User(NamedTuple):
    role: Role
    name: str
    """The name of the token."""
    session: str | None
    """The digest of the device's session; None for a program that sends its token with every request."""
    token: str = ""
    """The id of the token, not its secret."""

    @property
    def operates(self) -> bool:
        """Whether the user may make changes, and so run commands."""
        return self.role == "operator"


class Token(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    role: Role
    secret: str
    """In plain text: the link must be printable again. The file is as private as an SSH key."""
    created: float
    """Seconds since the epoch, like all times here."""
    seen: float | None = None
    """When a program last used it; requests of a device count for its session."""


class DeviceSession(msgspec.Struct, frozen=True, kw_only=True):
    """A device that is logged in."""

    digest: str
    """SHA-256 of the secret in its cookie: this file is not enough to forge a cookie."""
    token: str
    """The id of the token it logged in with."""
    created: float
    seen: float
    agent: str
    """The browser's User-Agent, shortened."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    address: str = ""
    """The page's address at its last start, for links that are printed later."""
    tokens: tuple[Token, ...] = ()
    sessions: tuple[DeviceSession, ...] = ()


class Stamp(msgspec.Struct, frozen=True):
    """Changes whenever the file is written."""

    inode: int
    modified: int
    size: int
    mode: int


class KeyFile:
    """`tokens.json` in the state directory, of mode 0600."""

    def __init__(self, home: Path) -> None:
        self.path = home / "tokens.json"

    def stamp(self) -> Stamp | None:
        """None if there is no file. Opens it, because NFS revalidates its cache only on open."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _stamp(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def read(self) -> tuple[Contents, Stamp | None]:
        """Empty contents without a file; StokerError if it is unreadable, invalid or not private."""
        try:
            with self.path.open("rb") as file:
                found = _stamp(os.fstat(file.fileno()))
                text = file.read()
        except FileNotFoundError:
            return Contents(), None
        except OSError as error:
            raise StokerError(f"cannot read the tokens in {self.path}: {error.strerror}") from None
        if found.mode & 0o077:
            raise StokerError(
                f"other users can read the tokens in {self.path}: run `chmod 600 {self.path}`,"
                " and revoke the tokens if somebody may have read them"
            )
        try:
            return msgspec.json.decode(text, type=Contents), found
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StokerError(
                f"{self.path} is not a valid token file ({error}): repair it, or remove it to start over"
            ) from None

    def write(self, contents: Contents) -> Stamp:
        """Replaces the file atomically; the new one is private from the start, regardless of the umask."""
        text = msgspec.json.format(msgspec.json.encode(contents), indent=1) + b"\n"
        return _stamp(write_atomically(self.path, text, sync=True))

    @contextlib.contextmanager
    def locked(self, timeout: float = _LOCK_TIMEOUT) -> Iterator[None]:
        """One writer at a time, of all processes; OSError after the timeout."""
        private_directory(self.path.parent)
        lock = open_privately(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT)
        try:
            deadline = time.monotonic() + timeout
            while not try_lock(lock):
                if time.monotonic() >= deadline:
                    raise TimeoutError(0, "another process has locked it")
                time.sleep(_RETRY_INTERVAL)
            yield
        finally:
            os.close(lock)


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size, stat.S_IMODE(found.st_mode))
