"""`stoker clean`: forget jobs that ended long ago."""

import sys
from typing import TYPE_CHECKING, Final

import click
import msgspec

from stoker.cli.options import Typed
from stoker.cli.queue_options import opened, queue_option
from stoker.cli.steering import print_json
from stoker.units import format_duration, parse_duration

if TYPE_CHECKING:
    from stoker.queue import State

ENDED: Final[tuple["State", ...]] = ("succeeded", "failed", "cancelled")

PAST: Final = {"succeeded": "succeeded", "failed": "failed", "cancelled": "were cancelled"}


class Cleaning(msgspec.Struct, frozen=True):
    """What was forgotten, as `--json` prints it."""

    verb: str
    queue: str
    dry_run: bool
    older_than: float
    states: tuple["State", ...]
    forgotten: int
    kept: int
    """Ended jobs in these states that are too young, or that an unfinished job comes after."""


@click.command("clean")
@click.option(
    "--older-than",
    type=Typed("duration", parse_duration),
    default="30d",
    metavar="DURATION",
    help="Those that ended longer ago than this [30d].",
)
@click.option(
    "--state", "states", type=click.Choice(ENDED), multiple=True, help="Only these [all that have ended]; repeatable."
)
@click.option("--dry-run", is_flag=True, help="Say how many there are, and forget none.")
@click.option("--json", "as_json", is_flag=True, help="Print how many as JSON.")
@queue_option
def command(older_than: float, states: tuple["State", ...], dry_run: bool, as_json: bool, queue_url: str | None) -> int:
    """Forget jobs that ended long ago, with their attempts and stored output.

    What is unfinished is never forgotten, nor what an unfinished job comes after.
    """
    meant = states or ENDED
    with opened(queue_url) as store:
        counts = store.counts()
        forgotten = store.forgettable(older_than, meant) if dry_run else store.clean(older_than, meant)
        left = max(sum(counts.get(state, 0) for state in meant) - forgotten, 0)
        done = Cleaning("clean", store.place, dry_run, older_than, meant, forgotten, left)
    if as_json:
        print_json(done)
    else:
        sys.stdout.write(_sentence(done))
    return 0


def _sentence(done: Cleaning) -> str:
    if not done.forgotten:
        kept = f"; {done.kept} that ended are younger, or others come after them" if done.kept else ""
        return f"nothing to forget{kept}\n"
    would = "would be forgotten" if done.dry_run else "forgotten"
    jobs = "1 job" if done.forgotten == 1 else f"{done.forgotten} jobs"
    how = "ended" if done.states == ENDED else " or ".join(PAST[state] for state in done.states)
    return f"{jobs} that {how} more than {format_duration(done.older_than)} ago {would}; {done.kept} kept\n"
