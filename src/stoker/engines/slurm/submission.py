"""Turns a queued job into arguments of `sbatch`. Pure."""

import math
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from stoker.errors import BadInputError, InvalidFieldsError
from stoker.queue.fields import JobSpec
from stoker.queue.model import Job, is_host
from stoker.queue.slurm_options import FURTHER, NAMED
from stoker.units import format_memory

# Slurm sends it before its own time limit, so that the job has its grace. Slurm uses it for nothing else.
TIME_LIMIT_SIGNAL: Final = "USR2"
# Slurm counts in minutes, and its clock starts before the job's.
_SPARE: Final = 60.0
_MINUTE: Final = 60.0
# The niceness per step of negative priority; users cannot raise a job.
_NICE_STEP: Final = 100
_MOST_NICE: Final = 2_000_000_000
# The limit of a job's name in Slurm.
_LONGEST_NAME: Final = 60
_NOT_IN_NAME: Final = re.compile(r"[^A-Za-z0-9_.=+-]+")
_PREFIX: Final = "stoker"

Destination = tuple[str | None, str | None]
"""A partition and a reservation."""


class SubmissionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's defaults for submissions, which a job can override."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    sbatch: tuple[str, ...] = ()
    """Further options of `sbatch`."""
    preemptible_partition: str | None = None
    """The partition of jobs that may be preempted."""
    preemptible_qos: str | None = None


class WhereItRuns(msgspec.Struct, frozen=True):
    """The nodes and labels that jobs can select."""

    nodes: tuple[str, ...] = ()
    """The names of the cluster's nodes; empty if unknown."""
    labels: tuple[str, ...] = ()
    """The worker's labels, which apply to all its nodes."""

    def node(self, name: str) -> str | None:
        return next((node for node in self.nodes if is_host(node, name)), None)


def constraint_of(job: JobSpec, constraint: str | None, labels: Sequence[str] = ()) -> str | None:
    """The features required of the nodes: the job's constraint, and its labels that the worker lacks."""
    wanted = [label for label in job.labels if label not in labels]
    if not wanted:
        return constraint
    before = f"({constraint})" if constraint and "|" in constraint else constraint
    return "&".join([*([before] if before else []), *wanted])


def comment_of(key: str, attempt: str) -> str:
    """The comment that identifies the attempt's Slurm job. `key`: the worker's."""
    return f"{_PREFIX}:{key}:{attempt}"


def attempt_of(comment: str, key: str) -> str | None:
    """The attempt of a Slurm job with this comment, if this worker submitted it."""
    before = comment_of(key, "")
    return comment.removeprefix(before) if comment.startswith(before) else None


def arguments(
    job: Job,
    options: SubmissionOptions,
    comment: str,
    directory: str,
    grace: float,
    gpu_type: str = "",
    where: "WhereItRuns | None" = None,
) -> list[str]:
    """The arguments of `sbatch` for an attempt at this job. `directory`: the attempt's.

    `gpu_type`: the cluster's name of the requested GPU model.
    """
    where = where or WhereItRuns()
    asked = _asked(job, options)
    given = [
        "--parsable",
        f"--job-name={_name(job)}",
        f"--comment={comment}",
        f"--output={directory.replace('%', '%%')}/slurm.out",
        "--open-mode=append",
        "--chdir=/",
        "--input=/dev/null",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--nice={min(_MOST_NICE, max(0, -job.priority) * _NICE_STEP)}",
        # Only a preemptible job may be restarted by Slurm itself.
        "--requeue" if job.preemptible else "--no-requeue",
        f"--signal=B:{TIME_LIMIT_SIGNAL}@{math.ceil(grace + _SPARE / 2)}",
    ]
    asked["constraint"] = constraint_of(job, asked.get("constraint"), where.labels)
    given += [f"--{name}={asked[name]}" for name in NAMED if asked.get(name)]
    if job.machine is not None:
        given.append(f"--nodelist={where.node(job.machine) or job.machine}")
    # Slurm refuses unknown names, which belong to other machines of the queue.
    if excluded := [node for name in job.exclude_machines if (node := where.node(name))]:
        given.append(f"--exclude={','.join(excluded)}")
    if job.gpus:
        kind = gpu_type or job.gpu_model or ""
        given.append(f"--gres=gpu:{kind}:{job.gpus}" if kind else f"--gres=gpu:{job.gpus}")
    if job.cpus:
        given.append(f"--cpus-per-task={job.cpus}")
    if job.ram:
        given.append(f"--mem={math.ceil(job.ram / 2**20)}M")
    if job.time_limit is not None:
        given.append(f"--time={math.ceil((job.time_limit + grace + _SPARE) / _MINUTE)}")
    # Last, so that explicit options override computed ones.
    return [*given, *options.sbatch, *asked.get(FURTHER, ())]


