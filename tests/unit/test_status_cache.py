"""Slow queries are repeated rarely; fast ones are always fresh."""

from collections.abc import Callable

from stoker.status.snapshot import ThrottledCache


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def question(clock: Clock, price: float) -> Callable[[], int]:
    answers = iter(range(100))

    def ask() -> int:
        clock.now += price
        return next(answers)

    return ask


def test_fast_query_is_not_cached() -> None:
    clock = Clock()
    kept = ThrottledCache[int](clock=clock)
    ask = question(clock, 0.0)
    assert [kept.get(ask) for _ in range(3)] == [0, 1, 2]


def test_slow_query_takes_a_small_share_of_the_time() -> None:
    clock = Clock()
    kept = ThrottledCache[int](clock=clock)
    ask = question(clock, 0.1)
    assert kept.get(ask) == 0
    clock.now += 4.9
    assert not kept.is_due()
    assert kept.get(ask) == 0
    clock.now += 0.2
    assert kept.get(ask) == 1


def test_answer_is_kept_for_its_minimum_time() -> None:
    clock = Clock()
    kept = ThrottledCache[int](20.0, clock)
    ask = question(clock, 0.0)
    kept.get(ask)
    clock.now += 19.9
    assert kept.get(ask) == 0
    clock.now += 0.2
    assert kept.get(ask) == 1


def test_no_answer_is_kept_for_long() -> None:
    clock = Clock()
    kept = ThrottledCache[int](clock=clock)
    ask = question(clock, 50.0)
    assert kept.get(ask) == 0
    clock.now += 29.9
    assert kept.get(ask) == 0
    clock.now += 0.2
    assert kept.get(ask) == 1
