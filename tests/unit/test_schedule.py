"""Moments and recurrences as people write them, also over clock changes."""

from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.schedule import (
    following,
    local_zone,
    moment_text,
    next_time,
    parse_moment,
    parse_recurrence,
    recurrence_text,
)

BERLIN = ZoneInfo("Europe/Berlin")
HOUR = 3600.0


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)).timestamp()


NOW = at("2026-11-18 14:30:10")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("22:00", "2026-11-18 22:00"),
        ("14:30", "2026-11-19 14:30"),
        ("9:05", "2026-11-19 09:05"),
        ("14:30:30", "2026-11-18 14:30:30"),
        ("+2h", "2026-11-18 16:30:10"),
        ("+1d", "2026-11-19 14:30:10"),
        ("2026-12-24", "2026-12-24 00:00"),
        ("2026-12-24 18:00", "2026-12-24 18:00"),
        ("2026-12-24 8:00", "2026-12-24 08:00"),
        ("2026-12-24T18:00Z", "2026-12-24 19:00"),
        ("2026-12-24T18:00-08:00", "2026-12-25 03:00"),
    ],
)
def test_moment_is_read_as_people_write_it(text: str, moment: str) -> None:
    assert parse_moment(text, NOW, BERLIN) == at(moment)


@pytest.mark.parametrize("text", ["", "22", "25:00", "tomorrow", "+", "+x", "2026-13-01", "+100000d"])
def test_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(BadInputError):
        parse_moment(text, NOW, BERLIN)


def test_clock_time_on_the_day_of_a_clock_change_is_that_of_the_wall() -> None:
    evening = at("2026-03-28 22:00")
    assert parse_moment("21:00", evening, BERLIN) == at("2026-03-29 21:00") == evening + 22 * HOUR


@given(st.floats(0, 4e9))
def test_written_moment_is_read_back(moment: float) -> None:
    assert parse_moment(moment_text(moment), 0.0) == pytest.approx(moment, abs=1e-5)


@pytest.mark.parametrize(
    ("recurrence", "after", "moments"),
    [
        ("0 3 * * *", "2026-11-18 02:00", ["2026-11-18 03:00", "2026-11-19 03:00"]),
        ("0 3 * * *", "2026-11-18 03:00", ["2026-11-19 03:00"]),
        ("*/20 9-10 * * mon-fri", "2026-11-20 10:30", ["2026-11-20 10:40", "2026-11-23 09:00", "2026-11-23 09:20"]),
        ("30 6 1,15 * *", "2026-11-18 00:00", ["2026-12-01 06:30", "2026-12-15 06:30"]),
        ("0 0 1 jan *", "2026-11-18 00:00", ["2027-01-01 00:00", "2028-01-01 00:00"]),
        ("0 12 13 * fri", "2026-11-11 00:00", ["2026-11-13 12:00", "2026-11-20 12:00"]),
        ("0 12 * * 7", "2026-11-18 00:00", ["2026-11-22 12:00"]),
        ("0 0 29 2 *", "2026-11-18 00:00", ["2028-02-29 00:00", "2032-02-29 00:00"]),
        ("@weekly", "2026-11-18 00:00", ["2026-11-22 00:00"]),
        ("5/20 * * * *", "2026-11-18 00:00", ["2026-11-18 00:05", "2026-11-18 00:25", "2026-11-18 00:45"]),
        # The clock goes from 02:00 to 03:00 on March 29th.
        ("30 2 * * *", "2026-03-28 12:00", ["2026-03-29 03:00", "2026-03-30 02:30"]),
        ("0 3 * * *", "2026-03-28 12:00", ["2026-03-29 03:00", "2026-03-30 03:00"]),
        ("30 * * * *", "2026-03-29 00:45", ["2026-03-29 01:30", "2026-03-29 03:30"]),
        # And from 03:00 back to 02:00 on October 25th.
        ("30 2 * * *", "2026-10-24 12:00", ["2026-10-25T02:30+02:00", "2026-10-26 02:30"]),
        ("30 2 * * *", "2026-10-25T02:30+01:00", ["2026-10-26 02:30"]),
        ("30 * * * *", "2026-10-25T01:45+02:00", ["2026-10-25T02:30+02:00", "2026-10-25T02:30+01:00"]),
        ("0 4 * * *", "2026-10-24 04:00", ["2026-10-25 04:00"]),
    ],
)
def test_next_times_are_those_of_cron(recurrence: str, after: str, moments: list[str]) -> None:
    moment = at(after)
    for expected in moments:
        moment = next_time(f"{recurrence} Europe/Berlin", moment)
        assert datetime.fromtimestamp(moment, BERLIN) == datetime.fromtimestamp(at(expected), BERLIN)


@given(
    st.sampled_from(["0 3 * * *", "30 2 * * *", "*/15 * * * *", "0 */6 * * *", "15 2,3 * * sun"]),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]),
    # In milliseconds: half of less is nothing that a float could tell.
    st.integers(int(at("2026-01-01") * 1000), int(at("2028-01-01") * 1000)).map(lambda moment: moment / 1000),
)
def test_every_next_time_is_later_and_none_lies_between(recurrence: str, zone: str, after: float) -> None:
    first = next_time(f"{recurrence} {zone}", after)
    assert after < first <= after + 8 * 24 * HOUR
    assert first % 60 == 0
    middle = after + (first - after) / 2
    assert next_time(f"{recurrence} {zone}", middle) == first


def test_missed_times_are_made_up_for_by_one_run() -> None:
    hourly = "0 * * * * UTC"
    ten = datetime(2026, 11, 18, 10, tzinfo=UTC).timestamp()
    assert following(hourly, ten, ten + 60) == ten + HOUR
    # It ran for two and a half hours: once at once, then at the next hour.
    assert following(hourly, ten, ten + 2.5 * HOUR) == ten + 2 * HOUR
    assert following(hourly, ten + 2.5 * HOUR, ten + 2.6 * HOUR) == ten + 3 * HOUR


@pytest.mark.parametrize(
    "text",
    ["", "0 3 * *", "60 3 * * *", "0 24 * * *", "0 3 0 * *", "0 3 * * 8", "0 3 30 2 *", "a b c d e", "*/0 * * * *",
     "5-1 * * * *", "0 3 * * * Nowhere/City", "0 3 * * * ../etc", "@never"],
)  # fmt: skip
def test_invalid_recurrence_is_refused(text: str) -> None:
    with pytest.raises(BadInputError):
        parse_recurrence(text)


def test_recurrence_keeps_the_time_zone_of_its_submission(tmp_path: Path) -> None:
    assert recurrence_text(" 0  3 * * * ", "Europe/Berlin") == "0 3 * * * Europe/Berlin"
    assert recurrence_text("@daily UTC", "Europe/Berlin") == "@daily UTC"
    assert local_zone({"TZ": "America/New_York"}) == "America/New_York"
    (tmp_path / "etc").mkdir()
    assert local_zone({}, tmp_path) == "UTC"
    (tmp_path / "etc/localtime").symlink_to("/usr/share/zoneinfo/Asia/Tokyo")
    assert local_zone({"TZ": "nonsense"}, tmp_path) == "Asia/Tokyo"
