"""The code of an attempt on the machine that runs it: brought from the queue, unpacked for the job, removed after it.

A machine keeps the archives that it used last, so that the jobs of a sweep bring theirs once. The database may be slow
or away, and a disk too: all happens in a process beside the supervisor, which goes on watching its lease and signals.
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

# Of the archives that a machine keeps: those of as many experiments are in the queue at a time.
_MOST_KEPT: Final = 16
_KEPT_FOR: Final = 7 * 86400.0
_BLOCK: Final = 2**20
# How often the supervisor looks at its signals and its lease meanwhile.
_CHECK_EVERY: Final = 0.1
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 10.0
# An archive of 50 MiB over a slow network takes a minute.
FETCH_SECONDS: Final = 600.0


class _Failure(msgspec.Struct, frozen=True):
    """What went wrong in the other process."""

    message: str
    number: int | None = None
    """Of an error of the machine, such as a full disk."""


def unpack_code(code: CodeSnapshot, queue: str | None, attempt: Path, to: Path, check: Callable[[], None]) -> str:
    """Unpacks the code at `to`; the job's directory in it. Raises StokerError, and OSError for what is the machine's.

    `queue`: None where it is out of reach, and the archive is in the directory of the attempt. `check` is called
    repeatedly, and raises to give up.
    """

    def work() -> None:
        home = attempt.parent.parent
        with (attempt / ARCHIVE).open("rb") if queue is None else fetch(queue, home, code.digest) as archive:
            to.mkdir()
            try:
                unpack(Unpacker(code.digest, _blocks(archive)), to)
            except StokerError:
                _kept(home, code.digest).unlink(missing_ok=True)  # a disk has damaged it: the next attempt brings it
                raise

    try:
        _beside(work, check)
    except BaseException:
        remove_tree(to, ignore_errors=True)
        raise
    return str(to / code.directory)


def _kept(home: Path, digest: str) -> Path:
    return home / "snapshots" / digest


def fetch(queue: str, home: Path, digest: str, gives_up_at: float = math.inf) -> IO[bytes]:
    """The archive, compressed, from this machine or else from the queue, which is waited for.

    Raises StokerError when the queue does not have it, and OSError.
    """
    kept = _kept(home, digest)
    with contextlib.suppress(FileNotFoundError):
        os.utime(kept)
        return kept.open("rb")
    private_directory(kept.parent)
    backoff, parent = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), os.getppid()
    while True:
        try:
            with open_queue(queue) as store:
                return _brought(store, digest, kept)
        except QueueAwayError:
            # Nobody waits for it when the supervisor was killed.
            if time.monotonic() >= gives_up_at or os.getppid() != parent:
                raise
            time.sleep(backoff.next())


def _brought(store: "Store", digest: str, kept: Path) -> IO[bytes]:
    """Writes it beside its place and checks it there: other processes may bring the same."""
    partial = kept.with_name(f".{digest}-{os.getpid()}")
    try:
        with private_file(partial) as file:
            Unpacker(digest, _copied(store.blobs.chunks(digest), file)).finish()
        partial.replace(kept)
    finally:
        partial.unlink(missing_ok=True)
    archive = kept.open("rb")
    tidy_archives(kept.parent.parent)
    return archive


def tidy_archives(home: Path) -> None:
    """Removes those that are too many or were not used for long, and what a process left that was killed."""
    with contextlib.suppress(OSError):
        with os.scandir(home / "snapshots") as entries:
            found = sorted(((entry.stat().st_mtime, entry.path) for entry in entries), reverse=True)
        for place, (used, path) in enumerate(found):
            if place >= _MOST_KEPT or used < time.time() - _KEPT_FOR:
                os.unlink(path)  # noqa: PTH108 - a path as text


def _copied(chunks: Iterator[bytes], file: IO[bytes]) -> Iterator[bytes]:
    for data in chunks:
        file.write(data)
        yield data


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(_BLOCK):
        yield data


def with_code(environment: dict[str, str], code: CodeSnapshot, at: Path) -> dict[str, str]:
    """The job's environment, where PYTHONPATH names the snapshot instead of the repository that it was made of."""
    places = environment.get("PYTHONPATH")
    if not places or not code.root:
        return environment
    moved = [
        str(at) + place.removeprefix(code.root) if place == code.root or place.startswith(f"{code.root}/") else place
        for place in places.split(os.pathsep)
    ]
    return environment | {"PYTHONPATH": os.pathsep.join(moved)}


# The other process


def _beside(work: Callable[[], None], check: Callable[[], None]) -> None:
    """Does it in a forked process, with `check` ten times a second. Raises what went wrong there."""
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
    """The forked process."""
    failure: _Failure | None = None
    try:
        os.setsid()
        # A worker at the other end of the supervisor's connections must see the supervisor's death.
        close_inherited_descriptors([sender])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        work()
    except StokerError as error:
        failure = _Failure(str(error))
    except OSError as error:
        failure = _Failure(error.strerror or type(error).__name__, error.errno or 0)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must not go on as the supervisor
        failure = _Failure(f"internal error: {type(error).__name__}: {error}")
    try:
        os.write(sender, msgspec.msgpack.encode(failure))
    finally:
        os._exit(0)


# For a cluster whose nodes do not reach the queue: the worker brings the archive to where they see it


def fetch_command(queue: str, attempt: Path, code: CodeSnapshot) -> tuple[list[str], dict[str, str]]:
    """A command that brings the archive into the directory of an attempt, with its environment.

    It fails when trying again may help. What cannot be helped it prints.
    """
    command = [sys.executable, "-m", "stoker.engines.code", str(attempt), code.digest]
    return command, {**os.environ, "STOKER_QUEUE": queue}


def main(attempt: str, digest: str) -> int:
    directory = Path(attempt)
    try:
        gives_up_at = time.monotonic() + FETCH_SECONDS / 2
        fetch(os.environ["STOKER_QUEUE"], directory.parent.parent, digest, gives_up_at).close()
        # The same file, however many attempts run from it.
        os.link(_kept(directory.parent.parent, digest), directory / ARCHIVE)
    except (QueueAwayError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except StokerError as error:
        sys.stdout.write(f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
