"""One attempt that this machine has taken on, as its worker sees it."""

import contextlib
import os
import time
from pathlib import Path

from stoker.queue.model import Snoozed
from stoker.runs.cgroup import Cgroup
from stoker.runs.marks import kill_marked
from stoker.runs.processes import descends, identify, is_alive
from stoker.runs.record import Snooze
from stoker.worker.assignment import Assignment, AttemptRecord, Heeded, conclusion
from stoker.worker.capacity import Holding
from stoker.worker.delivery import Excerpt
from stoker.worker.messages import Channel, Over, Stop


class Engagement:
    """An attempt, the line to its attendant, and what is known of its end."""

    def __init__(self, record: AttemptRecord, assignment: Assignment, channel: Channel | None) -> None:
        self.record = record
        self.assignment = assignment
        self.channel = channel
        self.excerpt = Excerpt(record, assignment)
        self.since = time.monotonic() - max(0.0, time.time() - assignment.started)
        self.stopping = False
        self.over: Over | None = None
        """How it ended, once that is known."""
        self.recorded = False
        """Whether the queue has the outcome; what is missing then is the last of the output."""
        self.guardian_end = -1
        """A descriptor that becomes readable when the guardian of a job without an attendant is gone."""
        self.snooze_trouble_told = False
        """Whether it was told that a snooze could not be written: it is tried again without a word."""
        self._heeded = self._kept = record.heeded()
        """The last snooze that somebody asked the queue for and that was heeded, and the one that the disk has."""

    @property
    def job(self) -> str:
        return self.assignment.job

    @property
    def attempt(self) -> str:
        return self.assignment.attempt

    def holding(self, used: dict[str, int] | None) -> Holding:
        return Holding(self.assignment.want, self.assignment.gpus, self.since, used=used, stopping=self.stopping)

    def owns(self, pid: int) -> bool:
        """Whether this process is the job's."""
        keepers = self.assignment.keepers
        # What probes its batch size comes from its attendant, the job itself from its guardian.
        if descends(pid, keepers.guardian_identity.pid) or descends(pid, keepers.attendant_identity.pid):
            return True
        return keepers.cgroup is not None and pid in Cgroup(Path(keepers.cgroup)).pids()

    def stop(self, order: Stop) -> None:
        self.stopping = True
        if self.channel is not None:
            self.channel.send(order)

    def heed(self, wish: Snoozed) -> bool:
        """Has its supervisor leave the job alone for as long as somebody asked the queue for; whether that was new.

        A wish that is not new is not written again: since then the job itself may have asked for something else. One
        that could not be written is new the next time too. Raises StokerError.
        """
        wished = Heeded(wish.until, wish.by)
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

    # When the attendant was killed

    def watch_guardian(self) -> bool:
        """Whether the guardian still lives, and stops the job: then `guardian_end` tells when it is done."""
        guardian = self.assignment.keepers.guardian_identity
        try:
            self.guardian_end = os.pidfd_open(guardian.pid)
        except OSError:
            return False
        if identify(guardian.pid) == guardian and is_alive(guardian):
            return True
        self.forget_guardian()
        return False

    def forget_guardian(self) -> None:
        if self.guardian_end >= 0:
            os.close(self.guardian_end)
            self.guardian_end = -1

    def conclude(self) -> None:
        """Attendant and guardian are gone: stops what they may have left, and reads how it ended."""
        self.forget_guardian()
        status = self.record.status()
        if status.state != "ended":
            self._kill_leftovers()
        self.over = Over(*conclusion(status))

    def conclude_after_reboot(self) -> None:
        """Nothing of it can be left, and no number of a process means anything any more."""
        status = self.record.status()
        if status.state == "ended":
            self.over = Over(*conclusion(status))
        else:
            self.over = Over("lost", None, "the machine was restarted while it ran")

    def _kill_leftovers(self) -> None:
        """Both that looked after the job were killed, and nobody stopped it."""
        cgroup = self.assignment.keepers.cgroup
        if cgroup is not None and Path(cgroup).exists():
            Cgroup(Path(cgroup)).kill()
            Cgroup(Path(cgroup)).remove()
        kill_marked("STOKER_RUN_DIR", str(self.record.directory))
