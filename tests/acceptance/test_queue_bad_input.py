"""Whatever is wrong with what was typed or with the queue: one clear sentence, the right code, and nothing changed."""

import contextlib
import os
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stoker.queue import JobSpec, Store, View, WorkerGpu, init_queue
from stoker.queue.driver import VERSION
from tests.support.command import Finished, stoker
from tests.support.postgres import PASSWORD, SETTINGS, PostgresServer, postgres_programs
from tests.support.queue_jobs import submit

AWKWARD = "echo 'it''s' \"quoted\" \\ $HOME %s `x` {other} #no\n\tsecond line\r\n\n🔥 ﷽ \u202e end"
MEBIBYTE = 2**20


class World:
    """A queue with two jobs, and places where there is no good one."""

    def __init__(self, directory: Path, queue: Store, request: pytest.FixtureRequest) -> None:
        self.directory = directory
        self.queue = queue
        self.first, self.second = submit(queue, "first", "second")
        self.later = contextlib.ExitStack()
        self._request = request
        self._watched: list[Callable[[], object]] = [lambda: (queue.jobs.find(), queue.paused(), queue.jobs.counts())]

    def fixture(self, name: str) -> Any:
        return self._request.getfixturevalue(name)

    def file(self, name: str, content: bytes) -> str:
        """A file that must stay as it is."""
        path = self.directory / name
        path.write_bytes(content)
        return self.watched_file(path)

    def watched_file(self, path: Path) -> str:
        self.watch(path.read_bytes)
        return str(path)

    def watch(self, what: Callable[[], object]) -> None:
        self._watched.append(what)

    def seen(self) -> list[object]:
        return [look() for look in self._watched]

    def queue_of_many(self) -> Path:
        path = self.directory / "many.db"
        with init_queue(str(path)) as store:
            store.jobs.submit([JobSpec(command=f"echo {number} {'x' * 200}") for number in range(500)])
        return path


class TcpServer(PostgresServer):
    """The server on a port of this machine, as another machine would reach it."""

    def __init__(self, programs: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        super().__init__(programs, (*SETTINGS, "listen_addresses=127.0.0.1", f"port={self._port}"))

    def url(self, database: str, *, user: str = "stoker", password: str = PASSWORD) -> str:
        return f"postgresql://{user}:{password.replace(' ', '%20')}@127.0.0.1:{self._port}/{database}"


@pytest.fixture(scope="module")
def tcp_server(postgres_server: PostgresServer) -> Iterator[TcpServer]:
    """`postgres_server` has found out whether there can be one."""
    programs = postgres_programs()
    assert programs is not None
    server = _started(programs)
    try:
        yield server
    finally:
        server.stop()


def _started(programs: Path, tries: int = 5) -> TcpServer:
    """Between finding a free port and listening on it, another process may take it: then there is another one."""
    server = TcpServer(programs)
    try:
        server.start()
    except AssertionError:
        server.stop()
        if tries == 1:
            raise
        return _started(programs, tries - 1)
    return server


@pytest.fixture
def world(tmp_path: Path, queue: Store, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path, queue, request)
    with made.later:
        yield made


# What is prepared: each gives the words after `stoker`.


def typed(*words: str) -> Callable[[World], list[str]]:
    return lambda _world: list(words)


def on_file(content: bytes, *words: str) -> Callable[[World], list[str]]:
    return lambda world: [words[0], "--queue", world.file("a file", content), *words[1:]]


def ambiguous(world: World) -> list[str]:
    world.queue.jobs.submit([JobSpec(command="-", id="abcdef01"), JobSpec(command="-", id="abcdef02")])
    return ["cancel", "abcdef0"]


def same_name(world: World) -> list[str]:
    submit(world.queue, "twin", "twin")
    return ["cancel", "twin"]


def cycle(world: World) -> list[str]:
    world.queue.jobs.edit(world.second, {"after": (world.first,)})
    return ["edit", "first", "--after", "second"]


def long_cycle(world: World) -> list[str]:
    (third,) = submit(world.queue, "third", after_any=(world.second,))
    world.queue.jobs.edit(world.second, {"after": (world.first,)})
    return ["edit", "first", "--after-any", third]


def other_database(world: World) -> list[str]:
    path = world.directory / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
        connection.commit()
    return ["submit", "--queue", world.watched_file(path), "--", "true"]


def newer(world: World) -> list[str]:
    path = world.queue_of_many()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE stoker_queue SET version = 99")
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return ["cancel", "--all", "--queue", world.watched_file(path)]


def corrupt(world: World) -> list[str]:
    path = world.queue_of_many()
    content = bytearray(path.read_bytes())
    content[8192:] = os.urandom(len(content) - 8192)
    path.write_bytes(content)
    return ["cancel", "--all", "--queue", world.watched_file(path)]


def full_disk(world: World) -> list[str]:
    if os.geteuid() != 0 and not os.environ.get("CI"):
        pytest.skip("needs root for a small disk")
    disk = world.directory / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], check=True)
    world.later.callback(subprocess.run, ["umount", str(disk)], check=True)
    store = world.later.enter_context(init_queue(str(disk / "queue.db")))
    submit(store, "kept")
    world.watch(store.jobs.find)
    with contextlib.suppress(OSError), (disk / "fill").open("wb", buffering=0) as fill:
        while True:
            fill.write(b"0" * 4096)
    many = world.directory / "many.txt"
    many.write_text("".join(f"echo {number} {'x' * 200}\n" for number in range(1000)))
    return ["submit", "--queue", store.place, "--from", str(many)]


