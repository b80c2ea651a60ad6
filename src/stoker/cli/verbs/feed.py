"""`stoker feed`: take jobs from a text file or a Google Sheet, as they are written there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from stoker.cli.options.common import DURATION, Typed
from stoker.cli.options.job import check_share, job_options, job_values
from stoker.cli.options.queue import opened_or_created, queue_option
from stoker.errors import BadInputError, StokerError

if TYPE_CHECKING:
    from stoker.feeds.intake import Intake
    from stoker.feeds.rows import Layout

F = TypeVar("F", bound=Callable[..., Any])
# Where a house sends its requests to Google through.
SHEETS_URL: Final = "STOKER_SHEETS_URL"
# Google lets one account read a sheet 60 times a minute; a turn of the feed reads it once.
SHORTEST_TURN: Final = 1.0


def _columns(text: str) -> Any:
    from stoker.feeds.rows import parse_columns

    return parse_columns(text)


def feed_options(command: F) -> F:
    """What every job of a feed asks for."""
    options = (
        click.option("--fit", "fits", is_flag=True, help="Find the largest batch size that fits for each first."),
        click.option("--fit-with", metavar="TEXT", help="The same with options of `stoker fit`, in one word."),
        click.option(
            "--retries-oom",
            type=click.IntRange(0),
            default=2,
            metavar="N",
            help="With --fit: start it again, smaller, when it runs out of memory later [2].",
        ),
        click.option(
            "--append", default="", metavar="TEXT", help="Put this behind each command, such as --version={id}."
        ),
        click.option("--directory", metavar="DIR", help="Where they run [here]."),
        click.option("--once", is_flag=True, help="Take what is there and end, for cron."),
        queue_option,
    )
    for option in reversed(options):
        command = option(command)
    return job_options("feed")(command)


@click.group("feed")
def feed_command() -> None:
    """Take jobs from a text file or a Google Sheet: what is written there becomes a job, once."""


@feed_command.command("file")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--finished", type=click.Path(path_type=Path), metavar="FILE", help="Append commands that succeeded to it."
)
@click.option("--as", "name", metavar="NAME", help="Remember lines under this name instead of the file's path.")
@feed_options
def file_command(
    path: Path, finished: Path | None, name: str | None, once: bool, queue_url: str | None, **asked: Any
) -> int:
    """Every line that is or will be in PATH becomes a job, once; blank lines and # comments are skipped."""
    from stoker.feeds.intake import FeedLog
    from stoker.feeds.text_file import FileFeed, FinishedFile

    if name == "":
        raise BadInputError("--as wants a name: leave it out to use the file's path")
    if finished is not None:
        _check_finished(path, finished)
    feed = FileFeed(
        path.absolute(),
        name,
        _intake(dict(asked)),
        FinishedFile(finished.absolute(), asked["append"]) if finished is not None else None,
        lambda: opened_or_created(queue_url),
        FeedLog(),
    )
    try:
        if once:
            feed.run_once()
        else:
            feed.run()
    finally:
        feed.close()
    return 0


def _check_finished(path: Path, finished: Path) -> None:
    if finished.resolve() == path.resolve():
        raise BadInputError(f"{finished} cannot be both: what is finished would be taken as new")
    if finished.is_dir() or not finished.absolute().parent.is_dir():
        raise BadInputError(f"{finished} cannot be a file for finished commands: there is no such place")


@feed_command.command("sheet")
@click.argument("key")
@click.option(
    "--credentials",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The service account's key, JSON.",
)
@click.option("--worksheet", metavar="TITLE", help="Which one [the first].")
@click.option("--counter", default="B1", metavar="CELL", help="Says the number of the next row to take [B1].")
@click.option("--commands", default="C", metavar="COLUMN", help="Has one command per row [C].")
@click.option("--first-row", type=click.IntRange(1), default=3, metavar="N", help="The first row with a command [3].")
@click.option(
    "--write-back",
    "columns",
    type=Typed("columns", _columns),
    default="state=D,gpu=E,id=F,link=G",
    metavar="COLUMNS",
    help="What is written beside each row, or off [state=D,gpu=E,id=F,link=G].",
)
@click.option("--every", type=DURATION, default="15s", metavar="DURATION", help="How often to look at the sheet [15s].")
@feed_options
def sheet_command(
    key: str,
    credentials: Path,
    worksheet: str | None,
    counter: str,
    commands: str,
    first_row: int,
    columns: Any,
    every: float,
    once: bool,
    queue_url: str | None,
    **asked: Any,
) -> int:
    """Rows of the Google Sheet KEY become jobs, each once, and what becomes of these is written beside them."""
    from stoker.feeds.rows import parse_layout

    if every < SHORTEST_TURN:
        raise BadInputError(
            f"--every must be at least {SHORTEST_TURN:g}s: Google allows no more than one look a second"
        )
    layout = parse_layout(counter, commands, first_row, columns)
    feed = _sheet_feed(credentials, key, worksheet, layout, _intake(asked), queue_url)
    try:
        if once:
            feed.run_once()
        else:
            feed.run(every)
    finally:
        feed.close()
    return 0


def _sheet_feed(
    credentials: Path, key: str, worksheet: str | None, layout: "Layout", intake: "Intake", queue_url: str | None
) -> Any:
    try:
        from stoker.feeds.google import GOOGLE, GoogleSheet, key_in
    except ImportError as error:
        raise StokerError(
            f"a Google Sheet needs gspread ({error.name} is missing): `pip install 'stoker[sheets]'` brings it"
        ) from None
    from stoker.feeds.intake import FeedLog
    from stoker.feeds.sheet import SheetFeed

    sheet = GoogleSheet(credentials, key_in(key), worksheet, os.environ.get(SHEETS_URL) or GOOGLE)
    return SheetFeed(sheet, layout, intake, lambda: opened_or_created(queue_url), FeedLog())


def _intake(options: dict[str, Any]) -> "Intake":
    from stoker.feeds.intake import Intake
    from stoker.queue.fields import check, spec_of
    from stoker.queue.provenance import check_environment, kept_environment, login_name, working_directory

    environment = kept_environment()
    check_environment(environment)
    asked = job_values(options)
    check_share(asked)
    if options["fits"] or options["fit_with"] is not None:
        from stoker.cli.options.job import fit_of

        asked["fit"] = fit_of(options["fit_with"] or "", options["retries_oom"], (), asked["batch_size"], asked["gpus"])
    directory = working_directory(options["directory"])
    pattern = spec_of(
        {**asked, "command": "-", "directory": directory, "environment": environment, "submitter": login_name()}
    )
    check(pattern)
    return Intake(pattern, options["append"])
