"""Runs probes at the sizes that the search chooses, until it has an answer."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.fit.measurements import BLOCK, MemoryTracker, Rates
from stoker.fit.model import (
    Capacity,
    Fitted,
    NextProbe,
    NothingFitsError,
    Overrides,
    ProbeFailedError,
    ProbeOptions,
    ProbeOutcome,
    SearchOptions,
    argv,
)
from stoker.fit.oom import host_kills, is_out_of_memory, is_silent, was_killed
from stoker.fit.probe import Probe, ProbeReport, ProbeSetup
from stoker.fit.search import Search
from stoker.gpus.model import Gpu, Look, Reading, known
from stoker.gpus.prober import Prober
from stoker.gpus.visible import visible_gpus
from stoker.paths import private_directory
from stoker.queue.commands import Command
from stoker.units import format_duration, format_memory

# The driver takes seconds to clear the memory of a large program that has ended.
MEMORY_PATIENCE: Final = 15.0
MEMORY_POLL: Final = 0.2
# Enough lines to explain a failure, and few enough for a screen.
LAST_LINES: Final = 12
# A probe that failed with this share of the free memory in use probably needed more.
NEARLY_ALL: Final = 0.85
# Exit codes of wrong usage and of missing or unexecutable commands, for which no smaller size helps.
_SAYS_WHY: Final = (2, 126, 127)
_LONGEST_LINE: Final = 300
_LONGEST_REASON: Final = 100


class FitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command to fit, with its environment."""

    command: Command
    search_options: SearchOptions = SearchOptions()
    overrides: Overrides = Overrides()
    limits: ProbeOptions = ProbeOptions()
    rate: str | None = None
    """A regular expression that finds the throughput in the output."""
    environment: Mapping[str, str]
    """The environment of probes, which determines the visible GPUs."""
    directory: str | None = None
    gpus: tuple[str, ...] = ()
    """The uuids of the assigned GPUs; empty for the first visible one."""
    outputs: Path
    """The directory for the output of probes."""
    most_memory: int | None = None
    """The limit in bytes on each GPU, regardless of free memory."""
    name: str | None = None
    """The prefix of ids of probes, for commands with `{id}`: a real run must not resume from a probe's checkpoint."""

    def check(self) -> None:
        """Raises BadInputError for invalid options, before anything runs."""
        self.search_options.check()
        self.overrides.check(self.command, self.search_options.effective)
        self.limits.pattern()
        Rates(self.rate)


