"""One step up or down in the queue: nobody is lost, and nobody jumps."""

from hypothesis import given
from hypothesis import strategies as st

from stoker.queue.moving import Waiting, stepped

QUEUES = st.lists(st.integers(0, 2), max_size=12).map(
    lambda priorities: [
        Waiting(f"{number:08x}", priority, float(number)) for number, priority in enumerate(sorted(priorities)[::-1])
    ]
)


def order(waiting: list[Waiting], places: dict[str, float]) -> list[str]:
    return [job.id for job in sorted(waiting, key=lambda job: (-job.priority, places.get(job.id, job.position)))]


@given(QUEUES, st.data())
def test_a_step_up_and_the_same_step_down_mirror_each_other(waiting: list[Waiting], data: st.DataObject) -> None:
    moving = data.draw(st.sets(st.sampled_from([job.id for job in waiting]))) if waiting else set()
    up = order(waiting, stepped(waiting, moving, "up"))
    assert sorted(up) == [job.id for job in waiting]
    before = {job.id: at for at, job in enumerate(waiting)}
    for at, name in enumerate(up):
        assert before[name] - at <= (1 if name in moving else 0)
    assert [name for name in up if name in moving] == [job.id for job in waiting if job.id in moving]
    turned = [Waiting(job.id, -job.priority, -job.position) for job in reversed(waiting)]
    assert order(turned, stepped(turned, moving, "down")) == up[::-1]
