"""One run from its launch to its end: starts the command, watches its GPUs, passes signals on, stops it, says why."""

import contextlib
import math
import os
import pwd
import signal
import socket
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from stoker.errors import StokerError
from stoker.gpus.model import Look, known
from stoker.gpus.prober import Prober, Sampler
from stoker.gpus.report import describe
from stoker.gpus.source import AbsentError
from stoker.gpus.spawn import forked
from stoker.gpus.visible import select_gpus
from stoker.paths import state_home
from stoker.procfs import boot_id, read_stat
from stoker.rules.judge import Judge
from stoker.rules.registry import in_words, stored_form
from stoker.rules.rule import JobProgress, Verdict
from stoker.rules.scope import JobScope, MachineScope, Scope
from stoker.runs.journal import Journal
from stoker.runs.loop import CommandHandler, CommandLoop, helpers_of
from stoker.runs.plan import OF_THE_JOB, Plan
from stoker.runs.processes.reaper import (
    Failed,
    LaunchRequest,
    OrphanStop,
    Program,
    Reaper,
    exit_code,
    fork_reaper,
)
from stoker.runs.processes.signals import FORWARDED, Received, SignalStream, Terminal
from stoker.runs.processes.termination import TerminationOutcome
from stoker.runs.record import Ending, NoRecord, Record, Records, Spec, Status, readable
from stoker.streams import ERROR, emit
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.runs.postmortem.report import Queued

# Commands that are over before this never pay for a GPU helper.
FIRST_LOOK: Final = 3.0
# Where there is no GPU, look again from time to time: drivers are loaded late on freshly booted machines.
ABSENT_RETRY: Final = 60.0
# How old the progress in the status on disk may be; changes of the verdict are written at once.
STATUS_EVERY: Final = 10.0
# Between two rounds of the loop after one that failed, so that a trouble that lasts does not keep a core busy.
TROUBLE_PAUSE: Final = 0.2
# The driver takes seconds to clear the memory of a large job; who holds it longer than this is named.
MEMORY_PATIENCE: Final = 15.0
MEMORY_POLL: Final = 0.2
OWN_FAILURE: Final = 125
_FROM_TERMINAL: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def supervise(plan: Plan, on_rule_stop: Callable[[Verdict], None] | None = None) -> int:
    """The exit code that the whole command ends with. `on_rule_stop` is called after a rule has stopped it."""
    prober = Prober(plan.source, deadline=plan.deadline, start=forked)
    _check_gpus(plan, prober)
    record = _record_of(plan)
    with SignalStream(FORWARDED) as signals, contextlib.closing(Terminal()) as terminal:
        reaper = _fork_reaper(prober)
        supervisor = Supervisor(plan, record, prober, os.environ, signals, reaper)
        try:
            code = supervisor.run()
        finally:
            if supervisor.status.ending != "by itself" or not reaper.exited:
                terminal.restore()
            reaper.close()
            record.forget_if_empty()
    if on_rule_stop is not None and supervisor.stopped_by is not None:
        on_rule_stop(supervisor.stopped_by)
    return code


def _record_of(plan: Plan) -> Record:
    """The record is ours, the job is somebody's: without a place for the one the other runs all the same."""
    record: Record = NoRecord()
    try:
        records = Records(state_home())
        # First: what is forgotten may be the space that is missing.
        records.prune()
        record = records.create()
        record.write_spec(spec_of(plan, record))
    except StokerError as error:
        # What cannot be written to a place that is there is tried again, and told of then.
        if not record.is_kept:
            _log(f"{error}; the command runs without a record")
            record.write_spec(spec_of(plan, record))
    return record


def _fork_reaper(prober: Prober) -> Reaper:
    try:
        return fork_reaper(orphaned=note_orphaned, helpers=lambda: helpers_of(prober))
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise StokerError(f"the command cannot be started: {why}", exit_code=OWN_FAILURE) from None


