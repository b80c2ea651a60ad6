"""The QR code in a terminal: whether a camera that reads its colours finds the link's modules."""

import io
import re

import pytest
import segno

from stoker.web.qr import qr_code

LINK = "https://stoker.example.org:7865/login#stk_Wn3qv5QhGgB2Yt0kXbZr8cLs1uMdJfPa"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def seen(picture: str) -> list[list[bool]]:
    """What is dark, row by row, as a camera sees it: black is colour 16, white is 231."""
    rows: list[list[bool]] = []
    for line in picture.splitlines():
        upper, lower, dark = list[bool](), list[bool](), (False, False)
        for foreground, background, block in re.findall(r"\x1b\[38;5;(\d+);48;5;(\d+)m|(▀)|\x1b\[0m", line):
            if foreground:
                dark = (foreground == "16", background == "16")
            elif block:
                upper.append(dark[0])
                lower.append(dark[1])
        rows += [upper, lower]
    return rows


def test_qr_code_contains_the_link_with_a_margin() -> None:
    picture = qr_code(LINK, Terminal())
    assert picture is not None
    expected = [[bool(one) for one in row] for row in segno.make(LINK, error="l", boost_error=False).matrix]
    rows = seen(picture)
    inner = [row[2 : 2 + len(expected)] for row in rows[2 : 2 + len(expected)]]
    assert inner == expected
    margins = rows[:2] + rows[2 + len(expected) :] + [row[:2] + row[2 + len(expected) :] for row in rows]
    assert len(rows) >= len(expected) + 4
    assert not any(any(row) for row in margins)
    assert all(line.endswith("\x1b[0m") for line in picture.splitlines()), "its colours run on"


def test_qr_code_is_omitted_if_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert qr_code(LINK, io.StringIO()) is None
    ascii_only = Terminal()
    ascii_only.encoding = "ascii"
    assert qr_code(LINK, ascii_only) is None
    monkeypatch.setenv("COLUMNS", "30")
    assert qr_code(LINK, Terminal()) is None
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    assert qr_code(LINK, Terminal()) is None
