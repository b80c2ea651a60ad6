"""Selecting jobs: by id, prefix, name or group, or all with a tag or a state; and shell completion."""

import contextlib
import importlib
import os
import shlex
import signal
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from stoker.errors import BadInputError
from stoker.queue.search import parse_query

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from stoker.queue import Job, State, Store

# One statement for a consistent view: a job claimed between two pages would shift the next page.
PAGE: Final = 100_000
# Completion offers recent jobs.
MOST_COMPLETED: Final = 500
# Completion gives up on a database that does not answer.
COMPLETION_SECONDS: Final = 2.0


class Selection(msgspec.Struct, frozen=True):
    """Jobs by name, or criteria for all jobs."""

    words: tuple[str, ...] = ()
    tag: str | None = None
    states: tuple["State", ...] = ()
    everything: bool = False
    tag_option: str = "--tag"
    match: str | None = None
    """A search."""

    @property
    def by_rule(self) -> bool:
        return self.everything or self.tag is not None or bool(self.states) or self.match is not None

    def jobs(self, store: "Store", among: tuple["State", ...]) -> list["Job"]:
        """The selected jobs, each once; criteria without a state select the states `among`. A name without a job fails
        the whole selection.
        """
        self._check()
        if not self.by_rule:
            found = [job for word in self.words for job in _named(store, word, among)]
        elif self.match is not None:
            query = parse_query(self.match).narrowed(self.states, self.tag)
            found = store.jobs.matching(query if query.states else query.narrowed(among))
        else:
            found = list(_pages(store, self.states or among, self.tag))
        return list({job.id: job for job in found}.values())

    def nothing(self, among: tuple["State", ...]) -> str:
        """The message for a selection without jobs."""
        if self.match is not None:
            return f"no job matches {self.match!r}"
        states = self.states or among
        tagged = f" with the tag {self.tag!r}" if self.tag is not None else ""
        return f"there is no {_any_of(states)} job{tagged}"

    def _check(self) -> None:
        if not self.words and not self.by_rule:
            raise BadInputError(
                f"which jobs? Write their ids or names, or choose by {self.tag_option}, --state, --match or --all"
            )
        if self.words and self.by_rule:
            raise BadInputError(
                f"name the jobs, or choose them by {self.tag_option}, --state, --match or --all, not both"
            )
        if self.everything and (self.tag is not None or self.states or self.match is not None):
            raise BadInputError(f"--all means every job: omit it to select by {self.tag_option}, --state or --match")
        if self.match is not None and not self.match.strip():
            raise BadInputError("--match is empty: use --all for every job")


def _named(store: "Store", word: str, among: tuple["State", ...]) -> list["Job"]:
    """One job, or a group's jobs in the states `among`: retrying a group skips succeeded jobs."""
    jobs = store.jobs.named(word)
    if len(jobs) == 1:
        return jobs
    if found := [job for job in jobs if job.state in among]:
        return found
    raise BadInputError(f"the group {word!r} has no job that is {_any_of(among)}")


def _any_of(states: tuple["State", ...]) -> str:
    return states[0] if len(states) == 1 else f"{', '.join(states[:-1])} or {states[-1]}"


def _pages(store: "Store", states: tuple["State", ...], tag: str | None) -> Iterator["Job"]:
    for offset in range(0, 2**31, PAGE):
        page = store.jobs.find(states=states, tag=tag, order="queue", limit=PAGE, offset=offset)
        yield from page
        if len(page) < PAGE:
            return


def words_of_query(words: Iterable[str]) -> str:
    """Words of a command line as one search; each word of the shell stays one word."""
    return " ".join(f'"{word}"' if " " in word and '"' not in word and ":" not in word else word for word in words)


class _Completed(click.ParamType[str]):
    """A word, completed from recent jobs of the queue."""

    def __init__(self, *states: "State") -> None:
        self._states = states

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 - click's signature
        incomplete: str,
    ) -> list["CompletionItem[Any]"]:
        from click.shell_completion import CompletionItem

        offered = self.offered(_recent(ctx, self._states))
        return [
            CompletionItem(word, help=text)
            for word, text in offered.items()
            if word.startswith(incomplete) and _is_a_word(word)
        ]

    def offered(self, jobs: list["Job"]) -> dict[str, str | None]:
        """The candidates with their descriptions."""
        raise NotImplementedError


class JobName(_Completed):
    """An id, its beginning, or a name; completed with jobs and groups in these states, or in any."""

    name = "job"

    def offered(self, jobs: list["Job"]) -> dict[str, str | None]:
        names: dict[str, str | None] = dict.fromkeys(name for job in jobs for name in (job.name, job.group))
        return names | {job.id: _summary(job) for job in jobs}


class TagName(_Completed):
    """A tag, completed with those of recent jobs."""

    name = "tag"

    def offered(self, jobs: list["Job"]) -> dict[str, str | None]:
        return dict.fromkeys(tag for job in jobs for tag in job.tags)


def _recent(context: click.Context, states: tuple["State", ...]) -> list["Job"]:
    """The newest jobs of the queue on the command line; none if it cannot be read in time."""
    from stoker.cli.options.queue import opened
    from stoker.errors import StokerError

    # `stoker --config FILE …`: click does not call the group during completion.
    if config := context.find_root().params.get("config"):
        os.environ["STOKER_CONFIG"] = config
    # The time limit applies to the queue, so imports come before it.
    importlib.import_module("stoker.queue.sqlite")
    # Not an exception: database drivers swallow exceptions during their import.
    signal.signal(signal.SIGALRM, lambda _number, _frame: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, COMPLETION_SECONDS)
    with contextlib.suppress(StokerError, OSError), opened(context.params.get("queue_url")) as store:
        return store.jobs.find(states=states, limit=MOST_COMPLETED)
    return []


def _is_a_word(text: str) -> bool:
    """Whether it needs no quoting; in bash a colon ends a word."""
    return bool(text) and shlex.quote(text) == text and ":" not in text


def _summary(job: "Job") -> str:
    from stoker.queue.commands import shell_text

    command = shell_text(job.command)
    return " ".join(f"{job.state} {job.name} {command[:200]}".split())[:60]
