"""Background programs on the worker's own idle GPUs: a filler in a process of its own, which the worker tells where.

The worker owns the GPUs; the filler runs only where it is let, and its programs are the first that step aside.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from stoker.fill.config import FillConfig
from stoker.fill.filler import Filler
from stoker.fill.ledger import lock
from stoker.gpus.prober import Prober
from stoker.runs.descriptors import close_all_but
from stoker.runs.processes import descends
from stoker.worker.capacity import BACKGROUND, Holding, Want
from stoker.worker.orders import Orders

_LONGEST: Final = 65536
# The filler of a worker that was killed stops its programs first.
_PATIENCE: Final = 20.0
# Behind every job, whatever its priority.
_LAST: Final = 2**31


class Filling:
    """The worker's side."""

    def __init__(self, config: FillConfig, orders: Orders, home: Path, tell: Callable[[str], None]) -> None:
        """For a process of one thread, without connections that a fork would break."""
        held = lock(home, socket.gethostname(), patience=_PATIENCE)
        self._tell = tell
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            _fill(its, held, config, orders, home, tell)
        its.close()
        self._line = mine
        self._since: dict[str, float] = {}
        self._programs: dict[str, str] = {}
        self._granted: frozenset[str] | None = None
        self._dead = False

    def fileno(self) -> int:
        """-1 once the filler is gone."""
        return -1 if self._dead else self._line.fileno()

    @property
    def occupied(self) -> frozenset[str]:
        """The uuids of the GPUs on which a background program runs."""
        return frozenset(self._since)

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
                self._tell("what fills idle GPUs has ended: they stay idle until the next `stoker work --fill`")
                break
            self._programs = msgspec.msgpack.decode(packet, type=dict[str, str])
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

    def holdings(self, used: Mapping[str, int] | None) -> list[Holding]:
        """Each GPU by itself: a program on several of them gives all of them up when it gives up one.

        `used`: the bytes that background programs really use on each GPU; None when nobody can tell.
        """
        granted = self._granted or frozenset()
        return [
            Holding(
                Want(self.name_on(uuid), 1, _LAST, priority=-_LAST, preemptible=True, background=True),
                (uuid,),
                since,
                used=used,
                stopping=uuid not in granted,
            )
            for uuid, since in self._since.items()
        ]

    def grant(self, uuids: Iterable[str]) -> None:
        """Background programs may run on these GPUs, and must leave all others."""
        wanted = frozenset(uuids)
        if wanted != self._granted and not self._dead:
            self._granted = wanted
            with contextlib.suppress(OSError):
                self._line.send(msgspec.msgpack.encode(sorted(wanted)), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Its programs end with it."""
        self._line.close()
        os.waitpid(self._pid, 0)


def _fill(
    line: socket.socket, held: int, config: FillConfig, orders: Orders, home: Path, tell: Callable[[str], None]
) -> None:
    """The filler's own process: never returns."""
    worker = os.getppid()
    try:
        os.setsid()
        # Also a filler whose worker was killed owns the GPUs until its programs are gone, so it keeps the lock.
        close_all_but([line.fileno(), held])
        root = Path(os.environ.get("STOKER_ROOT", "/"))
        with Prober(orders.source, deadline=orders.deadline) as prober:
            filler = Filler(config, prober, home, tell, owner="stoker work", owner_pid=worker, root=root)
            filler.grant(frozenset())
            _follow(line, filler)
    except BaseException:  # noqa: BLE001 - it must never return into the worker's code, and not fail silently
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _follow(line: socket.socket, filler: Filler) -> None:
    """Does as it is told until the worker is gone, and leaves nothing behind."""
    told: dict[str, str] | None = None
    listening = True
    while listening or filler.busy:
        filler.wait([line.fileno()] if listening else [])
        filler.heed_signals()
        if listening:
            listening = _heed(line, filler)
        filler.step()
        if listening and told != (occupants := filler.occupants()):
            told = occupants
            with contextlib.suppress(OSError):
                line.send(msgspec.msgpack.encode(occupants), socket.MSG_NOSIGNAL)


def _heed(line: socket.socket, filler: Filler) -> bool:
    """Whether the worker is still there."""
    while True:
        try:
            packet = line.recv(_LONGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            packet = b""
        if not packet:
            filler.end()
            return False
        filler.grant(msgspec.msgpack.decode(packet, type=frozenset[str]))
