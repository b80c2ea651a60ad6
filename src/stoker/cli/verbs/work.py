"""`stoker work`: run the queue's jobs with an engine."""

from collections.abc import Sequence
from typing import Any, Final

import click

from stoker.cli.options.common import DURATION, MEMORY, Typed
from stoker.cli.options.queue import opened_or_created, queue_option, queue_url_of
from stoker.cli.output import log
from stoker.engines import ENGINES, EngineOption, engine_module
from stoker.settings import load_settings

_PARAMETERS: Final = "stoker.engine_parameters"


class _WorkCommand(click.Command):
    """Takes the options of the engine that is chosen by `--engine`, `STOKER_ENGINE` or `stoker.toml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_PARAMETERS] = _parameters(_chosen(args))
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if _PARAMETERS not in ctx.meta:
            ctx.meta[_PARAMETERS] = _parameters(load_settings().engine)
        *own, help_option = super().get_params(ctx)
        return [*own, *ctx.meta[_PARAMETERS], help_option]


def _chosen(args: Sequence[str]) -> str:
    """The engine, read before the rest of the command line: the other options depend on it."""
    for position, word in enumerate(args):
        if word == "--engine" and position + 1 < len(args):
            return args[position + 1]
        if word.startswith("--engine="):
            return word.removeprefix("--engine=")
    return load_settings().engine


def _parameters(engine: str) -> list[click.Option]:
    return [_parameter(option) for option in engine_module(engine).OPTIONS]


def _parameter(option: EngineOption) -> click.Option:
    attributes: dict[str, Any] = {"default": option.default, "metavar": option.metavar, "help": option.help}
    if option.bare is not None:
        attributes |= {"is_flag": False, "flag_value": option.bare}
    return click.Option([option.name], type=Typed(option.metavar.lower(), option.parse), **attributes)


@click.command("work", cls=_WorkCommand)
@queue_option
@click.option(
    "--engine",
    metavar="NAME",
    help=f"Where jobs run: {', '.join(ENGINES)} (default: STOKER_ENGINE, then local). Each has its own options.",
)
@click.option(
    "--lease",
    type=DURATION,
    default="10m",
    metavar="DURATION",
    help="Other machines take over the jobs of one that is silent for this long [10m].",
)
@click.option("--grace", type=DURATION, default="30s", metavar="DURATION", help="From SIGTERM to SIGKILL [30s].")
@click.option(
    "--log-limit", type=MEMORY, default="64MiB", metavar="SIZE", help="Keep this much of a job's output [64MiB]."
)
@click.option("--until-empty", is_flag=True, help="End when nothing is left that could start here.")
def work_command(
    queue_url: str | None,
    engine: str | None,
    lease: float,
    grace: float,
    log_limit: int,
    until_empty: bool,
    **engine_options: Any,
) -> int:
    """Run the queue's jobs on this machine's GPUs, each when there is room for it.

    Ctrl-C ends the worker, not the jobs: the next `stoker work` finds them again.
    """
    from stoker.engines.engine import WorkerOptions
    from stoker.worker.loop import work

    options = WorkerOptions(
        queue=queue_url_of(queue_url), lease=lease, grace=grace, log_limit=log_limit, until_empty=until_empty
    )
    options.check()
    module = engine_module(engine or load_settings().engine)
    return work(options, module, engine_options, log, lambda: opened_or_created(queue_url).close())
