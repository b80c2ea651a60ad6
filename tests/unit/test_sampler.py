"""The interval of looks, with a clock and a prober controlled by the test."""

from typing import cast

import pytest

from stoker.gpus import prober as prober_module
from stoker.gpus.model import Look
from stoker.gpus.prober import Prober, Sampler
from tests.support.looks import a_look


class World:
    """A prober that takes as long as `takes` says for each look, or 0.01 s."""

    def __init__(self) -> None:
        self.now = 100.0
        self.takes: list[float] = []
        self._ends = 0.0
        self.asked_for: float | None = None
        self.asks: list[tuple[float, float]] = []

    def monotonic(self) -> float:
        return self.now

    def ask(self, max_age: float = 0.0, at: float = 0.0) -> None:
        if self.asked_for is not None and self.asked_for <= self.now:
            return
        self.asks.append((max_age, at))
        self.asked_for = max(at, self.now)
        self._ends = self.asked_for + (self.takes.pop(0) if self.takes else 0.01)

    def answer(self) -> Look | None:
        if self.now < self._ends:
            return None
        self.asked_for = None
        return a_look(0.0, at=self.now)

    def remaining(self) -> float:
        return self._ends - self.now

    def fileno(self) -> int:
        return -1

    def looks(self, sampler: Sampler, count: int) -> list[float]:
        """The times of the first `count` looks."""
        came: list[float] = []
        while len(came) < count:
            self.now = max(self.now, sampler.due())
            if sampler.step() is not None:
                came.append(round(self.now - 100.0, 2))
        return came


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(prober_module, "time", world)
    return world


def sampler(world: World, *, aligned: bool = False) -> Sampler:
    return Sampler(cast("Prober", world), 5.0, aligned=aligned)


def test_looks_have_a_steady_interval_regardless_of_their_duration(world: World) -> None:
    world.takes = [0.01, 2.0, 0.01, 2.5]
    assert world.looks(sampler(world), 5) == [0.01, 7.0, 10.01, 17.5, 20.01]


@pytest.mark.parametrize("stall", [3.0, 4.9, 5.1, 60.0])
def test_look_after_a_stall_is_not_followed_at_once(world: World, stall: float) -> None:
    world.takes = [0.01, stall]
    came = world.looks(sampler(world), 4)
    assert came == [0.01, 5 + stall, round(5 + stall + 5.01, 2), round(5 + stall + 10.01, 2)]


def test_look_after_a_suspend_is_not_followed_at_once(world: World) -> None:
    rhythm = sampler(world)
    world.looks(rhythm, 1)
    world.now += 12.0
    assert world.looks(rhythm, 2) == [12.02, 17.03]


def test_aligned_looks_are_at_multiples_of_the_interval_and_planned_ahead(world: World) -> None:
    world.now = 102.3
    steady = sampler(world, aligned=True)
    assert world.looks(steady, 4) == [2.31, 5.01, 10.01, 15.01]
    assert world.asks == [(0.5, 0.0), (0.5, 105.0), (0.5, 110.0), (0.5, 115.0), (0.5, 120.0)]


def test_aligned_look_is_not_right_after_another(world: World) -> None:
    world.now = 104.0
    assert world.looks(sampler(world, aligned=True), 3) == [4.01, 10.01, 15.01]


def test_look_for_a_decision_is_moved_forward_and_taken_anew(world: World) -> None:
    steady = sampler(world, aligned=True)
    world.looks(steady, 1)
    steady.no_later_than(102.0)
    assert world.asks[-1] == (0.0, 102.0)
    assert world.looks(steady, 2) == [2.01, 5.01]
    steady.no_later_than(100.0)
    assert world.looks(steady, 1) == [5.02]


def test_planned_look_is_asked_for_again_when_the_helper_has_ended(world: World) -> None:
    steady = sampler(world, aligned=True)
    world.looks(steady, 1)
    world.asked_for = None
    assert steady.due() == 105.0
    assert world.looks(steady, 1) == [5.01]


def test_driver_that_does_not_answer_is_not_asked_without_a_pause(world: World) -> None:
    steady = sampler(world, aligned=True)
    world.looks(steady, 1)
    world.now = 105.0
    steady.step()
    world.asked_for = 105.0  # still outstanding after its deadline
    steady._over()
    assert steady.due() == 110.0


def test_postponed_look_is_planned_anew(world: World) -> None:
    steady = sampler(world, aligned=True)
    world.looks(steady, 1)
    steady.postpone(60.0)
    assert world.looks(steady, 1) == [60.02]
