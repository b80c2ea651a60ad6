"""`stoker watch`: watch the GPUs of this machine or container, and act when they stay idle."""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from stoker.actions.action import ACTION_FAILED, log_to_stderr
from stoker.actions.catalogue import (
    ACTION_FORMS,
    DEFAULT_EXEC_TIMEOUT,
    DEFAULT_GRACE,
    ActionSettings,
    Exit,
    parse_action,
)
from stoker.actions.notify import Notify
from stoker.actions.systemd import ServiceManager, unit_text
from stoker.actions.watcher import ACTED, Watched, Watcher, WatchOptions
from stoker.actions.whose import ProcessMeter, judged_processes
from stoker.cli.options.common import GENERAL, SectionedCommand, open_prober, source_options
from stoker.cli.options.policy import LENGTH, policy_options, then_option, with_joined_actions
from stoker.cli.output import dry_run_option, json_option, print_json
from stoker.cli.tables.table import Column, print_table
from stoker.errors import BadInputError, StokerError
from stoker.gpus.source import AbsentError
from stoker.paths import state_home
from stoker.procfs import user_name
from stoker.rules.registry import in_words, policies_of
from stoker.rules.rule import Policy
from stoker.settings import load_settings
from stoker.settings_path import config_path
from stoker.units import format_duration, parse_duration

F = TypeVar("F", bound=Callable[..., Any])
# In addition to the variables of options.
_CARRIED: Final = ("STOKER_GPUS", "STOKER_DEADLINE", "CUDA_VISIBLE_DEVICES")
_PRINT_UNIT: Final = "--print-unit"
_WORDS: Final = "stoker.watch_words"
# A look every ten seconds misses nothing and costs almost nothing.
_SLURM_EVERY: Final = 10.0
# A short window, as in a trial, needs lists of jobs more often than every half minute.
_LISTS_IN_A_WINDOW: Final = 10
_SHORTEST_ASKED_EVERY: Final = 2.0
_DEFAULT_SINCE: Final = 7 * 86400.0


class _SlurmOptions(NamedTuple):
    """The options of `--slurm`."""

    slurm: bool
    all_users: bool
    warn: bool
    stop: bool
    table: bool
    since: float | None
    as_json: bool

    def check(self, then: tuple[str, ...]) -> None:
        given = {"all-users": self.all_users, "warn": self.warn, "stop": self.stop, "table": self.table}
        if not self.slurm and any(given.values()):
            raise BadInputError(f"--{next(name for name in given if given[name])} needs --slurm")
        if not self.table and (self.since is not None or self.as_json):
            raise BadInputError(f"{'--json' if self.as_json else '--since'} needs --slurm --table")
        if self.slurm and then:
            raise BadInputError("--slurm and --then exclude each other: use --warn or --stop")


def _slurm_options(command: F) -> F:
    for option in (
        json_option("With --table: print it as JSON."),
        click.option("--since", type=LENGTH, metavar="DURATION", help="With --table: the period [7d]."),
        click.option("--table", is_flag=True, help="With --slurm: print the GPU-hours of each user and exit."),
        click.option("--stop", is_flag=True, help="With --slurm: warn owners twice, then cancel their jobs."),
        click.option("--warn", is_flag=True, help="With --slurm: warn owners and cancel nothing."),
        click.option("--all-users", is_flag=True, help="With --slurm: everybody's jobs, not only your own."),
        click.option("--slurm", is_flag=True, help="Watch running jobs of a Slurm cluster; a dry run by default."),
    ):
        command = option(command)
    return command


class _WatchCommand(SectionedCommand):
    """Accepts `--then stop 4242` as well as `--then 'stop 4242'`."""

    headings: Mapping[str, str] = {"--below": "Rules", "--gpus": GENERAL, "--slurm": "Slurm", "--deadline": GENERAL}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = [word for word in args if word != _PRINT_UNIT]
        return super().parse_args(ctx, with_joined_actions(args))


@click.command(
    "watch",
    cls=_WatchCommand,
    epilog="Exit codes: 124 after acting; 125 when an action failed or cannot work; 2 for an error in the command "
    "line; 128+n when signal n ended it.",
)
@then_option(f"Actions, in this order: {ACTION_FORMS}.")
@policy_options
@click.option("--gpus", metavar="GPUS", default="all", help="GPUs to watch: all, visible, 0,2 or uuids [all].")
@click.option(
    "--whose",
    metavar="mine|all|USER",
    help="Whose processes count [with 'stop', the ones it would stop; with 'shutdown' and 'reboot', and as root, "
    "everyone's but display servers and monitors; else mine].",
)
@click.option(
    "--grace",
    type=LENGTH,
    default=DEFAULT_GRACE,
    metavar="DURATION",
    help=f"With 'stop': time between SIGTERM and SIGKILL [{format_duration(DEFAULT_GRACE)}].",
)
@click.option(
    "--exec-timeout",
    type=LENGTH,
    default=DEFAULT_EXEC_TIMEOUT,
    metavar="DURATION",
    help=f"Time limit of the command of 'exec' [{format_duration(DEFAULT_EXEC_TIMEOUT)}].",
)
@click.option("--repeat", is_flag=True, help="Continue to watch after acting, instead of exiting.")
@dry_run_option("Report what would be done and when, and do nothing.")
@click.option(
    "--idle-exit-code",
    type=click.IntRange(0, 255),
    default=ACTED,
    metavar="CODE",
    help=f"Exit code after acting on any rule [{ACTED}].",
)
@click.option(_PRINT_UNIT, is_flag=True, help="Print a systemd unit for this command line and exit.")
@_slurm_options
@source_options
def watch_command(
    then: tuple[str, ...],
    gpus: str,
    whose: str | None,
    grace: float,
    exec_timeout: float,
    repeat: bool,
    dry_run: bool,
    idle_exit_code: int,
    print_unit: bool,
    source: str | None,
    deadline: float | None,
    **rules: Any,
) -> int:
    """Watch the GPUs of this machine or container, and act when they stay idle or a job hangs."""
    slurm = _SlurmOptions(*(rules.pop(name) for name in _SlurmOptions._fields))
    slurm.check(then)
    policies = policies_of(rules)
    if not policies:
        raise BadInputError("every rule is off: nothing to watch for")
    if slurm.slurm:
        return _slurm(slurm, rules, dry_run=dry_run, print_unit=print_unit)
    if not then:
        raise BadInputError("no action for when a rule fires: give at least one --then, such as --then shutdown")
    if exec_timeout <= 0:
        raise BadInputError("--exec-timeout must be greater than zero")
    settings = ActionSettings(environment=os.environ, grace=grace, exec_timeout=exec_timeout)
    orders = WatchOptions(
        actions=tuple(parse_action(text, settings) for text in then),
        host=socket.gethostname(),
        repeat=repeat,
        dry_run=dry_run,
        idle_exit_code=idle_exit_code,
    )
    if repeat and any(isinstance(action, Exit) for action in orders.actions):
        raise BadInputError("--repeat and --then exit exclude each other: choose one")
    if print_unit:
        return _print_unit(policies, orders, then)
    for message in [message for action in orders.actions for message in action.prepare()]:
        log_to_stderr(message)
    judged = judged_processes(whose, orders.actions, user_name(os.geteuid()))
    watched = Watched(gpus, policies, os.environ, judged, ProcessMeter(judged))
    return _watch(source, deadline, watched, policies, orders)


