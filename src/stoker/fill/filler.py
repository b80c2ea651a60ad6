"""The filler: keeps background programs on idle GPUs, and gets them out of the way when somebody comes.

One loop waits for everything: openers of device nodes (an event each), looks at the GPUs, scans of who holds them,
terminals, and its own programs. Its programs die with it: nobody would watch for people then.
"""

import contextlib
import math
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import BadInputError
from stoker.fill.claims import Claims, gpus_to_fill, machine_of
from stoker.fill.config import FillConfig
from stoker.fill.leftovers import Leftovers
from stoker.fill.other_users import OtherUsers
from stoker.fill.pace import ScanPacer
from stoker.fill.place import Place
from stoker.fill.slot import Slot, SlotView
from stoker.fill.status import FillStatus, SlotStatus, StatusFile, wall
from stoker.gpus.model import Gpu, Look
from stoker.gpus.prober import Prober, Sampler
from stoker.gpus.source import AbsentError
from stoker.gpus.visible import device_nodes, select_gpus
from stoker.paths import is_there
from stoker.presence.device_events import DeviceEvents
from stoker.presence.holders import HolderScanner
from stoker.presence.ignoring import SHIPPED, Ignored
from stoker.presence.terminals import Terminals
from stoker.procfs import Identity, boot_id, identify, stat
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.tree import descends
from stoker.units import format_duration

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Kernel terminal times are eight seconds coarse: looking more often than that shows nothing new.
_TERMINALS_EVERY: Final = 5.0
_STATUS_EVERY: Final = 30.0
# The kernel tells of an opening just before the opener has the file: a scan at that very moment can miss him.
_SETTLED_AFTER: Final = 0.1
# Long enough for the driver to have samples of its own, short enough that nobody waits for it.
_CLEAN_AFTER: Final = 1.0


