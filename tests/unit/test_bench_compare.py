"""`python -m bench compare` finds what got slower, and nothing else."""

import pytest

from bench.table import compare

BASELINE = {"dispatch": {"gap ÷ tsp": [2.0, "×"], "idle submit": [3.0, "ms"]}}


@pytest.mark.parametrize(("measured", "is_worse"), [(1.0, False), (2.39, False), (2.41, True)])
def test_ratio_that_is_a_fifth_worse_is_reported(measured: float, is_worse: bool) -> None:
    lines, worse = compare({"dispatch": {"gap ÷ tsp": [measured, "×"]}}, BASELINE)
    assert len(lines) == 1
    assert worse == ([f"dispatch: gap ÷ tsp is {measured:.2f} ×, and was 2.00"] if is_worse else [])


def test_times_and_new_figures_are_not_compared() -> None:
    assert compare({"dispatch": {"idle submit": [30.0, "ms"], "new": [9.0, "×"]}}, BASELINE) == ([], [])


def test_results_of_another_size_are_not_compared() -> None:
    assert compare({"dispatch --quick": {"gap ÷ tsp": [9.0, "×"]}}, BASELINE) == ([], [])
