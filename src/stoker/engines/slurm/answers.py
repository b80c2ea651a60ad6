"""Parses the output of Slurm's commands: jobs, nodes, partitions, refusals. Pure.

It reads text formats only, because the JSON formats differ between Slurm 20.11 and 24.11.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from stoker.engines.slurm.reasons import pending_reason
from stoker.errors import BadInputError, StokerError

OLDEST: Final = (20, 11)
# The requested fields in the letters of `squeue --format`. The two that may contain any text are last.
JOB_FIELDS: Final = "ATrSelbDNPuVjk"
# Each call puts a random separator before each field, which no job name or comment can contain. Its length is fixed, so
# that `parse_jobs` finds it at the start of the answer.
SEPARATOR_LENGTH: Final = 20
# The ways in which the commands print an empty value.
_NOTHING: Final = frozenset(("", "N/A", "n/a", "(null)", "None", "NONE", "Unknown"))


class SlurmProblem(StokerError):  # noqa: N818 - a condition of the cluster
    """Slurm could not be reached or did not answer; the result of the request is unknown."""


class SlurmFull(SlurmProblem):
    """Slurm takes no more jobs until some have ended."""


class SlurmClosed(SlurmProblem):
    """Slurm takes no jobs for this partition or reservation now. The job itself is fine."""


class SlurmRefusal(BadInputError):  # noqa: N818 - an answer
    """Slurm refused, and would refuse again."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as `squeue` lists it."""

    id: int
    state: str
    """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, TIMEOUT, CANCELLED, PREEMPTED, NODE_FAIL and so on."""
    reason: str = ""
    """Slurm's code, or a sentence from Slurm."""
    comment: str = ""
    name: str = ""
    nodes: str = ""
    """As Slurm writes it: `node[1-3]`."""
    node_count: int = 0
    partition: str = ""
    user: str = ""
    submitted: float | None = None
    start: float | None = None
    """For a pending job, Slurm's estimate, if any."""
    end: float | None = None
    time_limit: float | None = None
    gres: str = ""
    """Generic resources per node, such as `gres/gpu:a100:2`; `gpus_in` reads it."""


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as `scontrol` shows it."""

    name: str
    state: str
    """idle, mixed, allocated, draining, drained, down and so on."""
    available: bool
    """Jobs can start on it, now or after those on it have ended."""
    reason: str = ""
    """Why an administrator or Slurm took it out of service."""
    partitions: tuple[str, ...] = ()
    gpus: int = 0
    gpus_allocated: int = 0
    gpu_model: str = ""
    """The first type of GPU in gres.conf."""
    cpus: int = 0
    cpus_allocated: int = 0
    memory: int = 0
    """Bytes."""
    features: tuple[str, ...] = ()


class SlurmPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition as `scontrol` shows it."""

    name: str
    default: bool
    up: bool
    max_time: float | None
    nodes: str


class SlurmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster's settings that matter here; times in seconds."""

    cluster: str
    kill_wait: float
    """From SIGTERM to SIGKILL."""
    version: str


def submitted_id(answer: str) -> int:
    """The id in an answer of `sbatch --parsable`: `12` or `12;cluster`."""
    found = re.search(r"^(\d+)(;|$)", answer, re.MULTILINE)
    if found is None:
        raise SlurmProblem(f"sbatch printed no job id: {answer.strip()[:200]!r}")
    return int(found[1])


def parse_jobs(answer: str) -> list[SlurmJob]:
    """All jobs of an answer. Raises SlurmProblem for an incomplete one, rather than return some."""
    if not answer:
        return []
    separator, count = answer[:SEPARATOR_LENGTH], len(JOB_FIELDS)
    fields = answer.split(separator)[1:]
    is_whole = answer.endswith("\n") and len(fields) % count == 0
    if not is_whole or not fields or not re.fullmatch(r"[0-9a-f]+", separator):
        raise SlurmProblem(f"squeue's answer cannot be read: it begins with {answer[:80]!r}")
    try:
        return [_job(fields[first : first + count]) for first in range(0, len(fields), count)]
    except ValueError as error:
        raise SlurmProblem(f"squeue's answer cannot be read: {error}") from error


