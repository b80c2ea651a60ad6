"""Recordings of looks: one line per look, safe to append, complete up to the last line after any crash.

docs/reference/recordings.md documents the format. A session starts with a header line. Each look is one line, written
in one call, where null stands for an unchanged cell. The reader skips a line truncated by a crash, which does not
affect later sessions.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import DeviceHealth, Gpu, JobProgress, Look, Pipes, Process, Reading, Unknown, Utilization
from stoker.procfs import boot_id

FORMAT: Final = "stoker readings"
VERSION: Final = 2
# The fields of a reading in the order of cells; the row's position determines the uuid.
_FIELDS: Final = tuple(name for name in Reading.__struct_fields__ if name != "uuid")
# The fields of version 1, whose header does not name them.
_FIELDS_1: Final = _FIELDS[: _FIELDS.index("pipes") + 1]
_DIGITS: Final = {"span": 3, "power": 1, "power_limit": 1, "energy": 1, "temperature": 0, "sm_clock": 0}
_DAMAGED: Final = Unknown("the recording is damaged before this look")


class Header(msgspec.Struct, frozen=True):
    """The first line of a session."""

    format: str
    version: int
    host: str
    boot: str
    """The boot, since monotonic times of different boots are not comparable."""
    source: str
    gpus: tuple[Gpu, ...]
    fields: tuple[str, ...] = _FIELDS_1
    """The fields of a row's cells. A reader skips unknown fields."""


class _Line(msgspec.Struct, frozen=True, array_like=True):
    wall: float
    at: float
    rows: list[Any]
    problem: str | None = None
    note: str | None = None
    job: JobProgress | None = None


