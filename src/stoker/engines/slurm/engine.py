"""The Slurm engine: submits each attempt as one Slurm job, and follows it in Slurm and in its directory.

Nothing here blocks on Slurm: its commands run in the background, and their output is read when they end.
"""

import contextlib
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from msgspec.structs import replace

from stoker.backoff import Backoff
from stoker.engines.attempt import ATTEMPT_TAG, AttemptResult
from stoker.engines.code import FETCH_SECONDS, fetch_command
from stoker.engines.engine import CannotTellError, Decision, Found, Log, RunningAttempt, Start, Step, WorkerOptions
from stoker.engines.gpu_usage import UsagePerMinute
from stoker.engines.identity import WorkerIdentity
from stoker.engines.preparation import KNOWN_LATER, batch_size_fit, on_one_machine, prepare
from stoker.engines.slurm import answers, client
from stoker.engines.slurm.answers import SlurmClosed, SlurmFull, SlurmJob, SlurmProblem, SlurmRefusal, gpus_in
from stoker.engines.slurm.attempts import SlurmAttempt, find_attempts
from stoker.engines.slurm.client import Running
from stoker.engines.slurm.cluster import Cluster
from stoker.engines.slurm.evidence import ACTIVE, WAITING
from stoker.engines.slurm.reasons import why_pending
from stoker.engines.slurm.record import SlurmAttemptRecord, SlurmAttemptSpec
from stoker.engines.slurm.submission import (
    Destination,
    SubmissionOptions,
    WhereItRuns,
    arguments,
    attempt_of,
    check,
    comment_of,
    destination_of,
    partition_of,
    script,
)
from stoker.errors import StokerError
from stoker.gpus.prober import DEFAULT_DEADLINE
from stoker.queue import Attempt, Job, queue_address
from stoker.queue.model import ReadyJob, Usage, View

# A Slurm job outlives any absence of its worker, so its claim never expires.
LEASE: Final = 10 * 365 * 86400.0
# The intervals of `squeue`, which covers all jobs: short while something changes, long otherwise.
_SOON: Final = 2.0
_OFTEN: Final = 4.0
_RARELY: Final = 20.0
# Long answers load the controller, so the interval grows by this for each job. Each query makes two requests, since
# `squeue` reads the partitions, too.
_LATER_PER_JOB: Final = 0.005
_SLOWER: Final = 1.5
# The delays after a failed query.
_AWAY_FIRST: Final = 3.0
_AWAY_LONGEST: Final = 60.0
# The interval of checks of attempt directories.
_LOOK_EVERY: Final = 0.5
# The interval of counting the GPUs that jobs hold.
_COUNT_EVERY: Final = 5.0
# The limit of `sbatch` processes at a time; the controller serializes them anyway.
_MOST_SUBMITTING: Final = 4
# The limit of jobs claimed ahead of `sbatch`, so that it never waits for the queue.
_MOST_AHEAD: Final = 16
# When Slurm takes no more jobs, the next try comes after this time, or when a job of this worker ends. For a closed
# partition, only the time counts.
_FULL_FOR: Final = 120.0
# A worker that ends waits this long for submissions in progress.
_CLOSE_WITHIN: Final = 5.0
_CLOSE_POLL: Final = 0.05
# Slurm lists ended attempts only for minutes.
_MOST_FORGOTTEN: Final = 1000
# The limit of reasons in a heartbeat: more than anybody reads.
_MOST_REASONS: Final = 200


class SlurmEngineOptions(SubmissionOptions, frozen=True, kw_only=True):
    """The engine's own options."""

    max_pending: int = 50
    """The limit of jobs pending in Slurm."""
    source: str = "auto"
    deadline: float = DEFAULT_DEADLINE


