"""Replay of a policy on recorded looks: firings, savings, cost, and the drawing."""

import json
import re
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cli.tables import replay as text
from stoker.cli.tables.replay_page import Timeline, page_of
from stoker.gpus.model import JobProgress, Look, Maybe, Process, Unknown, Utilization
from stoker.rules.idle import IdlePolicy, IdleRule
from stoker.rules.replay import Firing, Replay, replay, rhythm_of
from stoker.rules.scope import JobScope, MachineScope
from stoker.rules.stalled import StalledPolicy
from tests.support.looks import a_gpu, a_look, a_process

MINUTE, HOUR = 60.0, 3600.0
WALL = 1_790_000_000.0
BELOW = 0.1
LOST = Unknown("the GPU is lost")


def a_policy(**changes: Any) -> IdlePolicy:
    return msgspec.structs.replace(
        IdlePolicy(unused_for=0.0, below=BELOW, window=10 * MINUTE, after=0.0, every=MINUTE), **changes
    )


def look_at(minute: float, utilizations: Sequence[Maybe[float]], processes: tuple[Process, ...] = ()) -> Look:
    look = a_look(*utilizations, at=minute * MINUTE, wall=WALL + minute * MINUTE, span=MINUTE)
    readings = tuple(msgspec.structs.replace(reading, processes=processes) for reading in look.readings)
    return msgspec.structs.replace(look, readings=readings)


def minutes(*stretches: tuple[int, Maybe[float]]) -> list[Look]:
    """One look per minute at one GPU: minutes and utilization of each period, with one process throughout."""
    values = [value for count, value in stretches for _ in range(count)]
    return [look_at(float(minute), [value], (a_process(),)) for minute, value in enumerate(values)]


def played(looks: Iterable[Look], chosen: str = "all", **changes: Any) -> Replay:
    return replay(looks, [a_policy(**changes)], MachineScope(chosen, {}))


def summary(found: Replay) -> list[tuple[float, float, bool]]:
    """The minute of each firing, how many minutes were idle after it, and whether the GPUs were used again."""
    return [(firing.moment.at / MINUTE, firing.idle_after / MINUTE, firing.resumed) for firing in found.firings]


# Firings


def test_each_idle_period_fires_once() -> None:
    found = played(minutes((30, 0.9), (100, 0.0), (5, 0.9), (9, 0.0), (5, 0.9), (60, 0.0)))
    assert summary(found) == [(39.0, 90.0, True), (158.0, 50.0, False)]


def test_firing_has_its_reason_time_and_start() -> None:
    firing = played(minutes((30, 0.9), (100, 0.0))).firings[0]
    assert firing.reason == "GPU 0 stayed below 10% for 10m"
    assert firing.moment.wall == WALL + 39 * MINUTE
    assert firing.moment.at - firing.window_from.at == 10 * MINUTE
    assert firing.gpus == (a_gpu().uuid,)


def test_replay_fires_when_a_watcher_would() -> None:
    looks = minutes((7, 0.3), (20, 0.0), (3, LOST), (25, 0.05), (1, 0.1), (12, 0.0))
    rule = IdleRule(a_policy(), looks[0].at)
    scope = MachineScope("all", {})
    fired = []
    for look in looks:
        if rule.observe(scope.observe(look)).effect == "act":
            fired.append(look.at)
            rule.rearm(look.at)
    assert [firing.moment.at for firing in played(looks).firings] == fired
    assert len(fired) == 2


def test_start_up_delay_counts_from_the_first_look() -> None:
    looks = minutes((100, 0.0))
    assert summary(played(looks, after=HOUR)) == [(70.0, 29.0, False)]


def test_arming_is_part_of_the_rule() -> None:
    found = played(minutes((60, 0.0), (10, 0.9), (60, 0.0)), arm_above=0.5, arm_for=5 * MINUTE)
    assert [minute for minute, _after, _resumed in summary(found)] == [79.0]


def test_only_the_chosen_gpus_are_judged() -> None:
    looks = [look_at(float(minute), [0.9, 0.0, 0.9]) for minute in range(30)]
    found = played(looks, "1")
    assert [gpu.index for gpu in found.gpus] == [1]
    assert len(found.firings) == 1
    assert found.totals.recorded == 29 * MINUTE


# Savings


