"""Fills the parts of the reference that come from the code; MkDocs runs it as a hook.

A page says `<!-- generated: NAME -->` where a part belongs. Nothing generated is committed, so nothing is ever stale.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

import click

from stoker.cli.app import GROUPS, stoker

MARKER: Final = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)
# Every command has it.
_HELP: Final = "--help"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' hook: the text of a page with its generated parts."""
    return fill_in(markdown)


def fill_in(markdown: str) -> str:
    return MARKER.sub(lambda found: PARTS[found[1]](), markdown)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command by its name as typed, such as `stoker tokens add`, groups before what they hold."""
    context = click.Context(stoker, info_name="stoker")
    for verb in stoker.list_commands(context):
        command = stoker.get_command(context, verb)
        if command is not None:
            yield f"stoker {verb}", command
        if isinstance(command, click.Group):
            for name, child in command.commands.items():
                yield f"stoker {verb} {name}", child


def options_of(command: click.Command) -> list[click.Option]:
    return [
        parameter
        for parameter in command.get_params(click.Context(command))
        if isinstance(parameter, click.Option) and not parameter.hidden and _HELP not in parameter.opts
    ]


def _command_reference() -> str:
    parts = [_options_table(stoker, "Options before the verb:")]
    headings = {f"stoker {next(iter(verbs))}": purpose for purpose, verbs in GROUPS.items()}
    for name, command in commands():
        if name in headings:
            parts.append(f"## {headings[name]}")
        level = "###" if name.count(" ") == 1 else "####"
        context = click.Context(command, info_name=name)
        parts.append(f"{level} `{name}`\n\n{_prose(command.help or '')}")
        parts.append(f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```")
        if options_of(command):
            parts.append(_options_table(command))
        if command.epilog:
            parts.append(_prose(command.epilog))
    return "\n\n".join(parts)


def _options_table(command: click.Command, lead: str = "") -> str:
    rows = ["| option | meaning | variable |", "|---|---|---|"]
    has_variables = any(option.envvar for option in options_of(command))
    if not has_variables:
        rows = ["| option | meaning |", "|---|---|"]
    context = click.Context(command)
    for option in options_of(command):
        record = option.get_help_record(context)
        if record is None:
            continue
        cells = [f"`{record[0]}`", _cell(record[1])]
        if has_variables:
            cells.append(f"`{option.envvar}`" if option.envvar else "")
        rows.append("| " + " | ".join(cells) + " |")
    table = "\n".join(rows)
    return f"{lead}\n\n{table}" if lead else table


def _prose(text: str) -> str:
    """Click's help as Markdown: paragraphs, and what it keeps as typed (`\\b`) as a block."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            paragraphs.append("```text\n" + paragraph.removeprefix("\b").strip("\n") + "\n```")
        else:
            paragraphs.append(_cell(paragraph))
    return "\n\n".join(paragraphs)


def _cell(text: str) -> str:
    """Plain text on one line, with nothing that Markdown would take for markup outside of code."""
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for number, piece in enumerate(pieces):
        if not piece.startswith("`"):
            pieces[number] = re.sub(r"([\\*_<|\[\]])", r"\\\1", piece)
    return "".join(pieces)


PARTS: Final = {"commands": _command_reference}
