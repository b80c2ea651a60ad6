"""Mock device nodes of GPUs, and real processes that open them."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from stoker.presence.holders import DeviceHolder

NOBODY = 65534
# /dev/zero and /dev/full: anybody may open them, and hardly any program does.
NUMBERS = (os.makedev(1, 5), os.makedev(1, 7))

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def make_node(path: Path, number: int, mode: int = 0o666) -> Path:
    """A node of the device with this number; a plain file without the permission to create nodes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | mode, number)
    else:
        path.touch()
    path.chmod(mode)
    return path


class NodeHolders:
    """Processes that hold files open until the test ends."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def open(self, *paths: Path, user: int | None = None) -> "subprocess.Popen[str]":
        """A `sleep` that has these open."""
        opened = " ".join(f'{number}<"{path}"' for number, path in enumerate(paths, 3))
        return self.run(["sh", "-c", f"exec {opened}; echo ready; exec sleep 300"], user=user)

    def python(self, code: str, *arguments: object) -> "subprocess.Popen[str]":
        return self.run([sys.executable, "-c", code, *map(str, arguments)])

    def run(self, command: Sequence[str], *, user: int | None = None) -> "subprocess.Popen[str]":
        """A process that says `ready` when it is."""
        groups: list[int] | None = None if user is None else []
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            user=user,
            group=user,
            extra_groups=groups,
            start_new_session=True,
        )
        self._started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def among(self, holders: Iterable[DeviceHolder]) -> list[int]:
        """The pids of those holders that this test started: another one may use the same device at this moment."""
        started = {process.pid for process in self._started}
        return [holder.pid for holder in holders if _group(holder.pid) in started]

    def end(self) -> None:
        for process in self._started:
            # With all that it has started, unless nothing of that is left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._started:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def as_nobody(code: str, *arguments: object) -> str:
    """The output of an unprivileged Python program; it may use `sys`, `Path`, `DeviceEvents` and `HolderScanner`."""
    # It drops its rights only after its imports: the interpreter itself may be where others do not come.
    begin = f"""
import os, sys
from pathlib import Path
from stoker.presence.device_events import DeviceEvents
from stoker.presence.holders import HolderScanner
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""
    command = [sys.executable, "-c", begin + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="stoker-test-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def node_holders() -> Iterator[NodeHolders]:
    those = NodeHolders()
    yield those
    those.end()
