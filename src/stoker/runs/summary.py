"""A run as one object, the same in tables, on the screen and as JSON."""

import time
from typing import Any, Final, Literal

import msgspec

from stoker.runs.record import Record, readable

_LOST: Final = "Its supervisor is gone and left no status, as after a crash of the machine."
_ENDED: Final = {
    "time limit": "stopped, time limit",
    "signal": "stopped",
    "exited": "ended",
    "cancelled": "cancelled",
    "preempted": "preempted",
    "lease": "stopped, lease over",
    "machine": "stopped with its machine",
    "not started": "not started",
}


class Summary(msgspec.Struct, kw_only=True):
    """What is known of a run now. The fields are documented in docs/reference/json.md."""

    id: str
    state: Literal["starting", "running", "stopping", "ended", "lost"]
    command: tuple[str, ...]
    directory: str
    user: str
    host: str
    started: float
    ended: float | None
    seconds: float
    pid: int | None
    verdict: str
    verdict_reason: str
    progress: float
    snoozed_until: float | None
    policy: dict[str, Any]
    rule: str
    gpus: str
    used: tuple[str, ...]
    dry_run: bool
    containment: str
    ending: str | None
    stopped_by: str
    """The name of the rule that stopped it; empty if none did."""
    reason: str
    exit_code: int | None
    left: tuple[str, ...]
    report: str | None
    record: str


def summary_of(record: Record) -> Summary:
    spec, status = record.spec(), record.status()
    is_alive = record.is_alive(spec)
    is_lost = not is_alive and status.state != "ended"
    snooze = record.snooze() if is_alive else None
    fields = {
        **msgspec.structs.asdict(status),
        **msgspec.structs.asdict(spec),
        "seconds": max((time.time() if status.ended is None else status.ended) - spec.started, 0.0),
        "pid": status.job if is_alive else None,
        "snoozed_until": snooze.wall if snooze else None,
        "stopped_by": status.rule,
        "report": readable(str(record.report)) if record.report.exists() else None,
        "record": readable(str(record.directory)),
    }
    if is_lost:
        fields |= {"state": "lost", "reason": _LOST}
    return msgspec.convert(fields, Summary)


def in_a_word(summary: Summary) -> str:
    """How it ended, or its state: for a column of a table."""
    if summary.state == "lost":
        return "lost"
    if summary.state == "ended":
        ending = summary.ending or "ended"
        return f"stopped, {ending}" if summary.stopped_by else _ENDED.get(ending, ending)
    if summary.snoozed_until is not None:
        return "snoozed"
    return summary.verdict if summary.state == "running" else summary.state
