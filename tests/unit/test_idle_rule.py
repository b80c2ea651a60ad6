"""The idle rule against a brute-force model of GPUs, second by second, for any sequence of looks."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.gpus.model import JobProgress, Maybe, Reading, Unknown, Utilization
from stoker.rules.idle import LONGEST_PAUSE, IdlePolicy, IdleRule, Require
from stoker.rules.rule import Activity, Observation, Verdict
from tests.support.deep import examples
from tests.support.looks import a_process

BELOW = 0.1
HIDDEN = Unknown("the driver did not answer in 5 s")
# What one GPU did, one entry per second: its utilization, or unknown.
Seconds = tuple[Maybe[float], ...]


def an_activity(peak: Maybe[float], gpu: int = 0, span: float = 1.0) -> Activity:
    return Activity(f"GPU-{gpu}", f"GPU {gpu}", span, peak)


def is_idle(value: Maybe[float]) -> bool:
    return not isinstance(value, Unknown) and value < BELOW


# The model: GPUs with a value for every second, and looks at some of the seconds


class World(NamedTuple):
    """GPUs over time. Second n is the time from `begun + n` to `begun + n + 1`."""

    begun: float
    gpus: tuple[Seconds, ...]

    @property
    def length(self) -> int:
        return len(self.gpus[0])

    def activities(self, since: int, until: int) -> list[Activity]:
        """What a look at second `until` sees after a look at `since`."""
        return [
            an_activity(_peak(seconds[max(since, 0) : until]), number, float(until - since))
            for number, seconds in enumerate(self.gpus)
        ]


def _peak(seconds: Seconds) -> Maybe[float]:
    """The reading of a span: unknown if any second is, else the maximum."""
    peak: Maybe[float] = 0.0
    for value in seconds:
        if isinstance(value, Unknown) or isinstance(peak, Unknown):
            return HIDDEN
        peak = max(peak, value)
    return peak


def idle_for(rule: IdleRule, at: float, activities: Sequence[Activity]) -> float:
    """Seconds that count for the window after this look."""
    since = rule.observe(Observation(at, activities)).since
    return 0.0 if since is None else at - since


class Seen(NamedTuple):
    second: int
    since: int
    verdict: Verdict


def watch(world: World, policy: IdlePolicy, moments: Sequence[int]) -> list[Seen]:
    """All verdicts of a rule that looks in these seconds, ignoring `due`."""
    rule = IdleRule(policy, world.begun)
    seen = []
    since = moments[0] - 1
    for second in moments:
        verdict = rule.observe(Observation(world.begun + second, world.activities(since, second)))
        seen.append(Seen(second, since, verdict))
        since = second
    return seen


def watch_steadily(world: World, policy: IdlePolicy, every: int, phase: int = 1) -> Iterator[Seen]:
    """The verdicts of a watcher that looks at an interval, and when the rule is due."""
    rule = IdleRule(policy, world.begun)
    since, second = phase - 1, phase
    while second <= world.length:
        yield Seen(second, since, rule.observe(Observation(world.begun + second, world.activities(since, second))))
        due = rule.due()
        since = second
        second += every
        if due is not None:
            second = min(second, max(int(due - world.begun), since + 1))


def first_firing(seen: Iterator[Seen]) -> int | None:
    return next((one.second for one in seen if one.verdict.kind == "idle"), None)


def required(policy: IdlePolicy, gpus: int) -> int:
    match policy.require:
        case "all":
            return gpus
        case "any":
            return 1
        case number:
            return min(number, gpus)


# Brute force: what holds in the model, computed for every second


def idle_gpus(world: World, second: int, window: int) -> int:
    """How many GPUs were idle in `window` seconds up to `second`, not counting short unknown ones."""
    return sum(idle_seconds(seconds[:second]) >= window for seconds in world.gpus)


def idle_seconds(seconds: Seconds) -> int:
    idle = unknown = 0
    for value in reversed(seconds):
        unknown = unknown + 1 if isinstance(value, Unknown) else 0
        if unknown > LONGEST_PAUSE or not (unknown or is_idle(value)):
            break
        idle += not unknown
    return idle


def fulfilled_at(world: World, policy: IdlePolicy) -> int | None:
    """The first second at which a rule with complete information would fire."""
    window, after = int(policy.window), int(policy.after)
    for second in range(after + window, world.length + 1):
        if idle_gpus(world, second, window) >= required(policy, len(world.gpus)):
            return second
    return None


def armed_at(world: World, policy: IdlePolicy, moments: Sequence[int]) -> int | None:
    """The first look at which every look back to some other one, `arm_for` earlier, saw activity."""
    if policy.arm_above is None:
        return -1
    level = policy.arm_above
    peaks = [
        [a.peak for a in world.activities(s, m)] for s, m in zip([moments[0] - 1, *moments], moments, strict=False)
    ]
    for end, last in enumerate(moments):
        for start in range(end, -1, -1):
            if not any(not isinstance(peak, Unknown) and peak >= level for peak in peaks[start]):
                break
            if last - moments[start] >= policy.arm_for:
                return last
            if start and moments[start] - moments[start - 1] > policy.longest_gap:
                break
    return None


# Strategies: times are whole seconds after a start that floats represent exactly

BEGINNINGS = st.sampled_from([0.0, 0.25, 1000.5, 1e6, 1e9, 1e9 + 0.75])
KNOWN_LEVELS: st.SearchStrategy[Maybe[float]] = st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.099, BELOW, 0.5, 1.0])
LEVELS = st.one_of(*[KNOWN_LEVELS] * 8, st.just(HIDDEN))
REQUIRES: st.SearchStrategy[Require] = st.sampled_from(["all", "any", 1, 2, 3])


@st.composite
def seconds_of_a_gpu(
    draw: st.DrawFn, length: int, levels: st.SearchStrategy[Maybe[float]] = LEVELS, longest: int = 60
) -> Seconds:
    seconds: list[Maybe[float]] = []
    while len(seconds) < length:
        seconds += [draw(levels)] * draw(st.integers(1, longest))
    return tuple(seconds[:length])


@st.composite
def worlds(draw: st.DrawFn, levels: st.SearchStrategy[Maybe[float]] = LEVELS) -> World:
    length = draw(st.integers(60, 240))
    count = draw(st.integers(1, 3))
    return World(draw(BEGINNINGS), tuple(draw(seconds_of_a_gpu(length, levels)) for _ in range(count)))


@st.composite
def policies(draw: st.DrawFn) -> IdlePolicy:
    every = draw(st.integers(1, 4))
    arm_above = draw(st.sampled_from([None, None, 0.05, 0.5]))
    return IdlePolicy(
        unused_for=0.0,
        below=BELOW,
        window=float(draw(st.integers(every, 60))),
        after=float(draw(st.sampled_from([0, 0, 7, 50]))),
        every=float(every),
        require=draw(REQUIRES),
        arm_above=arm_above,
        arm_for=0.0 if arm_above is None else float(draw(st.sampled_from([0, 1, 10]))),
    )


@st.composite
def looks_at(draw: st.DrawFn, world: World) -> list[int]:
    """The seconds of looks: mostly frequent, with occasional gaps."""
    steps = st.one_of(st.integers(1, 8), st.sampled_from([1, 2, 30, 60]))
    moments = [draw(st.integers(1, 3))]
    while (following := moments[-1] + draw(steps)) <= world.length:
        moments.append(following)
    return moments


# Never: what must not happen, for any looks


@given(st.data(), worlds(), policies())
@settings(max_examples=examples(250))
def test_rule_fires_only_if_the_whole_window_was_seen_idle(
    data: st.DataObject, world: World, policy: IdlePolicy
) -> None:
    moments = data.draw(looks_at(world))
    for seen in watch(world, policy, moments):
        if seen.verdict.kind == "idle":
            assert idle_gpus(world, seen.second, int(policy.window)) >= required(policy, len(world.gpus))
            assert seen.second - policy.window >= policy.after


@given(st.data(), worlds(), policies())
@settings(max_examples=examples(250))
def test_gap_restarts_the_window(data: st.DataObject, world: World, policy: IdlePolicy) -> None:
    moments = data.draw(looks_at(world))
    gap_ended = 0
    for seen in watch(world, policy, moments):
        if seen.second - seen.since > policy.longest_gap:
            gap_ended = seen.second
        if seen.verdict.kind == "idle":
            assert seen.second - gap_ended >= policy.window


@given(st.data(), worlds(), policies())
@settings(max_examples=examples(300))
def test_rule_fires_only_when_armed_and_arms_as_soon_as_possible(
    data: st.DataObject, world: World, policy: IdlePolicy
) -> None:
    moments = data.draw(looks_at(world))
    armed = armed_at(world, policy, moments)
    for seen in watch(world, policy, moments):
        if seen.second >= policy.after:
            assert (seen.verdict.kind == "arming") == (armed is None or seen.second < armed)


@given(worlds(st.just(HIDDEN)), policies(), st.integers(1, 20))
def test_unknown_alone_never_fires(world: World, policy: IdlePolicy, every: int) -> None:
    for seen in watch_steadily(world, policy, every):
        assert seen.verdict.kind in {"unknown", "waiting", "arming"}
        assert (seen.verdict.since, seen.verdict.progress) == (None, 0.0)


@given(BEGINNINGS, st.integers(2, 100), st.integers(26, 5000))
def test_unknown_time_is_not_idle_even_if_the_next_reading_spans_it(begun: float, unknown: int, claimed: int) -> None:
    """A driver that hung returns a reading that spans the whole hang."""
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=20.0, after=0.0, every=1.0), begun)
    for second in range(unknown):
        rule.observe(Observation(begun + second, [an_activity(HIDDEN)]))
    verdict = rule.observe(Observation(begun + unknown, [an_activity(0.0, span=float(claimed))]))
    assert verdict.kind == "waiting"
    assert verdict.since is not None
    assert begun + unknown - verdict.since <= 1.0


@pytest.mark.parametrize("claimed", [26.0, 3600.0, -5.0])
def test_first_reading_covers_no_more_than_the_longest_gap(claimed: float) -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=20.0, after=0.0, every=5.0), 0.0)
    assert idle_for(rule, 5000.0, [an_activity(0.0, span=claimed)]) == 0.0
    rule.observe(Observation(5001.0, [an_activity(0.5)]))
    assert idle_for(rule, 5002.0, [an_activity(0.0, span=min(claimed, 0.5))]) == min(max(claimed, 0.0), 0.5)


@pytest.mark.parametrize(("distance", "seconds"), [(25.0, 26.0), (25.25, 0.0)])
def test_gap_is_three_intervals_and_two_deadlines(distance: float, seconds: float) -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=60.0, after=0.0, every=5.0), 0.0)
    rule.observe(Observation(100.0, [an_activity(0.0)]))
    assert idle_for(rule, 100.0 + distance, [an_activity(0.0, span=distance)]) == seconds


@pytest.mark.parametrize(("distance", "seconds"), [(5.0, 5.0), (10.0, 10.0), (10.25, 0.0), (25.0, 0.0)])
def test_momentary_sample_does_not_cover_a_stall_before_it(distance: float, seconds: float) -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=60.0, after=0.0, every=5.0), 0.0)
    rule.observe(Observation(100.0, [an_activity(0.0, span=0.0)]))
    assert idle_for(rule, 100.0 + distance, [an_activity(0.0, span=0.0)]) == seconds


def test_momentary_sample_does_not_cover_the_time_before_it() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=5.0, after=0.0, every=5.0), 0.0)
    rule.observe(Observation(100.0, [an_activity(0.9, span=0.0)]))
    assert rule.observe(Observation(105.0, [an_activity(0.0, span=0.0)])).kind == "waiting"
    assert rule.observe(Observation(110.0, [an_activity(0.0, span=0.0)])).kind == "idle"


@pytest.mark.parametrize("peak", [float("nan"), -0.5, float("inf")])
def test_invalid_utilization_is_not_idle(peak: float) -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=2.0, after=0.0, every=1.0), 0.0)
    words = [rule.observe(Observation(float(second), [an_activity(peak)])).kind for second in range(1, 60)]
    assert set(words) == {"busy"}


def test_time_that_runs_backwards_is_a_gap() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=10.0, after=0.0, every=1.0), 0.0)
    *_, backwards = [
        rule.observe(Observation(float(second), [an_activity(0.0)])) for second in (100, 101, 102, 103, 50)
    ]
    assert backwards.since == 50.0
    assert rule.observe(Observation(60.0, [an_activity(0.0, span=10.0)])).kind == "idle"


# Always: what must happen, and when


@given(
    worlds(KNOWN_LEVELS),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 40),
    st.sampled_from([0.0, 7.0]),
    REQUIRES,
)
@settings(max_examples=examples(300))
def test_rule_fires_within_one_look_after_an_idle_window(
    world: World, every: int, phase: int, more: int, after: float, require: Require
) -> None:
    window = every + more
    policy = IdlePolicy(
        unused_for=0.0, below=BELOW, window=float(window), after=after, every=float(every), require=require
    )
    lasting = (0.0,) * (window + every + phase)
    world = World(world.begun, tuple(seconds + lasting for seconds in world.gpus))
    fulfilled = fulfilled_at(world, policy)
    assert fulfilled is not None
    # The same GPUs must stay idle for one look more than the window.
    assume(idle_gpus(world, fulfilled + max(every, phase), window + every) >= required(policy, len(world.gpus)))
    fired = first_firing(watch_steadily(world, policy, every, phase))
    assert fired is not None
    assert fulfilled <= fired <= fulfilled + max(every, phase)


@given(
    BEGINNINGS,
    st.lists(st.tuples(st.integers(1, 25), st.sampled_from([BELOW, 0.7]), st.integers(1, 9)), max_size=6),
    st.integers(1, 12),
    st.integers(1, 12),
    REQUIRES,
)
@settings(max_examples=examples(300))
def test_verdict_does_not_depend_on_the_rate_of_looks(
    begun: float, prelude: list[tuple[int, Maybe[float], int]], quick: int, slow: int, require: Require
) -> None:
    """Interrupted idle periods too short to fire, then one long enough for both."""
    quick, slow = sorted((quick, slow))
    window = 30
    busy: list[Maybe[float]] = [0.5]
    for idle, breaker, length in prelude:
        busy += [0.0] * idle + [breaker] * length
    lasting: list[Maybe[float]] = [0.0] * (window + slow)
    world = World(begun, (tuple(busy + lasting), tuple([0.0] * len(busy) + lasting)))
    policy = IdlePolicy(unused_for=0.0, below=BELOW, window=float(window), after=0.0, every=1.0, require=require)
    one = first_firing(watch_steadily(world, policy, quick))
    other = first_firing(watch_steadily(world, policy, slow))
    assert one is not None
    assert other is not None
    assert abs(one - other) <= slow


@given(
    st.floats(0, 2e9),
    st.lists(st.floats(0.001, 15.0), min_size=1, max_size=20),
    st.floats(0.001, 15.0),
    st.floats(0.0, 100.0),
)
def test_due_is_the_first_moment_at_which_the_rule_fires(
    begun: float, steps: list[float], ahead: float, after: float
) -> None:
    policy = IdlePolicy(unused_for=0.0, below=BELOW, window=5000.0, after=after, every=1.0)

    def at_the_end() -> tuple[IdleRule, float]:
        rule, now = IdleRule(policy, begun), begun
        for step in steps:
            now += step
            if rule.observe(Observation(now, [an_activity(0.0, span=step)])).kind == "idle":
                assume(False)
        return rule, now

    rule, now = at_the_end()
    late = rule.due()
    assert late is not None
    # A window that ends soon after the last look.
    policy = msgspec.structs.replace(policy, window=max(1.0, now - (late - policy.window) + ahead))
    rule, now = at_the_end()
    due = rule.due()
    assert due is not None
    assume(0 < due - now <= policy.longest_gap)
    assert rule.observe(Observation(due, [an_activity(0.0, span=due - now)])).kind == "idle"
    rule, now = at_the_end()
    just_before = max(now, due - max(1e-6, due * 1e-15))
    assume(just_before < due)
    assert rule.observe(Observation(just_before, [an_activity(0.0, span=just_before - now)])).kind == "waiting"
    assert rule.due() == due


def test_nothing_is_due_while_too_few_are_idle_or_after_firing() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=3.0, after=0.0, every=1.0), 0.0)
    assert rule.due() is None
    rule.observe(Observation(1.0, [an_activity(0.0, 0), an_activity(0.5, 1)]))
    assert rule.due() is None
    rule.observe(Observation(2.0, [an_activity(0.0, 0), an_activity(0.0, 1)]))
    assert rule.due() == 4.0
    assert rule.observe(Observation(4.0, [an_activity(0.0, 0), an_activity(0.0, 1)])).kind == "idle"
    assert rule.due() is None


def test_due_includes_start_up_delay_and_snooze() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=30.0, after=100.0, every=1.0), 1000.0)
    rule.observe(Observation(1001.0, [an_activity(0.0)]))
    assert rule.due() == 1130.0
    rule.snooze(1500.0)
    assert rule.due() is None
    rule.observe(Observation(1002.0, [an_activity(0.0)]))
    assert rule.due() == 1530.0


# Which GPUs count may change


def test_gpu_that_leaves_the_scope_no_longer_counts() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=10.0, after=0.0, every=1.0), 0.0)
    for second in range(1, 9):
        rule.observe(Observation(float(second), [an_activity(0.0, 0), an_activity(0.9, 1)]))
    verdict = rule.observe(Observation(10.0, [an_activity(0.0, 0)]))
    assert (verdict.kind, verdict.reason) == ("idle", "GPU 0 stayed below 10% for 10s")


def test_gpu_that_joins_the_scope_starts_a_whole_window() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=10.0, after=0.0, every=1.0), 0.0)
    for second in range(1, 9):
        rule.observe(Observation(float(second), [an_activity(0.0, 0)]))
    verdicts = [
        rule.observe(Observation(float(second), [an_activity(0.0, 0), an_activity(0.0, 1)])).kind
        for second in range(9, 20)
    ]
    assert verdicts == ["waiting"] * 9 + ["idle"] * 2


def test_gpu_that_left_and_came_back_starts_again() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=10.0, after=0.0, every=1.0), 0.0)
    for second in range(1, 9):
        rule.observe(Observation(float(second), [an_activity(0.0, 0)]))
    rule.observe(Observation(9.0, [an_activity(0.5, 1)]))
    assert idle_for(rule, 10.0, [an_activity(0.0, 0)]) == 1.0


def test_no_gpu_is_unknown_and_resets_idle_time() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=3.0, after=0.0, every=1.0), 0.0)
    rule.observe(Observation(1.0, [an_activity(0.0)]))
    verdicts = [rule.observe(Observation(float(second), [])) for second in range(2, 20)]
    assert {(verdict.kind, verdict.reason) for verdict in verdicts} == {("unknown", "there is no GPU to judge by")}
    assert idle_for(rule, 20.0, [an_activity(0.0)]) == 1.0


def test_requiring_more_gpus_than_there_are_means_all() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=3.0, after=0.0, every=1.0, require=4), 0.0)
    words = [rule.observe(Observation(float(s), [an_activity(0.0, 0), an_activity(0.0, 1)])).kind for s in range(1, 5)]
    assert words == ["waiting", "waiting", "idle", "idle"]
    unknown = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=3.0, after=0.0, every=1.0, require=4), 0.0)
    assert unknown.observe(Observation(1.0, [an_activity(HIDDEN, 0), an_activity(0.0, 1)])).kind == "unknown"


# Snooze and rearming


@given(st.integers(1, 29), st.integers(1, 200), st.integers(1, 5))
def test_whole_window_follows_a_snooze(asked: int, length: int, every: int) -> None:
    policy = IdlePolicy(unused_for=0.0, below=BELOW, window=30.0, after=0.0, every=float(every))
    rule = IdleRule(policy, 0.0)
    until = asked + length
    fired = []
    for second in range(every, until + 30 + every, every):
        if second - every < asked <= second:
            rule.snooze(float(until))
        if rule.observe(Observation(float(second), [an_activity(0.0, span=float(every))])).kind == "idle":
            fired.append(second)
    assert fired
    assert fired[0] >= until + 30


def test_snooze_can_be_ended_early() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=10.0, after=0.0, every=1.0), 0.0)
    rule.observe(Observation(1.0, [an_activity(0.0)]))
    rule.snooze(1000.0)
    assert rule.observe(Observation(2.0, [an_activity(0.0)])).reason == "snoozed for another 16m38s"
    rule.snooze(2.0)
    assert rule.observe(Observation(3.0, [an_activity(0.0)])).kind == "waiting"
    assert rule.observe(Observation(12.0, [an_activity(0.0, span=9.0)])).kind == "idle"


def test_snooze_survives_rearming() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=10.0, after=0.0, every=1.0), 0.0)
    rule.snooze(100.0)
    rule.rearm(5.0)
    assert rule.observe(Observation(6.0, [an_activity(0.5)])).reason == "snoozed for another 1m34s"


def test_snooze_and_rearming_do_not_shorten_the_start_up_delay() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=10.0, after=100.0, every=1.0), 0.0)
    rule.snooze(20.0)
    rule.rearm(30.0)
    rule.observe(Observation(39.0, [an_activity(0.5)]))
    assert rule.observe(Observation(40.0, [an_activity(0.0)])).reason == "start-up delay: the window begins in 1m"


def drive(rule: IdleRule, *stretches: tuple[int, Maybe[float]]) -> list[int]:
    """Looks once a second and rearms after every firing; returns the seconds of firings."""
    fired = []
    second = 0
    for length, peak in stretches:
        for _ in range(length):
            second += 1
            if rule.observe(Observation(float(second), [an_activity(peak)])).kind == "idle":
                fired.append(second)
                rule.rearm(float(second))
    return fired


def test_rearmed_rule_fires_once_for_each_use_of_the_gpus() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=10.0, after=0.0, every=1.0), 0.0)
    assert drive(rule, (300, 0.0), (1, 0.5), (300, 0.0), (20, HIDDEN), (300, 0.0)) == [10, 311]


def test_rearmed_rule_must_be_armed_again() -> None:
    policy = IdlePolicy(unused_for=0.0, below=BELOW, window=10.0, after=0.0, every=1.0, arm_above=0.5, arm_for=5.0)
    fired = drive(IdleRule(policy, 0.0), (50, 0.0), (6, 0.9), (50, 0.0), (3, 0.9), (50, 0.0), (6, 0.5), (50, 0.0))
    assert fired == [66, 175]


def test_spent_rule_reports_it_and_has_no_due_time() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=5.0, after=0.0, every=1.0), 0.0)
    drive(rule, (6, 0.0))
    assert rule.spent
    verdict = rule.observe(Observation(7.0, [an_activity(0.0)]))
    assert (verdict.kind, verdict.reason) == ("arming", "it has fired: not armed until the GPUs are used again")
    assert rule.due() is None
    rule.observe(Observation(8.0, [an_activity(0.2)]))
    assert not rule.spent


@pytest.mark.parametrize(
    ("require", "fired"),
    [
        # GPU 0 is idle all the time but for second 30; GPU 1 works from then on until second 60.
        ("any", {5: "GPU 0", 35: "GPU 0", 65: "GPU 0 and GPU 1"}),
        ("all", {5: "GPU 0 and GPU 1", 65: "GPU 0 and GPU 1"}),
        (2, {5: "GPU 0 and GPU 1", 65: "GPU 0 and GPU 1"}),
    ],
)
def test_gpu_is_reported_again_only_after_it_was_used(require: Require, fired: dict[int, str]) -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=5.0, after=0.0, every=1.0, require=require), 0.0)
    reasons = {}
    for second in range(1, 120):
        activities = [
            an_activity(0.8 if second == 30 else 0.0, 0),
            an_activity(0.9 if 30 <= second <= 60 or (require == "any" and second < 30) else 0.0, 1),
        ]
        verdict = rule.observe(Observation(float(second), activities))
        if verdict.kind == "idle":
            reasons[second] = verdict.reason.split(" stayed")[0]
            rule.rearm(float(second))
    assert reasons == fired


@given(worlds(), st.integers(1, 5), st.integers(0, 10), REQUIRES)
@settings(max_examples=examples(200))
def test_every_firing_includes_a_gpu_used_since_the_last(world: World, every: int, more: int, require: Require) -> None:
    policy = IdlePolicy(
        unused_for=0.0, below=BELOW, window=float(every + more), after=0.0, every=float(every), require=require
    )
    rule = IdleRule(policy, world.begun)
    reported: set[str] = set()
    for second in range(1, world.length + 1, every):
        activities = world.activities(second - every, second)
        reported -= {a.uuid for a in activities if not isinstance(a.peak, Unknown) and a.peak >= BELOW}
        at = world.begun + second
        verdict = rule.observe(Observation(at, activities))
        if verdict.effect == "act":
            idle = set(verdict.gpus)
            assert len(idle) >= required(policy, len(world.gpus))
            assert idle - reported
            # A GPU that went idle slightly later belongs to the same firing.
            reported |= {a.uuid for a in activities if is_idle(a.peak)}
            rule.rearm(at)
        assert rule.spent == (len(reported) == len(world.gpus))


def test_one_used_gpu_rearms_a_rule_that_requires_all() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=5.0, after=0.0, every=1.0), 0.0)
    fired = []
    for second in range(1, 60):
        activities = [an_activity(0.8 if second in {20, 21} else 0.0, 0), an_activity(0.0, 1)]
        due = rule.due()
        if rule.observe(Observation(float(second), activities)).kind == "idle":
            assert due == second
            fired.append(second)
            rule.rearm(float(second))
    assert fired == [5, 26]


def test_verdict_names_gpus_idle_for_the_whole_window() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=5.0, after=0.0, every=1.0, require="any"), 0.0)
    named = [
        rule.observe(Observation(float(at), [an_activity(0.0, 0), an_activity(0.0 if at > 2 else 0.5, 1)])).gpus
        for at in range(1, 8)
    ]
    assert named[3:] == [(), ("GPU-0",), ("GPU-0",), ("GPU-0", "GPU-1")]


# Reasons

FOUR = [an_activity(0.0, gpu) for gpu in range(4)]


@pytest.mark.parametrize(
    ("activities", "word", "reason"),
    [
        ([an_activity(0.0)], "waiting", "GPU 0 stayed below 10% for 1m of 30m"),
        ([an_activity(0.0), an_activity(0.87, 3)], "busy", "GPU 3 was at 87%"),
        ([an_activity(0.1)], "busy", "GPU 0 was at 10%"),
        ([an_activity(0.0), an_activity(HIDDEN, 1)], "unknown", f"GPU 1 is unknown: {HIDDEN.reason}"),
        ([an_activity(HIDDEN), an_activity(HIDDEN, 1)], "unknown", f"GPU 0 and GPU 1 are unknown: {HIDDEN.reason}"),
        # An unknown GPU makes no difference where another is certainly busy.
        ([an_activity(0.5), an_activity(HIDDEN, 1)], "busy", "GPU 0 was at 50%"),
        (FOUR[:3], "waiting", "GPU 0, GPU 1 and GPU 2 stayed below 10% for 1m of 30m"),
        ([*FOUR, an_activity(0.0, 4)], "waiting", "all 5 GPUs stayed below 10% for 1m of 30m"),
    ],
)
def test_each_verdict_says_why(activities: list[Activity], word: str, reason: str) -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, after=0.0), 0.0)
    spans = [a._replace(span=5.0) for a in activities]
    *_, verdict = [rule.observe(Observation(float(second), spans)) for second in range(5, 61, 5)]
    assert (verdict.kind, verdict.reason) == (word, reason)


def test_reason_names_only_idle_gpus() -> None:
    rule = IdleRule(IdlePolicy(unused_for=0.0, below=BELOW, window=30.0, after=0.0, every=1.0, require=2), 0.0)
    before = [an_activity(0.0, 0), an_activity(0.9, 1), an_activity(0.0, 2), an_activity(1.0, 3)]
    after = [an_activity(0.0, 0), an_activity(0.0, 1), an_activity(0.0, 2), an_activity(1.0, 3)]
    *_, verdict = [
        rule.observe(Observation(float(second), before if second < 20 else after)) for second in range(1, 31)
    ]
    assert (verdict.kind, verdict.effect, verdict.progress, verdict.since) == ("idle", "act", 1.0, 0.0)
    assert verdict.reason == "GPU 0 and GPU 2 stayed below 10% for 30s"


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (IdlePolicy(), "start-up delay: the window begins in 9m59s"),
        (IdlePolicy(after=0.0, arm_above=0.5), "not armed: no GPU has been at 50% or more yet"),
        (IdlePolicy(after=0.0, arm_above=0.5, arm_for=300.0), "not armed: no GPU has been at 50% or more for 5m yet"),
    ],
)
def test_waiting_and_arming_verdicts_give_a_reason(policy: IdlePolicy, reason: str) -> None:
    assert IdleRule(policy, 0.0).observe(Observation(1.0, [an_activity(0.0)])).reason == reason


def test_burst_between_looks_is_not_long_activity() -> None:
    policy = IdlePolicy(unused_for=0.0, below=BELOW, window=60.0, after=0.0, every=60.0, arm_above=0.5, arm_for=60.0)
    rule = IdleRule(policy, 0.0)
    peaks = {60.0: 1.0, 120.0: 0.0, 180.0: 0.0}
    assert {rule.observe(Observation(at, [an_activity(peak, span=60.0)])).kind for at, peak in peaks.items()} == {
        "arming"
    }


def test_invalid_policy_is_refused() -> None:
    with pytest.raises(BadInputError, match="shorter than --every"):
        IdleRule(IdlePolicy(window=1.0, every=10.0), 0.0)


# Windows


MINUTE = 60.0
QUIET = JobProgress(cpu=0.01, io=0.0)
WORKING = JobProgress(cpu=1.2, io=0.0)
DOWNLOADING = JobProgress(cpu=0.1, io=2e7)


def minutes_until_firing(
    rule: IdleRule, *phases: tuple[float, Maybe[float], JobProgress], every: float = MINUTE
) -> float | None:
    """Phases of minutes, utilization and progress; when the rule fires, in minutes."""
    at = 0.0
    for minutes, peak, progress in phases:
        for _ in range(int(minutes * MINUTE / every)):
            at += every
            if rule.observe(Observation(at, [an_activity(peak, span=every)], progress=progress)).effect == "act":
                return at / MINUTE
    return None


def usual(**changes: float) -> IdleRule:
    return IdleRule(msgspec.structs.replace(IdlePolicy(after=0.0, every=MINUTE), **changes), 0.0)


@pytest.mark.parametrize(
    ("phases", "minutes"),
    [
        pytest.param([(10, 0.9, WORKING), (500, 0.0, QUIET)], 40, id="idle after work"),
        pytest.param([(800, 0.0, JobProgress())], 360, id="never used, nothing known of its processes"),
        pytest.param([(800, 0.0, DOWNLOADING)], 360, id="never used, downloading"),
        pytest.param([(800, 0.0, WORKING)], 360, id="never used, preparing data"),
        pytest.param([(800, 0.0, QUIET)], 121, id="never used and doing nothing"),
        pytest.param([(300, 0.0, DOWNLOADING), (800, 0.0, QUIET)], 360, id="a download that hangs"),
        pytest.param([(10, 0.9, WORKING), (119, 0.0, WORKING), (9, 0.9, WORKING)], None, id="evaluation on the CPU"),
        pytest.param([(10, 0.9, WORKING), (500, 0.0, WORKING)], 130, id="a server at rest that spins"),
        pytest.param([(10, 0.9, WORKING), (20, 0.0, WORKING), (500, 0.0, QUIET)], 51, id="hung after an evaluation"),
        pytest.param([(10, 0.9, WORKING), (500, 0.0, JobProgress())], 40, id="idle, nothing known of its processes"),
    ],
)
def test_window_depends_on_what_the_job_did(
    phases: list[tuple[float, Maybe[float], JobProgress]], minutes: float | None
) -> None:
    fired = minutes_until_firing(usual(), *phases)
    assert fired == minutes


def test_windows_can_be_set() -> None:
    assert minutes_until_firing(usual(unused_for=0.0), (100, 0.0, DOWNLOADING)) == 30
    assert minutes_until_firing(usual(unused_for=3000.0), (100, 0.0, DOWNLOADING)) == 50
    assert minutes_until_firing(usual(cpu_for=0.0), (6, 0.9, WORKING), (100, 0.0, WORKING)) == 36


@pytest.mark.parametrize(("unknown", "fired"), [(20.0, 30 + 10), (60.0, 30 + 30), (65.0, None)])
def test_short_unknown_readings_pause_the_window_and_long_ones_restart_it(unknown: float, fired: float | None) -> None:
    """Every second minute some readings fail."""
    rule = usual(every=5.0, unused_for=0.0)
    healthy = 120.0 - unknown
    pair: list[tuple[float, Maybe[float], JobProgress]] = [
        (healthy / MINUTE, 0.0, QUIET),
        (unknown / MINUTE, HIDDEN, QUIET),
    ]
    phases = pair * 40
    found = minutes_until_firing(rule, *phases, every=5.0)
    if fired is None:
        assert found is None
    else:
        assert found is not None
        # What a pause takes out is the unknown time and up to one look beside it.
        assert 30 * 120 / (healthy + 5) - 1 <= found <= 30 * 120 / (healthy - 5) + 2


@pytest.mark.parametrize(("every", "minutes"), [(5.0, 30), (30.0, 30), (60.0, 60)])
def test_momentary_samples_must_be_many(every: float, minutes: float) -> None:
    rule = usual(every=every, unused_for=0.0)
    momentary = msgspec.structs.replace(Reading.unknown("GPU-0", "n/a"), utilization=Utilization(0.0, 0.0, 1))
    fired, at = None, 0.0
    while fired is None:
        at += every
        verdict = rule.observe(Observation(at, [Activity("GPU-0", "GPU 0", 0.0, 0.0, momentary)]))
        fired = at / MINUTE if verdict.effect == "act" else None
        if verdict.progress == 1.0 and fired is None:
            assert "too few samples" in verdict.reason
    assert minutes <= fired <= minutes + 1


@pytest.mark.parametrize(("own", "check_minutes", "fired"), [(True, 1, 31), (False, 4, 360), (False, 6, 36)])
def test_short_use_by_others_does_not_make_a_job_that_prepares_a_user_of_its_gpu(
    own: bool, check_minutes: int, fired: float
) -> None:
    rule, at = usual(), 0.0
    process = (a_process(1),) if own else ()
    while True:
        at += MINUTE
        peak = 0.9 if at <= check_minutes * MINUTE else 0.0
        activity = Activity("GPU-0", "GPU 0", MINUTE, peak, None, process)
        if rule.observe(Observation(at, [activity], progress=DOWNLOADING._replace(cpu=0.1, io=0.0))).effect == "act":
            break
    assert at / MINUTE in {fired, fired + check_minutes}


@pytest.mark.parametrize(("samples", "fired"), [(1, False), (360, True)])
def test_steps_between_momentary_samples_of_zero_are_work(samples: int, fired: bool) -> None:
    rule, at, acted = usual(), 0.0, False
    reading = msgspec.structs.replace(Reading.unknown("GPU-0", "n/a"), utilization=Utilization(0.0, 0.0, samples))
    while at < 5 * 60 * MINUTE:
        at += MINUTE
        steps = JobProgress(int(at // (4 * MINUTE)), at - at % (4 * MINUTE), "log", cpu=8.0)
        peak, process = (0.9, (a_process(1),)) if at <= 5 * MINUTE else (0.0, ())
        verdict = rule.observe(
            Observation(at, [Activity("GPU-0", "GPU 0", 0.0, peak, reading, process)], progress=steps)
        )
        acted = acted or verdict.effect == "act"
    assert acted == fired


def test_unknown_reading_does_not_hide_that_the_job_has_worked_on_the_cpu() -> None:
    """An evaluation on the CPU, in which the driver fails once."""
    phases: list[tuple[float, Maybe[float], JobProgress]] = [
        (6, 0.9, WORKING),
        (50, 0.0, WORKING),
        (0.1, HIDDEN, WORKING),
        (60, 0.0, WORKING),
    ]
    assert minutes_until_firing(usual(every=5.0), *phases, every=5.0) is None


def test_window_that_lacks_samples_is_not_filled_by_looks_in_quick_succession() -> None:
    rule, at = usual(every=60.0, unused_for=0.0), 0.0
    momentary = msgspec.structs.replace(Reading.unknown("GPU-0", "n/a"), utilization=Utilization(0.0, 0.0, 1))
    while at < 45 * MINUTE:
        at += MINUTE
        assert rule.observe(Observation(at, [Activity("GPU-0", "GPU 0", 0.0, 0.0, momentary)])).effect == "none"
        due = rule.due()
        assert due is None or due > at
