"""The log of a job on disk: line by line, within a limit, despite a full disk."""

import errno
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engines.delivery import Links
from stoker.logs.reader import read_tail
from stoker.logs.writer import LogWriter

PLENTY = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "output"


def kept(path: Path, *pieces: bytes, limit: int = PLENTY) -> bytes:
    log = LogWriter(path, limit)
    for piece in pieces:
        log.write(piece)
    log.close()
    assert log.failure is None
    return path.read_bytes()


@pytest.mark.parametrize(
    ("pieces", "stored"),
    [
        ([b"one\n", b"two\n"], b"one\ntwo\n"),
        ([b"o", b"ne\ntw", b"o"], b"one\ntwo"),
        ([b"10%\r20%\r30%\n"], b"30%\n"),
        ([b"\r10%", b"\r20%", b"\r30%", b"\ndone\n"], b"30%\ndone\n"),
        ([b"100%|####|", b"\r5%|#|"], b"5%|#|"),
        ([b"10%\r", b"20%\r", b"30%\r"], b"30%"),
        ([b"one\r\ntwo\r\n"], b"one\ntwo\n"),
        ([b"one\r\r\ntwo"], b"one\ntwo"),
        ([b"abc\r", b"\n"], b"abc\n"),
        ([b"abc\r", b"xyz"], b"xyz"),
        ([b"abc\r", b"", b"\r", b"\nx"], b"abc\nx"),
        ([b"before\nabc\r", b"x\nafter\r\n"], b"before\nx\nafter\n"),
        ([b"\n\n\r\n\r\r\n"], b"\n\n\n\n"),
        ([b"\x1b[32mgreen\x1b[0m\n\x1b[A\n"], b"\x1b[32mgreen\x1b[0m\n\x1b[A\n"),
    ],
)
def test_last_state_of_each_line_is_kept(path: Path, pieces: list[bytes], stored: bytes) -> None:
    assert kept(path, *pieces) == stored


def as_a_terminal_leaves_it(text: bytes) -> bytes:
    """Reference implementation, byte by byte."""
    lines, returned = [b""], False
    for byte in (bytes([value]) for value in text):
        if byte == b"\r":
            returned = True
        elif byte == b"\n":
            lines, returned = [*lines, b""], False
        else:
            lines[-1], returned = (b"" if returned else lines[-1]) + byte, False
    return b"\n".join(lines)


chunks = st.lists(st.text(alphabet="ab\r\n", max_size=8).map(str.encode), max_size=12)


