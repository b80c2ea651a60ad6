"""A log as numbered lines of HTML."""

from collections.abc import Callable
from typing import Final, NamedTuple

from stoker.logs.model import LogUpdate
from stoker.logs.terminal import REACH, ScreenLine, TerminalEmulator, as_html

# An unfinished line is shown from its beginning, and cut long before that.
_MAX_UNFINISHED: Final = 64 * 1024


class HtmlLine(NamedTuple):
    """One line for a page, by the number of line ends before it."""

    number: int
    html: str


class LogLines:
    """Turns log text into lines. The last ones can still be rewritten by carriage returns and cursor moves."""

    def __init__(self, first: int = 0) -> None:
        """`first`: the number of the first line."""
        self._terminal = TerminalEmulator(first)
        self._unfinished = b""
        self.open: tuple[HtmlLine, ...] = ()
        """The lines that may still change, as they are now."""

    def feed(self, update: LogUpdate) -> list[HtmlLine]:
        """The lines that cannot change any more."""
        settled = self._terminal.feed(update.finished) if update.finished else []
        if update.finished or update.unfinished != self._unfinished:
            self._unfinished = update.unfinished
            self.open = tuple(map(_html, self._terminal.preview(update.unfinished[:_MAX_UNFINISHED])))
        return [_html(line) for line in settled]


def lines_from(step: Callable[[], tuple[LogUpdate, bool]], number: int) -> tuple[LogLines, list[HtmlLine], bool]:
    """Skips to a line: its emulator, the settled lines of the first step, and whether more is available at once."""
    # Lines above may still be rewritten from there.
    first, skipped, is_behind = max(0, number - REACH), 0, True
    update = LogUpdate(b"", b"")
    while is_behind:
        update, is_behind = step()
        count = update.finished.count(b"\n")
        if skipped + count > first:
            break
        skipped += count
        update = LogUpdate(b"", update.unfinished)
    surplus = max(0, first - skipped)
    data = update.finished.split(b"\n", surplus)[-1] if surplus else update.finished
    lines = LogLines(skipped + surplus if update.finished else skipped)
    return lines, lines.feed(LogUpdate(data, update.unfinished)), is_behind


def _html(line: ScreenLine) -> HtmlLine:
    return HtmlLine(line.number, as_html(line.spans))
