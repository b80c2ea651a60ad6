"""A real, private PostgreSQL for the tests: started once per session, a fresh database for each test."""

import contextlib
import fcntl
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from stoker.procfs import stat
from stoker.runs.processes.tree import children
from tests.support.waiting import wait_for

# Seconds, on a machine that runs other tests at the same time.
PATIENCE = 60.0
# Read here, before a fixture removes Stoker's variables.
VERSION = os.environ.get("STOKER_TESTS_POSTGRES", "")
PASSWORD = "a password of the tests"
PGBOUNCER = "/usr/sbin/pgbouncer"
# Held for as long as the server is needed.
LOCK = "in-use"
# In memory, where there is enough of it: a new database is some hundred files.
MEMORY = Path("/dev/shm")
ENOUGH = 2**31
# Nothing here must outlive the tests, so nothing is waited for until it is on the disk.
SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=60", "shared_buffers=32MB")
# What was committed is there again after the server was killed, though not after the machine was.
DURABLE = (*SETTINGS, "synchronous_commit=on")


class PostgresServer:
    """A server on a socket in a separate directory."""

    def __init__(self, programs: Path, settings: tuple[str, ...] = SETTINGS) -> None:
        self._programs = programs
        self._settings = settings
        self.directory, self._ours = _new_directory()
        self._process: subprocess.Popen[bytes] | None = None
        self._names = itertools.count(1)
        self._left: list[str] = []
        self._frozen: set[int] = set()
        self._administrator: Any = None
        """A connection that is kept: to make one takes longer than most of what is asked of it."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    def start(self) -> None:
        """Starts it, or starts it again after `kill`; nothing happens when it runs."""
        if self._process is not None:
            return
        if not (self.directory / "data").exists():
            self._initialise()
        settings = itertools.chain.from_iterable(("-c", setting) for setting in self._settings)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *_unprivileged("--pdeathsig", "QUIT"),
                    str(self._programs / "postgres"),
                    *("-D", str(self.directory / "data"), "-k", str(self.directory), "-c", "listen_addresses="),
                    *settings,
                ],
                cwd=self.directory,
                # The server is nobody's job: it must not be found by what the test that needs it first set.
                env={name: value for name, value in os.environ.items() if not name.startswith("STOKER_")},
                stdout=log,
                stderr=log,
            )
        wait_for(self._answers, deadline=PATIENCE, named=f"PostgreSQL's start (see {self.directory / 'log'})")

    def stop(self) -> None:
        self._end(signal.SIGINT)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._ours.close()

    def kill(self) -> None:
        """As if the machine had lost it: all connections break at once."""
        self._end(signal.SIGQUIT)

    def kill_hard(self) -> None:
        """kill -9: what serves the connections finds out by itself, a moment later."""
        serving = children(self._process.pid) if self._process is not None else []
        self._end(signal.SIGKILL)
        wait_for(lambda: not any(found and not found.is_zombie for found in map(stat, serving)), deadline=PATIENCE)

    def freeze(self) -> None:
        """It answers nothing until `thaw`, and no connection breaks."""
        self._frozen = self._stand_still()

    def _stand_still(self) -> set[int]:
        assert self._process is not None
        server = self._process.pid
        stopped: set[int] = set()
        # The server first: what it starts until then is found in the next round.
        while fresh := {server, *children(server)} - stopped:
            for pid in sorted(fresh, key=lambda pid: pid != server):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh
        return stopped

    def thaw(self) -> None:
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen = set()

    def url(self, database: str, *, user: str = "stoker", password: str = PASSWORD) -> str:
        return f"postgresql://{user}:{password.replace(' ', '%20')}@/{database}?host={self.directory}"

    def create_database(self) -> str:
        """The url of a fresh one."""
        while self._left:
            self.drop_database(self._left.pop())
        name = f"test_{next(self._names)}"
        # Copied as files instead of through the log, which takes twice as long.
        self.administer(f"CREATE DATABASE {name}" + (" STRATEGY FILE_COPY" if self._version() >= 15_00_00 else ""))
        return self.url(name)

    def leave_database(self, url: str) -> None:
        """It is dropped before the next one is made: right after its last connection that takes a tenth of a second."""
        self._left.append(url)

    def drop_database(self, url: str) -> None:
        name = url.split("?", maxsplit=1)[0].rsplit("/", maxsplit=1)[1]
        self.administer(f"DROP DATABASE {name} WITH (FORCE)")

    def administer(self, statement: str) -> None:
        import psycopg

        try:
            self._administration().execute(statement.encode())
        except psycopg.OperationalError:
            self._dismiss_administrator()
            raise

    def _administration(self) -> Any:
        import psycopg

        if self._administrator is None:
            self._administrator = psycopg.connect(self.url("postgres"), autocommit=True)
        return self._administrator

    def _version(self) -> int:
        version: int = self._administration().info.server_version
        return version

    def _initialise(self) -> None:
        secret = self.directory / "password"
        secret.write_text(PASSWORD)
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            for path in (self.directory, secret):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        subprocess.run(
            [
                *_unprivileged(),
                str(self._programs / "initdb"),
                *("-D", str(self.directory / "data"), "-U", "stoker", "--pwfile", str(secret)),
                *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"),
            ],
            cwd=self.directory,
            check=True,
            capture_output=True,
        )

    def _answers(self) -> bool:
        import psycopg

        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "log").read_text()
        with contextlib.suppress(psycopg.OperationalError):
            self.administer("SELECT 1")
            return True
        return False

    def _end(self, how: signal.Signals) -> None:
        self._dismiss_administrator()
        self.thaw()
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=PATIENCE)
            self._process = None

    def _dismiss_administrator(self) -> None:
        if self._administrator is not None:
            self._administrator.close()
            self._administrator = None


def _new_directory() -> tuple[Path, IO[bytes]]:
    """And its lock. Removes those first that runs have left which were killed."""
    in_memory = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ENOUGH
    place = MEMORY if in_memory else Path(tempfile.gettempdir())
    for lock in place.glob(f"stoker-pg-*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as somebodys:
            fcntl.flock(somebodys, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="new-stoker-pg-", dir=place))
    ours = (made / LOCK).open("wb")
    fcntl.flock(ours, fcntl.LOCK_EX)
    # Not found by another before it is locked.
    return made.rename(place / made.name.removeprefix("new-")), ours


def _unprivileged(*options: str) -> list[str]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() == 0:
        return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *options]
    return ["setpriv", *options] if options else []


def postgres_programs() -> Path | None:
    """The directory of the server's programs: of the version in `make test POSTGRES=16`, else of the newest."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if VERSION:
        return next((initdb.parent for initdb in installed if initdb.parts[-3] == VERSION), None)
    found = str(installed[-1]) if installed else shutil.which("initdb")
    return Path(found).parent if found else None


