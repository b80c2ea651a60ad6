"""The supervisor of a queued job, held ready before there is one: a process of its own that outlives its worker.

It is given an attempt, runs it as `stoker run` would, and stays until the queue has the outcome. A worker that is
there renews the lease and takes the outcome; when there is none, the attendant goes to the queue itself. When the
lease cannot be renewed, the job is stopped before another machine may take it.
"""

import contextlib
import errno
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from stoker.actions.action import facts_of
from stoker.actions.perform import perform_detached
from stoker.engines.attempt import AttemptResult, lease_clock, result_of
from stoker.engines.delivery import DetachedDelivery
from stoker.engines.fitting import BatchSizeFit
from stoker.engines.local.messages import (
    AttemptRunning,
    LeaseRenewed,
    Message,
    ResultRecorded,
    ShimChannel,
    ShimReady,
    StartAttempt,
    StopAttempt,
)
from stoker.engines.local.record import SHIM_NAME, AttemptProcesses, LocalAttemptRecord, LocalAttemptSpec
from stoker.errors import StokerError
from stoker.fit.model import Fitted, smaller
from stoker.gpus.prober import Prober
from stoker.gpus.spawn import forked
from stoker.logs.reader import read_tail
from stoker.logs.writer import LogWriter
from stoker.procfs import identify
from stoker.rules.registry import in_words
from stoker.rules.rule import Verdict
from stoker.runs.loop import helpers_of, is_from_job
from stoker.runs.plan import Plan
from stoker.runs.processes.reaper import Reaper, fork_reaper
from stoker.runs.processes.signals import FORWARDED, Received, SignalStream
from stoker.runs.processes.syscalls import BootTimer, set_name
from stoker.runs.processes.termination import wait_until_empty
from stoker.runs.record import Ending, Status
from stoker.runs.run import record_orphan_stop, spec_of
from stoker.runs.supervisor import StopRequest, Supervisor
from stoker.units import format_duration

# Between two tries to listen for a worker, where that could not be done when the job began.
_LISTEN_EVERY: Final = 1.0
# A worker has just written it: what cannot be read of it is a matter of a moment.
_READS: Final = 10
_READ_EVERY: Final = 0.1
# Between two tries to fork, where the machine is short of processes or memory.
_FORK_EVERY: Final = 0.5
# By the signal's own name for a shell: the job was told to end, and did.
_STOPPED: Final = 128 + signal.SIGTERM
# What means "end" to a supervisor that nobody types at: a machine that shuts down, or its administrator.
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A worker renews every quarter of a lease; when it has missed two of them the attendant goes itself.
_OWN_RENEWAL: Final = 0.5
# A timer rings when a machine wakes up whose lease ended while it slept. Should it fail, that is noticed so much later.
_LONGEST_SLEEP: Final = 5.0
# A fitted job that fails in its first minutes and does not say why most likely met a larger batch than its probes did.
_FIRST_MINUTES: Final = 600.0
_AGAIN: Final = ", and is started again with a batch of "
# The message that says so is followed by the tracebacks of other ranks.
_OOM_WITHIN: Final = 256 * 1024
# Between two tries to reach the queue, doubled from try to try.
_FIRST_PAUSE: Final = 0.5
_LAST_PAUSE: Final = 30.0
# Of the lease: between the moment when the attendant goes itself and the end there are several tries.
_PAUSE_SHARE: Final = 1 / 16
# It comes at once, unless the reaper is held up or something of the job cannot be killed.
_LAST_WORDS_WITHIN: Final = 10.0
# A worker that is there records an outcome at once, unless its database is away or it hangs.
_RECORDED_WITHIN: Final = 60.0
# After that nobody waits for it any more; the next worker finds it on disk.
_LONGEST_DELIVERY: Final = 86400.0