class RecordingWriter:
    """Appends looks to a file. A second writer is refused."""

    def __init__(self, path: Path, *, private: bool = False) -> None:
        """`private`: a new file is readable by its owner only, regardless of the umask."""
        self._path = path
        self._gpus: tuple[Gpu, ...] | None = None
        self._before: list[list[Any]] = []
        self.size = 0
        """The size of the file in bytes."""
        try:
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600 if private else 0o644
            )
        except OSError as error:
            raise StokerError(f"cannot write to {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise StokerError(f"{path} is being written by another recorder: choose another file") from None
        try:
            self._mend()
        except OSError as error:
            os.close(self._descriptor)
            raise StokerError(f"cannot write to {path}: {error.strerror}") from None

    def append(self, look: Look) -> None:
        """Writes one look to the file, without buffering."""
        if look.gpus != self._gpus:
            self._begin_session(look)
        cells = [_cells(reading) for reading in look.readings]
        rows = [_changed(new, old) for new, old in zip(cells, self._before, strict=True)]
        self._before = cells
        problem = look.problem.reason if look.problem else None
        line = _Line(round(look.wall, 3), round(look.at, 3), rows, problem, look.note, _rounded(look.job))
        self._write(msgspec.json.encode(line))

    def close(self) -> None:
        os.close(self._descriptor)

    def _mend(self) -> None:
        """Ends a truncated line, so that later lines are intact."""
        size = self.size = os.fstat(self._descriptor).st_size
        if not size:
            return
        if not _is_recording(os.pread(self._descriptor, 64, 0)):
            os.close(self._descriptor)
            raise BadInputError(f"{self._path} exists and is not a recording of readings: choose another file")
        if os.pread(self._descriptor, 1, size - 1) != b"\n":
            self.size += os.write(self._descriptor, b"\n")

    def _begin_session(self, look: Look) -> None:
        header = Header(FORMAT, VERSION, socket.gethostname(), boot_id(), look.source, look.gpus, _FIELDS)
        self._write(msgspec.json.encode(header))
        self._gpus = look.gpus
        self._before = [[] for _ in look.gpus]

    def _write(self, body: bytes) -> None:
        line = body + b"\n"
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise StokerError(f"the recording {self._path} cannot be continued: {error.strerror}") from None
        self.size += written
        if written != len(line):
            raise StokerError(f"the recording {self._path} cannot be continued: the disk is full")


class RecordingReader:
    """The looks of a recording, in order, with times that continue across sessions and reboots."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damaged = 0
        """The number of damaged lines, after a full pass."""

    def __iter__(self) -> Iterator[Look]:
        session: _Session | None = None
        last: Look | None = None
        self.damaged = 0
        for raw in self._lines():
            try:
                if raw.startswith(b"{"):
                    session = _Session(msgspec.json.decode(raw, type=Header), last)
                    continue
                line = msgspec.json.decode(raw, type=_Line)
                if session is None:
                    raise msgspec.ValidationError("a look before any header")
                last = session.look(line)
            except (msgspec.DecodeError, ValueError):
                self.damaged += 1
                if session is not None:
                    session.forget()
                continue
            yield last

    def _lines(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                first = file.readline()
                if not _is_recording(first):
                    raise BadInputError(f"{self._path} is not a recording of readings")
                _refuse_newer(first, self._path)
                yield first
                yield from file
        except OSError as error:
            raise BadInputError(f"the recording {self._path} cannot be read: {error.strerror}") from None


class _Session:
    """The lines under one header: fills in unchanged cells, and connects its clock to the previous session."""

    def __init__(self, header: Header, last: Look | None) -> None:
        self._header = header
        self._last = last
        self._shift: float | None = None if last else 0.0
        self._cells: list[dict[str, Any]] = []
        self.forget()

    def look(self, line: _Line) -> Look:
        if self._shift is None and self._last is not None:
            # The gap comes from the wall clock, which may have been set back.
            self._shift = self._last.at + max(line.wall - self._last.wall, 0.0) - line.at
        readings = [self._reading(place, row) for place, row in enumerate(line.rows)]
        if len(readings) != len(self._header.gpus):
            raise ValueError("not one row per GPU")
        return Look(
            self._header.source,
            line.at + (self._shift or 0.0),
            line.wall,
            self._header.gpus,
            tuple(readings),
            Unknown(line.problem) if line.problem is not None else None,
            line.note,
            line.job and line.job._replace(since=self._shifted(line.job.since)),
        )

    def _shifted(self, at: float | None) -> float | None:
        return None if at is None else at + (self._shift or 0.0)

    def _reading(self, place: int, row: list[Any]) -> Reading:
        if len(row) > len(self._header.fields):
            raise ValueError("a row of another length")
        cells = self._cells[place]
        cells |= {
            name: _decoded(name, cell)
            for name, cell in zip(self._header.fields, row, strict=False)
            if cell is not None and name in _FIELDS
        }
        span = cells["span"]
        return Reading(self._header.gpus[place].uuid, **{**cells, "span": 0.0 if isinstance(span, Unknown) else span})

    def forget(self) -> None:
        """Discards the state after a damaged line, when "unchanged" is meaningless."""
        recorded = [name for name in _FIELDS if name in self._header.fields or name in _FIELDS_1]
        self._cells = [dict.fromkeys(recorded, _DAMAGED) for _ in self._header.gpus]


_SHAPES: Final[dict[str, Any]] = {
    "utilization": Utilization,
    "processes": tuple[Process, ...],
    "pipes": Pipes,
    "memory_used": int,
    "memory_total": int,
    "memory_activity": Utilization,
    "throttling": tuple[str, ...],
    "health": DeviceHealth,
}


def _decoded(name: str, cell: Any) -> Any:
    if isinstance(cell, str):
        return Unknown(cell)
    return msgspec.convert(cell, _SHAPES.get(name, float))


def _cells(reading: Reading) -> list[Any]:
    return [_encoded(name, getattr(reading, name)) for name in _FIELDS]


def _encoded(name: str, value: Any) -> Any:
    if isinstance(value, Unknown):
        return value.reason
    if isinstance(value, Utilization):
        return [round(value.peak, 4), round(value.mean, 4), value.samples]
    return round(value, _DIGITS[name]) if name in _DIGITS else value


def _changed(new: list[Any], old: list[Any]) -> list[Any]:
    """The changed cells, without unchanged ones at the end."""
    row = [None if cell == before else cell for cell, before in zip(new, old, strict=True)] if old else list(new)
    while row and row[-1] is None:
        row.pop()
    return row


def _rounded(job: JobProgress | None) -> JobProgress | None:
    if job is None:
        return None
    since, cpu, io = job.since, job.cpu, job.io
    return job._replace(
        since=None if since is None else round(since, 3),
        cpu=None if cpu is None else round(cpu, 2),
        io=None if io is None else round(io),
    )


def _is_recording(start: bytes) -> bool:
    return start.startswith(b'{"format":"' + FORMAT.encode() + b'"')


def _refuse_newer(first: bytes, path: Path) -> None:
    try:
        version = msgspec.json.decode(first, type=Header).version
    except msgspec.DecodeError:
        return
    if version > VERSION:
        raise BadInputError(f"{path} was recorded by a newer Stoker (format {version}): upgrade to read it")
