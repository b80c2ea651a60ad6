"""The shim of an attempt on Slurm: the batch script's process, or the process on another node of a multi-node job.

The first supervises the attempt inside its allocation, see `execution.py`. In a multi-node job it leads (`leader.py`):
it starts a shim on each other node (`follower.py`) and reports for all.
"""

import contextlib
import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from stoker.engines.attempt import lease_clock
from stoker.engines.execution import redirect_stderr
from stoker.engines.slurm.execution import (
    FOLLOWER,
    NOT_RUN,
    PATIENCE,
    POLL,
    RETRY,
    SlurmExecution,
    slurm_identity,
    slurm_variables,
)
from stoker.engines.slurm.record import INTERRUPTED, NodeGroup, NodeRecord, Owner, SlurmAttemptRecord, SlurmAttemptSpec
from stoker.gpus.prober import Prober
from stoker.gpus.spawn import forked
from stoker.logs.writer import LogWriter
from stoker.paths import private_directory
from stoker.runs.processes.cgroup import NoCgroupError, remove_abandoned
from stoker.runs.processes.reaper import fork_reaper
from stoker.runs.processes.reaper_process import REAPER_NAME
from stoker.runs.processes.signals import FORWARDED, SignalStream
from stoker.runs.processes.syscalls import set_name
from stoker.runs.processes.tree import find_orphans, kill_all
from stoker.runs.run import record_orphan_stop
from stoker.units import list_all

T = TypeVar("T")

SHIM_NAME: Final = "stoker-shim"
_MOST_NAMES: Final = 8


def run(directory: Path) -> int:
    """Runs the attempt of this directory if this Slurm job may. Returns the exit code of the Slurm job."""
    record = SlurmAttemptRecord(directory)
    attempt_spec = _read_spec(record)
    if attempt_spec is None:
        return _refuse(f"there is no attempt in {directory}: it was given up")
    try:
        names = _node_names() if attempt_spec.nodes > 1 else (node_name(),)
    except ValueError as error:
        return _refuse(f"the nodes of the job are not known: {error}")
    try:
        owner = _own(record, attempt_spec, names)
    except OSError as error:
        return _refuse(f"{directory} cannot be written: {error.strerror}")
    if owner is None:
        return _refuse("the attempt has ended, or another Slurm job runs it")
    parts = _Parts(attempt_spec, directory)
    environment = job_environment(attempt_spec, os.environ)
    if attempt_spec.nodes == 1:
        execution = SlurmExecution(record, attempt_spec, owner, parts.signals, parts.reaper, parts.prober, environment)
    else:
        from stoker.engines.slurm.leader import LeaderExecution

        execution = LeaderExecution(
            record, attempt_spec, owner, parts.signals, parts.reaper, parts.prober, environment, names
        )
    return parts.run(execution)


def follow(directory: Path, start: str) -> int:
    """Runs this node's part of the attempt on the leader's orders. `start`: the leader's."""
    from stoker.engines.slurm.follower import FollowerExecution, as_follower

    shared = SlurmAttemptRecord(directory)
    attempt_spec, group = _read_spec(shared), _read_nodes(shared, start)
    if attempt_spec is None or group is None or node_name() not in group.names:
        return _refuse(f"nothing of the attempt in {directory} is to run on {node_name()}")
    rank = group.names.index(node_name())
    record = NodeRecord(directory, rank)
    try:
        private_directory(record.directory)
        owner = shared.owner()
        record.touch_alive()
    except OSError as error:
        return _refuse(f"{record.directory} cannot be written: {error.strerror}")
    if owner is None or owner.start != start or shared.stop_order() is not None:
        return _refuse("the attempt has ended, or another Slurm job runs it")
    attempt_spec = as_follower(attempt_spec, group, rank)
    parts = _Parts(attempt_spec, directory)
    environment = group.rendezvous(rank).fill_all(job_environment(attempt_spec, os.environ) | group.environment)
    execution = FollowerExecution(
        record,
        attempt_spec,
        owner,
        parts.signals,
        parts.reaper,
        parts.prober,
        environment | slurm_variables(group.slurm, len(group.names), rank),
        group,
    )
    return parts.run(execution)


class _Parts:
    """The resources of an execution."""

    def __init__(self, attempt_spec: SlurmAttemptSpec, directory: Path) -> None:
        source = os.environ.get("STOKER_GPUS") or attempt_spec.plan.source
        self.prober = Prober(source, deadline=attempt_spec.plan.deadline, start=forked)
        self.signals = SignalStream(FORWARDED)
        self._execution: SlurmExecution | None = None
        # Of jobs whose processes Slurm killed on this node: no worker is here to do that.
        with contextlib.suppress(OSError, NoCgroupError):
            remove_abandoned()
        # What is left of a job whose slurmstepd was killed together with its shim and reaper: Slurm has given its GPUs
        # away. Steps and other jobs that a job has started have a slurmstepd too.
        with contextlib.suppress(OSError):
            place = str(directory.parent)
            kill_all(lambda: [who for who, _ in find_orphans(place, SHIM_NAME, REAPER_NAME, "slurmstepd")])
        self.reaper = fork_reaper(
            orphaned=record_orphan_stop,
            helpers=lambda: () if self._execution is None else self._execution.helpers(),
            keeps_output=True,
        )
        redirect_stderr(self.reaper)

    def run(self, execution: SlurmExecution) -> int:
        self._execution = execution
        execution.run()
        self.reaper.close()
        return execution.exit_code


