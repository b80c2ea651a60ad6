"""`stoker replay`: apply rules to recorded readings, and score them on labelled ones."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from stoker.cli.options.policy import policy_options_with
from stoker.cli.output import count_of, json_option, note, print_json
from stoker.cli.tables import replay as text
from stoker.cli.tables.replay_page import Timeline, page_of
from stoker.cli.tables.table import Column, print_table
from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Look, known
from stoker.gpus.recording import RecordingReader
from stoker.procfs import user_name
from stoker.rules.registry import policies_of, stored_form
from stoker.rules.replay import Firing, Replay, Stretch, replay, rhythm_of
from stoker.rules.scope import JobScope, MachineScope
from stoker.rules.score import Label, Score, TraceOutcome, class_in_words, first_stop, hours_after, score
from stoker.units import format_duration

# A recording has no start of a job.
_DEFAULTS: Final = {"after": 0.0}
# Enough to find the interval between looks.
_HEAD: Final = 1000
_ONLY_LIVE: Final = ("visible", "mine", "job")
_HOUR: Final = 3600.0
_MOST_WARNINGS: Final = 20


def _at_the_recordings_rhythm(command: click.Command) -> click.Command:
    """`--every` has another meaning here: the looks are recorded already."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name == "every":
            parameter.help = "The longest time between looks before it is a gap [as recorded]."
    return command


@_at_the_recordings_rhythm
@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option(
    "--gpus",
    "chosen",
    metavar="GPUS",
    help="Only these: all, 0,2, 0-3 or uuids [in the recording of a run, the job's; else all].",
)
@click.option(
    "--corpus",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Instead of TRACE: score the rules on the labelled recordings in this directory.",
)
@click.option("--by-class", is_flag=True, help="With --corpus: also show each class of recordings.")
@policy_options_with(defaults=_DEFAULTS)
@click.option(
    "--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with charts to this file."
)
@json_option("Print the result as JSON.")
@click.pass_context
def replay_command(
    ctx: click.Context,
    /,
    trace: Path | None,
    chosen: str | None,
    corpus: Path | None,
    by_class: bool,
    page: Path | None,
    as_json: bool,
    **rules: Any,
) -> int:
    """Show when rules would have fired on the readings in TRACE, and what this would have saved. TRACE is a file of
    `stoker record`, or the `readings` of a run, which include the progress of the job. No GPU or process is touched.
    """
    if corpus is not None:
        if trace is not None or chosen is not None or page is not None:
            raise BadInputError("--corpus judges a whole directory: leave out TRACE, --gpus and --html")
        return _replay_corpus(corpus, {key: rules[key] for key in rules if _is_given(ctx, key)}, by_class, as_json)
    if trace is None:
        raise BadInputError("which recording? Give the path of one, or --corpus DIRECTORY")
    return _replay_trace(ctx, trace, chosen, page, as_json, rules)


def _replay_trace(
    ctx: click.Context, trace: Path, chosen: str | None, page: Path | None, as_json: bool, rules: dict[str, Any]
) -> int:
    if chosen is not None and chosen.strip().lower() in _ONLY_LIVE:
        raise BadInputError(f"--gpus {chosen} needs a running job: for a recording write all, 0,2 or uuids")
    if page is not None and page.exists() and trace.exists() and page.samefile(trace):
        raise BadInputError(f"--html {page} is the recording itself: choose another file")
    reader = RecordingReader(trace)
    looks, rhythm, has_job = _begun(reader, trace)
    if not _is_given(ctx, "every"):
        rules["every"] = rhythm
    # The interval cannot be shorter than the recording's.
    policies = policies_of({**rules, "every": max(rules["every"], rhythm)})
    if not policies:
        raise BadInputError("every rule is off: there is nothing to replay")
    timeline = Timeline(min(policy.longest_gap for policy in policies)) if page is not None else None
    scope = JobScope({}, _owner(trace)) if has_job and chosen is None else MachineScope(chosen or "all", {})
    try:
        found = replay(timeline.following(looks) if timeline else looks, policies, scope)
    except BadInputError as error:
        raise BadInputError(f"in {trace}, {error}") from None
    if page is not None and timeline is not None:
        _write(page, page_of(found, timeline, trace.name))
    if as_json:
        print_json(_as_json(found, trace, reader.damaged))
    else:
        _print(found, trace)
    if reader.damaged:
        note(f"{count_of(reader.damaged, 'damaged line')} in {trace} skipped")
    if page is not None:
        note(f"wrote {page}")
    return 0