class Fitter:
    """Serves one request, in a single-threaded process, since it forks reapers."""

    def __init__(
        self,
        request: FitRequest,
        prober: Prober,
        log: Callable[[str], None] = lambda _message: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`log` gets progress messages. `check` is called ten times a second and raises to abort."""
        request.check()
        self._request = request
        self._prober = prober
        self._log = log
        self._check = check
        self._before = self._look()
        self.gpus = _expected(self._before, request)
        """The expected GPUs of the command, later the ones that it used."""
        self._watch: MemoryTracker | None = None
        """The tracker of the last probe."""
        self._capacity = Capacity(0, 0)
        """The capacity at the last look."""
        self._probes = 0
        self._smallest: int | None = None
        """The smallest size that ran."""
        self._kills: int | None = None
        """The count of OOM kills at the start of the probe."""
        self._doubt: ProbeFailedError | None = None
        """The failure of a probe before any smaller size ran; a smaller probe shows whether the size caused it."""
        self._suspects: dict[int, int | None] = {}
        """Exit codes of sizes that failed, probably for lack of memory."""

    def capacity(self) -> Capacity:
        """The memory that the command can use on each of its GPUs now."""
        look = self._settled()
        self._before = look
        readings = {reading.uuid: reading for reading in look.readings}
        room = [_room(gpu, readings.get(gpu.uuid)) for gpu in self.gpus]
        free = min(one.free for one in room)
        if self._request.most_memory is not None:
            free = min(free, self._request.most_memory)
        self._capacity = Capacity(free, min(one.card for one in room))
        return self._capacity

    def limit(self) -> int:
        """The current limit of one run in bytes."""
        return self.capacity().limit(self._request.search_options)

    def fit(self) -> Fitted:
        """Raises NothingFitsError, ProbeFailedError and what `check` raises. No process is left running."""
        search = Search(self._request.search_options, self.capacity())
        try:
            while not isinstance(found := search.next(), Fitted):
                search.record(self._observe(found))
                search.allow(self.capacity())
        except NothingFitsError:
            if self._doubt is not None:
                raise self._doubt from None
            raise
        return self._annotated(found)

    def _observe(self, trial: NextProbe) -> ProbeOutcome:
        request = self._request
        accumulate = self._accumulate(trial.size)
        self._probes += 1
        name = None if request.name is None else f"{request.name}{self._probes}"
        command = request.overrides.probe(request.command, trial.size, accumulate, name)
        environment = request.overrides.environment(untracked(request.environment, name), trial.size)
        uuids = frozenset(gpu.uuid for gpu in self.gpus)
        setup = ProbeSetup(
            self._prober, environment, request.directory, request.limits, uuids, self._ceiling(), self._check
        )
        self._log(f"batch size {trial.size}: {'making sure' if trial.verification else 'trying'}")
        rates = Rates(request.rate)
        self._kills = host_kills()
        log = request.outputs / f"probe-{trial.size}{'-again' if trial.verification else ''}.out"
        report, self._watch = Probe(setup, argv(command), log, self._before, rates).run()
        return self._understood(trial, report, self._watch, rates)

    def _understood(self, trial: NextProbe, report: ProbeReport, watch: MemoryTracker, rates: Rates) -> ProbeOutcome:
        """The outcome of a probe. Raises ProbeFailedError if its memory is unknown."""
        out_of_memory = ProbeOutcome(
            size=trial.size,
            outcome="oom",
            peak=watch.peak or None,
            seconds=report.seconds,
            verification=trial.verification,
        )
        if report.ending == "ceiling":
            self._log(
                f"batch size {trial.size}: stopped after {format_duration(report.seconds)}, as it took "
                f"{format_memory(watch.peak)} and the rest of the GPU is for others"
            )
            return out_of_memory
        if reason := self._out_of_memory(trial, report):
            shown = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}…"
            self._log(f"batch size {trial.size}: out of memory after {format_duration(report.seconds)} ({shown})")
            return out_of_memory
        if report.code:
            self._suspect(trial, report, watch)
            return msgspec.structs.replace(out_of_memory, suspected=True)
        if not watch.peak:
            if watch.blind is not None:
                raise ProbeFailedError(f"the memory of the probe could not be watched: {watch.blind}")
            raise ProbeFailedError(self._never_seen(trial, report))
        self._use(watch)
        self._smallest = min(trial.size, self._smallest or trial.size)
        self._log(
            f"batch size {trial.size}: took {format_memory(watch.peak)}, watched for {format_duration(report.seconds)}"
            + ("" if report.ending != "time" else ", and it may not have shown all")
        )
        return msgspec.structs.replace(
            out_of_memory,
            outcome="fits",
            rate=rates.rate(trial.size * (self._accumulate(trial.size) or 1)),
            settled=report.ending != "time",
        )

    def _suspect(self, trial: NextProbe, report: ProbeReport, watch: MemoryTracker) -> None:
        """Raises ProbeFailedError, unless lack of memory is the probable cause of an unexplained failure."""
        failure = ProbeFailedError(
            f"the probe at batch size {trial.size} failed with code {report.code} after "
            f"{format_duration(report.seconds)}, and nothing says that it was for lack of memory"
            f"{_last_lines(report.output)}"
        )
        why = self._circumstance(trial, report, watch)
        if why is None:
            may_be = report.code not in _SAYS_WHY and (watch.peak > 0 or is_silent(report.output))
            if self._doubt is not None or not may_be or trial.size == 1:
                raise self._doubt or failure
            self._doubt = failure
            why = "or for another reason: a smaller size shows"
        self._suspects[trial.size] = report.code
        self._log(
            f"batch size {trial.size}: failed with code {report.code} after {format_duration(report.seconds)}, "
            f"probably out of memory ({why})"
        )

    def _circumstance(self, trial: NextProbe, report: ProbeReport, watch: MemoryTracker) -> str | None:
        kills = host_kills()
        if was_killed(report.code) and kills is not None and self._kills is not None and kills > self._kills:
            return "the kernel killed a process for lack of the host's memory"
        if watch.peak >= NEARLY_ALL * self._capacity.free > 0:
            return f"it held {format_memory(watch.peak)} of {format_memory(self._capacity.free)}"
        if self._smallest is not None and self._smallest < trial.size:
            return f"a batch of {self._smallest} runs"
        return None

    def _ceiling(self) -> int | None:
        """The limit on a shared GPU, which a probe must not exceed even for a moment."""
        request = self._request
        if request.most_memory is None and request.search_options.per_gpu == 1:
            return None
        return int(self._capacity.share(request.search_options))

    def _out_of_memory(self, trial: NextProbe, report: ProbeReport) -> str | None:
        smaller_ran = self._smallest is not None and self._smallest < trial.size
        return is_out_of_memory(report.output, report.code, smaller_ran=smaller_ran)

    def _accumulate(self, size: int) -> int | None:
        """The number of accumulation steps of this size for the effective batch."""
        effective = self._request.search_options.effective
        return None if effective is None else -(-effective // size)

    def _never_seen(self, trial: NextProbe, report: ProbeReport) -> str:
        where = " or ".join(f"GPU {gpu.index}" for gpu in self.gpus)
        ended = "ended" if report.ending == "exited" else "was stopped"
        return (
            f"the probe at batch size {trial.size} {ended} after {format_duration(report.seconds)} and was never seen "
            f"to use {where}: let it run for longer (--probe-time, --probe-args), or see what it prints"
            f"{_last_lines(report.output)}"
        )

    def _use(self, watch: MemoryTracker) -> None:
        """Limits the GPUs to those that the probe used."""
        used = tuple(gpu for gpu in self._before.gpus if gpu.uuid in watch.peaks)
        if used != self.gpus:
            self.gpus = used
            self._log(f"it uses {', '.join(f'GPU {gpu.index}' for gpu in used)}")

    def _annotated(self, fitted: Fitted) -> Fitted:
        suspects = [
            f"a batch of {size} failed with code {code}, probably for lack of memory"
            for size, code in sorted(self._suspects.items())
        ]
        notes = [fitted.note, *suspects, self._watch.note if self._watch else ""]
        return msgspec.structs.replace(fitted, note="; ".join(filter(None, notes)))

    # Looks while no probe runs

    def _look(self) -> Look:
        look = self._prober.look()
        if look.problem is not None:
            raise StokerError(f"the GPUs cannot be read, so nothing can be fitted: {look.problem.reason}")
        return look

    def _settled(self) -> Look:
        """A look after the memory of the last probe was freed."""
        ends = time.monotonic() + MEMORY_PATIENCE
        while self._holds(look := self._look()) and time.monotonic() < ends:
            self._check()
            time.sleep(MEMORY_POLL)
        return look

    def _holds(self, look: Look) -> bool:
        if self._watch is None:
            return False
        before = {reading.uuid: reading for reading in self._before.readings}
        return any(self._is_held(reading, before.get(reading.uuid)) for reading in look.readings)

    def _is_held(self, reading: Reading, before: Reading | None) -> bool:
        assert self._watch is not None  # noqa: S101 - for the type checker
        if reading.uuid not in self._watch.peaks:
            return False
        if known(reading.processes) and self._watch.pids:
            return any(process.pid in self._watch.pids for process in reading.processes)
        if before is None or not known(reading.memory_used) or not known(before.memory_used):
            return False
        return reading.memory_used > before.memory_used + BLOCK


def _expected(look: Look, request: FitRequest) -> tuple[Gpu, ...]:
    if request.gpus:
        given = tuple(gpu for gpu in look.gpus if gpu.uuid in request.gpus)
    else:
        given = visible_gpus(look.gpus, request.environment)[:1]
    if not given:
        raise BadInputError("the command would see no GPU here: CUDA_VISIBLE_DEVICES may hide them, or use --gpu")
    return given


def _room(gpu: Gpu, reading: Reading | None) -> Capacity:
    """The memory of the card, and the part that others leave free."""
    if reading is None:
        raise StokerError(f"the driver does not list GPU {gpu.index} any more, so nothing can be fitted to it")
    total = reading.memory_total if known(reading.memory_total) else gpu.memory
    unreadable = f"the memory of GPU {gpu.index} cannot be read, so nothing can be fitted to it"
    if not known(total):
        raise StokerError(f"{unreadable}: {total.reason}")
    if not known(reading.memory_used):
        raise StokerError(f"{unreadable}: {reading.memory_used.reason}")
    return Capacity(max(0, total - reading.memory_used), total)


def _last_lines(output: str) -> str:
    lines: Sequence[str] = [line.rstrip() for line in output.replace("\r", "\n").splitlines() if line.strip()]
    if not lines:
        return "; it printed nothing"
    report = "\n".join(f"    {line[:_LONGEST_LINE]}" for line in lines[-LAST_LINES:])
    return f"; its last lines:\n{report}"


# With one of these, a tracker continues the named run.
_RUNS: Final = frozenset(
    {
        *("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME", "WANDB_SWEEP_ID"),
        *("MLFLOW_RUN_ID", "NEPTUNE_CUSTOM_RUN_ID", "COMET_EXPERIMENT_KEY", "CLEARML_TASK_ID"),
    }
)
_OFF: Final = {"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug"}


def untracked(environment: Mapping[str, str], name: str | None) -> dict[str, str]:
    """The environment of a probe, without experiment tracking; `name` replaces the job's id."""
    kept = {variable: value for variable, value in environment.items() if variable not in _RUNS}
    return {**kept, **_OFF, **({} if name is None else {"STOKER_JOB_ID": name})}


# Outputs are kept to explain failed probes.
KEPT_FOR: Final = 7 * 86400.0


@contextlib.contextmanager
def probe_outputs(home: Path, log: Callable[[str], None]) -> Iterator[Path]:
    """A new directory for the output of probes. It is kept and logged after a failed probe with output."""
    directory = _fresh(home)
    keep = False
    try:
        yield directory
    except ProbeFailedError:
        if any(file.stat().st_size for file in directory.iterdir()):
            log(f"the whole output of the probes is in {directory}")
            keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _fresh(home: Path) -> Path:
    try:
        private_directory(home)
        directory = Path(tempfile.mkdtemp(dir=home))
    except OSError as error:
        raise StokerError(f"the output of probes cannot be kept in {home}: {error.strerror}") from None
    for older in home.iterdir():
        with contextlib.suppress(OSError):
            if older.stat().st_mtime < time.time() - KEPT_FOR:
                shutil.rmtree(older)
    return directory
