"""Durations, sizes and percentages as people write them."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.units import (
    about_when,
    format_duration,
    format_memory,
    format_percent,
    ordinal,
    parse_duration,
    parse_fraction,
    parse_memory,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("2h", 7200),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("1.5h", 5400),
        ("3", 3),
        ("1d", 86400),
    ],
)
def test_duration_is_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "-5s", "5x", "5 m", "1h30", "soon", "1e3s", "٣s", "9" * 400 + "s"])
def test_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInputError, match="90s, 5m or 1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5g", 1536 * 2**20),
        ("24 GiB", 24 * 2**30),
    ],
)
def test_memory_size_is_parsed(text: str, amount: int) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize("text", ["", "8", "GiB", "-1GiB", "8 apples", "9" * 400 + "GiB"])
def test_memory_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="8GiB"):
        parse_memory(text)


@pytest.mark.parametrize(("text", "value"), [("20%", 0.2), ("0.2", 0.2), ("0", 0), ("100%", 1), ("0.5 %", 0.005)])
def test_percentage_is_parsed(text: str, value: float) -> None:
    assert parse_fraction(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["20", "1", "101%", "-1%", "a lot", "nan", "nan%", "inf"])
def test_ambiguous_or_invalid_percentage_is_refused(text: str) -> None:
    with pytest.raises(BadInputError):
        parse_fraction(text)


@given(st.integers(min_value=0, max_value=400 * 86400))
def test_printed_duration_can_be_parsed(seconds: int) -> None:
    # At most two units are printed, so a smaller remainder is lost.
    lost = 3600 if seconds >= 86400 else 60 if seconds >= 3600 else 1
    assert 0 <= seconds - parse_duration(format_duration(seconds)) < lost


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 B"), (512 * 2**20, "512 MiB"), (int(7.9 * 2**30), "7.9 GiB"), (80 * 2**30, "80 GiB")],
)
def test_memory_is_printed_in_short_form(amount: int, text: str) -> None:
    assert format_memory(amount) == text


@pytest.mark.parametrize(("fraction", "text"), [(0, "0%"), (0.005, "0.5%"), (0.01, "1%"), (0.374, "37%"), (1, "100%")])
def test_printed_percentage_can_be_parsed(fraction: float, text: str) -> None:
    assert format_percent(fraction) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "in less than a minute"),
        (59, "in less than a minute"),
        (61, "in about 1 min"),
        (5 * 60 + 20, "in about 5 min"),
        (9 * 60 + 40, "in about 10 min"),
        (41 * 60, "in about 40 min"),
        (58 * 60, "in about 1 h"),
        (80 * 60, "in about 1 h 30 min"),
        (2.9 * 3600, "in about 3 h"),
        (7.4 * 3600, "in about 7 h"),
        (12.2 * 3600, "today about 22:00"),
        (28 * 3600, "tomorrow about 14:00"),
        (60 * 3600, "Thursday about 22:00"),
        (10 * 86400, "2027-01-29 about 10:00"),
    ],
)
def test_estimated_time_is_no_more_exact_than_it_can_be(seconds: float, text: str) -> None:
    now = time.mktime((2027, 1, 19, 10, 0, 0, 0, 0, -1))  # a Tuesday
    assert about_when(now + seconds, now) == text


def test_ordinal_has_its_ending() -> None:
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111, 1000)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th", "1,000th")
    ]
