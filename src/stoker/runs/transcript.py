"""The end of what a job wrote, as a terminal would have left it standing, with nothing in it that acts."""

import os
import re
import stat
from pathlib import Path
from typing import Final

from stoker.gpus.model import Maybe, Unknown

LINES: Final = 40
# Forty lines of ordinary output many times over; of a single endless line the end is enough.
MOST_BYTES: Final = 64 * 1024
MOST_COLUMNS: Final = 400

# Sequences that steer a terminal. None reaches beyond the next escape or line, so that a broken one eats little.
_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, cursor movements
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, device strings
    r"|\x1b[ -/]*[0-~]?"
)
# What is left after that and is no text: controls, the marks that turn the writing direction around, odd line ends.
_UNSEEN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
_BLANKS: Final = re.compile(r"\n{3,}")


def output_tail(output: int | str | os.PathLike[str], lines: int = LINES) -> Maybe[str]:
    """The last lines of a file, or of what a descriptor is open on; the place where it is written stays as it is."""
    # Through /proc even a descriptor that is for writing only can be read, and a file that was renamed.
    path = Path(f"/proc/self/fd/{output}" if isinstance(output, int) else output)
    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind):
            return Unknown(f"it went to {_kind_in_words(path, kind)}, so it is not kept")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return Unknown(f"it cannot be read: {(error.strerror or 'it is not there').lower()}")
    try:
        size = os.fstat(descriptor).st_size
        begin = max(size - MOST_BYTES, 0)
        raw = os.pread(descriptor, MOST_BYTES, begin)
    except OSError as error:
        return Unknown(f"it cannot be read: {(error.strerror or 'no reason given').lower()}")
    finally:
        os.close(descriptor)
    if begin and b"\n" in raw[:-1]:
        raw = raw.partition(b"\n")[2]  # The first line is a piece of one.
    return last_lines(harmless(raw.decode(errors="replace")), lines)


def last_lines(text: str, lines: int) -> str:
    """The end of a text, without the blank lines at its edges and the far ends of long lines."""
    kept = text.strip("\n").split("\n")[-lines:]
    return "\n".join(_clip(line) for line in kept).strip("\n")


def harmless(text: str) -> str:
    """What a terminal would show in the end: no escapes, no controls but line ends, progress bars as they were last."""
    plain = _ESCAPES.sub("", text)
    settled = "\n".join(_settled(line) for line in plain.split("\n"))
    shown = _UNSEEN.sub("", settled.expandtabs(4))
    # A byte that was no text travels through Python as half of a character, which no file can be written with.
    return _BLANKS.sub("\n\n", shown.encode("utf-8", "replace").decode("utf-8"))


def one_line(text: str) -> str:
    """The same in a single line, for a sentence or a table."""
    return " ".join(harmless(text).split())


def _settled(line: str) -> str:
    """One line after its carriage returns and backspaces have been obeyed."""
    last = next((part for part in reversed(line.split("\r")) if part.strip()), "")
    if "\b" not in last:
        return last.rstrip()
    letters: list[str] = []
    for letter in last:
        if letter != "\b":
            letters.append(letter)
        elif letters:
            letters.pop()
    return "".join(letters).rstrip()


def _clip(line: str) -> str:
    return line if len(line) <= MOST_COLUMNS else f"{line[: MOST_COLUMNS - 1]}…"


def _kind_in_words(path: Path, kind: int) -> str:
    if stat.S_ISFIFO(kind):
        return "a pipe"
    if stat.S_ISSOCK(kind):
        return "a socket"
    target = str(path.resolve())
    if target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
        return "a terminal"
    return target if target.startswith("/dev/") else "something that is no file"
