"""One connection to PostgreSQL for everything, also to listen; a server without free ones; a connection pooler."""

import contextlib
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from stoker.engines.engine import WorkerOptions
from stoker.engines.identity import WorkerIdentity
from stoker.errors import QueueAwayError
from stoker.queue import JobSpec, Store, init_queue, open_queue
from stoker.queue import postgres as postgres_module
from stoker.queue.driver import Changes, Ready
from stoker.queue.fields import shape_of
from stoker.queue.postgres import PostgresChanges
from stoker.worker.loop import WorkerLoop
from tests.support.command import stoker
from tests.support.postgres import PostgresServer, running_pooler
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

if TYPE_CHECKING:
    from stoker.engines.engine import Engine

LONG = 600.0


@pytest.fixture
def queue(postgres_url: str) -> Iterator[Store]:
    with init_queue(postgres_url) as opened:
        yield opened


def connections(queue: Store) -> int:
    sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    return int(queue._driver.fetch_text(sql, {})[0][0])


def test_store_listens_on_its_only_connection(queue: Store, postgres_url: str) -> None:
    with open_queue(postgres_url) as other, contextlib.closing(other.listen()) as changes:
        queue.jobs.submit([JobSpec(command="x")])
        assert select.select([changes], [], [], 60.0)[0]
        assert changes.poll()
        assert connections(queue) == 1


def test_notification_that_comes_with_an_answer_still_wakes(queue: Store, postgres_url: str) -> None:
    """The socket is not readable any more then."""
    with open_queue(postgres_url) as other, contextlib.closing(other.listen()) as changes:
        queue.jobs.submit([JobSpec(command="x")])
        assert isinstance(changes, PostgresChanges)
        wait_for(lambda: other.jobs.counts() and changes._changes is not None, named="the notification")
        assert not select.select([other._driver._connection], [], [], 0.0)[0]  # type: ignore[attr-defined]
        assert select.select([changes], [], [], 0.0)[0]
        assert changes.poll()
        assert not select.select([changes], [], [], 0.0)[0]
        assert changes.poll() is None


def test_notification_during_a_transaction_is_not_lost(queue: Store, postgres_url: str) -> None:
    with open_queue(postgres_url) as other, contextlib.closing(other.listen()) as changes:

        def work() -> None:
            queue.jobs.submit([JobSpec(command="x")])
            assert other.jobs.counts() == {"queued": 1}
            changes.poll()

        other._driver.transaction(work)
        assert select.select([changes], [], [], 60.0)[0]
        assert changes.poll()


def test_worker_hears_only_what_concerns_workers(queue: Store, postgres_url: str) -> None:
    with open_queue(postgres_url) as other, contextlib.closing(other.listen(as_worker=True)) as changes:

        def heard() -> Changes | None:
            assert select.select([changes], [], [], 60.0)[0]
            return changes.poll()

        (job, _second) = queue.jobs.submit([JobSpec(command="x", gpus=2, priority=3), JobSpec(command="x", gpus=2)])
        shape = shape_of(JobSpec(command="x", gpus=2))
        assert heard() == Changes(ready={shape: Ready(3, 2)})
        (then,) = queue.jobs.submit([JobSpec(command="x", priority=7, after=(job,))])
        heard()
        attempt = queue.attempts.claim([job], "w-1", [], LONG)
        assert attempt is not None
        queue.attempts.snooze(attempt.id, 60.0, "alice")
        assert heard() == Changes(workers=frozenset({"w-1"}))
        queue.jobs.cancel([job])
        assert heard() == Changes(workers=frozenset({"w-1"}))
        queue.logs.request_stream(attempt.id, 60.0)
        assert heard() == Changes(workers=frozenset({"w-1"}))
        # An outcome concerns them if other jobs may start because of it.
        queue.attempts.finish(attempt.id, "succeeded", 0)
        wait_for(lambda: queue.flush_due() in (None, 0.0), named="the end of the pause after a notification")
        queue.flush()
        assert heard() == Changes(ready={shape_of(JobSpec(command="")): Ready(7, 1)})
        attempt = queue.attempts.claim([then], "w-1", [], LONG)
        assert attempt is not None
        wait_for(queue._throttle.may_send, named="the end of the pause after a notification")
        queue.attempts.finish(attempt.id, "succeeded", 0)
        assert not select.select([changes], [], [], 0.1)[0]
        queue.pause()
        found = heard()
        assert found is not None
        assert found.everything


def test_worker_has_one_connection(site: WorkSite, postgres_url: str) -> None:
    with init_queue(postgres_url) as queue:
        worker = site.work("--queue", postgres_url)
        (job,) = queue.jobs.submit([JobSpec(command="true", gpus=0)])
        wait_for(lambda: queue.jobs.get(job).state == "succeeded", named="the job")
        wait_for(lambda: connections(queue) == 1, named="one connection of the worker")
        worker.stop()


def test_worker_that_lost_its_connection_does_not_come_back_at_once(queue: Store, postgres_url: str) -> None:
    """All workers lose theirs at the same moment: each has a pause of its own before it connects."""
    with open_queue(postgres_url) as worker, contextlib.closing(worker.listen(as_worker=True)) as changes:
        with open_queue(postgres_url) as page, contextlib.closing(page.listen()) as seen:
            queue._driver.fetch_text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()",
                {},
            )
            for one in (changes, seen):
                assert select.select([one], [], [], 60.0)[0]
                wait_for(lambda one=one: (found := one.poll()) is not None and found.everything, named="the loss")  # type: ignore[misc]
            with pytest.raises(QueueAwayError, match="went away"):
                worker.jobs.counts()
            assert page.jobs.counts() == {}
        assert worker.jobs.counts() == {}


