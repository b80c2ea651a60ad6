"""The worker's view of local attempts: connections to shims, results, and attempts of earlier workers."""

import errno
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from stoker.backoff import Backoff
from stoker.engines.attempt import ATTEMPT_TAG, AttemptResult, StopCause, result_of
from stoker.engines.engine import CannotTellError, Found, RunningAttempt
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.capacity import Allocation
from stoker.engines.local.record import (
    SHIM_NAME,
    LeaseRenewed,
    LocalAttemptRecord,
    LocalAttemptSpec,
    ResultRecorded,
    ShimChannel,
    StopAttempt,
    has_shim,
)
from stoker.procfs import Identity, boot_id, is_gone, stat
from stoker.queue import Attempt, queue_address
from stoker.runs.processes.cgroup import Cgroup
from stoker.runs.processes.reaper_process import REAPER_NAME
from stoker.runs.processes.tree import descends, find_orphans, find_tagged, has_ancestor_named, kill_all, send
from stoker.runs.record import Status

# The delay between two checks on a missing shim, doubled each time.
_FIRST_PAUSE: Final = 0.05
_LAST_PAUSE: Final = 5.0
# File descriptors that a worker needs for the queue, the GPUs and the next jobs.
_SPARE_DESCRIPTORS: Final = 16
# A process that survives SIGKILL this long is blocked in a driver; waiting does not help.
_KILLING: Final = 30.0
# A stop takes its grace, the kill, and a look at the GPUs. A shim that takes longer is hung.
_LONGEST_STOP: Final = 90.0
# A suspended or traced shim that ignores SIGCONT this long is killed.
_LONGEST_SUSPENSION: Final = 5.0
# Errors of a machine short of resources, which prove nothing about the attempt.
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})


