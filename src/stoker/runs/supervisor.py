"""The supervisor of a run: starts the command, watches its GPUs, forwards signals, stops it and reports why."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from stoker.errors import StokerError
from stoker.gpus.model import Look, known
from stoker.gpus.prober import Prober, Sampler
from stoker.gpus.report import describe
from stoker.gpus.source import AbsentError
from stoker.procfs import user_name
from stoker.rules.judge import Judge, Judgement
from stoker.rules.rule import Observation, RuleWarning, Verdict
from stoker.rules.scope import JobScope, MachineScope, Scope
from stoker.runs.gpu_holders import GpuHolders
from stoker.runs.loop import CommandHandler, CommandLoop
from stoker.runs.plan import OF_THE_JOB, Plan
from stoker.runs.processes.reaper import (
    Failed,
    LaunchRequest,
    Program,
    Reaper,
    exit_code,
)
from stoker.runs.processes.signals import Received, SignalStream
from stoker.runs.processes.spawn import OWN_FAILURE
from stoker.runs.processes.termination import TerminationOutcome
from stoker.runs.progress import ProgressTracker
from stoker.runs.record import Ending, Journal, Record, Status
from stoker.streams import ERROR, emit
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.runs.postmortem.facts import NodeFacts, RunFacts
    from stoker.runs.postmortem.report import Postmortem

# Commands that end sooner need no GPU helper.
FIRST_LOOK: Final = 3.0
# A freshly booted machine may load drivers late.
ABSENT_RETRY: Final = 60.0
# The status of a command that ends sooner is not written before its end.
NOTED_WITHIN: Final = 0.002
# The longest wait for the pid of a command before the status is written without it.
_PID_WITHIN: Final = 1.0
# The interval of writing progress to the status; changes of the verdict are written at once.
STATUS_EVERY: Final = 10.0
# The interval without new steps and with less than this share of a window, when only times in a sentence differ.
QUIET_STATUS_EVERY: Final = 30.0
STATUS_SHARE: Final = 0.01
# The pause after a failed round of the loop, so that a lasting problem does not keep a core busy.
ERROR_PAUSE: Final = 0.2
# The driver takes seconds to clear the memory of a large job. Later holders are named.
MEMORY_PATIENCE: Final = 15.0
MEMORY_POLL: Final = 0.2
_FROM_TERMINAL: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


class StopRequest(NamedTuple):
    """A controller's request to stop the job, with the exit code of the run."""

    ending: Ending
    reason: str
    code: int


class Controller(Protocol):
    """Stops a run from outside: for a queued job, on behalf of its worker and its lease."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has work."""

    def due(self) -> float:
        """The monotonic time when `poll` is due at the latest."""

    def poll(self) -> StopRequest | None:
        """Handles messages. Never blocks."""

    def on_signal(self, received: Received) -> StopRequest | None:
        """Interprets a signal to the supervisor; None passes it on to the job."""

    def on_started(self) -> None:
        """Called when the job has started. Never raises."""

    def job_has_signal(self, signum: int) -> bool:
        """True if the sender also signalled every process of the job."""

    def max_grace(self) -> float:
        """Seconds until another machine may run the job; it must have ended by then."""

    def on_exit(self, code: int) -> StopRequest | None:
        """Why the command exited with this code, if it was stopped from outside; None otherwise."""

    def on_ended(self, status: Status) -> None:
        """Called at the end of the run, before the status is on disk."""


class OtherNodes(Protocol):
    """The other machines of a multi-node run, which is judged, explained and stopped as a whole."""

    @property
    def here(self) -> str:
        """This machine's name for people."""

    def descriptors(self) -> Iterable[int]:
        """Descriptors that become readable when messages arrive."""

    def due(self) -> float:
        """The monotonic time when `observation` is due at the latest."""

    def share(self, observation: Observation) -> None:
        """Passes on this machine's observation."""

    def observation(self) -> Observation | None:
        """A new observation of all machines, if any. Never blocks."""

    def ended(self, code: int) -> int | None:
        """Notes the exit code of the command here. Returns the code of the whole run; None while others run."""

    def ask_for_facts(self) -> None:
        """Requests their parts of the report. Never raises."""

    def facts(self) -> "Sequence[NodeFacts]":
        """Their parts of the report, after a short wait."""

    def stop(self, ending: Ending, reason: str) -> None:
        """Asks them to stop. Never raises, never blocks."""

    def finish(self, ending: Ending, reason: str) -> Sequence[str]:
        """Stops them and waits for their end. Describes what may be left after a while."""


