"""`gpu_idle_timeout`: stops a command, or ends the Determined task around it, when the GPUs do nothing for a while."""

import argparse
import logging
import os
import platform
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from stoker.dropin.arguments import whole
from stoker.dropin.idle_watch import PROGRAM, IdleWatch, look_distance, open_log
from stoker.dropin.looks import steady_looks
from stoker.errors import BadInputError, StokerError
from stoker.rules.samples import SamplesPolicy
from stoker.runs.plan import parse_signal
from stoker.settings import load_settings
from stoker.streams import ERROR, emit, open_missing
from stoker.units import parse_duration

KILLED: Final = 1
FAILED: Final = 1
INTERRUPTED: Final = 130
# What the original sends in its later versions: Python with faulthandler, and Java, answer it with their stacks.
CHILDREN_SIGNAL: Final = "SIGQUIT"


class Options(NamedTuple):
    """What was typed."""

    policy: SamplesPolicy
    signal: signal.Signals | None
    """Sent before the kill, if any is."""
    signal_children: bool
    debug: bool
    command: tuple[str, ...]


def main() -> None:
    """The `gpu_idle_timeout` command."""
    open_missing()
    options = parse(sys.argv[1:])
    log = open_log(debug=options.debug)
    try:
        code = run(options, log)
    except StokerError as error:
        emit(ERROR, f"{PROGRAM}: {error}\n")
        code = error.exit_code if isinstance(error, BadInputError) else FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def run(options: Options, log: logging.Logger) -> int:
    watch = IdleWatch(options.policy, log, parse_duration(load_settings().deadline))
    if not options.command:
        return end_task(watch, log)
    from stoker.dropin.watched_command import WatchedCommand

    return WatchedCommand(options.command, watch, log, options.signal, children=options.signal_children).run()


def end_task(watch: IdleWatch, log: logging.Logger) -> int:
    """Ends the Determined task that this runs in, when its GPUs are idle."""
    from stoker.actions.action import facts_of
    from stoker.actions.determined import Determined

    task = Determined(os.environ)
    # Now, not when the task has been idle for hours: outside Determined there is nothing to watch for.
    for sentence in task.prepare():
        log.warning(sentence)
    watch.announce()
    for look in steady_looks(watch.policy.every):
        verdict = watch.observe(look)
        if verdict.effect != "act":
            continue
        log.error(verdict.reason)
        try:
            task.act(facts_of(verdict, verdict.reason, look.at, platform.node()))
        except StokerError as error:
            log.error("%s; it is tried again when the GPUs were idle for as long again", error)
            watch.start_again(look.at)
        else:
            return KILLED
    raise AssertionError("unreachable: looks never end")


def parse(arguments: Sequence[str]) -> Options:
    given = _parser().parse_args(arguments)
    command: list[str] = given.exec_command_and_args
    if command[:1] == ["--"]:
        command = command[1:]
    children: bool = given.signal_children
    named: signal.Signals | None = given.signal_name
    return Options(
        SamplesPolicy(
            every=look_distance(given.sample_freq),
            threshold=given.threshhold_percentage,
            sample_freq=given.sample_freq,
            num_samples=given.num_samples,
            delay_samples=given.delay_samples,
            require=given.all_or_any,
        ),
        named or (parse_signal(CHILDREN_SIGNAL) if children else None),
        children,
        given.debug,
        tuple(command),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=(
            "Launches a process and terminates when GPU usage drops below threshhold during sample window. "
            "Without a command, the Determined task that it runs in is ended instead."
        ),
        formatter_class=_DefaultsHelp,
    )
    parser.add_argument(
        "-t",
        "--threshhold-percentage",
        type=whole(1, 100),
        default=1,
        help="Threshhold in percentage of GPU usage which triggers a failure. Must be greater than 0.",
    )
    parser.add_argument(
        "-s",
        "--sample-freq",
        type=whole(1),
        default=5,
        help="How frequently, in seconds, to sample the GPU usage. Must be greater than 0.",
    )
    parser.add_argument(
        "-n",
        "--num-samples",
        type=whole(1),
        default=60,
        help="Number of samples in window used to evaluate GPU usage. Must be greater than 0.",
    )
    parser.add_argument(
        "-d",
        "--delay-samples",
        type=whole(0),
        default=12,
        help="Number of samples to delay before evaluating GPU usage.",
    )
    # Its other spelling is left out of the help, which is long enough.
    which: dict[str, Any] = {"choices": ["all", "any"], "default": "all", "metavar": "ALL_OR_ANY"}
    parser.add_argument(
        "-a",
        "--all_or_any",
        help="Whether to verify that all or any of the GPUs have the specified threshold. Must be either all or any",
        **which,
    )
    parser.add_argument("--all-or-any", dest="all_or_any", help=argparse.SUPPRESS, **which)
    parser.add_argument(
        "--signal-name",
        type=_signal,
        help=(
            "Signal to send to the process before killing it, which then has 3 seconds to end. (default: none, it is "
            f"killed at once; {CHILDREN_SIGNAL} with --signal-children)"
        ),
    )
    parser.add_argument(
        "--signal-children",
        action="store_true",
        help="Whether to signal the children of the process first.",
    )
    parser.add_argument(
        "-x",
        "--debug",
        action="store_true",
        help="Enable debug logging (reports GPU readings each sample period).",
    )
    parser.add_argument(
        "exec_command_and_args",
        nargs=argparse.REMAINDER,
        help="Command and arguments to execute",
    )
    return parser


class _DefaultsHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the defaults, but where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _signal(text: str) -> signal.Signals:
    try:
        return parse_signal(text)
    except BadInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
