"""A log on a page: as a terminal shows it, and only as text."""

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stoker.web
from stoker.logs.colours import Style, classes_of, contrast, nearest
from stoker.logs.reader import LogUpdate
from stoker.logs.terminal import (
    CUT,
    LONGEST_LINE,
    NOTE,
    REACH,
    HtmlLine,
    LogLines,
    ScreenLine,
    TerminalEmulator,
    as_html,
    for_terminal,
    lines_from,
)
from tests.support.deep import examples

# All terminal control characters, between letters.
_TOKENS = [
    b"a", b"text", b"<b>&\"'", "ü€😀".encode(), b"\xff", b"\xe2\x82", b"\n", b"\r", b"\b", b"\t", b"\x00", b"\x07",
    b"\x9b", "\x9b31m\x85".encode(), b"\x1b", b"\x1b[", b"\x1b[31m", b"\x1b[1;38;5;200m", b"\x1b[48;2;1;2;3m",
    b"\x1b[38:2::9:9:9m", b"\x1b[0m", b"\x1b[7m", b"\x1b[A", b"\x1b[2A", b"\x1b[B", b"\x1b[K", b"\x1b[1K", b"\x1b[2K",
    b"\x1b[J", b"\x1b[5G", b"\x1b[3C", b"\x1b[9D", b"\x1b[?25l", b"\x1b]0;title\x07", b"\x1b]8;;http://x\x1b\\",
    b"\x1bP+q\x1b\\", b"\x1b(B", b"\x1b]0;", b"\x1b[" + b"1" * 140, b"x" * (LONGEST_LINE - 3), "\u202e".encode(),
]  # fmt: skip
_OUTPUT = st.lists(st.one_of(st.sampled_from(_TOKENS), st.binary(max_size=4)), max_size=24).map(b"".join)


def shown(data: bytes) -> list[ScreenLine]:
    terminal = TerminalEmulator()
    return [*terminal.feed(data), *terminal.lines()]


def text_of(line: ScreenLine) -> str:
    return "".join(span.text for span in line.spans)


def texts(data: bytes) -> list[str]:
    return [text_of(line) for line in shown(data)]


@pytest.mark.parametrize(
    ("written", "left"),
    [
        (b"one\ntwo\n", ["one", "two", ""]),
        (b" 10%\r 20%\r 30%", [" 30%"]),
        (b"long text\rshort", ["shorttext"]),
        (b"long text\r\x1b[Kshort", ["short"]),
        (b"a\r\nb\r\n", ["a", "b", ""]),
        (b"working |\b/\b-\b\\", ["working \\"]),
        (b"a\tb\tc", ["a       b       c"]),
        (b"left\x1b[10Gright", ["left     right"]),
        (b"abcdef\x1b[3D\x1b[1K", ["    ef"]),
        (b"\x1b]0;a title\x07shown \x1b]8;;http://x.y\x1b\\link\x1b]8;;\x1b\\", ["shown link"]),
        (b"\x1b]0;a title that never ends\nnext", ["", "next"]),
        (b"\x1bP1;2q data \x1b\\after\x1b(B\x1b)0.", ["after."]),
        (b"\x1b[?25l\x1b[?2004hshown\x1b[6n", ["shown"]),
        (b"\x1b[31", [""]),
        (b"bell\x07 null\x00 other\x01", ["bell null other\ufffd"]),
        ("c1 \x9b31m".encode(), ["c1 \ufffd31m"]),
        (b"caf\xc3\xa9 caf\xe9 ", ["café caf\ufffd "]),
        ("turned \u202egpj.exe".encode(), ["turned \ufffdgpj.exe"]),
        (b"1\n2\n3\x1b[2A\x1b[Jx", ["1x", "", ""]),
    ],
)
def test_line_is_shown_as_on_a_terminal(written: bytes, left: list[str]) -> None:
    assert texts(written) == left


def test_nested_progress_bars_rewrite_their_own_lines() -> None:
    steps = [b"\router 0%", b"\n\rinner 0%\x1b[A", b"\n\rinner 50%\x1b[A", b"\router 9%", b"\n\rinner 70%\x1b[A"]
    assert texts(b"".join(steps)) == ["outer 9%", "inner 70%"]
    # The same as the worker keeps it: of a line that was overwritten only the last state.
    assert texts(b"outer 0%\ninner 50%\x1b[A\ninner 70%\x1b[A\ndone\n") == ["outer 0%", "doner 70%", ""]