def no_queue_in_postgres(world: World) -> list[str]:
    url = str(world.fixture("postgres_url"))
    world.watch(lambda: _tables(url))
    return ["submit", "--queue", url, "--", "true"]


def foreign_postgres(world: World) -> list[str]:
    url = str(world.fixture("postgres_url"))
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE stoker_queue (colour TEXT)")
    world.watch(lambda: _tables(url))
    return ["cancel", "--all", "--queue", url]


def _tables(url: str) -> list[Any]:
    import psycopg

    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        ).fetchall()


def wrong_password(world: World) -> list[str]:
    return ["cancel", "--all", "--queue", world.fixture("tcp_server").url("postgres", password="secret-mistake")]


def no_database(world: World) -> list[str]:
    return ["cancel", "--all", "--queue", world.fixture("tcp_server").url("nowhere")]


def huge_command(world: World) -> list[str]:
    path = world.directory / "huge.txt"
    path.write_text("echo " + "x" * MEBIBYTE)
    return ["submit", "--from", str(path)]


def huge_edit(world: World) -> list[str]:
    path = world.directory / "huge.toml"
    path.write_text(f'command = "echo {"x" * MEBIBYTE}"\n')
    return ["edit", "first", "--from", str(path)]


# What is odd but accepted: each looks at what became of it.


def why_says_so(world: World, job: str) -> None:
    gpus = tuple(WorkerGpu(uuid=f"GPU-{index}", index=index, name="H100") for index in range(2))
    world.queue.workers.heartbeat("worker-1", "alpha", View(gpus=gpus))
    said = stoker("why", job)
    assert (said.code, "64 GPUs" in said.out) == (0, True), said
    assert "no machine" in said.out or "no worker" in said.out, said


def same_text(_world: World, job: str) -> None:
    assert stoker("show", job, "--json").json()["job"]["command"] == AWKWARD


def same_words(_world: World, job: str) -> None:
    shown = stoker("show", job, "--json").json()["job"]
    assert (shown["command"], shown["name"]) == (["python", AWKWARD, "", "--x={y}"], "🔥 'n' \"m\"")


class Case(NamedTuple):
    words: Callable[[World], list[str]]
    code: int
    says: str
    """For what is refused: a part of the sentence."""
    accepted: Callable[[World, str], None] | None = None


