"""Any line of a large log, and the lines with a text or an error: in bounded memory, also while the log rotates."""

import itertools
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.logs.search import LineFinder, LogIndex, is_error
from stoker.logs.writer import LogWriter

MIB = 2**20


def write(directory: Path, data: bytes, name: str = "output") -> LogIndex:
    (directory / name).write_bytes(data)
    return LogIndex(directory)


def found(index: LogIndex, text: str | None, **options: int) -> list[int]:
    with index.open() as view:
        matches, more = view.before(LineFinder(text), **options)
        assert more is False
        assert (matches, more) == view.after(LineFinder(text)) or options
        return [match.line for match in matches]


def test_text_is_found_in_any_case_with_its_line(tmp_path: Path) -> None:
    index = write(tmp_path, "one\n\x1b[31mEr\x1b[0mror: Füße\n\nthree error ERROR\nlast erro".encode())
    assert found(index, "error") == [2, 4]
    assert found(index, "ERRO") == [2, 4, 5]
    assert found(index, "FÜSSE") == []
    assert found(index, "füße") == [2]
    assert found(index, "nothing of the kind") == []
    with index.open() as view:
        assert view.count_of_lines == 5
        assert view.after(LineFinder("error"))[0][0].text == "Error: Füße"
        assert view.lines(1, 2) == ["\x1b[31mEr\x1b[0mror: Füße".encode(), b""]
        assert view.lines(4, 10) == [b"last erro"]
        assert view.lines(5, 10) == []


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "RuntimeError: 3.5 is too much",
        "[rank1]: NCCL WARN Call to ibv_poll failed",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "Segmentation fault (core dumped)",
        "Killed",
        "OSError: [Errno 28] No space left on device",
        "epoch 1 val_error=0.1 ValueError: bad",
        "cublasCreate failed: CUBLAS_STATUS_ALLOC_FAILED",
    ],
)
def test_line_that_reports_an_error_is_one(line: str, tmp_path: Path) -> None:
    assert is_error(line)
    # The quick search for words that stand in such lines misses none.
    assert found(write(tmp_path, f"fine\n{line}\nfine\n".encode()), None) == [2]


@pytest.mark.parametrize(
    "line",
    ["epoch 3 loss=0.5 val_error=0.12", "mean_error: 0.25", "finished with 0 errors", "memory 3.2 GiB", "no errors"],
)
def test_line_with_a_figure_of_that_name_is_no_error(line: str) -> None:
    assert not is_error(line)


@pytest.mark.parametrize("text", ["", "a" * 201, "two\nlines"])
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(BadInputError):
        LineFinder(text)


def test_every_line_of_a_large_log_is_within_reach_in_little_memory(tmp_path: Path) -> None:
    line = b"%09d " + b"x" * 90 + b"\n"
    with (tmp_path / "output").open("wb") as log:
        for begin in range(0, 400_000, 10_000):
            log.write(b"".join(line % number for number in range(begin, begin + 10_000)))
    index = LogIndex(tmp_path)
    tracemalloc.start()
    with index.open() as view:
        assert view.count_of_lines == 400_000
        for first in (0, 1, 10_485, 10_486, 200_000, 399_999):
            lines = view.lines(first, 3)
            assert [int(one[:9]) for one in lines] == list(range(first, min(first + 3, 400_000)))
        # Twenty matches in the last lines are found without reading the rest: from the end, and so on upwards.
        later, more = view.before(LineFinder("7777 "), limit=2)
        assert ([match.line for match in later], more) == ([387_778, 397_778], True)
        earlier, _ = view.before(LineFinder("7777 "), later[0].line, limit=2)
        assert [match.line for match in earlier] == [367_778, 377_778]
        first_ones, more = view.after(LineFinder("7777 "), 7_778, limit=1)
        assert ([match.line for match in first_ones], more) == ([17_778], True)
        assert len(view.after(LineFinder("7777 "), limit=1000)[0]) == 40
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert os.path.getsize(tmp_path / "output") > 38 * MIB  # noqa: PTH202 - of a file
    assert used < 12 * MIB


