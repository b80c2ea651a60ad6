"""The stalled rule: what it calls a hang, what it leaves alone, and that nothing but evidence advances it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.gpus.model import DeviceHealth, JobProgress, Maybe, Pipes, Reading, Unknown, Utilization
from stoker.rules.rule import Activity, Observation, Verdict
from stoker.rules.stalled import StalledPolicy, StalledRule
from tests.support.deep import examples
from tests.support.looks import a_process

MINUTE, HOUR = 60.0, 3600.0
EVERY = 15.0
NOT_READ = Unknown("not supported by this GPU")


def a_board(
    use: float, power: Maybe[float], memory: Maybe[float] = NOT_READ, pipes: Maybe[Pipes] = NOT_READ, **more: Any
) -> Reading:
    shape = Utilization(memory, memory, 90) if not isinstance(memory, Unknown) else memory
    return msgspec.structs.replace(
        Reading.unknown("", "not read"),
        utilization=Utilization(use, use, 90),
        power=power,
        power_limit=700.0,
        memory_activity=shape,
        pipes=pipes,
        **more,
    )


WORK = a_board(0.98, 500.0, 0.4)
SPIN = a_board(1.0, 110.0, 0.0)
IDLE = a_board(0.0, 70.0, 0.0)
LOST = Reading.unknown("", "the GPU is lost")


class Job:
    """Boards of a job and its steps, look by look."""

    def __init__(self, boards: int = 2, **settings: Any) -> None:
        self.rule = StalledRule(StalledPolicy(every=EVERY, **settings), 0.0)
        self.boards = boards
        self.at = 0.0
        self.steps = 0
        self.step_at = 0.0
        self.dead: frozenset[int] = frozenset()

    def look(self, readings: Sequence[Reading], *, steps: bool = False, **progress: Any) -> Verdict:
        self.at += EVERY
        if steps:
            self.steps, self.step_at = self.steps + 1, self.at
        activities = []
        for number, reading in enumerate(readings):
            uuid = f"GPU-{number}"
            own = () if number in self.dead else (a_process(100 + number),)
            whole = msgspec.structs.replace(reading, uuid=uuid, processes=own)
            used = reading.utilization
            peak = used if isinstance(used, Unknown) else used.peak
            activities.append(Activity(uuid, f"GPU {number}", EVERY, peak, whole, own))
        seen = JobProgress(self.steps, self.step_at, **{"trust": "log", **progress})
        return self.rule.observe(Observation(self.at, activities, progress=seen))

    def work(self, seconds: float = HOUR, reading: Reading = WORK, step_every: float = EVERY) -> None:
        for number in range(int(seconds / EVERY)):
            verdict = self.look([reading] * self.boards, steps=number % int(step_every / EVERY) == 0)
            assert verdict.effect == "none"

    def until_stopped(self, *readings: Reading, most: float = 6 * HOUR, **progress: Any) -> float | None:
        """Seconds until the rule acts while the boards do this and no step is made."""
        begun = self.at
        while self.at - begun < most:
            if self.look(readings, **progress).effect == "act":
                return self.at - begun
        return None


@pytest.mark.parametrize(
    ("working", "hung", "hours"),
    [
        pytest.param(WORK, SPIN, 1, id="memory falls silent"),
        pytest.param(WORK, a_board(0.7, 110.0, 0.01), 1, id="memory falls silent, utilization is sampled"),
        pytest.param(WORK, a_board(1.0, 110.0, 0.06), 3, id="memory far below its usual"),
        pytest.param(WORK, a_board(1.0, 110.0, 0.15), 4, id="memory and power below half of their usual"),
        pytest.param(
            a_board(0.98, 984.0 / 2, pipes=Pipes(0.9, 0.8, 0.32, 0.24)),
            a_board(1.0, 250.0, pipes=Pipes(1.0, 0.15, 0.0, 0.01)),
            1,
            id="GB200, marin#7344",
        ),
        pytest.param(a_board(0.97, 300.0), a_board(1.0, 90.0), 3, id="only power is known"),
    ],
)
def test_hung_collective_is_stalled_after_the_window(working: Reading, hung: Reading, hours: int) -> None:
    job = Job()
    job.work(reading=working)
    assert job.until_stopped(hung, hung) == pytest.approx(hours * HOUR, abs=2 * EVERY)


def test_power_alone_is_enough_near_the_floor_of_a_board_that_was_seen_idle() -> None:
    job = Job()
    job.look([a_board(0.0, 70.0)] * 2)
    job.work(reading=a_board(0.97, 500.0))
    hung = a_board(1.0, 110.0)
    assert job.until_stopped(hung, hung) == pytest.approx(HOUR, abs=2 * EVERY)


def test_some_ranks_spin_and_others_are_idle() -> None:
    job = Job()
    job.work()
    assert job.until_stopped(SPIN, IDLE) == pytest.approx(2 * HOUR, abs=2 * EVERY)


def test_lost_rank_shortens_the_window() -> None:
    job = Job(boards=3)
    job.work()
    job.dead = frozenset({2})
    assert job.until_stopped(SPIN, SPIN, IDLE) == pytest.approx(10 * MINUTE, abs=2 * EVERY)


def test_single_rank_with_light_work_is_not_a_hang() -> None:
    """The others have ended; this one evaluates with a quarter of the usual memory traffic."""
    job = Job(boards=3)
    job.work()
    job.dead = frozenset({1, 2})
    assert job.until_stopped(a_board(1.0, 150.0, 0.08), IDLE, IDLE, most=3 * HOUR - MINUTE) is None


def test_gpu_with_a_fatal_error_does_not_hide_the_hang_of_the_others() -> None:
    job = Job()
    job.work()
    broken = msgspec.structs.replace(LOST, health=DeviceHealth(xids=(79,)))
    assert job.until_stopped(SPIN, broken) == pytest.approx(10 * MINUTE, abs=2 * EVERY)


@pytest.mark.parametrize(("last_steps", "minutes"), [(1, 10), (2, 10), (9, 60)])
def test_rank_that_is_gone_before_the_last_step_is_seen_is_missed(last_steps: int, minutes: int) -> None:
    """A job that goes on without a process does not wait for it."""
    job = Job()
    job.work()
    job.dead = frozenset({1})
    for _ in range(last_steps):
        job.look([WORK, IDLE], steps=True)
    assert job.until_stopped(SPIN, IDLE) == pytest.approx(minutes * MINUTE, abs=2 * EVERY)


def test_verdict_has_its_evidence() -> None:
    job = Job()
    job.work()
    job.dead = frozenset({1})
    job.until_stopped(SPIN, IDLE)
    verdict = job.look([SPIN, IDLE])
    assert verdict.kind == "stalled"
    assert verdict.gpus == ("GPU-0",)
    assert verdict.reason.startswith("GPU 0 has been fully used without doing work for 10m")
    assert "the job made no step for 10m" in verdict.reason
    board, steps, rank = verdict.evidence
    assert board == ("GPU 0: 100% used, 110 W of 700 W (500 W while it worked), memory 0% (40% while it worked)")
    assert steps.startswith("no step for 10m")
    assert "seen by step counts in its log" in steps
    assert rank == "GPU 1: the job's process on it is gone"


# Left alone


@pytest.mark.parametrize(
    ("working", "light"),
    [
        pytest.param(WORK, a_board(1.0, 140.0, 0.3), id="light phase with memory traffic"),
        pytest.param(WORK, a_board(1.0, 450.0, 0.0), id="much power, no memory traffic"),
        pytest.param(WORK, a_board(0.7, 110.0, 0.04), id="not fully used"),
        pytest.param(a_board(1.0, 300.0, 0.0), a_board(1.0, 280.0, 0.0), id="counter that is always zero"),
        pytest.param(a_board(1.0, 137.0), a_board(1.0, 120.0), id="light work all along, only power known"),
        pytest.param(WORK, IDLE, id="idle is another rule's matter"),
    ],
)
def test_boards_that_may_work_are_left_alone(working: Reading, light: Reading) -> None:
    job = Job()
    job.work(reading=working)
    assert job.until_stopped(light, light) is None


def test_one_working_board_is_enough() -> None:
    job = Job()
    job.work()
    assert job.until_stopped(SPIN, WORK) is None


def test_job_that_makes_steps_is_never_stalled() -> None:
    job = Job()
    job.work()
    for number in range(2000):
        assert job.look([SPIN, SPIN], steps=number % 20 == 0).effect == "none"


def test_slow_steps_are_waited_for() -> None:
    job = Job()
    job.work(4 * HOUR, step_every=40 * MINUTE)
    assert job.until_stopped(SPIN, SPIN) == pytest.approx(3 * 40 * MINUTE - 40 * MINUTE + EVERY, abs=3 * EVERY)


def test_job_that_never_made_a_step_is_only_warned_of() -> None:
    job = Job()
    effects = [job.look([SPIN, SPIN]).effect for _ in range(2000)]
    assert set(effects) == {"none", "warn"}


def test_hang_of_unseen_progress_is_warned_of_and_stopped_where_asked_for() -> None:
    def warned_and_stopped(unseen_for: float | None = None) -> tuple[bool, float | None]:
        job = Job(unseen_for=unseen_for)
        for _ in range(240):
            job.look([WORK, WORK])
        begun, effects = job.at, []
        for _ in range(1500):
            effects.append(job.look([SPIN, SPIN]).effect)
            if effects[-1] == "act":
                return "warn" in effects, job.at - begun
        return "warn" in effects, None

    assert warned_and_stopped() == (True, None)
    _, stopped = warned_and_stopped(unseen_for=2 * HOUR)
    assert stopped == pytest.approx(2 * HOUR, abs=2 * EVERY)


def test_cpu_work_beside_spinning_ranks_extends_the_window() -> None:
    job = Job()
    job.work()
    assert job.until_stopped(SPIN, SPIN, cpu=12.0) == pytest.approx(3 * HOUR, abs=2 * EVERY)
    other = Job()
    other.work()
    assert other.until_stopped(SPIN, SPIN, cpu=2.0) == pytest.approx(HOUR, abs=2 * EVERY)


def test_board_used_by_others_says_nothing() -> None:
    job = Job(boards=1)
    job.work()
    shared = msgspec.structs.replace(SPIN, uuid="GPU-0", processes=(a_process(100), a_process(7, utilization=0.6)))
    for _ in range(1000):
        job.at += EVERY
        activity = Activity("GPU-0", "GPU 0", EVERY, 1.0, shared, (a_process(100),))
        progress = JobProgress(job.steps, job.step_at, "log")
        assert job.rule.observe(Observation(job.at, [activity], progress=progress)).effect == "none"


def test_rhythm_of_a_new_source_of_steps_must_be_seen_before_its_silence_counts() -> None:
    """A line a minute, then only the end of each epoch is seen: an hour without one is not a hang yet."""
    job = Job()
    job.work()
    job.steps = 1
    assert job.until_stopped(SPIN, SPIN, trust="events") is None


# Interruptions


def test_health_check_every_half_hour_pauses_the_window() -> None:
    job = Job()
    job.work()
    begun, verdict = job.at, job.look([SPIN, SPIN])
    while verdict.effect != "act" and job.at - begun < 6 * HOUR:
        checked = (job.at - begun) % (30 * MINUTE) < 2 * MINUTE
        verdict = job.look([WORK, WORK] if checked else [SPIN, SPIN])
    assert HOUR <= job.at - begun <= HOUR + 10 * MINUTE


@pytest.mark.parametrize(("unknown", "stops"), [(45.0, True), (90.0, False)])
def test_unknown_readings_pause_the_window_for_a_minute_at_most(unknown: float, stops: bool) -> None:
    job = Job()
    job.work()
    begun, verdict = job.at, job.look([SPIN, SPIN])
    while verdict.effect != "act" and job.at - begun < 6 * HOUR:
        hidden = (job.at - begun) % (10 * MINUTE) < unknown
        verdict = job.look([LOST, SPIN] if hidden else [SPIN, SPIN])
    assert (verdict.effect == "act") == stops


# Properties


READINGS = st.sampled_from([WORK, SPIN, IDLE, LOST, a_board(0.5, 300.0, 0.2), a_board(1.0, NOT_READ, NOT_READ)])


@given(st.lists(st.tuples(READINGS, READINGS, st.booleans(), st.integers(1, 60)), max_size=30))
@settings(max_examples=examples(200))
def test_rule_acts_only_after_steps_and_a_silence_of_ten_minutes_with_a_hollow_board(
    phases: list[tuple[Reading, Reading, bool, int]],
) -> None:
    job = Job()
    hollow = 0.0
    for one, other, steps, looks in phases:
        for _ in range(looks):
            verdict = job.look([one, other], steps=steps)
            hollow = 0.0 if steps else hollow + EVERY * (SPIN in (one, other))
            if verdict.effect == "act":
                assert job.steps >= 3
                assert job.at - job.step_at >= 10 * MINUTE
                assert hollow >= HOUR - 2 * EVERY
                assert LOST not in (one, other)
                assert WORK not in (one, other)


@given(st.integers(1, 600), st.integers(1, 600))
def test_longer_silence_never_takes_a_verdict_back(quiet: int, more: int) -> None:
    job = Job()
    job.work()
    progress = [job.look([SPIN, SPIN]).progress for _ in range(quiet)]
    progress += [job.look([SPIN, SPIN]).progress for _ in range(more)]
    assert progress == sorted(progress)


@given(st.integers(1, 200))
def test_unknown_readings_never_advance_the_window(unknown: int) -> None:
    job = Job()
    job.work()
    before = [job.look([SPIN, SPIN]).progress for _ in range(60)]
    for _ in range(unknown):
        assert job.look([LOST, LOST]).progress == 0.0
    after = job.look([SPIN, SPIN])
    assert after.progress <= before[-1] + 2 * EVERY / HOUR
    assert after.effect == "none"


# Evidence that changes


@pytest.mark.parametrize(
    ("usually", "now_and_then"),
    [
        pytest.param({"cpu": 12.0}, {"cpu": 2.0}, id="work on the CPU pauses"),
        pytest.param({"boards": (a_board(1.0, 110.0, 0.05), SPIN)}, {}, id="one sample of memory traffic is low"),
        pytest.param({"boards": (SPIN, IDLE)}, {}, id="the absent rank looks in"),
    ],
)
def test_one_look_does_not_shorten_the_window(usually: dict[str, Any], now_and_then: dict[str, Any]) -> None:
    """One of ten looks asks for a single window: the others say that the job may work."""
    job = Job()
    job.work()
    effects = set()
    for number in range(int(1.9 * HOUR / EVERY)):
        shown = dict(now_and_then if number % 10 == 9 else usually)
        effects.add(job.look(shown.pop("boards", (SPIN, SPIN)), **shown).effect)
    assert effects == {"none"}


def test_single_look_that_asks_for_more_does_not_lengthen_the_window() -> None:
    job = Job()
    job.work()
    begun = job.at
    job.until_stopped(SPIN, SPIN, most=30 * MINUTE)
    job.look([SPIN, SPIN], cpu=12.0)
    job.until_stopped(SPIN, SPIN)
    assert job.at - begun == pytest.approx(HOUR, abs=2 * EVERY)


@pytest.mark.parametrize("other", [WORK, LOST])
def test_pauses_that_are_a_large_part_of_the_time_restart_the_window(other: Reading) -> None:
    """Each of them alone is short: an evaluation that works on GPUs and CPUs by turns."""
    job = Job()
    job.work()
    for number in range(int(6 * HOUR / EVERY)):
        shown = other if number % 6 < 3 else SPIN
        assert job.look([shown, SPIN]).effect == "none"


def test_fault_that_passes_neither_shortens_the_window_nor_hides_work() -> None:
    fault = {"health": DeviceHealth(xids=(119,))}
    faulty_work, faulty_spin = (msgspec.structs.replace(one, **fault) for one in (WORK, SPIN))
    evaluating = Job()
    evaluating.work()
    assert evaluating.until_stopped(SPIN, faulty_work) is None
    job = Job()
    job.work()
    for _ in range(5):
        job.look([WORK, faulty_work], steps=True)
    assert job.until_stopped(SPIN, faulty_spin) == pytest.approx(HOUR, abs=2 * EVERY)


@pytest.mark.parametrize("limit", [NOT_READ, 0.0])
@pytest.mark.parametrize(("power", "stops"), [(450.0, False), (110.0, True)])
def test_board_without_a_limit_is_compared_with_the_most_power_that_it_drew(
    limit: Maybe[float], power: float, stops: bool
) -> None:
    job = Job()
    job.work(reading=msgspec.structs.replace(WORK, power_limit=limit))
    without = msgspec.structs.replace(a_board(1.0, power, 0.0), power_limit=limit)
    assert (job.until_stopped(without, without) is not None) == stops


def test_snooze_that_is_taken_back_ends_at_once() -> None:
    job = Job()
    job.work()
    job.rule.snooze(job.at + 10 * HOUR)
    job.look([SPIN, SPIN])
    job.rule.snooze(job.at)
    assert job.until_stopped(SPIN, SPIN) == pytest.approx(HOUR, abs=2 * EVERY)


def test_rule_that_has_acted_without_steps_acts_again_once_the_boards_have_worked() -> None:
    job = Job(unseen_for=HOUR)
    job.look([WORK, WORK])
    assert job.until_stopped(SPIN, SPIN) is not None
    job.rule.rearm(job.at)
    assert job.until_stopped(SPIN, SPIN) is None
    job.look([WORK, WORK])
    assert job.until_stopped(SPIN, SPIN) is not None


def test_look_is_due_only_when_something_is_decided_then() -> None:
    """A due time that has passed would be a look at once, and again."""

    def due_later(job: Job) -> bool:
        due = job.rule.due()
        return due is None or due > job.at

    unseen = Job()
    for _ in range(600):
        unseen.look([SPIN, SPIN])
        assert due_later(unseen)
    paused = Job()
    paused.work()
    paused.look([SPIN, SPIN])
    assert paused.rule.due() == pytest.approx(paused.at + HOUR, abs=2 * EVERY)
    for _ in range(10):
        paused.look([WORK, SPIN])
        assert due_later(paused)


def test_board_without_a_limit_that_never_made_a_step_is_warned_of() -> None:
    job = Job()
    spin = msgspec.structs.replace(SPIN, power_limit=NOT_READ)
    assert "warn" in {job.look([spin, spin]).effect for _ in range(300)}