def test_saved_time_is_idle_time_from_the_firing_to_the_next_use() -> None:
    found = played(minutes((30, 0.9), (100, 0.0), (30, 0.9)))
    assert found.totals.saved == 90 * MINUTE
    assert found.totals.idle == 100 * MINUTE
    assert found.totals.recorded == 159 * MINUTE


def test_gap_counts_neither_as_saved_nor_as_idle() -> None:
    looks = minutes((40, 0.0), (20, LOST), (40, 0.0))
    found = played(looks)
    assert found.totals.unknown == 20 * MINUTE
    assert found.totals.saved == (29 + 40) * MINUTE
    hole = [look for look in looks if not 60 < look.at / MINUTE < 90]
    found = played(hole)
    assert [(gap.begun.at, gap.ended.at) for gap in found.gaps] == [(60 * MINUTE, 90 * MINUTE)]
    assert found.totals.recorded == (60 + 9) * MINUTE


def test_every_gpu_is_counted_separately() -> None:
    looks = [look_at(float(minute), [0.0, 0.0, 0.0 if minute < 50 else 0.9]) for minute in range(60)]
    found = played(looks)
    # Saving ends as soon as one of them is used again.
    assert found.totals.saved == 3 * 39 * MINUTE
    assert found.totals.idle == (3 * 49 + 2 * 10) * MINUTE


def test_require_any_saves_the_idle_gpu_and_names_the_busy_ones() -> None:
    looks = [look_at(float(minute), [0.0, 0.9 if minute < 40 else 0.0, 0.9]) for minute in range(100)]
    first, second = played(looks, require="any").firings
    assert (first.moment.at / MINUTE, first.gpus, first.working) == (10.0, (a_gpu(0).uuid,), ("GPU 1", "GPU 2"))
    assert first.saved == 89 * MINUTE
    # The second firing is for the GPU that went idle later, and does not count the time of the first again.
    assert (second.moment.at / MINUTE, second.gpus, second.working) == (49.0, (a_gpu(1).uuid,), ("GPU 2",))
    assert second.saved == 50 * MINUTE
    assert text.also_working(first) == "GPU 1 and GPU 2 were at work at that moment"
    assert text.also_working(second) == "GPU 2 was at work at that moment"


def test_gpu_not_idle_for_the_whole_window_is_not_listed_as_idle() -> None:
    looks = [look_at(float(minute), [0.0, 0.9 if minute < 5 else 0.0]) for minute in range(100)]
    (firing,) = played(looks, require="any").firings
    assert (firing.gpus, firing.working) == ((a_gpu(0).uuid,), ())


# Cost


def after_a_firing(back: int, returning: Maybe[tuple[Process, ...]], held: Maybe[tuple[Process, ...]]) -> Firing:
    """Idle for `back` minutes after the firing, then used again by `returning`; `held` is there until then."""
    looks = [look_at(float(minute), [0.0]) for minute in range(back + 11)] + [look_at(float(back + 11), [0.9])]
    processes: list[Any] = [held] * (back + 11) + [returning]
    changed = [
        msgspec.structs.replace(look, readings=(msgspec.structs.replace(look.readings[0], processes=there),))
        for look, there in zip(looks, processes, strict=True)
    ]
    (firing,) = played(changed).firings
    assert firing.idle_after == back * MINUTE
    return firing


SAME, OTHER = a_process(1, utilization=0.9), a_process(2, user="bob", utilization=0.9)
NO_PERMISSION = Unknown("no permission")


