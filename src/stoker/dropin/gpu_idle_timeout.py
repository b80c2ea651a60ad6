"""`gpu_idle_timeout`: stops a command, or ends the Determined task around it, when the GPUs stay idle."""

import argparse
import contextlib
import logging
import math
import os
import platform
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from stoker.dropin.common import look_without_gpus, open_prober, steady_looks, whole
from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Look, known
from stoker.gpus.prober import LONGEST_WAIT, Sampler
from stoker.gpus.source import AbsentError
from stoker.procfs import Identity, stat
from stoker.rules.rule import LOOK_TAKES, Verdict
from stoker.rules.samples import SamplesPolicy, SamplesRule, UsageSample
from stoker.rules.scope import DeviceScope
from stoker.runs.loop import CommandHandler, CommandLoop, helpers_of
from stoker.runs.plan import parse_signal
from stoker.runs.processes.reaper import Failed, Program, exit_code, launch
from stoker.runs.processes.signals import FORWARDED, SignalStream, Terminal
from stoker.runs.processes.termination import wait_until_empty
from stoker.runs.processes.tree import send
from stoker.settings import load_settings
from stoker.streams import ERROR, emit, open_missing
from stoker.units import parse_duration

PROGRAM: Final = "gpu_idle_timeout"
KILLED: Final = 1
FAILED: Final = 1
INTERRUPTED: Final = 130
# Like later versions of the original: Python with faulthandler, and Java, print their stacks.
CHILDREN_SIGNAL: Final = "SIGQUIT"


class TimeoutArguments(NamedTuple):
    """The command line."""

    policy: SamplesPolicy
    signal: signal.Signals | None
    """Sent before the kill, if given."""
    signal_children: bool
    debug: bool
    command: tuple[str, ...]


def look_distance(sample_freq: int) -> float:
    """Seconds between looks: several per long sample interval, because the driver buffers sixteen seconds."""
    return sample_freq / math.ceil(sample_freq / LONGEST_WAIT)


class IdleWatch:
    """Takes one look per `policy.every`, the first at the start."""

    def __init__(self, policy: SamplesPolicy, log: logging.Logger, look_takes: float = LOOK_TAKES) -> None:
        """`look_takes`: the prober's deadline for a look."""
        self.policy = policy
        self._log = log
        self._scope = DeviceScope()
        self._rule = SamplesRule(policy, look_takes=look_takes)
        self._unknown: dict[str, str] = {}

    def announce(self) -> None:
        self._log.info(
            "Starting GPU idle watcher: threshhold_percentage=%d%%, sample_freq=%d, num_samples=%d, delay_samples=%d, "
            "window_size=%d",
            self.policy.threshold,
            self.policy.sample_freq,
            self.policy.num_samples,
            self.policy.delay_samples,
            self.policy.window,
        )

    def observe(self, look: Look) -> Verdict:
        verdict = self._rule.observe(self._scope.observe(look))
        if verdict.kind == "arming":
            self._log.info(verdict.reason)
        if self._rule.sample is not None:
            self._log_readings(self._rule.sample)
        return verdict

    def start_again(self, at: float) -> None:
        """Restarts the window."""
        self._rule.rearm(at)

    def _log_readings(self, sample: UsageSample) -> None:
        unknown: dict[str, str] = {"": sample.problem} if sample.problem else {}
        for uuid, percent in sample.percents.items():
            if known(percent):
                self._log.debug("%s usage %d%%", uuid, percent)
            else:
                unknown[f"{uuid} "] = percent.reason
        for prefix, reason in unknown.items():
            # Logged at its beginning and on a change of reason; with --debug every time.
            level = logging.DEBUG if self._unknown.get(prefix) == reason else logging.WARNING
            self._log.log(level, "%susage unknown: %s", prefix, reason)
        self._unknown = unknown


class _GuardedHandler(logging.Handler):
    """Writes to stderr, if possible."""

    def emit(self, record: logging.LogRecord) -> None:
        emit(ERROR, f"{self.format(record)}\n")


def open_log(*, debug: bool) -> logging.Logger:
    """The log on stderr, in the original's format."""
    handler = _GuardedHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s: %(levelname)s: {PROGRAM}: %(message)s"))
    log = logging.Logger(PROGRAM, logging.DEBUG if debug else logging.INFO)
    log.addHandler(handler)
    return log


# The time that the original gives signal handlers before it kills.
HANDLERS_TIME: Final = 3.0


