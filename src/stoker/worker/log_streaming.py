"""The whole output of attempts on this machine, lent through the queue while somebody elsewhere reads it."""

import math
import os
import time
from pathlib import Path
from typing import Final

from stoker.engines.attempt import AttemptRecord
from stoker.engines.identity import WorkerIdentity
from stoker.errors import StokerError
from stoker.logs.model import LogChunk
from stoker.logs.reader import LogFileReader, is_log_of
from stoker.queue import QueueAwayError, Store
from stoker.queue.driver import CollisionError
from stoker.queue.log_streams import KEPT
from stoker.queue.model import LogRequest

# Whether there is something to lend is asked no more often than this, however often the bell rings.
_ASK_EVERY: Final = 1.0
# Meanwhile readers have the end of an output that the queue keeps: perhaps it was the loan that filled the disk.
_AFTER_ABSENCE: Final = 5.0
_AFTER_TROUBLE: Final = 60.0
# Loans of machines that are gone are forgotten by the others.
_END_EVERY: Final = 600.0
# As quick as people read along; a row is written each time.
_LEND_EVERY: Final = 0.5
# What is brought in one step: between two of them the worker does what else there is to do.
_STEP: Final = 256 * 1024
# Who wants to read more than these at once waits until others are brought.
_MOST_LENDERS: Final = 8
# Those that are brought as far as they go, and go on as their jobs do: each has a file open.
_MOST_OPEN: Final = 64
# All together in the queue, finished ones too.
_MOST_LENT: Final = 512 * 2**20
# More than anybody reads, and than a queue should have to carry: of such an output others see the end.
_LARGEST: Final = 128 * 2**20
# The same of one line: it is brought as a whole, and an unfinished one anew with each change.
_LONGEST_LINE: Final = 4 * 2**20
_LONGEST_UNFINISHED: Final = 64 * 1024


