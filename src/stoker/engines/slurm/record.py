"""What a worker and the shim in a Slurm job share: the attempt's directory on a file system that both see.

Beside what every attempt has:

    slurm.json   the id of the Slurm job, as soon as the worker knows it
    owner.json   which Slurm job runs the attempt; created by the first that comes, see `Owner`
    result.json  how the attempt ended, once that is certain
    stop.json    that the job is to be stopped, and why
    alive        touched by the shim every few seconds
    slurm.out    what the shim itself, or Slurm, printed

Of a job over several nodes, the directory is that of the first node, whose shim leads, with two more files:

    nodes.json   the nodes, and what they run; written before the leader starts the shims of the others
    leader.json  what the leader wants of them

and a directory `node1`, `node2`, … of each other node: a run's record with the node's own `output`, `alive` and
`facts.N`, its part of a report.
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
# How a run ends that Slurm, or somebody else, interrupted: whether it is started again only Slurm knows.
INTERRUPTED: Final = frozenset({"machine", "supervisor killed", "lease"})


class SlurmAttemptSpec(AttemptSpec, frozen=True, kw_only=True):
    """An attempt as one Slurm job."""

    kill_wait: float
    """How long Slurm waits between SIGTERM and SIGKILL."""
    nodes: int = 1
    exported: tuple[str, ...] = ()
    """Variables of the shim's environment that came with `sbatch`; all others are the node's own."""
    start_by: float | None = None
    """Its deadline, in seconds since the epoch: what still waits in Slurm then is ended."""


class SlurmJobId(msgspec.Struct, frozen=True):
    """The Slurm job of an attempt."""

    slurm_job: int
    launched: bool = False
    """Whether Slurm has started it on a node, though no shim may have begun there."""


class Owner(msgspec.Struct, frozen=True):
    """Who has the right to run the attempt: one Slurm job, or nobody any more.

    The file is created exclusively, by the shim or by the worker that gives the submission up. So a Slurm job that
    appears after the worker has given it up never runs anything.
    """

    slurm_job: int
    """0: the worker has given the submission up, and no Slurm job may run it."""
    restart: int = 0
    """How often Slurm has started the job again, as far as it knows: a controller that crashed has forgotten some."""
    host: str = ""
    start: str = ""
    """Which start of the job: no other has the same."""

    @property
    def is_void(self) -> bool:
        return self.slurm_job == 0


VOID: Final = Owner(0)


class StopOrder(msgspec.Struct, frozen=True):
    """That the shim is to stop the job."""

    cause: StopCause
    reason: str


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of one run of an attempt, and what they run."""

    start: str
    """That of the owner: a shim of an earlier start runs nothing."""
    run: int
    """Which run of this start it is: one that ran out of memory is followed by another."""
    names: tuple[str, ...]
    """As Slurm calls them, that of the leader first; the index is the rank of the node."""
    master_addr: str
    master_port: int
    command: tuple[str, ...]
    environment: dict[str, str]
    """Variables of the job that its attempt spec does not have."""
    slurm: dict[str, str]
    """Slurm's variables about the whole job, which differ in a step."""
    directory: str | None

    def rendezvous(self, rank: int) -> Rendezvous:
        return Rendezvous(len(self.names), rank, self.master_addr, self.master_port)


class LeaderOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader wants of the other nodes."""

    run: int
    explain: int = 0
    """How often it has asked for their parts of a report."""
    stop: bool = False
    ending: Ending = ""
    reason: str = ""


class SlurmAttemptRecord(AttemptRecord):
    """The directory of one attempt of the Slurm engine."""

    _snooze: tuple[float, Snooze] | None = None

    def attempt_spec(self) -> SlurmAttemptSpec | None:
        """None when its outcome was delivered, or the file is damaged. Raises OSError when it cannot be read."""
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
        """The owner: this one, or the one that came first. Raises OSError."""
        own = self.directory / f".owner-{owner.slurm_job}-{os.getpid()}-{time.monotonic_ns()}"
        write_atomically(own, msgspec.json.encode(owner), sync=True)
        try:
            # A link is created once, also on network file systems, and never half written.
            os.link(own, self.directory / _OWNER)
        except FileExistsError:
            if (first := self.owner()) is None:
                # A network file system may show late what is there: nobody may take it for his own meanwhile.
                raise OSError(errno.EAGAIN, "its owner cannot be read yet") from None
            return first
        finally:
            own.unlink(missing_ok=True)
        return owner

    def owner(self) -> Owner | None:
        """Raises OSError when it is there and cannot be read."""
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

    def replace_owner(self, owner: Owner) -> None:
        """For a later start of the same Slurm job. Raises OSError."""
        write_atomically(self.directory / _OWNER, msgspec.json.encode(owner), sync=True)

    def touch_owner(self) -> None:
        """The sign of life of a start that waits for the end of an earlier one. Raises OSError."""
        os.utime(self.directory / _OWNER)

    def write_result(self, result: AttemptResult) -> None:
        """Raises OSError."""
        self._replace(_RESULT, result)

    def result(self) -> AttemptResult | None:
        """None until the shim has written it."""
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
        """Needs no space on the disk after the first time. Raises OSError."""
        path = self.directory / _ALIVE
        try:
            os.utime(path)
        except FileNotFoundError:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def alive_version(self) -> int:
        """Another number after each touch; 0 before the first. Raises OSError when it cannot be looked at."""
        try:
            return os.stat(self.directory / _ALIVE).st_mtime_ns  # noqa: PTH116 - one call
        except FileNotFoundError:
            return 0

    def life_version(self) -> tuple[int, float | None]:
        """Another one after each sign of life of any start. Raises OSError when it cannot be looked at."""
        return self.alive_version(), self.begun_at()

    # The nodes of a job over several

    def write_nodes(self, group: NodeGroup) -> None:
        """Raises OSError."""
        self._replace(_NODES, group)

    def nodes(self) -> NodeGroup | None:
        """None until the leader has written it."""
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
        """The records of those other nodes that have begun. Raises OSError."""
        with os.scandir(self.directory) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith("node") and entry.is_dir())
        for name in names:
            if (rank := name.removeprefix("node")).isdecimal():
                yield NodeRecord(self.directory, int(rank))

    def snooze(self) -> Snooze | None:
        """By the time of day: the monotonic clock of the machine that wrote it is another one."""
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
        """Puts the status of an earlier start aside, and removes its code. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            (self.directory / "status.json").replace(self.directory / f"status.{restart}.json")
        (self.directory / _RESULT).unlink(missing_ok=True)
        for code in self.directory.glob("code-*"):
            remove_tree(code, ignore_errors=True)


class NodeRecord(SlurmAttemptRecord):
    """The directory of one of the other nodes of an attempt."""

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
        """The file with its part of the report, as the answer to this question."""
        return self.directory / f"facts.{explain}"
