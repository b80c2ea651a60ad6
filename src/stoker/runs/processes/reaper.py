"""The supervisor's hold on one job: launches it under a reaper process, hears of it, and reaches all of it.

```
  supervisor ── reaper ── the job ── whatever it starts
      ▲             ▲ orphans of the job
      └ and these, should the reaper itself be killed
```
"""

import contextlib
import errno
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import Final, NamedTuple, TypeAlias

from stoker.logs.writer import LogWriter
from stoker.procfs import Identity, identify, stat
from stoker.runs.processes.cgroup import Cgroup, NoCgroupError
from stoker.runs.processes.reaper_process import (
    DEADLINE_PASSED,
    EMPTY,
    ENDED,
    FAILED,
    HOLD,
    MESSAGE,
    MOMENT,
    RELEASE,
    STARTED,
    STOPPED,
    LaunchRequest,
    OrphanStop,
    ReaperProcess,
    ReaperSetup,
)
from stoker.runs.processes.spawn import Failed, Program, failure
from stoker.runs.processes.syscalls import become_subreaper
from stoker.runs.processes.tree import ProcessScan, ProcessTree, children, descends, exit_code, send

__all__ = [
    "DeadlinePassed",
    "Empty",
    "Ended",
    "Failed",
    "LaunchRequest",
    "OrphanStop",
    "Program",
    "Reaper",
    "ReaperEvent",
    "ReaperKilled",
    "Started",
    "Stopped",
    "exit_code",
    "fork_reaper",
    "launch",
]  # fmt: skip

# A command starts within milliseconds; on a network disk that hangs, its supervisor must not hang along.
_START_PATIENCE: Final = 1.0
# Every signal but the real-time ones, which nobody sends to strangers.
_ALL_SIGNALS: Final = range(1, 32)
# A reaper leaves at once when it is released, unless somebody stopped it.
_LEAVE_PATIENCE: Final = 1.0
_LEAVE_POLL: Final = 0.005
_OWN_FAILURE: Final = 125
# Far more than need watching at one time, far below the usual limit of 1024 open files.
_MOST_PIDFDS: Final = 200


class Started(NamedTuple):
    """The command runs."""

    job: Identity


class Ended(NamedTuple):
    """The command ended; what it started may live on."""

    status: int
    """As from waitpid; `exit_code` makes a shell's number of it."""


class Stopped(NamedTuple):
    """The command was stopped, not ended, by this signal, and still is: a shell would show its prompt now."""

    signal: int


class Empty:
    """Nothing of the job is left."""


class DeadlinePassed:
    """The moment is over until which the job was to be held: the reaper stops it, or has not started it."""


class ReaperKilled:
    """The reaper was killed. What it looked after is looked after here from now on, and news of it go on coming."""


ReaperEvent: TypeAlias = Started | Failed | Ended | Stopped | Empty | DeadlinePassed | ReaperKilled


def launch(
    program: Program,
    *,
    signum: int = signal.SIGTERM,
    grace: float = 10.0,
    orphaned: Callable[[OrphanStop], None] | None = None,
    helpers: Callable[[], Collection[int]] = frozenset,
    contain_cgroup: bool = True,
) -> "Reaper":
    """Starts the program under a reaper. For a single-threaded process.

    `signum` and `grace` are for the reaper, should this process be killed: it then stops the job, calls `orphaned`
    in its own process (which has standard input, output and error and no other descriptor of this one) and exits.
    `helpers` says which children of this process, started later than now and not yet collected, are not the job's; it
    matters once the reaper was killed. A helper that starts others should lead a session of its own.
    """
    reaper = fork_reaper(orphaned=orphaned, helpers=helpers, contain_cgroup=contain_cgroup)
    reaper.start(LaunchRequest(program, signum, grace))
    return reaper


