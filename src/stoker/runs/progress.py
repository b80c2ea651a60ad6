"""The progress of a job, observed by its supervisor without touching the job.

Each look reads several sources. The most trusted one with at least two increases counts, and less trusted ones never
replace it: a heartbeat in the output continues while the training hangs.
"""

import math
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, get_args

from stoker.gpus.model import JobProgress, Trust
from stoker.logs.wandb import BLOCK, count_steps
from stoker.procfs import KeptFiles, Stat
from stoker.runs.processes.usage import ProcessUsage, UsageMeter, WrittenFile, written_files
from stoker.runs.record import RankProgress, RunProgress
from stoker.step_file import RankSteps, read_steps

if TYPE_CHECKING:
    from stoker.logs.steps import StepCounter

# A source counts after this many increases; a single one may be the start of a file.
_LEAST_INCREASES: Final = 2
# The number of bytes read from a file per look, from the end if it grows faster.
_MOST_BYTES: Final = 64 * 1024
_MOST_TAILS: Final = 8
# The limit for scanning a large process tree, as a share of a core, unless the last scan is older than a minute.
_MOST_CPU: Final = 0.001
_OLDEST_SCAN: Final = 60.0
# In nanoseconds, and longer than a tick of the kernel's clock.
_TICK: Final = 100_000_000
# The largest number that fits into a recording.
_MOST_STEPS: Final = 2**53

_LOG_NAME: Final = re.compile(r"\.(?:log|out|err|txt|jsonl)$")
_EVENTS_NAME: Final = re.compile(r"(?:^|/)events\.out\.tfevents\.[^/]*$|\.csv$")
_CHECKPOINT_NAME: Final = re.compile(r"\.(?:ckpt|pt|pth|safetensors|distcp)(?:\.[^/]*)?$|/checkpoint-\d[^/]*/[^/]*$")
# A quick filter, since most files of a job are none of these.
_NAME: Final = re.compile("|".join((_LOG_NAME.pattern, _EVENTS_NAME.pattern, _CHECKPOINT_NAME.pattern, r"\.wandb$")))
_STANDARD_OUTPUT: Final = (1, 2)


class _Job(Protocol):
    """A source of the job's processes."""

    def measured_processes(self, files: KeptFiles) -> list[Stat]:
        """The live processes that a single scan finds."""


class _Source:
    """The steps seen by one source."""

    def __init__(self) -> None:
        self.steps = 0
        self.since = 0.0
        self._increases = 0
        self._looked: float | None = None

    def advance(self, by: int, at: float, since: float | None = None) -> None:
        """Adds steps. `at`: the time of the look. `since`: the time of the last step, if known."""
        self.steps = min(self.steps + by, _MOST_STEPS)
        self.since = at if since is None else min(since, at)
        self._increases += at != self._looked
        self._looked = at

    @property
    def counts(self) -> bool:
        return self._increases >= _LEAST_INCREASES