def _asked(job: JobSpec, options: SubmissionOptions) -> dict[str, Any]:
    """The options of a job: its own, then those for preemptible jobs, then the worker's."""
    asked: dict[str, Any] = {name: getattr(options, name) for name in NAMED}
    if job.preemptible:
        asked["partition"] = options.preemptible_partition or asked["partition"]
        asked["qos"] = options.preemptible_qos or asked["qos"]
    own: Mapping[str, Any] = job.slurm
    return asked | {name: value for name, value in own.items() if value}


def partition_of(job: JobSpec, options: SubmissionOptions) -> str | None:
    """The partition of the submission; None for the cluster's default."""
    found = _asked(job, options)["partition"]
    return None if found is None else str(found)


def destination_of(job: JobSpec, options: SubmissionOptions) -> Destination:
    """The partition and reservation, each of which may be closed while others are open."""
    asked = _asked(job, options)
    return asked["partition"], asked["reservation"]


def script(python: str, directory: str) -> str:
    """The batch script, which becomes the shim by `exec` so that the shim gets all signals."""
    return f"#!/bin/sh\nexec {shlex.join(shim_command(python, directory))}\n"


def shim_command(python: str, *arguments: str) -> list[str]:
    """The shim's command, with a fast start of Python on every node: imports run without garbage collection and without
    `site`, which reads files of all packages. Instead of `typing_extensions`, msgspec uses `typing`."""
    start = (
        f"import gc, sys; gc.disable(); sys.path += {_package_places()}; sys.modules['typing_extensions'] = None; "
        "from stoker.engines.slurm.shim import main; del sys.modules['typing_extensions']; main()"
    )
    return [python, "-S", "-P", "-c", start, *arguments]


def _package_places() -> list[str]:
    """This process's package directories, without the standard library."""
    own = [str(Path(__file__).parents[3]), str(Path(msgspec.__file__).parents[1])]
    library, scripts = sysconfig.get_path("stdlib"), sysconfig.get_path("scripts")
    paths = [path for path in sys.path if path.startswith("/") and Path(path).is_dir() and path != scripts]
    packages = [path for path in paths if path.endswith("-packages") or not path.startswith(library)]
    return list(dict.fromkeys([*own, *packages]))


class NodeCapacity(Protocol):
    """The resources of a node."""

    @property
    def name(self) -> str: ...
    @property
    def features(self) -> tuple[str, ...]: ...
    @property
    def partitions(self) -> tuple[str, ...]: ...
    @property
    def gpus(self) -> int: ...
    @property
    def gpu_model(self) -> str: ...
    @property
    def cpus(self) -> int: ...
    @property
    def memory(self) -> int: ...


def lacking(
    job: JobSpec, nodes: Iterable[NodeCapacity], partition: str | None, labels: Sequence[str] = ()
) -> dict[str, str]:
    """Why no node of this partition (or of the cluster) can ever run the job, by field; empty if one can.

    `labels`: the worker's, which apply to all its nodes.
    """
    names = set((partition or "").split(",")) - {""}
    members = [node for node in nodes if not names or names & set(node.partitions)]
    if not members:
        return {}
    if missing := _not_among(job, members, partition, labels):
        return missing
    members = [node for node in members if _is_chosen(node, job, labels)]
    where = f"of partition {partition}" if partition else "of the cluster"
    if missing := _too_little(job, members, where):
        return missing
    suitable = sum(1 for node in members if _has_all(node, job))
    within = f"in partition {partition}" if partition else "in the cluster"
    have = "node has" if suitable == 1 else "nodes have"
    few = f"it asks for {job.nodes} nodes, but {within} only {suitable} {have} what it needs on each"
    return {"nodes": few} if job.nodes > max(suitable, 1) else {}