class LocalAttempt(RunningAttempt):
    """An attempt under a shim on this machine."""

    record: LocalAttemptRecord
    spec: LocalAttemptSpec

    def __init__(self, record: LocalAttemptRecord, attempt_spec: LocalAttemptSpec, channel: ShimChannel | None) -> None:
        super().__init__(record, attempt_spec)
        self.channel = channel
        self.reaper_exit = -1
        """The pidfd of the reaper, once the shim is dead."""
        self.retry_at = math.inf
        """When to check on the shim again, in monotonic seconds."""
        self.ended_at = math.inf
        """When the result arrived, in monotonic seconds."""
        self._is_unacknowledged = False
        self._backoff = Backoff(_FIRST_PAUSE, _LAST_PAUSE)
        self._stop: StopAttempt | None = None
        self._stopped_at = math.inf
        self._suspended_since: float | None = None
        self._killed_at: float | None = None

    @property
    def is_settled(self) -> bool:
        # A shim closes the connection or reports ready once log and report are complete.
        return self.result is not None and self.channel is None

    def allocation(self, used: dict[str, int] | None) -> Allocation:
        return Allocation(self.spec.request, self.spec.gpus, self.since, used=used, stopping=self.stopping)

    def owns(self, pid: int) -> bool:
        """True if this process belongs to the job."""
        processes = self.spec.processes
        # Batch-size probes descend from the shim, the job itself from the reaper.
        if descends(pid, processes.reaper.pid) or descends(pid, processes.shim.pid):
            return True
        return processes.cgroup is not None and pid in Cgroup(Path(processes.cgroup)).pids()

    def stop(self, cause: StopCause, reason: str) -> None:
        self.stopping, self._stop, self._stopped_at = True, StopAttempt(cause, reason), time.monotonic()
        if self.channel is not None:
            self.channel.send(self._stop)

    def renewed(self, until: float) -> None:
        if self.channel is not None:
            self.channel.send(LeaseRenewed(until))

    def acknowledge(self) -> None:
        """Deferred to `send_acknowledgement`: the shim's cleanup would take a core from the job that starts now."""
        self._is_unacknowledged = True

    def send_acknowledgement(self) -> None:
        if self._is_unacknowledged and self.channel is not None:
            self.channel.send(ResultRecorded())
        self._is_unacknowledged = False

    def lose_shim(self) -> None:
        """The shim has closed the connection: it has finished, or was killed."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
            if self.result is None:
                self.connect()

    def check_shim(self) -> None:
        """Continues a suspended shim, which must receive cancellations and renew its lease.

        A shim that fails to carry out a stop is killed; its reaper then stops the job.
        """
        if self.result is not None or self.channel is None:
            return
        shim, moment = self.spec.processes.shim, time.monotonic()
        found = stat(shim.pid)
        if found is not None and found.identity == shim and found.state in "Tt":
            send(shim, signal.SIGCONT)
            self._suspended_since = self._suspended_since or moment
        else:
            self._suspended_since = None
        is_suspended = (
            self._suspended_since is not None
            and moment > max(self._suspended_since, self._stopped_at) + _LONGEST_SUSPENSION
        )
        if is_suspended or moment > self._stopped_at + self.spec.plan.grace + _LONGEST_STOP:
            send(shim, signal.SIGKILL)

    def connect(self) -> None:
        """Connects to the shim. If it is dead, waits for the reaper to stop the job, or concludes.

        Only proof ends an attempt. If the state is unknown, this is tried again later; the job keeps running, and its
        shim renews the lease itself.
        """
        self.retry_at = math.inf
        processes = self.spec.processes
        try:
            _check_descriptors()
            self.channel = ShimChannel(self.record.connect())
            self._backoff.reset()
            if self._stop is not None:
                self.channel.send(self._stop)
        except OSError as error:
            refused = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
            if refused and self.record.status().state == "ended":
                self.conclude()  # the shim has finished, and may run another attempt by now
            elif not is_gone(processes.shim):
                self._try_later()
            elif is_gone(processes.reaper):
                self.conclude()
            else:
                self._watch_reaper()

    def _watch_reaper(self) -> None:
        try:
            self.reaper_exit = os.pidfd_open(self.spec.processes.reaper.pid)
        except OSError:
            self._try_later()
            return
        if is_gone(self.spec.processes.reaper):
            self.conclude()  # the pid was reused, so the pidfd belongs to another process

    def _try_later(self) -> None:
        self.retry_at = time.monotonic() + self._backoff.next()

    def conclude(self) -> None:
        """Shim and reaper are dead: kills leftovers of the job, and reads its last status."""
        if self.reaper_exit >= 0:
            os.close(self.reaper_exit)
            self.reaper_exit = -1
        try:
            status = self.record.checked_status()
            has_ended = status.state == "ended" or kill_leftovers(self.record, self.spec)
            if not has_ended:
                self._killed_at = self._killed_at or time.monotonic()
                has_ended = time.monotonic() > self._killed_at + _KILLING
        except OSError as error:
            has_ended, status = error.errno not in _SHORTAGES, Status()
        if has_ended:
            self.result = result_of(status, self.spec.requeue_at_limit, self.record.output)
        else:
            self._try_later()

    def conclude_after_reboot(self) -> None:
        """The reboot ended all its processes, and its pids are meaningless."""
        status = self.record.status()
        if status.state == "ended":
            self.result = result_of(status, self.spec.requeue_at_limit, self.record.output)
        else:
            self.result = AttemptResult("lost", None, "the machine was restarted while it ran")


def kill_leftovers(record: LocalAttemptRecord, attempt_spec: LocalAttemptSpec) -> bool:
    """Kills a job whose shim and reaper are both dead. True once all its processes are gone. Raises OSError."""
    path = attempt_spec.processes.cgroup
    cgroup = Cgroup(Path(path)) if path is not None and Path(path).exists() else None
    if cgroup is not None:
        cgroup.kill()
    all_gone = kill_all(lambda: find_tagged("STOKER_RUN_DIR", str(record.directory)))
    all_gone = kill_all(lambda: find_tagged(ATTEMPT_TAG, attempt_spec.attempt)) and all_gone
    if cgroup is not None:
        all_gone = cgroup.remove() and all_gone
    return all_gone


def _check_descriptors() -> None:
    """Raises OSError if too few file descriptors are left for the rest of the worker."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if len(os.listdir("/proc/self/fd")) + _SPARE_DESCRIPTORS > most:  # noqa: PTH208 - one call
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def find_attempts(identity: WorkerIdentity, queue: str | None, known: Collection[str] = ()) -> Found[LocalAttempt]:
    """Attempts of earlier workers that are not in `known`; some have ended.

    Works without the queue. Unsupervised jobs are killed first, since another machine may start them when the lease
    ends.
    """
    address = str(queue_address(queue))
    found: list[LocalAttempt] = []
    complete = True
    try:
        _kill_orphans(identity)
        names = sorted(os.listdir(identity.directory / "attempts"))  # noqa: PTH208 - thousands of names, one call
    except FileNotFoundError:
        return Found((), True)
    except OSError:
        return Found((), False)
    for name in names:
        record = LocalAttemptRecord(identity.directory / "attempts" / name)
        try:
            attempt_spec = record.attempt_spec()
        except OSError:
            complete = False
            continue
        if attempt_spec is None or attempt_spec.attempt in known or attempt_spec.host != identity.host:
            continue
        if str(queue_address(attempt_spec.queue)) != address:
            continue  # another queue's worker takes care of it
        attempt = LocalAttempt(record, attempt_spec, None)
        if attempt_spec.boot == boot_id():
            attempt.connect()
        else:
            attempt.conclude_after_reboot()
        found.append(attempt)
    return Found(tuple(found), complete)