@pytest.mark.parametrize(
    ("back", "returning", "held", "hit", "sentence"),
    [
        (60, (SAME,), (SAME,), True, "used again after 1h by alice's python (pid 1), which had been there all along"),
        (60, (OTHER,), (SAME,), False, "idle for another 1h, then used again by bob's python (pid 2)"),
        (60, (OTHER,), (), False, "idle for another 1h, then used again by bob's python (pid 2)"),
        (60, NO_PERMISSION, (SAME,), False, "idle for another 1h, then used again"),
        (60, (SAME,), NO_PERMISSION, False, "idle for another 1h, then used again by alice's python (pid 1)"),
        (10, (OTHER,), (SAME,), True, "used again after only 10m by bob's python (pid 2)"),
        (5, NO_PERMISSION, NO_PERMISSION, True, "used again after only 5m"),
        # Both are listed; only the active process has returned.
        (
            60,
            (a_process(2, user="bob", utilization=0.0), SAME),
            (SAME,),
            True,
            "used again after 1h by alice's python (pid 1), which had been there all along",
        ),
        (60, (a_process(1, utilization=0.0), OTHER), (SAME,), False, "idle for another 1h, then used again by bob's "),
        (60, (OTHER, SAME), (SAME,), True, "used again after 1h by alice's python (pid 1), which had been there"),
        (
            60,
            (a_process(1, utilization=NO_PERMISSION),),
            (SAME,),
            True,
            "used again after 1h by alice's python (pid 1)",
        ),
        # The reused pid of an ended process.
        (60, (a_process(1, started=99, utilization=0.9),), (SAME,), False, "idle for another 1h, then used again"),
    ],
)
def test_stop_hits_work_when_the_process_resumes_or_use_returns_soon(
    back: int, returning: Maybe[tuple[Process, ...]], held: Maybe[tuple[Process, ...]], hit: bool, sentence: str
) -> None:
    firing = after_a_firing(back, returning, held)
    assert firing.hit_work is hit
    assert text.what_came_after(firing).startswith(sentence)
    assert (firing.same_process is None) == isinstance(returning if held != NO_PERMISSION else held, Unknown)


def test_idle_period_until_the_end_of_the_recording_hits_no_work() -> None:
    assert played(minutes((15, 0.0))).hits == 0
    found = played(minutes((30, 0.0)))
    assert text.what_came_after(found.firings[0]) == "idle for another 19m, to the end of the recording"


# Hangs


def hanging(*stretches: tuple[int, bool, float]) -> Replay:
    """One look a minute at a GPU at 100 %: minutes, whether steps are made, and watts. Its memory works in steps."""
    looks: list[Look] = []
    steps = 0
    for minute, (stepping, watts) in enumerate(
        (stepping, watts) for count, stepping, watts in stretches for _ in range(count)
    ):
        steps += stepping
        level = 1.0 if watts > 0 else 0.0
        look = look_at(float(minute), [level], (a_process(),))
        memory = Utilization(0.5, 0.5, 6) if stepping else Utilization(0.0, 0.0, 6)
        readings = tuple(msgspec.structs.replace(one, power=watts, memory_activity=memory) for one in look.readings)
        since = look.at if stepping else (looks[-1].job.since if looks and looks[-1].job else None)
        job = JobProgress(steps, since, "log", 1.0, 0.0, (a_process().pid,))
        looks.append(msgspec.structs.replace(look, readings=readings, job=job))
    policies = [a_policy(), StalledPolicy(every=MINUTE, window=30 * MINUTE)]
    return replay(looks, policies, JobScope({}, "alice"))


def test_hang_is_saved_until_the_end_of_the_recording() -> None:
    found = hanging((60, True, 400.0), (100, False, 120.0))
    (firing,) = found.firings
    assert (firing.rule, firing.hung, firing.resumed, firing.hit_work, firing.working) == (
        "stalled", True, False, False, (),
    )  # fmt: skip
    assert firing.saved == firing.idle_after > 60 * MINUTE
    assert found.totals.hung == firing.saved + (firing.moment.at - firing.window_from.at)
    assert found.totals.idle == 0
    assert text.what_came_after(firing).startswith("it hung for another 1h")
    assert "idle or hung GPU-hours" in text.outcome(found)


def test_step_after_a_hang_is_work_that_came_back() -> None:
    (firing,) = hanging((60, True, 400.0), (50, False, 120.0), (20, True, 400.0)).firings
    assert (firing.resumed, firing.hit_work) == (True, True)
    assert text.what_came_after(firing).startswith("the job made a step after another")


def test_hang_is_over_when_its_gpus_are_idle() -> None:
    found = hanging((60, True, 400.0), (50, False, 120.0), (60, False, 0.0))
    hang, idle = found.firings
    assert (hang.rule, idle.rule) == ("stalled", "idle")
    assert not hang.resumed
    assert hang.until.at <= 110 * MINUTE
    assert [warned.rule for warned in found.warnings if warned.fired] == ["stalled", "idle"]


# Other results


