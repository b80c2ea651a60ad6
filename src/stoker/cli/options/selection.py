"""Which jobs a verb is about: by id, prefix, name or name of a sweep, or all with a tag or a state; and completion."""

import contextlib
import importlib
import os
import shlex
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from stoker.errors import BadInputError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from stoker.queue import Job, State, Store

# One statement sees one moment: a job that a worker takes between two pages would shift the next page past another.
PAGE: Final = 100_000
# Who presses Tab means a job of these days, and more than a screen of them helps nobody.
MOST_COMPLETED: Final = 500
# A person who presses Tab does not wait for a database that is away.
COMPLETION_SECONDS: Final = 2.0
STATES: Final = ("queued", "held", "running", "succeeded", "failed", "cancelled")


class Selection(msgspec.Struct, frozen=True):
    """What a person wrote: words for single jobs, or a rule that chooses among all."""

    words: tuple[str, ...] = ()
    tag: str | None = None
    states: tuple["State", ...] = ()
    everything: bool = False
    tag_option: str = "--tag"

    @property
    def by_rule(self) -> bool:
        return self.everything or self.tag is not None or bool(self.states)

    def jobs(self, store: "Store", among: tuple["State", ...]) -> list["Job"]:
        """The jobs that are meant, each once. A rule that names no state means those in the states `among`.

        A single word that fits no job refuses them all: nothing is half done.
        """
        self._check()
        if not self.by_rule:
            found = [job for word in self.words for job in _meant_by(store, word, among)]
        else:
            found = list(_pages(store, self.states or among, self.tag))
        return list({job.id: job for job in found}.values())

    def nothing(self, among: tuple["State", ...]) -> str:
        """The sentence for a rule that chose nothing."""
        states = self.states or among
        tagged = f" with the tag {self.tag!r}" if self.tag is not None else ""
        return f"there is no {_any_of(states)} job{tagged}"

    def _check(self) -> None:
        if not self.words and not self.by_rule:
            raise BadInputError(
                f"which jobs? Write their ids or names, or choose by {self.tag_option}, --state or --all"
            )
        if self.words and self.by_rule:
            raise BadInputError(
                f"jobs are named, or chosen by {self.tag_option}, --state or --all: both at once is not clear"
            )
        if self.everything and (self.tag is not None or self.states):
            raise BadInputError(f"--all means every job: leave it out to choose by {self.tag_option} or --state")


def _meant_by(store: "Store", word: str, among: tuple["State", ...]) -> list["Job"]:
    """One job, or those of a sweep in the states `among`: who retries a sweep does not mean what succeeded in it."""
    trials = store.jobs.trials(word)
    if not trials:
        return [store.jobs.get(word)]
    if found := [job for job in trials if job.state in among]:
        return found
    raise BadInputError(f"the sweep {word!r} has no job that is {_any_of(among)}")


def _any_of(states: tuple["State", ...]) -> str:
    return states[0] if len(states) == 1 else f"{', '.join(states[:-1])} or {states[-1]}"


def _pages(store: "Store", states: tuple["State", ...], tag: str | None) -> Iterator["Job"]:
    for offset in range(0, 2**31, PAGE):
        page = store.jobs.find(states=states, tag=tag, order="queue", limit=PAGE, offset=offset)
        yield from page
        if len(page) < PAGE:
            return


class JobName(click.ParamType[str]):
    """An id, the beginning of one, or a name; a shell completes it with jobs and sweeps in these states, or in any."""

    name = "job"

    def __init__(self, *states: "State") -> None:
        self._states = states

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 - click's signature
        incomplete: str,
    ) -> list["CompletionItem[Any]"]:
        from click.shell_completion import CompletionItem

        from stoker.queue.model import sweep_name

        found = _recent(ctx, self._states)
        ids = [CompletionItem(job.id, help=_in_short(job)) for job in found if job.id.startswith(incomplete)]
        called = [name for job in found for name in (job.name, sweep_name(job.name))]
        names = dict.fromkeys(name for name in called if name.startswith(incomplete) and _is_a_word(name))
        return [*(CompletionItem(name) for name in names), *ids]


class TagName(click.ParamType[str]):
    """A tag; a shell completes it with those of recent jobs."""

    name = "tag"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 - click's signature
        incomplete: str,
    ) -> list["CompletionItem[Any]"]:
        from click.shell_completion import CompletionItem

        tags = dict.fromkeys(tag for job in _recent(ctx, ()) for tag in job.tags)
        return [CompletionItem(tag) for tag in tags if tag.startswith(incomplete) and _is_a_word(tag)]


def state_choice() -> click.Choice[str]:
    return click.Choice(STATES)


def _recent(context: click.Context, states: tuple["State", ...]) -> list["Job"]:
    """The newest jobs of the queue that the line so far means. Nothing when it cannot be read, or not soon enough."""
    from stoker.cli.options.queue import opened
    from stoker.errors import StokerError

    _use_configuration(context)
    # What is waited for is the queue, not this machine's disk: what reads it is loaded before the clock starts.
    importlib.import_module("stoker.queue.sqlite")
    _give_up_soon()
    with contextlib.suppress(StokerError, OSError), opened(context.params.get("queue_url")) as store:
        return store.jobs.find(states=states, limit=MOST_COMPLETED)
    return []


def _use_configuration(context: click.Context) -> None:
    """`stoker --config FILE …`: the group itself is not called while a line is completed."""
    if config := context.find_root().params.get("config"):
        os.environ["STOKER_CONFIG"] = config


def _give_up_soon() -> None:
    """Ends this process after a while without a word: it is there for nothing but the completion.

    An exception would not do: drivers try one thing after another while they are imported, and swallow what goes wrong.
    """
    signal.signal(signal.SIGALRM, lambda _number, _frame: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, COMPLETION_SECONDS)


def _is_a_word(text: str) -> bool:
    """Whether a shell takes it as it stands; bash takes a colon for the end of a word."""
    return bool(text) and shlex.quote(text) == text and ":" not in text


def _in_short(job: "Job") -> str:
    from stoker.queue.commands import shell_text

    command = shell_text(job.command)
    return " ".join(f"{job.state} {job.name} {command[:200]}".split())[:60]
