"""Runs other programs: found on PATH, without a terminal and with a time limit."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

# Directories of administrators' commands that an ordinary user's PATH omits.
_ADMINISTRATORS: Final = ("usr/sbin", "sbin", "usr/local/sbin")
# The code of a program that could not start or did not end in time; no program exits with it.
NOT_RUN: Final = -1000
# How often `check` is called while a program runs.
_CHECK_EVERY: Final = 0.1


class ProgramResult(NamedTuple):
    """The result of a program."""

    code: int
    out: str
    complaint: str
    """Its last line on stderr, or why there is none."""
    errors: str = ""

    @property
    def ok(self) -> bool:
        return self.code == 0


def find_program(name: str, environment: Mapping[str, str], root: str = "/") -> str | None:
    """The absolute path of a program."""
    places = [environment.get("PATH", ""), *(str(Path(root) / place) for place in _ADMINISTRATORS)]
    import shutil

    return shutil.which(name, path=":".join(place for place in places if place))


def run_program(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    check: Callable[[], None] | None = None,
) -> ProgramResult:
    """Runs a program without a terminal, so it cannot prompt for a password; never raises for its result. `check` is
    called ten times a second and may raise; the program is then killed.
    """
    name = Path(command[0]).name
    try:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )
    except OSError as error:
        return ProgramResult(
            NOT_RUN, "", f"{name} could not be started: {(error.strerror or 'no reason given').lower()}"
        )
    except ValueError as error:  # a word with a zero byte
        return ProgramResult(NOT_RUN, "", f"{name} could not be started: {error}")
    with process:
        try:
            answer = _communicate(process, timeout, check)
        finally:
            process.kill()  # an ended program is not signalled
    if answer is None:
        return ProgramResult(NOT_RUN, "", f"{name} did not end within {timeout:g} s")
    out, errors = answer
    lines = _printable(errors).strip().splitlines() or _printable(out).strip().splitlines()
    complaint = lines[-1].strip() if lines else f"{name} ended with {process.returncode}"
    return ProgramResult(process.returncode, out, complaint, _printable(errors))


def _communicate(
    process: "subprocess.Popen[str]", timeout: float, check: Callable[[], None] | None
) -> tuple[str, str] | None:
    """Its output and errors; None if it does not end in time."""
    ends = time.monotonic() + timeout
    while (left := ends - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=left if check is None else min(_CHECK_EVERY, left))
        if check is not None:
            check()
    return None


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()
