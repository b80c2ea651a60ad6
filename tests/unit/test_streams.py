"""Messages on closed or full streams never fail the program."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from stoker.streams import emit


def test_line_is_written_at_once() -> None:
    reader, writer = os.pipe()
    emit(writer, "idle für 30m \udcff\n")
    assert os.read(reader, 100).decode() == "idle für 30m \\udcff\n"
    os.close(reader)
    emit(writer, "nobody reads this\n")
    os.close(writer)
    emit(writer, "closed\n")


def test_full_disk_and_closed_pipe_lose_only_the_line() -> None:
    with Path("/dev/full").open("wb") as full:
        emit(full.fileno(), "no room\n")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    os.set_blocking(writer, True)
    begun = time.monotonic()
    emit(writer, "more\n")
    assert time.monotonic() - begun < 30
    os.close(reader)
    os.close(writer)


_STREAMS = """
import os, sys
from stoker.streams import open_missing
open_missing()
print("lost"); sys.stderr.write("lost"); assert sys.stdin.read() == ""
reader, writer = os.pipe()
assert min(reader, writer) > 2, (reader, writer)
os.execvp("sh", ["sh", "-c", "ls /proc/self/fd > $1; exit 3", "sh", sys.argv[1]])
"""


def test_closed_streams_are_not_reused_and_stay_closed_for_a_command(tmp_path: Path) -> None:
    listed = tmp_path / "descriptors"
    line = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", line, sys.executable, _STREAMS, str(listed)], check=False, timeout=60)
    assert done.returncode == 3
    # Its own redirection has 1, the listed directory the lowest number that is free: 0.
    assert listed.read_text().split() == ["0", "1"]
