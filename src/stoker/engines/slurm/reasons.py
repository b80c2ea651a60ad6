"""Explains Slurm's reason codes. Pure."""

import re
from typing import Final, Literal, NamedTuple

from stoker.units import clock_time

Outlook = Literal["waits", "held", "never"]
"""A pending job starts by itself, only after a release, or never as it is."""


class PendingReason(NamedTuple):
    """Why Slurm does not start a job."""

    outlook: Outlook
    text: str
    """A clause for people: `jobs of higher priority come first`."""


_WAITS: Final = {
    "Priority": "jobs of higher priority come first",
    "Resources": "other jobs use what it asks for",
    "Requested nodes are busy": "other jobs use what it asks for",
    "Dependency": "another job has to end first",
    "Licenses": "the licences that it asks for are in use",
    "Reservation": "its reservation has not begun, or has no room for it",
    "Reserved for maintenance": "its nodes are reserved for maintenance",
    "May be reserved for other job": "nodes that it needs may be reserved for another job",
    "Prolog": "its nodes are being prepared for it",
    "Cleaning": "what is left of its last run is being removed",
    "NodeDown": "a node that it needs is down",
    "ReqNodeNotAvail": "nodes that it needs are not available",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        "the nodes that it could use are down, drained, or reserved for partitions of higher priority"
    ),
    "PartitionDown": "{partition} is down",
    "PartitionInactive": "{partition} is not active and starts no jobs",
    "PartitionNodeLimit": "it asks for more or fewer nodes than {partition} allows, or for nodes that are down",
    "PartitionConfig": "the settings of {partition} do not allow what it asks for",
    "FrontEndDown": "no front-end node can run it",
    "SchedDefer": "it was to start at once, and Slurm has deferred that",
    "JobArrayTaskLimit": "as many tasks of its array run as may at a time",
    "BurstBufferResources": "there is not enough burst buffer space",
    "BurstBufferStageIn": "its files are being copied to the burst buffer",
    "PowerNotAvail": "there is not enough power for it",
    "PowerReserved": "the power that it needs is reserved",
    "FedJobLock": "the clusters of the federation agree on where it runs",
    "AccountingPolicy": "a limit of its account or its QOS is reached",
    "AssociationJobLimit": "its account has as many jobs as it may",
    "AssociationResourceLimit": "its account has reached a limit of resources",
    "AssociationTimeLimit": "its account has used up its time",
    "QOSJobLimit": "its QOS has as many jobs as it may",
    "QOSResourceLimit": "its QOS has reached a limit of resources",
    "QOSTimeLimit": "its QOS has used up its time",
    "QOSUsageThreshold": "its account has used too much lately for its QOS",
    "SystemFailure": "a part of Slurm has failed",
    # These describe an end; a requeued job may still have them.
    "JobLaunchFailure": "its last start failed",
    "NonZeroExitCode": "it was requeued after it had failed",
    "RaisedSignal": "it was requeued after a signal had ended it",
    "TimeLimit": "it was requeued at its time limit",
    "InactiveLimit": "it was requeued after it had been inactive for too long",
    "OutOfMemory": "it was requeued after it had run out of memory",
}

_HELD: Final = {
    "JobHeldUser": "somebody has to release it with `scontrol release`",
    "JobHeldAdmin": "an administrator has to release it",
    "JobHoldMaxRequeue": "it was requeued too often, and somebody has to release it with `scontrol release`",
    "launch failed requeued held": "it could not be launched, and somebody has to release it with `scontrol release`",
    "job requeued in held state": "it was requeued, and somebody has to release it with `scontrol release`",
    "user env retrieval failed requeued held": (
        "the environment of its user could not be read, and somebody has to release it with `scontrol release`"
    ),
    "BurstBufferOperation": "its files could not be copied to or from the burst buffer",
}

