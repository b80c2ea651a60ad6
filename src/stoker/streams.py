"""Standard streams of programs that must not fail or block because of their output."""

import contextlib
import os
import select
import sys
from typing import Final

OUTPUT: Final = 1
ERROR: Final = 2
# A full pipe or a terminal stopped by Ctrl-S: after this long the text is dropped.
_PATIENCE: Final = 0.1

_warned: set[str] = set()


def open_missing() -> None:
    """Opens the null device for standard streams that the caller closed (`>&-`). Otherwise the next opened file would
    get the free number and receive the output. The null device is closed on exec, so a command started from here finds
    the streams closed, as without Stoker.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (OUTPUT, "stdout", "w"), (ERROR, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - a descriptor


def emit(descriptor: int, text: str) -> None:
    """Writes at once and drops text that cannot be written: a full disk or a closed pipe must not stop a supervisor.
    Python's streams would retry at exit and change the exit code to 120.
    """
    rest = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        while rest and room.poll(_PATIENCE * 1000):
            # As much as a pipe with room accepts without blocking.
            rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]


def warn(message: str) -> None:
    """Prints a warning on stderr, once per process."""
    if message not in _warned:
        _warned.add(message)
        emit(ERROR, f"stoker: {message}\n")
