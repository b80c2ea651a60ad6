"""Ten thousand short jobs through one worker: descriptors, memory, processes and disk must stay flat.

`python -m tests.chaos soak` prints the figures and says what is not flat; `--picture` draws them.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stoker.queue import JobSpec, init_queue
from stoker.queue.model import ENDED
from tests.support.small_multiples import Panel, draw
from tests.support.work_site import WorkSite

JOBS: Final = 10_000
BACKLOG: Final = 300
EVERY: Final = 1.0
# The worker forgets attempts beyond a number, so flat means: from the moment on when that is reached.
SETTLED: Final = 0.25
# Seconds without an ended job after which the run counts as stuck.
PATIENCE: Final = 120.0
MIB: Final = 2**20
ROLES: Final = {
    "stoker": "worker",
    "stoker-forksrv": "fork server",
    "stoker-shim": "supervisors",
    "stoker-reaper": "reapers",
}


class Sample(msgspec.Struct, frozen=True):
    """What there was at one moment."""

    jobs: int
    """How many had ended."""
    seconds: float
    descriptors: dict[str, int]
    """By role: all processes of the role together, and the largest as `most`."""
    memory: dict[str, int]
    """Proportional set size by role, in bytes; the worker's resident set as `worker RSS`."""
    processes: dict[str, int]
    disk: dict[str, int]
    """Bytes of the records of attempts, of the queue, and of the rest of the state directory."""


class Measure(NamedTuple):
    """One line of the plot, and how far it may rise."""

    name: str
    value: Callable[[Sample], float]
    share: float
    """Of its own height."""
    more: float
    """And so much, in its own unit."""


MEASURES: Final = (
    Measure("descriptors of the worker", lambda s: s.descriptors.get("worker", 0), 0.0, 3),
    Measure("descriptors of the fork server", lambda s: s.descriptors.get("fork server", 0), 0.0, 1),
    Measure("most descriptors of one process", lambda s: s.descriptors["most"], 0.0, 3),
    Measure("memory of all (PSS)", lambda s: sum(s.memory.get(role, 0) for role in ROLES.values()), 0.1, 4 * MIB),
    Measure("memory of the worker (RSS)", lambda s: s.memory["worker RSS"], 0.05, 2 * MIB),
    Measure("memory of one supervisor (PSS)", lambda s: _each(s, "supervisors"), 0.15, MIB),
    Measure("memory of one reaper (PSS)", lambda s: _each(s, "reapers"), 0.15, MIB),
    Measure("processes", lambda s: sum(s.processes.values()), 0.0, 4),
    Measure("disk for records of attempts", lambda s: s.disk["attempts"], 0.15, MIB),
    Measure("disk for the rest of the state directory", lambda s: s.disk["rest"], 0.0, MIB),
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"number of jobs [{JOBS}]")
    parser.add_argument("--picture", type=Path, help="draw the figures there, as SVG")
    parser.add_argument("--figures", type=Path, help="keep the figures there, as JSON")
    asked = parser.parse_args(words)
    samples = soak(asked.jobs, lambda line: print(line, flush=True))
    if asked.figures is not None:
        asked.figures.write_bytes(msgspec.json.encode(samples))
    if asked.picture is not None:
        asked.picture.write_text(picture(samples))
    print(f"\n{'':44} {'before':>12} {'at the end':>12}")
    for measure in MEASURES:
        before, after = _levels(measure, samples)
        print(f"{measure.name:44} {_number(measure, before):>12} {_number(measure, after):>12}")
    per_job = _queue_bytes_per_job(samples)
    print(f"{'the queue itself, in bytes per job':44} {'':12} {per_job:12.0f}")
    findings = uneven(samples)
    print("\n" + ("\n".join(findings) if findings else "all flat"))
    return bool(findings)


def soak(jobs: int, log: Callable[[str], None]) -> list[Sample]:
    """The figures from the first job to the last."""
    with contextlib.ExitStack() as place:
        directory = Path(place.enter_context(tempfile.TemporaryDirectory(prefix="stoker-soak-")))
        os.environ["STOKER_HOME"] = str(directory / "home")
        store = place.enter_context(init_queue())
        site = place.enter_context(contextlib.closing(WorkSite(directory, store)))
        worker = site.work(said=directory / "worker.txt").ready()
        samples: list[Sample] = []
        begun = changed = time.monotonic()
        submitted = ended = 0
        while ended < jobs:
            wanted = min(BACKLOG, jobs - submitted, ended + BACKLOG - submitted)
            if wanted > BACKLOG // 3 or submitted + wanted == jobs > submitted:
                job = JobSpec(command=("echo", "done"), gpus=0, directory=str(directory), policy={"idle": False})
                store.jobs.submit([job] * wanted)
                submitted += wanted
            counts = store.jobs.counts()
            before, ended = ended, sum(counts.get(state, 0) for state in ENDED)
            changed = time.monotonic() if ended != before else changed
            assert time.monotonic() < changed + PATIENCE, f"nothing ends any more: {worker.said[-2000:]}"
            assert worker.process.poll() is None, worker.said[-2000:]
            samples.append(_sample(site, ended, time.monotonic() - begun))
            if len(samples) % 20 == 0:
                log(f"{ended:6} jobs after {samples[-1].seconds:.0f} s")
            time.sleep(EVERY)
        assert store.jobs.counts() == {"succeeded": jobs}, store.jobs.counts()
        worker.stop()
        return samples


