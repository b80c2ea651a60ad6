"""The filler: runs background programs on idle GPUs and stops them when another user comes.

A single loop handles events of device nodes, looks, scans for holders, terminals, and its own programs. The programs
end with it, since nothing would watch for other users any more.
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
from stoker.fill.background_process import BackgroundProcess, Leftovers, SlotRunner
from stoker.fill.claims import Claims, gpus_to_fill, machine_of
from stoker.fill.config import Background, FillConfig
from stoker.fill.other_users import OtherUsers, ScanPacer
from stoker.fill.slot import Slot, SlotView
from stoker.fill.status import FillStatus, SlotStatus, StatusFile
from stoker.gpus.model import Gpu, Look
from stoker.gpus.prober import Prober, Sampler
from stoker.gpus.quarantine import QuarantineFile
from stoker.gpus.source import AbsentError
from stoker.gpus.visible import device_nodes, select_gpus
from stoker.paths import is_there
from stoker.presence.device_events import DeviceEvents
from stoker.presence.holders import HolderScanner
from stoker.presence.ignoring import SHIPPED
from stoker.presence.terminals import Terminals
from stoker.procfs import Identity, boot_id, identify, stat
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.tree import descends
from stoker.units import format_duration

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Terminal times have a resolution of eight seconds, so shorter intervals show nothing new.
_TERMINALS_EVERY: Final = 5.0
_STATUS_EVERY: Final = 30.0
# An event comes just before the process has the file open, so an immediate scan can miss it.
_SETTLED_AFTER: Final = 0.1
# Long enough for driver samples, short enough that no user waits.
_CLEAN_AFTER: Final = 1.0


class Filler:
    """A filler. `descriptors`, `due` and `step` serve another event loop."""

    def __init__(
        self,
        config: FillConfig,
        prober: Prober,
        home: Path,
        log: Callable[[str], None],
        *,
        owner: str = "stoker fill",
        owner_pid: int | None = None,
        root: Path = Path("/"),
        claims: Claims | None = None,
    ) -> None:
        """`owner_pid`: the worker that owns the GPUs, whose GPU helper does not count as a user.

        `claims`: existing claims of GPUs.
        """
        self._config = config
        self._prober = prober
        self._log = log
        self._owner = owner
        self._owner_pid = owner_pid
        self._root = root
        self._claims = claims or Claims(machine_of(prober.spec, root))
        self._host = socket.gethostname()
        self._status_file = StatusFile(home, self._host)
        self._before = self._status_file.read()
        self._quarantine_file = QuarantineFile(home, self._host)
        self._sampler = Sampler(prober, config.interval)
        self._terminals = Terminals(root) if config.terminals.enabled else None
        self._runners: list[SlotRunner] = []
        self._leftovers: Leftovers | None = None
        self._other_users = OtherUsers(self._is_own, {})
        self._holders: HolderScanner | None = None
        self._device_events: DeviceEvents | None = None
        self._has_nodes = False
        self._scan_at = math.inf
        self._changed_nodes: frozenset[str] = frozenset()
        """GPUs with node events for which no scan has shown a change."""
        self._changed_since_scan: frozenset[str] = frozenset()
        """GPUs with node events since the start of the last scan, which may have missed them."""
        self._settled_at = -math.inf
        """When a scan can see the reported openers."""
        self._pacer = ScanPacer(time.monotonic())
        self._look_again = False
        """The next look may include time before another user came or left."""
        self._terminals_at = 0.0
        self._active_user: str | None = None
        self._granted: frozenset[str] | None = None
        """The GPUs granted by the worker; None for all."""
        self._undecided = False
        """A start has interrupted the decisions for other slots."""
        self._status_at = 0.0
        self._shown: tuple[object, ...] = ()
        self._notes: dict[str, str] = {}
        self._problem: str | None = None
        """The last logged reason why the GPUs cannot be read."""
        self._signals = SignalStream(_STOPPING)
        self._ending = False

    def run(self) -> int:
        """Runs until a signal, and until all its programs have ended."""
        with contextlib.ExitStack() as goodbye:
            goodbye.callback(self._signals.close)
            goodbye.callback(self._close)
            while not self._ending or self.busy:
                self.wait([])
                self.handle_signals()
                self.step()
        return 0

    def descriptors(self) -> list[int]:
        found = [self._sampler.fileno()]
        if self._device_events is not None:
            found.append(self._device_events.fileno())
        found += [process.reaper.fileno() for process in self._processes() if not process.gone]
        return [descriptor for descriptor in found if descriptor >= 0]

    def due(self) -> float:
        now = time.monotonic()
        if self._undecided:
            return now
        ends = [self._sampler.due(), self._scan_at, self._status_at]
        if self._terminals is not None:
            ends.append(self._terminals_at)
        if self._leftovers is not None:
            ends.append(self._leftovers.due())
        ends += [
            runner.due(now) for runner in self._runners if runner.process is not None or not self._awaits_scan(runner)
        ]
        return min(ends)

    def step(self) -> None:
        self._look()
        self._read_device_events()
        if time.monotonic() >= self._scan_at:
            self._scan()
        self._look_at_terminals()
        self._update_leftovers()
        for runner in self._runners:
            runner.update()
        self._read_device_events()
        if self._runners and not self._ending:
            self._decide()
        self._write_status()

    def grant(self, uuids: frozenset[str]) -> None:
        """Limits background programs to these GPUs."""
        self._granted = uuids

    def occupants(self) -> dict[str, str]:
        """The name of the background program on each occupied GPU, by uuid."""
        return {
            uuid: runner.slot.program.name
            for runner in self._runners
            if runner.process is not None
            for uuid in runner.slot.gpus
        }

    def end(self) -> None:
        """Stops every program; call `step` until `busy` is False."""
        if not self._ending:
            self._ending = True
            for runner in self._runners:
                runner.leave()

    @property
    def busy(self) -> bool:
        """True if any of its programs is left."""
        return bool(self._processes())

    def _processes(self) -> list[BackgroundProcess]:
        return [runner.process for runner in self._runners if runner.process is not None]

    def wait(self, also: Sequence[int]) -> None:
        poll = select.poll()
        for descriptor in (self._signals.fileno(), *also, *self.descriptors()):
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, self.due() - time.monotonic()) * 1000 + 0.5)

    def handle_signals(self) -> None:
        """Ends on a signal. A second Ctrl-C ends the grace of its programs."""
        for received in self._signals.read():
            if received.signal not in _STOPPING:
                continue
            if self._ending and received.signal == signal.SIGINT and received.from_kernel:
                for process in self._processes():
                    process.hurry()
            self.end()

    # Observing

    def _look(self) -> None:
        try:
            look = self._sampler.step()
        except AbsentError as absent:
            self._other_users.lost()
            self._note("absent", f"{absent}: there is nothing to fill")
            return
        if look is None:
            return
        self._other_users.looked(look)
        self._log_problem(look)
        if self._look_again:
            self._look_again = False
            self._sampler.no_later_than(time.monotonic() + _CLEAN_AFTER)
        if not self._runners and look.problem is None and look.gpus:
            self._create_slots(look)

    def _create_slots(self, look: Look) -> None:
        """Creates the slots, and watches for other users. Raises StokerError if another filler has a GPU."""
        self._claims.take(gpus_to_fill(self._config, look.gpus))
        ignored = {gpu.uuid: self._patterns(gpu, look.gpus) for gpu in look.gpus}
        nodes = device_nodes(look.gpus, self._root)

        def holders_suffice(uuid: str) -> bool:
            return self._config.holders_suffice and any(is_there(node) for node in nodes.get(uuid, ()))

        self._other_users = OtherUsers(self._is_own, ignored, holders_suffice=holders_suffice)
        self._other_users.looked(look)
        self._holders = HolderScanner(nodes, self._root)
        self._device_events = DeviceEvents(nodes)
        self._has_nodes = any(nodes.values())
        if not self._has_nodes:
            self._note("nodes", "these GPUs have no device nodes here: other users are only seen in the driver's list")
        elif self._device_events.why_not is not None:
            self._note("events", f"other users of the GPUs are only seen by scans: {self._device_events.why_not}")
        self._leftovers = self._left_by(self._before)
        for program in self._config.programs:
            chosen = select_gpus(look.gpus, program.gpus)
            groups = [(gpu,) for gpu in chosen] if program.each else [chosen]
            self._runners += [self._runner(program, gpus) for gpus in groups]
        self._scan_at = time.monotonic()

    def _runner(self, program: Background, gpus: Sequence[Gpu]) -> SlotRunner:
        slot = Slot(program, tuple(gpu.uuid for gpu in gpus), time.monotonic())
        for earlier in self._before.slots if self._before is not None else ():
            if (earlier.program, earlier.gpus) == (program.name, slot.gpus):
                slot.gpu_seconds, slot.preemptions = earlier.gpu_hours * 3600.0, earlier.preemptions
        tag = f"{self._status_file.path}:{program.name}:{','.join(slot.gpus)}"
        return SlotRunner(slot, gpus, tag, self._log)

    def _left_by(self, before: FillStatus | None) -> Leftovers:
        known = before.slots if before is not None and before.boot == boot_id() else ()
        reapers = [Identity(*slot.reaper) for slot in known if slot.reaper is not None]
        grace = max(program.grace for program in self._config.programs)
        return Leftovers(f"{self._status_file.path}:", reapers, grace, time.monotonic())

    def _patterns(self, gpu: Gpu, gpus: Sequence[Gpu]) -> list[str]:
        patterns = list(SHIPPED) if self._config.ignore_shipped else []
        for watched in self._config.watched:
            with contextlib.suppress(BadInputError):
                if gpu in select_gpus(gpus, watched.gpus):
                    patterns += watched.ignore
        return patterns

    def _read_device_events(self) -> None:
        changed = self._device_events.changed() if self._device_events is not None else frozenset()
        if changed:
            now = time.monotonic()
            self._changed_nodes |= changed
            self._changed_since_scan |= changed
            self._settled_at = now + _SETTLED_AFTER
            self._scan_at = min(self._scan_at, self._pacer.soonest(now))

    def _scan(self) -> None:
        now = time.monotonic()
        self._scan_at = now + self._config.interval
        if self._holders is None or not self._has_nodes:
            return
        self._changed_since_scan = frozenset()
        begun = time.process_time()
        scan = self._holders.scan()
        self._pacer.spent(now, time.process_time() - begun)
        changed = self._other_users.scanned(scan)
        self._changed_nodes = self._changed_nodes - changed if now < self._settled_at else frozenset()
        if self._changed_nodes:
            self._scan_at = min(self._scan_at, self._settled_at)
        if changed:
            self._look_again = True
            self._sampler.no_later_than(now)
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
        self._active_user = None
        for activity in self._terminals.activity(time.time()):
            if activity.user not in rule.whitelist and activity.idle < rule.idle_seconds:
                ago = f"{format_duration(round(activity.idle))} ago" if activity.idle >= 1 else "just now"
                self._active_user = f"{activity.user} was active at {activity.terminal} {ago}"
                return

    def _is_own(self, pid: int) -> bool:
        me = os.getpid()
        if pid == me or descends(pid, me) or any(process.reaper.owns(pid) for process in self._processes()):
            return True
        found = stat(pid) if self._owner_pid is not None else None
        return found is not None and self._owner_pid in (pid, found.parent)

    # Deciding

    def _decide(self) -> None:
        seen = self._other_users.views(self.occupants().keys())
        if self._granted is not None:
            for uuid in seen.keys() - self._granted:
                seen[uuid] = SlotView(False, "needed by the queue")
        for uuid, quarantined in self._quarantine_file.out_of_rotation().items():
            seen[uuid] = SlotView(False, f"out of rotation ({quarantined.reason})")
        veto = self._veto()
        # Stops come first, then one start at a time, since another user may come in between.
        self._undecided = False
        for runner in sorted(self._runners, key=lambda runner: runner.slot.state != "running"):
            if self._awaits_scan(runner):
                continue
            if runner.decide(seen, veto, self._other_users.gpus, self._helpers):
                self._undecided = True
                break

    def _awaits_scan(self, runner: SlotRunner) -> bool:
        """True if a start must wait for the next scan, since the last one may have missed a new opener."""
        return runner.slot.state == "waiting" and not self._changed_since_scan.isdisjoint(runner.slot.gpus)

    def _veto(self) -> str | None:
        schedule, wall_clock = self._config.schedule, time.localtime()
        if schedule and not any(hours.contain(wall_clock) for hours in schedule):
            return "outside the scheduled hours"
        if self._leftovers is not None:
            stopping = "programs of an earlier filler are being stopped"
            return stopping if self._leftovers.found else "it is being checked whether an earlier filler left programs"
        return self._active_user

    def _update_leftovers(self) -> None:
        if self._leftovers is not None:
            self._leftovers.update(time.monotonic())
            if self._leftovers.gone:
                self._leftovers = None

    def _helpers(self) -> list[int]:
        helper = self._prober.children
        return [*helper, *(process.reaper.pid for process in self._processes())]

    # Reporting

    def _log_problem(self, look: Look) -> None:
        """Logs the start, change or end of a problem."""
        problem = look.problem.reason if look.problem is not None else None
        # Ignores the duration in the text, which changes from look to look.
        kind = re.sub(r"[0-9.]+", "", problem) if problem is not None else None
        if kind == self._problem:
            return
        self._problem = kind
        if problem is None:
            self._log("the GPUs can be read again")
        else:
            self._log(f"the GPUs cannot be read, so nothing is started on them: {problem}")

    def _note(self, what: str, sentence: str) -> None:
        """Logs a sentence once."""
        if what not in self._notes:
            self._notes[what] = sentence
            self._log(sentence)

    def _write_status(self) -> None:
        now = time.monotonic()
        shown = tuple((runner.slot.state, runner.slot.why) for runner in self._runners)
        if shown == self._shown and now < self._status_at:
            return
        self._shown, self._status_at = shown, now + _STATUS_EVERY
        me = identify(os.getpid())
        self._status_file.write(
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
                slots=tuple(_status(runner, now) for runner in self._runners) or _unseen(self._before),
            )
        )

    def _close(self) -> None:
        self._status_at = 0.0
        self._write_status()
        if self._device_events is not None:
            self._device_events.close()
        self._claims.close()


def _unseen(before: FillStatus | None) -> tuple[SlotStatus, ...]:
    """The slots of an earlier filler, kept until this one has seen the GPUs."""
    why = "the GPUs have not been read yet"
    slots = before.slots if before is not None else ()
    return tuple(msgspec.structs.replace(slot, state="waiting", why=why, pid=None) for slot in slots)


def _status(runner: SlotRunner, now: float) -> SlotStatus:
    slot = runner.slot
    reaper = runner.process.reaper if runner.process is not None else None
    identity = identify(reaper.pid) if reaper is not None else None
    return SlotStatus(
        program=slot.program.name,
        gpus=slot.gpus,
        indices=tuple(gpu.index for gpu in runner.gpus),
        state=slot.state,
        why=slot.why,
        since=time.time() - (now - slot.since),
        pid=reaper.job.pid if reaper is not None and reaper.job is not None else None,
        reaper=None if identity is None else (identity.pid, identity.started),
        gpu_hours=round(slot.given(now) / 3600.0, 4),
        preemptions=slot.preemptions,
    )
