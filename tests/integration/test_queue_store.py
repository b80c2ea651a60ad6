"""What every store of the queue must do, asked of SQLite and of a real PostgreSQL alike."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import BadInputError, StokerError
from stoker.queue import (
    JobSpec,
    Outcome,
    QueueAwayError,
    Requests,
    Store,
    View,
    WorkerGpu,
    init_queue,
    new_id,
    open_queue,
)
from stoker.queue.attempts import ClaimRequest
from stoker.queue.driver import DRIVERS, VERSION, DriverType, queue_address
from stoker.queue.fields import shape_of
from stoker.queue.model import KeptGpus
from stoker.queue.sqlite import SqliteDriver
from stoker.queue.table import LOG_TAIL
from stoker.status.machines import machines_of
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.waiting import wait_for

LONG = 600.0
OVER = -1.0
"""A lease that has ended before it began: no test waits for one."""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "a place" / "queue.db")


@pytest.fixture
def queue(url: str) -> Iterator[Store]:
    with init_queue(url) as opened:
        yield opened


def submit(queue: Store, *commands: str, **asked: object) -> list[str]:
    return queue.jobs.submit([JobSpec(command=command, **asked) for command in commands])  # type: ignore[arg-type]  # by name


def run(queue: Store, job: str, outcome: Outcome, exit_code: int | None = None) -> None:
    attempt = queue.attempts.claim([job], "w", [], LONG)
    assert attempt is not None
    assert queue.attempts.finish(attempt.id, outcome, exit_code)


def ready(queue: Store) -> list[str]:
    return [job.id for job in queue.attempts.heads().jobs]


def test_job_is_read_as_submitted(queue: Store) -> None:
    awkward = "echo 'it''s' \"quoted\" \\ %s %(x)s :name {id}\n\tsecond line \0 \r 🔥 ﷽"
    (words,) = queue.jobs.submit(
        [
            JobSpec(
                command=("python", "train.py", awkward, ""),
                directory="/srv/ünï",
                environment={"A": "1=2", "EMPTY": ""},
                name="the run 🔥",
                tags=("a", "b:c"),
                gpus=2,
                memory=20 * 2**30,
                share=True,
                batch_size=96,
                priority=-3,
                retries=4,
                backoff=1.5,
                time_limit=3600.0,
                policy={"idle": 0.2, "window": "5m", "all": True},
                preemptible=True,
                on_loss="hold",
                commit="0" * 40,
                dirty=False,
                pin=True,
                origin="sheet:1",
            )
        ]
    )
    job = queue.jobs.get(words)
    assert job.command == ("python", "train.py", awkward, "")
    assert (job.directory, job.environment, job.name) == ("/srv/ünï", {"A": "1=2", "EMPTY": ""}, "the run 🔥")
    assert (job.tags, job.gpus, job.memory, job.share, job.priority) == (("a", "b:c"), 2, 20 * 2**30, True, -3)
    assert (job.retries, job.retries_left, job.backoff, job.time_limit) == (4, 4, 1.5, 3600.0)
    assert job.batch_size == 96
    assert job.policy == {"idle": 0.2, "window": "5m", "all": True}
    assert (job.preemptible, job.on_loss, job.commit, job.dirty, job.pin) == (True, "hold", "0" * 40, False, True)
    assert (job.state, job.attempts, job.started, job.ended, job.exit_code) == ("queued", 0, None, None, None)
    assert abs(job.submitted - queue.clock()) < 60


def test_command_of_one_mebibyte_is_stored_whole(queue: Store) -> None:
    command = "echo " + "ü" * 2**19
    (job,) = submit(queue, command)
    assert queue.jobs.get(job).command == command


def test_ten_thousand_jobs_of_one_submission_keep_their_order(queue: Store) -> None:
    ids = queue.jobs.submit([JobSpec(command=f"echo {number}", tags=("sweep",)) for number in range(10_000)])
    assert len(set(ids)) == 10_000
    assert all(len(name) == 8 and int(name, 16) >= 0 for name in ids)
    assert [job.id for job in queue.jobs.find(order="queue", limit=20_000)] == ids
    assert queue.jobs.counts() == {"queued": 10_000}


def test_duplicate_id_is_drawn_again(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter(["0000000a", "0000000a", "0000000a", "0000000b"])
    monkeypatch.setattr("stoker.queue.jobs.new_id", lambda: next(draws))
    assert submit(queue, "first") == ["0000000a"]
    assert submit(queue, "second") == ["0000000b"]


def test_one_invalid_job_rejects_the_whole_submission(queue: Store) -> None:
    with pytest.raises(BadInputError, match="no such job"):
        queue.jobs.submit([JobSpec(command="good"), JobSpec(command="bad", after=("deadbeef",))])
    assert queue.jobs.find() == []


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        (JobSpec(command=""), "needs a command"),
        (JobSpec(command=()), "needs a command"),
        (JobSpec(command="x", gpus=-1), "gpus: must be between 0"),
        (JobSpec(command="x", gpus=2**40), "not 1099511627776"),
        (JobSpec(command="x", retries=-1), "retries: must be"),
        (JobSpec(command="x", batch_size=0), "batch_size: must be between 1"),
        (JobSpec(command="x", backoff=float("nan")), "backoff: nan s"),
        (JobSpec(command="x", time_limit=-5.0), "time_limit: -5 s"),
        (JobSpec(command="x", priority=2**40), "priority"),
        (JobSpec(command="x", name="two\nlines"), "name: .* is not one line"),
        (JobSpec(command="x", tags=("",)), "a tag must not be empty"),
        (JobSpec(command="x", after=("nonsense",)), "not the id of a job"),
        (JobSpec(command="x", id="XYZ"), "eight hexadecimal digits"),
        (JobSpec(command="\udcff"), "UTF-8"),
    ],
)
def test_invalid_jobs_are_refused(queue: Store, job: JobSpec, complaint: str) -> None:
    with pytest.raises(BadInputError, match=complaint):
        queue.jobs.submit([job])
    assert queue.jobs.find() == []


def test_origin_becomes_a_job_once(queue: Store, url: str) -> None:
    row = JobSpec(command="from a sheet", origin="sheet:7")
    first = queue.jobs.submit([row, JobSpec(command="other"), row])
    with open_queue(url) as again:
        assert again.jobs.submit([row]) == first[:1]
    assert first[0] == first[2] != first[1]
    assert len(queue.jobs.find()) == 2


def test_jobs_of_one_submission_may_depend_on_each_other_but_not_in_a_cycle(queue: Store) -> None:
    one, two = new_id(), new_id()
    with pytest.raises(BadInputError, match="cycle"):
        queue.jobs.submit([JobSpec(command="1", id=one, after=(two,)), JobSpec(command="2", id=two, after_any=(one,))])
    queue.jobs.submit([JobSpec(command="2", id=two, after=(one,)), JobSpec(command="1", id=one)])
    assert ready(queue) == [one]


def test_ready_jobs_are_ordered_by_priority_then_age(queue: Store) -> None:
    old, young = submit(queue, "old", "young")
    (urgent,) = submit(queue, "urgent", priority=5)
    (lazy,) = submit(queue, "lazy", priority=-5)
    assert ready(queue) == [urgent, old, young, lazy]
    queue.jobs.edit(lazy, {"priority": 9})
    assert ready(queue) == [lazy, urgent, old, young]
    assert queue.jobs.get(lazy).priority == 9


def test_job_waits_for_the_success_of_its_dependencies(queue: Store) -> None:
    first, second = submit(queue, "first", "second")
    (then,) = submit(queue, "then", after=(first,), after_any=(second,))
    assert queue.attempts.claim([then], "w", [], LONG) is None
    run(queue, second, "failed", 1)
    assert queue.jobs.needs_of([then]).of(then) == {first: "queued"}
    run(queue, first, "failed", 1)
    assert ready(queue) == []
    assert queue.jobs.needs_of([then]).of(then) == {first: "failed"}
    (last,) = submit(queue, "last", after_any=(then,))
    assert queue.jobs.needs_of([last]).dead_end(last) == ((then, "queued"), (first, "failed"))
    queue.jobs.retry([first])
    assert queue.jobs.needs_of([last]).dead_end(last) == ()
    run(queue, first, "succeeded", 0)
    assert ready(queue) == [then]
    assert queue.jobs.needs_of([then]).of(then) == {}


def test_claim_succeeds_once_and_returns_the_attempt(queue: Store) -> None:
    (job,) = submit(queue, "train", gpus=1)
    attempt = queue.attempts.claim([job], "w1", ["GPU-aa"], LONG)
    assert attempt is not None
    assert (attempt.job, attempt.worker, attempt.number, attempt.gpus) == (job, "w1", 1, ("GPU-aa",))
    assert attempt.lease_expires - attempt.started == pytest.approx(LONG, abs=10)
    assert queue.attempts.claim([job], "w2", ["GPU-bb"], LONG) is None
    assert queue.attempts.of(job) == queue.attempts.running() == [attempt]
    running = queue.jobs.get(job)
    assert (running.state, running.attempt, running.attempts) == ("running", attempt.id, 1)
    assert queue.attempts.claim(["ffffffff"], "w1", [], LONG) is None


def next_of(queue: Store, before: tuple[int, float] | None = None, **asked: Any) -> str | None:
    shape = shape_of(JobSpec(command="", **asked))
    claimed = queue.attempts.take_head(ClaimRequest(shape=shape, worker="w", lease=LONG, before=before))
    return None if claimed is None else claimed.job.id


def test_claim_takes_the_first_job_of_that_shape(queue: Store) -> None:
    (two,) = submit(queue, "two", gpus=2, priority=5)
    late, early = submit(queue, "late", gpus=0) + submit(queue, "early", gpus=0, priority=1)
    assert next_of(queue) is None
    assert next_of(queue, gpus=0) == early
    assert next_of(queue, gpus=2) == two
    assert next_of(queue, gpus=0) == late
    assert next_of(queue, gpus=0) is None


def test_claim_takes_nothing_when_another_shape_has_its_turn(queue: Store) -> None:
    urgent, first, second = (submit(queue, "x", gpus=0, priority=priority)[0] for priority in (3, 1, 1))
    turn = queue.jobs.get(first).position
    assert next_of(queue, (3, 0.0), gpus=0) is None
    assert next_of(queue, (2, 0.0), gpus=0) == urgent
    assert next_of(queue, (1, turn), gpus=0) is None
    assert next_of(queue, (1, turn + 1), gpus=0) == first
    assert next_of(queue, (0, 0.0), gpus=0) == second


def test_success_is_recorded_with_its_code_and_time(queue: Store) -> None:
    (job,) = submit(queue, "x")
    run(queue, job, "succeeded", 0)
    done = queue.jobs.get(job)
    assert (done.state, done.exit_code) == ("succeeded", 0)
    assert done.started is not None
    assert done.ended is not None
    assert done.started <= done.ended
    assert [(a.number, a.outcome, a.exit_code) for a in queue.attempts.of(job)] == [(1, "succeeded", 0)]


def test_attempt_is_finished_once(queue: Store) -> None:
    (job,) = submit(queue, "x")
    attempt = queue.attempts.claim([job], "w", [], LONG)
    assert attempt is not None
    assert queue.attempts.finish(attempt.id, "failed", 3, "it said no")
    before = queue.jobs.get(job)
    assert not queue.attempts.finish(attempt.id, "succeeded", 0)
    assert not queue.attempts.finish("0" * 32, "succeeded", 0)
    assert queue.jobs.get(job) == before
    assert (before.state, before.exit_code, before.reason) == ("failed", 3, "it said no")


def test_expired_lease_requeues_the_job_once_and_a_late_outcome_is_refused(queue: Store) -> None:
    (job,) = submit(queue, "x", retries=0)
    late = queue.attempts.claim([job], "cut off", [], OVER)
    assert late is not None
    new = queue.attempts.claim([job], "w2", [], LONG)
    assert new is not None
    assert new.number == 2
    assert queue.attempts.claim([job], "w3", [], LONG) is None
    assert queue.attempts.renew([late.id], LONG) == {}
    assert not queue.attempts.finish(late.id, "succeeded", 0)
    assert queue.jobs.get(job).state == "running"
    assert queue.attempts.finish(new.id, "succeeded", 0)
    assert [a.outcome for a in queue.attempts.of(job)] == ["lost", "succeeded"]


def test_outcome_after_the_lease_counts_until_the_job_is_claimed(queue: Store) -> None:
    (job,) = submit(queue, "x")
    attempt = queue.attempts.claim([job], "w", [], OVER)
    assert attempt is not None
    assert queue.attempts.finish(attempt.id, "succeeded", 0)
    assert queue.attempts.sweep() == 0
    assert queue.jobs.get(job).state == "succeeded"


def test_renewed_lease_keeps_the_job(queue: Store) -> None:
    ids = submit(queue, "kept", "lost")
    attempt = queue.attempts.claim([ids[0]], "w", [], OVER)
    assert attempt is not None
    assert queue.attempts.renew([attempt.id, "f" * 32], LONG) == {attempt.id: False}
    assert queue.attempts.claim([ids[1]], "w", [], OVER) is not None
    assert queue.attempts.sweep() == 1
    assert [queue.jobs.get(job).state for job in ids] == ["running", "queued"]


def test_worker_does_not_declare_its_own_attempts_lost(queue: Store) -> None:
    (job,) = submit(queue, "runs here")
    assert queue.attempts.claim([job], "mine", [], OVER) is not None
    assert queue.attempts.sweep("mine") == 0
    assert not queue.attempts.heads("mine").jobs
    assert queue.attempts.claim([job], "mine", [], LONG) is None
    assert queue.jobs.get(job).state == "running"
    assert queue.attempts.sweep("another") == 1


def set_clock(queue: Store, by: float) -> None:
    """The time of day that the database sees from now on is so far off."""
    driver = queue._driver
    if isinstance(driver, SqliteDriver):
        days = lambda _now: (time.time() + by) / 86400.0 + 2440587.5  # noqa: E731
        driver.close()  # with the statements that know the old function
        driver._connected().create_function("julianday", 1, days)
        return
    driver.fetch_text("CREATE SCHEMA IF NOT EXISTS set_clock", {})
    driver.fetch_text(
        "CREATE OR REPLACE FUNCTION set_clock.statement_timestamp() RETURNS timestamptz LANGUAGE sql AS "
        f"$$ SELECT pg_catalog.statement_timestamp() + interval '{by} seconds' $$",
        {},
    )
    driver.fetch_text("SET search_path = set_clock, pg_catalog, public", {})


@pytest.mark.parametrize("by", [3600.0, LONG * 0.9, -3600.0])
def test_clock_step_expires_no_lease(queue: Store, by: float) -> None:
    (job,) = submit(queue, "runs")
    attempt = queue.attempts.claim([job], "w", [], LONG)
    assert attempt is not None
    assert queue.attempts.sweep("another") == 0
    before = queue.clock()
    set_clock(queue, by)
    assert queue.clock() - before == pytest.approx(by, abs=60.0)
    for _ in range(2):
        assert queue.attempts.sweep("another") == 0
    assert queue.attempts.claim([job], "another", [], LONG) is None
    (shown,) = queue.attempts.running()
    if by > 0 or isinstance(queue._driver, SqliteDriver):
        # What people are shown goes by the clock that they see.
        assert shown.lease_expires - queue.clock() == pytest.approx(LONG, abs=60.0)
    assert queue.attempts.renew([attempt.id], LONG) == {attempt.id: False}
    assert queue.attempts.sweep("another") == 0
    (lost,) = submit(queue, "lost")
    assert queue.attempts.claim([lost], "w", [], OVER) is not None
    assert queue.attempts.sweep("another") == 1


@pytest.mark.parametrize("by", [3600.0, -3600.0])
def test_clock_step_does_not_move_a_retry(tmp_path: Path, by: float) -> None:
    with init_queue(str(tmp_path / "queue.db")) as queue:
        soon, later = submit(queue, "soon", retries=1, backoff=0.01) + submit(queue, "later", retries=1, backoff=LONG)
        for job in (soon, later):
            run(queue, job, "failed", 1)
        set_clock(queue, by)
        wait_for(lambda: ready(queue) == [soon], named="the retry")
        assert queue.jobs.get(later).not_before - queue.clock() == pytest.approx(LONG, abs=60.0)
        assert queue.attempts.heads().wake_in == pytest.approx(LONG, abs=60.0)


def test_all_processes_measure_leases_by_the_same_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "queue.db")
    with init_queue(place) as first:
        (job,) = submit(first, "runs")
        attempt = first.attempts.claim([job], "w", [], LONG)
        assert attempt is not None
        really = time.time
        with monkeypatch.context() as stepped:
            stepped.setattr(time, "time", lambda: really() + 3600.0)
            with open_queue(place) as second:
                assert second.attempts.sweep("another") == 0
                assert second.attempts.renew([attempt.id], LONG) == {attempt.id: False}
        assert first.attempts.running()[0].lease_expires - really() == pytest.approx(LONG, abs=60.0)


def test_restarted_worker_adopts_running_attempts(queue: Store) -> None:
    ids = submit(queue, "runs", "ended")
    runs, ended = (queue.attempts.claim([job], "old start", [], LONG) for job in ids)
    assert runs is not None
    assert ended is not None
    queue.attempts.finish(ended.id, "succeeded", 0)
    assert queue.attempts.adopt([runs.id, ended.id], "new start", LONG) == {runs.id}
    assert queue.attempts.renew([runs.id, ended.id], LONG) == {runs.id: False}
    assert [attempt.worker for attempt in queue.attempts.running()] == ["new start"]


def test_lost_job_is_held_if_configured(queue: Store) -> None:
    (job,) = submit(queue, "x", on_loss="hold")
    queue.attempts.claim([job], "w", [], OVER)
    assert queue.attempts.sweep() == 1
    assert queue.jobs.get(job).state == "held"
    assert "did not renew its lease" in queue.jobs.get(job).reason


def test_repeatedly_lost_job_is_held(queue: Store) -> None:
    (job,) = submit(queue, "takes its machine down")
    lost = 0
    while queue.attempts.claim([job], f"w{lost}", [], OVER):
        lost += 1
        assert lost <= 10
    assert lost == 10
    assert queue.jobs.get(job).state == "held"


def test_retry_delay_doubles_with_each_failure(queue: Store) -> None:
    (job,) = submit(queue, "x", retries=2, backoff=100.0)
    run(queue, job, "failed", 1)
    waiting = queue.jobs.get(job)
    assert (waiting.state, waiting.retries_left) == ("queued", 1)
    assert waiting.not_before - queue.clock() == pytest.approx(100, abs=20)
    assert queue.attempts.heads().wake_in == pytest.approx(waiting.not_before - queue.clock(), abs=1.0)
    assert ready(queue) == []
    assert queue.attempts.claim([job], "w", [], LONG) is None
    queue._driver.fetch_text("UPDATE stoker_jobs SET not_before = 0", {})  # as if that time had passed
    run(queue, job, "failed", 1)
    assert queue.jobs.get(job).not_before - queue.clock() == pytest.approx(200, abs=20)
    assert queue.jobs.retry([job]) == [job]
    assert (ready(queue), queue.jobs.get(job).retries_left) == ([job], 2)


def test_job_without_retries_left_has_failed(queue: Store) -> None:
    (job,) = submit(queue, "x", retries=2, backoff=0.0)
    for _ in range(3):
        run(queue, job, "failed", 9)
    assert (queue.jobs.get(job).state, queue.jobs.get(job).exit_code, queue.jobs.get(job).attempts) == ("failed", 9, 3)
    assert queue.attempts.heads().wake_in is None


def test_preempted_job_keeps_its_retries_and_position(queue: Store) -> None:
    first, second = submit(queue, "first", "second", preemptible=True, retries=1)
    run(queue, first, "preempted")
    back = queue.jobs.get(first)
    assert (back.state, back.retries_left, back.attempts) == ("queued", 1, 1)
    assert ready(queue) == [first, second]


def test_queued_job_is_cancelled_at_once(queue: Store) -> None:
    queued, held, done = submit(queue, "1", "2", "3")
    queue.jobs.hold([held])
    run(queue, done, "succeeded", 0)
    result = queue.jobs.cancel([queued, held, done])
    assert (sorted(result.cancelled), result.asked) == (sorted([queued, held]), [])
    assert [queue.jobs.get(job).state for job in (queued, held, done)] == ["cancelled", "cancelled", "succeeded"]
    assert queue.attempts.claim([queued], "w", [], LONG) is None


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ("cancelled", "cancelled"),
        ("failed", "cancelled"),
        ("preempted", "cancelled"),
        ("lost", "cancelled"),
        ("succeeded", "succeeded"),
    ],
)
def test_cancelled_running_job_is_stopped_by_its_supervisor(queue: Store, outcome: Outcome, state: str) -> None:
    job, other = submit(queue, "x", "y", retries=3)
    attempt = queue.attempts.claim([job], "w", [], LONG)
    assert attempt is not None
    assert queue.attempts.requests([attempt.id]) == Requests()
    assert queue.jobs.cancel([job]).asked == [job]
    assert queue.jobs.get(job).state == "running"
    assert queue.attempts.requests([attempt.id]) == Requests(cancelled=frozenset({attempt.id}))
    assert queue.attempts.renew([attempt.id], LONG) == {attempt.id: True}
    assert queue.attempts.requests(["another"]) == Requests()
    assert queue.attempts.finish(attempt.id, outcome, 143)
    assert queue.jobs.get(job).state == state
    assert queue.attempts.requests([attempt.id]) == Requests()
    queue.jobs.retry([job])
    assert queue.jobs.get(job).cancel_requested is None
    assert ready(queue) == [job, other]


def test_held_job_waits_until_released(queue: Store) -> None:
    job, born_held = submit(queue, "x") + submit(queue, "y", hold=True)
    assert queue.jobs.hold([job, born_held]) == [job]
    assert ready(queue) == []
    assert sorted(queue.jobs.release([job, born_held])) == sorted([job, born_held])
    assert ready(queue) == [job, born_held]


def test_moving_changes_the_order_among_jobs_of_one_priority(queue: Store) -> None:
    a, b, c, d = submit(queue, "a", "b", "c", "d")
    (urgent,) = submit(queue, "urgent", priority=1)
    queue.jobs.move([c], "first")
    assert ready(queue) == [urgent, c, a, b, d]
    queue.jobs.move([c], "down")
    assert ready(queue) == [urgent, a, c, b, d]
    queue.jobs.move([d], "up")
    assert ready(queue) == [urgent, a, c, d, b]
    queue.jobs.move([a], "last")
    assert ready(queue) == [urgent, c, d, b, a]
    queue.jobs.move([c], "up")
    queue.jobs.move([a], "down")
    assert ready(queue) == [urgent, c, d, b, a]
    (late,) = submit(queue, "late")
    assert ready(queue) == [urgent, c, d, b, a, late]


def test_jobs_moved_together_keep_their_order(queue: Store) -> None:
    a, b, c, d = submit(queue, "a", "b", "c", "d")
    queue.jobs.move([d, c], "first")
    assert ready(queue) == [c, d, a, b]
    queue.jobs.move([c, d], "up")
    assert ready(queue) == [c, d, a, b]
    queue.jobs.move([d, a], "up")
    assert ready(queue) == [d, a, c, b]
    queue.jobs.move([a, d], "down")
    assert ready(queue) == [c, d, a, b]
    queue.jobs.move([d, c], "last")
    assert ready(queue) == [a, b, c, d]


def test_running_job_is_not_moved(queue: Store) -> None:
    a, b = submit(queue, "a", "b")
    queue.attempts.claim([b], "w", [], LONG)
    assert queue.jobs.move([b, "ffffffff"], "first") == []
    assert ready(queue) == [a]


def test_waiting_job_is_edited(queue: Store) -> None:
    before, job = submit(queue, "before", "x", tags=("old",))
    edited = queue.jobs.edit(
        job, {"command": ("y", "z"), "gpus": 0, "tags": ("new",), "after": (before,), "priority": 2}
    )
    assert queue.jobs.get(job) == edited
    assert (edited.command, edited.gpus, edited.tags, edited.priority) == (("y", "z"), 0, ("new",), 2)
    assert [found.id for found in queue.jobs.find(tag="new")] == [job]
    assert [found.id for found in queue.jobs.find(tag="old")] == [before]
    assert ready(queue) == [before]


def test_invalid_edits_are_refused_and_change_nothing(queue: Store) -> None:
    a, b = submit(queue, "a", "b")
    (c,) = submit(queue, "c", after=(b,))
    queue.jobs.edit(b, {"after": (a,)})
    before = queue.jobs.find()
    refused: list[tuple[dict[str, object], str]] = [
        ({"after": (c,)}, "wait for itself"),
        ({"after_any": (a,)}, "wait for itself"),
        ({"after": ("ffffffff",)}, "no such job"),
        ({"gpus": "many"}, "cannot be edited so"),
        ({"state": "succeeded"}, "no field 'state'"),
        ({"command": ""}, "needs a command"),
    ]
    for changes, complaint in refused:
        with pytest.raises(BadInputError, match=complaint):
            queue.jobs.edit(a, changes)
    assert queue.jobs.find() == before
    queue.attempts.claim([a], "w", [], LONG)
    with pytest.raises(BadInputError, match="is running"):
        queue.jobs.edit(a, {"gpus": 2})
    with pytest.raises(BadInputError, match="no job 'ffffffff'"):
        queue.jobs.edit("ffffffff", {"gpus": 2})


def test_job_is_found_by_id_name_or_id_prefix(queue: Store) -> None:
    queue.jobs.submit(
        [
            JobSpec(command="1", id="abc00001", name="baseline"),
            JobSpec(command="2", id="abc00002"),
            JobSpec(command="3", id="abd00000", name="twice"),
            JobSpec(command="4", id="ac000000", name="twice"),
            JobSpec(command="5", id="ffffffff"),
        ]
    )
    assert queue.jobs.get("abc00002").command == "2"
    assert queue.jobs.get("abd").command == "3"
    assert queue.jobs.get("fffffff").command == "5"
    assert queue.jobs.get("baseline").command == "1"
    for ambiguous in ("abc", "twice"):
        with pytest.raises(BadInputError, match="fits several jobs"):
            queue.jobs.get(ambiguous)
    for unknown in ("", "0", "abc00003", "base", "%", "'", "\0", "é", "\udcff"):
        with pytest.raises(BadInputError, match="there is no job"):
            queue.jobs.get(unknown)


def test_jobs_are_listed_by_state_and_tag_newest_first(queue: Store) -> None:
    a, b, c = submit(queue, "a", "b", "c", tags=("sweep",))
    (d,) = submit(queue, "d")
    run(queue, b, "failed", 1)
    queue.jobs.hold([c])
    assert [job.id for job in queue.jobs.find()] == [d, c, b, a]
    assert [job.id for job in queue.jobs.find(limit=2, offset=1)] == [c, b]
    assert [job.id for job in queue.jobs.find(["queued"])] == [d, a]
    assert [job.id for job in queue.jobs.find(["queued", "held"], tag="sweep")] == [c, a]
    assert [job.id for job in queue.jobs.find(["queued", "held"], order="queue")] == [a, c, d]
    assert queue.jobs.find(tag="'; DROP TABLE stoker_jobs; --") == []
    assert queue.jobs.counts() == {"queued": 2, "failed": 1, "held": 1}


def test_cleaning_deletes_old_ended_jobs_that_no_job_waits_for(queue: Store) -> None:
    old, needed, waits, failed = submit(queue, "old", "needed", "waits", "failed")
    queue.jobs.edit(waits, {"after_any": (needed,)})
    run(queue, failed, "failed", 1)
    for job in (old, needed):
        run(queue, job, "succeeded", 0)
    assert queue.jobs.clean(3600.0) == 0
    assert queue.jobs.clean(-1.0, ["succeeded"]) == 1
    assert {job.id for job in queue.jobs.find()} == {needed, waits, failed}
    assert queue.attempts.of(old) == []
    queue.jobs.cancel([waits])
    assert queue.jobs.clean(-1.0) == 3
    assert queue.jobs.find() == []


def test_log_tail_is_bounded(queue: Store) -> None:
    (job,) = submit(queue, "x")
    attempt = queue.attempts.claim([job], "w", [], LONG)
    assert attempt is not None
    assert queue.logs.read(attempt.id) == ""
    assert queue.logs.write(attempt.id, "first\n")
    assert queue.logs.write(attempt.id, "a nul \0, half a letter \udcff, 🔥")
    assert queue.logs.read(attempt.id) == "a nul \ufffd, half a letter ?, 🔥"
    queue.logs.write(attempt.id, "x" * 10 + "ü" * LOG_TAIL)
    kept = queue.logs.read(attempt.id)
    assert set(kept) == {"ü"}
    assert len(kept.encode()) <= LOG_TAIL
    assert not queue.logs.write("f" * 32, "nobody's")


def test_inconsistent_job_is_reported_and_not_started(queue: Store) -> None:
    job, other = submit(queue, "x", "y", gpus=0)
    attempt = queue.attempts.claim([job], "w", [], LONG)
    assert attempt is not None
    assert queue.check() == []
    queue._driver.fetch_text("UPDATE stoker_jobs SET state = 'queued'", {})
    with pytest.raises(StokerError, match=r"a running attempt: `stoker queue check`"):
        queue.attempts.claim([job], "w2", [], LONG)
    (complaint,) = queue.check()
    assert job in complaint
    queue._driver.fetch_text(f"UPDATE stoker_jobs SET spec = '{{' WHERE id = '{other}'", {})
    assert any(other in complaint and "cannot be read" in complaint for complaint in queue.check())


@pytest.mark.parametrize("spec", ["{", '{"command": 7}', "[]", '{"command": ["true"], "gpus": "all"}'])
def test_unreadable_job_fails_with_a_reason_and_others_of_its_shape_start(queue: Store, spec: str) -> None:
    first, second, third = submit(queue, "1", "2", "3", gpus=0)
    for job in (first, third):
        queue._driver.fetch_text(f"UPDATE stoker_jobs SET spec = '{spec}' WHERE id = '{job}'", {})
    assert {job.id for job in queue.jobs.search().jobs} == {first, second, third}, "people see it"
    heads = queue.attempts.heads("w")
    assert heads.wake_in == 0.0, "the others of its shape are read next"
    # The last one that was read stands for its shape.
    found = queue.jobs.get(third)
    assert (found.state, found.exit_code) == ("failed", 125)
    assert found.reason.startswith("what the queue has of it cannot be read")
    heads = queue.attempts.heads("w")
    assert [job.id for job in heads.jobs] == [first, second]
    assert heads.wake_in is None
    claim = ClaimRequest(shape=heads.jobs[0].shape, worker="w", lease=LONG)
    claimed = [queue.attempts.take_head(claim) for _ in range(2)]
    assert [one and (one.job.id, bool(one.job.command)) for one in claimed] == [(first, False), (second, True)]


def test_first_free_job_of_several_is_claimed(queue: Store) -> None:
    first, second, third = submit(queue, "1", "2", "3")
    queue.jobs.edit(third, {"priority": 5})
    assert queue.attempts.claim([third], "w", [], LONG)
    attempt = queue.attempts.claim([second, third, first, "ffffffff"], "w", ["GPU-a"], LONG)
    assert attempt is not None
    assert (attempt.job, attempt.gpus) == (first, ("GPU-a",))
    assert queue.attempts.claim([first, third], "w", [], LONG) is None
    assert queue.attempts.claim([], "w", [], LONG) is None


def test_job_of_a_lost_worker_is_ready_again(queue: Store, url: str) -> None:
    (job,) = submit(queue, "x")
    assert queue.attempts.claim([job], "gone", [], OVER)
    with open_queue(url) as other:
        assert ready(other) == [job]


def test_only_the_link_of_the_current_attempt_is_stored(queue: Store) -> None:
    (job,) = submit(queue, "x")
    old = queue.attempts.claim([job], "cut off", [], OVER)
    new = queue.attempts.claim([job], "w", [], LONG)
    assert old is not None
    assert new is not None
    assert queue.jobs.set_link(new.id, "https://wandb.ai/a/b/runs/c")
    assert not queue.jobs.set_link(old.id, "https://elsewhere")
    assert queue.jobs.get(job).link == "https://wandb.ai/a/b/runs/c"


def test_paused_queue_and_a_paused_worker_claim_nothing(queue: Store) -> None:
    (job,) = submit(queue, "x")
    queue.workers.heartbeat("w", "host", View())
    queue.pause()
    assert queue.paused()
    assert queue.attempts.claim([job], "w", [], LONG) is None
    queue.pause(False)
    assert queue.workers.pause("w")
    gpu = WorkerGpu(uuid="GPU-a", index=0, name="A100", memory_total=2**36, utilization=0.5, jobs=(job,), note="ours")
    seen = View(gpus=(gpu,), waiting={job: "waits for 2 GPUs"}, problem="half of it is hidden")
    queue.workers.heartbeat("w", "host", seen)
    assert [(worker.view, worker.paused) for worker in queue.workers.all()] == [(seen, True)]
    assert queue.attempts.claim([job], "w", [], LONG) is None
    assert queue.workers.pause("w", False)
    assert not queue.workers.pause("unknown")
    assert queue.attempts.claim([job], "w", [], LONG) is not None


def test_expired_job_is_claimed_by_one_of_several_threads(queue: Store, url: str) -> None:
    (job,) = submit(queue, "x")
    assert queue.attempts.claim([job], "cut off", [], OVER)
    together = threading.Barrier(6)
    got: list[int] = []

    def claim(number: int) -> None:
        with open_queue(url) as own:
            together.wait(timeout=30)
            if own.attempts.claim([job], f"w{number}", [], LONG) or own.attempts.claim([job], f"w{number}", [], LONG):
                got.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(got) == 1
    assert [attempt.outcome for attempt in queue.attempts.of(job)] == ["lost", None]


def test_two_feeders_of_the_same_rows_create_one_job_per_row(queue: Store, url: str) -> None:
    rows = [JobSpec(command=f"row {number}", origin=f"sheet:{number}") for number in range(100)]
    together = threading.Barrier(3)
    answers: list[list[str]] = []

    def feed() -> None:
        with open_queue(url) as own:
            together.wait(timeout=30)
            answers.append([own.jobs.submit([row])[0] for row in rows])

    threads = [threading.Thread(target=feed) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(answers) == 3
    assert answers[0] == answers[1] == answers[2]
    assert len(queue.jobs.find(limit=1000)) == 100


def test_opening_a_missing_queue_does_not_create_it(url: str) -> None:
    with pytest.raises(StokerError, match=r"no queue at .*`stoker (queue init|submit)` creates it"):
        open_queue(url)
    with init_queue(url) as made:
        (job,) = submit(made, "x")
    with init_queue(url) as again, open_queue(url) as opened:
        assert again.jobs.get(job) == opened.jobs.get(job)


def test_concurrent_creation_makes_one_queue(url: str) -> None:
    together = threading.Barrier(6)
    jobs: list[str] = []

    def begin() -> None:
        together.wait(timeout=30)
        with init_queue(url) as own:
            jobs.extend(submit(own, "x"))

    threads = [threading.Thread(target=begin) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    with open_queue(url) as queue:
        assert sorted(job.id for job in queue.jobs.find()) == sorted(jobs)
    assert len(jobs) == 6


def test_queue_of_another_version_is_refused(queue: Store, url: str) -> None:
    queue._driver.fetch_text("UPDATE stoker_queue SET version = 7", {})
    for opening in (open_queue, init_queue):
        with pytest.raises(StokerError, match=f"has version 7, and this Stoker uses version {VERSION}: use the Stoker"):
            opening(url)


def test_file_without_a_queue_is_refused_and_unchanged(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database at all, but long enough to be read as one\n" * 50)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE songs (title)")
    connection.close()
    for path in (text, foreign):
        before = path.read_bytes()
        for opening in (open_queue, init_queue):
            with pytest.raises(StokerError, match=f"{path.name} is .*not a queue"):
                opening(str(path))
        assert path.read_bytes() == before


def test_damaged_file_is_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    with init_queue(str(path)) as queue:
        submit(queue, *[f"echo {number}" for number in range(2000)])
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(StokerError, match=r"queue\.db is damaged .*recover"):
        open_queue(str(path)).jobs.find()


def test_read_only_queue_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StokerError, match=r"cannot be created: (Not a directory|File exists)"):
        init_queue(str(tmp_path / "file" / "queue.db"))


def test_full_disk_is_reported_and_existing_data_is_kept(tmp_path: Path) -> None:
    with init_queue(str(tmp_path / "queue.db")) as queue:
        submit(queue, "kept")
        pages = queue._driver.fetch_text("PRAGMA page_count", {})[0][0]
        queue._driver.fetch_text(f"PRAGMA max_page_count = {pages}", {})
        with pytest.raises(StokerError, match="disk is full"):
            submit(queue, "x" * 2**20)
        assert [job.command for job in queue.jobs.find()] == ["kept"]
        assert submit(queue, "small")


def test_wrong_password_is_reported_without_showing_it(postgres_server: PostgresServer) -> None:
    with pytest.raises(StokerError, match="refused the password") as refused:
        open_queue(postgres_server.url("postgres", password="secret-guess"))
    assert "secret-guess" not in str(refused.value)


def test_missing_or_unreachable_database_is_reported(postgres_server: PostgresServer) -> None:
    with pytest.raises(StokerError, match='database "nowhere" does not exist'):
        open_queue(postgres_server.url("nowhere"))
    with pytest.raises(QueueAwayError, match="cannot be reached"):
        open_queue("postgresql://stoker@127.0.0.1:1/nowhere")


@pytest.mark.parametrize("do", [lambda queue, job: queue.jobs.get(job), lambda queue, _job: submit(queue, "another")])
def test_lost_connection_is_reopened(
    postgres_server: PostgresServer, postgres_url: str, do: Callable[[Store, str], object]
) -> None:
    with init_queue(postgres_url) as queue:
        (job,) = submit(queue, "x")
        postgres_server.administer(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'stoker'"
        )
        with pytest.raises(QueueAwayError, match="went away"):
            do(queue, job)
        do(queue, job)
        assert queue.jobs.get(job).state == "queued"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/srv/queue.db", "/srv/queue.db"),
        ("queue.db", "queue.db"),
        ("sqlite:///srv/queue.db", "/srv/queue.db"),
        ("sqlite:////srv/queue.db", "/srv/queue.db"),
        ("", "/home/of/stoker/queue.db"),
    ],
)
def test_path_or_sqlite_url_names_a_file(text: str, path: str) -> None:
    where = queue_address(None, {"STOKER_QUEUE": text, "STOKER_HOME": "/home/of/stoker"})
    assert (where.scheme, where.path) == ("sqlite", Path(path))


def test_password_in_a_url_is_never_shown() -> None:
    where = queue_address("postgresql://me:hush@host/db?password=hush&x=1", {})
    assert (where.scheme, "hush" in where.location) == ("postgresql", True)
    assert str(where) == "postgresql://me@host/db?password=…&x=1"
    assert "hush" not in repr(where)


@pytest.mark.parametrize("text", ["mysql://host/db", "sqlite:relative", "sqlite://relative", "postgresql:db"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="is not the address of a queue"):
        queue_address(text, {})


def reaper_process(queue: Store, job: str) -> str | None:
    kept = queue.jobs.get(job).kept
    return None if kept is None else kept.worker


def test_one_machine_at_a_time_reserves_gpus_for_a_job(queue: Store) -> None:
    (job,) = submit(queue, "x", gpus=2)
    for worker in ("a", "b"):
        queue.workers.heartbeat(worker, "host", View())
    assert queue.jobs.keep(job, "a", ["GPU-a"], None)
    assert not queue.jobs.keep(job, "b", ["GPU-b"], 5.0)
    assert queue.jobs.get(job).kept == KeptGpus(worker="a", gpus=("GPU-a",), until=None)
    assert queue.jobs.keep(job, "b", [], 60.0, instead_of="a")
    assert not queue.jobs.keep(job, "a", ["GPU-a"], None, instead_of="c")
    heads = queue.attempts.heads()
    (waiting,) = heads.jobs
    assert waiting.kept is not None
    assert (waiting.kept.worker, waiting.kept.gpus) == ("b", ())
    assert waiting.kept.until is not None
    assert 0 < waiting.kept.until - heads.queue_time < 61
    queue.jobs.keep_no_more("a")
    queue.jobs.keep_no_more("b", [job])
    assert reaper_process(queue, job) == "b"
    queue.jobs.keep_no_more("b")
    assert reaper_process(queue, job) is None


def test_reservation_ends_when_the_job_starts_is_edited_or_its_machine_is_lost(queue: Store) -> None:
    """A machine that dies says nothing: what it kept is for the next that can start the job."""

    def grow_old() -> None:
        queue._driver.fetch_text("UPDATE stoker_workers SET seen = seen - 61", {})

    ends: list[Callable[[str], object]] = [
        lambda job: queue.attempts.claim([job], "b", [], LONG),
        lambda job: queue.jobs.cancel([job]),
        lambda job: queue.jobs.hold([job]),
        lambda job: queue.jobs.edit(job, {"gpus": 1}),
        lambda _job: queue.workers.farewell("a"),
        lambda _job: grow_old(),
    ]
    for end in ends:
        for worker in ("a", "b"):
            queue.workers.heartbeat(worker, "host", View())
        (job,) = submit(queue, "x", gpus=2)
        assert queue.jobs.keep(job, "a", ["GPU-a"], None)
        end(job)
        assert reaper_process(queue, job) is None
        queue.workers.heartbeat("b", "host", View())
        assert queue.jobs.keep(job, "b", ["GPU-b"], None) == (queue.jobs.get(job).state == "queued")
        queue.jobs.cancel([job])


def test_database_registered_from_outside_holds_a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRIVERS, "another", DriverType("Another", "stoker.queue.sqlite", is_file=True))
    url = f"another://{tmp_path}/queue.db"
    with init_queue(url) as queue:
        (job,) = submit(queue, "x")
    with open_queue(url) as queue:
        assert queue.jobs.get(job).state == "queued"
    assert queue_address(url).database.name == "Another"


def test_file_has_no_address_for_other_machines(tmp_path: Path) -> None:
    with init_queue(str(tmp_path / "queue.db")) as store:
        assert store.shared_address() is None


def test_address_for_other_machines_has_what_comes_from_elsewhere_here(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = postgres_url.partition("@/")[2].partition("?")[0]
    bare = f"postgresql:///{database}?host={postgres_server.directory}"
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"*:*:*:*:{PASSWORD}\n")
    passwords.chmod(0o600)
    with init_queue(postgres_url) as store:
        assert store.shared_address() == postgres_url
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    monkeypatch.setenv("PGUSER", "stoker")
    with open_queue(bare) as store:
        address = store.shared_address()
    monkeypatch.delenv("PGPASSFILE")
    monkeypatch.delenv("PGUSER")
    assert address == f"{bare}&user=stoker&password={PASSWORD.replace(' ', '%20')}"
    open_queue(address).close()


def test_machine_that_was_removed_is_not_listed_unless_it_works_again(queue: Store) -> None:
    queue.workers.heartbeat("key-1", "gpu-box", View())
    queue.workers.farewell("key-1", removed=True)
    assert machines_of(queue.workers.all(), [], {}, queue.clock()) == ()
    queue.workers.heartbeat("key-2", "gpu-box", View())
    assert [machine.worker for machine in machines_of(queue.workers.all(), [], {}, queue.clock())] == ["key-2"]
