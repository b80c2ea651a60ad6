"""The `stoker` command as a person types it."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


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
    done = subprocess.run(
        [stoker_command(), *arguments],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)
