"""The worker beside the page of `stoker up`: a process of its own, started again when it dies."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from stoker.runs.syscalls import hear_of_death_of_parent

# One that lived shorter than this could not do its work, and says why itself.
_SHORT_LIFE: Final = 10.0
# It may do better soon (the one before it has not left yet), or when somebody has mended what is wrong: after each time
# that it does not, twice as much time is left to that.
_FIRST_PAUSE: Final = 5.0
_LAST_PAUSE: Final = 60.0
# A worker leaves within a second or two, unless its database hangs.
_PATIENCE: Final = 15.0


class WorkerProcess:
    """`stoker work` until this process ends, whichever way it ends."""

    def __init__(self, options: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None]) -> None:
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
        return subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
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
                self._tell(f"the worker ended with code {code}, and is started again")
            elif not trouble_told:
                trouble_told = True
                self._tell(f"the worker ended with code {code} soon after its start: it is tried again until it stays")
            if self._ending.wait(pause):
                return
            pause = min(pause * 2, _LAST_PAUSE)
            self._process = self._started()


def _die_with(parent: int) -> None:
    """If the page is killed, its worker leaves too, and the next `stoker up` can have its own."""
    hear_of_death_of_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)
