"""The supervisor's handle on a job: launches it under a reaper process, receives its events, signals its processes.

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
import socket
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
    GO,
    MESSAGE,
    PREPARE,
    STARTED,
    STOPPED,
    TIME,
    FastPath,
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

# A command starts within milliseconds. The supervisor must not hang with it on a dead network disk.
_START_PATIENCE: Final = 1.0
# All signals except real-time ones.
_ALL_SIGNALS: Final = range(1, 32)
# A released reaper exits at once, unless it is suspended.
_LEAVE_PATIENCE: Final = 1.0
_LEAVE_POLL: Final = 0.005
# Far below the usual limit of 1024 open files.
_MOST_PIDFDS: Final = 200


class Started(NamedTuple):
    """The command has started."""

    job: Identity


class Ended(NamedTuple):
    """The command has exited; processes that it started may still run."""

    status: int
    """The wait status; `exit_code` converts it."""


class Stopped(NamedTuple):
    """A job-control signal has suspended the command."""

    signal: int


class Empty:
    """The last process of the job has ended."""


class DeadlinePassed:
    """The job's deadline has passed: the reaper stops it, or has not started it."""


class ReaperKilled:
    """The reaper was killed. The supervisor now tracks its processes itself, and their events continue."""


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
    """Starts the program under a reaper. Call it in a single-threaded process.

    If this process is killed, the reaper stops the job with `signum` and `grace`, calls `orphaned` in its own process
    (which shares only standard input, output and error with this one) and exits. `helpers` returns later children of
    this process that do not belong to the job; it is used if the reaper is killed. A helper that starts processes
    should lead its own session.
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
    has_fast_path: bool = False,
) -> "Reaper":
    """Forks a reaper without a job, so that `Reaper.start` costs only the fork of the job.

    `keeps_output`: the reaper writes the output of its jobs to files. `has_fast_path`: a worker connects to it by
    `take_connection`. Raises OSError.
    """
    # Like GNU timeout: an inherited SIG_IGN for SIGCHLD would discard the exit status of children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    become_subreaper()
    me = os.getpid()
    earlier = [who for child in children(me) if (who := identify(child))]
    # A worker itself removes abandoned cgroups, since each of many shims would check those of all others.
    cgroup, containment = _contain(contain_cgroup, tidy=not keeps_output)
    with contextlib.ExitStack() as undo:
        if cgroup is not None:
            undo.callback(cgroup.remove)
        requests, send_requests = _pipe(undo)
        report, report_events = _pipe(undo)
        output = _pipe(undo) if keeps_output else None
        connection, fast_path = _fast_path(undo) if has_fast_path else (None, None)
        setup = ReaperSetup(me, requests, report_events, cgroup, orphaned, output, fast_path)
        # Frozen objects are never collected, so the two processes keep sharing their memory.
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
        if fast_path is not None:
            reaper.use_fast_path(connection, fast_path.outcome)
        undo.pop_all()
    os.close(requests)
    os.close(report_events)
    if fast_path is not None:
        fast_path.worker.close()
    return reaper


def _fast_path(undo: contextlib.ExitStack) -> tuple[socket.socket, FastPath]:
    """The worker's end of the connection, and the reaper's part."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        undo.callback(end.close)
    outcome = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    undo.callback(os.close, outcome)
    return ends[0], FastPath(ends[1], outcome)


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        undo.callback(os.close, end)
    return ends


