"""The `stoker` command as typed."""

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.support.deep import DEEP
from tests.support.warm_command import ServerGoneError, WarmCommand

_server: WarmCommand | None = None


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
    done = None
    if not DEEP and _warm().can_run(arguments, variables):
        try:
            done = _warm().run(arguments, variables, timeout)
        except ServerGoneError:
            done = None  # some test killed it: this command starts as a person would start it
    if done is None:
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


def _warm() -> WarmCommand:
    """Started by the first test that needs it, and again after it was killed; gone when this process is."""
    global _server  # noqa: PLW0603 - one per process
    if _server is None or not _server.alive():
        if _server is not None:
            _server.close()
        _server = WarmCommand()
        atexit.register(_server.close)
    return _server
