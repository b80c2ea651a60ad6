"""GPU-hours per user, allocated and idle. One small file per day in the state directory."""

import contextlib
import datetime
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from stoker.paths import private_directory, write_atomically

KEPT_DAYS: Final = 56
_DAY: Final = 86400.0


class DayOfUser(msgspec.Struct):
    """One user's jobs on one day, in GPU-seconds."""

    jobs: set[int] = msgspec.field(default_factory=set)
    allocated: float = 0.0
    watched: float = 0.0
    """The part of these with known utilization."""
    idle: float = 0.0
    warnings: int = 0
    stops: int = 0


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One user in the table."""

    user: str
    jobs: int
    gpu_hours: float
    watched_gpu_hours: float
    idle_gpu_hours: float
    wasted: float | None
    """The idle share of the watched hours; None without watched hours."""
    warnings: int
    stops: int


class DailyUsage:
    """Sums up the usage of the current day in a file."""

    def __init__(self, directory: Path, wall: float) -> None:
        self._directory = directory
        self._day = _name_of(wall)
        self._users = _read(directory / self._day)

    def allocate(self, wall: float, user: str, job: int, gpu_seconds: float) -> None:
        of_user = self._of(wall, user)
        of_user.jobs.add(job)
        of_user.allocated += gpu_seconds

    def observe(self, wall: float, user: str, watched: float, idle: float) -> None:
        of_user = self._of(wall, user)
        of_user.watched += watched
        of_user.idle += idle

    def count(self, wall: float, user: str, *, warnings: int = 0, stops: int = 0) -> None:
        of_user = self._of(wall, user)
        of_user.warnings += warnings
        of_user.stops += stops

    def save(self, wall: float) -> None:
        """Raises OSError."""
        private_directory(self._directory)
        write_atomically(self._directory / self._day, msgspec.json.encode(self._users, order="deterministic"))
        oldest = _name_of(wall - KEPT_DAYS * _DAY)
        for path in self._directory.glob("usage-*.json"):
            if path.name < oldest:
                path.unlink(missing_ok=True)

    def _of(self, wall: float, user: str) -> DayOfUser:
        if (day := _name_of(wall)) != self._day:
            with contextlib.suppress(OSError):
                self.save(wall)
            self._day, self._users = day, _read(self._directory / day)
        return self._users.setdefault(user, DayOfUser())


def usage_rows(directory: Path, since: float, until: float) -> list[UsageRow]:
    """The users of GPUs on the days between these times, most idle hours first."""
    first, last = _name_of(since), _name_of(until)
    days = [_read(path) for path in sorted(directory.glob("usage-*.json")) if first <= path.name <= last]
    users = sorted({user for day in days for user in day})
    rows = [_row(user, [day[user] for day in days if user in day]) for user in users]
    return sorted(rows, key=lambda row: (-row.idle_gpu_hours, row.user))


def _row(user: str, days: Sequence[DayOfUser]) -> UsageRow:
    watched, idle = sum(day.watched for day in days), sum(day.idle for day in days)
    return UsageRow(
        user=user,
        jobs=len(set[int]().union(*(day.jobs for day in days))),
        gpu_hours=_hours(day.allocated for day in days),
        watched_gpu_hours=_hours([watched]),
        idle_gpu_hours=_hours([idle]),
        wasted=round(idle / watched, 4) if watched > 0 else None,
        warnings=sum(day.warnings for day in days),
        stops=sum(day.stops for day in days),
    )


def _hours(seconds: Iterable[float]) -> float:
    return round(sum(seconds) / 3600.0, 2)


def table_cells(rows: Sequence[UsageRow]) -> list[tuple[str, ...]]:
    """The cells of the table, with a heading."""
    heading = ("user", "jobs", "GPU-hours", "watched", "idle", "wasted", "warnings", "cancelled")
    return [
        heading,
        *(
            (
                row.user,
                str(row.jobs),
                f"{row.gpu_hours:.1f}",
                f"{row.watched_gpu_hours:.1f}",
                f"{row.idle_gpu_hours:.1f}",
                "unknown" if row.wasted is None else f"{row.wasted:.0%}",
                str(row.warnings),
                str(row.stops),
            )
            for row in rows
        ),
    ]


def table_text(rows: Sequence[UsageRow]) -> str:
    """The table as plain text, for a mail."""
    cells = table_cells(rows)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def last_monday(wall: float) -> float:
    """The most recent Monday at 08:00."""
    now = datetime.datetime.fromtimestamp(wall)  # noqa: DTZ006 - local time
    monday = (now - datetime.timedelta(days=now.weekday())).replace(hour=8, minute=0, second=0, microsecond=0)
    return (monday if monday <= now else monday - datetime.timedelta(days=7)).timestamp()


def _name_of(wall: float) -> str:
    return time.strftime("usage-%Y-%m-%d.json", time.localtime(wall))


def _read(path: Path) -> dict[str, DayOfUser]:
    """A day's users; none if the file is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, DayOfUser])
    except (OSError, msgspec.DecodeError):
        return {}
