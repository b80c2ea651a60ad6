"""`stoker feed`: submit jobs from a text file or a Google Sheet."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from stoker.cli.options.common import DURATION, Typed
from stoker.cli.options.job import JobCommand, fit_of, fit_options, job_options, job_values
from stoker.cli.options.queue import opened_or_created, queue_option
from stoker.errors import BadInputError, StokerError

if TYPE_CHECKING:
    from stoker.feeds.intake import Intake
    from stoker.feeds.rows import Layout

F = TypeVar("F", bound=Callable[..., Any])
# A proxy for requests to Google.
SHEETS_URL: Final = "STOKER_SHEETS_URL"
# Google allows an account 60 reads of a sheet a minute.
SHORTEST_TURN: Final = 1.0


def _columns(text: str) -> Any:
    from stoker.feeds.rows import parse_columns

    return parse_columns(text)


def feed_options(command: F) -> F:
    """The options of both feeds."""
    options = (
        job_options("feed"),
        fit_options("Find the largest batch size that fits each job."),
        click.option(
            "--append", default="", metavar="TEXT", help="Append this to each command, such as --version={id}."
        ),
        click.option("--directory", metavar="DIR", help="Working directory [here]."),
        click.option("--once", is_flag=True, help="Submit the present lines or rows and exit, for cron."),
        queue_option,
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


@click.group("feed")
def feed_command() -> None:
    """Submit jobs from a text file or a Google Sheet; each line or row becomes a job once."""


@feed_command.command("file", cls=JobCommand, short_help="Submit jobs from a text file.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--finished", type=click.Path(path_type=Path), metavar="FILE", help="Append commands that succeeded to this file."
)
@click.option("--as", "name", metavar="NAME", help="Identify the file by this name instead of its path.")
@feed_options
def file_command(
    path: Path, finished: Path | None, name: str | None, once: bool, queue_url: str | None, **asked: Any
) -> int:
    """Submit each line of PATH once, including lines added later; blank lines and # comments are skipped."""
    from stoker.feeds.intake import FeedLog
    from stoker.feeds.text_file import FileFeed, FinishedFile

    if name == "":
        raise BadInputError("--as needs a name: leave it out to use the file's path")
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
        raise BadInputError(f"{finished} is the file of jobs: finished commands would be submitted again")
    if finished.is_dir() or not finished.absolute().parent.is_dir():
        raise BadInputError(f"{finished} cannot be written: it is a directory, or its directory does not exist")


@feed_command.command("sheet", cls=JobCommand, short_help="Submit jobs from a Google Sheet.")
@click.argument("key")
@click.option(
    "--credentials",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The key of the service account (JSON).",
)
@click.option("--worksheet", metavar="TITLE", help="The worksheet [the first].")
@click.option("--counter", default="B1", metavar="CELL", help="The cell with the number of the next row [B1].")
@click.option("--commands", default="C", metavar="COLUMN", help="The column of commands [C].")
@click.option("--first-row", type=click.IntRange(1), default=3, metavar="N", help="The first row with a command [3].")
@click.option(
    "--write-back",
    "columns",
    type=Typed("columns", _columns),
    default="state=D,gpu=E,id=F,link=G",
    metavar="COLUMNS",
    help="Columns to write [state=D,gpu=E,id=F,link=G].",
)
@click.option("--every", type=DURATION, default="15s", metavar="DURATION", help="How often to read the sheet [15s].")
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
    """Submit each row of the Google Sheet KEY once, and write the state of its job into the row."""
    from stoker.feeds.rows import parse_layout

    if every < SHORTEST_TURN:
        raise BadInputError(f"--every must be at least {SHORTEST_TURN:g}s: Google allows one read a second")
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
    from stoker.queue.provenance import submitted_from

    asked = job_values(options)
    if options["fits"] or options["fit_with"] is not None:
        asked["fit"] = fit_of(options["fit_with"] or "", options["retries_oom"], (), asked["batch_size"], asked["gpus"])
    pattern = spec_of({**asked, **submitted_from(options["directory"], {}), "command": "-"})
    check(pattern)
    return Intake(pattern, options["append"])
