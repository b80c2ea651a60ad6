"""`stoker queue`: the queue is created, brought up to date and looked at."""

import os
import subprocess
from pathlib import Path

import pytest

from stoker.queue import JobSpec, Store, View, WorkerGpu, init_queue
from stoker.queue.driver import VERSION
from tests.support.command import stoker, stoker_command
from tests.support.queue_jobs import end, start, submit


def test_creating_a_queue_is_idempotent(tmp_path: Path) -> None:
    file = tmp_path / "a place" / "queue.db"
    created = stoker("queue", "init", "--queue", str(file))
    assert (created.code, created.out) == (0, f"the queue {file} is ready (SQLite, version {VERSION})\n")
    with init_queue(str(file)) as store:
        submit(store, "a")
    assert stoker("queue", "init", "--queue", str(file), "--json").json() == {
        "queue": str(file),
        "kind": "SQLite",
        "version": VERSION,
    }
    with init_queue(str(file)) as store:
        assert store.jobs.get("a").state == "queued"


@pytest.mark.parametrize(("directory", "file"), [(0o700, 0o600), (0o755, 0o600), (0o755, 0o644)])
@pytest.mark.parametrize("verb", [("list",), ("submit", "true")])
def test_queue_of_another_user_is_refused(tmp_path: Path, directory: int, file: int, verb: tuple[str, ...]) -> None:
    queue = tmp_path / "theirs" / "queue.db"
    init_queue(str(queue)).close()
    # Root may do everything; without these capabilities it is a user like any other.
    user = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    for path, mode in ((queue, file), (queue.parent, directory)):
        if user:
            os.chown(path, 65534, 65534)
        path.chmod(mode if user else 0)
    command = [*user, stoker_command(), verb[0], "--queue", str(queue), *verb[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    queue.parent.chmod(0o755)
    assert done.returncode != 0
    assert done.stderr.startswith(f"stoker: the queue {queue} cannot be used: this user may not ")
    assert len(done.stderr.splitlines()) == 1


def test_queue_is_created_in_postgresql_without_showing_the_password(postgres_url: str) -> None:
    created = stoker("queue", "init", "--queue", postgres_url)
    assert created.code == 0, created.err
    assert f"(PostgreSQL, version {VERSION})" in created.out
    assert "password" not in created.out
    checked = stoker("queue", "check", "--json", "--queue", postgres_url)
    assert (checked.code, checked.json()["kind"], checked.json()["problems"]) == (0, "PostgreSQL", [])


@pytest.mark.parametrize("verb", ["check"])
def test_check_does_not_create_a_missing_queue(tmp_path: Path, verb: str) -> None:
    file = tmp_path / "queue.db"
    done = stoker("queue", verb, "--queue", str(file))
    assert (done.code, done.err) == (1, f"stoker: there is no queue at {file}: the first `stoker submit` creates it\n")
    assert not file.exists()


def test_check_shows_jobs_and_workers(queue: Store) -> None:
    _a, _b, over = submit(queue, "a", "b", "over")
    end(queue, over)
    queue.pause()
    gpu = WorkerGpu(uuid="GPU-1", index=0, name="H100")
    queue.workers.heartbeat("worker-1", "alpha", View(gpus=(gpu, gpu)))
    queue.workers.heartbeat("worker-2", "beta", View(gpus=(gpu,)))
    queue._driver.fetch_text("UPDATE stoker_workers SET seen = seen - 7200 WHERE host = 'beta'", {})
    done = stoker("queue", "check")
    assert done.code == 0, done.out
    assert done.out.splitlines() == [
        f"queue        {queue.place} (SQLite, version {VERSION}), paused",
        "jobs         2 queued, 1 failed",
        "worker       worker-1 on alpha: 2 GPUs, alive",
        "worker       worker-2 on beta: 1 GPU, last seen 2h ago",
        "problems     none",
    ]
    result = stoker("queue", "check", "--json").json()
    assert (result["counts"], result["paused"], result["problems"]) == ({"queued": 2, "failed": 1}, True, [])
    assert [(worker["host"], worker["there"]) for worker in result["workers"]] == [("alpha", True), ("beta", False)]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("UPDATE stoker_jobs SET state = 'running' WHERE name = 'a'", "no attempt at them runs"),
        ("UPDATE stoker_jobs SET state = 'queued' WHERE name = 'runs'", "not marked as running"),
        ("UPDATE stoker_jobs SET state = 'purple' WHERE name = 'a'", "in a state that this Stoker does not know"),
        (
            """INSERT INTO stoker_dependencies SELECT a.id, b.id, 'any' FROM stoker_jobs a, stoker_jobs b
            WHERE a.name = 'a' AND b.name = 'b'""",
            "in a cycle",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_check_with_problems_exits_with_code_1(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, harm: str, says: str
) -> None:
    url = str(request.getfixturevalue("postgres_url")) if kind == "postgres" else str(tmp_path / "queue.db")
    with init_queue(url) as store:
        a, runs = submit(store, "a", "runs")
        submit(store, "b", after=(a,))
        start(store, runs)
        assert store.check() == []
        store._driver.fetch_text(harm, {})
    done = stoker("queue", "check", "--queue", url)
    assert (done.code, done.err) == (1, "")
    (problem,) = [line for line in done.out.splitlines() if line.startswith("problem")]
    assert says in problem
    result = stoker("queue", "check", "--json", "--queue", url)
    assert (result.code, len(result.json()["problems"])) == (1, 1)


def test_check_finds_a_damaged_index(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    with init_queue(str(path)) as store:
        store.jobs.submit([JobSpec(command=f"echo {number} {'x' * 200}") for number in range(500)])
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4096] = bytes(4096)
    path.write_bytes(content)
    done = stoker("queue", "check", "--queue", str(path))
    assert done.code == 1
    assert "damaged" in done.out + done.err
