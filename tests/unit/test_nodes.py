"""A job over several machines: one observation of all its nodes."""

import random
from typing import Any, NamedTuple, get_args

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.gpus.model import JobProgress, Maybe, Reading, Trust, Unknown, Utilization, known
from stoker.rules.idle import IdlePolicy, IdleRule
from stoker.rules.nodes import ClockShift, NodeObservations, merge_observations, on_clock_here
from stoker.rules.rule import Activity, Observation
from tests.support.deep import examples
from tests.support.looks import a_process, a_reading

HIDDEN = Unknown("the driver did not answer in 5 s")
EVERY = 5.0
WINDOW = 60.0
PATIENCE = 12.0


def an_observation(*peaks: Maybe[float], at: float = 100.0, span: float = 5.0, **changes: Any) -> Observation:
    return Observation(at, [an_activity(peak, gpu, span) for gpu, peak in enumerate(peaks)])._replace(**changes)


def an_activity(peak: Maybe[float], gpu: int = 0, span: float = 5.0) -> Activity:
    return Activity(f"GPU-{gpu}", f"GPU {gpu}", span, peak, a_reading(utilization=peak, span=span))


def unreadable(at: float = 100.0) -> Observation:
    return Observation(at, [], "the step has ended")


def a_rule() -> IdleRule:
    return IdleRule(IdlePolicy(window=WINDOW, after=0.0, every=EVERY, unused_for=WINDOW), begun=0.0)


# One moment


def test_gpus_and_processes_of_different_nodes_are_kept_apart() -> None:
    one = an_observation(0.0)
    mine = one.activities[0]._replace(processes=(a_process(100),))
    merged = merge_observations({"b": one, "a": one._replace(activities=[mine])})
    assert [activity.label for activity in merged.activities] == ["GPU 0 of a", "GPU 0 of b"]
    assert len({activity.uuid for activity in merged.activities}) == 2
    assert [len(activity.processes) for activity in merged.activities] == [1, 0]


def test_job_on_one_node_is_observed_as_before() -> None:
    one = an_observation(0.0, 0.5)
    assert merge_observations({"a": one}) == one


def test_node_that_cannot_be_read_is_unknown() -> None:
    merged = merge_observations({"a": an_observation(0.0), "b": unreadable()})
    assert merged.unknown == [("b", "the step has ended")]
    assert merged.problem == "b: the step has ended"


def test_node_that_lists_no_gpu_is_unknown() -> None:
    assert merge_observations({"a": an_observation(0.0), "b": an_observation()}).unknown == [("b", "it lists no GPU")]


def test_each_gpu_speaks_for_the_time_that_all_nodes_have_seen() -> None:
    merged = merge_observations({"a": an_observation(0.0, at=100.0), "b": an_observation(0.0, at=103.0)})
    assert merged.at == 100.0
    assert [activity.span for activity in merged.activities] == [5.0, 2.0]


# Progress


def progress_of(*each: JobProgress) -> JobProgress:
    return merge_observations({str(n): an_observation(0.0, progress=one) for n, one in enumerate(each)}).progress


def test_step_of_any_node_is_a_step_of_the_job() -> None:
    before = progress_of(JobProgress(7, 50.0, "log"), JobProgress(9, 40.0, "log"))
    after = progress_of(JobProgress(7, 50.0, "log"), JobProgress(10, 60.0, "log"))
    assert before.steps != after.steps
    assert after.since == 60.0


def test_most_trusted_source_of_steps_counts() -> None:
    merged = progress_of(JobProgress(900, 99.0, "output"), JobProgress(7, 50.0, "call"))
    assert (merged.steps, merged.since, merged.trust) == (7, 50.0, "call")


def test_steps_that_no_node_shows_stay_unseen() -> None:
    assert progress_of(JobProgress(), JobProgress()) == JobProgress()
    assert merge_observations({}).progress == JobProgress()


def test_processes_of_all_nodes_are_added() -> None:
    merged = progress_of(JobProgress(cpu=1.5, io=10.0), JobProgress(cpu=0.5, io=5.0))
    assert (merged.cpu, merged.io) == (2.0, 15.0)


def test_node_with_unreadable_processes_counts_as_work_but_never_as_idle() -> None:
    assert progress_of(JobProgress(cpu=1.5), JobProgress()).cpu == 1.5
    assert progress_of(JobProgress(cpu=0.0), JobProgress()).cpu is None


# Over time


def collected(nodes: str = "ab") -> NodeObservations:
    return NodeObservations(list(nodes), begun=0.0, patience=PATIENCE)


def test_nodes_wait_for_each_other() -> None:
    nodes = collected()
    nodes.add("a", an_observation(0.0, at=5.0))
    assert nodes.take(5.0) is None
    nodes.add("b", an_observation(0.0, at=6.0))
    merged = nodes.take(6.0)
    assert merged is not None
    assert merged.at == 5.0
    assert nodes.take(6.0) is None


