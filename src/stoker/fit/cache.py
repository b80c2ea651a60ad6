"""What was fitted before: the answers by command, GPU model and memory, with their age."""

import contextlib
import fcntl
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import StokerError
from stoker.fit.model import Fitted, SearchOptions
from stoker.fit.overrides import Command, Overrides, in_words
from stoker.fit.spec import smaller
from stoker.gpus.model import Gpu, known
from stoker.paths import private_directory, private_file, write_atomically

# Many times what anybody trains; the oldest go first.
MOST: Final = 500
# A program changes in the meantime, and what it takes with it.
LEARNED_FOR: Final = 30 * 86400.0
# What can be said on a command line without changing the memory that a training takes: everything else counts.
_NAMES: Final = (
    r"(?:random_|data_)?seed|lr|learning_rate|min_lr|weight_decay|version|(?:wandb_)?run_(?:id|name)|exp(?:eriment)?_name"
    r"|wandb_project|wandb_log|tags?|(?:out|output|log|save|checkpoint)_dir"
).replace("_", "[_-]")
_HARMLESS: Final = re.compile(
    rf"""(?<!\S) (?P<name> (?:--?(?:{_NAMES})(?:=|\s+)) | (?:{_NAMES})= ) (?P<value> '[^']*' | "[^"]*" | [^\s'"]+ )""",
    re.VERBOSE | re.IGNORECASE,
)


class Key(msgspec.Struct, frozen=True):
    """What an answer holds for."""

    shape: str
    directory: str
    gpu: str
    memory: int
    """Bytes that the GPU has."""
    terms: SearchOptions
    overrides: Overrides


class CachedFit(msgspec.Struct, frozen=True):
    """An answer, and when it was found."""

    key: Key
    at: float
    """Seconds since the epoch."""
    fitted: Fitted
    ran_out: int | None = None
    """The smallest size with which a real run has run out of memory."""


def learned(remembered: "CachedFit | None", terms: SearchOptions) -> SearchOptions:
    """The terms, without sizes with which a real run has run out of memory, however well they were probed."""
    if remembered is None or remembered.ran_out is None or time.time() - remembered.at > LEARNED_FOR:
        return terms
    most = smaller(remembered.ran_out, terms)
    if most is None or most >= terms.most:
        return terms
    return msgspec.structs.replace(terms, most=most, base=min(terms.base, most))


def shape_of(command: Command) -> str:
    """The command without what does not change its memory: seeds, learning rates, names and places of output."""
    return _HARMLESS.sub(r"\g<name>*", in_words(command))


def key_of(command: Command, directory: str, gpu: Gpu, terms: SearchOptions, overrides: Overrides) -> Key:
    """What an answer for this command on such a GPU is remembered by."""
    return Key(
        shape=shape_of(command),
        directory=directory,
        gpu=gpu.name if known(gpu.name) else gpu.vendor,
        memory=gpu.memory if known(gpu.memory) else 0,
        terms=terms,
        overrides=overrides,
    )


class FitCache:
    """The file of answers. One that cannot be read is as good as none: a fit finds them again."""

    def __init__(self, home: Path) -> None:
        self._path = home / "fits.json"

    def recall(self, key: Key) -> CachedFit | None:
        return next((entry for entry in self._read() if entry.key == key), None)

    def keep(self, key: Key, fitted: Fitted, ran_out: int | None = None) -> None:
        """Together with the size with which the real run has run out of memory. Raises StokerError."""
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
