"""Packs the current code of a job: all files in the working tree that git does not ignore."""

import contextlib
import fnmatch
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Final, NamedTuple

from stoker.errors import BadInputError
from stoker.queue.code.archive import ArchiveWriter, Blob, CodeSnapshot, Entry, Packer, write_file
from stoker.units import format_memory

# More files mean that the directory contains data or a Python environment.
MOST_FILES: Final = 100_000
# Listing and comparing a large repository over a network takes seconds.
_GIT_SECONDS: Final = 60.0
# An editor may save a file during packing; a file that changes constantly has no state to pack.
_MOST_TRIES: Final = 3
_MOST_NAMED: Final = 10
# Variables of the caller that name one repository, and would be wrong in submodules.
_OF_ONE_REPOSITORY: Final = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE"),
)
_DIFF: Final = ("diff", "--no-ext-diff", "--no-color", "--ignore-submodules=untracked")
_AS_TEXT: Final = ("--no-textconv", "--submodule=diff", "--src-prefix=a/", "--dst-prefix=b/")
# Names of files that usually hold secrets.
_SECRET: Final = (
    *(".env", ".env.*", ".netrc", ".pgpass", ".git-credentials", ".npmrc", ".pypirc", "credentials.json"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx"),
)
_NO_SECRET: Final = (".env.example", ".env.sample", ".env.template", ".env.dist")


class _ChangedError(Exception):
    """A file has changed since the files were listed."""

    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self.path = path


class _File(NamedTuple):
    """A file at the time of listing."""

    path: bytes
    mode: int
    size: int
    changed: tuple[int, int, int]
    """Inode, mtime and ctime."""
    tracked: bool


class _Tree(NamedTuple):
    """The files to pack."""

    commit: str | None
    files: tuple[_File, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class PackedCode(NamedTuple):
    """The code of a job, ready to be stored with it."""

    code: CodeSnapshot
    commit: str | None
    blobs: tuple[Blob, ...]
    secrets: tuple[str, ...]
    """Names of packed files that look like secrets."""

    def __enter__(self) -> "PackedCode":
        return self

    def __exit__(self, *_error: object) -> None:
        for blob in self.blobs:
            blob.file.close()

    @property
    def description(self) -> str:
        """`snapshot 3f9ede8c0a1b of commit 1a2b3c4d: 12 files, 34 KiB; 2 changed, 1 untracked`."""
        of = f" of commit {self.commit[:12]}" if self.commit else ""
        return f"snapshot {self.code.digest[:12]}{of}: {self.code.extent}"

    @property
    def warning(self) -> str:
        """One sentence about secrets; empty if none were found."""
        if not self.secrets:
            return ""
        named = ", ".join(self.secrets[:3]) + (" and others" if len(self.secrets) > 3 else "")
        return (
            f"the snapshot contains {named}, which everyone who can read the queue can read now: "
            ".gitignore leaves files out"
        )


def pack(directory: str, limit: int) -> PackedCode:
    """Packs the repository that contains the directory. Raises BadInputError.

    Sizes are checked before reading. If a file changes during packing, packing starts over, so that the archive is
    consistent.
    """
    top, inside = _top_of(directory)
    path = b""
    for _try in range(_MOST_TRIES):
        try:
            tree = _listed(top)
            _check(tree, top, inside, limit)
            packed = _packed(tree, top, inside)
        except _ChangedError as error:
            path = error.path
            continue
        again = _listed(top)
        if again == tree:
            return packed
        packed.__exit__()
        path = _first_difference(tree, again)
    raise BadInputError(
        f"{_shown(path)} in {_shown(top)} changes while it is packed: try again, or leave it out by .gitignore"
    )


def _top_of(directory: str) -> tuple[bytes, bytes]:
    """The top of the working tree, and the directory's path inside it."""
    shown = _git(os.fsencode(directory), "rev-parse", "--show-toplevel", "--show-prefix")
    if shown.returncode != 0:
        raise BadInputError(
            f"a snapshot has the files that git lists, and {directory} is not in a working tree of git: "
            f"{_complaint(shown)} (`git init` there is enough)"
        )
    top, _, inside = shown.stdout.removesuffix(b"\n").partition(b"\n")
    return top, inside.removesuffix(b"/")


# Listing files


def _listed(top: bytes) -> _Tree:
    head = _git(top, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    files = sorted(_files_of(top, b"", tracked=True))
    return _Tree(head.stdout.decode().strip() or None, tuple(files))


def _files_of(top: bytes, below: bytes, *, tracked: bool) -> Iterator[_File]:
    """The files of the repository at this path of the working tree, and of nested repositories."""
    own = os.path.join(top, below)  # noqa: PTH118 - bytes
    listings = [(tracked, ("--cached",)), (False, ("--others", "--exclude-standard"))]
    seen: set[bytes] = set()
    real: dict[bytes, bool] = {}
    for is_tracked, options in listings:
        shown = _git(own, "ls-files", "-z", *options, nested=bool(below))
        if shown.returncode != 0:
            raise BadInputError(f"the files of {_shown(own)} cannot be listed: {_complaint(shown)}")
        for name in shown.stdout.split(b"\0"):
            # A nested repository that is not a submodule ends with a slash. A file with conflicts is listed repeatedly.
            path = below + name.removesuffix(b"/")
            if not name or path in seen or not _is_real(top, os.path.dirname(path), real):  # noqa: PTH120 - bytes
                continue
            seen.add(path)
            try:
                status = os.lstat(os.path.join(top, path))  # noqa: PTH118 - bytes
            except (FileNotFoundError, NotADirectoryError):
                continue  # deleted, or excluded by a sparse checkout
            if stat.S_ISDIR(status.st_mode):
                if os.path.lexists(os.path.join(top, path, b".git")):  # noqa: PTH118 - bytes
                    yield from _files_of(top, path + b"/", tracked=is_tracked)
            elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                changed = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
                yield _File(path, status.st_mode, status.st_size, changed, is_tracked)


def _is_real(top: bytes, directory: bytes, known: dict[bytes, bool]) -> bool:
    """True if the path contains no symbolic link: git still lists files behind a link that replaced a directory."""
    if not directory:
        return True
    if directory not in known:
        known[directory] = _is_real(top, os.path.dirname(directory), known) and stat.S_ISDIR(  # noqa: PTH120 - bytes
            _mode_of(os.path.join(top, directory))  # noqa: PTH118 - bytes
        )
    return known[directory]


def _mode_of(path: bytes) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _check(tree: _Tree, top: bytes, inside: bytes, limit: int) -> None:
    if len(tree.files) > MOST_FILES:
        raise BadInputError(
            f"the snapshot of {_shown(top)} would have {len(tree.files):,} files, more than {MOST_FILES:,}: "
            "leave some out by .gitignore"
        )
    if tree.size > limit:
        largest = sorted(tree.files, key=lambda file: (-file.size, file.path))[:_MOST_NAMED]
        named = ", ".join(f"{_shown(file.path)} ({format_memory(file.size)})" for file in largest)
        raise BadInputError(
            f"the snapshot of {_shown(top)} would be {format_memory(tree.size)}, more than the limit of "
            f"{format_memory(limit)}: leave files out by .gitignore, or raise --snapshot-limit; the largest are {named}"
        )
    if inside and not any(file.path.startswith(inside + b"/") for file in tree.files):
        raise BadInputError(
            f"the snapshot would have nothing in {_shown(inside)}, where the job runs: git ignores it, or it is empty"
        )


# The archives


def _packed(tree: _Tree, top: bytes, inside: bytes) -> PackedCode:
    with contextlib.ExitStack() as files:
        archive = _archive(tree, top)
        files.callback(archive.file.close)
        changed, changes = _changes(tree, top)
        if changes is not None:
            files.callback(changes.file.close)
        code = CodeSnapshot(
            digest=archive.digest,
            size=tree.size,
            files=len(tree.files),
            directory=os.fsdecode(inside),
            root=os.fsdecode(top),
            changes=changes.digest if changes is not None else "",
            changed=changed,
            untracked=sum(not file.tracked for file in tree.files),
        )
        secrets = tuple(_shown(file.path) for file in tree.files if _is_secret(file.path))
        packed = PackedCode(code, tree.commit, (archive, *([changes] if changes else [])), secrets)
        files.pop_all()
    return packed


def _archive(tree: _Tree, top: bytes) -> Blob:
    with Packer() as packer:
        writer = ArchiveWriter(packer)
        for file in tree.files:
            _add(writer, file, os.path.join(top, file.path))  # noqa: PTH118 - bytes
        writer.close()
        return packer.blob()


def _add(writer: ArchiveWriter, file: _File, path: bytes) -> None:
    try:
        if stat.S_ISLNK(file.mode):
            writer.add(Entry(file.path, target=os.readlink(path)))  # noqa: PTH115 - bytes
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as content:  # noqa: PTH123 - a descriptor
            if os.fstat(descriptor).st_size != file.size:
                raise _ChangedError(file.path)
            writer.add(Entry(file.path, executable=bool(file.mode & stat.S_IXUSR)), file.size, content)
    except PermissionError as error:
        raise BadInputError(f"{_shown(path)} cannot be packed: {error.strerror}") from None
    except OSError:
        raise _ChangedError(file.path) from None


def _changes(tree: _Tree, top: bytes) -> tuple[int, Blob | None]:
    """The number of tracked files that differ from the commit, and the differences for `comparison.read_changes`."""
    base = tree.commit or _git(top, "hash-object", "-t", "tree", os.devnull).stdout.decode().strip()
    names = _git(top, *_DIFF, "--name-only", "-z", base, "--")
    changed = names.stdout.count(b"\0")
    untracked = [file.path for file in tree.files if not file.tracked]
    if not changed and not untracked:
        return 0, None
    with tempfile.TemporaryFile() as difference, Packer() as packer:
        done = _git(top, *_DIFF, *_AS_TEXT, base, "--", output=difference)
        if done.returncode != 0 or names.returncode != 0:
            raise BadInputError(f"what differs from the commit cannot be listed: {_complaint(done)}")
        packer.write(b"".join(path + b"\0" for path in untracked) + b"\0")
        difference.seek(0)
        write_file(packer, difference)
        return changed, packer.blob()


def _first_difference(before: _Tree, after: _Tree) -> bytes:
    differing = set(before.files) ^ set(after.files)
    return min((file.path for file in differing), default=b"HEAD")


def _is_secret(path: bytes) -> bool:
    name = os.fsdecode(os.path.basename(path))  # noqa: PTH119 - bytes
    return name not in _NO_SECRET and any(fnmatch.fnmatchcase(name, pattern) for pattern in _SECRET)


# git


def _git(
    directory: bytes, *words: str, nested: bool = False, output: IO[bytes] | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Runs git without its locks and its file monitor, since a commit may be in progress. Names are bytes."""
    environment = {name: value for name, value in os.environ.items() if not nested or name not in _OF_ONE_REPOSITORY}
    command: Sequence[bytes | str] = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", directory)
    try:
        return subprocess.run(
            (*command, *words),
            env=environment | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.PIPE,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadInputError(f"git did not end within {_GIT_SECONDS:g} s in {_shown(directory)}") from None
    except OSError as error:
        raise BadInputError(f"a snapshot needs git, which could not be started: {error.strerror}") from None


def _complaint(done: "subprocess.CompletedProcess[bytes]") -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"git ended with {done.returncode}"]
    errors = [line for line in lines if line.startswith(("fatal: ", "error: "))] or lines
    return errors[0].removeprefix("fatal: ").removeprefix("error: ")


def _shown(path: bytes) -> str:
    """The path as printable text."""
    text = path.decode(errors="backslashreplace")
    return text if text.isprintable() else ascii(text)[1:-1]