def tagged(environment: Mapping[str, str], record: Record) -> dict[str, str]:
    """With the variables by which a process of the run is found."""
    tags = {"STOKER_RUN": record.id, "STOKER_RUN_DIR": str(record.directory)} if record.is_kept else {}
    return {**environment, **tags}


def launch_request(
    plan: Plan, record: Record, environment: Mapping[str, str], signals: SignalStream, log: str | None, log_limit: int
) -> LaunchRequest:
    """What the reaper of a run starts. `environment`: with its tags; `log`: the file that keeps its output."""
    program = Program(
        plan.command, environment, directory=plan.directory, session=log is not None, mask=signals.original
    )
    return LaunchRequest(program, plan.signal_number, plan.grace, str(record.directory), log, log_limit)


class Supervisor(CommandHandler[int]):
    """Runs one plan. Call `run` once."""

    def __init__(
        self,
        plan: Plan,
        record: Record,
        prober: Prober,
        environment: Mapping[str, str],
        signals: SignalStream,
        reaper: Reaper,
        controller: Controller | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        self._plan = plan
        self._record = record
        self._controller = controller
        self.nodes: OtherNodes | None = None
        """The other machines of the run, if it has several; set before `run`."""
        self._is_left_clean = False
        """Leftover processes of the command are stopped."""
        self._on_warning = on_warning
        self._environment = tagged(environment, record)
        self._prober = prober
        self._journal = Journal(record)
        self._status = Status()
        self._started_at = time.monotonic()
        self._written_at = self._started_at
        self._written_progress = self._status.progress
        self._note_start_at = math.inf
        self.unwritten = False
        """The last status could not be written."""
        policies = plan.policies
        self._judge = Judge(
            policies,
            self._started_at,
            "stop the job",
            look_takes=prober.deadline,
            unless="it works or is snoozed",
            dry_run=plan.dry_run,
        )
        every = self._judge.every
        first = min(every, FIRST_LOOK) if policies else math.inf
        self._sampler = Sampler(prober, every, first=first, aligned=True)
        self._scope = _scope_of(plan, environment)
        self._signals = signals
        self._reaper = reaper
        self._loop = CommandLoop(self, reaper, signals=signals, sampler=self._sampler)
        self._judged_gpus: frozenset[str] | None = None
        self._logged: set[str] = set()
        self._snoozed_until: float | None = None
        self.stopped_by: Verdict | None = None
        """The verdict by which a rule stopped the run."""
        self._log_path: str | None = None
        self._gpu_holders = GpuHolders(reaper)
        self._tracker = ProgressTracker(
            reaper,
            directory=str(record.directory) if record.is_kept else None,
            log=lambda: self._log_path,
            every=every,
        )

    @property
    def status(self) -> Status:
        return self._status

    def run(self, log: str | None = None, log_limit: int = 0, *, is_launched: bool = False) -> int:
        """Runs the plan and returns the exit code. `log`: the file for the job's output.

        `is_launched`: the reaper has the order to start the command.
        """
        plan, self._log_path = self._plan, log
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._journal.close)
            cleanup.callback(self._tracker.close)
            cleanup.callback(self._prober.leave)
            self._status = msgspec.structs.replace(self._status, containment=self._reaper.containment)
            if not is_launched:
                request = launch_request(plan, self._record, self._environment, self._signals, log, log_limit)
                self._reaper.start(request, waits=log is None)
            self._note_start_at = time.monotonic() + NOTED_WITHIN
            return self._loop.run()

    def _note_start(self) -> None:
        """On disk: not before the end of a command that ends at once, for which others wait."""
        self._note_start_at = math.inf
        if self._controller is not None:
            self._controller.on_started()
        if self._status.state == "starting":
            self._write_status(state="running", job=self._reaper.job and self._reaper.job.pid)

    # Events of the loop

    def descriptors(self) -> Iterable[int]:
        controller = () if self._controller is None else (self._controller.fileno(),)
        return controller if self.nodes is None else (*controller, *self.nodes.descriptors())

    def due(self) -> float:
        due = self._note_start_at
        if self._controller is not None:
            due = min(due, self._controller.due())
        if self.nodes is not None:
            due = min(due, self.nodes.due())
        if self._plan.max_time is not None and "time limit" not in self._logged:
            due = min(due, self._started_at + self._plan.max_time)
        if self.unwritten:
            due = min(due, self._written_at + STATUS_EVERY)
        return due

    def on_tick(self) -> int | None:
        if time.monotonic() >= self._note_start_at:
            is_unconfirmed = self._reaper.job is None and not self._reaper.empty
            if is_unconfirmed and time.monotonic() < self._started_at + _PID_WITHIN:
                self._reaper.ensure_start()
                self._note_start_at = time.monotonic() + NOTED_WITHIN
            else:
                self._note_start()
        if self._controller is not None and (request := self._controller.poll()) is not None:
            return self._stop_as_requested(request)
        if self.unwritten and time.monotonic() >= self._written_at + STATUS_EVERY:
            self._write_status()
        if self.nodes is not None and (observation := self.nodes.observation()) is not None:
            code = self._judge_observation(observation)
            if code is not None:
                return code
        return self._check_time()

    def on_signal(self, received: Received) -> int | None:
        request = None if self._controller is None else self._controller.on_signal(received)
        return None if request is None else self._stop_as_requested(request)

    def on_second_interrupt(self) -> int:
        """Stops without report and grace, because a person is waiting."""
        reason = "Ctrl-C was pressed twice."
        self._write_status(state="stopping", ending="signal", reason=reason)
        outcome = self._terminate(0.0)
        self._write_status(left=outcome.survivors)
        log(f"{reason.rstrip('.')}: {outcome.in_words()}")
        return self._end("signal", reason, 128 + signal.SIGINT)

    def on_suspended(self, signum: int) -> None:
        """Suspends this process with the command, so that the shell shows its prompt."""
        if signum in _FROM_TERMINAL:
            os.kill(os.getpid(), signal.SIGTSTP)

    def on_deadline_passed(self) -> int:
        reason = "Its supervisor did not respond for so long that another machine may run the job."
        return self._stop_as_requested(StopRequest("lease", reason, 128 + signal.SIGTERM))

    def on_error(self, error: Exception) -> None:
        """Logs the error. A bug in Stoker or a lack of memory or descriptors must not affect the job."""
        self._log_once("round", f"{_message(error)}; the job continues")
        time.sleep(ERROR_PAUSE)

    def on_look_failed(self, error: Exception) -> None:
        if isinstance(error, AbsentError):
            self._log_once("absent", f"{error}; the command runs, but whether it is idle cannot be seen")
        else:
            self._log_once("failed", f"{_message(error)}; the command continues, with the next look in a minute")
        self._sampler.postpone(ABSENT_RETRY)

    # Watching

    def on_look(self, look: Look) -> int | None:
        look = msgspec.structs.replace(look, job=self._tracker.observe(look.at, self._gpu_holders.own_pids(look)))
        trust_before = self._status.progress and self._status.progress.trust
        self._status = msgspec.structs.replace(self._status, progress=self._tracker.progress(look.wall - look.at))
        if self._status.progress and self._status.progress.trust != trust_before:
            self._write_status()
        observation = self._scope.observe(look)
        if isinstance(self._scope, JobScope):
            self._journal.append(self._scope.recorded(look))
            if (gpus := self._scope.own_gpus) is not None:
                self._gpu_holders.narrow(self._prober, gpus, look.at + self._judge.every)
        else:
            self._journal.append(look)
        if self._journal.failure is not None:
            self._log_once("readings", f"{self._journal.failure}; the job continues without a record of its readings")
        self._judged_gpus = frozenset(activity.uuid for activity in observation.activities) or None
        if self.nodes is not None:
            used = tuple(sorted(self._scope.used)) if isinstance(self._scope, JobScope) else ()
            self._status = msgspec.structs.replace(self._status, used=used)
            self.nodes.share(observation)
            return None  # `on_tick` judges all machines together
        return self._judge_observation(observation)

    def _judge_observation(self, observation: Observation) -> int | None:
        self._read_snooze()
        judgement = self._judge.observe(observation)
        self._sampler.no_later_than(self._judge.due())
        self._write_verdict(judgement)
        stops = judgement.fired and not self._plan.dry_run
        for message in judgement.messages if not stops else ():
            log(message.text)
            if message.urgent and self._on_warning is not None:
                self._on_warning(message.text)
        return self._stop_by_rule(judgement.verdict) if stops else None

    def _read_snooze(self) -> None:
        """Reads the snooze before every verdict, so that it takes effect at once."""
        snooze = self._record.snooze()
        until = snooze.until if snooze else None
        if until == self._snoozed_until:
            return
        ended_early = until is None and self._snoozed_until is not None and self._snoozed_until > time.monotonic()
        self._snoozed_until = until
        if until is not None:
            self._judge.snooze(until)
        elif ended_early:
            self._judge.snooze(time.monotonic())

    def _stop_by_rule(self, verdict: Verdict) -> int | None:
        if (succeeded := self._success()) is not None:
            return succeeded  # no rule has stopped it, so its actions are not due
        self._status = msgspec.structs.replace(self._status, rule=verdict.rule)
        reason = f"{verdict.reason.rstrip('.')}."
        code = self._stop(verdict.kind, reason, code=self._plan.idle_exit_code, verdict=verdict)
        self.stopped_by = None if code is None else verdict
        return code

    def _check_time(self) -> int | None:
        limit = self._plan.max_time
        if limit is None or time.monotonic() < self._started_at + limit:
            return None
        if self._plan.dry_run:
            self._log_once("time limit", f"would stop the job now: it has run for {format_duration(limit)} (dry run)")
            return None
        reason = f"It had run for {format_duration(limit)}, which was its time limit."
        return self._stop("time limit", reason, code=self._plan.idle_exit_code)

    # Endings

    def on_start_failed(self, failed: Failed) -> int:
        reason = f"cannot run {self._plan.command[0]!r}: {failed.why}"
        log(reason)
        # A queued job can start on another machine, or here later.
        ending: Ending = "not started" if failed.transient and self._controller is not None else "could not start"
        return self._end(ending, f"{reason}.", failed.exit_code)

    def on_exit(self, status: int) -> int | None:
        code: int | None = exit_code(status)
        if not self._is_left_clean:
            if self._controller is not None and (request := self._controller.on_exit(exit_code(status))) is not None:
                return self._stop_as_requested(request)
            self._reaper.update()  # most jobs leave nothing behind, which the reaper reports at the same time
            left, settled = self._reaper.scan_processes()
            if left:
                log(f"the command ended and left {len(left)} process(es) behind: they are stopped")
            if left or not settled:
                self._terminate(self._plan.grace)
            self._is_left_clean = True
        if self.nodes is not None:
            code = self.nodes.ended(exit_code(status))
        return None if code is None else self._end("exited", f"It ended by itself with code {code}.", code)

    def on_reaper_killed(self) -> int:
        """Stops the job. The kernel has made its processes children of this one."""
        reason = "The reaper of the job was killed from outside, so the job was stopped."
        log(reason)
        self._terminate(self._plan.grace)
        return self._end("signal", reason, OWN_FAILURE)

    def _stop_as_requested(self, request: StopRequest) -> int:
        """Stops on request of the controller, with a report only at the time limit."""
        if (succeeded := self._success()) is not None:
            return succeeded
        if request.ending == "time limit" and (code := self._stop("time limit", request.reason, code=request.code)):
            return code
        self._write_status(state="stopping", ending=request.ending, reason=request.reason)
        if self.nodes is not None:
            self.nodes.stop(request.ending, request.reason)
        outcome = self._terminate(self._plan.grace)
        self._write_status(left=(*outcome.survivors, *self._gpus_still_held()))
        log(f"{request.reason.rstrip('.')}: {outcome.in_words()}")
        return self._end(request.ending, request.reason, request.code)

    def _stop(self, ending: Ending, reason: str, *, code: int, verdict: Verdict | None = None) -> int | None:
        """Collects the report while the processes live, then terminates them.

        Returns None if a snooze arrives before the first signal; the run then continues.
        """
        if (succeeded := self._success()) is not None:
            return succeeded
        self._write_status(state="stopping", ending=ending, reason=reason)
        postmortem: Postmortem | None = None
        with self._explaining():
            if self.nodes is not None:
                self.nodes.ask_for_facts()
            postmortem = self._postmortem(verdict)
            # Written now in case this process is killed during the stop.
            postmortem.write()
            if self.nodes is not None:
                postmortem.add_nodes(self.nodes.here, self.nodes.facts())
        if verdict is not None and self._record.snooze() is not None:
            with contextlib.suppress(OSError):
                self._record.report.unlink(missing_ok=True)
            self._write_status(state="running", ending=None, reason="", rule="")
            self._reaper.leave_undecided()
            return None
        if self.nodes is not None:
            self.nodes.stop(ending, reason)
        outcome = self._terminate(self._plan.grace)
        self._write_status(left=(*outcome.survivors, *self._gpus_still_held()))
        if postmortem is not None:
            with self._explaining():
                postmortem.publish(f"{outcome.in_words()}; exit code {code}", self._status)
        return self._end(ending, reason, code)

    def _success(self) -> int | None:
        """The exit code, if the reaper has decided that the job has succeeded, and nothing is to be stopped."""
        if self._reaper.decide() or self._reaper.wait_for_status() != 0:
            return None
        return self.on_exit(0)

    def _postmortem(self, verdict: Verdict | None) -> "Postmortem":
        """Collects the facts of this machine within a time limit."""
        from stoker.runs.postmortem.report import Postmortem

        log_path = self._log_path
        found = Postmortem(
            self._record,
            self._status,
            self._journal,
            judged=self._judged_gpus,
            verdict=verdict,
            # Only queued jobs have a log; the variable alone may be inherited from a job.
            job=None if log_path is None else self._environment["STOKER_JOB_ID"],
            log=None if log_path is None else Path(log_path),
        )
        found.collect([process.pid for process in self._reaper.processes()], hurry=self._signals)
        return found

    def collect_facts(self) -> "RunFacts":
        """This machine's part of the report on a multi-node run."""
        return self._postmortem(None).facts

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Logs a failure of the report, which must not prevent the stop."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the stop goes on
            log(f"the report is incomplete: {_message(error)}")

    def _terminate(self, grace: float) -> TerminationOutcome:
        signum, has_signal = self._plan.signal_number, False
        if self._controller is not None:
            grace = min(grace, self._controller.max_grace())
            has_signal = self._controller.job_has_signal(signum)
        return self._loop.stop(signum, grace, has_signal=has_signal)

    def _gpus_still_held(self) -> tuple[str, ...]:
        """Waits for the driver to free the memory, and names the processes that hold some after a while."""
        if not self._status.used:
            return ()
        began = time.monotonic()
        ends = began + MEMORY_PATIENCE
        while True:
            try:
                look = self._prober.look()
            except AbsentError as absent:
                return (f"whether the GPU memory came back cannot be seen: {absent}",)
            if look.problem:
                return (f"whether the GPU memory came back cannot be seen: {look.problem.reason}",)
            holders = self._holders(look)
            # A look that was requested before the end of the job shows its processes alive.
            is_released = not holders and look.at >= began
            if is_released or time.monotonic() > ends or self._signals.read():
                return holders
            time.sleep(MEMORY_POLL)

    def _holders(self, look: Look) -> tuple[str, ...]:
        """Processes listed on the job's GPUs that belong to the job or have exited."""
        found: list[str] = []
        for gpu, reading in zip(look.gpus, look.readings, strict=True):
            if gpu.uuid not in self._status.used or not known(reading.processes):
                continue
            found += [
                f"GPU {gpu.index} is still held by {describe(process)}"
                for process in reading.processes
                if not known(process.started) or self._reaper.owns(process.pid)
            ]
        return tuple(found)

    def _end(self, ending: Ending, reason: str, code: int) -> int:
        if self.nodes is not None and (left := tuple(self.nodes.finish(ending, reason))):
            self._status = msgspec.structs.replace(self._status, left=(*self._status.left, *left))
        ended = msgspec.structs.replace(
            self._status, state="ended", ending=ending, reason=reason, exit_code=code, ended=time.time()
        )
        if self._controller is not None:
            # Reported before it is on disk: the worker waits for this to start the next job, and stores it.
            self._controller.on_ended(ended)
        self._status = ended
        self._write_status()
        if self._note_start_at < math.inf:
            self._note_start()
        return code

    # Status and log

    def _write_status(self, **changes: Any) -> None:
        """Writes changes of the status. A full disk does not affect the job."""
        self._status = msgspec.structs.replace(self._status, **changes)
        self._written_at, self._written_progress = time.monotonic(), self._status.progress
        try:
            self._record.write_status(self._status)
            self.unwritten = False
        except StokerError as error:
            self.unwritten = True
            self._log_once("record", f"{error}; the job continues")

    def _write_verdict(self, judgement: Judgement) -> None:
        verdict, warning = judgement.verdict, self._warning(judgement)
        used = tuple(sorted(self._scope.used)) if isinstance(self._scope, JobScope) else self._status.used
        now = time.monotonic()
        before = self._status
        changed = (verdict.kind, used, warning) != (before.verdict, before.used, before.warning)
        is_quiet = (
            before.progress == self._written_progress and abs(verdict.progress - before.verdict_progress) < STATUS_SHARE
        )
        longest = QUIET_STATUS_EVERY if is_quiet else STATUS_EVERY
        if changed or now - self._written_at > longest or verdict.effect == "act":
            self._write_status(
                verdict=verdict.kind,
                verdict_reason=verdict.reason,
                verdict_progress=round(verdict.progress, 3),
                warning=warning,
                used=used,
            )

    def _warning(self, judgement: Judgement) -> RuleWarning | None:
        """The current warning. The same one persists, unless the time of the stop has moved."""
        verdict, acts_in = judgement.warned, judgement.acts_in
        if verdict is None or judgement.fired:
            return None
        now = time.time()
        acts_at = None if acts_in is None or self._plan.dry_run else now + acts_in
        found = RuleWarning(
            rule=verdict.rule,
            word="may hang" if verdict.hang else f"may be {verdict.rule}",
            reason=verdict.reason,
            at=now,
            acts_at=acts_at,
        )
        before = self._status.warning
        if before is None or (before.rule, before.reason) != (found.rule, found.reason):
            return found
        moved = before.acts_at is None or acts_at is None or abs(acts_at - before.acts_at) > STATUS_EVERY
        return msgspec.structs.replace(before, acts_at=acts_at) if moved else before

    def _log_once(self, what: str, message: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            log(message)


def _scope_of(plan: Plan, environment: Mapping[str, str]) -> Scope:
    if plan.gpus in {OF_THE_JOB, "mine"}:
        return JobScope(environment, user_name(os.getuid()), only_used=plan.gpus == "mine")
    return MachineScope(plan.gpus, environment)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, StokerError) else f"internal error: {type(error).__name__}: {error}"


def log(message: str) -> None:
    emit(ERROR, f"stoker: {message}\n")
