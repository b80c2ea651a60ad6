"""A cache of answers by command, GPU model and memory, with their age."""

import contextlib
import fcntl
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import StokerError
from stoker.fit.model import Fitted, Overrides, SearchOptions, smaller
from stoker.gpus.model import Gpu, known
from stoker.paths import private_directory, private_file, write_atomically
from stoker.queue.commands import Command, shell_text

# The limit of answers; the oldest are removed first.
MOST: Final = 500
# Programs change over time, and their memory with them.
LEARNED_FOR: Final = 30 * 86400.0
# Options that do not affect the memory of a training; all others are part of the key.
_NAMES: Final = (
    r"(?:random_|data_)?seed|lr|learning_rate|min_lr|weight_decay|version|(?:wandb_)?run_(?:id|name)|exp(?:eriment)?_name"
    r"|wandb_project|wandb_log|tags?|(?:out|output|log|save|checkpoint)_dir"
).replace("_", "[_-]")
_HARMLESS: Final = re.compile(
    rf"""(?<!\S) (?P<name> (?:--?(?:{_NAMES})(?:=|\s+)) | (?:{_NAMES})= ) (?P<value> '[^']*' | "[^"]*" | [^\s'"]+ )""",
    re.VERBOSE | re.IGNORECASE,
)


class Key(msgspec.Struct, frozen=True):
    """The key of an answer."""

    shape: str
    directory: str
    gpu: str
    memory: int
    """The memory of the GPU in bytes."""
    search_options: SearchOptions
    overrides: Overrides


class CachedFit(msgspec.Struct, frozen=True):
    """An answer with its time."""

    key: Key
    at: float
    """Seconds since the epoch."""
    fitted: Fitted
    ran_out: int | None = None
    """The smallest size that ran out of memory in a real run."""


def learned(cached: "CachedFit | None", search_options: SearchOptions) -> SearchOptions:
    """The search options, without sizes that ran out of memory in a real run."""
    if cached is None or cached.ran_out is None or time.time() - cached.at > LEARNED_FOR:
        return search_options
    most = smaller(cached.ran_out, search_options)
    if most is None or most >= search_options.most:
        return search_options
    return msgspec.structs.replace(search_options, most=most, base=min(search_options.base, most))


def shape_of(command: Command) -> str:
    """The command without options that do not affect memory: seeds, learning rates, names and output directories."""
    return _HARMLESS.sub(r"\g<name>*", shell_text(command))


def key_of(command: Command, directory: str, gpu: Gpu, search_options: SearchOptions, overrides: Overrides) -> Key:
    """The cache key for this command on such a GPU."""
    return Key(
        shape=shape_of(command),
        directory=directory,
        gpu=gpu.name if known(gpu.name) else gpu.vendor,
        memory=gpu.memory if known(gpu.memory) else 0,
        search_options=search_options,
        overrides=overrides,
    )


class FitCache:
    """The file of answers. An unreadable file counts as empty, since a fit finds the answers again."""

    def __init__(self, home: Path) -> None:
        self._path = home / "fits.json"

    def find(self, key: Key) -> CachedFit | None:
        return next((entry for entry in self._read() if entry.key == key), None)

    def keep(self, key: Key, fitted: Fitted, ran_out: int | None = None) -> None:
        """Stores an answer, with the size that ran out of memory in a real run, if any. Raises StokerError."""
        try:
            with self._locked():
                entries = self._read()
                others = [entry for entry in entries if entry.key != key]
                sizes = [entry.ran_out for entry in entries if entry.key == key] + [ran_out]
                smallest = min((size for size in sizes if size is not None), default=None)
                self._write([CachedFit(key, time.time(), fitted, smallest), *others][:MOST])
        except OSError as error:
            raise StokerError(f"{self._path} cannot be written: {error.strerror}") from None

    def _read(self) -> list[CachedFit]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[CachedFit])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return []

    def _write(self, entries: list[CachedFit]) -> None:
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(entries), indent=1) + b"\n")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        private_directory(self._path.parent)
        with private_file(self._path.with_name(f".{self._path.name}.lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
