"""A program set aside instead of stopped: NVIDIA's `cuda-checkpoint` moves its GPU memory to the host, and back."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence

TOOL = "cuda-checkpoint"


def tool() -> str | None:
    """Where it is, if it is installed."""
    return shutil.which(TOOL)


class Toggle:
    """The tool at work on some processes, one after another, within a time: out of GPU memory, or back into it."""

    def __init__(self, path: str, pids: Sequence[int], timeout: float) -> None:
        self._path = path
        self._left = list(pids)
        self._ends = time.monotonic() + timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.ok: bool | None = None
        """Whether it worked; None while it is under way."""
        self.why = ""
        self._next()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def fileno(self) -> int:
        return self._pidfd

    def due(self) -> float:
        return self._ends

    def attend(self) -> None:
        """Takes note of what happened. Past its time it has failed."""
        while self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            said = (self._process.stderr.read() if self._process.stderr else b"").decode(errors="replace").strip()
            self._forget()
            if code != 0:
                self._fail(f"{TOOL} ended with code {code}{': ' + said.splitlines()[-1] if said else ''}")
                return
            self._next()
        if self._process is not None and time.monotonic() >= self._ends:
            self.abandon()
            self._fail(f"{TOOL} did not end in time")

    def abandon(self) -> None:
        """Whoever it was for is no longer kept: nothing of the tool is left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()
            self._fail("it is no longer wanted")

    def _next(self) -> None:
        if not self._left:
            self.ok = True
            return
        pid = self._left.pop(0)
        try:
            self._process = subprocess.Popen(
                [self._path, "--toggle", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._fail(f"{TOOL} cannot be run: {(error.strerror or 'no reason given').lower()}")

    def _fail(self, why: str) -> None:
        self.ok = False
        self.why = why

    def _forget(self) -> None:
        if self._process is not None and self._process.stderr is not None:
            self._process.stderr.close()
        self._process = None
        with contextlib.suppress(OSError):
            if self._pidfd >= 0:
                os.close(self._pidfd)
        self._pidfd = -1
