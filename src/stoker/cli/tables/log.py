"""Shows a job's log: on a terminal, where progress bars move; to a pipe, in whole lines; or as JSON."""

import shutil
import sys
import time
from typing import TYPE_CHECKING, Final, Protocol

from stoker.cli.options.queue import SLOW_POLL, Listener, patiently
from stoker.cli.output import note
from stoker.logs.follow import LogFollower
from stoker.logs.model import LogUpdate
from stoker.logs.reader import last_lines, skip_to_last
from stoker.logs.terminal import for_terminal, plain_text
from stoker.paths import state_home
from stoker.queue.model import ENDED, Attempt, Job

if TYPE_CHECKING:
    from stoker.queue import Store

_CLEAR_LINE: Final = "\r\x1b[K"
_POLL_JOB: Final = 0.3


class LogScreen(Protocol):
    """Where a log is shown."""

    def begin(self, attempt: int) -> None:
        """What follows is of this attempt."""

    def show(self, update: LogUpdate) -> None: ...

    def pause(self) -> None:
        """Makes room for a note, or for the shell."""


class PipeScreen:
    """Whole lines, as they were printed."""

    def begin(self, attempt: int) -> None:
        """Attempts look alike."""

    def show(self, update: LogUpdate) -> None:
        if update.finished:
            sys.stdout.buffer.write(update.finished)
            sys.stdout.buffer.flush()

    def pause(self) -> None:
        """Only whole lines were written."""


class TerminalScreen:
    """Rewrites the unfinished line in place, cut to the width: a line that wraps cannot be rewritten."""

    def __init__(self) -> None:
        self._shown = ""

    def begin(self, attempt: int) -> None:
        """Attempts look alike."""

    def show(self, update: LogUpdate) -> None:
        preview = self._preview(update.unfinished)
        if not update.finished and preview == self._shown:
            return
        clear = _CLEAR_LINE if self._shown else ""
        sys.stdout.buffer.write(clear.encode() + for_terminal(update.finished) + preview.encode())
        sys.stdout.buffer.flush()
        self._shown = preview

    def pause(self) -> None:
        if self._shown:
            sys.stdout.buffer.write(b"\n")
            sys.stdout.buffer.flush()
            self._shown = ""

    def _preview(self, line: bytes) -> str:
        if not line:
            return ""
        from rich.cells import cell_len, set_cell_size

        width = shutil.get_terminal_size().columns - 1
        # Only the beginning is visible, and an unfinished line may be long.
        plain = plain_text(line[: 16 * width].decode(errors="replace")).partition("\n")[0]
        return plain if cell_len(plain) <= width else set_cell_size(plain, width)


class JsonScreen:
    """One object per line."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._attempt = 0

    def begin(self, attempt: int) -> None:
        self._attempt = attempt

    def show(self, update: LogUpdate) -> None:
        import msgspec

        for line in update.finished.split(b"\n")[:-1]:
            shown = {"job": self._job, "attempt": self._attempt, "line": line.decode(errors="replace")}
            sys.stdout.write(msgspec.json.encode(shown).decode() + "\n")
        if update.finished:
            sys.stdout.flush()

    def pause(self) -> None:
        """Only whole lines were written."""


def end_line(update: LogUpdate) -> LogUpdate:
    """The last update of a log: its unfinished line is finished."""
    return LogUpdate(update.finished + (update.unfinished + b"\n" if update.unfinished else b""), b"")


class JobFollower:
    """Shows the log of a job as it comes, through its retries."""

    def __init__(self, store: "Store", listener: Listener, screen: LogScreen, lines: int | None) -> None:
        """`lines`: how many of the first attempt's lines to begin with; None for all."""
        self._store = store
        self._listener = listener
        self._screen = screen
        self._lines = lines
        self._noted = ""

    def follow_job(self, job: Job) -> None:
        """From its current attempt until the job has ended."""
        number = max(1, job.attempts)
        while (attempt := self._next_attempt(job.id, number)) is not None:
            self.follow_attempt(attempt)
            number = attempt.number + 1

    def follow_attempt(self, attempt: Attempt) -> None:
        self._screen.begin(attempt.number)
        self._noted = ""
        follower = LogFollower(attempt, state_home(), continuous=True)
        is_empty, is_tail_noted = True, False
        try:
            while True:
                update = patiently(lambda: follower.read(self._store))
                if is_empty and any(update):
                    update, is_empty = self._first_lines(follower, update), False
                if any(update) and follower.source == "tail" and not is_tail_noted:
                    self._screen.pause()
                    patiently(lambda: note_tail(self._store, attempt))
                    is_tail_noted = True
                if follower.is_complete:
                    self._screen.show(end_line(update))
                    return
                self._screen.show(update)
                self._listener.wait(follower.pause())
        finally:
            follower.close()
            self._screen.pause()

    def _first_lines(self, follower: LogFollower, first: LogUpdate) -> LogUpdate:
        count, self._lines = self._lines, None
        return first if count is None else last_of(follower, self._store, count, first)

    def _next_attempt(self, name: str, number: int) -> Attempt | None:
        """The attempt with this number or a later one, once there is one; None when the job ended without."""
        noted = -SLOW_POLL
        while True:
            # In this order: a job that has ended after its attempts were read has no other.
            attempts = patiently(lambda: self._store.attempts.of(name))
            job = patiently(lambda: self._store.jobs.get(name))
            if found := [attempt for attempt in attempts if attempt.number >= number]:
                return found[0]
            if job.state in ENDED:
                if number == 1:
                    note(f"job {name} has printed nothing: {_why(self._store, job)[1]}")
                return None
            if time.monotonic() - noted >= SLOW_POLL:
                self._note_why(job)
                noted = time.monotonic()
            if self._listener.wait(_POLL_JOB):
                noted = -SLOW_POLL

    def _note_why(self, job: Job) -> None:
        """Once for each kind of reason: the seconds in it change all the time."""
        kind, reason = patiently(lambda: _why(self._store, job))
        if kind != self._noted:
            self._noted = kind
            note(f"job {job.id}: {reason}")


def last_of(follower: LogFollower, store: "Store", count: int, first: LogUpdate) -> LogUpdate:
    """The last lines of what is there now; `first` was read already."""
    pending = [first]

    def step() -> tuple[LogUpdate, bool]:
        update = pending.pop() if pending else patiently(lambda: follower.read(store))
        return update, follower.is_behind

    _skipped, update = skip_to_last(step, count)
    return last_lines(update, count)


def _why(store: "Store", job: Job) -> tuple[str, str]:
    from stoker.queue.explanation import why

    reason = why(store, job)
    return reason.kind, reason.reason


def note_tail(store: "Store", attempt: Attempt) -> None:
    host = next(
        (worker.host for worker in store.workers.all() if worker.id == attempt.worker), "the machine that ran it"
    )
    note(f"this is the end of the log, as the queue keeps it; the whole log is on {host}")
