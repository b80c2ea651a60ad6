"""The whole output of attempts on this machine, lent through the queue while somebody elsewhere reads it."""

import math
import os
import time
from pathlib import Path
from typing import Final

from stoker.errors import StokerError
from stoker.queue import QueueAwayError, Store
from stoker.queue.driver import CollisionError
from stoker.queue.loans import KEPT
from stoker.queue.model import Lent, Wanted
from stoker.runs.output_reader import OutputReader
from stoker.worker.assignment import AttemptRecord
from stoker.worker.home import Home
from stoker.worker.place import is_output_of

# Whether there is something to lend is asked no more often than this, however often the bell rings.
_ASK_EVERY: Final = 1.0
_AFTER_TROUBLE: Final = 60.0
# As quick as people read along; a row is written each time.
_LEND_EVERY: Final = 0.5
# What is brought in one step: between two of them the worker does what else there is to do.
_STEP: Final = 256 * 1024
# A line that grows for ever is not brought anew twice a second.
_LONGEST_UNFINISHED: Final = 64 * 1024
# More than anybody reads, and than a queue should have to carry: of such an output others see the end.
_LARGEST: Final = 256 * 2**20


class Lending:
    """All outputs that this machine lends now. What goes wrong with them costs no job anything."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lenders: dict[str, _Lender] = {}
        self._asked = -math.inf
        self._ask_at = 0.0
        self._end_at = math.inf
        """When what nobody wants any more is to be forgotten."""

    def rang(self) -> None:
        """Something in the queue has changed: perhaps that."""
        self._ask_at = min(self._ask_at, self._asked + _ASK_EVERY)

    def due(self) -> float:
        return min([self._ask_at, self._end_at, *(lender.due for lender in self._lenders.values())])

    def lend(self, store: Store) -> None:
        """What is due. Raises QueueAwayError: what was on its way then is begun anew later."""
        try:
            if time.monotonic() >= self._ask_at:
                self._ask(store)
            if time.monotonic() >= self._end_at:
                self._end_at = math.inf
                store.end_loans()
            for attempt, lender in list(self._lenders.items()):
                if time.monotonic() >= lender.due and not lender.lend(store):
                    self._forget(attempt)
        except QueueAwayError:
            self.forget_all()
            raise
        except StokerError:
            # Whatever the database has against it, jobs have nothing to do with that.
            self.forget_all()
            self._asked = time.monotonic() + _AFTER_TROUBLE
            self._ask_at = math.inf

    def forget_all(self) -> None:
        for attempt in list(self._lenders):
            self._forget(attempt)

    def _ask(self, store: Store) -> None:
        wanted = {one.attempt: one for one in store.wanted_outputs() if self._home.is_own(one.worker)}
        self._asked = time.monotonic()
        for attempt in self._lenders.keys() - wanted.keys():
            self._forget(attempt)
            self._end_at = self._asked + KEPT + 1.0
        for attempt, one in wanted.items():
            if attempt not in self._lenders and (directory := self._place_of(one)) is not None:
                self._lenders[attempt] = _Lender(one, directory)
        # Without a ring, only the end of what is wanted is to be noticed.
        self._ask_at = self._asked + _ASK_EVERY if wanted else math.inf

    def _place_of(self, wanted: Wanted) -> Path | None:
        directory = self._home.directory / "attempts" / f"{wanted.job}-{wanted.number}"
        try:
            is_here = is_output_of(directory, wanted.attempt) and not _is_too_large(directory)
        except OSError:
            is_here = False
        return directory if is_here else None

    def _forget(self, attempt: str) -> None:
        self._lenders.pop(attempt).close()


def _is_too_large(directory: Path) -> bool:
    sizes = [path.stat().st_size for name in ("output", "output.1") if (path := directory / name).exists()]
    return sum(sizes) > _LARGEST


class _Lender:
    """One output, from its beginning on."""

    def __init__(self, wanted: Wanted, directory: Path) -> None:
        self._attempt = wanted.attempt
        self._record = AttemptRecord(directory)
        self._reader = OutputReader(directory)
        self._edition = os.urandom(8).hex()
        self._told: Lent | None = None
        self.due = 0.0

    def lend(self, store: Store) -> bool:
        """One step. False when it is over: nobody wants it any more, or it cannot be read."""
        try:
            lent = self._next()
        except (StokerError, OSError):
            lent = None
        if lent is None or lent.size > _LARGEST:
            store.take_back_output(self._attempt)
            return False
        self.due = time.monotonic() + (0.0 if self._reader.is_behind else _LEND_EVERY)
        if self._is_news(lent):
            try:
                if not store.lend_output(self._attempt, lent):
                    return False
            except CollisionError:  # it is being cleaned away, or another worker is at home here too
                return False
            self._told = lent
        return True

    def _next(self) -> Lent:
        # Asked before the output is read: then what is read is all.
        has_ended = not self._record.is_assigned()
        finished, unfinished = self._reader.read(_STEP)
        is_complete = has_ended and not self._reader.is_behind
        return Lent(
            edition=self._edition,
            start=0 if self._told is None else self._told.size,
            finished=finished,
            unfinished=unfinished if is_complete else unfinished[:_LONGEST_UNFINISHED],
            is_behind=self._reader.is_behind,
            is_complete=is_complete,
        )

    def close(self) -> None:
        self._reader.close()

    def _is_news(self, lent: Lent) -> bool:
        return self._told is None or bool(lent.finished) or _state(self._told) != _state(lent)


def _state(lent: Lent) -> tuple[object, ...]:
    """What may change although nothing was finished."""
    return lent.unfinished, lent.is_behind, lent.is_complete
