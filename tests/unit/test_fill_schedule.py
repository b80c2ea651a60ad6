"""The schedule of background programs."""

from datetime import datetime, timedelta
from time import struct_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.fill.config import DailyHours, parse_days, parse_hours

# A Monday.
MONDAY = datetime(2024, 1, 8)  # noqa: DTZ001 - a local clock has no zone
WEEK = 7 * 24 * 60


def at(weekday: int, clock: str) -> struct_time:
    hour, minute = map(int, clock.split(":"))
    return (MONDAY + timedelta(days=weekday, hours=hour, minutes=minute)).timetuple()


HOURS = st.builds(
    DailyHours,
    st.sampled_from([0, 1, 450, 480, 719, 1200, 1439]),
    st.sampled_from([2, 15, 481, 720, 1201, 1440]),
    st.sets(st.integers(0, 6), min_size=1).map(lambda days: tuple(sorted(days))),
)


def painted(hours: DailyHours) -> list[bool]:
    """Every minute of a week."""
    week = [False] * WEEK
    length = (hours.end - hours.begin) % 1440 or 1440
    for day in hours.days:
        for minute in range(length):
            week[(day * 1440 + hours.begin + minute) % WEEK] = True
    return week


@settings(max_examples=15, deadline=None)
@given(HOURS)
def test_hours_agree_with_a_table_of_every_minute(hours: DailyHours) -> None:
    week = [(MONDAY + timedelta(minutes=minute)).timetuple() for minute in range(WEEK)]
    assert [hours.contain(wall) for wall in week] == painted(hours)


def test_night_belongs_to_the_day_it_starts_on() -> None:
    nights = parse_hours("20:00-08:00", parse_days("mon-fri"))
    assert not nights.contain(at(0, "07:59"))
    assert nights.contain(at(0, "20:00"))
    assert nights.contain(at(5, "07:59"))
    assert not nights.contain(at(5, "08:00"))
    assert not nights.contain(at(6, "21:00"))


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("mon-fri", (0, 1, 2, 3, 4)),
        ("sat,sun", (5, 6)),
        ("fri-mon", (0, 4, 5, 6)),
        ("Weekend, Wednesday", (2, 5, 6)),
        ("daily", (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_common_spellings_of_days_are_accepted(text: str, days: tuple[int, ...]) -> None:
    assert parse_days(text) == days


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [("20:00-08:00", 1200, 480), ("8:00 - 12:30", 480, 750), ("00:00-24:00", 0, 1440), ("20:00-00:00", 1200, 1440)],
)
def test_common_spellings_of_hours_are_accepted(text: str, begin: int, end: int) -> None:
    assert parse_hours(text) == DailyHours(begin, end)


@pytest.mark.parametrize(
    "text", ["20-8", "25:00-08:00", "20:60-08:00", "20:00", "08:00-08:00", "", "00:00-00:00", "a-b"]
)
def test_invalid_hours_are_refused(text: str) -> None:
    with pytest.raises(BadInputError, match=r"write"):
        parse_hours(text)


@pytest.mark.parametrize("text", ["someday", "mon-", "", "mon..fri"])
def test_invalid_days_are_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="mon-fri"):
        parse_days(text)
