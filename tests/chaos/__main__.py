"""Random faults at full size, on SQLite and on PostgreSQL, and ten thousand jobs through one worker.

`make chaos` runs it. The same `--seed` gives the same faults in the same order.
"""

import argparse
import contextlib
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
from typing import Final

import msgspec

from stoker.queue import init_queue
from stoker.runs.processes.cgroup import NoCgroupError, own_cgroup
from tests.chaos import soak
from tests.support.chaos import KINDS, ChaosRun, Extent
from tests.support.postgres import DURABLE, running_server
from tests.support.work_site import WorkSite

FAULTS: Final = 2000
PER_ROUND: Final = 125
AT_ONCE: Final = 2
EVERY: Final = 0.25
# A round that takes longer is stuck.
LONGEST_ROUND: Final = 1800.0
DATABASES: Final = ("sqlite", "postgres")


class Result(msgspec.Struct):
    """What a round found."""

    seed: int
    database: str
    struck: dict[str, int]
    jobs: int
    attempts: int
    seconds: float
    findings: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=FAULTS, help=f"number of faults [{FAULTS}]")
    parser.add_argument("--every", type=float, default=EVERY, help=f"seconds between two faults of a round [{EVERY:g}]")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--database", choices=DATABASES, help="only on this one")
    parser.add_argument("--only", action="append", choices=sorted(KINDS), help="only faults of this kind, or of these")
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
    kinds = frozenset(asked.only or KINDS)
    with contextlib.ExitStack() as place:
        directory = place.enter_context(_directory(asked.keep))
        cgroup = place.enter_context(_own_cgroup())
        os.environ["STOKER_HOME"] = str(directory / "nobody")
        server = place.enter_context(running_server(DURABLE)) if asked.database == "postgres" else None
        (directory / "queue").mkdir()
        url = str(directory / "queue" / "queue.db") if server is None else server.create_database()
        store = place.enter_context(init_queue(url))
        site = place.enter_context(contextlib.closing(WorkSite(directory, store, queue=url)))
        extent = Extent(
            asked.faults, asked.every, machines=1 if server is None else 2, kinds=kinds, mounts=os.geteuid() == 0
        )
        chaos = place.enter_context(contextlib.closing(ChaosRun(site, url, extent, asked.seed, server)))
        chaos.run(lambda line: print(line, flush=True))
        findings = chaos.findings()
        findings += [f"{left} is left" for left in cgroup.glob("stoker-*")] if cgroup is not None else []
        return Result(
            asked.seed,
            asked.database,
            dict(chaos.struck),
            chaos.jobs,
            chaos.attempts,
            chaos.seconds,
            findings,
        )


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


def play_all(asked: argparse.Namespace) -> list[Result]:
    """Several at a time: most of a round is waiting."""
    print(f"chaos with seed {asked.seed}: {asked.faults} faults", flush=True)
    databases = [asked.database] if asked.database else list(DATABASES)
    rounds = -(-asked.faults // asked.per_round)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="stoker-chaos-results-") as scratch:
        waiting = [
            (number, databases[number % len(databases)], min(asked.per_round, asked.faults - number * asked.per_round))
            for number in range(rounds)
        ]
        playing: dict[int, tuple[subprocess.Popen[bytes], Path, str, float]] = {}
        while waiting or playing:
            while waiting and len(playing) < asked.at_once:
                number, database, faults = waiting.pop(0)
                file = Path(scratch) / f"round-{number}"
                playing[number] = _round(asked, number, database, faults, file), file, database, time.monotonic()
            time.sleep(0.2)
            for number, (process, file, database, begun) in list(playing.items()):
                if process.poll() is None and time.monotonic() - begun < LONGEST_ROUND:
                    continue
                del playing[number]
                results.append(_result(asked.seed + number, database, process, file))
                _print_result(results[-1])
    return results


def _round(asked: argparse.Namespace, number: int, database: str, faults: int, file: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.chaos", "--round", str(file), "--seed", str(asked.seed + number)]
    command += ["--faults", str(faults), "--every", str(asked.every), "--database", database]
    command += [word for kind in asked.only or () for word in ("--only", kind)]
    command += ["--keep", str(asked.keep / str(number))] if asked.keep is not None else []
    # What is mounted there is gone when the round is, however that ends.
    apart = ["unshare", "--mount"] if os.geteuid() == 0 and shutil.which("unshare") else []
    with file.with_suffix(".log").open("wb") as log:
        return subprocess.Popen([*apart, *command], stdout=log, stderr=subprocess.STDOUT)


def _result(seed: int, database: str, process: "subprocess.Popen[bytes]", file: Path) -> Result:
    if process.poll() is None:
        process.kill()
    if process.wait() == 0 and file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Result)
    said = file.with_suffix(".log").read_text(errors="replace")[-4000:]
    return Result(seed, database, {}, 0, 0, 0.0, [f"the round itself failed: {said}"])


def _print_result(result: Result) -> None:
    faults = sum(result.struck.values())
    print(
        f"seed {result.seed} on {result.database}: {faults} faults, {result.jobs} jobs, {result.attempts} attempts, "
        f"{result.seconds:.0f} s, {len(result.findings)} findings",
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
