"""The terminal of `stoker top`: taken over while it runs, and given back as it was whatever happens."""

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

# Whoever presses Escape sends the same that other keys begin with; a terminal sends the rest of those at once.
_ESCAPE_SECONDS: Final = 0.05
# Where tcgetattr has them.
_LOCAL_MODES: Final = 3
_LEAVING: Final = (signal.SIGTERM, signal.SIGHUP)
# Colours off, and the cursor, margins and modes as they were: the output of a job may have changed them.
_SOFT_RESET: Final = b"\x1b[!p\x1b[0m"


class TopTerminal:
    """Signals only wake it: what they ask for is done between two frames."""

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
        self._wake, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
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
            os.close(self._bell)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, by the terminal itself: COLUMNS, where a shell exports it, does not follow a window."""
        with contextlib.suppress(OSError):  # it is gone, which the next read says
            self._console.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))
        return self._console.size.width, self._console.size.height

    @property
    def leaves_with(self) -> int | None:
        """The exit code, when somebody wants it to end."""
        if number := next((number for number in _LEAVING if number in self._asked), None):
            return 128 + number
        return 128 + signal.SIGHUP if self._hung_up else None

    def draw(self, lines: Sequence[Text]) -> None:
        if self._live is not None:
            self._live.update(Group(*lines), refresh=True)

    def wait(self, others: Sequence[int], seconds: float) -> list[str]:
        """The keys that were pressed; returns as soon as there are some, or one of the others can be read."""
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
    def lent(self) -> Iterator[None]:
        """The ordinary screen, for somebody else's output; keys still come here."""
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
        """As the shell expects of Ctrl-Z: back as it was, stopped, and taken again when it goes on."""
        self._asked.discard(signal.SIGTSTP)
        had_screen = self._live is not None
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._note)
        # Somebody may have changed it meanwhile: it is given back like that.
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
            # A terminal that is gone needs nothing any more.
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
    ("Enter", "what is known of it: why, its attempts, its last lines"),
    ("l", "follow its log; q returns"),
    ("c", "cancel it; asks once when it runs"),
    ("r", "let it run again"),
    ("h", "hold it, or release it"),
    ("u  d", "move it up or down among those that wait"),
    ("s", "leave it alone for 30 minutes, however idle it is"),
    ("p", "pause the queue, or let it go on"),
    ("a", "show only your own jobs, or all"),
    ("q", "leave"),
)

_NAMED: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
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
    """Puts together what arrives in pieces."""

    def __init__(self) -> None:
        self._rest = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the beginning of a key is there, which may also be the key Escape."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        text = self._rest + data.decode(errors="ignore")
        begun = _BEGUN.search(text)
        self._rest = begun[0] if begun else ""
        return _names(text[: len(text) - len(self._rest)])

    def settle(self) -> list[str]:
        """Nothing followed: it was Escape."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest else []


def _names(text: str) -> list[str]:
    return [_NAMED.get(key, key) for key in _ONE_KEY.findall(text)]