def test_line_longer_than_a_block_counts_as_one(tmp_path: Path) -> None:
    index = write(tmp_path, b"first\n" + b"y" * (3 * MIB) + b"\nerror: third\n" + b"z" * (2 * MIB))
    with index.open() as view:
        assert view.count_of_lines == 4
        assert [line[:3] for line in view.lines(0, 10)] == [b"fir", b"yyy", b"err", b"zzz"]
        assert max(map(len, view.lines(0, 10))) <= 32 * 1024
    assert found(index, None) == [3]


def test_index_grows_with_its_log_and_starts_over_when_the_beginning_is_removed(tmp_path: Path) -> None:
    index = LogIndex(tmp_path)
    with index.open() as view:
        assert (view.count_of_lines, view.lines(0, 5)) == (0, [])
    log = LogWriter(tmp_path / "output", 4 * MIB)
    log.write(b"begin\n10%")
    with index.open() as view:
        assert view.lines(0, 9) == [b"begin", b"10%"]
        first = view.first_file
    for number in range(100):
        log.write(b"\r%d%%" % number)
    log.write(b"\n" + b"a" * 99 + b"\n" + b"b\n" * (MIB - 100))
    with index.open() as view:
        assert view.lines(1, 3) == [b"99%", b"a" * 99, b"b"]
        assert (view.count_of_lines, view.first_file) == (3 + MIB - 100, first)
    log.write(b"c\n" * MIB)  # its size: the first file is full and becomes the older one
    with index.open() as view:
        assert (view.count_of_lines, view.first_file) == (3 + MIB - 100 + MIB, first)
        assert view.lines(view.count_of_lines - 2, 5) == [b"c", b"c"]
    log.write(b"d\n" * (MIB + 10))
    with index.open() as view:
        assert view.first_file != first
        whole = (tmp_path / "output.1").read_bytes() + (tmp_path / "output").read_bytes()
        assert view.count_of_lines == whole.count(b"\n")
    log.close()


def test_line_that_is_in_both_files_for_a_moment_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "output.1").write_bytes(b"one\nunfin")
    index = write(tmp_path, b"unfinished\nlast\n")
    with index.open() as view:
        assert view.lines(0, 9) == [b"one", b"unfinished", b"last"]
    # A line that was cut where the file was full goes on in the next one.
    (tmp_path / "output.1").write_bytes(b"one\nunfi")
    (tmp_path / "output").write_bytes(b"nished\nlast\n")
    with LogIndex(tmp_path).open() as view:
        assert view.lines(0, 9) == [b"one", b"unfinished", b"last"]


@given(
    st.lists(st.text("abE\n\x1bß", max_size=6), max_size=12),
    st.sampled_from(["a", "be", "ß", "E"]),
    st.integers(0, 12),
    st.integers(1, 4),
)
def test_matches_are_those_of_a_plain_search(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], text: str, line: int, limit: int
) -> None:
    whole = "\n".join(parts)
    directory = tmp_path_factory.mktemp("log")
    index = write(directory, whole.encode())
    lines = whole.split("\n")
    if lines[-1] == "":
        lines.pop()
    expected = [number for number, one in enumerate(lines, 1) if text.lower() in one.lower()]
    with index.open() as view:
        assert view.count_of_lines == len(lines)
        assert [one.decode() for one in view.lines(0, 100)][: len(lines)] == lines
        before, more = view.before(LineFinder(text), line, limit)
        wanted = [number for number in expected if number < line]
        assert [match.line for match in before] == wanted[-limit:]
        assert more == (len(wanted) > limit)
        after, more = view.after(LineFinder(text), line, limit)
        wanted = [number for number in expected if number > line]
        assert [match.line for match in after] == list(itertools.islice(wanted, limit))
        assert more == (len(wanted) > limit)
