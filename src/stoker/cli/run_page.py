"""All that is known of one run, for a person or a program."""

import shlex
import time

from stoker.masking import masked_command
from stoker.rules.policy import Policy
from stoker.runs.record import Record
from stoker.runs.summary import Summary, in_a_word, summary_of
from stoker.units import format_duration


def run_json(record: Record) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(summary_of(record)), indent=2).decode() + "\n"


def run_text(record: Record) -> str:
    summary = summary_of(record)
    report = "" if summary.report is None else "\n" + record.report.read_text(encoding="utf-8")
    return _text(summary) + report


def _text(summary: Summary) -> str:
    policy = Policy(**summary.policy)
    lines = {
        "run": summary.id + (" (dry run)" if summary.dry_run else ""),
        "command": masked_command(shlex.join(summary.command)),
        "directory": summary.directory,
        "started": f"{_clock(summary.started)} by {summary.user} on {summary.host}",
        "state": f"{in_a_word(summary)}, for {format_duration(round(summary.seconds))}",
        "rule": policy.in_words(),
    }
    if summary.state in {"running", "stopping"}:
        lines["pid"] = str(summary.pid)
        lines["verdict"] = f"{summary.verdict}: {summary.verdict_reason}"
    if summary.snoozed_until is not None:
        lines["snoozed"] = f"until {_clock(summary.snoozed_until)}"
    if summary.ended is not None:
        lines["ended"] = f"{_clock(summary.ended)} with code {summary.exit_code}"
    if summary.reason:
        lines["why"] = summary.reason
    for left in summary.left:
        lines["left over"] = left
    lines["contained by"] = summary.containment
    lines["record"] = summary.record
    return "".join(f"{name:13}{value}\n" for name, value in lines.items() if value)


def _clock(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