def fork_reaper(
    *,
    orphaned: Callable[[OrphanStop], None] | None = None,
    helpers: Callable[[], Collection[int]] = frozenset,
    contain_cgroup: bool = True,
    keeps_output: bool = False,
) -> "Reaper":
    """A reaper that waits for what it is to start: `Reaper.start` then costs one fork, the job's own.

    `keeps_output` is for jobs whose output goes to a file of their own. Raises OSError when there can be none now.
    """
    # As GNU timeout does: whoever ignores the ends of children, and hands that down, is told of none.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    become_subreaper()
    me = os.getpid()
    strangers = [who for child in children(me) if (who := identify(child))]
    cgroup, containment = _contain(contain_cgroup)
    with contextlib.ExitStack() as undo:
        if cgroup is not None:
            undo.callback(cgroup.remove)
        orders, order = _pipe(undo)
        report, tell = _pipe(undo)
        output = _pipe(undo) if keeps_output else None
        setup = ReaperSetup(me, orders, tell, cgroup, orphaned, output)
        # What lives until now lives for ever: the two processes then share its memory.
        gc.freeze()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                _guard(setup)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        reaper = Reaper(pid, order, report, cgroup, containment, _Others(strangers, helpers), output)
        undo.pop_all()
    os.close(orders)
    os.close(tell)
    return reaper


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        undo.callback(os.close, end)
    return ends


def _guard(setup: ReaperSetup) -> None:
    """The rest of the reaper's process."""
    try:
        gc.disable()
        ReaperProcess(setup).run()
    except BaseException:  # noqa: BLE001 - it must never return into the supervisor's code, and not fail silently
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _contain(wanted: bool) -> tuple[Cgroup | None, str]:
    by_descent = "orphans are adopted and found by descent"
    if not wanted:
        return None, by_descent
    try:
        cgroup = Cgroup.create()
    except NoCgroupError as error:
        return None, f"{by_descent} (no cgroup: {error})"
    return cgroup, f"cgroup {cgroup.path}; {by_descent}"


class _Others:
    """Children of this process that are not the job's."""

    def __init__(self, strangers: list[Identity], helpers: Callable[[], Collection[int]]) -> None:
        self._strangers = strangers
        self._helpers = helpers

    def __call__(self) -> set[int]:
        here = {stranger.pid for stranger in self._strangers if identify(stranger.pid) == stranger}
        return here.union(self._helpers())


