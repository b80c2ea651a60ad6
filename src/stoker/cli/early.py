"""The helper that reads GPUs, started before this process has imported what it needs itself.

Half of what a person waits for after `stoker gpus` is the helper loading the driver's library, the other half is the
command line loading its own: done side by side, they wait once.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.gpus.helper_process import HelperProcess


def helper_for(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> "HelperProcess | None":
    """A helper for `stoker gpus` when it is plain which source it will ask; None leaves it to the prober."""
    if arguments[:1] != ["gpus"] or any(a.startswith(("--source", "-h", "--help")) for a in arguments):
        return None
    from stoker.gpus.helper_process import HelperProcess
    from stoker.settings_path import config_path

    spec = environment.get("STOKER_GPUS") or "auto"
    if spec not in {"auto", "nvml", "nvidia-smi", "drm"} or config_path(environment).exists():
        return None
    try:
        return HelperProcess(spec, environment.get("STOKER_ROOT", "/"))
    except OSError:
        return None
