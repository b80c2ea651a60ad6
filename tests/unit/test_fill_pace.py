"""Scans follow events at once, at a limited cost under continuous events."""

from stoker.fill.other_users import ScanPacer

SCAN = 0.015


def busy(pace: ScanPacer, begin: float, seconds: float) -> list[float]:
    """The times of scans under continuous events."""
    scans = []
    now = begin
    while (now := max(now, pace.soonest(now))) < begin + seconds:
        scans.append(now)
        pace.spent(now, SCAN)
        now += 0.001
    return scans


def test_scan_follows_an_event_at_once() -> None:
    pace = ScanPacer(0.0)

    for visit in range(100):
        now = 10.0 * visit
        assert pace.soonest(now) == now
        pace.spent(now, SCAN)


def test_continuous_events_cost_a_twentieth_of_a_core() -> None:
    scans = busy(ScanPacer(0.0), 0.0, 600.0)

    assert len(scans) * SCAN / 600.0 <= 0.055


def test_scan_follows_within_a_third_of_a_second_at_any_cost() -> None:
    pace = ScanPacer(0.0)
    for second in range(100):
        pace.spent(float(second), 5.0)

    assert 99.0 < pace.soonest(99.0) <= 99.34


def test_pace_recovers_after_a_quiet_time() -> None:
    pace = ScanPacer(0.0)
    last = busy(pace, 0.0, 60.0)[-1]

    assert pace.soonest(last + 10.0) == last + 10.0