class ProgressTracker:
    """Reads the sources at every look. It never raises and never blocks."""

    def __init__(
        self,
        job: _Job,
        *,
        directory: str | None = None,
        log: Callable[[], str | None] = lambda: None,
        every: float = 5.0,
    ) -> None:
        """`directory`: the run's. `log`: the file with the job's output, if Stoker writes it."""
        self._job = job
        self._directory = directory
        self._device = _device(directory)
        """The file system of the record, on which the supervisor depends anyway."""
        self._log = log
        self._every = every
        self._sources: dict[Trust, _Source] = {trust: _Source() for trust in _BEST_FIRST}
        self._ranks: dict[int, RankSteps] = {}
        self._directory_changed = -1
        """When a file of the run was last created or replaced, if that is over."""
        self._tails: dict[str, _Tail] = {}
        self._positions: dict[tuple[str, int, int], int] | None = None
        """Positions in the files that the job writes; None before the first scan."""
        self._files = KeptFiles()
        self._meter = UsageMeter(self._files.read)
        self._usage = ProcessUsage()
        self._scan_due = self._files_due = -math.inf
        self._cost = 0.0
        """The CPU seconds of the last scan."""

    def observe(self, at: float, pids: tuple[int, ...] = ()) -> JobProgress:
        """The progress at a look. `pids`: the job's processes on GPUs."""
        for read in (self._read_calls, self._read_log, self._scan):
            try:
                read(at)
            except Exception:  # noqa: BLE001, S112 - a failure here must not affect the run
                continue
        seen = JobProgress(cpu=self._usage.cpu, io=self._usage.io, pids=pids)
        for trust, source in self._sources.items():
            if source.counts:
                return seen._replace(steps=source.steps, since=source.since, trust=trust)
        return seen

    def close(self) -> None:
        self._files.close()

    def progress(self, wall: float) -> RunProgress | None:
        """The progress for the record. `wall`: the offset from monotonic seconds to seconds since the epoch."""
        for trust, source in self._sources.items():
            if source.counts:
                since = round(source.since + wall, 3)
                return RunProgress(steps=source.steps, since=since, trust=trust, ranks=self._all_ranks(wall))
        return None

    def _all_ranks(self, wall: float) -> tuple[RankProgress, ...]:
        """The processes that called `stoker.step()`, the newest of each rank."""
        newest: dict[int, RankSteps] = {}
        for one in sorted(self._ranks.values(), key=lambda one: one.since):
            newest[-one.pid if one.rank is None else one.rank] = one
        return tuple(
            RankProgress(rank=one.rank, pid=one.pid, steps=one.steps, since=round(one.since + wall, 3))
            for _, one in sorted(newest.items())
        )

    # Sources

    def _read_calls(self, at: float) -> None:
        if self._directory is None or (not self._ranks and self._is_directory_unchanged(self._directory)):
            return
        increase, newest = 0, 0.0
        for one in read_steps(self._directory):
            before = self._ranks.get(one.pid)
            if one.steps > _MOST_STEPS or (before is not None and before.steps == one.steps):
                continue
            self._ranks[one.pid] = one
            increase += max(one.steps - (before.steps if before else 0), 1)
            newest = max(newest, one.since)
        if increase:
            self._sources["call"].advance(increase, at, newest)

    def _is_directory_unchanged(self, directory: str) -> bool:
        """Whether it has had the same files since the last call."""
        changed = os.stat(directory).st_mtime_ns  # noqa: PTH116 - at every look
        is_unchanged = changed == self._directory_changed
        # Two changes within a tick of the kernel's clock have the same time.
        self._directory_changed = changed if time.time_ns() - changed > _TICK else -1
        return is_unchanged

    def _read_log(self, at: float) -> None:
        path = self._log()
        if path is None:
            return
        tail = self._tails.setdefault("", _LogTail())
        steps = tail.read(path)
        if tail.has_grown:
            self._sources["output"].advance(1, at)
        if steps:
            self._sources["log"].advance(steps, at)

    def _scan(self, at: float) -> None:
        """Reads CPU time and I/O of the processes, and the files that they write."""
        if at < self._scan_due:
            return
        begun = time.thread_time()
        try:
            processes = self._job.measured_processes(self._files)
            self._usage = self._meter.measure(at, processes)
            if self._meter.may_have_written or at >= self._files_due:
                self._read_files(at, list(written_files(processes, _is_wanted)))
                self._files_due = at + _OLDEST_SCAN
        finally:
            self._files.end_round()
            before, self._cost = self._cost, time.thread_time() - begun
            # The lower cost of two scans: the first loads code, and others may meet a busy machine.
            pause = min(before, self._cost) / _MOST_CPU
            self._scan_due = at + max(self._every / 2, min(pause, _OLDEST_SCAN))

    def _read_files(self, at: float, files: Sequence[WrittenFile]) -> None:
        before, self._positions = self._positions, {file[:3]: file.position for file in files}
        for trust, steps in self._read_tails(files).items():
            self._sources[trust].advance(steps, at)
        if before is None:
            return
        grown = [file for file in files if file.position > before.get(file[:3], file.position)]
        if any(_EVENTS_NAME.search(file.path) for file in grown):
            self._sources["events"].advance(1, at)
        began = [file for file in files if file[:3] not in before]
        if any(_CHECKPOINT_NAME.search(file.path) for file in grown + began):
            self._sources["checkpoint"].advance(1, at)
        if any(file.descriptor in _STANDARD_OUTPUT for file in grown):
            self._sources["output"].advance(1, at)

    def _read_tails(self, files: Sequence[WrittenFile]) -> Mapping[Trust, int]:
        """Counts new steps in the content of files."""
        readable = {file.path: (kind, file) for file in files if (kind := _tail_of(file)) is not None}
        self._tails = {path: tail for path, tail in self._tails.items() if path in readable or path == ""}
        found: dict[Trust, int] = {}
        for path, (kind, file) in readable.items():
            # A dead file server must not block the supervisor.
            if path not in self._tails and len(self._tails) < _MOST_TAILS and file.is_on(self._device):
                self._tails[path] = kind()
            tail = self._tails.get(path)
            if tail is not None and (steps := tail.read(file.opened)):
                found[tail.trust] = found.get(tail.trust, 0) + steps
        return found


