"""What running jobs printed last: from the file where they run here, from the queue where not."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from stoker.logs.readers import directory_of, has_output
from stoker.queue.model import Attempt
from stoker.runs.output import read_tail
from stoker.runs.transcript import harmless
from stoker.status.model import Progress
from stoker.status.progress import progress_in

if TYPE_CHECKING:
    from stoker.queue import Store

# A few screens of a terminal: more than any progress bar with its neighbours takes.
MOST_LETTERS: Final = 4096
# Workers write the ends of outputs to the queue every few seconds: asking more often than that brings nothing new.
_ASK_QUEUE_EVERY: Final = 1.0
_LONGEST_LINE: Final = 300


class LastWords(NamedTuple):
    """What a job printed last."""

    progress: Progress | None
    line: str


NOTHING: Final = LastWords(None, "")


class Listening:
    """Remembers what each attempt said: only what is new is read again."""

    def __init__(self, home: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._clock = clock
        self._asked = -_ASK_QUEUE_EVERY
        self._asked_for: frozenset[str] = frozenset()
        self._stored: Mapping[str, str] = {}
        self._heard: dict[str, tuple[str, LastWords]] = {}

    def words(self, store: "Store", attempts: Sequence[Attempt]) -> dict[str, LastWords]:
        """By the ids of the attempts."""
        here = {attempt.id: text for attempt in attempts if (text := self._in_file(attempt)) is not None}
        elsewhere = self._in_queue(store, [attempt.id for attempt in attempts if attempt.id not in here])
        self._heard = {name: self._understood(name, text) for name, text in (*elsewhere.items(), *here.items())}
        return {name: words for name, (_text, words) in self._heard.items()}

    def _in_file(self, attempt: Attempt) -> str | None:
        """None when it does not run here."""
        directory = directory_of(self._home, attempt)
        return read_tail(directory / "output", MOST_LETTERS) if has_output(directory) else None

    def _in_queue(self, store: "Store", attempts: Iterable[str]) -> Mapping[str, str]:
        wanted = frozenset(attempts)
        if wanted and (wanted - self._asked_for or self._clock() - self._asked >= _ASK_QUEUE_EVERY):
            self._stored = store.last_words(sorted(wanted), MOST_LETTERS)
            self._asked, self._asked_for = self._clock(), wanted
        return {name: text for name, text in self._stored.items() if name in wanted}

    def _understood(self, name: str, text: str) -> tuple[str, LastWords]:
        known = self._heard.get(name)
        return known if known is not None and known[0] == text else (text, last_words(text))


def last_words(text: str) -> LastWords:
    lines = [line for line in harmless(text).split("\n") if line.strip()]
    last = lines[-1].strip() if lines else ""
    return LastWords(progress_in(text), last if len(last) <= _LONGEST_LINE else f"{last[: _LONGEST_LINE - 1]}…")
