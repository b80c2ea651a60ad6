"""The helper that reads GPUs, started before this process has imported what it needs itself.

Half of what a person waits for after `stoker gpus` is the helper loading the driver's library, the other half is the
command line loading its own: done side by side, they wait once. So this module imports next to nothing.
"""

import os

from stoker.gpus.spawn import Helper, spawned
from stoker.settings_path import config_path


def helper_for(arguments: list[str]) -> Helper | None:
    """A helper for `stoker gpus` when it is plain which source it will ask; None leaves it to the prober.

    Not for `--watch` and `--follow`: they stay, so a helper that shares their memory serves them better.
    """
    others = ("--source", "-h", "--help", "--watch", "--follow")
    if arguments[:1] != ["gpus"] or any(word.startswith(others) for word in arguments):
        return None
    spec = os.environ.get("STOKER_GPUS") or "auto"
    if spec not in {"auto", "nvml", "nvidia-smi", "drm"} or os.access(config_path(os.environ), os.F_OK):
        return None
    try:
        return spawned(spec, os.environ.get("STOKER_ROOT", "/"))
    except OSError:
        return None
