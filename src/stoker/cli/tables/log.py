"""Where followed output goes: a terminal, which shows a progress bar move; a pipe, which gets whole lines; or JSON."""

import re
import shutil
import sys
from typing import Final, Protocol

from stoker.runs.output_reader import Piece

_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
_CLEAR_LINE: Final = "\r\x1b[K"


class LogScreen(Protocol):
    """What a follower writes to."""

    def begin(self, attempt: int) -> None:
        """What follows is of this attempt."""

    def show(self, piece: Piece) -> None:
        """Something new, or nothing."""

    def leave(self, piece: Piece) -> None:
        """The last of this attempt: its unfinished line stays as it is."""

    def pause(self) -> None:
        """Makes room for a note, or for the shell."""


def ended(piece: Piece) -> Piece:
    """The same when nothing follows: its last line is finished too."""
    return Piece(piece.finished + (piece.unfinished + b"\n" if piece.unfinished else b""), b"")


class PipeScreen:
    """Whole lines only."""

    def begin(self, attempt: int) -> None:
        """One attempt's lines look like another's."""

    def show(self, piece: Piece) -> None:
        if piece.finished:
            sys.stdout.buffer.write(piece.finished)
            sys.stdout.buffer.flush()

    def leave(self, piece: Piece) -> None:
        self.show(ended(piece))

    def pause(self) -> None:
        """What was written are whole lines."""


class TerminalScreen:
    """The unfinished line is written again and again, cut to the width: a line that wraps cannot be rewritten."""

    def __init__(self) -> None:
        self._shown = ""

    def begin(self, attempt: int) -> None:
        """One attempt's lines look like another's."""

    def show(self, piece: Piece) -> None:
        preview = self._preview(piece.unfinished)
        if not piece.finished and preview == self._shown:
            return
        clear = _CLEAR_LINE if self._shown else ""
        sys.stdout.buffer.write(clear.encode() + piece.finished + preview.encode())
        sys.stdout.buffer.flush()
        self._shown = preview

    def leave(self, piece: Piece) -> None:
        self.show(ended(piece))

    def pause(self) -> None:
        if self._shown:
            sys.stdout.buffer.write(b"\n")
            sys.stdout.buffer.flush()
            self._shown = ""

    def _preview(self, line: bytes) -> str:
        if not line:
            return ""
        from rich.cells import cell_len, set_cell_size

        width = shutil.get_terminal_size().columns - 1
        # Only the beginning can be seen, and a line without an end may be long.
        plain = _ESCAPES.sub("", line[: 16 * width].decode(errors="replace"))
        return plain if cell_len(plain) <= width else set_cell_size(plain, width)


class JsonScreen:
    """One object per line."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._attempt = 0

    def begin(self, attempt: int) -> None:
        self._attempt = attempt

    def show(self, piece: Piece) -> None:
        import msgspec

        for line in piece.finished.split(b"\n")[:-1]:
            told = {"job": self._job, "attempt": self._attempt, "line": line.decode(errors="replace")}
            sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        if piece.finished:
            sys.stdout.flush()

    def leave(self, piece: Piece) -> None:
        self.show(ended(piece))

    def pause(self) -> None:
        """What was written are whole lines."""