def spec_of(plan: Plan, record: Record) -> Spec:
    """What is written down of the plan before anything is started, with this process as its supervisor."""
    return Spec(
        id=record.id,
        command=tuple(map(readable, plan.command)),
        directory=readable(plan.directory or _here()),
        host=socket.gethostname(),
        user=_user(),
        boot=boot_id(),
        supervisor=os.getpid(),
        supervisor_started=read_stat("/proc/self/stat").started,
        started=time.time(),
        policy=stored_form(plan.policies, whole=True),
        rule=in_words(plan.policies),
        gpus=plan.gpus,
        signal=plan.signal_name,
        grace=plan.grace,
        max_time=plan.max_time,
        dry_run=plan.dry_run,
        idle_exit_code=plan.idle_exit_code,
    )


def note_orphaned(stop: OrphanStop) -> None:
    """Called in the reaper when the supervisor was killed: the job was stopped, and somebody should read why."""
    record = Record(Path(stop.about))
    status = record.status()
    if status.state == "ended":
        return  # it was killed after its last word
    code = None if stop.status is None else exit_code(stop.status)
    ending: Ending = "supervisor killed"
    reason = f"Stoker itself was killed, so the job was stopped: {stop.words}."
    # Unless it was being stopped already: then its end was no more its own.
    if stop.ended_before and status.state == "running":
        ending, reason = "by itself", f"It ended by itself with code {code}, and Stoker was killed a moment later."
    with contextlib.suppress(StokerError):
        record.write_status(
            msgspec.structs.replace(
                status,
                state="ended",
                ending=ending,
                reason=reason,
                exit_code=code,
                left=stop.survivors,
                ended=time.time(),
            )
        )


class StopRequest(NamedTuple):
    """Somebody wants the job stopped."""

    ending: Ending
    reason: str
    code: int


class Controller(Protocol):
    """Whoever else has a say in a run: for a job of the queue, its worker and its lease."""

    def fileno(self) -> int:
        """Readable when `attend` has something to do."""

    def due(self) -> float:
        """When to call `attend` at the latest, in monotonic seconds."""

    def poll(self) -> StopRequest | None:
        """Hears what there is. Never blocks."""

    def on_signal(self, received: Received) -> StopRequest | None:
        """What a signal to the supervisor means; None: it is for the job."""

    def on_started(self) -> None:
        """Called when the job was started: what could wait until then is done now. Never raises."""

    def max_grace(self) -> float:
        """How many seconds a job that is stopped now may still have: after that another may run it."""

    def on_ended(self, status: Status) -> None:
        """Called the moment the run is over: what comes after is tidying up."""


