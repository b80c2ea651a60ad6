"""A simulated machine: its GPUs, and the directory shared by its processes.

The directory has a file for each process on the machine (`loads/PID-STARTTIME.json`), the `lock` for changes, and
`faults.json`. Only /proc decides whether a process exists, not its file, so a killed process frees its memory at once.
Readers take no lock and change nothing.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import LINKS, Gpu, Link
from stoker.gpus.sim.load import HISTORY, Load, Use
from stoker.paths import private_directory, state_home, write_atomically
from stoker.procfs import read_stat
from stoker.units import format_memory, parse_memory

DEFAULT_GPUS: Final = 4
DEFAULT_MEMORY: Final = 24 * 2**30
# More than any machine sold, to catch typing errors.
MOST_GPUS: Final = 64
MOST_MEMORY: Final = 2**40
# Device numbers differ from indices, so that code that confuses them finds nothing.
FIRST_MINOR: Final = 10
# The lock is held for a millisecond; a longer wait means that its holder is suspended.
LOCK_PATIENCE: Final = 30.0
_LOCK_POLL: Final = 0.002

_SHAPE: Final = re.compile(r"(\d{1,6})(?:x([^,]+))?")
_GROUP: Final = re.compile(r"(nvlink|switch|node)=(\d{1,6})")
_LOAD_NAME: Final = re.compile(r"(\d+)-(\d+)\.json")
_PREFIX: Final = "sim"
_UNITS: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


class Shape(msgspec.Struct, frozen=True):
    """Number, memory and links of the GPUs of a simulated machine."""

    count: int
    memory: int
    groups: tuple[tuple[Link, int], ...] = ()
    """`("nvlink", 2)`: GPUs 0 and 1, 2 and 3, … are connected by NVLink. Empty: unknown links."""

    def __str__(self) -> str:
        return f"{self.count}x{_exact_memory(self.memory)}" + "".join(f",{link}={size}" for link, size in self.groups)

    def link(self, first: int, second: int) -> Link:
        """The link between two of its GPUs."""
        return next((link for link, size in self.groups if first // size == second // size), "system")


def _exact_memory(amount: int) -> str:
    """The amount in the largest lossless unit, so that two shapes never share a name."""
    return next(f"{amount // size}{unit}" for unit, size in _UNITS if amount % size == 0)


def parse_shape(argument: str) -> Shape:
    """Parses the part after `sim:`: `4`, `2x24GiB`, `8,nvlink=2`, with or without `@DIR`; empty means `4`."""
    return _parse(argument)[0]


def _parse(argument: str) -> tuple[Shape, str | None]:
    written, at, directory = argument.strip().partition("@")
    if at and not directory:
        raise BadInputError(f"'sim:{argument}' names no directory after the @: write it like sim:4@/tmp/machine")
    if not written:
        return Shape(DEFAULT_GPUS, DEFAULT_MEMORY), directory or None
    size, *groups = written.split(",")
    match = _SHAPE.fullmatch(size)
    if not match:
        raise BadInputError(f"'sim:{argument}' is not a simulated machine: write it like sim:4 or sim:2x24GiB")
    count = int(match[1])
    memory = parse_memory(match[2]) if match[2] else DEFAULT_MEMORY
    if not 1 <= count <= MOST_GPUS:
        raise BadInputError(f"'sim:{argument}' asks for {count} GPUs: a simulated machine has 1 to {MOST_GPUS}")
    if not 1 <= memory <= MOST_MEMORY:
        raise BadInputError(f"'sim:{argument}' asks for GPUs with {memory} bytes: each has at least 1 and at most 1TiB")
    return Shape(count, memory, _groups(argument, groups)), directory or None


def _groups(argument: str, written: list[str]) -> tuple[tuple[Link, int], ...]:
    """The number of consecutive GPUs connected by each kind of link, fastest kind first."""
    sizes: dict[str, int] = {}
    for part in written:
        match = _GROUP.fullmatch(part)
        if not match or not int(match[2]) or match[1] in sizes:
            raise BadInputError(
                f"'sim:{argument}' does not say how its GPUs are connected: write it like sim:8,nvlink=2,switch=4"
            )
        sizes[match[1]] = int(match[2])
    return tuple((link, sizes[link]) for link in LINKS if link in sizes)


def state_directory(environment: Mapping[str, str]) -> Path:
    """The default directory of simulated machines."""
    if said := environment.get("STOKER_SIM_DIR"):
        return Path(said)
    return state_home(environment) / "sim"


def is_simulated(spec: str) -> bool:
    """True if a source spec, such as the value of STOKER_GPUS, means simulated GPUs."""
    return spec == _PREFIX or spec.startswith(f"{_PREFIX}:")


class SimMachine:
    """A simulated machine, shared by all processes with the same directory and shape."""

    def __init__(
        self,
        shape: Shape,
        directory: Path,
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape = shape
        self.directory = directory.expanduser().absolute() / str(shape)
        # Several users may share an explicitly named directory.
        self._is_private = self.directory.is_relative_to(state_home().absolute())
        self.root = root
        self.proc = root / "proc"
        self.clock = clock
        self.gpus = tuple(_gpu(shape, index) for index in range(shape.count))
        self._decode = msgspec.json.Decoder(Load).decode

    @classmethod
    def find(cls, spec: str, environment: Mapping[str, str]) -> "SimMachine":
        """The machine of a spec, with or without the prefix `sim:`."""
        argument = spec[len(_PREFIX) :].removeprefix(":") if is_simulated(spec) else spec
        shape, directory = _parse(argument)
        return cls(shape, Path(directory) if directory else state_directory(environment))

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "SimMachine":
        """The machine of STOKER_GPUS."""
        spec = environment.get("STOKER_GPUS", "")
        if not is_simulated(spec):
            raise StokerError("STOKER_GPUS names no simulated machine: set it like STOKER_GPUS=sim:4")
        return cls.find(spec, environment)

    @property
    def spec(self) -> str:
        """The spec by which any process finds this machine, in any environment."""
        return f"{_PREFIX}:{self.shape}@{self.directory.parent}"

    @property
    def loads_directory(self) -> Path:
        return self.directory / "loads"

    # Reading: no lock, nothing changed

    def loads(self) -> tuple["LoadFile", ...]:
        """All loads with a file, of live and dead processes, by pid."""
        try:
            names = [path.name for path in self.loads_directory.iterdir()]
        except FileNotFoundError:
            return ()
        matches = [match for name in names if (match := _LOAD_NAME.fullmatch(name))]
        found = [self._found(match[0], int(match[1]), int(match[2])) for match in matches]
        return tuple(sorted((one for one in found if one is not None), key=lambda one: one.identity))

    def _found(self, name: str, pid: int, started: int) -> "LoadFile | None":
        path = self.loads_directory / name
        state = process_state(self.proc, pid, started)
        try:
            load = self._decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return LoadFile(path, (pid, started), state, None)
        return LoadFile(path, (pid, started), state, load)

    def held(self, gpu: int, loads: tuple["LoadFile", ...]) -> int:
        """Bytes that live processes hold on a GPU."""
        return sum(use.held() for found in loads for use in found.present_uses() if use.gpu == gpu)

    # Changing: only under the lock

    @contextlib.contextmanager
    def locked(self) -> Iterator[tuple["LoadFile", ...]]:
        """Locks the machine, removes loads of dead processes, and yields the others."""
        try:
            if self._is_private:
                private_directory(self.loads_directory)
            else:
                self.loads_directory.mkdir(parents=True, exist_ok=True)
            mode = 0o600 if self._is_private else 0o666
            file = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        except OSError as error:
            raise StokerError(
                f"the simulated machine in {self.directory} cannot be used ({error.strerror}): "
                "set STOKER_SIM_DIR to a directory that can be written"
            ) from error
        try:
            self._take(file)
            yield self._sweep(self.clock())
        finally:
            os.close(file)

    def _take(self, file: int) -> None:
        patience = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > patience:
                    raise StokerError(
                        f"another process holds {self.directory / 'lock'} and does not let go: "
                        "end it (fuser names it) and try again"
                    ) from None
                time.sleep(_LOCK_POLL)
            else:
                return

    def _sweep(self, now: float) -> tuple["LoadFile", ...]:
        # Files are written under the lock only, so these belong to killed writers.
        for half in self.loads_directory.glob("*.new"):
            half.unlink(missing_ok=True)
        kept = []
        for found in self.loads():
            if found.matters(now):
                kept.append(found)
            else:
                found.path.unlink(missing_ok=True)
        return tuple(kept)

    def write(self, load: Load) -> None:
        """Writes the load of a process. Call it only under the lock."""
        self.replace(self.loads_directory / f"{load.pid}-{load.started}.json", msgspec.json.encode(load))

    def replace(self, path: Path, content: bytes) -> None:
        """Replaces a file atomically. Call it only under the lock."""
        write_atomically(path, content, private=self._is_private)


class LoadFile(msgspec.Struct, frozen=True):
    """A load in the directory, with the state of its process in /proc."""

    path: Path
    identity: tuple[int, int]
    """Pid and start time."""
    state: str | None
    """The letter in /proc/PID/stat; None if the process has ended."""
    load: Load | None
    """None if the file is unreadable."""

    @property
    def alive(self) -> bool:
        return self.state is not None

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    def present_uses(self) -> Iterator[Use]:
        """Current uses."""
        if self.alive and self.load is not None:
            yield from (use for use in self.load.uses if use.ended is None)

    def matters(self, now: float) -> bool:
        """True if the file is needed: its process lives, or has ended so recently that a look may need it."""
        if self.load is None:
            return self.alive
        ends = [use.ended for use in self.load.uses]
        return (self.alive and None in ends) or any(end is not None and 0 <= now - end <= HISTORY for end in ends)


def process_state(proc: Path, pid: int, started: int) -> str | None:
    """The state letter of exactly this process while it runs. A zombie has released everything."""
    try:
        found = read_stat(f"{proc}/{pid}/stat")
    except (OSError, ValueError):
        return None
    return None if found.started != started or found.state in ("Z", "X", "x") else found.state


def _gpu(shape: Shape, index: int) -> Gpu:
    others = [other for other in range(shape.count) if other != index and shape.groups]
    return Gpu(
        uuid=_uuid(index),
        index=index,
        name=f"Simulated {format_memory(shape.memory)}",
        vendor="sim",
        minor=index + FIRST_MINOR,
        memory=shape.memory,
        # A PCI domain that no real machine uses, so that sysfs has no entry for it.
        bus=f"5100:{index + 1:02x}:00.0",
        links=tuple((_uuid(other), shape.link(index, other)) for other in others),
    )


def _uuid(index: int) -> str:
    return f"GPU-51000000-0000-4000-8000-{index:012x}"
