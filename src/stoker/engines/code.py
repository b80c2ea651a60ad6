"""Code snapshots on the machine that runs the job: fetched from the queue, unpacked, removed after the run.

Each machine caches its most recent archives, so that the jobs of a sweep fetch theirs once. Database and disk may hang,
so a separate process does the work while the supervisor keeps watching its lease and signals.
"""

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NoReturn

import msgspec

from stoker.backoff import Backoff
from stoker.engines.attempt import ARCHIVE
from stoker.errors import QueueAwayError, StokerError
from stoker.paths import private_directory, private_file, remove_tree
from stoker.procfs import close_inherited_descriptors
from stoker.queue import open_queue
from stoker.queue.code.archive import CodeSnapshot, Unpacker, unpack

if TYPE_CHECKING:
    from stoker.queue.store import Store

# The cache covers about as many experiments as a queue holds at a time.
_MOST_KEPT: Final = 16
_KEPT_FOR: Final = 7 * 86400.0
_BLOCK: Final = 2**20
# How often the supervisor checks its signals and its lease.
_CHECK_EVERY: Final = 0.1
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 10.0
# An archive of 50 MiB over a slow network takes a minute.
FETCH_SECONDS: Final = 600.0


class _Failure(msgspec.Struct, frozen=True):
    """An error in the separate process."""

    message: str
    number: int | None = None
    """The errno of a machine error, such as a full disk."""


def unpack_code(code: CodeSnapshot, queue: str | None, attempt: Path, to: Path, check: Callable[[], None]) -> str:
    """Unpacks the code at `to` and returns the job's directory in it.

    `queue`: None if this machine cannot reach it; the archive is then in the attempt's directory. `check` is called
    repeatedly, and raises to abort. Raises StokerError, and OSError if the machine is at fault.
    """

    def work() -> None:
        home = attempt.parent.parent
        with (attempt / ARCHIVE).open("rb") if queue is None else fetch(queue, home, code.digest) as archive:
            to.mkdir()
            try:
                unpack(Unpacker(code.digest, _blocks(archive)), to)
            except StokerError:
                # The cached archive is damaged: the next attempt fetches it again.
                _cached(home, code.digest).unlink(missing_ok=True)
                raise

    try:
        _in_process(work, check)
    except BaseException:
        remove_tree(to, ignore_errors=True)
        raise
    return str(to / code.directory)


def _cached(home: Path, digest: str) -> Path:
    return home / "snapshots" / digest


def fetch(queue: str, home: Path, digest: str, gives_up_at: float = math.inf) -> IO[bytes]:
    """Opens the compressed archive from the cache, or fetches it from the queue, retrying while the queue is away.

    Raises StokerError if the queue does not have it, and OSError.
    """
    cached = _cached(home, digest)
    with contextlib.suppress(FileNotFoundError):
        os.utime(cached)
        return cached.open("rb")
    private_directory(cached.parent)
    backoff, parent = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), os.getppid()
    while True:
        try:
            with open_queue(queue) as store:
                return _download(store, digest, cached)
        except QueueAwayError:
            # A new parent means that the supervisor was killed.
            if time.monotonic() >= gives_up_at or os.getppid() != parent:
                raise
            time.sleep(backoff.next())


def _download(store: "Store", digest: str, cached: Path) -> IO[bytes]:
    """Writes and checks a temporary file first: other processes may fetch the same archive."""
    partial = cached.with_name(f".{digest}-{os.getpid()}")
    try:
        with private_file(partial) as file:
            Unpacker(digest, _copy_to(file, store.blobs.chunks(digest))).finish()
        partial.replace(cached)
    finally:
        partial.unlink(missing_ok=True)
    archive = cached.open("rb")
    tidy_archives(cached.parent.parent)
    return archive


def tidy_archives(home: Path) -> None:
    """Removes surplus and stale archives, and partial files of killed processes."""
    with contextlib.suppress(OSError):
        with os.scandir(home / "snapshots") as entries:
            newest_first = sorted(((entry.stat().st_mtime, entry.path) for entry in entries), reverse=True)
        for index, (used, path) in enumerate(newest_first):
            if index >= _MOST_KEPT or used < time.time() - _KEPT_FOR:
                os.unlink(path)  # noqa: PTH108 - a path as text


def _copy_to(file: IO[bytes], chunks: Iterator[bytes]) -> Iterator[bytes]:
    for data in chunks:
        file.write(data)
        yield data


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(_BLOCK):
        yield data


def with_code(environment: dict[str, str], code: CodeSnapshot, at: Path) -> dict[str, str]:
    """The job's environment with PYTHONPATH pointing into the snapshot instead of its repository."""
    paths = environment.get("PYTHONPATH")
    if not paths or not code.root:
        return environment
    moved = [
        str(at) + path.removeprefix(code.root) if path == code.root or path.startswith(f"{code.root}/") else path
        for path in paths.split(os.pathsep)
    ]
    return environment | {"PYTHONPATH": os.pathsep.join(moved)}


# The separate process


def _in_process(work: Callable[[], None], check: Callable[[], None]) -> None:
    """Runs `work` in a forked process and calls `check` ten times a second. Raises the error of `work`."""
    answers, sender = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(answers)
        os.close(sender)
        raise
    if pid == 0:
        _work(work, sender)
    os.close(sender)
    try:
        body = bytearray()
        while True:
            while not select.select([answers], [], [], _CHECK_EVERY)[0]:
                check()
            if not (part := os.read(answers, 65536)):
                break
            body += part
    finally:
        os.close(answers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    failure = msgspec.msgpack.decode(bytes(body), type=_Failure | None) if body else _Failure("it was interrupted", 0)
    if failure is not None and failure.number is not None:
        raise OSError(failure.number, failure.message)
    if failure is not None:
        raise StokerError(failure.message)


def _work(work: Callable[[], None], sender: int) -> NoReturn:
    """The body of the forked process."""
    failure: _Failure | None = None
    try:
        os.setsid()
        # The worker sees the supervisor's death by its connections, so no other process may hold them.
        close_inherited_descriptors([sender])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        work()
    except StokerError as error:
        failure = _Failure(str(error))
    except OSError as error:
        failure = _Failure(error.strerror or type(error).__name__, error.errno or 0)
    except BaseException as error:  # noqa: BLE001 - the fork must not continue as the supervisor
        failure = _Failure(f"internal error: {type(error).__name__}: {error}")
    try:
        os.write(sender, msgspec.msgpack.encode(failure))
    finally:
        os._exit(0)


# For a cluster whose nodes cannot reach the queue: the worker fetches the archive to the shared directory


def fetch_command(queue: str, attempt: Path, code: CodeSnapshot) -> tuple[list[str], dict[str, str]]:
    """The command that fetches the archive into an attempt's directory, and its environment.

    It exits with an error if a retry may help. It prints permanent errors.
    """
    command = [sys.executable, "-m", "stoker.engines.code", str(attempt), code.digest]
    return command, {**os.environ, "STOKER_QUEUE": queue}


def main(attempt: str, digest: str) -> int:
    directory = Path(attempt)
    try:
        gives_up_at = time.monotonic() + FETCH_SECONDS / 2
        fetch(os.environ["STOKER_QUEUE"], directory.parent.parent, digest, gives_up_at).close()
        # A hard link: all attempts share one file.
        os.link(_cached(directory.parent.parent, digest), directory / ARCHIVE)
    except (QueueAwayError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except StokerError as error:
        sys.stdout.write(f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
