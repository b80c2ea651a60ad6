"""Which source serves this machine: the one that was asked for, or the first that has something to read."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from stoker.errors import BadInputError
from stoker.gpus.kernel import gpus_of_kernel
from stoker.gpus.model import Choice
from stoker.gpus.source import AbsentError, Source

# The vendor's library tells most; its command is for machines where the library cannot be loaded; sysfs serves the
# other vendors and comes last, because many machines with NVIDIA cards have an Intel or AMD GPU for the screen.
AUTO_ORDER: Final = ("nvml", "nvidia-smi", "drm")
KNOWN: Final = (*AUTO_ORDER, "sim", "rss")


def check_spec(spec: str) -> None:
    """Refuses a spec that names no source, before anything is started."""
    name, _, argument = spec.partition(":")
    if name == "sim":
        from stoker.gpus.sim import parse_shape

        parse_shape(argument)
    elif name == "rss":
        from stoker.gpus.rss import parse_size

        parse_size(argument)
    elif spec != "auto" and (name not in KNOWN or argument):
        raise BadInputError(
            f"{spec!r} is not a source of GPU readings: STOKER_GPUS and --source take auto, nvml, nvidia-smi, drm, "
            "or simulated GPUs such as sim:4 or sim:2x24GiB"
        )


def open_source(spec: str, root: Path) -> tuple[Source, tuple[Choice, ...]]:
    """Opens the source of `spec`, saying why each one was taken or left; `AbsentError` when there is none."""
    if spec != "auto":
        source = _open(spec, root)
        return source, (Choice(source.name, True, "asked for by name"),)
    choices: list[Choice] = []
    for name in AUTO_ORDER:
        try:
            source = _open(name, root)
        except AbsentError as absent:
            choices.append(Choice(name, False, str(absent)))
        else:
            choices.append(Choice(name, True, "it reads the GPUs of this machine"))
            return source, tuple(choices)
    raise AbsentError(_nothing(choices, root))


def _nothing(choices: list[Choice], root: Path) -> str:
    tried = "; ".join(f"{choice.source}: {choice.reason}" for choice in choices)
    if there := gpus_of_kernel(root):
        return (
            f"the kernel knows {len(there)} NVIDIA GPU(s) but nothing here can read them ({tried}): "
            "install the NVIDIA driver's library or give the container access to it"
        )
    return f"no GPU was found ({tried}); to try Stoker on simulated ones, set STOKER_GPUS=sim:4"


def _open(spec: str, root: Path) -> Source:
    name, _, argument = spec.partition(":")
    return _OPENERS[name](root, argument)


def _open_nvml(root: Path, _argument: str) -> Source:
    from stoker.gpus.nvml.source import open_source

    return open_source(root)


def _open_nvidia_smi(root: Path, _argument: str) -> Source:
    from stoker.gpus.nvidia_smi import open_source

    return open_source(root)


def _open_drm(root: Path, _argument: str) -> Source:
    from stoker.gpus.drm import open_source

    return open_source(root)


def _open_sim(_root: Path, argument: str) -> Source:
    from stoker.gpus.sim import open_source

    return open_source(argument)


def _open_rss(root: Path, argument: str) -> Source:
    from stoker.gpus.rss import open_source

    return open_source(root, argument)


_OPENERS: Final[dict[str, Callable[[Path, str], Source]]] = {
    "nvml": _open_nvml,
    "nvidia-smi": _open_nvidia_smi,
    "drm": _open_drm,
    "sim": _open_sim,
    "rss": _open_rss,
}