def _write(page: Path, html: str) -> None:
    try:
        page.write_text(html, encoding="utf-8")
    except OSError as error:
        raise StokerError(f"cannot write to {page}: {error.strerror}") from None


def _is_given(ctx: click.Context, name: str) -> bool:
    """Whether an option was given, or set by a variable or the settings file."""
    return ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _owner(trace: Path) -> str:
    """The user of the recorded run: until a process of the job uses a GPU, other users' work is not its own."""
    return user_name(trace.stat().st_uid)


def _begun(reader: RecordingReader, trace: Path) -> tuple[Iterator[Look], float, bool]:
    """The looks of a recording, the interval between its first ones, and whether it is the recording of a job."""
    looks = iter(reader)
    head = list(itertools.islice(looks, _HEAD))
    if not head:
        raise BadInputError(f"{trace} holds no readings yet")
    return itertools.chain(head, looks), rhythm_of(head), any(look.job is not None for look in head)


def _print(found: Replay, trace: Path) -> None:
    every = format_duration(found.every)
    lines = [
        f"{trace}: {count_of(len(found.gpus), 'GPU')}, a look every {every}",
        text.period(found),
        f"Rule: {text.rule(found.policies)}",
        "",
        *_events_in_lines(found),
        text.outcome(found),
    ]
    lines += [sentence for sentence in (text.cost(found), text.warnings(found)) if sentence]
    lines += text.blind_spots(found)
    sys.stdout.write("\n".join(lines) + "\n")


def _events_in_lines(found: Replay) -> Iterator[str]:
    """Firings with their numbers, and the warnings without one, in the order of time."""
    in_vain = text.warnings_in_vain(found)
    events: list[tuple[float, list[str]]] = [
        (one.moment.at, _firing_in_lines(number, one, found)) for number, one in enumerate(found.firings, 1)
    ]
    events += [
        (one.moment.at, [f"     {text.local_time(one.moment.wall)}  {one.rule}, only a warning: {one.reason}", ""])
        for one in in_vain[:_MOST_WARNINGS]
    ]
    for _at, lines in sorted(events, key=lambda event: event[0]):
        yield from lines
    if len(in_vain) > _MOST_WARNINGS:
        yield from (f"     And {len(in_vain) - _MOST_WARNINGS:,} more warnings: --json has them all.", "")


def _firing_in_lines(number: int, firing: Firing, found: Replay) -> list[str]:
    after = "; ".join(filter(None, (text.warned_before(found, firing), text.what_came_after(firing))))
    mark = "work came back: " if firing.hit_work else ""
    lines = [
        f"{number:3}. {text.local_time(firing.moment.wall)}  {firing.rule}: {firing.reason}",
        f"     {mark}{after}; {text.gpu_hours(firing.saved)} GPU-hours saved",
    ]
    if (working := text.also_working(firing)) is not None:
        lines.append(f"     {working}")
    return [*lines, ""]


class _Labelled(msgspec.Struct, frozen=True, rename={"of": "class"}):
    """One entry of corpus.json: the truth about a recording. Times are on the clock of its looks."""

    id: str
    file: str
    label: Label
    begun: float
    every: float
    of: str = ""
    from_when: float | None = None
    user: str = ""
    half: str = ""


