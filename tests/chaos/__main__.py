"""Random faults at full size, on SQLite, on PostgreSQL and on Slurm, and ten thousand jobs through one worker.

`make chaos` runs it. The same `--seed` gives the same faults in the same order.
"""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stoker.queue import init_queue
from stoker.runs.processes.cgroup import NoCgroupError, own_cgroup
from tests.chaos import soak
from tests.support.chaos import KINDS, ChaosRun, Extent
from tests.support.chaos_slurm import SLURM_KINDS, SLURM_PARAMETERS, SlurmChaosRun, slurm_extent
from tests.support.postgres import DURABLE, running_server
from tests.support.slurm_cluster import running_cluster
from tests.support.work_site import WorkSite

FAULTS: Final = 2000
SLURM_FAULTS: Final = 500
PER_ROUND: Final = 125
AT_ONCE: Final = 2
EVERY: Final = 0.25
SLURM_EVERY: Final = 1.0
# A round that takes longer is stuck.
LONGEST_ROUND: Final = 1800.0
PLACES: Final = ("sqlite", "postgres", "slurm")


class Result(msgspec.Struct):
    """What a round found."""

    seed: int
    place: str
    struck: dict[str, int]
    jobs: int
    attempts: int
    seconds: float
    held_up: float
    findings: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, help=f"number of faults [{FAULTS}, and {SLURM_FAULTS} on Slurm]")
    parser.add_argument(
        "--every", type=float, help=f"seconds between two faults of a round [{EVERY:g}, on Slurm {SLURM_EVERY:g}]"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--on", action="append", choices=PLACES, help="only there")
    kinds = sorted({*KINDS, *SLURM_KINDS})
    parser.add_argument("--only", action="append", choices=kinds, help="only faults of this kind, or of these")
    parser.add_argument("--per-round", type=int, default=PER_ROUND, help=f"faults on one set of machines [{PER_ROUND}]")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help=f"rounds at a time [{AT_ONCE}]")
    parser.add_argument("--keep", type=Path, help="leave everything there for people to read")
    parser.add_argument("--round", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.round is not None:
        asked.round.write_bytes(msgspec.json.encode(play(asked)))
        return 0
    return report(asked.seed, play_all(asked))


# One round, in a separate process


def play(asked: argparse.Namespace) -> Result:
    (place,) = asked.on
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(_directory(asked.keep))
        cgroup = stack.enter_context(_own_cgroup())
        os.environ["STOKER_HOME"] = str(directory / "nobody")
        (directory / "queue").mkdir()
        chaos = (_on_slurm if place == "slurm" else _on_machines)(asked, directory, stack)
        chaos.run(lambda line: print(line, flush=True))
        findings = chaos.findings()
        findings += [f"{left} is left" for left in cgroup.glob("stoker-*")] if cgroup is not None else []
        return Result(
            asked.seed, place, dict(chaos.struck), chaos.jobs, chaos.attempts, chaos.seconds, chaos.held_up, findings
        )


def _on_machines(asked: argparse.Namespace, directory: Path, stack: contextlib.ExitStack) -> ChaosRun:
    server = stack.enter_context(running_server(DURABLE)) if asked.on == ["postgres"] else None
    url = str(directory / "queue" / "queue.db") if server is None else server.create_database()
    site = _site(directory, url, stack)
    kinds = frozenset(asked.only or KINDS)
    extent = Extent(
        asked.faults, asked.every, machines=1 if server is None else 2, kinds=kinds, mounts=os.geteuid() == 0
    )
    return stack.enter_context(contextlib.closing(ChaosRun(site, url, extent, asked.seed, server)))


def _on_slurm(asked: argparse.Namespace, directory: Path, stack: contextlib.ExitStack) -> ChaosRun:
    cluster = stack.enter_context(running_cluster(SLURM_PARAMETERS[asked.seed % len(SLURM_PARAMETERS)]))
    if asked.keep is not None:
        stack.callback(lambda: [shutil.copy(log, directory) for log in cluster.directory.glob("*.log")])
    url = str(directory / "queue" / "queue.db")
    site = _site(directory, url, stack)
    extent = slurm_extent(asked.faults, asked.every, frozenset(asked.only or SLURM_KINDS), mounts=os.geteuid() == 0)
    return stack.enter_context(contextlib.closing(SlurmChaosRun(site, url, extent, asked.seed, cluster)))


def _site(directory: Path, url: str, stack: contextlib.ExitStack) -> WorkSite:
    store = stack.enter_context(init_queue(url))
    return stack.enter_context(contextlib.closing(WorkSite(directory, store, queue=url)))


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="stoker-chaos-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextlib.contextmanager
def _own_cgroup() -> Iterator[Path | None]:
    """One in which nobody else makes any, so that whatever is left there is Stoker's; None where there is none."""
    try:
        parent = own_cgroup()
        cgroup = parent / f"chaos-{os.getpid()}"
        cgroup.mkdir()
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    except (OSError, NoCgroupError):
        yield None
        return
    try:
        yield cgroup
    finally:
        with contextlib.suppress(OSError):
            (parent / "cgroup.procs").write_text(str(os.getpid()))
            cgroup.rmdir()


# All of them


class _Round(NamedTuple):
    seed: int
    place: str
    faults: int
    every: float


def rounds(asked: argparse.Namespace) -> list[_Round]:
    """Machines and cluster take turns, so that both are seen early."""
    machines = [place for place in asked.on or PLACES if place != "slurm"]
    found = {
        "machines": _rounds(asked, machines, asked.faults or FAULTS, asked.every or EVERY),
        "slurm": _rounds(asked, ["slurm"], asked.faults or SLURM_FAULTS, asked.every or SLURM_EVERY),
    }
    chosen = [found["machines"]] if machines else []
    chosen += [found["slurm"]] if "slurm" in (asked.on or PLACES) else []
    return [one for turn in itertools.zip_longest(*chosen) for one in turn if one is not None]


def _rounds(asked: argparse.Namespace, places: list[str], faults: int, every: float) -> list[_Round]:
    return [
        _Round(
            asked.seed + number,
            places[number % len(places)],
            min(asked.per_round, faults - number * asked.per_round),
            every,
        )
        for number in range(-(-faults // asked.per_round) if places else 0)
    ]


def play_all(asked: argparse.Namespace) -> list[Result]:
    """Several at a time: most of a round is waiting."""
    waiting = rounds(asked)
    print(f"chaos with seed {asked.seed}: {sum(one.faults for one in waiting)} faults", flush=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="stoker-chaos-results-") as scratch:
        playing: list[tuple[_Round, subprocess.Popen[bytes], Path, float]] = []
        while waiting or playing:
            while waiting and len(playing) < asked.at_once:
                fresh = waiting.pop(0)
                file = Path(scratch) / f"{fresh.place}-{fresh.seed}"
                playing.append((fresh, _round(asked, fresh, file), file, time.monotonic()))
            time.sleep(0.2)
            for one in list(playing):
                played, process, file, begun = one
                if process.poll() is None and time.monotonic() - begun < LONGEST_ROUND:
                    continue
                playing.remove(one)
                results.append(_result(played, process, file))
                _print_result(results[-1])
    return results


def _round(asked: argparse.Namespace, played: _Round, file: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.chaos", "--round", str(file), "--seed", str(played.seed)]
    command += ["--faults", str(played.faults), "--every", str(played.every), "--on", played.place]
    command += [word for kind in asked.only or () for word in ("--only", kind)]
    command += ["--keep", str(asked.keep / file.name)] if asked.keep is not None else []
    # What is mounted there is gone when the round is, however that ends.
    apart = ["unshare", "--mount"] if os.geteuid() == 0 and shutil.which("unshare") else []
    with file.with_suffix(".log").open("wb") as log:
        return subprocess.Popen([*apart, *command], stdout=log, stderr=subprocess.STDOUT)


def _result(played: _Round, process: "subprocess.Popen[bytes]", file: Path) -> Result:
    if process.poll() is None:
        process.kill()
    if process.wait() == 0 and file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Result)
    said = file.with_suffix(".log").read_text(errors="replace")[-4000:]
    return Result(played.seed, played.place, {}, 0, 0, 0.0, 0.0, [f"the round itself failed: {said}"])


def _print_result(result: Result) -> None:
    faults = sum(result.struck.values())
    print(
        f"seed {result.seed} on {result.place}: {faults} faults, {result.jobs} jobs, {result.attempts} attempts, "
        f"{result.seconds:.0f} s (the machine was held up for {result.held_up:.0f}), {len(result.findings)} findings",
        flush=True,
    )
    for finding in result.findings:
        print(f"  {finding}", flush=True)


def report(seed: int, results: list[Result]) -> int:
    struck: Counter[str] = Counter()
    for result in results:
        struck.update(result.struck)
    print(f"\n{'fault':40} {'times':>6}")
    for kind, count in sorted(struck.items(), key=lambda item: -item[1]):
        print(f"{kind:40} {count:6}")
    findings = sum(len(result.findings) for result in results)
    print(f"{'all':40} {sum(struck.values()):6}\n")
    print(
        f"{sum(one.jobs for one in results)} jobs in {sum(one.attempts for one in results)} attempts, seed {seed}: "
        + (f"{findings} findings" if findings else "every outcome is right, no overlap, nothing is left")
    )
    return bool(findings)


if __name__ == "__main__":
    sys.exit(soak.main(sys.argv[2:]) if sys.argv[1:2] == ["soak"] else main())
