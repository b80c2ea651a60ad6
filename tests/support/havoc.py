"""Random deaths over a queue of short jobs, and what must be true of every job when it is over."""

import contextlib
import random
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from stoker.queue import NewJob, QueueAwayError, Store, open_queue
from stoker.queue.model import ENDED
from stoker.runs.processes import Identity, children, send, stat
from stoker.worker.assignment import undelivered
from tests.support.diary import Diary
from tests.support.postgres import PostgresServer
from tests.support.work_site import RunningWorker, WorkSite

# How often each is the next to die, in hundredths. Keepers are those of a job that runs now.
VICTIMS: Final = {"worker": 20, "attendant": 30, "guardian": 8, "job": 25, "spare": 5, "nursery": 2, "database": 10}
NAMES: Final = {"worker": "stoker", "spare": "stoker-job", "nursery": "stoker-nursery", "job": "marking_job"}
# Above a job are its guardian and its attendant, unless those were killed just now.
ABOVE: Final = {"guardian": ("stoker-guard",), "attendant": ("stoker-guard", "stoker-job")}
WORK: Final = ("--lease", "6s", "--grace", "1s", "--cpu-jobs", "2")
LONGEST_OUTAGE: Final = 1.0
# From the last kill to the last outcome: a lease or two, and the jobs that are left.
LONGEST_END: Final = 120.0
# So many jobs more than the kills so far account for.
BACKLOG: Final = 5
# For a victim of the wanted kind: when all jobs are done there is none any more.
LONGEST_WAIT: Final = 3.0
# When there has been none for so many looks, another job is submitted.
LOOKS_PER_JOB: Final = 10


class Extent(NamedTuple):
    """How much of it."""

    jobs: int
    kills: int
    every: float
    """Seconds between two kills, on the average."""
    workers: int = 2


