"""The hot statements of the queue stay quick whatever its history: each uses the index that was made for it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.queue import NewJob, Store, init_queue
from tests.support.postgres import PostgresServer

HISTORY = 20_000
WAITING = 1_000
PARAMETERS: dict[str, str | int | float | None] = {
    "limit": 16,
    "offset": 0,
    "job": "",
    "attempt": "",
    "worker": "",
    "wanted": 1,
}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def new_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Gives the url of a place for a queue."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return server.create_database
    return lambda: str(tmp_path_factory.mktemp("plans") / "queue.db")


@pytest.fixture(scope="module")
def queue(new_url: Callable[[], str]) -> Iterator[Store]:
    """Twenty thousand jobs that have ended, and a thousand that wait."""
    with init_queue(new_url()) as opened:
        opened.submit([NewJob(command="old")] * HISTORY)
        driver = opened._driver
        driver.fetch_text("UPDATE stoker_jobs SET state = 'succeeded', ended = submitted", {})
        driver.fetch_text(
            "INSERT INTO stoker_attempts (id, job_id, worker_id, number, gpus, started, lease_expires, outcome)"
            " SELECT 'a' || id, id, 'w', 1, '[]', 0, 0, 'succeeded' FROM stoker_jobs",
            {},
        )
        opened.submit([NewJob(command="new")] * WAITING)
        driver.fetch_text("ANALYZE", {})
        yield opened


def plan(queue: Store, statement: str) -> str:
    sql = queue._driver.sql(statement)
    sqlite = Path(queue.place).exists()
    used = {name: value for name, value in PARAMETERS.items() if f":{name}" in sql or f"%({name})s" in sql}
    rows = queue._driver.fetch_text(f"EXPLAIN {'QUERY PLAN ' if sqlite else ''}{sql}", used)
    return "\n".join(str(row[-1]) for row in rows)


@pytest.fixture(scope="module")
def young(new_url: Callable[[], str]) -> Iterator[Store]:
    """Ten thousand jobs that were submitted a moment ago: nothing has counted them yet."""
    with init_queue(new_url()) as opened:
        opened.submit([NewJob(command="new")] * 10_000)
        yield opened


@pytest.mark.parametrize("statement", ["ready", "claim next"])
def test_ready_jobs_are_found_in_order_by_the_index_of_queued_ones(queue: Store, statement: str) -> None:
    assert_walks_along_the_queued(plan(queue, statement))


@pytest.mark.parametrize("statement", ["ready", "claim next"])
def test_that_index_is_used_before_there_are_statistics(young: Store, statement: str) -> None:
    assert_walks_along_the_queued(plan(young, statement))


def assert_walks_along_the_queued(chosen: str) -> None:
    assert "stoker_jobs_queued" in chosen
    assert "Seq Scan on stoker_jobs" not in chosen
    assert "Sort" not in chosen
    assert "USE TEMP B-TREE" not in chosen


def test_a_claim_touches_one_job(queue: Store) -> None:
    chosen = plan(queue, "claim")
    assert "Seq Scan on stoker_jobs" not in chosen
    assert "SCAN j" not in chosen


def test_expired_leases_are_found_by_the_index_of_running_attempts(queue: Store) -> None:
    assert "stoker_attempts_running" in plan(queue, "expired attempts")


def test_a_lookup_by_the_beginning_of_an_id_reads_no_more_than_it_finds(queue: Store) -> None:
    sql = queue._driver.sql("jobs by prefix")
    explain = "EXPLAIN QUERY PLAN " if Path(queue.place).exists() else "EXPLAIN "
    rows = queue._driver.fetch_text(explain + sql, {"prefix": "abcd", "beyond": "abcdg"})
    chosen = "\n".join(str(row[-1]) for row in rows)
    assert "Seq Scan" not in chosen
    assert "SCAN j" not in chosen
