"""Carries out the decisions of a slot on real processes: start, stop, checkpoint, restore."""

import contextlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Sequence

from stoker.errors import StokerError
from stoker.fill.background_process import BackgroundProcess
from stoker.fill.slot import Slot, SlotView, StartProgram, StopProgram
from stoker.gpus.model import Gpu

TOOL = "cuda-checkpoint"


def tool() -> str | None:
    """The path of cuda-checkpoint, if it is installed."""
    return shutil.which(TOOL)


class Toggle:
    """cuda-checkpoint at work on some processes, one after another: it moves GPU memory to the host, or back."""

    def __init__(self, path: str, pids: Sequence[int], timeout: float) -> None:
        self._path = path
        self._left = list(pids)
        self._ends = time.monotonic() + timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.ok: bool | None = None
        """Whether it worked; None while it runs."""
        self.why = ""
        self._next()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def fileno(self) -> int:
        return self._pidfd

    def due(self) -> float:
        return self._ends

    def update(self) -> None:
        """Handles what happened since. After its timeout it has failed."""
        while self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            said = (self._process.stderr.read() if self._process.stderr else b"").decode(errors="replace").strip()
            self._forget()
            if code != 0:
                self._fail(f"{TOOL} ended with code {code}{': ' + said.splitlines()[-1] if said else ''}")
                return
            self._next()
        if self._process is not None and time.monotonic() >= self._ends:
            self.abandon()
            self._fail(f"{TOOL} did not end in time")

    def abandon(self) -> None:
        """Kills the tool: its program is being stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()
            self._fail("it was abandoned")

    def _next(self) -> None:
        if not self._left:
            self.ok = True
            return
        pid = self._left.pop(0)
        try:
            self._process = subprocess.Popen(
                [self._path, "--toggle", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._fail(f"{TOOL} cannot be run: {(error.strerror or 'no reason given').lower()}")

    def _fail(self, why: str) -> None:
        self.ok = False
        self.why = why

    def _forget(self) -> None:
        if self._process is not None and self._process.stderr is not None:
            self._process.stderr.close()
        self._process = None
        with contextlib.suppress(OSError):
            if self._pidfd >= 0:
                os.close(self._pidfd)
        self._pidfd = -1


class SlotRunner:
    """One slot with its program, in an event loop."""

    def __init__(self, slot: Slot, gpus: Sequence[Gpu], tag: str, log: Callable[[str], None]) -> None:
        self.slot = slot
        self.gpus = tuple(gpus)
        self.tag = tag
        self.process: BackgroundProcess | None = None
        self.checkpointed = False
        """Whether the program is checkpointed: alive without GPU memory."""
        self._toggle: Toggle | None = None
        self._log = log

    @property
    def name(self) -> str:
        indices = ", ".join(str(gpu.index) for gpu in self.gpus)
        return f"{self.slot.program.name} on GPU{'s' if len(self.gpus) > 1 else ''} {indices}"

    @property
    def occupied(self) -> bool:
        """Whether the background program is on the GPUs."""
        return self.process is not None and (not self.checkpointed or self._toggle is not None)

    def descriptors(self) -> list[int]:
        found = [] if self.process is None or self.process.gone else [self.process.fileno()]
        return found if self._toggle is None else [*found, self._toggle.fileno()]

    def helpers(self) -> list[int]:
        """Children of this process that do not belong to the background program."""
        found = [] if self.process is None else [self.process.reaper]
        pid = self._toggle.pid if self._toggle is not None else None
        return found if pid is None else [*found, pid]

    def due(self, now: float) -> float:
        # Decisions wait while the program is being restored.
        ends = [self.slot.due(now)] if self._toggle is None else []
        if self.process is not None:
            ends.append(self.process.due())
        if self._toggle is not None:
            ends.append(self._toggle.due())
        return min(ends, default=math.inf)

    def owns(self, pid: int) -> bool:
        return self.process is not None and self.process.owns(pid)

    def decide(
        self,
        seen: dict[str, SlotView],
        veto: str | None,
        present: Sequence[Gpu],
        helpers: Callable[[], Collection[int]],
    ) -> bool:
        """Carries out what the slot decides; returns whether that was a start, which takes time."""
        now = time.monotonic()
        match self.slot.decide(now, seen, veto):
            case StartProgram() if self._toggle is not None:
                self.slot.why = "being restored from its checkpoint"
            case StartProgram():
                self._start(now, present, helpers)
                return True
            case StopProgram(reason=reason):
                self._log(f"{self.name}: stops, {reason}")
                self.slot.stopping(now, reason)
                self._make_room()
        return False

    def update(self) -> None:
        """Handles what became of the program."""
        if self._toggle is not None:
            self._update_toggle(self._toggle)
        if self.process is None:
            return
        self.process.update()
        if self.process.gone:
            self._gone(self.process)

    def leave(self, grace: float | None = None) -> None:
        """Stops the program because the filler ends."""
        if self.process is not None:
            if self.slot.state != "stopping":
                self.slot.leaving(time.monotonic())
            if self.checkpointed:
                grace = 0.0  # a checkpointed program handles no signals
            self._abandon_toggle()
            self.process.stop(grace)

    def _start(self, now: float, present: Sequence[Gpu], helpers: Callable[[], Collection[int]]) -> None:
        if self.process is not None and self.checkpointed:
            self._begin_toggle(self.process)
            self.slot.why = "being restored from its checkpoint"
            return
        try:
            process = BackgroundProcess(self.slot.program, self.gpus, present, self.tag, helpers)
        except (StokerError, OSError) as error:
            self.slot.could_not_start(now, str(error))
            self._log(f"{self.name}: {self.slot.setback(now)}")
            return
        self.slot.started(now)
        self.process = process
        self._log(f"{self.name}: started")
        self.update()

    def _make_room(self) -> None:
        if self.process is None:
            return
        if self.slot.program.preempt == "checkpoint" and not self.checkpointed and self._toggle is None:
            self._begin_toggle(self.process)
        else:
            self.process.stop()

    def _begin_toggle(self, process: BackgroundProcess) -> None:
        path = tool()
        if path is None or process.job is None:
            self._give_up(process, "there is no cuda-checkpoint here")
            return
        self._toggle = Toggle(path, [process.job.pid], self.slot.program.checkpoint_timeout)
        self._update_toggle(self._toggle)

    def _abandon_toggle(self) -> None:
        if self._toggle is not None:
            self._toggle.abandon()
            self._toggle = None

    def _update_toggle(self, toggle: Toggle) -> None:
        toggle.update()
        if toggle.ok is None:
            return
        self._toggle = None
        now = time.monotonic()
        if toggle.ok and not self.checkpointed:
            self.checkpointed = True
            self._log(f"{self.name}: is checkpointed")
            self.slot.gone(now)
        elif toggle.ok:
            self.checkpointed = False
            self._log(f"{self.name}: is restored")
            self.slot.started(now)
        elif self.process is not None:
            self._give_up(self.process, toggle.why)

    def _give_up(self, process: BackgroundProcess, why: str) -> None:
        """Stops a program that can be neither checkpointed nor restored."""
        self._log(f"{self.name}: {why}; it is stopped")
        if self.slot.state == "waiting":
            self.slot.stopping(time.monotonic(), why)
        process.stop()

    def _gone(self, process: BackgroundProcess) -> None:
        now = time.monotonic()
        self._abandon_toggle()
        self.process = None
        self.checkpointed = False
        if self.slot.state == "stopping":
            self.slot.gone(now)
            self._log(f"{self.name}: has stopped")
        else:
            how = process.ended or "ended"
            self.slot.died(now, how)
            self._log(f"{self.name}: {self.slot.setback(now) or how}")