_BEST_FIRST: Final[tuple[Trust, ...]] = tuple(trust for trust in get_args(Trust) if trust != "none")


def _is_wanted(path: str, descriptor: int) -> bool:
    return descriptor in _STANDARD_OUTPUT or _NAME.search(path) is not None


class _Tail:
    """The end of a growing file."""

    trust: ClassVar[Trust]

    def __init__(self) -> None:
        self._file = (0, 0)
        self._stamp = (-1, -1)
        self._done = 0
        """The bytes that are done."""
        self.has_grown = False
        """The last read found a change."""

    def read(self, path: str) -> int:
        """The number of new steps in the file."""
        self.has_grown = False
        try:
            if _stamp(os.stat(path)) == (self._file, self._stamp):  # noqa: PTH116 - at every look
                return 0
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            status = os.fstat(descriptor)
            file, stamp = _stamp(status)
            if not stat.S_ISREG(status.st_mode) or (file, stamp) == (self._file, self._stamp):
                return 0
            self.has_grown = self._stamp != (-1, -1)
            if file != self._file:
                self._done = 0
            elif status.st_size < self._done:
                self._shorten(status.st_size)
            self._file, self._stamp = file, stamp
            return self._count(descriptor, status.st_size)
        except OSError:
            return 0
        finally:
            os.close(descriptor)

    def _shorten(self, size: int) -> None:  # noqa: ARG002 - of another kind of file
        """The file is shorter than it was."""
        self._done = 0

    def _count(self, descriptor: int, size: int) -> int:
        raise NotImplementedError


def _stamp(status: os.stat_result) -> tuple[tuple[int, int], tuple[int, int]]:
    return (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns)


class _LogTail(_Tail):
    """The steps that a program prints."""

    trust = "log"

    def __init__(self) -> None:
        super().__init__()
        self._counter: StepCounter | None = None
        self._line = 0
        """Where the last line begins."""
        self._has_fewer_states = False

    def _shorten(self, size: int) -> None:
        # Of a long bar, Stoker's own log drops some of the states before the last one.
        self._has_fewer_states = size >= self._line
        self._done = self._line if self._has_fewer_states else 0

    def _count(self, descriptor: int, size: int) -> int:
        begin = max(self._done, size - _MOST_BYTES)
        data = os.pread(descriptor, _MOST_BYTES, begin)
        if self._has_fewer_states:
            last = data[data.rfind(b"\r") + 1 :]
            begin, data, self._has_fewer_states = begin + len(data) - len(last), last, False
        if b"\n" in data:
            self._line = begin + data.rfind(b"\n") + 1
        # The last line may be rewritten in place: it is read again.
        self._done = begin + max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if self._counter is None:
            # Imported lazily: its patterns take a while to compile, and most commands are short.
            from stoker.logs.steps import StepCounter

            self._counter = StepCounter()
        return self._counter.feed(data.decode(errors="replace"))


class _WandbTail(_Tail):
    """The metrics in a file of Weights & Biases."""

    trust = "events"

    def _count(self, descriptor: int, size: int) -> int:
        if size - self._done > _MOST_BYTES:
            self._done = (size - _MOST_BYTES) // BLOCK * BLOCK + BLOCK
        steps, self._done = count_steps(os.pread(descriptor, _MOST_BYTES, self._done), self._done)
        return steps


def _tail_of(file: WrittenFile) -> type[_Tail] | None:
    if file.path.endswith(".wandb"):
        return _WandbTail
    return _LogTail if file.descriptor in _STANDARD_OUTPUT or _LOG_NAME.search(file.path) else None


def _device(directory: str | None) -> int | None:
    try:
        return None if directory is None else os.stat(directory).st_dev  # noqa: PTH116
    except OSError:
        return None
