"""`stoker replay`: try a rule on recorded readings."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from stoker.cli.options.policy import policy_options_with
from stoker.cli.output import count_of, json_option, note, print_json
from stoker.cli.tables import replay as text
from stoker.cli.tables.replay_page import Timeline, page_of
from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Look, known
from stoker.gpus.recording import RecordingReader
from stoker.rules.registry import policies_of, stored_form
from stoker.rules.replay import Firing, Replay, Stretch, replay, rhythm_of
from stoker.rules.scope import MachineScope
from stoker.units import format_duration

# A recording has no start of a job to wait for.
_DEFAULTS: Final = {"after": 0.0}
# Enough to find the interval between looks.
_HEAD: Final = 1000
_ONLY_LIVE: Final = ("visible", "mine", "job")
_HOUR: Final = 3600.0


def _at_the_recordings_rhythm(command: click.Command) -> click.Command:
    """`--every` has another meaning here: the looks are recorded already."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name == "every":
            parameter.help = "The longest time between looks before it is a gap [as recorded]."
    return command


@_at_the_recordings_rhythm
@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--gpus", "chosen", metavar="GPUS", default="all", help="Only these: all, 0,2, 0-3 or uuids [all].")
@policy_options_with(defaults=_DEFAULTS)
@click.option(
    "--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with charts to this file."
)
@json_option("Print the result as JSON.")
@click.pass_context
def replay_command(
    ctx: click.Context, /, trace: Path, chosen: str, page: Path | None, as_json: bool, **rules: Any
) -> int:
    """Show what a rule would have done with the readings in TRACE, when, and what that would have saved.

    TRACE is a file of `stoker record`. No GPU or process is touched.
    """
    if chosen.strip().lower() in _ONLY_LIVE:
        raise BadInputError(f"--gpus {chosen} needs a running job: for a recording write all, 0,2 or uuids")
    if page is not None and page.exists() and trace.exists() and page.samefile(trace):
        raise BadInputError(f"--html {page} is the recording itself: choose another file")
    reader = RecordingReader(trace)
    looks, rhythm = _begun(reader, trace)
    if ctx.get_parameter_source("every") is click.core.ParameterSource.DEFAULT:
        rules["every"] = rhythm
    # It cannot look more often than the recording.
    policies = policies_of({**rules, "every": max(rules["every"], rhythm)})
    if not policies:
        raise BadInputError("every rule is off: there is nothing to replay")
    timeline = Timeline(min(policy.longest_gap for policy in policies)) if page is not None else None
    try:
        found = replay(timeline.following(looks) if timeline else looks, policies, MachineScope(chosen, {}))
    except BadInputError as error:
        raise BadInputError(f"in {trace}, {error}") from None
    if page is not None and timeline is not None:
        try:
            page.write_text(page_of(found, timeline, trace.name), encoding="utf-8")
        except OSError as error:
            raise StokerError(f"cannot write to {page}: {error.strerror}") from None
    if as_json:
        print_json(_as_json(found, trace, reader.damaged))
    else:
        _print(found, trace)
    if reader.damaged:
        note(f"{count_of(reader.damaged, 'damaged line')} in {trace} skipped")
    if page is not None:
        note(f"wrote {page}")
    return 0


def _begun(reader: RecordingReader, trace: Path) -> tuple[Iterator[Look], float]:
    """The looks of a recording, and the interval between its first ones."""
    looks = iter(reader)
    head = list(itertools.islice(looks, _HEAD))
    if not head:
        raise BadInputError(f"{trace} holds no readings yet")
    return itertools.chain(head, looks), rhythm_of(head)


def _print(found: Replay, trace: Path) -> None:
    every = format_duration(found.every)
    lines = [
        f"{trace}: {count_of(len(found.gpus), 'GPU')}, a look every {every}",
        text.period(found),
        f"Rule: {text.rule(found.policies)}",
        "",
        *itertools.chain.from_iterable(_firing_in_lines(n, firing) for n, firing in enumerate(found.firings, 1)),
        text.outcome(found),
    ]
    lines += [sentence for sentence in (text.cost(found), text.warnings(found)) if sentence]
    lines += text.blind_spots(found)
    sys.stdout.write("\n".join(lines) + "\n")


def _firing_in_lines(number: int, firing: Firing) -> list[str]:
    after = text.what_came_after(firing)
    mark = "work came back: " if firing.hit_work else ""
    lines = [
        f"{number:3}. {text.local_time(firing.moment.wall)}  {firing.reason}",
        f"     {mark}{after}; {text.gpu_hours(firing.saved)} GPU-hours saved",
    ]
    if (working := text.also_working(firing)) is not None:
        lines.append(f"     {working}")
    return [*lines, ""]


def _as_json(found: Replay, trace: Path, damaged: int) -> dict[str, Any]:
    totals = found.totals
    return {
        "trace": str(trace),
        "policy": stored_form(found.policies, whole=True),
        "gpus": [
            {"uuid": gpu.uuid, "index": gpu.index, "name": gpu.name if known(gpu.name) else None} for gpu in found.gpus
        ],
        "looks": found.looks,
        "damaged_lines": damaged,
        "from": round(found.begun.wall, 3),
        "to": round(found.ended.wall, 3),
        "seconds": round(found.ended.at - found.begun.at, 3),
        "firings": [_firing(firing) for firing in found.firings],
        "firings_that_hit_work": found.hits,
        "warnings": [
            {"time": round(warned.moment.wall, 3), "reason": warned.reason, "fired": warned.fired}
            for warned in found.warnings
        ],
        "unknown": [_stretch(stretch) for stretch in found.unknown],
        "gaps": [_stretch(gap) for gap in found.gaps],
        "gpu_hours": {name: round(seconds / _HOUR, 4) for name, seconds in totals._asdict().items()},
    }


def _firing(firing: Firing) -> dict[str, Any]:
    return {
        "time": round(firing.moment.wall, 3),
        "verdict": firing.kind,
        "reason": firing.reason,
        "gpus": list(firing.gpus),
        "working": list(firing.working),
        "idle_before": round(firing.moment.at - firing.window_from.at, 3),
        "idle_after": round(firing.idle_after, 3),
        "used_again": firing.resumed,
        "used_again_by": firing.resumed_by,
        "same_process": firing.same_process,
        "hit_work": firing.hit_work,
        "saved_gpu_hours": round(firing.saved / _HOUR, 4),
    }


def _stretch(stretch: Stretch) -> dict[str, Any]:
    return {
        "from": round(stretch.begun.wall, 3),
        "to": round(stretch.ended.wall, 3),
        "seconds": round(stretch.seconds, 3),
        "reason": stretch.reason,
    }
