"""The file of tokens and device sessions: nobody else ever reads it, and writers take turns."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import StokerError
from stoker.paths import open_privately, private_directory, try_lock, write_atomically
from stoker.web.auth.user import Role

# A writer holds the lock for milliseconds; one that is stopped must not stop the page too.
_PATIENCE: Final = 3.0
_BETWEEN_TRIES: Final = 0.02


class Token(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    role: Role
    secret: str
    """As it is: the link must be printable again. The file is as private as an SSH key."""
    created: float
    """Seconds since the epoch, like every time here."""
    seen: float | None = None
    """When a program last showed it; a device's visits count for its session."""


class DeviceSession(msgspec.Struct, frozen=True, kw_only=True):
    """A device that was let in."""

    digest: str
    """SHA-256 of the secret in its cookie: who reads this file cannot make the cookie of somebody's phone."""
    token: str
    """The id of the token that let it in."""
    created: float
    seen: float
    agent: str
    """What the browser calls itself, shortened."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    address: str = ""
    """Where the page was when it last started, for links that are printed later."""
    tokens: tuple[Token, ...] = ()
    sessions: tuple[DeviceSession, ...] = ()


class Stamp(msgspec.Struct, frozen=True):
    """What differs when the file was written again."""

    inode: int
    modified: int
    size: int
    mode: int


class KeyFile:
    """`tokens.json` in the state directory, of mode 0600."""

    def __init__(self, home: Path) -> None:
        self.path = home / "tokens.json"

    def stamp(self) -> Stamp | None:
        """Which state the file is in; None when there is none.

        It is opened for that: a file server then asks again instead of telling what it remembers.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _stamp(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def read(self) -> tuple[Contents, Stamp | None]:
        """What is in it, nothing when it is not there. StokerError when it is not what it should be."""
        try:
            with self.path.open("rb") as file:
                found = _stamp(os.fstat(file.fileno()))
                text = file.read()
        except FileNotFoundError:
            return Contents(), None
        except OSError as error:
            raise StokerError(f"the tokens in {self.path} cannot be read: {error.strerror}") from None
        if found.mode & 0o077:
            raise StokerError(
                f"others can read the tokens in {self.path}: run `chmod 600 {self.path}`,"
                " and revoke them if somebody may have"
            )
        try:
            return msgspec.json.decode(text, type=Contents), found
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StokerError(
                f"{self.path} is not what `stoker tokens` wrote ({error}): mend it, or remove it to begin anew"
            ) from None

    def write(self, contents: Contents) -> Stamp:
        """Puts a new file in the old one's place. It is private from its first moment, whatever the umask."""
        text = msgspec.json.format(msgspec.json.encode(contents), indent=1) + b"\n"
        return _stamp(write_atomically(self.path, text, sync=True))

    @contextlib.contextmanager
    def locked(self, patience: float = _PATIENCE) -> Iterator[None]:
        """One writer at a time, of all processes. OSError when the lock is not to be had."""
        private_directory(self.path.parent)
        lock = open_privately(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT)
        try:
            ends = time.monotonic() + patience
            while not try_lock(lock):
                if time.monotonic() >= ends:
                    raise TimeoutError(0, "another process has been writing it for seconds")
                time.sleep(_BETWEEN_TRIES)
            yield
        finally:
            os.close(lock)


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size, stat.S_IMODE(found.st_mode))
