"""Options that several verbs share, and the types of their values."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import click

from stoker.errors import BadInputError
from stoker.gpus.prober import Prober
from stoker.gpus.source import source_names
from stoker.gpus.spawn import Helper, spawned
from stoker.settings import load_settings
from stoker.settings_path import config_path
from stoker.units import parse_duration, parse_fraction, parse_memory

F = TypeVar("F", bound=Callable[..., Any])


class Typed(click.ParamType[Any]):
    """A value read by `parse`; its error is one sentence, without click's usage lines."""

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


def _positive_duration(text: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise BadInputError(f"{text!r} must be greater than zero")
    return seconds


DURATION = Typed("duration", _positive_duration)
MEMORY = Typed("memory", parse_memory)
FRACTION = Typed("percentage", parse_fraction)


def source_options(command: F) -> F:
    """`--source` and `--deadline`, for verbs that read GPUs."""
    command = click.option(
        "--source",
        metavar="SOURCE",
        help=f"{', '.join(source_names())} (default: STOKER_GPUS, then auto).",
    )(command)
    return click.option(
        "--deadline", type=DURATION, metavar="DURATION", help="How long one look may take (default: 5s)."
    )(command)


def open_prober(source: str | None, deadline: float | None, start: Callable[[str, str], Helper] = spawned) -> Prober:
    """A prober as set by the options, the environment or the configuration file, in that order.

    A verb that starts no threads may pass `start=forked`: the helper then shares its memory.
    """
    settings = load_settings()
    early = click.get_current_context().find_object(Helper)
    seconds = deadline or _positive_duration(settings.deadline)
    return Prober(source or settings.gpus, deadline=seconds, start=start, early=early)


class SteadyRhythm:
    """Ticks at a fixed interval, the first after one interval; missed ticks are skipped."""

    def __init__(self, every: float, duration: float | None = None) -> None:
        self._every = every
        self._duration = duration

    def __iter__(self) -> Iterator[None]:
        begun = due = time.monotonic()
        while True:
            due = max(due + self._every, time.monotonic())
            if self._duration is not None and due - begun > self._duration:
                return
            time.sleep(max(due - time.monotonic(), 0))
            yield


CONFIGURABLE: Final = ("run", "watch")


def defaults_from_file(verb: str, command: click.Command) -> dict[str, Any]:
    """The verb's table in the configuration file, by parameter name."""
    parameters = {
        option.removeprefix("--"): parameter.name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
        if option.startswith("--")
    }
    found: dict[str, Any] = {}
    for key, value in getattr(load_settings(), verb).items():
        name = parameters.get(key.replace("_", "-"))
        if name is None:
            import difflib

            near = difflib.get_close_matches(key, parameters, n=1)
            hint = f": did you mean {near[0]!r}?" if near else f": `stoker {verb} --help` lists its options"
            raise BadInputError(
                f"error in the configuration file {config_path(os.environ)}: [{verb}] has no {key!r}{hint}"
            )
        found[name] = value
    return found
