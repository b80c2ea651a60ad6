"""What keeps a probe out of the records of the experiment that it belongs to."""

from collections.abc import Mapping
from typing import Final

# Who finds one of these goes on in the run that it names: with its metrics, its configuration, its checkpoints.
_RUNS: Final = frozenset(
    {
        *("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME", "WANDB_SWEEP_ID"),
        *("MLFLOW_RUN_ID", "NEPTUNE_CUSTOM_RUN_ID", "COMET_EXPERIMENT_KEY", "CLEARML_TASK_ID"),
    }
)
_OFF: Final = {"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug"}


def untracked(environment: Mapping[str, str], name: str | None) -> dict[str, str]:
    """The environment for a probe; `name` is the id that it has instead of the job's."""
    kept = {variable: value for variable, value in environment.items() if variable not in _RUNS}
    return {**kept, **_OFF, **({} if name is None else {"STOKER_JOB_ID": name})}