def _missing(what: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing, and under CI nothing is skipped for that")
    pytest.skip(f"{what} is missing: `make test` installs it where it may")


@contextlib.contextmanager
def running_server(settings: tuple[str, ...] = SETTINGS) -> Iterator[PostgresServer]:
    if importlib.util.find_spec("psycopg") is None:
        _missing("psycopg")
    programs = postgres_programs()
    if programs is None:
        _missing(f"PostgreSQL (Debian's package postgresql{VERSION and f'-{VERSION}'})")
        raise AssertionError("unreachable")
    server = PostgresServer(programs, settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class PgBouncer:
    """A connection pooler before a server, on a socket in a separate directory."""

    PORT = 6432

    def __init__(
        self, server: PostgresServer, mode: str, directory: Path, connections: int = 3, clients: int = 100
    ) -> None:
        self._directory = directory
        settings = directory / "pgbouncer.ini"
        settings.write_text(
            f"""
[databases]
* = host={server.directory} user=stoker password='{PASSWORD}' client_encoding=UTF8
[pgbouncer]
listen_port = {self.PORT}
unix_socket_dir = {directory}
auth_type = any
pool_mode = {mode}
default_pool_size = {connections}
max_client_conn = {clients}
logfile = {directory / "log"}
pidfile =
"""
        )
        directory.chmod(0o777)
        self._process = subprocess.Popen([*_unprivileged("--pdeathsig", "QUIT"), PGBOUNCER, "-q", str(settings)])

    @property
    def pid(self) -> int:
        return self._process.pid

    def url(self, database: str) -> str:
        """The address of a database of the server, through the pooler."""
        name = database.split("?", maxsplit=1)[0].rsplit("/", maxsplit=1)[1]
        return f"postgresql://stoker@/{name}?host={self._directory}&port={self.PORT}"

    def wait_until_there(self) -> None:
        wait_for(self._listens, deadline=PATIENCE, named=f"PgBouncer's start (see {self._directory / 'log'})")

    def _listens(self) -> bool:
        # Its socket is there before it listens.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self._directory / f".s.PGSQL.{self.PORT}"))
            return True
        return False

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=PATIENCE)


@contextlib.contextmanager
def running_pooler(server: PostgresServer, mode: str) -> Iterator[PgBouncer]:
    if not Path(PGBOUNCER).exists():
        _missing("PgBouncer (Debian's package pgbouncer)")
    with tempfile.TemporaryDirectory(prefix="stoker-pgbouncer-") as directory:
        pooler = PgBouncer(server, mode, Path(directory))
        try:
            pooler.wait_until_there()
            yield pooler
        finally:
            pooler.stop()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def mortal_server() -> Iterator[PostgresServer]:
    """A server that a test may kill and restart without losing committed data."""
    with running_server(DURABLE) as server:
        yield server


@pytest.fixture
def mortal_url(mortal_server: PostgresServer) -> Iterator[str]:
    """A database on that one; it is up when the test begins, and when it has ended."""
    url = mortal_server.create_database()
    yield url
    mortal_server.start()
    mortal_server.leave_database(url)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A database of the test's own."""
    url = postgres_server.create_database()
    yield url
    postgres_server.leave_database(url)
