"""`stoker move`: which of the waiting jobs comes earlier."""

import pytest

from stoker.queue import Store
from tests.support.command import stoker
from tests.support.queue_jobs import start, submit


def order(queue: Store) -> str:
    return "".join(job.name for job in queue.jobs(states=["queued"], order="queue"))


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["first", "c"], "cabde"),
        (["last", "b"], "acdeb"),
        (["up", "c"], "acbde"),
        (["down", "c"], "abdce"),
        (["first", "e", "c"], "ceabd"),
        (["last", "b", "a"], "cdeab"),
        (["up", "b", "c"], "bcade"),
        (["down", "b", "c"], "adbce"),
        (["up", "a", "b", "d"], "abdce"),
        (["down", "e"], "abcde"),
    ],
)
def test_jobs_go_where_they_are_told_and_keep_their_order(queue: Store, words: list[str], becomes: str) -> None:
    submit(queue, *"abcde")
    done = stoker("move", *words)
    assert done.code == 0, done.err
    assert order(queue) == becomes
    assert done.out.count(f"moved {words[0]}") == len(words) - 1


def test_a_job_stays_behind_those_of_a_higher_priority(queue: Store) -> None:
    submit(queue, "a", priority=1)
    submit(queue, "b", "c")
    assert stoker("move", "first", "c").code == 0
    assert stoker("move", "up", "c").code == 0
    assert order(queue) == "acb"


def test_what_runs_is_not_moved_and_what_is_held_is(queue: Store) -> None:
    runs, held, _free = submit(queue, "runs", "held", "free")
    start(queue, runs)
    queue.hold([held])
    done = stoker("move", "last", "runs", "held")
    assert (done.code, done.out) == (0, f"{held} (held): moved last\n")
    assert done.err == f"stoker: job {runs} (runs) was not moved: it is running\n"
    assert stoker("move", "last", "runs").code == 1


def test_a_rehearsal_moves_nothing(queue: Store) -> None:
    submit(queue, "a", "b")
    assert "would be moved first" in stoker("move", "first", "b", "--dry-run").out
    assert order(queue) == "ab"


def test_the_place_comes_before_the_jobs(queue: Store) -> None:
    submit(queue, "a", "b")
    done = stoker("move", "b", "first")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "'up', 'down', 'first', 'last'" in done.err
    assert order(queue) == "ab"
