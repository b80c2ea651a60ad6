"""`stoker wait` as typed: it ends when the jobs have, with a code that says how."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from stoker.queue import Store, init_queue, open_queue
from tests.support.attempts import run, start, submit
from tests.support.command import stoker, stoker_command


@pytest.fixture(params=["sqlite", "postgres"])
def queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "postgres":
        monkeypatch.setenv("STOKER_QUEUE", request.getfixturevalue("postgres_url"))
    with init_queue() as opened:
        yield opened


class Waiting(NamedTuple):
    process: subprocess.Popen[str]

    def said(self) -> str:
        """The next thing it says beside its output."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def waiting() -> Iterator[Callable[..., Waiting]]:
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> Waiting:
        command = [stoker_command(), "wait", *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return Waiting(started[-1])

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_wait_ends_when_the_last_job_has_succeeded(queue: Store, waiting: Callable[..., Waiting]) -> None:
    first, second = submit(queue, "a", "b")
    wait = waiting(first, second)
    assert "no worker is there" in wait.said()  # so it waits
    run(queue, first, "succeeded", 0)
    assert f"job b ({second}): " in wait.said()
    run(queue, second, "succeeded", 0)
    assert wait.ended() == (0, "", "")


def test_unsuccessful_jobs_are_listed_with_code_1(queue: Store) -> None:
    good, bad, unwanted = submit(queue, "a", "b", "c", tags=("sweep",))
    run(queue, good, "succeeded", 0)
    run(queue, bad, "failed", 9)
    queue.jobs.cancel([unwanted])
    done = stoker("wait", "--tag", "sweep")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert done.err.startswith("stoker: 2 of 3 jobs did not succeed: ")
    assert f"b ({bad}) failed with code 9" in done.err
    assert f"c ({unwanted}) was cancelled" in done.err
    assert stoker("wait", bad).err == f"stoker: the job did not succeed: b ({bad}) failed with code 9\n"


def test_wait_includes_retries(queue: Store, waiting: Callable[..., Waiting]) -> None:
    (job,) = submit(queue, "a", retries=1, backoff=0.0)
    wait = waiting(job)
    wait.said()
    run(queue, job, "failed", 1)
    run(queue, job, "succeeded", 0)
    assert wait.ended()[0] == 0


def test_timeout_exits_with_124_and_lists_unfinished_jobs(queue: Store) -> None:
    slow, done_behind_it = submit(queue, "a", "b")
    start(queue, slow)
    run(queue, done_behind_it, "succeeded", 0)
    done = stoker("wait", slow, done_behind_it, "--timeout", "200ms")
    assert (done.code, done.err) == (124, f"stoker: 1 of 2 jobs had not ended after 0.2s: a ({slow}): running\n")


def test_all_selects_unfinished_jobs(queue: Store, waiting: Callable[..., Waiting]) -> None:
    old, new = submit(queue, "a", "b")
    run(queue, old, "failed", 1)
    wait = waiting("--all", "--json")
    wait.said()
    run(queue, new, "succeeded", 0)
    code, out, _err = wait.ended()
    assert code == 0
    assert f'"id": "{new}"' in out
    assert f'"id": "{old}"' not in out
    assert stoker("wait", "--all").code == 0


def test_job_that_cannot_start_is_reported_and_waited_for(queue: Store, waiting: Callable[..., Waiting]) -> None:
    first, second = submit(queue, "a", "b")
    queue.jobs.edit(second, {"after": (first,)})
    run(queue, first, "failed", 1)
    wait = waiting(second)
    assert f"can never start: it comes after {first}, which failed" in wait.said()
    queue.jobs.cancel([second])
    assert wait.ended()[0] == 1


def test_ctrl_c_ends_wait_cleanly(queue: Store, waiting: Callable[..., Waiting]) -> None:
    wait = waiting(*submit(queue, "a"))
    wait.said()
    wait.process.send_signal(signal.SIGINT)
    code, out, err = wait.ended()
    assert (code, out, err.strip()) == (130, "", "")


def test_invalid_input_is_refused_in_one_sentence(queue: Store) -> None:
    (job,) = submit(queue, "a")
    for arguments in ([], [job, "--all"], ["--tag", "nobody"], ["nobody"], [job, "--timeout", "soon"]):
        done = stoker("wait", *arguments)
        assert (done.code, len(done.err.splitlines())) == (2, 1), arguments


def test_wait_handles_many_jobs_that_end_concurrently(queue: Store, waiting: Callable[..., Waiting]) -> None:
    jobs = submit(queue, *(["x"] * 40))
    url = os.environ.get("STOKER_QUEUE")

    def work(some: list[str]) -> None:
        with open_queue(url) as own:
            for job in some:
                run(own, job, "succeeded", 0)

    wait = waiting("--all")
    wait.said()
    workers = [threading.Thread(target=work, args=(jobs[half::2],)) for half in (0, 1)]
    for worker in workers:
        worker.start()
    assert wait.ended()[0] == 0
    for worker in workers:
        worker.join()