class Havoc:
    """One run of it: reproducible by its seed as far as random deaths can be."""

    def __init__(self, site: WorkSite, url: str, extent: Extent, seed: int, server: PostgresServer | None) -> None:
        self._site = site
        self._url = url
        self._extent = extent
        self._server = server
        self._random = random.Random(seed)
        self._diaries: dict[str, Diary] = {}
        self._workers: dict[Path, RunningWorker] = {}
        self._unguarded: set[str] = set()
        """The attempts whose guardians were killed."""
        self.killed: Counter[str] = Counter()
        self.seconds = 0.0
        sys.stdout.write(f"havoc with seed {seed}\n")

    def run(self) -> None:
        begun = time.monotonic()
        while (kills := sum(self.killed.values())) < self._extent.kills:
            self._submit(BACKLOG + self._extent.jobs * kills // self._extent.kills)
            self._live_for(self._random.uniform(0, 2 * self._extent.every))
            self._strike()
        self._wait(self._nothing_is_left_to_do, named="the end of every job")
        for worker in self._workers.values():
            worker.stop()
        self._wait(lambda: not self._site.processes(), named="the end of every process")
        self.seconds = time.monotonic() - begun

    # The work

    def _submit(self, wanted: int) -> None:
        """Until there are so many. Each has an origin, so that it is one job also if the database died over it."""
        numbers = range(len(self._diaries), min(wanted, self._extent.jobs))
        diaries = [Diary(self._site.directory / f"diary-{number}") for number in numbers]
        jobs = [
            NewJob(command=self._command(number), gpus=0, directory=str(self._site.directory), origin=f"havoc {number}")
            for number in numbers
        ]
        with contextlib.suppress(QueueAwayError):
            self._diaries |= dict(zip(self._site.store.submit(jobs), diaries, strict=True))

    def _command(self, number: int) -> tuple[str, ...]:
        diary = Diary(self._site.directory / f"diary-{number}")
        # One that does not end when it is asked to lives long enough to overlap the next attempt, if that came early.
        deaf = number % 3 == 0
        seconds = random.Random(number).uniform(0.05, 0.5)
        return tuple(shlex.split(diary.command(round(seconds, 3), deaf=deaf)))

    def _keep_workers(self) -> None:
        """As a service manager does."""
        for number in range(self._extent.workers):
            home = self._site.directory / f"home-{number}"
            worker = self._workers.get(home)
            if worker is None or worker.process.poll() is not None:
                self._workers[home] = self._site.work(*WORK, home=home)

    def _live_for(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self._keep_workers()
            time.sleep(0.01)

    def _nothing_is_left_to_do(self) -> bool:
        self._keep_workers()
        self._submit(self._extent.jobs)
        with contextlib.suppress(QueueAwayError), open_queue(self._url) as store:
            counts = store.counts()
            over = sum(counts.get(state, 0) for state in ENDED) == sum(counts.values()) == self._extent.jobs
            return over and not any(map(_undelivered, self._workers))
        return False

    def _wait(self, there: Callable[[], bool], *, named: str) -> None:
        ends = time.monotonic() + LONGEST_END
        while not there():
            assert time.monotonic() < ends, f"{named} did not come; {self._where_it_stands()}"
            time.sleep(0.05)

    def _where_it_stands(self) -> str:
        with open_queue(self._url) as store:
            unfinished = [(job.id, job.state, job.sentence) for job in store.jobs(limit=1000) if job.state not in ENDED]
        return f"{unfinished} {self._site.processes()} {[worker.said[-2000:] for worker in self._workers.values()]}"

    # The deaths

    def _strike(self) -> None:
        kind = self._random.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        if kind == "database":
            self._kill_database()
            return
        ends = time.monotonic() + LONGEST_WAIT
        looks = 0
        while (victim := self._victim(kind)) is None and time.monotonic() < ends:
            looks += 1
            if looks % LOOKS_PER_JOB == 0:
                self._submit(len(self._diaries) + 1)
            self._live_for(0.01)
        if victim is None:
            return
        attempts = {_attempt_of(child) for child in children(victim.pid)}
        if send(victim, signal.SIGKILL):
            self.killed[kind] += 1
            if kind == "guardian":
                self._unguarded |= attempts

    def _victim(self, kind: str) -> Identity | None:
        """One of those that there are; None when there is none now."""
        name = NAMES.get(kind, NAMES["job"])
        those = sorted(pid for pid, called in self._site.processes().items() if called == name)
        found = stat(self._random.choice(those)) if those else None
        for above in ABOVE.get(kind, ()):
            found = stat(found.parent) if found is not None and found.name == name else None
            name = above
        return found.identity if found is not None and found.name == name else None

    def _kill_database(self) -> None:
        if self._server is None:
            return
        self._random.choice([self._server.kill, self._server.kill_hard])()
        self._live_for(self._random.uniform(0, LONGEST_OUTAGE))
        self._server.start()
        self.killed["database"] += 1

    # What must be true

    def findings(self) -> list[str]:
        """Everything that is wrong, in words; nothing when all is well."""
        with open_queue(self._url) as store:
            return [wrong for job, diary in self._diaries.items() for wrong in self._wrong_with(store, job, diary)]

    def _wrong_with(self, store: Store, job: str, diary: Diary) -> list[str]:
        attempts = store.attempts(job)
        found = [f"{job}: {overlap}" for overlap in diary.overlaps()]
        *earlier, last = (attempt.outcome for attempt in attempts)
        if last not in {"succeeded", "failed"} or last != store.job(job).state or set(earlier) - {"lost"}:
            found.append(f"{job} is {store.job(job).state} after {[*earlier, last]}")
        known = {attempt.number for attempt in attempts}
        found += [f"{job}: attempt {number} is not known" for number in diary.attempts() if number not in known]
        for attempt in attempts:
            printed = diary.printed(attempt.number)
            for place, text in (
                ("the queue", store.log(attempt.id)),
                ("the file", self._output(job, attempt.number)),
            ):
                kept = [line for line in text.splitlines() if line.startswith("attempt")]
                if not _is_whole(printed, kept, unguarded=f"{job}-{attempt.number}" in self._unguarded):
                    found.append(f"{job}: attempt {attempt.number} printed {printed[-1:]}, {place} has {kept[-1:]}")
        return found

    def _output(self, job: str, number: int) -> str:
        places = [home / "attempts" / f"{job}-{number}" / "output" for home in self._workers]
        return "".join(place.read_text() for place in places if place.exists())


def _is_whole(printed: list[str], kept: list[str], *, unguarded: bool) -> bool:
    """It may have been killed before it could note that it had printed one more."""
    if kept[: len(printed)] == printed:
        return len(kept) <= len(printed) + 1
    # What a guardian has read and not yet written dies with it: one piece, no more.
    hole = [place for place, line in enumerate(printed) if line not in kept]
    return unguarded and len(hole) > 0 and hole == list(range(hole[0], hole[-1] + 1))


def _attempt_of(pid: int) -> str:
    """The name of the attempt that this process belongs to, if any."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.decode(errors="replace").partition("=")
            if name == "STOKER_RUN_DIR":
                return Path(value).name
    return ""


def _undelivered(home: Path) -> bool:
    return any(True for _ in undelivered(home))
