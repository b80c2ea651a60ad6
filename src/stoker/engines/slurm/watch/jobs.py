"""The running jobs of a cluster, from a single `squeue`, and exemptions from watching.

Fields have fixed widths, so that user-chosen names and comments cannot imitate other fields.
"""

import datetime
import fnmatch
import re
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from stoker.engines.slurm.answers import expand_hosts
from stoker.errors import BadInputError
from stoker.fill.config import EVERY_DAY, DailyHours, parse_days, parse_hours
from stoker.settings import Exemption, SlurmWatch

# Names and widths in bytes. User-chosen fields come last.
_FIELDS: Final = (
    ("JobID", 12),
    ("UserName", 64),
    ("Partition", 64),
    ("Account", 64),
    ("QOS", 64),
    ("NumNodes", 8),
    ("NumTasks", 8),
    ("StartTime", 16),
    ("BatchFlag", 4),
    ("tres-alloc", 200),
    ("tres-per-job", 100),
    ("tres-per-node", 100),
    ("tres-per-task", 100),
    ("NodeList", 4000),
    ("Comment", 400),
    ("Name", 200),
)
_WIDTH: Final = sum(width for _name, width in _FIELDS)
_EMPTY: Final = frozenset({"", "N/A", "(null)"})
_GPUS: Final = re.compile(r"gres[/:]gpu(?P<type>:[^,:=()]*[^,:=()0-9][^,:=()]*)?(?:[:=](?P<count>\d+))?(?=[,(]|$)")
_KEEP: Final = re.compile(r"stoker:\s*keep until (\d{4}-\d{2}-\d{2})(?:[T ](\d{1,2}:\d{2}))?", re.IGNORECASE)
# The comment of a job that Stoker's own queue has submitted.
_SUPERVISED: Final = re.compile(r"stoker:[^\s:]+")


class ClusterJob(msgspec.Struct, frozen=True, kw_only=True):
    """A running job with GPUs."""

    id: int
    user: str
    name: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    comment: str = ""
    nodes: tuple[str, ...] = ()
    gpus: int = 0
    started: float = 0.0
    """Seconds since the epoch."""
    interactive: bool = False

    @property
    def key(self) -> str:
        """The id of this run of the job; a requeued job gets another."""
        return f"{self.id}@{self.started:.0f}"

    @property
    def label(self) -> str:
        name = "".join(letter if letter.isprintable() else "?" for letter in self.name)
        return f"job {self.id} ({name}) of {self.user}"


def squeue_command(user: str | None) -> list[str]:
    """The command that lists the running jobs of one user or of all. It needs `SLURM_TIME_FORMAT=%s`."""
    form = ",".join(f"{name}:{width}" for name, width in _FIELDS)
    whose = [f"--user={user}"] if user is not None else []
    return ["squeue", "--noheader", "--array", "--all", "--states=RUNNING", *whose, f"--Format={form}"]


def parse_jobs(answer: str) -> list[ClusterJob]:
    """The jobs with GPUs. Raises ValueError for an answer that is not a list of jobs."""
    jobs = []
    for line in answer.encode().split(b"\n"):
        if not line.strip():
            continue
        if len(line) < _WIDTH - _FIELDS[-1][1]:
            raise ValueError(f"a line of {len(line)} bytes")
        values, at = {}, 0
        for name, width in _FIELDS:
            text = line[at : at + width].decode(errors="replace").strip()
            values[name] = "" if text in _EMPTY else text
            at += width
        gpus = _gpus(values)
        if gpus:
            jobs.append(
                ClusterJob(
                    id=int(values["JobID"]),
                    user=values["UserName"],
                    name=values["Name"],
                    partition=values["Partition"],
                    account=values["Account"],
                    qos=values["QOS"],
                    comment=values["Comment"],
                    nodes=expand_hosts(values["NodeList"]),
                    gpus=gpus,
                    started=float(values["StartTime"]),
                    interactive=values["BatchFlag"] == "0",
                )
            )
    return jobs


def _gpus(values: dict[str, str]) -> int:
    """The number of the job's GPUs: allocated ones if Slurm accounts for them, requested ones otherwise."""
    nodes, tasks = int(values["NumNodes"] or 1), int(values["NumTasks"] or 1)
    for field, times in (("tres-alloc", 1), ("tres-per-job", 1), ("tres-per-node", nodes), ("tres-per-task", tasks)):
        found = [(each["type"], int(each["count"] or 1)) for each in _GPUS.finditer(values[field])]
        # An allocation lists the total and the count per type.
        untyped = [count for kind, count in found if kind is None]
        if count := sum(untyped or [count for _kind, count in found]):
            return count * times
    return 0


class Exemptions:
    """Decides which jobs are left alone, by settings and by owners."""

    def __init__(self, settings: SlurmWatch) -> None:
        """Raises BadInputError for invalid hours or days, and for an exemption of all jobs."""
        self._may_keep = settings.owners_may_keep
        self._exempt = [(one, _hours(one, number)) for number, one in enumerate(settings.exempt, 1)]

    def why(self, job: ClusterJob, wall: float) -> str | None:
        """Why this job is left alone now; None if it is watched."""
        if _SUPERVISED.match(job.comment):
            return "Stoker's queue supervises it"
        if self._may_keep and (until := kept_until(job.comment)) is not None and wall < until:
            return f"its owner keeps it until {time.strftime('%Y-%m-%d %H:%M', time.localtime(until))}"
        for one, hours in self._exempt:
            if _applies(one, job) and (hours is None or hours.contain(time.localtime(wall))):
                return f"it is exempt: {one.reason}" if one.reason else "it is exempt"
        return None


def kept_until(comment: str) -> float | None:
    """The time in a comment `stoker: keep until 2026-11-20 18:00`. A date alone means the end of the day."""
    found = _KEEP.match(comment)
    if found is None:
        return None
    day, clock = found.groups()
    try:
        if clock:
            return datetime.datetime.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M").timestamp()  # noqa: DTZ007 - local
        return (datetime.datetime.strptime(day, "%Y-%m-%d") + datetime.timedelta(days=1)).timestamp()  # noqa: DTZ007
    except (ValueError, OverflowError):
        return None


def _applies(exemption: Exemption, job: ClusterJob) -> bool:
    return all(
        not patterns or any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns)
        for patterns, value in _criteria(exemption, job)
    )


def _criteria(exemption: Exemption, job: ClusterJob) -> Sequence[tuple[tuple[str, ...], str]]:
    return (
        (exemption.users, job.user),
        (exemption.partitions, job.partition),
        (exemption.names, job.name),
        (exemption.accounts, job.account),
        (exemption.qos, job.qos),
    )


def _hours(exemption: Exemption, number: int) -> DailyHours | None:
    """The hours of an exemption; None for all times."""
    where = f"[[slurm-watch.exempt]] number {number}"
    has_time = bool(exemption.hours or exemption.days)
    names = (exemption.users, exemption.partitions, exemption.names, exemption.accounts, exemption.qos)
    if not has_time and not any(names):
        raise BadInputError(f"{where} exempts every job: name users, partitions, names, accounts, qos, hours or days")
    try:
        days = parse_days(exemption.days) if exemption.days else EVERY_DAY
        return parse_hours(exemption.hours or "00:00-24:00", days) if has_time else None
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from None
