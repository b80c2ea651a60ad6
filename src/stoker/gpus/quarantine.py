"""The file of GPUs out of rotation on this machine, which outlives the worker.

The worker and `stoker gpus` write it; the worker, `stoker fill` and `stoker gpus` read it.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.paths import open_privately, private_directory, write_atomically
from stoker.procfs import boot_id


class QuarantinedGpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU that is out of rotation, or was until its release, with the reason."""

    index: int
    """Its index at that time, to name a GPU that is no longer listed."""
    reason: str
    """Part of a sentence."""
    since: float
    """Seconds since the epoch."""
    boot: str = ""
    """The boot to which it applies; empty until a release."""
    faults: tuple[str, ...] = ()
    """The faults of the GPU. After a release only new ones take it out again."""
    released: bool = False


Entries = Mapping[str, QuarantinedGpu]
"""Entries by GPU uuid."""


class QuarantineFile:
    """The file of GPUs out of rotation since the boot of one machine."""

    def __init__(self, home: Path, host: str) -> None:
        self.home = home
        self._path = home / f"quarantine-{host}.json"
        self._lock = home / f"quarantine-{host}.lock"
        self._seen: tuple[int, int, int] | None = None
        self._entries: dict[str, QuarantinedGpu] = {}

    def read(self) -> dict[str, QuarantinedGpu]:
        """The entries of this boot. If the file cannot be read now, the last ones."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - at every look
        except FileNotFoundError:
            self._seen, self._entries = None, {}
            return {}
        except OSError:
            return dict(self._entries)
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen != self._seen:
            with contextlib.suppress(OSError):
                self._entries = self._read()
                self._seen = seen
        return dict(self._entries)

    def out_of_rotation(self) -> dict[str, QuarantinedGpu]:
        return {uuid: entry for uuid, entry in self.read().items() if not entry.released}

    def update(self, change: Callable[[dict[str, QuarantinedGpu]], Entries]) -> None:
        """Replaces the entries with the result of `change`. Raises StokerError."""
        try:
            private_directory(self.home)
            with self._locked():
                before = self._read()
                after = change(dict(before))
                if after != before:
                    write_atomically(self._path, msgspec.json.encode(after))
        except OSError as error:
            raise StokerError(f"{self._path} cannot be written: {error.strerror}") from None

    def _read(self) -> dict[str, QuarantinedGpu]:
        """Reads the entries; none in a damaged file. Raises OSError."""
        boot = boot_id()
        try:
            entries = msgspec.json.decode(self._path.read_bytes(), type=dict[str, QuarantinedGpu])
        except (FileNotFoundError, ValueError):
            return {}
        return {uuid: entry for uuid, entry in entries.items() if entry.boot in ("", boot)}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = open_privately(self._lock, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def release(file: QuarantineFile, chosen: str) -> list[QuarantinedGpu]:
    """Puts GPUs back into rotation, by `all`, index, uuid or uuid prefix. Raises StokerError."""
    released: list[QuarantinedGpu] = []

    def change(entries: dict[str, QuarantinedGpu]) -> Entries:
        out = {uuid: entry for uuid, entry in entries.items() if not entry.released}
        for uuid in _chosen(out, chosen, file.home):
            released.append(out[uuid])
            if out[uuid].faults:
                entries[uuid] = msgspec.structs.replace(out[uuid], released=True)
            else:
                del entries[uuid]
        return entries

    file.update(change)
    return released


def _chosen(out: Entries, chosen: str, home: Path) -> list[str]:
    """The uuids of the chosen GPUs."""
    word = chosen.strip()
    if word == "all":
        return list(out)
    found = [
        uuid
        for uuid, entry in out.items()
        if (word.isdecimal() and entry.index == int(word)) or (not word.isdecimal() and word and uuid.startswith(word))
    ]
    if len(found) == 1:
        return found
    there = ", ".join(f"GPU {entry.index} ({uuid})" for uuid, entry in out.items())
    if found:
        raise BadInputError(f"{chosen!r} means several GPUs, name one by its uuid: {there}")
    others = f"out of rotation: {there}" if there else f"none is, by {home}"
    raise BadInputError(f"{f'GPU {word}' if word.isdecimal() else repr(chosen)} is not out of rotation; {others}")


def take_out(file: QuarantineFile, uuid: str, index: int, reason: str, wall: float) -> None:
    """Takes a GPU out of rotation until it is released. Raises StokerError."""
    entry = QuarantinedGpu(index=index, reason=reason, since=wall)
    file.update(lambda entries: {**entries, uuid: entry})
