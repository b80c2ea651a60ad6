"""The worker beside the page of `stoker up`: a process of its own, started again when it dies."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from stoker.errors import StokerError
from stoker.paths import open_privately, private_directory
from stoker.runs.processes.syscalls import hear_of_death_of_parent

# One that lived shorter than this could not do its work, and says why itself.
_SHORT_LIFE: Final = 10.0
# It may do better soon (the one before it has not left yet), or when somebody has mended what is wrong: after each time
# that it does not, twice as much time is left to that.
_FIRST_PAUSE: Final = 5.0
_LAST_PAUSE: Final = 60.0
# A worker leaves within a second or two, unless its database hangs.
_PATIENCE: Final = 15.0
_LONGEST_LOG: Final = 8 * 2**20
_LONGEST_WORDS: Final = 2000


class WorkerProcess:
    """`stoker work` until this process ends, whichever way it ends."""

    def __init__(
        self, options: Sequence[str], environment: Mapping[str, str], log: Path, tell: Callable[[str], None]
    ) -> None:
        """What the worker says goes to `log`; `tell` is given what a person at the terminal should know."""
        self._log = log
        self._command = [sys.executable, "-P", "-m", "stoker.cli", "work", *options]
        self._environment = dict(environment)
        self._tell = tell
        self._ending = threading.Event()
        self._process = self._started()
        self._thread = threading.Thread(target=self._keep, name="worker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        self._thread.join(_PATIENCE)

    def _started(self) -> "subprocess.Popen[bytes]":
        parent = os.getpid()
        with _appended(self._log) as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the page, which tells the worker when it is time
                preexec_fn=lambda: _die_with(parent),  # noqa: PLW1509 - two system calls, and no thread holds a lock of theirs
            )

    def _keep(self) -> None:
        pause, trouble_told = _FIRST_PAUSE, False
        while True:
            began = time.monotonic()
            if self._ending.is_set():
                self._process.terminate()  # the end came while it was being started
            code = self._process.wait()
            if self._ending.is_set():
                return
            if time.monotonic() - began >= _SHORT_LIFE:
                pause, trouble_told = _FIRST_PAUSE, False
                self._tell(f"the worker ended with code {code}{self._last_words()}, and is started again")
            elif not trouble_told:
                trouble_told = True
                said = self._last_words()
                self._tell(f"the worker ended with code {code} soon after its start{said}: it is tried again")
            if self._ending.wait(pause):
                return
            pause = min(pause * 2, _LAST_PAUSE)
            self._process = self._started()

    def _last_words(self) -> str:
        """Why, as it said itself."""
        try:
            lines = self._log.read_bytes()[-_LONGEST_WORDS:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({said})" if said else ""


@contextlib.contextmanager
def _appended(path: Path) -> Iterator[int]:
    """The log, for its owner alone; begun anew when it has become long."""
    try:
        private_directory(path.parent)
        if path.exists() and path.stat().st_size > _LONGEST_LOG:
            path.replace(path.with_name(f"{path.name}.1"))
        file = open_privately(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise StokerError(f"the worker's log {path} cannot be written: {error.strerror}") from None
    try:
        yield file
    finally:
        os.close(file)


def _die_with(parent: int) -> None:
    """If the page is killed, its worker leaves too, and the next `stoker up` can have its own."""
    hear_of_death_of_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)