def _replay_corpus(directory: Path, rules: dict[str, Any], by_class: bool, as_json: bool) -> int:
    """Judges every recording like the supervisor of its job: with its progress, from its start."""
    outcomes = [_judged(directory, labelled, rules) for labelled in _labels(directory)]
    halves = {half: [one for one in outcomes if one.half == half] for half in sorted({one.half for one in outcomes})}
    classes = list(dict.fromkeys((one.label, one.of) for one in outcomes))
    of_class = {name: [one for one in outcomes if (one.label, one.of) == name] for name in classes}
    if as_json:
        print_json(
            {
                "corpus": str(directory),
                "policy": stored_form(policies_of(rules), whole=True),
                "score": score(outcomes)._asdict(),
                "halves": {half: score(found)._asdict() for half, found in halves.items()},
                "classes": [
                    {"class": of, "label": label, "score": score(found)._asdict()}
                    for (label, of), found in of_class.items()
                ],
                "outcomes": [{key: value for key, value in one._asdict().items() if key != "rule"} for one in outcomes],
            }
        )
        return 0
    sys.stdout.write(f"{directory}: {count_of(len(outcomes), 'recording')}\nRule: {text.rule(policies_of(rules))}\n\n")
    parts = halves if len(halves) > 1 else {"all": outcomes}
    print_table(_SCORE_COLUMNS, [_score_row(half, score(found)) for half, found in parts.items()])
    if by_class:
        sys.stdout.write("\n")
        rows = [(label, of, class_in_words(found)) for (label, of), found in of_class.items()]
        print_table([Column("label"), Column("class"), Column("outcome", gives="wrap")], rows)
    return 0


_SCORE_COLUMNS: Final = [
    Column("recordings"),
    Column("healthy killed", "right"),
    Column("unknown killed", "right"),
    Column("idle missed", "right"),
    Column("stalled missed", "right"),
    Column("killed early", "right"),
]


def _score_row(name: str, found: Score) -> list[str]:
    return [
        name,
        f"{found.healthy_killed} of {found.healthy}",
        f"{found.unknown_killed} of {found.unknown}",
        f"{found.idle_missed} of {found.idle}",
        f"{found.stalled_missed} of {found.stalled}",
        str(found.killed_early),
    ]


def _labels(directory: Path) -> list[_Labelled]:
    path = directory / "corpus.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_Labelled])
    except OSError as error:
        raise BadInputError(
            f"cannot read {path}, which says what is true of each recording: {error.strerror}"
        ) from None
    except msgspec.MsgspecError as error:
        raise BadInputError(f"{path} is not a list of labelled recordings: {error}") from None
    if not found:
        raise BadInputError(f"{path} names no recording")
    return found


def _judged(directory: Path, labelled: _Labelled, rules: dict[str, Any]) -> TraceOutcome:
    reader = RecordingReader(directory / labelled.file)
    policies = policies_of({**rules, "every": max(rules.get("every", 0.0), labelled.every)})
    stop = first_stop(reader, policies, JobScope({}, labelled.user), labelled.begun)
    stopped, right_from = (hours_after(labelled.begun, at) for at in (stop.at, labelled.from_when))
    return TraceOutcome(
        "", labelled.id, labelled.of, labelled.label, labelled.half, stopped, right_from, stop.warned, stop.rule
    )


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
            {
                "time": round(warned.moment.wall, 3),
                "rule": warned.rule,
                "reason": warned.reason,
                "fired": warned.fired,
            }
            for warned in found.warnings
        ],
        "unknown": [_stretch(stretch) for stretch in found.unknown],
        "gaps": [_stretch(gap) for gap in found.gaps],
        "gpu_hours": {name: round(seconds / _HOUR, 4) for name, seconds in totals._asdict().items()},
    }


def _firing(firing: Firing) -> dict[str, Any]:
    return {
        "time": round(firing.moment.wall, 3),
        "rule": firing.rule,
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
