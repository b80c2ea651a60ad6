"""Random faults over a queue of short jobs: kills, stops, full disks, failing calls, clocks that are set.

What happens is drawn from a seed: the same seed gives the same faults in the same order on the same machines. Whom
they meet there depends on the moment.
"""

import contextlib
import errno
import random
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from stoker.procfs import Identity, is_alive
from stoker.queue import JobSpec, QueueAwayError, open_queue
from stoker.queue.model import ENDED
from stoker.runs.processes.tree import children, send
from tests.support.chaos_judge import Condition, Evidence, Submitted, judge
from tests.support.chaos_machine import (
    FORK_SERVER,
    OF_STOKER,
    SUPERVISOR,
    WORKER,
    Host,
    JobProcesses,
    Machine,
    attempts_below,
    lift_limits,
    limit_descriptors,
)
from tests.support.faults import Call
from tests.support.job_journal import JobJournal, journal_clock
from tests.support.postgres import PostgresServer
from tests.support.work_site import WorkSite

LEASE: Final = 8.0
GRACE: Final = 1.5
WORK: Final = ("--lease", f"{LEASE:g}s", "--grace", f"{GRACE:g}s", "--cpu-jobs", "3")

# How often each is the next, in parts of their sum.
KINDS: Final = {
    "kill worker": 10,
    "kill supervisor": 10,
    "kill reaper": 6,
    "kill job": 8,
    "kill spare supervisor": 3,
    "kill fork server": 3,
    "kill all three": 6,
    "stop worker": 3,
    "stop supervisor": 3,
    "stop reaper": 3,
    "stop fork server": 3,
    "suspend": 3,
    "sleep": 3,
    "clock forward": 4,
    "clock backward": 4,
    "full disk": 5,
    "no inodes": 4,
    "EIO": 5,
    "ENOSPC": 5,
    "EMFILE": 5,
    "ENOMEM": 5,
    "EAGAIN": 5,
    "descriptor limit": 5,
    "restart with few descriptors": 3,
    "delete attempts": 3,
    "delete home": 3,
    "kill database": 5,
    "freeze database": 3,
    "lock database": 3,
    "database disk": 4,
}
ONLY_POSTGRES: Final = {"kill database", "freeze database"}
ONLY_SQLITE: Final = {"lock database", "database disk"}
# Longer than a lease: most of a short run would be waiting for them.
LONG: Final = {"suspend"}

# Each of these has its own rule, so that two may be there at once.
RULE: Final = {"EIO": 0, "ENOSPC": 1, "EMFILE": 2, "ENOMEM": 3, "EAGAIN": 4, "full disk": 5, "no inodes": 6}
DATABASE_RULE: Final = 7
FILES: Final = Call.OPEN | Call.WRITE | Call.SYNC | Call.NAME
CALLS: Final = {
    "EIO": FILES | Call.READ,
    "ENOSPC": FILES,
    "EMFILE": Call.OPEN | Call.SOCKET | Call.HANDLE,
    "ENOMEM": Call.OPEN | Call.SOCKET | Call.HANDLE | Call.FORK,
    "EAGAIN": Call.FORK,
}
ON_DISK: Final = {"EIO", "ENOSPC"}

LONGEST_CONDITION: Final = 2.0
LONGEST_OUTAGE: Final = 2.0
# Of the stops and outages, this share outlives a lease.
LONG_SHARE: Final = 0.12
# Waiting and running, per machine.
BACKLOG: Final = 5
# For a victim of the wanted kind.
LONGEST_WAIT: Final = 3.0
# From the last fault to the last outcome: a lease or two, pauses of workers, and the jobs that are left.
LONGEST_END: Final = 150.0
# A worker that was started kills what the one before it left, queue or no queue.
ORPHAN_PATIENCE: Final = 12.0
STOP_PATIENCE: Final = 20.0
DELIVERY_PATIENCE: Final = 5.0
# A short sleep that takes longer than that means that this machine was held up, and so was Stoker.
HELD_UP: Final = 1.0
# Neither is Stoker at fault where this process waits for a core this many times as long as it has one: with 5, a
# supervisor needs seconds to start.
STARVED: Final = 5.0
STARVED_WITHIN: Final = 1.0
MOST_CONDITIONS: Final = 2
MOST_ATTEMPTS: Final = 4


