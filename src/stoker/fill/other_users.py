"""Who else is on each GPU: the driver's list of processes and the holders of the device nodes, put together."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from stoker.fill.slot import SlotView
from stoker.gpus.model import NOT_SUPPORTED, Gpu, Look, Process, Reading, Unknown, known
from stoker.gpus.report import describe
from stoker.presence.holders import DeviceHolder, Scan
from stoker.presence.ignoring import is_ignored
from stoker.procfs import Identity, is_alive
from stoker.units import format_percent

# More than a display or a monitor causes.
WORKING: Final = 0.05


class OtherUsers:
    """What the last look and the last scan showed of everybody else."""

    def __init__(
        self,
        is_own: Callable[[int], bool],
        ignored: Mapping[str, Collection[str]],
        *,
        holders_suffice: Callable[[str], bool] = lambda _uuid: False,
    ) -> None:
        """`ignored`: by the uuid of a GPU, patterns of the programs on it that do not count.

        `holders_suffice`: whether the holders of a GPU's node are enough to judge it by, where its driver reports
        neither utilization nor processes.
        """
        self._is_own = is_own
        self._ignored = ignored
        self._holders_suffice = holders_suffice
        self._look: Look | None = None
        self._by_gpu: Mapping[str, tuple[DeviceHolder, ...]] = {}
        # Found out while they live: an ended child of our own program is nobody's child any more, and an ended
        # stranger may have been followed by another that only the next scan shows.
        self._clients: frozenset[Identity] = frozenset()
        """Processes that the driver lists and that are not ours."""
        self._openers: frozenset[Identity] = frozenset()
        """Those who hold a node and are not ours."""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self._look.gpus if self._look is not None else ()

    def looked(self, look: Look) -> None:
        self._look = look
        listed = [reading.processes for reading in look.readings if known(reading.processes)]
        self._clients = self._others(process for processes in listed for process in processes)

    def lost(self) -> None:
        """There is nothing to look at any more."""
        self._look = None

    def scanned(self, scan: Scan) -> frozenset[str]:
        """The GPUs that have other holders than before."""
        before, self._by_gpu = self._by_gpu, scan.by_gpu
        self._openers = self._others(holder for holders in scan.by_gpu.values() for holder in holders)
        return frozenset(uuid for uuid, holders in scan.by_gpu.items() if before.get(uuid, ()) != holders)

    def views(self, occupied: Collection[str]) -> dict[str, SlotView]:
        """What is seen of each GPU; `occupied`: those on which a program of ours runs."""
        if self._look is None:
            return {}
        readings = {reading.uuid: reading for reading in self._look.readings}
        return {
            gpu.uuid: self._view(gpu.uuid, readings[gpu.uuid], gpu.uuid in occupied)
            for gpu in self._look.gpus
            if gpu.uuid in readings
        }

    def _view(self, uuid: str, reading: Reading, is_occupied: bool) -> SlotView:
        stranger = self._opener(uuid) or self._client(uuid, reading, is_occupied)
        if stranger is not None:
            return SlotView(False, f"used by {stranger}")
        for value in (reading.processes, reading.utilization):
            if isinstance(value, Unknown) and not (_answers(reading) and self._holders_suffice(uuid)):
                return SlotView(None, value.reason)
        used = reading.utilization
        if not is_occupied and known(used) and used.peak >= WORKING:
            return SlotView(False, f"{format_percent(used.peak)} busy with nobody seen there")
        return SlotView(True, "")

    def _opener(self, uuid: str) -> str | None:
        """Another user's process that holds the device node."""
        for holder in self._by_gpu.get(uuid, ()):
            is_other = Identity(holder.pid, holder.started) in self._openers
            if is_other and not is_ignored(self._ignored.get(uuid, ()), holder.name, holder.executable):
                return f"{holder.user}'s {holder.executable or holder.name} (pid {holder.pid})"
        return None

    def _client(self, uuid: str, reading: Reading, is_occupied: bool) -> str | None:
        """A process that the driver lists."""
        if not known(reading.processes):
            return None
        for process in reading.processes:
            if self._is_stranger(uuid, process, is_occupied):
                return describe(process)
        return None

    def _is_stranger(self, uuid: str, process: Process, is_occupied: bool) -> bool:
        if not known(process.started):
            # A pid of another namespace: where a program of ours runs, it is most likely that.
            return not is_occupied
        name = process.name if known(process.name) else ""
        is_other = Identity(process.pid, process.started) in self._clients
        return is_other and not is_ignored(self._ignored.get(uuid, ()), name)

    def _others(self, those: Iterable[DeviceHolder | Process]) -> frozenset[Identity]:
        """Those that are not ours. In this order: one that ended just now cannot be distinguished from them."""
        seen = {Identity(one.pid, one.started) for one in those if known(one.started)}
        return frozenset(who for who in seen if not self._is_own(who.pid) and is_alive(who))


def _answers(reading: Reading) -> bool:
    """Whether the driver answers for this GPU at all, if only that it does not support a value."""
    values = (reading.utilization, reading.processes, reading.memory_used, reading.power, reading.temperature)
    return any(not isinstance(value, Unknown) or value.reason == NOT_SUPPORTED for value in values)


# A monitor that opens the nodes all day long must not cause much load here.
_SHARE: Final = 0.05
"""Of a core, for scans in the long run."""
_SAVINGS: Final = 0.5
"""Seconds of processor time saved in quiet times for bursts of events."""
# However many events there are: a user who waits for a GPU is seen within this.
_LONGEST_GAP: Final = 0.3


class ScanPacer:
    """Limits the processor time of scans: a scan follows an event at once, unless events come too often."""

    def __init__(self, now: float) -> None:
        self._credit = _SAVINGS
        self._at = now

    def soonest(self, now: float) -> float:
        """When the next scan may be."""
        credit = self._credit_at(now)
        return now if credit >= 0 else now - credit / _SHARE

    def spent(self, now: float, seconds: float) -> None:
        # The debt is limited to what the longest gap repays.
        self._credit = max(self._credit_at(now) - seconds, -_LONGEST_GAP * _SHARE)
        self._at = now

    def _credit_at(self, now: float) -> float:
        return min(_SAVINGS, self._credit + (now - self._at) * _SHARE)
