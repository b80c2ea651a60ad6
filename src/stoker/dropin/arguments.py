"""Numbers on a drop-in's command line: argparse types whose refusal is a sentence."""

from argparse import ArgumentTypeError
from collections.abc import Callable


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` on."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise ArgumentTypeError(f"must be greater than {least - 1}, not {number}")
        if most is not None and number > most:
            raise ArgumentTypeError(f"must be {most} at the most, not {number}")
        return number

    return convert


def fraction(*, zero: bool, one: bool) -> Callable[[str], float]:
    """A number between 0 and 1, which themselves belong to it or not."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a number") from None
        if 1 < number <= 100:
            raise ArgumentTypeError(f"{text} is not a fraction of 1: write {number / 100:g} for {number:g}%")
        if not 0 <= number <= 1:
            raise ArgumentTypeError(f"must be between 0 and 1, not {text}")
        if number == 0 and not zero:
            raise ArgumentTypeError("must be greater than 0: no GPU can be below that")
        if number == 1 and not one:
            raise ArgumentTypeError("must be less than 1: no GPU can be above that")
        return number

    return convert
