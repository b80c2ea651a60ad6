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

    def monotonic(self) -> float:
        return self.now

    def ask(self) -> None:
        self._ends = self.now + (self.takes.pop(0) if self.takes else 0.01)

    def answer(self) -> Look | None:
        return a_look(0.0, at=self.now) if self.now >= self._ends else None

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


def sampler(world: World) -> Sampler:
    return Sampler(cast("Prober", world), 5.0)


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
