"""Background programs on idle GPUs of the worker: a separate filler process, which gets GPUs granted.

The worker owns the GPUs. The filler runs programs only on granted GPUs, and they are preempted before any job.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from stoker.engines.local.capacity import BACKGROUND, Allocation, ResourceRequest
from stoker.errors import StokerError
from stoker.fill.claims import Claims, gpus_to_fill, machine_of
from stoker.fill.config import FillConfig
from stoker.fill.config_files import check, find_config
from stoker.fill.filler import Filler
from stoker.fill.status import lock
from stoker.gpus.model import Gpu
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError
from stoker.procfs import close_inherited_descriptors
from stoker.runs.processes.tree import descends

_LONGEST: Final = 65536
# The filler of a worker that was killed stops its programs before it lets go of the lock.
_PATIENCE: Final = 20.0
# Behind every job, whatever its priority.
_LAST: Final = 2**31


class BackgroundFill:
    """The worker's end of the filler."""

    def __init__(self, file: str | None, source: str, deadline: float, home: Path, log: Callable[[str], None]) -> None:
        """For a process of one thread, without connections that a fork would break. Raises StokerError.

        `file`: the configuration; None for the one that `stoker fill` finds.
        """
        config, gpus = _checked(file, source, deadline)
        held = lock(home, socket.gethostname(), patience=_PATIENCE)
        claims = Claims(machine_of(source, _root()))
        claims.take(gpus)
        self._log = log
        try:
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            self._pid = os.fork()
        except OSError as error:
            raise StokerError(f"the background filler cannot be started: {(error.strerror or '').lower()}") from None
        if self._pid == 0:
            _fill(its, held, claims, config, Prober(source, deadline=deadline, sharing="start"), home, log)
        its.close()
        self._connection = mine
        self.programs: dict[str, str] = {}
        """The name of the background program on each GPU, by its uuid."""
        self._granted: frozenset[str] | None = None
        self._grants = Grants()
        self._dead = False

    def fileno(self) -> int:
        """-1 once the filler is gone."""
        return -1 if self._dead else self._connection.fileno()

    @property
    def reach(self) -> frozenset[str]:
        """The GPUs on which a program runs or may start: a revoked one is free when the filler has confirmed it."""
        return self._grants.possible.union(self.programs)

    def receive(self) -> bool:
        """Handles what the filler sent; whether that changed anything."""
        changed = False
        while not self._dead:
            try:
                packet = self._connection.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            changed = True
            if not packet:
                self._dead = True
                self.programs = {}
                self._grants.clear()
                self._log("the background filler has ended: idle GPUs stay idle until the next `stoker work --fill`")
                break
            number, self.programs = msgspec.msgpack.decode(packet, type=tuple[int, dict[str, str]])
            self._grants.confirm(number)
        return changed

    def owns(self, pid: int) -> bool:
        return not self._dead and descends(pid, self._pid)

    def name_on(self, uuid: str) -> str:
        """The name of this GPU's program in placement."""
        return f"{BACKGROUND} on {uuid}"

    def allocations(self, used: Mapping[str, int] | None) -> list[Allocation]:
        """One per GPU: a program on several GPUs leaves all of them when it has to leave one.

        `used`: the bytes that background programs really use on each GPU; None when unknown.
        """
        granted = self._granted or frozenset()
        return [
            Allocation(
                ResourceRequest(self.name_on(uuid), 1, _LAST, priority=-_LAST, preemptible=True, background=True),
                (uuid,),
                time.monotonic(),
                used=used,
                stopping=uuid not in granted,
            )
            for uuid in sorted(self.reach)
        ]

    def grant(self, uuids: Iterable[str]) -> None:
        """Lets background programs run on these GPUs, and on no others."""
        wanted = frozenset(uuids)
        if wanted != self._granted and not self._dead:
            self._granted = wanted
            number = self._grants.add(wanted)
            with contextlib.suppress(OSError):
                self._connection.send(msgspec.msgpack.encode((number, sorted(wanted))), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Stops its programs too."""
        self._connection.close()
        # A suspended process cannot end.
        os.kill(self._pid, signal.SIGCONT)
        os.waitpid(self._pid, 0)


def _root() -> Path:
    return Path(os.environ.get("STOKER_ROOT", "/"))


def _checked(file: str | None, source: str, deadline: float) -> tuple[FillConfig, Sequence[Gpu]]:
    """The configuration, and the GPUs that programs may run on: none while they cannot be read."""
    with Prober(source, deadline=deadline, sharing="start") as prober:
        try:
            look = prober.look()
        except AbsentError as absent:
            raise StokerError(f"{absent}: there is nothing to fill") from None
    gpus = look.gpus if look.problem is None else None
    config = find_config(file)
    check(config, gpus)
    return config, () if gpus is None else gpus_to_fill(config, gpus)


def _fill(
    connection: socket.socket,
    held: int,
    claims: Claims,
    config: FillConfig,
    prober: Prober,
    home: Path,
    log: Callable[[str], None],
) -> None:
    """The filler's process: never returns."""
    worker = os.getppid()
    try:
        os.setsid()
        # A filler whose worker was killed owns the GPUs until its programs are gone, so it keeps the lock.
        close_inherited_descriptors([connection.fileno(), held, *claims.descriptors()])
        with prober:
            filler = Filler(
                config, prober, home, log, owner="stoker work", owner_pid=worker, root=_root(), claims=claims
            )
            filler.grant(frozenset())
            _serve(connection, filler)
    except StokerError as error:
        log(str(error))
    except BaseException:  # noqa: BLE001 - it must never return into the worker's code, and not fail silently
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _serve(connection: socket.socket, filler: Filler) -> None:
    """Follows the grants until the worker is gone, then stops all programs."""
    sent: tuple[int, dict[str, str]] | None = None
    number: int | None = 0
    while number is not None or filler.busy:
        filler.wait([connection.fileno()] if number is not None else [])
        filler.handle_signals()
        if number is not None:
            number = _receive(connection, filler, number)
        filler.step()
        # After the step: a program that was about to start on a revoked GPU is among them, or never starts.
        if number is not None and sent != (state := (number, filler.occupants())):
            sent = state
            with contextlib.suppress(OSError):
                connection.send(msgspec.msgpack.encode(state), socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket, filler: Filler, number: int) -> int | None:
    """The number of the last grant; None when the worker is gone."""
    while True:
        try:
            packet = connection.recv(_LONGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return number
        except OSError:
            packet = b""
        if not packet:
            filler.end()
            return None
        number, granted = msgspec.msgpack.decode(packet, type=tuple[int, frozenset[str]])
        filler.grant(granted)


class Grants:
    """The grants that the filler has confirmed or may not have received yet, by number."""

    def __init__(self) -> None:
        self._open: dict[int, frozenset[str]] = {}

    @property
    def possible(self) -> frozenset[str]:
        """The GPUs on which a program may start, or have started unnoticed."""
        return frozenset[str]().union(*self._open.values())

    def add(self, gpus: frozenset[str]) -> int:
        """The number of a new grant, which replaces the others once it is confirmed."""
        number = max(self._open, default=0) + 1
        self._open[number] = gpus
        return number

    def confirm(self, number: int) -> None:
        self._open = {other: gpus for other, gpus in self._open.items() if other >= number}

    def clear(self) -> None:
        """The filler is gone."""
        self._open.clear()
