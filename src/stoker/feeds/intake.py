"""The way from a feed into the queue: each origin becomes a job once, whoever brings it and how often."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from stoker.errors import BadInputError
from stoker.queue.commands import check_command, wants_batch_size
from stoker.queue.fields import JobSpec
from stoker.queue.jobs import new_id
from stoker.queue.provenance import checkout_of
from stoker.queue.store import Store

# A chosen id is taken by chance once in thousands of submissions; several times in a row means something else.
MOST_DRAWS: Final = 5


class Wanted(NamedTuple):
    """A command, and the place it was written in."""

    command: str
    origin: str


class Taken(NamedTuple):
    """What became of it: a job of ours, or the one that somebody had made of the same origin before."""

    id: str
    wanted: Wanted
    is_new: bool


class Intake:
    """Makes jobs that are all like `pattern`, except for their commands."""

    def __init__(self, pattern: JobSpec, append: str = "") -> None:
        """`append` is put behind every command."""
        self._pattern = pattern
        self._append = append

    def refusal(self, command: str) -> str | None:
        """Why no job can be made of this command; None when one can."""
        try:
            check_command(command)
        except BadInputError as error:
            return str(error)
        if self._pattern.batch_size is None and not self._pattern.fit and wants_batch_size(command):
            return "it has {batch_size} in it: start the feed with --batch-size, or write {{batch_size}} for the word"
        return None

    def take(self, store: Store, wanted: Sequence[Wanted]) -> list[Taken]:
        """All of them, in this order, in one transaction."""
        for tries_left in reversed(range(MOST_DRAWS)):
            # An id that was chosen here and comes back says that the job is new.
            jobs = [replace(job, id=new_id()) for job in self.made(wanted)]
            try:
                ids = store.jobs.submit(jobs)
            except BadInputError:
                if not tries_left:
                    raise
                continue
            return [Taken(name, one, is_new=name == job.id) for name, one, job in zip(ids, wanted, jobs, strict=True)]
        raise AssertionError("unreachable")

    def made(self, wanted: Sequence[Wanted]) -> list[JobSpec]:
        """The jobs that these become, without ids."""
        if not wanted:
            return []
        code = checkout_of(self._pattern.directory)
        pattern = replace(self._pattern, commit=code.commit, dirty=code.dirty)
        return [replace(pattern, command=self._whole(one), origin=one.origin) for one in wanted]

    def _whole(self, wanted: Wanted) -> str:
        return f"{wanted.command} {self._append}" if self._append else wanted.command
