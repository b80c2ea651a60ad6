"""Tokens that people create and revoke, and the device sessions that were opened with them.

Changes by `stoker tokens` in another process take effect within a second. Sessions that cannot be written (disk full)
are kept in memory until the next start. Only login and logout wait for the disk; other requests never do.
"""

import contextlib
import hashlib
import hmac
import itertools
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.web.auth.key_file import Contents, DeviceSession, KeyFile, Role, Stamp, Token, User

__all__ = ["DeviceSession", "Keys", "Token", "key_id", "last_seen"]

# Recognizable, for the access log and for secret scanners.
TOKEN_PREFIX: Final = "stk_"  # noqa: S105 - not a secret, but how one begins
# 192 bits, in a QR code that still fits a terminal.
_TOKEN_BYTES: Final = 24
_SESSION_BYTES: Final = 32
# How often the file is checked for changes: half of the promised second.
_CHECK_EVERY: Final = 0.5
# `seen` is needed to the hour; writing it with every request would wear the disk.
_WRITE_SEEN_EVERY: Final = 300.0
# How long login and logout wait for another writer.
_SHORT_TIMEOUT: Final = 0.3
# Browsers keep no cookie for longer.
KEPT_FOR: Final = 400 * 24 * 3600.0
# For each token; the session that was unused for longest is dropped. A widely shared token affects no other token.
_MAX_SESSIONS: Final = 50
_MAX_AGENT_LENGTH: Final = 120
_MAX_NAME_LENGTH: Final = 60

T = TypeVar("T")


