"""Turns a queued job into a run: command, environment, rules and batch size."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from stoker.engines.attempt import BatchSizeFit
from stoker.errors import BadInputError
from stoker.fit.model import FitSpec
from stoker.gpus.model import Gpu
from stoker.gpus.visible import hiding_variables, set_visible_gpus
from stoker.queue.commands import filled, mentioned
from stoker.queue.model import UNREADABLE, Job
from stoker.rules.registry import policies_of
from stoker.runs.plan import OF_THE_JOB, UNWATCHED, Plan

# Below Linux's ephemeral ports.
_FIRST_PORT: Final = 20_000
_PORTS: Final = 12_000


class Rendezvous(NamedTuple):
    """The rendezvous address of an attempt's processes, and the rank of this machine."""

    nodes: int | str = 1
    node_rank: int | str = 0
    master_addr: str = "127.0.0.1"
    master_port: int | str = _FIRST_PORT

    def placeholders(self) -> dict[str, str]:
        """Values for {nodes}, {node_rank}, {master_addr} and {master_port}."""
        return {name: str(value) for name, value in self._asdict().items()}

    def fill(self, text: str) -> str:
        """The text with the stand-ins of `KNOWN_LATER` replaced by these values."""
        for name, value in self.placeholders().items():
            text = text.replace(_later(name), value)
        return text

    def fill_all(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {name: self.fill(value) for name, value in variables.items()}


def _later(name: str) -> str:
    """A stand-in for a later value. No command or variable can contain it, because of the NUL."""
    return f"\0{name}\0"


ONE_MACHINE: Final = Rendezvous()
KNOWN_LATER: Final = Rendezvous(*map(_later, Rendezvous._fields))
"""For an attempt whose machines the cluster manager has not chosen yet."""
AS_TYPED: Final = Rendezvous(*(f"{{{name}}}" for name in Rendezvous._fields))
"""Shown to people, since each machine has different values."""


def rendezvous_port(attempt: str) -> int:
    """A port that two attempts on a machine rarely share."""
    return _FIRST_PORT + zlib.crc32(attempt.encode()) % _PORTS


def on_one_machine(attempt: str) -> Rendezvous:
    return Rendezvous(master_port=rendezvous_port(attempt))


def prepare(
    job: Job,
    gpus: Sequence[Gpu],
    environment: Mapping[str, str],
    number: int,
    present: Sequence[Gpu] = (),
    rendezvous: Rendezvous = ONE_MACHINE,
    *,
    chosen_later: bool = False,
) -> tuple[Plan, dict[str, str]]:
    """The plan of an attempt on these GPUs, and the command's environment. Raises BadInputError.

    `environment`: the worker's; `present`: all GPUs of the machine, since some are addressed by index only.
    `chosen_later`: the cluster manager chooses the job's GPUs and sets the variables itself.
    """
    if not job.command:
        raise BadInputError(f"the job {job.id} cannot be run: {UNREADABLE}")
    words = job.command if isinstance(job.command, tuple) else ("/bin/sh", "-c", job.command)
    values = {"gpus": str(job.gpus if chosen_later else len(gpus)), **rendezvous.placeholders()}
    command = tuple(_filled_in(word, job, values) for word in words)
    inherited = {
        name: value
        for name, value in (*environment.items(), *job.environment.items())
        # These belong to a run that contains the worker or the submission.
        if name not in ("STOKER_RUN", "STOKER_BATCH_SIZE") and not name.startswith("STOKER_RUN_")
    }
    variables = _presets(job, number) | inherited | {"STOKER_JOB_ID": job.id, "STOKER_ATTEMPT": str(number)}
    variables |= {"STOKER_NODES": str(rendezvous.nodes), "STOKER_NODE_RANK": str(rendezvous.node_rank)}
    if rendezvous.nodes != 1:
        # The worker's own values do not apply to the job.
        master = {"MASTER_ADDR": rendezvous.master_addr, "MASTER_PORT": str(rendezvous.master_port)}
        variables |= {name: job.environment.get(name, value) for name, value in master.items()}
    if job.batch_size is not None:
        variables["STOKER_BATCH_SIZE"] = str(job.batch_size)
    if gpus:
        set_visible_gpus(variables, gpus, present)
    elif chosen_later and job.gpus:
        for name in hiding_variables():
            if name not in job.environment:
                variables.pop(name, None)
    else:
        variables |= {name: job.environment.get(name, "") for name in hiding_variables()}
    if job.gpus:
        try:
            policies_of(job.policy)
        except BadInputError as error:
            raise BadInputError(f"the policy of job {job.id} cannot be used: {error}") from None
    plan = Plan(
        command=command,
        policy=job.policy,
        gpus=OF_THE_JOB if job.gpus else UNWATCHED,
        max_time=job.time_limit,
        then=job.then,
        directory=job.directory,
    )
    return plan, variables


def is_fitted(job: Job) -> bool:
    """True if the job's batch size is found before it starts."""
    return bool(job.fit) and job.batch_size is None


def _filled_in(text: str, job: Job, given: Mapping[str, str]) -> str:
    """Replaces the placeholders that a job may use; other braces stay."""
    values = dict(given)
    if not is_fitted(job):  # a fitted job gets its size after probing, and its probes have other ids
        values["id"] = job.id
        if job.batch_size is None and mentioned(text, ("batch_size",)):
            raise BadInputError(
                f"the command of job {job.id} contains {{batch_size}}, but the job has no batch size: "
                "set one, or write {{batch_size}} for the literal text"
            )
        values["batch_size"] = str(job.batch_size)
    return filled(text, values)


def _presets(job: Job, number: int) -> dict[str, str]:
    """Defaults that the user may override. All attempts continue one Weights & Biases run."""
    presets = {
        "WANDB_RUN_ID": job.id,
        "WANDB_NAME": job.name or job.id,
        # Python buffers output to files, and `logs -f` would show nothing for minutes.
        "PYTHONUNBUFFERED": "1",
        # Number GPUs as nvidia-smi and Stoker do.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if number > 1:
        presets["WANDB_RESUME"] = "allow"
    return presets


def batch_size_fit(job: Job, number: int, command: tuple[str, ...], slots: int) -> BatchSizeFit | None:
    """How to find the batch size before the job starts; None if the job has one. `slots`: jobs per GPU."""
    if not is_fitted(job):
        return None
    try:
        spec = msgspec.convert(job.fit, FitSpec)
    except msgspec.ValidationError as error:
        raise BadInputError(f"the fit of job {job.id} is invalid: {error}") from None
    if slots > spec.search_options.per_gpu:
        spec = replace(spec, search_options=replace(spec.search_options, per_gpu=slots))
    # A shell command has become `/bin/sh -c TEXT`.
    words = command[-1] if isinstance(job.command, str) else command
    # On a shared GPU the job must stay below its requested memory.
    return BatchSizeFit(
        spec=spec, command=words, job=job.id, number=number, most_memory=job.memory if job.share else None
    )
