"""`stoker move`: which of the waiting jobs comes earlier."""

import pytest

from stoker.queue import Store
from tests.support.command import stoker
from tests.support.queue_jobs import start, submit


def order(queue: Store) -> str:
    return "".join(job.name for job in queue.jobs.find(states=["queued"], order="queue"))


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
def test_moved_jobs_keep_their_order(queue: Store, words: list[str], becomes: str) -> None:
    submit(queue, *"abcde")
    done = stoker("move", *words)
    assert done.code == 0, done.err
    assert order(queue) == becomes
    assert done.out.count(f"moved {words[0]}") == len(words) - 1


def test_job_stays_behind_jobs_of_higher_priority(queue: Store) -> None:
    submit(queue, "a", priority=1)
    submit(queue, "b", "c")
    assert stoker("move", "first", "c").code == 0
    assert stoker("move", "up", "c").code == 0
    assert order(queue) == "acb"


def test_running_job_is_not_moved_and_held_job_is(queue: Store) -> None:
    runs, held, _free = submit(queue, "runs", "held", "free")
    start(queue, runs)
    queue.jobs.hold([held])
    done = stoker("move", "last", "runs", "held")
    assert (done.code, done.out) == (0, f"held ({held}): moved last\n")
    assert done.err == f"stoker: job runs ({runs}) was not moved: it is running\n"
    assert stoker("move", "last", "runs").code == 1


def test_dry_run_moves_nothing(queue: Store) -> None:
    submit(queue, "a", "b")
    assert "would be moved first" in stoker("move", "first", "b", "--dry-run").out
    assert order(queue) == "ab"


def test_place_precedes_the_jobs_on_the_command_line(queue: Store) -> None:
    submit(queue, "a", "b")
    done = stoker("move", "b", "first")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "'up', 'down', 'first', 'last'" in done.err
    assert order(queue) == "ab"


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["before", "b", "e"], "aebcd"),
        (["after", "b", "e"], "abecd"),
        (["before", "a", "e", "c"], "ceabd"),
        (["after", "e", "b", "a"], "cdeab"),
        (["after", "a", "b"], "abcde"),
    ],
)
def test_jobs_move_next_to_another_and_keep_their_order(queue: Store, words: list[str], becomes: str) -> None:
    other = dict(zip("abcde", submit(queue, *"abcde"), strict=True))[words[1]]
    done = stoker("move", *words)
    assert done.code == 0, done.err
    assert order(queue) == becomes
    assert done.out.count(f"moved {words[0]} {other}") == len(words) - 2


def test_job_moved_next_to_another_takes_its_priority(queue: Store) -> None:
    submit(queue, "u", priority=5)
    _a, b = submit(queue, "a", "b")
    assert stoker("move", "before", "u", b[:7]).code == 0
    assert (order(queue), queue.jobs.get(b).priority) == ("bua", 5)


def test_jobs_of_a_tag_move_next_to_a_job_of_the_same_tag(queue: Store) -> None:
    submit(queue, "a", "b")
    c, d, e = submit(queue, *"cde", tags=("night",))
    queue.jobs.move([d], "last")
    done = stoker("move", "before", "d", "--tag", "night", "--json")
    assert {job["id"] for job in done.json()["changed"]} == {c, e}
    assert [job["why"] for job in done.json()["unchanged"]] == ["the others go before it"]
    assert order(queue) == "abced"


def test_moving_next_to_a_job_that_is_not_waiting_is_refused(queue: Store) -> None:
    runs, _a = submit(queue, "runs", "a")
    start(queue, runs)
    for words in (["before", "runs", "a"], ["after", "runs", "a", "--dry-run"]):
        done = stoker("move", *words)
        assert (done.code, done.out) == (2, "")
        assert done.err == f"stoker: nothing can be moved {words[0]} job runs ({runs}): it is running\n"


def test_missing_job_is_reported_with_the_usage(queue: Store) -> None:
    submit(queue, "a", "b")
    nobody = stoker("move", "before")
    assert (nobody.code, "before which job?" in nobody.err) == (2, True)
    alone = stoker("move", "before", "a")
    assert (alone.code, "which jobs?" in alone.err) == (2, True)
    itself = stoker("move", "before", "a", "a")
    assert (itself.code, itself.err.count("\n")) == (1, 1)
    assert order(queue) == "ab"


def test_dry_run_before_another_job_moves_nothing(queue: Store) -> None:
    a, _b = submit(queue, "a", "b")
    assert f"would be moved before {a}" in stoker("move", "before", "a", "b", "--dry-run").out
    assert order(queue) == "ab"
