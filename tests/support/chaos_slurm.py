"""Random faults over a queue whose jobs run on a real Slurm cluster: of its daemons, its nodes and its commands, too.

One worker on the login node, three nodes that share its home. The faults of `chaos.py` strike there as well.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from stoker.engines.slurm.record import SlurmAttemptRecord
from stoker.procfs import Identity, identify, stat
from stoker.queue import JobSpec
from stoker.runs.processes.tree import children, send
from tests.support.chaos import LONGEST_CONDITION, LONGEST_WAIT, WORK, ChaosRun, Extent, Planned
from tests.support.chaos_judge import SLURM_FATAL, SLURM_OUTAGES, Evidence, Submitted
from tests.support.chaos_machine import SUPERVISOR, Host, Machine
from tests.support.faults import Call
from tests.support.job_journal import journal_clock
from tests.support.slurm_cluster import NODES, TAG, SlurmCluster
from tests.support.work_site import WorkSite

# How often each is the next, in parts of their sum.
SLURM_KINDS: Final = {
    "kill worker": 8,
    "kill supervisor": 7,
    "kill reaper": 5,
    "kill step": 3,
    "kill job": 6,
    "kill slurmstepd": 4,
    "kill srun": 4,
    "kill slurmd": 4,
    "kill controller": 5,
    "stop worker": 3,
    "stop supervisor": 4,
    "stop reaper": 3,
    "stop job": 3,
    "stop slurmstepd": 3,
    "stop slurmd": 3,
    "stop controller": 4,
    "restart controller": 4,
    "preempt": 8,
    "requeue": 8,
    "node down": 5,
    "crash node": 4,
    "suspend": 3,
    "sleep": 3,
    "clock forward": 3,
    "clock backward": 3,
    "full disk": 5,
    "no inodes": 3,
    "EIO": 4,
    "ENOSPC": 4,
    "EMFILE": 3,
    "ENOMEM": 3,
    "EAGAIN": 3,
    "slow directory": 4,
    "late directory": 4,
    "sbatch loses its answer": 6,
    "sbatch hangs": 3,
    "sbatch fails": 3,
    "squeue fails": 3,
    "squeue is cut short": 3,
    "squeue is empty once": 4,
    "squeue hangs": 2,
    "scancel fails": 3,
    "lock database": 3,
}
# Longer than a lease: most of a short run would be waiting for them.
SLURM_LONG: Final = frozenset({"suspend", "crash node", "sbatch hangs"})
SLURM_WORK: Final = (
    *WORK[:4],
    *("--engine", "slurm", "--partition", "main", "--preemptible-partition", "spare", "--max-pending", "8"),
)
# MinJobAge: so that Slurm has forgotten some jobs before the worker has asked about them.
SLURM_PARAMETERS: Final = ({"MinJobAge": 2}, {"MinJobAge": 300})
# On the login node; all others strike a node, or either.
_OF_WORKER: Final = frozenset({"kill worker", "stop worker", "full disk", "no inodes", "lock database"})
_ANYWHERE: Final = frozenset({"clock forward", "clock backward", "EIO", "ENOSPC", "EMFILE", "ENOMEM", "EAGAIN",
                              "slow directory", "late directory"})  # fmt: skip
_SLOW_RULE: Final = 8
_LATE_RULE: Final = 9
# `squeue` is asked every four seconds.
_LONGEST_COMMAND_FAULT: Final = 6.0
# Longer than a command of Slurm may take.
_TOO_LONG: Final = 33
_BACKLOG: Final = 9
_COMMANDS: Final = ("sbatch", "squeue", "scancel")

# What Slurm's commands do, by a word in a file of their name. A line is added to NAME.fired each time.
_WRAPPER: Final = """#!/bin/sh
name=${0##*/}
[ "$1" != --version ] || exec REAL/$name "$@"
read -r how seconds 2>/dev/null < DIRECTORY/$name || exec REAL/$name "$@"
echo >> DIRECTORY/$name.fired
case $how in
    fails) echo "$name: error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
    loses) REAL/$name "$@" > /dev/null; echo "$name: error: Socket timed out on send/recv operation" >&2; exit 1 ;;
    hangs) answer=$(REAL/$name "$@"); sleep "$seconds"; exit 1 ;;
    is) REAL/$name "$@" | { dd bs=200 count=1 2>/dev/null; cat > /dev/null; }; exit 0 ;;
    once) rm DIRECTORY/$name; exit 0 ;;
