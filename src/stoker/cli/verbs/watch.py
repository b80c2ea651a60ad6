"""`stoker watch`: watch the GPUs of this machine or container, and act when they stay idle."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

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
from stoker.cli.options.common import open_prober, source_options
from stoker.cli.options.policy import LENGTH, policy_options, then_option, with_joined_actions
from stoker.cli.output import dry_run_option
from stoker.errors import BadInputError, StokerError
from stoker.gpus.source import AbsentError
from stoker.procfs import user_name
from stoker.rules.registry import in_words, policies_of
from stoker.rules.rule import Policy
from stoker.settings_path import config_path
from stoker.units import format_duration

# Beside the variables of options.
_CARRIED: Final = ("STOKER_GPUS", "STOKER_DEADLINE", "CUDA_VISIBLE_DEVICES")
_PRINT_UNIT: Final = "--print-unit"
_WORDS: Final = "stoker.watch_words"


class _WatchCommand(click.Command):
    """Accepts `--then stop 4242` as well as `--then 'stop 4242'`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = [word for word in args if word != _PRINT_UNIT]
        return super().parse_args(ctx, with_joined_actions(args))


@click.command(
    "watch",
    cls=_WatchCommand,
    epilog="Exit codes: 124 after acting; 125 when an action failed or cannot work; 2 for an error in the command "
    "line; 128+n when signal n ended it.",
)
@then_option(f"What to do, in this order: {ACTION_FORMS}.")
@policy_options
@click.option("--gpus", metavar="GPUS", default="all", help="Which to watch: all, visible, 0,2 or uuids [all].")
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
    help=f"How long the command of 'exec' may take [{format_duration(DEFAULT_EXEC_TIMEOUT)}].",
)
@click.option("--repeat", is_flag=True, help="Go on watching after acting, instead of exiting.")
@dry_run_option("Say what would be done and when, and do nothing.")
@click.option(
    "--idle-exit-code",
    type=click.IntRange(0, 255),
    default=ACTED,
    metavar="CODE",
    help=f"Exit code after acting on any rule [{ACTED}].",
)
@click.option(_PRINT_UNIT, is_flag=True, help="Print a systemd unit for this command line, and do nothing else.")
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
    policies = policies_of(rules)
    if not policies:
        raise BadInputError("every rule is off: there is nothing to watch for")
    if not then:
        raise BadInputError("what is to be done when a rule fires? Give at least one --then, such as --then shutdown")
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
    prober = open_prober(source, deadline)
    try:
        try:
            first = prober.look()
        except AbsentError as absent:
            raise StokerError(f"there is no GPU to watch: {absent}", exit_code=ACTION_FAILED) from None
        return Watcher(prober, watched, policies, orders, ServiceManager(os.environ)).run(first)
    finally:
        prober.leave()


def _print_unit(policies: Sequence[Policy], orders: WatchOptions, then: tuple[str, ...]) -> int:
    words = ["watch", *click.get_current_context().meta[_WORDS]]
    description = f"Stoker: {in_words(policies)}, then {', then '.join(text.split()[0] for text in then)}"
    click.echo(unit_text(description, [*_program(), *words], _environment(), orders.idle_exit_code), nl=False)
    if any(isinstance(action, Notify) for action in orders.actions):
        log_to_stderr("the unit holds the URL of 'notify', which may be a secret: let only root read the file")
    return 0


def _environment() -> dict[str, str]:
    """The variables that this command line depends on: a service has no others."""
    options = [str(option.envvar) for option in click.get_current_context().command.params if option.envvar]
    found = {name: os.environ[name] for name in (*_CARRIED, *options) if os.environ.get(name)}
    config = Path(config_path(os.environ)).absolute()
    return {**found, "STOKER_CONFIG": str(config)} if config.exists() else found


def _program() -> list[str]:
    """How to start this installation from anywhere."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return [sys.executable, "-m", "stoker.cli"]
    return [str(program.absolute())]
