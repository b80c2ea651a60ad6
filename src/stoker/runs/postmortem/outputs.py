"""The end of a run's output, as a terminal shows it, without control sequences."""

import os
import re
import signal
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stoker.gpus.model import Maybe, Unknown
from stoker.logs.reader import read_tail
from stoker.logs.terminal import plain_text
from stoker.runs.postmortem.processes import answers_in_time

LINES: Final = 40
# Much more than 40 ordinary lines.
MOST_BYTES: Final = 64 * 1024
MOST_COLUMNS: Final = 400
# The limit of distinct outputs: standard output and error of a program and its pipeline; ranks may have files.
MOST_PLACES: Final = 4

# The final message of torchrun, about the first rank that ended on its machine.
_FIRST_FAILURE: Final = re.compile(
    r"first observed failure\):\s+\[0\]:\s+time +: (\S+).*?\s+rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+)",
    re.DOTALL,
)
# Exit codes of a rank after the death of a peer: an exception, or its library gives up.
_OF_OTHERS: Final = (1, -signal.SIGABRT, -signal.SIGTERM)

_NAMES: Final = {1: "standard output", 2: "standard error"}


class Output(msgspec.Struct, frozen=True):
    """The end of one output of a run, or why it is unknown."""

    name: str
    """`standard error`, `captured output`."""
    file: str
    """Its path; empty if it is not a file."""
    text: Maybe[str]


class _Place(NamedTuple):
    """The target of a process's descriptor."""

    identity: tuple[int, int]
    descriptor: int
    path: str
    file: str
    """Its path if it is a file; empty otherwise."""


def first_failed_rank(texts: Iterable[str]) -> str:
    """The rank that failed first and how, according to torchrun on each machine; empty without its message.

    Times have whole seconds. Among failures of one second, those not explained by a dead peer come first.
    """
    found = [match for text in texts for match in list(_FIRST_FAILURE.finditer(text))[-1:]]
    if not found:
        return ""
    first = min(found, key=lambda match: (match[1], int(match[3]) in _OF_OTHERS))
    return f"rank {first[2]} failed first, {_how(int(first[3]))}"


def _how(code: int) -> str:
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"with code {code}"


def last_outputs(pids: Sequence[int], captured: Path | None = None) -> list[Output]:
    """The end of standard output and standard error of a run's processes.

    `captured`: the log of a queued job. A file on a dead network mount costs half a second.
    """
    pids = list(pids) or [os.getpid()]
    answers = answers_in_time(_places_of, pids)
    descriptors: dict[tuple[int, int], set[int]] = {}
    chosen: dict[tuple[int, int], _Place] = {}
    for pid in pids:
        for place in answers.get(pid, ()):
            # A pipe or terminal is mentioned only for the command itself, and without a log.
            if place.file or (captured is None and pid == pids[0]):
                chosen.setdefault(place.identity, place)
                descriptors.setdefault(place.identity, set()).add(place.descriptor)
    kept = list(chosen.values())[:MOST_PLACES]
    texts = answers_in_time(lambda number: output_tail(kept[number].path), range(len(kept)))
    late = Unknown("its file system does not respond")
    found = [
        Output(_named(descriptors[place.identity]), place.file, texts.get(number, late))
        for number, place in enumerate(kept)
    ]
    if captured is None:
        return found
    return [Output("captured output", "", last_lines(plain_text(read_tail(captured, MOST_BYTES)), LINES)), *found]


def _places_of(pid: int) -> list[_Place]:
    found = []
    for descriptor in _NAMES:
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            about, target = os.stat(path), os.readlink(path)  # noqa: PTH116, PTH115 - links that lead nowhere
        except OSError:
            continue  # it is closed, the process has ended, or it belongs to another user
        file = target if stat.S_ISREG(about.st_mode) else ""
        found.append(_Place((about.st_dev, about.st_ino), descriptor, path, file))
    return found


def _named(descriptors: set[int]) -> str:
    return " and ".join(_NAMES[descriptor] for descriptor in sorted(descriptors))


def output_tail(file: str | os.PathLike[str], lines: int = LINES) -> Maybe[str]:
    """The last lines of a file. A path in /proc/PID/fd also works for a renamed file."""
    path = Path(file)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return Unknown(f"it went to {_kind(path, mode)}, so it is not kept")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return Unknown(f"it cannot be read: {(error.strerror or 'no reason given').lower()}")
    try:
        size = os.fstat(descriptor).st_size
        begin = max(size - MOST_BYTES, 0)
        raw = os.pread(descriptor, MOST_BYTES, begin)
    except OSError as error:
        return Unknown(f"it cannot be read: {(error.strerror or 'no reason given').lower()}")
    finally:
        os.close(descriptor)
    if begin and b"\n" in raw[:-1]:
        raw = raw.partition(b"\n")[2]  # the first line is incomplete
    return last_lines(plain_text(raw.decode(errors="replace")), lines)


def last_lines(text: str, lines: int) -> str:
    """The last lines of a text, truncated to `MOST_COLUMNS`, without surrounding blank lines."""
    kept = text.strip("\n").split("\n")[-lines:]
    return "\n".join(_clip(line) for line in kept).strip("\n")


def _clip(line: str) -> str:
    return line if len(line) <= MOST_COLUMNS else f"{line[: MOST_COLUMNS - 1]}…"


def _kind(path: Path, mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    target = str(path.resolve())
    if target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
        return "a terminal"
    return target if target.startswith("/dev/") else "something other than a file"
