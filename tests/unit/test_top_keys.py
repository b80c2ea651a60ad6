"""Keys as a terminal sends them."""

import pytest

from stoker.cli.top.terminal import KeyReader


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1bOAkj", ["up", "up", "down"]),
        (b"\x1b[C\x1b[D\x1bOC", ["right", "left", "right"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[F", ["page up", "page down", "home", "end"]),
        (b"\rq?", ["enter", "q", "?"]),
        (b"\x1bq", ["escape", "q"]),
        (b"\x1b[1;5Ac", ["\x1b[1;5A", "c"]),
        ("ü".encode(), ["ü"]),
        (b"\xff\xfe", []),
    ],
)
def test_keys_have_names(data: bytes, keys: list[str]) -> None:
    assert KeyReader().feed(data) == keys


def test_key_received_in_pieces_is_one_key() -> None:
    keys = KeyReader()
    assert keys.feed(b"\x1b") == []
    assert keys.is_waiting
    assert keys.feed(b"[") == []
    assert keys.feed(b"Bx") == ["down", "x"]
    assert not keys.is_waiting


def test_escape_is_a_key_when_nothing_follows() -> None:
    keys = KeyReader()
    assert keys.feed(b"\x1b") == []
    assert keys.settle() == ["escape"]
    assert keys.settle() == []
