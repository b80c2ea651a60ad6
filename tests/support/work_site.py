"""A queue, a simulated machine, and real workers on it."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.queue import Attempt, Job, JobSpec, Store, init_queue
from stoker.status.forecast import why
from tests.support.command import Finished, stoker, stoker_command
from tests.support.waiting import kill_all, wait_for

# On a machine that runs other tests at the same time.
PATIENCE = 60.0


def troubled(trouble: str) -> tuple[str, ...]:
    """For `WorkSite.work(prefix=…)`: a worker whose processes all begin with these lines of Python.

    `failing(name, number)` makes the function of that name raise this error as long as there is a file `trouble` in the
    worker's home, and writes a file `failed` there each time.
    """
    return (sys.executable, "-c", f"{_FAILING}\n{trouble}\nsys.argv = sys.argv[1:]\nsys.exit(main())")


_FAILING = """
import errno, importlib, os, sys
from pathlib import Path
from stoker.cli import main

home = Path(os.environ["STOKER_HOME"])

def failing(name, number, caller=None):
    parts = name.split(".")
    owner = importlib.import_module(".".join(part for part in parts[:-1] if part.islower()))
    for part in [part for part in parts[:-1] if not part.islower()]:
        owner = getattr(owner, part)
    really = getattr(owner, parts[-1])
    def fails(*arguments, **options):
        concerned = caller is None or sys._getframe(1).f_code.co_name == caller
        if concerned and os.path.exists(home / "trouble"):
            (home / "failed").touch()
            raise OSError(number, os.strerror(number))
        return really(*arguments, **options)
    setattr(owner, parts[-1], fails)
"""


class RunningWorker:
    """`stoker work` in the background."""

    def __init__(
        self,
        home: Path,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        prefix: tuple[str, ...] = (),
        said: Path | None = None,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self._said = said or home / f"worker-{time.monotonic_ns()}.txt"
        with self._said.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, stoker_command(), "work", *arguments],
                env={**os.environ, **environment, "STOKER_HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def wait_until_it_says(self, pattern: str) -> None:
        wait_for(lambda: re.search(pattern, self.said), deadline=PATIENCE, named=f"{pattern!r} in {self.said!r}")

    def ready(self) -> "RunningWorker":
        """Once it takes jobs."""
        self.wait_until_it_says("at work for")
        return self

    def stop(self) -> int:
        """As Ctrl-C would: its jobs go on."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=PATIENCE)


class WorkSite:
    """One queue, one machine that is simulated, any number of workers. Nothing of it survives `close`."""

    def __init__(self, directory: Path, store: Store, machine: str = "sim:2", queue: str | None = None) -> None:
        """`queue` is its address, unless it is the file that `stoker` finds by itself."""
        self.directory = directory
        self.store = store
        self.home = Path(os.environ["STOKER_HOME"])
        self._homes = {self.home}
        self.environment = {"STOKER_GPUS": machine, "STOKER_SIM_DIR": str(directory / "sim")}
        if queue is not None:
            self.environment["STOKER_QUEUE"] = queue
        self._children: list[subprocess.Popen[bytes]] = []
        self._workers: list[RunningWorker] = []

    def uuid(self, index: int) -> str:
        return f"GPU-51000000-0000-4000-8000-{index:012d}"

    # The commands

    def stoker(self, *arguments: str, timeout: float = 60.0) -> Finished:
        return stoker(*arguments, environment=self.environment, timeout=timeout)

    def work(
        self,
        *arguments: str,
        home: Path | None = None,
        environment: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        said: Path | None = None,
    ) -> RunningWorker:
        """A worker in the background; give a second one another home. `prefix` is a program that becomes it.

        `said` is the file for what it says, unless that belongs into its home.
        """
        place = home or self.home
        self._homes.add(place)
        worker = RunningWorker(place, arguments, self.environment | (environment or {}), prefix, said)
        self._children.append(worker.process)
        self._workers.append(worker)
        return worker

    def work_until_empty(self, *arguments: str) -> Finished:
        done = self.stoker("work", "--until-empty", *arguments)
        assert done.code == 0, done.err
        return done

    def foreigner(self, *options: str) -> subprocess.Popen[bytes]:
        """A process of another user on a GPU, once it is there."""
        process = subprocess.Popen(
            [stoker_command(), "sim", "load", *options],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self._children.append(process)
        assert process.stdout is not None
        assert b"holds" in process.stdout.readline()
        return process

    # Jobs

    def submit(self, command: str | tuple[str, ...], **asked: object) -> str:
        """Without a GPU and in the site's directory, unless something else is asked for."""
        usual: dict[str, object] = {"gpus": 0, "directory": str(self.directory), "policy": {"idle": False}}
        return self.store.jobs.submit([JobSpec(command=command, **(usual | asked))])[0]  # type: ignore[arg-type]  # by name

    def until(self, flag: str) -> str:
        """A command that runs until `create_flag`."""
        return f"until [ -e {shlex.quote(flag)} ]; do sleep 0.05; done"

    def create_flag(self, flag: str) -> None:
        (self.directory / flag).touch()

    def job(self, name: str) -> Job:
        return self.store.jobs.get(name)

    def last_attempt(self, name: str) -> Attempt:
        return self.store.attempts.of(name)[-1]

    def wait_until(self, name: str, *states: str, deadline: float = PATIENCE) -> Job:
        """Until the job is in one of these states."""

        def there() -> Job | None:
            job = self.job(name)
            return job if job.state in states else None

        try:
            return wait_for(there, deadline=deadline, named=f"that job {name} is {' or '.join(states)}")
        except AssertionError as error:
            said = "\n".join(worker.said for worker in self._workers)
            raise AssertionError(f"{error}: it is {self.job(name).state}, and the worker printed\n{said}") from None

    def wait_for_why(self, name: str, pattern: str) -> str:
        """What `stoker why -v` says of it, once that fits. Asked as that asks, without the start of a command."""
        ends = time.monotonic() + PATIENCE
        while True:
            reason = why(self.store, self.job(name))
            if re.search(pattern, said := "\n".join([f"{name}: {reason.reason}", *reason.details, ""])):
                return said
            assert time.monotonic() < ends, f"`stoker why` never said {pattern!r}, but {said!r}"
            time.sleep(0.01)

    def output(self, name: str, number: int = 1) -> Path:
        return self.home / "attempts" / f"{name}-{number}" / "output"

    # Processes

    def processes(self) -> dict[int, str]:
        """Everything that was started with one of the site's homes in its environment, by pid: what it is called."""
        marks = {f"STOKER_HOME={home}".encode() for home in self._homes}
        found: dict[int, str] = {}
        for place in Path("/proc").iterdir():
            if place.name.isdigit():
                with contextlib.suppress(OSError):
                    if marks.intersection((place / "environ").read_bytes().split(b"\0")):
                        found[int(place.name)] = (place / "comm").read_text().strip()
        found.pop(os.getpid(), None)
        return found

    def close(self) -> None:
        kill_all(self.processes)
        for child in self._children:
            child.kill()
            child.wait(timeout=PATIENCE)
            if child.stdout is not None:
                child.stdout.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[WorkSite]:
    """Two simulated GPUs, and a SQLite queue."""
    place = tmp_path / "site"
    place.mkdir()
    with init_queue() as store, contextlib.closing(WorkSite(place, store)) as found:
        yield found
