"""Jobs as a table on a terminal, and the line that sums the queue up."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stoker.queue.explanation import Surroundings, Why, gpu_names, spoken
from stoker.queue.fields import State
from stoker.queue.model import ENDED, Job
from stoker.status.job_text import job_label
from stoker.units import format_duration, format_memory

# In the order of the table.
ORDER: Final[tuple[State, ...]] = ("running", "queued", "held", "succeeded", "failed", "cancelled")
_COLOURS: Final = {"running": "green", "failed": "red", "held": "yellow", "cancelled": "dim", "succeeded": ""}
# The first few are enough to know where the work is done.
_MOST_HOSTS: Final = 3


class Line(NamedTuple):
    """One job as words."""

    id: str
    state: str
    gpus: str
    when: str
    lasted: str
    exit_code: str
    what: str


def line_of(job: Job, why: Why, around: Surroundings) -> Line:
    return Line(
        id=job.id,
        state=f"{job.state}, {why.word}" if why.word else job.state,
        gpus=_gpus(job, around),
        when=_when(job, around.now),
        lasted=_lasted(job, around.now),
        exit_code="" if job.exit_code is None else str(job.exit_code),
        what=job_label(job),
    )


def _gpus(job: Job, around: Surroundings) -> str:
    """Which ones a job has while it runs, and how many it asks for otherwise."""
    attempt = around.running.get(job.id) if job.state == "running" else None
    if attempt is not None:
        worker = next((known for known in around.workers if known.id == attempt.worker), None)
        where = f"{worker.host}:" if worker is not None else ""
        return f"{where}{','.join(gpu_names(attempt.gpus, worker)) or '-'}"
    if not job.gpus:
        return "-"
    return str(job.gpus) if job.memory is None else f"{job.gpus} x {format_memory(job.memory)}"


def _when(job: Job, now: float) -> str:
    """When it came into its state, as far as that is remembered."""
    since = job.started if job.state == "running" else job.ended if job.state in ENDED else job.submitted
    return "" if since is None else f"{format_duration(max(0, round(now - since)))} ago"


def _lasted(job: Job, now: float) -> str:
    if job.started is None or job.state in {"queued", "held"}:
        return ""
    until = now if job.state == "running" else job.ended
    return "" if until is None or until < job.started else format_duration(round(until - job.started))


def print_jobs(lines: Sequence[Line]) -> None:
    from rich.text import Text

    from stoker.cli.tables.table import Column, print_table

    columns = (
        Column("job"),
        # What is behind the state itself may be cut.
        Column("state", gives="cut", least=24),
        Column("gpus", gives="middle", least=14, left_out=1),
        Column("when", "right", left_out=2),
        Column("for", "right", left_out=3),
        Column("exit", "right"),
        Column("name or command", gives="cut"),
    )
    rows = [
        (line.id, Text(line.state, style=_COLOURS.get(line.state.partition(",")[0], "")), *line[2:]) for line in lines
    ]
    print_table(columns, rows)


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
