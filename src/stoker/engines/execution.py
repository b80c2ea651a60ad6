"""One attempt in its supervisor process: code snapshot, batch size, runs, result.

Subclasses add what differs between engines: who may stop the attempt, and who gets its result.
"""

import abc
import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from stoker.engines.attempt import AttemptRecord, AttemptResult, AttemptSpec, BatchSizeFit, result_of
from stoker.engines.code import unpack_code, with_code
from stoker.engines.fitting import FittedRun
from stoker.errors import StokerError
from stoker.fit.oom import host_kills, was_killed
from stoker.gpus.prober import Prober
from stoker.logs.reader import read_tail
from stoker.paths import remove_tree
from stoker.queue.code.archive import CodeSnapshot
from stoker.queue.commands import Command
from stoker.rules.rule import Verdict
from stoker.runs.loop import helpers_of
from stoker.runs.plan import Plan
from stoker.runs.processes.reaper import Reaper
from stoker.runs.processes.signals import Received, SignalStream
from stoker.runs.processes.spawn import OWN_FAILURE
from stoker.runs.processes.termination import wait_until_empty
from stoker.runs.record import Status
from stoker.runs.run import spec_of
from stoker.runs.supervisor import OtherNodes, StopRequest, Supervisor

# As a shell reports a command that ended by SIGTERM.
STOPPED: Final = 128 + signal.SIGTERM
# These signals stop a supervisor.
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A signal to every process of a job reaches the last this long after the first.
SIGNAL_SPREAD: Final = 0.5
# The output is complete at once, unless the reaper is delayed or a process of the job cannot be killed.
_OUTPUT_TIMEOUT: Final = 10.0
# torchrun names the failed rank at the end of its output.
_TORCHRUN_FAILURE: Final = "first observed failure"
_TORCHRUN_TAIL: Final = 8 * 1024


