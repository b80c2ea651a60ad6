"""Delivery of an attempt to the queue: its result, the end of its log, the link in the log, its details."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from stoker.engines.attempt import AttemptRecord, AttemptResult, AttemptSpec, lease_clock
from stoker.errors import StokerError
from stoker.logs.reader import read_tail
from stoker.procfs import close_inherited_descriptors
from stoker.queue import QueueAwayError, Store, open_queue
from stoker.queue.driver import CollisionError
from stoker.queue.model import LONGEST_REPORT, AttemptDetails

# The queue keeps this much of a log; the machine that ran the job has all of it.
TAIL: Final = 64 * 1024
# Every worker writes this every few seconds for each running job. A job that prints more in between gets the longer
# tail, so that followers find the point where they stopped.
RUNNING_TAIL: Final = 16 * 1024
# A training prints its link at the start; the search ends here.
_LINK_WITHIN: Final = 16 * 2**20
_BLOCK: Final = 256 * 1024
# Much longer than a tick of the kernel's clock. A file server may have a different clock.
_TICK: Final = 2.0
_CUT: Final = "\n\n… (the rest is on the machine that ran it)\n"

# The limit for an unfinished line.
_LONGEST_LINK: Final = 4096

_COLOURS: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# The character after the link must have arrived, or the link may continue in the next chunk.
_LINK: Final = re.compile(r"https?://[^\s\x00-\x20\x7f\"'<>`]+(?=[\s\x00-\x20\x7f\"'<>`])")
_WANDB: Final = re.compile(r"https://wandb\.ai/\S+/runs/\S")
_VIEW_RUN: Final = re.compile(r"view run\b", re.IGNORECASE)


class LogTail:
    """Keeps one attempt's log tail, link and fit in the queue up to date."""

    def __init__(self, record: AttemptRecord, attempt_spec: AttemptSpec) -> None:
        self._record = record
        self._output = record.output
        self.attempt = attempt_spec.attempt
        self._limit = attempt_spec.log_limit
        self._awaits_fit = attempt_spec.fitting is not None
        self._links = Links()
        self._searched = 0
        self._link: str | None = None
        self._link_written = False
        self._seen: tuple[int, int] | None = None
        self._settled: tuple[int, int, int] | None = None
        """Inode, size and mtime of a delivered file that had not changed for a moment."""
        self._end = ""
        """The tail delivered last, which a progress bar may have rewritten since."""

    def deliver(self, store: Store) -> None:
        """Writes what has changed since the last call."""
        if self._awaits_fit:
            self._awaits_fit = not write_fit(store, self._record, self.attempt)
        try:
            stat = os.stat(self._output)  # noqa: PTH116 - for every job, every few seconds
        except OSError:
            return
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if stamp == self._settled:
            return
        # Two writes within a tick of the kernel's clock have the same mtime.
        settled = stamp if abs(time.time() - stat.st_mtime) > _TICK else None
        # A progress bar is rewritten in place, often with the same length.
        end = read_tail(self._output, min(RUNNING_TAIL, self._limit))
        if self._seen == (seen := (stat.st_ino, stat.st_size)) and end == self._end:
            self._settled = settled
            return
        inode, delivered = self._seen or (stat.st_ino, 0)
        overlaps = inode == stat.st_ino and stat.st_size - delivered <= RUNNING_TAIL // 2
        self._deliver(store, RUNNING_TAIL if overlaps else TAIL)
        self._seen, self._end, self._settled = seen, end, settled

    def deliver_last(self, store: Store) -> None:
        deliver_last_logs(store, [self])

    def _deliver(self, store: Store, most: int) -> None:
        if text := self.read(most):
            # `stoker clean` may remove the job at this moment.
            with contextlib.suppress(CollisionError):
                store.logs.write(self.attempt, text)
        self.write_link(store)

    def read(self, most: int) -> str:
        """The last bytes of the log, at most this many."""
        return read_tail(self._output, min(most, self._limit))

    def write_link(self, store: Store) -> None:
        """Writes the link once it is found."""
        self._find_link()
        if self._link is not None and not self._link_written:
            store.jobs.set_link(self.attempt, self._link)
            self._link_written = True

    def _find_link(self) -> None:
        older = self._output.with_name("output.1")
        while self._link is None and self._searched < _LINK_WITHIN:
            # A rotation renames the file under search.
            block = _block(older if older.exists() else self._output, self._searched)
            if not block:
                return
            self._searched += len(block)
            self._link = self._links.feed(block.decode(errors="replace"))


def deliver_last_logs(store: Store, tails: Sequence[LogTail]) -> None:
    """Writes the log tails of ended attempts in one transaction."""
    texts = {tail.attempt: tail.read(TAIL) for tail in tails}
    store.logs.write_last(texts)
    for tail in tails:
        if texts[tail.attempt]:
            tail.write_link(store)


def details_of(record: AttemptRecord) -> AttemptDetails | None:
    """The details of an ended attempt; None if there are none."""
    status, fit, body = record.status(), _fit(record), b""
    if record.has_report():
        with contextlib.suppress(OSError):
            body = record.report.read_bytes()
    report = body.decode(errors="replace")
    if len(body) > LONGEST_REPORT:
        report = body[: LONGEST_REPORT - len(_CUT.encode())].decode(errors="ignore") + _CUT
    cause = status.ending or ""
    if not report and not fit and cause in ("", "exited"):
        return None
    return AttemptDetails(cause=cause, rule=status.rule, report=report, fit=fit)