def _too_little(job: JobSpec, members: Sequence[NodeCapacity], where: str) -> dict[str, str]:
    """Requests that none of these nodes can satisfy, by field."""
    wanted = (job.gpu_model or "").lower()
    gpus, cpus, memory = (max(getattr(node, what) for node in members) for what in ("gpus", "cpus", "memory"))
    if job.gpus > gpus:
        return {"gpus": f"no node {where} has {job.gpus} GPUs (at most {gpus})"}
    if job.gpus and wanted and all(node.gpu_model.lower() != wanted for node in members):
        known = ", ".join(sorted({node.gpu_model for node in members} - {""}))
        return {"gpu_model": f"no node {where} has GPUs of type {job.gpu_model}{f' (but {known})' if known else ''}"}
    if job.cpus and job.cpus > cpus:
        return {"cpus": f"no node {where} has {job.cpus} CPUs (at most {cpus})"}
    if job.ram and job.ram > memory:
        return {"ram": f"no node {where} has {format_memory(job.ram)} of RAM (at most {format_memory(memory)})"}
    return {}


def _not_among(
    job: JobSpec, members: Sequence[NodeCapacity], partition: str | None, labels: Sequence[str]
) -> dict[str, str]:
    """Why the job's selection of machines excludes all these nodes."""
    where = f"of partition {partition}" if partition else "of the cluster"
    if job.machine is not None and not any(is_host(node.name, job.machine) for node in members):
        return {"machine": f"no node {where} is called {job.machine}"}
    known = {*labels, *(feature for node in members for feature in node.features)}
    if absent := next((label for label in job.labels if label not in known), None):
        return {"labels": f"no node {where} has the feature {absent}"}
    if not any(_is_chosen(node, job, labels) for node in members):
        return {"labels" if job.labels else "exclude_machines": f"no node {where} is left by what it asks and excludes"}
    return {}


def _is_chosen(node: NodeCapacity, job: JobSpec, labels: Sequence[str]) -> bool:
    if job.machine is not None and not is_host(node.name, job.machine):
        return False
    if any(is_host(node.name, name) for name in job.exclude_machines):
        return False
    return set(job.labels) <= {*labels, *node.features}


def _has_all(node: NodeCapacity, job: JobSpec) -> bool:
    wanted = (job.gpu_model or "").lower() if job.gpus else ""
    is_model = not wanted or node.gpu_model.lower() == wanted
    return is_model and node.gpus >= job.gpus and node.cpus >= (job.cpus or 0) and node.memory >= (job.ram or 0)


def check_partition(name: str | None, known: Iterable[str]) -> None:
    """Raises BadInputError if the partitions are known and this one is not among them."""
    names = sorted(known)
    for one in (name or "").split(","):
        if one and names and one not in names:
            raise BadInputError(f"the cluster has no partition {one!r}: choose among {', '.join(names)}")


def check(job: JobSpec, nodes: Sequence[NodeCapacity] = (), labels: Sequence[str] = ()) -> None:
    """Raises BadInputError for a job that this engine can never run.

    `nodes`: all nodes of the cluster, if known; `labels`: the worker's.
    """
    if job.share:
        raise InvalidFieldsError({"share": "Slurm gives whole GPUs to jobs, so a job there cannot share one"})
    if job.memory is not None:
        raise InvalidFieldsError({"memory": "Slurm does not know the memory of GPUs: choose a GPU model instead"})
    if job.gpu_memory is not None:
        raise InvalidFieldsError(
            {"gpu_memory": "Slurm does not know the memory of GPUs: choose a GPU model or a label"}
        )
    if job.labels and "[" in job.slurm.get("constraint", ""):
        raise InvalidFieldsError({"labels": "labels cannot be added to a constraint with brackets: write them there"})
    if job.gpu_model and not re.fullmatch(r"[A-Za-z0-9_.-]+", job.gpu_model):
        raise InvalidFieldsError({"gpu_model": "Slurm takes one type of GPU, by its name on the cluster, such as a100"})
    partition = job.slurm.get("partition")
    try:
        check_partition(partition, {name for node in nodes for name in node.partitions})
    except BadInputError as error:
        raise InvalidFieldsError({"slurm": str(error)}) from None
    if missing := lacking(job, nodes, partition, labels):
        raise InvalidFieldsError(missing)


def _name(job: Job) -> str:
    name = _NOT_IN_NAME.sub("-", job.name).strip("-")[:_LONGEST_NAME] if job.name else ""
    return f"{_PREFIX}-{name}-{job.id}" if name else f"{_PREFIX}-{job.id}"