class Reaper:
    """One launched job. `fileno()` is readable when `next_event()` has something to say."""

    def __init__(
        self,
        pid: int,
        order: int,
        report: int,
        cgroup: Cgroup | None,
        containment: str,
        others: _Others,
        output: tuple[int, int] | None = None,
    ) -> None:
        self.pid = pid
        self.job: Identity | None = None
        """The command's own process, once it is started."""
        self.status: int | None = None
        """The command's wait status, once it has ended."""
        self.empty = False
        """Whether nothing of the job is left."""
        self.containment = containment
        """By which means the job is held together, in words."""
        self._me = identify(pid) or Identity(pid, 0)
        self._order = order
        self._report: int | None = report
        self.cgroup = cgroup
        """The job's own, where it has one."""
        self._others = others
        self.output = output
        """Both ends of the pipe that the jobs write to, where their output is kept."""
        self._request: LaunchRequest | None = None
        self._tree = ProcessTree(pid, cgroup)
        self._adopted: dict[int, Identity] | None = None
        """After the reaper's death: the processes that are watched, by pidfd."""
        self._queued_events: list[ReaperEvent] = []
        self._early: list[int] = []
        """Signals for a command that is not yet known to run."""
        self._dismissed = False
        self._closed = False
        self._struck = False
        os.set_blocking(report, False)
        # Rings while something is untold that no other descriptor calls for.
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._epoll.register(report, select.EPOLLIN)

    @property
    def reusable(self) -> bool:
        """Whether nothing is left of the job and the reaper can start another."""
        # Newer kernels (6.18) kill at birth whatever is put into a cgroup that was killed once.
        return self.empty and self._report is not None and not self._struck

    @property
    def exited(self) -> bool:
        """Whether the command ended by calling exit, not by a signal."""
        return self.status is not None and os.WIFEXITED(self.status)

    def start(self, request: LaunchRequest) -> None:
        """Starts a job, the first one or the next when nothing is left of the last.

        Waits a moment until the command runs or is known not to. That is event all the same.
        """
        self.job, self.status, self.empty = None, None, False
        self._early.clear()
        self._request = request
        try:
            _write_all(self._order, request.order())
        except BrokenPipeError:
            # Killed before it had all of the order: nothing was started.
            self.empty = True
            self._queue_event(
                Failed(errno.EAGAIN, _OWN_FAILURE, "the process that was to start it was killed", transient=True)
            )
            return
        if self._epoll.poll(_START_PATIENCE):
            self._listen()

    def set_deadline(self, moment: float) -> None:
        """The reaper stops the job at this moment of the boot clock, should its supervisor not have done so."""
        room = select.poll()
        room.register(self._order, select.POLLOUT)
        # A reaper that is stopped, with thousands of these untaken, is not waited for.
        if any(events & select.POLLOUT for _, events in room.poll(0)):
            with contextlib.suppress(BrokenPipeError):
                os.write(self._order, HOLD + MOMENT.pack(moment))

    def cancel_start(self) -> None:
        """A reaper that has not said that the command runs may have been stopped: it must not start it later."""
        self.update()
        if self.job is None and not self.empty and self._report is not None and not self._dismissed:
            os.kill(self.pid, signal.SIGKILL)  # not collected yet, so the pid is still its own
            self._dismiss()
            self.update()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def next_event(self) -> ReaperEvent | None:
        """The next thing that happened, if any. Never blocks."""
        if not self._queued_events:
            self._listen()
        if not self._queued_events:
            return None
        first = self._queued_events.pop(0)
        if not self._queued_events:
            os.eventfd_read(self._wakeup)
        return first

    def processes(self) -> list[Identity]:
        """All of the job that live."""
        return self.scan_processes().processes

    def owns(self, pid: int) -> bool:
        """Whether this process is the job's; cheaper than `processes()`, however many threads and processes it has."""
        if self._adopted is None:
            return descends(pid, self.pid) or (self.cgroup is not None and pid in self.cgroup.pids())
        return any(process.pid == pid for process in self.processes())

    def signal(self, signum: int) -> bool:
        """Sends it to the command's own process alone, as soon as that runs; False when it is gone."""
        if self.job is None and not self.empty and self._report is not None:
            self._early.append(signum)
            return True
        return self.job is not None and self.status is None and send(self.job, signum)

    def close(self) -> None:
        """Lets the reaper go and cleans up. Whoever of the job still lives is on his own."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BrokenPipeError):
            os.write(self._order, RELEASE)
        os.close(self._order)
        if not self._dismissed:
            # Should somebody have stopped it, it cannot leave.
            os.kill(self.pid, signal.SIGCONT)
        self._dismiss()
        if self._report is not None:
            self.update()
        if self._adopted is not None:
            self._collect()
            self._write_down()
            for pidfd in self._adopted:
                os.close(pidfd)
        if self._report is not None:
            os.close(self._report)
        os.close(self._wakeup)
        self._epoll.close()
        for end in self.output or ():
            os.close(end)
        if self.cgroup is not None:
            self.cgroup.remove()

    # What a termination needs

    def scan_processes(self) -> ProcessScan:
        """Who of the job lives."""
        return ProcessScan([], settled=True) if self.empty else self._tree.scan_processes()

    def kill(self) -> bool:
        """Kills the job at one blow, where it has a cgroup."""
        struck = self._tree.kill()
        self._struck = self._struck or struck
        return struck

    def update(self) -> None:
        """Hears everything there is; `job`, `status` and `empty` remember it."""
        while self.next_event() is not None:
            pass

    # News from the reaper

    def _queue_event(self, event: ReaperEvent) -> None:
        if not self._queued_events:
            os.eventfd_write(self._wakeup, 1)
        self._queued_events.append(event)

    def _listen(self) -> None:
        if self._report is not None:
            self._read_report(self._report)
        elif self._adopted is not None and not self.empty:
            self._look_after(self._adopted)

    def _read_report(self, report: int) -> None:
        """One message at a time: the next one then calls for itself."""
        try:
            message = os.read(report, MESSAGE.size)
        except BlockingIOError:
            return
        if not message:
            self._hear_silence(report)
            return
        kind, first, second = MESSAGE.unpack(message)
        if kind == STARTED:
            self.job = Identity(first, second)
            for signum in self._early:
                send(self.job, signum)
            self._early.clear()
            self._queue_event(Started(self.job))
        elif kind == FAILED:
            self.empty = True
            self._queue_event(failure(first, second))
        elif kind == ENDED:
            self.status = first
            self._queue_event(Ended(first))
        elif kind == EMPTY:
            self.empty = True
            self._queue_event(Empty())
        elif kind == DEADLINE_PASSED:
            self._struck = True
            self._queue_event(DeadlinePassed())
        elif kind == STOPPED and self._is_stopped():
            self._queue_event(Stopped(first))

    def _is_stopped(self) -> bool:
        """Whether it still is: a terminal that stopped all of us may since have made all of us go on."""
        found = stat(self.job.pid) if self.job else None
        return found is not None and found.identity == self.job and found.state == "T"

    def _hear_silence(self, report: int) -> None:
        """The reaper has left, or was killed."""
        self._epoll.unregister(report)
        os.close(report)
        self._report = None
        self._dismiss()
        if not self.empty:
            self._queue_event(ReaperKilled())
            self._adopt()

    def _dismiss(self) -> None:
        """Collects the reaper, which is leaving; one that somebody stopped would never."""
        if self._dismissed:
            return
        self._dismissed = True
        if not _ends_within(self.pid, _LEAVE_PATIENCE):
            # Not collected yet, so the pid is still its own.
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    # After the reaper's death

    def _adopt(self) -> None:
        """The kernel made the reaper's children this process's own."""
        self._tree = ProcessTree(os.getpid(), self.cgroup, since=self._me.started, exclude=self._others)
        self._adopted = {}
        self.containment += "; its reaper was killed, so it would outlive a killed supervisor"
        self._look_after(self._adopted)

    def _look_after(self, watched: dict[int, Identity]) -> None:
        for pidfd, _ in self._epoll.poll(0):
            if watched.pop(pidfd, None):
                self._epoll.unregister(pidfd)
                os.close(pidfd)
        self._collect()
        processes, settled = self._tree.scan_processes()
        if settled and not processes:
            self._write_down()
            self.empty = True
            self._queue_event(Empty())
            return
        known = set(watched.values())
        for process in processes:
            if process not in known and len(watched) < _MOST_PIDFDS:
                self._watch(process, watched)

    def _write_down(self) -> None:
        """The last words of a job whose reaper was killed are still in the pipe."""
        if self.output is None or self._request is None or self._request.log is None:
            return
        log = LogWriter(self._request.log, self._request.log_limit)
        with contextlib.suppress(BlockingIOError):
            while True:
                log.write(os.read(self.output[0], 65536))
        log.close()

    def _watch(self, process: Identity, watched: dict[int, Identity]) -> None:
        """Makes `fileno()` readable when it ends."""
        with contextlib.suppress(OSError, AttributeError):
            pidfd = os.pidfd_open(process.pid)
            watched[pidfd] = process
            self._epoll.register(pidfd, select.EPOLLIN)

    def _collect(self) -> None:
        """Collects the adopted children that ended."""
        others = self._others()
        for child in children(os.getpid()):
            if child in others:
                continue
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(child, os.WNOHANG)
                if self.job is not None and pid == self.job.pid and self.status is None:
                    self.status = status
                    self._queue_event(Ended(status))


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _ends_within(child: int, seconds: float) -> bool:
    """Whether this child ends in time, without collecting it."""
    try:
        pidfd = os.pidfd_open(child)
    except (OSError, AttributeError):
        return _has_ended_within(child, seconds)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(pidfd)


def _has_ended_within(child: int, seconds: float) -> bool:
    """The same where there are no pidfds, or none left."""
    ends = time.monotonic() + seconds
    try:
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > ends:
                return False
            time.sleep(_LEAVE_POLL)
    except ChildProcessError:
        return True
    return True
