"""What is to be filled, with what, and how considerately: the configuration that both file formats lead to."""

from typing import Final, Literal

import msgspec

from stoker.fill.schedule import Schedule

GpuChoice = Literal["all"] | tuple[str, ...]
"""All GPUs, or indices, ranges and uuids as typed: `stoker.gpus.visible.select_gpus` knows which they are."""

# As often as people who watched for openers by hand found enough; where events come, they come at once anyway.
DEFAULT_INTERVAL: Final = 10.0
# Between two steps of an interactive session lie seconds, between two runs of a person who tries something a minute.
DEFAULT_IDLE_FOR: Final = 60.0
# Long enough to write a small checkpoint, short enough for somebody who waits for the memory.
DEFAULT_GRACE: Final = 10.0
# A program that died at once has most likely a cause that lasts: the pause doubles, up to an hour.
DEFAULT_BACKOFF: Final = 10.0
LONGEST_BACKOFF: Final = 3600.0
# Copying device memory to the host takes about a second for each ten gigabytes.
DEFAULT_CHECKPOINT_TIMEOUT: Final = 10.0
# A person who reads what is on the screen types nothing for minutes.
DEFAULT_TERMINAL_IDLE: Final = 300.0


class WatchedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that are watched for others, and the programs on them that do not count."""

    name: str
    gpus: GpuChoice = "all"
    ignore: tuple[str, ...] = ()
    """Names of executables; `*` and `?` stand for what they stand for in a shell."""


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """A program that runs where nobody else is."""

    name: str
    command: tuple[str, ...]
    directory: str | None = None
    """None: where Stoker was started."""
    gpus: GpuChoice = "all"
    each: bool = False
    """One program for every GPU of `gpus`; otherwise one on all of them together, once all of them are idle."""
    log: str | None = None
    """A file that the output is appended to. None: Stoker's own console."""
    environment: dict[str, str] = {}
    """What is added to Stoker's own."""
    idle_for: float = DEFAULT_IDLE_FOR
    settle: float | None = None
    """How long nobody must have been there once a visitor has left. None: as long as `idle_for`."""
    grace: float = DEFAULT_GRACE
    """Between SIGTERM and SIGKILL."""
    backoff: float = DEFAULT_BACKOFF
    """The first pause after the program died at once; doubled each time, up to `LONGEST_BACKOFF`."""
    nice: int | None = None
    ionice: str | None = None
    """`idle`, or `best-effort:N` with N from 0 (first) to 7 (last)."""
    mps_priority: int | None = None
    """CUDA_MPS_CLIENT_PRIORITY: 0 is normal, 1 is below normal."""
    mps_thread_percentage: int | None = None
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE."""
    preempt: Literal["stop", "checkpoint"] = "stop"
    checkpoint_timeout: float = DEFAULT_CHECKPOINT_TIMEOUT
    """After that long a checkpoint has failed, and the program is stopped."""

    @property
    def idle_after_visitor(self) -> float:
        """`settle`, or `idle_for` where it was not set."""
        return self.idle_for if self.settle is None else self.settle

    @property
    def mps_environment(self) -> dict[str, str]:
        """The variables by which CUDA MPS is told how little this program matters."""
        wanted = {
            "CUDA_MPS_CLIENT_PRIORITY": self.mps_priority,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": self.mps_thread_percentage,
        }
        return {name: str(value) for name, value in wanted.items() if value is not None}


class TerminalRule(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a person at a terminal stops everything."""

    enabled: bool = False
    whitelist: tuple[str, ...] = ()
    """Users who do not count."""
    idle_seconds: float = DEFAULT_TERMINAL_IDLE
    """Somebody who typed nothing for so long is not there."""


class FillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, and where it was written."""

    interval: float = DEFAULT_INTERVAL
    """Seconds between two scans."""
    watched: tuple[WatchedGpus, ...] = ()
    programs: tuple[Background, ...] = ()
    terminals: TerminalRule = TerminalRule()
    schedule: Schedule | None = None
    """When background programs may run. None: always."""
    ignore_shipped: bool = True
    """Whether the monitors on Stoker's own list (persistence daemon, exporters, display servers) are ignored too."""
    holders_suffice: bool = False
    """Whether a GPU that tells neither utilization nor processes counts as idle while nobody holds its device node.
    Otherwise it is unknown, and unknown is never idle."""
    source: str = ""
    """The file's path."""
    lines: dict[str, dict[str, int]] = {}
    """By section and key the line in that file; a section's own line under the key ``""``."""

    def where(self, section: str = "", key: str = "") -> str:
        """`file:line` of a key, or of its section where the key is left out; `file:1` for what is not there at all."""
        known = self.lines.get(section, {})
        return f"{self.source}:{known.get(key, known.get('', 1))}"
