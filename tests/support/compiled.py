"""Small C programs of the tests, compiled when they are first needed."""

import fcntl
import hashlib
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Final

CACHE: Final = Path(__file__).parents[2] / ".cache" / "programs"
COMPILER: Final = ("cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")


def compiled(name: str, *options: str) -> Path:
    """The program made of NAME.c beside this file, or with `-shared` and `-fPIC` a library to be preloaded.

    Several processes may ask at once.
    """
    source = Path(__file__).with_name(f"{name}.c")
    digest = hashlib.sha256(
        "\0".join((source.read_text(), *COMPILER, *options, platform.machine())).encode()
    ).hexdigest()
    # In a separate directory, so that a process of it has the name of the program.
    built = CACHE / digest[:16] / name
    built.parent.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                subprocess.run([*COMPILER, *options, "-o", f"{scratch}/{name}", source], check=True)
                Path(scratch, name).rename(built)
    return built
