"""The steps of a stop, with a process tree and a clock controlled by the test."""

import signal
from collections.abc import Callable

import pytest

from stoker.procfs import Identity
from stoker.runs.processes import termination as termination_module
from stoker.runs.processes.termination import PATIENCE, Termination, TerminationOutcome
from stoker.runs.processes.tree import ProcessScan

FIRST, SECOND = Identity(1_000_001, 5), Identity(1_000_002, 6)


class World:
    """Simulated processes; `obey` returns whether a signal ends a process."""

    def __init__(self) -> None:
        self.now = 100.0
        self.alive = [FIRST, SECOND]
        self.sent: list[tuple[Identity, int]] = []
        self.settled = True
        self.obey: Callable[[Identity, int], bool] = lambda _who, signum: signum == signal.SIGKILL
        self.permitted = True
        self.has_cgroup = False

    def scan_processes(self) -> ProcessScan:
        return ProcessScan(list(self.alive), self.settled)

    def kill(self) -> bool:
        if self.has_cgroup:
            self.alive = []
        return self.has_cgroup

    def send(self, who: Identity, signum: int) -> bool:
        if who not in self.alive or not self.permitted:
            return False
        self.sent.append((who, signum))
        if self.obey(who, signum):
            self.alive.remove(who)
        return True

    def signals(self) -> list[int]:
        return [signum for _, signum in self.sent]

    def termination(
        self,
        *,
        grace: float = 10.0,
        signum: int = signal.SIGTERM,
        first: Identity | None = None,
        has_signal: bool = False,
    ) -> Termination:
        return Termination(self, signum=signum, grace=grace, first=first, has_signal=has_signal, clock=lambda: self.now)

    def climb_down(self, termination: Termination) -> TerminationOutcome:
        while not termination.step():
            self.now += termination.timeout()
        return termination.outcome()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(termination_module, "send", world.send)
    monkeypatch.setattr(termination_module, "is_alive", lambda who: who in world.alive)
    monkeypatch.setattr(termination_module, "describe", lambda who: f"trainer (pid {who.pid}, blocked in the kernel)")
    return world


def test_all_get_the_signal_at_once_and_none_is_killed_before_the_grace_is_over(world: World) -> None:
    termination = world.termination(grace=10)
    assert world.sent == [
        (FIRST, signal.SIGTERM), (FIRST, signal.SIGCONT), (SECOND, signal.SIGTERM), (SECOND, signal.SIGCONT),
    ]  # fmt: skip
    world.now += 9.9
    assert not termination.step()
    assert signal.SIGKILL not in world.signals()
    world.now += 0.1
    termination.step()
    assert world.signals()[4:] == [signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL]
    assert termination.step()


def test_main_process_gets_the_signal_first_and_the_others_after_its_end(world: World) -> None:
    termination = world.termination(first=FIRST)
    assert world.sent == [(FIRST, signal.SIGTERM), (FIRST, signal.SIGCONT)]
    world.now += 2
    assert not termination.step()
    assert len(world.sent) == 2
    world.alive.remove(FIRST)
    assert not termination.step()
    assert world.sent[2:] == [(SECOND, signal.SIGTERM), (SECOND, signal.SIGCONT)]
    world.now += 7.9
    assert not termination.step()
    assert signal.SIGKILL not in world.signals()
    world.now += 0.2
    assert world.climb_down(termination).killed == 1


def test_others_get_the_signal_after_half_of_the_grace(world: World) -> None:
    termination = world.termination(grace=10, first=FIRST)
    assert termination.timeout() == 5
    world.now += 5
    assert not termination.step()
    assert (SECOND, signal.SIGTERM) in world.sent
    assert world.signals().count(signal.SIGTERM) == 2
    assert termination.timeout() == 5
    assert world.climb_down(termination).killed == 2


