"""Differences between the code of a job and its commit, or between the code of two jobs."""

import difflib
import hashlib
import io
from collections.abc import Iterator
from typing import IO, Final, NamedTuple

from stoker.errors import BadInputError
from stoker.queue.code.archive import CodeSnapshot, Entry, members
from stoker.queue.code.blobs import Blobs
from stoker.queue.model import Job

# Larger files are data, and take minutes to compare line by line.
_LONGEST_TEXT: Final = 2**20
# Git's rule: a NUL within this many bytes makes a file binary.
_BINARY_WITHIN: Final = 8000


class CodeChanges(NamedTuple):
    """Differences from the commit at a job's submission."""

    difference: bytes
    """The output of `git diff` for tracked files."""
    untracked: tuple[bytes, ...]

    @property
    def text(self) -> bytes:
        """Both parts as text for people."""
        return self.difference + b"".join(
            b"untracked: " + path.replace(b"\n", b"\\n") + b"\n" for path in self.untracked
        )


class _Content(NamedTuple):
    entry: Entry
    size: int
    digest: bytes
    text: bytes | None
    """None for a file that is not compared line by line."""


def code_of(job: Job) -> CodeSnapshot:
    """The job's snapshot. Raises BadInputError for a job without one."""
    if job.code is None:
        raise BadInputError(f"job {job.id} has no snapshot of its code: `stoker submit --snapshot` makes one")
    return job.code


def read_changes(blobs: Blobs, job: Job) -> CodeChanges:
    """The job's differences from its commit. Raises BadInputError for a job without a snapshot."""
    code = code_of(job)
    if not code.changes:
        return CodeChanges(b"", ())
    source = blobs.read(code.changes)
    data = source.read_all()
    source.finish()
    # Each path ends with NUL, and an empty path ends the list.
    names, _, difference = data.partition(b"\0\0") if not data.startswith(b"\0") else (b"", b"", data[1:])
    return CodeChanges(difference, tuple(name for name in names.split(b"\0") if name))


def compare(blobs: Blobs, before: Job, after: Job) -> Iterator[bytes]:
    """The lines of a unified diff between the code of two jobs; none if it is the same."""
    if code_of(before).digest == code_of(after).digest:
        return
    old, new = _contents(blobs, code_of(before)), _contents(blobs, code_of(after))
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            yield from _difference(path, old.get(path), new.get(path))


def _contents(blobs: Blobs, code: CodeSnapshot) -> dict[bytes, _Content]:
    return {entry.path: _content(entry, file) for entry, file in members(blobs.read(code.digest))}


def _content(entry: Entry, file: IO[bytes] | None) -> _Content:
    if file is None:
        target = entry.target or b""
        return _Content(entry, len(target), b"", target)
    head = file.read(_LONGEST_TEXT + 1)
    digest, size = hashlib.sha256(head), len(head)
    while data := file.read(_LONGEST_TEXT):
        digest.update(data)
        size += len(data)
    is_text = size <= _LONGEST_TEXT and b"\0" not in head[:_BINARY_WITHIN]
    return _Content(entry, size, digest.digest(), head if is_text else None)


def _difference(path: bytes, old: _Content | None, new: _Content | None) -> Iterator[bytes]:
    """The difference in git's format, for diff tools."""
    yield b"diff --git a/%b b/%b\n" % (path, path)
    if old is None and new is not None:
        yield b"new file mode %b\n" % _mode(new.entry)
    elif new is None and old is not None:
        yield b"deleted file mode %b\n" % _mode(old.entry)
    elif old is not None and new is not None and _mode(old.entry) != _mode(new.entry):
        yield b"old mode %b\nnew mode %b\n" % (_mode(old.entry), _mode(new.entry))
    names = (b"/dev/null" if old is None else b"a/" + path, b"/dev/null" if new is None else b"b/" + path)
    texts = [b"" if one is None else one.text for one in (old, new)]
    if texts[0] is None or texts[1] is None:
        if old is None or new is None or old.digest != new.digest:
            yield b"Files %b and %b differ\n" % names
        return
    lines = [io.BytesIO(text).readlines() for text in texts if text is not None]
    for line in difflib.diff_bytes(difflib.unified_diff, lines[0], lines[1], *names):
        yield line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"


def _mode(entry: Entry) -> bytes:
    return b"120000" if entry.target is not None else b"100755" if entry.executable else b"100644"
