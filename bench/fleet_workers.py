"""Many workers in a process, for `bench fleet`: the product's own loop in a thread each, on made-up machines.

Everything between a worker and the queue is real: statements, notifications, connections, logs, heartbeats, usage. Only
the engine is not: its GPUs are figures, its jobs end when the bench wants it, and print a line a second if it does.
"""

import contextlib
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from stoker.engines.attempt import AttemptRecord, AttemptResult, AttemptSpec, StopCause
from stoker.engines.delivery import LogTail
from stoker.engines.engine import Decision, Found, Reservation, RunningAttempt, Step, WorkerOptions
from stoker.engines.gpu_usage import UsagePerMinute
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.capacity import Allocation, PlacementOptions, ResourceRequest
from stoker.engines.local.gpu_tracker import GpuTracker
from stoker.engines.local.placement import CannotFit, Offer, WaitingReason, place
from stoker.engines.local.waiting_reasons import why_waiting
from stoker.gpus.model import Gpu, Look, Reading, Unknown, Utilization
from stoker.queue import Attempt, Job, Store, prepare_types
from stoker.queue.model import ReadyJob, Usage, View
from stoker.runs.plan import Plan
from stoker.worker.loop import WorkerLoop

GIB = 2**30
LOOKS = 5.0
MOST_REASONS = 200
# What a training prints in a second; the queue gets the last 16 KiB of it.
LINE = "epoch 3 step {:9d} loss 0.{:06d} lr 3.0e-04 tokens/s 181234 mfu 0.41 grad norm 0.87 eta 11:42:07\n"


class PrintingTail(LogTail):
    """The tail of a job that has printed something since the last delivery, if jobs print."""

    def __init__(self, record: AttemptRecord, spec: AttemptSpec, engine: "MadeUpEngine") -> None:
        super().__init__(record, spec)
        self._record, self._engine, self._steps = record, engine, 0

    def deliver(self, store: Store) -> None:
        if not self._engine.fleet.prints:
            return
        # The first time as much as the queue keeps, as after some minutes.
        lines = 3 if self._steps else 200
        with self._record.output.open("a") as output:
            output.writelines(LINE.format(self._steps + one, random.randrange(10**6)) for one in range(lines))
        self._steps += lines
        super().deliver(store)


class MadeUpAttempt(RunningAttempt):
    """An attempt that ends when the bench wants it."""

    def __init__(self, record: AttemptRecord, spec: AttemptSpec, request: ResourceRequest, engine: "MadeUpEngine"):
        super().__init__(record, spec)
        self.request = request
        self.log_tail = PrintingTail(record, spec, engine)

    @property
    def is_settled(self) -> bool:
        return self.result is not None

    def stop(self, cause: StopCause, reason: str) -> None:
        self.stopping = True
        self.result = AttemptResult("lost" if cause == "lease" else "cancelled", None, reason)

    def renewed(self, until: float) -> None:
        pass

    def acknowledge(self) -> None:
        pass

    def warning(self) -> None:
        """No supervisor warns of anything."""


