"""Other users of each GPU, from the driver's list of processes and the holders of device nodes."""

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
    """The other users according to the last look and the last scan."""

    def __init__(
        self,
        is_own: Callable[[int], bool],
        ignored: Mapping[str, Collection[str]],
        *,
        holders_suffice: Callable[[str], bool] = lambda _uuid: False,
    ) -> None:
        """`ignored`: patterns of ignored programs, by GPU uuid.

        `holders_suffice`: judges a GPU by the holders of its node if its driver reports neither utilization nor
        processes.
        """
        self._is_own = is_own
        self._ignored = ignored
        self._holders_suffice = holders_suffice
        self._look: Look | None = None
        self._by_gpu: Mapping[str, tuple[DeviceHolder, ...]] = {}
        # Owners are determined while processes live: an ended child of our program has no parent, and an ended stranger
        # may have a successor that only the next scan shows.
        self._clients: frozenset[Identity] = frozenset()
        """Foreign processes listed by the driver."""
        self._openers: frozenset[Identity] = frozenset()
        """Foreign holders of nodes."""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self._look.gpus if self._look is not None else ()

    def looked(self, look: Look) -> None:
        self._look = look
        listed = [reading.processes for reading in look.readings if known(reading.processes)]
        self._clients = self._others(process for processes in listed for process in processes)

    def lost(self) -> None:
        """Forgets everything, since the GPUs are gone."""
        self._look = None

    def scanned(self, scan: Scan) -> frozenset[str]:
        """Processes a scan, and returns the GPUs with changed holders."""
        before, self._by_gpu = self._by_gpu, scan.by_gpu
        self._openers = self._others(holder for holders in scan.by_gpu.values() for holder in holders)
        return frozenset(uuid for uuid, holders in scan.by_gpu.items() if before.get(uuid, ()) != holders)

    def views(self, occupied: Collection[str]) -> dict[str, SlotView]:
        """The state of each GPU. `occupied`: the GPUs with a program of ours."""
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
        """A foreign holder of the device node."""
        for holder in self._by_gpu.get(uuid, ()):
            is_other = Identity(holder.pid, holder.started) in self._openers
            if is_other and not is_ignored(self._ignored.get(uuid, ()), holder.name, holder.executable):
                return f"{holder.user}'s {holder.executable or holder.name} (pid {holder.pid})"
        return None

    def _client(self, uuid: str, reading: Reading, is_occupied: bool) -> str | None:
        """A foreign process listed by the driver."""
        if not known(reading.processes):
            return None
        for process in reading.processes:
            if self._is_stranger(uuid, process, is_occupied):
                return describe(process)
        return None

    def _is_stranger(self, uuid: str, process: Process, is_occupied: bool) -> bool:
        if not known(process.started):
            # A pid from another namespace most likely belongs to our program, if one runs there.
            return not is_occupied
        name = process.name if known(process.name) else ""
        is_other = Identity(process.pid, process.started) in self._clients
        return is_other and not is_ignored(self._ignored.get(uuid, ()), name)

    def _others(self, those: Iterable[DeviceHolder | Process]) -> frozenset[Identity]:
        """The foreign ones. The order matters: a process that has just ended looks foreign."""
        seen = {Identity(one.pid, one.started) for one in those if known(one.started)}
        return frozenset(who for who in seen if not self._is_own(who.pid) and is_alive(who))


def _answers(reading: Reading) -> bool:
    """True if the driver answers for this GPU at all, even that a value is unsupported."""
    values = (reading.utilization, reading.processes, reading.memory_used, reading.power, reading.temperature)
    return any(not isinstance(value, Unknown) or value.reason == NOT_SUPPORTED for value in values)


# A monitor that opens the nodes all day must not cause much load here.
_SHARE: Final = 0.05
"""The long-term share of a core for scans."""
_SAVINGS: Final = 0.5
"""Seconds of CPU time saved in quiet times for bursts of events."""
# The limit of delays, in which a waiting user is seen despite many events.
_LONGEST_GAP: Final = 0.3


class ScanPacer:
    """Limits the CPU time of scans: a scan follows an event at once, unless events come too often."""

    def __init__(self, now: float) -> None:
        self._credit = _SAVINGS
        self._at = now

    def soonest(self, now: float) -> float:
        """The earliest time of the next scan."""
        credit = self._credit_at(now)
        return now if credit >= 0 else now - credit / _SHARE

    def spent(self, now: float, seconds: float) -> None:
        # The debt is limited to what the longest gap repays.
        self._credit = max(self._credit_at(now) - seconds, -_LONGEST_GAP * _SHARE)
        self._at = now

    def _credit_at(self, now: float) -> float:
        return min(_SAVINGS, self._credit + (now - self._at) * _SHARE)
