"""What an attempt leaves on disk, brought to the queue: its result, the end of its log, the link in it, its details."""

import contextlib
from pathlib import Path
from typing import Any, Final

import msgspec

from stoker.engines.attempt import AttemptRecord, AttemptResult, AttemptSpec
from stoker.errors import StokerError
from stoker.queue import QueueAwayError, Store
from stoker.queue.driver import CollisionError
from stoker.queue.model import AttemptDetails
from stoker.runs.output import Links, read_tail

# What the queue keeps of a log; the whole is in the file on the machine that ran it.
TAIL: Final = 64 * 1024
# While the job runs: written every few seconds, for every job of every machine. A job that prints more in between gets
# the longer tail, so that readers who follow it find where to go on.
RUNNING_TAIL: Final = 16 * 1024
# A training prints its link at the start. Beyond this it is not searched for.
_LINK_WITHIN: Final = 16 * 2**20
_BLOCK: Final = 256 * 1024
# A report is a few pages. One of a job with thousands of processes is complete only on the machine that ran it.
LONGEST_REPORT: Final = 256 * 1024
_CUT: Final = "\n\n… (the rest is on the machine that ran it)\n"


def deliver(store: Store, record: AttemptRecord, attempt_spec: AttemptSpec, result: AttemptResult) -> bool:
    """Writes everything of an attempt that has ended. False when the queue already had an outcome."""
    # People who wait for the outcome read the log next.
    LogTail(record, attempt_spec).deliver_last(store)
    accepted = store.finish(attempt_spec.attempt, result.outcome, result.exit_code, result.reason)
    write_details(store, record, attempt_spec.attempt)
    record.delivered()
    return accepted


class LogTail:
    """Keeps the queue's copy of the end of one attempt's log up to date, with the link in it and the fit."""

    def __init__(self, record: AttemptRecord, attempt_spec: AttemptSpec) -> None:
        self._record = record
        self._output = record.output
        self._attempt = attempt_spec.attempt
        self._limit = attempt_spec.log_limit
        self._awaits_fit = attempt_spec.fitting is not None
        self._links = Links()
        self._searched = 0
        self._link: str | None = None
        self._link_written = False
        self._seen: tuple[int, int] | None = None
        self._end = ""
        """The end of the last delivery, which a progress bar may have rewritten since."""

    def deliver(self, store: Store) -> None:
        """Writes what is new since the last time."""
        if self._awaits_fit:
            self._awaits_fit = not write_fit(store, self._record, self._attempt)
        try:
            found = self._output.stat()
        except OSError:
            return
        # A progress bar is rewritten in place, and often keeps its length.
        end = read_tail(self._output, min(RUNNING_TAIL, self._limit))
        if self._seen == (seen := (found.st_ino, found.st_size)) and end == self._end:
            return
        self._deliver(store, RUNNING_TAIL if self._grew_little(*seen) else TAIL)
        self._seen, self._end = seen, end

    def _grew_little(self, file: int, size: int) -> bool:
        """Whether a short tail overlaps with the one before."""
        before, delivered = self._seen or (file, 0)
        return file == before and size - delivered <= RUNNING_TAIL // 2

    def deliver_last(self, store: Store) -> None:
        self._deliver(store, TAIL, is_last=True)

    def _deliver(self, store: Store, most: int, *, is_last: bool = False) -> None:
        text = read_tail(self._output, min(most, self._limit))
        if text or is_last:
            # The job may be removed by `stoker clean` at the same moment.
            with contextlib.suppress(CollisionError):
                store.write_log(self._attempt, text, is_last=is_last)
        self._find_link()
        if self._link is not None and not self._link_written:
            store.set_link(self._attempt, self._link)
            self._link_written = True

    def _find_link(self) -> None:
        older = self._output.with_name("output.1")
        while self._link is None and self._searched < _LINK_WITHIN:
            # After a rotation the file that was being searched is the older one.
            block = _block(older if older.exists() else self._output, self._searched)
            if not block:
                return
            self._searched += len(block)
            self._link = self._links.feed(block.decode(errors="replace"))


def details_of(record: AttemptRecord) -> AttemptDetails | None:
    """The details of an attempt that has ended; None when there are none."""
    status, report, fit = record.status(), _report(record), _fit(record)
    cause = status.ending or ""
    if not report and not fit and cause in ("", "by itself"):
        return None
    return AttemptDetails(cause=cause, rule=status.rule, report=report, fit=fit)


def write_details(store: Store, record: AttemptRecord, attempt: str) -> None:
    """Writes the details of an attempt whose outcome the queue has."""
    if (details := details_of(record)) is not None:
        _write(store, attempt, details)


def write_fit(store: Store, record: AttemptRecord, attempt: str) -> bool:
    """Writes how the batch size of a running attempt was found; False until it is."""
    fit = _fit(record)
    if fit:
        _write(store, attempt, AttemptDetails(fit=fit))
    return bool(fit)


def _write(store: Store, attempt: str, details: AttemptDetails) -> None:
    """Raises QueueAwayError, to be tried again; what the queue refuses stays on the machine that ran the attempt."""
    try:
        store.write_details(attempt, details)
    except QueueAwayError:
        raise
    except (CollisionError, StokerError):
        return


def _report(record: AttemptRecord) -> str:
    try:
        with record.report.open("rb") as file:
            body = file.read(LONGEST_REPORT + 1)
    except OSError:
        return ""
    if len(body) <= LONGEST_REPORT:
        return body.decode(errors="replace")
    return body[: LONGEST_REPORT - len(_CUT.encode())].decode(errors="ignore") + _CUT


def _fit(record: AttemptRecord) -> dict[str, Any]:
    fitted = record.fit()
    return {} if fitted is None else dict(msgspec.to_builtins(fitted))


def _block(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_BLOCK)
    except OSError:
        return b""