def test_warnings_without_a_firing_are_marked() -> None:
    found = played(minutes((7, 0.0), (1, 0.9), (20, 0.0), (1, 0.9), (8, 0.0)))
    assert [(warned.moment.at / MINUTE, warned.fired) for warned in found.warnings] == [
        (5.0, False),
        (12.0, True),
        (33.0, False),
    ]
    assert text.warnings(found) == "It would also have warned twice without acting."
    assert played(minutes((30, 0.0)), warn_at=None).warnings == ()


def test_unknown_periods_are_merged_by_reason() -> None:
    found = played(minutes((5, 0.0), (3, LOST), (5, Unknown("asleep")), (2, 0.5), (1, LOST)))
    assert [(s.reason, s.begun.at / MINUTE, s.ended.at / MINUTE) for s in found.unknown] == [
        ("GPU 0: the GPU is lost", 4.0, 7.0),
        ("GPU 0: asleep", 7.0, 12.0),
        ("GPU 0: the GPU is lost", 14.0, 15.0),
    ]


def test_unreadable_machine_is_unknown_with_its_reason() -> None:
    why = Unknown("the driver did not answer in 5 s")
    looks = minutes((20, 0.0))
    blind = [msgspec.structs.replace(look, gpus=(), readings=(), problem=why) for look in looks[10:]]
    found = played([*looks[:10], *blind])
    assert [stretch.reason for stretch in found.unknown] == [why.reason]
    assert found.firings == ()
    only_blind = played(blind)
    assert (only_blind.gpus, only_blind.totals.recorded) == ((), 0.0)
    assert [stretch.reason for stretch in only_blind.unknown] == [why.reason]


def test_interval_is_the_usual_distance_between_looks() -> None:
    times = [0.0, 5.0, 10.0, 15.0, 3600.0, 3605.0, *[3605.0] * 9]
    assert rhythm_of([a_look(0.0, at=at) for at in times]) == 5.0
    assert rhythm_of([a_look(0.0)]) == 5.0


def test_empty_recording_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no look"):
        played([])


LEVELS: st.SearchStrategy[Maybe[float]] = st.sampled_from([0.0, 0.0, 0.05, 0.1, 0.8, LOST])
TRACES = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 60]), st.integers(1, 25), st.lists(LEVELS, min_size=2, max_size=2)),
    min_size=1,
    max_size=12,
)


def a_trace(stretches: list[tuple[int, int, list[Maybe[float]]]]) -> list[Look]:
    """Stretches of looks at two GPUs: minutes between looks, how many looks, and what the GPUs did."""
    looks, minute = [], 0
    for distance, count, levels in stretches:
        for _ in range(count):
            minute += distance
            looks.append(look_at(float(minute), levels, (a_process(),)))
    return looks


@given(TRACES, st.sampled_from(["all", "any", 2]))
def test_sums_always_add_up(stretches: list[tuple[int, int, list[Maybe[float]]]], require: Any) -> None:
    looks = a_trace(stretches)
    found = played(looks, require=require)
    totals = found.totals
    assert 0 <= totals.saved <= totals.idle <= totals.recorded - totals.unknown
    assert totals.saved == sum(firing.saved for firing in found.firings)
    seen = sum(later.at - earlier.at for earlier, later in pairwise(looks) if later.at - earlier.at <= 190.0)
    assert totals.recorded == pytest.approx(2 * seen)
    assert found.ended.at - found.begun.at == pytest.approx(seen + sum(gap.seconds for gap in found.gaps))
    assert [firing.moment.at for firing in found.firings] == sorted(firing.moment.at for firing in found.firings)
    for firing in found.firings:
        assert firing.gpus
        assert 0 <= firing.saved <= firing.idle_after * len(firing.gpus)
        assert firing.moment.at - firing.window_from.at >= 10 * MINUTE


# Text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0"), (900.0, "0.25"), (3600.0, "1"), (3600.0 * 12.34, "12.3"), (3600.0 * 1344.2, "1,344")],
)
def test_gpu_hours_are_rounded_for_reading(seconds: float, shown: str) -> None:
    assert text.gpu_hours(seconds) == shown