def test_cursor_stays_within_the_height_of_a_terminal() -> None:
    lines = b"".join(b"%d\n" % number for number in range(200))
    terminal = TerminalEmulator()
    settled = terminal.feed(lines)
    assert [text_of(line) for line in settled] == [str(number) for number in range(200 - REACH + 1)]
    assert [line.number for line in settled] == list(range(200 - REACH + 1))
    assert terminal.feed(b"\x1b[500A\rX") == []
    assert text_of(terminal.lines()[0]) == "X37"


@pytest.mark.parametrize(
    ("code", "classes"),
    [
        (b"31", ("a-fg-1",)),
        (b"97;41", ("a-fg-15", "a-bg-1")),
        (b"30;43", ("a-fg-b", "a-bg-3")),
        (b"97;104", ("a-fg-b", "a-bg-12")),
        (b"42", ("a-fg-w", "a-bg-2")),
        (b"38;5;208", ("a-fg-208",)),
        (b"38;2;255;135;0", ("a-fg-208",)),
        (b"38:2::255:135:0", ("a-fg-208",)),
        (b"48;2;8;8;8", ("a-bg-232",)),
        (b"1;2;3;4;9", ("a-b", "a-d", "a-i", "a-u", "a-s")),
        (b"31;7", ("a-fg-b", "a-bg-1")),
        (b"7", ("a-fg-p", "a-bg-k")),
        (b"1;31;22;39", ()),
        (b"31;0", ()),
        (b"31;", ()),
        (b"38;5;999", ()),
        (b"31;39", ()),
        (b"1;4;4:0", ("a-b",)),
        (b"38:5:208", ("a-fg-208",)),
        (b"?31", ()),
    ],
)
def test_colours_and_weights_become_classes(code: bytes, classes: tuple[str, ...]) -> None:
    assert shown(b"\x1b[" + code + b"mx") == [(0, (("x", classes),))]


def test_colour_lasts_over_lines_until_it_is_reset() -> None:
    assert [as_html(line.spans) for line in shown(b"a\x1b[32mb\nc\x1b[md")] == [
        'a<span class="a-fg-2">b</span>',
        '<span class="a-fg-2">c</span>d',
    ]


def test_line_numbers_do_not_depend_on_where_reading_starts() -> None:
    lines = b"one\nouter\ninner\x1b[A\ninner\x1b[A\n\nlast\n"
    assert [line.number for line in shown(lines)] == [0, 1, 2, 5, 6]
    begun_later = TerminalEmulator(1)
    begun_later.feed(lines[4:])
    assert [line.number for line in begun_later.preview(b"")] == [1, 2, 5]
    assert [text_of(line) for line in begun_later.preview(b"and")] == ["outer", "inner", "last", "and"]


def test_too_long_line_is_cut_with_a_note() -> None:
    (line,) = shown(b"x" * LONGEST_LINE)
    assert line.spans == (("x" * LONGEST_LINE, ()),)
    (line,) = shown(b"x" * LONGEST_LINE + b"y" * 100_000)
    assert line.spans == (("x" * LONGEST_LINE, ()), (NOTE, (CUT,)))
    assert texts(b"\x1b[999999999Cfar") == [NOTE]
    assert texts(b"x" * 100_000 + b"\r\x1b[Kshort") == ["short"]


@given(_OUTPUT, st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=examples(300))
@example(b"\x1b[3\n1m\x1b", [3])
def test_chunk_size_does_not_matter(data: bytes, cuts: list[int]) -> None:
    terminal = TerminalEmulator()
    settled: list[ScreenLine] = []
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for begin, end in itertools.pairwise(borders):
        settled += terminal.feed(data[begin:end])
        terminal.preview(b"\xe2\x1b[31mnot\ryet\x1b]")  # which must leave no trace
    assert [*settled, *terminal.lines()] == shown(data)


