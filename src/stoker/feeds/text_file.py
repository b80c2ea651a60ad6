"""The feed from a text file: every new line becomes a job."""

import contextlib
import fcntl
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import quote

from stoker import inotify
from stoker.errors import BadInputError, StokerError
from stoker.feeds.intake import FeedLog, Intake, RetryForever, SourceCommand
from stoker.inotify import Inotify
from stoker.queue import QueueAwayError, Store, new_id
from stoker.queue.model import Job

# A last line without a newline counts as complete when unchanged for this long.
SECONDS_TO_FINISH_A_LINE: Final = 2.0
# inotify does not report changes that other machines make on a file server.
SECONDS_BETWEEN_LOOKS: Final = 5.0
# A transaction of this many jobs blocks other processes for a fraction of a second.
MOST_AT_ONCE: Final = 500

_OF_THE_FILE: Final = inotify.MODIFIED | inotify.CLOSED_AFTER_WRITING
# Editors write another file and rename it, so the directory is watched too.
_OF_THE_DIRECTORY: Final = inotify.CREATED | inotify.MOVED_HERE


class FileFeed:
    """One file and its queue."""

    def __init__(
        self,
        path: Path,
        name: str | None,
        intake: Intake,
        finished: "FinishedFile | None",
        open_store: Callable[[], Store],
        log: FeedLog,
    ) -> None:
        self._path = path
        self._prefix = feed_prefix(path, name)
        self._intake = intake
        self._finished = finished
        self._open_store = open_store
        self._log = log
        self._store: Store | None = None
        self._taken: set[str] = set()
        """Origins known to be in the queue."""
        self._data = b""
        self._changed = time.monotonic()
        self._done: bytes | None = None
        """The part of the file that was already submitted."""

    def run_once(self) -> None:
        """Submits existing lines; waits for a last line without a newline to be complete."""
        while (pause := self._look()) < SECONDS_BETWEEN_LOOKS:
            time.sleep(pause)
        self._write_finished()

    def run(self) -> None:
        """Takes what is there and what comes, for ever."""
        patience = RetryForever(self._log, QueueAwayError, FileAwayError, longest=SECONDS_BETWEEN_LOOKS)
        events = Inotify()
        try:
            while True:
                # The watch precedes the read: changes in between wake at once.
                events.drain()
                events.watch(self._path.parent, _OF_THE_DIRECTORY)
                events.watch(self._path, _OF_THE_FILE)
                pause = patience.until_done(self._look)
                patience.until_done(self._report_finished)
                if events.fileno() >= 0:
                    select.select([events], [], [], pause)
                else:
                    time.sleep(pause)
        finally:
            events.close()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _look(self) -> float:
        """Submits every complete new line; returns the seconds until the next read at the latest."""
        data = self._read()
        now = time.monotonic()
        if data != self._data:
            self._data, self._changed = data, now
        whole = finished_part(data)
        missing = max(0.0, self._changed + SECONDS_TO_FINISH_A_LINE - now) if len(whole) < len(data) else 0.0
        self._take(whole if missing else data)
        return missing or SECONDS_BETWEEN_LOOKS

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            self._log.write_once(f"{self._path} is not there yet: its lines are taken when it is")
            return b""
        except IsADirectoryError:
            raise BadInputError(f"{self._path} is a directory: name a file with one command per line") from None
        except OSError as error:
            raise FileAwayError(f"{self._path} cannot be read: {error.strerror}") from None

    def _take(self, data: bytes) -> None:
        if data == self._done:
            return
        lines = lines_in(data)
        for number in lines.unreadable:
            self._log.write_once(f"line {number} of {self._path} is left out: it is not text in UTF-8")
        wanted = []
        for line in lines.commands:
            origin = origin_of(self._prefix, line)
            if origin in self._taken:
                continue
            if (problem := self._intake.refusal(line.text)) is not None:
                self._log.write_once(f"line {line.number} of {self._path} is left out: {problem}")
                continue
            wanted.append(SourceCommand(line.text, origin, new_id()))
        for start in range(0, len(wanted), MOST_AT_ONCE):
            with self._queue() as store:
                self._intake.admit(store)
                self._submit(store, wanted[start : start + MOST_AT_ONCE])
        self._done = data

    def _submit(self, store: Store, wanted: Sequence[SourceCommand]) -> None:
        try:
            ids = store.jobs.submit(self._intake.made(wanted))
        except BadInputError:
            # One of these ids collides with another job's: draw others.
            wanted = [one._replace(id=new_id()) for one in wanted]
            ids = store.jobs.submit(self._intake.made(wanted))
        for one, name in zip(wanted, ids, strict=True):
            self._taken.add(one.origin)
            # A different id belongs to the job that this line became before.
            if name == one.id:
                self._log.job(name, one.command)

    def _report_finished(self) -> None:
        try:
            self._write_finished()
        except FileAwayError as error:
            # A full disk elsewhere must not delay new lines.
            self._log.write_once(f"{error} (trying again)")

    def _write_finished(self) -> None:
        if self._finished is None:
            return
        with self._queue() as store:
            jobs = [job for job in store.jobs.by_origin(self._prefix) if job.state == "succeeded"]
        self._finished.append(sorted(jobs, key=lambda job: (job.ended or 0.0, job.id)))

    @contextlib.contextmanager
    def _queue(self) -> Iterator[Store]:
        if self._store is None:
            self._store = self._open_store()
        try:
            yield self._store
        except QueueAwayError:
            # A database that comes back may have lost its last jobs: submit every line again.
            self._taken.clear()
            self._done = None
            raise


