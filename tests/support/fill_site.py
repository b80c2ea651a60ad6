"""A machine whose idle GPUs are filled: two NVIDIA GPUs with nodes, programs to fill them with, and who disturbs."""

import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker.fill.status import StatusFile
from stoker.paths import state_home
from tests.support.command import Finished, stoker, stoker_command
from tests.support.compiled import compiled
from tests.support.mock_nvml import MockMachine
from tests.support.node_holders import NodeHolders
from tests.support.waiting import kill_all, wait_for

# On a machine that runs other tests at the same time.
PATIENCE = 60.0
FAST = 20
"""How many times faster the fast clock runs."""

# It runs until SIGTERM and records both. Its children are left to the filler.
MINER = """\
trap 'echo "term $$" >> "$JOURNAL"; exit 0' TERM
echo "start $$ ${CUDA_VISIBLE_DEVICES-unset}" >> "$JOURNAL"
sleep 1000 & wait $!
"""


class RunningFiller:
    """`stoker fill` or `gpu_mon` in the background."""

    def __init__(
        self, command: Sequence[str], said: Path, environment: dict[str, str], output: int | None = None
    ) -> None:
        """`output`: where it says what it says, if not in the file `said`."""
        self._said = said
        with said.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file if output is None else output,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def wait_until_it_says(self, pattern: str) -> None:
        wait_for(lambda: re.search(pattern, self.said), deadline=PATIENCE, named=f"{pattern!r} in {self.said!r}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout=PATIENCE)


class FillSite:
    """Nothing of it survives `close`."""

    def __init__(self, directory: Path, machine: MockMachine) -> None:
        self.directory = directory
        self.machine = machine
        self.node_holders = NodeHolders()
        self.root = directory / "root"
        self.programs = directory / "programs"
        self.journal = directory / "journal"
        self.environment = {
            "STOKER_ROOT": str(self.root),
            "STOKER_GPUS": "nvml",
            "JOURNAL": str(self.journal),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
        }
        self._fillers: list[RunningFiller] = []
        self._terminals: list[int] = []
        self.programs.mkdir(parents=True)
        (self.root / "dev/pts").mkdir(parents=True)
        (self.root / "proc").symlink_to("/proc")
        # Plain files: a device number of this machine's may be open in any other program.
        for node in self.nodes:
            node.touch()
        self.program("miner-run", MINER)

    @property
    def nodes(self) -> list[Path]:
        return [self.root / f"dev/nvidia{gpu.minor}" for gpu in self.machine.gpus]

    @property
    def uuids(self) -> list[str]:
        return [gpu.uuid for gpu in self.machine.gpus]

    # What is filled with

    def program(self, name: str, script: str) -> Path:
        """A program on PATH."""
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
        return path

    def write(self, text: str, name: str = "gpu_mon.conf") -> str:
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def config(self, *programs: str, defaults: str = "", more: str = "") -> str:
        """A file with one program per text of keys, numbered, which start as soon as they may."""
        sections = "".join(f"[process-{number}]\n{program}\n" for number, program in enumerate(programs))
        return self.write(f"[defaults]\nidle_for = 0\n{defaults}\n[gpu-all]\ngpus = ALL\n{sections}{more}\n")

    # Who fills

    def fill(
        self, *arguments: str, environment: dict[str, str] | None = None, output: int | None = None
    ) -> RunningFiller:
        return self._run(stoker_command(), "fill", *arguments, environment=environment or {}, output=output)

    def gpu_mon(self, *arguments: str, environment: dict[str, str] | None = None) -> RunningFiller:
        command = str(Path(stoker_command()).with_name("gpu_mon"))
        return self._run(command, *arguments, environment=environment or {})

    def work(self, *arguments: str) -> RunningFiller:
        """`stoker work`, for a separate queue."""
        return self._run(stoker_command(), "work", *arguments, environment={})

    def _run(self, *command: str, environment: dict[str, str], output: int | None = None) -> RunningFiller:
        said = self.directory / f"said-{len(self._fillers)}"
        filler = RunningFiller(command, said, {**os.environ, **self.environment, **environment}, output)
        self._fillers.append(filler)
        return filler

    def fast_clock(self) -> dict[str, str]:
        """An environment in which a minute is three seconds. A driver has its usual time to answer."""
        library = compiled("fast_clock", "-shared", "-fPIC")
        return {"LD_PRELOAD": str(library), "FAST_CLOCK": str(FAST), "STOKER_DEADLINE": f"{30 * FAST}s"}

    def stoker(self, *arguments: str) -> Finished:
        return stoker(*arguments, environment=self.environment)

    def slots(self) -> list[dict[str, Any]]:
        """What `stoker fill status --json` says of every program; nothing before there is something to say."""
        status = self.stoker("fill", "status", "--json").json()["status"]
        slots: list[dict[str, Any]] = status["slots"] if status else []
        return slots

    def wait_for_why(self, pattern: str, slot: int = 0) -> str:
        """Why the program does what it does, once that fits. Read without the start of a command."""
        ends = time.monotonic() + PATIENCE
        status_file = StatusFile(state_home(), socket.gethostname())
        why = ""
        while not re.search(pattern, why):
            assert time.monotonic() < ends, f"the reason never was {pattern!r}, but {why!r}"
            time.sleep(0.01)
            status = status_file.read()
            why = status.slots[slot].why if status is not None and len(status.slots) > slot else ""
        return why

    # What the programs noted

    def noted(self) -> list[list[str]]:
        # The last line may be being written.
        return [line.split() for line in self.journal.read_text().split("\n")[:-1]] if self.journal.exists() else []

    def started(self) -> dict[int, str]:
        """The visible devices of every program that was started, by its pid."""
        return {int(words[1]): words[2] for words in self.noted() if words[0] == "start"}

    def asked_to_end(self) -> set[int]:
        return {int(words[1]) for words in self.noted() if words[0] == "term"}

    def wait_for_start(self, count: int = 1) -> list[int]:
        """The pids, once exactly that many programs have started."""
        wait_for(lambda: len(self.started()) >= count, deadline=PATIENCE, named=f"start {count} in {self._messages()}")
        assert len(self.started()) == count
        return list(self.started())

    def wait_for_end(self, pid: int) -> None:
        """Once the program is gone."""
        wait_for(lambda: not alive(pid), deadline=PATIENCE, named=f"the end of {pid} in {self._messages()}")

    def _messages(self) -> str:
        return "\n".join(filler.said for filler in self._fillers)

    # Who disturbs

    def open_node(self, *gpus: int) -> "subprocess.Popen[str]":
        """A `sleep` of another user that has these GPUs open."""
        return self.node_holders.open(*(self.nodes[gpu] for gpu in gpus))

    def leave(self, other_user: "subprocess.Popen[str]") -> None:
        """It is collected in the end, like those that stay."""
        other_user.kill()

    def follow_gpus(self) -> "subprocess.Popen[str]":
        """`stoker gpus --follow`, once it has seen the GPUs."""
        variables = (f"{name}={value}" for name, value in self.environment.items())
        follow = f'"{stoker_command()}" gpus --follow | while read -r _; do echo ready; done'
        return self.node_holders.run(["env", *variables, "sh", "-c", follow])

    def open_node_as(self, name: str, *gpus: int) -> "subprocess.Popen[str]":
        """The same by a program of that name."""
        program = self.directory / name
        if not program.exists():
            program.write_bytes(Path("/bin/sh").resolve().read_bytes())
            program.chmod(0o755)
        opened = " ".join(f'{number}<"{self.nodes[gpu]}"' for number, gpu in enumerate(gpus, 3))
        # A shell under another name: it opens them itself, so that nobody of another name ever has.
        return self.node_holders.run([str(program), "-c", f"exec {opened}; echo ready; read -r _"])

    def terminal(self, user: int, idle: float) -> Path:
        """A terminal of this user's, idle for that many seconds."""
        master, slave = pty.openpty()
        self._terminals += [master, slave]
        path = Path(os.ttyname(slave))
        os.chown(path, user, -1)
        typed_at(path, idle)
        (self.root / "dev/pts" / path.name).symlink_to(path)
        return path

    # Its end

    def processes(self) -> list[int]:
        """Everything that a filler of this site started and that lives, the fillers included."""
        tag = f"JOURNAL={self.journal}".encode()
        found = []
        for runner in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if runner.name.isdigit() and tag in (runner / "environ").read_bytes().split(b"\0"):
                    found.append(int(runner.name))
        return [pid for pid in found if pid != os.getpid()]

    def wait_until_nothing_is_left(self) -> None:
        wait_for(lambda: not self.processes(), deadline=PATIENCE, named="the end of everything")

    def close(self) -> None:
        self.machine.clear_faults()
        for filler in self._fillers:
            filler.process.kill()
            filler.process.wait(timeout=PATIENCE)
        kill_all(self.processes)
        self.node_holders.end()
        for descriptor in self._terminals:
            os.close(descriptor)


def typed_at(terminal: Path, idle: float) -> None:
    """Moves the last key press that many seconds into the past."""
    os.utime(terminal, (time.time() - idle, time.time() - idle))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


@pytest.fixture
def filling(tmp_path: Path, nvidia: MockMachine) -> Iterator[FillSite]:
    """Two GPUs with device nodes, and `miner-run` on PATH."""
    with contextlib.closing(FillSite(tmp_path / "filling", nvidia)) as site:
        yield site
