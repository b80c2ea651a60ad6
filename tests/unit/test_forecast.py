"""When waiting jobs probably start, by what similar jobs took and by time limits; unknown is never a number."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.queue.commands import pattern_of
from stoker.queue.explanation import Estimate, Needs, QueueContext
from stoker.queue.fields import State
from stoker.queue.model import Attempt, Job, View, Worker, WorkerGpu
from stoker.status.forecast import estimates, typical
from tests.support.deep import examples

NOW = 1_800_000_000.0
TRAIN = "python train.py --seed {}"
TOOK = {pattern_of(TRAIN.format(1), gpus): [600.0] * 5 for gpus in range(1, 9)}
GIB = 2**30


def job(number: int, state: State = "queued", **fields: Any) -> Job:
    known: dict[str, Any] = {
        "id": f"{number:08x}", "command": TRAIN.format(number), "state": state, "position": float(number),
        "submitted": NOW - 60, "started": NOW if state == "running" else None, "ended": None, "not_before": 0.0,
        "retries_left": 0, "attempts": 0, "attempt": None, "exit_code": None, "reason": "", "link": "",
        "cancel_requested": None, "origin": None,
    }  # fmt: skip
    return Job(**{**known, **fields})


def worker(host: str = "box", gpus: int = 2, states: Sequence[str] = (), **view: Any) -> Worker:
    cards = tuple(
        WorkerGpu(
            uuid=f"{host}-{index}",
            index=index,
            name="A100",
            memory_total=80 * GIB,
            state=states[index] if states else "free",  # type: ignore[arg-type]  # one of them
        )
        for index in range(gpus)
    )
    return Worker(id=host, host=host, view=View(gpus=cards, **view), started=0.0, seen=NOW, paused=False)


def runs(one: Job, *gpus: int, host: str = "box") -> Attempt:
    return Attempt(
        id=f"a{one.id}", job=one.id, worker=host, number=1, gpus=tuple(f"{host}-{gpu}" for gpu in gpus),
        started=one.started or NOW, lease_expires=NOW + 60,
    )  # fmt: skip


def minutes(
    line: Sequence[Job],
    *workers: Worker,
    running: Sequence[tuple[Job, Attempt]] = (),
    needs: Sequence[tuple[str, str, State]] = (),
    took: dict[str, list[float]] = TOOK,
    is_whole: bool = True,
    **around: Any,
) -> list[float | None]:
    """When each starts, in minutes from now; rounded up where it may be sooner."""
    found = forecast(line, *workers, running=running, needs=needs, took=took, is_whole=is_whole, **around)
    return [None if one.id not in found else (found[one.id].at - NOW) / 60 for one in line]


def forecast(
    line: Sequence[Job],
    *workers: Worker,
    running: Sequence[tuple[Job, Attempt]] = (),
    needs: Sequence[tuple[str, str, State]] = (),
    took: dict[str, list[float]] = TOOK,
    is_whole: bool = True,
    **around: Any,
) -> dict[str, Estimate]:
    attempts = {one.id: attempt for one, attempt in running}
    surroundings = QueueContext(now=NOW, workers=workers, running=attempts, **around)
    return estimates(line, [one for one, _ in running], surroundings, Needs(needs), took, is_whole=is_whole)


LINE = [job(number) for number in range(10, 16)]


def test_line_is_started_as_jobs_before_it_end() -> None:
    first, second = job(1, "running", started=NOW - 300), job(2, "running")
    running = [(first, runs(first, 0)), (second, runs(second, 1))]
    assert minutes(LINE, worker(), running=running) == [5, 10, 15, 20, 25, 30]
    assert minutes(LINE, worker(), worker("other"), running=running) == [0, 0, 5, 10, 10, 10]


def test_job_over_the_usual_time_lasts_as_long_as_the_longer_ones() -> None:
    took = {pattern_of(TRAIN.format(1), 1): [500.0, 600.0, 600.0, 700.0, 900.0]}
    late = job(1, "running", started=NOW - 660)
    assert minutes(LINE[:1], worker(gpus=1), running=[(late, runs(late, 0))], took=took) == [140 / 60]
    later = job(1, "running", started=NOW - 1000)
    assert minutes(LINE[:1], worker(gpus=1), running=[(later, runs(later, 0))], took=took) == [None]


def test_time_limit_bounds_what_nothing_is_known_of() -> None:
    limited = job(1, "running", command="other", time_limit=1200.0)
    found = forecast(LINE[:2], worker(gpus=1), running=[(limited, runs(limited, 0))])
    assert [found[one.id] for one in LINE[:2]] == [Estimate(NOW + 1200, True), Estimate(NOW + 1800, True)]
    short = [job(number, time_limit=60.0) for number in (1, 2)]
    assert forecast(short, worker(gpus=1))[short[1].id] == Estimate(NOW + 60, False)


def test_unknown_duration_is_never_a_number() -> None:
    unknown = job(1, "running", command="other")
    assert minutes(LINE, worker(gpus=1), running=[(unknown, runs(unknown, 0))]) == [None] * 6
    line = [job(1, command="other"), *LINE[:2]]
    assert minutes(line, worker(gpus=1)) == [0, None, None]
    # Beside it there is room, and it may end at any time.
    found = forecast(line, worker(gpus=2))
    assert [found[one.id] for one in line[1:]] == [Estimate(NOW, False), Estimate(NOW + 600, True)]


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ([], None),
        ([600.0], None),
        ([600.0, 660.0], 630.0),
        ([10.0, 600.0], None),
        ([1.0, 25.0], 13.0),
        ([600.0] * 9 + [6000.0], 600.0),
        ([60.0] * 5 + [600.0] * 5, None),
    ],
)
def test_similar_jobs_count_if_they_took_about_as_long(seconds: list[float], found: float | None) -> None:
    assert typical(seconds) == found


def test_commands_are_alike_if_only_values_of_options_differ() -> None:
    def alike(one: str, other: str) -> bool:
        return pattern_of(one, 1) == pattern_of(other, 1)

    assert alike("train.py --lr 1e-3 --seed=1 out=runs/a1", "train.py --lr 3e-4 --seed=22 out=runs/a17")
    assert alike("train.py --shift -1", "train.py --shift -2.5")
    assert not alike("train.py --model vit", "train.py --model resnet")
    assert not alike("train.py --epochs 10", "train.py --epochs 20")
    assert not alike("train.py max_steps=10", "train.py max_steps=20")
    assert not alike("sleep 10", "sleep 600")
    assert pattern_of("train.py", 1) != pattern_of("train.py", 2)
    assert pattern_of(("train.py", "--lr", "1"), 1) == pattern_of("train.py --lr 2", 1)


def test_gpus_are_reserved_for_a_large_job() -> None:
    one = job(1, "running", started=NOW - 300)
    line = [job(2, gpus=2), job(3), job(4)]
    assert minutes(line, worker(), running=[(one, runs(one, 0))]) == [5, 15, 15]
    # A short one does not delay it.
    line = [job(2, gpus=2), job(3, command="other", time_limit=120.0)]
    assert minutes(line, worker(), running=[(one, runs(one, 0))]) == [5, 0]


def test_caps_begin_times_and_dependencies_are_kept() -> None:
    capped = [job(number, group="sweep", at_most=1) for number in (1, 2)]
    assert minutes([*capped, job(3)], worker()) == [0, 10, 0]
    runner = job(9, "running", group="sweep", at_most=1)
    full = minutes(capped, worker(), running=[(runner, runs(runner, 0))], capped={"sweep": (1, 1)})
    assert full == [10, 20]
    assert minutes([job(1, not_before=NOW + 1800), job(2)], worker(gpus=1)) == [30, 0]
    chain = [job(1), job(2), job(3)]
    after: list[tuple[str, str, State]] = [(chain[1].id, chain[0].id, "queued"), (chain[2].id, chain[1].id, "queued")]
    assert minutes(chain, worker(gpus=4), needs=after) == [0, 10, 20]
    assert minutes(chain[1:], worker(gpus=4), needs=[(chain[1].id, "ffffffff", "held")]) == [None, 0]


def test_only_machines_that_have_what_is_asked_for_count() -> None:
    big = worker("big", labels=("ib",), cpus=8, ram=64 * GIB)
    for asked in (
        {"machine": "big"},
        {"labels": ("ib",)},
        {"exclude_machines": ("box",)},
    ):
        line = [job(number, **asked) for number in (1, 2, 3)]
        assert minutes(line, worker(), big) == [0, 0, 10], asked
    assert minutes([job(1, gpu_model="h100"), job(2, gpu_memory=100 * GIB), job(3, cpus=9)], big) == [None] * 3
    assert minutes([job(1, cpus=5), job(2, cpus=5)], big) == [0, 10]
    assert minutes([job(1, nodes=2), job(2, gpus=0)], big) == [None, None]


def test_jobs_share_a_gpu_as_long_as_its_memory_lasts() -> None:
    line = [job(number, share=True, memory=30 * GIB) for number in (1, 2, 3)]
    assert minutes(line, worker(gpus=1)) == [0, 0, 10]
    assert minutes([*line[:1], job(4)], worker(gpus=1)) == [0, 10]


def test_preemptible_jobs_come_last_and_give_way() -> None:
    line = [job(1, preemptible=True), job(2)]
    assert minutes(line, worker(gpus=1)) == [10, 0]
    assert minutes(line, worker(gpus=1), is_whole=False) == [None, 0]
    one = job(9, "running", preemptible=True, command="other")
    assert minutes([job(2)], worker(gpus=1), running=[(one, runs(one, 0))]) == [0]


def test_gpus_that_others_use_or_that_cannot_be_read_do_not_count() -> None:
    found = forecast(LINE[:3], worker(gpus=3, states=("somebody", "unknown", "background")))
    assert [found[one.id] for one in LINE[:3]] == [
        Estimate(NOW),
        Estimate(NOW + 600, True),
        Estimate(NOW + 1200, True),
    ]


def test_job_that_a_worker_lets_wait_does_not_start_at_once() -> None:
    says = {LINE[0].id: "waits for 1 GPU: GPU 0 is held"}
    assert minutes(LINE[:2], worker(gpus=1, waiting=says)) == [None, None]
    one = job(1, "running", started=NOW - 300)
    running = [(one, runs(one, 0))]
    assert minutes(LINE[:2], worker(waiting=says), running=running) == [5, 5]
    never = {LINE[0].id: "is not for this machine"}
    assert minutes(LINE[:2], worker(gpus=1, waiting=never)) == [None, 0]


@pytest.mark.parametrize(
    ("workers", "around"),
    [
        ((), {}),
        ((worker(),), {"paused": True}),
        ((worker(), worker("login", gpus=0, cluster="slurm", engine="slurm")), {}),
        ((worker(problem="the driver does not answer"),), {}),
    ],
)
def test_nothing_is_estimated_where_nothing_starts_or_a_cluster_decides(
    workers: tuple[Worker, ...], around: dict[str, Any]
) -> None:
    assert forecast(LINE, *workers, **around) == {}


# Properties

DURATIONS = st.sampled_from([60.0, 600.0, 3600.0, None])


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[Job], list[tuple[Job, Attempt]], dict[str, list[float]]]:
    """Jobs of one to three GPUs that take different times, some of them unknown."""
    took: dict[str, list[float]] = {}

    def some(number: int, state: State = "queued") -> Job:
        lasts, gpus = draw(DURATIONS), draw(st.integers(1, 3)) if state == "queued" else 1
        command = f"job {lasts}"
        if lasts is not None:
            took[pattern_of(command, gpus)] = [lasts, lasts]
        limit = draw(st.sampled_from([None, None, 900.0])) if lasts is None else None
        return job(
            number, state, command=command, gpus=gpus, time_limit=limit, started=NOW if state == "running" else None
        )

    running = [some(100 + gpu, "running") for gpu in range(draw(st.integers(0, 4)))]
    line = [some(number) for number in range(draw(st.integers(0, 12)))]
    return line, [(one, runs(one, gpu)) for gpu, one in enumerate(running)], took


@settings(max_examples=examples(60), deadline=None)
@given(queues())
def test_estimates_are_deterministic_and_never_overcommit_gpus(
    drawn: tuple[list[Job], list[tuple[Job, Attempt]], dict[str, list[float]]],
) -> None:
    line, running, took = drawn
    found = forecast(line, worker(gpus=4), running=running, took=took)
    assert found == forecast(line, worker(gpus=4), running=list(reversed(running)), took=took)

    def end(one: Job, at: float) -> float:
        known = took.get(pattern_of(one.command, one.gpus))
        return at + (known[0] if known else one.time_limit or math.inf)

    spans = [(NOW, max(NOW + 1, end(one, NOW)), 1) for one, _ in running]
    spans += [(found[one.id].at, end(one, found[one.id].at), one.gpus) for one in line if one.id in found]
    for start, _end, _gpus in spans:
        assert sum(gpus for begun, ended, gpus in spans if begun <= start < ended) <= 4
    # What starts later than now, while something of unknown length is there, may start sooner.
    if any(one.id not in found for one in line):
        assert any(math.isinf(ended) for _start, ended, _gpus in spans) or not spans


@settings(max_examples=examples(60), deadline=None)
@given(
    ages=st.lists(st.integers(0, 599), max_size=4),
    jobs=st.integers(1, 30),
    gpus=st.integers(1, 3),
    machine=st.integers(4, 8),
)
def test_equal_jobs_start_in_their_order_and_not_later_with_more_gpus(
    ages: list[int], jobs: int, gpus: int, machine: int
) -> None:
    running = [job(100 + gpu, "running", started=NOW - age) for gpu, age in enumerate(ages)]
    attempts = [(one, runs(one, gpu)) for gpu, one in enumerate(running)]
    line = [job(number, gpus=gpus) for number in range(jobs)]
    fewer, more = (
        [at for at in minutes(line, worker(gpus=number), running=attempts) if at is not None]
        for number in (machine, machine + 1)
    )
    assert len(fewer) == len(more) == jobs
    assert fewer == sorted(fewer)
    assert all(at <= before for at, before in zip(more, fewer, strict=True))
    # The last of them cannot start before the GPUs have done the work before it.
    assert fewer[-1] * machine >= gpus * 10 * (jobs - machine // gpus) - 10 * machine


@settings(max_examples=examples(40), deadline=None)
@given(queues(), st.integers(0, 11))
def test_nothing_is_estimated_on_gpus_of_a_job_without_an_end(
    drawn: tuple[list[Job], list[tuple[Job, Attempt]], dict[str, list[float]]], place: int
) -> None:
    line, running, took = drawn
    forever = job(50, command="forever", gpus=4)
    line.insert(min(place, len(line)), forever)
    found = forecast(line, worker(gpus=4), running=running, took=took)
    if forever.id in found:
        assert all(one.at < found[forever.id].at for name, one in found.items() if name != forever.id)
