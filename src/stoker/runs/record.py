"""The record of a run on disk: spec, status, readings and report.

One directory per run, below `runs/` in the state directory:

    spec.json      what was asked for; written once, before anything is started
    status.json    the current state; replaced atomically at every change
    readings       every look, in the format of `stoker record`; one older part of it as `readings.1`
    steps.PID      the steps that this process of the command reported by `stoker.step()`
    snooze.json    until when no rule may stop it, if it is snoozed
    report.md      why it was stopped
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

# Enough to look back over weeks of experiments; a record is mostly its readings, a few MiB at the most.
MOST_RECORDS: Final = 200
OLDEST_RECORD: Final = 60 * 86400.0
# Two of these at five seconds between looks are more than a week of eight GPUs.
MOST_READINGS: Final = 16 * 2**20

Ending: TypeAlias = str
"""`exited`, `time limit`, `signal`, `could not start`, `supervisor killed`; of jobs of the queue also `cancelled`,
`preempted`, `lease` (another machine may run it), `machine` (the worker was stopped), `not started` (the machine was
short of processes, memory or descriptors) and `node lost` (one of several machines). If a rule stopped it: the kind of
its verdict, such as `idle`."""
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
    """What was asked for."""

    id: str
    command: tuple[str, ...]
    directory: str
    host: str
    user: str
    boot: str
    supervisor: int
    supervisor_started: int
    """Start time of the supervisor in clock ticks since boot: with its pid, its identity."""
    started: float
    """Seconds since the epoch."""
    policy: Stored
    """The settings of its rules, with the defaults."""
    rule: str
    """The rules in words."""
    gpus: str
    dry_run: bool


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one process that calls `stoker.step()`."""

    rank: int | None
    """None where its launcher has not set one."""
    pid: int
    steps: int
    since: float
    """When it reported the last one, in seconds since the epoch."""


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of the job."""

    steps: int
    since: float
    """When the last one was seen, in seconds since the epoch."""
    trust: Trust
    """Where they are seen."""
    ranks: tuple[RankProgress, ...] = ()
    """Of each process that reports its own."""


class Status(msgspec.Struct, kw_only=True):
    """The current state."""

    state: Literal["starting", "running", "stopping", "ended"] = "starting"
    job: int | None = None
    containment: str = ""
    verdict: str = "waiting"
    verdict_reason: str = ""
    verdict_progress: float = 0.0
    """The share of the rule's window that has passed."""
    progress: RunProgress | None = None
    """Its own steps; None while they cannot be seen."""
    warning: RuleWarning | None = None
    """What people are warned of now."""
    used: tuple[str, ...] = ()
    """The uuids of the GPUs on which it was seen."""
    ending: Ending | None = None
    reason: str = ""
    """Why it ended, in a sentence."""
    exit_code: int | None = None
    ended: float | None = None
    rule: str = ""
    """The name of the rule that stopped it; empty if none did."""
    left: tuple[str, ...] = ()
    """What outlived the stop, in words."""


class Snooze(msgspec.Struct, frozen=True):
    """No rule may stop the run for a while."""

    until: float
    """Monotonic seconds, for the supervisor."""
    wall: float
    """Seconds since the epoch: for people."""
    by: str


class Record:
    """The directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Read at every look or heartbeat, where Path takes its time.
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

    @property
    def is_kept(self) -> bool:
        """Whether there is a directory for it."""
        return True

    def spec(self) -> Spec:
        return self._unwritten or _read(self.directory / "spec.json", Spec)

    def status(self) -> Status:
        try:
            return _read(self.directory / "status.json", Status)
        except StokerError:
            return Status()

    def status_version(self) -> int:
        """Another number after each change of the status; 0 when there is none."""
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
        """A spec that cannot be written now is written with a later status."""
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
        """Removes a directory in which nothing could be written."""
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def is_alive(self, spec: Spec) -> bool:
        """Whether its supervisor still runs."""
        if spec.boot != boot_id():
            return False
        return not is_gone(Identity(spec.supervisor, spec.supervisor_started))


class NoRecord(Record):
    """The record of a run without a directory: nothing is kept."""

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
                    remove_tree(directory)  # of another queue, or of one that was created again
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
        """Deletes ended runs that are too many or too old."""
        too_old = time.time() - OLDEST_RECORD
        for place, record in enumerate(self.newest_first()):
            with contextlib.suppress(OSError, StokerError):
                spec = record.spec()
                if (place >= MOST_RECORDS or spec.started < too_old) and not record.is_alive(spec):
                    remove_tree(record.directory)


class Journal:
    """The readings of one run: the newest part, and one older part of the same size.

    A supervisor runs for days, so it keeps none in memory. A full disk costs the run its readings, never the job.
    """

    def __init__(self, record: Record) -> None:
        self._path = record.readings
        self._is_kept = record.is_kept
        self._writer: RecordingWriter | None = None
        self.failure: str | None = None
        """Why the last look could not be written. The next one is tried again."""

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
                # Times of one run are of one boot, so they are this process's own.
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
    """What is known of a run now. The fields are documented in docs/reference/json.md."""

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
    """The name of the rule that stopped it; empty if none did."""
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
    """How it ended, or its state: for a column of a table."""
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
    """Text that JSON and pages can hold: bytes that are not UTF-8 become `\\xe9`."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
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
