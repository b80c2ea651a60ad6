"""One attempt that this machine has taken on, as its worker sees it."""

import contextlib
import errno
import math
import os
import resource
import signal
import time
from pathlib import Path
from typing import Final

from stoker.engines.delivery import LogTail
from stoker.engines.local.attempt_spec import ATTEMPT_TAG, AppliedSnooze, AttemptRecord, AttemptSpec, conclusion
from stoker.engines.local.capacity import Allocation
from stoker.engines.local.messages import AttemptResult, ShimChannel, StopAttempt
from stoker.procfs import is_gone, stat
from stoker.queue.model import Snoozed
from stoker.runs.processes.cgroup import Cgroup
from stoker.runs.processes.tree import descends, find_tagged, kill_all, send
from stoker.runs.record import Snooze, Status

# Between two tries to find out what became of an attendant, doubled from try to try.
_FIRST_PAUSE: Final = 0.05
_LAST_PAUSE: Final = 5.0
# Descriptors that a worker needs besides those to its attendants: for the queue, the GPUs, the next jobs.
_SPARE_DESCRIPTORS: Final = 16
# Who is still there so long after a kill is blocked in a driver, and waiting on does not help.
_KILLING: Final = 30.0
# A stop takes its grace, the kill, and a look at the GPUs; whoever has said nothing so much later hears nothing.
_LONGEST_STOP: Final = 90.0
# One that somebody has stopped, or traces, and that does not go on when it is told to.
_LONGEST_DEAF: Final = 5.0
# The machine is out of something, which says nothing of what was asked for.
_WANTS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})


