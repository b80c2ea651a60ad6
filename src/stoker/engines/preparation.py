"""From a queued job to what its supervisor runs: command, environment, rules and batch size."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from stoker.engines.attempt import BatchSizeFit
from stoker.errors import BadInputError
from stoker.fit.model import FitSpec
from stoker.gpus.model import Gpu
from stoker.gpus.visible import hiding_variables, set_visible_gpus
from stoker.queue.commands import filled, mentioned
from stoker.queue.model import Job
from stoker.rules.registry import policies_of
from stoker.runs.plan import OF_THE_JOB, UNWATCHED, Plan


def prepare(
    job: Job, gpus: Sequence[Gpu], environment: Mapping[str, str], number: int, present: Sequence[Gpu] = ()
) -> tuple[Plan, dict[str, str]]:
    """What the supervisor of an attempt on these GPUs runs, and the command's environment. Raises BadInputError.

    `environment`: the worker's own; `present`: all GPUs of the machine, for those that can only be named by index.
    """
    words = job.command if isinstance(job.command, tuple) else ("/bin/sh", "-c", job.command)
    command = tuple(_filled_in(word, job, len(gpus)) for word in words)
    inherited = {
        name: value
        for name, value in (*environment.items(), *job.environment.items())
        # These describe a run around the worker, or around the submission.
        if name not in ("STOKER_RUN", "STOKER_BATCH_SIZE") and not name.startswith("STOKER_RUN_")
    }
    variables = _presets(job, number) | inherited | {"STOKER_JOB_ID": job.id, "STOKER_ATTEMPT": str(number)}
    if job.batch_size is not None:
        variables["STOKER_BATCH_SIZE"] = str(job.batch_size)
    if gpus:
        set_visible_gpus(variables, gpus, present)
    else:
        variables |= {name: job.environment.get(name, "") for name in hiding_variables()}
    try:
        policies_of(job.policy if job.gpus else {})
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


def _filled_in(text: str, job: Job, gpus: int) -> str:
    """Fills in the placeholders that a job may use; other braces stay."""
    values = {"gpus": str(gpus)}
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
