"""The local engine: runs attempts on the GPUs of this machine, each under a shim that outlives the worker."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from stoker.engines import EngineOption, integer
from stoker.errors import BadInputError, InvalidFieldsError
from stoker.units import format_memory, parse_fraction, parse_memory, parse_positive_duration

if TYPE_CHECKING:
    from stoker.engines.engine import Log, WorkerOptions
    from stoker.engines.local.engine import LocalEngine
    from stoker.queue.fields import JobSpec
    from stoker.queue.model import View

_GPU_ORDERS: Final = ("links", "memory", "index")


def _gpu_order(text: str) -> str:
    if text not in _GPU_ORDERS:
        raise BadInputError(
            f"{text!r} is not an order of GPUs: choose {', '.join(_GPU_ORDERS[:-1])} or {_GPU_ORDERS[-1]}"
        )
    return text


OPTIONS: Final = (
    EngineOption("--gpus", "GPUS", "Use only these: 0,2 or uuids [all].", "all"),
    EngineOption(
        "--free-below", "PERCENT", "A GPU with a higher utilization is in use by others [50%].", "50%", parse_fraction
    ),
    EngineOption(
        "--slots-per-gpu",
        "K",
        "Run up to K jobs on one GPU at a time, also jobs submitted without --share [1].",
        "1",
        integer(1, 64),
    ),
    EngineOption(
        "--gpu-order",
        "ORDER",
        "Prefer GPUs by links, memory or index [links].",
        "links",
        _gpu_order,
    ),
    EngineOption("--cpu-jobs", "N", "Run up to N jobs without a GPU at a time [4].", "4", integer(0, 1024)),
    EngineOption("--cpus", "N", "Let jobs with --cpus have N CPUs together (default: all).", None, integer(0, 65536)),
    EngineOption("--ram", "SIZE", "Let jobs with --ram have this much together (default: all).", None, parse_memory),
    EngineOption(
        "--fill", "[FILE]", "Fill GPUs that no job needs, as `stoker fill` does [stoker.toml].", None, str, bare=""
    ),
    EngineOption("--source", "SOURCE", "auto, nvml, nvidia-smi, drm or sim:4 (default: STOKER_GPUS, then auto)."),
    EngineOption("--deadline", "DURATION", "How long one look may take (default: 5s).", None, parse_positive_duration),
)


def create(options: "WorkerOptions", own: Mapping[str, Any], log: "Log") -> "LocalEngine":
    from stoker.engines.local.engine import LocalEngine, LocalOptions
    from stoker.settings import load_settings

    settings = load_settings()
    source = own["source"] or settings.gpus
    deadline = own["deadline"] or parse_positive_duration(settings.deadline)
    return LocalEngine(options, LocalOptions(**{**own, "source": source, "deadline": deadline}), log)


def check(job: "JobSpec", view: "View | None" = None) -> None:
    """Raises BadInputError for a job that no machine can run, or that exceeds the CPUs or RAM of the view's machine.

    GPUs are not checked: one that fell off the bus may come back.
    """
    if job.nodes > 1:
        raise InvalidFieldsError({"nodes": "a job over several machines needs a worker with --engine slurm"})
    if view is None:
        return
    where = "no machine of this queue has"
    if job.cpus and view.cpus is not None and job.cpus > view.cpus:
        raise InvalidFieldsError({"cpus": f"{where} {job.cpus} CPUs (at most {view.cpus})"})
    if job.ram and view.ram is not None and job.ram > view.ram:
        most = format_memory(view.ram)
        raise InvalidFieldsError({"ram": f"{where} {format_memory(job.ram)} of RAM (at most {most})"})