# PostgreSQL indexes at most 2,700 bytes of an origin, and a path may have 4,096.
LONGEST_NAME: Final = 600


class Line(NamedTuple):
    number: int
    text: str
    occurrence: int
    """Which occurrence of this text, from 1."""


class Lines(NamedTuple):
    commands: list[Line]
    unreadable: list[int]
    """Numbers of lines that are not text."""


def lines_in(data: bytes) -> Lines:
    """The commands; blank lines and comments are skipped."""
    found = Lines([], [])
    seen: Counter[str] = Counter()
    # Some editors begin a file with a byte order mark.
    for number, written in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            text = written.decode().strip()
        except UnicodeDecodeError:
            found.unreadable.append(number)
            continue
        if text and not text.startswith("#"):
            seen[text] += 1
            found.commands.append(Line(number, text, seen[text]))
    return found


def finished_part(data: bytes) -> bytes:
    """All lines except a last one that may still be incomplete."""
    if not data[data.rfind(b"\n") + 1 :].strip():
        return data
    return data[: data.rfind(b"\n") + 1]


def feed_prefix(path: Path, name: str | None) -> str:
    """The common prefix of the origins of a file's lines: the feed's name, or the file's real path."""
    written = quote(os.fsencode(name if name is not None else os.path.realpath(path)), safe="/ .,-_~+=@")
    return f"file:{written if len(written) <= LONGEST_NAME else sha256(written.encode()).hexdigest()}:"


def origin_of(prefix: str, line: Line) -> str:
    """Line number and neighbouring lines are not part of it, because edits change them."""
    return f"{prefix}{sha256(line.text.encode()).hexdigest()[:32]}:{line.occurrence}"


class FileAwayError(StokerError):
    """A file is temporarily unreadable or unwritable."""


class FinishedFile:
    """The file of `--finished`, which people may edit or remove. A file beside it contains the ids of its jobs."""

    def __init__(self, path: Path, appended: str = "") -> None:
        """`appended`: the text that the feed appended to each command, removed here."""
        self.path = path
        self._appended = appended
        self._ids = path.with_name(f".{path.name}.stoker")
        self._seen: set[str] = set()
        """Jobs known to be in it."""

    def append(self, jobs: Sequence[Job]) -> None:
        """Appends the commands of jobs that it does not contain yet. After a crash some may appear twice."""
        unseen = [job for job in jobs if job.id not in self._seen]
        if not unseen:
            return
        try:
            with self._ids.open("a+b") as ids:
                # One feeder at a time.
                fcntl.flock(ids, fcntl.LOCK_EX)
                ids.seek(0)
                known = set(ids.read().decode(errors="replace").split())
                if fresh := [job for job in unseen if job.id not in known]:
                    with self.path.open("a+b") as file:
                        _append_lines(file, [_one_line(job, self._appended) for job in fresh])
                    _append_lines(ids, [job.id for job in fresh])
                self._seen |= {job.id for job in unseen}
        except OSError as error:
            raise FileAwayError(f"finished commands cannot be written to {self.path}: {error.strerror}") from None


def _append_lines(file: BinaryIO, lines: Sequence[str]) -> None:
    """On separate lines, also after a last line without a newline."""
    separator = ""
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        separator = "" if file.read(1) == b"\n" else "\n"
    file.write((separator + "".join(f"{line}\n" for line in lines)).encode())
    file.flush()
    os.fsync(file.fileno())


def _one_line(job: Job, appended: str) -> str:
    """The command as written in the feed, on one line."""
    words = job.command if isinstance(job.command, str) else " ".join(job.command)
    words = words.removesuffix(f" {appended}") if appended else words
    return " ".join(words.splitlines())
