"""The tables that benchmarks print, with what was promised beside what was measured."""

from typing import NamedTuple


class Promise(NamedTuple):
    """One line: a measured figure, the bound on it, and in which unit."""

    what: str
    measured: float
    at_most: float
    unit: str = "×"

    @property
    def kept(self) -> bool:
        return self.measured <= self.at_most


def print_promises(title: str, promises: list[Promise]) -> int:
    """Prints them and says how many were missed."""
    print(f"\n{title}")
    width = max(len(promise.what) for promise in promises)
    for promise in promises:
        verdict = "kept" if promise.kept else "MISSED"
        print(
            f"  {promise.what:{width}}  {promise.measured:8.2f} {promise.unit:4} "
            f"at most {promise.at_most:g} {promise.unit:4} {verdict}"
        )
    return sum(not promise.kept for promise in promises)
