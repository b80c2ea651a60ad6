"""Steps and moves in the queue: no job is lost, and other jobs keep their order."""

import math

from hypothesis import given
from hypothesis import strategies as st

from stoker.queue.jobs import Waiting, beside, stepped
from stoker.queue.model import Side

QUEUES = st.lists(st.integers(0, 2), max_size=12).map(
    lambda priorities: [
        Waiting(f"{number:08x}", priority, float(number)) for number, priority in enumerate(sorted(priorities)[::-1])
    ]
)


def order(waiting: list[Waiting], places: dict[str, float]) -> list[str]:
    return [job.id for job in sorted(waiting, key=lambda job: (-job.priority, places.get(job.id, job.position)))]


@given(QUEUES, st.data())
def test_step_up_and_step_down_are_inverse(waiting: list[Waiting], data: st.DataObject) -> None:
    moving = data.draw(st.sets(st.sampled_from([job.id for job in waiting]))) if waiting else set()
    up = order(waiting, stepped(waiting, moving, "up"))
    assert sorted(up) == [job.id for job in waiting]
    before = {job.id: at for at, job in enumerate(waiting)}
    for at, name in enumerate(up):
        assert before[name] - at <= (1 if name in moving else 0)
    assert [name for name in up if name in moving] == [job.id for job in waiting if job.id in moving]
    turned = [Waiting(job.id, -job.priority, -job.position) for job in reversed(waiting)]
    assert order(turned, stepped(turned, moving, "down")) == up[::-1]


# With adjacent positions without room between them, and shared positions.
CROWDS = st.lists(
    st.sampled_from([-3.0, 0.0, 5e-324, 1.0, math.nextafter(1.0, 2.0), 1.5, 7.0, 2.0**53]), min_size=2, max_size=8
).map(lambda places: [Waiting(f"{at:08x}", 0, place) for at, place in enumerate(sorted(places))])


@given(CROWDS, st.sampled_from(["before", "after"]), st.data())
def test_job_moved_next_to_another_is_adjacent(waiting: list[Waiting], side: Side, data: st.DataObject) -> None:
    neighbour = data.draw(st.sampled_from(waiting))
    others = [job.id for job in waiting if job != neighbour]
    chosen = data.draw(st.sets(st.sampled_from(others), min_size=1))
    moving = [name for name in others if name in chosen]
    places = beside(waiting, moving, neighbour, side)
    expected = [job.id for job in waiting if job.id not in chosen]
    at = expected.index(neighbour.id) + (side == "after")
    expected[at:at] = moving
    # Jobs at the same position are ordered by submission time.
    after = [Waiting(job.id, 0, places.get(job.id, job.position)) for job in waiting]
    assert [job.id for job in sorted(after, key=lambda job: (job.position, job.id))] == expected
    last = max(job.position for job in waiting)
    assert all(place < math.floor(last) + 1 for place in places.values()), "the next submitted job is behind all"