class Filler:
    """One filler from its start to its end."""

    def __init__(
        self,
        config: FillConfig,
        prober: Prober,
        home: Path,
        tell: Callable[[str], None],
        *,
        owner: str = "stoker fill",
        owner_pid: int | None = None,
        root: Path = Path("/"),
        claims: Claims | None = None,
    ) -> None:
        """`owner_pid`: the process that owns the GPUs, if it is another: what it reads them with is nobody's use.

        `claims`: the GPUs that were claimed for it already.
        """
        self._config = config
        self._prober = prober
        self._tell = tell
        self._owner = owner
        self._owner_pid = owner_pid
        self._root = root
        self._claims = claims or Claims(machine_of(prober.spec, root))
        self._host = socket.gethostname()
        self._ledger = StatusFile(home, self._host)
        self._before = self._ledger.read()
        self._lookout = Sampler(prober, config.interval)
        self._terminals = Terminals(root) if config.terminals.enabled else None
        self._places: list[Place] = []
        self._leftovers: Leftovers | None = None
        self._company = OtherUsers(self._is_own, {})
        self._holders: HolderScanner | None = None
        self._alarm: DeviceEvents | None = None
        self._has_nodes = False
        self._scan_at = math.inf
        self._rung: frozenset[str] = frozenset()
        """The GPUs whose nodes were opened or closed, and on which no scan has shown a change yet."""
        self._rung_since: frozenset[str] = frozenset()
        """Those whose nodes were opened or closed since the last scan began, which may have missed it."""
        self._settled_at = -math.inf
        """When the openers that were told of have their files for certain: a scan from then on sees them."""
        self._pace = ScanPacer(time.monotonic())
        self._look_again = False
        """Whether the next look still speaks of a time before somebody came or left."""
        self._terminals_at = 0.0
        self._person: str | None = None
        self._granted: frozenset[str] | None = None
        """The GPUs that whoever owns them leaves to this filler; None: all."""
        self._undecided = False
        """Whether a start came between what was seen and what the other programs make of it."""
        self._status_at = 0.0
        self._shown: tuple[object, ...] = ()
        self._notes: dict[str, str] = {}
        self._problem: str | None = None
        """Why the GPUs cannot be read, as it was last told."""
        self._signals = SignalStream(_STOPPING)
        self._ending = False

    def run(self) -> int:
        """Until it is asked to end; then nothing of what it started is left."""
        with contextlib.ExitStack() as goodbye:
            goodbye.callback(self._signals.close)
            goodbye.callback(self._close)
            while not self._ending or self.busy:
                self.wait([])
                self.heed_signals()
                self.step()
        return 0

    # For a loop of somebody else's

    def descriptors(self) -> list[int]:
        found = [self._lookout.fileno()]
        if self._alarm is not None:
            found.append(self._alarm.fileno())
        for place in self._places:
            found += place.descriptors()
        return [descriptor for descriptor in found if descriptor >= 0]

    def due(self) -> float:
        now = time.monotonic()
        if self._undecided:
            return now
        ends = [self._lookout.due(), self._scan_at, self._status_at]
        if self._terminals is not None:
            ends.append(self._terminals_at)
        if self._leftovers is not None:
            ends.append(self._leftovers.due())
        ends += [place.due(now) for place in self._places if place.tenant is not None or not self._awaits_scan(place)]
        return min(ends)

    def step(self) -> None:
        """Whatever there is to do."""
        self._look()
        self._hear_alarm()
        if time.monotonic() >= self._scan_at:
            self._scan()
        self._look_at_terminals()
        self._attend_leftovers()
        for place in self._places:
            place.attend()
        self._hear_alarm()
        if self._places and not self._ending:
            self._decide()
        self._write_status()

    def grant(self, uuids: frozenset[str]) -> None:
        """Whoever owns the GPUs leaves these to background programs, and no others."""
        self._granted = uuids

    def occupied(self) -> frozenset[str]:
        """The GPUs on which a background program runs."""
        return frozenset(self.occupants())

    def occupants(self) -> dict[str, str]:
        """The name of the background program that runs on each of those GPUs, by its uuid."""
        return {uuid: place.seat.program.name for place in self._places if place.occupied for uuid in place.seat.gpus}

    def end(self) -> None:
        """Stops every program; `occupied` and `step` go on until they are gone."""
        if not self._ending:
            self._ending = True
            for place in self._places:
                place.leave()

    @property
    def busy(self) -> bool:
        """Whether anything that it started is left."""
        return any(place.tenant is not None for place in self._places)

    def wait(self, also: Sequence[int]) -> None:
        poll = select.poll()
        for descriptor in (self._signals.fileno(), *also, *self.descriptors()):
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, self.due() - time.monotonic()) * 1000 + 0.5)

    def heed_signals(self) -> None:
        """A signal ends it; Ctrl-C at the terminal after that ends the patience with its programs."""
        for received in self._signals.read():
            if received.signal not in _STOPPING:
                continue
            if self._ending and received.signal == signal.SIGINT and received.from_kernel:
                for place in self._places:
                    if place.tenant is not None:
                        place.tenant.hurry()
            self.end()

    # Seeing

    def _look(self) -> None:
        try:
            look = self._lookout.step()
        except AbsentError as absent:
            self._company.lost(str(absent))
            self._note("absent", f"{absent}: there is nothing to fill")
            return
        if look is None:
            return
        self._company.looked(look)
        self._tell_problem(look)
        if self._look_again:
            self._look_again = False
            self._lookout.no_later_than(time.monotonic() + _CLEAN_AFTER)
        if not self._places and look.problem is None and look.gpus:
            self._furnish(look)

    def _furnish(self, look: Look) -> None:
        """Makes a place for every program, and begins to watch who comes. Raises a sentence when another fills them."""
        self._claims.take(gpus_to_fill(self._config, look.gpus))
        ignored = {gpu.uuid: Ignored(self._patterns(gpu, look.gpus)) for gpu in look.gpus}
        nodes = device_nodes(look.gpus, self._root)

        def holders_suffice(uuid: str) -> bool:
            return self._config.holders_suffice and any(is_there(node) for node in nodes.get(uuid, ()))

        self._company = OtherUsers(self._is_own, ignored, holders_suffice=holders_suffice)
        self._company.looked(look)
        self._holders = HolderScanner(nodes, self._root)
        self._alarm = DeviceEvents(nodes)
        self._has_nodes = any(nodes.values())
        if not self._has_nodes:
            self._note(
                "nodes", "these GPUs have no device nodes here: who uses them is seen by the driver's list alone"
            )
        elif self._alarm.why_not is not None:
            self._note("alarm", f"openers of the GPUs are seen by scans alone: {self._alarm.why_not}")
        self._leftovers = self._left_by(self._before)
        for program in self._config.programs:
            chosen = select_gpus(look.gpus, "all" if program.gpus == "all" else ",".join(program.gpus))
            groups = [(gpu,) for gpu in chosen] if program.each else [chosen]
            for gpus in groups:
                self._places.append(self._place(program.name, gpus, self._before))
        self._scan_at = time.monotonic()

    def _place(self, name: str, gpus: Sequence[Gpu], before: FillStatus | None) -> Place:
        program = next(program for program in self._config.programs if program.name == name)
        seat = Slot(program, tuple(gpu.uuid for gpu in gpus), time.monotonic())
        mark = f"{self._ledger.path}:{name}:{','.join(seat.gpus)}"
        place = Place(seat, gpus, mark, self._tell)
        earlier = _of(before, name, seat.gpus)
        if earlier is not None:
            seat.gpu_seconds, seat.preemptions = earlier.gpu_hours * 3600.0, earlier.preemptions
        return place

    def _left_by(self, before: FillStatus | None) -> Leftovers:
        known = before.seats if before is not None and before.boot == boot_id() else ()
        reapers = [Identity(*seat.reaper) for seat in known if seat.reaper is not None]
        grace = max(program.grace for program in self._config.programs)
        return Leftovers(f"{self._ledger.path}:", reapers, grace, time.monotonic())

    def _patterns(self, gpu: Gpu, gpus: Sequence[Gpu]) -> list[str]:
        patterns = list(SHIPPED) if self._config.ignore_shipped else []
        for watched in self._config.watched:
            text = "all" if watched.gpus == "all" else ",".join(watched.gpus)
            with contextlib.suppress(BadInputError):
                if gpu in select_gpus(gpus, text):
                    patterns += watched.ignore
        return patterns

    def _hear_alarm(self) -> None:
        rung = self._alarm.rung() if self._alarm is not None else frozenset()
        if rung:
            now = time.monotonic()
            self._rung |= rung
            self._rung_since |= rung
            self._settled_at = now + _SETTLED_AFTER
            self._scan_at = min(self._scan_at, self._pace.soonest(now))

    def _scan(self) -> None:
        now = time.monotonic()
        self._scan_at = now + self._config.interval
        if self._holders is None or not self._has_nodes:
            return
        self._rung_since = frozenset()
        begun = time.process_time()
        scan = self._holders.scan()
        self._pace.spent(now, time.process_time() - begun)
        changed = self._company.scanned(scan)
        self._rung = self._rung - changed if now < self._settled_at else frozenset()
        if self._rung:
            self._scan_at = min(self._scan_at, self._settled_at)
        if changed:
            self._look_again = True
            self._lookout.no_later_than(now)
        if scan.unseen:
            who = "1 process" if scan.unseen == 1 else f"{scan.unseen} processes"
            remedy = " (root sees all)" if os.geteuid() else ""
            self._note(
                "unseen",
                f"the open files of {who} may not be read by this user: "
                f"of theirs, only what the driver lists is seen{remedy}",
            )
        if self._holders.out_of_sight is not None:
            self._note("outside", self._holders.out_of_sight)

    def _look_at_terminals(self) -> None:
        now = time.monotonic()
        if self._terminals is None or now < self._terminals_at:
            return
        self._terminals_at = now + _TERMINALS_EVERY
        rule = self._config.terminals
        self._person = None
        for activity in self._terminals.activity(time.time()):
            if activity.user not in rule.whitelist and activity.idle < rule.idle_seconds:
                ago = f"{format_duration(round(activity.idle))} ago" if activity.idle >= 1 else "just now"
                self._person = f"{activity.user} was active at {activity.terminal} {ago}"
                return

    def _is_own(self, pid: int) -> bool:
        me = os.getpid()
        if pid == me or descends(pid, me) or any(place.owns(pid) for place in self._places):
            return True
        found = stat(pid) if self._owner_pid is not None else None
        return found is not None and self._owner_pid in (pid, found.parent)

    # Deciding

    def _decide(self) -> None:
        occupied = self.occupied()
        seen = self._company.sights(occupied)
        if self._granted is not None:
            for uuid in seen.keys() - self._granted:
                seen[uuid] = SlotView(False, "needed by the queue")
        veto = self._veto()
        # Who has to step aside does so before anybody starts, and one start at a time: somebody may come meanwhile.
        self._undecided = False
        for place in sorted(self._places, key=lambda place: place.seat.doing != "running"):
            if self._awaits_scan(place):
                continue
            if place.decide(seen, veto, self._company.gpus, self._helpers):
                self._undecided = True
                break

    def _awaits_scan(self, place: Place) -> bool:
        """Whether nothing is started there before the next scan, which is due.

        A scan takes its time: it misses who came while it went on, just before another left.
        """
        return place.seat.doing == "away" and not self._rung_since.isdisjoint(place.seat.gpus)

    def _veto(self) -> str | None:
        schedule = self._config.schedule
        if schedule is not None and not schedule.allows(time.localtime()):
            return "not at this hour"
        if self._leftovers is not None:
            stopping = "what an earlier Stoker started here is being stopped"
            return stopping if self._leftovers.found else "it is made sure that nothing is left of an earlier Stoker"
        return self._person

    def _attend_leftovers(self) -> None:
        if self._leftovers is not None:
            self._leftovers.attend(time.monotonic())
            if self._leftovers.gone:
                self._leftovers = None

    def _helpers(self) -> list[int]:
        helper = [] if self._prober.helper is None else [self._prober.helper]
        return [*helper, *(pid for place in self._places for pid in place.helpers())]

    # Telling

    def _tell_problem(self, look: Look) -> None:
        """Once when it begins or changes, and once when it is over."""
        problem = look.problem.reason if look.problem is not None else None
        # How long it has lasted changes from look to look, and is no news.
        kind = re.sub(r"[0-9.]+", "", problem) if problem is not None else None
        if kind == self._problem:
            return
        self._problem = kind
        if problem is None:
            self._tell("the GPUs can be read again")
        else:
            self._tell(f"the GPUs cannot be read, so nothing is started on them: {problem}")

    def _note(self, what: str, sentence: str) -> None:
        """Says it once."""
        if what not in self._notes:
            self._notes[what] = sentence
            self._tell(sentence)

    def _write_status(self) -> None:
        now = time.monotonic()
        shown = tuple((place.seat.doing, place.seat.why, place.set_aside) for place in self._places)
        if shown == self._shown and now < self._status_at:
            return
        self._shown, self._status_at = shown, now + _STATUS_EVERY
        me = identify(os.getpid())
        self._ledger.write(
            FillStatus(
                host=self._host,
                pid=os.getpid(),
                started=me.started if me else 0,
                boot=boot_id(),
                written=time.time(),
                config=self._config.source,
                owner=self._owner,
                veto=self._veto(),
                notes=tuple(self._notes.values()),
                seats=tuple(_status(place, now) for place in self._places) or _unseen(self._before),
            )
        )

    def _close(self) -> None:
        self._status_at = 0.0
        self._write_status()
        if self._alarm is not None:
            self._alarm.close()
        self._claims.close()


