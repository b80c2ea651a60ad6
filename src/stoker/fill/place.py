"""A seat and who sits on it: what was decided, carried out on real processes."""

import math
import time
from collections.abc import Callable, Collection, Sequence

from stoker.errors import StokerError
from stoker.fill.checkpoint import Toggle, tool
from stoker.fill.seat import Seat, Sight, Start, Stop
from stoker.fill.tenant import Tenant
from stoker.gpus.model import Gpu
from stoker.runs.processes import Identity, is_alive


class Place:
    """One seat with its program, in an event loop."""

    def __init__(self, seat: Seat, gpus: Sequence[Gpu], mark: str, tell: Callable[[str], None]) -> None:
        self.seat = seat
        self.gpus = tuple(gpus)
        self.mark = mark
        self.tenant: Tenant | None = None
        self.set_aside = False
        """Whether the program lives on without GPU memory, and can be taken back."""
        self.left_by_earlier: Identity | None = None
        """The guardian of a program that an earlier filler started: it is stopping it."""
        self._toggle: Toggle | None = None
        self._tell = tell

    @property
    def name(self) -> str:
        indices = ", ".join(str(gpu.index) for gpu in self.gpus)
        return f"{self.seat.program.name} on GPU{'s' if len(self.gpus) > 1 else ''} {indices}"

    @property
    def occupied(self) -> bool:
        """Whether a program of ours is on the GPUs."""
        return self.tenant is not None and not self.set_aside

    def descriptors(self) -> list[int]:
        found = [] if self.tenant is None or self.tenant.gone else [self.tenant.fileno()]
        return found if self._toggle is None else [*found, self._toggle.fileno()]

    def helpers(self) -> list[int]:
        """Children of this process that are no background program's own."""
        found = [] if self.tenant is None else [self.tenant.guardian]
        pid = self._toggle.pid if self._toggle is not None else None
        return found if pid is None else [*found, pid]

    def due(self, now: float) -> float:
        ends = [self.seat.due(now)]
        if self.tenant is not None:
            ends.append(self.tenant.due())
        if self._toggle is not None:
            ends.append(self._toggle.due())
        if self.left_by_earlier is not None:
            ends.append(now + 0.2)
        return min(ends, default=math.inf)

    def owns(self, pid: int) -> bool:
        return self.tenant is not None and self.tenant.owns(pid)

    def decide(
        self,
        seen: dict[str, Sight],
        veto: str | None,
        present: Sequence[Gpu],
        helpers: Callable[[], Collection[int]],
    ) -> None:
        if self.left_by_earlier is not None:
            if is_alive(self.left_by_earlier):
                self.seat.why = "what an earlier Stoker started here is being stopped"
                return
            self.left_by_earlier = None
        now = time.monotonic()
        match self.seat.decide(now, seen, veto):
            case Start():
                self._start(now, present, helpers)
            case Stop(reason=reason):
                self._tell(f"{self.name}: stops, {reason}")
                self.seat.stopping(now, reason)
                self._make_room()

    def attend(self) -> None:
        """Takes note of what became of the program."""
        if self._toggle is not None:
            self._attend_toggle(self._toggle)
        if self.tenant is None:
            return
        self.tenant.attend()
        if self.tenant.gone:
            self._gone(self.tenant)

    def leave(self, grace: float | None = None) -> None:
        """The filler ends, and its programs with it."""
        if self.tenant is not None:
            if self.seat.doing == "running":
                self.seat.leaving(time.monotonic())
            if self._toggle is None and self.set_aside:
                grace = 0.0  # it cannot hear anything while it is set aside
            self.tenant.stop(grace)

    def _start(self, now: float, present: Sequence[Gpu], helpers: Callable[[], Collection[int]]) -> None:
        if self.tenant is not None and self.set_aside:
            self._begin_toggle(self.tenant)
            self.seat.why = "taken back from where it was set aside"
            return
        try:
            tenant = Tenant(self.seat.program, self.gpus, present, self.mark, helpers)
        except (StokerError, OSError) as error:
            self.seat.could_not_start(now, str(error))
            self._tell(f"{self.name}: could not be started: {error}")
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

    def _begin_toggle(self, tenant: Tenant) -> None:
        path = tool()
        if path is None or tenant.job is None:
            self._tell(f"{self.name}: there is no cuda-checkpoint here, so it is stopped")
            tenant.stop()
            return
        self._toggle = Toggle(path, [tenant.job.pid], self.seat.program.checkpoint_timeout)
        self._attend_toggle(self._toggle)

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
        else:
            self._tell(f"{self.name}: {toggle.why}; it is stopped")
            if self.seat.doing == "away":
                self.seat.stopping(now, toggle.why)
            if self.tenant is not None:
                self.tenant.stop()

    def _gone(self, tenant: Tenant) -> None:
        now = time.monotonic()
        self.tenant = None
        self.set_aside = False
        if self.seat.doing == "stopping":
            self.seat.gone(now)
            self._tell(f"{self.name}: has stopped")
        else:
            how = tenant.ended or "ended"
            self._tell(f"{self.name}: {how}")
            self.seat.died(now, how)
