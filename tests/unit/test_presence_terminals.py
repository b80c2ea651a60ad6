"""Users at terminals and screens, on machines made of plain files."""

import os
import pwd
from pathlib import Path

import pytest

from stoker.presence.terminals import TerminalActivity, Terminals

NOW = 1_800_000_000.0
# The uid of a user: any uid when root runs the tests, else that of the test process.
USER_ID = 54321 if os.geteuid() == 0 else os.geteuid()
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def terminal(root: Path, name: str, *, idle: float, uid: int = USER_ID) -> Path:
    path = root / "dev" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    if os.geteuid() == 0:
        os.chown(path, uid, 0)
    # Output changes the modification time and is not activity of a user.
    os.utime(path, (NOW - idle, NOW))
    return path


def session(root: Path, number: int, **fields: str) -> Path:
    path = root / f"run/systemd/sessions/{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {"UID": "1000", "USER": "alice", "ACTIVE": "1", "STATE": "active", "CLASS": "user", "TYPE": "tty"} | fields
    text = "".join(f"{key}={value}\n" for key, value in known.items())
    path.write_text(f"# This is private data. Do not parse.\n{text}")
    return path


def screen(root: Path, name: str, *, plugged: str = "connected", power: str = "On") -> Path:
    place = root / "sys/class/drm" / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "status").write_text(plugged + "\n")
    (place / "dpms").write_text(power + "\n")
    return place


def test_machine_without_terminals_has_no_users(tmp_path: Path) -> None:
    assert Terminals(tmp_path).activity(NOW) == []


def test_pseudo_terminals_have_their_owner_and_the_most_recent_comes_first(tmp_path: Path) -> None:
    terminal(tmp_path, "pts/0", idle=308)
    terminal(tmp_path, "pts/12", idle=68)
    terminal(tmp_path, "pts/ptmx", idle=0)
    user = name_of(USER_ID)
    assert Terminals(tmp_path).activity(NOW) == [
        TerminalActivity(user, "pts/12", 60.0),
        TerminalActivity(user, "pts/0", 300.0),
    ]


@pytest.mark.parametrize("age", [-3600.0, 0.0, 0.3, 4.0, 7.9])
def test_age_within_the_resolution_of_the_kernel_is_activity(tmp_path: Path, age: float) -> None:
    terminal(tmp_path, "pts/0", idle=age)
    assert Terminals(tmp_path).activity(NOW)[0].idle == 0.0


def test_idle_time_is_never_overestimated(tmp_path: Path) -> None:
    """Input up to 7.9 s after the recorded time may leave it unchanged."""
    terminal(tmp_path, "pts/0", idle=300)
    assert Terminals(tmp_path).activity(NOW)[0].idle <= 300 - 7.9


def test_console_with_a_logged_in_user_counts(tmp_path: Path) -> None:
    terminal(tmp_path, "tty2", idle=100)
    terminal(tmp_path, "tty", idle=0)
    terminal(tmp_path, "tty0", idle=0)
    terminal(tmp_path, "ttyS0", idle=0)
    assert Terminals(tmp_path).activity(NOW) == [TerminalActivity(name_of(USER_ID), "tty2", 92.0)]


@needs_root
def test_consoles_of_root_are_unused_unless_root_has_a_session_there(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        terminal(tmp_path, f"tty{number}", idle=50, uid=0)
    session(tmp_path, 4, UID="0", USER="root", TTY="tty2", SEAT="seat0")
    assert Terminals(tmp_path).activity(NOW) == [TerminalActivity("root", "tty2", 42.0)]


@needs_root
def test_root_at_a_pseudo_terminal_is_a_user(tmp_path: Path) -> None:
    terminal(tmp_path, "pts/3", idle=50, uid=0)
    assert Terminals(tmp_path).activity(NOW) == [TerminalActivity("root", "pts/3", 42.0)]


def test_serial_line_counts_when_another_user_has_a_session_on_it(tmp_path: Path) -> None:
    terminal(tmp_path, "ttyS0", idle=20)
    session(tmp_path, 1, TTY="/dev/ttyS0")
    assert [activity.terminal for activity in Terminals(tmp_path).activity(NOW)] == ["ttyS0"]


@pytest.mark.parametrize("fields", [{"CLASS": "greeter"}, {"CLASS": "manager"}, {"STATE": "closing"}])
@pytest.mark.parametrize("kind", ["wayland", "tty"])
def test_login_screens_managers_and_closing_sessions_are_not_users(
    tmp_path: Path, fields: dict[str, str], kind: str
) -> None:
    terminal(tmp_path, "tty1", idle=0)
    session(tmp_path, 1, TYPE=kind, SEAT="seat0", TTY="tty1", **fields)
    assert Terminals(tmp_path).activity(NOW) == []


def test_session_with_a_missing_terminal_is_not_an_error(tmp_path: Path) -> None:
    session(tmp_path, 1, TTY="pts/9")
    session(tmp_path, 2)
    (tmp_path / "run/systemd/sessions/.#3").write_text("USER=half")
    os.mkfifo(tmp_path / "run/systemd/sessions/1.ref")
    (tmp_path / "run/systemd/sessions/5").write_bytes(b"\xff\xfe no pairs at all\n=\n")
    assert Terminals(tmp_path).activity(NOW) == []


def test_user_at_a_lit_screen_is_active(tmp_path: Path) -> None:
    terminal(tmp_path, "tty2", idle=9999)
    session(tmp_path, 1, TYPE="wayland", SEAT="seat0", TTY="tty2")
    screen(tmp_path, "card0-DP-1", power="Off")
    screen(tmp_path, "card1-HDMI-A-1", power="On")
    assert Terminals(tmp_path).activity(NOW) == [TerminalActivity("alice", "seat0 (wayland)", 0.0)]


def test_idle_time_counts_while_all_screens_are_dark(tmp_path: Path) -> None:
    session(tmp_path, 1, TYPE="x11", SEAT="seat0", DISPLAY=":0")
    lit = screen(tmp_path, "card0-DP-1", power="On")
    screen(tmp_path, "card0-DP-2", plugged="disconnected", power="On")
    terminals = Terminals(tmp_path)

    def idle(at: float) -> float:
        return terminals.activity(at)[0].idle

    assert idle(NOW) == 0
    screen(tmp_path, lit.name, power="Off")
    assert [idle(NOW + seconds) for seconds in (10, 70, 310)] == [0, 60, 300]
    screen(tmp_path, lit.name, power="On")
    assert idle(NOW + 320) == 0


def test_user_with_an_unreadable_screen_is_active(tmp_path: Path) -> None:
    session(tmp_path, 1, TYPE="x11", DISPLAY=":10", REMOTE="1")
    session(tmp_path, 2, USER="bob", TYPE="wayland", SEAT="seat0")
    assert Terminals(tmp_path).activity(NOW) == [
        TerminalActivity("alice", ":10 (x11)", 0.0),
        TerminalActivity("bob", "seat0 (wayland)", 0.0),
    ]


def test_inactive_session_is_not_at_the_screen(tmp_path: Path) -> None:
    session(tmp_path, 1, TYPE="x11", SEAT="seat0", ACTIVE="0", STATE="online")
    assert Terminals(tmp_path).activity(NOW) == []
