"""The search: nearly the largest size that fits, in few runs, and the real run never fails."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stoker.fit.model import (
    Capacity,
    FitSpec,
    Fitted,
    NextProbe,
    NothingFitsError,
    ProbeFailedError,
    ProbeOutcome,
    SearchOptions,
    smaller,
)
from stoker.fit.search import RUNS, RUNS_FOR_A_POOR_ANSWER, Search, Sizes
from tests.support.deep import examples
from tests.support.trainers import GIB, MIB, TRAINERS, Trainer, search

GOOD = 0.9
FITTING = [name for name, trainer in TRAINERS.items() if trainer.ends == "size"]


def showing(
    *observations: ProbeOutcome, search_options: SearchOptions | None = None, capacity: int = 24 * GIB
) -> Search:
    searching = Search(search_options or SearchOptions(), Capacity(capacity, 24 * GIB))
    for observation in observations:
        searching.record(observation)
    return searching


def ran(size: int, gib: float, rate: float | None = None, settled: bool = True) -> ProbeOutcome:
    return ProbeOutcome(size=size, outcome="fits", peak=int(gib * GIB), rate=rate, settled=settled)


def ran_out(size: int) -> ProbeOutcome:
    return ProbeOutcome(size=size, outcome="oom")


def answer(searching: Search) -> Fitted:
    found = searching.next()
    assert isinstance(found, Fitted), found
    return found


def asked(searching: Search) -> NextProbe:
    step = searching.next()
    assert isinstance(step, NextProbe), step
    return step


# On every simulated program


@pytest.mark.parametrize("name", FITTING)
def test_search_finds_nearly_the_largest_size_in_few_runs_and_the_real_run_survives(name: str) -> None:
    trainer = TRAINERS[name]

    found = search(trainer)

    size: int | None = found.size
    # Growth after all probes kills the first real run; it is restarted smaller.
    for _ in range(FitSpec().retries_oom if trainer.surprises else 0):
        if size is not None and trainer.dies(size):
            size = smaller(size, trainer.search_options)
    assert size is not None
    assert size >= (0.8 if trainer.surprises else GOOD) * trainer.true_limit()
    assert not trainer.dies(size)
    assert len(found.observations) <= (RUNS_FOR_A_POOR_ANSWER if trainer.bends_strongly else RUNS)


def test_table_has_enough_programs() -> None:
    assert len(TRAINERS) >= 24


@pytest.mark.parametrize("name", FITTING)
def test_answer_is_an_allowed_size(name: str) -> None:
    trainer = TRAINERS[name]
    sizes = Sizes(trainer.search_options)

    found = search(trainer)

    assert found.size == sizes.down(found.size)
    assert found.size <= trainer.search_options.most


@pytest.mark.parametrize("name", FITTING)
def test_answer_predicts_the_memory_of_the_run(name: str) -> None:
    trainer = TRAINERS[name]

    found = search(trainer)

    if not trainer.surprises:
        assert found.predicted == pytest.approx(trainer.peak(found.size), rel=0.1)
    assert found.predicted <= found.limit
    assert found.fixed >= 0
    assert found.slope >= 0


def test_search_reports_that_nothing_fits() -> None:
    with pytest.raises(NothingFitsError, match=r"^nothing fits: a batch of one ran out of memory, of the 24 GiB"):
        search(TRAINERS["nothing fits"])


def test_program_that_reaches_no_step_gets_no_answer() -> None:
    with pytest.raises(ProbeFailedError):
        search(TRAINERS["never reaches a step"])


def test_ignored_flag_is_reported_with_a_size_that_ran() -> None:
    found = search(TRAINERS["ignores the flag"])

    assert found.size in {seen.size for seen in found.observations}
    assert found.note == "the memory does not depend on the batch size: check that the program uses it"


def test_end_of_memory_growth_is_reported() -> None:
    found = search(TRAINERS["no more data than 300"])

    assert found.size in {seen.size for seen in found.observations}
    assert "does not grow beyond a batch of" in found.note


# On any program


BLOCKS = st.sampled_from([512, 2 * MIB, 20 * MIB])


@settings(max_examples=examples(150), deadline=None)
@given(
    total=st.integers(16, 80),
    limit=st.floats(8, 4000),
    fixed=st.floats(0, 0.9),
    bend=st.floats(0, 0.15),
    block=BLOCKS,
)
def test_any_nearly_linear_program_is_fitted(total: int, limit: float, fixed: float, bend: float, block: int) -> None:
    """At most 15 % of the growth is nonlinear; at most 90 % of the limit is fixed; 8 fits."""
    room = total * GIB * 0.9
    slope = (1 - fixed) * room / limit / (1 + bend)
    trainer = Trainer("any", int(fixed * room), slope, bend=bend * slope / limit, block=block, total=total * GIB)
    assume(trainer.true_limit() >= 8)

    found = search(trainer)

    assert not trainer.dies(found.size)
    assert found.size >= GOOD * trainer.true_limit()
    assert len(found.observations) <= RUNS


@settings(max_examples=examples(150), deadline=None)
@given(
    fixed=st.floats(0, 22),
    slope=st.floats(0.001, 10_000),
    bend=st.floats(0, 1),
    jitter=st.floats(0, 0.02),
    block=BLOCKS,
    search_options=st.builds(
        SearchOptions,
        base=st.integers(1, 300),
        multiple=st.integers(1, 70),
        most=st.integers(300, 5000),
        margin=st.floats(0.05, 0.3),
        per_gpu=st.integers(1, 3),
        effective=st.none() | st.integers(1, 2000),
    ),
)
def test_no_program_gets_a_size_that_runs_out_of_memory(
    fixed: float, slope: float, bend: float, jitter: float, block: int, search_options: SearchOptions
) -> None:
    trainer = Trainer(
        "any",
        int(fixed * GIB),
        slope * MIB,
        bend=bend * slope * 2**10,
        jitter=jitter,
        block=block,
        search_options=search_options,
    )
    try:
        found = search(trainer)
    except NothingFitsError:
        assert trainer.true_limit() == 0 or jitter > 0
        return

    assert not trainer.dies(found.size)
    assert len(found.observations) <= RUNS_FOR_A_POOR_ANSWER
    assert found.accumulate is None or found.size * found.accumulate >= (search_options.effective or 0)


# Step by step


def test_second_run_is_at_the_proportional_size() -> None:
    searching = showing()

    assert asked(searching) == NextProbe(8, verification=False)
    searching.record(ran(8, 2.0))
    assert asked(searching) == NextProbe(80, verification=False)


def test_third_run_verifies_the_linear_estimate() -> None:
    searching = showing(ran(8, 2.4), ran(72, 5.59))

    assert asked(searching) == NextProbe(392, verification=True)
    searching.record(ran(392, 21.5))
    found = answer(searching)
    assert (found.size, found.predicted, found.note) == (392, int(21.5 * GIB), "")
    assert found.slope == pytest.approx(0.05 * GIB, rel=0.02)
    assert found.fixed == pytest.approx(2 * GIB, rel=0.1)


def test_size_above_the_margin_is_lowered_and_verified_again() -> None:
    searching = showing(ran(8, 2.4), ran(72, 5.6), ran(392, 22.5))

    step = asked(searching)

    assert step.verification
    assert 360 <= step.size < 392


def test_linear_estimate_between_two_runs_is_trusted_without_runs_left() -> None:
    found = answer(showing(ran(8, 2.4), ran(72, 5.6), ran(392, 22.5), ran(376, 21.7)))

    assert found.size == 368
    assert 21 * GIB < found.predicted <= found.limit


def test_running_out_of_memory_lowers_the_bound() -> None:
    step = asked(showing(ran(8, 2.4), ran(72, 5.6), ran_out(392)))

    assert 72 < step.size < 392


def test_fifth_run_is_made_only_for_a_poor_answer() -> None:
    poor = (ran(8, 2.4), ran(72, 5.6), ran_out(392))

    assert asked(showing(*poor, ran_out(320))).size < 320
    assert answer(showing(*poor, ran(320, 18.0))).size == 320


def test_no_run_is_made_for_a_small_gain() -> None:
    assert answer(showing(ran(8, 2.4), ran(72, 5.6), ran(392, 21.0))).size == 392
    assert asked(showing(ran(8, 2.4), ran(72, 5.6), ran(392, 19.0))).size > 392


def test_sizes_below_the_base_are_powers_of_two() -> None:
    searching = showing(ran_out(8))

    assert asked(searching).size == 2
    searching.record(ran(2, 10))
    assert asked(searching).size == 4
    searching.record(ran_out(4))
    assert answer(searching).size == 2


def test_nothing_fits_only_when_size_one_does_not() -> None:
    searching = showing(ran_out(8), ran_out(2))

    assert asked(searching).size == 1
    searching.record(ran(1, 23))
    with pytest.raises(NothingFitsError, match=r"a batch of one takes 23 GiB, and of the 24 GiB .* it may take 22 GiB"):
        searching.next()


def test_run_on_a_shared_gpu_uses_only_its_share() -> None:
    search_options = SearchOptions(per_gpu=2)

    assert showing(search_options=search_options).limit == int(24 * GIB * 0.9 / 2)
    assert answer(showing(ran(8, 3), ran(24, 9), ran(32, 10.9), search_options=search_options)).size == 24
    with pytest.raises(NothingFitsError, match="that each of 2 runs has"):
        showing(ran(1, 12), search_options=search_options).next()


def test_second_of_two_runs_may_use_as_much_as_the_first() -> None:
    search_options = SearchOptions(per_gpu=2)

    assert (
        showing(search_options=search_options, capacity=13 * GIB).limit == showing(search_options=search_options).limit
    )
    assert showing(search_options=search_options, capacity=10 * GIB).limit == int(10 * GIB * 0.9), (
        "a stranger has the rest"
    )


def test_growing_memory_is_estimated_pessimistically() -> None:
    flat = asked(showing(ran(8, 2.4), ran(72, 5.6))).size
    growing = asked(showing(ran(8, 2.4, settled=False), ran(72, 5.6, settled=False))).size

    assert growing < 0.9 * flat
    found = answer(showing(ran(8, 2.4), ran(72, 5.6), ran(344, 19.4, settled=False)))
    assert found.note == "the memory was still growing when a probe ended"


def test_shrinking_memory_gives_no_extreme_answer() -> None:
    step = asked(showing(ran(8, 6.0), ran(24, 5.9)))

    assert step.verification
    assert step.size <= 4096


def test_growth_hidden_by_rounding_is_considered() -> None:
    assert asked(showing(ran(8, 20), ran(16, 20))).size == 664


def test_size_excluded_only_by_rounding_is_tried() -> None:
    assert asked(showing(ran(8, 19.4), ran(16, 20.505))) == NextProbe(24, verification=True)
    assert answer(showing(ran(8, 19.4), ran(16, 20.6))).size == 16


def test_missing_memory_readings_give_no_answer() -> None:
    with pytest.raises(ProbeFailedError, match="at batch size 8 could not be seen"):
        showing(ProbeOutcome(size=8, outcome="fits", peak=None))


@pytest.mark.parametrize(("base", "multiple", "first"), [(8, 3, 6), (12, 8, 8), (8, 16, 8), (8, 8, 8), (7, 100, 4)])
def test_only_allowed_sizes_are_tried(base: int, multiple: int, first: int) -> None:
    assert asked(showing(search_options=SearchOptions(base=base, multiple=multiple))).size == first


@pytest.mark.parametrize("fixed", [1.0, 8.0])
@pytest.mark.parametrize(("slope", "bend"), [(1.0, 2.0), (0.0, 0.1), (50.0, 0.5), (0.0, 8.0)])
def test_strongly_nonlinear_memory_is_bisected(fixed: float, slope: float, bend: float) -> None:
    trainer = Trainer("bends", int(fixed * GIB), slope * MIB, bend=bend * MIB)
    outcomes: list[ProbeOutcome] = []

    found = search(trainer, outcomes)

    assert found.size >= 0.9 * trainer.true_limit()
    assert len(outcomes) <= RUNS_FOR_A_POOR_ANSWER
    assert sum(seen.outcome == "oom" for seen in outcomes) <= 4


def test_poor_answer_reports_the_unknown_range_above() -> None:
    poor = (ran(8, 2.4), ran_out(100), ran_out(80), ran_out(40), ran_out(24), ran_out(16))

    assert "a batch of 16 does not fit" in answer(showing(*poor)).note


def test_less_memory_than_before_gives_a_smaller_answer() -> None:
    searching = showing(ran(8, 2.4), ran(72, 5.6), ran(392, 21.5))

    searching.allow(Capacity(20 * GIB, 24 * GIB))

    step = asked(searching)
    assert 320 <= step.size <= 328
    searching.record(ran(step.size, 18))
    assert answer(searching).limit == 18 * GIB


# The effective batch


@pytest.mark.parametrize(
    ("effective", "fits", "size", "steps", "note"),
    [
        pytest.param(512, 400, 256, 2, "", id="halves, though more fits"),
        pytest.param(512, 4096, 512, 1, "", id="all in one step"),
        pytest.param(512, 512, 512, 1, "", id="exactly what fits"),
        pytest.param(1000, 408, 200, 5, "", id="a divisor rather than fewer steps"),
        pytest.param(480, 64, 48, 10, "", id="not the fewest steps, but exact"),
        pytest.param(500, 408, 168, 3, "3 steps of 168 make 504, not 500", id="no multiple divides it: nearest above"),
        pytest.param(509, 408, 256, 2, "2 steps of 256 make 512, not 509", id="a prime: nearest above, fewest steps"),
        pytest.param(512, 4, 4, 128, "", id="tiny batches"),
        pytest.param(4, 4096, 4, 1, "", id="less than the multiple"),
        pytest.param(1, 4096, 1, 1, "", id="one"),
    ],
)
def test_effective_batch_stays_what_the_experiment_wants(
    effective: int, fits: int, size: int, steps: int, note: str
) -> None:
    trainer = Trainer("any", 0, 21.6 * GIB / (fits + 0.5), search_options=SearchOptions(effective=effective))

    found = search(trainer)

    assert (found.size, found.accumulate, found.note) == (size, steps, note)


def test_no_run_is_made_above_the_effective_batch() -> None:
    found = search(Trainer("any", 2 * GIB, 1 * MIB, search_options=SearchOptions(effective=64)))

    assert max(seen.size for seen in found.observations) == 64


# Speed


def measured(prefer: str, *rates: float | None) -> Fitted:
    observations = [
        ran(size, gib, rate) for (size, gib), rate in zip(((8, 2.4), (72, 5.6), (392, 21.5)), rates, strict=True)
    ]
    search_options = SearchOptions(prefer="fastest") if prefer == "fastest" else SearchOptions()
    return answer(showing(*observations, search_options=search_options))


@pytest.mark.parametrize(
    ("rates", "knee"),
    [
        pytest.param((100, 500, 510), 72, id="two percent more is no more"),
        pytest.param((100, 500, 520), 392, id="four percent more is"),
        pytest.param((100, 99, 98), 8, id="never faster"),
        pytest.param((100, 500, 300), 72, id="slower again"),
    ],
)
def test_larger_batch_that_is_not_faster_is_reported_or_avoided(rates: tuple[float | None, ...], knee: int) -> None:
    largest, fastest = measured("largest", *rates), measured("fastest", *rates)

    assert largest.size == 392
    assert largest.note == ("" if knee == 392 else f"a batch of {knee} is as fast")
    assert fastest.size == knee
    assert fastest.note == ("" if knee == 392 else "a batch of 392 fits and is not faster")


@pytest.mark.parametrize("rates", [(None, None, None), (100, 500, None)], ids=["of none", "not of the largest"])
def test_unknown_speed_is_left_out(rates: tuple[float | None, ...]) -> None:
    largest, fastest = measured("largest", *rates), measured("fastest", *rates)

    assert (largest.size, largest.note) == (392, "")
    assert (fastest.size, fastest.note) == (392, "the speed could not be read from the output")
