"""The seam between readings and their origin: `Source`, and the registry of sources.

A new source is a module and a line in `_BUILT_IN`.
"""

import contextlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Look, SourceChoice


class Source(Protocol):
    """A way of reading this machine's GPUs, used by one thread. A look may block, which the prober guards.

    `look` does not raise for a failure of the driver: that is an unknown with a reason, in a field, in a whole reading,
    or in `Look.problem`. A look covers the time since the previous one.
    """

    name: str

    def look(self) -> Look: ...

    def close(self) -> None: ...


class AbsentError(StokerError):
    """This source has nothing to read here. The message is the reason, as part of a sentence."""


class SourceEntry(NamedTuple):
    """A source in the registry. Its module is imported when the source is opened."""

    name: str
    """The name in STOKER_GPUS and --source."""
    factory: str
    """`module:function`, called with the root directory and the argument of `name:argument`."""
    help: str
    auto: bool = False
    """`auto` tries it, in the order of the registry."""
    check: str | None = None
    """`module:function`, called with the argument; raises BadInputError. None if it takes no argument."""
    example: str = ""
    """An example with its argument."""
    simulated: bool = False
    """Its GPUs are simulated, and must never be shown as real."""


# The vendor's library knows most; its command is for machines where the library cannot be loaded. drm is last, because
# many machines with NVIDIA cards have an Intel or AMD GPU for the screen.
_BUILT_IN: Final = (
    SourceEntry("nvml", "stoker.gpus.nvml.source:open_source", "NVIDIA GPUs through the driver's library", auto=True),
    SourceEntry("nvidia-smi", "stoker.gpus.nvidia_smi:open_source", "NVIDIA GPUs through nvidia-smi", auto=True),
    SourceEntry("drm", "stoker.gpus.drm:open_source", "AMD and Intel GPUs through the kernel's files", auto=True),
    SourceEntry(
        "sim", "stoker.gpus.sim.source:open_source", "simulated GPUs", check="stoker.gpus.sim.machine:parse_shape",
        example="sim:4", simulated=True,
    ),
)  # fmt: skip
_SOURCES: Final[dict[str, SourceEntry]] = {entry.name: entry for entry in _BUILT_IN}


def register(entry: SourceEntry, *, before: str | None = None) -> None:
    """Adds a source, before the one named `before` or at the end."""
    others = [other for other in _SOURCES.values() if other.name != entry.name]
    place = next((number for number, other in enumerate(others) if other.name == before), len(others))
    others.insert(place, entry)
    _SOURCES.clear()
    _SOURCES.update((other.name, other) for other in others)


def has_outside_source() -> bool:
    """True if this process has a source that others may lack."""
    return sources() != _BUILT_IN


def sources() -> tuple[SourceEntry, ...]:
    """All sources, in the order in which `auto` tries them."""
    return tuple(_SOURCES.values())


def source_names() -> tuple[str, ...]:
    """Examples for STOKER_GPUS and --source: auto, nvml, …, sim:4."""
    return ("auto", *(entry.example or entry.name for entry in sources()))


def find_source(spec: str) -> SourceEntry | None:
    """The source of a spec or name; None for `auto` and unknown names."""
    return _SOURCES.get(spec.partition(":")[0])


def is_simulated_source(spec: str) -> bool:
    return (entry := find_source(spec)) is not None and entry.simulated


def check_spec(spec: str) -> None:
    """Raises BadInputError if `spec` names no source."""
    entry, argument = find_source(spec), spec.partition(":")[2]
    if entry is not None and entry.check is not None:
        _imported(entry.check)(argument)
    elif spec != "auto" and (entry is None or argument):
        raise BadInputError(
            f"{spec!r} is not a source of GPU readings: STOKER_GPUS and --source take {', '.join(source_names())}"
        )


def import_source(spec: str) -> None:
    """Imports the source of `spec`, or the first one of `auto`, so that it opens sooner. Never raises."""
    entry = next(_automatic(), None) if spec == "auto" else find_source(spec)
    with contextlib.suppress(Exception):
        if entry is not None:
            _imported(entry.factory)


def open_source(spec: str, root: Path) -> tuple[Source, tuple[SourceChoice, ...]]:
    """Opens the source of `spec`, and explains the choice. Raises `AbsentError` if there is none."""
    if spec != "auto":
        name, _, argument = spec.partition(":")
        source: Source = _imported(_SOURCES[name].factory)(root, argument)
        return source, (SourceChoice(source.name, True, "asked for by name"),)
    choices: list[SourceChoice] = []
    for entry in _automatic():
        try:
            source = _imported(entry.factory)(root, "")
        except AbsentError as absent:
            choices.append(SourceChoice(entry.name, False, str(absent)))
        else:
            choices.append(SourceChoice(entry.name, True, "it reads the GPUs of this machine"))
            return source, tuple(choices)
    tried = "; ".join(f"{choice.source}: {choice.reason}" for choice in choices)
    raise AbsentError(f"no GPU was found ({tried}); to try Stoker on simulated ones, set STOKER_GPUS=sim:4")


def _automatic() -> Iterator[SourceEntry]:
    return (entry for entry in sources() if entry.auto)


def _imported(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)
