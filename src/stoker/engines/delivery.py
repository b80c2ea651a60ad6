"""The outcome of an attempt, the last of its output and what was found, brought to the queue."""

import contextlib
from pathlib import Path
from typing import Any, Final

import msgspec

from stoker.engines.local.attempt_spec import AttemptRecord, AttemptSpec
from stoker.engines.local.messages import AttemptResult
from stoker.errors import StokerError
from stoker.queue import QueueAwayError, Store
from stoker.queue.driver import CollisionError
from stoker.queue.model import AttemptDetails
from stoker.runs.output import Links, read_tail

# What the queue keeps of an output; the whole is in the file on the machine that ran it.
TAIL: Final = 64 * 1024
# While it runs: written every few seconds, for every job of every machine. A job that prints more in between gets the
# whole, so that whoever follows it finds where to go on.
RUNNING_TAIL: Final = 16 * 1024
# A link is told when a training begins. Further than that into its output it is not looked for.
_LINK_WITHIN: Final = 16 * 2**20
_BLOCK: Final = 256 * 1024


def deliver(store: Store, record: AttemptRecord, attempt_spec: AttemptSpec, over: AttemptResult) -> bool:
    """Writes everything that the queue is to know. False when the attempt had an outcome already."""
    # Whoever waits for the outcome wants to read the output next.
    LogTail(record, attempt_spec).deliver_last(store)
    accepted = store.finish(attempt_spec.attempt, over.outcome, over.exit_code, over.sentence)
    write_details(store, record, attempt_spec.attempt)
    record.delivered()
    return accepted


class LogTail:
    """What the queue gets of one attempt while it runs: the end of its output, the link in it, and its fit."""

    def __init__(self, record: AttemptRecord, attempt_spec: AttemptSpec) -> None:
        self._record = record
        self._output = record.output
        self._attempt = attempt_spec.attempt
        self._limit = attempt_spec.log_limit
        self._awaits_fit = attempt_spec.fitting is not None
        self._links = Links()
        self._read = 0
        self._link: str | None = None
        self._told_link = False
        self._seen: tuple[int, int] | None = None
        self._end = ""
        """What was delivered last, as far as a bar may have rewritten it since."""

    def deliver(self, store: Store) -> None:
        """What is new since the last time."""
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
        self._deliver(store, RUNNING_TAIL if self._has_said_little(*seen) else TAIL)
        self._seen, self._end = seen, end

    def _has_said_little(self, file: int, size: int) -> bool:
        """Since the last time, so that a short excerpt has something in common with the one before."""
        before, told = self._seen or (file, 0)
        return file == before and size - told <= RUNNING_TAIL // 2

    def deliver_last(self, store: Store) -> None:
        self._deliver(store, TAIL, is_last=True)

    def _deliver(self, store: Store, most: int, *, is_last: bool = False) -> None:
        text = read_tail(self._output, min(most, self._limit))
        if text or is_last:
            # Of a job that is cleaned away at the same moment, nothing is kept.
            with contextlib.suppress(CollisionError):
                store.write_log(self._attempt, text, is_last=is_last)
        self._look_for_link()
        if self._link is not None and not self._told_link:
            store.set_link(self._attempt, self._link)
            self._told_link = True

    def _look_for_link(self) -> None:
        older = self._output.with_name("output.1")
        while self._link is None and self._read < _LINK_WITHIN:
            # A file that was put aside since is the one that was being read.
            block = _block(older if older.exists() else self._output, self._read)
            if not block:
                return
            self._read += len(block)
            self._link = self._links.feed(block.decode(errors="replace"))


def _block(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_BLOCK)
    except OSError:
        return b""


# A report is a few pages. One of a job with thousands of processes is whole on the machine that ran it.
LONGEST_REPORT: Final = 256 * 1024
_CUT: Final = "\n\n… (the rest is on the machine that ran it)\n"


def details_of(record: AttemptRecord) -> AttemptDetails | None:
    """What the record of an attempt that has ended tells; None when there is nothing to say."""
    status, report, fit = record.status(), _report(record), _fit(record)
    cause = status.ending or ""
    if not report and not fit and cause in ("", "by itself"):
        return None
    return AttemptDetails(cause=cause, rule=status.rule, report=report, fit=fit)


def write_details(store: Store, record: AttemptRecord, attempt: str) -> None:
    """Of an attempt that has ended, and whose outcome the queue has."""
    _tell(store, attempt, details_of(record))


def write_fit(store: Store, record: AttemptRecord, attempt: str) -> bool:
    """While it runs: whether a size was found, and the queue has been told how."""
    fit = _fit(record)
    if fit:
        _tell(store, attempt, AttemptDetails(fit=fit))
    return bool(fit)


def _tell(store: Store, attempt: str, finding: AttemptDetails | None) -> None:
    """Nothing waits for it. A queue that is away is told when it is back, one that refuses it is not asked again."""
    if finding is None:
        return
    try:
        store.write_details(attempt, finding)
    except QueueAwayError:
        raise
    except CollisionError:
        return  # the job was cleaned away meanwhile
    except StokerError:
        return  # it is in the record, on the machine that ran it


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
