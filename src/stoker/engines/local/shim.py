"""The shim: the process that supervises queued attempts one after another, and outlives its worker.

It is forked in advance, runs each attempt like `stoker run`, and stays until the queue has the result. The worker
renews the lease and takes the result; without a worker the shim talks to the queue itself. If the lease cannot be
renewed, the shim stops the job before another machine may take it.
"""

import contextlib
import errno
import math
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stoker.backoff import Backoff
from stoker.engines.attempt import CANCELLED, AttemptResult, lease_clock, result_of
from stoker.engines.delivery import DetachedDelivery
from stoker.engines.execution import STOP_SIGNALS, STOPPED, Execution, redirect_stderr
from stoker.engines.local.record import (
    SHIM_NAME,
    AttemptClaimed,
    AttemptProcesses,
    LeaseRenewed,
    LocalAttemptRecord,
    LocalAttemptSpec,
    ResultRecorded,
    ShimChannel,
    ShimMessage,
    ShimReady,
    StartAttempt,
    StopAttempt,
)
from stoker.errors import StokerError
from stoker.gpus.prober import Prober
from stoker.gpus.spawn import forked
from stoker.procfs import identify
from stoker.runs.loop import is_from_job
from stoker.runs.processes.reaper import LaunchRequest, Reaper, fork_reaper
from stoker.runs.processes.signals import FORWARDED, Received, SignalStream
from stoker.runs.processes.syscalls import BootTimer, set_name
from stoker.runs.record import Status
from stoker.runs.run import record_orphan_stop
from stoker.runs.supervisor import StopRequest, launch_request, tagged

# What `result_of` says of a command that has exited with 0.
_SUCCESS: Final = ShimChannel.encoded(AttemptResult("succeeded", 0, ""))
# The delay before another try to listen for a worker.
_LISTEN_EVERY: Final = 1.0
# The delay before another try to fork on a machine short of processes or memory.
_FORK_EVERY: Final = 0.5
# A share of the lease. A worker renews every quarter of it; after two missed renewals the shim renews it itself.
_RENEW_ALONE_AT: Final = 0.5
# A timer fires if the lease ended while the machine was suspended. If the timer fails, this bounds the delay.
_LONGEST_SLEEP: Final = 15.0
# The delay between two tries to reach the queue, doubled each time.
_FIRST_PAUSE: Final = 0.5
_LAST_PAUSE: Final = 30.0
# A share of the lease, which leaves time for several tries before it ends.
_PAUSE_SHARE: Final = 1 / 16
# A shutdown kills the remaining processes soon after this.
_LAST_TRIES: Final = 10.0
# A worker records a result at once, unless it hangs or its database is away.
_RECORDED_WITHIN: Final = 60.0
# After this the shim gives up; the next worker finds the result on disk.
_LONGEST_DELIVERY: Final = 86400.0


def run_attempts(connection: socket.socket) -> None:
    """Runs attempts one after another, until the worker closes the connection."""
    set_name(SHIM_NAME)
    channel: ShimChannel | None = ShimChannel(connection)
    signals = SignalStream(FORWARDED)
    execution: LocalExecution | None = None

    def helpers() -> tuple[int, ...]:
        return execution.helpers() if execution is not None else ()

    reaper = fork_reaper(orphaned=record_orphan_stop, helpers=helpers, keeps_output=True, has_fast_path=True)
    processes = _processes(reaper)
    timer = BootTimer()
    redirect_stderr(reaper)
    # A plain dictionary: every lookup in `os.environ` decodes again.
    environment = dict(os.environ)
    while channel is not None and (start := _next_attempt(channel, signals, processes, reaper)) is not None:
        record, is_claimed = LocalAttemptRecord(Path(start.directory)), start.is_claimed
        try:
            if (attempt_spec := start.attempt_spec()) is None:
                raise OSError(errno.EIO, "its attempt spec cannot be read")
            execution = LocalExecution(record, attempt_spec, channel, signals, reaper, timer, environment)
            until, is_ordered = attempt_spec.lease_until, False
            if not is_claimed:
                execution.prepare()
                if (claimed := _await_claim(channel, signals)) is None:
                    break  # nobody has learned of it
                is_claimed, until, is_ordered = True, claimed.lease_until, claimed.is_ordered
            execution.own(until, is_ordered=is_ordered)
        except OSError as error:
            if is_claimed or _await_claim(channel, signals) is not None:
                _report_not_started(record, channel, error)
            break
        execution.run()
        channel = execution.close()
        if not reaper.reusable:
            break
    reaper.close()