@pytest.mark.usefixtures("queue")
def test_lost_connection_is_said_in_one_sentence(postgres_url: str) -> None:
    """Also within a pipeline, whose end psycopg logs in several lines."""
    program = (
        "import sys\n"
        "from stoker.queue import open_queue, QueueAwayError\n"
        "store = open_queue(sys.argv[1])\n"
        "store.jobs.counts()\n"
        "with open_queue(sys.argv[1]) as other:\n"
        "    text = 'SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()'\n"
        "    other._driver.fetch_text(f'{text} AND pid <> pg_backend_pid()', {})\n"
        "try:\n"
        "    store._driver.many('insert tag', [{'job': 'a', 'tag': tag} for tag in 'bc'])\n"
        "except QueueAwayError as error:\n"
        "    print(error)\n"
    )
    tried = subprocess.run(
        [sys.executable, "-c", program, postgres_url], capture_output=True, text=True, check=True, timeout=60
    )
    assert "went away" in tried.stdout
    assert tried.stderr == ""


def test_pause_before_workers_connect_again_grows_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = WorkerIdentity(tmp_path)
    monkeypatch.setattr(random, "uniform", lambda _low, high: high)
    pauses = []
    for workers in (1, 100, 500, 5000):
        engine = cast("Engine", SimpleNamespace(prepare=lambda _waiting, _read: ""))
        loop = WorkerLoop(WorkerOptions(), identity, engine, lambda _text: None)
        loop._scheduler.workers = workers
        loop._lose_queue(QueueAwayError("away"))
        pauses.append(round(loop._away_until - time.monotonic(), 1))
        loop._signals.close()
    identity.leave()
    assert pauses == [0.7, 1.5, 7.5, 15.0]


def test_full_server_is_reported_in_one_sentence_and_workers_keep_trying(
    postgres_server: PostgresServer, queue: Store, postgres_url: str, site: WorkSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    monkeypatch.setattr(postgres_module, "PATIENCE", 0.2)
    monkeypatch.setenv("STOKER_QUEUE", postgres_url)
    name = postgres_url.split("?", maxsplit=1)[0].rsplit("/", 1)[1]
    # As the role of a user, who is not let in by a reserve.
    postgres_server.administer("CREATE ROLE plain LOGIN PASSWORD 'plain'")
    postgres_server.administer("ALTER ROLE plain CONNECTION LIMIT 1")
    for what in ("TABLES", "SEQUENCES"):
        queue._driver.fetch_text(f"GRANT ALL ON ALL {what} IN SCHEMA public TO plain", {})
    try:
        url = postgres_server.url(name, user="plain", password="plain")
        with psycopg.connect(url):
            with pytest.raises(QueueAwayError, match=r"has no connection left .*: raise max_connections"):
                open_queue(url)
            for verb in (("list", "--queue", url), ("submit", "--queue", url, "--", "true")):
                refused = stoker(*verb)
                assert refused.code == 1
                assert refused.err.count("\n") == 1
                assert "raise max_connections of PostgreSQL, or connect through PgBouncer" in refused.err
            worker = site.work("--queue", url)
            worker.wait_until_it_says("has no connection left .*; jobs continue, retrying")
        worker.wait_until_it_says("the queue is back")
        (job,) = queue.jobs.submit([JobSpec(command="true", gpus=0)])
        wait_for(lambda: queue.jobs.get(job).state == "succeeded", named="the job of the worker that was let in")
        worker.stop()
    finally:
        queue._driver.fetch_text("DROP OWNED BY plain", {})
        postgres_server.administer("DROP ROLE plain")


def test_command_waits_for_a_connection_that_becomes_free(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = queue._driver
    assert isinstance(driver, postgres_module.PostgresDriver)
    driver.close()
    monkeypatch.setattr(postgres_module, "_PAUSE", 0.01)
    refusals = [postgres_module.TooManyConnectionsError("full")] * 3
    really = driver._connect

    def connect() -> object:
        if refusals:
            raise refusals.pop()
        return really()

    monkeypatch.setattr(driver, "_connect", connect)
    assert queue.jobs.counts() == {}
    assert refusals == []


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_queue_works_through_a_pooler(
    postgres_server: PostgresServer, postgres_url: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statements of one store run in different sessions of the server; changes are found by asking."""
    monkeypatch.setattr(postgres_module, "POLLS", 0.05)
    with init_queue(postgres_url), running_pooler(postgres_server, mode) as pooler:
        url = pooler.url(postgres_url)
        with (
            open_queue(url, timeout=30.0) as queue,
            open_queue(url) as other,
            contextlib.closing(queue.listen(as_worker=True)) as changes,
        ):
            assert changes.fileno() == -1
            for _ in range(20):
                (job,) = other.jobs.submit([JobSpec(command="x", gpus=0)])
                wait_for(changes.poll, named="the poll")
                (head,) = queue.attempts.heads("w").jobs
                assert head.id == job
                attempt = queue.attempts.claim([job], "w", [], LONG)
                assert attempt is not None
                assert other.jobs.get(job).state == "running"
                assert queue.attempts.finish(attempt.id, "succeeded", 0)
            # Twice: what was counted may not have been committed at the first time.
            wait_for(lambda: changes.poll() is None, named="a poll without news")
            other.pause()
            wait_for(changes.poll, named="the pause")
            assert queue.check() == []