class WatchedCommand(CommandHandler[int]):
    """Runs once."""

    def __init__(
        self,
        command: Sequence[str],
        watch: IdleWatch,
        log: logging.Logger,
        signum: signal.Signals | None,
        *,
        children: bool,
    ) -> None:
        """`signum`, if given, is sent before the kill; with `children`, to all processes of the command."""
        self._command = command
        self._watch = watch
        self._log = log
        self._signum = signum
        self._children = children
        self._killed = False

    def run(self) -> int:
        """The exit code of the program."""
        with contextlib.ExitStack() as cleanup:
            prober = open_prober()
            cleanup.callback(prober.leave)
            prober.ask()  # the driver's library is loaded while the command starts
            signals = cleanup.enter_context(SignalStream(FORWARDED))
            terminal = cleanup.enter_context(contextlib.closing(Terminal()))
            self._reaper = launch(
                Program(self._command, os.environ, mask=signals.original), helpers=lambda: helpers_of(prober)
            )
            cleanup.callback(self._reaper.close)
            self._sampler = Sampler(prober, self._watch.policy.every, first=math.inf)
            self._loop = CommandLoop(self, self._reaper, signals=signals, sampler=self._sampler)
            code = self._loop.run()
            if self._killed or not self._reaper.exited:
                terminal.restore()
            return code

    # Events of the loop

    def on_started(self) -> None:
        self._watch.announce()
        # Not earlier: a command that starts slowly has not been idle.
        self._sampler.postpone(0.0)

    def on_start_failed(self, failed: Failed) -> int:
        emit(ERROR, f"{PROGRAM}: cannot run {self._command[0]!r}: {failed.why}\n")
        return failed.exit_code

    def on_exit(self, status: int) -> int:
        if left := self._reaper.processes():
            self._log.warning("the command ended and left %d process(es) behind, ending them.", len(left))
            self._loop.stop(signal.SIGTERM, HANDLERS_TIME)
        return exit_code(status)

    def on_reaper_killed(self) -> int:
        self._log.error("the process that guards the command was killed from outside. Killing process.")
        return self._kill()

    def on_second_interrupt(self) -> int:
        self._loop.stop(signal.SIGKILL, 0.0)
        return 128 + signal.SIGINT

    def on_look(self, look: Look) -> int | None:
        verdict = self._watch.observe(look)
        if verdict.effect != "act":
            return None
        self._log.error("%s Killing process.", verdict.reason)
        if self._signum is not None:
            self._signal_first(self._signum)
        return self._kill()

    def on_look_failed(self, error: Exception) -> int | None:
        if not isinstance(error, AbsentError):
            raise error
        return self.on_look(look_without_gpus(error))

    def _signal_first(self, signum: signal.Signals) -> None:
        job = () if self._reaper.job is None else (self._reaper.job,)
        for process in _deepest_first(self._reaper.processes()) if self._children else job:
            self._log.info("Sending signal %s to process %d", signum.name, process.pid)
            send(process, signum)
        wait_until_empty(self._reaper, HANDLERS_TIME)

    def _kill(self) -> int:
        self._killed = True
        if self._reaper.processes():
            self._log.error("process still alive, maybe hung, killing.")
        for survivor in self._loop.stop(signal.SIGKILL, 0.0).survivors:
            self._log.error("could not be killed: %s", survivor)
        return KILLED


def _deepest_first(processes: Iterable[Identity]) -> list[Identity]:
    """Children before their parents, which might otherwise start new children."""
    parents = {process.pid: found.parent for process in processes if (found := stat(process.pid))}

    def depth(process: Identity) -> int:
        steps, pid = 0, process.pid
        while (pid := parents.get(pid, 0)) in parents and steps < len(parents):
            steps += 1
        return steps

    return sorted(processes, key=depth, reverse=True)


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


def run(options: TimeoutArguments, log: logging.Logger) -> int:
    watch = IdleWatch(options.policy, log, parse_duration(load_settings().deadline))
    if not options.command:
        return end_task(watch, log)
    return WatchedCommand(options.command, watch, log, options.signal, children=options.signal_children).run()


def end_task(watch: IdleWatch, log: logging.Logger) -> int:
    """Ends the surrounding Determined task when its GPUs are idle."""
    from stoker.actions.action import facts_of
    from stoker.actions.determined import Determined

    task = Determined(os.environ)
    # Fails now rather than after hours: outside Determined there is nothing to end.
    for sentence in task.prepare():
        log.warning(sentence)
    watch.announce()
    for look in steady_looks(watch.policy.every):
        verdict = watch.observe(look)
        if verdict.effect != "act":
            continue
        log.error(verdict.reason)
        try:
            task.act(facts_of(verdict, (), look.at, platform.node()))
        except StokerError as error:
            log.error("%s; trying again after another idle window", error)
            watch.start_again(look.at)
        else:
            return KILLED
    raise AssertionError("unreachable: looks never end")


def parse(arguments: Sequence[str]) -> TimeoutArguments:
    given = _parser().parse_args(arguments)
    command: list[str] = given.exec_command_and_args
    if command[:1] == ["--"]:
        command = command[1:]
    children: bool = given.signal_children
    named: signal.Signals | None = given.signal_name
    return TimeoutArguments(
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
    # The other spelling is accepted but not shown.
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
    """Shows defaults, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _signal(text: str) -> signal.Signals:
    try:
        return parse_signal(text)
    except BadInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
