"""Jobs and runs for people: a table, the details of one, and the summary of the queue."""

import functools
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from stoker.masking import masked, masked_actions, masked_command, masked_environment, masked_notify
from stoker.queue.explanation import QueueContext, Why, gpu_names, spoken
from stoker.queue.fields import State
from stoker.queue.groups import Group
from stoker.queue.model import Job
from stoker.status.job_columns import JobColumn, JobRow, columns_of
from stoker.status.job_text import command_text, figures_text, job_title, one_line, slurm_text, when_text, where_text
from stoker.units import format_duration, format_memory

if TYPE_CHECKING:
    from stoker.fit.model import ProbeOutcome
    from stoker.queue import Store
    from stoker.runs.record import Record, RunProgress, Summary
    from stoker.status.detail import AttemptDetail, JobDetail

# In the order of the table.
ORDER: Final[tuple[State, ...]] = ("running", "queued", "held", "succeeded", "failed", "cancelled")
_COLOURS: Final = {"running": "green", "failed": "red", "held": "yellow", "cancelled": "dim", "succeeded": ""}
_MOST_HOSTS: Final = 3
_NO_GROUP: Final = Group(name="")


def rows_of(store: "Store", jobs: Sequence[Job], reasons: Sequence[Why | None], context: QueueContext) -> list[JobRow]:
    rows, figures = [], _figures(store, jobs)
    workers = {worker.id: worker for worker in context.workers}
    for job, reason in zip(jobs, reasons, strict=True):
        attempt = context.running.get(job.id) if job.state == "running" else None
        if attempt is None:
            rows.append(JobRow(job=job, now=context.now, why=reason, figures=figures.get(job.id, {})))
            continue
        worker = workers.get(attempt.worker)
        gpus, host = gpu_names(attempt.gpus, worker) or ("-",), worker.host if worker else ""
        where, shown = attempt.where, figures.get(job.id, {})
        rows.append(JobRow(job=job, now=context.now, why=reason, host=host, gpus=gpus, where=where, figures=shown))
    return rows


def _figures(store: "Store", jobs: Sequence[Job]) -> dict[str, dict[str, float | None]]:
    if not any(job.metrics for job in jobs):
        return {}
    from stoker.status.progress import last_metrics

    return last_metrics(store, jobs)


def print_jobs(rows: Sequence[JobRow], groups: Mapping[str, Group] = {}) -> None:
    """`groups`: groups shown as one row, at the place of their first job."""
    from stoker.cli.tables.table import Column, print_table

    shown = columns_of("table", rows)
    columns = [Column(one.title, one.justify, one.gives, one.least, one.left_out) for one in shown]
    cells = [
        [
            _state_cell(column.text(row), row.job.state) if column.key == "state" else column.text(row)
            for column in shown
        ]
        if row is not None
        else _group_cells(shown, group)
        for row, group in _folded(rows, groups)
    ]
    print_table(columns, cells)


def _folded(rows: Sequence[JobRow], groups: Mapping[str, Group]) -> list[tuple[JobRow | None, Group]]:
    """The rows; a group replaces its first job, and its other jobs are omitted."""
    found: list[tuple[JobRow | None, Group]] = []
    seen: set[str] = set()
    for row in rows:
        group = groups.get(row.job.group)
        if group is None or group.total < 2:
            found.append((row, _NO_GROUP))
        elif group.name not in seen:
            found.append((None, group))
            seen.add(group.name)
    return found


def _group_cells(shown: Sequence[JobColumn], group: Group) -> list[Any]:
    state = next((one for one in ORDER if group.counts.get(one)), "queued")
    texts = {"id": "group", "name": f"{one_line(group.name)}: {group.progress}"}
    return [_state_cell(state, state) if one.key == "state" else texts.get(one.key, "") for one in shown]


@functools.cache
def _state_cell(text: str, state: State) -> str:
    """One for all jobs in this state: there may be a hundred thousand."""
    from stoker.cli.tables.table import Styled

    return Styled((text, _COLOURS.get(state, "")))


