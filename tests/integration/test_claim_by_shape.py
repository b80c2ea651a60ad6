"""A worker that reads the first jobs of each shape starts what it would have started had it read the whole queue."""

import copy
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engines.attempt import AttemptResult
from stoker.engines.engine import Decision, RunningAttempt
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.capacity import Allocation, GpuState, PlacementOptions, ResourceRequest
from stoker.engines.local.placement import CannotFit, CpuSlotsTaken, Offer, place
from stoker.queue import Attempt, Job, JobSpec, Store, init_queue, open_queue
from stoker.queue import attempts as attempts_module
from stoker.queue.attempts import MOST_OF_SHAPE, MOST_SHAPES, ClaimRequest, Heads
from stoker.queue.driver import EVERYTHING, Changes, Ready
from stoker.queue.fields import shape_of
from stoker.queue.model import ReadyJob, View
from stoker.worker.scheduler import Scheduler
from tests.support.deep import examples
from tests.support.either_queue import queue, url
from tests.support.waiting import wait_for

__all__ = ["queue", "url"]

GIB = 2**30
NOW = 100_000.0
LONG = 600.0


class Machine:
    """An engine that only decides: what it starts holds its GPUs from then on."""

    lease = LONG

    def __init__(self, gpus: int, cpu_jobs: int, held: Sequence[Allocation] = ()) -> None:
        self.gpus = [GpuState(f"GPU-{index}", index, 24 * GIB, 0, 0.0) for index in range(gpus)]
        self.rules = PlacementOptions(cpu_jobs=cpu_jobs)
        self.held = list(held)
        self.started: dict[str, tuple[str, ...]] = {}
        self.preempted: set[str] = set()
        self.attempts: dict[str, RunningAttempt] = {}
        self.decisions = 0

    def decide(self, waiting: Sequence[ReadyJob | Job], queue_time: float) -> Decision:  # noqa: ARG002
        self.decisions += 1
        requests = [request_of(job, order) for order, job in enumerate(waiting)]
        elsewhere = {
            job.id: Offer(math.inf, job.gpus - len(job.kept.gpus))
            for job in waiting
            if job.kept is not None and job.kept.worker != "w"
        }
        found = place(self.gpus, self.held, requests, self.rules, NOW, None, elsewhere)
        never = (
            job
            for job, why in found.waiting.items()
            if isinstance(why, CannotFit) or (isinstance(why, CpuSlotsTaken) and not why.at_once)
        )
        return Decision(start=found.start, preempt=found.preempt, reserved=found.reservations, never=frozenset(never))

    def start(self, job: Job, attempt: Attempt, claimed_at: float) -> Mock:  # noqa: ARG002
        self.held.append(Allocation(request_of(job, 0), attempt.gpus, NOW, used={}))
        self.started[job.id] = attempt.gpus
        return Mock(pending=False, where="")

    def commit(self, preempt: Collection[str]) -> None:
        self.preempted |= set(preempt)


def request_of(job: ReadyJob | Job, order: int) -> ResourceRequest:
    return ResourceRequest(
        job.id, job.gpus, order, job.memory, job.share, job.priority, job.preemptible, job.time_limit
    )


def scheduler_of(machine: Machine) -> Scheduler:
    identity = Mock(spec=WorkerIdentity, worker="w", host="here")
    engine: Any = machine
    return Scheduler(identity, engine, lambda _message: None)


def settle(scheduler: Scheduler, store: Store) -> None:
    """Until there is nothing more to decide before time passes."""
    for _ in range(1000):
        if scheduler.due() > time.monotonic():
            return
        scheduler.place(store)
    raise AssertionError("it decides for ever")


def read_at_once(store: Store, patch: pytest.MonkeyPatch, of_shape: int, shapes: int = MOST_SHAPES) -> None:
    """As if these were the limits."""
    driver: Any = store._driver
    text = driver._statements["heads"]
    assert f"LIMIT {MOST_OF_SHAPE}\n" in text
    changed = copy.copy(driver._statements)
    changed["heads"] = text.replace(f"LIMIT {MOST_OF_SHAPE}\n", f"LIMIT {of_shape}\n")
    patch.setattr(driver, "_statements", changed)
    patch.setattr(attempts_module, "MOST_OF_SHAPE", of_shape)
    patch.setattr(attempts_module, "MOST_SHAPES", shapes)