class Supervisor(CommandHandler[int]):
    """Runs one plan."""

    def __init__(
        self,
        plan: Plan,
        record: Record,
        prober: Prober,
        environment: Mapping[str, str],
        signals: SignalStream,
        reaper: Reaper,
        controller: Controller | None = None,
    ) -> None:
        self._plan = plan
        self._record = record
        self._controller = controller
        mark = {"STOKER_RUN": record.id, "STOKER_RUN_DIR": str(record.directory)} if record.is_kept else {}
        self._environment = {**environment, **mark}
        self._prober = prober
        self._journal = Journal(record)
        self._status = Status()
        self._begun = time.monotonic()
        self._noted_at = self._begun
        self.unwritten = False
        """Whether the disk did not take the last status."""
        self._judge = Judge(
            plan.policies,
            self._begun,
            "stop the job",
            look_takes=prober.deadline,
            unless="it works or is snoozed",
            dry_run=plan.dry_run,
        )
        every = self._judge.every
        self._sampler = Sampler(prober, every, first=min(every, FIRST_LOOK) if plan.policies else math.inf)
        self._scope = _scope_of(plan, environment, _Owned(reaper))
        self._signals = signals
        self._reaper = reaper
        self._loop = CommandLoop(self, reaper, signals=signals, sampler=self._sampler)
        self._judged: frozenset[str] | None = None
        self._logged: set[str] = set()
        self._snoozed_until: float | None = None
        self.stopped_by: Verdict | None = None
        """The verdict by which a rule stopped the run."""
        self._log_path: str | None = None

    @property
    def status(self) -> Status:
        return self._status

    def run(self, log: str | None = None, log_limit: int = 0) -> int:
        """The exit code that the whole command ends with. `log` is the file that keeps the job's output."""
        self._log_path = log
        with contextlib.ExitStack() as goodbye:
            goodbye.callback(self._journal.close)
            goodbye.callback(self._prober.leave)
            self._begin(log, log_limit)
            if self._controller is not None:
                self._controller.on_started()
            self._note(state="running", job=self._reaper.job and self._reaper.job.pid)
            return self._loop.run()

    def _begin(self, log: str | None, log_limit: int) -> None:
        plan = self._plan
        self._status = msgspec.structs.replace(self._status, containment=self._reaper.containment)
        program = Program(
            plan.command,
            self._environment,
            directory=plan.directory,
            session=log is not None,
            mask=self._signals.original,
        )
        about = str(self._record.directory)
        self._reaper.start(LaunchRequest(program, plan.signal_number, plan.grace, about, log, log_limit))

    # Events of the loop

    def descriptors(self) -> tuple[int, ...]:
        return () if self._controller is None else (self._controller.fileno(),)

    def due(self) -> float:
        due = math.inf if self._controller is None else self._controller.due()
        if self._plan.max_time is not None and "time limit" not in self._logged:
            due = min(due, self._begun + self._plan.max_time)
        if self.unwritten:
            due = min(due, self._noted_at + STATUS_EVERY)
        return due

    def on_tick(self) -> int | None:
        if self._controller is not None and (request := self._controller.poll()) is not None:
            return self._stop_as_requested(request)
        if self.unwritten and time.monotonic() >= self._noted_at + STATUS_EVERY:
            self._note()
        return self._check_time()

    def on_signal(self, received: Received) -> int | None:
        request = None if self._controller is None else self._controller.on_signal(received)
        return None if request is None else self._stop_as_requested(request)

    def on_second_interrupt(self) -> int:
        """No report, no grace: a person is waiting."""
        reason = "Ctrl-C was pressed twice."
        self._note(state="stopping", ending="signal", reason=reason)
        outcome = self._take_down(0.0)
        self._note(left=outcome.survivors)
        _log(f"{reason.rstrip('.')}: {outcome.in_words()}")
        return self._over("signal", reason, 128 + signal.SIGINT)

    def on_suspended(self, signum: int) -> None:
        """Suspends this process with the command, so that the shell shows its prompt."""
        if signum in _FROM_TERMINAL:
            os.kill(os.getpid(), signal.SIGTSTP)

    def on_deadline_passed(self) -> int:
        reason = "Its supervisor did not respond for so long that another machine may run the job."
        return self._stop_as_requested(StopRequest("lease", reason, 128 + signal.SIGTERM))

    def on_error(self, error: Exception) -> None:
        """A bug in Stoker, or a machine short of memory or descriptors, must never cost somebody's job."""
        self._log_once("round", f"{_in_words(error)}; the job goes on")
        time.sleep(TROUBLE_PAUSE)

    def on_look(self, look: Look) -> int | None:
        return self._judge_look(look)

    def on_look_failed(self, error: Exception) -> None:
        if isinstance(error, AbsentError):
            self._log_once("absent", f"{error}; the command runs, but whether it is idle cannot be seen")
        else:
            self._log_once("failed", f"{_in_words(error)}; the command goes on, and is looked at again in a minute")
        self._sampler.postpone(ABSENT_RETRY)

    # Watching

    def _judge_look(self, look: Look) -> int | None:
        self._keep(look)
        self._read_snooze()
        observation = self._scope.observe(look, self._progress())
        self._judged = frozenset(activity.uuid for activity in observation.activities) or None
        judgement = self._judge.observe(observation)
        self._sampler.no_later_than(self._judge.due())
        self._note_verdict(judgement.verdict)
        stops = judgement.fired and not self._plan.dry_run
        for message in judgement.messages if not stops else ():
            _log(message.text)
        return self._stop_by_rule(judgement.verdict) if stops else None

    def _keep(self, look: Look) -> None:
        self._journal.append(look)
        if self._journal.failure is not None:
            self._log_once("readings", f"{self._journal.failure}; the job goes on without a record of its readings")

    def _progress(self) -> JobProgress:
        """What the job has printed, where its output is kept."""
        if self._log_path is None:
            return JobProgress()
        try:
            found = os.stat(self._log_path)  # noqa: PTH116 - one call
        except OSError:
            return JobProgress()
        return JobProgress(found.st_size, time.monotonic() - (time.time() - found.st_mtime))

    def _read_snooze(self) -> None:
        """Asked before every verdict: a job that says "leave me alone" is heard at once."""
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
        self._status = msgspec.structs.replace(self._status, rule=verdict.rule)
        reason = f"{verdict.reason.rstrip('.')}."
        code = self._stop(verdict.kind, reason, code=self._plan.idle_exit_code, verdict=verdict)
        self.stopped_by = None if code is None else verdict
        return code

    def _check_time(self) -> int | None:
        limit = self._plan.max_time
        if limit is None or time.monotonic() < self._begun + limit:
            return None
        if self._plan.dry_run:
            self._log_once("time limit", f"would stop the job now: it has run for {format_duration(limit)} (dry run)")
            return None
        reason = f"It had run for {format_duration(limit)}, which was its time limit."
        return self._stop("time limit", reason, code=self._plan.idle_exit_code)

    # Endings

    def on_start_failed(self, failed: Failed) -> int:
        reason = f"cannot run {self._plan.command[0]!r}: {failed.why}"
        _log(reason)
        # A queue has other machines, and this one has later.
        ending: Ending = "not started" if failed.transient and self._controller is not None else "could not start"
        return self._over(ending, f"{reason}.", failed.exit_code)

    def on_exit(self, status: int) -> int:
        code = exit_code(status)
        self._reaper.update()  # it may have said in the same breath that nothing is left
        left, settled = self._reaper.scan_processes()
        if left:
            _log(f"the command ended and left {len(left)} process(es) behind: they are stopped")
        if left or not settled:
            self._take_down(self._plan.grace)
        return self._over("by itself", f"It ended by itself with code {code}.", code)

    def on_reaper_killed(self) -> int:
        """Somebody killed the process between us and the job: what it had started is ours now, and is stopped."""
        reason = "The process that guards the job was killed from outside, so the job was stopped."
        _log(reason)
        self._take_down(self._plan.grace)
        return self._over("signal", reason, OWN_FAILURE)

    def _stop_as_requested(self, order: StopRequest) -> int:
        """No report: whoever gave the order knows why."""
        self._note(state="stopping", ending=order.ending, reason=order.reason)
        outcome = self._take_down(self._plan.grace)
        self._note(left=(*outcome.survivors, *self._gpus_still_held()))
        _log(f"{order.reason.rstrip('.')}: {outcome.in_words()}")
        return self._over(order.ending, order.reason, order.code)

    def _stop(self, ending: Ending, reason: str, *, code: int, verdict: Verdict | None = None) -> int | None:
        """The report first, while there is something to report on; then the signal, the grace, and the kill.

        Returns None when it was called off: a snooze that comes before the first signal is in time.
        """
        from stoker.runs.postmortem.report import Postmortem

        self._note(state="stopping", ending=ending, reason=reason)
        postmortem: Postmortem | None = None
        with self._explaining():
            postmortem = Postmortem(self._record, self._status, self._journal, self._judged, self._queued(), verdict)
            postmortem.collect([process.pid for process in self._reaper.processes()], hurry=self._signals)
        if verdict is not None and self._record.snooze() is not None:
            with contextlib.suppress(OSError):
                self._record.report.unlink(missing_ok=True)
            self._note(state="running", ending=None, reason="", rule="")
            return None
        outcome = self._take_down(self._plan.grace)
        left = (*outcome.survivors, *self._gpus_still_held())
        self._note(left=left)
        if postmortem is not None:
            with self._explaining():
                postmortem.publish(f"{outcome.in_words()}; exit code {code}", left)
        return self._over(ending, reason, code)

    def _queued(self) -> "Queued | None":
        """The queued job that this is an attempt of: only its output is kept by us."""
        from stoker.runs.postmortem.report import Queued

        return None if self._log_path is None else Queued(self._environment["STOKER_JOB_ID"], Path(self._log_path))

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """An explanation that fails must not keep a job from being stopped: what was decided is done."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the stop goes on
            _log(f"the report is incomplete: {_in_words(error)}")

    def _take_down(self, grace: float) -> TerminationOutcome:
        if self._controller is not None:
            grace = min(grace, self._controller.max_grace())
        return self._loop.stop(self._plan.signal_number, grace)

    def _gpus_still_held(self) -> tuple[str, ...]:
        """Waits until the driver has taken the memory back, and names who still holds some if it does not."""
        if not self._status.used:
            return ()
        ends = time.monotonic() + MEMORY_PATIENCE
        while True:
            try:
                look = self._prober.look()
            except AbsentError as absent:
                return (f"whether the GPU memory came back cannot be seen: {absent}",)
            if look.problem:
                return (f"whether the GPU memory came back cannot be seen: {look.problem.reason}",)
            holders = self._holders(look)
            if not holders or time.monotonic() > ends or self._signals.read():
                return holders
            time.sleep(MEMORY_POLL)

    def _holders(self, look: Look) -> tuple[str, ...]:
        """Who of the job still holds one of its GPUs: a process that the driver lists and that is ours, or gone."""
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

    def _over(self, ending: Ending, reason: str, code: int) -> int:
        ended = msgspec.structs.replace(
            self._status, state="ended", ending=ending, reason=reason, exit_code=code, ended=time.time()
        )
        if self._controller is not None:
            # Before it is on disk: the next job waits for this word, and whoever hears it keeps it.
            self._controller.on_ended(ended)
        self._status = ended
        self._note()
        return code

    # Telling

    def _note(self, **changes: Any) -> None:
        """Changes the status on disk. A disk that is full costs the run its record, never the job."""
        self._status = msgspec.structs.replace(self._status, **changes)
        self._noted_at = time.monotonic()
        try:
            self._record.write_status(self._status)
            self.unwritten = False
        except StokerError as error:
            self.unwritten = True
            self._log_once("record", f"{error}; the job goes on")

    def _note_verdict(self, verdict: Verdict) -> None:
        used = tuple(sorted(self._scope.used)) if isinstance(self._scope, JobScope) else self._status.used
        now = time.monotonic()
        changed = (verdict.kind, used) != (self._status.verdict, self._status.used)
        if changed or now - self._noted_at > STATUS_EVERY or verdict.effect == "act":
            self._note(
                verdict=verdict.kind, verdict_reason=verdict.reason, progress=round(verdict.progress, 3), used=used
            )

    def _log_once(self, what: str, reason: str) -> None:
        """Says something once, until it is over and comes again."""
        if what not in self._logged:
            self._logged.add(what)
            _log(reason)


class _Owned:
    """The pids of a job, for a membership test: asked only for those that hold a GPU."""

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper

    def __contains__(self, pid: object) -> bool:
        return isinstance(pid, int) and self._reaper.owns(pid)


def _scope_of(plan: Plan, environment: Mapping[str, str], pids: Container[int]) -> Scope:
    if plan.gpus in {OF_THE_JOB, "mine"}:
        return JobScope(environment, _user(), pids, only_used=plan.gpus == "mine")
    return MachineScope(plan.gpus, environment)


def _check_gpus(plan: Plan, prober: Prober) -> None:
    """GPUs that were typed must be there; where nothing can be read now, that is told later."""
    if plan.gpus in {OF_THE_JOB, "mine", "visible", "all"}:
        return
    with contextlib.suppress(AbsentError):
        look = prober.look()
        if look.gpus:
            select_gpus(look.gpus, plan.gpus)


def _here() -> str:
    """A directory that was removed meanwhile is no reason not to run: a shell would run the command there too."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "(removed)"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, StokerError) else f"internal error: {type(error).__name__}: {error}"


def _log(reason: str) -> None:
    emit(ERROR, f"stoker: {reason}\n")