class Keys:
    """The tokens and sessions of one state directory. Safe to use from several threads."""

    def __init__(self, home: Path) -> None:
        self._file = KeyFile(home)
        self._lock = threading.RLock()
        self._contents = Contents()
        self._stamp: Stamp | None = None
        self._checked = float("-inf")
        self._problem: str | None = None
        self._unwritten: dict[str, DeviceSession] = {}
        """Sessions that could not be written yet, by digest."""
        self._ended: set[str] = set()
        """Sessions that ended and are still in the file, by digest."""
        self._seen: dict[str, float] = {}
        """When sessions and tokens were last used since the last write, by digest or id."""
        self._seen_written = time.monotonic()

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def problem(self) -> str | None:
        """Why the file cannot be used; nobody can log in then."""
        self._refresh()
        return self._problem

    # Administration; StokerError if the file cannot be read or written.

    def tokens(self) -> tuple[Token, ...]:
        return self._read_now().tokens

    def sessions(self) -> tuple[DeviceSession, ...]:
        """The devices that are logged in."""
        contents = self._read_now()
        with self._lock:
            return self._current(contents).sessions

    def first(self) -> Token:
        """The oldest operator token; created if there is none."""
        return next((token for token in self.tokens() if token.role == "operator"), None) or self._change(_with_first)

    def add(self, name: str, role: Role) -> Token:
        """Creates a token. The access log names its users by `name`."""
        name = name.strip()
        if not name or len(name) > _MAX_NAME_LENGTH or not name.isprintable():
            raise BadInputError(f"a token's name must have 1 to {_MAX_NAME_LENGTH} printable characters, not {name!r}")

        def added(contents: Contents) -> tuple[Contents, Token]:
            if any(token.name == name for token in contents.tokens):
                raise BadInputError(
                    f"there is already a token named {name!r}: choose another --name, or revoke that token"
                )
            return _with_token(contents, name, role)

        return self._change(added)

    def free_name(self, role: Role) -> str:
        """A name that no token has: the role, or so with a number behind it."""
        taken = {token.name for token in self.tokens()}
        names = (role if number == 1 else f"{role}-{number}" for number in itertools.count(1))
        return next(name for name in names if name not in taken)

    def token(self, name: str) -> Token:
        """The token with this name or id."""
        return _find(self._read_now(), name)

    def revoke(self, name: str) -> tuple[Token, int]:
        """Removes a token and its sessions; returns it and the number of sessions."""

        def removed(contents: Contents) -> tuple[Contents, tuple[Token, int]]:
            token = _find(contents, name)
            kept = tuple(session for session in contents.sessions if session.token != token.id)
            others = tuple(other for other in contents.tokens if other.id != token.id)
            changed = msgspec.structs.replace(contents, tokens=others, sessions=kept)
            return changed, (token, len(contents.sessions) - len(kept))

        return self._change(removed)

    def address(self) -> str:
        """The page's address at its last start; empty before the first."""
        return self._read_now().address

    def remember_address(self, address: str) -> None:
        """For links that are printed later; a failure to write is ignored."""
        with contextlib.suppress(StokerError):
            if self.address() != address:
                self._change(lambda contents: (msgspec.structs.replace(contents, address=address), None))

    # For the authentication middleware: never raises for a disk that is full, missing or read-only. Only `log_in` and
    # `log_out` wait for a slow disk.

    def is_valid(self, secret: str) -> bool:
        """Whether this is the secret of a token."""
        return self._by_secret(secret) is not None

    def log_in(self, secret: str, agent: str = "") -> tuple[User, str] | None:
        """Opens a session: its user and the secret for its cookie. None if the token is invalid."""
        token = self._by_secret(secret)
        if token is None:
            return None
        cookie = secrets.token_urlsafe(_SESSION_BYTES)
        now = time.time()
        agent = "".join(letter for letter in agent if letter.isprintable())[:_MAX_AGENT_LENGTH]
        session = DeviceSession(digest=_digest(cookie), token=token.id, created=now, seen=now, agent=agent)
        with self._lock:
            kept = _limited((*self._unwritten.values(), session))
            self._unwritten = {one.digest: one for one in kept}
        self._write_pending()
        return _user(token, session), cookie

    def by_token(self, secret: str) -> User | None:
        """The user of a program that sends its token."""
        token = self._by_secret(secret)
        if token is None:
            return None
        self._record_use(token.id)
        return _user(token, None)

    def by_session(self, cookie: str) -> User | None:
        """The user of a device that sends its cookie."""
        digest = _digest(cookie)
        found = self._lookup(lambda contents: self._session(contents, digest))
        if found is None:
            return None
        token, session = found
        self._record_use(digest)
        return _user(token, session)

    def still_valid(self, user: User) -> bool:
        """Whether the user has neither logged out nor lost the token since."""
        self._refresh()
        if user.session is not None:
            return self._session(self._contents, user.session) is not None
        return any(token.id == user.token for token in self._contents.tokens)

    def log_out(self, cookie: str) -> None:
        """Ends one session; the token stays valid."""
        digest = _digest(cookie)
        with self._lock:
            if self._session(self._contents, digest) is None:
                return
            if self._unwritten.pop(digest, None) is None:
                self._ended.add(digest)
        self._write_pending()

    # Reading the file

    def _read_now(self) -> Contents:
        """The current contents; StokerError if the file cannot be read."""
        with self._lock:
            self._checked = time.monotonic()
            self._read()
            return self._contents

    def _refresh(self, max_age: float = _CHECK_EVERY) -> None:
        """Reads the file again if it changed since."""
        if time.monotonic() - self._checked < max_age or not self._lock.acquire(blocking=False):
            # Another thread is reading or writing the file, perhaps on a slow disk: the known contents are used.
            return
        try:
            self._checked = time.monotonic()
            # Too many open files, or a file server that is down: the known contents stay valid.
            with contextlib.suppress(OSError, StokerError):
                if self._problem is not None or self._stamp is None or self._file.stamp() != self._stamp:
                    self._read()
        finally:
            self._lock.release()

    def _read(self) -> None:
        """With an invalid file nobody is logged in until it is repaired."""
        try:
            self._contents, self._stamp = self._file.read()
            self._problem = None
        except StokerError as error:
            self._contents, self._stamp, self._problem = Contents(), None, str(error)
            raise

    def _lookup(self, find: Callable[[Contents], T | None]) -> T | None:
        """Checks the file again before it returns None."""
        self._refresh()
        found = find(self._contents)
        if found is None:
            self._refresh(max_age=0.0)
            found = find(self._contents)
        return found

    def _by_secret(self, secret: str) -> Token | None:
        digest = _digest(secret.strip())

        def matching(contents: Contents) -> Token | None:
            # Compares digests of all tokens in constant time: the duration reveals nothing.
            equal = [token for token in contents.tokens if hmac.compare_digest(_digest(token.secret), digest)]
            return equal[0] if equal else None

        return self._lookup(matching)

    def _session(self, contents: Contents, digest: str) -> tuple[Token, DeviceSession] | None:
        if digest in self._ended:
            return None
        session = self._unwritten.get(digest) or next((s for s in contents.sessions if s.digest == digest), None)
        if session is None or session.created < time.time() - KEPT_FOR:
            return None
        token = next((token for token in contents.tokens if token.id == session.token), None)
        return None if token is None else (token, session)

    # Writing the file

    def _change(self, change: Callable[[Contents], tuple[Contents, T]], timeout: float | None = None) -> T:
        """Changes the current contents and writes them with the pending sessions; StokerError on failure."""
        with self._lock:
            try:
                with self._file.locked() if timeout is None else self._file.locked(timeout):
                    contents, answer = change(self._file.read()[0])
                    contents = self._current(contents)
                    self._stamp = self._file.write(contents)
            except OSError as error:
                raise StokerError(f"cannot write {self.path}: {error.strerror or error}") from None
            self._contents, self._problem, self._checked = contents, None, time.monotonic()
            self._unwritten.clear()
            self._ended.clear()
            self._seen.clear()
            self._seen_written = time.monotonic()
            return answer

    def _write_pending(self) -> None:
        """Writes the pending sessions; a failure is ignored."""
        with contextlib.suppress(StokerError):
            self._change(lambda contents: (contents, None), _SHORT_TIMEOUT)

    def _record_use(self, key: str) -> None:
        """Remembers when a token or session was used, and writes it from time to time."""
        self._seen[key] = time.time()
        if time.monotonic() - self._seen_written >= _WRITE_SEEN_EVERY:
            self._seen_written = time.monotonic()
            # In a thread, because requests do not wait for the disk; without it if no thread can be started.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._write_seen, name="write-seen", daemon=True).start()

    def _write_seen(self) -> None:
        with contextlib.suppress(StokerError):
            # A time in a table is not worth waiting for another writer.
            self._change(lambda contents: (contents, None), timeout=0.0)

    def _current(self, contents: Contents) -> Contents:
        """`contents` with the pending sessions, without those that ended or expired."""
        tokens = tuple(
            msgspec.structs.replace(token, seen=max(self._seen.get(token.id, 0.0), token.seen or 0.0) or None)
            for token in contents.tokens
        )
        ids = {token.id for token in tokens}
        oldest = time.time() - KEPT_FOR
        sessions = [
            msgspec.structs.replace(session, seen=max(self._seen.get(session.digest, 0.0), session.seen))
            for session in (*contents.sessions, *self._unwritten.values())
            if session.token in ids and session.digest not in self._ended and session.created > oldest
        ]
        return msgspec.structs.replace(contents, tokens=tokens, sessions=tuple(_limited(sessions)))