SPECS = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.sampled_from([0, 0, 1, 1, 2, 3, 8]),
        "priority": st.sampled_from([-1, 0, 5]),
        "preemptible": st.booleans(),
        "time_limit": st.sampled_from([600.0, 7200.0]),
        "wants": st.sampled_from([(4, True), (10, True), (20, False), (40, False)]),
    },
)
HELD = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, 1000.0, 9000.0]), st.booleans()), max_size=3)


def spec_of(asked: Mapping[str, Any]) -> JobSpec:
    fields = {name: value for name, value in asked.items() if name != "wants"}
    if "wants" in asked and fields.get("gpus", 1):
        memory, fields["share"] = asked["wants"]
        fields["memory"] = memory * GIB
    return JobSpec(command="x", **fields)


def allocations_of(held: Sequence[tuple[int, float | None, bool]]) -> list[Allocation]:
    taken: dict[int, Allocation] = {}
    for number, (gpu, limit, preemptible) in enumerate(held):
        request = ResourceRequest(f"h{number}", 1, 0, None, False, 0, preemptible, limit)
        taken.setdefault(gpu, Allocation(request, (f"GPU-{gpu}",), NOW - 100.0, used={}))
    return list(taken.values())


@given(st.lists(SPECS, max_size=40), HELD, st.integers(1, 4), st.integers(0, 3), st.sampled_from([16, 16, 2]))
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_jobs_start_as_if_the_whole_queue_was_read(
    tmp_path_factory: pytest.TempPathFactory,
    asked: list[dict[str, Any]],
    held: list[tuple[int, float | None, bool]],
    gpus: int,
    cpu_jobs: int,
    at_once: int,
) -> None:
    holding = [one for one in allocations_of(held) if int(one.gpus[0].removeprefix("GPU-")) < gpus]
    path = tmp_path_factory.mktemp("queue") / "queue.db"
    with init_queue(str(path)) as store, pytest.MonkeyPatch.context() as patch:
        read_at_once(store, patch, at_once)
        store.workers.heartbeat("w", "here", View())
        store.jobs.submit([spec_of(one) for one in asked])
        everything = store.jobs.in_line(1000)
        expected = Machine(gpus, cpu_jobs, holding).decide(everything, 0.0)
        machine = Machine(gpus, cpu_jobs, holding)
        settle(scheduler_of(machine), store)
        assert machine.started == {start.job: start.gpus for start in expected.start}
        assert machine.preempted == set(expected.preempt)
        kept = {job.id: job.kept.gpus for job in store.jobs.in_line(1000) if job.kept is not None}
        assert kept == {one.job: one.ready for one in expected.reserved if one.affects_others}


# More shapes than are read at once