class MadeUpEngine:
    """A machine of eight GPUs that are as the worker wants them; placement is the product's."""

    def __init__(self, fleet: "Fleet", options: WorkerOptions, index: int, gpus: int) -> None:
        self.fleet = fleet
        self.attempts: dict[str, MadeUpAttempt] = {}
        self._options = options
        self._gpus = tuple(
            Gpu(f"GPU-{index:08x}-0000-4000-8000-{gpu:012x}", gpu, "NVIDIA H100", "nvidia", gpu, 80 * GIB, f"{gpu}")
            for gpu in range(gpus)
        )
        self._placement = PlacementOptions()
        self._tracker = GpuTracker("all", self._placement)
        self._reasons: dict[str, WaitingReason] = {}
        self._reservations: tuple[Reservation, ...] = ()
        self._look_at = 0.0
        self._view: View | None = None
        """What was reported last, until something changes: a process has a thousand machines to report of."""
        self._asked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def lease(self) -> float:
        return self._options.lease

    def end_one(self) -> None:
        """From another thread: the next step finds that a job has ended."""
        os.eventfd_write(self._asked, 1)

    def open(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._usage = UsagePerMinute(identity.host)
        self._observe()

    def find(self) -> Found[RunningAttempt]:
        return Found((), True)

    def is_started(self, attempt: Attempt) -> bool:
        return attempt.id in self.attempts

    def _running(self) -> list[MadeUpAttempt]:
        return [attempt for attempt in self.attempts.values() if attempt.result is None]

    def _holders(self) -> dict[str, set[str]]:
        holders: dict[str, set[str]] = {}
        for attempt in self._running():
            for uuid in attempt.spec.gpus:
                holders.setdefault(uuid, set()).add(attempt.job)
        return holders

    def _observe(self) -> None:
        holders, moment, wall = self._holders(), time.monotonic(), time.time()
        readings = tuple(_reading(gpu, gpu.uuid in holders) for gpu in self._gpus)
        look = Look("made up", moment, wall, self._gpus, readings)
        self._tracker.observe(look, lambda _pid: None, holders)
        for gpu in self._tracker.worker_gpus(holders, wall):
            self._usage.observe(gpu.uuid, gpu.state, moment, wall, gpu.utilization, gpu.memory_used)
        self._look_at, self._view = moment + LOOKS, None

    def decide(self, waiting: Sequence[ReadyJob], queue_time: float) -> Decision:
        running = self._running()
        placed = place(
            self._tracker.gpus,
            [Allocation(one.request, one.spec.gpus, one.since, used={}) for one in running],
            [_request(job, order) for order, job in enumerate(waiting)],
            self._placement,
            time.monotonic(),
            elsewhere={job.id: offer for job in waiting if (offer := self._offer_elsewhere(job, queue_time))},
        )
        self._reasons, self._reservations, self._view = placed.waiting, placed.reservations, None
        return Decision(
            start=placed.start,
            reserved=placed.reservations,
            never=frozenset(job for job, reason in placed.waiting.items() if isinstance(reason, CannotFit)),
        )

    def prepare(self, waiting: Sequence[ReadyJob], read: Callable[[str], Job | None]) -> str:  # noqa: ARG002 - the engine's protocol
        return ""

    def _offer_elsewhere(self, job: ReadyJob, queue_time: float) -> Offer | None:
        if job.kept is None or self._identity.is_own(job.kept.worker):
            return None
        starts_in = math.inf if job.kept.until is None else max(0.0, job.kept.until - queue_time)
        return Offer(starts_in, job.gpus - len(job.kept.gpus))

    def start(self, job: Job, attempt: Attempt, claimed_at: float) -> MadeUpAttempt:
        record = AttemptRecord(self._identity.create_directory(attempt))
        spec = AttemptSpec(
            attempt=attempt.id,
            job=job.id,
            number=attempt.number,
            queue="",
            plan=Plan(command=("train",)),
            environment={},
            gpus=attempt.gpus,
            lease=self.lease,
            lease_until=claimed_at + self.lease,
            log_limit=self._options.log_limit,
            started=time.time(),
        )
        record.write_attempt(spec)
        started = self.attempts[attempt.id] = MadeUpAttempt(record, spec, _request(job, 0), self)
        self._view = None
        return started

    def commit(self, preempt: Collection[str]) -> None:
        pass

    def forget(self, attempt: str) -> None:
        del self.attempts[attempt]

    def wait_for(self) -> tuple[Iterable[int], float]:
        return (self._asked,), self._look_at

    def step(self, readable: Collection[int]) -> Step:
        if time.monotonic() >= self._look_at:
            self._observe()
        ended: list[RunningAttempt] = []
        if self._asked in readable:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._asked)
            for attempt in self._running()[:1]:
                attempt.result = AttemptResult("succeeded", 0, "")
                ended.append(attempt)
                self._view = None
        return Step(ended, bool(ended))

    def report(self) -> View:
        if self._view is None:
            reserved = {uuid: one for one in self._reservations for uuid in one.ready}
            reasons = list(self._reasons.items())[:MOST_REASONS]
            self._view = View(
                gpus=self._tracker.worker_gpus(self._holders(), time.time(), {}, reserved),
                waiting={job: why_waiting(reason) for job, reason in reasons},
            )
        return self._view

    def usage(self, *, final: bool = False) -> Sequence[Usage]:
        return self._usage.so_far() if final else self._usage.finished()

    def usage_written(self, rows: Iterable[Usage]) -> None:
        self._usage.written(rows)

    def tidy(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._asked)