class SlurmEngine:
    """Runs attempts as jobs of a Slurm cluster."""

    def __init__(self, options: WorkerOptions, own: SlurmEngineOptions, log: Log) -> None:
        """Raises StokerError without a usable Slurm."""
        self._options = options
        self._own = own
        self._log = log
        self._cluster = Cluster()
        # A wrong partition is an error now; an absent controller may come back.
        with contextlib.suppress(SlurmProblem):
            self._cluster.ask()
            for name in (own.partition, own.preemptible_partition):
                self._cluster.check_partition(name)
        self._attempts: dict[str, SlurmAttempt] = {}
        self._to_submit: dict[str, list[str]] = {}
        """Waiting submissions: the arguments of `sbatch` by attempt, in order."""
        self._submitting: dict[str, Running] = {}
        self._fetching: dict[str, Running] = {}
        """Code snapshots on their way to the shared directory."""
        self._to_cancel: dict[int, str] = {}
        """Slurm jobs to cancel, with their attempts."""
        self._cancelling: Running | None = None
        self._cancelled: dict[int, str] = {}
        """Slurm jobs that are being cancelled, with their attempts."""
        self._to_end: set[str] = set()
        """Attempts whose jobs could not be cancelled."""
        self._ended: dict[int, str] = {}
        """Recently cancelled Slurm jobs, with their attempts."""
        self._strays: dict[str, float] = {}
        """Ended attempts that still have a Slurm job, and since when that is known."""
        self._forgotten: deque[str] = deque(maxlen=_MOST_FORGOTTEN)
        """Recent attempts whose outcome this worker has delivered."""
        self._has_found_all = False
        self._asking: Running | None = None
        self._asked_at = -math.inf
        self._ask_at = -math.inf
        self._pause = _OFTEN
        self._backoff = Backoff(_AWAY_FIRST, _AWAY_LONGEST)
        self._jobs: dict[str, SlurmJob] = {}
        """The last complete answer: this worker's jobs by attempt."""
        self._answered_at = -math.inf
        self._problem: str | None = "it has not answered yet"
        self._problem_logged = False
        self._full = ""
        """Why Slurm takes no more jobs."""
        self._full_until = -math.inf
        self._closed: dict[Destination, tuple[str, float]] = {}
        """Why Slurm takes no jobs for a partition or reservation, and when to try again."""
        self._look_at = -math.inf
        self._count_at = -math.inf
        self._waiting: dict[str, str] = {}

    def open(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._usage = UsagePerMinute(identity.host)

    @property
    def lease(self) -> float:
        return LEASE

    @property
    def attempts(self) -> Mapping[str, SlurmAttempt]:
        return self._attempts

    def find(self) -> Found[SlurmAttempt]:
        found = find_attempts(self._identity, self._options.queue, self._attempts)
        self._attempts |= {attempt.id: attempt for attempt in found.attempts}
        self._has_found_all = self._has_found_all or found.complete
        self._ask_soon()
        return found

    def is_started(self, attempt: Attempt) -> bool:
        """Checks the directory, which exists before `sbatch` runs but may appear late on a network file system."""
        record = SlurmAttemptRecord(self._identity.directory_of(attempt.job, attempt.number))
        if record.has_attempt():
            with contextlib.suppress(OSError):
                if record.attempt_spec() is None:
                    return True  # it is damaged
            raise CannotTellError("its directory was not seen before")
        if self._problem is not None:
            raise CannotTellError(f"Slurm: {self._problem}")
        if attempt.id in self._jobs:
            raise CannotTellError("Slurm knows its job, and its directory is not seen yet")
        return False

    # Starts

    def decide(self, waiting: Sequence[ReadyJob], queue_time: float) -> Decision:  # noqa: ARG002 - the engine's protocol
        self._waiting = {}
        never: set[str] = set()
        starts: list[Start] = []
        free = self._free_places()
        for job in waiting:
            if (why := self._why_never(job)) is not None:
                never.add(job.id)
                self._waiting[job.id] = why
            elif self._problem is not None:
                self._waiting[job.id] = f"waits until Slurm answers again: {self._problem}"
            elif self._is_full():
                self._waiting[job.id] = f"waits until Slurm takes more jobs: {self._full}"
            elif (closed := self._why_closed(job)) is not None:
                self._waiting[job.id] = f"waits until Slurm takes jobs there again: {closed}"
            elif len(starts) < min(free, _MOST_AHEAD):
                starts.append(Start(job.id, pending=True))
            else:
                self._waiting[job.id] = f"waits until fewer than {self._own.max_pending} jobs wait in Slurm"
        return Decision(
            start=tuple(starts),
            never=frozenset(never),
            complete=self._problem is None,
        )

    def _free_places(self) -> int:
        pending = sum(1 for attempt in self._attempts.values() if attempt.result is None and attempt.pending)
        if self._is_full():
            return 0
        return min(self._own.max_pending - pending, _MOST_AHEAD - len(self._to_submit))

    def _is_full(self) -> bool:
        return time.monotonic() < self._full_until

    def _why_closed(self, job: ReadyJob) -> str | None:
        why, until = self._closed.get(destination_of(job, self._own), ("", -math.inf))
        return why if time.monotonic() < until else None

    def _why_never(self, job: ReadyJob) -> str | None:
        try:
            check(job)
        except StokerError as error:
            return f"can never start here: {error}"
        return self._cluster.why_never(job, partition_of(job, self._own), self._options.labels)

    def prepare(self, waiting: Sequence[ReadyJob], read: Callable[[str], Job | None]) -> str:  # noqa: ARG002 - the engine's protocol
        return ""  # sbatch takes longer than all that could be prepared

    def start(self, job: Job, attempt: Attempt, claimed_at: float) -> SlurmAttempt:
        identity = self._identity
        own = _without_slurm(identity.environment)
        meeting = on_one_machine(attempt.id) if job.nodes == 1 else KNOWN_LATER
        plan, variables = prepare(job, [], own, attempt.number, rendezvous=meeting, chosen_later=True)
        plan = replace(plan, grace=self._options.grace, source=self._own.source, deadline=self._own.deadline)
        record = SlurmAttemptRecord(identity.create_directory(attempt))
        attempt_spec = SlurmAttemptSpec(
            attempt=attempt.id,
            job=job.id,
            number=attempt.number,
            queue=str(queue_address(self._options.queue)),
            plan=plan,
            environment=variables | {ATTEMPT_TAG: attempt.id},
            lease=self._options.lease,
            lease_until=claimed_at + self._options.lease,
            log_limit=self._options.log_limit,
            fitting=batch_size_fit(job, attempt.number, plan.command, 1),
            commit=job.commit if job.pin else None,
            code=job.code if job.snapshot else None,
            requeue_at_limit=job.requeue_at_limit,
            started=time.time(),
            kill_wait=self._cluster.kill_wait,
            nodes=job.nodes,
            exported=tuple(client.environment()),
            start_by=job.deadline,
        )
        try:
            words = arguments(
                job,
                self._own,
                comment_of(identity.key, attempt.id),
                str(record.directory),
                self._options.grace,
                self._cluster.gpu_type(job.gpu_model),
                WhereItRuns(tuple(node.name for node in self._cluster.nodes), self._options.labels),
            )
            record.write_attempt(attempt_spec)
        except (StokerError, OSError):
            shutil.rmtree(record.directory, ignore_errors=True)
            raise
        running = self._attempts[attempt.id] = SlurmAttempt(record, attempt_spec, submitting=True)
        running.destination = destination_of(job, self._own)
        self._to_submit[attempt.id] = words
        self._waiting.pop(job.id, None)
        self._submit()
        return running

    def _submit(self) -> None:
        """Runs `sbatch` for one job of each destination at a time: Slurm starts equal jobs in the order of arrival."""
        busy = {self._attempts[name].destination for name in self._submitting.keys() & self._attempts.keys()}
        for name, words in list(self._to_submit.items()):
            if len(self._submitting) + len(self._fetching) >= _MOST_SUBMITTING:
                return
            attempt = self._attempts.get(name)
            if attempt is None or attempt.result is not None:
                del self._to_submit[name]
            elif attempt.needs_code and (code := attempt.spec.code) is not None:
                busy.add(attempt.destination)  # those behind it wait for its code
                if name not in self._fetching:
                    queue = queue_address(self._options.queue).whole
                    command, variables = fetch_command(queue, attempt.record.directory, code)
                    self._fetching[name] = Running(command, variables=variables, deadline=FETCH_SECONDS)
            elif attempt.destination not in busy:
                del self._to_submit[name]
                busy.add(attempt.destination)
                self._run_sbatch(attempt, words)

    def _run_sbatch(self, attempt: SlurmAttempt, words: Sequence[str]) -> None:
        body = script(sys.executable, str(attempt.record.directory))
        self._submitting[attempt.id] = client.sbatch(words, body)

    def _take_snapshots(self) -> None:
        """Notes which code has reached the shared directory."""
        for name, command in list(self._fetching.items()):
            if not command.has_ended():
                continue
            del self._fetching[name]
            attempt = self._attempts.get(name)
            problem: AttemptResult | None = None
            try:
                if why := command.result().strip():
                    problem = AttemptResult("failed", 125, why, "start")
            except (SlurmProblem, SlurmRefusal) as error:
                problem = AttemptResult("requeued", None, f"its snapshot could not be brought: {error}")
            if attempt is None or attempt.result is not None:
                continue
            if problem is not None:
                attempt.refused(problem)
            else:
                attempt.needs_code = False

    def commit(self, preempt: Collection[str]) -> None:
        pass  # Slurm preempts

    def forget(self, attempt: str) -> None:
        forgotten = self._attempts.pop(attempt)
        self._forgotten.append(attempt)
        if math.isfinite(forgotten.cancel_at) or forgotten.cancel_at < 0:
            self._end_in_slurm(forgotten)

    # Answers

    def wait_for(self) -> tuple[Iterable[int], float]:
        commands = [*self._submitting.values(), *filter(None, (self._asking, self._cancelling))]
        commands += self._fetching.values()
        due = min((command.due() for command in commands), default=math.inf)
        due = min(due, self._ask_at if self._asking is None else math.inf, self._cluster.due())
        if self._attempts:
            due = min(due, self._look_at)
        return [*(command.fileno() for command in commands), *self._cluster.descriptors()], due

    def step(self, readable: Collection[int]) -> Step:  # noqa: ARG002 - each command knows whether it has ended
        free, problem = self._free_places(), self._problem
        self._take_snapshots()
        self._take_submissions()
        self._take_answer()
        self._take_cancellation()
        changed = self._cluster.step()
        ended = self._look()
        self._submit()
        self._cancel()
        self._ask()
        changed = changed or (problem is not None and self._problem is None)
        return Step(ended, changed or bool(ended) or self._free_places() > free)

    def _look(self) -> list[RunningAttempt]:
        """Checks directories and returns attempts with a new result."""
        moment = time.monotonic()
        looks = moment >= self._look_at
        if looks:
            self._look_at = moment + _LOOK_EVERY
        counts = moment >= self._count_at
        if counts:
            self._count_at = moment + _COUNT_EVERY
        ended: list[RunningAttempt] = []
        for attempt in self._attempts.values():
            if looks and attempt.result is None and attempt.look_at <= moment:
                attempt.look()
            if counts and attempt.result is None:
                self._note_usage(attempt)
            if attempt.result is not None and not attempt.reported:
                attempt.reported = True
                ended.append(attempt)
                self._note_usage(attempt)
                if attempt.result.outcome != "requeued":
                    self._full_until = -math.inf  # there is room again
            if attempt.cancel_at <= moment:
                self._end_in_slurm(attempt)
        return ended

    def _take_submissions(self) -> None:
        for name, command in list(self._submitting.items()):
            if not command.has_ended():
                continue
            del self._submitting[name]
            attempt = self._attempts.get(name)
            try:
                slurm_job = answers.submitted_id(command.result())
            except SlurmRefusal as error:
                if attempt is not None:
                    attempt.refused(AttemptResult("failed", 125, str(error), "refused"))
            except SlurmClosed as error:
                if attempt is not None:
                    self._closed[attempt.destination] = str(error), time.monotonic() + _FULL_FOR
                    # The cause `start` keeps the worker from pausing: jobs for other partitions can start.
                    attempt.refused(AttemptResult("requeued", None, f"Slurm did not take it: {error}", "start"))
            except SlurmProblem as error:
                if isinstance(error, SlurmFull):
                    self._full, self._full_until = str(error), time.monotonic() + _FULL_FOR
                # Slurm may have the job after all: it is then found by its comment, and runs nothing.
                if attempt is not None:
                    attempt.refused(AttemptResult("requeued", None, f"Slurm did not take it: {error}"))
                self._ask_soon()
            else:
                if attempt is None or attempt.result is not None:
                    self._to_cancel[slurm_job] = name
                else:
                    attempt.submitted_as(slurm_job)
                    self._ask_within(self._often())

    def _ask(self) -> None:
        """Queries all jobs of this user when that is due."""
        if self._asking is None and time.monotonic() >= self._ask_at:
            self._asked_at = time.monotonic()
            self._asking = client.own_jobs()

    def _often(self) -> float:
        """The interval of queries while something changes."""
        return min(_RARELY, _OFTEN + _LATER_PER_JOB * len(self._jobs))

    def _ask_soon(self) -> None:
        self._ask_within(_SOON)

    def _ask_within(self, seconds: float) -> None:
        """`seconds`: after the last query."""
        self._pause = self._often()
        self._ask_at = min(self._ask_at, max(time.monotonic(), self._asked_at + seconds))

    def _take_answer(self) -> None:
        if self._asking is None or not self._asking.has_ended():
            return
        command, self._asking = self._asking, None
        try:
            jobs = answers.parse_jobs(command.result())
        except StokerError as error:
            self._note_problem(str(error))
            self._ask_at = time.monotonic() + self._backoff.next()
            return
        self._backoff.reset()
        self._note_problem(None)
        before, self._jobs = self._jobs, {}
        for job in jobs:
            if (name := attempt_of(job.comment, self._identity.key)) is not None:
                self._jobs[name] = job
        for name, attempt in self._attempts.items():
            # The answer cannot list jobs that were submitted after the query.
            if attempt.result is None and attempt.submitted_at < self._asked_at:
                known = self._jobs.get(name)
                attempt.hear(known, by_mistake=known is not None and self._ended.get(known.id, name) != name)
        self._to_cancel |= {self._jobs[name].id: name for name in self._to_end if name in self._jobs}
        self._to_end.clear()
        self._cancel_strays()
        if _on_nodes(before) != _on_nodes(self._jobs):
            self._cluster.ask_soon()
        changed = _gist(before) != _gist(self._jobs) or any(one.is_in_doubt for one in self._attempts.values())
        self._pause = self._often() if changed else min(_RARELY, self._pause * _SLOWER)
        self._ask_at = time.monotonic() + (self._pause if self._attempts else _RARELY)

    def _note_problem(self, problem: str | None) -> None:
        if problem is not None and not self._problem_logged:
            self._log(f"Slurm does not answer; jobs continue, retrying: {problem}")
        elif problem is None and self._problem_logged:
            self._log("Slurm answers again")
        self._problem, self._problem_logged = problem, problem is not None

    # Ends

    def _end_in_slurm(self, attempt: SlurmAttempt) -> None:
        attempt.cancel_at = math.inf
        listed = self._jobs.get(attempt.id)
        slurm_job = attempt.slurm_job if listed is None else listed.id
        if slurm_job is not None:
            self._to_cancel[slurm_job] = attempt.id

    def _cancel_strays(self) -> None:
        """Cancels Slurm jobs of ended attempts. Pending ones are cancelled at once: they would run nothing.

        Jobs that seem to run are cancelled after a lease, since Slurm misses some ends and would keep their GPUs. The
        same holds for jobs of earlier workers, whose directories may appear late on a network file system.
        """
        moment = time.monotonic()
        strays = {
            name: job
            for name, job in self._jobs.items()
            if name not in self._attempts and job.state in ACTIVE - {"COMPLETING"} and self._has_found_all
        }
        self._strays = {name: self._strays.get(name, moment) for name in strays}
        for name, job in strays.items():
            is_known = job.state == "PENDING" and name in self._forgotten
            if is_known or moment >= self._strays[name] + self._options.lease:
                self._to_cancel[job.id] = name

    def _cancel(self) -> None:
        """Cancels jobs, but never another attempt's: a controller that crashed may reuse ids."""
        if self._to_cancel and self._cancelling is None and not self._problem_logged:
            holders = {job.id: name for name, job in self._jobs.items()}
            holders |= {one.slurm_job: name for name, one in self._attempts.items() if one.slurm_job is not None}
            self._cancelled = {job: name for job, name in self._to_cancel.items() if holders.get(job, name) == name}
            self._to_cancel = {}
            if self._cancelled:
                self._cancelling = client.scancel(self._cancelled)
                self._ended = dict(islice((self._cancelled | self._ended).items(), _MOST_FORGOTTEN)) | self._cancelled

    def _take_cancellation(self) -> None:
        if self._cancelling is None or not self._cancelling.has_ended():
            return
        command, self._cancelling = self._cancelling, None
        try:
            command.result()
        except SlurmProblem:
            # After a crash of the controller the ids may belong to other jobs; the comments identify them again.
            self._to_end.update(self._cancelled.values())
        except SlurmRefusal:
            pass  # it had ended
        self._ask_soon()

    # Reports

    def report(self) -> View:
        pending = {
            attempt.job: why_pending(attempt.reason, attempt.estimate, time.time())
            for attempt in self._attempts.values()
            if attempt.result is None and attempt.pending and attempt.state is not None
        }
        waiting = dict(islice((pending | self._waiting).items(), _MOST_REASONS))
        problem = None if self._problem is None else f"Slurm does not answer: {self._problem}"
        running = [
            (attempt.job, self._jobs[name].nodes or attempt.host, gpus_in(self._jobs[name].gres))
            for name, attempt in self._attempts.items()
            if name in self._jobs and attempt.result is None and not attempt.pending
        ]
        nodes = self._cluster.view(running)
        absent = problem is None
        return View(cluster=self._cluster.name, nodes=nodes, waiting=waiting, problem=problem, absent=absent)

    def usage(self, *, final: bool = False) -> Sequence[Usage]:
        self._usage.pass_time(time.time())
        return self._usage.so_far() if final else self._usage.finished()

    def usage_written(self, rows: Iterable[Usage]) -> None:
        self._usage.written(rows)

    def _note_usage(self, attempt: SlurmAttempt) -> None:
        """Counts the GPUs of its job until now. Their utilization is in the attempt's record."""
        job = self._jobs.get(attempt.id)
        for number in range(0 if job is None or attempt.pending else gpus_in(job.gres) * max(1, job.node_count)):
            gpu = f"{attempt.id}-{number}"
            self._usage.observe(gpu, "job", time.monotonic(), time.time(), None, None)
            if attempt.result is not None:
                self._usage.forget(gpu)

    def tidy(self) -> None:
        pass

    def close(self) -> None:
        """Waits for submissions and cancellations in progress, if Slurm answers."""
        ends = time.monotonic() + (_CLOSE_WITHIN if self._problem is None else 0.0)
        while (self._submitting or self._to_cancel or self._cancelling) and time.monotonic() < ends:
            self._take_submissions()
            self._take_cancellation()
            self._cancel()
            time.sleep(_CLOSE_POLL)
        preparing = (*self._fetching.values(), *self._submitting.values())
        for command in (*preparing, *filter(None, (self._asking, self._cancelling))):
            command.kill()
        self._cluster.close()


def _gist(jobs: Mapping[str, SlurmJob]) -> dict[str, str]:
    return {name: job.state for name, job in jobs.items()}


def _on_nodes(jobs: Mapping[str, SlurmJob]) -> set[str]:
    """The attempts whose jobs occupy nodes."""
    return {name for name, job in jobs.items() if job.state in ACTIVE - WAITING}


def _without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of an allocation around the worker, which would mislead its jobs."""

    return {name: value for name, value in environment.items() if not name.startswith("SLURM")}