def test_all_activity_of_a_faster_node_is_merged() -> None:
    nodes = collected()
    nodes.add("a", an_observation(0.9, at=5.0))
    nodes.add("a", an_observation(0.0, at=10.0))
    nodes.add("b", an_observation(0.0, at=9.0))
    merged = nodes.take(10.0)
    assert merged is not None
    first = merged.activities[0]
    assert (merged.at, first.peak, first.span) == (9.0, 0.9, 9.0)
    assert first.reading is not None
    assert first.reading.utilization == Utilization(0.9, 0.45, 12)


def test_reading_that_was_unknown_in_between_stays_unknown() -> None:
    each: tuple[tuple[Maybe[float], ...], ...] = ((HIDDEN, 0.0), (0.0, HIDDEN))
    for peaks in each:
        nodes = collected("a")
        for at, peak in enumerate(peaks):
            nodes.add("a", an_observation(peak, at=float(at)))
        merged = nodes.take(2.0)
        assert merged is not None
        assert merged.unknown == [("GPU 0", HIDDEN.reason)]


def test_work_on_the_cpu_in_between_counts() -> None:
    nodes = collected("a")
    nodes.add("a", an_observation(0.0, at=5.0, progress=JobProgress(cpu=2.0)))
    nodes.add("a", an_observation(0.0, at=10.0, progress=JobProgress(cpu=0.0, io=3.0)))
    merged = nodes.take(10.0)
    assert merged is not None
    assert (merged.progress.cpu, merged.progress.io) == (2.0, 3.0)


def test_momentary_samples_stay_momentary() -> None:
    nodes = collected("a")
    for at in (5.0, 10.0):
        reading = a_reading(utilization=0.0)
        single: Reading = type(reading)(*_fields(reading, utilization=Utilization(0.0, 0.0, 1)))
        nodes.add("a", Observation(at, [Activity("GPU-0", "GPU 0", 0.0, 0.0, single)]))
    merged = nodes.take(10.0)
    assert merged is not None
    joined = merged.activities[0].reading
    assert joined is not None
    assert known(joined.utilization)
    assert joined.utilization.samples == 1


def _fields(reading: Reading, **changes: Any) -> list[Any]:
    return [changes.get(name, getattr(reading, name)) for name in Reading.__struct_fields__]


def test_gpus_of_a_silent_node_are_unknown_after_a_while() -> None:
    nodes = collected()
    nodes.add("a", an_observation(0.0, at=5.0))
    nodes.add("b", an_observation(0.0, 0.0, at=5.0))
    assert nodes.take(5.0) is not None
    nodes.add("a", an_observation(0.0, at=10.0))
    assert nodes.take(16.9) is None
    merged = nodes.take(nodes.due())
    assert merged is not None
    assert [label for label, _reason in merged.unknown] == ["GPU 0 of b", "GPU 1 of b"]


def test_lost_node_does_not_delay_observations() -> None:
    nodes = collected()
    nodes.lose("b", "the step has ended")
    assert nodes.take(4.0) is None
    nodes.add("a", an_observation(0.0, at=5.0))
    merged = nodes.take(5.0)
    assert merged is not None
    assert merged.unknown == [("b", "the step has ended")]


def test_job_of_which_nothing_is_received_is_unknown() -> None:
    merged = collected().take(PATIENCE)
    assert merged is not None
    assert merged.at == PATIENCE
    assert len(merged.unknown) == 2


def test_time_never_goes_back_when_a_late_observation_arrives() -> None:
    nodes = collected()
    nodes.add("b", an_observation(0.0, at=17.0))
    assert (nodes.take(17.0) or unreadable()).at == 17.0
    nodes.add("a", an_observation(0.0, at=16.0))
    nodes.add("b", an_observation(0.0, at=22.0))
    assert (nodes.take(22.0) or unreadable()).at == 17.0


# Properties: nodes with their own rhythm, judged together


def test_node_on_which_the_job_has_ended_is_not_waited_for() -> None:
    nodes = NodeObservations(["a", "b"], 100.0, PATIENCE)
    nodes.add("a", an_observation(0.5, at=101.0))
    assert nodes.take(101.0) is None
    nodes.leave("b")
    merged = nodes.take(101.0)
    assert merged is not None
    assert [activity.label for activity in merged.activities] == ["GPU 0"]


# Clocks


def test_report_that_was_held_up_is_of_when_it_was_made() -> None:
    shift = ClockShift()
    # The other machine was started later: its clock shows 1000 s less. Reports take 0.1 s and more.
    assert shift.here(10.0, 1010.5) == 1010.5
    assert shift.here(20.0, 1020.1) == 1020.1
    assert abs(shift.here(30.0, 1037.0) - 1030.1) < 0.02


def test_clock_that_goes_slower_is_followed() -> None:
    """By a hundred millionths, for three weeks: without that, its reports would be three minutes old."""
    shift = ClockShift()
    at = 0.0
    for second in range(0, 21 * 86400, 600):
        at = shift.here(second * (1 - 1e-4), float(second))
    assert abs(at - second) < 0.1


def test_times_of_an_observation_move_together() -> None:
    seen = an_observation(0.5, at=10.0, progress=JobProgress(steps=7, since=4.0, trust="call"))
    here = on_clock_here(seen, ClockShift(), 110.0)
    assert (here.at, here.progress.since) == (110.0, 104.0)
    assert on_clock_here(an_observation(0.5, at=10.0), ClockShift(), 110.0).progress.since is None


