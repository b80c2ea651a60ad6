"""Ways in which processes escape from their parent, and the small C program that uses them."""

import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).with_name("escapes.c")
CACHE: Final = Path(__file__).parents[2] / ".cache" / "escapes"
COMPILER: Final = ("cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")


class Escape(NamedTuple):
    """One way to get away."""

    command: str
    """For a shell; `$ESCAPES` is the program and `$PIPE` the descriptor that its processes hold."""
    ready: int
    """How many processes say that they are where they want to be."""
    deaf: bool = False
    """Whether it does not end when it is asked to."""


ESCAPES: Final[dict[str, Escape]] = {
    "double fork": Escape("exec $ESCAPES double-fork $PIPE", 2),
    "setsid": Escape("exec $ESCAPES setsid $PIPE", 2),
    "nohup": Escape("nohup $ESCAPES sit $PIPE & nohup setsid $ESCAPES sit $PIPE & exit 0", 2),
    "cleared environment": Escape("env -i setsid $ESCAPES double-fork $PIPE & env -i $ESCAPES sit $PIPE", 3),
    "fork storm": Escape("exec $ESCAPES storm $PIPE", 1, deaf=True),
    "fork storm during the kill": Escape("exec $ESCAPES storm-on-term $PIPE", 1, deaf=True),
    "stopped": Escape("exec $ESCAPES stopped $PIPE", 2, deaf=True),
    "ignores SIGTERM": Escape("exec $ESCAPES deaf $PIPE", 1, deaf=True),
    "many that ignore SIGTERM": Escape("exec $ESCAPES breed $PIPE 5", 32, deaf=True),
    "zombies": Escape("exec $ESCAPES zombies $PIPE", 2),
    "changes its name": Escape("exec $ESCAPES renamed $PIPE ') Z 1 1 (1 x'", 2),
    "first thread ends": Escape("exec $ESCAPES thread $PIPE", 2),
    "adopts its own orphans": Escape("exec $ESCAPES subreaper $PIPE", 2, deaf=True),
    "pid reused after death": Escape("exec $ESCAPES with-children $PIPE", 3),
}


def build() -> Path:
    """The compiled program. Several processes may ask at once."""
    digest = hashlib.sha256("\0".join((SOURCE.read_text(), *COMPILER, platform.machine())).encode()).hexdigest()
    built = CACHE / f"escapes-{digest[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                subprocess.run([*COMPILER, "-o", f"{scratch}/escapes", SOURCE], check=True)
                Path(scratch, "escapes").rename(built)
    return built


class Holders:
    """A pipe that the processes of one job hold: the kernel's own word on whether any of them is left."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_inheritable(self.writer, True)

    def let_go(self) -> None:
        """To be called once the job has it: from then on only the job holds it."""
        os.close(self.writer)

    def wait_until_ready(self, processes: int) -> None:
        while processes > 0:
            said = os.read(self.reader, processes)
            if not said:
                raise AssertionError("the escaping programs ended before they were ready")
            processes -= len(said)

    def anyone_left(self) -> bool:
        os.set_blocking(self.reader, False)
        try:
            while os.read(self.reader, 4096):
                pass
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        os.close(self.reader)
