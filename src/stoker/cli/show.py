"""`stoker show`: one run, whole: what was asked for, what is the case, and why it ended."""

import shlex
import sys
import time

import click

from stoker.places import state_home
from stoker.runs.record import Records
from stoker.runs.summary import Summary, in_a_word, summary_of
from stoker.units import format_duration
from stoker.verdicts.policy import Policy


@click.command("show")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(run: str | None, as_json: bool) -> int:
    """Show RUN (an id, or the beginning of one; the newest when left out), with its report if it was stopped."""
    records = Records(state_home())
    record = records.find(run or "") if run else next(records.newest_first(), None)
    if record is None:
        sys.stdout.write("no runs yet: `stoker run -- COMMAND` makes one\n")
        return 0
    summary = summary_of(record)
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n")
        return 0
    sys.stdout.write(_text(summary))
    if summary.report is not None:
        sys.stdout.write("\n" + record.report.read_text(encoding="utf-8"))
    return 0


def _text(summary: Summary) -> str:
    policy = Policy(**summary.policy)
    lines = {
        "run": summary.id + (" (dry run)" if summary.dry_run else ""),
        "command": shlex.join(summary.command),
        "directory": summary.directory,
        "started": f"{_clock(summary.started)} by {summary.user} on {summary.host}",
        "state": f"{in_a_word(summary)}, for {format_duration(round(summary.seconds))}",
        "rule": policy.in_words(),
    }
    if summary.state in {"running", "stopping"}:
        lines["pid"] = str(summary.pid)
        lines["verdict"] = f"{summary.verdict}: {summary.reason}"
    if summary.snoozed_until is not None:
        lines["snoozed"] = f"until {_clock(summary.snoozed_until)}"
    if summary.ended is not None:
        lines["ended"] = f"{_clock(summary.ended)} with code {summary.exit_code}"
    if summary.sentence:
        lines["why"] = summary.sentence
    for left in summary.left:
        lines["left over"] = left
    lines["contained by"] = summary.containment
    lines["record"] = summary.record
    return "".join(f"{name:13}{value}\n" for name, value in lines.items() if value)


def _clock(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