def summed_up(counts: Mapping[State, int], context: QueueContext) -> str:
    """`2 running, 14 queued, 120 succeeded; 1 worker, on gpu-box`, and why jobs do not start. Jobs that wait in a
    cluster count as pending.
    """
    pending = sum(attempt.pending for attempt in context.running.values())
    shown: dict[str, int] = {"running": max(0, counts.get("running", 0) - pending), "pending": pending}
    shown |= {state: counts.get(state, 0) for state in ORDER if state != "running"}
    states = ", ".join(f"{count:,} {state}" for state, count in shown.items() if count) or "no jobs"
    paused = "; the queue is paused: `stoker resume` starts jobs again" if context.paused else ""
    return f"{states}; {_workers(context)}{paused}"


def _workers(context: QueueContext) -> str:
    there = context.there()
    if not there:
        last = max((worker.seen for worker in context.workers), default=None)
        seen = "" if last is None else f" (last seen {spoken(context.now - last)} ago)"
        return f"no worker is running{seen}: `stoker work` starts one"
    hosts = [f"{worker.host} (paused)" if worker.paused else worker.host for worker in there]
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return f"{len(there)} {'worker' if len(there) == 1 else 'workers'}, on {', '.join(hosts[:_MOST_HOSTS])}{more}"


def show_json(detail: "JobDetail", hosts: Mapping[str, str], home: Path) -> dict[str, Any]:
    """`hosts`: host names by worker id."""
    return {
        "job": job_json(detail.job),
        "attempts": [
            {**msgspec.to_builtins(one.attempt), "host": hosts.get(one.attempt.worker)} for one in detail.attempts
        ],
        "why": detail.why,
        "figures": detail.figures,
        "log": _file(detail, home, "output"),
        "report": _file(detail, home, "report.md"),
        "details": detail.last.details if detail.last else None,
    }


def _file(detail: "JobDetail", home: Path, name: str) -> str | None:
    """A file of the last attempt, if it ran here."""
    from stoker.logs.reader import attempt_directory

    path = attempt_directory(home, detail.last.attempt) / name if detail.last else None
    return str(path) if path is not None and path.exists() else None


def show_text(detail: "JobDetail", home: Path) -> str:
    lines = {**_request(detail.job), **_state(detail), "output": _file(detail, home, "output") or ""}
    parts = ["".join(f"{name:13}{_indented(value)}\n" for name, value in lines.items() if value)]
    if detail.last is not None:
        parts.append("attempts\n" + "".join(f"{_attempt_words(one, detail.now)}\n" for one in detail.attempts))
        # The copy in the queue may be cut.
        here = _file(detail, home, "report.md")
        report = Path(here).read_text(encoding="utf-8", errors="replace") if here else detail.last.details.report
        if report:
            parts.append("\n".join(map(_printable, report.rstrip("\n").split("\n"))) + "\n")
    return "\n".join(parts)


def _state(detail: "JobDetail") -> dict[str, str]:
    job = detail.job
    submitted = [_clock(job.submitted)]
    submitted += [f"by {job.submitter}"] if job.submitter else []
    submitted += [f"from {job.origin}"] if job.origin else []
    return {
        "submitted": ", ".join(submitted),
        "state": job.shown_state,
        "why": "\n".join([detail.why.reason, *detail.why.details]),
        "fit": fit_words(detail.last.details.fit) if detail.last else "",
        "metrics": _metrics(detail),
        "link": job.link,
    }


def _metrics(detail: "JobDetail") -> str:
    """The newest values, or before the first ones the names of the metrics."""
    missing = [name for name in detail.job.metrics if name not in detail.figures]
    return ", ".join([*filter(None, [figures_text(detail.figures)]), *(f"{name} not printed" for name in missing)])