def test_answer_and_its_cost_are_sentences() -> None:
    quiet = played(minutes((30, 0.9), (9, 0.0)))
    assert text.outcome(quiet) == "The rule would not have fired; 0.15 of 0.63 GPU-hours were idle."
    assert text.cost(quiet) is None
    once = played(minutes((30, 0.9), (70, 0.0)))
    assert text.outcome(once) == (
        "The rule would have fired once and saved 1 of the 1.17 idle GPU-hours, out of 1.65 recorded."
    )
    assert text.cost(once) == (
        "No stop would have hit work that came back: never did the same process go on, and never were the GPUs used "
        "again within 10m."
    )
    hit = played(minutes((71, 0.0), (1, 0.9)))
    assert text.cost(hit) == (
        "The stop would have hit work that came back: used again after 1h by alice's python (pid 4242), which had been "
        "there all along."
    )
    often = played(minutes((71, 0.0), (1, 0.9), (71, 0.0)))
    assert text.cost(often) == (
        "1 of the 2 stops would have hit work that came back, because the same process went on or the GPUs were used "
        "again within 10m: 1 of the 2.02 GPU-hours."
    )


def test_gaps_are_summarized_with_the_longest() -> None:
    looks = minutes((5, 0.0), (3, LOST), (5, 0.0), (20, LOST), (3, 0.0))
    found = played([look for look in looks if not 33 <= look.at / MINUTE <= 34] + [look_at(120.0, [0.0])])
    unknown, unrecorded = text.blind_spots(found)
    assert re.fullmatch(
        r"Unknown for 23m in 2 stretches, the longest for 20m from .*: GPU 0: the GPU is lost\.", unknown
    )
    assert re.fullmatch(r"Not recorded for 1h25m from \w\w\w \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.", unrecorded)


def test_rule_is_described_with_all_conditions() -> None:
    policy = a_policy(after=HOUR, arm_above=0.5, arm_for=5 * MINUTE)
    assert text.rule([policy]) == (
        "all GPUs below 10% for 10m, not in the first 1h, armed once a GPU was at 50% or more for 5m"
    )


# Drawing


def followed(looks: Sequence[Look], longest_gap: float = 190.0) -> Timeline:
    timeline = Timeline(longest_gap)
    assert list(timeline.following(looks)) == looks
    return timeline


