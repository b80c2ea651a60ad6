"""Checks of every job after a chaos run; each violation is a sentence."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from stoker.queue import Attempt, Store
from tests.support.job_journal import Entry, JobJournal

# What the shell calls a death by SIGKILL.
KILLED: Final = 137
# A machine that wakes up runs its jobs until their supervisors have looked at the clock.
AWAKE_WITHIN: Final = 2.5
# Kernel timers do not see a suspend that only the clocks show: it is noticed at the next sample.
LOOKED_WITHIN: Final = 6.5
# A supervisor has written down how its job ended after that, unless it is held up.
WRITTEN_WITHIN: Final = 2.0
# Renewals come every quarter of a lease: less than that of an outage costs nobody his lease.
SHARE_OF_LEASE: Final = 0.35
# After these an attempt may be lost: nobody was left to look after it.
FATAL: Final = (
    "kill supervisor",
    "kill spare supervisor",
    "kill reaper",
    "kill all three",
    "kill all three with the database away",
)
# Nobody is left to write down how the job ended.
AT_ONCE: Final = frozenset({"kill all three", "kill all three with the database away", "kill step",
                            "crash node"})  # fmt: skip
OUTAGES: Final = ("database away", "kill database", "freeze database", "lock database", "database disk", "held up")
# After these on a node of a cluster an attempt may be lost, or started again by Slurm. A controller that is killed has
# forgotten its last seconds; one that is away for longer than a lease costs nobody anything.
SLURM_FATAL: Final = (
    *FATAL,
    "kill step",
    "kill slurmstepd",
    "requeue",
    "preempt",
    "node down",
    "crash node",
    "kill controller",
    "kill srun",
)
SLURM_OUTAGES: Final = ("held up", "stop supervisor", "EIO", "EMFILE", "ENOMEM")
# The supervisor of another node, too, needs a disk, descriptors, memory and processes to begin.
KEEPS_FROM_STARTING: Final = ("full disk", "no inodes", "EIO", "ENOSPC", "EMFILE", "ENOMEM", "EAGAIN", "slow directory",
                              "late directory")  # fmt: skip
# A daemon of Slurm that is suspended for a moment can cost the step on another node a timeout of Slurm's, longer
# than the lease of these tests.
DELAYS_STEPS: Final = ("stop slurmstepd", "stop slurmd", "stop controller")
# A controller that was killed may take a job for ended that it has started since, and gives it no step on other nodes.
FORGETS_FOR: Final = 10.0
# What a job printed may be missing when these were there.
COSTS_OUTPUT: Final = ("full disk", "no inodes", "EIO", "ENOSPC", "EMFILE", "ENOMEM", "descriptor limit",
                       "restart with few descriptors", "delete attempts", "delete home", "stop reaper")  # fmt: skip


@dataclass
class Condition:
    """A fault of one machine, or of all machines, for some time."""

    kind: str
    machine: int | None
    began: float
    ended: float | None = None

    def within(self, begin: float, end: float) -> float:
        """For how many seconds of that time."""
        ended = end if self.ended is None else self.ended
        return min(end, ended) - max(begin, self.began)


class Submitted(NamedTuple):
    journal: JobJournal
    code: int
    """Its exit code when it is not killed."""
    nodes: int = 1
    """On how many nodes it runs at a time."""


class Evidence(NamedTuple):
    """What is known apart from the queue."""

    jobs: dict[str, Submitted]
    touched: dict[str, list[tuple[float, str]]]
    """By the names of the attempts: which of their processes were killed or stopped, and when."""
    conditions: list[Condition]
    machines: dict[str, int]
    """By the beginnings of the ids of workers."""
    homes: list[Path]
    lease: float
    fatal: tuple[str, ...] = FATAL
    outages: tuple[str, ...] = OUTAGES
    """What costs an attempt when it lasts for most of a lease."""


def judge(store: Store, evidence: Evidence) -> Iterator[str]:
    """All violations."""
    for name, submitted in evidence.jobs.items():
        yield from _Case(store, evidence, name, submitted).findings()


class _Case:
    """One job."""

    def __init__(self, store: Store, evidence: Evidence, name: str, submitted: Submitted) -> None:
        self._store = store
        self._evidence = evidence
        self._name = name
        self._code = submitted.code
        self._nodes = submitted.nodes
        self._journal = submitted.journal
        self._entries = submitted.journal.entries()
        self._attempts = store.attempts.of(name)

    def findings(self) -> Iterator[str]:
        for wrong in (*self._outcome(), *self._overlaps(), *self._unfounded(), *self._outputs()):
            yield f"{self._name}: {wrong}"

    def _history(self) -> str:
        result = [f"{one.number} {one.outcome} {one.exit_code or ''} {one.reason!r}" for one in self._attempts]
        return f"attempts: {result}, journal: {_digest(self._entries)}, faults: {self._faults()}"

    def _faults(self) -> list[str]:
        if not self._entries:
            return []
        first, last = self._entries[0].time, self._entries[-1].time
        known = [
            (condition.began, f"{condition.kind} on {condition.machine} until {(condition.ended or 0) % 10000:.2f}")
            for condition in self._evidence.conditions
            if condition.within(first - 2, last + 1) >= 0
        ]
        for attempt in self._attempts:
            name = f"{self._name}-{attempt.number}"
            known += [(at, f"{kind} of {name}") for at, kind in self._evidence.touched.get(name, [])]
        return [f"{at % 10000:.2f} {what}" for at, what in sorted(known)]

    # One outcome, and the right one

    def _outcome(self) -> Iterator[str]:
        job = self._store.jobs.get(self._name)
        right = "succeeded" if self._code == 0 else "failed"
        ends = [(attempt.outcome, attempt.exit_code or 0) for attempt in self._attempts[-1:]]
        its_own = (job.state, ends) == (right, [(right, self._code)])
        killed = any("kill job" in self._kinds(attempt) for attempt in self._attempts[-1:])
        if not its_own and not (killed and (job.state, ends) == ("failed", [("failed", KILLED)])):
            yield f"is {job.state} ({job.reason}), and should be {right} with {self._code}; {self._history()}"
        if any(attempt.outcome in {"succeeded", "failed"} for attempt in self._attempts[:-1]):
            yield f"has several outcomes; {self._history()}"
        known = {attempt.number for attempt in self._attempts}
        for number in set(self._journal.attempts()) - known:
            yield f"attempt {number} ran, and is not known"
        for attempt in self._attempts:
            if attempt.outcome == "succeeded" and len(self._ended(attempt)) < self._nodes:
                yield f"attempt {attempt.number} is called a success, and did not come to its end; {self._history()}"

    def _kinds(self, attempt: Attempt) -> set[str]:
        return {kind for _, kind in self._evidence.touched.get(f"{self._name}-{attempt.number}", [])}

    def _ended(self, attempt: Attempt) -> set[int]:
        """The nodes on which it came to its end."""
        return {one.rank for one in self._entries if one.attempt == attempt.number and one.word == "end"}

    # One attempt at a time

    def _overlaps(self) -> Iterator[str]:
        place = {one: number for number, start in enumerate(_all_starts(self._entries)) for one in start}
        for start in (entry for entry in self._entries if entry.word == "start"):
            late = [
                one
                for one in self._entries
                if one.time >= start.time and place[one] < place[start] and not self._has_just_woken(one, start)
            ]
            if late:
                seconds = late[-1].time - start.time
                which = f"attempt {late[-1].attempt} lived on for {seconds:.2f} s beside {start.attempt}"
                yield f"{which}; {self._history()}"

    def _has_just_woken(self, one: Entry, start: Entry) -> bool:
        # Where a worker takes most of a lease to start, what its predecessor left lives until then.
        within = {"suspend": AWAKE_WITHIN, "sleep": LOOKED_WITHIN, "no worker": AWAKE_WITHIN}
        return any(
            condition.kind in within
            and self._is_on(condition, one.attempt)
            and condition.ended is not None
            and condition.began <= start.time <= one.time <= condition.ended + within[condition.kind]
            for condition in self._evidence.conditions
        )

    def _is_on(self, condition: Condition, number: int) -> bool:
        """Whether a condition is one of the machines of this attempt: its worker's, and the nodes it ran on."""
        if len({one.rank for one in self._entries if one.attempt == number}) < self._nodes:
            return True  # on one of its nodes it did not get so far as to say where that is
        worker = next((attempt.worker for attempt in self._attempts if attempt.number == number), "")
        names = {worker.partition("-")[0], *(one.place for one in self._entries if one.attempt == number)}
        known = {self._evidence.machines[name] for name in names if name in self._evidence.machines}
        return condition.machine is None or not known or condition.machine in known

    # No work lost without a reason

    def _unfounded(self) -> Iterator[str]:
        """A cluster may start one attempt several times."""
        for attempt in self._attempts:
            starts = _starts(self._entries, attempt.number)
            if attempt.outcome in {"succeeded", "failed"}:
                starts = starts[:-1]
            for start in starts:
                ends = [one for one in start if one.word == "end"]
                if len(ends) < self._nodes:
                    if not self._may_be_lost(attempt, start):
                        yield f"attempt {attempt.number} was lost without a reason; {self._history()}"
                elif not self._may_be_done_again(attempt, start[0], ends[-1]):
                    yield f"attempt {attempt.number} came to its end and was done again; {self._history()}"

    def _last_sign(self, attempt: Attempt) -> float:
        return max(one.time for one in self._entries if one.attempt == attempt.number)

    def _may_be_lost(self, attempt: Attempt, start: list[Entry]) -> bool:
        if self._kinds(attempt).intersection(self._evidence.fatal):
            return True
        begin, end = start[0].time - 1, start[-1].time + 2
        # Killed, and its files deleted before its supervisor could write that down.
        if "kill job" in self._kinds(attempt) and self._had(attempt, ("delete attempts", "delete home"), begin, end):
            return True
        if len({one.rank for one in start}) < self._nodes:
            if self._had(attempt, KEEPS_FROM_STARTING + DELAYS_STEPS, begin - 1, end):
                return True
            if self._had(attempt, ("kill controller",), begin - FORGETS_FOR, end):
                return True
        return self._was_cut_off(attempt, begin, end)

    def _may_be_done_again(self, attempt: Attempt, start: Entry, end: Entry) -> bool:
        """It ended by itself: that is lost only when nobody was left to write it down, or it came too late."""
        for at, kind in self._evidence.touched.get(f"{self._name}-{attempt.number}", []):
            # Asked to end, it may have come to its own end; all at once, nobody had the time.
            if kind not in self._evidence.fatal:
                continue
            if at <= end.time or (kind in AT_ONCE and at <= end.time + WRITTEN_WITHIN):
                return True
            if self._had(attempt, COSTS_OUTPUT, end.time - 3, at + 2):
                return True
        return self._was_cut_off(attempt, start.time - 1, end.time + self._evidence.lease)

    def _was_cut_off(self, attempt: Attempt, begin: float, end: float) -> bool:
        """From the queue for most of a lease, or asleep."""
        lease = self._evidence.lease
        if self._had(attempt, ("suspend", "sleep", *self._evidence.fatal), begin, end):
            return True
        outages = [
            condition.within(begin - lease, end + lease)
            for condition in self._evidence.conditions
            if condition.kind in self._evidence.outages and self._is_on(condition, attempt.number)
        ]
        return sum(seconds for seconds in outages if seconds > 0) >= SHARE_OF_LEASE * lease

    def _had(self, attempt: Attempt, kinds: tuple[str, ...], begin: float, end: float) -> bool:
        return any(
            condition.kind in kinds and self._is_on(condition, attempt.number) and condition.within(begin, end) >= 0
            for condition in self._evidence.conditions
        )

    # All that was printed

    def _outputs(self) -> Iterator[str]:
        for attempt, rank in itertools.product(self._attempts, range(self._nodes)):
            runs = _runs([one for one in self._entries if one.rank == rank], attempt.number)
            last = [one for run in runs[-1:] for one in run if one.word == "line"]
            printed = [f"attempt {attempt.number} says line {one.number}" for one in last]
            # One that has slept for longer than its lease may print something before it is killed: the queue has given
            # it up by then.
            in_time = sum(1 for one in last if one.time < self._next_start(attempt))
            if not printed or self._had(
                attempt, COSTS_OUTPUT, self._first_sign(attempt) - 1, self._kept_until(attempt)
            ):
                continue
            fatal = self._evidence.fatal[2:]
            unguarded = bool({*fatal} & self._kinds(attempt)) or self._had(
                attempt, fatal, self._first_sign(attempt) - 1, self._last_sign(attempt) + 2
            )
            # A node that has slept for longer than the lease ends its srun with its part, and so the others at once.
            if rank and attempt.outcome == "lost":
                unguarded |= self._had(
                    attempt, ("suspend", "sleep"), self._first_sign(attempt) - 1, self._last_sign(attempt) + 2
                )
            # The queue gets what the first node prints.
            known = {"the queue": self._store.logs.read(attempt.id)} if rank == 0 else {}
            for place, text in {**known, "the file": self._file(attempt, rank)}.items():
                kept = [line for line in text.splitlines() if line.startswith("attempt")]
                if len(runs) > 1:
                    kept = kept[_last_index(kept, printed[0]) :]
                wanted = printed
                if place == "the queue" and in_time < len(printed):
                    wanted, kept = printed[:in_time], kept[:in_time]
                if not _is_whole(wanted, kept, unguarded=unguarded):
                    yield (
                        f"attempt {attempt.number} printed {printed[-1:]} on node {rank}, {place} has {kept[-1:]}; "
                        f"{self._history()}"
                    )

    def _next_start(self, attempt: Attempt) -> float:
        return min((one.time for one in self._entries if one.attempt > attempt.number), default=math.inf)

    def _first_sign(self, attempt: Attempt) -> float:
        return min(one.time for one in self._entries if one.attempt == attempt.number)

    def _kept_until(self, attempt: Attempt) -> float:
        """The file may be deleted at any time."""
        last = self._last_sign(attempt) + 2 * self._evidence.lease
        deleted = [one.began for one in self._evidence.conditions if one.kind in {"delete attempts", "delete home"}]
        return max([last, *deleted])

    def _file(self, attempt: Attempt, rank: int) -> str:
        own = f"{self._name}-{attempt.number}" + (f"/node{rank}" if rank else "")
        places = [home / "attempts" / own / "output" for home in self._evidence.homes]
        text = ""
        for place in places:
            with contextlib.suppress(OSError):
                text += place.read_text()
        return text


