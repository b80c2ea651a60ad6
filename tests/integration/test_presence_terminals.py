"""Activity at real pseudo-terminals."""

import contextlib
import os
import pty
import pwd
import time
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.presence.terminals import TerminalActivity, Terminals


@pytest.fixture
def terminal() -> Iterator[tuple[int, int, Path]]:
    master, slave = pty.openpty()
    path = Path(os.ttyname(slave))
    if path.parent != Path("/dev/pts"):
        pytest.skip("pseudo-terminals are elsewhere here")
    tty.setraw(slave)
    yield master, slave, path
    for descriptor in (master, slave):
        with contextlib.suppress(OSError):  # A test may have closed it.
            os.close(descriptor)


def at(path: Path) -> TerminalActivity | None:
    name = f"pts/{path.name}"
    return next((each for each in Terminals().activity(time.time()) if each.terminal == name), None)


def test_input_is_activity_and_output_is_not(terminal: tuple[int, int, Path]) -> None:
    master, slave, path = terminal
    long_ago = time.time() - 1000
    os.utime(path, (long_ago, long_ago))
    os.write(slave, b"output")
    os.read(master, 100)
    quiet = at(path)
    assert quiet is not None
    assert quiet.user == pwd.getpwuid(os.geteuid()).pw_name
    assert 990 <= quiet.idle <= 1100
    os.write(master, b"x")
    assert os.read(slave, 1) == b"x"
    typed = at(path)
    assert typed is not None
    assert typed.idle == 0.0


def test_removed_terminal_counts_as_no_user(terminal: tuple[int, int, Path]) -> None:
    master, slave, path = terminal
    os.close(slave)
    os.close(master)
    # Its number may have been reused, but not by a terminal that was idle for that long.
    now = time.time() + 1000
    gone = [each for each in Terminals().activity(now) if each.terminal == f"pts/{path.name}"]
    assert not gone or path.exists()