def _report_not_started(record: LocalAttemptRecord, channel: ShimChannel, error: OSError) -> None:
    """Reports the failure to the worker, and writes it to disk in case that worker was killed."""
    status = Status(state="ended", ending="not started", reason=f"It was not started: {error.strerror}.")
    with contextlib.suppress(StokerError):
        record.write_status(status)
    channel.send(result_of(status))


def _next_attempt(
    channel: ShimChannel, signals: SignalStream, processes: AttemptProcesses, reaper: Reaper
) -> StartAttempt | None:
    """Reports ready and waits for an attempt; None if none will come."""
    ready, connection = ShimReady(processes), reaper.take_connection()
    if connection is None:
        is_sent = channel.send(ready)
    else:
        with connection:
            is_sent = channel.send_with(ready, connection.fileno())
    if not is_sent:
        return None
    message = _next_message(channel, signals)
    while message is not None and not isinstance(message, StartAttempt):
        message = _next_message(channel, signals)
    return message


def _await_claim(channel: ShimChannel, signals: SignalStream) -> AttemptClaimed | None:
    """Waits for the claim of a prepared attempt; None when there will be none, or the worker is gone."""
    message = _next_message(channel, signals)
    return message if isinstance(message, AttemptClaimed) else None


def _next_message(channel: ShimChannel, signals: SignalStream) -> ShimMessage | None:
    """None when none will come, or this process is asked to end."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.register(signals.fileno(), select.POLLIN)
    while channel.open:
        poll.poll()
        if any(received.signal in STOP_SIGNALS for received in signals.read()):
            return None
        if (message := channel.receive()) is not None:
            return message
    return None


def _processes(reaper: Reaper) -> AttemptProcesses:
    me, its = identify(os.getpid()), identify(reaper.pid)
    if me is None or its is None:
        raise StokerError("the reaper was killed before there was a job")
    return AttemptProcesses(me, its, str(reaper.cgroup.path) if reaper.cgroup else None)


class LocalExecution(Execution):
    """One attempt in a shim, which serves its worker and holds the lease."""

    _record: LocalAttemptRecord

    def __init__(
        self,
        record: LocalAttemptRecord,
        attempt_spec: LocalAttemptSpec,
        channel: ShimChannel,
        signals: SignalStream,
        reaper: Reaper,
        timer: BootTimer,
        environment: Mapping[str, str],
    ) -> None:
        """`environment`: the worker's."""
        prober = Prober(attempt_spec.plan.source, deadline=attempt_spec.plan.deadline, start=forked, sharing="start")
        of_job = dict(environment)
        for name in attempt_spec.without:
            of_job.pop(name, None)
        of_job |= attempt_spec.environment
        super().__init__(record, attempt_spec, signals, reaper, prober, attempt_spec.host, of_job)
        if reaper.cgroup is not None:
            # Set even without requests, since the previous job may have left limits.
            reaper.cgroup.limit(attempt_spec.request.cpus, attempt_spec.request.ram)
        self._channel: ShimChannel | None = channel
        self._until = -math.inf
        self._delivery: DetachedDelivery | None = None
        longest_pause = min(_LAST_PAUSE, attempt_spec.lease * _PAUSE_SHARE)
        self._backoff = Backoff(_FIRST_PAUSE, longest_pause)
        self._next_delivery = -math.inf
        self._recorded = False
        self._listener: socket.socket | None = None
        self._listen_at = -math.inf
        self._epoll = select.epoll()
        self._epoll.register(channel.fileno(), select.EPOLLIN)
        self._timer = timer
        self._epoll.register(timer.fileno(), select.EPOLLIN | select.EPOLLET)
        self._directory = -1
        self._request: LaunchRequest | None = None

    def prepare(self) -> None:
        """What can be done before the attempt is claimed, for one without a batch size to find or code to unpack."""
        spec, log = self._attempt_spec, str(self._record.output)
        environment = tagged(self._environment, self._record)
        request = launch_request(spec.plan, self._record, environment, self._signals, log, spec.log_limit)
        self._request = request._replace(id=bytes.fromhex(spec.attempt), success=_SUCCESS)
        self._reaper.prepare(self._request)

    def own(self, until: float, *, is_ordered: bool = False) -> None:
        """The attempt is claimed, and its directory there. `until`: the end of its lease, on `lease_clock()`.

        `is_ordered`: the worker orders the start from the reaper.
        """
        spec = self._attempt_spec
        is_next = spec.fitting is None and spec.commit is None and spec.code is None
        self._tell_reaper(until, with_start=is_next)
        if self._request is not None:
            self._reaper.start(self._request, waits=False, is_ordered=is_ordered)
            self._is_launched = True
            # The reaper first: it may have been woken on this core.
            os.sched_yield()
        self._hold_until(until, is_told=True)
        with contextlib.suppress(OSError):
            self._directory = self._record.hold_open()

    def close(self) -> ShimChannel | None:
        """Closes everything except the connection to the worker, and returns that if there is one."""
        self._epoll.close()
        if self._listener is not None:
            self._listener.close()
        if self._directory >= 0:
            os.close(self._directory)
        return self._channel

    def helpers(self) -> tuple[int, ...]:
        delivery = () if self._delivery is None else (self._delivery.pid,)
        return (*super().helpers(), *delivery)

    # The controller of the supervisor

    def fileno(self) -> int:
        return self._epoll.fileno()

    def max_grace(self) -> float:
        return max(0.0, self._until - self._attempt_spec.margin - lease_clock())

    def due(self) -> float:
        """The due time in monotonic seconds, which stop while the machine is suspended."""
        soonest = self._stop_at() if self._delivery is not None else min(self._stop_at(), self._delivery_at())
        due = time.monotonic() + min(soonest - lease_clock(), _LONGEST_SLEEP)
        if self._started and self._listener is None:
            due = min(due, self._listen_at)
        return due if self._delivery is None else min(due, self._delivery.due())

    def poll(self) -> StopRequest | None:
        request = self._receive()
        if request is not None:
            return request
        if lease_clock() >= self._stop_at():
            return StopRequest(
                "lease", "The queue could not be reached for so long that another worker may run the job.", STOPPED
            )
        if self._delivery is None and lease_clock() >= self._delivery_at():
            self._send_delivery()
        return None

    def on_signal(self, received: Received) -> StopRequest | None:
        if received.signal not in STOP_SIGNALS or is_from_job(received, self._reaper):
            return None
        name = signal.Signals(received.signal).name
        return StopRequest("machine", f"The job's supervisor was asked to end by {name}.", STOPPED)

    def on_first_start(self) -> None:
        """Listens for the next worker. A full disk delays that until a later try."""
        self._listen()

    def _listen(self) -> None:
        """Listens for the next worker, unless a try has failed just now.

        Most results are recorded by this worker at once: for the rest of the attempt there is no next one.
        """
        is_last = self._result is not None and self._channel is not None
        if not self._started or is_last or self._listener is not None or time.monotonic() < self._listen_at:
            return
        try:
            listener = self._record.listen()
        except OSError:
            self._listen_at = time.monotonic() + _LISTEN_EVERY
            return
        self._listener = listener
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def announce(self, result: AttemptResult) -> None:
        if self._reaper.reported:
            return
        if self._channel is not None and not self._channel.send(result):
            self._lose_worker()

    # The lease

    def _stop_at(self) -> float:
        return self._until - self._attempt_spec.stop_before_end

    def _delivery_at(self) -> float:
        return max(self._until - self._attempt_spec.lease * _RENEW_ALONE_AT, self._next_delivery)

    def _hold_until(self, moment: float, *, is_told: bool = False) -> None:
        """Sets the end of the lease: -inf once the queue has given the job up. `is_told`: the reaper knows."""
        self._until = moment
        self._timer.ring_at(self._stop_at())
        if not is_told:
            self._tell_reaper(moment)

    def _tell_reaper(self, moment: float, *, with_start: bool = False) -> None:
        """The reaper stops the job if this process hangs or is suspended without a worker.

        `with_start`: sends the deadline together with the start of the job, its next message.
        """
        self._reaper.set_deadline(self._attempt_spec.reaper_deadline(moment), with_start=with_start)

    def _send_delivery(self) -> None:
        try:
            self._delivery = DetachedDelivery(self._record, self._attempt_spec, self._result)
        except OSError:
            self._next_delivery = lease_clock() + _FORK_EVERY
            return
        self._epoll.register(self._delivery.fileno(), select.EPOLLIN)

    def _receive(self) -> StopRequest | None:
        """Handles all messages and returns the last stop request."""
        request: StopRequest | None = None
        for descriptor, _ in self._epoll.poll(0):
            if self._listener is not None and descriptor == self._listener.fileno():
                self._accept_worker(self._listener)
            elif self._delivery is not None and descriptor == self._delivery.fileno():
                request = self._take_answer(self._delivery) or request
            elif self._channel is not None and descriptor == self._channel.fileno():
                request = self._receive_from_worker(self._channel) or request
        if self._delivery is not None and time.monotonic() >= self._delivery.due():
            self._epoll.unregister(self._delivery.fileno())
            self._delivery.give_up()
            self._delivery = None
        self._listen()
        return request

    def _take_answer(self, delivery: DetachedDelivery) -> StopRequest | None:
        self._epoll.unregister(delivery.fileno())
        answer = delivery.answer()
        self._delivery = None
        if answer.problem is not None:
            self._next_delivery = lease_clock() + self._backoff.next()
            return None
        self._backoff.reset()
        if delivery.brings_outcome:
            self._recorded = True
            return None
        if not answer.alive:
            self._hold_until(-math.inf)
            return StopRequest("lease", "The queue had given the job up, and another worker may run it.", STOPPED)
        self._hold_until(max(self._until, delivery.begun + self._attempt_spec.lease))
        return StopRequest("cancelled", CANCELLED, STOPPED) if answer.cancel else None

    # The worker

    def _receive_from_worker(self, channel: ShimChannel) -> StopRequest | None:
        request: StopRequest | None = None
        while (message := channel.receive()) is not None:
            request = self._handle(message) or request
        if not channel.open:
            self._lose_worker()
        return request

    def _handle(self, message: ShimMessage) -> StopRequest | None:
        match message:
            case LeaseRenewed(until=until):
                self._hold_until(max(self._until, until))
            case ResultRecorded():
                self._recorded = True
            case StopAttempt(ending=ending, reason=reason):
                if ending == "lease":
                    self._hold_until(-math.inf)
                return StopRequest(ending, reason, STOPPED)
        return None

    def _accept_worker(self, listener: socket.socket) -> None:
        """Accepts a new worker, which replaces the previous one."""
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        self._lose_worker()
        self._channel = ShimChannel(connection)
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        if self._result is not None:
            self._channel.send(self._result)

    def _lose_worker(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(self._channel.fileno())
            self._channel.close()
            self._channel = None

    # The result

    def wait_until_recorded(self) -> None:
        """Leaves delivery to the worker. Without one, or if it fails, the shim delivers the result itself."""
        trusts_worker_until = lease_clock() + _RECORDED_WITHIN
        gives_up_at = lease_clock() + _LONGEST_DELIVERY
        self._backoff.reset()
        self._next_delivery = -math.inf
        while lease_clock() < gives_up_at:
            written = self._write_outcome()
            if any(received.signal in STOP_SIGNALS for received in self._signals.read()):
                # The machine shuts down; the next worker finds the result on disk.
                if written:
                    break
                trusts_worker_until, gives_up_at = -math.inf, min(gives_up_at, lease_clock() + _LAST_TRIES)
            self._receive()
            # Without its directory nothing can be delivered later.
            if self._recorded or (lease_clock() >= self._until and not self._record.directory.exists()):
                break
            # A suspended worker does not renew the lease, and must not cause a second run of the job.
            trusts_until = min(trusts_worker_until, self._until - self._attempt_spec.lease * _RENEW_ALONE_AT)
            alone = self._channel is None or lease_clock() >= trusts_until
            if alone and self._delivery is None and lease_clock() >= self._next_delivery:
                self._send_delivery()
            due = gives_up_at if alone else trusts_until
            if self._delivery is not None:
                due = min(due, lease_clock() + self._delivery.due() - time.monotonic())
            elif alone:
                due = min(due, self._next_delivery)
            select.select([self._epoll.fileno()], [], [], min(max(0.0, due - lease_clock()), _LONGEST_SLEEP))
        if self._delivery is not None:
            self._delivery.give_up()  # a worker was faster
            self._delivery = None
