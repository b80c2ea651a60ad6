"""Terminates a process tree: signal, grace, freeze, kill, until no process is left."""

import select
import signal
import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from stoker.procfs import Identity, is_alive
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.syscalls import boot_clock
from stoker.runs.processes.tree import ProcessScan, describe, send

# The kernel takes seconds to tear down a process with GPUs or much memory. A process that survives longer is blocked in
# a driver.
PATIENCE: Final = 30.0
# A tree that forks faster than it can be frozen is killed unfrozen after this time.
_FREEZING: Final = 1.0
# The share of the grace after which all processes get the signal, if the main process neither ends nor forwards it.
_FIRST_SHARE: Final = 0.5
# The interval of checks after a kill, doubled each time.
_FIRST_RETRY: Final = 0.002
_LAST_RETRY: Final = 0.25
# Zombies are collected within a millisecond, unless their parent is suspended.
_COLLECTING: Final = 0.5
# The delay of noticing that the grace ended during a suspend of the machine.
_LONGEST_WAIT: Final = 1.0
# These signals from the terminal end the grace.
_HURRYING: Final = (signal.SIGINT, signal.SIGQUIT)


class TerminationOutcome(NamedTuple):
    """The outcome of a termination."""

    asked: int
    """The number of signalled processes."""
    killed: int
    """The number of killed processes."""
    survivors: tuple[str, ...]
    """Descriptions of remaining processes."""
    seconds: float
    signal: int

    def in_words(self) -> str:
        steps = []
        if self.asked:
            steps.append(f"{_processes(self.asked)} got {signal.Signals(self.signal).name}")
        if self.killed:
            steps.append(f"{_processes(self.killed)} had to be killed" if self.asked else _were_killed(self.killed))
        done = ", ".join(steps) or "there was nothing to stop"
        if self.survivors:
            return f"{done}; left after {self.seconds:.1f} s: {', '.join(self.survivors)}"
        return f"{done}; all gone after {self.seconds:.1f} s" if steps else done


class Tree(Protocol):
    """A process tree that can be terminated."""

    def scan_processes(self) -> ProcessScan:
        """The live processes."""

    def kill(self) -> bool:
        """Kills all processes at once; False if the kernel cannot."""


