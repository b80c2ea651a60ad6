"""The hot statements of the queue stay quick whatever its history: each uses the index that was made for it.

The benchmark of the queue says the same of a million jobs; here are enough of them for every planner to see the point.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stoker.queue import JobSpec, State, Store, init_queue, search
from stoker.queue.attempts import MOST_OF_SHAPE, ClaimRequest
from stoker.queue.driver import Parameters, Row, script
from stoker.queue.fields import shape_of
from stoker.queue.jobs import Jobs
from stoker.queue.search import EVERY_JOB, FEW, parse_query
from stoker.queue.sqlite import SqliteDriver
from tests.support.deep import DEEP
from tests.support.postgres import PostgresServer
from tests.support.queue_history import write_history, write_texts, write_waiting

HISTORY = 100_000
WAITING = 1_000
PARAMETERS: dict[str, str | int | float | None] = {
    "group": "bert",
    "names": '["bert", "vit"]',
    "keys": '["0123456789ab"]',
    "id": "",
    "priority": 0,
    "jobs": '["0000000a", "0000000b"]',
    "attempt": "",
    "worker": "",
    "instead_of": "",
    "shape": "0000000000000000",
    "shapes": 100,
    "also": "[]",
    "without": "[]",
    "after": "",
    "others": "[]",
    "ended": "a",
    "job": "",
    "finished": "",
    "is_needed": 0,
    "began": 0.0,
    "expires": 0.0,
    "gpus": "[]",
    "lease": 60.0,
    "pending": 0,
    "number": 1,
    "job_started": 0.0,
    "exit_code": 0,
    "reason": "",
    "ring": 0,
    "attempts": '["a", "b"]',
    "at": 1.0e9,
    "since": 29_000_000,
    "until": 29_010_080,
    "step": 20,
    "written": 1.0e9,
    "letters": 4096,
    "seen": "seen: failed",
    "by_rule": 0,
    "minutes": 44640,
    "seconds": 60.0,
    "who": "",
    "host": "h1",
    "gpu": "g",
    "cause": "",
    "rule": "",
    "report": "",
    "fit": "{}",
    "submitted": 1.0e9,
    "position": 1.0,
    "tie": 1.0,
    "limit": 50,
    "offset": 0,
    "edition": "aa",
    "start": 0,
    "most": 8,
    "patterns": '["0123456789abcdef", "0123456789abcdee"]',
}
WALKS = ("heads", "claim head", "succeed and claim")
HOT = (
    *(*WALKS, "claim", "succeed", "first ready", "specs", "wake", "expired attempts", "is anything expired"),
    *("requests", "keep", "keep no more", "keep for the dead no more"),
)
LOOKS = (
    "ended since",
    "to notify since",
    "is anyone to notify",
    "snoozes",
    "snooze",
    "write attempt details",
    "attempt details",
    "causes",
    "stops by rule",
    "last words",
    "unseen failures",
    "count unseen failures",
)
LOANS = ("request log stream", "renew log stream", "log requests", "log stream", "log chunks")


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def new_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Gives the url of a place for a queue."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return server.create_database
    return lambda: str(tmp_path_factory.mktemp("plans") / "queue.db")


@pytest.fixture(scope="module")
def queue(new_url: Callable[[], str]) -> Iterator[Store]:
    """Many jobs that have ended, and a thousand that were submitted after the database last counted."""
    with init_queue(new_url()) as opened:
        write_history(opened, HISTORY)
        opened.jobs.submit([JobSpec(command="new")] * WAITING)
        yield opened


@pytest.fixture(scope="module")
def young(new_url: Callable[[], str]) -> Iterator[Store]:
    """Ten thousand jobs that were submitted a moment ago: nothing has counted them yet."""
    with init_queue(new_url()) as opened:
        opened.jobs.submit([JobSpec(command="new")] * 10_000)
        yield opened


def plans(queue: Store, statement: str) -> list[str]:
    """How the database would run it: for these parameters, and on PostgreSQL for any, as it does in the long run."""
    limit = " LIMIT 100" if statement == "ended since" else ""
    return plans_of(queue, queue._driver.sql(statement) + limit)


def plans_of(queue: Store, sql: str) -> list[str]:
    if not Path(queue.place).exists():
        return [explained(queue, f"EXPLAIN {sql}"), generic_plan(queue, sql)]
    return ["\n".join(explained(queue, f"EXPLAIN QUERY PLAN {step}") for step in script(sql))]


def explained(queue: Store, sql: str) -> str:
    used = {name: value for name, value in PARAMETERS.items() if re.search(rf":{name}\b|%\({name}\)s", sql)}
    return "\n".join(str(row[-1]) for row in queue._driver.fetch_text(sql, used))


def generic_plan(queue: Store, sql: str) -> str:
    numbers: dict[str, int] = {}
    numbered = re.sub(r"%\((\w+)\)s", lambda found: f"${numbers.setdefault(found[1], len(numbers) + 1)}", sql)
    nothing = ", ".join(itertools.repeat("NULL", len(numbers)))
    driver = queue._driver
    for command in ("SET plan_cache_mode = force_generic_plan", f"PREPARE hot AS {numbered.replace('%%', '%')}"):
        driver.fetch_text(command, {})
    rows = driver.fetch_text(f"EXPLAIN EXECUTE hot ({nothing})" if numbers else "EXPLAIN EXECUTE hot", {})
    for command in ("DEALLOCATE hot", "SET plan_cache_mode = auto"):
        driver.fetch_text(command, {})
    return "\n".join(str(row[-1]) for row in rows)


@pytest.mark.parametrize("statement", WALKS)
def test_ready_jobs_are_read_in_order_from_the_index_of_ready_jobs(queue: Store, statement: str) -> None:
    assert_walks_along_the_ready(queue, statement)


@pytest.mark.parametrize("statement", WALKS)
def test_index_of_ready_jobs_is_used_without_statistics(young: Store, statement: str) -> None:
    assert_walks_along_the_ready(young, statement)


def assert_walks_along_the_ready(queue: Store, statement: str) -> None:
    for plan in plans(queue, statement):
        assert "stoker_jobs_ready" in plan
        # Of the few jobs for which machines reserve GPUs some are sorted.
        assert "Sort" not in plan.partition("stoker_jobs_kept")[0]
        assert "USE TEMP B-TREE" not in plan


@pytest.mark.parametrize("statement", HOT)
def test_worker_statements_do_not_scan_the_history(queue: Store, statement: str) -> None:
    for plan in plans(queue, statement):
        assert_reads_little(plan)


def test_worker_on_postgresql_plans_a_statement_once(postgres_server: PostgresServer) -> None:
    """Planning the claim takes longer than the claim."""
    with init_queue(postgres_server.create_database()) as queue, contextlib.closing(queue.listen(as_worker=True)):
        queue.jobs.submit([JobSpec(command="new")] * 20)
        claim = ClaimRequest(shape=shape_of(JobSpec(command="new")), worker="w", lease=60.0)
        claimed = queue.attempts.take_head(claim)
        for _ in range(10):
            assert claimed is not None
            queue.attempts.heads("w")
            claimed = queue.attempts.complete(claimed.attempt.id, "succeeded", 0, claim=claim).claimed
        plans = (
            "SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE generic_plans + custom_plans >= 10"
        )
        rows = queue._driver.fetch_text(plans, {})
        assert len(rows) >= 2
        assert all(generic >= 10 and custom == 0 for generic, custom in rows)


@pytest.mark.parametrize("statement", LOOKS)
def test_recent_history_statements_do_not_scan_the_history(queue: Store, statement: str) -> None:
    # Of these PostgreSQL keeps making plans for the time that is asked for: one for any time would cost it more.
    assert_reads_little(plans(queue, statement)[0])


def assert_reads_little(plan: str) -> None:
    assert not re.search(r"Seq Scan on stoker_(jobs|attempts|findings|logs|lent|usage)", plan)
    # SQLite scans an index too when it reads all of it.
    assert not re.search(r"SCAN (j|a|f|stoker_(jobs|attempts|findings|lent|usage))\b(?! USING)", plan)


def asked_of(
    queue: Store, monkeypatch: pytest.MonkeyPatch, look: Callable[[Store], object], result: Sequence[Row] = ()
) -> str:
    """The statement that the store builds for it; `result` is what the database returns."""
    asked: list[str] = []

    def record(sql: str, _parameters: Parameters) -> list[Row]:
        asked.append(sql)
        return list(result)

    with monkeypatch.context() as patch:
        patch.setattr(queue._driver, "fetch_text", record)
        look(queue)
    (sql,) = asked
    return sql


@pytest.mark.parametrize("states", [(), ("failed",), ("failed", "cancelled", "held")])
@pytest.mark.parametrize("after", [None, (1.0e9, 1.0)])
def test_every_page_of_jobs_uses_an_index(
    queue: Store, monkeypatch: pytest.MonkeyPatch, states: tuple[State, ...], after: tuple[float, float] | None
) -> None:
    sql = asked_of(queue, monkeypatch, lambda store: store.jobs.search(EVERY_JOB.narrowed(states), after=after))
    for plan in plans_of(queue, sql):
        assert_reads_little(plan)
        # Half of the jobs here have failed: PostgreSQL may walk along all of them as well.
        assert "stoker_jobs_submitted" in plan or (states and "stoker_jobs_state" in plan), plan
        if len(states) < 2:
            assert "Sort" not in plan
            assert "USE TEMP B-TREE" not in plan


def test_recently_ended_jobs_use_the_index_of_end_times(queue: Store) -> None:
    assert "stoker_jobs_ended" in plans(queue, "ended since")[0]
    for plan in plans(queue, "ended since"):
        assert "Sort" not in plan
        assert "USE TEMP B-TREE" not in plan


def test_idle_stops_use_their_index(queue: Store) -> None:
    assert "stoker_attempt_details_rule" in plans(queue, "stops by rule")[0]


def test_gpu_usage_of_the_last_hour_uses_an_index(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: tuple[Callable[[Store], object], ...] = (
        lambda store: store.usage.read(29_000_000),
        lambda store: store.usage.read(29_000_000, "h1", "g"),
    )
    for look in looks:
        assert_reads_little(plans_of(queue, asked_of(queue, monkeypatch, look))[0])
    assert_reads_little(plans(queue, "usage totals")[0])


def test_week_of_one_gpu_reads_only_its_own_minutes(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = asked_of(queue, monkeypatch, lambda store: store.usage.read(1000, "h1", "g", until_minute=11_080, step=20))
    for plan in plans_of(queue, sql):
        assert_reads_little(plan)
        assert re.search(
            r"(PRIMARY KEY|Index Cond:) \(+(ROW\()?host, ?gpu, ?minute\).*\(?host, ?gpu, ?minute\) ?<", plan
        ), plan


def test_gpus_of_a_machine_are_found_without_reading_their_minutes(queue: Store) -> None:
    for plan in plans(queue, "gpus of host"):
        assert_reads_little(plan)
        assert "stoker_usage_minute" not in plan


def test_last_attempts_of_a_worker_are_read_in_order_from_its_index(queue: Store) -> None:
    for plan in plans(queue, "attempts of worker"):
        assert "stoker_attempts_worker" in plan
        assert "Sort" not in plan
        assert "USE TEMP B-TREE" not in plan


def test_expired_leases_use_the_index_of_running_attempts(queue: Store) -> None:
    for statement in ("expired attempts", "is anything expired"):
        for plan in plans(queue, statement):
            # Both hold nothing but attempts that run.
            assert "stoker_attempts_running" in plan or "stoker_attempts_one" in plan


def test_next_retry_uses_the_index_of_pending_retries(queue: Store) -> None:
    for statement in ("heads", "is anything expired", "wake"):
        for plan in plans(queue, statement):
            assert "stoker_jobs_later" in plan


def test_lookup_by_id_prefix_reads_only_matching_rows(queue: Store) -> None:
    sql = queue._driver.sql("jobs by prefix")
    explain = "EXPLAIN QUERY PLAN " if Path(queue.place).exists() else "EXPLAIN "
    rows = queue._driver.fetch_text(explain + sql, {"prefix": "abcd", "beyond": "abcdg"})
    chosen = "\n".join(str(row[-1]) for row in rows)
    assert "Seq Scan" not in chosen
    assert "SCAN j" not in chosen


def test_groups_are_found_and_counted_by_their_index(queue: Store) -> None:
    for statement in ("jobs of group", "group counts", "rooms", "set shapes", "clean groups"):
        for plan in plans(queue, statement):
            assert "stoker_jobs_group" in plan, (statement, plan)
            assert "Seq Scan on stoker_jobs" not in plan
            assert "SCAN j\n" not in f"{plan}\n"


def test_durations_of_similar_jobs_use_their_index(queue: Store) -> None:
    for plan in plans(queue, "durations"):
        assert_reads_little(plan)
        assert "stoker_jobs_pattern" in plan
        assert "Sort" not in plan
        assert "USE TEMP B-TREE" not in plan


@pytest.mark.parametrize("look", [lambda jobs: jobs.find(["queued"], order="queue", limit=20), Jobs.unfinished_counts])
def test_lists_and_counts_of_queued_jobs_use_the_index_of_queued_jobs(
    long_queue: Store, monkeypatch: pytest.MonkeyPatch, look: Callable[[Jobs], object]
) -> None:
    driver, asked = long_queue._driver, list[str]()
    sql = driver.sql

    def record(text: str, _parameters: Parameters) -> list[Row]:
        asked.append(text)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(driver, "fetch_text", record)
        patch.setattr(driver, "fetch", lambda statement, parameters: record(sql(statement), parameters))
        look(long_queue.jobs)
    for plan in plans_of(long_queue, asked[0]):
        assert "stoker_jobs_queued" in plan
        assert_reads_little(plan)
        assert "Sort" not in plan
        assert "USE TEMP B-TREE FOR ORDER BY" not in plan


def test_first_queued_jobs_use_the_index_of_queued_jobs(queue: Store) -> None:
    for statement in ("in line", "ids in line"):
        for plan in plans_of(queue, f"{queue._driver.sql(statement)} LIMIT 50"):
            assert "stoker_jobs_queued" in plan
            assert "Sort" not in plan
            assert "USE TEMP B-TREE" not in plan


def test_neighbours_of_a_job_use_the_indexes_of_waiting_jobs(queue: Store) -> None:
    for plan in plans(queue, "neighbours"):
        assert_looks_into_the_queued(plan, 2)
        assert plan.count("stoker_jobs_state") == 2  # of those that are held


def assert_looks_into_the_queued(plan: str, times: int) -> None:
    assert_reads_little(plan)
    assert plan.count("stoker_jobs_queued") == times
    # From a place on, and not from its beginning.
    assert len(re.findall(r"SEARCH j USING (COVERING )?INDEX stoker_jobs_queued|Index Cond: .*priority", plan)) == times


@pytest.mark.parametrize("statement", ["unfinished counts", "unfulfilled needs"])
def test_frequent_statements_do_not_scan_the_history(queue: Store, statement: str) -> None:
    for plan in plans(queue, statement):
        assert_reads_little(plan)


@pytest.mark.parametrize("statement", LOANS)
def test_log_stream_statements_read_only_their_own_rows(queue: Store, statement: str) -> None:
    for plan in plans(queue, statement):
        assert_reads_little(plan)


# Searches

SUBMITTED_BEFORE = r"stoker_jobs_submitted \(\(?submitted[<,]|stoker_jobs_submitted(?s:.*)Index Cond: .*submitted <"
STATE_BEFORE = r"stoker_jobs_state \(state=\? AND \(?submitted[<,]|stoker_jobs_state(?s:.*)Index Cond: .*submitted <"
NEWEST_TEXTS = "stoker_texts_pkey|SCAN t|SEARCH t USING INTEGER PRIMARY KEY"
TRIGRAMS = "stoker_texts_grams|VIRTUAL TABLE INDEX"


@pytest.fixture(scope="module")
def searchable(new_url: Callable[[], str]) -> Iterator[Store]:
    """Many jobs that have ended, with what they are searched by."""
    with init_queue(new_url()) as opened:
        write_history(opened, 20_000)
        write_texts(opened)
        yield opened


def searches(
    queue: Store,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    after: tuple[float, float] | None = None,
    few: bool = False,
) -> tuple[list[tuple[str, Parameters]], list[tuple[str, Parameters]]]:
    """The statements of a search that finds nothing, in their order; and those before it that count, up to `FEW`."""
    asked: list[tuple[str, Parameters]] = []
    counted: list[tuple[str, Parameters]] = []

    def record(sql: str, parameters: Parameters) -> list[Row]:
        is_count = sql.startswith("SELECT count")
        (counted if is_count else asked).append((sql, parameters))
        return [(0 if few else FEW,)] if is_count else []

    with monkeypatch.context() as patch:
        patch.setattr(queue._driver, "fetch_text", record)
        patch.setattr(queue._driver, "fetch", lambda _statement, _parameters: [("w1", "gpu1")])
        queue.jobs.search(parse_query(text), after=after)
    return asked, counted


@pytest.mark.parametrize("after", [None, (1.0e9, 1.0e6)])
@pytest.mark.parametrize(
    ("text", "few", "first", "then"),
    [
        ("19876", False, NEWEST_TEXTS, TRIGRAMS),
        ("name:19876 state:failed", False, "stoker_jobs_state", TRIGRAMS),
        ("name:19876 state:failed", True, "stoker_jobs_state", "stoker_jobs_state"),
        ("seed=19876 since:1h", False, NEWEST_TEXTS, TRIGRAMS),
        ("seed=19876 since:1h", True, NEWEST_TEXTS, "stoker_jobs_ended"),
        ("state:failed since:1h", False, "stoker_jobs_state", "stoker_jobs_ended"),
        ("19876 before:1h", False, "stoker_jobs_submitted", TRIGRAMS),
        ("before:1h", False, SUBMITTED_BEFORE, None),
        ("state:failed before:1h", False, STATE_BEFORE, None),
        ("machine:gpu1", False, "stoker_jobs_submitted", "stoker_attempts_worker"),
        ("sweep state:held,running", False, "stoker_jobs_state", None),
    ],
)  # fmt: skip
def test_searches_look_at_the_newest_jobs_and_then_use_an_index(
    searchable: Store,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    few: bool,
    first: str,
    then: str | None,
    after: tuple[float, float] | None,
) -> None:
    is_file = Path(searchable.place).exists()
    explain = "EXPLAIN QUERY PLAN " if is_file else "EXPLAIN "
    asked, counted = searches(searchable, monkeypatch, text, after, few)
    plans, counts = (
        [
            "\n".join(str(row[-1]) for row in searchable._driver.fetch_text(explain + sql, parameters))
            for sql, parameters in statements
        ]
        for statements in (asked, counted)
    )
    # Few jobs that changed since then are all looked at, instead of more of the newest.
    assert len(plans) == (1 if then is None else 2 if few and "since:" in text else 3)
    for plan in plans[: max(1, len(plans) - 1)]:
        assert re.search(first, plan), plan
    assert then is None or re.search(then, plans[-1]), plans[-1]
    for plan in (*plans, *counts):
        assert not re.search(r"Seq Scan on stoker_(jobs|attempts|texts)", plan), plan
    if is_file and then is not None:
        assert not re.search(r"SCAN [jtac]\b(?! USING| VIRTUAL)", "\n".join([plans[-1], *counts])), plans[-1]


# With many matches, few, and none; of a frequent word among few jobs, and of none among many.
SEARCHES = (
    *("python", "19876", "seed=19876", "nowhere", "lr=0.001 19876 sweep", "name:nur user:alice"),
    *("python state:failed", "state:held x", "alice state:cancelled", "state:failed python nowhere"),
    *("python since:1m", "state:failed since:1m", "state:cancelled since:1970-01-01T00:00Z", "python machine:nowhere"),
    *("python before:1970-01-01T01:00Z", "state:failed before:1970-01-01T01:00Z", "before:1970-01-01T00:00Z"),
)


def test_searches_read_few_rows(searchable: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by SQLite in steps, of which a look at every job takes more than a hundred thousand."""
    monkeypatch.setattr(search, "FEW", 500)
    for text in SEARCHES:
        assert rows_read(searchable, text) < 80_000, text