class Extent(NamedTuple):
    """How much of it."""

    faults: int
    every: float
    """Seconds between two faults, on the average."""
    machines: int = 2
    kinds: frozenset[str] = frozenset(KINDS)
    mounts: bool = False
    """Whether machines get disks of their own."""
    longest_job: float = 14.0
    """An orphan that nobody kills must outlive its lease."""


class Planned(NamedTuple):
    kind: str
    gap: float
    machine: int
    amount: float
    """How much or how long, between 0 and 1."""


def plan(seed: int, extent: Extent, weights: Mapping[str, int]) -> Iterator[Planned]:
    """What a seed means."""
    chance = random.Random(seed)
    kinds = {kind: weight for kind, weight in weights.items() if kind in extent.kinds}
    while True:
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        yield Planned(
            kind, chance.uniform(0, 2 * extent.every), chance.randrange(extent.machines), round(chance.random(), 3)
        )


class _Active(NamedTuple):
    """A condition that will be over."""

    ends: float
    machine: Host | None
    condition: Condition
    undo: Callable[[], bool]
    """Whether it had any effect."""


class ChaosRun:
    """One run of it."""

    def __init__(self, site: WorkSite, url: str, extent: Extent, seed: int, server: PostgresServer | None) -> None:
        self._site = site
        self._url = url
        self._extent = extent
        self._server = server
        self._plan = plan(seed, extent, self._weights())
        self._random = random.Random(seed)
        self._machines = self._new_machines()
        self._jobs: dict[str, Submitted] = {}
        self._numbers = 0
        self._active: list[_Active] = []
        self._conditions: list[Condition] = []
        self._touched: dict[str, list[tuple[float, str]]] = {}
        self._database_away = False
        self._submit_at = 0.0
        self._cores = (time.monotonic(), *_core_times())
        self._wrong: list[str] = []
        self.struck: Counter[str] = Counter()
        self.seconds = 0.0
        sys.stdout.write(f"chaos with seed {seed}\n")
        sys.stdout.flush()

    def _weights(self) -> Mapping[str, int]:
        """How often each kind of fault is the next."""
        apart = ONLY_POSTGRES if self._server is None else ONLY_SQLITE
        return {kind: weight for kind, weight in KINDS.items() if kind not in apart}

    def _new_machines(self) -> list[Machine]:
        """Those that have a worker."""
        mounts = self._extent.mounts
        return [Machine(self._site, number, WORK, mounts=mounts) for number in range(self._extent.machines)]

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    @property
    def attempts(self) -> int:
        return sum(len(set(job.journal.attempts())) for job in self._jobs.values())

    @property
    def held_up(self) -> float:
        """Seconds for which this machine had too much else to do: what is lost then is no finding."""
        return sum((one.ended or one.began) - one.began for one in self._conditions if one.kind == "held up")

    def run(self, log: Callable[[str], None] = lambda _: None) -> None:
        begun = time.monotonic()
        while sum(self.struck.values()) < self._extent.faults:
            planned = next(self._plan)
            self._live_for(planned.gap)
            log(f"{time.monotonic() - begun:8.2f} {planned.kind} on machine {planned.machine} ({planned.amount})")
            self._strike(planned)
        self._end_all()
        self._wait(self._all_jobs_are_over, named="the end of every job")
        self._count_descriptors()
        if not self._is_delivered_within(DELIVERY_PATIENCE):
            # What could not be written while a disk was full is found by the next worker.
            self._stop_workers()
            self._wait(self._all_is_delivered, named="the delivery of every outcome")
        self._wait_for_rest()
        self._stop_workers()
        self._wait(lambda: not self._site.processes(), named="the end of every process")
        self.seconds = time.monotonic() - begun

    def findings(self) -> list[str]:
        """Everything that is wrong, in words; nothing when all is well."""
        evidence = self._evidence()
        for machine in self._machines:
            self._wrong += [f"machine {machine.number}: a worker said: {line}" for line in machine.mistakes()]
        with open_queue(self._url) as store:
            return [*self._wrong, *judge(store, evidence)]

    def _evidence(self) -> Evidence:
        machines = {key: machine.number for machine in self._machines for key in machine.keys}
        homes = [one.home for one in self._machines]
        return Evidence(self._jobs, self._touched, self._conditions, machines, homes, LEASE)

    def close(self) -> None:
        for active in self._active:
            active.undo()
        for machine in self._machines:
            if machine.disk is not None:
                machine.disk.close()

    # The work

    def _submit(self) -> None:
        """Enough to do. Each has an origin, so that it is one job also if the database died over it."""
        if self._database_away or time.monotonic() < self._submit_at:
            return
        with contextlib.suppress(QueueAwayError):
            counts = self._site.store.jobs.counts()
            missing = self._backlog() - sum(count for state, count in counts.items() if state not in ENDED)
            self._submit_at = time.monotonic() + 0.2
            if missing <= 0:
                return
            new = [self._new_job(self._numbers + number) for number in range(missing)]
            names = self._site.store.jobs.submit([job for job, _ in new])
            self._numbers += missing
            self._jobs |= {name: submitted for name, (_, submitted) in zip(names, new, strict=True)}

    def _backlog(self) -> int:
        """How many jobs wait or run at a time."""
        return BACKLOG * len(self._machines)

    def _new_job(self, number: int) -> tuple[JobSpec, Submitted]:
        journal = JobJournal(self._site.directory / f"journal-{number}")
        chance = random.Random(number)
        # A job that ignores SIGTERM lives long enough to overlap a next attempt that starts too early.
        deaf = number % 3 == 0 or number % 10 == 0
        seconds = chance.uniform(0.05, 0.6) if number % 5 else self._extent.longest_job * chance.uniform(0.1, 1.0) ** 2
        code = 0 if number % 4 else 3
        command = tuple(shlex.split(journal.command(round(seconds, 3), code, deaf=deaf)))
        job = JobSpec(command=command, gpus=0, directory=str(self._site.directory), origin=f"chaos {number}")
        return job, Submitted(journal, code)

    def _live_for(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while True:
            self._look_after()
            before = time.monotonic()
            if before >= ends:
                return
            time.sleep(min(0.02, ends - before))
            if time.monotonic() - before > HELD_UP:
                self._conditions.append(
                    Condition("held up", None, journal_clock() - (time.monotonic() - before), journal_clock())
                )

    def _note_load(self) -> None:
        """A machine that has too much else to do holds up Stoker as well."""
        moment = time.monotonic()
        since, had, waited = self._cores
        if moment < since + STARVED_WITHIN:
            return
        self._cores = (moment, *_core_times())
        if self._cores[2] - waited > STARVED * (self._cores[1] - had):
            ended = journal_clock()
            self._conditions.append(Condition("held up", None, ended - (moment - since), ended))

    def _look_after(self) -> None:
        moment = time.monotonic()
        self._note_load()
        for active in [one for one in self._active if moment >= one.ends]:
            self._finish(active)
        for machine in self._machines:
            machine.keep()
            since = machine.came_up()
            if since is not None and journal_clock() - since > LEASE / 2:
                self._conditions.append(Condition("no worker", machine.number, since, journal_clock()))
        self._submit()

    def _all_jobs_are_over(self) -> bool:
        for machine in self._machines:
            machine.keep()
        with contextlib.suppress(QueueAwayError), open_queue(self._url) as store:
            counts = store.jobs.counts()
            if counts.get("held"):
                # A long job that met ten faults is held; release it as a user would.
                store.jobs.release(
                    [job.id for job in store.jobs.find(limit=10000) if job.reason.endswith("for the 10th time")]
                )
            return sum(counts.get(state, 0) for state in ENDED) == sum(counts.values())
        return False

    def _all_is_delivered(self) -> bool:
        for machine in self._machines:
            machine.keep()
        ready = all("at work for" in machine.worker.said for machine in self._machines if machine.worker is not None)
        return ready and not self._undelivered()

    def _undelivered(self) -> list[str]:
        found = [path for machine in self._machines for path in machine.home.glob("attempts/*/attempt.json")]
        return [path.parent.name for path in found]

    def _is_delivered_within(self, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while not (delivered := self._all_is_delivered()) and time.monotonic() < ends:
            self._note_load()
            time.sleep(0.1)
        return delivered

    def _wait_for_rest(self) -> None:
        """What must be over before the workers are stopped."""

    def _stop_workers(self) -> None:
        """As a user or a service manager does."""
        for machine in self._machines:
            if machine.worker is not None and machine.worker.process.poll() is None:
                machine.worker.process.send_signal(signal.SIGTERM)
        for machine in self._machines:
            if machine.worker is not None:
                try:
                    code = machine.worker.process.wait(timeout=STOP_PATIENCE)
                except subprocess.TimeoutExpired:
                    self._wrong.append(f"the worker of machine {machine.number} does not end by SIGTERM")
                    machine.worker.kill()
                else:
                    if code not in {0, -signal.SIGTERM}:
                        self._wrong.append(f"the worker of machine {machine.number} ended with {code}")

    def _wait(self, there: Callable[[], bool], *, named: str) -> None:
        ends = time.monotonic() + LONGEST_END
        while not there():
            self._note_load()
            if time.monotonic() > ends:
                self._wrong.append(f"{named} did not come: {self._where_it_stands()}")
                return
            time.sleep(0.1)

    def _where_it_stands(self) -> str:
        with open_queue(self._url) as store:
            unfinished = [
                (job.id, job.state, job.reason) for job in store.jobs.find(limit=10000) if job.state not in ENDED
            ]
        left = self._undelivered()
        said = [machine.worker.said[-1000:] for machine in self._machines if machine.worker is not None]
        return f"{unfinished} undelivered: {left} processes: {self._site.processes()} {said}"

    def _count_descriptors(self) -> None:
        """Who has nothing to do holds the output of the last job at the most."""
        for machine in self._machines:
            for who in machine.called(*OF_STOKER):
                held = {target for target in _open_files(who.pid) if "/attempts/" in target}
                if len(held) > 1:
                    self._wrong.append(
                        f"pid {who.pid} of machine {machine.number} holds {sorted(held)} when all is over"
                    )

    # The faults

    def _strike(self, planned: Planned) -> None:
        kind = planned.kind
        machine: Any = self._place_of(planned)
        strike: Callable[[Host, float], None] | None = getattr(self, f"_{kind.replace(' ', '_')}", None)
        if strike is not None:
            strike(machine, planned.amount)
        elif kind.startswith("kill "):
            self._kill(kind, machine)
        elif kind.startswith("stop "):
            self._stop(kind, machine, planned.amount)
        else:
            self._fail_calls(kind, machine, planned.amount)

    def _place_of(self, planned: Planned) -> Host:
        return self._free_machine(planned.machine)

    def _free_machine(self, number: int) -> Machine:
        """This one, or the next that is not suspended."""
        while True:
            for place in range(len(self._machines)):
                machine = self._machines[(number + place) % len(self._machines)]
                if not machine.suspended:
                    return machine
            self._live_for(0.1)

    def _hit(self, kind: str, attempts: Iterable[str] = ()) -> None:
        self.struck[kind] += 1
        for attempt in attempts:
            self._touched.setdefault(attempt, []).append((journal_clock(), kind))

    def _begin(self, kind: str, machine: Host | None, seconds: float, undo: Callable[[], bool]) -> None:
        """A condition that lasts for that time. `undo` returns whether it affected a process."""
        here = [one for one in self._active if one.machine is machine]
        for one in here[: max(0, len(here) - MOST_CONDITIONS + 1)]:
            self._finish(one)
        condition = Condition(kind, machine.number if machine is not None else None, journal_clock())
        self._conditions.append(condition)
        self._active.append(_Active(time.monotonic() + seconds, machine, condition, undo))

    def _finish(self, active: _Active) -> None:
        if active not in self._active:
            return  # the end of another condition has ended it
        self._active.remove(active)
        if active.undo():
            self._hit(active.condition.kind)
        active.condition.ended = journal_clock()

    def _end_all(self, machine: Host | None = None) -> None:
        for active in [one for one in self._active if machine is None or one.machine is machine]:
            self._finish(active)

    def _end_kind(self, machine: Host | None, *kinds: str) -> None:
        """Ends the current condition of a kind before another begins."""
        for active in [one for one in self._active if one.machine is machine and one.condition.kind in kinds]:
            self._finish(active)

    # Deaths

    def _kill(self, kind: str, machine: Host) -> None:
        victim = self._victim(kind.removeprefix("kill "), machine)
        if victim is None:
            return
        attempts = attempts_below(victim.pid)
        if kind == "kill job":
            attempts = {processes.attempt for processes in machine.running() if processes.job == victim}
            if not attempts:
                return
        # A worker that was idle a moment ago may have claimed a job since.
        reapers = children(victim.pid) if kind == "kill spare supervisor" else []
        if send(victim, signal.SIGKILL):
            time.sleep(0.02 if reapers else 0.0)
            self._hit(kind, attempts.union(*map(attempts_below, reapers)))

    def _victim(self, kind: str, machine: Host) -> Identity | None:
        """One of those that there are, waiting a while for one."""
        ends = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < ends and not machine.suspended:
            if those := self._those(kind, machine):
                return self._random.choice(those)
            self._live_for(0.02)
        return None

    def _those(self, kind: str, machine: Host) -> list[Identity]:
        if kind in {"worker", "fork server", "spare supervisor"}:
            name = {"worker": WORKER, "fork server": FORK_SERVER}.get(kind, SUPERVISOR)
            return machine.called(name)
        return [getattr(processes, kind) for processes in self._targets(machine)]

    def _targets(self, machine: Host) -> list[JobProcesses]:
        """The jobs that run, but for those that had enough: after ten losses a job is held, and rightly so."""
        return [
            processes for processes in machine.running() if int(processes.attempt.rpartition("-")[2]) <= MOST_ATTEMPTS
        ]

    def _kill_all_three(self, machine: Machine, amount: float) -> None:
        """Worker, supervisor and reaper at once, half of the time with the database away."""
        # What keeps a worker from being started would let the orphan live for longer than its lease.
        self._end_all(machine)
        if self._victim("job", machine) is None:
            return
        without_database = self._server is not None and amount < 0.5
        if without_database:
            self._end_kind(None, "kill database", "freeze database")
            self._set_database_away(True)
        running = self._targets(machine)
        processes = max(running, key=lambda one: one.seconds, default=None)
        if processes is not None:
            those = [*machine.called(WORKER), processes.supervisor, processes.reaper]
            for how in (signal.SIGSTOP, signal.SIGKILL):
                for who in those:
                    send(who, how)
            self._hit(
                "kill all three with the database away" if without_database else "kill all three", [processes.attempt]
            )
            self._expect_end_of_orphan(machine, processes.job, processes.attempt)
        if without_database:
            self._set_database_away(False)

    def _expect_end_of_orphan(self, machine: Machine, job: Identity, attempt: str) -> None:
        ends = time.monotonic() + ORPHAN_PATIENCE
        while is_alive(job):
            if time.monotonic() > ends:
                away = " while the database is away" if self._database_away else ""
                self._wrong.append(f"{attempt}: its orphan still runs after {ORPHAN_PATIENCE:g} s{away}")
                return
            self._live_for(0.02)
            if machine.suspended:
                return

    # Standing still

    def _stop(self, kind: str, machine: Host, amount: float) -> None:
        victim = self._victim(kind.removeprefix("stop "), machine)
        if victim is None or not send(victim, signal.SIGSTOP):
            return
        for attempt in attempts_below(victim.pid):
            self._touched.setdefault(attempt, []).append((journal_clock(), kind))
        self._begin(kind, machine, self._duration(amount), lambda: send(victim, signal.SIGCONT))

    def _duration(self, amount: float, usual: float = LONGEST_CONDITION) -> float:
        """Mostly short; some outlive a lease, where the run has time for that."""
        if amount < LONG_SHARE and LONG & self._extent.kinds:
            return LEASE * 1.3
        return usual * amount

    def _suspend(self, machine: Host, amount: float) -> None:
        """The machine stands still for longer than its leases."""
        self._end_all(machine)
        machine.suspended = True
        stopped = machine.stop_all()

        def wake() -> bool:
            for who in stopped:
                send(who, signal.SIGCONT)
            machine.suspended = False
            return True

        self._begin("suspend", machine, LEASE * (1.05 + amount / 2), wake)

    def _sleep(self, machine: Host, amount: float) -> None:
        """The same as its clocks log it: for everybody else it is a moment."""
        stopped = machine.stop_all()
        machine.faults.sleep(LEASE * (0.5 + 10 * amount))
        for who in stopped:
            send(who, signal.SIGCONT)
        self._moment("sleep", machine)

    def _clock_forward(self, machine: Host, amount: float) -> None:
        machine.faults.step_wall(LEASE + 3600 * 24 * amount**4)
        self._moment("clock forward", machine)

    def _clock_backward(self, machine: Host, amount: float) -> None:
        machine.faults.step_wall(-LEASE - 3600 * 24 * amount**4)
        self._moment("clock backward", machine)

    def _moment(self, kind: str, machine: Host | None) -> None:
        self._conditions.append(Condition(kind, machine.number if machine else None, journal_clock(), journal_clock()))
        self._hit(kind)

    # Refusals

    def _full_disk(self, machine: Host, amount: float) -> None:
        self._end_kind(machine, "full disk", "no inodes")
        disk = machine.disk
        if disk is None:
            self._inject("full disk", machine, FILES, errno.ENOSPC, 1.0, amount)
            return
        disk.fill(int(amount * 100) % 4)
        self._begin("full disk", machine, LONGEST_CONDITION * amount, lambda: _done(disk.relieve))

    def _no_inodes(self, machine: Host, amount: float) -> None:
        self._end_kind(machine, "full disk", "no inodes")
        disk = machine.disk
        if disk is None:
            self._inject("no inodes", machine, Call.OPEN | Call.NAME, errno.ENOSPC, 1.0, amount)
            return
        disk.use_up_inodes()
        self._begin("no inodes", machine, LONGEST_CONDITION * amount, lambda: _done(disk.relieve))

    def _fail_calls(self, kind: str, machine: Host, amount: float) -> None:
        roles = ["", "", WORKER, SUPERVISOR, "stoker-reaper", FORK_SERVER]
        role = roles[int(amount * 1000) % len(roles)]
        chance = (0.05, 0.3, 1.0)[int(amount * 10000) % 3]
        self._inject(kind, machine, CALLS[kind], getattr(errno, kind), chance, amount, role)

    def _inject(
        self, kind: str, machine: Host, calls: Call, error: int, chance: float, amount: float, role: str = ""
    ) -> None:
        self._end_kind(machine, kind)
        rule = RULE[kind]
        path = str(machine.home) if error in {errno.EIO, errno.ENOSPC} else ""
        machine.faults.inject(rule, calls, error, chance, path=path, role=role)
        self._begin(kind, machine, LONGEST_CONDITION * amount, lambda: machine.faults.withdraw(rule) > 0)

    def _descriptor_limit(self, machine: Host, amount: float) -> None:
        """Worker, or the supervisors, may open no more."""
        self._end_kind(machine, "descriptor limit")
        those = machine.called(WORKER if amount < 0.5 else SUPERVISOR)
        before = limit_descriptors(those)
        self._begin("descriptor limit", machine, LONGEST_CONDITION * amount, lambda: _done(lift_limits, before))

    def _restart_with_few_descriptors(self, machine: Machine, amount: float) -> None:
        self._end_kind(machine, "restart with few descriptors")
        machine.limit = 12 + int(amount * 40)
        for who in machine.called(WORKER):
            send(who, signal.SIGKILL)

        def lift() -> bool:
            machine.limit = None
            for who in machine.called(WORKER):
                send(who, signal.SIGKILL)
            return True

        self._begin("restart with few descriptors", machine, 1 + LONGEST_CONDITION * amount, lift)

    # Deletions

    def _delete_attempts(self, machine: Machine, amount: float) -> None:
        shutil.rmtree(machine.home / "attempts", ignore_errors=True)
        self._deleted("delete attempts", machine, amount)

    def _delete_home(self, machine: Machine, amount: float) -> None:
        shutil.rmtree(machine.home, ignore_errors=True)
        self._deleted("delete home", machine, amount)

    def _deleted(self, kind: str, machine: Machine, amount: float) -> None:
        self._moment(kind, machine)
        if amount < 0.5:
            for who in machine.called(WORKER):
                send(who, signal.SIGKILL)

    # The database

    def _set_database_away(self, away: bool) -> None:
        assert self._server is not None
        if away:
            self._server.kill()
        else:
            self._server.start()
        self._database_away = away
        if away:
            self._conditions.append(Condition("database away", None, journal_clock()))
        else:
            for condition in self._conditions:
                if condition.kind == "database away" and condition.ended is None:
                    condition.ended = journal_clock()

    def _away_for(self, kind: str, seconds: float, back: Callable[[], None]) -> None:
        self._database_away = True

        def undo() -> bool:
            back()
            self._database_away = False
            return True

        self._begin(kind, None, seconds, undo)

    def _kill_database(self, _: Machine, amount: float) -> None:
        assert self._server is not None
        self._end_kind(None, "kill database", "freeze database")
        (self._server.kill if int(amount * 100) % 2 else self._server.kill_hard)()
        self._away_for("kill database", self._duration(amount, LONGEST_OUTAGE), self._server.start)

    def _freeze_database(self, _: Machine, amount: float) -> None:
        assert self._server is not None
        self._end_kind(None, "kill database", "freeze database")
        self._server.freeze()
        self._away_for("freeze database", self._duration(amount, LONGEST_OUTAGE), self._server.thaw)

    def _lock_database(self, _: Machine, amount: float) -> None:
        self._end_kind(None, "lock database")
        connection = sqlite3.connect(self._url, isolation_level=None, timeout=5)
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            connection.close()
            return
        self._away_for("lock database", self._duration(amount, LONGEST_OUTAGE), connection.close)

    def _database_disk(self, machine: Machine, amount: float) -> None:
        """Of the file that is the queue."""
        self._end_kind(machine, "database disk")
        error = errno.EIO if int(amount * 100) % 2 else errno.ENOSPC
        chance = (0.05, 0.3, 1.0)[int(amount * 1000) % 3]
        machine.faults.inject(DATABASE_RULE, CALLS["EIO"], error, chance, path=str(Path(self._url).parent))
        self._begin(
            "database disk",
            machine,
            LONGEST_CONDITION * amount,
            lambda: machine.faults.withdraw(DATABASE_RULE) > 0,
        )


def _core_times() -> tuple[float, float]:
    """Seconds for which this thread had a core, and for which it waited for one."""
    try:
        had, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(had) / 1e9, int(waited) / 1e9


def _open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            with contextlib.suppress(OSError):
                yield str(entry.readlink())


def _done(work: Callable[..., object], *arguments: object) -> bool:
    work(*arguments)
    return True