def attend(line: socket.socket) -> None:
    """The life of an attendant: one job after another, until its worker has no more for it or is gone."""
    set_name(SHIM_NAME)
    channel: ShimChannel | None = ShimChannel(line)
    signals = SignalStream(FORWARDED)
    supervision: _Supervision | None = None

    def helpers() -> tuple[int, ...]:
        return supervision.helpers() if supervision is not None else ()

    reaper = fork_reaper(orphaned=record_orphan_stop, helpers=helpers, keeps_output=True)
    processes = _processes(reaper)
    timer = BootTimer()
    _speak_into(reaper)
    while channel is not None and (directory := _next_directory(channel, signals, processes)) is not None:
        record = LocalAttemptRecord(Path(directory))
        try:
            supervision = _Supervision(record, _read(record), channel, signals, reaper, timer)
        except OSError as error:
            _decline(record, channel, error)
            break
        channel = supervision.run()
        if not reaper.reusable:
            break
    reaper.close()


def _read(record: LocalAttemptRecord) -> LocalAttemptSpec:
    """What is to be run. Raises OSError when that cannot be read, although it was tried for a while."""
    for _ in range(_READS):
        if (attempt_spec := record.attempt_spec()) is not None:
            return attempt_spec
        time.sleep(_READ_EVERY)
    raise OSError(errno.EIO, "what it is to run cannot be read")


def _decline(record: LocalAttemptRecord, channel: ShimChannel, error: OSError) -> None:
    """Nothing was started: for the worker, and on disk for the next one should this one have been killed."""
    status = Status(state="ended", ending="not started", reason=f"It was not started: {error.strerror}.")
    with contextlib.suppress(StokerError):
        record.write_status(status)
    channel.send(result_of(status))


def _next_directory(channel: ShimChannel, signals: SignalStream, processes: AttemptProcesses) -> str | None:
    """Says that there is nothing to do here, and waits for something; None when nothing will come."""
    if not channel.send(ShimReady(processes)):
        return None
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.register(signals.fileno(), select.POLLIN)
    while channel.open:
        poll.poll()
        if any(received.signal in _ENDING for received in signals.read()):
            return None
        message = channel.receive()
        if isinstance(message, StartAttempt):
            return message.directory
    return None


def _processes(reaper: Reaper) -> AttemptProcesses:
    me, its = identify(os.getpid()), identify(reaper.pid)
    if me is None or its is None:
        raise StokerError("the reaper of the next job was killed before there was one")
    return AttemptProcesses(
        (me.pid, me.started), (its.pid, its.started), str(reaper.cgroup.path) if reaper.cgroup else None
    )


