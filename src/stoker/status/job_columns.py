"""The columns of a list of jobs, for `stoker list` as a table and as JSON, `stoker top` and the page."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from stoker.queue.explanation import Why
from stoker.queue.model import ENDED, Job
from stoker.status.job_text import command_text, figures_text, job_label
from stoker.units import format_duration, format_memory

List = Literal["table", "json", "top", "page"]


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a list, with further data."""

    job: Job
    now: float = 0.0
    why: Why | None = None
    host: str = ""
    """The machine that runs it."""
    gpus: Sequence[str] = ()
    """The names of its GPUs."""
    where: str = ""
    """Where it runs, if not on GPUs of its host."""
    figures: Mapping[str, float | None] = {}
    """The newest values of its metrics."""


class JobColumn(msgspec.Struct, frozen=True, kw_only=True):
    """One column."""

    key: str
    title: str
    text: Callable[[JobRow], str]
    lists: frozenset[List] = frozenset({"table", "json", "top", "page"})
    """Where it is shown. JSON has every field of a job, and `top` its own layout of the first columns."""
    justify: Literal["left", "right"] = "left"
    gives: Literal["never", "cut", "middle"] = "never"
    """How it shrinks on a narrow terminal."""
    least: int = 16
    left_out: int = 0
    """On a narrow terminal, the column with the highest number is omitted first; 0 is never omitted."""
    is_rare: bool = False
    """Whether it is omitted when empty."""


def gpus_text(row: JobRow) -> str:
    """The GPUs of a running job; otherwise the requested number."""
    if row.job.state == "running" and row.where and not row.job.is_pending:
        return row.where
    if row.job.state == "running" and not row.job.is_pending and (row.host or row.gpus):
        return f"{row.host}:{','.join(row.gpus) or '-'}".removeprefix(":")
    if not row.job.gpus:
        return "-"
    gpus = str(row.job.gpus) if row.job.memory is None else f"{row.job.gpus} x {format_memory(row.job.memory)}"
    return gpus if row.job.nodes == 1 else f"{row.job.nodes} machines x {gpus}"


def since_text(row: JobRow) -> str:
    """Time since it entered its state, or since its submission if it waits."""
    job = row.job
    is_running = job.state == "running" and not job.is_pending
    since = job.started if is_running else job.ended if job.state in ENDED else job.submitted
    return "" if since is None else f"{format_duration(max(0, round(row.now - since)))} ago"


def lasted_text(row: JobRow) -> str:
    job = row.job
    if job.started is None or job.state in {"queued", "held"}:
        return ""
    until = row.now if job.state == "running" else job.ended
    return "" if until is None or until < job.started else format_duration(round(until - job.started))


def state_text(row: JobRow) -> str:
    state = row.job.shown_state
    return f"{state}, {row.why.word}" if row.why is not None and row.why.word else state


def _in(*lists: List) -> frozenset[List]:
    return frozenset(lists)


COLUMNS: Final[list[JobColumn]] = [
    JobColumn(key="name", title="name", text=lambda row: job_label(row.job), lists=_in("table", "page"), gives="cut"),
    JobColumn(key="id", title="job", text=lambda row: row.job.id, lists=_in("table")),
    # Words after the state may be cut.
    JobColumn(key="state", title="state", text=state_text, lists=_in("table", "page"), gives="cut", least=24),
    JobColumn(key="command", title="command", text=lambda row: command_text(row.job), lists=_in("page")),
    JobColumn(key="when", title="when", text=since_text, lists=_in("page")),
    JobColumn(
        key="gpus", title="gpus", text=gpus_text, lists=_in("table", "page"), gives="middle", least=14, left_out=1
    ),
    JobColumn(key="since", title="when", text=since_text, lists=_in("table"), justify="right", left_out=2),
    JobColumn(key="lasted", title="for", text=lasted_text, lists=_in("table"), justify="right", left_out=3),
    JobColumn(
        key="figures",
        title="metrics",
        text=lambda row: figures_text(row.figures),
        lists=_in("table"),
        gives="cut",
        left_out=4,
        is_rare=True,
    ),
    JobColumn(
        key="exit_code",
        title="exit",
        text=lambda row: "" if row.job.exit_code is None else str(row.job.exit_code),
        lists=_in("table"),
        justify="right",
    ),
    JobColumn(key="tags", title="tags", text=lambda row: ", ".join(row.job.tags), lists=_in("page")),
    JobColumn(key="id", title="id", text=lambda row: row.job.id, lists=_in("page")),
]


def columns_of(where: List, rows: Sequence[JobRow] = ()) -> list[JobColumn]:
    """The columns of a list; rare ones only if one of these rows has a value."""
    shown = [column for column in COLUMNS if where in column.lists]
    return [column for column in shown if not column.is_rare or any(column.text(row) for row in rows)]
