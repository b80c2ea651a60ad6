"""Follows a job's output until it has ended, from one attempt to the next."""

import time
from typing import TYPE_CHECKING, Final

from stoker.cli.options.queue import SLOW_POLL, Listener, note, patiently
from stoker.cli.tables.log import LogScreen
from stoker.logs.readers import Piece, Reader, last_lines, reader_of
from stoker.paths import state_home
from stoker.queue.model import ENDED, Attempt, Job

if TYPE_CHECKING:
    from stoker.queue import Store

# A file here costs next to nothing to look at; a database should not be asked for the same text so often.
_LOOK_AT_FILE: Final = 0.1
_LOOK_AT_QUEUE: Final = 0.3
# The end of an attempt is told by the bell; this is for when it is not.
_ASK_FOR_END: Final = 1.0
# What another machine lends comes twice a second. A worker that was stopped meanwhile is not waited for.
_LAST_OF_IT: Final = 5.0
# The end that the queue keeps is written shortly after the outcome.
_LAST_KEPT: Final = 2.0


class Follower:
    """Shows the output of a job as it comes."""

    def __init__(self, store: "Store", listener: Listener, screen: LogScreen, lines: int | None) -> None:
        self._store = store
        self._listener = listener
        self._screen = screen
        self._lines = lines
        """How many to begin with; None for all."""
        self._noted = ""

    def follow_job(self, job: Job) -> None:
        """From its current attempt on, until the job has ended."""
        number = max(1, job.attempts)
        while (attempt := self._attempt_to_come(job.id, number)) is not None:
            self.follow_attempt(attempt)
            number = attempt.number + 1

    def follow_attempt(self, attempt: Attempt) -> None:
        """Until the attempt has ended."""
        self._screen.begin(attempt.number)
        self._noted = ""
        reader = self._reader(attempt)
        has_ended = self._has_ended(attempt)
        asked = time.monotonic()
        silent = seems_whole = True
        try:
            while True:
                piece = patiently(reader.read)
                if any(piece) and seems_whole and not reader.is_whole:
                    self._say_it_is_the_end(attempt)
                    seems_whole = False
                if silent and any(piece):
                    piece, silent = self._first(piece), False
                if has_ended and not reader.is_late and not self._may_come(reader, attempt, asked):
                    self._screen.leave(piece)
                    return
                if has_ended and time.monotonic() - asked >= _LAST_OF_IT:
                    reader.give_up()
                self._screen.show(piece)
                heard = self._listener.wait(_LOOK_AT_FILE if reader.is_here else _LOOK_AT_QUEUE)
                if not has_ended and (heard or time.monotonic() - asked >= _ASK_FOR_END):
                    # Asked before the output is read: then what is read is all.
                    has_ended = self._has_ended(attempt)
                    asked = time.monotonic()
        finally:
            reader.close()
            self._screen.pause()

    def _may_come(self, reader: Reader, attempt: Attempt, learned: float) -> bool:
        """Whether the queue may not have the last of an attempt yet whose end was learned of just now."""
        is_kept = reader.is_whole or attempt.outcome is not None
        return not is_kept and time.monotonic() - learned < _LAST_KEPT

    def _first(self, piece: Piece) -> Piece:
        """The first that is shown of an attempt; of the first attempt, no more lines than were asked for."""
        wanted, self._lines = self._lines, None
        return last_lines(piece, wanted)

    def _say_it_is_the_end(self, attempt: Attempt) -> None:
        self._screen.pause()
        patiently(lambda: say_it_is_the_end(self._store, attempt))

    def _reader(self, attempt: Attempt) -> Reader:
        return reader_of(self._store, state_home(), attempt)

    def _has_ended(self, attempt: Attempt) -> bool:
        found = patiently(lambda: self._store.attempt(attempt.id))
        return found is None or found.outcome is not None

    def _attempt_to_come(self, name: str, number: int) -> Attempt | None:
        """The attempt with this number or a later one, when there is one; None when the job has ended without."""
        said = -SLOW_POLL
        while True:
            # In this order: a job that has ended after its attempts were read has no other.
            attempts = patiently(lambda: self._store.attempts(name))
            job = patiently(lambda: self._store.job(name))
            if found := [attempt for attempt in attempts if attempt.number >= number]:
                return found[0]
            if job.state in ENDED:
                if number == 1:
                    note(f"job {name} has printed nothing: {_why(self._store, job)[1]}")
                return None
            if time.monotonic() - said >= SLOW_POLL:
                self._say_why(job)
                said = time.monotonic()
            if self._listener.wait(_LOOK_AT_QUEUE):
                said = -SLOW_POLL

    def _say_why(self, job: Job) -> None:
        """Once for each kind of reason: the seconds in it would otherwise make it a new one each time."""
        kind, sentence = patiently(lambda: _why(self._store, job))
        if kind != self._noted:
            self._noted = kind
            note(f"job {job.id}: {sentence}")


def _why(store: "Store", job: Job) -> tuple[str, str]:
    from stoker.queue.surroundings import why

    reason = why(store, job)
    return reason.kind, reason.reason


def say_it_is_the_end(store: "Store", attempt: Attempt) -> None:
    host = next((worker.host for worker in store.workers() if worker.id == attempt.worker), "the machine that ran it")
    note(f"this is the end of the output, as the queue keeps it; the whole is on {host}")
