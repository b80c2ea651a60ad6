"""A change by another process wakes a listener of the queue at once, and nothing else does."""

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.queue import AttemptDetails, ChangeListener, JobSpec, Store, Usage, View, init_queue, open_queue
from stoker.queue.driver import (
    EVERYTHING,
    FOR_PEOPLE,
    SECONDS_BETWEEN_NOTIFICATIONS,
    SECONDS_BETWEEN_PEOPLES,
    NotifyThrottle,
)
from stoker.queue.postgres import PostgresDriver
from tests.support.either_queue import queue, url
from tests.support.postgres import PostgresServer
from tests.support.waiting import wait_for

__all__ = ["queue", "url"]


@pytest.fixture
def other(queue: Store, url: str) -> Iterator[Store]:
    with open_queue(url) as opened:
        yield opened


@pytest.fixture
def changes(queue: Store) -> Iterator[ChangeListener]:
    changes = listening(queue)
    yield changes
    changes.close()


def listening(queue: Store) -> ChangeListener:
    """A listener that works: a server that was delayed for a moment is tried again."""
    changes = queue.listen()
    wait_for(
        lambda: changes.fileno() >= 0 or (changes.poll() and changes.fileno() >= 0), named="the changes that listens"
    )
    return changes


def rings(changes: ChangeListener, within: float = 60.0) -> bool:
    """Whether it became readable with a change: writes of its store may make it readable without one."""
    assert changes.fileno() >= 0
    ends = time.monotonic() + within
    while select.select([changes], [], [], max(0.0, ends - time.monotonic()))[0]:
        if changes.poll():
            return True
    return False


def is_quiet(changes: ChangeListener) -> bool:
    """Whether it is not even readable now."""
    return not select.select([changes], [], [], 0.05)[0] and not changes.poll()


def wait_until_due(store: Store) -> None:
    wait_for(store._throttle.may_send, named="the end of the pause after a ring")


def let_people_rest(store: Store) -> None:
    """As if nobody had notified people for long."""
    if isinstance(store._driver, PostgresDriver):
        store._driver.fetch_text("SELECT setval('stoker_notified', 1)", {})


def test_change_by_another_process_wakes_the_listener_and_is_visible(
    changes: ChangeListener, queue: Store, other: Store
) -> None:
    assert is_quiet(changes)
    (job,) = other.jobs.submit([JobSpec(command="x")])
    assert rings(changes)
    assert queue.attempts.heads().jobs[0].id == job
    assert is_quiet(changes)
    for change in (other.jobs.hold, other.jobs.release, other.jobs.cancel, other.jobs.retry):
        change([job])
        assert rings(changes)
    (neighbour,) = other.jobs.submit([JobSpec(command="y")])
    assert rings(changes)
    other.jobs.move_beside([job], neighbour, "after")
    assert rings(changes)
    attempt = other.attempts.claim([job], "w", [], 60.0)
    assert attempt is not None
    other.attempts.snooze(attempt.id, 60.0, "alice")
    assert rings(changes)
    wait_until_due(other)
    let_people_rest(other)
    other.attempts.finish(attempt.id, "succeeded", 0)
    assert rings(changes)


def test_heartbeats_leases_logs_and_usage_wake_no_listener(changes: ChangeListener, queue: Store, other: Store) -> None:
    (job,) = queue.jobs.submit([JobSpec(command="my own")])
    if Path(queue.place).exists():
        assert select.select([changes], [], [], 60.0)[0]  # its own touch of the file
    assert not changes.poll()
    attempt = other.attempts.claim([job], "w", [], 60.0)
    assert attempt is not None
    other.workers.heartbeat("w", "host", View())
    other.attempts.renew([attempt.id], 60.0)
    other.logs.write(attempt.id, "output")
    other.attempts.write_details(attempt.id, AttemptDetails(cause="idle", rule="idle"))
    other.usage.write([Usage(host="host", gpu="g", minute=1, seconds={"job": 60.0})])
    other.notices.note_once("something")
    assert not select.select([changes], [], [], 0.05)[0]


