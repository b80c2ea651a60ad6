"""`stoker.Queue`: the queue as a Python program uses it, on SQLite and on a real PostgreSQL."""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stoker
from stoker import client
from stoker.client import Options
from stoker.errors import BadInputError, StokerError
from stoker.queue import JobSpec, Outcome, Store, Usage, View, init_queue, open_queue, postgres
from stoker.queue.fields import editable
from tests.support.postgres import PostgresServer

LONG = 600.0


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        prepared = str(request.getfixturevalue("postgres_url"))
        init_queue(prepared).close()
        return prepared
    return str(tmp_path / "queue.db")


@pytest.fixture
def queue(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[stoker.Queue]:
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    with stoker.Queue(url) as opened:
        yield opened


@pytest.fixture
def store(queue: stoker.Queue, url: str) -> Iterator[Store]:
    """What a worker would have open."""
    with open_queue(url) as opened:
        yield opened


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once the client has found no change and waits."""
    rests, rest = threading.Event(), client._rest

    def result(descriptor: int, seconds: float) -> None:
        rests.set()
        rest(descriptor, seconds)

    monkeypatch.setattr(client, "_rest", result)
    return rests


def run(store: Store, job: str, outcome: Outcome = "succeeded", output: str = "") -> None:
    attempt = store.attempts.claim([job], "w", [], LONG)
    assert attempt is not None
    store.logs.write(attempt.id, output)
    assert store.attempts.finish(attempt.id, outcome, 0 if outcome == "succeeded" else 1)


def test_job_is_submitted_with_its_options(queue: stoker.Queue, tmp_path: Path) -> None:
    first = queue.submit("echo first", name="the first")
    job = queue.submit(
        ["python", "train.py", "{id}", "{batch_size}"],
        directory=tmp_path,
        environment={"A": "1"},
        name="second",
        tags=["x", "y"],
        gpus=2,
        memory="20GiB",
        share=True,
        priority=5,
        after=first,
        after_any="the first",
        retries=3,
        backoff="1m",
        time_limit="12h",
        policy={"window": 60, "require": "any"},
        preemptible=True,
        on_loss="hold",
        batch_size=8,
        hold=True,
    )
    assert isinstance(job, stoker.Job)
    assert job.command == ("python", "train.py", "{id}", "{batch_size}")
    assert (job.directory, job.environment, job.tags) == (str(tmp_path), {"A": "1"}, ("x", "y"))
    assert (job.gpus, job.memory, job.share, job.priority) == (2, 20 * 2**30, True, 5)
    assert (job.after, job.after_any) == ((first.id,), (first.id,))
    assert (job.retries, job.backoff, job.time_limit) == (3, 60.0, 43200.0)
    assert (job.policy, job.batch_size, job.state) == ({"window": 60, "require": "any"}, 8, "held")
    assert (first.command, first.directory, first.gpus, first.state) == ("echo first", str(Path.cwd()), 1, "queued")


def test_submitter_is_stored(queue: stoker.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "alice")
    assert queue.submit("true").submitter == "alice"


def test_job_equals_its_json(queue: stoker.Queue) -> None:
    job = queue.submit("true", tags=["x"])
    assert msgspec.json.decode(msgspec.json.encode(job), type=stoker.Job) == job == queue.job(job.id)


def test_batch_is_accepted_entirely_or_not_at_all(queue: stoker.Queue) -> None:
    jobs = queue.submit_many(["echo 1", ["echo", "2"], "echo 3"], gpus=0, tags=["t"])
    assert [job.command for job in jobs] == ["echo 1", ("echo", "2"), "echo 3"]
    with pytest.raises(BadInputError, match="character NUL"):
        queue.submit_many(["echo 4", "echo \0"])
    assert queue.counts() == {"queued": 3}
    assert [job.id for job in queue.jobs(["queued"], "t", order="queue", limit=2)] == [job.id for job in jobs[:2]]
    assert queue.jobs(tag="other") == []
    assert [job.id for job in queue.search("tag:t state:queued", sort="-submitted", limit=2)] == [
        job.id for job in jobs[:2]
    ]


def test_jobs_are_found_by_id_prefix_name_and_object(queue: stoker.Queue) -> None:
    job = queue.submit("true", name="called this")
    for which in (job, job.id, job.id[:6], "called this"):
        assert queue.job(which) == job
    with pytest.raises(BadInputError, match="there is no job 'nobody'"):
        queue.job("nobody")


def test_jobs_are_held_released_cancelled_and_retried(queue: stoker.Queue, store: Store) -> None:
    job = queue.submit("true")
    assert queue.hold(job) == [job.id]
    assert queue.release([job.id]) == [job.id]
    assert queue.cancel(job.id[:7]).cancelled == [job.id]
    assert queue.retry(job) == [job.id]
    run(store, job.id, output="epoch 1\nepoch 2\n")
    assert queue.logs(job) == "epoch 1\nepoch 2\n"
    assert queue.logs(queue.submit("true")) == ""
    assert queue.counts() == {"succeeded": 1, "queued": 1}


def test_jobs_are_edited_all_or_none(queue: stoker.Queue, store: Store) -> None:
    first, second = queue.submit_many(["train --lr 1e-3"] * 2, group="night")
    later = queue.submit("true")
    edited = queue.edit("night", command="train --lr 3e-4", after=later, time_limit="2h")
    assert {job.command for job in edited} == {"train --lr 3e-4"}
    assert [queue.job(job).time_limit for job in (first, second)] == [7200.0, 7200.0]
    assert queue.job(second).after == (later.id,)
    with pytest.raises(BadInputError, match="'colour': there is no such option"):
        queue.edit(first, colour="red")
    with pytest.raises(BadInputError, match="gpus"):
        queue.edit([first, second], gpus=-1)
    assert store.attempts.claim([later.id], "w", [], LONG) is not None
    with pytest.raises(BadInputError, match=f"job {later.id} is running"):
        queue.edit([first, later], name="new")
    assert queue.job(first).name == first.name
    assert queue.edit(later, notify=["end"])[0].notify == ("end",)
    group = queue.edit("night", at_most=1)
    assert (len(group), queue.group("night").at_most) == (2, 1)


def test_jobs_are_moved(queue: stoker.Queue) -> None:
    a, b, c, d = (job.id for job in queue.submit_many(["true"] * 4))

    def order() -> list[str]:
        return [job.id for job in queue.jobs(order="queue")]

    assert queue.move([c, d], "first") == [c, d]
    assert order() == [c, d, a, b]
    assert queue.move(b, before=d) == [b]
    assert queue.move(c, after=a) == [c]
    assert order() == [b, d, a, c]
    mistakes: list[dict[str, Any]] = [{}, {"place": "first", "before": a}, {"place": "middle"}]
    for mistake in mistakes:
        with pytest.raises(BadInputError, match="place"):
            queue.move(a, **mistake)


def test_logs_are_complete_after_wait(queue: stoker.Queue, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the last of its output comes after the outcome, which is brought first."""
    store.workers.heartbeat("w", "host", View())
    job = queue.submit("train")
    attempt = store.attempts.claim([job.id], "w", [], LONG)
    assert attempt is not None
    store.logs.write(attempt.id, "half of")
    assert store.attempts.finish(attempt.id, "succeeded", 0)
    pauses: list[float] = []

    def bring(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            store.logs.write(attempt.id, "half of it, and the rest", is_last=True)

    monkeypatch.setattr("stoker.queue.logs.time.sleep", bring)
    assert queue.wait(job).state == "succeeded"
    assert queue.logs(job) == "half of it, and the rest"
    assert len(pauses) == 3


def test_lines_of_a_log_are_found(queue: stoker.Queue, store: Store) -> None:
    job = queue.submit("true")
    assert queue.log_matches(job, "x") == []
    run(store, job.id, "failed", output="one\nRuntimeError: X\nlast x")
    found = [(match.line, match.text) for match in queue.log_matches(job, "x")]
    assert found == [(2, "RuntimeError: X"), (3, "last x")]
    assert [match.line for match in queue.log_matches(job)] == [2]


def test_history_of_a_job(queue: stoker.Queue, store: Store) -> None:
    job = queue.submit("train", gpus=1)
    assert queue.history(job).gpus == ()
    store.workers.heartbeat("w", "box", View())
    attempt = store.attempts.claim([job.id], "w", ["GPU-0"], LONG)
    assert attempt is not None
    row = Usage(host="box", gpu="GPU-0", minute=int(attempt.started // 60), seconds={"job": 9.0}, power=250.0)
    store.usage.write([row])
    history = queue.history(job.id, minutes=5)
    assert (history.gpus[0].power[0], history.gpus[0].utilization[0]) == (250.0, None)
    assert [span.attempt for span in history.jobs] == [1]
    with pytest.raises(BadInputError, match="two points"):
        queue.history(job, points=1)


def test_curves_of_a_job(queue: stoker.Queue, store: Store) -> None:
    job = queue.submit("true")
    assert queue.curves(job) == []
    run(store, job.id, output="step=1 loss=2.0 lr=1\nstep=2 loss=1.5 lr=1\n")
    (curve,) = queue.curves(job, ["loss"])
    assert (curve.name, curve.axis, curve.at, curve.values) == ("loss", "step", [1.0, 2.0], [2.0, 1.5])
    assert [curve.name for curve in queue.curves(job)] == ["loss", "lr"]
    store.jobs.edit(job.id, {"metrics": ("lr",)})
    assert [curve.name for curve in queue.curves(job)] == ["lr"]


def test_wait_returns_when_the_job_ends(
    queue: stoker.Queue, url: str, rests: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the change listener can wake it: the next poll would come at its deadline.
    monkeypatch.setattr(client, "POLL_SECONDS", 600.0)
    monkeypatch.setitem(postgres.LISTENING, "connect_timeout", 60)
    jobs = queue.submit_many(["true"] * 2)

    def work() -> None:
        assert rests.wait(60)
        with open_queue(url) as store:
            for job in jobs:
                run(store, job.id, "failed")

    worker = threading.Thread(target=work)
    worker.start()
    begun = time.monotonic()
    found = queue.wait([jobs[1], jobs[0].id], timeout=90.0)
    assert time.monotonic() - begun < 60.0
    worker.join()
    assert [(job.id, job.state, job.exit_code) for job in found] == [
        (jobs[1].id, "failed", 1),
        (jobs[0].id, "failed", 1),
    ]
    assert queue.wait(jobs[0]).state == "failed"
    assert queue.wait([]) == []


def test_wait_polls_when_the_listener_cannot_listen(
    queue: stoker.Queue, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def fileno(self) -> int:
            return -1

        def poll(self) -> bool:
            return False

        def close(self) -> None:
            pass

    monkeypatch.setattr(Store, "listen", lambda _self: Broken())
    monkeypatch.setattr(client, "POLL_SECONDS", 0.05)
    job = queue.submit("true")
    with pytest.raises(TimeoutError, match=f"job {job.id} has not ended in time"):
        queue.wait(job, timeout=0.2)
    run(store, job.id)
    assert queue.wait(job, timeout=60).state == "succeeded"


def test_wait_raises_at_its_timeout(queue: stoker.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "POLL_SECONDS", 600.0)
    job = queue.submit("true", hold=True)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        queue.wait(job, timeout=0.1)
    assert time.monotonic() - begun < 60.0
    with pytest.raises(TimeoutError):
        queue.wait([job.id], timeout=0)


def test_wait_survives_an_unreachable_database(mortal_server: PostgresServer, rests: threading.Event) -> None:
    url = mortal_server.create_database()
    with init_queue(url) as store:
        (job,) = store.jobs.submit([JobSpec(command="true")])
    found = list[stoker.Job]()

    def wait() -> None:
        with stoker.Queue(url) as queue:
            found.append(queue.wait(job, timeout=90))

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert rests.wait(60)
    # The tests' server is not careful with what was written last.
    mortal_server.administer("CHECKPOINT")
    mortal_server.kill()
    mortal_server.start()
    with open_queue(url) as store:
        run(store, job)
    waiter.join(90)
    mortal_server.drop_database(url)
    assert [job.state for job in found] == ["succeeded"]


def test_pinned_job_needs_a_commit(queue: stoker.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(BadInputError, match="a pinned job needs a commit to run"):
        queue.submit("true", pin=True, directory=tmp_path)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    (tmp_path / "train.py").write_text("print(1)\n")
    commit = (*identity, "commit", "--quiet", "--message", "first")
    for words in (("init", "--quiet"), ("add", "train.py"), commit):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    job = queue.submit("true", pin=True, directory=tmp_path)
    assert (job.pin, len(job.commit or ""), job.dirty) == (True, 40, False)
    (tmp_path / "train.py").write_text("print(2)\n")
    with pytest.raises(BadInputError, match="has changes that are not: commit them"):
        queue.submit("true", pin=True, directory=tmp_path)
    assert queue.submit("true", pin=True, allow_dirty=True, directory=tmp_path).dirty is True


def test_active_python_environment_is_used_by_the_job(queue: stoker.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    assert queue.submit("true", environment={"A": "1"}).environment.keys() >= {"VIRTUAL_ENV", "PATH", "A"}
    assert queue.submit("true", bare_environment=True).environment == {}


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ([], {}, "a job needs a command"),
        ("", {}, "a job needs a command"),
        ("\ud800", {}, "must be text in UTF-8"),
        ("x" * 2**20, {}, "put it into a script"),
        ("train {batch_size}", {}, "batch_size: the command contains {batch_size}: give a batch size"),
        ([1, 2], {}, "command[0]: expected str, got int"),
        ("true", {"gpus": "two"}, "gpus: 'two' is not a whole number"),
        ("true", {"gpus": -1}, "gpus: must be between 0"),
        ("true", {"colour": "red"}, "with 'colour': there is no such option"),
        ("true", {"commit": "x"}, "with 'commit': there is no such option"),
        ("true", {"memory": "lots"}, "is not an amount of memory"),
        ("true", {"share": True}, "memory: a job that shares a GPU must say how much memory it needs"),
        ("true", {"time_limit": "soon"}, "is not a duration"),
        ("true", {"on_loss": "cry"}, "on_loss: 'cry' is not one of retry, hold"),
        ("true", {"policy": {"windows": 3}}, "no rule has a setting 'windows'"),
        ("true", {"policy": {"window": "x"}}, "the settings of the rule 'idle' are not valid"),
        ("true", {"policy": {"window": 0}}, "must be greater than zero"),
        ("true", {"environment": {"A=B": "1"}}, "cannot be set"),
        ("true", {"after": "nobody"}, "there is no job 'nobody'"),
        ("true", {"directory": "not/there"}, "is not there"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, command: Any, options: dict[str, Any], says: str) -> None:
    with stoker.Queue(str(tmp_path / "queue.db")) as queue:
        with pytest.raises(BadInputError) as refused:
            queue.submit(command, **options)
        assert says in str(refused.value)
        assert queue.counts() == {}


def test_string_is_not_accepted_as_a_list_of_commands(tmp_path: Path) -> None:
    with (
        stoker.Queue(str(tmp_path / "queue.db")) as queue,
        pytest.raises(BadInputError, match="takes several commands"),
    ):
        queue.submit_many("echo 1")


def test_client_and_command_line_use_the_same_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stoker.Queue() as queue:
        job = queue.submit("true")
    with open_queue() as store:
        assert store.jobs.get(job.id) == job
    config = tmp_path / "config" / "stoker" / "stoker.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'queue = "{tmp_path}/configured.db"\n')
    with stoker.Queue() as queue:
        assert repr(queue) == f"<stoker.Queue at {tmp_path}/configured.db>"
    monkeypatch.setenv("STOKER_QUEUE", f"{tmp_path}/variable.db")
    with stoker.Queue() as queue:
        assert "variable.db" in repr(queue)


def test_uninitialized_database_is_not_modified(postgres_url: str) -> None:
    with pytest.raises(StokerError, match="`stoker queue init` creates it"):
        stoker.Queue(postgres_url)


def test_every_job_field_is_an_argument_of_submit() -> None:
    chosen = {*editable(), "hold"} - {"command"}
    assert Options.__annotations__.keys() == chosen | {"allow_dirty", "bare_environment"}