def _runs(entries: list[Entry], attempt: int) -> list[list[Entry]]:
    """The entries of one attempt by its runs: each is one process."""
    found: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry.attempt == attempt:
            found.setdefault(entry.pid, []).append(entry)
    return list(found.values())


def _starts(entries: list[Entry], attempt: int) -> list[list[Entry]]:
    """The same by its starts: one run on each node. A controller that was killed may count a restart twice."""
    starts: list[list[list[Entry]]] = []
    for run in sorted(_runs(entries, attempt), key=lambda run: run[0].time):
        before = [other[0] for other in starts[-1]] if starts else []
        if not before or run[0].restart != before[0].restart or run[0].rank in {one.rank for one in before}:
            starts.append([])
        starts[-1].append(run)
    return [sorted(itertools.chain(*start), key=lambda one: one.time) for start in starts]


def _all_starts(entries: list[Entry]) -> list[list[Entry]]:
    """Of all attempts, in their order."""
    return [start for attempt in sorted({one.attempt for one in entries}) for start in _starts(entries, attempt)]


def _last_index(lines: list[str], line: str) -> int:
    """Of this line, or of the end."""
    return max((place for place, one in enumerate(lines) if one == line), default=len(lines))


def _is_whole(printed: list[str], kept: list[str], *, unguarded: bool) -> bool:
    """It may have been killed before it could note that it had printed one more."""
    if kept[: len(printed)] == printed:
        return len(kept) <= len(printed) + 1
    # What a reaper has read and not yet written dies with it: one piece, no more.
    hole = [place for place, line in enumerate(printed) if line not in kept]
    return unguarded and len(hole) > 0 and hole == list(range(hole[0], hole[-1] + 1))


def _digest(entries: list[Entry]) -> list[str]:
    """When each attempt began, last gave a sign, and how."""
    result = []
    for number, pid in dict.fromkeys((entry.attempt, entry.pid) for entry in entries):
        own = [entry for entry in entries if (entry.attempt, entry.pid) == (number, pid)]
        result.append(f"{number} (pid {pid}) {own[0].time % 10000:.2f} to {own[-1].time % 10000:.2f} {own[-1].word}")
    return result
