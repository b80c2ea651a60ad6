"""The schedule of background programs."""

import time
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.fill.config import DailyHours, Schedule, parse_days, parse_hours

# A Monday.
MONDAY = datetime(2024, 1, 8)  # noqa: DTZ001 - a local clock has no zone
WEEK = 7 * 24 * 60
BERLIN = ZoneInfo("Europe/Berlin")


def at(weekday: int, clock: str) -> datetime:
    hour, minute = map(int, clock.split(":"))
    return MONDAY + timedelta(days=weekday, hours=hour, minutes=minute)


HOURS = st.builds(
    DailyHours,
    st.sampled_from([0, 1, 450, 480, 719, 1200, 1439]),
    st.sampled_from([2, 15, 481, 720, 1201, 1440]),
    st.sets(st.integers(0, 6), min_size=1).map(lambda days: tuple(sorted(days))),
)


def painted(schedule: Schedule) -> list[bool]:
    """Every minute of a week, filled range by range."""
    week = [False] * WEEK
    for each in schedule.hours:
        length = (each.end - each.begin) % 1440 or 1440
        for day in each.days:
            for minute in range(length):
                week[(day * 1440 + each.begin + minute) % WEEK] = True
    return week


@settings(max_examples=15, deadline=None)
@given(st.lists(HOURS, min_size=1, max_size=3).map(lambda hours: Schedule(tuple(hours))))
def test_schedule_agrees_with_a_table_of_every_minute(schedule: Schedule) -> None:
    assert [schedule.allows(MONDAY + timedelta(minutes=minute)) for minute in range(WEEK)] == painted(schedule)


@settings(max_examples=25, deadline=None)
@given(st.lists(HOURS, min_size=1, max_size=3).map(lambda hours: Schedule(tuple(hours))), st.integers(0, WEEK - 1))
def test_next_change_is_the_first_minute_that_differs(schedule: Schedule, minute: int) -> None:
    utc = ZoneInfo("UTC")
    week = painted(schedule)
    ahead = next((n for n in range(1, WEEK + 1) if week[(minute + n) % WEEK] != week[minute]), None)
    now = (MONDAY + timedelta(minutes=minute, seconds=7)).replace(tzinfo=utc)
    expected = None if ahead is None else (MONDAY + timedelta(minutes=minute + ahead)).replace(tzinfo=utc)
    assert schedule.next_change(now) == expected


def test_night_belongs_to_the_day_it_starts_on() -> None:
    nights = Schedule((parse_hours("20:00-08:00", "mon-fri"),))
    assert not nights.allows(at(0, "07:59"))
    assert nights.allows(at(0, "20:00"))
    assert nights.allows(at(5, "07:59"))
    assert not nights.allows(at(5, "08:00"))
    assert not nights.allows(at(6, "21:00"))


def test_struct_time_is_accepted() -> None:
    nights = Schedule((parse_hours("20:00-08:00"),))
    assert nights.allows(time.strptime("2024-01-08 23:00", "%Y-%m-%d %H:%M"))
    assert not nights.allows(time.strptime("2024-01-08 12:00", "%Y-%m-%d %H:%M"))


def test_hour_skipped_in_spring_is_skipped() -> None:
    # On 31 March 2024 the clock goes from 02:00 to 03:00.
    early = Schedule((parse_hours("02:30-05:00"),))
    change = early.next_change(datetime(2024, 3, 31, 1, 0, tzinfo=BERLIN))
    assert change == datetime(2024, 3, 31, 3, 0, tzinfo=BERLIN)
    assert change.timestamp() - datetime(2024, 3, 31, 1, 0, tzinfo=BERLIN).timestamp() == 3600


def test_hour_repeated_in_autumn_counts_twice() -> None:
    # On 27 October 2024 the clock goes from 03:00 to 02:00.
    schedule = Schedule((parse_hours("01:00-02:30"),))
    first_end = datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN)
    again = schedule.next_change(first_end)
    assert again is not None
    assert (again.hour, again.minute, again.fold) == (2, 0, 1)
    assert again.timestamp() - first_end.timestamp() == 1800


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
