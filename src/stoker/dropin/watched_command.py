"""The command under `gpu_idle_timeout`: launched, watched, killed with all that it started when its GPUs are idle."""

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Final

from stoker.dropin.idle_watch import PROGRAM, IdleWatch
from stoker.dropin.looks import look_come, open_prober
from stoker.gpus.prober import Prober, Sampler
from stoker.runs.processes.reaper import Ended, Failed, Program, Reaper, ReaperKilled, Started, exit_code, launch
from stoker.runs.processes.scan import Identity, send, stat
from stoker.runs.processes.signals import FORWARDED, DoublePress, Received, SignalStream
from stoker.runs.processes.terminal import Terminal
from stoker.runs.processes.termination import stop
from stoker.streams import ERROR, emit

KILLED: Final = 1
# What the original gives to signal handlers before it kills.
HANDLERS_TIME: Final = 3.0


class WatchedCommand:
    """Everything that is waited for is waited for in one place: a driver that hangs delays readings alone."""

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
        self._double_press = DoublePress()
        self._killed = False

    def run(self) -> int:
        """The exit code that the whole program ends with."""
        with contextlib.ExitStack() as goodbye:
            prober = open_prober()
            goodbye.callback(prober.leave)
            prober.ask()  # the driver's library is loaded while the command is
            signals = goodbye.enter_context(SignalStream(FORWARDED))
            terminal = goodbye.enter_context(contextlib.closing(Terminal()))
            reaper = launch(
                Program(self._command, os.environ, mask=signals.original),
                helpers=lambda: () if prober.helper is None else (prober.helper,),
            )
            goodbye.callback(reaper.close)
            code = self._until_ended(reaper, signals, prober)
            if self._killed or not reaper.exited:
                terminal.restore()
            return code

    def _until_ended(self, reaper: Reaper, signals: SignalStream, prober: Prober) -> int:
        sampler: Sampler | None = None
        while True:
            if (code := self._hear(reaper)) is not None:
                return code
            if sampler is None and reaper.job is not None:
                # Not before: a command that is slow to start has not been idle.
                sampler = Sampler(prober, self._watch.look_every)
            for received in signals.read():
                if (code := self._pass_on(received, reaper)) is not None:
                    return code
            look = look_come(sampler) if sampler is not None else None
            idle = self._watch.observe(look) if look is not None else ()
            if idle:
                return self._kill_idle(reaper, idle)
            _wait(reaper, signals, sampler)

    def _hear(self, reaper: Reaper) -> int | None:
        while (event := reaper.next_event()) is not None:
            if isinstance(event, Failed):
                emit(ERROR, f"{PROGRAM}: cannot run {self._command[0]!r}: {event.why}\n")
                return event.exit_code
            if isinstance(event, Started):
                self._watch.announce()
            if isinstance(event, Ended):
                self._end_the_rest(reaper)
                return exit_code(event.status)
            if isinstance(event, ReaperKilled):
                self._log.error("the process that guards the command was killed from outside. Killing process.")
                return self._kill(reaper)
        return None

    def _end_the_rest(self, reaper: Reaper) -> None:
        if left := reaper.processes():
            self._log.warning("the command ended and left %d process(es) behind, ending them.", len(left))
            stop(reaper, signal.SIGTERM, HANDLERS_TIME)

    def _pass_on(self, received: Received, reaper: Reaper) -> int | None:
        if self._double_press.is_second(received):
            # It means now, whatever the command makes of the first press.
            stop(reaper, signal.SIGKILL, 0.0)
            return 128 + signal.SIGINT
        # What a terminal says to all in front of it, the command has heard already.
        if not received.from_kernel and not reaper.owns(received.sender):
            reaper.signal(received.signal)
        return None

    def _kill_idle(self, reaper: Reaper, idle: Sequence[str]) -> int:
        self._log.error("%s Killing process.", self._watch.idle_in_words(idle))
        if self._signum is not None:
            self._signal_first(self._signum, reaper)
        return self._kill(reaper)

    def _signal_first(self, signum: signal.Signals, reaper: Reaper) -> None:
        job = () if reaper.job is None else (reaper.job,)
        for process in _deepest_first(reaper.processes()) if self._children else job:
            self._log.info("Sending signal %s to process %d", signum.name, process.pid)
            send(process, signum)
        poll = select.poll()
        poll.register(reaper.fileno(), select.POLLIN)
        ends = time.monotonic() + HANDLERS_TIME
        while not reaper.empty and (left := ends - time.monotonic()) > 0:
            poll.poll(left * 1000)
            reaper.update()

    def _kill(self, reaper: Reaper) -> int:
        self._killed = True
        if reaper.processes():
            self._log.error("process still alive, maybe hung, killing.")
        for survivor in stop(reaper, signal.SIGKILL, 0.0).survivors:
            self._log.error("could not be killed: %s", survivor)
        return KILLED


def _wait(reaper: Reaper, signals: SignalStream, sampler: Sampler | None) -> None:
    poll = select.poll()
    poll.register(reaper.fileno(), select.POLLIN)
    poll.register(signals.fileno(), select.POLLIN)
    if sampler is None:
        poll.poll()
        return
    if sampler.fileno() >= 0:
        poll.register(sampler.fileno(), select.POLLIN)
    poll.poll(max(sampler.due() - time.monotonic(), 0) * 1000)


def _deepest_first(processes: Iterable[Identity]) -> list[Identity]:
    """Children before their parents, which might otherwise start new ones."""
    parents = {process.pid: found.parent for process in processes if (found := stat(process.pid))}

    def depth(process: Identity) -> int:
        steps, pid = 0, process.pid
        while (pid := parents.get(pid, 0)) in parents and steps < len(parents):
            steps += 1
        return steps

    return sorted(processes, key=depth, reverse=True)