class Termination:
    """One termination, step by step, for an event loop.

    Call `step()` after every event of the tree and after `timeout()` seconds, until it returns True. It never blocks.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        signum: int = signal.SIGTERM,
        grace: float,
        first: Identity | None = None,
        has_signal: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Signals `first` alone, and the others when it has ended or half of the grace is over.

        A training that writes a checkpoint on SIGTERM still needs its data loaders. A shell that forwards nothing exits
        at once, and then the others get the signal. Without `first`, all processes get it at once.
        `has_signal`: the job already has the signal, so `first` does not get it again.
        """
        self.phase: Literal["first signalled", "signalled", "killing", "over"] = "signalled"
        self._tree = tree
        self._signum = signum
        self._clock = clock
        self._began = clock()
        self._until = self._began + grace
        self._retry = _FIRST_RETRY
        self._killed: set[Identity] = set()
        self._survivors: list[Identity] = []
        self._asked = 0
        self._first = first
        self._rest_from = self._began
        if signum == signal.SIGKILL:
            self._until = self._began
        elif first is not None and grace > 0 and self._signal([first], has_signal=has_signal):
            self.phase = "first signalled"
            self._rest_from = self._began + grace * _FIRST_SHARE
        else:
            self._signal(self._tree.scan_processes().processes)

    def timeout(self) -> float:
        """Seconds until `step()` is due."""
        if self.phase == "over":
            return 0.0
        due = self._rest_from if self.phase == "first signalled" else self._until
        return max(due - self._clock(), 0.0)

    def hurry(self) -> None:
        """Ends the grace: the next step kills."""
        if self.phase in {"first signalled", "signalled"}:
            self.phase = "signalled"
            self._until = self._clock()

    def step(self) -> bool:
        """Performs due steps. True once the termination is over."""
        if self.phase == "over":
            return True
        processes, settled = self._tree.scan_processes()
        if settled and not processes:
            return self._finish([])
        if self.phase == "first signalled":
            if self._first in processes and self._clock() < self._rest_from:
                return False
            self.phase = "signalled"
            self._signal([process for process in processes if process != self._first])
        if self.phase == "signalled":
            if self._clock() < self._until:
                return False
            self.phase = "killing"
            self._give_up = self._clock() + PATIENCE
        elif self._clock() < self._until and self._killed.issuperset(processes):
            return False
        return self._kill(processes)

    def outcome(self) -> TerminationOutcome:
        left = tuple(description for survivor in self._survivors if (description := describe(survivor)))
        return TerminationOutcome(self._asked, len(self._killed), left, self._clock() - self._began, self._signum)

    def _signal(self, processes: list[Identity], *, has_signal: bool = False) -> int:
        """Signals processes, and returns the number of successes."""
        asked = 0
        for process in processes:
            asked += is_alive(process) if has_signal else send(process, self._signum)
            # A suspended process handles the signal only after it is continued.
            send(process, signal.SIGCONT)
        self._asked += asked
        return asked

    def _kill(self, processes: list[Identity]) -> bool:
        self._killed.update(processes)
        self._tree.kill()
        frozen = self._freeze()
        self._killed.update(frozen)
        untouchable = {process for process in frozen if not send(process, signal.SIGKILL) and is_alive(process)}
        now = self._clock()
        if (frozen and untouchable.issuperset(frozen)) or now > self._give_up:
            return self._finish([process for process in frozen if is_alive(process)])
        self._until = now + self._retry
        self._retry = min(self._retry * 2, _LAST_RETRY)
        return False

    def _freeze(self) -> list[Identity]:
        """Suspends all processes, so that none forks or reacts during the kill."""
        frozen: set[Identity] = set()
        ends = self._clock() + _FREEZING
        while True:
            processes, settled = self._tree.scan_processes()
            fresh = [process for process in processes if process not in frozen]
            if (settled and not fresh) or self._clock() > ends:
                return [*frozen, *fresh]
            for process in fresh:
                send(process, signal.SIGSTOP)
                frozen.add(process)

    def _finish(self, survivors: list[Identity]) -> bool:
        self._survivors = survivors
        self.phase = "over"
        return True


class WatchedTree(Tree, Protocol):
    """A tree with a descriptor for its events."""

    @property
    def empty(self) -> bool:
        """True if certainly no process is left, not even a zombie."""

    def fileno(self) -> int: ...

    def update(self) -> None:
        """Handles pending events."""


def stop(
    tree: WatchedTree,
    signum: int,
    grace: float,
    *,
    first: Identity | None = None,
    has_signal: bool = False,
    hurry: SignalStream | None = None,
) -> TerminationOutcome:
    """Terminates the tree and waits for it. A Ctrl-C in `hurry` ends the grace."""
    termination = Termination(tree, signum=signum, grace=grace, first=first, has_signal=has_signal, clock=boot_clock)
    poll = select.poll()
    poll.register(tree.fileno(), select.POLLIN)
    if hurry is not None:
        poll.register(hurry.fileno(), select.POLLIN)
    while not termination.step():
        # Rounded up, since a poll that returns early costs another round.
        poll.poll(min(termination.timeout(), _LONGEST_WAIT) * 1000 + 1)
        tree.update()
        if hurry is not None and _hurried(hurry):
            termination.hurry()
    outcome = termination.outcome()
    if not outcome.survivors:
        wait_until_empty(tree, _COLLECTING)
    return outcome


def wait_until_empty(tree: WatchedTree, seconds: float) -> bool:
    """Waits until no process is left, not even a zombie. False after a timeout."""
    poll = select.poll()
    poll.register(tree.fileno(), select.POLLIN)
    ends = time.monotonic() + seconds
    tree.update()
    while not tree.empty and poll.poll(max(ends - time.monotonic(), 0) * 1000):
        tree.update()
    return tree.empty


def _hurried(signals: SignalStream) -> bool:
    """True if Ctrl-C was pressed at the terminal. Signals from programs do not count."""
    return any(received.signal in _HURRYING and received.from_kernel for received in signals.read())


def _were_killed(count: int) -> str:
    return f"{_processes(count)} {'was' if count == 1 else 'were'} killed"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
