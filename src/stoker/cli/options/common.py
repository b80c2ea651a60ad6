"""Options that several verbs share, and the types of their values."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from stoker.errors import BadInputError, did_you_mean
from stoker.gpus.sharing import Sharing
from stoker.gpus.source import source_names
from stoker.gpus.spawn import Helper, Start, spawned
from stoker.settings import OptionTable, load_settings
from stoker.settings_path import config_path
from stoker.units import parse_fraction, parse_memory, parse_positive_duration

if TYPE_CHECKING:
    from stoker.gpus.prober import Prober

F = TypeVar("F", bound=Callable[..., Any])


class Typed(click.ParamType[Any]):
    """A value parsed by `parse`; errors are one sentence, without click's usage lines."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002 - click's signature
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except BadInputError as error:
            option = param.opts[0] if param is not None else self.name
            raise BadInputError(f"{option}: {error}") from None


GENERAL: Final = "Options"


class SectionedCommand(click.Command):
    """A command whose help shows many options under headings."""

    headings: Mapping[str, str] = {}
    """Headings by their first option; a heading may occur several times. `GENERAL` comes first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        heading = GENERAL
        sections: dict[str, list[tuple[str, str]]] = {heading: []}
        for parameter in self.get_params(ctx):
            heading = next((self.headings[option] for option in parameter.opts if option in self.headings), heading)
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


DURATION = Typed("duration", parse_positive_duration)
MEMORY = Typed("memory", parse_memory)
FRACTION = Typed("percentage", parse_fraction)


def source_options(command: F) -> F:
    """`--source` and `--deadline`, for verbs that read GPUs."""
    command = click.option(
        "--source",
        metavar="SOURCE",
        help=f"{', '.join(source_names())} (default: STOKER_GPUS, then auto).",
    )(command)
    return click.option("--deadline", type=DURATION, metavar="DURATION", help="Deadline of one look (default: 5s).")(
        command
    )


def open_prober(
    source: str | None, deadline: float | None, start: Start = spawned, sharing: Sharing = "join"
) -> "Prober":
    """A prober as set by options, environment or configuration file, in this order. A verb without threads may pass
    `start=forked`: the helper then shares its memory. A long-running verb may pass `sharing="start"`.
    """
    settings = load_settings()
    early = click.get_current_context().find_object(Helper)
    seconds = deadline or parse_positive_duration(settings.deadline)
    from stoker.gpus.prober import Prober

    return Prober(source or settings.gpus, deadline=seconds, start=start, sharing=sharing, early=early)


CONFIGURABLE: Final = ("run", "watch")


def option_defaults(
    section: str, table: OptionTable, parameters: Iterable[click.Parameter], excluded: Collection[str] = ()
) -> dict[str, Any]:
    """The options in a section of the configuration file, by parameter name."""
    options = {
        option.removeprefix("--"): parameter
        for parameter in parameters
        if isinstance(parameter, click.Option)
        for option in parameter.opts
        if option.startswith("--") and option.removeprefix("--") not in excluded
    }
    found: dict[str, Any] = {}
    for key, value in table.items():
        try:
            option = options.get(key.replace("_", "-"))
            if option is None:
                raise BadInputError(
                    f"[{section}] has no key {key!r}: {did_you_mean(key.replace('_', '-'), sorted(options))}"
                )
            found[str(option.name)] = _as_typed(option, value, f"[{section}] {key}")
        except BadInputError as error:
            raise BadInputError(f"error in the configuration file {config_path(os.environ)}: {error}") from None
    return found


def _as_typed(option: click.Option, value: Any, place: str) -> Any:
    """The value in the form of the command line. Raises BadInputError if the option refuses it."""
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    if option.is_flag:
        if not isinstance(value, bool):
            raise BadInputError(f"{place}: {value!r} is neither true nor false")
        return value
    if option.multiple and isinstance(value, list) and all(isinstance(one, str) for one in value):
        typed: Any = value
    elif is_plain:
        typed = [str(value)] if option.multiple else str(value)
    else:
        raise BadInputError(f"{place}: {value!r} is not text{' or a list of text' if option.multiple else ''}")
    try:
        option.type_cast_value(click.get_current_context(), typed)
    except BadInputError as error:
        raise BadInputError(f"{place}: {str(error).removeprefix(f'{option.opts[0]}: ')}") from None
    except click.BadParameter as error:
        raise BadInputError(f"{place}: {error.message}") from None
    return typed
