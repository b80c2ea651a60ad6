"""One attempt in the process that supervises it: the snapshot of its code, its batch size, its runs, its result.

What differs between engines is who may stop the attempt and who learns its result: that is what a subclass adds.
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
# What asks a supervisor to end.
ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# From the first to the last process that gets such a signal.
SAME_MOMENT: Final = 0.5
# The output is complete at once, unless the reaper is held up or a process of the job cannot be killed.
_OUTPUT_COMPLETE_WITHIN: Final = 10.0
# torchrun says which rank failed, as its last words.
_LAUNCHER_SAYS: Final = "first observed failure"
_LAUNCHER_WITHIN: Final = 8 * 1024


class _StoppedBeforeStartError(Exception):
    """The job is stopped before it runs, or its lease is over."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.reason)
        self.request = request


class Execution(abc.ABC):
    """One attempt, from its start until its result is recorded. The controller of its supervisor."""

    is_on_cluster = False
    """Whether a cluster manager has started it. It may start the same attempt again, and the queue is out of reach:
    the worker has put a snapshot into the attempt's directory."""

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
        """`host`: this machine, as people know it. `environment`: of the job."""
        self._record = record
        self._attempt_spec = attempt_spec
        self._signals = signals
        self._reaper = reaper
        self._prober = prober
        self._host = host
        self._environment = dict(environment)
        self._result: AttemptResult | None = None
        self._started = False
        """Whether the job runs, or the probes that find its batch size."""
        self._fitted_run: FittedRun | None = None
        self._last = Status()
        """The last status of the last run."""
        self._stopped_by: Verdict | None = None
        self._unwritten: Status | None = None
        """The last status, until the disk takes it."""
        self._kills = 0
        """How often the kernel of this machine had killed a process for lack of memory when the job started."""

    # What engines differ in, beside the events of a controller

    @abc.abstractmethod
    def fileno(self) -> int:
        """Readable when `poll` has something to do."""

    @abc.abstractmethod
    def due(self) -> float:
        """When to call `poll` at the latest, in monotonic seconds."""

    @abc.abstractmethod
    def poll(self) -> StopRequest | None:
        """Handles what has arrived. Never blocks."""

    @abc.abstractmethod
    def on_signal(self, received: Received) -> StopRequest | None:
        """What a signal to this process means; None: it is for the job."""

    def has_signalled_job(self, signum: int) -> bool:  # noqa: ARG002 - for those who override it
        """Whether who asked this process to end has sent this signal to every process of the job, too."""
        return False

    @abc.abstractmethod
    def max_grace(self) -> float:
        """Seconds until another machine may run the job: it must be gone by then."""

    @abc.abstractmethod
    def on_first_start(self) -> None:
        """Called once, when the job starts or the first probe for its batch size. Never raises."""

    @abc.abstractmethod
    def announce(self, result: AttemptResult) -> None:
        """Called as soon as the result is known, which may not be on disk yet. Never raises."""

    @abc.abstractmethod
    def wait_until_recorded(self) -> None:
        """Returns when the result is safe with the queue, or on disk for somebody who brings it there.

        Calls `_write_outcome` until it succeeds.
        """

    def gpus(self) -> tuple[str, ...]:
        """The uuids of the job's GPUs, asked for before its batch size is found. Raises StokerError."""
        return self._attempt_spec.gpus

    def other_nodes(self, supervisor: Supervisor) -> OtherNodes | None:  # noqa: ARG002 - for those who override it
        """The other machines of the run, if it has several."""
        return None

    def for_probes(self, command: Command) -> tuple[Command, dict[str, str]]:
        """What a probe for the batch size runs on this machine, and its environment."""
        return command, self._environment

    def outputs(self) -> list[Path]:
        """The job's logs, that of the machine on which it failed first."""
        return [self._record.output]

    def remark(self) -> str:
        """What to add to the reason of the result."""
        return ""

    def shown_plan(self) -> Plan:
        """What the record says that the job runs."""
        return self._attempt_spec.plan

    def helpers(self) -> tuple[int, ...]:
        """Children of this process that are not the job's."""
        return helpers_of(self._prober)

    # The attempt

    def run(self) -> None:
        """Runs the job, and stays until its result is recorded."""
        try:
            with self._plan() as plan:
                if self._attempt_spec.fitting is None:
                    self._run(plan, self._environment)
                else:
                    self._fit_and_run(self._attempt_spec.fitting, plan)
                # Before its snapshot is removed, which may take minutes.
                self.wait_until_recorded()
                self._act(plan)
        except (_StoppedBeforeStartError, StokerError, OSError) as error:
            self._give_up(error)
            self.wait_until_recorded()

    @contextlib.contextmanager
    def _plan(self) -> Iterator[Plan]:
        """The plan, in a copy of the code if the job has --snapshot or --pin."""
        plan, commit, code = self._attempt_spec.plan, self._attempt_spec.commit, self._attempt_spec.code
        place = self._place_of_code()
        if code is not None:
            with self._unpacked(code, place) as directory:
                yield msgspec.structs.replace(plan, directory=directory)
            return
        if commit is None:
            yield plan
            return
        from stoker.engines.worktree import Worktree

        worktree = Worktree.create(plan.directory or "/", commit, place, self._check_before_start)
        try:
            yield msgspec.structs.replace(plan, directory=worktree.directory)
        finally:
            worktree.remove()

    def _place_of_code(self) -> Path:
        """A new one at each start: an earlier one may still be busy removing its own."""
        return self._record.directory / (f"code-{os.urandom(4).hex()}" if self.is_on_cluster else "code")

    @contextlib.contextmanager
    def _unpacked(self, code: CodeSnapshot, place: Path) -> Iterator[str]:
        """The job's directory in its snapshot, which is removed afterwards with everything written into it."""
        queue = None if self.is_on_cluster else self._attempt_spec.queue
        directory = unpack_code(code, queue, self._record.directory, place, self._check_before_start)
        self._environment = with_code(self._environment, code, place)
        try:
            yield directory
        finally:
            remove_tree(place, ignore_errors=True)

    def _fit_and_run(self, fit: BatchSizeFit, plan: Plan) -> None:
        self.on_started()
        fitted_run = FittedRun(fit, self._record, self._attempt_spec.log_limit)
        fitted_run.probed, environment = self.for_probes(fit.command)
        # By this variable the next worker finds what is left of a probe whose supervisors were killed.
        environment |= {"STOKER_RUN_DIR": str(self._record.directory)}
        fitted_run.find(plan, self.gpus(), environment, self._prober, self._check_before_start)
        self._fitted_run = fitted_run
        fitted_run.run(plan, self._environment, self._run)
        if self._result is None:
            # It ran out of memory, and nothing smaller is left, or the reaper cannot start it.
            fitted_run.gives_up = True
            self.on_ended(self._last)

    def _check_before_start(self) -> None:
        """Handles requests to stop while the job does not run yet. Raises _StoppedBeforeStartError."""
        for received in self._signals.read():
            if (request := self.on_signal(received)) is not None:
                raise _StoppedBeforeStartError(request)
        if (request := self.poll()) is not None:
            raise _StoppedBeforeStartError(request)

    def _run(self, plan: Plan, environment: dict[str, str]) -> bool:
        """One run of the job; whether another could follow."""
        self._check_before_start()
        supervisor = Supervisor(plan, self._record, self._prober, environment, self._signals, self._reaper, self)
        supervisor.nodes = self.other_nodes(supervisor)
        supervisor.run(str(self._record.output), self._attempt_spec.log_limit)
        self._stopped_by = supervisor.stopped_by
        self._last = supervisor.status
        self._unwritten = supervisor.status if supervisor.unwritten else None
        # The output is complete when the reaper has seen the last process end.
        wait_until_empty(self._reaper, _OUTPUT_COMPLETE_WITHIN)
        return self._reaper.reusable

    def _act(self, plan: Plan) -> None:
        """Starts the actions that the job asked for, once the queue knows that a rule stopped it."""
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
        """A full disk costs the spec, which is for people, and stops no job."""
        if self._started:
            return
        self._started = True
        self._kills = host_kills() or 0
        self.on_first_start()
        with contextlib.suppress(StokerError, OSError):
            self._record.write_spec(spec_of(self.shown_plan(), self._record))

    def on_exit(self, code: int) -> StopRequest | None:
        """Slurm, and a machine that shuts down, send a signal to every process, and the job may die of it first.

        After SIGKILL, this process does not return from here.
        """
        ends = time.monotonic() + self.signalled_within(code)
        while (seconds := ends - time.monotonic()) > 0:
            select.select([self._signals.fileno()], [], [], seconds)
            for received in self._signals.read():
                if received.signal in ENDING and (request := self.on_signal(received)) is not None:
                    return request
        return None

    def signalled_within(self, code: int) -> float:
        """Seconds from the end of the command, with this code, to a signal that has ended it and is for all."""
        return SAME_MOMENT if code - 128 in {*ENDING, signal.SIGKILL} else 0.0

    def on_ended(self, status: Status) -> None:
        if self._fitted_run is not None:
            self._fitted_run.outputs = self.outputs()
            if self._fitted_run.restarts_after(status):
                return
        # Asked for only where it matters: it takes as long as the rest.
        kills = max(0, (host_kills() or 0) - self._kills) if was_killed(status.exit_code) else 0
        result = result_of(status, self._attempt_spec.requeue_at_limit, self._record.output, kills)
        fit = "" if self._fitted_run is None else self._fitted_run.description
        ranks = self._failed_rank() if status.ending == "exited" and status.exit_code else ""
        reason = "; ".join(filter(None, [result.reason, self.remark(), ranks, fit]))
        result = AttemptResult(result.outcome, result.exit_code, reason, result.cause)
        self._result = result
        self.announce(result)

    def _failed_rank(self) -> str:
        """Which process of the job failed first, where its launcher says that."""
        texts = [read_tail(output, _LAUNCHER_WITHIN) for output in self.outputs()]
        if not any(_LAUNCHER_SAYS in text for text in texts):
            return ""
        from stoker.runs.postmortem.outputs import first_failed_rank

        return first_failed_rank(texts)

    # The result

    def _give_up(self, error: _StoppedBeforeStartError | StokerError | OSError) -> None:
        """For an error before the start of the job or after its end: a run itself never raises."""
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
        """Writes the last status, in case this process is killed before the queue has the result. Whether it is
        written."""
        if self._unwritten is not None:
            with contextlib.suppress(StokerError):
                self._record.write_status(self._unwritten)
                self._unwritten = None
        return self._unwritten is None


def redirect_stderr(reaper: Reaper) -> None:
    """Messages of the supervisor go into the job's output, as they do on a terminal."""
    if reaper.output is not None:
        # Opened again, since O_NONBLOCK belongs to the open file: writes of the job itself must block.
        mine = os.open(f"/proc/self/fd/{reaper.output[1]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.dup2(mine, 2)
        os.close(mine)