def _request(job: Job) -> dict[str, str]:
    return {
        "job": job_title(job),
        "command": command_text(job),
        "directory": job.directory,
        "environment": " ".join(f"{name}={value}" for name, value in masked_environment(job.environment).items()),
        "group": job.group + ("" if job.at_most is None else f", at most {job.at_most} at once"),
        "tags": ", ".join(job.tags),
        "then": ", then ".join(masked_actions(job.then)),
        "notify": ", ".join(masked_notify(job.notify)),
        "gpus": _gpus(job),
        "machines": "" if job.nodes == 1 else str(job.nodes),
        "where": where_text(job),
        "cpus": "" if job.cpus is None else str(job.cpus),
        "ram": "" if job.ram is None else format_memory(job.ram),
        "slurm": slurm_text(job),
        "batch size": "" if job.batch_size is None else str(job.batch_size),
        "priority": str(job.priority) if job.priority else "",
        "after": ", ".join([*job.after, *(f"{name} (however it ends)" for name in job.after_any)]),
        **when_text(job),
        "retries": _retries(job),
        "time limit": _time_limit(job),
        "rules": ", ".join(f"{name} {value}" for name, value in job.policy.items()),
        "when lost": "held" if job.on_loss == "hold" else "",
        "commit": _commit(job),
        "snapshot": _snapshot(job),
    }


def _gpus(job: Job) -> str:
    if not job.gpus:
        return "none"
    memory = "" if job.memory is None else f" with {format_memory(job.memory)} each"
    memory += "" if job.nodes == 1 else " on each machine"
    model = [] if job.gpu_model is None else [" or ".join(job.gpu_model.split("|"))]
    model += [] if job.gpu_memory is None else [f"of at least {format_memory(job.gpu_memory)}"]
    also = [what for what, holds in (("may share them", job.share), ("preemptible", job.preemptible)) if holds]
    return ", ".join([f"{job.gpus}{memory}", *model, *also])


def _retries(job: Job) -> str:
    if not job.retries:
        return ""
    on = f", on {', '.join(job.retry_on)}" if job.retry_on else ""
    return f"{job.retries_left} of {job.retries} left, the first after {format_duration(job.backoff)}{on}"


def _time_limit(job: Job) -> str:
    again = "then back to the queue" if job.requeue_at_limit else ""
    return ", ".join(filter(None, ["" if job.time_limit is None else format_duration(job.time_limit), again]))


def _commit(job: Job) -> str:
    if job.commit is None:
        return ""
    tree = ", with uncommitted changes" if job.dirty else ""
    return f"{job.commit}{tree}" + (", run from a worktree" if job.pin else "")


def _snapshot(job: Job) -> str:
    if job.code is None:
        return ""
    differs = f" (`stoker diff {job.id}`)" if job.code.changes else ""
    unused = "" if job.snapshot else "; it is not used"
    return f"{job.code.digest[:12]}: {job.code.extent}{differs}{unused}"


def _attempt_words(one: "AttemptDetail", now: float) -> str:
    """`  1  on gpu-box GPU 0,1, started …, lasted 2h05m, failed, exit code 1: out of memory`."""
    attempt = one.attempt
    gpus = f" GPU {','.join(one.gpus)}" if one.gpus else ""
    until = attempt.ended if attempt.ended is not None else now
    lasted = format_duration(max(0, round(until - attempt.started)))
    if attempt.pending:
        since = f"pending since {_clock(attempt.started)}"
        facts = [since] if attempt.outcome is None else ["never began", attempt.outcome]
    else:
        facts = [
            f"started {_clock(attempt.started)}",
            f"{'lasted' if attempt.ended is not None else 'for'} {lasted}",
            attempt.outcome or "running",
        ]
    if attempt.exit_code is not None:
        facts.append(f"exit code {attempt.exit_code}")
    because = f": {attempt.reason}" if attempt.reason else ""
    where = f"{attempt.where}, from {one.host}" if attempt.where else f"on {one.host}{gpus}"
    return f"  {attempt.number}  {where}, {', '.join(facts)}{because}"


def _indented(value: Any) -> str:
    """A value of several lines, without control characters."""
    return f"\n{'':13}".join(map(_printable, str(value).split("\n")))


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def _clock(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))


