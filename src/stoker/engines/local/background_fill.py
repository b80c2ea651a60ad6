"""Background programs on the worker's own idle GPUs: a filler in a process of its own, which the worker tells where.

The worker owns the GPUs; the filler runs only where it is let, and its programs are the first that step aside.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stoker.engines.local.capacity import BACKGROUND, Allocation, ResourceRequest
from stoker.engines.options import WorkerOptions
from stoker.errors import StokerError
from stoker.fill.claims import Claims, machine_of
from stoker.fill.config import FillConfig
from stoker.fill.filler import Filler
from stoker.fill.status import lock
from stoker.gpus.model import Gpu
from stoker.gpus.prober import Prober
from stoker.procfs import close_inherited_descriptors
from stoker.runs.processes.tree import descends

_LONGEST: Final = 65536
# The filler of a worker that was killed stops its programs first.
_PATIENCE: Final = 20.0
# Behind every job, whatever its priority.
_LAST: Final = 2**31


class FillRequest(NamedTuple):
    """What a worker fills its GPUs with."""

    config: FillConfig
    gpus: tuple[Gpu, ...]
    """Those that programs may run on; none while they cannot be read."""


class BackgroundFill:
    """The worker's side."""

    def __init__(self, fill: FillRequest, orders: WorkerOptions, home: Path, tell: Callable[[str], None]) -> None:
        """For a process of one thread, without connections that a fork would break."""
        held = lock(home, socket.gethostname(), patience=_PATIENCE)
        claims = Claims(machine_of(orders.source, _root()))
        claims.take(fill.gpus)
        self._tell = tell
        try:
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            self._pid = os.fork()
        except OSError as error:
            raise StokerError(f"what fills idle GPUs cannot be started: {(error.strerror or '').lower()}") from None
        if self._pid == 0:
            _fill(its, held, claims, fill.config, orders, home, tell)
        its.close()
        self._line = mine
        self._since: dict[str, float] = {}
        self._programs: dict[str, str] = {}
        self._granted: frozenset[str] | None = None
        self._grants = Grants()
        self._dead = False

    def fileno(self) -> int:
        """-1 once the filler is gone."""
        return -1 if self._dead else self._line.fileno()

    @property
    def occupied(self) -> frozenset[str]:
        """The uuids of the GPUs on which a background program runs."""
        return frozenset(self._since)

    @property
    def reach(self) -> frozenset[str]:
        """The same, with those on which one may be starting at this moment: a GPU that was taken back is free when the
        filler has said that it knows."""
        return self.occupied | self._grants.possible

    def attend(self) -> bool:
        """Hears what the filler says; whether that changed anything."""
        changed = False
        while not self._dead:
            try:
                packet = self._line.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            changed = True
            if not packet:
                self._dead = True
                self._since.clear()
                self._programs.clear()
                self._grants.end()
                self._tell("what fills idle GPUs has ended: they stay idle until the next `stoker work --fill`")
                break
            heard, self._programs = msgspec.msgpack.decode(packet, type=tuple[int, dict[str, str]])
            self._grants.heard(heard)
            self._since = {uuid: self._since.get(uuid, time.monotonic()) for uuid in self._programs}
        return changed

    def owns(self, pid: int) -> bool:
        return not self._dead and descends(pid, self._pid)

    def program_on(self, uuid: str) -> str:
        """What people call the program on this GPU; empty when none is there."""
        return self._programs.get(uuid, "")

    def name_on(self, uuid: str) -> str:
        """What placement calls the program on this GPU."""
        return f"{BACKGROUND} on {uuid}"

    def holdings(self, used: Mapping[str, int] | None) -> list[Allocation]:
        """Each GPU by itself: a program on several of them gives all of them up when it gives up one.

        `used`: the bytes that background programs really use on each GPU; None when nobody can tell.
        """
        granted, moment = self._granted or frozenset(), time.monotonic()
        return [
            Allocation(
                ResourceRequest(self.name_on(uuid), 1, _LAST, priority=-_LAST, preemptible=True, background=True),
                (uuid,),
                self._since.get(uuid, moment),
                used=used,
                stopping=uuid not in granted,
            )
            for uuid in sorted(self.reach)
        ]

    def grant(self, uuids: Iterable[str]) -> None:
        """Background programs may run on these GPUs, and must leave all others."""
        wanted = frozenset(uuids)
        if wanted != self._granted and not self._dead:
            self._granted = wanted
            number = self._grants.give(wanted)
            with contextlib.suppress(OSError):
                self._line.send(msgspec.msgpack.encode((number, sorted(wanted))), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Its programs end with it."""
        self._line.close()
        # Should somebody have stopped it, it cannot leave.
        os.kill(self._pid, signal.SIGCONT)
        os.waitpid(self._pid, 0)


def _root() -> Path:
    return Path(os.environ.get("STOKER_ROOT", "/"))


def _fill(
    line: socket.socket,
    held: int,
    claims: Claims,
    config: FillConfig,
    orders: WorkerOptions,
    home: Path,
    tell: Callable[[str], None],
) -> None:
    """The filler's own process: never returns."""
    worker = os.getppid()
    try:
        os.setsid()
        # Also a filler whose worker was killed owns the GPUs until its programs are gone, so it keeps the lock.
        close_inherited_descriptors([line.fileno(), held, *claims.descriptors()])
        with Prober(orders.source, deadline=orders.deadline) as prober:
            filler = Filler(
                config, prober, home, tell, owner="stoker work", owner_pid=worker, root=_root(), claims=claims
            )
            filler.grant(frozenset())
            _follow(line, filler)
    except StokerError as error:
        tell(str(error))
    except BaseException:  # noqa: BLE001 - it must never return into the worker's code, and not fail silently
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _follow(line: socket.socket, filler: Filler) -> None:
    """Does as it is told until the worker is gone, and leaves nothing behind."""
    told: tuple[int, dict[str, str]] | None = None
    heard: int | None = 0
    while heard is not None or filler.busy:
        filler.wait([line.fileno()] if heard is not None else [])
        filler.handle_signals()
        if heard is not None:
            heard = _heed(line, filler, heard)
        filler.step()
        # After that step: a program that was about to start on a GPU that was taken back is among them, or never comes.
        if heard is not None and told != (news := (heard, filler.occupants())):
            told = news
            with contextlib.suppress(OSError):
                line.send(msgspec.msgpack.encode(news), socket.MSG_NOSIGNAL)


def _heed(line: socket.socket, filler: Filler, heard: int) -> int | None:
    """The number of the last grant; None when the worker is gone."""
    while True:
        try:
            packet = line.recv(_LONGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return heard
        except OSError:
            packet = b""
        if not packet:
            filler.end()
            return None
        heard, granted = msgspec.msgpack.decode(packet, type=tuple[int, frozenset[str]])
        filler.grant(granted)


class Grants:
    """What was granted, by number: the grant that the filler goes by, and those that it may not have heard yet."""

    def __init__(self) -> None:
        self._open: dict[int, frozenset[str]] = {}

    @property
    def possible(self) -> frozenset[str]:
        """The GPUs on which a program may start, or have started, without our knowing yet."""
        return frozenset[str]().union(*self._open.values())

    def give(self, gpus: frozenset[str]) -> int:
        """The number of a new grant, which replaces the others once it was heard."""
        number = max(self._open, default=0) + 1
        self._open[number] = gpus
        return number

    def heard(self, number: int) -> None:
        """The filler goes by this one now."""
        self._open = {other: gpus for other, gpus in self._open.items() if other >= number}

    def end(self) -> None:
        """There is no filler any more."""
        self._open.clear()
