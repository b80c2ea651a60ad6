"""Background programs on idle GPUs of the worker, run by a separate filler process.

The worker owns the GPUs and grants some to the filler. Its programs are preempted before any job.
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
# The filler of a killed worker stops its programs before it releases the lock.
_PATIENCE: Final = 20.0
# Orders background programs after every job.
_LAST: Final = 2**31


class BackgroundFill:
    """The worker's end of the filler."""

    def __init__(self, file: str | None, source: str, deadline: float, home: Path, log: Callable[[str], None]) -> None:
        """Forks: call it in a single-threaded process without connections. Raises StokerError.

        `file`: the configuration; None for the default of `stoker fill`.
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
        """The connection's descriptor; -1 once the filler has ended."""
        return -1 if self._dead else self._connection.fileno()

    @property
    def reach(self) -> frozenset[str]:
        """GPUs on which a program runs or may start. A revoked GPU is free once the filler has confirmed it."""
        return self._grants.possible.union(self.programs)

    def receive(self) -> bool:
        """Handles messages of the filler. True if anything changed."""
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
        """This GPU's program as placement names it."""
        return f"{BACKGROUND} on {uuid}"

    def allocations(self, used: Mapping[str, int] | None) -> list[Allocation]:
        """One allocation per GPU: a program on several GPUs vacates all of them when it loses one.

        `used`: the measured bytes of background programs on each GPU; None if unknown.
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
        """Restricts background programs to these GPUs."""
        wanted = frozenset(uuids)
        if wanted != self._granted and not self._dead:
            self._granted = wanted
            number = self._grants.add(wanted)
            with contextlib.suppress(OSError):
                self._connection.send(msgspec.msgpack.encode((number, sorted(wanted))), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Ends the filler and its programs."""
        self._connection.close()
        # A suspended filler must be continued to end.
        os.kill(self._pid, signal.SIGCONT)
        os.waitpid(self._pid, 0)


def _root() -> Path:
    return Path(os.environ.get("STOKER_ROOT", "/"))


def _checked(file: str | None, source: str, deadline: float) -> tuple[FillConfig, Sequence[Gpu]]:
    """The configuration, and the GPUs that programs may use: none while they cannot be read."""
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
    """The body of the filler's process; never returns."""
    worker = os.getppid()
    try:
        os.setsid()
        # After its worker is killed, the filler keeps the lock until its programs have ended.
        close_inherited_descriptors([connection.fileno(), held, *claims.descriptors()])
        with prober:
            filler = Filler(
                config, prober, home, log, owner="stoker work", owner_pid=worker, root=_root(), claims=claims
            )
            filler.grant(frozenset())
            _serve(connection, filler)
    except StokerError as error:
        log(str(error))
    except BaseException:  # noqa: BLE001 - it must neither return into the worker's code nor fail silently
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _serve(connection: socket.socket, filler: Filler) -> None:
    """Follows the grants until the worker ends, then stops all programs."""
    sent: tuple[int, dict[str, str]] | None = None
    number: int | None = 0
    while number is not None or filler.busy:
        filler.wait([connection.fileno()] if number is not None else [])
        filler.handle_signals()
        if number is not None:
            number = _receive(connection, filler, number)
        filler.step()
        # Sent after the step: a program about to start on a revoked GPU either is in the list or never starts.
        if number is not None and sent != (state := (number, filler.occupants())):
            sent = state
            with contextlib.suppress(OSError):
                connection.send(msgspec.msgpack.encode(state), socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket, filler: Filler, number: int) -> int | None:
    """The number of the last grant; None once the worker has ended."""
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
    """Numbered grants: the last confirmed one, and those that the filler has not confirmed yet."""

    def __init__(self) -> None:
        self._open: dict[int, frozenset[str]] = {}

    @property
    def possible(self) -> frozenset[str]:
        """GPUs on which a program may start, or may have started unnoticed."""
        return frozenset[str]().union(*self._open.values())

    def add(self, gpus: frozenset[str]) -> int:
        """Adds a grant and returns its number. It replaces the older ones once it is confirmed."""
        number = max(self._open, default=0) + 1
        self._open[number] = gpus
        return number

    def confirm(self, number: int) -> None:
        self._open = {other: gpus for other, gpus in self._open.items() if other >= number}

    def clear(self) -> None:
        """Forgets all grants after the filler has ended."""
        self._open.clear()