CASES = {
    "unknown id": Case(typed("cancel", "00000000"), 2, "there is no job '00000000'"),
    "unknown name": Case(typed("hold", "nobody"), 2, "there is no job 'nobody'"),
    "empty name": Case(typed("retry", ""), 2, "there is no job ''"),
    "bytes as a name": Case(typed("release", os.fsdecode(b"\xff\xfe")), 2, "there is no job"),
    "ambiguous prefix": Case(ambiguous, 2, "'abcdef0' fits several jobs (abcdef01, abcdef02): write more of it"),
    "ambiguous name": Case(same_name, 2, "'twin' fits several jobs"),
    "one unknown among known": Case(typed("cancel", "first", "nobody"), 2, "there is no job 'nobody'"),
    "unknown job to show": Case(typed("show", "nobody"), 2, "nobody"),
    "unknown job to explain": Case(typed("why", "nobody"), 2, "there is no job 'nobody'"),
    "cycle": Case(cycle, 2, "would wait for itself"),
    "cycle of three": Case(long_cycle, 2, "would wait for itself"),
    "after itself": Case(typed("edit", "first", "--after", "first"), 2, "would wait for itself"),
    "after nobody": Case(typed("edit", "first", "--after", "nobody"), 2, "there is no job 'nobody'"),
    "submitted after nobody": Case(typed("submit", "--after", "nobody", "--", "true"), 2, "there is no job 'nobody'"),
    "no queue": Case(typed("cancel", "x", "--queue", "/nowhere/queue.db"), 1, "the first `stoker submit` creates it"),
    "no address": Case(typed("cancel", "x", "--queue", "gopher://x"), 2, "is not the address of a queue"),
    "another SQLite database": Case(other_database, 1, "is a database, but not a queue of Stoker's"),
    "a text file": Case(on_file(b"dear journal\n" * 500, "cancel", "x"), 1, "is not a queue, nor any SQLite file"),
    "a text file to submit to": Case(on_file(b"dear journal\n" * 500, "submit", "true"), 1, "is not a queue"),
    "a directory": Case(typed("cancel", "x", "--queue", "/"), 1, "the queue / cannot be used"),
    "a corrupt file": Case(corrupt, 1, "is damaged"),
    "a full disk": Case(full_disk, 1, "its disk is full"),
    "a newer version": Case(newer, 1, f"has version 99, and this Stoker uses version {VERSION}"),
    "PostgreSQL without a queue": Case(no_queue_in_postgres, 1, "`stoker queue init` creates it"),
    "PostgreSQL of somebody else": Case(foreign_postgres, 1, "is not a queue of Stoker"),
    "a wrong password": Case(wrong_password, 1, "refused the password"),
    "no such database": Case(no_database, 1, 'database "nowhere" does not exist'),
    "a command of 1 MiB": Case(huge_command, 2, "put it into a script"),
    "a command of 1 MiB by edit": Case(huge_edit, 2, "put it into a script"),
    "an empty command": Case(typed("submit", ""), 2, "a job needs a command"),
    "no command": Case(typed("submit"), 2, "there is no command to submit"),
    "bytes as a command": Case(typed("submit", os.fsdecode(b"echo \xff")), 2, "UTF-8"),
    "bytes as a tag": Case(typed("edit", "first", "--tag", os.fsdecode(b"\xff")), 2, "UTF-8"),
    "two lines as a tag": Case(typed("edit", "first", "--tag", "a\nb"), 2, "is not one line"),
    "GPUs below zero": Case(typed("submit", "--gpus", "-1", "true"), 2, "--gpus"),
    "GPUs as a word": Case(typed("edit", "first", "--gpus", "many"), 2, "--gpus"),
    "GPUs beyond counting": Case(typed("edit", "first", "--gpus", "9" * 20), 2, "is not a whole number"),
    "memory in parsecs": Case(typed("edit", "first", "--memory", "5parsecs"), 2, "--memory: '5parsecs'"),
    "memory beyond counting": Case(
        typed("edit", "first", "--memory", "9" * 15 + "TiB"), 2, "--memory: must be between"
    ),
    "a priority too large": Case(typed("edit", "first", "--priority", "9" * 12), 2, "must be between"),
    "retries below zero": Case(typed("submit", "--retries", "-2", "true"), 2, "--retries"),
    "a time limit in words": Case(typed("submit", "--time-limit", "soon", "true"), 2, "--time-limit: 'soon'"),
    "a time limit of nothing": Case(typed("edit", "first", "--time-limit", "0s"), 2, "must be greater than zero"),
    "a back-off in years": Case(typed("edit", "first", "--backoff", "1y"), 2, "--backoff: '1y'"),
    "a batch size in words": Case(typed("edit", "first", "--batch-size", "big"), 2, "--batch-size: 'big'"),
    "a batch size of nothing": Case(typed("edit", "first", "--batch-size", "0"), 2, "must be between 1"),
    "an age in words": Case(typed("clean", "--older-than", "ages"), 2, "--older-than: 'ages'"),
    "a variable without a value": Case(typed("edit", "first", "--env", "A"), 2, "write NAME=VALUE"),
    "a rule that cannot be": Case(typed("edit", "first", "--for", "1s", "--idle-every", "1h"), 2, "not a single look"),
    "a text that is not there": Case(typed("edit", "first", "--from", "/nowhere"), 2, "/nowhere cannot be read"),
    "text and options": Case(typed("edit", "first", "--from", "x", "--gpus", "1"), 2, "leave one of them out"),
    "more GPUs than exist anywhere": Case(typed("submit", "--gpus", "64", "--", "true"), 0, "", why_says_so),
    "newlines, quotes and emoji": Case(typed("submit", "--", AWKWARD), 0, "", same_text),
    "newlines, quotes and emoji in words": Case(
        typed("submit", "--name", "🔥 'n' \"m\"", "--", "python", AWKWARD, "", "--x={y}"), 0, "", same_words
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_invalid_input_is_refused_and_unusual_input_is_accepted(case: Case, world: World) -> None:
    words = case.words(world)
    before = world.seen()
    done = stoker(*words)
    if case.accepted is not None:
        assert (done.code, done.err) == (0, "")
        case.accepted(world, done.out.strip())
        return
    assert case.says in done.err, done
    assert (done.code, done.out) == (case.code, "")
    _is_one_sentence(done)
    assert world.seen() == before


def _is_one_sentence(done: Finished) -> None:
    assert done.err.startswith("stoker: ")
    assert done.err.count("\n") == 1, done.err
    assert len(done.err) < 600
    for unwanted in ("internal error", "secret-mistake", "sqlite3.", "psycopg."):
        assert unwanted not in done.err