def rows_read(queue: Store, text: str) -> int:
    driver = queue._driver
    if not isinstance(driver, SqliteDriver):
        return rows_of_plans(queue, text)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 100
        return 0

    connection = driver._connected()
    connection.set_progress_handler(count, 100)
    queue.jobs.search(parse_query(text))
    connection.set_progress_handler(None, 0)
    return steps


def rows_of_plans(queue: Store, text: str) -> int:
    """The most rows of a node of each plan on PostgreSQL; for each of them SQLite takes about twenty steps."""
    really, read = queue._driver.fetch_text, 0

    def count(sql: str, parameters: Parameters) -> list[Row]:
        nonlocal read
        plan = "\n".join(str(row[0]) for row in really(f"EXPLAIN (ANALYZE, TIMING OFF) {sql}", parameters))
        read += max(int(rows) * int(loops) for rows, loops in re.findall(r"actual rows=(\d+) loops=(\d+)", plan))
        read += sum(map(int, re.findall(r"Rows Removed by (?:Filter|Index Recheck): (\d+)", plan)))
        return really(sql, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue._driver, "fetch_text", count)
        queue.jobs.search(parse_query(text))
    return 20 * read


# What is read, however long the queue and its history are


@pytest.fixture(scope="module")
def long_queue(new_url: Callable[[], str]) -> Iterator[Store]:
    """With jobs that are ready, blocked, or wait for a retry, in a queue that nothing has counted since."""
    waiting, ended = (100_000, 1_000_000) if DEEP else (20_000, 50_000)
    with init_queue(new_url()) as opened:
        write_history(opened, ended)
        write_waiting(opened, waiting)
        write_waiting(opened, waiting, blocked=1)
        write_waiting(opened, waiting, not_before=1.0e10)
        yield opened


