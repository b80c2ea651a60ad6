"""Retries while a service is unreachable: exponential backoff with jitter, logged once."""

import errno
import io

import pytest

from stoker.errors import BadInputError, StokerError
from stoker.feeds.intake import LONGEST_PAUSE, FeedLog, RetryForever


class AwayError(StokerError):
    pass


class World:
    """A service that fails a number of times."""

    def __init__(self, tries: int, chance: float) -> None:
        self._tries = tries
        self.pauses: list[float] = []
        self.patience = RetryForever(FeedLog(), AwayError, sleep=self.pauses.append, chance=lambda: chance)

    def step(self) -> str:
        self._tries -= 1
        if self._tries >= 0:
            raise AwayError("it is away")
        return "done"


def test_pauses_grow_to_a_limit_and_are_spread(capsys: pytest.CaptureFixture[str]) -> None:
    late, early = World(10, 1.0), World(10, 0.0)
    assert late.patience.until_done(late.step) == early.patience.until_done(early.step) == "done"
    assert late.pauses == [0.5, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert max(late.pauses) == LONGEST_PAUSE
    assert early.pauses == [pause / 2 for pause in late.pauses]
    logged = capsys.readouterr().err.splitlines()[:2]
    assert logged == ["stoker: it is away (waiting, and trying again)", "stoker: it works again: going on"]


def test_success_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(0, 1.0)
    assert world.patience.until_done(world.step) == "done"
    assert capsys.readouterr().err == ""


def test_other_errors_are_not_retried() -> None:
    world = World(0, 1.0)
    answers = iter([BadInputError("wrong"), None])

    def step() -> None:
        if (error := next(answers)) is not None:
            raise error

    with pytest.raises(BadInputError):
        world.patience.until_done(step)
    answers = iter([BadInputError("wrong"), None])
    world.patience.also(BadInputError)
    world.patience.until_done(step)


def test_feed_continues_when_its_output_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    monkeypatch.setattr("sys.stderr", Full())
    FeedLog().job("1", "python train.py")
    FeedLog().write("a row cannot be read")
