"""Reading a log while it is written: no line is lost or repeated."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.logs.reader import LogFileReader, LogUpdate, TailReader, has_log, last_lines, overlap
from stoker.logs.writer import LogWriter


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[LogFileReader]:
    reader = LogFileReader(tmp_path)
    yield reader
    reader.close()


def test_each_line_is_returned_once_and_the_unfinished_one_as_it_is(reader: LogFileReader, tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert not has_log(tmp_path)
    assert reader.read() == LogUpdate(b"", b"")
    output.write_bytes(b"one\ntwo\n 10%")
    assert has_log(tmp_path)
    assert reader.read() == LogUpdate(b"one\ntwo\n", b" 10%")
    assert reader.read() == LogUpdate(b"", b" 10%")


def test_line_rewritten_in_place_is_returned_in_its_last_state(reader: LogFileReader, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_bytes(b"one\n 10% of it")
    reader.read()
    output.write_bytes(b"one\n 20%")
    assert reader.read() == LogUpdate(b"", b" 20%")
    output.write_bytes(b"one\ndone\n")
    assert reader.read() == LogUpdate(b"done\n", b"")


def test_older_file_comes_first(reader: LogFileReader, tmp_path: Path) -> None:
    (tmp_path / "output.1").write_bytes(b"old\n")
    (tmp_path / "output").write_bytes(b"new\n")
    assert reader.read() == LogUpdate(b"old\nnew\n", b"")


def test_text_written_just_before_a_rotation_is_not_lost(reader: LogFileReader, tmp_path: Path) -> None:
    output, older = tmp_path / "output", tmp_path / "output.1"
    output.write_bytes(b"1\n")
    assert reader.read().finished == b"1\n"
    with output.open("ab") as file:
        file.write(b"2\n")
    output.rename(older)
    assert reader.read() == LogUpdate(b"2\n", b"")  # there is no new file yet
    output.write_bytes(b"3\n")
    assert reader.read().finished == b"3\n"
    assert reader.read().finished == b""


def test_two_rotations_between_two_reads_lose_nothing(reader: LogFileReader, tmp_path: Path) -> None:
    output, older = tmp_path / "output", tmp_path / "output.1"
    output.write_bytes(b"1\n")
    reader.read()
    output.rename(older)
    output.write_bytes(b"2\n")
    output.rename(older)
    output.write_bytes(b"3\n")
    assert reader.read().finished == b"2\n3\n"


def test_line_being_carried_to_the_new_file_is_returned_once(reader: LogFileReader, tmp_path: Path) -> None:
    """The writer moves the file, copies the unfinished line to the new one, and removes it from the old one."""
    output, older = tmp_path / "output", tmp_path / "output.1"
    output.write_bytes(b"one\n 10%")
    reader.read()
    output.rename(older)
    output.write_bytes(b"")
    assert reader.read() == LogUpdate(b"", b" 10%")
    output.write_bytes(b" 10%")
    assert reader.read() == LogUpdate(b"", b" 10%")
    os.truncate(older, 4)
    output.write_bytes(b" 20%\n")
    assert reader.read() == LogUpdate(b" 20%\n", b"")


def test_line_left_in_both_files_by_a_killed_writer_is_returned_once(reader: LogFileReader, tmp_path: Path) -> None:
    (tmp_path / "output.1").write_bytes(b"one\n 10%")
    (tmp_path / "output").write_bytes(b" 10% and more\n")
    assert reader.read() == LogUpdate(b"one\n 10% and more\n", b"")


def test_text_written_during_a_read_is_not_lost(tmp_path: Path) -> None:
    output = tmp_path / "output"

    class Interrupted(LogFileReader):
        """The writer continues after the read of the file, before the check for a new one."""

        def _next_file(self) -> int:
            if not (tmp_path / "output.1").exists():
                with output.open("ab") as file:
                    file.write(b"2\n")
                output.rename(tmp_path / "output.1")
                output.write_bytes(b"3\n")
            return super()._next_file()

    output.write_bytes(b"1\n")
    reader = Interrupted(tmp_path)
    assert reader.read() == LogUpdate(b"1\n2\n3\n", b"")
    reader.close()


def test_line_longer_than_a_file_is_returned_whole(reader: LogFileReader, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_bytes(b"x" * 1000)
    assert reader.read() == LogUpdate(b"", b"x" * 1000)
    output.rename(tmp_path / "output.1")
    output.write_bytes(b"x" * 10)
    assert reader.read() == LogUpdate(b"", b"x" * 1010)
    output.write_bytes(b"x" * 10 + b"\nnext\n")
    assert reader.read() == LogUpdate(b"x" * 1010 + b"\nnext\n", b"")


def test_emptied_file_is_read_from_its_beginning(reader: LogFileReader, tmp_path: Path) -> None:
    (tmp_path / "output").write_bytes(b"one\ntwo\n")
    reader.read()
    (tmp_path / "output").write_bytes(b"new\n")
    assert reader.read().finished == b"new\n"


PIECES = st.lists(
    st.tuples(
        st.lists(st.sampled_from([b"line\n", b"a longer line than that\n", b"\r 10%", b"\r 100%", b"x", b"\n"])),
        st.booleans(),
    ),
    max_size=40,
)
NUMBERS = itertools.count()


@given(pieces=PIECES)
def test_reader_of_the_real_writer_sees_the_log_as_without_rotation(
    pieces: list[tuple[list[bytes], bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.getbasetemp() / f"followed-{next(NUMBERS)}"
    place.mkdir()
    log, whole = LogWriter(place / "output", 2 * 200), LogWriter(place / "whole", 10**9)
    reader = LogFileReader(place)
    received = b""
    unfinished = b""
    for number, (words, looks) in enumerate(pieces):
        data = b"".join(words)[:90] + b"%d\n" % number
        log.write(data)
        whole.write(data)
        if looks or number % 2:
            piece = reader.read()
            received, unfinished = received + piece.finished, piece.unfinished
    piece = reader.read()
    received, unfinished = received + piece.finished, piece.unfinished
    assert received + unfinished == (place / "whole").read_bytes()
    for opened in (log, whole, reader):
        opened.close()


# The end of the output, from the queue


def test_lines_of_a_moving_tail_are_returned_once() -> None:
    written = "".join(f"line {number}\n" for number in range(1000))
    length, received = 0, b""
    tails = TailReader(lambda: written[:length][-300:])
    for length in range(0, len(written), 113):  # noqa: B007 - read by the tail
        received += tails.read().finished
    length = len(written)
    received += tails.read().finished
    assert received.decode() == written


def test_unfinished_line_of_a_tail_is_returned_as_it_is() -> None:
    text = "one\n 10%"
    reader = TailReader(lambda: text)
    assert reader.read() == LogUpdate(b"one\n", b" 10%")
    text = "one\n 20%"
    assert reader.read() == LogUpdate(b"", b" 20%")
    text = "one\n100%\n"
    assert reader.read() == LogUpdate(b"100%\n", b"")


def test_gap_between_two_tails_is_marked() -> None:
    text = "one\ntwo\n"
    reader = TailReader(lambda: text)
    assert reader.read().finished == b"one\ntwo\n"
    text = "eight\nnine\n"
    marker, *lines = reader.read().finished.splitlines()
    assert b"lines are missing here" in marker
    assert lines == [b"eight", b"nine"]
    text = "nine\nten\n"
    assert reader.read().finished == b"ten\n"


@given(before=st.text("ab\n", max_size=700).map(str.encode), more=st.text("ab\n", max_size=30).map(str.encode))
def test_overlap_of_two_tails_is_the_longest_one(before: bytes, more: bytes) -> None:
    after = (before + more)[-600:]
    longest = max(size for size in range(len(after) + 1) if before.endswith(after[:size]))
    assert overlap(before, after) == longest


# Last lines


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (None, LogUpdate(b"1\n2\n3\n", b"4")),
        (0, LogUpdate(b"", b"")),
        (1, LogUpdate(b"", b"4")),
        (2, LogUpdate(b"3\n", b"4")),
        (99, LogUpdate(b"1\n2\n3\n", b"4")),
    ],
)
def test_unfinished_line_counts_among_the_last_lines(count: int | None, expected: LogUpdate) -> None:
    assert last_lines(LogUpdate(b"1\n2\n3\n", b"4"), count) == expected


def test_long_log_is_read_in_steps_of_whole_lines(reader: LogFileReader, tmp_path: Path) -> None:
    (tmp_path / "output.1").write_bytes(b"1\n22\n" + b"3" * 50 + b"\n")
    (tmp_path / "output").write_bytes(b"4\n5\nunfinished")
    assert reader.read(limit=6) == LogUpdate(b"1\n22\n", b"")
    assert reader.is_behind
    assert reader.read(limit=6) == LogUpdate(b"3" * 50 + b"\n4\n5\n", b"")
    assert reader.is_behind
    assert reader.read(limit=100) == LogUpdate(b"", b"unfinished")
    assert not reader.is_behind
