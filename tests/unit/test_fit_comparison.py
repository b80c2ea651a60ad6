"""The comparison in the documentation is up to date, and fair to the other methods."""

import pytest

from bench.fit import PAGE, compared, page
from bench.fit_peers import Outcome, binsearch, in_proportion, power, shrinking
from tests.support.trainers import GIB, Trainer


def with_a_limit_of(size: int) -> Trainer:
    """The whole card without a margin, as the other methods assume."""
    return Trainer("any", 0, 24 * GIB / (size + 0.5))


def test_page_shows_what_the_simulation_gives() -> None:
    assert PAGE.read_text() == page(compared()), "it is written by `python -m bench fit`"


@pytest.mark.parametrize(
    ("limit", "expected"), [(50, (32, 6, 1)), (100, (64, 7, 1)), (300, (256, 9, 1)), (1000, (512, 10, 1))]
)
def test_power_is_simulated_as_it_works(limit: int, expected: tuple[int, int, int]) -> None:
    assert power(with_a_limit_of(limit)) == Outcome(*expected, dies=False)


@pytest.mark.parametrize(
    ("limit", "expected"), [(50, (47, 11, 4)), (100, (95, 13, 5)), (300, (285, 17, 6)), (1000, (950, 19, 5))]
)
def test_binsearch_is_simulated_as_it_works(limit: int, expected: tuple[int, int, int]) -> None:
    assert binsearch(with_a_limit_of(limit)) == Outcome(*expected, dies=False)


@pytest.mark.parametrize(
    ("limit", "expected"), [(50, (50, 29, 28)), (100, (97, 23, 22)), (300, (286, 13, 12)), (1000, (921, 2, 1))]
)
def test_shrinking_is_simulated_as_it_works(limit: int, expected: tuple[int, int, int]) -> None:
    assert shrinking(with_a_limit_of(limit)) == Outcome(*expected, dies=False)


def test_proportional_estimate_scales_the_fixed_part() -> None:
    assert in_proportion(Trainer("any", 2 * GIB, 0.25 * GIB)).size == 40
    assert in_proportion(Trainer("any", 0, 0.5 * GIB)).size == 40
