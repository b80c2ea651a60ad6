"""The feed from a text file: every line that appears in it becomes a job."""

import contextlib
import math
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stoker import inotify
from stoker.errors import BadInputError
from stoker.feeds.finished import FileAwayError, FinishedFile
from stoker.feeds.intake import Intake, Wanted
from stoker.feeds.lines import feed_prefix, finished_part, lines_in, origin_of
from stoker.feeds.patience import Patience
from stoker.feeds.voice import Voice
from stoker.inotify import Inotify
from stoker.queue import ChangeListener, QueueAwayError, Store

# An editor writes a file in a moment, a person types `echo -n` and then `echo`: a last line that has not changed for so
# long is whole, only without its newline.
SECONDS_TO_FINISH_A_LINE: Final = 2.0
# File servers tell no events of what other machines write.
SECONDS_BETWEEN_LOOKS: Final = 5.0
# A transaction of so many jobs takes a fraction of a second; others wait no longer for the queue.
MOST_AT_ONCE: Final = 500

# Finished jobs are looked up so often at the most, however many finish; and at the least, whatever the bell says.
SECONDS_BETWEEN_SETTLINGS: Final = 1.0
LONGEST_UNSETTLED: Final = 60.0

_OF_THE_FILE: Final = inotify.MODIFIED | inotify.CLOSED_AFTER_WRITING
# The directory is watched for the file itself: editors write another one and give it this name.
_OF_THE_DIRECTORY: Final = inotify.CREATED | inotify.MOVED_HERE


class FileFeed:
    """One file, and the queue that its lines go into."""

    def __init__(
        self,
        path: Path,
        name: str | None,
        intake: Intake,
        finished: FinishedFile | None,
        open_store: Callable[[], Store],
        voice: Voice,
    ) -> None:
        self._path = path
        self._prefix = feed_prefix(path, name)
        self._intake = intake
        self._finished = finished
        self._open_store = open_store
        self._voice = voice
        self._store: Store | None = None
        self._changes: ChangeListener | None = None
        self._taken: set[str] = set()
        """Origins that are known to be in the queue."""
        self._data = b""
        self._changed = time.monotonic()
        self._done: bytes | None = None
        """What of the file was taken already."""
        self._is_owed = True
        """Whether jobs may have finished that were not looked at."""
        self._settled = -math.inf

    def run_once(self) -> None:
        """Takes what is there; a last line without a newline is given its moment."""
        while (pause := self._look()) < SECONDS_BETWEEN_LOOKS:
            time.sleep(pause)
        self._write_finished()

    def run(self) -> None:
        """Takes what is there and what comes, for ever."""
        patience = Patience(self._voice, QueueAwayError, FileAwayError, longest=SECONDS_BETWEEN_LOOKS)
        events = Inotify()
        try:
            while True:
                # First the watch, then the look: what happens in between wakes at once.
                events.drain()
                events.watch(self._path.parent, _OF_THE_DIRECTORY)
                events.watch(self._path, _OF_THE_FILE)
                pause = patience.until_done(self._look)
                if self._until_settling() == 0.0:
                    patience.until_done(self._settle)
                self._wait(events, min(pause, self._until_settling()))
        finally:
            events.close()

    def close(self) -> None:
        if self._changes is not None:
            self._changes.close()
        if self._store is not None:
            self._store.close()

    def _look(self) -> float:
        """Takes every line that is whole and new; in how many seconds to look again at the latest."""
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
            self._voice.say_once(f"{self._path} is not there yet: its lines are taken when it is")
            return b""
        except IsADirectoryError:
            raise BadInputError(f"{self._path} is a directory: a file with one command per line is meant") from None
        except OSError as error:
            raise FileAwayError(f"{self._path} cannot be read: {error.strerror}") from None

    def _take(self, data: bytes) -> None:
        if data == self._done:
            return
        lines = lines_in(data)
        for bad in lines.unreadable:
            self._voice.say_once(f"line {bad.number} of {self._path} is left out: it is not text in UTF-8")
        wanted = []
        for line in lines.commands:
            origin = origin_of(self._prefix, line)
            if origin in self._taken:
                continue
            if (problem := self._intake.refusal(line.text)) is not None:
                self._voice.say_once(f"line {line.number} of {self._path} is left out: {problem}")
                continue
            wanted.append(Wanted(line.text, origin))
        for start in range(0, len(wanted), MOST_AT_ONCE):
            with self._queue() as store:
                batch = self._intake.take(store, wanted[start : start + MOST_AT_ONCE])
            for taken in batch:
                self._taken.add(taken.wanted.origin)
                if taken.is_new:
                    self._voice.job(taken.id, taken.wanted.command)
        self._done = data

    def _until_settling(self) -> float:
        """In how many seconds finished jobs are to be written down; never when nobody wants that."""
        if self._finished is None:
            return math.inf
        distance = SECONDS_BETWEEN_SETTLINGS if self._is_owed else LONGEST_UNSETTLED
        return max(0.0, self._settled + distance - time.monotonic())

    def _settle(self) -> None:
        try:
            self._write_finished()
        except FileAwayError as error:
            # The lines must not wait for a disk that is full elsewhere.
            self._voice.say_once(f"{error} (trying again)")
        self._settled = time.monotonic()
        self._is_owed = False

    def _write_finished(self) -> None:
        if self._finished is None:
            return
        with self._queue() as store:
            jobs = [job for job in store.jobs.by_origin(self._prefix) if job.state == "succeeded"]
        self._finished.append(sorted(jobs, key=lambda job: (job.ended or 0.0, job.id)))

    def _wait(self, events: Inotify, seconds: float) -> None:
        """Until the file or, where that matters, the queue has changed."""
        if self._finished is not None and self._changes is None:
            with self._queue() as store:
                self._changes = store.listen()
            # What happened before it could be heard was not.
            self._is_owed, seconds = True, min(seconds, SECONDS_BETWEEN_SETTLINGS)
        poll = select.poll()
        for descriptor in (events.fileno(), self._changes.fileno() if self._changes is not None else -1):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
        if self._changes is not None and self._changes.poll():
            self._is_owed = True

    @contextlib.contextmanager
    def _queue(self) -> Iterator[Store]:
        if self._store is None:
            self._store = self._open_store()
        try:
            yield self._store
        except QueueAwayError:
            # What comes back may have lost its last jobs, or be a copy of yesterday: every line is brought again.
            self._taken.clear()
            self._done = None
            raise