def test_change_by_another_process_wakes_within_milliseconds(changes: ChangeListener, url: str) -> None:
    program = (
        "import sys, time\n"
        "from stoker.queue import JobSpec, open_queue\n"
        "with open_queue(sys.argv[1]) as queue:\n"
        "    print('ready', flush=True)\n"
        "    for line in sys.stdin:\n"
        "        queue.jobs.submit([JobSpec(command='x')])\n"
        "        print(time.monotonic(), flush=True)\n"
    )
    delays = []
    with subprocess.Popen(
        [sys.executable, "-c", program, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(20):
            process.stdin.write("\n")
            process.stdin.flush()
            assert rings(changes)
            woken = time.monotonic()
            delays.append(woken - float(process.stdout.readline()))
        process.stdin.close()
    # It usually takes two; the bound only distinguishes an event from a poll, and a busy machine may exceed it.
    assert sorted(delays)[5] < 0.1


def test_first_outcome_notifies_at_once_and_later_ones_together(
    changes: ChangeListener, queue: Store, other: Store
) -> None:
    now = 0.0
    other.attempts._throttle = other._throttle = NotifyThrottle(lambda: now)
    jobs = queue.jobs.submit([JobSpec(command="x")] * 10)
    first, *soon_after = [other.attempts.claim([job], "w", [], 60.0) for job in jobs]
    assert first is not None
    assert other.flush_due() is None
    let_people_rest(other)
    other.attempts.finish(first.id, "succeeded", 0)
    assert rings(changes)
    for attempt in soon_after:
        assert attempt is not None
        now += SECONDS_BETWEEN_NOTIFICATIONS / 20
        assert other.attempts.finish(attempt.id, "succeeded", 0)
        other.flush()
    owed = other.flush_due()
    assert owed is not None
    assert 0.0 < owed < SECONDS_BETWEEN_NOTIFICATIONS
    assert not select.select([changes], [], [], 0.05)[0]
    now += SECONDS_BETWEEN_NOTIFICATIONS
    assert other.flush_due() == 0.0
    let_people_rest(other)
    other.flush()
    assert rings(changes)
    assert other.flush_due() is None
    other.flush()
    assert is_quiet(changes)


def test_outcomes_of_many_workers_notify_people_a_few_times_a_second(postgres_url: str) -> None:
    """Each notification wakes every worker's process of the server, whatever it listens to."""
    now = 0.0
    with init_queue(postgres_url) as queue, open_queue(postgres_url) as one, open_queue(postgres_url) as another:
        for store in (one, another):
            store.attempts._throttle = store._throttle = NotifyThrottle(lambda: now)
        jobs = queue.jobs.submit([JobSpec(command="x")] * 2)
        attempts = [one.attempts.claim([job], "w", [], 60.0) for job in jobs]
        let_people_rest(queue)
        with contextlib.closing(listening(queue)) as changes:
            assert attempts[0] is not None
            assert attempts[1] is not None
            one.attempts.finish(attempts[0].id, "succeeded", 0)
            assert rings(changes)
            another.attempts.finish(attempts[1].id, "succeeded", 0)
            assert is_quiet(changes)
            assert another.flush_due() == pytest.approx(SECONDS_BETWEEN_PEOPLES)
            now += SECONDS_BETWEEN_PEOPLES
            let_people_rest(queue)
            another.flush()
            assert rings(changes)
            assert another.flush_due() is None


def test_refused_notification_is_tried_again_unless_a_later_one_covers_it() -> None:
    now = 0.0
    throttle = NotifyThrottle(lambda: now)
    throttle.defer(FOR_PEOPLE)
    throttle.refused()
    now += SECONDS_BETWEEN_PEOPLES
    assert throttle.flush_due() == 0.0
    throttle.defer(FOR_PEOPLE)
    # Somebody has notified people since, maybe before this change.
    throttle.refused()
    assert throttle.flush_due() == pytest.approx(SECONDS_BETWEEN_PEOPLES)
    throttle.defer(EVERYTHING)
    assert throttle.flush_due() == 0.0
    now += SECONDS_BETWEEN_PEOPLES
    throttle.refused()
    assert throttle.flush_due() is None


def test_deferred_notification_is_sent_on_close(changes: ChangeListener, queue: Store, url: str) -> None:
    jobs = queue.jobs.submit([JobSpec(command="x")] * 2)
    with open_queue(url) as other:
        attempts = [other.attempts.claim([job], "w", [], 60.0) for job in jobs]
        # A clock that stands still: it has just notified.
        other.attempts._throttle = other._throttle = NotifyThrottle(lambda: 0.0)
        other._throttle.sent()
        for attempt in attempts:
            assert attempt is not None
            other.attempts.finish(attempt.id, "succeeded", 0)
        assert other.flush_due() is not None
        changes.poll()
    assert select.select([changes], [], [], 60.0)[0]


def test_poll_notices_changes_without_file_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.queue import sqlite

    monkeypatch.setattr(sqlite, "SECONDS_BETWEEN_TRIES", 0.05)
    path = str(tmp_path / "queue.db")
    with init_queue(path) as queue, open_queue(path) as other:
        with monkeypatch.context() as patch:
            patch.setattr(sqlite, "_watched", lambda _path: None)
            changes = queue.listen()
            assert changes.fileno() == -1
            assert not changes.poll()
            other.jobs.submit([JobSpec(command="x")])
            assert changes.poll()
            assert not changes.poll()
        wait_for(lambda: changes.poll() or changes.fileno() >= 0, named="the changes that listens again")
        other.jobs.submit([JobSpec(command="x")])
        assert rings(changes)
        changes.close()


def test_listener_reconnects_when_its_server_is_back(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.queue.postgres.SECONDS_BETWEEN_TRIES", 0.05)
    with init_queue(postgres_url) as queue:
        changes = listening(queue)
        assert not changes.poll()
        postgres_server.administer(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'LISTEN stoker'"
        )
        wait_for(changes.poll, named="the report of the lost connection")
        assert changes.fileno() == -1
        wait_for(lambda: changes.poll() and changes.fileno() >= 0, named="the changes that listens again")
        with open_queue(postgres_url) as other:
            other.jobs.submit([JobSpec(command="x")])
        assert rings(changes)
        changes.close()


def test_listener_without_a_server_reports_a_possible_change(postgres_server: PostgresServer) -> None:
    url = postgres_server.create_database()
    with init_queue(url) as queue:
        changes = queue.listen()
        postgres_server.drop_database(url)
        wait_for(changes.poll, named="the report of the lost connection")
        for _ in range(3):
            assert changes.poll()
            assert changes.fileno() == -1
        changes.close()
