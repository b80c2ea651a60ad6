"""The journal of a test job: its runs as the job itself records them."""

import shlex
import time
from pathlib import Path
from typing import NamedTuple

from tests.support.compiled import compiled


class Entry(NamedTuple):
    attempt: int
    pid: int
    word: str
    number: int
    time: float
    """On `journal_clock()`."""
    place: str
    """The node of a cluster, or `-`."""
    rank: int
    """Of the node, in a job over several."""
    restart: int
    """How often Slurm had started the attempt again."""

    @property
    def wall_time(self) -> float:
        """Seconds since the epoch, by the clock as it is set now."""
        return self.time + time.time() - journal_clock()


def journal_clock() -> float:
    """Seconds since boot: the clock of all entries, which nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class JobJournal:
    """One file, written by every attempt at one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def command(self, seconds: float, code: int = 0, *, deaf: bool = False) -> str:
        """The job that writes it."""
        words = [str(compiled("marking_job")), str(self.path), str(seconds), str(code), *(["deaf"] if deaf else [])]
        return shlex.join(words)

    def let_end(self) -> None:
        """The job ends by itself, soon."""
        Path(f"{self.path}.end").touch()

    def entries(self) -> list[Entry]:
        try:
            lines = self.path.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        # The last one may be being written.
        words = [line.split() for line in lines if line.endswith("\n")]
        return [
            Entry(int(attempt), int(pid), word, int(number), float(at), place, int(rank), int(restart))
            for attempt, pid, word, number, at, place, rank, restart in words
        ]

    def attempts(self) -> list[int]:
        """The numbers of the attempts that started, as often as they did."""
        return [entry.attempt for entry in self.entries() if entry.word == "start"]

    def has_started(self, attempt: int = 1) -> bool:
        return attempt in self.attempts()

    def printed(self, attempt: int) -> list[str]:
        """The lines that this attempt had surely printed."""
        return [
            f"attempt {attempt} says line {entry.number}"
            for entry in self.entries()
            if entry.attempt == attempt and entry.word == "line"
        ]

    def overlaps(self) -> list[str]:
        """Where one attempt lived while another did, in words; also when one was started twice."""
        entries = self.entries()
        found = []
        for start in (entry for entry in entries if entry.word == "start"):
            late = [one for one in entries if one.time >= start.time and _is_older(one, start)]
            found += [f"attempt {one.attempt} (pid {one.pid}) lived when {start.attempt} had started" for one in late]
        return found


def _is_older(one: Entry, start: Entry) -> bool:
    return one.attempt < start.attempt or (one.attempt == start.attempt and one.pid != start.pid)
