"""The interface of the worker and a shim in a Slurm job: the attempt's directory on a shared file system.

In addition to the files of every attempt:

    slurm.json   the id of the Slurm job, once the worker knows it
    owner.json   the Slurm job that runs the attempt; the first one creates it, see `Owner`
    result.json  the result of the attempt, once it is final
    stop.json    the order to stop the job, with its reason
    alive        touched by the shim every few seconds
    slurm.out    the output of the shim itself and of Slurm

In a multi-node job, the directory belongs to the first node, whose shim leads. It has two more files:

    nodes.json   the nodes and their commands, written before the leader starts the other shims
    leader.json  the leader's orders

and a directory `node1`, `node2`, … for each other node: a run's record with the node's own `output`, `alive` and
`facts.N`, its part of a report.
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stoker.engines.attempt import UNDELIVERED, AttemptRecord, AttemptResult, AttemptSpec, StopCause
from stoker.engines.preparation import Rendezvous
from stoker.paths import remove_tree, write_atomically
from stoker.runs.record import Ending, Snooze

_SUBMITTED: Final = "slurm.json"
_OWNER: Final = "owner.json"
_RESULT: Final = "result.json"
_STOP: Final = "stop.json"
_ALIVE: Final = "alive"
_NODES: Final = "nodes.json"
_LEADER: Final = "leader.json"
# Endings of an interrupted run, which Slurm may restart.
INTERRUPTED: Final = frozenset({"machine", "supervisor killed", "lease"})


class SlurmAttemptSpec(AttemptSpec, frozen=True, kw_only=True):
    """An attempt as one Slurm job."""

    kill_wait: float
    """Slurm's delay between SIGTERM and SIGKILL."""
    nodes: int = 1
    exported: tuple[str, ...] = ()
    """Variables that `sbatch` passes to the shim; all others are the node's own."""
    start_by: float | None = None
    """The deadline in seconds since the epoch, at which a pending attempt ends."""


class SlurmJobId(msgspec.Struct, frozen=True):
    """The Slurm job of an attempt."""

    slurm_job: int
    launched: bool = False
    """Slurm has started it on a node, perhaps without a shim."""


class Owner(msgspec.Struct, frozen=True):
    """The Slurm job that may run the attempt, or none.

    The file is created exclusively, either by the shim or by the worker when it gives up the submission. So a Slurm job
    that appears later never runs anything.
    """

    slurm_job: int
    """The job's id; 0 if the worker has given up the submission."""
    restart: int = 0
    """Slurm's count of restarts, which a crash of the controller may reduce."""
    host: str = ""
    start: str = ""
    """A unique id of this start of the job."""

    @property
    def is_void(self) -> bool:
        return self.slurm_job == 0


VOID: Final = Owner(0)


class StopOrder(msgspec.Struct, frozen=True):
    """An order to the shim to stop the job."""

    cause: StopCause
    reason: str


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of one run of an attempt, and their command."""

    start: str
    """The owner's start; a shim of an earlier start runs nothing."""
    run: int
    """The number of the run within this start; after running out of memory another run follows."""
    names: tuple[str, ...]
    """Slurm's node names, leader first; the index is the node's rank."""
    master_addr: str
    master_port: int
    command: tuple[str, ...]
    environment: dict[str, str]
    """Variables of the job that are not in its attempt spec."""
    slurm: dict[str, str]
    """Slurm's variables about the whole job, since they differ in a step."""
    directory: str | None

    def rendezvous(self, rank: int) -> Rendezvous:
        return Rendezvous(len(self.names), rank, self.master_addr, self.master_port)


class LeaderOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's orders to the other nodes."""

    run: int
    explain: int = 0
    """The number of requests for their parts of a report."""
    stop: bool = False
    ending: Ending = ""
    reason: str = ""


class Waited(NamedTuple):
    """Seconds from the moment when an attempt was written."""

    begun: float
    """Until its shim took it, or gave its last sign of life while it waited for an earlier start to end."""
    ended: float
    """Until its last status was written."""


