"""Pages of jobs, recently ended jobs and moves of waiting jobs, on both databases."""

import pytest

from stoker.errors import BadInputError
from stoker.queue import JobSpec, State, Store
from stoker.queue.commands import pattern_of
from stoker.queue.search import EVERY_JOB
from tests.support.either_queue import queue, url
from tests.support.queue_jobs import end, moment, start, states, submit

__all__ = ["queue", "url"]


def pages(queue: Store, size: int, states: tuple[State, ...] = (), tag: str | None = None) -> list[list[str]]:
    """The names of the jobs on each page."""
    query = EVERY_JOB.narrowed(states, tag)
    page = queue.jobs.search(query, limit=size)
    found = [[job.name for job in page.jobs]]
    while page.next is not None:
        assert len(found) < 10, "the pages have no end"
        page = queue.jobs.search(query, after=page.next, limit=size)
        found.append([job.name for job in page.jobs])
    return found


def order(queue: Store) -> str:
    """The names of what waits, as a word."""
    return "".join(job.name for job in queue.jobs.find(("queued", "held"), order="queue"))


def test_pages_hold_every_job_once_newest_first(queue: Store) -> None:
    for names in ("ab", "cde"):
        submit(queue, *names)
    assert pages(queue, 2) == [["e", "d"], ["c", "b"], ["a"]]
    assert pages(queue, 5) == [["e", "d", "c", "b", "a"]]


def test_new_job_does_not_shift_the_next_page(queue: Store) -> None:
    submit(queue, *"abcd")
    first = queue.jobs.search(limit=2)
    submit(queue, "new")
    then = queue.jobs.search(after=first.next, limit=2)
    assert [job.name for job in (*first.jobs, *then.jobs)] == ["d", "c", "b", "a"]


def test_pages_are_filtered_by_state_or_tag(queue: Store) -> None:
    jobs = submit(queue, *"abcdef", tags=("night",))
    submit(queue, "other")
    for job in jobs[:4:2]:
        end(queue, job)
    end(queue, jobs[1], "succeeded")
    assert pages(queue, 2, ("failed", "succeeded")) == [["c", "b"], ["a"]]
    assert pages(queue, 2, ("failed",)) == [["c", "a"]]
    assert pages(queue, 4, tag="night") == [["f", "e", "d", "c"], ["b", "a"]]
    assert pages(queue, 2, ("queued", "failed"), "night") == [["f", "e"], ["d", "c"], ["a"]]
    assert pages(queue, 2, tag="nothing") == [[]]
    with pytest.raises(BadInputError, match="is not a state"):
        queue.jobs.search(EVERY_JOB.narrowed(("' OR 1",)))  # type: ignore[arg-type]  # what is refused here


def test_recently_ended_jobs_are_listed_last_end_first(queue: Store) -> None:
    a, b, c, d = submit(queue, *"abcd")
    end(queue, a)
    moment(queue)
    end(queue, c, "succeeded")
    between = moment(queue)
    end(queue, b, "succeeded")
    moment(queue)
    queue.jobs.cancel([d])
    assert [job.name for job in queue.jobs.ended_since(between)] == ["d", "b"]
    assert [job.name for job in queue.jobs.ended_since(0.0)] == ["d", "b", "c", "a"]
    assert [job.name for job in queue.jobs.ended_since(0.0, limit=1)] == ["d"]
    queue.jobs.retry([d])
    assert [job.name for job in queue.jobs.ended_since(between)] == ["b"]


@pytest.mark.parametrize(
    ("moved", "neighbour", "expected"),
    [
        ("e", "before b", "aebcd"),
        ("a", "after c", "bcade"),
        ("de", "before a", "deabc"),
        ("ab", "after e", "cdeab"),
        ("ce", "after a", "acebd"),
        ("b", "after a", "abcde"),
        ("ac", "before b", "acbde"),
    ],
)
def test_jobs_are_moved_next_to_another(queue: Store, moved: str, neighbour: str, expected: str) -> None:
    jobs = dict(zip("abcde", submit(queue, *"abcde"), strict=True))
    side, beside = neighbour.split()
    # Named in any order, they keep the one they have in the queue.
    ids = [jobs[name] for name in reversed(moved)]
    assert queue.jobs.move_beside(ids, jobs[beside], "before" if side == "before" else "after") == ids[::-1]
    assert order(queue) == expected
    submit(queue, "x")
    assert order(queue) == expected + "x"


