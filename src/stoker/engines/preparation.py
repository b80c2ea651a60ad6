"""From a queued job to what its supervisor runs: command, environment, rules and batch size."""

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

# Below the ports that Linux gives to clients.
_FIRST_PORT: Final = 20_000
_PORTS: Final = 12_000


class Rendezvous(NamedTuple):
    """Where the processes of an attempt meet, and which of its machines this one is."""

    nodes: int | str = 1
    node_rank: int | str = 0
    master_addr: str = "127.0.0.1"
    master_port: int | str = _FIRST_PORT

    def placeholders(self) -> dict[str, str]:
        """The values of {nodes}, {node_rank}, {master_addr} and {master_port}."""
        return {name: str(value) for name, value in self._asdict().items()}

    def fill(self, text: str) -> str:
        """The text with these values in place of those of `KNOWN_LATER`."""
        for name, value in self.placeholders().items():
            text = text.replace(_later(name), value)
        return text

    def fill_all(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {name: self.fill(value) for name, value in variables.items()}


def _later(name: str) -> str:
    """Stands for a value in text that no person can have written: neither commands nor variables contain NUL."""
    return f"\0{name}\0"


ONE_MACHINE: Final = Rendezvous()
KNOWN_LATER: Final = Rendezvous(*map(_later, Rendezvous._fields))
"""Of an attempt whose machines a cluster manager has not chosen yet."""
AS_TYPED: Final = Rendezvous(*(f"{{{name}}}" for name in Rendezvous._fields))
"""For people: each machine has other values."""


def rendezvous_port(attempt: str) -> int:
    """A port that attempts on one machine hardly ever share."""
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
    """What the supervisor of an attempt on these GPUs runs, and the command's environment. Raises BadInputError.

    `environment`: the worker's own; `present`: all GPUs of the machine, for those that can only be named by index.
    `chosen_later`: a cluster manager chooses the job's GPUs, and names them in its own variables.
    """
    if not job.command:
        raise BadInputError(f"the job {job.id} cannot be run: {UNREADABLE}")
    words = job.command if isinstance(job.command, tuple) else ("/bin/sh", "-c", job.command)
    values = {"gpus": str(job.gpus if chosen_later else len(gpus)), **rendezvous.placeholders()}
    command = tuple(_filled_in(word, job, values) for word in words)
    inherited = {
        name: value
        for name, value in (*environment.items(), *job.environment.items())
        # These describe a run around the worker, or around the submission.
        if name not in ("STOKER_RUN", "STOKER_BATCH_SIZE") and not name.startswith("STOKER_RUN_")
    }
    variables = _presets(job, number) | inherited | {"STOKER_JOB_ID": job.id, "STOKER_ATTEMPT": str(number)}
    variables |= {"STOKER_NODES": str(rendezvous.nodes), "STOKER_NODE_RANK": str(rendezvous.node_rank)}
    if rendezvous.nodes != 1:
        # Those of the worker are not meant for the job.
        meeting = {"MASTER_ADDR": rendezvous.master_addr, "MASTER_PORT": str(rendezvous.master_port)}
        variables |= {name: job.environment.get(name, value) for name, value in meeting.items()}
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
    """Whether its batch size is found before it starts."""
    return bool(job.fit) and job.batch_size is None


def _filled_in(text: str, job: Job, given: Mapping[str, str]) -> str:
    """Fills in the placeholders that a job may use; other braces stay."""
    values = dict(given)
    if not is_fitted(job):  # otherwise they are filled in when the size is known, and probes have other ids
        values["id"] = job.id
        if job.batch_size is None and mentioned(text, ("batch_size",)):
            raise BadInputError(
                f"the command of job {job.id} contains {{batch_size}}, but the job has no batch size: "
                "set one, or write {{batch_size}} for the literal text"
            )
        values["batch_size"] = str(job.batch_size)
    return filled(text, values)


def _presets(job: Job, number: int) -> dict[str, str]:
    """Defaults that the user may override: every attempt continues the same run of Weights & Biases."""
    presets = {
        "WANDB_RUN_ID": job.id,
        "WANDB_NAME": job.name or job.id,
        # Python buffers output to a file, and a follower would see nothing for minutes.
        "PYTHONUNBUFFERED": "1",
        # The order of nvidia-smi and of Stoker.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if number > 1:
        presets["WANDB_RESUME"] = "allow"
    return presets


def batch_size_fit(job: Job, number: int, command: tuple[str, ...], slots: int) -> BatchSizeFit | None:
    """How the batch size is found before the job starts; None when it is not. `slots`: jobs per GPU."""
    if not is_fitted(job):
        return None
    try:
        spec = msgspec.convert(job.fit, FitSpec)
    except msgspec.ValidationError as error:
        raise BadInputError(f"the fit of job {job.id} is invalid: {error}") from None
    if slots > spec.search_options.per_gpu:
        spec = replace(spec, search_options=replace(spec.search_options, per_gpu=slots))
    # A shell command became three words, of which the last is the text.
    words = command[-1] if isinstance(job.command, str) else command
    # A job that shares a GPU must stay below the memory that it asked for.
    return BatchSizeFit(
        spec=spec, command=words, job=job.id, number=number, most_memory=job.memory if job.share else None
    )
