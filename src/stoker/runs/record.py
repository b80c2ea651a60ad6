"""The record of a run on disk: spec, status, readings and report.

One directory per run, below `runs/` in the state directory:

    spec.json      the specification, written once before the start
    status.json    the current state; replaced atomically at every change
    readings       every look, in the format of `stoker record`; `readings.1` has an older part
    steps.PID      the steps that a process reported by `stoker.step()`
    snooze.json    the current snooze, if any
    report.md      the report on a stop
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Look, Trust
from stoker.gpus.recording import RecordingReader, RecordingWriter
from stoker.paths import private_directory, remove_tree, write_atomically
from stoker.procfs import Identity, boot_id, is_gone
from stoker.rules.rule import RuleWarning, Stored

# Enough for weeks of experiments; a record is mostly readings, a few MiB at most.
MOST_RECORDS: Final = 200
OLDEST_RECORD: Final = 60 * 86400.0
# Two parts hold more than a week of eight GPUs with a look every five seconds.
MOST_READINGS: Final = 16 * 2**20

Ending: TypeAlias = str
"""`exited`, `time limit`, `signal`, `could not start`, `supervisor killed`. Queued jobs also have `cancelled`,
`preempted`, `lease` (another machine may run it), `machine` (the worker was stopped), `not started` (the machine lacked
processes, memory or descriptors) and `node lost` (one of several machines). After a stop by a rule, the kind of its
verdict, such as `idle`."""
T = TypeVar("T", bound=msgspec.Struct)


_LOST: Final = "Its supervisor is gone and left no status, as after a crash of the machine."
_ENDED: Final = {
    "time limit": "stopped, time limit",
    "signal": "stopped",
    "exited": "ended",
    "cancelled": "cancelled",
    "preempted": "preempted",
    "lease": "stopped, lease over",
    "machine": "stopped with its machine",
    "not started": "not started",
    "node lost": "lost a node",
}


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of a run."""

    id: str
    command: tuple[str, ...]
    directory: str
    host: str
    user: str
    boot: str
    supervisor: int
    supervisor_started: int
    """The supervisor's start time in clock ticks since boot, which identifies it together with the pid."""
    started: float
    """Seconds since the epoch."""
    policy: Stored
    """The settings of its rules, including defaults."""
    rule: str
    """A description of the rules."""
    gpus: str
    dry_run: bool


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a process that calls `stoker.step()`."""

    rank: int | None
    """None if its launcher sets no rank."""
    pid: int
    steps: int
    since: float
    """The time of its last step in seconds since the epoch."""


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of the job."""

    steps: int
    since: float
    """The time of the last step in seconds since the epoch."""
    trust: Trust
    """Their source."""
    ranks: tuple[RankProgress, ...] = ()
    """The processes that report their own steps."""


class Status(msgspec.Struct, kw_only=True):
    """The current state of a run."""

    state: Literal["starting", "running", "stopping", "ended"] = "starting"
    job: int | None = None
    containment: str = ""
    verdict: str = "waiting"
    verdict_reason: str = ""
    verdict_progress: float = 0.0
    """The elapsed share of the rule's window."""
    progress: RunProgress | None = None
    """The job's steps; None while none are visible."""
    warning: RuleWarning | None = None
    """The current warning."""
    used: tuple[str, ...] = ()
    """The uuids of the GPUs that it has used."""
    ending: Ending | None = None
    reason: str = ""
    """The reason of its end, in a sentence."""
    exit_code: int | None = None
    ended: float | None = None
    rule: str = ""
    """The rule that stopped it, if any."""
    left: tuple[str, ...] = ()
    """Descriptions of whatever outlived the stop."""


class Snooze(msgspec.Struct, frozen=True):
    """Keeps rules from stopping the run for a while."""

    until: float
    """The end in monotonic seconds, for the supervisor."""
    wall: float
    """The end in seconds since the epoch, for people."""
    by: str


