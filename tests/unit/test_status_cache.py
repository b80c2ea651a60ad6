"""Answers that cost much are asked for seldom; cheap ones are always fresh."""

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


def test_a_cheap_answer_is_always_fresh() -> None:
    clock = Clock()
    kept = ThrottledCache[int](clock=clock)
    ask = question(clock, 0.0)
    assert [kept.get(ask) for _ in range(3)] == [0, 1, 2]


def test_a_dear_answer_takes_no_more_than_a_small_share_of_the_time() -> None:
    clock = Clock()
    kept = ThrottledCache[int](clock=clock)
    ask = question(clock, 0.1)
    assert kept.get(ask) == 0
    clock.now += 4.9
    assert not kept.is_due()
    assert kept.get(ask) == 0
    clock.now += 0.2
    assert kept.get(ask) == 1


def test_what_changes_slowly_is_not_asked_for_before_its_time() -> None:
    clock = Clock()
    kept = ThrottledCache[int](20.0, clock)
    ask = question(clock, 0.0)
    kept.get(ask)
    clock.now += 19.9
    assert kept.get(ask) == 0
    clock.now += 0.2
    assert kept.get(ask) == 1


def test_an_answer_that_was_held_up_once_is_soon_asked_for_again() -> None:
    clock = Clock()
    kept = ThrottledCache[int](clock=clock)
    prices, answers = iter([5.0, 0.0, 5.0, 5.0, 0.0]), iter(range(5))

    def ask() -> int:
        clock.now += next(prices)
        return next(answers)

    kept.get(ask)
    clock.now += 5.1
    assert [kept.get(ask), kept.get(ask)] == [1, 2]  # the second was cheap
    clock.now += 5.1
    assert kept.get(ask) == 3
    clock.now += 240.0  # dear twice: now it is believed
    assert kept.get(ask) == 3
