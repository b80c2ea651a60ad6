"""One machine of a chaos run: a worker that is restarted as by a service manager, a disk, clocks, and processes."""

import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from stoker.procfs import Identity, identify, stat
from stoker.runs.processes.tree import children, send
from tests.support.disk import Disk
from tests.support.faults import Faults
from tests.support.job_journal import journal_clock
from tests.support.work_site import RunningWorker, WorkSite

WORKER, SUPERVISOR, REAPER, FORK_SERVER = "stoker", "stoker-shim", "stoker-reaper", "stoker-forksrv"
JOB: Final = "marking_job"
BETWEEN_STARTS: Final = 0.2
# Of hundreds of processes most are others', and a pid is given away again after minutes at the earliest.
STRANGER_FOR: Final = 2.0
OF_STOKER: Final = (WORKER, SUPERVISOR, REAPER, FORK_SERVER)


class JobProcesses(NamedTuple):
    """A running job with its supervisor and reaper."""

    attempt: str
    """JOB-NUMBER."""
    job: Identity
    reaper: Identity
    supervisor: Identity

    @property
    def seconds(self) -> float:
        """How long the job is."""
        try:
            return float(Path(f"/proc/{self.job.pid}/cmdline").read_bytes().split(b"\0")[2])
        except (OSError, IndexError, ValueError):
            return 0.0


class Host:
    """The processes of one machine, its kernel and its clocks."""

    def __init__(self, directory: Path, number: int, home: Path) -> None:
        """`home`: where its attempts are."""
        self.number = number
        self.home = home
        self.faults = Faults(directory / f"faults-{number}")
        self.disk: Disk | None = None
        self.suspended = False
        self._strangers: dict[int, float] = {}
        """Processes that are not of this machine, and until when that is believed."""

    def is_here(self, environment: list[bytes]) -> bool:
        """Whether a process with this environment runs on it."""
        return f"STOKER_HOME={self.home}".encode() in environment

    # Its processes

    def processes(self) -> dict[int, str]:
        """By pid: what each is called."""
        moment = time.monotonic()
        self._strangers = {pid: until for pid, until in self._strangers.items() if until > moment}
        found: dict[int, str] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of names, one call
            if not name.isdigit() or (pid := int(name)) in self._strangers:
                continue
            if not self.is_here(_environment(pid)):
                self._strangers[pid] = moment + STRANGER_FOR
                continue
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        return found

    def called(self, *names: str) -> list[Identity]:
        return [who for pid, name in sorted(self.processes().items()) if name in names and (who := identify(pid))]

    def running(self) -> list[JobProcesses]:
        """The jobs that run now with all who look after them."""
        found = []
        for job in self.called(JOB):
            reaper = _parent(job, REAPER)
            supervisor = _parent(reaper, SUPERVISOR) if reaper is not None else None
            attempt = attempt_of(job.pid)
            if reaper is not None and supervisor is not None and attempt:
                found.append(JobProcesses(attempt, job, reaper, supervisor))
        return found

    def stop_all(self) -> list[Identity]:
        """Stops every process of it, until none is left that was not stopped."""
        stopped: set[Identity] = set()
        while fresh := {who for pid in self.processes() if (who := identify(pid))} - stopped:
            for who in fresh:
                send(who, signal.SIGSTOP)
            stopped |= fresh
        # Supervisors and reapers continue before their jobs, as nearly as possible.
        return sorted(stopped, key=lambda who: _name(who.pid) == JOB)


