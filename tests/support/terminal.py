"""A program on a real pty: its screen, and keys sent to it."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping
from typing import Any

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
PATIENCE = 60.0


class Terminal:
    def __init__(self, command: list[str], environment: Mapping[str, str], columns: int = 80, lines: int = 24) -> None:
        pid, terminal = pty.fork()
        if pid == 0:
            # Not before the terminal has its size.
            os.read(0, 1)
            os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", **environment})
        self.pid, self._terminal = pid, terminal
        self.resize(columns, lines)
        self.modes: list[Any] = termios.tcgetattr(terminal)
        os.write(terminal, b"\n")
        # What was drawn comes in pieces that may end within a letter.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.drawn = ""
        """All that was drawn so far."""

    @property
    def text(self) -> str:
        """The same without colours and movements."""
        return _ESCAPES.sub("", self.drawn)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def modes_now(self) -> list[Any]:
        return termios.tcgetattr(self._terminal)

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def until(self, text: str, since: int = 0) -> int:
        """Waits until it has drawn this, colours aside; how much was drawn until then."""
        ends = time.monotonic() + PATIENCE
        while text not in _ESCAPES.sub("", self.drawn[since:]):
            assert time.monotonic() < ends, f"{text!r} was never drawn, but {_ESCAPES.sub('', self.drawn[since:])!r}"
            self._read(0.5)
        return len(self.drawn)

    def do(self, keys: str, text: str) -> None:
        """Presses keys and waits for what is drawn then."""
        while self._is_ready(0) and self._read(0):
            pass  # of before, and not read yet
        before = len(self.drawn)
        self.press(keys)
        self.until(text, before)

    def code(self) -> int:
        """Its exit code, once it has ended."""
        ends = time.monotonic() + PATIENCE
        while self._read(0.5):
            assert time.monotonic() < ends, self.drawn
        _pid, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self, seconds: float) -> bool:
        if not self._is_ready(seconds):
            return True
        try:
            piece = os.read(self._terminal, 65536)
        except OSError:
            return False  # how a terminal says that its last user left
        self.drawn += self._decoder.decode(piece)
        return bool(piece)

    def _is_ready(self, seconds: float) -> bool:
        return bool(select.select([self._terminal], [], [], seconds)[0])

    def close(self) -> None:
        os.close(self._terminal)
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@contextlib.contextmanager
def terminal(command: list[str], *, columns: int = 80, lines: int = 24, **environment: str) -> Iterator[Terminal]:
    found = Terminal(command, environment, columns, lines)
    try:
        yield found
    finally:
        found.close()