def test_moved_job_takes_the_priority_of_its_neighbour(queue: Store) -> None:
    urgent = submit(queue, "u", "v", priority=5)
    a, b = submit(queue, "a", "b")
    queue.jobs.hold([b])
    assert queue.jobs.move_beside([b], urgent[0], "after") == [b]
    assert (order(queue), queue.jobs.get(b).priority) == ("ubva", 5)
    assert queue.jobs.move_beside([urgent[1]], a, "before") == [urgent[1]]
    assert (order(queue), queue.jobs.get(urgent[1]).priority) == ("ubva", 0)
    assert [queue.jobs.get(job.id).name for job in queue.attempts.heads().jobs] == ["u", "v", "a"]


def test_job_can_always_be_moved_between_two_others(queue: Store) -> None:
    jobs = submit(queue, *"abcd")
    # Each halves the room before the last one; doubles are soon at their end.
    for turn in range(120):
        queue.jobs.move_beside([jobs[1 + turn % 2]], jobs[3], "before")
        assert order(queue) == ("acbd", "abcd")[turn % 2]
    submit(queue, "x")
    assert order(queue) == "abcdx"


def test_moving_next_to_a_job_that_is_not_waiting_is_refused(queue: Store) -> None:
    a, b, c = submit(queue, *"abc")
    start(queue, c)
    for neighbour in (c, "00000000"):
        with pytest.raises(BadInputError, match=f"nothing can be put before {neighbour}: no such job waits"):
            queue.jobs.move_beside([a], neighbour, "before")
    with pytest.raises(BadInputError, match=f"{a} cannot be put after itself"):
        queue.jobs.move_beside([a, b], a, "after")
    assert queue.jobs.move_beside([c], a, "before") == []
    assert (order(queue), states(queue, a, b, c)) == ("ab", ["queued", "queued", "running"])


def test_neighbours_of_a_job_are_waiting_jobs_of_its_priority(queue: Store) -> None:
    a, b, c, d, e = submit(queue, *"abcde")
    (urgent,) = submit(queue, "u", priority=5)
    queue.jobs.hold([b, d])
    start(queue, c)
    end(queue, e)
    queue.jobs.move([d], "first")  # in the order d, a, b
    around = {name: queue.jobs.neighbours(queue.jobs.get(name)) for name in (a, b, d, urgent)}
    assert around == {d: (None, a), a: (d, b), b: (a, None), urgent: (None, None)}
    queue.jobs.release([d])
    assert queue.jobs.neighbours(queue.jobs.get(a)) == (d, b)
    queue.jobs.move_beside([a], b, "after")  # d, b, a
    assert [queue.jobs.neighbours(queue.jobs.get(name)) for name in (d, b, a)] == [(None, b), (d, a), (b, None)]


def test_first_jobs_in_line_are_read_in_their_order(queue: Store) -> None:
    a, b, c, d = submit(queue, *"abcd")
    (urgent,) = submit(queue, "u", priority=5)
    (later,) = submit(queue, "later", priority=-1)
    queue.jobs.hold([b])
    queue.jobs.move([d], "first")
    assert queue.jobs.first_ids(10) == [urgent, d, a, c, later]
    assert [job.id for job in queue.jobs.in_line(3)] == queue.jobs.first_ids(3) == [urgent, d, a]


def test_durations_of_similar_jobs_are_those_of_the_newest_that_succeeded(queue: Store) -> None:
    command = "python train.py --lr {} --epochs 10"
    jobs = queue.jobs.submit([JobSpec(command=command.format(number)) for number in range(20)])
    (failed, other) = queue.jobs.submit([JobSpec(command=command.format(9)), JobSpec(command="python test.py")])
    for name in (*jobs, other, failed):
        end(queue, name, "failed" if name == failed else "succeeded")
    alike, unlike = pattern_of(command.format(1e-3), 1), pattern_of("python test.py", 1)
    found = queue.jobs.durations([alike, unlike, pattern_of("nothing like it", 1)])
    assert {pattern: len(seconds) for pattern, seconds in found.items()} == {alike: 15, unlike: 1}
    assert all(0 <= seconds < 60 for seconds in found[alike])
    queue.jobs.edit_many({other: {"command": command.format(7)}})
    assert len(queue.jobs.durations([unlike])) == 0
    assert queue.jobs.durations([]) == {}


def test_search_text_invalid_in_databases_matches_nothing(queue: Store) -> None:
    odd = "\0\ud800"
    assert queue.usage.read(0, odd, odd) == []
    assert queue.jobs.find(tag=odd) == queue.jobs.search(EVERY_JOB.narrowed(tag=odd)).jobs == []
    assert not queue.workers.pause(odd)
    assert not queue.notices.forget_note(odd)
    with pytest.raises(BadInputError, match="there is no job"):
        queue.jobs.get(odd)