def _speak_into(reaper: Reaper) -> None:
    """What the supervisor says belongs into the job's output, as it does on a terminal."""
    if reaper.output is not None:
        # Opened anew, as waiting or not is a matter of the opening: the job's own end must go on waiting.
        mine = os.open(f"/proc/self/fd/{reaper.output[1]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.dup2(mine, 2)
        os.close(mine)


class _CalledOffError(Exception):
    """Somebody wants the job stopped before it runs, or its lease is over."""

    def __init__(self, order: StopRequest) -> None:
        super().__init__(order.reason)
        self.order = order


class _Supervision:
    """One attempt, from its assignment to the moment the queue has its outcome. The controller of its supervisor."""

    def __init__(
        self,
        record: LocalAttemptRecord,
        attempt_spec: LocalAttemptSpec,
        channel: ShimChannel,
        signals: SignalStream,
        reaper: Reaper,
        timer: BootTimer,
    ) -> None:
        self._record = record
        self._attempt_spec = attempt_spec
        self._channel: ShimChannel | None = channel
        self._signals = signals
        self._reaper = reaper
        self._until = attempt_spec.lease_until
        self._delivery: DetachedDelivery | None = None
        self._pause = _FIRST_PAUSE
        self._next_delivery = -math.inf
        self._prober = Prober(attempt_spec.plan.source, deadline=attempt_spec.plan.deadline, start=forked)
        self._over: AttemptResult | None = None
        self._batch_size: int | None = None
        """What was found for a job that is fitted."""
        self._retries_oom = 0
        self._ran_out = False
        self._how_it_failed = ""
        self._ran_out_with = ""
        self._run_at = 0.0
        self._kills: int | None = None
        """How often the kernel had killed for want of memory when the run began."""
        self._last = Status()
        self._stopped_by: Verdict | None = None
        """What the last run came to."""
        self._recorded = False
        self._unwritten: Status | None = None
        """How it ended, as long as the disk does not take that."""
        self._begun = False
        self._listener: socket.socket | None = None
        self._listen_at = -math.inf
        self._epoll = select.epoll()
        self._epoll.register(channel.fileno(), select.EPOLLIN)
        self._timer = timer
        self._epoll.register(timer.fileno(), select.EPOLLIN | select.EPOLLET)
        self._hold_until(attempt_spec.lease_until)
        self._place = -1
        with contextlib.suppress(OSError):
            self._place = record.hold_open()

    def helpers(self) -> tuple[int, ...]:
        delivery = () if self._delivery is None else (self._delivery.pid,)
        return (*helpers_of(self._prober), *delivery)

    def run(self) -> ShimChannel | None:
        """Runs the job and sees to it that the queue learns of its end. The line to the worker, if there is one."""
        try:
            with self._plan() as plan:
                self._supervise(plan)
                # Before its snapshot is removed, which may take long.
                self._wait_until_recorded()
                self._act(plan)
        except _CalledOffError as called_off:
            self._end_with(called_off.order.ending, called_off.order.reason, called_off.order.code)
            self._wait_until_recorded()
        except (StokerError, OSError) as error:
            self._give_up(error)
            self._wait_until_recorded()
        self._epoll.close()
        if self._listener is not None:
            self._listener.close()
        if self._place >= 0:
            os.close(self._place)
        return self._channel

    def _act(self, plan: Plan) -> None:
        """Starts the actions that the job asked for, once the queue knows that a rule stopped it."""
        if self._stopped_by is None or not plan.then:
            return
        facts = facts_of(self._stopped_by, in_words(plan.policies), time.monotonic(), self._attempt_spec.host)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            perform_detached(plan.then, facts)

    @contextlib.contextmanager
    def _plan(self) -> Iterator[Plan]:
        """The plan, in its snapshot of the code if it asked for one."""
        plan, commit = self._attempt_spec.plan, self._attempt_spec.commit
        if commit is None:
            yield plan
            return
        from stoker.engines.local.worktree import Worktree

        place = self._record.directory / "code"
        worktree = Worktree.create(plan.directory or "/", commit, place, self._heed_before_start)
        try:
            yield msgspec.structs.replace(plan, directory=worktree.directory)
        finally:
            worktree.remove()

    def _supervise(self, plan: Plan) -> None:
        assigned = self._attempt_spec
        environment = {name: value for name, value in os.environ.items() if name not in assigned.without}
        environment |= assigned.environment
        if assigned.fitting is None:
            self._run(plan, environment)
        else:
            self._fit_and_run(assigned.fitting, plan, environment)

    def _fit_and_run(self, fitting: BatchSizeFit, plan: Plan, environment: dict[str, str]) -> None:
        """Finds the size, and makes the real run with it; smaller again when it runs out of memory all the same."""
        self.on_started()
        home = self._record.directory.parent.parent
        place = self._record.directory / "probes"
        fitted, key = fitting.find(
            plan,
            self._attempt_spec.gpus,
            # By this mark the next worker finds what is left of a probe whose processes were killed.
            environment | {"STOKER_RUN_DIR": str(self._record.directory)},
            place,
            home,
            self._prober,
            self._note_in_output,
            self._heed_before_start,
        )
        self._keep_fit(fitted)
        size: int | None = fitted.size
        self._retries_oom = fitting.spec.retries_oom
        while size is not None:
            self._batch_size, self._ran_out = size, False
            accumulate = fitted.accumulate if size == fitted.size else fitting.accumulate_at(size)
            self._run(fitting.plan_at(plan, size, accumulate), fitting.environment_at(environment, size))
            size = smaller(size, fitting.spec.search_options) if self._ran_out and self._reaper.reusable else None
            if size is not None:
                failed = self._batch_size
                self._ran_out_with = f"as it {self._how_it_failed} with {failed}"
                self._note_in_output(f"it {self._how_it_failed}{_AGAIN}{size}")
                # The next job like this one need not find it out for itself.
                accumulate = fitting.accumulate_at(size)
                lasted = format_duration(round(lease_clock() - self._run_at))
                again = f"a batch of {failed} {self._how_it_failed} after {lasted}, and was started again smaller"
                note = "; ".join(filter(None, [fitted.note, again]))
                fitted = msgspec.structs.replace(fitted, size=size, accumulate=accumulate, note=note)
                self._keep_fit(fitted)
                fitting.remember(home, key, fitted, failed, self._note_in_output)
        if self._over is None:
            # It ran out of memory, and nothing smaller is left, or nobody to start it.
            self._retries_oom = 0
            self.on_ended(self._last)

    def _keep_fit(self, fitted: Fitted) -> None:
        with contextlib.suppress(OSError):
            # For people who want to see how; a disk that is full is no reason not to run it.
            self._record.write_fit(fitted)

    def _note_in_output(self, sentence: str) -> None:
        """Between runs nobody keeps what is said: it is written where the job's own words go."""
        log = LogWriter(self._record.output, self._attempt_spec.log_limit)
        log.write(f"stoker: {sentence}\n".encode(errors="replace"))
        log.close()

    def _heed_before_start(self) -> None:
        """Whoever may stop the job may stop what comes before it; the lease is held meanwhile."""
        for received in self._signals.read():
            if (order := self.on_signal(received)) is not None:
                raise _CalledOffError(order)
        if (order := self.poll()) is not None:
            raise _CalledOffError(order)

    def _run(self, plan: Plan, environment: dict[str, str]) -> None:
        self._heed_before_start()
        if self._batch_size is not None:
            from stoker.fit.oom import host_kills

            self._run_at, self._kills = lease_clock(), host_kills()
        supervisor = Supervisor(plan, self._record, self._prober, environment, self._signals, self._reaper, self)
        supervisor.run(str(self._record.output), self._attempt_spec.log_limit)
        self._stopped_by = supervisor.stopped_by
        self._last = supervisor.status
        self._unwritten = supervisor.status if supervisor.unwritten else None
        # The output is complete when the reaper has seen the last process end.
        wait_until_empty(self._reaper, _LAST_WORDS_WITHIN)

    def _give_up(self, error: StokerError | OSError) -> None:
        """Before the job was started, or after it had ended: a run never raises what happens in between."""
        if self._over is not None:
            return
        if isinstance(error, StokerError):
            self._end_with("could not start", f"{error}.", 125)
        else:
            why = (error.strerror or type(error).__name__).lower()
            self._end_with("not started", f"It could not be started on {self._attempt_spec.host}: {why}.", 125)

    def _end_with(self, ending: Ending, sentence: str, code: int) -> None:
        """It ended before there was a run."""
        self._unwritten = Status(state="ended", ending=ending, reason=sentence, exit_code=code, ended=time.time())
        self.on_ended(self._unwritten)
        self._write_outcome()

    def _write_outcome(self) -> None:
        """For whoever comes should this process be killed before the queue knows."""
        if self._unwritten is not None:
            with contextlib.suppress(StokerError):
                self._record.write_status(self._unwritten)
                self._unwritten = None

    # The controller of the supervisor

    def fileno(self) -> int:
        return self._epoll.fileno()

    def max_grace(self) -> float:
        return max(0.0, self._until - self._attempt_spec.margin - lease_clock())

    def due(self) -> float:
        """On the supervisor's clock, which stands still while the machine sleeps."""
        soonest = self._stop_at() if self._delivery is not None else min(self._stop_at(), self._delivery_at())
        due = time.monotonic() + min(soonest - lease_clock(), _LONGEST_SLEEP)
        if self._begun and self._listener is None:
            due = min(due, self._listen_at)
        return due if self._delivery is None else min(due, self._delivery.due())

    def poll(self) -> StopRequest | None:
        order = self._hear()
        if order is not None:
            return order
        if lease_clock() >= self._stop_at():
            return StopRequest(
                "lease", "The queue could not be reached for so long that another may run the job.", _STOPPED
            )
        if self._delivery is None and lease_clock() >= self._delivery_at():
            self._send_delivery()
        return None

    def on_signal(self, received: Received) -> StopRequest | None:
        if received.signal not in _ENDING or is_from_job(received, self._reaper):
            return None
        name = signal.Signals(received.signal).name
        return StopRequest("machine", f"The job's supervisor was asked to end by {name}.", _STOPPED)

    def on_started(self) -> None:
        """A worker that comes later finds the way here; a person finds what was asked for.

        A disk that takes neither costs no job: the one is tried again here, the other with the next status.
        """
        if self._begun:
            return
        self._begun = True
        self._listen()
        with contextlib.suppress(StokerError, OSError):
            self._record.write_spec(spec_of(self._attempt_spec.plan, self._record))

    def _listen(self) -> None:
        if not self._begun or self._listener is not None or time.monotonic() < self._listen_at:
            return
        try:
            listener = self._record.listen()
        except OSError:
            self._listen_at = time.monotonic() + _LISTEN_EVERY
            return
        self._listener = listener
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def on_ended(self, status: Status) -> None:
        if self._is_out_of_memory(status):
            self._ran_out = True
            self._retries_oom -= 1
            return
        result = result_of(status)
        if self._batch_size is not None:
            size = ", ".join(filter(None, [f"batch size {self._batch_size}", self._ran_out_with]))
            reason = "; ".join(filter(None, [result.reason, size]))
            result = AttemptResult(result.outcome, result.exit_code, reason)
        self._over = result
        if self._channel is not None and not self._channel.send(self._over):
            self._lose_worker()

    def _is_out_of_memory(self, status: Status) -> bool:
        """Whether it failed for want of GPU memory, and may be started again smaller."""
        if self._retries_oom <= 0 or status.ending != "exited" or not status.exit_code:
            return False
        from stoker.fit.oom import host_kills, is_out_of_memory, is_silent, said_elsewhere, was_killed

        # What the run before has said is of no account.
        output = read_tail(self._record.output, _OOM_WITHIN).rpartition(_AGAIN)[2]
        is_host = self._attempt_spec.plan.source.startswith("rss")
        # Its probes ran with less: what a library does not support now is the size.
        if is_out_of_memory(output, status.exit_code, smaller_ran=True, host=is_host) is not None:
            self._how_it_failed = "ran out of memory"
            return True
        self._how_it_failed = "probably ran out of memory"
        if was_killed(status.exit_code):
            kills = host_kills()
            return kills is not None and self._kills is not None and kills > self._kills
        if said_elsewhere(output) is not None:
            return True
        # It ran as a probe, and now it fails early and without a word: validation and long sequences come later.
        return lease_clock() - self._run_at < _FIRST_MINUTES and is_silent(output)

    # The lease

    def _stop_at(self) -> float:
        return self._until - self._attempt_spec.stop_before_end

    def _delivery_at(self) -> float:
        return max(self._until - self._attempt_spec.lease * _OWN_RENEWAL, self._next_delivery)

    def _hold_until(self, moment: float) -> None:
        """The lease ends then; long ago, when the queue has given the job up."""
        self._until = moment
        self._timer.ring_at(self._stop_at())
        # Should this process be stopped, or hang, while there is no worker.
        self._reaper.set_deadline(moment - self._attempt_spec.margin / 2)

    def _send_delivery(self) -> None:
        try:
            self._delivery = DetachedDelivery(self._record, self._attempt_spec, self._over)
        except OSError:
            self._next_delivery = lease_clock() + _FORK_EVERY
            return
        self._epoll.register(self._delivery.fileno(), select.EPOLLIN)

    def _hear(self) -> StopRequest | None:
        """Whatever has come; the last order in it."""
        order: StopRequest | None = None
        self._listen()
        for descriptor, _ in self._epoll.poll(0):
            if self._listener is not None and descriptor == self._listener.fileno():
                self._accept_worker(self._listener)
            elif self._delivery is not None and descriptor == self._delivery.fileno():
                order = self._take_answer(self._delivery) or order
            elif self._channel is not None and descriptor == self._channel.fileno():
                order = self._hear_worker(self._channel) or order
        if self._delivery is not None and time.monotonic() >= self._delivery.due():
            self._epoll.unregister(self._delivery.fileno())
            self._delivery.give_up()
            self._delivery = None
        return order

    def _take_answer(self, delivery: DetachedDelivery) -> StopRequest | None:
        self._epoll.unregister(delivery.fileno())
        answer = delivery.answer()
        self._delivery = None
        if answer.problem is not None:
            self._next_delivery = lease_clock() + self._pause
            self._pause = min(self._pause * 2, _LAST_PAUSE, self._attempt_spec.lease * _PAUSE_SHARE)
            return None
        self._pause = _FIRST_PAUSE
        if delivery.brings_outcome:
            self._recorded = True
            return None
        if not answer.alive:
            self._hold_until(-math.inf)
            return StopRequest("lease", "The queue had given the job up, and another may run it.", _STOPPED)
        self._hold_until(max(self._until, delivery.begun + self._attempt_spec.lease))
        return StopRequest("cancelled", "It was cancelled.", _STOPPED) if answer.cancel else None

    # The worker

    def _hear_worker(self, channel: ShimChannel) -> StopRequest | None:
        order: StopRequest | None = None
        while (message := channel.receive()) is not None:
            order = self._understand(message) or order
        if not channel.open:
            self._lose_worker()
        return order

    def _understand(self, message: Message) -> StopRequest | None:
        match message:
            case LeaseRenewed(until=until):
                self._hold_until(max(self._until, until))
            case ResultRecorded():
                self._recorded = True
            case StopAttempt(ending=ending, reason=reason):
                if ending == "lease":
                    self._hold_until(-math.inf)
                return StopRequest(ending, reason, _STOPPED)
        return None

    def _accept_worker(self, listener: socket.socket) -> None:
        """A worker that was started later: from now on it is the one."""
        try:
            line, _ = listener.accept()
        except OSError:
            return
        self._lose_worker()
        self._channel = ShimChannel(line)
        self._epoll.register(line.fileno(), select.EPOLLIN)
        self._channel.send(AttemptRunning() if self._over is None else self._over)

    def _lose_worker(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(self._channel.fileno())
            self._channel.close()
            self._channel = None

    # The outcome

    def _wait_until_recorded(self) -> None:
        """Tells the worker, and where there is none, or it does not get anywhere, the queue itself."""
        trusts_worker_until = lease_clock() + _RECORDED_WITHIN
        gives_up_at = lease_clock() + _LONGEST_DELIVERY
        self._pause, self._next_delivery = _FIRST_PAUSE, -math.inf
        while lease_clock() < gives_up_at:
            self._write_outcome()
            if any(received.signal in _ENDING for received in self._signals.read()):
                # The machine shuts down, or somebody wants it gone: the next worker finds the outcome on disk.
                if self._unwritten is None:
                    break
                trusts_worker_until, gives_up_at = -math.inf, min(gives_up_at, lease_clock() + _LAST_WORDS_WITHIN)
            self._hear()
            # When also the place is gone where it is written down, nobody is left to tell.
            if self._recorded or (lease_clock() >= self._until and not self._record.directory.exists()):
                break
            # A worker that is stopped renews nothing: what is done must not be done again for that.
            trusts_until = min(trusts_worker_until, self._until - self._attempt_spec.lease * _OWN_RENEWAL)
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


def run_and_leave(line: socket.socket) -> None:
    """The whole of an attendant's process: it never returns into the code that it was forked from."""
    code = 1
    try:
        attend(line)
        code = 0
    except BaseException:  # noqa: BLE001 - it must not go on as its parent, and not fail silently
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
