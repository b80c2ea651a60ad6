"""A reproducible archive of files: a compressed tar without times and owners.

Its digest is the SHA-256 of the uncompressed tar, so it does not depend on the version of zlib.
"""

import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec

from stoker.errors import StokerError
from stoker.units import format_memory

if TYPE_CHECKING:
    import tarfile

# Fast compression: the queue is near, code is small, and a person waits.
_LEVEL: Final = 1
_BLOCK: Final = 256 * 1024
_EXECUTABLE: Final = 0o755
_PLAIN: Final = 0o644


class CodeSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The code that a job runs. The queue stores its files by digest."""

    digest: str
    size: int
    """The total size of the files in bytes."""
    files: int
    directory: str = ""
    """The job's directory inside it; empty for the top."""
    root: str = ""
    """The top of the repository on the submitting machine."""
    changes: str = ""
    """The digest of the differences from the commit; empty without any."""
    changed: int = 0
    """The number of tracked files that differ from the commit."""
    untracked: int = 0

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of everything that the queue stores for it."""
        return (self.digest, self.changes) if self.changes else (self.digest,)

    @property
    def extent(self) -> str:
        """`12 files, 34 KiB; 2 changed, 1 untracked`."""
        counts = ((self.changed, "changed"), (self.untracked, "untracked"))
        differs = ", ".join(f"{count:,} {what}" for count, what in counts if count)
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        return f"{files}, {format_memory(self.size)}; {differs or 'as committed'}"


class Blob(NamedTuple):
    """Compressed content in an anonymous file."""

    digest: str
    """The digest of the uncompressed content."""
    size: int
    file: IO[bytes]


class Entry(NamedTuple):
    """One file of an archive."""

    path: bytes
    """The path relative to the top."""
    executable: bool = False
    target: bytes | None = None
    """The target of a symbolic link; None for a file."""


class Packer:
    """Compresses the data written to it."""

    def __init__(self) -> None:
        import hashlib
        import tempfile

        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller that takes the blob closes it
        self._hash = hashlib.sha256()
        self._compress = zlib.compressobj(_LEVEL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is not None:
            self._file.close()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._file.write(self._compress.compress(data))
        return len(data)

    def blob(self) -> Blob:
        self._file.write(self._compress.flush())
        return Blob(self._hash.hexdigest(), self._file.tell(), self._file)


class Unpacker:
    """Reads and verifies the output of a `Packer`. Raises StokerError if it is damaged."""

    def __init__(self, digest: str, compressed: Iterable[bytes]) -> None:
        import hashlib

        self._digest = digest
        self._compressed = iter(compressed)
        self._decompress = zlib.decompressobj()
        self._hash = hashlib.sha256()

    def read(self, size: int = _BLOCK) -> bytes:
        """Reads at most `size` bytes; empty at the end."""
        try:
            while not self._decompress.eof:
                given = self._decompress.unconsumed_tail or next(self._compressed, b"")
                # The decompressor may still hold output after the last input.
                if data := self._decompress.decompress(given, size):
                    self._hash.update(data)
                    return data
                if not given:
                    raise self._damaged()
        except zlib.error:
            raise self._damaged() from None
        return b""

    def read_all(self) -> bytes:
        return b"".join(iter(self.read, b""))

    def finish(self) -> None:
        """Reads the rest, and verifies the digest."""
        while self.read():
            pass
        if self._hash.hexdigest() != self._digest:
            raise self._damaged()

    def _damaged(self) -> StokerError:
        return StokerError(f"the snapshot {self._digest[:12]} is damaged: submit the job again")


def write_file(packer: IO[bytes] | Packer, file: IO[bytes]) -> None:
    """Copies a file."""
    while data := file.read(_BLOCK):
        packer.write(data)


class ArchiveWriter:
    """Writes entries, which must be sorted by path."""

    def __init__(self, packer: Packer) -> None:
        import tarfile

        self._tar = tarfile.open(fileobj=packer, mode="w|", format=tarfile.GNU_FORMAT, **_encoding())  # type: ignore[call-overload]  # noqa: SIM115 - closed by `close`

    def add(self, entry: Entry, size: int = 0, content: IO[bytes] | None = None) -> None:
        """Adds an entry. Raises OSError if the content is shorter than `size`."""
        import tarfile

        info = tarfile.TarInfo(os.fsdecode(entry.path))
        if entry.target is not None:
            info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.fsdecode(entry.target), 0o777
        else:
            info.size, info.mode = size, _EXECUTABLE if entry.executable else _PLAIN
        self._tar.addfile(info, content)

    def close(self) -> None:
        self._tar.close()


def members(source: Unpacker) -> Iterator[tuple[Entry, IO[bytes] | None]]:
    """The entries in order, each file with its content, which must be read before the next. Raises StokerError."""
    import tarfile

    try:
        with tarfile.open(fileobj=source, mode="r|", **_encoding()) as tar:  # type: ignore[call-overload]
            for info in tar:
                yield _entry(info), tar.extractfile(info) if info.isreg() else None
    except tarfile.TarError as error:
        raise StokerError(f"the snapshot cannot be read: {error}") from None
    source.finish()


def _entry(info: "tarfile.TarInfo") -> Entry:
    if not info.isreg() and not info.issym():
        raise StokerError(f"the snapshot has something in it that is neither a file nor a link: {info.name!a}")
    target = os.fsencode(info.linkname) if info.issym() else None
    return Entry(os.fsencode(info.name), bool(info.mode & stat.S_IXUSR), target)


def _encoding() -> dict[str, Any]:
    """The encoding of file names in Python, which preserves all bytes."""
    return {"encoding": sys.getfilesystemencoding(), "errors": "surrogateescape"}


def unpack(source: Unpacker, to: Path) -> None:
    """Writes all files below `to`, an empty directory. Raises StokerError or OSError.

    Links are created last, so that no file can be written through a link out of the directory.
    """
    top = os.fsencode(to)
    links: list[tuple[bytes, bytes]] = []
    for entry, content in members(source):
        path = _inside(top, entry.path)
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - bytes
        if entry.target is not None:
            links.append((entry.target, path))
        elif content is not None:
            mode = _EXECUTABLE if entry.executable else _PLAIN
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
            with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
                while data := content.read(_BLOCK):
                    file.write(data)
    for target, path in links:
        os.symlink(target, path)  # noqa: PTH211 - bytes


def _inside(top: bytes, path: bytes) -> bytes:
    if not path or any(part in {b"", b".", b".."} for part in path.split(b"/")):
        raise StokerError(f"the snapshot has a path that leads out of it: {path!a}")
    return top + b"/" + path
