"""Jobs as a table on a terminal, and the line that sums the queue up."""

from collections.abc import Mapping, Sequence
from typing import Final

from stoker.queue.explanation import Surroundings, Why, gpu_names, spoken
from stoker.queue.fields import State
from stoker.queue.model import Job
from stoker.status.job_columns import JobRow, columns_of

# In the order of the table.
ORDER: Final[tuple[State, ...]] = ("running", "queued", "held", "succeeded", "failed", "cancelled")
_COLOURS: Final = {"running": "green", "failed": "red", "held": "yellow", "cancelled": "dim", "succeeded": ""}
# The first few are enough to know where the work is done.
_MOST_HOSTS: Final = 3


def rows_of(jobs: Sequence[Job], reasons: Sequence[Why], around: Surroundings) -> list[JobRow]:
    rows = []
    for job, why in zip(jobs, reasons, strict=True):
        attempt = around.running.get(job.id) if job.state == "running" else None
        worker = next((known for known in around.workers if attempt and known.id == attempt.worker), None)
        gpus = () if attempt is None else gpu_names(attempt.gpus, worker) or ("-",)
        rows.append(JobRow(job=job, now=around.now, why=why, host=worker.host if worker else "", gpus=gpus))
    return rows


def print_jobs(rows: Sequence[JobRow]) -> None:
    from rich.text import Text

    from stoker.cli.tables.table import Column, print_table

    shown = columns_of("table")
    columns = [Column(one.title, one.justify, one.gives, one.least, one.left_out) for one in shown]
    cells = [
        [
            Text(column.text(row), style=_COLOURS.get(row.job.state, "") if column.key == "state" else "")
            for column in shown
        ]
        for row in rows
    ]
    print_table(columns, cells)


def summed_up(counts: Mapping[State, int], around: Surroundings) -> str:
    """`2 running, 14 queued, 120 succeeded; 1 worker, on gpu-box`, or what keeps jobs from starting."""
    states = ", ".join(f"{counts[state]:,} {state}" for state in ORDER if counts.get(state)) or "no jobs"
    paused = "; the queue is paused: `stoker resume` lets jobs start" if around.paused else ""
    return f"{states}; {_workers(around)}{paused}"


def _workers(around: Surroundings) -> str:
    there = around.there()
    if not there:
        last = max((worker.seen for worker in around.workers), default=None)
        heard = "" if last is None else f" (the last was heard of {spoken(around.now - last)} ago)"
        return f"no worker is there{heard}: `stoker work` starts one"
    hosts = [f"{worker.host} (paused)" if worker.paused else worker.host for worker in there]
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return f"{len(there)} {'worker' if len(there) == 1 else 'workers'}, on {', '.join(hosts[:_MOST_HOSTS])}{more}"