def is_supervised(identity: WorkerIdentity, attempt: Attempt) -> bool:
    """True if the attempt runs under a supervisor although `find_attempts` missed it, as after deleting its files.

    Unsupervised processes of it are killed. Raises CannotTellError.
    """
    directory = identity.directory_of(attempt.job, attempt.number)
    if LocalAttemptRecord(directory).has_attempt():
        return True
    try:
        if has_shim(directory) or any(map(_has_supervisor, find_tagged(ATTEMPT_TAG, attempt.id))):
            return True
        return not kill_all(lambda: find_tagged(ATTEMPT_TAG, attempt.id))
    except OSError as error:
        raise CannotTellError(str(error)) from None


def _kill_orphans(identity: WorkerIdentity) -> None:
    """Kills processes of attempts that have neither files nor supervisors. Raises OSError."""
    place = str(identity.directory / "attempts")
    kill_all(
        lambda: [who for who, directory in find_orphans(place, REAPER_NAME, SHIM_NAME) if not _is_recorded(directory)]
    )


def _is_recorded(directory: str) -> bool:
    """True if the attempt has a record, which names its supervisor or its end."""
    return any(os.path.exists(f"{directory}/{name}") for name in ("attempt.json", "delivered.json"))  # noqa: PTH110 - text


def _has_supervisor(who: Identity) -> bool:
    return has_ancestor_named(who, REAPER_NAME, SHIM_NAME)


def unsupervised(home: Path, names: Collection[str]) -> set[str]:
    """The attempts without a supervisor, after killing their leftovers. Raises OSError."""
    found = set()
    for name in names:
        record = LocalAttemptRecord(home / "attempts" / name)
        attempt_spec = record.attempt_spec()
        if attempt_spec is None or attempt_spec.host != socket.gethostname() or attempt_spec.boot != boot_id():
            found.add(name)  # delivered, or on another machine that shares the home
            continue
        is_alone = is_gone(attempt_spec.processes.shim) and is_gone(attempt_spec.processes.reaper)
        if is_alone and (record.checked_status().state == "ended" or kill_leftovers(record, attempt_spec)):
            found.add(name)
    return found
