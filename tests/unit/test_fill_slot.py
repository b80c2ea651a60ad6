"""When a background program starts and stops, by a clock that the test moves."""

import itertools
import math

import pytest

from stoker.fill.config import LONGEST_BACKOFF, Background
from stoker.fill.slot import BLIND_FOR, HEALTHY_AFTER, LEAST_BETWEEN_STARTS, Slot, SlotView, StartProgram, StopProgram

IDLE = SlotView(True, "")
ALICE = SlotView(False, "used by alice's python (pid 42)")
BLIND = SlotView(None, "the driver did not answer in 5 s")


class Watch:
    """A slot on GPUs a and b, with a clock."""

    def __init__(self, *, gpus: tuple[str, ...] = ("a",), **manners: float) -> None:
        self.now = 1000.0
        self.slot = Slot(Background(name="fold", command=("fold",), **manners), gpus, self.now)  # type: ignore[arg-type]  # by name

    def after(self, seconds: float, veto: str | None = None, **seen: SlotView) -> StartProgram | StopProgram | None:
        """The decision at that time; GPUs that are not named are idle."""
        self.now += seconds
        return self.slot.decide(self.now, {"a": IDLE, "b": IDLE, **seen}, veto)

    def running(self) -> "Watch":
        """Starts the program as soon as the slot allows it."""
        if self.after(0) is None:
            assert isinstance(self.after(self.slot.due(self.now) - self.now), StartProgram)
        self.slot.started(self.now)
        return self

    def stopped(self, reason: str = "somebody came") -> "Watch":
        self.slot.stopping(self.now, reason)
        self.slot.gone(self.now)
        return self

    def died(self, after: float, how: str = "ended with code 3") -> "Watch":
        self.now += after
        self.slot.died(self.now, how)
        return self

    def pause(self) -> float:
        """The time until the start, if no other user appears."""
        before = self.now
        assert self.after(0) is None
        due = self.slot.due(self.now)
        assert self.after(due - self.now - 0.001) is None
        assert isinstance(self.after(0.001), StartProgram)
        return round(self.now - before, 3)


class TestStart:
    def test_program_starts_once_the_gpu_was_idle_for_long_enough(self) -> None:
        watch = Watch(idle_for=60)
        assert watch.after(0) is None
        assert watch.slot.why == "idle, and given to fold in 1m"
        assert watch.after(59) is None
        assert watch.slot.why == "idle, and given to fold in 1s"
        assert isinstance(watch.after(1), StartProgram)

    def test_wait_restarts_when_another_user_appears(self) -> None:
        watch = Watch(idle_for=60)
        assert watch.after(59, a=ALICE) is None
        assert watch.slot.why == ALICE.reason
        assert watch.after(59) is None
        assert isinstance(watch.after(1), StartProgram)

    def test_program_on_two_gpus_waits_for_both(self) -> None:
        watch = Watch(gpus=("a", "b"), idle_for=0)
        assert watch.after(5, b=ALICE) is None
        assert isinstance(watch.after(0), StartProgram)

    def test_another_user_on_another_gpu_does_not_matter(self) -> None:
        assert isinstance(Watch(idle_for=0).after(0, b=ALICE), StartProgram)

    def test_veto_prevents_a_start(self) -> None:
        watch = Watch(idle_for=10)
        assert watch.after(60, veto="alice was active at pts/3 just now") is None
        assert watch.slot.why == "alice was active at pts/3 just now"
        assert watch.after(9) is None
        assert isinstance(watch.after(1), StartProgram)

    def test_unknown_is_not_idle(self) -> None:
        watch = Watch(idle_for=10)
        for _ in range(10):
            assert watch.after(60, a=BLIND) is None
        assert watch.slot.why == BLIND.reason
        assert watch.after(9) is None
        assert isinstance(watch.after(1), StartProgram)

    def test_missing_gpu_is_not_idle(self) -> None:
        watch = Watch(idle_for=0)
        assert watch.slot.decide(watch.now, {"b": IDLE}, None) is None
        assert watch.slot.why == "the GPU is no longer listed"

    @pytest.mark.parametrize("idle_for", [0.0, 60.0])
    @pytest.mark.parametrize(("seen", "veto"), [(ALICE, None), (BLIND, None), (IDLE, "outside the scheduled hours")])
    def test_no_wake_up_is_scheduled_while_a_start_is_blocked(
        self, idle_for: float, seen: SlotView, veto: str | None
    ) -> None:
        watch = Watch(idle_for=idle_for)
        watch.after(1, veto, a=seen)
        assert watch.slot.due(watch.now) == math.inf


class TestStop:
    def test_program_stops_at_once_for_another_user(self) -> None:
        assert Watch(idle_for=0).running().after(0, a=ALICE) == StopProgram(ALICE.reason)

    def test_program_stops_at_once_for_a_veto(self) -> None:
        assert Watch(idle_for=0).running().after(0, veto="outside the scheduled hours") == StopProgram(
            "outside the scheduled hours"
        )

    def test_program_on_two_gpus_stops_for_a_user_of_either(self) -> None:
        assert Watch(gpus=("a", "b"), idle_for=0).running().after(1, b=ALICE) == StopProgram(ALICE.reason)

    def test_stop_is_requested_once(self) -> None:
        watch = Watch(idle_for=0).running()
        watch.slot.stopping(watch.now, ALICE.reason)
        assert watch.after(1, a=ALICE) is None
        assert watch.slot.preemptions == 1

    def test_short_driver_outage_does_not_stop_the_program(self) -> None:
        watch = Watch(idle_for=0).running()
        assert watch.after(0, a=BLIND) is None
        assert watch.slot.due(watch.now) == watch.now + BLIND_FOR
        assert watch.after(BLIND_FOR - 0.1, a=BLIND) is None
        assert watch.after(0.1) is None
        assert watch.after(BLIND_FOR - 0.1, a=BLIND) is None

    def test_long_driver_outage_stops_the_program(self) -> None:
        watch = Watch(idle_for=0).running()
        assert watch.after(0, a=BLIND) is None
        assert watch.after(BLIND_FOR, a=BLIND) == StopProgram(
            f"it is unknown whether another user needs it: {BLIND.reason}"
        )

    def test_visible_user_counts_during_a_driver_outage(self) -> None:
        assert Watch(gpus=("a", "b"), idle_for=0).running().after(0, a=BLIND, b=ALICE) == StopProgram(ALICE.reason)