def _watch(
    source: str | None, deadline: float | None, watched: Watched, policies: Sequence[Policy], orders: WatchOptions
) -> int:
    prober = open_prober(source, deadline, sharing="start")
    try:
        try:
            first = prober.look()
        except AbsentError as absent:
            raise StokerError(f"there is no GPU to watch: {absent}", exit_code=ACTION_FAILED) from None
        return Watcher(prober, watched, policies, orders, ServiceManager(os.environ)).run(first)
    finally:
        prober.leave()


def _slurm(asked: _SlurmOptions, rules: dict[str, Any], *, dry_run: bool, print_unit: bool) -> int:
    if asked.table:
        return _print_table(_DEFAULT_SINCE if asked.since is None else asked.since, as_json=asked.as_json)
    if print_unit:
        return _print_slurm_unit()
    from stoker.engines.slurm.watch.commands import check_commands
    from stoker.engines.slurm.watch.watcher import ASK_EVERY, SlurmWatcher, SlurmWatchOptions, own_name

    settings = load_settings()
    stop, warn = asked.stop and not dry_run, asked.warn and not dry_run
    if asked.all_users and (warn or stop) and not settings.slurm_watch.owner:
        raise BadInputError("owners cannot be warned: set owner in [slurm-watch] of stoker.toml to an apprise URL")
    check_commands(["squeue", "srun", "scontrol", "scancel"])
    if click.get_current_context().get_parameter_source("every") is ParameterSource.DEFAULT:
        rules = {**rules, "every": min(_SLURM_EVERY, rules["window"])}
    longer = max(rules["window"], parse_duration(settings.slurm_watch.interactive_for))
    options = SlurmWatchOptions(
        user=None if asked.all_users else own_name(),
        warn=warn,
        stop=stop,
        policies=policies_of(rules),
        interactive=policies_of({**rules, "window": longer}),
        home=state_home() / "slurm-watch",
        ask_every=min(max(rules["window"] / _LISTS_IN_A_WINDOW, _SHORTEST_ASKED_EVERY), ASK_EVERY),
    )
    return SlurmWatcher(options, settings).run()


def _print_table(since: float, *, as_json: bool) -> int:
    from stoker.engines.slurm.watch.usage import table_cells, usage_rows

    now = time.time()
    rows = usage_rows(state_home() / "slurm-watch", now - since, now)
    if as_json:
        print_json(rows)
        return 0
    heading, *cells = table_cells(rows)
    print_table([Column(name, "left" if name == "user" else "right") for name in heading], cells)
    if not rows:
        log_to_stderr("no usage is recorded: 'stoker watch --slurm' records it while it runs")
    return 0


def _print_slurm_unit() -> int:
    words = ["watch", *click.get_current_context().meta[_WORDS]]
    click.echo(unit_text("Stoker: idle GPUs of Slurm's jobs", [*_program(), *words], _environment(), 0), nl=False)
    return 0


def _print_unit(policies: Sequence[Policy], orders: WatchOptions, then: tuple[str, ...]) -> int:
    words = ["watch", *click.get_current_context().meta[_WORDS]]
    description = f"Stoker: {in_words(policies)}, then {', then '.join(text.split()[0] for text in then)}"
    click.echo(unit_text(description, [*_program(), *words], _environment(), orders.idle_exit_code), nl=False)
    if any(isinstance(action, Notify) for action in orders.actions):
        log_to_stderr(
            "the unit contains the URL of 'notify', which may be a secret: make the file readable by root only"
        )
    return 0


def _environment() -> dict[str, str]:
    """The variables that this command line needs: a service has no others."""
    options = [str(option.envvar) for option in click.get_current_context().command.params if option.envvar]
    found = {name: os.environ[name] for name in (*_CARRIED, *options) if os.environ.get(name)}
    config = Path(config_path(os.environ)).absolute()
    return {**found, "STOKER_CONFIG": str(config)} if config.exists() else found


def _program() -> list[str]:
    """The command that starts this installation from any directory."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return [sys.executable, "-m", "stoker.cli"]
    return [str(program.absolute())]