@given(chunks)
def test_chunk_size_does_not_matter(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert kept(Path(directory) / "output", *pieces) == as_a_terminal_leaves_it(b"".join(pieces))


@given(chunks, st.integers(1, 30))
def test_end_is_kept_within_the_limit_for_any_chunks(pieces: list[bytes], limit: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "output"
        log = LogWriter(path, limit)
        for piece in pieces:
            log.write(piece)
            assert sizes(path) <= max(2, limit)
        log.close()
        assert log.failure is None
        last = as_a_terminal_leaves_it(b"".join(pieces)).rpartition(b"\n")[2]
        if len(last) <= limit // 2:
            assert path.read_bytes().rpartition(b"\n")[2] == last


def sizes(path: Path) -> int:
    return sum(part.stat().st_size for part in path.parent.iterdir())


def test_unfinished_line_is_on_disk_at_once(path: Path) -> None:
    log = LogWriter(path, PLENTY)
    log.write(b"one\ntwo: 10%")
    assert path.read_bytes() == b"one\ntwo: 10%"
    log.write(b"\rtwo: 9%\r")
    assert path.read_bytes() == b"one\ntwo: 9%"
    log.close()


def test_another_writer_continues_the_line_of_a_killed_one(path: Path) -> None:
    program = (
        "import signal, sys; from stoker.logs.writer import LogWriter; log = LogWriter(sys.argv[1], 1000);"
        r"log.write(b'one\n'); log.write(b'\rtwo: 10%'); print('written', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == b"written\n"
        writer.kill()
    assert path.read_bytes() == b"one\ntwo: 10%"
    assert kept(path, b"\rtwo: 20%") == b"one\ntwo: 20%"
    assert kept(path, b" done\nthree") == b"one\ntwo: 20% done\nthree"


def test_long_unfinished_line_is_continued_from_its_beginning(path: Path) -> None:
    path.write_bytes(b"one\n" + b"x" * 200_000)
    assert kept(path, b"\rtwo\n") == b"one\ntwo\n"


def test_rotation_happens_at_a_line_end(path: Path) -> None:
    assert kept(path, *(b"line %d\n" % number for number in range(10)), limit=32) == b"line 8\nline 9\n"
    assert Path(f"{path}.1").read_bytes() == b"line 6\nline 7\n"


def test_line_that_does_not_fit_moves_to_the_new_file(path: Path) -> None:
    assert kept(path, b"first\n", b"second, ", b"in parts", limit=40) == b"second, in parts"
    assert Path(f"{path}.1").read_bytes() == b"first\n"


def test_line_without_an_end_is_cut(path: Path) -> None:
    assert kept(path, b"".join(b"%d" % (n % 10) for n in range(25)), limit=20) == b"01234"
    assert Path(f"{path}.1").read_bytes() == b"0123456789"


def test_long_line_is_cut_instead_of_carried(path: Path) -> None:
    assert kept(path, b"first\n", b"x" * 100_000, b"y" * 100_000, limit=260_000) == b"y" * 70_006
    assert Path(f"{path}.1").read_bytes() == b"first\n" + b"x" * 100_000 + b"y" * 29_994


def test_progress_bar_never_fills_the_file(path: Path) -> None:
    assert kept(path, b"begin\n", *(b"\r%3d%%" % number for number in range(100)), limit=24) == b"begin\n 99%"
    assert not Path(f"{path}.1").exists()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def bar(path: Path, clock: Clock, states: int, log: LogWriter | None = None) -> LogWriter:
    """One state a second."""
    log = log or LogWriter(path, PLENTY, clock)
    for number in range(states):
        clock.now += 1.0
        log.write(b"\rstep %d/%d loss=%d" % (number, states, states - number))
    return log


def test_some_states_of_a_bar_stay_before_the_last_one_for_curves(path: Path) -> None:
    clock = Clock()
    log = bar(path, clock, 10)
    first = [int(state.split(b"/")[0][5:]) for state in path.read_bytes().split(b"\r")]
    assert first == [1, 3, 5, 7, 9]
    log.write(b"\nnext\n")
    bar(path, clock, 5000, log).close()
    *lines, last = path.read_bytes().split(b"\n")
    assert (len(lines), last.rpartition(b"\r")[2]) == (2, b"step 4999/5000 loss=1")
    kept = [int(state.split(b"/")[0][5:]) for state in last.split(b"\r")]
    assert len(last) <= 5000
    assert len(kept) >= 50
    apart = [after - before for before, after in itertools.pairwise(kept)]
    assert max(apart[:-1]) <= 4 * min(apart[:-1]), "a long bar has them in even intervals"
    assert read_tail(path, PLENTY) == "step 9/10 loss=1\nnext\nstep 4999/5000 loss=1"


def test_another_writer_continues_the_states_of_a_bar(path: Path) -> None:
    clock = Clock()
    bar(path, clock, 6).close()
    log = LogWriter(path, PLENTY, clock)
    log.write(b"\rstep 7")
    log.close()
    assert path.read_bytes().split(b"\r")[1:] == [b"step 3/6 loss=3", b"step 7"]


class FullDisk:
    """Accepts this many bytes, then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = PLENTY
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._pwrite(descriptor, memoryview(data)[: self.room], offset)
        self.room -= written
        return written


def test_full_disk_loses_output_and_raises_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    log = LogWriter(path, PLENTY)
    disk.room = 6
    log.write(b"one\ntwo\n")
    assert path.read_bytes() == b"one\ntw"
    assert log.failure == f"{path} cannot be written: no space left on device"
    log.write(b"three\n")
    disk.room = 20
    log.write(b"four\n")
    assert path.read_bytes() == b"one\ntw"
    disk.room = PLENTY
    log.write(b"five\n")
    log.close()
    assert path.read_text() == f"one\ntw\n[13 bytes of output are missing here: {log.failure}]\nfive\n"


def test_full_disk_during_an_overwrite_is_noted_in_the_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    log = LogWriter(path, PLENTY)
    log.write(b"one\n10%")
    disk.room = 1
    log.write(b"\r20%")
    disk.room = PLENTY
    log.write(b"\r30%\n")
    log.close()
    assert path.read_text() == f"one\n2\n[2 bytes of output are missing here: {log.failure}]\n30%\n"


def test_log_starts_once_its_directory_exists(tmp_path: Path) -> None:
    path = tmp_path / "later" / "output"
    log = LogWriter(path, PLENTY)
    log.write(b"lost\n")
    assert log.failure == f"{path} cannot be written: no such file or directory"
    path.parent.mkdir()
    log.write(b"kept\n")
    log.close()
    assert path.read_text() == f"[5 bytes of output are missing here: {log.failure}]\nkept\n"


def test_old_file_stays_if_the_new_one_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogWriter(path, 16)
    log.write(b"1234567\n")

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        log.write(b"lost\n")
    assert path.read_bytes() == b"1234567\n"
    log.write(b"kept\n")
    log.close()
    assert path.read_bytes() == b"kept\n"


def test_deleted_file_is_created_again(path: Path) -> None:
    log = LogWriter(path, 16)
    log.write(b"1234567\n")
    path.unlink()
    log.write(b"one\n")
    log.close()
    assert (path.read_bytes(), log.failure) == (b"one\n", None)


def test_tail_reaches_into_the_older_file_and_starts_at_a_line(path: Path) -> None:
    Path(f"{path}.1").write_bytes(b"one\ntwo\n")
    path.write_bytes(b"three\nfour")
    assert read_tail(path, 100) == "one\ntwo\nthree\nfour"
    assert read_tail(path, 14) == "two\nthree\nfour"
    assert read_tail(path, 13) == "three\nfour"
    assert read_tail(path, 4) == "four"
    assert read_tail(path, 3) == "our"
    assert read_tail(path, 0) == ""


def test_tail_of_an_unterminated_line_is_its_end(path: Path) -> None:
    path.write_text("ä" * 10)
    assert read_tail(path, 5) == "�ää"
    path.write_text("x" * 10 + "\n")
    assert read_tail(path, 5) == "xxxx\n"


def test_piece_of_a_line_is_left_out_of_the_tail(path: Path) -> None:
    path.write_text("one\ntwo\n")
    assert read_tail(path, 6) == "two\n"
    assert read_tail(path, 4) == "two\n"


def test_tail_of_an_empty_log_is_empty(path: Path) -> None:
    assert read_tail(path, 100) == ""


MLFLOW = "http://mlflow.local:5000/#/experiments/1/runs/2"
RUN = "https://wandb.ai/team/project/runs/ab12cd34"


@pytest.mark.parametrize(
    ("pieces", "link"),
    [
        ([f"wandb: Run page: {RUN}\n"], RUN),
        ([f"wandb: 🚀 View run at \x1b[34m\x1b[4m{RUN}\x1b[0m\n"], RUN),
        ([f"see ({RUN}).\n"], RUN),
        ([f"{RUN}?nw=x, please\n"], f"{RUN}?nw=x"),
        ([f"wandb: {RUN[:20]}", RUN[20:-3], RUN[-3:], "\nmore"], RUN),
        ([f"at {RUN} "], RUN),
        ([f"10%\rat {RUN}\r20%"], RUN),
        (["wandb: View project at https://wandb.ai/team/project\n", f"x {RUN}\n"], RUN),
        ([f"project https://wandb.ai/team/project; view run {RUN}\n"], RUN),
        (["Vi", f"ew \x1b[1mRun\x1b[0m at {MLFLOW}\n"], MLFLOW),
        ([f"{RUN}\n", "https://wandb.ai/team/project/runs/other\n"], RUN),
        (["https://example.org/ is nice\n"], None),
        (["View runs at https://example.org/\n"], None),
        (["https://wandb.ai/team/project\n"], None),
        (["View run here\n", "https://example.org/\n"], None),
        ([f"not yet {RUN}"], None),
    ],
)
def test_wandb_url_of_a_run_is_found(pieces: list[str], link: str | None) -> None:
    links = Links()
    found = [links.feed(piece) for piece in pieces]
    assert found[-1] == link


def test_line_without_an_end_costs_little_memory_and_hides_no_later_link() -> None:
    links = Links()
    for _ in range(100):
        assert links.feed("x" * 10_000) is None
    assert links.feed(f" {RUN}\n") == RUN
