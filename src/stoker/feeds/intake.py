"""Shared by both feeds: creating jobs, printing, and retrying."""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TextIO, TypeVar

from msgspec.structs import replace

from stoker.backoff import Backoff
from stoker.engines.admission import check_jobs
from stoker.errors import BadInputError, StokerError
from stoker.queue.commands import check_command
from stoker.queue.fields import JobSpec, check
from stoker.queue.provenance import checkout_of
from stoker.queue.store import Store


class SourceCommand(NamedTuple):
    """A command, its origin, and the id of its job."""

    command: str
    origin: str
    id: str


class Intake:
    """Creates jobs like `pattern` with other commands."""

    def __init__(self, pattern: JobSpec, append: str = "") -> None:
        """`append` is appended to every command."""
        self._pattern = pattern
        self._append = append
        self._admitted = False

    def admit(self, store: Store) -> None:
        """Raises BadInputError if no engine of this queue can run such jobs. Checked once, because workers change."""
        if not self._admitted:
            check_jobs(store, [self._pattern])
            self._admitted = True

    def refusal(self, command: str) -> str | None:
        """Why this command is invalid; None if it is valid."""
        try:
            check_command(command)
            check(replace(self._pattern, command=command))
        except BadInputError as error:
            return str(error)
        return None

    def made(self, commands: Sequence[SourceCommand]) -> list[JobSpec]:
        """The jobs for these commands."""
        if not commands:
            return []
        code = checkout_of(self._pattern.directory)
        pattern = replace(self._pattern, commit=code.commit, dirty=code.dirty)
        return [replace(pattern, command=self._whole(one.command), origin=one.origin, id=one.id) for one in commands]

    def _whole(self, command: str) -> str:
        return f"{command} {self._append}" if self._append else command


class FeedLog:
    """Prints the progress of a feed. Every line is flushed at once, for readers of a pipe."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def job(self, job: str, command: str) -> None:
        """Prints a job that this feed has submitted."""
        _write(sys.stdout, f"{job}  {' '.join(command.splitlines())}\n")

    def write(self, message: str) -> None:
        _write(sys.stderr, f"stoker: {message}\n")

    def write_once(self, message: str) -> None:
        """Writes each message once per process."""
        if message not in self._reported:
            self._reported.add(message)
            self.write(message)


def _write(stream: TextIO, line: str) -> None:
    # A full disk or a closed pipe must not stop the feed.
    with contextlib.suppress(OSError):
        stream.write(line)
        stream.flush()


# Most outages are a dropped connection, so the first retry comes soon.
FIRST_PAUSE: Final = 0.5
# Longer than a minute, for which Google's quotas count.
LONGEST_PAUSE: Final = 64.0

T = TypeVar("T")


class RetryForever:
    """Retries after the errors in `away`; all others end the feed."""

    def __init__(
        self,
        log: FeedLog,
        *away: type[StokerError],
        longest: float = LONGEST_PAUSE,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._log = log
        self._away = away
        self._longest = longest
        self._sleep = sleep
        self._chance = chance

    def also(self, *away: type[StokerError]) -> None:
        """From now on, also retries after these errors."""
        self._away = (*self._away, *away)

    def until_done(self, step: Callable[[], T]) -> T:
        backoff = Backoff(FIRST_PAUSE, self._longest)
        reported = False
        while True:
            try:
                answer = step()
            except self._away as error:
                if not reported:
                    self._log.write(f"{error} (waiting, and trying again)")
                reported = True
                # With jitter, so several feeds do not retry at the same time.
                self._sleep(backoff.next() * (1.0 + self._chance()) / 2)
                continue
            if reported:
                self._log.write("it works again: going on")
            return answer
