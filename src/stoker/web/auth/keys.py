"""Who may come in: tokens that people make and revoke, and the devices that were let in with them.

What `stoker tokens` does in another process is seen within a second. A disk that is full costs a device no more than
having to show its token again after the next start: what cannot be written is kept in mind. A disk that is slow costs
only whoever logs in or out: the gate never waits until something is written.
"""

import contextlib
import hashlib
import hmac
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.web.auth.key_file import Contents, DeviceSession, KeyFile, Stamp, Token
from stoker.web.auth.user import Role, User

__all__ = ["DeviceSession", "Keys", "Token", "key_id"]

# Recognizable, so that the access log, and whoever searches a repository for secrets, can tell one.
TOKEN_PREFIX: Final = "stk_"  # noqa: S105 - not a secret, but how one begins
# 192 bits: beyond guessing, and still a QR code that fits a terminal.
_TOKEN_BYTES: Final = 24
_SESSION_BYTES: Final = 32
# How long after its change the file is looked at, at the latest: half of the promised second.
_LOOK_EVERY: Final = 0.5
# When a device was last here matters to the hour; every visit written would wear the disk.
_WRITE_SEEN_EVERY: Final = 300.0
# Whoever asks the gate meanwhile waits as long for another writer.
_SHORT_PATIENCE: Final = 0.3
# Browsers keep no cookie for longer.
KEPT_FOR: Final = 400 * 24 * 3600.0
# More devices than a person has, for each token: whoever shares one widely pushes out nobody who has another. The one
# that was away for longest makes room.
_MOST_SESSIONS: Final = 50
_LONGEST_AGENT: Final = 120
_LONGEST_NAME: Final = 60

T = TypeVar("T")


