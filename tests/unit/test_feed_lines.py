"""Lines of a file as commands: parsing, and identity across edits."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stoker.feeds.text_file import LONGEST_NAME, feed_prefix, finished_part, lines_in, origin_of

PREFIX = "file:/a:"
command = st.text(st.characters(exclude_categories=["C"], exclude_characters="\u2028\u2029\x85"), min_size=1).filter(
    lambda text: text.strip() and not text.strip().startswith("#")
)


def origins(text: str) -> set[str]:
    return {origin_of(PREFIX, line) for line in lines_in(text.encode()).commands}


def test_blank_lines_and_comments_are_skipped() -> None:
    found = lines_in("\N{BYTE ORDER MARK}one\r\n\n  # note\n\ttwo # with a note\n".encode())
    assert [(line.number, line.text) for line in found.commands] == [(1, "one"), (4, "two # with a note")]


def test_undecodable_line_does_not_affect_others() -> None:
    found = lines_in(b"one\n\xff\ntwo")
    assert [line.text for line in found.commands] == ["one", "two"]
    assert found.unreadable == [2]


def test_last_line_without_a_newline_may_be_unfinished() -> None:
    assert finished_part(b"one\ntw") == b"one\n"
    assert finished_part(b"tw") == b""
    for whole in (b"one\n", b"", b"one\n  "):
        assert finished_part(whole) == whole


@given(st.lists(command), st.lists(command), st.randoms())
def test_identity_of_a_line_is_independent_of_order_and_neighbours(
    old: list[str], added: list[str], chance: object
) -> None:
    together = [*old, *added, "# a note", ""]
    chance.shuffle(together)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    before, after = origins("\n".join(old)), origins("\n".join(together))
    assert before <= after
    assert len(after) == len(old) + len(added)


def test_second_line_with_the_same_text_is_distinct() -> None:
    assert len(origins("one\none\n")) == 2
    assert origins("one\none\n") > origins("one\n")


def test_file_is_identified_by_its_real_path_or_name(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    assert feed_prefix(link, None) == feed_prefix(tmp_path / "file", None)
    assert feed_prefix(tmp_path / "one", "night") == feed_prefix(tmp_path / "two", "night")
    assert feed_prefix(tmp_path / "one", None) != feed_prefix(tmp_path / "two", None)


def test_origin_is_unambiguous_and_fits_an_index() -> None:
    assert not feed_prefix(Path("/a:b"), None).startswith(feed_prefix(Path("/a"), None))
    assert len(feed_prefix(Path("/" + "ü/" * 1000), None)) <= LONGEST_NAME + len("file::")