class RunningAttempt:
    """An attempt, the line to its attendant, and what is known of its end."""

    def __init__(self, record: AttemptRecord, attempt_spec: AttemptSpec, channel: ShimChannel | None) -> None:
        self.record = record
        self.attempt_spec = attempt_spec
        self.channel = channel
        self.excerpt = LogTail(record, attempt_spec)
        self.since = time.monotonic() - max(0.0, time.time() - attempt_spec.started)
        self.stopping = False
        self.over: AttemptResult | None = None
        """How it ended, once that is known."""
        self.recorded = False
        """Whether the queue has the outcome; what is missing then is the last of the output."""
        self.reaper_end = -1
        """A descriptor that becomes readable when the reaper of a job without an attendant is gone."""
        self.retry_at = math.inf
        """When it is tried again to find out who looks after the job, in monotonic seconds."""
        self._pause = _FIRST_PAUSE
        self._order: StopAttempt | None = None
        self._ordered_at = math.inf
        self._deaf_since: float | None = None
        self._killed_at: float | None = None
        self.snooze_trouble_told = False
        """Whether it was told that a snooze could not be written: it is tried again without a word."""
        self._heeded = self._kept = record.heeded()
        """The last snooze that somebody asked the queue for and that was heeded, and the one that the disk has."""

    @property
    def job(self) -> str:
        return self.attempt_spec.job

    @property
    def attempt(self) -> str:
        return self.attempt_spec.attempt

    def holding(self, used: dict[str, int] | None) -> Allocation:
        return Allocation(self.attempt_spec.want, self.attempt_spec.gpus, self.since, used=used, stopping=self.stopping)

    def owns(self, pid: int) -> bool:
        """Whether this process is the job's."""
        keepers = self.attempt_spec.keepers
        # What probes its batch size comes from its attendant, the job itself from its reaper.
        if descends(pid, keepers.reaper_identity.pid) or descends(pid, keepers.attendant_identity.pid):
            return True
        return keepers.cgroup is not None and pid in Cgroup(Path(keepers.cgroup)).pids()

    def stop(self, order: StopAttempt) -> None:
        self.stopping, self._order, self._ordered_at = True, order, time.monotonic()
        if self.channel is not None:
            self.channel.send(order)

    def rouse(self) -> None:
        """Makes an attendant go on that somebody has stopped: it must hear a cancellation, and renew its lease.

        One that cannot carry out an order is killed. Its reaper then stops the job.
        """
        if self.over is not None or self.channel is None:
            return
        attendant, moment = self.attempt_spec.keepers.attendant_identity, time.monotonic()
        found = stat(attendant.pid)
        if found is not None and found.identity == attendant and found.state in "Tt":
            send(attendant, signal.SIGCONT)
            self._deaf_since = self._deaf_since or moment
        else:
            self._deaf_since = None
        is_deaf = self._deaf_since is not None and moment > max(self._deaf_since, self._ordered_at) + _LONGEST_DEAF
        if is_deaf or moment > self._ordered_at + self.attempt_spec.plan.grace + _LONGEST_STOP:
            send(attendant, signal.SIGKILL)

    def heed(self, wish: Snoozed) -> bool:
        """Has its supervisor leave the job alone for as long as somebody asked the queue for; whether that was new.

        A wish that is not new is not written again: since then the job itself may have asked for something else. One
        that could not be written is new the next time too. Raises StokerError.
        """
        wished = AppliedSnooze(wish.until, wish.by)
        changed = wished != self._heeded and self._carry_out(wish)
        self._heeded = wished
        if self._kept != wished:
            # As long as the disk does not take it, it is known here at least.
            with contextlib.suppress(OSError):
                self.record.write_heeded(wished)
                self._kept = wished
        return changed

    def _carry_out(self, wish: Snoozed) -> bool:
        if wish.seconds > 0:
            self.record.write_snooze(Snooze(time.monotonic() + wish.seconds, time.time() + wish.seconds, wish.by))
            return True
        # Also one that an earlier worker wrote, or that somebody asked for on this machine.
        if self.record.snooze() is None:
            return False
        self.record.write_snooze(None)
        return True

    # Whoever looks after the job

    def reach(self) -> None:
        """Connects to the attendant. When it is gone: waits for the reaper, which stops the job, or concludes.

        Only proof of an end is one. What cannot be told just now is asked again later: until then the job goes on, and
        its attendant renews the lease itself.
        """
        self.retry_at = math.inf
        keepers = self.attempt_spec.keepers
        try:
            _check_descriptors()
            self.channel = ShimChannel(self.record.connect())
            self._pause = _FIRST_PAUSE
            if self._order is not None:
                self.channel.send(self._order)
        except OSError as error:
            nobody_listens = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
            if nobody_listens and self.record.status().state == "ended":
                self.conclude()  # its attendant is done with it, and may have another job by now
            elif not is_gone(keepers.attendant_identity):
                self._try_later()
            elif is_gone(keepers.reaper_identity):
                self.conclude()
            else:
                self._watch_reaper()

    def _watch_reaper(self) -> None:
        try:
            self.reaper_end = os.pidfd_open(self.attempt_spec.keepers.reaper_identity.pid)
        except OSError:
            self._try_later()
            return
        if is_gone(self.attempt_spec.keepers.reaper_identity):
            self.conclude()  # the descriptor is that of whoever has its pid now

    def _try_later(self) -> None:
        self.retry_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _LAST_PAUSE)

    def _forget_reaper(self) -> None:
        if self.reaper_end >= 0:
            os.close(self.reaper_end)
            self.reaper_end = -1

    def conclude(self) -> None:
        """Attendant and reaper are gone: stops what they may have left, and reads how it ended."""
        self._forget_reaper()
        try:
            status = self.record.last_status()
            is_over = status.state == "ended" or self._stop_leftovers()
        except OSError as error:
            is_over, status = error.errno not in _WANTS, Status()
        if is_over:
            self.over = AttemptResult(*conclusion(status))
        else:
            self._try_later()

    def conclude_after_reboot(self) -> None:
        """Nothing of it can be left, and no number of a process means anything any more."""
        status = self.record.status()
        if status.state == "ended":
            self.over = AttemptResult(*conclusion(status))
        else:
            self.over = AttemptResult("lost", None, "the machine was restarted while it ran")

    def _stop_leftovers(self) -> bool:
        self._killed_at = self._killed_at or time.monotonic()
        return stop_leftovers(self.record, self.attempt_spec) or time.monotonic() > self._killed_at + _KILLING


def stop_leftovers(record: AttemptRecord, attempt_spec: AttemptSpec) -> bool:
    """Both that looked after the job were killed, and nobody stopped it. Whether all is gone. Raises OSError."""
    place = attempt_spec.keepers.cgroup
    cgroup = Cgroup(Path(place)) if place is not None and Path(place).exists() else None
    if cgroup is not None:
        cgroup.kill()
    all_gone = kill_all(lambda: find_tagged("STOKER_RUN_DIR", str(record.directory)))
    all_gone = kill_all(lambda: find_tagged(ATTEMPT_TAG, attempt_spec.attempt)) and all_gone
    if cgroup is not None:
        all_gone = cgroup.remove() and all_gone
    return all_gone


def _check_descriptors() -> None:
    """Raises OSError when there are so few left that everything else would fail for the want of them."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if len(os.listdir("/proc/self/fd")) + _SPARE_DESCRIPTORS > most:  # noqa: PTH208 - one call
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
