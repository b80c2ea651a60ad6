"""Processes of background programs: the program of a slot, and leftovers of an earlier filler."""

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from stoker.errors import StokerError
from stoker.fill.config import Background
from stoker.fill.slot import Slot, SlotView, StartProgram, StopProgram
from stoker.gpus.model import Gpu
from stoker.gpus.visible import set_visible_gpus
from stoker.procfs import Identity, is_alive, is_gone
from stoker.runs.loop import CommandHandler, CommandLoop
from stoker.runs.processes.reaper import Failed, Program, exit_code, launch
from stoker.runs.processes.reaper_process import REAPER_NAME
from stoker.runs.processes.termination import Termination
from stoker.runs.processes.tree import environments, has_ancestor_named, send

# In the environment of every process of a background program, so that the next filler finds leftovers.
TAG: Final = "STOKER_FILL"


class BackgroundProcess(CommandHandler[bool]):
    """A program under a reaper, for an event loop. `update` is due when the reaper is readable, or at `due()`."""

    def __init__(
        self,
        program: Background,
        gpus: Sequence[Gpu],
        present: Sequence[Gpu],
        tag: str,
        helpers: Callable[[], Collection[int]],
    ) -> None:
        """Raises StokerError if its log cannot be written."""
        self._program = program
        self.ended: str | None = None
        """How it exited by itself, or why it could not start."""
        self.gone = False
        self._termination: Termination | None = None
        output = _opened(program.log)
        try:
            self.reaper = launch(
                Program(
                    program.command if program.nice is None else ("nice", "-n", str(program.nice), *program.command),
                    _environment(program, gpus, present, tag),
                    program.directory,
                    output,
                    session=True,
                ),
                signum=signal.SIGTERM,
                grace=program.grace,
                helpers=helpers,
            )
        finally:
            if output is not None:
                os.close(output)
        self._loop = CommandLoop(self, self.reaper)
        self.update()

    def due(self) -> float:
        """The due time in monotonic seconds."""
        if self.gone:
            return -math.inf
        return time.monotonic() + self._termination.timeout() if self._termination is not None else math.inf

    def stop(self) -> None:
        """Stops it; it is killed after its grace."""
        if not self.gone:
            self._terminate()
            self.update()

    def _terminate(self) -> None:
        if self._termination is None:
            first = self.reaper.job if self.reaper.status is None else None
            self._termination = Termination(self.reaper, signum=signal.SIGTERM, grace=self._program.grace, first=first)

    def hurry(self) -> None:
        """Ends the grace."""
        if self._termination is not None:
            self._termination.hurry()

    def update(self) -> None:
        """Handles events, and sets `ended` and `gone`."""
        if not self.gone and self._loop.step():
            self.gone = True
            self.reaper.close()

    # Events of the loop

    def on_tick(self) -> bool | None:
        return True if self._termination is not None and self._termination.step() else None

    def on_start_failed(self, failed: Failed) -> bool:
        self.ended = f"cannot run {self._program.command[0]!r}: {failed.why}"
        return True

    def on_exit(self, status: int) -> None:
        if self._termination is None:
            self.ended = f"ended with code {exit_code(status)}"
            # Its leftover processes must not stay on the GPU.
            self._terminate()

    def on_reaper_killed(self) -> None:
        self.ended = self.ended or "its reaper was killed"
        self._terminate()


def _opened(log: str | None) -> int | None:
    if log is None:
        return None
    try:
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StokerError(f"the log {log} cannot be written: {(error.strerror or 'no reason given').lower()}") from None


def _environment(program: Background, gpus: Sequence[Gpu], present: Sequence[Gpu], tag: str) -> Mapping[str, str]:
    """The environment of a program: the caller's with its own variables, and only its GPUs visible."""
    environment = dict(os.environ)
    for name in ("STOKER_RUN", "STOKER_RUN_DIR"):
        environment.pop(name, None)
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    environment |= program.environment
    set_visible_gpus(environment, gpus, present)
    environment[TAG] = tag
    return environment