@pytest.mark.parametrize("statement", WALKS)
def test_long_queue_is_read_by_the_index_of_ready_jobs(long_queue: Store, statement: str) -> None:
    assert_walks_along_the_ready(long_queue, statement)


@pytest.mark.parametrize("statement", HOT)
def test_worker_statements_do_not_scan_a_long_queue(long_queue: Store, statement: str) -> None:
    for plan in plans(long_queue, statement):
        assert_reads_little(plan)
        # Of queued jobs there are many: only the statements of listings may look for them by state.
        assert "stoker_jobs_state" not in plan


def test_claims_from_a_long_queue_read_few_rows(long_queue: Store) -> None:
    """Counted by the database: its steps on SQLite, the rows of all nodes of the plan on PostgreSQL."""
    claim = ClaimRequest(shape=shape_of(JobSpec(command="")), worker="w", lease=60.0)

    def turn() -> None:
        assert len(long_queue.attempts.heads("w").jobs) == 2 * MOST_OF_SHAPE
        claimed = long_queue.attempts.take_head(claim)
        assert claimed is not None
        done = long_queue.attempts.complete(claimed.attempt.id, "succeeded", 0, claim=claim)
        assert done.claimed is not None
        assert long_queue.attempts.finish(done.claimed.attempt.id, "succeeded", 0)

    driver = long_queue._driver
    if isinstance(driver, SqliteDriver):
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 100
            return 0

        turn()  # SQLite prepares the statements
        connection = driver._connected()
        connection.set_progress_handler(count, 100)
        turn()
        connection.set_progress_handler(None, 0)
        assert steps < 20_000
    else:
        turn()
        for statement in ("heads", "claim head"):
            with contextlib.suppress(_RolledBackError):
                driver.transaction(functools.partial(assert_few_rows, long_queue, statement))


class _RolledBackError(Exception):
    """The claim of EXPLAIN ANALYZE is undone."""


def assert_few_rows(queue: Store, statement: str) -> None:
    plan = explained(queue, f"EXPLAIN (ANALYZE, TIMING OFF) {queue._driver.sql(statement)}")
    rows = [int(rows) * int(loops) for rows, loops in re.findall(r"actual rows=(\d+) loops=(\d+)", plan)]
    assert rows
    assert max(rows) <= 2 * MOST_OF_SHAPE + 1, plan
    assert all(int(removed) <= 100 for removed in re.findall(r"Rows Removed by Filter: (\d+)", plan)), plan
    raise _RolledBackError
