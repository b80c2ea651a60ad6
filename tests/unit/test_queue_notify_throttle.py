"""Change notifications are sent at once after a pause, and then at a limited rate."""

import pytest

from stoker.queue.driver import SECONDS_BETWEEN_NOTIFICATIONS, NotifyThrottle


def test_early_notification_is_deferred() -> None:
    now = 5.0
    pace = NotifyThrottle(lambda: now)
    assert pace.may_send()
    assert pace.flush_due() is None
    pace.sent()
    assert not pace.may_send()
    now += SECONDS_BETWEEN_NOTIFICATIONS / 4
    pace.defer()
    assert pace.flush_due() == pytest.approx(SECONDS_BETWEEN_NOTIFICATIONS * 3 / 4)
    now += 1.0
    assert pace.flush_due() == 0.0
    assert pace.may_send()
    pace.sent()
    assert pace.flush_due() is None
