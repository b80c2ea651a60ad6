"""A queue of an older version becomes a newer one while others work on it; nothing is done twice or by halves."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.errors import StokerError
from stoker.queue import AttemptDetails, NewJob, Store, View, init_queue, open_queue, queue_version, schema
from stoker.queue.model import LogChunk
from stoker.queue.statements import sections

NOVELTY = """
ALTER TABLE stoker_jobs ADD COLUMN novelty TEXT;
UPDATE stoker_jobs SET novelty = 'none' WHERE state = 'queued';
ALTER TABLE stoker_attempts ADD COLUMN novelty TEXT;
CREATE INDEX stoker_novelty ON stoker_jobs (novelty);
"""
MIGRATE = """
import sys
from stoker.queue import NewJob, open_queue, schema

schema.VERSION = schema.VERSION + 1
schema.sections = lambda _file: {str(schema.VERSION): sys.argv[2]}
print("ready", flush=True)
sys.stdin.readline()
with open_queue(sys.argv[1]) as queue:
    queue.submit([NewJob(command="from the newer version")])
"""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "queue.db")


def work(queue: Store) -> None:
    """Takes a job and finishes it, as a worker of the older version does."""
    queue.submit([NewJob(command="x")])
    attempt = queue.claim(queue.ready(1)[0].id, "older", [], 600.0)
    assert attempt is not None
    assert queue.renew([attempt.id], 600.0) == {attempt.id: False}
    queue._driver.fetch_text(f"INSERT INTO stoker_logs (attempt_id, tail) VALUES ('{attempt.id}', 'output')", {})
    assert queue.finish(attempt.id, "succeeded", 0)


def test_an_older_queue_is_migrated_once_by_several_while_a_worker_works(url: str) -> None:
    with init_queue(url) as queue:
        for _ in range(5):
            work(queue)
        newer = [
            subprocess.Popen(
                [sys.executable, "-c", MIGRATE, url, NOVELTY],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        for process in newer:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in newer:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        done = 5
        while done < 20 or any(process.poll() is None for process in newer):
            work(queue)
            done += 1
        for process in newer:
            _output, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, "")
        assert queue.counts() == {"succeeded": done, "queued": 4}
        assert queue._driver.version() == schema.VERSION + 1
        assert queue._driver.fetch_text("SELECT count(novelty) FROM stoker_jobs", {})[0][0] <= 4


def test_a_migration_that_fails_leaves_the_queue_as_it_was(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with init_queue(url) as queue:
        work(queue)
    with monkeypatch.context() as patch:
        patch.setattr(schema, "VERSION", schema.VERSION + 1)
        patch.setattr(
            schema, "sections", lambda _file: {str(schema.VERSION): NOVELTY + "INSERT INTO nowhere VALUES (1);"}
        )
        with pytest.raises(StokerError):
            open_queue(url)
    assert queue_version(url) == (schema.VERSION, schema.VERSION)
    with open_queue(url) as queue:
        work(queue)
        with pytest.raises(Exception, match="novelty"):
            queue._driver.fetch_text("SELECT novelty FROM stoker_jobs", {})


def test_the_version_of_a_queue_is_told_without_making_one(url: str) -> None:
    assert queue_version(url) == (None, schema.VERSION)
    with pytest.raises(StokerError, match="no queue at"):
        open_queue(url)
    init_queue(url).close()
    assert queue_version(url) == (schema.VERSION, schema.VERSION)


def test_a_queue_of_version_1_keeps_all_that_is_in_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "VERSION", 1)
        # It is filled by the statements of today, which need the columns that came later.
        patch.setattr(schema, "sections", lambda file: {"1": f"{sections(file)['1']}\n{sections(file)['5']}"})
        with init_queue(url) as queue:
            work(queue)
            first, second = queue.submit([NewJob(command="runs", tags=("a",)), NewJob(command="waits")])
            running = queue.claim(first, "older", ["gpu"], 600.0)
            assert running is not None
            queue.heartbeat("older", "box", View())
            queue.pause()
            jobs, log = queue.jobs(), queue.log(running.id)
            queue._driver.fetch_text("DROP INDEX stoker_jobs_kept", {})
            for column in ("kept_by", "kept_gpus", "kept_until"):
                queue._driver.fetch_text(f"ALTER TABLE stoker_jobs DROP COLUMN {column}", {})
    assert queue_version(url) == (1, schema.VERSION)
    together = threading.Barrier(3)
    with ThreadPoolExecutor(3) as several:
        versions = list(several.map(lambda _: opened_version(url, together), range(3)))
    assert versions == [schema.VERSION] * 3
    with open_queue(url) as queue:
        assert (queue.jobs(), queue.log(running.id), queue.paused()) == (jobs, log, True)
        assert [worker.id for worker in queue.workers()] == ["older"]
        assert queue.check() == []
        assert [job.state for job in queue.ended_since(0.0)] == ["succeeded"]
        assert queue.details(running.id) is None
        assert queue.write_details(running.id, AttemptDetails(cause="idle"))
        assert queue.snooze(running.id, 60.0, "alice")
        assert list(queue.requests("older").snoozed) == [running.id]
        assert queue.request_log_stream(running.id, 60.0)
        assert queue.write_log_chunk(running.id, LogChunk(edition="aa", start=0, finished=b"all of it\n"))
        assert queue.log_chunk(running.id) == LogChunk(edition="aa", start=0, finished=b"all of it\n")
        assert queue.finish(running.id, "failed", 1)
        assert queue.jobs(("queued",))[0].id == second


def test_a_worker_that_is_not_upgraded_yet_goes_on_with_a_queue_that_is(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attendants open the queue anew for every outcome and every renewal: refused, they would stop their jobs."""
    with init_queue(url) as queue:
        (job,) = queue.submit([NewJob(command="runs")])
        running = queue.claim(job, "older", [], 600.0)
        assert running is not None
    monkeypatch.setattr(schema, "VERSION", 1)
    with open_queue(url) as queue:
        assert queue.renew([running.id], 600.0) == {running.id: False}
        assert queue.finish(running.id, "succeeded", 0)
    monkeypatch.undo()
    assert queue_version(url) == (schema.VERSION, schema.VERSION)


def opened_version(url: str, together: threading.Barrier) -> int:
    together.wait(30.0)
    with open_queue(url) as queue:
        return queue._driver.version() or 0
