"""Origins: the same place becomes a job once, also when that job was forgotten, and its jobs are found again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.queue import JobSpec, Store, init_queue


@pytest.fixture(params=["sqlite", "postgres"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "queue.db")
    with init_queue(str(url)) as opened:
        yield opened


def test_jobs_are_found_by_origin_prefix(queue: Store) -> None:
    origins = [
        "sheet:K:0:3#1",
        "sheet:K:0:10#1",
        "sheet:K:0:é\U0010fffd",
        "sheet:K:01:3#1",
        "sheet:k:0:3#1",
        "Sheet:K:0:",
        None,
    ]
    queue.jobs.submit([JobSpec(command=str(origin), origin=origin) for origin in origins])
    found = queue.jobs.by_origin("sheet:K:0:")
    assert [job.origin for job in found] == ["sheet:K:0:10#1", "sheet:K:0:3#1", "sheet:K:0:é\U0010fffd"]
    assert [job.command for job in found] == [job.origin for job in found]
    assert queue.jobs.by_origin("file:") == []


def test_origin_of_a_cleaned_job_does_not_become_a_job_again(queue: Store) -> None:
    (name, other) = queue.jobs.submit([JobSpec(command="one", origin="file:a:1"), JobSpec(command="no origin")])
    queue.jobs.cancel([name, other])
    assert queue.jobs.clean(-1.0) == 2
    assert queue.jobs.by_origin("file:a:") == []
    assert queue.jobs.submit([JobSpec(command="one", origin="file:a:1")]) == [name]
    assert queue.jobs.find() == []
    assert queue.jobs.clean(-1.0) == 0


def test_lookup_by_origin_prefix_reads_only_matching_rows(queue: Store) -> None:
    queue.jobs.submit([JobSpec(command="x", origin=f"file:{number}") for number in range(2000)])
    queue._driver.fetch_text("ANALYZE", {})
    explain = "EXPLAIN QUERY PLAN " if Path(queue.place).exists() else "EXPLAIN "
    sql = queue._driver.sql("jobs by origin")
    rows = queue._driver.fetch_text(explain + sql, {"prefix": "file:7:", "beyond": "file:7:~"})
    chosen = "\n".join(str(row[-1]) for row in rows)
    assert "origin" in chosen
    # Workers are few: of them all may be read.
    for slow in ("Seq Scan on stoker_jobs", "SCAN j", "Sort", "USE TEMP B-TREE"):
        assert slow not in chosen