class TestRestart:
    def test_program_waits_for_the_configured_time_after_another_user(self) -> None:
        watch = Watch(idle_for=10, settle=300).running()
        watch.after(100, a=ALICE)
        assert watch.stopped().pause() == 300

    def test_user_before_the_first_start_does_not_delay_it(self) -> None:
        watch = Watch(idle_for=10, settle=300)
        watch.after(100, a=ALICE)
        assert watch.pause() == 10

    def test_earlier_user_is_forgotten_after_a_restart(self) -> None:
        watch = Watch(idle_for=10, settle=300).running()
        watch.after(100, a=ALICE)
        watch.stopped().running()
        watch.after(100, veto="outside the scheduled hours")
        assert watch.stopped().pause() == 10

    def test_user_of_five_seconds_causes_no_thrashing(self) -> None:
        watch = Watch(idle_for=0)
        starts = []
        for _ in range(600):
            decision = watch.after(1, a=ALICE if round(watch.now) % 10 < 5 else IDLE)
            if isinstance(decision, StartProgram):
                starts.append(watch.now)
                watch.slot.started(watch.now)
            elif isinstance(decision, StopProgram):
                watch.stopped()
        assert len(starts) > 5
        assert min(later - earlier for earlier, later in itertools.pairwise(starts)) >= LEAST_BETWEEN_STARTS

    def test_reason_for_waiting_after_a_start_is_given(self) -> None:
        watch = Watch(idle_for=0).running()
        watch.after(1, a=ALICE)
        watch.stopped()
        watch.after(1)
        assert watch.slot.why == "it was started a moment ago: tried again in 58s"


class TestBackoff:
    def test_backoff_doubles_with_each_immediate_exit(self) -> None:
        watch = Watch(idle_for=0, backoff=100)
        pauses = []
        for _ in range(7):
            watch.running().died(1)
            pauses.append(watch.pause())
        assert pauses == [100, 200, 400, 800, 1600, 3200, LONGEST_BACKOFF]

    def test_backoff_is_at_least_the_minimum_between_starts(self) -> None:
        assert Watch(idle_for=0, backoff=1).running().died(20).pause() == LEAST_BETWEEN_STARTS - 20

    def test_backoff_is_reported_with_its_count_and_end(self) -> None:
        watch = Watch(idle_for=0, backoff=100).running().died(1)
        assert watch.slot.setback(watch.now) == "after 1s it ended with code 3: tried again in 1m40s"
        watch.running().died(2)
        watch.after(0)
        assert watch.slot.why == "after 2s it ended with code 3, 2 times in a row: tried again in 3m20s"

    def test_program_that_ran_long_restarts_at_once(self) -> None:
        watch = Watch(idle_for=0, backoff=100).running().died(HEALTHY_AFTER)
        assert watch.slot.setback(watch.now) is None
        assert isinstance(watch.after(0), StartProgram)

    @pytest.mark.parametrize("well", ["ran", "stopped"])
    def test_long_run_resets_the_backoff(self, well: str) -> None:
        watch = Watch(idle_for=0, backoff=100).running().died(1).running()
        if well == "ran":
            watch.died(HEALTHY_AFTER)
        else:
            watch.stopped()
        assert watch.running().died(1).pause() == 100

    def test_program_that_cannot_be_started_is_backed_off(self) -> None:
        watch = Watch(idle_for=0, backoff=100)
        assert isinstance(watch.after(0), StartProgram)
        watch.slot.could_not_start(watch.now, "the log /x cannot be written: no space left on device")
        watch.after(0)
        assert "could not be started: the log /x cannot be written" in watch.slot.why
        assert watch.pause() == 100

    def test_another_user_takes_precedence_over_a_restart(self) -> None:
        watch = Watch(idle_for=0, backoff=100).running().died(1)
        assert watch.after(200, a=ALICE) is None
        assert watch.slot.why == ALICE.reason


class TestUsage:
    def test_gpu_seconds_count_all_gpus_of_the_program(self) -> None:
        watch = Watch(gpus=("a", "b"), idle_for=0)
        watch.now += 50
        watch.running()
        assert watch.slot.given(watch.now + 10) == 20
        watch.now += 30
        watch.stopped()
        watch.now += 1000
        assert watch.slot.given(watch.now) == 60

    def test_only_a_stop_for_another_user_is_a_preemption(self) -> None:
        watch = Watch(idle_for=0).running().died(100).running()
        watch.slot.stopping(watch.now, "the filler ends", preempted=False)
        watch.slot.gone(watch.now)
        assert watch.slot.preemptions == 0
        assert watch.running().stopped().slot.preemptions == 1