class Record:
    """The directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Plain strings, since `Path` is slow and these are used at every look.
        self._status_path = f"{directory}/status.json"
        self._snooze_path = f"{directory}/snooze.json"
        self._unwritten: Spec | None = None

    @property
    def id(self) -> str:
        return self.directory.name

    @property
    def readings(self) -> Path:
        return self.directory / "readings"

    @property
    def report(self) -> Path:
        return self.directory / "report.md"

    def has_report(self) -> bool:
        """Cheaper than a try to read it: most runs have none."""
        return os.access(f"{self.directory}/report.md", os.F_OK)

    @property
    def is_kept(self) -> bool:
        """True if it has a directory."""
        return True

    def spec(self) -> Spec:
        return self._unwritten or _read(self.directory / "spec.json", Spec)

    def status(self) -> Status:
        try:
            return _read(self._status_path, Status)
        except StokerError:
            return Status()

    def status_version(self) -> int:
        """A number that changes with the status; 0 without a status."""
        try:
            return os.stat(self._status_path).st_mtime_ns  # noqa: PTH116
        except OSError:
            return 0

    def snooze(self) -> Snooze | None:
        if not os.access(self._snooze_path, os.F_OK):
            return None
        try:
            snooze = _read(Path(self._snooze_path), Snooze)
        except StokerError:
            return None
        return snooze if snooze.until > time.monotonic() else None

    def write_spec(self, spec: Spec) -> None:
        """Writes the spec. After a failure, a later status writes it, too."""
        self._unwritten = spec
        _replace(self.directory / "spec.json", spec)
        self._unwritten = None

    def write_status(self, status: Status) -> None:
        _replace(self._status_path, status)
        if self._unwritten is not None:
            self.write_spec(self._unwritten)

    def write_snooze(self, snooze: Snooze | None) -> None:
        path = Path(self._snooze_path)
        if snooze is not None:
            _replace(path, snooze)
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StokerError(f"{path} cannot be removed: {error.strerror}", exit_code=125) from None

    def write_report(self, text: str) -> None:
        _replace_text(self.report, readable(text).encode())

    def forget_if_empty(self) -> None:
        """Removes an empty directory, after all writes have failed."""
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def is_alive(self, spec: Spec) -> bool:
        """True if its supervisor runs."""
        if spec.boot != boot_id():
            return False
        return not is_gone(Identity(spec.supervisor, spec.supervisor_started))


class NoRecord(Record):
    """The record of a run without a directory, which stores nothing."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull, "no record"))

    @property
    def id(self) -> str:
        return ""

    @property
    def is_kept(self) -> bool:
        return False

    def write_spec(self, spec: Spec) -> None:
        self._unwritten = spec

    def write_status(self, status: Status) -> None:
        pass


class Records:
    """All runs in one state directory."""

    def __init__(self, home: Path, room: Literal["runs", "attempts"] = "runs") -> None:
        """`attempts` are the runs of queued jobs."""
        self._directory = home / room

    def create(self, name: str | None = None) -> Record:
        """A new record, with this name or a random id."""
        try:
            while True:
                directory = self._directory / (name or os.urandom(4).hex())
                try:
                    directory.mkdir(mode=0o700)
                except FileNotFoundError:
                    private_directory(self._directory)
                    continue
                except FileExistsError:
                    if name is None:
                        continue
                    remove_tree(directory)  # left by another queue, or by one before its re-creation
                    directory.mkdir(mode=0o700)
                return Record(directory)
        except OSError as error:
            raise StokerError(
                f"the run's record cannot be written to {self._directory}: {error.strerror} "
                "(STOKER_HOME names another place)",
                exit_code=125,
            ) from None

    def newest_first(self) -> Iterator[Record]:
        with contextlib.suppress(OSError):
            entries = [(entry.stat().st_mtime, entry.name) for entry in os.scandir(self._directory) if entry.is_dir()]
            for _time, name in sorted(entries, reverse=True):
                if (self._directory / name / "spec.json").exists():
                    yield Record(self._directory / name)

    def find(self, name: str) -> Record:
        """The run with this id or unique prefix."""
        found = [record for record in self.newest_first() if record.id.startswith(name)]
        if not found:
            raise BadInputError(f"there is no run {name!r} here: `stoker runs` lists them")
        if len(found) > 1:
            raise BadInputError(
                f"{name!r} fits {len(found)} runs ({', '.join(r.id for r in found[:4])}): write more of it"
            )
        return found[0]

    def prune(self) -> None:
        """Deletes surplus and old runs that have ended."""
        too_old = time.time() - OLDEST_RECORD
        for index, record in enumerate(self.newest_first()):
            with contextlib.suppress(OSError, StokerError):
                spec = record.spec()
                if (index >= MOST_RECORDS or spec.started < too_old) and not record.is_alive(spec):
                    remove_tree(record.directory)