def fit_words(fit: Mapping[str, Any]) -> str:
    """A few lines about the batch size; empty without one, or if a newer Stoker wrote it."""
    from stoker.fit.model import Fitted

    try:
        fitted = msgspec.convert(fit, Fitted)
    except msgspec.ValidationError:
        return ""
    steps = "" if fitted.accumulate is None else f", {fitted.accumulate} steps of accumulation"
    found = f"batch size {fitted.size}{steps}, about {format_memory(fitted.predicted)} of {format_memory(fitted.limit)}"
    probes = ", ".join(map(_probe, fitted.observations))
    return "\n".join([found, *([f"tried {probes}"] if probes else []), *([fitted.note] if fitted.note else [])])


def _probe(seen: "ProbeOutcome") -> str:
    """`96 (61 GiB)`, `128 (out of memory)`."""
    if seen.outcome == "oom":
        return f"{seen.size} (out of memory)"
    return f"{seen.size} ({'fits' if seen.peak is None else format_memory(seen.peak)})"


def job_json(job: Job) -> dict[str, Any]:
    """Without secrets: JSON is pasted into chats and logs."""
    found: dict[str, Any] = masked(msgspec.to_builtins(job))
    return found


def print_runs(summaries: "Sequence[Summary]") -> None:
    from stoker.cli.tables.table import Column, print_table
    from stoker.runs.record import in_a_word

    columns = (
        Column("run"),
        Column("started", left_out=1),
        Column("for", "right", left_out=2),
        Column("what"),
        Column("exit", "right"),
        Column("command", gives="cut"),
    )
    rows = [
        (
            summary.id,
            time.strftime("%m-%d %H:%M", time.localtime(summary.started)),
            format_duration(round(summary.seconds)),
            in_a_word(summary),
            "" if summary.exit_code is None else str(summary.exit_code),
            masked_command(shlex.join(summary.command)),
        )
        for summary in summaries
    ]
    print_table(columns, rows)


def run_text(record: "Record") -> str:
    from stoker.runs.record import in_a_word, summary_of

    summary = summary_of(record)
    is_running = summary.state in {"running", "stopping"}
    lines = {
        "run": summary.id + (" (dry run)" if summary.dry_run else ""),
        "command": masked_command(shlex.join(summary.command)),
        "directory": summary.directory,
        "started": f"{_clock(summary.started)} by {summary.user} on {summary.host}",
        "state": f"{in_a_word(summary)}, for {format_duration(round(summary.seconds))}",
        "rule": summary.rule,
        "pid": str(summary.pid) if is_running else "",
        "verdict": f"{summary.verdict}: {summary.verdict_reason}" if is_running else "",
        "progress": "" if summary.progress is None else _progress_text(summary.progress),
        "snoozed": "" if summary.snoozed_until is None else f"until {_clock(summary.snoozed_until)}",
        "ended": "" if summary.ended is None else f"{_clock(summary.ended)} with code {summary.exit_code}",
        "why": summary.reason,
        "left over": ", ".join(summary.left),
        "contained by": summary.containment,
        "record": summary.record,
    }
    report = "" if summary.report is None else "\n" + record.report.read_text(encoding="utf-8")
    return "".join(f"{name:13}{value}\n" for name, value in lines.items() if value) + report


def _progress_text(progress: "RunProgress") -> str:
    """`120 steps, the last one at 14:02:11, seen by step counts in its log; rank 0: 60, rank 1: 60`."""
    from stoker.rules.stalled import SEEN_BY

    steps = "1 step" if progress.steps == 1 else f"{progress.steps:,} steps"
    text = f"{steps}, the last one at {_clock(progress.since)}, seen by {SEEN_BY[progress.trust]}"
    ranks = [f"rank {one.rank}: {one.steps:,}" for one in progress.ranks if one.rank is not None]
    return f"{text}; {', '.join(ranks)}" if len(ranks) > 1 else text