class Machine(Host):
    """A home on a separate disk, and the processes started there."""

    def __init__(
        self,
        site: WorkSite,
        number: int,
        arguments: tuple[str, ...],
        *,
        mounts: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: of its workers, beside that of the site."""
        place = site.directory / f"machine-{number}"
        place.mkdir()
        super().__init__(site.directory, number, place / "home")
        self._site = site
        self._arguments = arguments
        self._environment = {**self.faults.environment, **(environment or {})}
        if mounts:
            with contextlib.suppress(OSError):
                self.disk = Disk(place)
        self.limit: int | None = None
        """How many descriptors its next worker may have."""
        self.keys: set[str] = set()
        """What the ids of its workers begin with."""
        self._workers: list[RunningWorker] = []
        self.starts = 0
        self._start_at = 0.0
        self._ready = False
        self._down_since = journal_clock()

    @property
    def worker(self) -> RunningWorker | None:
        return self._workers[-1] if self._workers else None

    def keep(self) -> None:
        """As a service manager does: a worker that ended is started again."""
        if self.suspended:
            return
        ended = self.worker is None or self.worker.process.poll() is not None
        if ended and self._ready:
            self._ready, self._down_since = False, journal_clock()
        if ended and time.monotonic() >= self._start_at:
            self.start_worker()
        with contextlib.suppress(OSError):
            for lock in self.home.glob("worker-*.lock"):
                if key := re.match(r"[0-9a-z]+", lock.read_text()):
                    self.keys.add(key[0])

    def came_up(self) -> float | None:
        """Since when there was no worker at work, in the moment when there is one again."""
        if self._ready or self.worker is None or "at work for" not in self.worker.said:
            return None
        self._ready = True
        return self._down_since

    def start_worker(self) -> None:
        # As service managers do: a worker that cannot start must not use up the machine.
        self._start_at = time.monotonic() + BETWEEN_STARTS
        said = self._site.directory / f"worker-{self.number}-{self.starts}.txt"
        prefix = ("prlimit", f"--nofile={self.limit}:") if self.limit is not None else ()
        # A full disk has no room for a deleted home; the next try may find some.
        with contextlib.suppress(OSError):
            worker = self._site.work(
                *self._arguments, home=self.home, environment=self._environment, prefix=prefix, said=said
            )
            self.starts += 1
            self._workers.append(worker)

    def mistakes(self) -> list[str]:
        """What no worker that had begun to work should ever say. Python itself may be unable to start."""
        return [
            line
            for worker in self._workers
            if "at work for" in worker.said
            for line in worker.said.splitlines()
            if "Traceback" in line or "internal error" in line
        ]


def limit_descriptors(those: Iterable[Identity]) -> list[tuple[Identity, tuple[int, int]]]:
    """They may open no more; what was allowed before."""
    before = []
    for who in those:
        with contextlib.suppress(OSError, ProcessLookupError):
            held = len(os.listdir(f"/proc/{who.pid}/fd"))  # noqa: PTH208 - as above
            soft, hard = resource.prlimit(who.pid, resource.RLIMIT_NOFILE)
            if identify(who.pid) == who:
                resource.prlimit(who.pid, resource.RLIMIT_NOFILE, (held, hard))
                before.append((who, (soft, hard)))
    return before


def lift_limits(before: Iterable[tuple[Identity, tuple[int, int]]]) -> None:
    for who, limits in before:
        with contextlib.suppress(OSError, ProcessLookupError):
            if identify(who.pid) == who:
                resource.prlimit(who.pid, resource.RLIMIT_NOFILE, limits)


def attempt_of(pid: int) -> str:
    """The name of the attempt that this process belongs to, if any."""
    for variable in _environment(pid):
        name, _, value = variable.decode(errors="replace").partition("=")
        if name == "STOKER_RUN_DIR":
            # Each other node of a job over several has a directory in that of the attempt.
            return next(part for part in reversed(Path(value).parts) if not re.fullmatch(r"node\d+", part))
    return ""


def attempts_below(pid: int) -> set[str]:
    """Attempts of all jobs below this process."""
    below = children(pid)
    found = {attempt_of(child) for child in below if _name(child) == JOB}
    return found.union(*(attempts_below(child) for child in below)) - {""}


def _parent(of: Identity, called: str) -> Identity | None:
    found = stat(of.pid)
    above = stat(found.parent) if found is not None and found.identity == of else None
    return above.identity if above is not None and above.name == called else None


def _name(pid: int) -> str:
    found = stat(pid)
    return found.name if found is not None else ""


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