class Keys:
    """The tokens and sessions of one state directory. Safe to use from several threads."""

    def __init__(self, home: Path) -> None:
        self._file = KeyFile(home)
        self._turn = threading.RLock()
        self._contents = Contents()
        self._stamp: Stamp | None = None
        self._looked = float("-inf")
        self._problem: str | None = None
        self._unwritten: dict[str, DeviceSession] = {}
        """Sessions that the disk did not take, by digest."""
        self._ended: set[str] = set()
        """Sessions that were ended and that the disk still has."""
        self._seen: dict[str, float] = {}
        """When devices and tokens were here last, by digest or id, since it was written."""
        self._seen_written = time.monotonic()

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def problem(self) -> str | None:
        """Why nobody can be let in at the moment."""
        self._look()
        return self._problem

    # What people do with tokens; StokerError says why it could not be done.

    def tokens(self) -> tuple[Token, ...]:
        return self._now().tokens

    def sessions(self) -> tuple[DeviceSession, ...]:
        """The devices that may come, with the time of their last visit."""
        contents = self._now()
        with self._turn:
            return self._alive(contents).sessions

    def first(self) -> Token:
        """The oldest token that may do everything; it is made when there is none, as on the first start."""
        return next((token for token in self.tokens() if token.role == "operator"), None) or self._changed(_with_first)

    def add(self, name: str, role: Role) -> Token:
        """A new token. Its name is what the access log calls whoever uses it."""
        name = name.strip()
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise BadInputError(f"a token's name is 1 to {_LONGEST_NAME} printable letters, not {name!r}")

        def with_it(contents: Contents) -> tuple[Contents, Token]:
            if any(token.name == name for token in contents.tokens):
                raise BadInputError(
                    f"there is a token named {name!r} already: choose another --name, or revoke that one"
                )
            return _with_token(contents, name, role)

        return self._changed(with_it)

    def token(self, called: str) -> Token:
        """By its id or its name."""
        return _find(self._now(), called)

    def revoke(self, called: str) -> tuple[Token, int]:
        """Ends a token, and every device that it let in: how many those were."""

        def without(contents: Contents) -> tuple[Contents, tuple[Token, int]]:
            token = _find(contents, called)
            kept = tuple(session for session in contents.sessions if session.token != token.id)
            others = tuple(other for other in contents.tokens if other.id != token.id)
            changed = msgspec.structs.replace(contents, tokens=others, sessions=kept)
            return changed, (token, len(contents.sessions) - len(kept))

        return self._changed(without)

    def address(self) -> str:
        """Where the page was when it last started; empty when it never did."""
        return self._now().address

    def remember_address(self, address: str) -> None:
        """For links that are printed later. A disk that is full costs those no more than their first half."""
        with contextlib.suppress(StokerError):
            if self.address() != address:
                self._changed(lambda contents: (msgspec.structs.replace(contents, address=address), None))

    # What the gate asks; it never raises for a disk that is full, gone or read-only. Only `enter` and `leave` wait for
    # one that is slow.

    def recognizes(self, secret: str) -> bool:
        """Whether a token is right at this moment."""
        return self._by_secret(secret) is not None

    def enter(self, secret: str, agent: str = "") -> tuple[User, str] | None:
        """Lets a device in: who it is, and the secret for its cookie. None when the token is not right."""
        token = self._by_secret(secret)
        if token is None:
            return None
        cookie = secrets.token_urlsafe(_SESSION_BYTES)
        now = time.time()
        shown = "".join(letter for letter in agent if letter.isprintable())[:_LONGEST_AGENT]
        session = DeviceSession(digest=_digest(cookie), token=token.id, created=now, seen=now, agent=shown)
        with self._turn:
            kept = _newest_of_each((*self._unwritten.values(), session))
            self._unwritten = {one.digest: one for one in kept}
        self._settle()
        return _user(token, session), cookie

    def by_token(self, secret: str) -> User | None:
        """A program that shows its token."""
        token = self._by_secret(secret)
        if token is None:
            return None
        self._note(token.id)
        return _user(token, None)

    def by_session(self, cookie: str) -> User | None:
        """A device that shows its cookie."""
        digest = _digest(cookie)
        found = self._known(lambda contents: self._session(contents, digest))
        if found is None:
            return None
        token, session = found
        self._note(digest)
        return _user(token, session)

    def still_valid(self, user: User) -> bool:
        """Whether somebody who was let in may stay: neither logged out nor revoked meanwhile."""
        self._look()
        if user.session is not None:
            return self._session(self._contents, user.session) is not None
        return any(token.id == user.token for token in self._contents.tokens)

    def leave(self, cookie: str) -> None:
        """Ends one device's session; the token stays good."""
        digest = _digest(cookie)
        with self._turn:
            if self._session(self._contents, digest) is None:
                return
            if self._unwritten.pop(digest, None) is None:
                self._ended.add(digest)
        self._settle()

    # How the file is followed

    def _now(self) -> Contents:
        """What the file says at this moment; StokerError when it cannot be read."""
        with self._turn:
            self._looked = time.monotonic()
            self._read()
            return self._contents

    def _look(self, patience: float = _LOOK_EVERY) -> None:
        """Reads the file again if it has changed."""
        if time.monotonic() - self._looked < patience or not self._turn.acquire(blocking=False):
            # Who has the turn is at the file, perhaps on a slow disk, and will know: what was known has to do.
            return
        try:
            self._looked = time.monotonic()
            # Too many open files, a file server that is away: what was known is still true then.
            with contextlib.suppress(OSError, StokerError):
                if self._problem is not None or self._stamp is None or self._file.stamp() != self._stamp:
                    self._read()
        finally:
            self._turn.release()

    def _read(self) -> None:
        """A file that is not in order lets nobody in until it is."""
        try:
            self._contents, self._stamp = self._file.read()
            self._problem = None
        except StokerError as error:
            self._contents, self._stamp, self._problem = Contents(), None, str(error)
            raise

    def _known(self, find: Callable[[Contents], T | None]) -> T | None:
        """Looks it up, and looks at the file once more before saying that it is not there."""
        self._look()
        found = find(self._contents)
        if found is None:
            self._look(patience=0.0)
            found = find(self._contents)
        return found

    def _by_secret(self, secret: str) -> Token | None:
        shown = _digest(secret.strip())

        def right(contents: Contents) -> Token | None:
            # All are compared, by digests and in constant time: how long it takes tells nothing.
            equal = [token for token in contents.tokens if hmac.compare_digest(_digest(token.secret), shown)]
            return equal[0] if equal else None

        return self._known(right)

    def _session(self, contents: Contents, digest: str) -> tuple[Token, DeviceSession] | None:
        if digest in self._ended:
            return None
        session = self._unwritten.get(digest) or next((s for s in contents.sessions if s.digest == digest), None)
        if session is None or session.created < time.time() - KEPT_FOR:
            return None
        token = next((token for token in contents.tokens if token.id == session.token), None)
        return None if token is None else (token, session)

    # How the file is changed

    def _changed(self, change: Callable[[Contents], tuple[Contents, T]], patience: float | None = None) -> T:
        """Changes what is in the file at this moment, with what was kept in mind; StokerError when it cannot."""
        with self._turn:
            try:
                with self._file.locked() if patience is None else self._file.locked(patience):
                    contents, answer = change(self._file.read()[0])
                    contents = self._alive(contents)
                    self._stamp = self._file.write(contents)
            except OSError as error:
                raise StokerError(f"{self.path} cannot be written: {error.strerror or error}") from None
            self._contents, self._problem, self._looked = contents, None, time.monotonic()
            self._unwritten.clear()
            self._ended.clear()
            self._seen.clear()
            self._seen_written = time.monotonic()
            return answer

    def _settle(self) -> None:
        """Writes what is kept in mind, if the disk takes it."""
        with contextlib.suppress(StokerError):
            self._changed(lambda contents: (contents, None), _SHORT_PATIENCE)

    def _note(self, who: str) -> None:
        """Remembers a visit, and now and then has it written down."""
        self._seen[who] = time.time()
        if time.monotonic() - self._seen_written >= _WRITE_SEEN_EVERY:
            self._seen_written = time.monotonic()
            # Who visits does not wait for the disk, nor is turned away where there can be no more threads.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._write_seen, name="visits", daemon=True).start()

    def _write_seen(self) -> None:
        with contextlib.suppress(StokerError):
            # It is no more than a time in a table: nobody waits for another writer because of it.
            self._changed(lambda contents: (contents, None), patience=0.0)

    def _alive(self, contents: Contents) -> Contents:
        """With what was kept in mind, and without what is over."""
        tokens = tuple(
            msgspec.structs.replace(token, seen=max(self._seen.get(token.id, 0.0), token.seen or 0.0) or None)
            for token in contents.tokens
        )
        there = {token.id for token in tokens}
        oldest = time.time() - KEPT_FOR
        sessions = [
            msgspec.structs.replace(session, seen=max(self._seen.get(session.digest, 0.0), session.seen))
            for session in (*contents.sessions, *self._unwritten.values())
            if session.token in there and session.digest not in self._ended and session.created > oldest
        ]
        return msgspec.structs.replace(contents, tokens=tokens, sessions=tuple(_newest_of_each(sessions)))


def key_id() -> str:
    """Six hexadecimal digits: enough to tell tokens apart, few enough to type."""
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
    names = {token.name for token in contents.tokens}
    name = next(
        candidate for candidate in ("operator", *map("operator-{}".format, range(2, 9999))) if candidate not in names
    )
    return _with_token(contents, name, "operator")


def _find(contents: Contents, called: str) -> Token:
    for token in contents.tokens:
        if called in {token.id, token.name}:
            return token
    raise BadInputError(f"there is no token {called!r}: `stoker tokens` lists those that there are")


def _user(token: Token, session: DeviceSession | None) -> User:
    return User(token.role, token.name, None if session is None else session.digest, token.id)


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode(errors="replace")).hexdigest()


def _newest_of_each(sessions: Iterable[DeviceSession]) -> list[DeviceSession]:
    """In the order of their last visits, of each token as many as it may have."""
    of_token: defaultdict[str, list[DeviceSession]] = defaultdict(list)
    for session in sorted(sessions, key=lambda session: session.seen):
        of_token[session.token].append(session)
    kept = (session for group in of_token.values() for session in group[-_MOST_SESSIONS:])
    return sorted(kept, key=lambda session: session.seen)
