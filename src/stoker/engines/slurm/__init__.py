"""The Slurm engine: runs attempts on a cluster, each as one Slurm job with a shim in its allocation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from stoker.engines import EngineOption, integer
from stoker.queue.slurm_options import FURTHER, check_slurm, read_slurm
from stoker.units import parse_positive_duration

if TYPE_CHECKING:
    from stoker.engines.engine import Log, WorkerOptions
    from stoker.engines.slurm.engine import SlurmEngine
    from stoker.queue.fields import JobSpec
    from stoker.queue.model import View


def _further_options(text: str) -> list[str]:
    found = read_slurm({FURTHER: text})
    check_slurm(found)
    return list(found.get(FURTHER, ()))


# A larger cluster does not report all its nodes: the queue row that holds them is rewritten every few seconds.
MOST_NODES: Final = 1000

OPTIONS: Final = (
    EngineOption("--partition", "NAME", "Submit jobs to this partition (default: the cluster's)."),
    EngineOption("--account", "NAME", "Charge jobs to this account (default: the user's)."),
    EngineOption("--qos", "NAME", "Submit jobs with this quality of service."),
    EngineOption("--constraint", "FEATURES", "Use only nodes with these features."),
    EngineOption("--reservation", "NAME", "Use this reservation."),
    EngineOption("--sbatch", "OPTIONS", "Further options of sbatch for every job.", None, _further_options),
    EngineOption("--max-pending", "N", "Let up to N jobs wait in Slurm at a time [50].", "50", integer(1, 10_000)),
    EngineOption("--preemptible-partition", "NAME", "Submit jobs with --preemptible to this partition."),
    EngineOption("--preemptible-qos", "NAME", "Submit jobs with --preemptible with this quality of service."),
    EngineOption("--source", "SOURCE", "Where readings on the nodes come from (default: STOKER_GPUS, then auto)."),
    EngineOption("--deadline", "DURATION", "How long one look may take (default: 5s).", None, parse_positive_duration),
)


def create(options: "WorkerOptions", own: Mapping[str, Any], log: "Log") -> "SlurmEngine":
    from stoker.engines.slurm.engine import SlurmEngine, SlurmEngineOptions
    from stoker.settings import load_settings

    settings = load_settings()
    chosen = {
        **own,
        "source": own["source"] or settings.gpus,
        "deadline": own["deadline"] or parse_positive_duration(settings.deadline),
        "sbatch": tuple(own["sbatch"] or ()),
    }
    return SlurmEngine(options, SlurmEngineOptions(**chosen), log)


def check(job: "JobSpec", view: "View | None" = None) -> None:
    """Raises BadInputError for a job that no cluster can run, or that the view's cluster cannot run."""
    from stoker.engines.slurm.submission import check as check_submission

    nodes = () if view is None or len(view.nodes) >= MOST_NODES else view.nodes
    check_submission(job, nodes, () if view is None else view.labels)