class LogStreaming:
    """All outputs that this machine lends now. What goes wrong with them costs no job anything."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._lenders: dict[str, _Lender] = {}
        """By attempt; those that have had their turn are behind the others."""
        self._refused: set[str] = set()
        """Attempts whose output is not to be lent, as long as somebody wants it."""
        self._asked = -math.inf
        self._ask_at = 0.0
        self._end_at = 0.0
        """When what nobody wants any more is to be forgotten."""

    def rang(self) -> None:
        """Something in the queue has changed: perhaps that."""
        self._ask_at = min(self._ask_at, self._asked + _ASK_EVERY)

    def due(self) -> float:
        return min([self._ask_at, self._end_at, *(lender.due for lender in self._lenders.values())])

    def lend(self, store: Store) -> None:
        """One step of what is due. Raises QueueAwayError: what was on its way then is begun anew later."""
        try:
            self._lend(store, time.monotonic())
        except QueueAwayError:
            self._rest(_AFTER_ABSENCE)
            raise
        except StokerError:
            # Whatever the database has against it, jobs have nothing to do with that.
            self._rest(_AFTER_TROUBLE)

    def forget_all(self) -> None:
        for attempt in list(self._lenders):
            self._forget(attempt)

    def _rest(self, seconds: float) -> None:
        self.forget_all()
        self._ask_at = time.monotonic() + seconds
        # Nor does a bell change that.
        self._asked = self._ask_at - _ASK_EVERY
        self._end_at = self._ask_at + _END_EVERY

    def _lend(self, store: Store, now: float) -> None:
        if now >= self._ask_at:
            self._ask(store)
        if now >= self._end_at:
            self._end_at = now + (_END_EVERY if store.expire_log_streams() else _LEND_EVERY)
        for attempt, lender in self._lenders.items():
            if now >= lender.due:
                is_on = lender.lend(store)
                self._lenders[attempt] = self._lenders.pop(attempt)
                if not is_on:
                    self._forget(attempt)
                    if lender.is_refused:
                        self._refused.add(attempt)
                return

    def _ask(self, store: Store) -> None:
        wanted = {one.attempt: one for one in store.log_requests() if self._identity.is_own(one.worker)}
        self._asked = time.monotonic()
        self._refused &= wanted.keys()
        for attempt in self._lenders.keys() - wanted.keys():
            self._forget(attempt)
            self._end_at = min(self._end_at, self._asked + KEPT + 1.0)
        for attempt, one in wanted.items():
            if attempt in self._lenders and not self._lenders[attempt].is_known_as(one.edition):
                # Nobody wanted it for a moment, and whoever wants it now was to begin anew.
                self._forget(attempt)
            if attempt in self._lenders or attempt in self._refused or not self._has_room():
                continue
            directory = self._identity.directory_of(one.job, one.number)
            if is_log_of(directory, attempt):
                self._lenders[attempt] = _Lender(one, directory)
        # Without a ring, only the end of what is wanted is to be noticed.
        self._ask_at = self._asked + _ASK_EVERY if wanted else math.inf

    def _has_room(self) -> bool:
        lenders = self._lenders.values()
        on_their_way = sum(lender.is_behind for lender in lenders)
        open_ones = sum(not lender.is_done for lender in lenders)
        lent = sum(lender.size for lender in lenders)
        return on_their_way < _MOST_LENDERS and open_ones < _MOST_OPEN and lent < _MOST_LENT

    def _forget(self, attempt: str) -> None:
        self._lenders.pop(attempt).close()


class _Lender:
    """One output, from its beginning on."""

    def __init__(self, wanted: LogRequest, directory: Path) -> None:
        self._attempt = wanted.attempt
        self._record = AttemptRecord(directory)
        self._reader = LogFileReader(directory)
        self._edition = os.urandom(8).hex()
        self._told: LogChunk | None = None
        self.due = 0.0
        self.is_refused = False
        """Whether there is no sense in trying again."""

    @property
    def size(self) -> int:
        """What the queue has of it, in bytes."""
        return 0 if self._told is None else self._told.size

    @property
    def is_behind(self) -> bool:
        return self._told is None or self._told.is_behind

    def is_known_as(self, edition: str) -> bool:
        """Whether readers have what was told of it."""
        return self._told is None or edition == self._edition

    @property
    def is_done(self) -> bool:
        return self._told is not None and self._told.is_complete

    def lend(self, store: Store) -> bool:
        """One step. False when it is over: nobody wants it any more, or it cannot be lent."""
        try:
            lent = self._next()
        except (StokerError, OSError):
            lent = None
        if lent is None or lent.size > _LARGEST:
            # One that has grown so long is begun anew: its file is shorter, for the writer keeps only so much.
            self.is_refused = lent is None
            store.drop_log_stream(self._attempt)
            return False
        self.due = time.monotonic() + (0.0 if lent.is_behind else _LEND_EVERY)
        if self._is_news(lent):
            try:
                if not store.write_log_chunk(self._attempt, lent):
                    return False
            except CollisionError:  # it is being cleaned away, or another worker is at home here too
                return False
            self._told = lent
        if self.is_done:
            self._reader.close()
            self.due = math.inf
        return True

    def close(self) -> None:
        self._reader.close()

    def _next(self) -> LogChunk | None:
        """What follows; None when there is too much of it. Raises StokerError or OSError when it cannot be read."""
        if self._told is None and _size_of(self._record.directory) > _LARGEST:
            return None
        # Asked before the output is read: then what is read is all.
        has_ended = not self._record.has_attempt()
        finished, unfinished = self._reader.read(_STEP)
        is_complete = has_ended and not self._reader.is_behind
        if len(finished) > _STEP + _LONGEST_LINE or len(unfinished) > _LONGEST_LINE:
            return None
        return LogChunk(
            edition=self._edition,
            start=self.size,
            finished=finished,
            unfinished=unfinished if is_complete else unfinished[:_LONGEST_UNFINISHED],
            is_behind=self._reader.is_behind,
            is_complete=is_complete,
        )

    def _is_news(self, lent: LogChunk) -> bool:
        return self._told is None or bool(lent.finished) or _state(self._told) != _state(lent)


def _size_of(directory: Path) -> int:
    return sum(path.stat().st_size for name in ("output", "output.1") if (path := directory / name).exists())


def _state(lent: LogChunk) -> tuple[object, ...]:
    """What may change although nothing was finished."""
    return lent.unfinished, lent.is_behind, lent.is_complete
