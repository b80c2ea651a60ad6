"""Output of verbs besides tables: JSON, notes, and changes."""

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import click
import msgspec

from stoker.streams import ERROR, OUTPUT, emit

F = TypeVar("F", bound=Callable[..., Any])

CHANGES_AS_JSON: Final = "Print changed and unchanged jobs as JSON."


def json_option(text: str = "Print it as JSON.") -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=text)


def dry_run_option(text: str = "Print what would happen without changing anything.") -> Callable[[F], F]:
    return click.option("--dry-run", is_flag=True, help=text)


def print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_json_list(values: Iterable[object]) -> None:
    """Like `print_json` for a list, but one value at a time, so a long list is never in memory as a whole."""
    before = "["
    for value in values:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
        sys.stdout.write(f"{before}\n  " + text.replace("\n", "\n  "))
        before = ","
    sys.stdout.write("[]\n" if before == "[" else "\n]\n")


def note(message: str) -> None:
    """Prints a message on standard error, after flushing standard output."""
    sys.stdout.flush()
    emit(ERROR, f"stoker: {message}\n")


def log(message: str) -> None:
    """Prints a message with the time, for a terminal, a file or the journal."""
    emit(OUTPUT, f"{time.strftime('%H:%M:%S')} {message}\n")


def count_of(number: int, noun: str) -> str:
    """`1 GPU`, `3 GPUs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Changed(msgspec.Struct, frozen=True):
    id: str
    name: str
    what: str


class Unchanged(msgspec.Struct, frozen=True):
    id: str
    name: str
    why: str


class ChangeReport(msgspec.Struct, frozen=True):
    """Changed and unchanged jobs, as printed by `--json`."""

    verb: str
    queue: str
    dry_run: bool
    changed: list[Changed]
    unchanged: list[Unchanged]


def print_changes(
    report: ChangeReport, done: str, label: Callable[[str, str], str], *, as_json: bool, noun: str = ""
) -> None:
    """Prints changed jobs on standard output and unchanged ones on standard error, or both as JSON. `label` combines id
    and name for people; `noun` precedes it in a sentence.
    """
    if as_json:
        print_json(report)
        return
    would = "would be " if report.dry_run else ""
    sys.stdout.write("".join(f"{label(one.id, one.name)}: {would}{one.what}\n" for one in report.changed))
    was_not = "would not be" if report.dry_run else "was not"
    for one in report.unchanged:
        note(f"{noun}{label(one.id, one.name)} {was_not} {done}: {one.why}")