def test_shapes_beyond_those_that_are_read_at_once_are_not_starved(
    queue: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that can never start here do not hide the others, though no reading shows them all."""
    read_at_once(queue, monkeypatch, MOST_OF_SHAPE, shapes=4)
    monkeypatch.setattr("stoker.worker.scheduler._NEXT_SHAPES", 0.0)
    first_only = "SELECT * FROM stoker_jobs j"
    driver: Any = queue._driver
    text = driver._statements["first ready"]
    assert first_only in text
    assert "LIMIT 100" in text
    changed = copy.copy(driver._statements)
    changed["first ready"] = text.replace("LIMIT 100", "LIMIT 5")
    monkeypatch.setattr(driver, "_statements", changed)
    too_large = [JobSpec(command="x", gpus=8, time_limit=60.0 + number) for number in range(20)]
    small = [JobSpec(command="x", gpus=1, time_limit=60.0 + number) for number in range(20)]
    queue.jobs.submit(too_large)
    ids = queue.jobs.submit(small)
    machine = Machine(20, 0)
    machine.gpus = machine.gpus[:7]
    scheduler = scheduler_of(machine)
    for _ in range(100):
        scheduler.place(queue)
        if machine.started.keys() >= set(ids):
            break
        machine.held.clear()  # what runs ends at once
        scheduler.room_changed()
    assert machine.started.keys() == set(ids)


def test_worker_until_empty_ends_when_no_shape_can_ever_start(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read_at_once(queue, monkeypatch, MOST_OF_SHAPE, shapes=4)
    monkeypatch.setattr("stoker.worker.scheduler._NEXT_SHAPES", 0.0)
    queue.jobs.submit([JobSpec(command="x", gpus=8, time_limit=60.0 + number) for number in range(9)])
    scheduler = scheduler_of(Machine(1, 0))
    rounds = 0
    while not scheduler.has_nothing_left():
        scheduler.place(queue)
        rounds += 1
        assert rounds < 20
    assert rounds >= 3
    queue.jobs.submit([JobSpec(command="x", gpus=1)])
    scheduler.queue_changed()
    scheduler.place(queue)
    assert not scheduler.has_nothing_left()


def test_thousand_shapes_are_read_in_bounded_pieces(queue: Store) -> None:
    queue.jobs.submit([JobSpec(command="x", memory=GIB + number) for number in range(1000)])
    first = queue.jobs.in_line(1)[0].id
    seen, after, readings = set[str](), "", 0
    while True:
        heads = queue.attempts.heads("w", after)
        assert len(heads.jobs) <= 2 * MOST_SHAPES
        assert heads.jobs[0].id == first
        seen |= {job.id for job in heads.jobs}
        readings, after = readings + 1, heads.after
        if len(seen) == 1000:
            break
    assert readings == 10


# What keeps a job from the index of ready ones


def test_blocked_and_later_jobs_are_not_read(queue: Store) -> None:
    (first,) = queue.jobs.submit([JobSpec(command="x", priority=-1)])
    waiting = queue.jobs.submit([JobSpec(command="x", after=(first,))] * 50)
    failed = queue.jobs.submit([JobSpec(command="x", retries=1, backoff=LONG)])
    attempt = queue.attempts.claim(failed, "w", [], LONG)
    assert attempt is not None
    queue.attempts.finish(attempt.id, "failed", 1)
    assert [job.id for job in queue.attempts.heads().jobs] == [first]
    attempt = queue.attempts.claim([first], "w", [], LONG)
    assert attempt is not None
    done = queue.attempts.complete(attempt.id, "succeeded", 0, claim=claim_of(JobSpec(command="x")))
    assert done.frees_jobs
    assert done.claimed is None  # one that has become ready may come first
    assert [job.id for job in queue.attempts.heads().jobs] == waiting[:MOST_OF_SHAPE]


def claim_of(spec: JobSpec, worker: str = "w") -> ClaimRequest:
    return ClaimRequest(shape=shape_of(spec), worker=worker, lease=LONG)


def test_job_whose_dependencies_end_at_the_same_time_becomes_ready(postgres_url: str) -> None:
    """Neither of two transactions sees the end of the other's job before it is committed."""
    import psycopg

    with init_queue(postgres_url) as store, psycopg.connect(postgres_url) as one, psycopg.connect(postgres_url) as two:
        a, b = store.jobs.submit([JobSpec(command="x")] * 2)
        (then,) = store.jobs.submit([JobSpec(command="x", after=(a, b))])
        ends = b"UPDATE stoker_jobs SET state = 'succeeded' WHERE id = %s"
        one.execute(ends, [a])
        pid = two.info.backend_pid
        two.pgconn.send_query_params(ends.replace(b"%s", b"$1"), [b.encode()])
        wait_for(
            lambda: store._driver.fetch_text(f"SELECT 1 FROM pg_locks WHERE pid = {pid} AND NOT granted", {}),
            named="the transaction that waits for the other",
        )
        one.commit()
        while two.pgconn.get_result() is not None:
            pass
        two.commit()
        assert [job.id for job in store.attempts.heads().jobs] == [then]
        assert store.check() == []


def test_job_submitted_after_one_that_ends_at_the_same_time_becomes_ready(postgres_url: str) -> None:
    import psycopg

    with init_queue(postgres_url) as store, psycopg.connect(postgres_url) as other:
        (a,) = store.jobs.submit([JobSpec(command="x")])
        other.execute("UPDATE stoker_jobs SET state = 'succeeded' WHERE id = %s", [a])
        done: list[list[str]] = []

        def submit() -> None:
            with open_queue(postgres_url) as second:
                done.append(second.jobs.submit([JobSpec(command="x", after=(a,))]))

        thread = threading.Thread(target=submit)
        thread.start()
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_for(lambda: store._driver.fetch_text(waits, {}), named="the submission that waits")
        other.commit()
        thread.join(60.0)
        assert [job.id for job in store.attempts.heads().jobs] == done[0]


# Several workers, and what one costs


def test_claim_is_not_before_the_turn_of_another_shape(queue: Store) -> None:
    """Another worker has taken the first job of the shape since this one has read the queue."""
    submitted = [JobSpec(command="x", gpus=gpus, priority=priority) for gpus, priority in ((1, 9), (2, 5), (1, 0))]
    first, second, _third = queue.jobs.submit(submitted)
    machine = Machine(2, 0, allocations_of([(0, None, False), (1, None, False)]))
    scheduler = scheduler_of(machine)
    settle(scheduler, queue)
    assert queue.attempts.claim([first], "another", [], LONG) is not None
    machine.held.clear()
    scheduler.room_changed()
    settle(scheduler, queue)
    assert list(machine.started) == [second]


def test_jobs_of_one_shape_cost_one_statement_each(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is never free for long: the outcome of each job brings the next."""
    jobs = 64
    queue.jobs.submit([JobSpec(command="x", gpus=0)] * (jobs + 1))
    queue.jobs.submit([JobSpec(command="x", gpus=8)] * 100)
    machine = Machine(1, 1)
    scheduler = scheduler_of(machine)
    settle(scheduler, queue)
    statements: Counter[str] = Counter()
    # On PostgreSQL the second calls the first.
    for name in ("fetch", "at_once")[: 2 if Path(queue.place).exists() else 1]:
        monkeypatch.setattr(queue._driver, name, counted(getattr(queue._driver, name), statements))
    for _ in range(jobs):
        (job,) = machine.held
        attempt = queue.jobs.get(job.request.job).attempt
        machine.held.clear()
        scheduler.room_changed()
        ended: Any = Mock(id=attempt, result=AttemptResult("succeeded", 0, ""))
        assert scheduler.finish(queue, ended)
        settle(scheduler, queue)
    assert len(machine.started) == jobs + 1
    by_name = statements - Counter({"one job": jobs})
    assert by_name == {"succeed and claim": jobs, "heads": jobs // MOST_OF_SHAPE}


def counted(really: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def count(statement: str, *arguments: Any) -> Any:
        counts[statement] += 1
        return really(statement, *arguments)

    return count


# Notifications


def is_due(scheduler: Scheduler) -> bool:
    return scheduler.due() <= time.monotonic()


def test_queue_is_read_again_only_for_jobs_that_could_change_the_decision(queue: Store) -> None:
    queue.jobs.submit([JobSpec(command="x", gpus=1), JobSpec(command="x", gpus=8)])
    machine = Machine(1, 0, allocations_of([(0, None, False)]))
    scheduler = scheduler_of(machine)
    settle(scheduler, queue)
    waits, never, unknown = (shape_of(JobSpec(command="x", gpus=gpus)) for gpus in (1, 8, 2))
    scheduler.note_changes(Changes(ready={waits: Ready(0, 600), never: Ready(-1, 1)}, workers=frozenset({"other"})))
    assert not is_due(scheduler)
    for changes in (Changes(ready={waits: Ready(1, 1)}), Changes(ready={unknown: Ready(-9, 1)}), EVERYTHING):
        scheduler.note_changes(changes)
        assert is_due(scheduler)
        settle(scheduler, queue)
    # When the one before it has started, an equal one is news.
    machine.held.clear()
    scheduler.room_changed()
    settle(scheduler, queue)
    assert len(machine.started) == 1
    scheduler.note_changes(Changes(ready={waits: Ready(0, 1)}))
    assert is_due(scheduler)


def test_many_workers_do_not_read_the_queue_all_at_once(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)  # a slow machine would let a worker poll meanwhile
    schedulers = [scheduler_of(Machine(1, 1)) for _ in range(200)]
    for scheduler in schedulers:
        settle(scheduler, queue)
        scheduler.workers = len(schedulers)
    few, many = (Changes(ready={shape_of(JobSpec(command="x")): Ready(0, number)}) for number in (1, 200))
    for scheduler in schedulers:
        scheduler.note_changes(few)
    at = sorted(scheduler.due() - now for scheduler in schedulers)
    assert at[100] > 0.05
    assert at[-1] < 2.0
    for scheduler in schedulers:
        scheduler.note_changes(many)
        assert is_due(scheduler)


def test_reservation_of_a_machine_that_died_is_ended(queue: Store) -> None:
    (job,) = queue.jobs.submit([JobSpec(command="x", gpus=2)])
    queue.workers.heartbeat("dead", "there", View())
    assert queue.jobs.keep(job, "dead", [], None)
    queue._driver.fetch_text("UPDATE stoker_workers SET seen = seen - 61", {})
    assert queue.workers.count() == 0
    queue.jobs.keep_for_the_dead_no_more()
    shape = shape_of(JobSpec(command="x", gpus=2))
    claimed = queue.attempts.take_head(ClaimRequest(shape=shape, worker="w", lease=LONG))
    assert claimed is not None
    assert claimed.job.id == job


def test_jobs_that_can_never_start_here_are_not_read_for_every_other(
    queue: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.jobs.submit([JobSpec(command="x", gpus=8)] * 100)
    machine = Machine(2, 0)
    scheduler = scheduler_of(machine)
    settle(scheduler, queue)
    really, read = queue.attempts.heads, list[int]()

    def heads(*arguments: Any) -> Heads:
        found = really(*arguments)
        read.append(len(found.jobs))
        return found

    monkeypatch.setattr(queue.attempts, "heads", heads)
    (job,) = queue.jobs.submit([JobSpec(command="x")])
    scheduler.note_changes(Changes(ready={shape_of(JobSpec(command="x")): Ready(0, 1)}))
    settle(scheduler, queue)
    assert list(machine.started) == [job]
    assert read == [1]
    # They are read again by and by: another machine may have taken them.
    scheduler._poll_at = 0.0
    settle(scheduler, queue)
    assert read == [1, MOST_OF_SHAPE]


def test_reserved_job_that_was_claimed_with_an_outcome_is_not_missed(queue: Store) -> None:
    """The job that a decision reserves GPUs for is gone when the rest of the decision is carried out."""
    queue.jobs.submit([JobSpec(command="x", gpus=0)] * 3 + [JobSpec(command="x", gpus=2), JobSpec(command="x")])
    machine = Machine(2, 1, allocations_of([(0, None, False)]))
    scheduler = scheduler_of(machine)
    settle(scheduler, queue)
    (reserved,) = scheduler._reserved
    decision = machine.decide(scheduler._waiting, 0.0)
    scheduler._waiting = [job for job in scheduler._waiting if job.id != reserved.job]
    scheduler._start_all(queue, decision)
    assert is_due(scheduler)
    settle(scheduler, queue)


@pytest.mark.parametrize(("workers", "seconds"), [(1, 5.0), (250, 5.0), (1000, 20.0)])
def test_workers_together_poll_at_a_limited_rate(
    queue: Store, monkeypatch: pytest.MonkeyPatch, workers: int, seconds: float
) -> None:
    monkeypatch.setattr(queue.workers, "count", lambda: workers)
    scheduler = scheduler_of(Machine(1, 1))
    before = time.monotonic()
    settle(scheduler, queue)
    assert before + seconds <= scheduler.due() <= time.monotonic() + seconds
