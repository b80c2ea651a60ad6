"""The `stoker` command as a person types it."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.support.deep import DEEP
from tests.support.warm_command import WarmCommand


class Finished(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float

    def json(self) -> Any:
        return msgspec.json.decode(self.out)


def stoker_command() -> str:
    return str(Path(sys.executable).with_name("stoker"))


def stoker(*arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 100.0) -> Finished:
    """Runs `stoker` to its end."""
    begun = time.monotonic()
    variables = {**os.environ, **(environment or {})}
    if not DEEP and _warm().can_run(arguments, variables):
        done = _warm().run(arguments, variables, timeout)
    else:
        done = subprocess.run(
            [stoker_command(), *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    assert "Traceback" not in done.stderr, done.stderr
    return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)


@functools.cache
def _warm() -> WarmCommand:
    """Started by the first test that needs it, and gone when this process is."""
    return WarmCommand()
