"""The loop of `stoker watch` with GPUs and actions that are made up, in real time."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import pytest

from stoker.actions.action import Action, ActionError, Facts
from stoker.actions.systemd import ServiceManager
from stoker.actions.watcher import Watched, Watcher, WatchOptions
from stoker.actions.whose import ProcessMeter, judged_processes
from stoker.gpus.model import Look, Maybe, Unknown
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError
from stoker.rules.idle import IdlePolicy
from tests.support.looks import a_look
from tests.support.waiting import wait_for

POLICY = IdlePolicy(unused_for=0.0, window=0.1, every=0.02, after=0.0, warn_at=None)


class Scripted(Prober):
    """Answers every look at once: with a utilization, with unknown, or with the driver gone; the last one for ever.

    The looks are at `moments`, seconds after the first: a machine that stands still for a while makes no difference.
    """

    def __init__(self, *script: Maybe[float] | AbsentError, moments: Iterable[float] | None = None) -> None:
        super().__init__("sim:1")
        self._script: Iterator[Maybe[float] | AbsentError] = _held(script)
        # None of them is at the very end of a window.
        self._moments = iter(moments or itertools.count(step=0.03))
        self._begun: float | None = None
        self.looks = 0

    def ask(self, max_age: float = 0.0, at: float = 0.0) -> None:  # noqa: ARG002 - the signature of a prober
        self.looks += 1

    def fileno(self) -> int:
        return -1

    def answer(self) -> Look:
        now = next(self._script)
        if isinstance(now, AbsentError):
            raise now
        return a_look(now, at=self._at(), span=POLICY.every)

    def _at(self) -> float:
        if self._begun is None:
            self._begun = time.monotonic()
        return self._begun + next(self._moments)


class AsItHappens(Scripted):
    """Looks when it is asked to."""

    def _at(self) -> float:
        return time.monotonic()


def _held(script: Iterable[Maybe[float] | AbsentError]) -> Iterator[Maybe[float] | AbsentError]:
    last: Maybe[float] | AbsentError = 0.0
    for last in script:
        yield last
    while True:
        yield last


class Scribe(Action):
    """Records the facts it gets and calls the test's function with them."""

    patience = 60.0

    def __init__(self, name: str, log: list[str], work: Callable[[Facts], None] = lambda _facts: None) -> None:
        self._name = name
        self._log = log
        self._work = work

    def describe(self) -> str:
        return f"do {self._name}"

    def prepare(self) -> tuple[str, ...]:
        return ()

    def act(self, facts: Facts) -> None:
        self._log.append(self._name)
        self._work(facts)


class SendingAction(Scribe):
    sends_messages = True

    def send_message(self, host: str, text: str) -> None:
        self._log.append(f"{host}: {text}")


def watch(
    prober: Scripted, *actions: Action, policy: IdlePolicy = POLICY, said: list[str] | None = None, **orders: bool
) -> tuple[int, list[str]]:
    """The exit code, and what was said."""
    said = [] if said is None else said
    whole = WatchOptions(actions=actions, host="node7", **orders)
    judged = judged_processes("all", actions, "root")
    watched = Watched("all", [policy], {}, judged, ProcessMeter(judged))
    watcher = Watcher(prober, watched, [policy], whole, ServiceManager({}), log=said.append)
    return watcher.run(prober.answer()), said


def test_hanging_action_is_reported_and_the_next_runs() -> None:
    log: list[str] = []
    never = threading.Event()

    def hang(_facts: Facts) -> None:
        never.wait()

    stuck = Scribe("stuck", log, hang)
    stuck.patience = 0.2
    code, said = watch(Scripted(0.0), stuck, Scribe("next", log))
    never.set()
    assert code == 125
    assert said[-3:] == ["now: do stuck", "failed: it did not end within 0.2s", "now: do next"]
    # Actions run in threads: the hanging one may record its start only after it was abandoned.
    wait_for(lambda: sorted(log) == ["next", "stuck"], named="both actions")


def test_exception_in_an_action_does_not_stop_the_others() -> None:
    log: list[str] = []

    def broken(_facts: Facts) -> None:
        raise ZeroDivisionError("division by zero")

    code, said = watch(Scripted(0.0), Scribe("broken", log, broken), Scribe("next", log))
    assert (code, log) == (125, ["broken", "next"])
    assert "failed: internal error: ZeroDivisionError: division by zero" in said


def test_actions_get_the_facts() -> None:
    received: list[Facts] = []
    code, _said = watch(Scripted(0.0), Scribe("it", [], received.append))
    assert code == 124
    [facts] = received
    assert facts.reason == "GPU 0 stayed below 1% for 0.1s"
    assert facts.rule == "all GPUs below 1% for 0.1s"
    assert facts.gpus == ("GPU-00000000",)
    assert facts.seconds >= 0.1
    assert facts.host == "node7"


@pytest.mark.parametrize("trouble", [Unknown("the GPU is lost"), AbsentError("the driver is not loaded")])
def test_unreadable_gpu_never_fires(trouble: Unknown | AbsentError) -> None:
    log: list[str] = []
    prober = Scripted(0.0, *[trouble] * 12, 0.0)
    code, _said = watch(prober, Scribe("it", log))
    assert (code, log) == (124, ["it"])
    # Twelve unknown samples, then one that begins the window and one that ends it; a busy machine takes no more.
    assert prober.looks >= 12 + 2


def test_warning_is_sent_as_a_message() -> None:
    log: list[str] = []
    policy = msgspec.structs.replace(POLICY, warn_at=0.5)
    code, said = watch(Scripted(0.0), SendingAction("message", log), policy=policy)
    assert code == 124
    [warning] = wait_for(lambda: [entry for entry in log if entry.startswith("node7: ")], named="the message")
    assert (
        "; in 0.0s, unless that changes: do message" in warning
        or "; in 0.1s, unless that changes: do message" in warning
    )
    assert warning.removeprefix("node7: ") in said


def test_undelivered_warning_is_logged() -> None:
    class Mute(SendingAction):
        def send_message(self, host: str, text: str) -> None:
            raise ActionError(f"{host} did not receive:  {text}")

    said: list[str] = []

    def is_logged() -> bool:
        return any(line.startswith("node7 did not receive:  GPU 0 stayed below 1%") for line in said)

    def moments() -> Iterator[float]:
        """The window does not end before that is logged."""
        yield 0.0
        yield from itertools.takewhile(lambda _moment: not is_logged(), itertools.repeat(0.2))
        yield 0.4

    policy = msgspec.structs.replace(POLICY, window=0.3, warn_at=0.1)
    code, _said = watch(Scripted(0.0, moments=moments()), Mute("message", []), policy=policy, said=said)
    assert code == 124
    assert is_logged()


def test_dry_run_sends_nothing_and_does_nothing() -> None:
    log: list[str] = []
    policy = msgspec.structs.replace(POLICY, warn_at=0.1)
    code, said = watch(Scripted(0.0), SendingAction("message", log), policy=policy, dry_run=True)
    assert (code, log) == (124, [])
    assert said[-1].endswith("; dry run: would do message now")


def test_last_sample_is_taken_at_the_end_of_the_window() -> None:
    policy = msgspec.structs.replace(POLICY, every=0.45, window=0.5)
    received: list[Facts] = []
    # Once more, and again, should the machine have stood still just then.
    while not received or (received[-1].seconds >= 0.85 and len(received) < 20):
        watch(AsItHappens(0.0), Scribe("it", [], received.append), policy=policy)
    assert 0.5 <= received[-1].seconds < 0.85  # beats are at 0.45 and 0.9