class SlurmAttemptRecord(AttemptRecord):
    """The directory of one attempt of the Slurm engine."""

    _snooze: tuple[float, Snooze] | None = None

    def attempt_spec(self) -> SlurmAttemptSpec | None:
        """The spec; None if the outcome is delivered or the file is damaged. Raises OSError if it cannot be read."""
        try:
            return msgspec.json.decode((self.directory / UNDELIVERED).read_bytes(), type=SlurmAttemptSpec)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def write_submitted(self, slurm_job: int, *, launched: bool = False) -> None:
        """Raises OSError."""
        self._replace(_SUBMITTED, SlurmJobId(slurm_job, launched))

    def submitted(self) -> SlurmJobId | None:
        """The Slurm job, if its id is known."""
        try:
            return msgspec.json.decode((self.directory / _SUBMITTED).read_bytes(), type=SlurmJobId)
        except (OSError, ValueError):
            return None

    def take(self, owner: Owner) -> Owner:
        """Takes the attempt for this owner, unless another was first. Returns the owner. Raises OSError."""
        own = self.directory / f".owner-{owner.slurm_job}-{os.getpid()}-{time.monotonic_ns()}"
        write_atomically(own, msgspec.json.encode(owner), sync=True)
        try:
            # Creating a hard link is atomic and exclusive, even on network file systems.
            os.link(own, self.directory / _OWNER)
        except FileExistsError:
            if (first := self.owner()) is None:
                # A network file system may show the file late, and no one may take the attempt until then.
                raise OSError(errno.EAGAIN, "its owner cannot be read yet") from None
            return first
        finally:
            own.unlink(missing_ok=True)
        return owner

    def owner(self) -> Owner | None:
        """The owner, if any. Raises OSError if the file exists and cannot be read."""
        try:
            return msgspec.json.decode((self.directory / _OWNER).read_bytes(), type=Owner)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def begun_at(self) -> float | None:
        """When the shim took the attempt, in seconds since the epoch."""
        try:
            return os.stat(self.directory / _OWNER).st_mtime  # noqa: PTH116 - one call
        except OSError:
            return None

    def seconds_since_written(self) -> Waited | None:
        """By the clock of the file system, from the attempt's spec; None when it cannot be read."""
        names = (UNDELIVERED, _OWNER, "status.json")
        try:
            written, begun, ended = (os.stat(self.directory / name).st_mtime for name in names)  # noqa: PTH116 - one call
        except OSError:
            return None
        return Waited(begun - written, ended - written)

    def replace_owner(self, owner: Owner) -> None:
        """Sets the owner to a later start of the same Slurm job. Raises OSError."""
        write_atomically(self.directory / _OWNER, msgspec.json.encode(owner), sync=True)

    def touch_owner(self) -> None:
        """Sends the heartbeat of a start that waits for an earlier one to end. Raises OSError."""
        os.utime(self.directory / _OWNER)

    def write_result(self, result: AttemptResult) -> None:
        """Raises OSError."""
        self._replace(_RESULT, result)

    def result(self) -> AttemptResult | None:
        """The shim's result, if any."""
        try:
            return msgspec.json.decode((self.directory / _RESULT).read_bytes(), type=AttemptResult)
        except (OSError, ValueError):
            return None

    def write_stop(self, order: StopOrder) -> None:
        """Raises OSError."""
        self._replace(_STOP, order)

    def stop_order(self) -> StopOrder | None:
        try:
            return msgspec.json.decode((self.directory / _STOP).read_bytes(), type=StopOrder)
        except (OSError, ValueError):
            return None

    def touch_alive(self) -> None:
        """Sends a heartbeat, which needs disk space only the first time. Raises OSError."""
        path = self.directory / _ALIVE
        try:
            os.utime(path)
        except FileNotFoundError:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def alive_version(self) -> int:
        """A number that changes with each heartbeat; 0 before the first. Raises OSError."""
        try:
            return os.stat(self.directory / _ALIVE).st_mtime_ns  # noqa: PTH116 - one call
        except FileNotFoundError:
            return 0

    def life_version(self) -> tuple[int, float | None]:
        """A value that changes with each heartbeat of any start. Raises OSError."""
        return self.alive_version(), self.begun_at()

    # The nodes of a multi-node job

    def write_nodes(self, group: NodeGroup) -> None:
        """Raises OSError."""
        self._replace(_NODES, group)

    def nodes(self) -> NodeGroup | None:
        """The nodes; None until the leader has written them."""
        try:
            return msgspec.json.decode((self.directory / _NODES).read_bytes(), type=NodeGroup)
        except (OSError, ValueError):
            return None

    def write_order(self, order: LeaderOrder) -> None:
        """Raises OSError."""
        self._replace(_LEADER, order)

    def order(self) -> LeaderOrder | None:
        try:
            return msgspec.json.decode((self.directory / _LEADER).read_bytes(), type=LeaderOrder)
        except (OSError, ValueError):
            return None

    def other_nodes(self) -> "Iterator[NodeRecord]":
        """The records of the other nodes that have started. Raises OSError."""
        with os.scandir(self.directory) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith("node") and entry.is_dir())
        for name in names:
            if (rank := name.removeprefix("node")).isdecimal():
                yield NodeRecord(self.directory, int(rank))

    def snooze(self) -> Snooze | None:
        """The current snooze, by wall clock: the writer's monotonic clock belongs to another machine."""
        written: Snooze | None = None
        with contextlib.suppress(OSError, ValueError):
            written = msgspec.json.decode((self.directory / "snooze.json").read_bytes(), type=Snooze)
        if written is None or written.wall <= time.time():
            return None
        if self._snooze is None or self._snooze[0] != written.wall:
            here = msgspec.structs.replace(written, until=time.monotonic() + written.wall - time.time())
            self._snooze = (written.wall, here)
        return self._snooze[1]

    def begin_again(self, restart: int) -> None:
        """Renames the status of an earlier start, and removes its code. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            (self.directory / "status.json").replace(self.directory / f"status.{restart}.json")
        (self.directory / _RESULT).unlink(missing_ok=True)
        for code in self.directory.glob("code-*"):
            remove_tree(code, ignore_errors=True)


class NodeRecord(SlurmAttemptRecord):
    """The directory of one of the other nodes."""

    def __init__(self, attempt: Path, rank: int) -> None:
        super().__init__(attempt / f"node{rank}")
        self.rank = rank

    @property
    def id(self) -> str:
        """All nodes are one run."""
        return self.directory.parent.name

    def snooze(self) -> Snooze | None:
        """The leader judges."""
        return None

    def begin_again(self, restart: int) -> None:
        super().begin_again(restart)
        for path in self.directory.glob("facts.*"):
            path.unlink(missing_ok=True)

    def facts(self, explain: int) -> Path:
        """The file with its part of the report, for this request."""
        return self.directory / f"facts.{explain}"
