"""`stoker run`: launch a command, and stop it when its GPUs stay idle or it hangs."""

import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from stoker.actions.catalogue import ACTION_FORMS
from stoker.cli.options.common import DURATION, GENERAL, SectionedCommand, source_options
from stoker.cli.options.policy import policy_options, then_option, with_joined_actions
from stoker.cli.output import dry_run_option
from stoker.errors import BadInputError, StokerError
from stoker.settings import load_settings
from stoker.units import parse_duration

if TYPE_CHECKING:
    from stoker.rules.rule import Verdict
    from stoker.runs.plan import Plan

OWN_FAILURE = 125


class _RunCommand(SectionedCommand):
    """Errors in the options end with 125, as in GNU timeout: all other codes are the command's."""

    headings: Mapping[str, str] = {"--below": "Rules", "--gpus": GENERAL}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_joined_actions(args))

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **extra)
        except click.UsageError as error:
            message = f"{error.format_message().rstrip('.')} (see `stoker run --help`)"
            raise StokerError(message, exit_code=OWN_FAILURE) from None
        except BadInputError as error:
            raise StokerError(str(error), exit_code=OWN_FAILURE) from None


@click.command(
    "run",
    cls=_RunCommand,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="Exit codes are those of GNU timeout: the command's own; 124 when it was stopped; 125 when Stoker itself "
    "failed; 126 and 127 when the command could not be run or found; 128+n when it died of signal n.",
)
@policy_options
@click.option(
    "--gpus",
    metavar="GPUS",
    default="job",
    help="GPUs to watch: mine, visible, all, 0,2 or uuids [those the command uses].",
)
@click.option(
    "--signal", "signal_name", metavar="SIGNAL", default="TERM", help="The signal that stops the command [TERM]."
)
@click.option(
    "--grace", type=DURATION, metavar="DURATION", default="30s", help="Time between this signal and SIGKILL [30s]."
)
@click.option("--max-time", type=DURATION, metavar="DURATION", help="Stop the command after this time, busy or not.")
@click.option(
    "--idle-exit-code",
    type=click.IntRange(0, 255),
    default=124,
    metavar="CODE",
    help="Exit code after a stop by any rule or by --max-time [124].",
)
@dry_run_option("Report when the command would be stopped, and stop nothing.")
@then_option(f"Actions after a rule has stopped the command, in this order: {ACTION_FORMS}.")
@source_options
@click.argument("command_line", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED)
def run_command(
    command_line: tuple[str, ...],
    gpus: str,
    signal_name: str,
    grace: float,
    max_time: float | None,
    idle_exit_code: int,
    dry_run: bool,
    then: tuple[str, ...],
    source: str | None,
    deadline: float | None,
    **rules: Any,
) -> int:
    """Run COMMAND; stop it and all its descendants when its GPUs stay idle or it hangs."""
    from stoker.rules.registry import policies_of, stored_form
    from stoker.runs.plan import Plan, parse_signal

    if not command_line:
        raise StokerError(
            "there is no command to run: write it after --, as in `stoker run -- python train.py`", exit_code=125
        )
    try:
        settings = load_settings()
        plan = Plan(
            command=command_line,
            policy=stored_form(policies_of(rules)),
            gpus=gpus,
            signal_name=parse_signal(signal_name).name.removeprefix("SIG"),
            grace=grace,
            max_time=max_time,
            dry_run=dry_run,
            then=then,
            idle_exit_code=idle_exit_code,
            source=source or settings.gpus,
            deadline=deadline or parse_duration(settings.deadline),
        )
        from stoker.runs.run import supervise

        return supervise(plan, *_actions(plan)) if then else supervise(plan)
    except BadInputError as error:
        raise StokerError(str(error), exit_code=OWN_FAILURE) from None


def _actions(plan: "Plan") -> "tuple[Callable[[Verdict], None], Callable[[str], None] | None]":
    """The callbacks for a stop and for a warning. Actions are checked before the run starts."""
    from stoker.actions.action import facts_of, log_to_stderr
    from stoker.actions.perform import perform, prepared, send_detached

    actions = prepared(plan.then, log_to_stderr)

    def act(verdict: "Verdict") -> None:
        perform(actions, facts_of(verdict, plan.policies, time.monotonic(), socket.gethostname()), log_to_stderr)

    def warn(text: str) -> None:
        send_detached(plan.then, socket.gethostname(), text)

    return act, warn if any(action.sends_messages for action in actions) and not plan.dry_run else None