class SlotRunner:
    """Carries out the decisions of a slot on its program, in an event loop."""

    def __init__(self, slot: Slot, gpus: Sequence[Gpu], tag: str, log: Callable[[str], None]) -> None:
        self.slot = slot
        self.gpus = tuple(gpus)
        self.process: BackgroundProcess | None = None
        self._tag = tag
        indices = ", ".join(str(gpu.index) for gpu in gpus)
        self._name = f"{slot.program.name} on GPU{'s' if len(gpus) > 1 else ''} {indices}"
        self._log = log

    def due(self, now: float) -> float:
        return min(self.slot.due(now), self.process.due() if self.process is not None else math.inf)

    def decide(
        self,
        seen: Mapping[str, SlotView],
        veto: str | None,
        present: Sequence[Gpu],
        helpers: Callable[[], Collection[int]],
    ) -> bool:
        """Carries out the slot's decision. True for a start, which takes time."""
        now = time.monotonic()
        match self.slot.decide(now, seen, veto):
            case StartProgram():
                self._start(now, present, helpers)
                return True
            case StopProgram(reason=reason):
                self._log(f"{self._name}: stops, {reason}")
                self.slot.stopping(now, reason)
                if self.process is not None:
                    self.process.stop()
        return False

    def update(self) -> None:
        """Handles events of the program."""
        if self.process is None:
            return
        self.process.update()
        if not self.process.gone:
            return
        now, how = time.monotonic(), self.process.ended or "ended"
        self.process = None
        if self.slot.state == "stopping":
            self.slot.gone(now)
            self._log(f"{self._name}: has stopped")
        else:
            self.slot.died(now, how)
            self._log(f"{self._name}: {self.slot.setback(now) or how}")

    def leave(self) -> None:
        """Stops the program when the filler ends."""
        if self.process is not None:
            if self.slot.state != "stopping":
                self.slot.stopping(time.monotonic(), "the filler ends", preempted=False)
            self.process.stop()

    def _start(self, now: float, present: Sequence[Gpu], helpers: Callable[[], Collection[int]]) -> None:
        try:
            self.process = BackgroundProcess(self.slot.program, self.gpus, present, self._tag, helpers)
        except (StokerError, OSError) as error:
            self.slot.could_not_start(now, str(error))
            self._log(f"{self._name}: {self.slot.setback(now)}")
            return
        self.slot.started(now)
        self._log(f"{self._name}: started")
        self.update()


# The reaper of a killed filler may be about to start its program. After this time the program can be found.
_SETTLING: Final = 0.5
_BETWEEN_SWEEPS: Final = 0.2
# A reaper kills its program at the end of the grace; a process alive this much later has no reaper.
_REAPERS_SHARE: Final = 5.0


class Leftovers:
    """Programs of earlier fillers with the same home. Nothing starts before `gone`."""

    def __init__(self, tag: str, reapers: Sequence[Identity], grace: float, now: float) -> None:
        """`tag`: the prefix of all tags. `grace`: the longest grace of any program."""
        self._tag = f"{TAG}={tag}".encode(errors="surrogateescape")
        self.reapers = list(reapers)
        self._grace = grace
        self._started = now
        self._due = now
        self._asked: dict[Identity, float] = {}
        """When processes without a reaper got SIGTERM."""
        self.found = False
        """There were leftovers."""
        self.gone = False

    def due(self) -> float:
        return self._due

    def update(self, now: float) -> None:
        """Searches for leftovers when that is due, and stops them."""
        if self.gone or now < self._due:
            return
        self._due = now + _BETWEEN_SWEEPS
        try:
            left = self._tagged()
        except OSError:
            return  # out of descriptors, so an empty result proves nothing
        self.reapers = [reaper for reaper in self.reapers if not is_gone(reaper)]
        self.found = self.found or bool(left or self.reapers)
        self.gone = not left and not self.reapers and now >= self._started + _SETTLING
        for who in left:
            if not has_ancestor_named(who, REAPER_NAME):
                self._stop(who, now)
            elif now >= self._started + self._grace + _REAPERS_SHARE:
                send(who, signal.SIGKILL)

    def _stop(self, who: Identity, now: float) -> None:
        """Stops a process whose reaper was also killed."""
        if who not in self._asked:
            self._asked[who] = now
            send(who, signal.SIGTERM)
            send(who, signal.SIGCONT)
        elif now >= self._asked[who] + self._grace:
            send(who, signal.SIGKILL)

    def _tagged(self) -> list[Identity]:
        return [
            who
            for who, environment in environments(self._tag)
            if any(variable.startswith(self._tag) for variable in environment) and is_alive(who)
        ]