def _read_spec(record: SlurmAttemptRecord) -> SlurmAttemptSpec | None:
    """Reads the attempt spec, which may appear late on a network file system."""
    ends = time.monotonic() + (0.0 if record.directory.exists() else PATIENCE)
    while True:
        try:
            if (found := record.attempt_spec()) is not None or time.monotonic() >= ends:
                return found
        except OSError:
            if time.monotonic() >= ends:
                return None
        time.sleep(RETRY)


def _read_nodes(record: SlurmAttemptRecord, start: str) -> NodeGroup | None:
    """Reads the nodes of this start, which may appear late on a network file system."""
    ends = time.monotonic() + PATIENCE
    while True:
        group = record.nodes()
        if group is not None and group.start == start:
            return group
        if time.monotonic() >= ends:
            return None
        time.sleep(RETRY)


def _own(record: SlurmAttemptRecord, attempt_spec: SlurmAttemptSpec, names: tuple[str, ...]) -> Owner | None:
    """Makes this start of this Slurm job the owner of the attempt; None if it may not be. Raises OSError.

    The latest start wins, whatever Slurm's count of restarts says.
    """
    slurm_job, restart = slurm_identity()
    shown = names if len(names) <= _MOST_NAMES else (*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} more")
    mine = Owner(slurm_job, restart, list_all(list(shown)), os.urandom(8).hex())
    if record.stop_order() is not None:
        return None
    found = _retried(lambda: record.take(mine))
    if found == mine:
        return mine
    if found.slurm_job != slurm_job:
        return None
    result, status = record.result(), record.status()
    # A status without a result may come from a batch size that was too large.
    has_ended = result is not None or (status.state == "ended" and attempt_spec.fitting is None)
    if has_ended and status.ending not in INTERRUPTED:
        return None
    _retried(lambda: record.replace_owner(mine))
    if not _wait_for_earlier(record, attempt_spec):
        return None
    _retried(lambda: record.begin_again(found.restart))
    log = LogWriter(record.output, attempt_spec.log_limit)
    log.write(f"stoker: Slurm started the job again on {mine.host}\n".encode())
    log.close()
    return mine


def _retried(change: Callable[[], T]) -> T:
    """Retries a change while the disk is full or away. Raises OSError after a while."""
    ends = lease_clock() + PATIENCE
    while True:
        try:
            return change()
        except OSError:
            if lease_clock() >= ends:
                raise
        time.sleep(RETRY)


def _wait_for_earlier(record: SlurmAttemptRecord, attempt_spec: SlurmAttemptSpec) -> bool:
    """Waits until an earlier start has ended on all its nodes, by status or by silence. Sends heartbeats.

    False if the job must stop.
    """
    versions: dict[Path, int] = {}
    silent_since = lease_clock()
    while True:
        try:
            left = [one for one in (record, *record.other_nodes()) if one.status().state != "ended"]
            found = {one.directory: one.alive_version() for one in left}
        except OSError:
            left, found = [record], versions
        if not left or lease_clock() >= silent_since + attempt_spec.lease:
            return True
        if found != versions:
            versions, silent_since = found, lease_clock()
        if record.stop_order() is not None:
            return False
        with contextlib.suppress(OSError):
            record.touch_owner()
        time.sleep(POLL)


def node_name() -> str:
    """Slurm's name of this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _node_names() -> tuple[str, ...]:
    """All nodes of the allocation, this one first. Raises ValueError."""
    from stoker.engines.slurm.answers import expand_hosts

    found = expand_hosts(os.environ.get("SLURM_JOB_NODELIST", ""))
    return (node_name(), *(name for name in found if name != node_name()))


def job_environment(attempt_spec: SlurmAttemptSpec, here: Mapping[str, str]) -> dict[str, str]:
    """The job's environment: its own, and what Slurm and the node add.

    SLURM_CONF is what the node says: without it, `srun` in the job may find no cluster.
    """
    added = {name: here[name] for name in here if name == "SLURM_CONF" or name not in attempt_spec.exported}
    return attempt_spec.environment | added


def _refuse(why: str) -> int:
    sys.stderr.write(f"stoker: {why}\n")
    return NOT_RUN


def main() -> None:
    """Runs the shim of the batch script, or of another node."""
    # Loaded modules stay for the whole run.
    gc.freeze()
    gc.enable()
    set_name(SHIM_NAME)
    directory = Path(sys.argv[1])
    code = follow(directory, sys.argv[3]) if sys.argv[2:3] == [FOLLOWER] else run(directory)
    # Everything is written, and interpreter shutdown would take a tenth of the total time.
    os._exit(code)


if __name__ == "__main__":
    main()