class Journal:
    """The readings of one run on disk, in a newer and an older part.

    A supervisor runs for days, so it keeps none in memory. A full disk loses readings, but does not affect the job.
    """

    def __init__(self, record: Record) -> None:
        self._path = record.readings
        self._is_kept = record.is_kept
        self._writer: RecordingWriter | None = None
        self.failure: str | None = None
        """Why the last look could not be written. The next one is tried anyway."""

    def append(self, look: Look) -> None:
        if not self._is_kept:
            return
        try:
            if self._writer is None:
                self._writer = RecordingWriter(self._path, private=True)
            self._writer.append(look)
            if self._writer.size > MOST_READINGS:
                self._turn_over()
            self.failure = None
        except (StokerError, OSError) as error:
            self.failure = str(error)
            self.close()

    def recent(self, seconds: float) -> list[Look]:
        """The looks of the last `seconds`, oldest first."""
        since = time.monotonic() - seconds
        looks: list[Look] = []
        for part in (_older(self._path), self._path):
            with contextlib.suppress(StokerError):
                # All times of a run belong to one boot, so they are comparable.
                looks += [look for look in RecordingReader(part) if look.at >= since]
        return looks

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):
                writer.close()

    def _turn_over(self) -> None:
        self.close()
        self._path.replace(_older(self._path))


class Summary(msgspec.Struct, kw_only=True):
    """The summary of a run. docs/reference/json.md documents the fields."""

    id: str
    state: Literal["starting", "running", "stopping", "ended", "lost"]
    command: tuple[str, ...]
    directory: str
    user: str
    host: str
    started: float
    ended: float | None
    seconds: float
    pid: int | None
    verdict: str
    verdict_reason: str
    verdict_progress: float
    progress: RunProgress | None
    warning: RuleWarning | None
    snoozed_until: float | None
    policy: dict[str, Any]
    rule: str
    gpus: str
    used: tuple[str, ...]
    dry_run: bool
    containment: str
    ending: str | None
    stopped_by: str
    """The rule that stopped it, if any."""
    reason: str
    exit_code: int | None
    left: tuple[str, ...]
    report: str | None
    record: str


def summary_of(record: Record) -> Summary:
    spec, status = record.spec(), record.status()
    is_alive = record.is_alive(spec)
    is_lost = not is_alive and status.state != "ended"
    snooze = record.snooze() if is_alive else None
    fields = {
        **msgspec.structs.asdict(status),
        **msgspec.structs.asdict(spec),
        "seconds": max((time.time() if status.ended is None else status.ended) - spec.started, 0.0),
        "pid": status.job if is_alive else None,
        "snoozed_until": snooze.wall if snooze else None,
        "stopped_by": status.rule,
        "report": readable(str(record.report)) if record.report.exists() else None,
        "record": readable(str(record.directory)),
    }
    if not is_alive:
        fields["warning"] = None
    if is_lost:
        fields |= {"state": "lost", "reason": _LOST}
    return msgspec.convert(fields, Summary)


def in_a_word(summary: Summary) -> str:
    """Its ending or state, for a table."""
    if summary.state == "lost":
        return "lost"
    if summary.state == "ended":
        ending = summary.ending or "ended"
        return f"stopped, {ending}" if summary.stopped_by else _ENDED.get(ending, ending)
    if summary.snoozed_until is not None:
        return "snoozed"
    if summary.warning is not None:
        return summary.warning.word
    return summary.verdict if summary.state == "running" else summary.state


def readable(text: str) -> str:
    """The text for JSON and pages: bytes that are not UTF-8 become `\\xe9`."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _read(path: str | Path, kind: type[T]) -> T:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - between two jobs, where Path takes its time
            return msgspec.json.decode(file.read(), type=kind)
    except (OSError, ValueError) as error:
        raise StokerError(f"{path} cannot be read: {error}") from None


def _replace(path: str | Path, value: msgspec.Struct) -> None:
    _replace_text(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def _replace_text(path: str | Path, body: bytes) -> None:
    try:
        write_atomically(path, body)
    except OSError as error:
        raise StokerError(f"{path} cannot be written: {error.strerror}", exit_code=125) from None


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
