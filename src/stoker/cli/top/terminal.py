"""The terminal of `stoker top`: taken over while it runs, always restored."""

import contextlib
import os
import re
import select
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Final, Self

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

# Escape is also the first byte of other keys; a terminal sends their other bytes at once.
_ESCAPE_SECONDS: Final = 0.05
# The index in the result of tcgetattr.
_LOCAL_MODES: Final = 3
_LEAVING: Final = (signal.SIGTERM, signal.SIGHUP)
# A job's output may have changed colours, cursor, margins and modes.
_SOFT_RESET: Final = b"\x1b[!p\x1b[0m"


class TopTerminal:
    """Signals only wake the loop; they are handled between frames."""

    def __init__(self) -> None:
        self._input = sys.stdin.fileno()
        self._console = Console(highlight=False)
        self._keys = KeyReader()
        self._live: Live | None = None
        self._before: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self._asked: set[int] = set()
        self._hung_up = False

    @staticmethod
    def is_there() -> bool:
        return sys.stdin.isatty() and sys.stdout.isatty() and not Console().is_dumb_terminal

    def __enter__(self) -> Self:
        self._wake, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (*_LEAVING, signal.SIGTSTP, signal.SIGWINCH):
            self._handlers[number] = signal.signal(number, self._note)
        self._before = termios.tcgetattr(self._input)
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._give_back()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._wake)
            os.close(self._wake_write)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, from the terminal: an exported COLUMNS does not follow the window."""
        with contextlib.suppress(OSError):  # the terminal is gone; the next read reports it
            self._console.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))
        return self._console.size.width, self._console.size.height

    @property
    def leaves_with(self) -> int | None:
        """The exit code, after a signal or a hangup."""
        if number := next((number for number in _LEAVING if number in self._asked), None):
            return 128 + number
        return 128 + signal.SIGHUP if self._hung_up else None

    def draw(self, lines: Sequence[Text]) -> None:
        if self._live is not None:
            self._live.update(Group(*lines), refresh=True)

    def wait(self, others: Sequence[int], seconds: float) -> list[str]:
        """The pressed keys; returns when there are some, or one of the other descriptors is readable."""
        if signal.SIGTSTP in self._asked:
            self._suspend()
            return []
        poll = select.poll()
        for number in (self._input, self._wake, *others):
            if number >= 0:
                poll.register(number, select.POLLIN)
        left = min(seconds, _ESCAPE_SECONDS) if self._keys.is_waiting else seconds
        ready = {number for number, _event in poll.poll(max(0.0, left) * 1000)}
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if self._input in ready:
            return self._read()
        return self._keys.settle()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """The ordinary screen, for output of another program; keys are still read here."""
        self._leave_screen()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.write(sys.stdout.fileno(), _SOFT_RESET)
            self._enter_screen()

    def _read(self) -> list[str]:
        try:
            data = os.read(self._input, 4096)
        except OSError:
            data = b""
        self._hung_up = not data
        return self._keys.feed(data)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._asked.add(number)

    def _suspend(self) -> None:
        """Ctrl-Z: restores the terminal, stops, and takes it over again afterwards."""
        self._asked.discard(signal.SIGTSTP)
        had_screen = self._live is not None
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._note)
        # The shell may have changed it meanwhile.
        self._before = termios.tcgetattr(self._input)
        self._take(with_screen=had_screen)

    def _take(self, *, with_screen: bool = True) -> None:
        changed = [*self._before]
        changed[_LOCAL_MODES] = self._before[_LOCAL_MODES] & ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(self._input, termios.TCSADRAIN, changed)
        if with_screen:
            self._enter_screen()

    def _give_back(self) -> None:
        try:
            self._leave_screen()
        finally:
            # The terminal may be gone.
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def _enter_screen(self) -> None:
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def _leave_screen(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()


HELP: Final = (
    ("↑ ↓  j k", "select a job; PgUp, PgDn, g and G go further"),
    ("Enter", "details: why, its attempts, its last lines; of a group, its jobs"),
    ("→  ←", "unfold a group to its jobs, or fold it"),
    ("l", "follow its log; q returns"),
    ("c", "cancel it; asks first when it is running"),
    ("r", "run it again"),
    ("h", "hold it, or release it; on a group, c, r and h are for all its jobs and ask once"),
    ("u  d", "move it up or down in the queue"),
    ("s", "snooze: no rule stops it for 30 minutes"),
    ("p", "pause or resume the queue"),
    ("a", "show only your own jobs, or all"),
    ("q", "quit"),
)

_NAMED: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[C": "right",
    "\x1bOC": "right",
    "\x1b[D": "left",
    "\x1bOD": "left",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
    "k": "up",
    "j": "down",
    "g": "home",
    "G": "end",
}
_ONE_KEY: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|\x1b(?![\[O])|[^\x1b]", re.DOTALL)
_BEGUN: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")


class KeyReader:
    """Assembles keys from partial input."""

    def __init__(self) -> None:
        self._rest = ""

    @property
    def is_waiting(self) -> bool:
        """Whether a key is incomplete; it may be Escape."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        text = self._rest + data.decode(errors="ignore")
        begun = _BEGUN.search(text)
        self._rest = begun[0] if begun else ""
        return _names(text[: len(text) - len(self._rest)])

    def settle(self) -> list[str]:
        """No more bytes: it was Escape."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest else []


def _names(text: str) -> list[str]:
    return [_NAMED.get(key, key) for key in _ONE_KEY.findall(text)]
