"""Users at terminals and screens of this machine, and their idle times.

Terminals record the time of their last input. Graphical sessions report it only on their user's bus, so the power state
of screens is used instead: while a screen is on, its user is active; after all are off, the user is idle. Without a
screen, as with a remote desktop, the user counts as active: unknown is not idle. A session hidden by another one does
not count. Sessions are read from logind's files, without a bus or privileges.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stoker.procfs import user_name

# The kernel records input with a resolution of eight seconds, to hide keystrokes, so the last input may be this much
# later.
COARSENESS: Final = 8.0
# The kernel's MAX_NR_CONSOLES. /dev/tty0 only stands for the console in front.
_CONSOLES: Final = range(1, 64)


class LoginSession(NamedTuple):
    """A login session, from its file."""

    user: str
    person: bool
    """A person is logged in: it is not a login screen, a service manager or a closing session."""
    in_front: bool
    """Its seat shows it; True without a seat."""
    kind: str
    """tty, x11, wayland, mir, web or unspecified."""
    seat: str
    terminal: str
    """The terminal, such as tty2 or pts/3."""
    display: str
    """The display of an X11 session, such as :0."""

    @property
    def graphical(self) -> bool:
        return self.kind in ("x11", "wayland", "mir")


def _sessions(root: Path) -> Iterator[LoginSession]:
    """All sessions; none without logind."""
    try:
        # The directory also has the session's pipe (.ref) and, for a moment, a replacement of its file.
        files = sorted(path for path in (root / "run/systemd/sessions").iterdir() if not path.name.startswith("."))
    except OSError:
        return
    for path in files:
        try:
            text = path.read_text(errors="replace") if path.is_file() else ""
        except OSError:
            continue
        fields = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in text.splitlines())}
        if user := fields.get("USER") or fields.get("UID"):
            yield LoginSession(
                user=user,
                # user, user-early, user-light…; not greeter, lock-screen, manager, background. Old files have no class.
                person=fields.get("CLASS", "user").startswith("user") and fields.get("STATE") != "closing",
                in_front=fields.get("ACTIVE", "1") == "1",
                kind=fields.get("TYPE", "unspecified"),
                seat=fields.get("SEAT", ""),
                terminal=fields.get("TTY", "").removeprefix("/dev/"),
                display=fields.get("DISPLAY", ""),
            )


class TerminalActivity(NamedTuple):
    """A user at this machine."""

    user: str
    terminal: str
    """The terminal, such as pts/3, tty2, seat0 (wayland)."""
    idle: float
    """The lower bound of seconds since the last input; 0 while input is possible."""


class Terminals:
    """Tracks how long the screens have been off; call `activity` repeatedly."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._dark_since: float | None = None

    def activity(self, now_wall: float) -> list[TerminalActivity]:
        """All users at terminals and screens, most recently active first."""
        sessions = list(_sessions(self._root))
        found = [*self._terminals(sessions, now_wall), *self._screens(sessions, now_wall)]
        return sorted(found, key=lambda activity: (activity.idle, activity.terminal))

    def _terminals(self, sessions: list[LoginSession], now: float) -> Iterator[TerminalActivity]:
        # The terminal of a graphical session gets no input; one of a login screen or service has no user.
        not_typed_at = {session.terminal for session in sessions if session.graphical or not session.person}
        logged_in = {session.terminal for session in sessions if session.terminal} - not_typed_at
        consoles = {f"tty{number}" for number in _CONSOLES} - not_typed_at
        for name in sorted(logged_in | consoles | self._pseudo_terminals()):
            try:
                found = (self._root / "dev" / name).stat()
            except OSError:
                continue  # it does not exist
            # A console owned by root has no login, unless logind lists one.
            if found.st_uid == 0 and name in consoles and name not in logged_in:
                continue
            yield TerminalActivity(user_name(found.st_uid), name, max(0.0, now - found.st_atime - COARSENESS))

    def _pseudo_terminals(self) -> set[str]:
        """The users of pseudo-terminals by owner, since shells in tmux and over ssh have no login session."""
        try:
            names = [path.name for path in (self._root / "dev/pts").iterdir()]
        except OSError:
            return set()
        return {f"pts/{name}" for name in names if name.isdecimal()}

    def _screens(self, sessions: list[LoginSession], now: float) -> Iterator[TerminalActivity]:
        dark_for = self._dark_for(now)
        for session in sessions:
            if session.person and session.graphical and session.in_front:
                place = session.seat or session.display or "remote"
                idle = dark_for if session.seat else 0.0
                yield TerminalActivity(session.user, f"{place} ({session.kind})", idle)

    def _dark_for(self, now: float) -> float:
        """Seconds since all screens went off; 0 if one is on or none is known."""
        # The connectors of graphics cards with a screen.
        screens = [
            connector
            for connector in (self._root / "sys/class/drm").glob("card[0-9]*-*")
            if _word(connector / "status") == "connected"
        ]
        if not screens or any(_word(screen / "dpms") != "Off" for screen in screens):
            self._dark_since = None
            return 0.0
        if self._dark_since is None or self._dark_since > now:
            self._dark_since = now
        return now - self._dark_since


def _word(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
