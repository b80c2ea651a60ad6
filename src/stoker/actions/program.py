"""Other programs that an action needs: found on PATH, run with a time limit, their complaint in a sentence."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

# Where commands for administrators are that an ordinary user's PATH leaves out.
_ADMINISTRATORS: Final = ("usr/sbin", "sbin", "usr/local/sbin")


class Outcome(NamedTuple):
    code: int
    out: str
    complaint: str
    """The last line that it wrote to stderr, or in words that it failed."""


def find(name: str, environment: Mapping[str, str], root: str = "/") -> str | None:
    """The absolute path of a program."""
    places = [environment.get("PATH", ""), *(str(Path(root) / place) for place in _ADMINISTRATORS)]
    return shutil.which(name, path=":".join(place for place in places if place))


def run(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Outcome:
    """Runs a program without a terminal, so that it cannot ask for a password; never raises for what it did."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(-1, "", f"{name} did not end within {timeout:g} s")
    except OSError as error:
        return Outcome(-1, "", f"{name} could not be started: {error.strerror}")
    said = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
    return Outcome(done.returncode, done.stdout, said[-1].strip() if said else f"{name} ended with {done.returncode}")
