"""A machine with mock GPUs and device nodes, a filler, and other users who open the nodes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stoker.fill.background_process import TAG
from tests.support.command import stoker_command
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import kill_all, wait_for

# A program on a GPU: it opens the node, notes whether it is alone there, and when it is asked to end.
PROGRAM: Final = """
import fcntl, os, signal, sys, time
site, gpu, linger = sys.argv[1], os.environ["CUDA_VISIBLE_DEVICES"], float(sys.argv[2])
journal = os.open(site + "/journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(what):
    os.write(journal, f"{time.monotonic()} {os.getpid()} {gpu} {what}\\n".encode())
def asked(*_):
    note("asked")
    if linger < 0:
        return
    time.sleep(linger)
    note("ends")
    os._exit(0)
signal.signal(signal.SIGTERM, asked)
held = os.open(f"{site}/by-uuid/{gpu}", os.O_RDONLY)
alone = os.open(f"{site}/locks/{gpu}", os.O_RDWR | os.O_CREAT)
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    note("runs")
except BlockingIOError:
    note("overlaps")
while True:
    signal.pause()
"""

OTHER_USER: Final = """
import os, sys, time
for line in sys.stdin:
    word, _, path = line.strip().partition(" ")
    at = time.monotonic()
    if word == "open":
        held = os.open(path, os.O_RDONLY)
    else:
        os.close(held)
    print(at, flush=True)
"""

# `stoker fill` as it is, but for the promise of at most one start a minute: for many trials in a short time.
EAGER: Final = """
import sys
import stoker.fill.slot
stoker.fill.slot.LEAST_BETWEEN_STARTS = 0.0
from stoker.cli import main
sys.argv[0] = "stoker"
main()
"""


class Entry(NamedTuple):
    """One line that a program wrote down."""

    at: float
    """Monotonic seconds."""
    pid: int
    gpu: str
    what: str


class FillMachine:
    """All of it, below one directory. `keys` go into the configuration as they are."""

    def __init__(
        self, directory: Path, *, gpus: int, linger: float = 0.0, interval: float = 10.0, keys: str = "idle_for = 0"
    ) -> None:
        """`linger`: seconds that a program takes to end when it is asked; negative: it does not end."""
        self.directory = directory
        for name in ("by-uuid", "locks", "home", "root/dev"):
            (directory / name).mkdir(parents=True)
        self.machine = MockMachine.create(directory / "state", gpus=gpus)
        self.nodes: dict[str, Path] = {}
        (directory / "root/proc").symlink_to("/proc")
        for gpu in self.machine.gpus:
            node = directory / f"root/dev/nvidia{gpu.minor}"
            node.touch()
            (directory / "by-uuid" / gpu.uuid).symlink_to(node)
            self.nodes[gpu.uuid] = node
        (directory / "program.py").write_text(PROGRAM)
        self.config = directory / "fill.toml"
        self.config.write_text(
            f'[fill]\ninterval = "{interval}s"\n\n[[fill.program]]\nname = "background"\neach = true\n'
            f'command = ["{sys.executable}", "-IS", "{directory}/program.py", "{directory}", "{linger}"]\n'
            f'log = "{directory}/log"\n{keys}\n'
        )
        self.environment = {
            **os.environ,
            **self.machine.environment(),
            "STOKER_HOME": str(directory / "home"),
            "STOKER_ROOT": str(directory / "root"),
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def fill(self, *, eager: bool = False) -> "subprocess.Popen[bytes]":
        """A filler; `eager`: without its promise of one start a minute."""
        command = [sys.executable, "-c", EAGER] if eager else [stoker_command()]
        with (self.directory / "said").open("ab") as said:
            filler = subprocess.Popen(
                [*command, "fill", "--config", str(self.config)],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip
        self._started.append(filler)
        return filler

    @property
    def said(self) -> str:
        return (self.directory / "said").read_text()

    def journal(self) -> list[Entry]:
        path = self.directory / "journal"
        # The last line may be being written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [Entry(float(at), int(pid), gpu, what) for at, pid, gpu, what in map(str.split, lines)]

    def latest(self, gpu: str) -> Entry | None:
        """The last that was written down of this GPU."""
        return next((entry for entry in reversed(self.journal()) if entry.gpu == gpu), None)

    def running(self, gpu: str) -> int | None:
        """The pid of the program that runs there and was not asked to end."""
        last = self.latest(gpu)
        return last.pid if last is not None and last.what == "runs" and _is_there(last.pid) else None

    def wait_until_running(self, gpus: Sequence[str], deadline: float = 60.0) -> None:
        wait_for(lambda: all(map(self.running, gpus)), deadline=deadline, named="a program on every GPU")

    def programs(self) -> list[int]:
        """All processes of background programs that live."""
        tag = f"{TAG}={self.directory}/".encode()
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [pid for pid in pids if any(variable.startswith(tag) for variable in _environment(pid))]

    def close(self) -> None:
        """Ends whatever is left."""
        for filler in self._started:
            if filler.poll() is None:
                filler.send_signal(signal.SIGTERM)
        for filler in self._started:
            try:
                filler.wait(60)
            except subprocess.TimeoutExpired:
                filler.kill()
                filler.wait()
        kill_all(self.programs)


class OtherUser:
    """Another process that opens and closes device nodes, and says when it began to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", OTHER_USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def open(self, node: Path) -> float:
        """When, in monotonic seconds."""
        return self._log(f"open {node}")

    def leave(self) -> float:
        return self._log("close")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _log(self, line: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


class PreemptionTimes(NamedTuple):
    """Seconds from the opening of the node."""

    asked: float
    """Until the program received SIGTERM."""
    gone: float
    """Until nothing of it was left, and its memory with it."""


def occupy(
    site: FillMachine, other_user: OtherUser, gpu: str, node: Path | None = None, patience: float = 60.0
) -> PreemptionTimes:
    """Opens the node of a GPU on which a program runs, waits until that is gone, and leaves again."""
    pid = site.running(gpu)
    assert pid is not None, "no program runs there"
    opened = other_user.open(node or site.nodes[gpu])
    wait_for(lambda: not _is_there(pid), deadline=patience, named="the end of the background program")
    gone = time.monotonic()
    other_user.leave()
    asked = next(entry.at for entry in site.journal() if entry.pid == pid and entry.what == "asked")
    return PreemptionTimes(asked - opened, gone - opened)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # It ended just now.


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}/cwd").is_symlink()
