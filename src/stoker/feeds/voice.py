"""What a feed tells people: its jobs on stdout, everything else on stderr, and nothing of that twice."""

import contextlib
import sys
from typing import TextIO


class Voice:
    """Every line is flushed at once: somebody may read it through a pipe."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def job(self, job: str, command: str) -> None:
        """A job that this feed has put into the queue."""
        _write(sys.stdout, f"{job}  {' '.join(command.splitlines())}\n")

    def say(self, sentence: str) -> None:
        _write(sys.stderr, f"stoker: {sentence}\n")

    def say_once(self, sentence: str) -> None:
        """The same sentence is told once for the whole life of the feed."""
        if sentence not in self._told:
            self._told.add(sentence)
            self.say(sentence)


def _write(stream: TextIO, line: str) -> None:
    # A disk that is full or a reader that left is no reason to feed no more.
    with contextlib.suppress(OSError):
        stream.write(line)
        stream.flush()