def write_details(store: Store, record: AttemptRecord, attempt: str) -> None:
    """Writes the details of an attempt after its outcome."""
    if (details := details_of(record)) is not None:
        _write(store, attempt, details)


def write_fit(store: Store, record: AttemptRecord, attempt: str) -> bool:
    """Writes the fit of a running attempt; False until there is one."""
    fit = _fit(record)
    if fit:
        _write(store, attempt, AttemptDetails(fit=fit))
    return bool(fit)


def _write(store: Store, attempt: str, details: AttemptDetails) -> None:
    """Raises QueueAwayError for a retry. Details that the queue refuses stay on the machine that ran the attempt."""
    try:
        store.attempts.write_details(attempt, details)
    except QueueAwayError:
        raise
    except (CollisionError, StokerError):
        return


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


# Delivery without a worker runs in a forked process: the database may hang, and the supervisor must keep watching its
# job, its signals and its clock.

# Longer than all database timeouts together; a process that hangs on a dead network disk is killed.
PATIENCE: Final = 60.0
# A short lease must leave time for a second try; one try takes this long on a busy machine.
_SHORTEST_PATIENCE: Final = 5.0


class Answer(msgspec.Struct, frozen=True):
    """The answer of the queue, or the `problem` of reaching it."""

    alive: bool = False
    """The attempt had no outcome before."""
    cancel: bool = False
    problem: str | None = None


class DetachedDelivery:
    """One delivery under way."""

    def __init__(self, record: AttemptRecord, attempt_spec: AttemptSpec, result: AttemptResult | None) -> None:
        """Delivers the result, or renews the lease without one. Raises OSError if it cannot fork."""
        self.brings_outcome = result is not None
        self.begun = lease_clock()
        answers, sender = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(answers)
            os.close(sender)
            raise
        if self.pid == 0:
            _run(record, attempt_spec, result, sender)
        os.close(sender)
        self._answers = answers
        self._ends = time.monotonic() + min(PATIENCE, max(_SHORTEST_PATIENCE, attempt_spec.lease / 4))

    def fileno(self) -> int:
        return self._answers

    def due(self) -> float:
        """The deadline in monotonic seconds."""
        return self._ends

    def give_up(self) -> Answer:
        os.kill(self.pid, signal.SIGKILL)
        return self.answer()

    def answer(self) -> Answer:
        """The answer. Call it when `fileno()` is readable."""
        body = bytearray()
        while part := os.read(self._answers, 65536):
            body += part
        os.close(self._answers)
        os.waitpid(self.pid, 0)
        try:
            return msgspec.msgpack.decode(bytes(body), type=Answer)
        except msgspec.DecodeError:
            return Answer(problem="the delivery was interrupted")


def _run(record: AttemptRecord, attempt_spec: AttemptSpec, result: AttemptResult | None, sender: int) -> None:
    """The body of the forked process; never returns."""
    try:
        os.setsid()
        # The worker sees the shim's death by its connections, so no other process may hold them.
        close_inherited_descriptors([sender])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with open_queue(attempt_spec.queue) as store:
            answer = _renew(store, attempt_spec) if result is None else _deliver(store, record, attempt_spec, result)
    except StokerError as error:
        answer = Answer(problem=str(error))
    except BaseException as error:  # noqa: BLE001 - the fork must not continue as the shim
        answer = Answer(problem=f"internal error: {type(error).__name__}: {error}")
    try:
        os.write(sender, msgspec.msgpack.encode(answer))
    finally:
        os._exit(0)


def _renew(store: Store, attempt_spec: AttemptSpec) -> Answer:
    renewed = store.attempts.renew([attempt_spec.attempt], attempt_spec.lease)
    return Answer(alive=attempt_spec.attempt in renewed, cancel=renewed.get(attempt_spec.attempt, False))


def _deliver(store: Store, record: AttemptRecord, attempt_spec: AttemptSpec, result: AttemptResult) -> Answer:
    """Writes log, outcome and details of an ended attempt."""
    # The log comes first: people who wait for the outcome read it next.
    LogTail(record, attempt_spec).deliver_last(store)
    accepted = store.attempts.finish(
        attempt_spec.attempt, result.outcome, result.exit_code, result.reason, result.cause
    )
    write_details(store, record, attempt_spec.attempt)
    record.delivered()
    return Answer(alive=accepted)


class Links:
    """Finds the run's page in the job's output: the first link to a Weights & Biases run, or after "View run"."""

    def __init__(self) -> None:
        self._unfinished = ""
        self._link: str | None = None

    def feed(self, text: str) -> str | None:
        """The first link, once it is complete. Lines may arrive in pieces."""
        if self._link is None:
            lines = (self._unfinished + text).split("\n")
            self._unfinished = lines.pop()[-_LONGEST_LINK:]
            # A newline ends a link.
            candidates = [*(f"{line}\n" for line in lines if "http" in line), self._unfinished]
            self._link = next(filter(None, map(_link_in, candidates)), None)
        return self._link


def _link_in(line: str) -> str | None:
    links = [match[0].rstrip(".,;:!?)]}*") for match in _LINK.finditer(line)]
    runs = list(filter(_WANDB.match, links))
    if not runs and _VIEW_RUN.search(_COLOURS.sub("", line)):
        runs = links
    return runs[0] if runs else None