esac
exec REAL/$name "$@"
"""


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


class _LoginNode(Machine):
    """Where the worker runs. Jobs on the nodes have its home, too."""

    def is_here(self, environment: list[bytes]) -> bool:
        return super().is_here(environment) and not any(one.startswith(f"{TAG}=".encode()) for one in environment)


class _Node(Host):
    """A node of the cluster."""

    def __init__(self, site: WorkSite, number: int, home: Path, cluster: SlurmCluster) -> None:
        super().__init__(site.directory, number, home)
        self.name = NODES[number - 1]
        self._mark = f"{TAG}={cluster.directory}/{self.name}".encode()
        cluster.export(self.name, self.faults.environment)

    def is_here(self, environment: list[bytes]) -> bool:
        return self._mark in environment


def slurm_extent(
    faults: int,
    every: float,
    kinds: frozenset[str] = frozenset(SLURM_KINDS),
    *,
    mounts: bool,
    longest_job: float = 14.0,
) -> Extent:
    """The login node and three others."""
    return Extent(faults, every, 1 + len(NODES), kinds, mounts, longest_job)


class SlurmChaosRun(ChaosRun):
    """One run of it."""

    def __init__(self, site: WorkSite, url: str, extent: Extent, seed: int, cluster: SlurmCluster) -> None:
        self._cluster = cluster
        self._controller_away = False
        self._resume_at = 0.0
        self._wrappers = site.directory / "bin"
        super().__init__(site, url, extent, seed, None)
        self._nodes = [_Node(site, number, self._machines[0].home, cluster) for number in range(1, len(NODES) + 1)]

    def _weights(self) -> Mapping[str, int]:
        return SLURM_KINDS

    def _new_machines(self) -> list[Machine]:
        self._write_wrappers()
        environment = {"PATH": f"{self._wrappers}:{os.environ['PATH']}", **self._cluster.environment()}
        return [_LoginNode(self._site, 0, SLURM_WORK, mounts=self._extent.mounts, environment=environment)]

    def _write_wrappers(self) -> None:
        self._wrappers.mkdir()
        faults = self._site.directory / "commands"
        faults.mkdir()
        for name in _COMMANDS:
            real = shutil.which(name)
            assert real is not None
            wrapper = self._wrappers / name
            wrapper.write_text(_WRAPPER.replace("DIRECTORY", str(faults)).replace("REAL", str(Path(real).parent)))
            wrapper.chmod(0o755)

    def _evidence(self) -> Evidence:
        known = super()._evidence()
        nodes = {node.name: node.number for node in self._nodes}
        return known._replace(machines=known.machines | nodes, fatal=SLURM_FATAL, outages=SLURM_OUTAGES)

    def close(self) -> None:
        super().close()
        for node in self._nodes:
            for who in node.called(*node.processes().values()):
                send(who, signal.SIGCONT)

    # The work

    def _backlog(self) -> int:
        return _BACKLOG

    def _new_job(self, number: int) -> tuple[JobSpec, Submitted]:
        """Some may be preempted, and requeued by Slurm; some run on several nodes."""
        job, submitted = super()._new_job(number)
        # Also of those that run for long, which are every fifth.
        nodes = {2: 2, 5: 2, 7: 3}.get(number % 10, 1)
        return msgspec.structs.replace(job, preemptible=number % 3 != 0, nodes=nodes), submitted._replace(nodes=nodes)

    def _all_jobs_are_over(self) -> bool:
        # One that needs all nodes waits for each of them.
        self._resume_nodes()
        return super()._all_jobs_are_over()

    def _wait_for_rest(self) -> None:
        """While the worker is there: it cancels what is left in Slurm."""
        # Slurm does not notice every end after a crash, neither of these.
        self._ask("scancel", "--jobname=foreign")
        self._wait(lambda: not self._cluster.active_jobs(), named="the end of every Slurm job")
        self._wait(lambda: not self._cluster.processes(), named="the end of every process on the nodes")

    def _where_it_stands(self) -> str:
        left = self._cluster.run("squeue", "--noheader", "--format=%A %T (%r) on [%N] %k").splitlines()
        return f"{super()._where_it_stands()} Slurm: {left} on nodes: {self._cluster.processes()}"

    # The faults

    def _place_of(self, planned: Planned) -> Host:
        if planned.kind in _OF_WORKER or (planned.kind in _ANYWHERE and planned.machine == 0):
            return self._machines[0]
        while True:
            nodes = [self._nodes[(planned.machine + place) % len(NODES)] for place in range(len(NODES))]
            nodes = [node for node in nodes if not node.suspended]
            if found := next((node for node in nodes if self._targets(node)), nodes[0] if nodes else None):
                return found
            self._live_for(0.1)

    def _strike(self, planned: Planned) -> None:
        command, _, how = planned.kind.partition(" ")
        if command in _COMMANDS:
            self._break_command(planned.kind, command, how, planned.amount)
        else:
            super()._strike(planned)

    def _those(self, kind: str, machine: Host) -> list[Identity]:
        if kind == "srun":
            # It has the environment of `sbatch`: nothing in it says where it runs.
            below = [pid for shim in machine.called(SUPERVISOR) for pid in children(shim.pid)]
            return [who for pid in below if (found := stat(pid)) and found.name == kind and (who := identify(pid))]
        return machine.called(kind) if kind == "slurmstepd" else super()._those(kind, machine)

    def _kill_slurmstepd(self, node: Host, _: float) -> None:
        """Of a job, or of its part on another node, whether the command has begun there or not."""
        if (victim := self._victim("slurmstepd", node)) is not None:
            # It says whose it is after its first moments.
            found = re.search(r"\[(\d+)\.", _command_line(victim.pid))
            if found is not None and send(victim, signal.SIGKILL):
                self._hit("kill slurmstepd", self._attempts_of(int(found[1])))

    def _attempts_of(self, slurm_job: int) -> list[str]:
        found = []
        for directory in (self._machines[0].home / "attempts").glob("*"):
            with contextlib.suppress(OSError):
                owner = SlurmAttemptRecord(directory).owner()
                if owner is not None and owner.slurm_job == slurm_job:
                    found.append(directory.name)
        return found

    def _kill_srun(self, node: Host, _: float) -> None:
        """Through it the first node of a job reaches the others."""
        if (victim := self._victim("srun", node)) is not None:
            attempts = re.findall(r"/attempts/([^/\s]+)", _command_line(victim.pid))
            if send(victim, signal.SIGKILL):
                self._hit("kill srun", set(attempts))

    def _kill_step(self, node: Host, _: float) -> None:
        """Supervisor, reaper and job at once, as a kernel does that is out of memory."""
        if self._victim("job", node) is None or not (running := self._targets(node)):
            return
        processes = self._random.choice(running)
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for who in processes[1:]:
                send(who, how)
        self._hit("kill step", [processes.attempt])

    # The shared file system

    def _slow_directory(self, machine: Host, amount: float) -> None:
        """Every change of a name in it takes a while."""
        delay = -int(100 + 900 * amount)
        self._inject_on(machine, "slow directory", _SLOW_RULE, Call.NAME, delay, amount)

    def _late_directory(self, machine: Host, amount: float) -> None:
        """New files are seen seconds after others have written them."""
        self._inject_on(machine, "late directory", _LATE_RULE, Call.OPEN, errno.ENOENT, amount)

    def _inject_on(self, machine: Host, kind: str, rule: int, calls: Call, error: int, amount: float) -> None:
        self._end_kind(machine, kind)
        machine.faults.inject(rule, calls, error, path=str(machine.home / "attempts"))
        self._begin(kind, machine, 3 * LONGEST_CONDITION * amount, lambda: machine.faults.withdraw(rule) > 0)

    # Commands

    def _break_command(self, kind: str, command: str, how: str, amount: float) -> None:
        self._end_kind(self._machines[0], *(one for one in SLURM_KINDS if one.startswith(f"{command} ")))
        seconds = _TOO_LONG if SLURM_LONG & self._extent.kinds and amount < 0.3 else max(1, round(8 * amount))
        file = self._site.directory / "commands" / command
        word = "once" if "once" in how else how.split(maxsplit=1)[0]
        fired = file.with_suffix(".fired")
        fired.unlink(missing_ok=True)
        file.write_text(f"{word} {seconds}\n")

        def undo() -> bool:
            file.unlink(missing_ok=True)
            return fired.exists()

        self._begin(kind, self._machines[0], 1 + _LONGEST_COMMAND_FAULT * amount, undo)

    # The controller

    def _away(self, kind: str, amount: float) -> None:
        """Until `_back`; some of the time for longer than a lease."""
        self._controller_away = True

        def back() -> bool:
            self._cluster.start_controller()
            self._controller_away = False
            return True

        self._begin(kind, None, self._duration(amount, 2 * LONGEST_CONDITION), back)

    def _kill_controller(self, _: Host, amount: float) -> None:
        if not self._controller_away:
            self._cluster.stop_controller(signal.SIGKILL)
            self._away("kill controller", amount)

    def _restart_controller(self, _: Host, amount: float) -> None:
        if not self._controller_away:
            self._cluster.stop_controller()
            self._away("restart controller", amount)

    def _stop_controller(self, _: Host, amount: float) -> None:
        if not self._controller_away:
            self._cluster.freeze_controller()
            self._away("stop controller", amount)

    def _ask(self, *command: str) -> str | None:
        """What the controller answers; None when it refuses, or is away."""
        if self._controller_away:
            return None
        with contextlib.suppress(AssertionError):
            return self._cluster.run(*command)
        return None

    # Nodes

    def _kill_slurmd(self, node: Host, amount: float) -> None:
        assert isinstance(node, _Node)
        if not self._has(node, "kill slurmd", "stop slurmd", "crash node"):
            self._cluster.stop_node(node.name, signal.SIGKILL)
            self._until_started("kill slurmd", node, self._duration(amount))

    def _stop_slurmd(self, node: Host, amount: float) -> None:
        assert isinstance(node, _Node)
        if not self._has(node, "kill slurmd", "stop slurmd", "crash node"):
            self._cluster.freeze_node(node.name)
            self._until_started("stop slurmd", node, self._duration(amount))

    def _crash_node(self, node: Host, amount: float) -> None:
        """As a loss of power. Half of the time the controller notices before the node is back."""
        assert isinstance(node, _Node)
        self._end_all(node)
        attempts = [processes.attempt for processes in node.running()]
        self._cluster.crash_node(node.name)
        self._hit("crash node", attempts)
        if amount < 0.5:
            self._ask("scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=chaos")
        self._until_started("crash node", node, self._duration(amount), counts=False)

    def _node_down(self, node: Host, amount: float) -> None:
        """The controller gives the node up, and everything on it goes on."""
        assert isinstance(node, _Node)
        attempts = [processes.attempt for processes in node.running()]
        if self._ask("scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=chaos") is None:
            return
        for attempt in attempts:
            self._touched.setdefault(attempt, []).append((journal_clock(), "node down"))
        self._begin("node down", node, self._duration(amount, 2 * LONGEST_CONDITION), lambda: True)

    def _has(self, node: Host, *kinds: str) -> bool:
        return any(one.machine is node and one.condition.kind in kinds for one in self._active)

    def _until_started(self, kind: str, node: _Node, seconds: float, *, counts: bool = True) -> None:
        def start() -> bool:
            # It asks the slurmstepd of its jobs before it listens, and a stopped one never answers.
            self._end_kind(node, "stop slurmstepd")
            self._cluster.start_node(node.name)
            return counts

        self._begin(kind, node, seconds, start)

    def _look_after(self) -> None:
        super()._look_after()
        self._resume_nodes()

    def _resume_nodes(self) -> None:
        """As an administrator does: a node that is down for no reason any more works again."""
        if self._controller_away or time.monotonic() < self._resume_at:
            return
        self._resume_at = time.monotonic() + 2.0
        answer = self._ask("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T") or ""
        for name, state in (line.split() for line in answer.splitlines()):
            node = self._nodes[NODES.index(name)]
            if node.suspended or self._has(node, "node down", "crash node", "kill slurmd", "stop slurmd"):
                continue
            if "down" in state or "drain" in state:
                self._ask("scontrol", "update", f"NodeName={name}", "State=RESUME")

    def _suspend(self, machine: Host, amount: float) -> None:
        if not self._has(machine, "kill slurmd", "stop slurmd", "crash node"):
            super()._suspend(machine, amount)

    # Slurm's own decisions

    def _requeue(self, node: Host, _: float) -> None:
        """Slurm refuses that for jobs that are not preemptible."""
        ends = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < ends:
            running = self._targets(node)
            self._random.shuffle(running)
            for processes in running:
                owner = SlurmAttemptRecord(node.home / "attempts" / processes.attempt).owner()
                if owner is not None and self._ask("scontrol", "requeue", str(owner.slurm_job)) is not None:
                    self._hit("requeue", [processes.attempt])
                    return
            self._live_for(0.2)

    def _preempt(self, node: Host, amount: float) -> None:
        """A job with the right to the whole node: those in `spare` are requeued."""
        assert isinstance(node, _Node)
        seconds = LONGEST_CONDITION * amount
        words = (
            f"--nodelist={node.name}",
            "--partition=main",
            "--exclusive",
            "--output=/dev/null",
            "--job-name=foreign",
        )
        answer = self._ask("sbatch", "--parsable", *words, f"--wrap=sleep {seconds:.1f}")
        if answer is None:
            return

        def over() -> bool:
            # It may have to wait for jobs in its own partition: then it preempts nobody after this.
            self._end_kind(None, "kill controller", "restart controller", "stop controller")
            self._ask("scancel", answer.strip())
            return True

        self._begin("preempt", node, 2 + seconds, over)