def _of(status: FillStatus | None, program: str, gpus: tuple[str, ...]) -> SlotStatus | None:
    if status is None:
        return None
    return next((seat for seat in status.seats if seat.program == program and seat.gpus == gpus), None)


def _unseen(before: FillStatus | None) -> tuple[SlotStatus, ...]:
    """What earlier fillers gave and left, while this one has not seen the GPUs yet: it must not be forgotten."""
    why = "the GPUs have not been seen yet"
    seats = before.seats if before is not None else ()
    return tuple(msgspec.structs.replace(seat, doing="away", why=why, pid=None) for seat in seats)


def _status(place: Place, now: float) -> SlotStatus:
    seat, tenant = place.seat, place.tenant
    reaper = identify(tenant.reaper) if tenant is not None else None
    return SlotStatus(
        program=seat.program.name,
        gpus=seat.gpus,
        indices=tuple(gpu.index for gpu in place.gpus),
        doing="set aside" if place.set_aside else seat.doing,
        why=seat.why,
        since=wall(seat.since),
        pid=tenant.job.pid if tenant is not None and tenant.job is not None else None,
        reaper=None if reaper is None else (reaper.pid, reaper.started),
        gpu_hours=round(seat.given(now) / 3600.0, 4),
        preemptions=seat.preemptions,
    )