def _job(fields: Sequence[str]) -> SlurmJob:
    value = dict(zip(JOB_FIELDS, fields, strict=True))
    return SlurmJob(
        id=int(value["A"]),
        state=value["T"],
        reason=_text(value["r"]),
        comment=_text(value["k"].removesuffix("\n")),
        name=value["j"],
        nodes=_text(value["N"]),
        node_count=int(value["D"]),
        partition=value["P"],
        user=value["u"],
        submitted=_moment(value["V"]),
        start=_moment(value["S"]),
        end=_moment(value["e"]),
        time_limit=parse_duration(value["l"]),
        gres=_text(value["b"]),
    )


def parse_fields(line: str) -> dict[str, str]:
    """The `Name=value` fields of `scontrol --oneliner`. The first of equal names wins.

    Values may contain spaces, so a job's name or comment can imitate later fields.
    """
    parts = re.split(r"(?:^|\s)([A-Z][\w:/]*)=", line.strip())
    found: dict[str, str] = {}
    for name, value in zip(parts[1::2], parts[2::2], strict=True):
        found.setdefault(name, value.strip())
    return found


def parse_nodes(answer: str) -> list[SlurmNode]:
    return [_node(record) for record in _records(answer, "NodeName=")]


def _node(record: str) -> SlurmNode:
    fields = parse_fields(record)
    state, available = _node_state(fields.get("State", "UNKNOWN"))
    models = _gpus_by_model(fields.get("Gres", ""))
    return SlurmNode(
        name=fields["NodeName"],
        state=state,
        available=available,
        reason=_node_reason(record),
        partitions=_list(fields.get("Partitions", "")),
        gpus=sum(models.values()),
        gpus_allocated=gpus_in(fields.get("GresUsed", "")),
        gpu_model=next((model for model in models if model), ""),
        cpus=int(fields.get("CPUTot", 0)),
        cpus_allocated=int(fields.get("CPUAlloc", 0)),
        memory=int(fields.get("RealMemory", 0)) * 2**20,
        features=_list(fields.get("ActiveFeatures", fields.get("AvailableFeatures", ""))),
    )


# State flags of a node that keep jobs from starting there.
_OUT_OF_SERVICE: Final = frozenset(
    ("DRAIN", "FAIL", "MAINT", "MAINTENANCE", "NOT_RESPONDING", "NO_RESPOND", "INVALID_REG", "REBOOT_ISSUED")
)
_AWAY: Final = frozenset(("DOWN", "ERROR", "UNKNOWN", "FUTURE", "FAIL"))


def _node_state(text: str) -> tuple[str, bool]:
    """Parses `MIXED+DRAIN` or `IDLE*` into the state and whether jobs can start there."""
    base, *flags = text.split(maxsplit=1)[0].split("+")
    responds = "*" not in text
    base, flags = base.rstrip("*~#!%$@^-"), [flag.rstrip("*~#!%$@^-") for flag in flags]
    available = responds and base not in _AWAY and not _OUT_OF_SERVICE.intersection(flags)
    if "DRAIN" in flags and base != "DOWN":
        return ("drained" if base == "IDLE" else "draining"), available
    if not responds and base != "DOWN":
        return "not responding", available
    if flags and not available and base != "DOWN":
        return next(flag for flag in flags if flag in _OUT_OF_SERVICE).lower().replace("_", " "), available
    return base.lower(), available


def _node_reason(record: str) -> str:
    """The reason without its author and time."""
    found = re.search(r"\sReason=(.*?)(?:\s\[[^\s\[\]]+@[^\[\]]+\].*)?$", record.strip(), re.DOTALL)
    return _text(found[1].strip()) if found else ""


def parse_partitions(answer: str) -> list[SlurmPartition]:
    return [
        SlurmPartition(
            name=fields["PartitionName"],
            default=fields.get("Default") == "YES",
            up=fields.get("State") == "UP",
            max_time=parse_duration(fields.get("MaxTime", "")),
            nodes=_text(fields.get("Nodes", "")),
        )
        for fields in map(parse_fields, _records(answer, "PartitionName="))
    ]