def _request(job: Job | ReadyJob, order: int) -> ResourceRequest:
    return ResourceRequest(job=job.id, gpus=job.gpus, order=order, memory=job.memory, priority=job.priority)


def _reading(gpu: Gpu, is_busy: bool) -> Reading:
    utilization = random.uniform(0.8, 1.0) if is_busy else 0.0
    return Reading(
        uuid=gpu.uuid,
        span=LOOKS,
        utilization=Utilization(utilization, utilization, 30),
        memory_used=random.randrange(60 * GIB, 70 * GIB) if is_busy else 500 * 2**20,
        memory_total=80 * GIB,
        power=600.0,
        power_limit=700.0,
        energy=3000.0,
        temperature=60.0,
        processes=(),
        pipes=Unknown("it is made up"),
    )


class Fleet:
    """The workers, each in a thread."""

    def __init__(self, home: Path, queue: str, workers: range, gpus: int) -> None:
        self._home = home
        self._options = WorkerOptions(queue=queue)
        self._gpus = gpus
        self.prints = False
        self._ends_per_second = 0.0
        self._engines: list[MadeUpEngine] = []
        self._log = (home / "log").open("a", buffering=1)
        threading.stack_size(512 * 1024)
        for index in workers:
            threading.Thread(target=self._work, args=(index,), daemon=True).start()
        threading.Thread(target=self._end_jobs, daemon=True).start()

    def obey(self, order: str) -> None:
        """`prints 1`, `ends 50`."""
        what, _, value = order.partition(" ")
        if what == "prints":
            self.prints = value == "1"
        else:
            self._ends_per_second = float(value)

    def _work(self, index: int) -> None:
        # They were not started all at once.
        time.sleep(random.uniform(0.0, 5.0))
        directory = self._home / f"worker-{index}"
        directory.mkdir()
        identity = WorkerIdentity(directory)
        identity.host = f"node{index:04d}"
        engine = MadeUpEngine(self, self._options, index, self._gpus)
        engine.open(identity)
        loop = WorkerLoop(self._options, identity, engine, lambda text: self._note(index, text))
        self._engines.append(engine)
        try:
            loop.run()
        except Exception as error:
            self._note(index, f"FAILED: {error!r}")
            raise

    def _note(self, index: int, text: str) -> None:
        # Only trouble: a line for each start and end of a job would take more time than the job.
        if ": started" not in text and ": succeeded" not in text:
            self._log.write(f"{time.time():.3f} {index} {text}\n")

    def _end_jobs(self) -> None:
        while True:
            if not self._ends_per_second:
                time.sleep(0.1)
                continue
            time.sleep(random.expovariate(self._ends_per_second))
            random.choice(self._engines).end_one()


def run_fleet(home: Path, queue: str, workers: range, gpus: int, orders: int) -> None:
    """In a process of its own, until it is killed. `orders`: a pipe with a line for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_types()
    fleet = Fleet(home, queue, workers, gpus)
    with os.fdopen(orders) as lines:
        for line in lines:
            fleet.obey(line.strip())