class _Page(HTMLParser):
    """The text and elements as a browser parses them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.elements: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        assert [name for name, _ in attrs] == ["class"]
        assert re.fullmatch(r"(a-[a-z0-9-]+ ?)+", attrs[0][1] or "")

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


@given(st.one_of(_OUTPUT, st.text(alphabet="<>&\"'/!-=ascript \x1b[1m;#x0", max_size=60).map(str.encode)))
@settings(max_examples=examples(300))
def test_output_becomes_only_text_and_spans(data: bytes) -> None:
    for line in shown(data):
        page = _Page()
        page.feed(as_html(line.spans))
        page.close()
        assert page.elements <= {"span"}
        assert page.text == text_of(line)


def test_style_sheet_knows_every_class() -> None:
    sheet = (Path(stoker.web.__file__).parent / "static" / "log.css").read_text()
    known = set(re.findall(r"\.(a-[a-z0-9-]+)", sheet))
    wanted = {f"a-{ground}-{colour}" for ground in ("fg", "bg") for colour in (*range(256), "k", "p")} - {
        "a-fg-k",
        "a-bg-p",
    }
    styles = Style(bold=True, dim=True, italic=True, underlined=True, struck=True)
    assert wanted | {*classes_of(styles), CUT} <= known


def test_text_is_readable_on_every_background() -> None:
    sheet = (Path(stoker.web.__file__).parent / "static" / "log.css").read_text()
    own = dict(re.findall(r"--(log-\w+): #(\w{6})", sheet))
    found = re.findall(r"\.(a-[fb]g-\w+)\s*{\s*(?:color|background):\s*(?:var\(--([\w-]+)\)|#(\w{6}))", sheet)
    colours = {name: colour(own.get(variable) or number) for name, variable, number in found}
    foreground, background = colour(own["log-ink"]), colour(own["log-paper"])
    assert len(colours) == 516
    table = [None, *range(256)]
    plain = itertools.product(table, table, (False,))
    swapped = ((*one, True) for number in table for one in ((number, None), (None, number)))
    for letters, behind, inverse in (*plain, *swapped):
        names = {name[:4]: colours[name] for name in classes_of(Style(letters, behind, inverse=inverse))}
        ratio = contrast(names.get("a-fg", foreground), names.get("a-bg", background))
        assert ratio >= 4.5, (letters, behind, inverse)


def colour(hexadecimal: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(hexadecimal)
    return red, green, blue


def test_true_colour_becomes_the_nearest_of_256() -> None:
    assert [nearest(0, 0, 0), nearest(255, 255, 255), nearest(250, 5, 5), nearest(120, 122, 119)] == [16, 231, 196, 243]


@pytest.mark.parametrize(
    ("written", "passed"),
    [
        (b"\x1b[1;32mgreen\x1b[0m\n", b"\x1b[1;32mgreen\x1b[0m\n"),
        (b"two bars\n\x1b[2A\x1b[Kfirst\n", b"two bars\n\x1b[2A\x1b[Kfirst\n"),
        (b"\x1b]0;title\x07text\n", b"text\n"),
        (b"\x1b]52;c;ZXZpbA==\x1b\\text\n", b"text\n"),
        (b"\x1b]8;;http://broken\nnext\n", b"\nnext\n"),
        (b"\x1b[2J\x1b[H\x1b[?1049h\x1bcgone\n", b"gone\n"),
        (b"\x07\x9b31mred\xff\n", "\ufffd31mred\ufffd\n".encode()),
        ("evil\u202etxt\n".encode(), b"eviltxt\n"),
    ],
)
def test_only_colours_and_short_moves_reach_a_terminal(written: bytes, passed: bytes) -> None:
    assert for_terminal(written) == passed


def test_lines_are_final_once_the_cursor_cannot_reach_them() -> None:
    lines = LogLines(10)
    assert lines.feed(LogUpdate(b"one\n", b"1%")) == []
    assert lines.open == (HtmlLine(10, "one"), HtmlLine(11, "1%"))
    assert lines.feed(LogUpdate(b"", b"<2%>")) == []
    assert lines.open[-1] == HtmlLine(11, "&lt;2%&gt;")
    assert lines.feed(LogUpdate(b"\n" * REACH, b"")) == [HtmlLine(10, "one"), HtmlLine(11, "")]


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize("number", [0, 1, 63, 64, 100, 199, 200, 500])
def test_skipping_to_a_line_shows_the_same_as_reading_everything(number: int, at_once: int) -> None:
    printed = [b"line %d\n" % each for each in range(200)]
    steps = [LogUpdate(b"".join(printed[at : at + at_once]), b"50%") for at in range(0, len(printed), at_once)]
    whole = LogLines()
    everything = [line for update in steps for line in whole.feed(update)]
    left = iter(enumerate(steps, 1))

    def step() -> tuple[LogUpdate, bool]:
        count, update = next(left)
        return update, count < len(steps)

    lines, settled, is_behind = lines_from(step, number)
    while is_behind:
        update, is_behind = step()
        settled += lines.feed(update)
    found = [line for line in (*settled, *lines.open) if line.number >= number]
    assert found == [line for line in (*everything, *whole.open) if line.number >= number]