def last_seen(token: Token, devices: Iterable[DeviceSession]) -> float | None:
    """When the token or one of the devices that logged in with it was last used."""
    return max((at for at in (token.seen, *(one.seen for one in devices)) if at is not None), default=None)


def key_id() -> str:
    """Six hexadecimal digits, short enough to type."""
    return secrets.token_hex(3)


def _with_token(contents: Contents, name: str, role: Role) -> tuple[Contents, Token]:
    used = {token.id for token in contents.tokens}
    fresh = next(candidate for candidate in iter(key_id, "") if candidate not in used)
    secret = TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    token = Token(id=fresh, name=name, role=role, secret=secret, created=time.time())
    return msgspec.structs.replace(contents, tokens=(*contents.tokens, token)), token


def _with_first(contents: Contents) -> tuple[Contents, Token]:
    """Another process may have been faster: then its token is the one."""
    for token in contents.tokens:
        if token.role == "operator":
            return contents, token
    is_taken = any(token.name == "operator" for token in contents.tokens)
    name = f"operator-{key_id()}" if is_taken else "operator"
    return _with_token(contents, name, "operator")


def _find(contents: Contents, name: str) -> Token:
    for token in contents.tokens:
        if name in {token.id, token.name}:
            return token
    raise BadInputError(f"there is no token {name!r}: `stoker tokens` lists the tokens")


def _user(token: Token, session: DeviceSession | None) -> User:
    return User(token.role, token.name, None if session is None else session.digest, token.id)


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode(errors="replace")).hexdigest()


def _limited(sessions: Iterable[DeviceSession]) -> list[DeviceSession]:
    """The most recently used sessions of each token, up to its limit, oldest first."""
    by_token: defaultdict[str, list[DeviceSession]] = defaultdict(list)
    for session in sorted(sessions, key=lambda session: session.seen):
        by_token[session.token].append(session)
    kept = (session for group in by_token.values() for session in group[-_MAX_SESSIONS:])
    return sorted(kept, key=lambda session: session.seen)
