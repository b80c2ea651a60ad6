"""One attempt inside its allocation: what stops it, and how its result gets on disk.

It speaks neither to the queue nor to Slurm. It reads orders from the attempt's directory, and writes there how the
attempt goes on and ends. When the directory cannot be reached for almost as long as the lease, it stops the job: the
worker then takes the attempt for lost, and may start another one.
"""

import os
import select
import signal
import time
from collections.abc import Mapping
from typing import Final

from stoker.engines.attempt import AttemptResult, lease_clock
from stoker.engines.execution import SIGNAL_SPREAD, STOP_SIGNALS, STOPPED, Execution
from stoker.engines.slurm.record import Owner, SlurmAttemptRecord, SlurmAttemptSpec
from stoker.gpus.prober import Prober
from stoker.gpus.visible import visible_gpus
from stoker.procfs import has_pending
from stoker.runs.loop import is_from_job
from stoker.runs.plan import IDLE_EXIT_CODE
from stoker.runs.processes.reaper import Reaper
from stoker.runs.processes.signals import Received, SignalStream
from stoker.runs.processes.syscalls import BootTimer
from stoker.runs.supervisor import StopRequest

# How soon an order is seen. Nothing tells a node that a file on a network file system has changed.
POLL: Final = 1.0
_LONGEST_HEARTBEAT: Final = 10.0
# Before Slurm's SIGKILL everything must be gone and written.
_BEFORE_KILL: Final = 3.0
# From the first to the last process that gets a signal of Slurm, on a busy node. No job is held up for that by more
# than this share of its time.
_SAME_SIGNAL: Final = 0.1
_SIGNAL_SHARE: Final = 0.05
# A directory that cannot be read may be late; a disk that is full may be cleared.
PATIENCE: Final = 120.0
RETRY: Final = 0.5
# Slurm reports a cancelled job as such only if it ended it: so the shim waits for that.
_CANCELLED_WITHIN: Final = 20.0
FOLLOWER: Final = "--node"
"""The second argument of a shim on another node."""
# As EX_TEMPFAIL: nothing was run.
NOT_RUN: Final = 75


def heartbeat_of(lease: float) -> float:
    """Seconds between two signs of life of a shim."""
    return min(_LONGEST_HEARTBEAT, lease / 10)


