"""One attempt inside its Slurm allocation: who stops it, and how its result reaches the disk.

It talks neither to the queue nor to Slurm. It reads orders from the attempt's directory, and writes status and result
there. If the directory is unreachable for almost as long as the lease, it stops the job: the worker then considers the
attempt lost and may start another.
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

# The interval of checks for orders. Network file systems send no change notifications.
POLL: Final = 1.0
_LONGEST_HEARTBEAT: Final = 10.0
# The job must have ended this long before Slurm's SIGKILL, so that the result gets written.
_KILL_MARGIN: Final = 3.0
# On a busy node, Slurm's signal reaches the last process this long after the first. The wait for it takes at most this
# share of a job's duration.
_SIGNAL_DELAY: Final = 0.1
_SIGNAL_SHARE: Final = 0.05
# A directory may appear late, and a full disk may be cleared.
PATIENCE: Final = 120.0
RETRY: Final = 0.5
# Slurm shows a job as cancelled only if Slurm ends it, so the shim waits for that.
_CANCELLED_WITHIN: Final = 20.0
FOLLOWER: Final = "--node"
"""The second argument of a shim on another node."""
# EX_TEMPFAIL: nothing was run.
NOT_RUN: Final = 75


def heartbeat_of(lease: float) -> float:
    """The interval of a shim's heartbeats in seconds."""
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
        """The attempt's own directory, which has the orders."""
        self._owner = self._mine = owner
        self._heartbeat = heartbeat_of(attempt_spec.lease)
        self._poll_at = self._beat_at = -1.0
        self._heard_at = lease_clock()
        """When the directory was last reachable."""
        self._killed_at: float | None = None
        """When Slurm's SIGKILL follows its SIGTERM."""
        self._began_at = lease_clock()
        """When the command started."""
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
        """Sends a heartbeat, and checks whether a newer start of the Slurm job has taken the attempt."""
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
        # The reaper stops the job if this process is suspended or hangs in a file system.
        self._reaper.set_deadline(self._attempt_spec.reaper_deadline(self._in_touch_at() + self._attempt_spec.lease))

    def _in_touch_at(self) -> float:
        """The last time when this process certainly held the lease."""
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
        """True if Slurm sent the signal to all processes of the job, and not only to the batch script.

        The reaper blocks signals, so a received one is pending there.
        """
        if self._killed_at is None:
            return False
        ends = time.monotonic() + _SIGNAL_DELAY
        while not (is_pending := has_pending(self._reaper.pid, signum)) and time.monotonic() < ends:
            time.sleep(_SIGNAL_DELAY / 10)
        return is_pending

    def max_grace(self) -> float:
        grace = self._stop_at() + self._attempt_spec.plan.grace - lease_clock()
        if self._killed_at is not None:
            grace = min(grace, self._killed_at - _KILL_MARGIN - lease_clock())
        return max(0.0, grace)

    def signal_delay(self, code: int) -> float:
        """Slurm signals the processes of a job one by one, this one last and the reaper before it. So a command that
        handles SIGTERM may have exited by then, with any code."""
        if has_pending(self._reaper.pid, signal.SIGTERM):
            return SIGNAL_SPREAD
        share = _SIGNAL_SHARE * (lease_clock() - self._began_at)
        return max(super().signal_delay(code), min(_SIGNAL_DELAY, share))

    def on_first_start(self) -> None:
        """Notes the start. The worker learns it from the status."""
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
        """Waits until the disk has the result. If that fails, the exit code of this process conveys it."""
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
        """The exit code for Slurm, which is the job's."""
        result = self._result
        if result is None or result.outcome == "requeued":
            return NOT_RUN
        if result.outcome == "succeeded":
            return 0
        return result.exit_code or STOPPED


def slurm_identity() -> tuple[int, int]:
    """The id of this Slurm job, and the number of its restarts."""
    return int(os.environ.get("SLURM_JOB_ID", "0")), int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def slurm_variables(whole: Mapping[str, str], nodes: int, rank: int) -> dict[str, str]:
    """Slurm's variables as a step with one task per node has them, consistent on all nodes."""
    return {
        **whole,
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NPROCS"), str(nodes)),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID"), str(rank)),
        "SLURM_LOCALID": "0",
    }
