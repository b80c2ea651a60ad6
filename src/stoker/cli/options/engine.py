"""The options of a worker: `--engine`, the common options, and those of the chosen engine."""

import os
from collections.abc import Sequence
from typing import Any, Final

import click
from click.core import ParameterSource

from stoker.cli.options.common import Typed, option_defaults
from stoker.engines import ENGINES, EngineOption, engine_module
from stoker.errors import BadInputError, did_you_mean
from stoker.queue.field_kinds import LABELS
from stoker.settings import load_settings
from stoker.settings_path import config_path
from stoker.units import parse_memory, parse_positive_duration


def _labels(text: str) -> tuple[str, ...]:
    labels: tuple[str, ...] = LABELS.read(text)
    LABELS.check(labels)
    return labels


_PARAMETERS: Final = "stoker.worker_parameters"
_OF_EVERY_ENGINE: Final = (
    EngineOption(
        "--lease",
        "DURATION",
        "Other machines take over the jobs of a machine after this long without a renewal [10m].",
        "10m",
        parse_positive_duration,
    ),
    EngineOption("--grace", "DURATION", "From SIGTERM to SIGKILL [30s].", "30s", parse_positive_duration),
    EngineOption("--label", "LABELS", "Take jobs that were submitted with --label: ib or ib,nvme.", None, _labels),
    EngineOption("--log-limit", "SIZE", "Keep this much of a job's output [64MiB].", "64MiB", parse_memory),
)

engine_option = click.option(
    "--engine",
    metavar="NAME",
    help=f"Where jobs run: {', '.join(ENGINES)} (default: STOKER_ENGINE, then local). Each has its own options.",
)


class WorkerCommand(click.Command):
    """Adds the options of a worker; `--engine`, `STOKER_ENGINE` or `stoker.toml` selects the engine."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        engine = self.choose_engine(ctx, args)
        ctx.default_map = _defaults(engine, ctx.meta[_PARAMETERS])
        return super().parse_args(ctx, args)

    def choose_engine(self, ctx: click.Context, args: Sequence[str]) -> str:
        """The engine of a command line, whose options apply from now on."""
        engine = _chosen(args)
        ctx.meta[_PARAMETERS] = _parameters(engine)
        return engine

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if _PARAMETERS not in ctx.meta:
            ctx.meta[_PARAMETERS] = _parameters(load_settings().engine)
        *own, help_option = super().get_params(ctx)
        return [*own, *ctx.meta[_PARAMETERS], help_option]


def typed_worker_options(context: click.Context) -> list[str]:
    """The given options of a worker, for the command line of `stoker work`."""
    return [
        f"{option.opts[0]}={option.type.typed}"
        for option in context.meta[_PARAMETERS]
        if context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    ]


def _defaults(engine: str, parameters: Sequence[click.Option]) -> dict[str, Any]:
    tables = load_settings().work
    if unknown := next((name for name in tables if name not in ENGINES), None):
        known = did_you_mean(unknown, list(ENGINES))
        raise BadInputError(
            f"error in the configuration file {config_path(os.environ)}: [work] has no {unknown!r}: {known}"
        )
    return option_defaults(f"work.{engine}", tables.get(engine, {}), parameters)


def _chosen(args: Sequence[str]) -> str:
    """The engine, parsed before the rest of the command line, which depends on it."""
    for position, word in enumerate(args):
        if word == "--engine" and position + 1 < len(args):
            return args[position + 1]
        if word.startswith("--engine="):
            return word.removeprefix("--engine=")
    return load_settings().engine


class _WorkerValue(Typed):
    """Remembers the given options."""

    typed = ""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        self.typed = str(value)
        return super().convert(value, param, ctx)


def _parameters(engine: str) -> list[click.Option]:
    return [_parameter(option) for option in (*_OF_EVERY_ENGINE, *engine_module(engine).OPTIONS)]


def _parameter(option: EngineOption) -> click.Option:
    attributes: dict[str, Any] = {"default": option.default, "metavar": option.metavar, "help": option.help}
    if option.bare is not None:
        attributes |= {"is_flag": False, "flag_value": option.bare}
    return click.Option([option.name], type=_WorkerValue(option.metavar.lower(), option.parse), **attributes)
