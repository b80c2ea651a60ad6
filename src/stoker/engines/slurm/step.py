"""A step of a Slurm job: a local `srun` with one task per node, and the messages that the tasks print.

Messages are split into lines short enough that `srun` does not mix those of different nodes.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final, cast

# The limit of a line, below the size up to which srun keeps lines intact.
CHUNK: Final = 900
MARK: Final = b"stoker-look"
_MOST_COMPLAINTS: Final = 2000
# A harmless message of clusters without CPU binding, which the step does not want anyway.
_NOTHING_WRONG: Final = "lacks support for cpu binding"
_READ: Final = 65536


def frames(node: str, content: bytes) -> Iterator[bytes]:
    """The lines of a message: mark, `+` (`.` in the last line), node, and a part of the content.

    `content` must not contain line breaks.
    """
    for at in range(0, len(content), CHUNK):
        more = b"+" if at + CHUNK < len(content) else b"."
        yield b" ".join((MARK, more, node.encode(), content[at : at + CHUNK])) + b"\n"


class Reassembly:
    """Assembles messages from the lines of all nodes. Other lines, such as a prolog's, are ignored."""

    def __init__(self) -> None:
        self._parts: dict[bytes, list[bytes]] = {}

    def add(self, line: bytes) -> tuple[str, bytes] | None:
        """Node and content of a message, when its last line arrives. A lost line damages the message."""
        mark, _space, rest = line.rstrip(b"\n").partition(b" ")
        more, _space, rest = rest.partition(b" ")
        node, _space, content = rest.partition(b" ")
        if mark != MARK or more not in (b"+", b"."):
            return None
        parts = self._parts.setdefault(node, [])
        parts.append(content)
        if more == b"+":
            return None
        del self._parts[node]
        return node.decode(errors="replace"), b"".join(parts)


def srun_command(job: int, nodes: Sequence[str], *options: str) -> list[str]:
    """The command for one task on each of these nodes of a running job. `options` end with the task's command."""
    return [
        "srun",
        "--quiet",
        f"--jobid={job}",
        # Shares CPUs, memory and GPUs with the job's other steps.
        "--overlap",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        # The end of one task must not end the others.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--chdir=/",
        *options,
    ]


class SrunStep:
    """A running `srun`."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], **how: Any) -> None:
        """`how`: further arguments of Popen. Raises OSError."""
        self._lines = Reassembly()
        self._rest = b""
        self._complaints = b""
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            env=variables,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The terminal's signals must not reach it; its owner ends it.
            start_new_session=True,
            **how,
        )
        self._stdout = cast("IO[bytes]", self._process.stdout)
        self._stderr = cast("IO[bytes]", self._process.stderr)
        for stream in (self._stdout, self._stderr):
            os.set_blocking(stream.fileno(), False)
        # A large pipe, so that a busy reader does not block the tasks of many nodes.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._stdout.fileno(), fcntl.F_SETPIPE_SZ, 2**20)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._stdout.fileno()

    def messages(self) -> list[tuple[str, bytes]]:
        """New messages, each with its node."""
        self._complaints = (self._complaints + _read(self._stderr))[-_MOST_COMPLAINTS:]
        *lines, self._rest = (self._rest + _read(self._stdout)).split(b"\n")
        return [message for line in lines if (message := self._lines.add(line)) is not None]

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def cause(self) -> str:
        """Why it ended, from srun's messages: the first error, since later ones follow from it."""
        self._complaints += _read(self._stderr)
        lines = [line.strip() for line in self._complaints.decode(errors="replace").splitlines()]
        lines = [line for line in lines if line and _NOTHING_WRONG not in line]
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        killed = [f"srun was ended by signal {-code}" for code in [self._process.returncode or 0] if code < 0]
        return next(iter(errors or killed or lines), "")

    def terminate(self) -> None:
        """Ends srun, which ends the step on all nodes that can be reached."""
        self._process.send_signal(signal.SIGTERM)

    def close(self, patience: float) -> None:
        """Waits for its end, and terminates it after a while."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        if not self.has_ended():
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        if not self.has_ended():
            self._process.kill()
        for stream in (self._stdout, self._stderr):
            stream.close()


def _read(stream: IO[bytes]) -> bytes:
    found = b""
    with contextlib.suppress(OSError):
        while piece := os.read(stream.fileno(), _READ):
            found += piece
    return found
