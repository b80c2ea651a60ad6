"""A seat and who sits on it: what was decided, carried out on real processes."""

import math
import time
from collections.abc import Callable, Collection, Sequence

from stoker.errors import StokerError
from stoker.fill.background_process import BackgroundProcess
from stoker.fill.checkpoint import Toggle, tool
from stoker.fill.slot import Slot, SlotView, StartProgram, StopProgram
from stoker.gpus.model import Gpu


class Place:
    """One seat with its program, in an event loop."""

    def __init__(self, seat: Slot, gpus: Sequence[Gpu], mark: str, tell: Callable[[str], None]) -> None:
        self.seat = seat
        self.gpus = tuple(gpus)
        self.mark = mark
        self.tenant: BackgroundProcess | None = None
        self.set_aside = False
        """Whether the program lives on without GPU memory, and can be taken back."""
        self._toggle: Toggle | None = None
        self._tell = tell

    @property
    def name(self) -> str:
        indices = ", ".join(str(gpu.index) for gpu in self.gpus)
        return f"{self.seat.program.name} on GPU{'s' if len(self.gpus) > 1 else ''} {indices}"

    @property
    def occupied(self) -> bool:
        """Whether a program of ours is on the GPUs."""
        return self.tenant is not None and (not self.set_aside or self._toggle is not None)

    def descriptors(self) -> list[int]:
        found = [] if self.tenant is None or self.tenant.gone else [self.tenant.fileno()]
        return found if self._toggle is None else [*found, self._toggle.fileno()]

    def helpers(self) -> list[int]:
        """Children of this process that are no background program's own."""
        found = [] if self.tenant is None else [self.tenant.reaper]
        pid = self._toggle.pid if self._toggle is not None else None
        return found if pid is None else [*found, pid]

    def due(self, now: float) -> float:
        # What a seat decides while its program is being taken back waits until it is back.
        ends = [self.seat.due(now)] if self._toggle is None else []
        if self.tenant is not None:
            ends.append(self.tenant.due())
        if self._toggle is not None:
            ends.append(self._toggle.due())
        return min(ends, default=math.inf)

    def owns(self, pid: int) -> bool:
        return self.tenant is not None and self.tenant.owns(pid)

    def decide(
        self,
        seen: dict[str, SlotView],
        veto: str | None,
        present: Sequence[Gpu],
        helpers: Callable[[], Collection[int]],
    ) -> bool:
        """Does what is to be done now; whether that was a start, which takes its time."""
        now = time.monotonic()
        match self.seat.decide(now, seen, veto):
            case StartProgram() if self._toggle is not None:
                self.seat.why = "taken back from where it was set aside"
            case StartProgram():
                self._start(now, present, helpers)
                return True
            case StopProgram(reason=reason):
                self._tell(f"{self.name}: stops, {reason}")
                self.seat.stopping(now, reason)
                self._make_room()
        return False

    def attend(self) -> None:
        """Takes note of what became of the program."""
        if self._toggle is not None:
            self._attend_toggle(self._toggle)
        if self.tenant is None:
            return
        self.tenant.update()
        if self.tenant.gone:
            self._gone(self.tenant)

    def leave(self, grace: float | None = None) -> None:
        """The filler ends, and its programs with it."""
        if self.tenant is not None:
            if self.seat.doing != "stopping":
                self.seat.leaving(time.monotonic())
            if self.set_aside:
                grace = 0.0  # it cannot hear anything while it is set aside
            self._abandon_toggle()
            self.tenant.stop(grace)

    def _start(self, now: float, present: Sequence[Gpu], helpers: Callable[[], Collection[int]]) -> None:
        if self.tenant is not None and self.set_aside:
            self._begin_toggle(self.tenant)
            self.seat.why = "taken back from where it was set aside"
            return
        try:
            tenant = BackgroundProcess(self.seat.program, self.gpus, present, self.mark, helpers)
        except (StokerError, OSError) as error:
            self.seat.could_not_start(now, str(error))
            self._tell(f"{self.name}: {self.seat.setback(now)}")
            return
        self.seat.started(now)
        self.tenant = tenant
        self._tell(f"{self.name}: started")
        self.attend()

    def _make_room(self) -> None:
        if self.tenant is None:
            return
        if self.seat.program.preempt == "checkpoint" and not self.set_aside and self._toggle is None:
            self._begin_toggle(self.tenant)
        else:
            self.tenant.stop()

    def _begin_toggle(self, tenant: BackgroundProcess) -> None:
        path = tool()
        if path is None or tenant.job is None:
            self._give_up(tenant, "there is no cuda-checkpoint here")
            return
        self._toggle = Toggle(path, [tenant.job.pid], self.seat.program.checkpoint_timeout)
        self._attend_toggle(self._toggle)

    def _abandon_toggle(self) -> None:
        if self._toggle is not None:
            self._toggle.abandon()
            self._toggle = None

    def _attend_toggle(self, toggle: Toggle) -> None:
        toggle.attend()
        if toggle.ok is None:
            return
        self._toggle = None
        now = time.monotonic()
        if toggle.ok and not self.set_aside:
            self.set_aside = True
            self._tell(f"{self.name}: is set aside")
            self.seat.gone(now)
        elif toggle.ok:
            self.set_aside = False
            self._tell(f"{self.name}: goes on")
            self.seat.started(now)
        elif self.tenant is not None:
            self._give_up(self.tenant, toggle.why)

    def _give_up(self, tenant: BackgroundProcess, why: str) -> None:
        """It can be neither set aside nor taken back."""
        self._tell(f"{self.name}: {why}; it is stopped")
        if self.seat.doing == "away":
            self.seat.stopping(time.monotonic(), why)
        tenant.stop()

    def _gone(self, tenant: BackgroundProcess) -> None:
        now = time.monotonic()
        self._abandon_toggle()
        self.tenant = None
        self.set_aside = False
        if self.seat.doing == "stopping":
            self.seat.gone(now)
            self._tell(f"{self.name}: has stopped")
        else:
            how = tenant.ended or "ended"
            self.seat.died(now, how)
            self._tell(f"{self.name}: {self.seat.setback(now) or how}")
