"""Runs jobs with limits through a worker, and prints how each attempt ended, for a machine with cgroups."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from stoker.queue import JobSpec, init_queue
from stoker.runs.processes.cgroup import own_cgroup

MIB = 2**20
_LIMITS = "cd /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup) && cat cpu.max memory.max"
_TAKE = "exec python -S -c \"x = bytearray(b'x' * {} * 2**20); print('fine')\""
_WORK = ("stoker", "work", "--until-empty", "--cpus", "2", "--cpu-jobs", "1", "--source", "sim:1")


def _job(mebibytes: int, **asked: Any) -> JobSpec:
    return JobSpec(command=f"{_LIMITS}; {_TAKE.format(mebibytes)}", gpus=0, directory="/run", **asked)


def output_of(job: str, number: int) -> str:
    return (Path.home() / ".local/state/stoker/attempts" / f"{job}-{number}" / "output").read_text()


def main() -> None:
    """One job at a time, so that the last one has the cgroup of an earlier one."""
    jobs = {
        "greedy": _job(80, cpus=2, ram=40 * MIB),
        "modest": _job(5, cpus=2, ram=40 * MIB),
        "after them": _job(60),
    }
    found: dict[str, object] = {}
    with init_queue() as store:
        ids = dict(zip(jobs, store.jobs.submit(list(jobs.values())), strict=True))
        subprocess.run(_WORK, check=True, stdout=subprocess.DEVNULL)
        for name, job in ids.items():
            found[name] = [
                [one.outcome, one.exit_code, one.reason, output_of(job, one.number)] for one in store.attempts.of(job)
            ]
    found["left"] = sorted(one.name for one in own_cgroup().parent.iterdir() if one.is_dir())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
