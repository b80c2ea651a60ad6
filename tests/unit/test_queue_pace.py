"""News of the queue is told at once after quiet, and not again too soon."""

import pytest

from stoker.queue.pace import SECONDS_BETWEEN, Pace


def test_what_comes_too_soon_is_owed_until_it_may_ring() -> None:
    now = 5.0
    pace = Pace(lambda: now)
    assert pace.due()
    assert pace.owes() is None
    pace.rang()
    assert not pace.due()
    now += SECONDS_BETWEEN / 4
    pace.owe()
    assert pace.owes() == pytest.approx(SECONDS_BETWEEN * 3 / 4)
    now += 1.0
    assert pace.owes() == 0.0
    assert pace.due()
    pace.rang()
    assert pace.owes() is None