@given(
    st.lists(st.tuples(st.integers(1, 400), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=200),
    st.integers(1, 50),
)
def test_every_burst_and_every_pause_is_drawn(steps: list[tuple[int, float, float]], points: int) -> None:
    looks, at = [], 0.0
    for distance, one, other in steps:
        at += distance
        peak, mean = max(one, other), min(one, other)
        look = a_look(0.0, at=at, span=float(distance))
        used = msgspec.structs.replace(look.readings[0], utilization=Utilization(peak, mean, 6))
        looks.append(msgspec.structs.replace(look, readings=(used,)))
    timeline = followed(looks)
    begun, ended = looks[0].at, max(looks[-1].at, looks[0].at + 1.0)
    drawn = timeline.drawn([a_gpu().uuid], begun, ended, points)
    assert len(drawn.high) == len(drawn.low) == len(drawn.mean) == points
    ranges = list(zip(drawn.low, drawn.high, strict=True))
    for look, (_distance, one, other) in zip(looks, steps, strict=True):
        # A reading on the border of two points may be in either.
        exact = (look.at - begun) / (ended - begun) * points
        near = ranges[max(int(exact - 1e-6), 0) : int(exact + 1e-6) + 1] or ranges[-1:]
        peak = max(one, other)
        assert any(low is not None and high is not None and low - 0.0001 <= peak <= high + 0.0001 for low, high in near)
    assert not any(drawn.unknown)


def test_unknown_and_unrecorded_time_are_drawn_differently() -> None:
    looks = [look for look in minutes((10, 0.5), (10, LOST), (20, 0.5)) if not 25 < look.at / MINUTE < 35]
    drawn = followed(looks).drawn([a_gpu().uuid], 0.0, 40 * MINUTE, 40)
    assert [place for place, unknown in enumerate(drawn.unknown) if unknown] == list(range(9, 20))
    nothing = [place for place, high in enumerate(drawn.high) if high is None and not drawn.unknown[place]]
    assert nothing == list(range(26, 35))


def test_several_gpus_are_drawn_as_their_maximum_and_unknown_if_any_is() -> None:
    looks = [look_at(0.0, [0.1, 0.7]), look_at(1.0, [0.4, 0.2]), look_at(2.0, [0.4, LOST]), look_at(3.0, [0.0, 0.0])]
    drawn = followed(looks).drawn([a_gpu(0).uuid, a_gpu(1).uuid], 0.0, 4 * MINUTE, 4)
    assert drawn.high == [0.7, 0.4, 0.0, 0.0]
    assert drawn.unknown == [False, True, True, False]


def test_gpu_is_unknown_before_it_appears_and_after_it_leaves() -> None:
    looks = [look_at(0.0, [0.5]), look_at(1.0, [0.5, 0.5]), look_at(2.0, [0.5]), look_at(3.0, [0.5])]
    drawn = followed(looks).drawn([a_gpu(1).uuid], 0.0, 3 * MINUTE, 3)
    assert drawn.unknown == [True, True, True]
    assert [high is None for high in drawn.high] == [False, False, True]


class Outline(HTMLParser):
    """The tags and words of a page; fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.charts: list[dict[str, Any]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and data.startswith("[{"):
            self.charts = json.loads(data)
        elif self.open[-1:] not in (["style"], ["script"]) and data.strip():
            self.words.append(data.strip())

    def classed(self, kind: str) -> list[dict[str, str | None]]:
        return [attrs for _tag, attrs in self.tags if kind in (attrs.get("class") or "").split()]


def drawn_page(looks: Sequence[Look], name: str = "trace", **changes: Any) -> Outline:
    timeline = followed(looks)
    return Outline(page_of(played(looks, **changes), timeline, name))


def test_page_shows_each_gpu_the_window_and_the_firing_point() -> None:
    looks = [look_at(float(minute), [0.9 if minute < 40 else 0.0, 0.0]) for minute in range(100)]
    page = drawn_page(looks)
    text = " ".join(page.words)
    assert "The rule would have fired once" in text
    assert "idle is below 10%" in text
    assert "GPU 0 and GPU 1 stayed below 10% for 10m." in text
    # Both GPUs, and the closer view.
    at, until = WALL + 49 * MINUTE, WALL + 99 * MINUTE
    firing = {"number": 1, "from": WALL + 39 * MINUTE, "at": at, "until": until, "hung": False}
    assert [chart["firings"] for chart in page.charts] == [[firing]] * 3
    assert [attrs["data-chart"] for attrs in page.classed("plot")] == ["0", "1", "2"]
    assert len(page.classed("firing")) == 1


def test_page_has_no_external_resources() -> None:
    page = drawn_page(minutes((30, 0.0)))
    assert not {tag for tag, _attrs in page.tags} & {"a", "link", "img", "iframe", "object", "base", "form"}
    for _tag, attrs in page.tags:
        assert not any(name.startswith("on") or name in {"src", "srcset", "href"} for name in attrs)
    (policy,) = [attrs["content"] for _tag, attrs in page.tags if "http-equiv" in attrs]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")


def test_names_are_escaped_on_the_page() -> None:
    evil = "<script>alert('&\"')</script>"
    process = a_process(name=evil, user=evil, utilization=0.9)
    lost = Unknown(evil)
    looks = []
    for minute, level in enumerate([0.0] * 20 + [lost] * 5 + [0.9] * 5):
        look = look_at(float(minute), [level], (process,))
        looks.append(msgspec.structs.replace(look, gpus=(a_gpu(name=evil),)))
    page = drawn_page(looks, evil)
    assert len([tag for tag, _attrs in page.tags if tag == "script"]) == 2
    assert sum(evil in text for text in page.words) >= 4
    assert "alert" not in json.dumps(page.charts)


def test_page_stays_small_for_any_recording() -> None:
    busy_and_idle = [
        look_at(float(minute), [(minute // 20 % 2) * 0.9 + 0.001 * (minute % 7)]) for minute in range(9000)
    ]
    timeline = followed(busy_and_idle)
    found = played(busy_and_idle)
    assert len(found.firings) == 225
    text = page_of(found, timeline, "long")
    assert len(text) < 500_000
    page = Outline(text)
    assert "And 25 more: --json has them all." in page.words
    assert [len(chart["curve"]["mean"]) for chart in page.charts] == [1000, *[300] * 12]


def test_recording_of_one_look_or_of_nothing_readable_can_be_drawn() -> None:
    assert "The rule would not have fired" in " ".join(drawn_page([look_at(0.0, [0.5])]).words)
    blind = msgspec.structs.replace(look_at(0.0, []), problem=LOST)
    assert "the GPU is lost" in " ".join(drawn_page([blind]).words)