def _run_reaper(setup: ReaperSetup) -> None:
    """The body of the reaper process."""
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
    """A launched job. `fileno()` is readable when `next_event()` has an event."""

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
        """The command's process, once it has started."""
        self.status: int | None = None
        """The command's wait status, once it has exited."""
        self.empty = False
        """All processes of the job have ended."""
        self.containment = containment
        """A description of how the job's processes are tracked."""
        self._me = identify(pid) or Identity(pid, 0)
        self._requests = requests
        self._report: int | None = report
        self.cgroup = cgroup
        """The job's cgroup, if any."""
        self._others = others
        self.output = output
        """Both ends of the pipe for the jobs' output, if the reaper keeps it."""
        self._connection: socket.socket | None = None
        """The worker's end of the fast path, until it is taken."""
        self._outcome: int | None = None
        self.reported = False
        """The reaper has reported the success of the job to the worker."""
        self._request: LaunchRequest | None = None
        self._prepared: LaunchRequest | None = None
        """One that the reaper has, and does not start yet."""
        self._has_decided = False
        """This process has decided how the job ends."""
        self._expected: float | None = None
        """The deadline of a start that the worker has ordered."""
        self._deadline: float | None = None
        """A deadline to send with the next start."""
        self._tree = ProcessTree(pid, cgroup)
        self._adopted: dict[int, Identity] | None = None
        """Processes watched by pidfd, after the reaper was killed."""
        self._queued_events: list[ReaperEvent] = []
        self._early_signals: list[int] = []
        """Signals for a command whose start is unconfirmed."""
        self._collected = False
        self._closed = False
        self._killed_cgroup = False
        os.set_blocking(report, False)
        # Signals queued events that no other descriptor announces.
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._epoll.register(report, select.EPOLLIN)

    def use_fast_path(self, connection: socket.socket | None, outcome: int) -> None:
        """`connection`: the worker's end."""
        self._connection, self._outcome = connection, outcome

    @property
    def reusable(self) -> bool:
        """True if the job has ended completely and the reaper can start another."""
        # Newer kernels (6.18) kill every process that enters a cgroup after a kill.
        return self.empty and self._report is not None and not self._killed_cgroup

    @property
    def exited(self) -> bool:
        """True if the command exited by itself, not by a signal."""
        return self.status is not None and os.WIFEXITED(self.status)

    def prepare(self, request: LaunchRequest) -> None:
        """Sends the request of the next `start` ahead, so that it takes less time."""
        self._prepared = request
        if self._outcome is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._outcome)
            os.eventfd_write(self._outcome, 1)
            self._has_decided = False
        with contextlib.suppress(BrokenPipeError):  # `start` reports it
            _write_all(self._requests, request.to_bytes(PREPARE))

    def start(self, request: LaunchRequest, *, waits: bool = True, is_ordered: bool = False) -> None:
        """Starts a job, after the previous one has ended completely.

        Waits a limited time for the command to start or fail; both are events. `is_ordered`: the worker orders the
        start of what is prepared; `ensure_start` does if it was killed first.
        """
        self.job, self.status, self.empty, self.reported = None, None, False, False
        self._early_signals.clear()
        self._request = request
        deadline, self._deadline = self._deadline, None
        prepared, self._prepared = self._prepared, None
        is_prepared = deadline is not None and request == prepared
        self._expected = deadline if is_prepared else None
        if not is_prepared:
            self._send_start(request._replace(deadline=deadline).to_bytes())
        elif not is_ordered:
            self.ensure_start()
        if waits and self._epoll.poll(_START_PATIENCE):
            self._read_events()

    def ensure_start(self) -> None:
        """Orders the start that the worker was to order; the reaper ignores the second order."""
        deadline, self._expected = self._expected, None
        if deadline is not None:
            self._send_start(GO + TIME.pack(deadline))

    def _send_start(self, order: bytes) -> None:
        try:
            _write_all(self._requests, order)
        except BrokenPipeError:
            # The reaper was killed before it read the whole request, so nothing was started.
            self.empty = True
            self._queue_event(
                Failed(errno.EAGAIN, OWN_FAILURE, "the process that was to start it was killed", transient=True)
            )

    def take_connection(self) -> socket.socket | None:
        """The worker's connection to the reaper, once; the caller closes it."""
        connection, self._connection = self._connection, None
        return connection

    def decide(self) -> bool:
        """Call it before a stop. False if the reaper has decided that the job has succeeded: its events follow."""
        if self._outcome is None or self._request is None or not self._request.success or self._has_decided:
            return True
        try:
            os.eventfd_read(self._outcome)
        except BlockingIOError:
            return False
        self._has_decided = True
        return True

    def leave_undecided(self) -> None:
        """Undoes `decide`."""
        if self._has_decided and self._outcome is not None:
            os.eventfd_write(self._outcome, 1)
        self._has_decided = False

    def wait_for_status(self) -> int | None:
        """The command's wait status, after waiting for it for a limited time."""
        ends = time.monotonic() + _START_PATIENCE
        self.update()
        while self.status is None and (left := ends - time.monotonic()) > 0:
            self._epoll.poll(left)
            self.update()
        return self.status

    def set_deadline(self, deadline: float, *, with_start: bool = False) -> None:
        """Sets the time on the boot clock at which the reaper stops the job, if its supervisor has not.

        `with_start`: sends it with the next start, to save a wake-up.
        """
        if with_start:
            self._deadline = deadline
            return
        self._deadline = None
        writable = select.poll()
        writable.register(self._requests, select.POLLOUT)
        # Must not block on a suspended reaper that has thousands of these unread.
        if any(events & select.POLLOUT for _, events in writable.poll(0)):
            with contextlib.suppress(BrokenPipeError):
                os.write(self._requests, DEADLINE + TIME.pack(deadline))

    def cancel_start(self) -> None:
        """Ensures that a reaper with an unconfirmed start does not start the command later."""
        self.update()
        if self.job is None and not self.empty and self._report is not None and self._epoll.poll(_START_PATIENCE):
            self.update()  # it was about to
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
        """Like `processes` with statistics, at a fraction of the cost. Some may be missing."""
        if self._adopted is None:
            return walk_processes(self.pid, files)
        return [found for who in self.processes() if (found := stat(who.pid)) is not None and found.identity == who]

    def owns(self, pid: int) -> bool:
        """True if this process belongs to the job; cheaper than `processes()`."""
        if self._adopted is None:
            return descends(pid, self.pid) or (self.cgroup is not None and pid in self.cgroup.pids())
        return any(process.pid == pid for process in self.processes())

    def signal(self, signum: int) -> bool:
        """Signals the command's process only, once it runs. False if it has ended."""
        if self.job is None and not self.empty and self._report is not None:
            self._early_signals.append(signum)
            return True
        return self.job is not None and self.status is None and send(self.job, signum)

    def close(self) -> None:
        """Releases the reaper and cleans up. Live processes of the job are no longer tracked."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, EXIT)
        os.close(self._requests)
        if not self._collected:
            # A suspended reaper must be continued to exit.
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
        if self._outcome is not None:
            os.close(self._outcome)
        if self._connection is not None:
            self._connection.close()
        for end in self.output or ():
            os.close(end)
        if self.cgroup is not None:
            self.cgroup.remove()

    # For `Termination`

    def scan_processes(self) -> ProcessScan:
        """The living processes of the job."""
        return ProcessScan([], settled=True) if self.empty else self._tree.scan_processes()

    def kill(self) -> bool:
        """Kills the whole job at once, if it has a cgroup."""
        killed = self._tree.kill()
        self._killed_cgroup = self._killed_cgroup or killed
        return killed

    def update(self) -> None:
        """Processes all events, which set `job`, `status` and `empty`."""
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
        """Reads one message; the pipe stays readable while there are more."""
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
            self.empty, self.reported = True, bool(first)
            self._queue_event(Empty())
        elif kind == DEADLINE_PASSED:
            self._killed_cgroup = True
            self._queue_event(DeadlinePassed())
        elif kind == STOPPED and self._is_stopped():
            self._queue_event(Stopped(first))

    def _is_stopped(self) -> bool:
        """True if the command is still suspended; the terminal may have continued the group."""
        found = stat(self.job.pid) if self.job else None
        return found is not None and found.identity == self.job and found.state == "T"

    def _reaper_gone(self, report: int) -> None:
        """Handles the exit or death of the reaper."""
        self._epoll.unregister(report)
        os.close(report)
        self._report = None
        self._collect_reaper()
        if not self.empty:
            self._queue_event(ReaperKilled())
            self._adopt()

    def _collect_reaper(self) -> None:
        """Collects the reaper, which is about to exit. A suspended one is killed."""
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
        """Tracks the reaper's children, which the kernel has made children of this process."""
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
        """Writes the rest of the output in the pipe of a killed reaper."""
        if self.output is None or self._request is None or self._request.log is None:
            return
        log = LogWriter(self._request.log, self._request.log_limit)
        with contextlib.suppress(BlockingIOError):
            while True:
                log.write(os.read(self.output[0], 65536))
        log.close()

    def _watch(self, process: Identity, watched: dict[int, Identity]) -> None:
        """Makes `fileno()` readable at the end of a process."""
        with contextlib.suppress(OSError, AttributeError):
            pidfd = os.pidfd_open(process.pid)
            watched[pidfd] = process
            self._epoll.register(pidfd, select.EPOLLIN)

    def _collect(self) -> None:
        """Collects ended children that were adopted."""
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
    """True if this child ends in time. It is not collected."""
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
    """Like `_ends_within`, without pidfds."""
    ends = time.monotonic() + seconds
    try:
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > ends:
                return False
            time.sleep(_LEAVE_POLL)
    except ChildProcessError:
        return True
    return True