_NEVER: Final = {
    "DependencyNeverSatisfied": "it comes after a job that did not end as it had to",
    "BadConstraints": "no node has what it asks for",
    "Constraints": "no node has what it asks for",
    "PartitionTimeLimit": "it asks for more time than {partition} allows",
    "MaxMemPerLimit": "it asks for more memory on a node or for a CPU than is allowed",
    "InvalidAccount": "its account does not exist or is not for its user",
    "InvalidQOS": "its QOS does not exist or is not for its user",
    "AccountNotAllowed": "its account may not use {partition}",
    "QOSNotAllowed": "its QOS may not be used in {partition}",
    "ReservationDeleted": "its reservation was deleted",
    "ReservationInvalid": "its reservation cannot be used",
    "DeadLine": "it cannot end before its deadline",
}

_TABLES: Final[dict[Outlook, dict[str, str]]] = {"waits": _WAITS, "held": _HELD, "never": _NEVER}
_SINGLE: Final = {
    code.lower(): PendingReason(outlook, text) for outlook, table in _TABLES.items() for code, text in table.items()
}


class _Resource(NamedTuple):
    """A resource of accounting limits."""

    amount: str
    """`CPUs`."""
    minutes: str
    """`CPU minutes`."""
    countable: bool = True


# By the word in reason codes, which differ between versions of Slurm. GRES other than GPUs are rare.
_RESOURCES: Final = {
    "cpu": _Resource("CPUs", "CPU minutes"),
    "mem": _Resource("memory", "memory minutes", countable=False),
    "node": _Resource("nodes", "node minutes"),
    "gres": _Resource("GPUs", "GPU minutes"),
    "license": _Resource("licences", "licence minutes"),
    "bb": _Resource("burst buffer space", "minutes of burst buffer space", countable=False),
    "energy": _Resource("energy", "energy minutes", countable=False),
    "billing": _Resource("billing units", "minutes of billing units"),
    "unknown": _Resource("units of a resource", "minutes of a resource"),
    "wall": _Resource("time", "time", countable=False),
}
_OWNERS: Final = {"assoc": "its account", "qos": "its QOS"}
_HOLDERS: Final = {"user": "its user", "account": "its account"}

# `AssocGrpCPURunMinutesLimit`, `QOSMaxGRESPerUser`, `QOSMinCpuNotSatisfied`, `MaxJobsPerAccount`.
_LIMIT: Final = re.compile(
    r"(?P<owner>assoc|qos)?(?P<kind>grp|max|min)"
    r"(?P<what>jobs?|submitjobs?|cpus?|mem(?:ory)?|nodes?|gres|license|bb|energy|billing|unknown|wall(?:duration)?)"
    r"(?P<minutes>(?P<running>run)?min(?:ute)?s)?"
    r"(?:per(?P<per>job|node|user|account))?(?:limit|notsatisfied)?"
)

# Slurm assumes 365 days for a job without a time limit, so estimates behind such a job are meaningless.
_NO_ESTIMATE: Final = 300 * 86400.0

# Older versions put the details in parentheses.
_DETAILS: Final = re.compile(r"(?P<code>\w+)(?:, ?|\()(?P<rest>[^()]*)\)?")


def why_pending(
    code: str, start: float | None = None, now: float = 0.0, partition: str = "", ahead: int | None = None
) -> str:
    """The predicate about a pending job: `waits in Slurm: …; starts about 14:30`.

    `start`: Slurm's estimate in seconds since the epoch. `ahead`: the number of jobs with higher priority.
    """
    if not _known_code(code):
        return f"waits in Slurm's queue{_at('; starts about', start, now)}"
    if _known_code(code) == "begintime":
        return f"waits in Slurm until it may start{_at(' at', start, now)}"
    found = pending_reason(code, partition)
    if found.outlook == "held":
        return f"is held in Slurm: {found.text}"
    if found.outlook == "never":
        return f"cannot start in Slurm: {found.text}"
    text = found.text
    if ahead and _known_code(code) == "priority":
        text = "1 job of higher priority comes first" if ahead == 1 else f"{ahead:,} jobs of higher priority come first"
    return f"waits in Slurm: {text}{_at('; starts about', start, now)}"


