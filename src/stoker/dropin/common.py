"""Shared by the drop-ins: looks at a steady rate, and numbers on the command line."""

import contextlib
import select
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator

from stoker.gpus.model import Look, Unknown
from stoker.gpus.prober import Prober, Sampler
from stoker.gpus.sharing import Sharing
from stoker.gpus.source import AbsentError
from stoker.gpus.spawn import Start, forked
from stoker.settings import load_settings
from stoker.units import parse_duration


def open_prober(start: Start = forked, sharing: Sharing = "start") -> Prober:
    """The prober chosen by environment and settings. The drop-ins have one thread, so the helper may be forked."""
    settings = load_settings()
    return Prober(settings.gpus, deadline=parse_duration(settings.deadline), start=start, sharing=sharing)


def steady_looks(every: float) -> Iterator[Look]:
    """Looks for ever, for a program without other events."""
    with contextlib.closing(open_prober()) as prober:
        sampler = Sampler(prober, every)
        while True:
            poll = select.poll()
            if sampler.fileno() >= 0:
                poll.register(sampler.fileno(), select.POLLIN)
            poll.poll(max(sampler.due() - time.monotonic(), 0) * 1000)
            try:
                look = sampler.step()
            except AbsentError as absent:
                look = look_without_gpus(absent)
            if look is not None:
                yield look


def look_without_gpus(absent: AbsentError) -> Look:
    """A machine without GPUs counts as unreadable: the driver may be loaded later."""
    return Look("none", time.monotonic(), time.time(), (), (), problem=Unknown(str(absent)))


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An integer of at least `least`."""

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
    """A number between 0 and 1, with or without the bounds."""

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