class SlurmExecution(Execution):
    """One attempt in its allocation."""

    _record: SlurmAttemptRecord
    _attempt_spec: SlurmAttemptSpec
    is_on_cluster = True

    def __init__(
        self,
        record: SlurmAttemptRecord,
        attempt_spec: SlurmAttemptSpec,
        owner: Owner,
        signals: SignalStream,
        reaper: Reaper,
        prober: Prober,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(record, attempt_spec, signals, reaper, prober, owner.host, environment)
        self._shared = record
        """Where orders come from: the attempt's own directory."""
        self._owner = self._mine = owner
        self._heartbeat = heartbeat_of(attempt_spec.lease)
        self._poll_at = self._beat_at = -1.0
        self._heard_at = lease_clock()
        """When the directory was last reached."""
        self._killed_at: float | None = None
        """When Slurm kills what is left, after its SIGTERM."""
        self._began_at = lease_clock()
        """When the command was started."""
        self._timer = BootTimer()
        self._fence()

    def fileno(self) -> int:
        return self._timer.fileno()

    def due(self) -> float:
        return self._poll_at

    def poll(self) -> StopRequest | None:
        if time.monotonic() < self._poll_at and lease_clock() < self._stop_at():
            return None
        self._poll_at = time.monotonic() + POLL
        if time.monotonic() >= self._beat_at:
            self._beat()
        if (request := self._ordered()) is not None:
            return request
        if lease_clock() >= self._stop_at():
            return StopRequest("lease", self._why_out_of_touch(), STOPPED)
        return None

    def _why_out_of_touch(self) -> str:
        return f"{self._shared.directory} could not be reached for so long that another attempt may run."

    def _beat(self) -> None:
        """A sign of life. A newer start of the same Slurm job has the attempt from then on."""
        before = lease_clock()
        try:
            self._record.touch_alive()
            owner = self._shared.owner()
        except OSError:
            return
        self._beat_at = time.monotonic() + self._heartbeat
        if owner is not None:
            self._owner = owner
        self._heard_at = before
        self._fence()

    def _fence(self) -> None:
        self._timer.ring_at(self._stop_at())
        # In case this process is suspended, or hangs in a file system.
        self._reaper.set_deadline(self._in_touch_at() + self._attempt_spec.lease - self._attempt_spec.margin / 2)

    def _in_touch_at(self) -> float:
        """When it was last certain that nobody else may run the job before the lease is over."""
        return self._heard_at

    def _stop_at(self) -> float:
        return self._in_touch_at() + self._attempt_spec.lease - self._attempt_spec.stop_before_end

    def _ordered(self) -> StopRequest | None:
        order = self._shared.stop_order()
        if order is not None:
            return StopRequest(order.cause, order.reason, STOPPED)
        if self._owner != self._mine:
            return StopRequest("lease", "Slurm has started the job again elsewhere.", STOPPED)
        return None

    def on_signal(self, received: Received) -> StopRequest | None:
        if is_from_job(received, self._reaper):
            return None
        if received.signal == signal.SIGUSR2:
            return StopRequest("time limit", "It had run for as long as Slurm allows.", IDLE_EXIT_CODE)
        if received.signal not in STOP_SIGNALS:
            return None
        self._killed_at = lease_clock() + self._attempt_spec.kill_wait
        return self._ordered() or StopRequest("machine", "Slurm asked it to end.", STOPPED)

    def job_has_signal(self, signum: int) -> bool:
        """Slurm sends its SIGTERM to all processes of a job, unless somebody wanted only the batch script to get it.

        The reaper handles no signals: one that it got is pending there.
        """
        if self._killed_at is None:
            return False
        ends = time.monotonic() + _SAME_SIGNAL
        while not (found := has_pending(self._reaper.pid, signum)) and time.monotonic() < ends:
            time.sleep(_SAME_SIGNAL / 10)
        return found

    def max_grace(self) -> float:
        grace = self._stop_at() + self._attempt_spec.plan.grace - lease_clock()
        if self._killed_at is not None:
            grace = min(grace, self._killed_at - _BEFORE_KILL - lease_clock())
        return max(0.0, grace)

    def signal_delay(self, code: int) -> float:
        """Slurm signals the processes of a job one by one, this one last: a command that handles SIGTERM may have ended
        before that, with any code. Between the two, the reaper gets the signal."""
        if has_pending(self._reaper.pid, signal.SIGTERM):
            return SIGNAL_SPREAD
        share = _SIGNAL_SHARE * (lease_clock() - self._began_at)
        return max(super().signal_delay(code), min(_SAME_SIGNAL, share))

    def on_first_start(self) -> None:
        """The worker sees the start by the status."""
        self._began_at = lease_clock()

    def announce(self, result: AttemptResult) -> None:
        self._write_result(result)

    def _write_result(self, result: AttemptResult) -> bool:
        try:
            self._record.write_result(result)
        except OSError:
            return False
        return True

    def wait_until_recorded(self) -> None:
        """Until the disk has the result. If it never takes it, the exit code of this process says how the job ended."""
        if self._result is None:
            return
        gives_up_at = lease_clock() + PATIENCE
        if self._killed_at is not None:
            gives_up_at = min(gives_up_at, self._killed_at)
        while not (self._write_outcome() and self._write_result(self._result)) and lease_clock() < gives_up_at:
            self._pause(RETRY)
        if self._result.outcome == "cancelled" and self._killed_at is None:
            ends = lease_clock() + _CANCELLED_WITHIN
            while lease_clock() < ends and not any(found.signal in STOP_SIGNALS for found in self._signals.read()):
                self._pause(RETRY)

    def _pause(self, seconds: float) -> None:
        if time.monotonic() >= self._beat_at:
            self._beat()
        select.select([self._signals.fileno()], [], [], seconds)

    def gpus(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in visible_gpus(self._prober.look().gpus, self._environment))

    @property
    def exit_code(self) -> int:
        """The exit code that Slurm sees: that of the job."""
        result = self._result
        if result is None or result.outcome == "requeued":
            return NOT_RUN
        if result.outcome == "succeeded":
            return 0
        return result.exit_code or STOPPED


def slurm_identity() -> tuple[int, int]:
    """The id of this Slurm job, and how often Slurm has started it again."""
    return int(os.environ.get("SLURM_JOB_ID", "0")), int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def slurm_variables(whole: Mapping[str, str], nodes: int, rank: int) -> dict[str, str]:
    """Slurm's variables as one step with a task on each node would have them, on every node alike."""
    return {
        **whole,
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NPROCS"), str(nodes)),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID"), str(rank)),
        "SLURM_LOCALID": "0",
    }
