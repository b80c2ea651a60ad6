"""The command under `gpu_idle_timeout`: launched, watched, killed with all that it started when its GPUs are idle."""

import contextlib
import logging
import math
import os
import signal
from collections.abc import Iterable, Sequence
from typing import Final

from stoker.dropin.idle_watch import PROGRAM, IdleWatch
from stoker.dropin.looks import look_without_gpus, open_prober
from stoker.gpus.model import Look
from stoker.gpus.prober import Sampler
from stoker.gpus.source import AbsentError
from stoker.procfs import Identity, stat
from stoker.runs.loop import CommandHandler, CommandLoop, helpers_of
from stoker.runs.processes.reaper import Failed, Program, exit_code, launch
from stoker.runs.processes.signals import FORWARDED, SignalStream, Terminal
from stoker.runs.processes.termination import wait_until_empty
from stoker.runs.processes.tree import send
from stoker.streams import ERROR, emit

KILLED: Final = 1
# What the original gives to signal handlers before it kills.
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
        """`signum` is sent before the kill if there is one, with `children` to all processes of the command."""
        self._command = command
        self._watch = watch
        self._log = log
        self._signum = signum
        self._children = children
        self._killed = False

    def run(self) -> int:
        """The exit code that the whole program ends with."""
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
        # Not before: a command that is slow to start has not been idle.
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
    """Children before their parents, which might otherwise start new ones."""
    parents = {process.pid: found.parent for process in processes if (found := stat(process.pid))}

    def depth(process: Identity) -> int:
        steps, pid = 0, process.pid
        while (pid := parents.get(pid, 0)) in parents and steps < len(parents):
            steps += 1
        return steps

    return sorted(processes, key=depth, reverse=True)
