"""A terminal emulator for logs: turns bytes into lines of styled text that are safe to display.

Programs rewrite the screen: progress bars use carriage returns, backspaces and cursor moves over several lines. The
last lines therefore stay open, and a line is final when the cursor can no longer reach it. Every character takes one
column. Colours become CSS classes, because the page allows no inline styles.
"""

import codecs
import html
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from stoker.logs.colours import PLAIN, Style, classes_of, restyled
from stoker.logs.reader import LogUpdate

# Longer lines make a page slow; a download contains them whole.
LONGEST_LINE: Final = 8192
# The height of a tall terminal; no program moves the cursor further up.
REACH: Final = 64
# An unfinished line is shown from its beginning and cut earlier.
_MAX_UNFINISHED: Final = 64 * 1024
# The end of a cut line, and its class.
NOTE: Final = " … cut here: the downloaded file has the whole line"
CUT: Final = "a-cut"

_TAB: Final = 8
# Text between two control characters; bidirectional control characters do not count as text.
_TEXT: Final = r"[^\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]+"
_TOKEN: Final = re.compile(
    rf"(?P<text>{_TEXT})"
    r"|\x1b\[(?P<parameters>[0-?]{0,128})[ -/]{0,4}(?P<final>[@-~])"
    r"|(?P<string>\x1b[\]PX^_])"
    r"|(?P<escape>\x1b[ -/]{0,4}[0-OQ-WYZ\\`-~])"
    r"|(?P<control>[\s\S])"
)
# The beginning of an escape sequence, whose rest may come with the next bytes.
_BEGUN: Final = re.compile(r"\x1b(?:\[[0-?]{0,128}[ -/]{0,4}|[ -/]{0,4})\Z")
# A title or a link ends with a bell, a string terminator or the line: a broken one must not hide the rest.
_STRING_END: Final = re.compile(r"[\x07\x18\x1a\n\x1b\x9c]")
_PASSED: Final = frozenset("\n\r\t\b")
# Colours, moves by a number of lines or columns, and erasing to the end.
_PASSED_SEQUENCE: Final = re.compile(r"\x1b\[(?:[0-9;:]*m|[0-9]*[ABCDEFGK]|0?J)")
_BLANK_LINES: Final = re.compile(r"\n{3,}")
# Control characters without any visible effect.
_SILENT: Final = frozenset("\x00\x07\x0e\x0f\x1b\x7f")


class Span(NamedTuple):
    """A piece of a line in one style."""

    text: str
    classes: tuple[str, ...]


class ScreenLine(NamedTuple):
    """A line, numbered by the line ends before it."""

    number: int
    spans: tuple[Span, ...]


_Run = tuple[str, Style]


class _Row:
    """A line that can still be rewritten."""

    __slots__ = ("is_cut", "length", "number", "runs")

    def __init__(self, number: int) -> None:
        self.number = number
        self.runs: list[_Run] = []
        self.length = 0
        self.is_cut = False
        """Whether the line was cut."""

    def copy(self) -> "_Row":
        other = _Row(self.number)
        other.runs, other.length, other.is_cut = self.runs.copy(), self.length, self.is_cut
        return other

    def put(self, column: int, text: str, style: Style) -> None:
        is_cut = self.is_cut or column + len(text) > LONGEST_LINE
        self._put(column, text[: LONGEST_LINE - column], style)
        self.is_cut = is_cut

    def _put(self, column: int, text: str, style: Style) -> None:
        if not text:
            return
        if column > self.length:
            self.runs.append((" " * (column - self.length), PLAIN))
            self.length = column
        if column < self.length:
            rest = self._behind(column + len(text))
            self.cut(column)
            self.runs += [(text, style), *rest]
            self.length = column + len(text) + sum(len(piece) for piece, _ in rest)
        else:
            self.runs.append((text, style))
            self.length += len(text)

    def cut(self, column: int) -> None:
        """Erases from this column to the end."""
        kept: list[_Run] = []
        at = 0
        for text, style in self.runs:
            if at >= column:
                break
            kept.append((text[: column - at], style))
            at += len(text)
        self.runs, self.length, self.is_cut = kept, min(self.length, column), False

    def _behind(self, column: int) -> list[_Run]:
        found: list[_Run] = []
        at = 0
        for text, style in self.runs:
            if at + len(text) > column:
                found.append((text[max(0, column - at) :], style))
            at += len(text)
        return found

    def line(self) -> ScreenLine:
        spans: list[Span] = []
        for text, style in self.runs:
            classes = classes_of(style)
            if spans and spans[-1].classes == classes:
                spans[-1] = Span(spans[-1].text + text, classes)
            else:
                spans.append(Span(text, classes))
        if self.is_cut:
            spans.append(Span(NOTE, (CUT,)))
        return ScreenLine(self.number, tuple(spans))


