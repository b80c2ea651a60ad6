"""The tables that benchmarks print, with the goal beside what was measured."""

from typing import NamedTuple


class Figure(NamedTuple):
    """One line: a measured figure, the bound on it, and in which unit."""

    what: str
    measured: float
    at_most: float
    unit: str = "×"

    @property
    def is_met(self) -> bool:
        return self.measured <= self.at_most


def print_figures(title: str, figures: list[Figure]) -> int:
    """Prints them and says how many were missed."""
    print(f"\n{title}")
    width = max(len(figure.what) for figure in figures)
    for figure in figures:
        verdict = "met" if figure.is_met else "MISSED"
        print(
            f"  {figure.what:{width}}  {figure.measured:8.2f} {figure.unit:4} "
            f"at most {figure.at_most:g} {figure.unit:4} {verdict}"
        )
    return sum(not figure.is_met for figure in figures)