def pending_reason(code: str, partition: str = "") -> PendingReason:
    """Explains a reason code. `partition`: the job's, for texts that name it."""
    known = _SINGLE.get(_known_code(code)) or _limit(_known_code(code)) or _with_details(code)
    if known is None:
        return PendingReason("waits", _spelled_out(code))
    where = f"partition {partition}" if partition else "its partition"
    return known._replace(text=known.text.replace("{partition}", where))


def _known_code(code: str) -> str:
    """Normalizes a code or text for the tables; `scontrol` writes underscores for spaces."""
    text = code.strip().strip("()")
    text = text if " " in text else text.replace("_", " ")
    return "" if text.lower() in {"none", "null", "n/a"} else text.lower()


def _limit(code: str) -> PendingReason | None:
    """Explains one of more than a hundred accounting limits."""
    found = _LIMIT.fullmatch(code)
    if found is None:
        return None
    owner = _OWNERS[found["owner"] or "qos"]
    what, per = found["what"].removesuffix("s") if found["what"] != "gres" else "gres", found["per"]
    if what in {"job", "submitjob"}:
        # An association limit that does not cover the whole account covers one user.
        holder = per or ("user" if found["kind"] == "max" else "")
        return PendingReason("waits", _limit_of_jobs(owner, holder, submitted=what == "submitjob"))
    resource = _RESOURCES[next(name for name in _RESOURCES if what.startswith(name))]
    amount = resource.minutes if found["minutes"] else resource.amount
    if found["kind"] == "min":
        compared = "fewer" if resource.countable else "less"
        return PendingReason("never", f"it asks for {compared} {amount} than {owner} requires")
    if found["kind"] == "max" and per in {"job", "node"}:
        each = "for one job" if per == "job" else "on one node"
        return PendingReason("never", f"it asks for more {amount} than {owner} allows {each}")
    if per in _HOLDERS:
        return PendingReason("waits", f"{_HOLDERS[per]} has all the {amount} that {owner} allows for one {per}")
    if found["running"]:
        text = f"the running jobs of {owner} hold all the {amount} that they may hold together"
    elif found["minutes"] or what.startswith("wall"):
        text = f"{owner} has used up its {amount}"
    else:
        text = f"the running jobs of {owner} have all the {amount} that they may have together"
    return PendingReason("waits", text)


def _limit_of_jobs(owner: str, holder: str, *, submitted: bool) -> str:
    has = "has as many jobs in Slurm as" if submitted else "runs as many jobs as"
    if holder in _HOLDERS:
        return f"{_HOLDERS[holder]} {has} {owner} allows for one {holder}"
    return f"{owner} {has} it may"


def _with_details(code: str) -> PendingReason | None:
    """Explains a code with details: `ReqNodeNotAvail, UnavailableNodes:node[1-2]`."""
    found = _DETAILS.fullmatch(code.strip().strip("()"))
    known = _SINGLE.get(_known_code(found["code"])) if found else None
    if found is None or known is None:
        return None
    rest = found["rest"]
    label, colon, names = rest.partition(":")
    if label.lower() in {"unavailablenodes", "unavailable"} and colon:
        return known._replace(text=f"{known.text}: {names}") if names else known
    details = _SINGLE.get(_known_code(rest))
    return details if details is not None else known._replace(text=f"{known.text} ({rest})")


def _spelled_out(code: str) -> str:
    """Spells out an unknown code: `QueuedForNewThing` becomes `queued for new thing (QueuedForNewThing)`."""
    shown = code.strip().strip("()")
    if " " in shown:
        return shown
    if shown.isdecimal():
        return f"code {shown}"
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", shown)
    plain = " ".join(word if word.isupper() and len(word) > 1 else word.lower() for word in words.split())
    return f"{plain} ({shown})" if plain != shown else plain


def _at(before: str, start: float | None, now: float) -> str:
    """`; starts about 14:30`; empty without a meaningful estimate in the future."""
    return f"{before} {clock_time(start, now)}" if start is not None and 0 < start - now < _NO_ESTIMATE else ""
