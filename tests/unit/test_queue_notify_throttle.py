"""Change notifications are sent at once after a pause, and then at a limited rate."""

import pytest

from stoker.queue.driver import (
    EVERYTHING,
    FOR_PEOPLE,
    SECONDS_BETWEEN_NOTIFICATIONS,
    Changes,
    NotifyThrottle,
    Ready,
)


def test_early_notification_is_deferred() -> None:
    now = 5.0
    pace = NotifyThrottle(lambda: now)
    assert pace.may_send()
    assert pace.flush_due() is None
    pace.sent()
    assert not pace.may_send()
    now += SECONDS_BETWEEN_NOTIFICATIONS / 4
    pace.defer(Changes(ready={"a": Ready(1, 2)}))
    pace.defer(FOR_PEOPLE)
    assert pace.flush_due() == pytest.approx(SECONDS_BETWEEN_NOTIFICATIONS * 3 / 4)
    now += 1.0
    assert pace.flush_due() == 0.0
    assert pace.may_send()
    # What is sent next covers what was deferred.
    assert pace.with_deferred(Changes(ready={"a": Ready(0, 1)})).ready == {"a": Ready(1, 3)}
    pace.sent()
    assert pace.with_deferred(FOR_PEOPLE) == FOR_PEOPLE
    assert pace.flush_due() is None


@pytest.mark.parametrize(
    "changes",
    [
        EVERYTHING,
        Changes(ready={"0123456789abcdef": Ready(-5, 600)}),
        Changes(ready={"a": Ready(0, 1), "b": Ready(7, 2)}, workers=frozenset({"w-1", "w-2"})),
    ],
)
def test_changes_are_the_same_after_the_way_through_a_notification(changes: Changes) -> None:
    assert Changes.decode(changes.encode()) == changes


def test_more_changes_than_fit_into_a_notification_are_everything() -> None:
    many = Changes(ready={f"{number:016x}": Ready(0, 1) for number in range(1000)})
    assert Changes.decode(many.encode()) == EVERYTHING
    assert Changes.decode("what a later version says") == EVERYTHING
    assert Changes.decode(Changes(workers=frozenset({"two words"})).encode()) == EVERYTHING
