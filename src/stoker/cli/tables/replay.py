"""The result of a replay in sentences, for the terminal and the page."""

from collections.abc import Sequence
from datetime import datetime

from stoker.rules.registry import conditions, in_words
from stoker.rules.replay import SOON, Firing, Replay, Stretch, Warned
from stoker.rules.rule import Policy
from stoker.units import format_duration

_HOUR = 3600.0


def gpu_hours(seconds: float) -> str:
    """`0`, `0.25`, `41.6`, `1,344`."""
    hours = seconds / _HOUR
    if hours >= 100:
        return f"{hours:,.0f}"
    return f"{hours:.1f}" if hours >= 10 else f"{hours:.2f}".rstrip("0").rstrip(".") or "0"


def local_time(wall: float) -> str:
    """`Tue 2026-11-10 03:14:05`, in the reader's time zone."""
    return datetime.fromtimestamp(wall).astimezone().strftime("%a %Y-%m-%d %H:%M:%S")


def time_zone(wall: float) -> str:
    return datetime.fromtimestamp(wall).astimezone().strftime("%Z")


def period(replay: Replay) -> str:
    length = format_duration(replay.ended.at - replay.begun.at)
    return (
        f"{local_time(replay.begun.wall)} to {local_time(replay.ended.wall)} {time_zone(replay.ended.wall)} ({length})"
    )


def rule(policies: Sequence[Policy]) -> str:
    """The rules in words, with their conditions."""
    return ", ".join([in_words(policies), *conditions(policies)])


def what_came_after(firing: Firing) -> str:
    """GPU activity after a firing."""
    after = format_duration(firing.idle_after)
    if firing.hung:
        return _after_a_hang(firing, after)
    if not firing.resumed:
        return f"idle for another {after}, to the end of the recording"
    who = f" by {firing.resumed_by}" if firing.resumed_by else ""
    if firing.same_process:
        return f"used again after {after}{who}, which had been there all along"
    if firing.idle_after <= SOON:
        return f"used again after only {after}{who}"
    return f"idle for another {after}, then used again{who}"


def _after_a_hang(firing: Firing, after: str) -> str:
    return f"the job made a step after another {after}" if firing.resumed else f"it hung for another {after}"


def also_working(firing: Firing) -> str | None:
    if not firing.working:
        return None
    names = firing.working
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed} {'was' if len(names) == 1 else 'were'} at work at that moment"


def times(number: int) -> str:
    return {0: "not once", 1: "once", 2: "twice"}.get(number, f"{number:,} times")


def outcome(replay: Replay) -> str:
    """The result in one sentence."""
    totals = replay.totals
    recorded = gpu_hours(totals.recorded)
    who = _rules(replay)
    if not replay.firings:
        return f"{who} would not have fired; {gpu_hours(totals.idle)} of {recorded} GPU-hours were idle."
    unused = f"{gpu_hours(totals.idle + totals.hung)} {'idle or hung' if totals.hung else 'idle'}"
    return (
        f"{who} would have fired {times(len(replay.firings))} and saved {gpu_hours(totals.saved)} of the "
        f"{unused} GPU-hours, out of {recorded} recorded."
    )


def _rules(replay: Replay) -> str:
    return "The rule" if len(replay.policies) == 1 else "The rules"


def cost(replay: Replay) -> str | None:
    """The stops that would have hit work; None if the rule did not fire."""
    if not replay.firings:
        return None
    soon = format_duration(SOON)
    if not replay.hits:
        return (
            "No stop would have hit work that came back: "
            f"never did the same process go on, and never were the GPUs used again within {soon}."
        )
    if len(replay.firings) == 1:
        return f"The stop would have hit work that came back: {what_came_after(replay.firings[0])}."
    wrongly = gpu_hours(sum(firing.saved for firing in replay.firings if firing.hit_work))
    return (
        f"{replay.hits:,} of the {len(replay.firings):,} stops would have hit work that came back, because the same "
        f"process went on or the GPUs were used again within {soon}: {wrongly} of the "
        f"{gpu_hours(replay.totals.saved)} GPU-hours."
    )


def warnings(replay: Replay) -> str | None:
    in_vain = len(warnings_in_vain(replay))
    if not in_vain:
        return None
    also = "also " if replay.firings else ""
    it = "It" if len(replay.policies) == 1 else "They"
    return f"{it} would {also}have warned {times(in_vain)} without acting."


def warnings_in_vain(replay: Replay) -> list[Warned]:
    """Warnings without a firing."""
    return [warned for warned in replay.warnings if not warned.fired]


def warned_before(replay: Replay, firing: Firing) -> str | None:
    """When people would have been warned about a firing."""
    since = [
        warned.moment.at
        for warned in replay.warnings
        if warned.rule == firing.rule and firing.window_from.at <= warned.moment.at <= firing.moment.at
    ]
    return f"warned {format_duration(firing.moment.at - since[0])} before" if since else None


def blind_spots(replay: Replay) -> list[str]:
    """Gaps and unknown time of the recording, one sentence each."""
    sentences = []
    if replay.unknown:
        sentences.append(f"Unknown for {_in_all(replay.unknown)}: {_longest(replay.unknown).reason}.")
    if replay.gaps:
        sentences.append(f"Not recorded for {_in_all(replay.gaps)}.")
    return sentences


def _in_all(stretches: Sequence[Stretch]) -> str:
    """`50m20s from …` for one; for several, the sum and the longest."""
    longest = _longest(stretches)
    this = f"{format_duration(longest.seconds)} from {local_time(longest.begun.wall)}"
    if len(stretches) == 1:
        return this
    together = format_duration(sum(stretch.seconds for stretch in stretches))
    return f"{together} in {len(stretches):,} stretches, the longest for {this}"


def _longest(stretches: Sequence[Stretch]) -> Stretch:
    return max(stretches, key=lambda stretch: stretch.seconds)
