"""The watch of `gpu_idle_timeout`: which looks make which log lines, and which verdict."""

import logging
import signal
from typing import Literal

import pytest

from stoker.dropin.gpu_idle_timeout import IdleWatch, look_distance, parse
from stoker.gpus.model import Look, Maybe, Unknown
from stoker.rules.samples import SamplesPolicy
from tests.support.looks import a_look

UNKNOWN = Unknown("not supported by this GPU")
GPU = "GPU-00000000"


class Watched:
    """A watch with a captured log, fed with looks at its interval."""

    def __init__(
        self,
        *,
        threshhold: int = 50,
        every: int = 1,
        samples: int = 2,
        delay: int = 1,
        require: Literal["all", "any"] = "all",
        level: int = logging.DEBUG,
    ) -> None:
        self.lines: list[str] = []
        log = logging.Logger("test", level)
        log.addHandler(self._Collector(self.lines))
        self.watch = IdleWatch(
            SamplesPolicy(
                every=look_distance(every),
                threshold=threshhold,
                sample_freq=every,
                num_samples=samples,
                delay_samples=delay,
                require=require,
            ),
            log,
        )
        self._at = 0.0

    class _Collector(logging.Handler):
        def __init__(self, lines: list[str]) -> None:
            super().__init__()
            self._lines = lines

        def emit(self, record: logging.LogRecord) -> None:
            self._lines.append(f"{record.levelname}: {record.getMessage()}")

    def look(self, *utilizations: Maybe[float]) -> tuple[str, ...]:
        return self.feed(a_look(*utilizations, at=self._at))

    def feed(self, look: Look) -> tuple[str, ...]:
        self._at += self.watch.policy.every
        self.verdict = self.watch.observe(look)
        return self.verdict.gpus


@pytest.mark.parametrize(("every", "look_every"), [(1, 1), (6, 6), (10, 10), (11, 5.5), (30, 10), (60, 10)])
def test_distant_samples_consist_of_several_looks(every: int, look_every: float) -> None:
    assert Watched(every=every).watch.policy.every == look_every


def test_work_between_two_samples_is_seen() -> None:
    watched = Watched(every=30, samples=1)
    for used in (0.0, 0.9, 0.0):
        assert watched.look(used) == ()
    assert watched.look(0.0) == ()
    for used in (0.0, 0.0):
        watched.look(used)
    assert watched.look(0.0) == (GPU,)
    assert watched.lines == [f"DEBUG: {GPU} usage 90%", f"DEBUG: {GPU} usage 0%"]


def test_activity_during_the_delay_does_not_count() -> None:
    watched = Watched(every=6, delay=3, samples=1)
    assert [watched.look(0.0) for _ in range(3)] == [(), (), ()]
    assert watched.lines == [
        "INFO: waiting for delay samples. 12 seconds left",
        "INFO: waiting for delay samples. 6 seconds left",
    ]
    assert watched.look(0.0) == (GPU,)


@pytest.mark.parametrize("delay", [0, 1])
def test_first_sample_without_a_delay_is_one_interval_after_the_start(delay: int) -> None:
    watched = Watched(delay=delay, samples=1)
    assert watched.look(0.0) == ()
    assert watched.look(0.0) == (GPU,)


def test_activity_before_the_start_does_not_count() -> None:
    watched = Watched(samples=1)
    watched.look(0.9)
    assert watched.look(0.0) == (GPU,)


def test_unknown_usage_is_logged_when_it_begins_and_when_its_reason_changes() -> None:
    watched = Watched(samples=1, level=logging.INFO)
    reasons: list[Maybe[float]] = [UNKNOWN, UNKNOWN, UNKNOWN, Unknown("the GPU is lost"), 0.9, UNKNOWN]
    for reason in reasons:
        assert watched.look(reason) == ()
    assert watched.lines == [
        f"WARNING: {GPU} usage unknown: not supported by this GPU",
        f"WARNING: {GPU} usage unknown: the GPU is lost",
        f"WARNING: {GPU} usage unknown: not supported by this GPU",
    ]


def test_unknown_usage_is_logged_every_time_with_debug() -> None:
    watched = Watched(samples=1)
    for _ in range(3):
        watched.look(UNKNOWN)
    assert [line.split(": ")[0] for line in watched.lines] == ["WARNING", "DEBUG"]


def test_unreadable_machine_is_logged_and_restarts_the_window() -> None:
    watched = Watched(samples=2)
    watched.look(0.0)
    watched.look(0.0)
    assert watched.feed(a_look(at=2.0, problem=Unknown("no GPU was found"))) == ()
    assert watched.look(0.0) == ()
    assert watched.look(0.0) == (GPU,)
    assert "WARNING: usage unknown: no GPU was found" in watched.lines


def test_failed_action_requires_another_idle_window() -> None:
    watched = Watched(samples=2)
    assert [watched.look(0.0) for _ in range(3)] == [(), (), (GPU,)]
    watched.watch.start_again(0.0)
    assert [watched.look(0.0) for _ in range(2)] == [(), (GPU,)]


def test_any_names_the_idle_gpus() -> None:
    watched = Watched(samples=1, require="any")
    watched.look(0.0, 0.9)
    watched.look(0.0, 0.9)
    assert watched.verdict.reason == (f"usage for any GPUs: ['{GPU}'] was below threshhold 50% for last 1 seconds.")


@pytest.mark.parametrize("spelling", ["-a", "--all_or_any", "--all-or-any"])
def test_every_spelling_of_all_or_any_is_accepted(spelling: str) -> None:
    assert parse([spelling, "any", "cat"]).policy.require == "any"
    assert parse(["cat"]).policy.require == "all"


def test_defaults_are_those_of_the_original() -> None:
    options = parse(["cat", "-x"])
    assert options.policy == SamplesPolicy()
    assert options.command == ("cat", "-x")
    assert (options.debug, options.signal, options.signal_children) == (False, None, False)


def test_children_get_the_signal_of_the_original_by_default() -> None:
    assert parse(["--signal-children", "cat"]).signal is signal.SIGQUIT
    assert parse(["--signal-children", "--signal-name", "SIGTERM", "cat"]).signal is signal.SIGTERM