def test_hurry_skips_the_signal_to_the_others(world: World) -> None:
    termination = world.termination(first=FIRST)
    termination.hurry()
    assert termination.timeout() == 0
    assert world.climb_down(termination).killed == 2


def test_process_that_ends_on_the_signal_is_not_killed(world: World) -> None:
    world.obey = lambda _who, signum: signum == signal.SIGTERM
    outcome = world.climb_down(world.termination())
    assert (outcome.asked, outcome.killed, outcome.survivors, outcome.seconds) == (2, 0, (), 0.0)
    assert outcome.in_words() == "2 processes got SIGTERM; all gone after 0.0 s"


def test_hurry_ends_the_grace(world: World) -> None:
    termination = world.termination(grace=1000)
    assert termination.timeout() == 1000
    termination.hurry()
    assert termination.timeout() == 0
    outcome = world.climb_down(termination)
    assert outcome.killed == 2
    assert outcome.seconds < 1
    assert "2 processes got SIGTERM, 2 processes had to be killed" in outcome.in_words()


def test_stop_by_sigkill_sends_no_other_signal(world: World) -> None:
    outcome = world.climb_down(world.termination(signum=signal.SIGKILL, grace=1000))
    assert world.signals() == [signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL]
    assert outcome.in_words() == "2 processes were killed; all gone after 0.0 s"


def test_tree_with_cgroup_is_killed_at_once(world: World) -> None:
    world.has_cgroup = True
    outcome = world.climb_down(world.termination(grace=0))
    assert outcome.killed == 2
    assert world.signals() == [signal.SIGTERM, signal.SIGCONT] * 2


def test_unkillable_process_is_named_after_a_while(world: World) -> None:
    world.obey = lambda who, signum: who == FIRST and signum == signal.SIGKILL
    outcome = world.climb_down(world.termination(grace=0))
    assert outcome.survivors == ("trainer (pid 1000002, blocked in the kernel)",)
    assert PATIENCE <= outcome.seconds < PATIENCE + 1
    assert outcome.in_words().endswith("left after 30.0 s: trainer (pid 1000002, blocked in the kernel)")


def test_process_of_another_user_is_named_at_once(world: World) -> None:
    world.permitted = False
    outcome = world.climb_down(world.termination(grace=0))
    assert len(outcome.survivors) == 2
    assert outcome.seconds < 1


def test_unsettled_scan_does_not_count_as_empty(world: World) -> None:
    world.alive = []
    world.settled = False
    termination = world.termination(grace=10)
    assert not termination.step()
    world.settled = True
    assert termination.step()


def test_process_forked_during_the_kill_is_killed(world: World) -> None:
    def obey(who: Identity, signum: int) -> bool:
        if who == FIRST and signum == signal.SIGKILL:
            world.alive.append(Identity(1_000_003, 7))
        return signum == signal.SIGKILL

    world.obey = obey
    outcome = world.climb_down(world.termination(grace=0))
    assert world.alive == []
    assert outcome.killed == 3


def test_empty_tree_needs_no_signal(world: World) -> None:
    world.alive = []
    assert world.climb_down(world.termination()).in_words() == "there was nothing to stop"


def test_process_that_somebody_else_has_signalled_gets_the_signal_only_once(world: World) -> None:
    termination = world.termination(grace=10, first=FIRST, has_signal=True)
    assert world.sent == [(FIRST, signal.SIGCONT)], "a stopped process handles it only when it is continued"
    assert not termination.step()
    world.now += 5
    assert not termination.step()
    assert world.sent[1:] == [(SECOND, signal.SIGTERM), (SECOND, signal.SIGCONT)]
    outcome = world.climb_down(termination)
    assert (outcome.asked, outcome.killed) == (2, 2)


def test_other_processes_are_signalled_at_once_if_the_first_was_killed_by_others(world: World) -> None:
    world.alive = [SECOND]
    world.termination(grace=10, first=FIRST, has_signal=True)
    assert (SECOND, signal.SIGTERM) in world.sent
