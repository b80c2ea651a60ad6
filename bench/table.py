"""Figures with their goals: printed, kept, written into the documentation, and compared with the committed ones."""

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

# Smaller sizes and fewer rounds.
QUICK = "--quick" in sys.argv
LATEST = Path(__file__).with_name("results") / "latest.json"
BASELINE = Path(__file__).with_name("baseline.json")
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
# A ratio that is worse by more than this fails `python -m bench compare`.
TOLERANCE = 0.2
# Depend on the machine, and on what else it does: not compared between runs.
NOT_COMPARED = ("ms", "s", "%")


class Figure(NamedTuple):
    """One line: a measured figure, the bound on it, and in which unit."""

    what: str
    measured: float
    at_most: float
    unit: str = "×"

    @property
    def is_met(self) -> bool:
        return self.measured <= self.at_most


class Result(NamedTuple):
    """What one benchmark has measured."""

    bench: str
    title: str
    figures: list[Figure]


_printed: list[tuple[str, list[Figure]]] = []


def print_figures(title: str, figures: list[Figure]) -> int:
    """Prints them and says how many were missed."""
    _printed.append((title, figures))
    print(f"\n{title}")
    width = max(len(figure.what) for figure in figures)
    for figure in figures:
        verdict = "met" if figure.is_met else "MISSED"
        print(
            f"  {figure.what:{width}}  {figure.measured:8.2f} {figure.unit:4} "
            f"at most {figure.at_most:g} {figure.unit:4} {verdict}",
            flush=True,
        )
    return sum(not figure.is_met for figure in figures)


def take_printed(bench: str) -> list[Result]:
    """What was printed since the last call, as the results of this benchmark."""
    found = [Result(bench, title, figures) for title, figures in _printed]
    _printed.clear()
    return found


def keep(results: list[Result]) -> None:
    """Keeps the results of this run, for `compare` and `baseline`."""
    kept: dict[str, dict[str, Any]] = {}
    for result in results:
        of_bench = kept.setdefault(f"{result.bench} --quick" if QUICK else result.bench, {})
        of_bench |= {figure.what: [round(figure.measured, 4), figure.unit] for figure in result.figures}
    LATEST.parent.mkdir(exist_ok=True)
    LATEST.write_text(_text(kept))


def compare(latest: dict[str, Any], baseline: dict[str, Any]) -> tuple[list[str], list[str]]:
    """A line for each figure that both have; and a sentence for each one that got worse by more than a fifth."""
    lines, worse = [], []
    for bench, figures in sorted(latest.items()):
        for what, (measured, unit) in figures.items():
            before = baseline.get(bench, {}).get(what)
            if before is None or unit in NOT_COMPARED:
                continue
            lines.append(f"{bench}: {what}: {measured:.2f} {unit}, committed {before[0]:.2f}")
            if measured > before[0] * (1 + TOLERANCE):
                worse.append(f"{bench}: {what} is {measured:.2f} {unit}, and was {before[0]:.2f}")
    return lines, worse


def compare_files() -> int:
    """The number of figures that got worse, each printed; raises SystemExit when there is nothing to compare."""
    latest, baseline = _read(LATEST), _read(BASELINE)
    lines, worse = compare(latest, baseline)
    if not lines:
        raise SystemExit("there is nothing to compare: run `make bench-quick` or `make bench` first")
    print("\n".join(lines))
    allowed = f"more than {TOLERANCE:.0%} worse than {BASELINE.name}"
    print(f"\n{len(worse)} of {len(lines)} figures are {allowed}" + "".join(f"\n  {one}" for one in worse))
    return len(worse)


def commit_baseline() -> None:
    """Makes the results of the last run those that later ones are compared with; other benches stay."""
    BASELINE.write_text(_text(_read(BASELINE) | _read(LATEST)))


def document(results: list[Result], label: str) -> None:
    """Appends the results to the documentation, with the date and the machine."""
    heading = ", ".join(filter(None, (f"{datetime.now(UTC):%Y-%m-%d}", label, "quick sizes" if QUICK else "")))
    lines = ["", f"### {heading}", "", f"{machine()}.", ""]
    lines += ["| bench | figure | measured | goal |", "|---|---|---|---|"]
    for result in results:
        for what, measured, at_most, unit in result.figures:
            shown = "" if unit == "×" else f" {unit}"
            factor = " ×" if unit == "×" else ""
            mark = "" if measured <= at_most else " (missed)"
            lines.append(
                f"| `{result.bench}` | {what} | {measured:.2f}{factor}{shown} | ≤ {at_most:g}{factor}{shown}{mark} |"
            )
    with DOCUMENT.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def machine() -> str:
    """Processor, memory and versions, without anybody's names."""
    processor = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    kernel = ".".join(platform.release().split(".")[:2])
    return (
        f"{os.cpu_count()} cores ({processor}), {memory:.0f} GiB, {system}, Linux {kernel}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end"
    )


def _text(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _read(place: Path) -> dict[str, Any]:
    return json.loads(place.read_text()) if place.exists() else {}