def parse_config(answer: str) -> SlurmConfig:
    found = dict(re.findall(r"^(\S+)\s*= ?(.*)$", answer, re.MULTILINE))
    if "SLURM_VERSION" not in found:
        raise SlurmProblem(f"scontrol's answer cannot be read: it begins with {answer[:80]!r}")
    return SlurmConfig(
        cluster=found.get("ClusterName", ""),
        kill_wait=_seconds(found.get("KillWait", ""), 30.0),
        version=found["SLURM_VERSION"],
    )


def parse_version(answer: str) -> tuple[int, int]:
    """Parses `slurm-wlm 22.05.8`. Raises StokerError if the version is too old."""
    found = re.search(r"\b(\d+)\.(\d+)\S*", answer)
    if found is None:
        raise SlurmProblem(f"sbatch --version printed no version: {answer.strip()[:200]!r}")
    major, minor = int(found[1]), int(found[2])
    if (major, minor) < OLDEST:
        raise BadInputError(f"Slurm {found[0]} is too old: Stoker needs Slurm {'.'.join(map(str, OLDEST))} or newer")
    return major, minor


def parse_duration(text: str) -> float | None:
    """The seconds of `1-02:03:04`, `02:03:04` or `03:04`; None for `INFINITE`."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def gpus_in(gres: str) -> int:
    """The number of GPUs in `gres/gpu:a100:2`, `gres:gpu:2`, `gpu:a100:1(IDX:0),gpu:v100:4` or `gpu`."""
    return sum(_gpus_by_model(gres).values())


def _gpus_by_model(gres: str) -> dict[str, int]:
    found: dict[str, int] = {}
    # Sockets and indices are in parentheses, and contain commas.
    for entry in re.sub(r"\([^()]*\)", "", gres).split(","):
        name, *rest = re.sub(r"^gres[:/]", "", entry.strip()).split(":")
        if name == "gpu":
            count = rest.pop() if rest and rest[-1].isdecimal() else "1"
            model = rest[0] if rest else ""
            found[model] = found.get(model, 0) + int(count)
    return found


_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?")
# A longer hostlist is a mistake of the parser or of its input.
_MOST_HOSTS: Final = 100_000


def expand_hosts(text: str) -> tuple[str, ...]:
    """The names in a hostlist such as `gpu[01-03,7],login`."""
    parts, depth, begun = [], 0, 0
    for at, letter in enumerate(f"{text},"):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[begun:at])
            begun = at + 1
    return tuple(name for part in parts if part for name in _expanded(part))


def _expanded(part: str) -> Iterable[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _bracket, tail = rest.partition("]")
    numbers: list[str] = []
    for one in ranges.split(","):
        found = _RANGE.fullmatch(one)
        if found is None:
            raise ValueError(f"{part!r} is not a hostlist")
        first, last = found[1], found[2] or found[1]
        if int(last) - int(first) > _MOST_HOSTS:
            raise ValueError(f"{part!r} is too long")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return (
        [f"{head}{number}{end}" for number in numbers for end in _expanded(tail)]
        if tail
        else [f"{head}{number}" for number in numbers]
    )


def _records(answer: str, start: str) -> list[str]:
    """The records of `scontrol`. A reason may contain line breaks."""
    return [start + record for record in re.split(rf"^{start}", answer, flags=re.MULTILINE)[1:]]


def _text(value: str) -> str:
    return "" if value in _NOTHING else value


def _list(value: str) -> tuple[str, ...]:
    return tuple(part for part in _text(value).split(",") if part)


def _moment(value: str) -> float | None:
    """Seconds since the epoch; None if there is no time."""
    return float(value) if value.isdecimal() and int(value) else None


def _seconds(value: str, default: float) -> float:
    found = re.match(r"\d+", value)
    return float(found[0]) if found else default


# Refusals and problems

# Messages of `sbatch` without a decision of the controller: it is asked again later.
_UNDECIDED: Final = re.compile(
    r"unable to contact|timed out|time out|timeout|standby mode|zero bytes|insufficient data|connection|"
    r"communication|authenticat|munge|temporarily|try again|retrying|not responding|no route|network|resolve|"
    r"could not establish|i/o error|input/output|no space|unable to open|unexpected message|"
    r"protocol|incompatible|credential|invalid configuration|configuration source|shut ?down|slurmdbd|"
    r"job state|database|out of memory|cannot allocate|too many open",
    re.IGNORECASE,
)
# Codes of a limit on the number of submitted jobs, such as `QOSMaxSubmitJobPerUserLimit`.
_FULL: Final = re.compile(r"\w*SubmitJobs?\w*(?: |$)", re.IGNORECASE)
# After this message `sbatch` itself retries for minutes.
TRIES_AGAIN: Final = "temporarily unable to accept job"
# Conditions that an administrator ends, by a part of slurm_strerror.
_CLOSED: Final = {
    "Required partition not available": "the partition takes no new jobs, it is drained or inactive",
    "Requested reservation not usable now": "the reservation cannot be used now",
    "submissions disabled": "an administrator has stopped submissions for now",
}
# Explanations by a part of slurm_strerror.
_MEANINGS: Final = {
    "Invalid partition name": "Slurm has no such partition",
    "Requested node configuration is not available": (
        "no node of the partition has the GPUs, CPUs and memory that the job asks for"
    ),
    "Requested partition configuration not available": "the partition does not allow a job of this size or time limit",
    "Invalid account": "this user may not use that account, or not in that partition",
    "Invalid qos": "this user, account or partition may not use that QOS",
    "Invalid feature specification": "no node has the features that the constraint names",
    "Requested reservation is invalid": "Slurm has no such reservation",
    "Access denied to requested reservation": "this user may not use that reservation",
    "Requested time limit is invalid": "the time limit is missing, or longer than the partition allows",
    "Requested time limit exceeds": "the time limit is longer than the partition allows",
    "Job violates accounting/QOS policy": "the job is over a limit of the account or QOS: number of jobs, size or time",
    "Node count specification invalid": "the partition does not allow this number of nodes",
    "CPU count": "no node has as many CPUs as the job asks for",
    "More processors requested than permitted": "no node has as many CPUs as the job asks for",
    "Memory required by task is not available": "no node has as much memory as the job asks for",
    "Memory specification can not be satisfied": "no node has as much memory as the job asks for",
    "Invalid generic resource": "the cluster has no GPUs of that name",
    "User's group not permitted": "this user's group may not use that partition",
    "Group not permitted": "this user's group may not use that partition",
    "Invalid node name": "Slurm has no node of that name",
    "Access/permission denied": "this user may not do that",
    "User not found": "Slurm does not know this user",
    "Invalid user id": "Slurm does not know this user",
    "Invalid job id": "Slurm knows no job with this id",
    "Job dependency problem": "the job that it depends on does not exist",
    "Invalid license": "the cluster has no such licence",
}


def failure(command: str, code: int, errors: str) -> SlurmProblem | SlurmRefusal:
    """The exception for a command that failed with this exit code and these error messages."""
    lines = [_complaint(line) for line in errors.splitlines() if line.strip()]
    message = "; ".join(line for line in lines if line)[:1000]
    if not message:
        return SlurmProblem(f"{command} ended with {code}")
    # Only the controller, or the command judging its own options, can refuse.
    last = lines[-1].removeprefix("Batch job submission failed: ")
    if limit := next((found[0].strip() for line in lines if (found := _FULL.fullmatch(line))), None):
        return SlurmFull(pending_reason(limit).text)
    if closed := next((text for part, text in _CLOSED.items() if part in last), None):
        return SlurmClosed(closed)
    if _UNDECIDED.search(last) or (command != "sbatch" and "Invalid job id" not in message and "denied" not in message):
        return SlurmProblem(f"{command}: {last}")
    for part, meaning in _MEANINGS.items():
        if part.lower() in last.lower():
            return SlurmRefusal(f"Slurm refuses the job: {_specific(meaning, lines)} ({last})")
    return SlurmRefusal(f"Slurm refuses the job: {message.replace('Batch job submission failed: ', '')}")


def _complaint(line: str) -> str:
    """The line without a prefix such as `sbatch: error: ` or `slurm_load_jobs error: `."""
    return re.sub(r"^(?:\w+: )?(?:\w+ )?(?:error|fatal): ", "", line.strip())


def _specific(meaning: str, lines: Sequence[str]) -> str:
    """Adds the name of the partition, which `sbatch` prints on a separate line."""
    name = next((line.rpartition(": ")[2] for line in lines if line.startswith("invalid partition specified: ")), None)
    return f"{meaning} as {name!r}" if name else meaning