class World(NamedTuple):
    """What the one GPU of each node did, second by second."""

    nodes: tuple[tuple[Maybe[float], ...], ...]
    seed: int


VALUES = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.0, 0.9, HIDDEN]), st.sampled_from([1, 2, 20, 45, 90])),
    min_size=1,
    max_size=8,
).map(lambda stretches: tuple(value for value, length in stretches for _ in range(length)))
# Idle but for a second here and there.
BURSTS = st.sets(st.integers(0, 199), max_size=3).map(
    lambda bursts: tuple(0.9 if second in bursts else 0.0 for second in range(200))
)
WORLDS = st.builds(World, st.lists(VALUES | BURSTS, min_size=1, max_size=3).map(tuple), st.integers(0, 1000))


def looks_of(world: World) -> list[tuple[float, str, Observation]]:
    """Each node looks at its own moments; every look arrives a little later."""
    chance = random.Random(world.seed)
    length = min(map(len, world.nodes))
    arrivals = []
    for number, seconds in enumerate(world.nodes):
        rhythm = chance.choice((2, 4, 8))
        at = chance.randrange(1, 6)
        last = 0
        while at <= length:
            span = seconds[last:at]
            unknown = [value for value in span if isinstance(value, Unknown)]
            peak: Maybe[float] = unknown[0] if unknown else max(value for value in span if known(value))
            arrivals.append(
                (at + chance.random() / 2, f"n{number}", an_observation(peak, at=float(at), span=at - last))
            )
            last, at = at, at + rhythm + chance.randrange(2)
    return sorted(arrivals, key=lambda arrival: arrival[0])


def as_seen(world: World) -> list[list[Maybe[float]]]:
    """What each node did, second by second; a look that failed hides all of the time that it covers."""
    nodes = [list(seconds) for seconds in world.nodes]
    for _arrives, node, observation in looks_of(world):
        (activity,) = observation.activities
        if isinstance(activity.peak, Unknown):
            last = int(observation.at)
            nodes[int(node.removeprefix("n"))][last - int(activity.span) : last] = [activity.peak] * int(activity.span)
    return nodes


# A node that worked and failed to be read within the same look.
@example(World(((*[0.0] * 46, 0.9, HIDDEN, *[0.0] * 20),), 0))
@given(WORLDS)
@settings(max_examples=examples(300))
def test_job_is_idle_only_if_every_node_was_for_the_whole_window(world: World) -> None:
    rule = a_rule()
    nodes = NodeObservations([f"n{n}" for n in range(len(world.nodes))], 0.0, PATIENCE)
    for arrives, node, observation in looks_of(world):
        nodes.add(node, observation)
        merged = nodes.take(arrives)
        if merged is None or rule.observe(merged).effect != "act":
            continue
        window = range(int(merged.at - WINDOW), int(merged.at))
        for seconds in as_seen(world):
            assert all(isinstance(seconds[second], Unknown) or seconds[second] == 0.0 for second in window)
            assert sum(not isinstance(seconds[second], Unknown) for second in window) >= 1


@given(WORLDS, st.integers(0, 2), st.integers(0, 300))
@settings(max_examples=examples(200))
def test_job_is_never_idle_while_a_node_is_silent(world: World, silent: int, until: int) -> None:
    """One node says nothing before `until`."""
    rule = a_rule()
    silent %= len(world.nodes)
    nodes = NodeObservations([f"n{n}" for n in range(len(world.nodes))], 0.0, PATIENCE)
    for arrives, node, observation in looks_of(world):
        if node == f"n{silent}" and arrives < until:
            if arrives >= nodes.due() and (merged := nodes.take(arrives)) is not None:
                assert rule.observe(merged).effect != "act"
            continue
        nodes.add(node, observation)
        if (merged := nodes.take(arrives)) is not None and arrives < until:
            assert rule.observe(merged).effect != "act"


PROGRESS = st.builds(
    JobProgress,
    st.none() | st.integers(0, 9),
    st.none() | st.floats(0, 99),
    st.sampled_from(get_args(Trust)),
    st.none() | st.floats(0, 9),
    st.none() | st.floats(0, 9e6),
)
OBSERVATIONS = st.builds(
    lambda peaks, at, progress: an_observation(*peaks, at=at, progress=progress),
    st.lists(st.sampled_from([0.0, 0.5, HIDDEN]), max_size=3),
    st.floats(90, 110),
    PROGRESS,
)


@given(st.dictionaries(st.sampled_from("abcd"), OBSERVATIONS, min_size=1), st.randoms())
@settings(max_examples=examples(200))
def test_order_of_nodes_does_not_matter(by_node: dict[str, Observation], chance: random.Random) -> None:
    items = list(by_node.items())
    chance.shuffle(items)
    merged, again = merge_observations(by_node), merge_observations(dict(items))
    assert merged == again
    if len(by_node) > 1:
        seen = sum(max(len(one.activities), 1) for one in by_node.values())
        assert len({activity.uuid for activity in merged.activities}) == seen
