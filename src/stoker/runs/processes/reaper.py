"""The supervisor's handle on one job: launches it under a reaper process, receives its events, and reaches all of it.

```
  supervisor ── reaper ── the job ── its descendants
      ▲             ▲ adopts orphans of the job
      └ adopts them if the reaper is killed
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
from stoker.procfs import Identity, KeptFiles, Stat, identify, stat
from stoker.runs.processes.cgroup import Cgroup, NoCgroupError
from stoker.runs.processes.reaper_process import (
    DEADLINE,
    DEADLINE_PASSED,
    EMPTY,
    ENDED,
    EXIT,
    FAILED,
    MESSAGE,
    STARTED,
    STOPPED,
    TIME,
    LaunchRequest,
    OrphanStop,
    ReaperProcess,
    ReaperSetup,
)
from stoker.runs.processes.spawn import OWN_FAILURE, Failed, Program, failure
from stoker.runs.processes.syscalls import become_subreaper
from stoker.runs.processes.tree import ProcessScan, ProcessTree, children, descends, exit_code, send, walk_processes

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

# A command starts within milliseconds. On a network disk that hangs, its supervisor must not hang too.
_START_PATIENCE: Final = 1.0
# Every signal but the real-time ones.
_ALL_SIGNALS: Final = range(1, 32)
# A released reaper exits at once, unless it was stopped by a signal.
_LEAVE_PATIENCE: Final = 1.0
_LEAVE_POLL: Final = 0.005
# Far below the usual limit of 1024 open files.
_MOST_PIDFDS: Final = 200


class Started(NamedTuple):
    """The command runs."""

    job: Identity


class Ended(NamedTuple):
    """The command ended; processes that it started may still run."""

    status: int
    """As from waitpid; `exit_code` converts it."""


class Stopped(NamedTuple):
    """The command was suspended by this job-control signal, and still is."""

    signal: int


class Empty:
    """Nothing of the job is left."""


class DeadlinePassed:
    """The deadline of the job passed: the reaper stops it, or has not started it."""


class ReaperKilled:
    """The reaper was killed. Its processes are watched from here from now on, and their events keep coming."""


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

    If this process is killed, the reaper stops the job with `signum` and `grace`, calls `orphaned` in its own process
    (which has standard input, output and error and no other descriptor of this one) and exits. `helpers` returns the
    children of this process, started later than now and not yet collected, that do not belong to the job; it is used
    if the reaper is killed. A helper that starts others should lead its own session.
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
    """A reaper without a job yet: `Reaper.start` then costs one fork, that of the job.

    `keeps_output`: the reaper writes the output of its jobs to files. Raises OSError.
    """
    # As GNU timeout does: with SIGCHLD ignored, which is inherited, the ends of children are not reported.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    become_subreaper()
    me = os.getpid()
    earlier = [who for child in children(me) if (who := identify(child))]
    # A worker removes abandoned cgroups itself: each of many shims would look at those of all others.
    cgroup, containment = _contain(contain_cgroup, tidy=not keeps_output)
    with contextlib.ExitStack() as undo:
        if cgroup is not None:
            undo.callback(cgroup.remove)
        requests, send_requests = _pipe(undo)
        report, report_events = _pipe(undo)
        output = _pipe(undo) if keeps_output else None
        setup = ReaperSetup(me, requests, report_events, cgroup, orphaned, output)
        # Objects that exist now are never collected, so that the two processes share their memory.
        gc.freeze()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                _run_reaper(setup)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        def others() -> set[int]:
            """Children of this process that do not belong to the job."""
            here = {child.pid for child in earlier if identify(child.pid) == child}
            return here.union(helpers())

        reaper = Reaper(pid, send_requests, report, cgroup, containment, others, output)
        undo.pop_all()
    os.close(requests)
    os.close(report_events)
    return reaper


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        undo.callback(os.close, end)
    return ends


def _run_reaper(setup: ReaperSetup) -> None:
    """The rest of the reaper process."""
    try:
        gc.disable()
        ReaperProcess(setup).run()
    except BaseException:  # noqa: BLE001 - it must neither return into the supervisor nor fail silently
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _contain(wanted: bool, *, tidy: bool) -> tuple[Cgroup | None, str]:
    by_descent = "orphans are adopted and found by descent"
    if not wanted:
        return None, by_descent
    try:
        cgroup = Cgroup.create(tidy=tidy)
    except NoCgroupError as error:
        return None, f"{by_descent} (no cgroup: {error})"
    return cgroup, f"cgroup {cgroup.path}; {by_descent}"


class Reaper:
    """One launched job. `fileno()` is readable when `next_event()` returns one."""

    def __init__(
        self,
        pid: int,
        requests: int,
        report: int,
        cgroup: Cgroup | None,
        containment: str,
        others: Callable[[], set[int]],
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
        """How the processes of the job are tracked, in words."""
        self._me = identify(pid) or Identity(pid, 0)
        self._requests = requests
        self._report: int | None = report
        self.cgroup = cgroup
        """That of the job, where it has one."""
        self._others = others
        self.output = output
        """Both ends of the pipe that the jobs write to, if the reaper keeps their output."""
        self._request: LaunchRequest | None = None
        self._deadline: float | None = None
        """One that the reaper learns with the next start."""
        self._tree = ProcessTree(pid, cgroup)
        self._adopted: dict[int, Identity] | None = None
        """After the reaper was killed: the processes that are watched, by pidfd."""
        self._queued_events: list[ReaperEvent] = []
        self._early_signals: list[int] = []
        """Signals for a command whose start is not confirmed yet."""
        self._collected = False
        self._closed = False
        self._killed_cgroup = False
        os.set_blocking(report, False)
        # Readable while events are queued that no other descriptor announces.
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._epoll.register(report, select.EPOLLIN)

    @property
    def reusable(self) -> bool:
        """Whether nothing of the job is left and the reaper can start another."""
        # Newer kernels (6.18) kill every process that enters a cgroup that was killed once.
        return self.empty and self._report is not None and not self._killed_cgroup

    @property
    def exited(self) -> bool:
        """Whether the command ended by calling exit, not by a signal."""
        return self.status is not None and os.WIFEXITED(self.status)

    def start(self, request: LaunchRequest) -> None:
        """Starts a job: the first one, or the next when nothing of the last is left.

        Waits a deadline until the command runs or has failed to start, which is an event in either case.
        """
        self.job, self.status, self.empty = None, None, False
        self._early_signals.clear()
        self._request = request
        if self._deadline is not None:
            request, self._deadline = request._replace(deadline=self._deadline), None
        try:
            _write_all(self._requests, request.to_bytes())
        except BrokenPipeError:
            # Killed before it had read the whole request: nothing was started.
            self.empty = True
            self._queue_event(
                Failed(errno.EAGAIN, OWN_FAILURE, "the process that was to start it was killed", transient=True)
            )
            return
        if self._epoll.poll(_START_PATIENCE):
            self._read_events()

    def set_deadline(self, deadline: float, *, with_start: bool = False) -> None:
        """The reaper stops the job at this time of the boot clock if its supervisor has not done so.

        `with_start`: it learns that with the next start, and wakes up once for both.
        """
        if with_start:
            self._deadline = deadline
            return
        self._deadline = None
        writable = select.poll()
        writable.register(self._requests, select.POLLOUT)
        # Never waits for a reaper that is stopped and has not read thousands of these.
        if any(events & select.POLLOUT for _, events in writable.poll(0)):
            with contextlib.suppress(BrokenPipeError):
                os.write(self._requests, DEADLINE + TIME.pack(deadline))

    def cancel_start(self) -> None:
        """Makes sure that a reaper that has not confirmed the start yet does not start the command later."""
        self.update()
        if self.job is None and not self.empty and self._report is not None and not self._collected:
            os.kill(self.pid, signal.SIGKILL)  # not collected yet, so the pid cannot have been reused
            self._collect_reaper()
            self.update()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def next_event(self) -> ReaperEvent | None:
        """The next event, if any. Never blocks."""
        if not self._queued_events:
            self._read_events()
        if not self._queued_events:
            return None
        first = self._queued_events.pop(0)
        if not self._queued_events:
            os.eventfd_read(self._wakeup)
        return first

    def processes(self) -> list[Identity]:
        """The living processes of the job."""
        return self.scan_processes().processes

    def measured_processes(self, files: KeptFiles) -> list[Stat]:
        """The same at a fraction of the cost, with their figures. Some may be missing."""
        if self._adopted is None:
            return walk_processes(self.pid, files)
        return [found for who in self.processes() if (found := stat(who.pid)) is not None and found.identity == who]

    def owns(self, pid: int) -> bool:
        """Whether this process belongs to the job; cheaper than `processes()`."""
        if self._adopted is None:
            return descends(pid, self.pid) or (self.cgroup is not None and pid in self.cgroup.pids())
        return any(process.pid == pid for process in self.processes())

    def signal(self, signum: int) -> bool:
        """Sends it to the process of the command alone, as soon as that runs; False when it is gone."""
        if self.job is None and not self.empty and self._report is not None:
            self._early_signals.append(signum)
            return True
        return self.job is not None and self.status is None and send(self.job, signum)

    def close(self) -> None:
        """Releases the reaper and cleans up. Processes of the job that still live are no longer tracked."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, EXIT)
        os.close(self._requests)
        if not self._collected:
            # One that was stopped could not exit.
            os.kill(self.pid, signal.SIGCONT)
        self._collect_reaper()
        if self._report is not None:
            self.update()
        if self._adopted is not None:
            self._collect()
            self._write_output()
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

    # What `Termination` needs

    def scan_processes(self) -> ProcessScan:
        """The living processes of the job."""
        return ProcessScan([], settled=True) if self.empty else self._tree.scan_processes()

    def kill(self) -> bool:
        """Kills all of the job at once, where it has a cgroup."""
        killed = self._tree.kill()
        self._killed_cgroup = self._killed_cgroup or killed
        return killed

    def update(self) -> None:
        """Reads all events; `job`, `status` and `empty` keep what matters of them."""
        while self.next_event() is not None:
            pass

    # Events from the reaper

    def _queue_event(self, event: ReaperEvent) -> None:
        if not self._queued_events:
            os.eventfd_write(self._wakeup, 1)
        self._queued_events.append(event)

    def _read_events(self) -> None:
        if self._report is not None:
            self._read_report(self._report)
        elif self._adopted is not None and not self.empty:
            self._watch_adopted(self._adopted)

    def _read_report(self, report: int) -> None:
        """One message at a time: while there are more, the pipe stays readable."""
        try:
            message = os.read(report, MESSAGE.size)
        except BlockingIOError:
            return
        if not message:
            self._reaper_gone(report)
            return
        kind, first, second = MESSAGE.unpack(message)
        if kind == STARTED:
            self.job = Identity(first, second)
            for signum in self._early_signals:
                send(self.job, signum)
            self._early_signals.clear()
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
            self._killed_cgroup = True
            self._queue_event(DeadlinePassed())
        elif kind == STOPPED and self._is_stopped():
            self._queue_event(Stopped(first))

    def _is_stopped(self) -> bool:
        """Whether it still is: the terminal may have continued the whole group since."""
        found = stat(self.job.pid) if self.job else None
        return found is not None and found.identity == self.job and found.state == "T"

    def _reaper_gone(self, report: int) -> None:
        """The reaper exited, or was killed."""
        self._epoll.unregister(report)
        os.close(report)
        self._report = None
        self._collect_reaper()
        if not self.empty:
            self._queue_event(ReaperKilled())
            self._adopt()

    def _collect_reaper(self) -> None:
        """Collects the reaper, which is about to exit; one that was stopped is killed."""
        if self._collected:
            return
        self._collected = True
        if not _ends_within(self.pid, _LEAVE_PATIENCE):
            # Not collected yet, so the pid cannot have been reused.
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    # After the reaper was killed

    def _adopt(self) -> None:
        """The kernel made the children of the reaper children of this process."""
        self._tree = ProcessTree(os.getpid(), self.cgroup, since=self._me.started, exclude=self._others)
        self._adopted = {}
        self.containment += "; its reaper was killed, so the job would survive a kill of its supervisor"
        self._watch_adopted(self._adopted)

    def _watch_adopted(self, watched: dict[int, Identity]) -> None:
        for pidfd, _ in self._epoll.poll(0):
            if watched.pop(pidfd, None):
                self._epoll.unregister(pidfd)
                os.close(pidfd)
        self._collect()
        processes, settled = self._tree.scan_processes()
        if settled and not processes:
            self._write_output()
            self.empty = True
            self._queue_event(Empty())
            return
        known = set(watched.values())
        for process in processes:
            if process not in known and len(watched) < _MOST_PIDFDS:
                self._watch(process, watched)

    def _write_output(self) -> None:
        """Writes the output that is still in the pipe of a killed reaper."""
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
    """Whether this child ends in time. It is not collected."""
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
    """The same without pidfds."""
    ends = time.monotonic() + seconds
    try:
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > ends:
                return False
            time.sleep(_LEAVE_POLL)
    except ChildProcessError:
        return True
    return True
