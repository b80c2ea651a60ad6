"""The login sessions of this machine, from the files that logind keeps of them: no bus, no privilege.

What these files hold is what sd-login(3) tells of a session: user, class, state, type, seat and terminal. Whether a
graphical session is idle or locked is not among it; only the desktop knows, and only its user's bus tells.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class LoginSession(NamedTuple):
    """One session, as far as its file tells."""

    user: str
    person: bool
    """Whether it is somebody's: not a login screen, a service manager, a timer's."""
    closing: bool
    """Its person has left and only some of its processes stay."""
    in_front: bool
    """Whether its seat shows it; a session without a seat is always in front."""
    kind: str
    """tty, x11, wayland, mir, web or unspecified."""
    seat: str | None
    terminal: str | None
    """Such as tty2 or pts/3."""
    display: str | None
    """Such as :0, of an X11 session."""

    @property
    def graphical(self) -> bool:
        return self.kind in ("x11", "wayland", "mir")


def read_sessions(root: Path) -> list[LoginSession]:
    """All sessions; none where there is no logind. One that ends while it is read is none either."""
    try:
        files = sorted((root / "run/systemd/sessions").iterdir())
    except OSError:
        return []
    return list(_sessions(files))


def _sessions(files: list[Path]) -> Iterator[LoginSession]:
    for path in files:
        try:
            # Beside a session's file lie its pipe (.ref) and, for a moment, the file that will replace it.
            if path.name.startswith(".") or not path.is_file():
                continue
            text = path.read_text(errors="replace")
        except OSError:
            continue
        fields = dict(_pairs(text))
        user = fields.get("USER") or fields.get("UID")
        if user:
            yield _session(user, fields)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not key.startswith("#"):
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            yield key, value[1:-1] if quoted else value


def _session(user: str, fields: dict[str, str]) -> LoginSession:
    return LoginSession(
        user=user,
        # user, user-early, user-light…; not greeter, lock-screen, manager, background. Old files have no class.
        person=fields.get("CLASS", "user").startswith("user"),
        closing=fields.get("STATE") == "closing",
        in_front=fields.get("ACTIVE", "1") == "1",
        kind=fields.get("TYPE", "unspecified"),
        seat=fields.get("SEAT") or None,
        terminal=(fields.get("TTY") or "").removeprefix("/dev/") or None,
        display=fields.get("DISPLAY") or None,
    )