class TerminalEmulator:
    """Takes bytes in chunks of any size. Each line that can no longer change is returned once."""

    def __init__(self, number: int = 0) -> None:
        """`number`: of the first line."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""
        self._in_string = False
        self._style = PLAIN
        self._number = number
        self._rows = [_Row(number)]
        self._line = 0
        """The row of the cursor."""
        self._column = 0
        self._settled: list[ScreenLine] = []

    def feed(self, data: bytes) -> list[ScreenLine]:
        """Lines that the cursor can no longer reach."""
        text = self._begun + self._decoder.decode(data)
        self._begun = ""
        at = 0
        while at < len(text):
            at = self._skip_string(text, at) if self._in_string else self._take(text, at)
        settled, self._settled = self._settled, []
        return settled

    def lines(self) -> list[ScreenLine]:
        """The open lines, with the current one, which may be empty."""
        return [row.line() for row in self._rows]

    def preview(self, unfinished: bytes) -> list[ScreenLine]:
        """The open lines as these bytes would leave them, without changing the state. A line after a finished one
        exists only when something is written to it.
        """
        before, decoded = self.__dict__.copy(), self._decoder.getstate()
        self._rows = [row.copy() for row in self._rows]
        lines = [*self.feed(unfinished), *self.lines()]
        if not lines[-1].spans and self._line == len(self._rows) - 1:
            lines.pop()
        self.__dict__.update(before)
        self._decoder.setstate(decoded)
        return lines

    def _take(self, text: str, at: int) -> int:
        """Handles one token; returns the start of the next."""
        token = _TOKEN.match(text, at)
        assert token is not None  # noqa: S101 - any letter is a control, if nothing else
        kind = token.lastgroup
        if kind == "text":
            self._rows[self._line].put(self._column, token[0], self._style)
            self._column = min(self._column + len(token[0]), LONGEST_LINE)
        elif kind == "final":
            self._obey(token["final"], token["parameters"])
        elif kind == "string":
            self._in_string = True
        elif kind == "control":
            if token[0] == "\x1b" and _BEGUN.match(text, at):
                self._begun = text[at:]
                return len(text)
            self._control(token[0])
        return token.end()

    def _skip_string(self, text: str, at: int) -> int:
        end = _STRING_END.search(text, at)
        if end is None:
            return len(text)
        if end[0] == "\x1b":
            if end.end() == len(text):
                self._begun = "\x1b"
                return len(text)
            self._in_string = False
            # Any other escape ends it too and is handled itself.
            return end.end() + 1 if text[end.end()] == "\\" else end.start()
        self._in_string = False
        return end.start() if end[0] == "\n" else end.end()

    def _control(self, letter: str) -> None:
        if letter == "\n":
            self._new_line()
        elif letter == "\r":
            self._column = 0
        elif letter == "\b":
            self._column = max(0, self._column - 1)
        elif letter == "\t":
            self._go_to(self._column // _TAB * _TAB + _TAB)
        elif letter not in _SILENT:
            self._rows[self._line].put(self._column, "\ufffd", self._style)
            self._go_to(self._column + 1)

    def _new_line(self) -> None:
        self._column = 0
        self._line += 1
        self._number += 1
        if self._line < len(self._rows):
            return
        self._rows.append(_Row(self._number))
        if len(self._rows) > REACH:
            self._settled.append(self._rows.pop(0).line())
            self._line -= 1

    def _obey(self, final: str, parameters: str) -> None:
        """A control sequence; most concern a screen, which does not exist here."""
        if final == "m":
            self._style = restyled(self._style, parameters)
            return
        if not re.fullmatch(r"[0-9;]*", parameters):
            return
        first = parameters.partition(";")[0]
        number = int(first[-6:] or 0)
        if final == "K":
            self._erase(number)
        elif final == "J" and number == 0:
            self._rows[self._line].cut(self._column)
            for row in self._rows[self._line + 1 :]:
                row.cut(0)
        else:
            self._move(final, max(1, number))

    def _erase(self, which: int) -> None:
        row = self._rows[self._line]
        if which == 0:
            row.cut(self._column)
        elif which == 1:
            row.put(0, " " * min(self._column + 1, row.length), PLAIN)
        elif which == 2:
            row.cut(0)

    def _move(self, final: str, by: int) -> None:
        if final in "AF":
            self._line = max(0, self._line - by)
        elif final in "BE":
            self._line = min(len(self._rows) - 1, self._line + by)
        elif final == "C":
            self._go_to(self._column + by)
        elif final == "D":
            self._go_to(self._column - by)
        elif final in "G`":
            self._go_to(by - 1)
        if final in "EF":
            self._column = 0

    def _go_to(self, column: int) -> None:
        self._column = max(0, min(column, LONGEST_LINE))


def as_html(line: Iterable[Span]) -> str:
    """The line for a page: only text and `span` elements, for any output."""
    return "".join(
        f'<span class="{" ".join(classes)}">{html.escape(text)}</span>' if classes else html.escape(text)
        for text, classes in line
    )


def plain_text(text: str) -> str:
    """The final state of a terminal without colours: no escapes, no control characters except line ends."""
    # Python decodes invalid bytes to surrogates, which cannot be written to a file.
    data = text.encode("utf-8", "replace")
    if text.isprintable():
        return data.decode().rstrip()
    terminal = TerminalEmulator()
    lines = [*terminal.feed(data), *terminal.lines()]
    texts = ("".join(text for text, classes in line.spans if classes != (CUT,)) for line in lines)
    shown = "\n".join(text.rstrip() for text in texts)
    return _BLANK_LINES.sub("\n\n", shown)


def plain_line(text: str) -> str:
    """The same on one line, for sentences and tables."""
    return " ".join(plain_text(text).split())


def for_terminal(data: bytes) -> bytes:
    """Whole lines for a user's terminal: passes colours and moves within the last lines, and no other sequences."""
    text, shown, at = data.decode(errors="replace"), [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        assert token is not None  # noqa: S101 - any letter is a control, if nothing else
        at = token.end()
        if token.lastgroup == "string":
            end = _STRING_END.search(text, at)
            at = len(text) if end is None else end.start() if end[0] in "\n\x1b" else end.end()
        elif token.lastgroup == "text" or token[0] in _PASSED or _PASSED_SEQUENCE.fullmatch(token[0]):
            shown.append(token[0])
    return "".join(shown).encode()


# Lines of a page


class HtmlLine(NamedTuple):
    """One line for a page, numbered by the line ends before it."""

    number: int
    html: str


class LogLines:
    """Turns log text into lines. Carriage returns and cursor moves can still rewrite the last ones."""

    def __init__(self, first: int = 0) -> None:
        """`first`: the number of the first line."""
        self._terminal = TerminalEmulator(first)
        self._unfinished = b""
        self.open: tuple[HtmlLine, ...] = ()
        """The current state of lines that may still change."""

    def feed(self, update: LogUpdate) -> list[HtmlLine]:
        """Lines that can no longer change."""
        settled = self._terminal.feed(update.finished) if update.finished else []
        if update.finished or update.unfinished != self._unfinished:
            self._unfinished = update.unfinished
            self.open = tuple(map(_html, self._terminal.preview(update.unfinished[:_MAX_UNFINISHED])))
        return [_html(line) for line in settled]


def lines_from(step: Callable[[], tuple[LogUpdate, bool]], number: int) -> tuple[LogLines, list[HtmlLine], bool]:
    """Skips to a line; returns its emulator, the settled lines of the first step, and whether more is available at
    once."""
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
