"""Options of `submit`, `edit` and `feed`, derived from the table of job fields; and `--fit-with`."""

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click

from stoker.actions.catalogue import check_actions
from stoker.cli.options.common import GENERAL, SectionedCommand, Typed
from stoker.cli.options.selection import JobName, TagName
from stoker.errors import BadInputError
from stoker.queue.field_kinds import ACTIONS, ENDS, FLAG, JOBS, LABELS, MACHINES, METRICS, NOTIFY, TAGS
from stoker.queue.fields import FIELDS, FieldPart, JobField

if TYPE_CHECKING:
    from stoker.fit.model import FitSpec
    from stoker.queue.commands import Command

F = TypeVar("F", bound=Callable[..., Any])
JobVerb = Literal["submit", "edit", "feed"]

NONE: Final = "none"
"""The word that removes a value in `edit`."""
_PREFIX: Final = "field_"
# Separates a mapping field from the key of the option.
_PART: Final = "__"


class JobCommand(SectionedCommand):
    """A verb that takes the fields of a job."""

    headings: Mapping[str, str] = {
        "--gpus": "GPUs and machines",
        "--batch-size": "Batch size",
        "--priority": "Order and time",
        "--retries": "Retries and limits",
        "--notify": GENERAL,
        "--preemptible": "Retries and limits",
        "--partition": "Slurm",
        "--hold": "Order and time",
        "--pin": "Code and environment",
        "--env": "Code and environment",
        "--fit": "Batch size",
        "--below": "Rules",
        "--append": GENERAL,
        "--sweep": GENERAL,
        "--from": GENERAL,
        "--dry-run": GENERAL,
    }


class OrNone(click.ParamType[Any]):
    """A value of the wrapped type, or the word that removes it."""

    def __init__(self, wanted: click.ParamType[Any]) -> None:
        self.name = wanted.name
        self._wanted = wanted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == NONE else self._wanted.convert(value, param, ctx)


def job_options(verb: JobVerb) -> Callable[[F], F]:
    """One option per field, in the order of the table."""

    def decorate(command: F) -> F:
        for field in reversed(FIELDS.values()):
            if field.parts and _takes_parts(verb, field):
                for part in reversed(field.parts):
                    command = click.option(*_part_names(field, part), **_part_settings(verb, part))(command)
            elif _takes(verb, field):
                command = click.option(*_names(verb, field), **_settings(verb, field))(command)
        return command

    return decorate