def uneven(samples: Sequence[Sample]) -> list[str]:
    """What is not flat, in words."""
    found = []
    for measure in MEASURES:
        before, after = _levels(measure, samples)
        if after > before * (1 + measure.share) + measure.more:
            found.append(
                f"{measure.name} rose from {_number(measure, before)} to {_number(measure, after)} "
                f"over {samples[-1].jobs} jobs"
            )
    return found


def _levels(measure: Measure, samples: Sequence[Sample]) -> tuple[float, float]:
    """The usual one of the second quarter, and of the last."""
    total = samples[-1].jobs
    early = [measure.value(one) for one in samples if SETTLED * total <= one.jobs < 2 * SETTLED * total]
    late = [measure.value(one) for one in samples if (1 - SETTLED) * total <= one.jobs < total]
    return statistics.median(early), statistics.median(late)


def _queue_bytes_per_job(samples: Sequence[Sample]) -> float:
    first, last = samples[len(samples) // 4], samples[-1]
    return (last.disk["queue"] - first.disk["queue"]) / max(1, last.jobs - first.jobs)


def _number(measure: Measure, value: float) -> str:
    return f"{value / MIB:.1f} MiB" if "memory" in measure.name or "disk" in measure.name else f"{value:.0f}"


def _each(sample: Sample, role: str) -> float:
    return sample.memory.get(role, 0) / max(1, sample.processes.get(role, 0))


# One look


def _sample(site: WorkSite, jobs: int, seconds: float) -> Sample:
    descriptors: dict[str, int] = {"most": 0}
    memory: dict[str, int] = {"worker RSS": 0}
    processes: dict[str, int] = {}
    for pid, name in site.processes().items():
        role = ROLES.get(name)
        if role is None:
            continue
        with contextlib.suppress(OSError, ValueError):
            held = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
            processes[role] = processes.get(role, 0) + 1
            descriptors[role] = descriptors.get(role, 0) + held
            descriptors["most"] = max(descriptors["most"], held)
            memory[role] = memory.get(role, 0) + rollup["Pss"]
            if role == "worker":
                memory["worker RSS"] = rollup["Rss"]
    return Sample(jobs, seconds, descriptors, memory, processes, _disk(site.home))


def _fields(path: Path) -> dict[str, int]:
    """Of a file of lines like `Pss:  123 kB`, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def _disk(home: Path) -> dict[str, int]:
    queue = sum(_blocks(path) for path in home.glob("queue.db*"))
    attempts = _tree(home / "attempts")
    return {"attempts": attempts, "queue": queue, "rest": max(0, _tree(home) - queue - attempts)}


def _tree(directory: Path) -> int:
    """What it takes on disk, as far as it stays while it is counted."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            total += _blocks(Path(entry.path))
            if entry.is_dir(follow_symlinks=False):
                total += _tree(Path(entry.path))
    return total


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


# The picture


def picture(samples: Sequence[Sample]) -> str:
    jobs = [one.jobs for one in samples]

    def line(value: Callable[[Sample], float]) -> list[float]:
        return [value(one) for one in samples]

    return draw(
        f"{jobs[-1]:,} short jobs through one worker, {samples[-1].seconds / 60:.0f} minutes",
        "jobs that have ended",
        jobs,
        (
            Panel(
                "open descriptors",
                {
                    "worker": line(lambda s: s.descriptors.get("worker", 0)),
                    "fork server": line(lambda s: s.descriptors.get("fork server", 0)),
                    "the process with most": line(lambda s: s.descriptors["most"]),
                },
            ),
            Panel(
                "memory in MiB (proportional set size)",
                {role: line(lambda s, role=role: s.memory.get(role, 0) / MIB) for role in ROLES.values()},  # type: ignore[misc]
            ),
            Panel(
                "processes",
                {
                    "all": line(lambda s: sum(s.processes.values())),
                    "supervisors": line(lambda s: s.processes.get("supervisors", 0)),
                    "reapers": line(lambda s: s.processes.get("reapers", 0)),
                },
            ),
            Panel(
                "disk in MiB",
                {
                    "records of attempts": line(lambda s: s.disk["attempts"] / MIB),
                    "the queue": line(lambda s: s.disk["queue"] / MIB),
                    "everything else": line(lambda s: s.disk["rest"] / MIB),
                },
            ),
        ),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