class _StoppedBeforeStartError(Exception):
    """A request to stop, or the end of the lease, came before the start."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.reason)
        self.request = request


class Execution(abc.ABC):
    """One attempt, from its start until its result is recorded. It is the controller of its supervisor."""

    is_on_cluster = False
    """A cluster manager starts the attempt, and may restart it. The queue is out of reach, so the worker puts the code
    snapshot into the attempt's directory."""

    def __init__(
        self,
        record: AttemptRecord,
        attempt_spec: AttemptSpec,
        signals: SignalStream,
        reaper: Reaper,
        prober: Prober,
        host: str,
        environment: Mapping[str, str],
    ) -> None:
        """`host`: this machine's name for people. `environment`: the job's."""
        self._record = record
        self._attempt_spec = attempt_spec
        self._signals = signals
        self._reaper = reaper
        self._prober = prober
        self._host = host
        self._environment = dict(environment)
        self._result: AttemptResult | None = None
        self._is_launched = False
        """Whether the reaper has been told to start the job."""
        self._started = False
        """The job, or the first probe for its batch size, has started."""
        self._fitted_run: FittedRun | None = None
        self._last = Status()
        """The last status of the last run."""
        self._stopped_by: Verdict | None = None
        self._unwritten: Status | None = None
        """The last status, while the disk refuses it."""
        self._kills: int | None = None
        """This machine's count of OOM kills when the job started; None until it was read."""

    # The engine's part, besides the events of a controller

    @abc.abstractmethod
    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has work."""

    @abc.abstractmethod
    def due(self) -> float:
        """The monotonic time when `poll` is due at the latest."""

    @abc.abstractmethod
    def poll(self) -> StopRequest | None:
        """Handles messages. Never blocks."""

    @abc.abstractmethod
    def on_signal(self, received: Received) -> StopRequest | None:
        """Interprets a signal to this process; None passes it on to the job."""

    def job_has_signal(self, signum: int) -> bool:  # noqa: ARG002 - overridden
        """True if the sender also signalled every process of the job."""
        return False

    @abc.abstractmethod
    def max_grace(self) -> float:
        """Seconds until another machine may run the job; it must have ended by then."""

    @abc.abstractmethod
    def on_first_start(self) -> None:
        """Called once, when the job or the first probe for its batch size starts. Never raises."""

    @abc.abstractmethod
    def announce(self, result: AttemptResult) -> None:
        """Called as soon as the result is known, perhaps before it is on disk. Never raises."""

    @abc.abstractmethod
    def wait_until_recorded(self) -> None:
        """Returns when the queue has the result, or the disk has it for the worker to deliver.

        Calls `_write_outcome` until it succeeds.
        """

    def gpus(self) -> tuple[str, ...]:
        """The uuids of the job's GPUs, needed to find its batch size. Raises StokerError."""
        return self._attempt_spec.gpus

    def other_nodes(self, supervisor: Supervisor) -> OtherNodes | None:  # noqa: ARG002 - overridden
        """The other machines of the run, if it has several."""
        return None

    def for_probes(self, command: Command) -> tuple[Command, dict[str, str]]:
        """Command and environment of a batch-size probe on this machine."""
        return command, self._environment

    def outputs(self) -> list[Path]:
        """The job's logs. The log of the machine that failed first comes first."""
        return [self._record.output]

    def remark(self) -> str:
        """An addition to the reason of the result."""
        return ""

    def recorded_plan(self) -> Plan:
        """The plan as the record shows it."""
        return self._attempt_spec.plan

    def helpers(self) -> tuple[int, ...]:
        """Children of this process that do not belong to the job."""
        return helpers_of(self._prober)

    # The attempt

    def run(self) -> None:
        """Runs the job. Returns when its result is recorded."""
        try:
            with self._plan() as plan:
                if self._attempt_spec.fitting is None:
                    self._run(plan, self._environment)
                else:
                    self._fit_and_run(self._attempt_spec.fitting, plan)
                # Removing the snapshot may take minutes, so the result is recorded first.
                self.wait_until_recorded()
                self._start_actions(plan)
        except (_StoppedBeforeStartError, StokerError, OSError) as error:
            self._give_up(error)
            self.wait_until_recorded()

    @contextlib.contextmanager
    def _plan(self) -> Iterator[Plan]:
        """The plan, with the directory of the code copy if the job has --snapshot or --pin."""
        plan, commit, code = self._attempt_spec.plan, self._attempt_spec.commit, self._attempt_spec.code
        path = self._code_path()
        if code is not None:
            with self._unpacked(code, path) as directory:
                yield msgspec.structs.replace(plan, directory=directory)
            return
        if commit is None:
            yield plan
            return
        from stoker.engines.worktree import Worktree

        worktree = Worktree.create(plan.directory or "/", commit, path, self._check_before_start)
        try:
            yield msgspec.structs.replace(plan, directory=worktree.directory)
        finally:
            worktree.remove()

    def _code_path(self) -> Path:
        """A new path for each restart on a cluster: the previous supervisor may still be removing its copy."""
        return self._record.directory / (f"code-{os.urandom(4).hex()}" if self.is_on_cluster else "code")

    @contextlib.contextmanager
    def _unpacked(self, code: CodeSnapshot, path: Path) -> Iterator[str]:
        """The job's directory in its snapshot. The snapshot is removed afterwards, with all files written into it."""
        queue = None if self.is_on_cluster else self._attempt_spec.queue
        directory = unpack_code(code, queue, self._record.directory, path, self._check_before_start)
        self._environment = with_code(self._environment, code, path)
        try:
            yield directory
        finally:
            remove_tree(path, ignore_errors=True)

    def _fit_and_run(self, fit: BatchSizeFit, plan: Plan) -> None:
        self.on_started()
        fitted_run = FittedRun(fit, self._record, self._attempt_spec.log_limit)
        fitted_run.probed, environment = self.for_probes(fit.command)
        # The next worker finds leftovers of a killed probe by this variable.
        environment |= {"STOKER_RUN_DIR": str(self._record.directory)}
        fitted_run.find(plan, self.gpus(), environment, self._prober, self._check_before_start)
        self._fitted_run = fitted_run
        fitted_run.run(plan, self._environment, self._run)
        if self._result is None:
            # The smallest size ran out of memory, or the reaper cannot start another run.
            fitted_run.gives_up = True
            self.on_ended(self._last)

    def _check_before_start(self) -> None:
        """Handles stop requests before the start. Raises _StoppedBeforeStartError."""
        for received in self._signals.read():
            if (request := self.on_signal(received)) is not None:
                raise _StoppedBeforeStartError(request)
        if (request := self.poll()) is not None:
            raise _StoppedBeforeStartError(request)

    def _run(self, plan: Plan, environment: dict[str, str]) -> bool:
        """Runs the job once. True if another run can follow."""
        if not self._is_launched:
            self._check_before_start()
        supervisor = Supervisor(plan, self._record, self._prober, environment, self._signals, self._reaper, self)
        supervisor.nodes = self.other_nodes(supervisor)
        supervisor.run(str(self._record.output), self._attempt_spec.log_limit, is_launched=self._is_launched)
        self._is_launched = False
        self._stopped_by = supervisor.stopped_by
        self._last = supervisor.status
        self._unwritten = supervisor.status if supervisor.unwritten else None
        # The output is complete once the reaper has collected the last process.
        wait_until_empty(self._reaper, _OUTPUT_TIMEOUT)
        return self._reaper.reusable

    def _start_actions(self, plan: Plan) -> None:
        """Starts the job's actions after a rule stopped it. The queue knows the outcome by now."""
        if self._stopped_by is None or not plan.then:
            return
        import subprocess

        from stoker.actions.action import facts_of
        from stoker.actions.perform import perform_detached

        facts = facts_of(self._stopped_by, plan.policies, time.monotonic(), self._host)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            perform_detached(plan.then, facts)

    # Events of the run

    def on_started(self) -> None:
        """A full disk does not stop the job: only people read the spec. The job may have ended already."""
        if self._started:
            return
        self._started = True
        if self._result is None:
            self._kills = host_kills()
        self.on_first_start()
        with contextlib.suppress(StokerError, OSError):
            self._record.write_spec(spec_of(self.recorded_plan(), self._record))

    def on_exit(self, code: int) -> StopRequest | None:
        """Waits for a signal that may have ended the command before it reaches this process.

        Slurm and a shutdown signal every process. After SIGKILL to all, this call never returns.
        """
        ends = time.monotonic() + self.signal_delay(code)
        while (seconds := ends - time.monotonic()) > 0:
            select.select([self._signals.fileno()], [], [], seconds)
            for received in self._signals.read():
                if received.signal in STOP_SIGNALS and (request := self.on_signal(received)) is not None:
                    return request
        return None

    def signal_delay(self, code: int) -> float:
        """Seconds to wait, after the command exits with this code, for a signal that was sent to all processes."""
        return SIGNAL_SPREAD if code - 128 in {*STOP_SIGNALS, signal.SIGKILL} else 0.0

    def on_ended(self, status: Status) -> None:
        if self._fitted_run is not None:
            self._fitted_run.outputs = self.outputs()
            if self._fitted_run.restarts_after(status):
                return
        # Read only if it matters: it takes as long as the rest.
        before = self._kills if was_killed(status.exit_code) else None
        kills = 0 if before is None else max(0, (host_kills() or 0) - before)
        result = result_of(status, self._attempt_spec.requeue_at_limit, self._record.output, kills)
        fit = "" if self._fitted_run is None else self._fitted_run.description
        ranks = self._failed_rank() if status.ending == "exited" and status.exit_code else ""
        reason = "; ".join(filter(None, [result.reason, self.remark(), ranks, fit]))
        result = AttemptResult(result.outcome, result.exit_code, reason, result.cause)
        self._result = result
        self.announce(result)

    def _failed_rank(self) -> str:
        """The rank that failed first, according to torchrun."""
        texts = [read_tail(output, _TORCHRUN_TAIL) for output in self.outputs()]
        if not any(_TORCHRUN_FAILURE in text for text in texts):
            return ""
        from stoker.runs.postmortem.outputs import first_failed_rank

        return first_failed_rank(texts)

    # The result

    def _give_up(self, error: _StoppedBeforeStartError | StokerError | OSError) -> None:
        """Ends the attempt after an error before or after its runs; a run itself never raises."""
        if self._result is not None:
            return
        if isinstance(error, _StoppedBeforeStartError):
            request = error.request
        elif isinstance(error, StokerError):
            request = StopRequest("could not start", f"{error}.", OWN_FAILURE)
        else:
            why = (error.strerror or type(error).__name__).lower()
            reason = f"It could not be started on {self._host}: {why}."
            request = StopRequest("not started", reason, OWN_FAILURE)
        ending, reason, code = request
        self._unwritten = Status(state="ended", ending=ending, reason=reason, exit_code=code, ended=time.time())
        self.on_ended(self._unwritten)
        self._write_outcome()

    def _write_outcome(self) -> bool:
        """Writes the last status, in case this process is killed before delivery. True once it is written."""
        if self._unwritten is not None:
            with contextlib.suppress(StokerError):
                self._record.write_status(self._unwritten)
                self._unwritten = None
        return self._unwritten is None


def redirect_stderr(reaper: Reaper) -> None:
    """Sends messages of the supervisor to the job's output, as on a terminal."""
    if reaper.output is not None:
        # A second open file description: O_NONBLOCK must not apply to the job's own writes.
        descriptor = os.open(f"/proc/self/fd/{reaper.output[1]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.dup2(descriptor, 2)
        os.close(descriptor)