def job_values(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the values of job fields from a verb's options and returns them; for mappings, the given keys."""
    values: dict[str, Any] = {}
    for option in [name for name in options if name.startswith(_PREFIX)]:
        name, is_part, key = option.removeprefix(_PREFIX).partition(_PART)
        value = options.pop(option)
        if not is_part:
            values[name] = value
        elif value not in (None, ()):
            values.setdefault(name, {})[key] = list(value) if isinstance(value, tuple) else value
    return values


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `edit`, with the default in place of `none`; in a mapping None."""
    return {
        name: {key: None if each in (NONE, [NONE]) else each for key, each in value.items()}
        if isinstance(value, dict)
        else FIELDS[name].default
        if value in (NONE, (NONE,))
        else value
        for name, value in values.items()
    }


def _takes(verb: JobVerb, field: JobField) -> bool:
    if not field.option:
        return False
    return bool(field.feed_help) if verb == "feed" else verb == "submit" or bool(field.editable_in)


def _takes_parts(verb: JobVerb, field: JobField) -> bool:
    return verb != "feed" or bool(field.feed_help)


def _part_names(field: JobField, part: FieldPart) -> tuple[str, str]:
    return part.option, f"{_PREFIX}{field.name}{_PART}{part.key}"


def _part_settings(verb: JobVerb, part: FieldPart) -> dict[str, Any]:
    def read(text: str) -> str:
        part.check(text.strip())
        return text.strip()

    text = f"{part.help.removesuffix('.')}; or {NONE}." if verb == "edit" else part.help
    one = Typed(part.key, read)
    return {
        "help": text,
        "metavar": "OPTION" if part.several else "TEXT",
        "multiple": part.several,
        "type": OrNone(one) if verb == "edit" else one,
    }


def _names(verb: JobVerb, field: JobField) -> tuple[str, str]:
    bare = field.option.removeprefix("--")
    option = f"--{bare}/--no-{bare}" if verb == "edit" and field.kind is FLAG else field.option
    return option, _PREFIX + field.name


def _settings(verb: JobVerb, field: JobField) -> dict[str, Any]:
    edits = verb == "edit"
    default = None if edits else field.default
    if field.kind is FLAG:
        return {"help": _help(verb, field), "default": default, **({} if edits else {"is_flag": True})}
    settings: dict[str, Any] = {"help": _help(verb, field), "metavar": field.kind.metavar}
    if field.kind in (ACTIONS, NOTIFY):
        one = Typed(field.kind.name, _read_action if field.kind is ACTIONS else _read_notification)
        return settings | {"multiple": True, "type": OrNone(one) if edits else one}
    if field.kind is ENDS and edits:
        return settings | {"type": OrNone(Typed(field.kind.name, _reader(field)))}
    if field.kind in (LABELS, MACHINES, METRICS):
        one = Typed(field.kind.name, _read_word(field))
        return settings | {"multiple": True, "type": OrNone(one) if edits else one}
    if field.kind in (TAGS, JOBS):
        return settings | {"multiple": True, "type": JobName() if field.kind is JOBS else TagName()}
    settings |= {"type": Typed(field.kind.name, _reader(field)), "default": default}
    if edits and field.default is None:
        settings["type"] = OrNone(settings["type"])
    return settings


def _read_action(text: str) -> str:
    check_actions([text])
    return text.strip()


def _read_notification(text: str) -> str:
    (entry,) = NOTIFY.read([text])
    NOTIFY.check([entry])
    return str(entry)


def _read_word(field: JobField) -> Callable[[str], str]:
    def read(text: str) -> str:
        field.kind.check([text.strip()])
        return text.strip()

    return read


def _reader(field: JobField) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = field.kind.read(text)
        field.kind.check(value)
        return value

    return read


def _help(verb: JobVerb, field: JobField) -> str:
    if verb == "edit":
        return field.edit_help or (
            f"{field.help.removesuffix('.')}, or {NONE}." if field.default is None else field.help
        )
    text = field.feed_help if verb == "feed" else field.help
    if field.kind is FLAG or field.default in (None, "", ()):
        return text
    return f"{text.removesuffix('.')} [{field.kind.write(field.default)}]."


def fit_options(what: str) -> Callable[[F], F]:
    """`--fit`, `--fit-with` and `--retries-oom`; `what` is done with `--fit`."""
    options = (
        click.option("--fit", "fits", is_flag=True, help=what),
        click.option("--fit-with", metavar="TEXT", help="--fit with options of `stoker fit`, such as '--max 64'."),
        click.option(
            "--retries-oom",
            type=click.IntRange(0),
            default=2,
            metavar="N",
            help="With --fit: retries with a smaller batch when out of memory [2].",
        ),
    )
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def fit_of(
    text: str, retries_oom: int, commands: "Sequence[Command]", batch_size: int | None, gpus: int
) -> dict[str, Any]:
    """The field `fit` of a job. Refuses invalid options at submission."""
    from stoker.fit.model import fit_fields

    return fit_fields(fit_spec_of(text, retries_oom), commands, batch_size, gpus)


def fit_spec_of(text: str, retries_oom: int) -> "FitSpec":
    """`--fit-with TEXT`: options of `stoker fit`, parsed by `stoker fit` itself."""
    from stoker.cli.verbs.fit import fit_command, search_fields
    from stoker.fit.model import FitSpec

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInputError(f"--fit-with {text!r} cannot be split into words: {str(error).lower()}") from None
    try:
        options = fit_command.make_context("fit", [*words, "--", "command"]).params
    except click.ClickException as error:
        raise BadInputError(f"--fit-with: {error.format_message()} (see `stoker fit --help`)") from None
    if options["words"] != ("command",):
        raise BadInputError(f"--fit-with takes options of `stoker fit`: {options['words'][0]!r} is not one")
    reuse = None if options["refit"] else options["reuse"]
    spec = FitSpec(reuse=reuse, retries_oom=retries_oom, **search_fields(options))
    spec.search_options.check()
    spec.limits.pattern()
    return spec
