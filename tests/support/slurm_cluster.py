"""A real, private Slurm cluster for the tests: one controller and three nodes with two simulated GPUs each.

`python -m tests.support.slurm_cluster` starts the same cluster by hand.
"""

import contextlib
import fcntl
import os
import random
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

import pytest

from stoker.procfs import stat as read_stat
from stoker.runs.processes.tree import children
from tests.support.compiled import compiled
from tests.support.waiting import kill_all, wait_for

NODES = ("node1", "node2", "node3")
# Held for as long as the cluster is needed.
LOCK = "in-use"
# Below the ports that the kernel gives to clients.
PORTS = range(10_000, 32_000)
# Seconds, on a machine that runs other tests at the same time.
PATIENCE = 60.0
# In the environment of everything that runs on a node.
TAG = "TEST_CLUSTER_NODE"
# Character devices that everybody has: Slurm accepts nothing else as a GPU.
STAND_INS = ("/dev/null", "/dev/zero")

PARAMETERS: Mapping[str, object] = {
    "AuthType": "auth/none",
    "CredType": "cred/none",
    "AuthInfo": "cred_expire=5",  # else a requeued job waits for two minutes
    "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "SwitchType": "switch/none",
    "MpiDefault": "none",
    "ReturnToService": 2,
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "SlurmdParameters": "config_overrides",  # a node has more CPUs and memory than this machine
    "DefMemPerCPU": 100,
    "GresTypes": "gpu",
    "AccountingStorageType": "accounting_storage/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "KillWait": 5,
    "MinJobAge": 300,
    "SlurmdTimeout": 300,
}
PARTITIONS = (
    "PartitionName=main Nodes=ALL Default=YES PriorityTier=10 State=UP PreemptMode=off",
    "PartitionName=spare Nodes=ALL PriorityTier=1 State=UP",
)


class SlurmCluster:
    """Jobs in `spare` are preempted, by requeueing, when a job in `main` needs their node."""

    def __init__(
        self, parameters: Mapping[str, object] | None = None, partitions: Sequence[str] = (), cpus: int = 8
    ) -> None:
        """Parameters of slurm.conf beside or instead of PARAMETERS; lines with further partitions; CPUs of a node."""
        self.directory, self._ours, self._port = _new_directory()
        self._own = (dict(parameters or {}), tuple(partitions))
        self._cpus = cpus
        self._changed = False
        self._reset_at = 0.0
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def name(self) -> str:
        """In slurm.conf: several may run on this machine."""
        return f"test{self._port}"

    @property
    def configuration(self) -> Path:
        """What SLURM_CONF names."""
        return self.directory / "slurm.conf"

    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find this cluster."""
        return {"SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        for directory in ("state", "dev", "machines", *(f"spool.{node}" for node in NODES)):
            (self.directory / directory).mkdir()
        self.simulate("2")
        self._write_prolog()
        self._write_gpus()
        # An empty file would be refused.
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        self._write_configuration(*self._own)
        # A node that cannot register tries again a second later.
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_until_ready()

    def stop(self) -> None:
        """The end of everything that runs on it, at once."""
        for name in list(self._daemons):
            self._end(name, signal.SIGKILL)
        _remove(self.directory)
        self._ours.close()

    def configure(self, partitions: Sequence[str] = (), **parameters: object) -> None:
        """Changes parameters of slurm.conf, or adds partitions, until the end of the test."""
        self._changed = True
        self._write_configuration({**self._own[0], **parameters}, (*self._own[1], *partitions))
        self.run("scontrol", "reconfigure")

    def simulate(self, gpus: str) -> None:
        """The GPUs that jobs find on each node, as in `sim:GPUS`; two are what Slurm knows about."""
        (self.directory / "gpus").write_text(gpus)

    def export(self, node: str, variables: Mapping[str, str]) -> None:
        """Variables of all that jobs start on this node from now on."""
        lines = [f"export {name}={value}\n" for name, value in variables.items()]
        (self.directory / f"environment.{node}").write_text("".join(lines))

    def machine(self, node: str) -> Path:
        """The directory of the node's simulated GPUs."""
        return self.directory / "machines" / node

    # The daemons, as they fail.

    def stop_controller(self, how: signal.Signals = signal.SIGTERM) -> None:
        self._end("slurmctld", how)

    def start_controller(self) -> None:
        """Nothing happens when it runs; a frozen one goes on."""
        is_restart = "slurmctld" not in self._daemons and (self.directory / "state" / "node_state").exists()
        self._launch("slurmctld", "slurmctld", "-D")
        wait_for(self._controller_answers, deadline=PATIENCE, named=f"slurmctld's start ({self.directory}/ctld.log)")
        if is_restart:
            self._cancel_jobs_of_earlier_tests()
            # The nodes register now instead of seconds later.
            self.run("scontrol", "reconfigure")

    def freeze_controller(self) -> None:
        """It accepts connections and answers nothing until `start_controller`."""
        self._daemons["slurmctld"].send_signal(signal.SIGSTOP)

    def stop_node(self, node: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Only slurmd: jobs on the node go on."""
        self._end(node, how)

    def start_node(self, node: str, hidden: Path | None = None, slow_kill: int = 0) -> None:
        """Nothing happens when it runs; a frozen one goes on. What is `hidden` is an empty directory there.

        `slow_kill`: milliseconds between the signals to two processes of a job.
        """
        command: tuple[str, ...] = ("slurmd", "-D", "-N", node)
        if slow_kill:
            library = compiled("slow_kill", "-shared", "-fPIC")
            command = ("env", f"LD_PRELOAD={library}", f"SLOW_KILL={slow_kill}", *command)
        if hidden is not None:
            hide = f"mount -t tmpfs none {shlex.quote(str(hidden))} && exec {shlex.join(command)}"
            command = ("unshare", "--mount", "sh", "-c", hide)
        self._launch(node, *command)
        # It does not survive a change of its configuration while it starts.
        port = self._port + 1 + NODES.index(node)
        wait_for(lambda: self._has_died(node) or _listens(port), named=f"the start of {node} ({self.directory})")

    def freeze_node(self, node: str) -> None:
        """Its slurmd answers nothing until `start_node`; jobs on the node go on."""
        self._daemons[node].send_signal(signal.SIGSTOP)

    def crash_node(self, node: str) -> None:
        """As a loss of power: slurmd and everything on the node are gone."""
        self._end(node, signal.SIGKILL)
        kill_all(lambda: self.processes(node))

    def wait_until_ready(self) -> None:
        """Until the controller answers and no node is down or busy."""
        wait_for(self._is_ready, deadline=PATIENCE, named=f"a cluster with {len(NODES)} idle nodes ({self.directory})")

    # What runs on it.

    def run(self, *command: str, script: str = "") -> str:
        """What one of Slurm's commands prints."""
        done = self._try(*command, script=script)
        assert done.returncode == 0, f"{shlex.join(command)} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def submit(self, *options: str, script: str) -> int:
        """The id of a new batch job; its output goes to `output(id)` unless the options say otherwise."""
        output = f"--output={self.directory}/output.%j"
        body = script if script.startswith("#!") else f"#!/bin/sh\n{script}\n"
        return int(self.run("sbatch", "--parsable", output, *options, script=body).split(";")[0])

    def output(self, job: int) -> str:
        path = self.directory / f"output.{job}"
        return path.read_text() if path.exists() else ""

    def details(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job` that have no space in them."""
        words = self.run("scontrol", "-o", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: int) -> str:
        return self.details(job)["JobState"]

    def wait_for_state(self, job: int, *states: str, deadline: float = PATIENCE) -> str:
        wait_for(lambda: self.state(job) in states, deadline=deadline, named=f"{' or '.join(states)} of job {job}")
        return self.state(job)

    def active_jobs(self) -> list[int]:
        """Those that wait, run or are about to end."""
        return [int(line) for line in self.run("squeue", "--noheader", "--format=%A").split()]

    def processes(self, node: str | None = None) -> list[int]:
        """The slurmstepd, the jobs' processes and their descendants, on this node or on all nodes."""
        daemons = {daemon.pid for daemon in self._daemons.values()}
        return _tagged_processes(self.directory, (node,) if node else NODES, exclude=daemons)

    def reset(self, patience: float = 10.0) -> list[str]:
        """Brings it back to its first state; returns what had been left on it, in sentences.

        `patience` is for jobs that are ending, and for the processes of those that have ended.
        """
        for name in self._daemons:
            self._daemons[name].send_signal(signal.SIGCONT)
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        left = []
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.active_jobs(), deadline=patience)
        if jobs := self.active_jobs():
            left = self.run("squeue", "--noheader", "--format=Slurm job %A (%j) is %T (%r) on [%N]").splitlines()
            names = [str(job) for job in jobs]
            self._try("scancel", "--full", "--signal=KILL", *names)
            self._try("scancel", *names)
            wait_for(lambda: not self.active_jobs(), deadline=PATIENCE, named="the end of cancelled jobs")
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.processes(), deadline=patience)
        if processes := self.processes():
            left += [f"process {pid} ({_command_line(pid)}) runs on" for pid in processes]
            kill_all(self.processes)
        if self._changed:
            self._write_configuration(*self._own)
            self.run("scontrol", "reconfigure")
            self._changed = False
        self.simulate("2")
        for variables in self.directory.glob("environment.*"):
            variables.unlink()
        for machine in (self.directory / "machines").iterdir():
            shutil.rmtree(machine, ignore_errors=True)
        self.wait_until_ready()
        self._reset_at = time.time()
        return left

    # How it is done.

    def _launch(self, name: str, *command: str) -> None:
        if name in self._daemons and not self._has_died(name):
            self._daemons[name].send_signal(signal.SIGCONT)
            return
        # A node knows its jobs by their processes; the person's own settings stay outside.
        environment = {"PATH": _search_path(), "LANG": "C.UTF-8", **self.environment()}
        if name in NODES:
            environment[TAG] = f"{self.directory}/{name}"
        with (self.directory / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _has_died(self, name: str) -> bool:
        return self._daemons[name].poll() is not None

    def _end(self, name: str, how: signal.Signals) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            daemon.send_signal(signal.SIGCONT)
            daemon.send_signal(how)
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:  # slurmd loses a SIGTERM that arrives while it reads its configuration
                daemon.kill()
                daemon.wait(timeout=PATIENCE)

    def _cancel_jobs_of_earlier_tests(self) -> None:
        """A controller that was killed has forgotten its last five seconds: finished jobs are pending again."""
        for line in self.run("squeue", "--noheader", "--format=%A %V").splitlines():
            job, submitted = line.split()
            # Slurm tells whole seconds: a job of this test may carry the second of the reset.
            if datetime.fromisoformat(submitted).timestamp() < int(self._reset_at):
                self._try("scancel", job)

    def _try(self, *command: str, script: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            input=script,
            # A test may have set what Slurm's commands print and list.
            env={name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
            | self.environment(),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def _controller_answers(self) -> bool:
        return self._try("scontrol", "ping").returncode == 0

    def _is_ready(self) -> bool:
        for name, daemon in self._daemons.items():
            log = self.directory / f"{name}.out"
            assert daemon.poll() is None, f"{name} has died: {log.read_text() or f'see {self.directory}'}"
        return self._try("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").stdout.split() == (
            ["idle"] * len(NODES)
        )

    def _write_configuration(self, parameters: Mapping[str, object], partitions: Sequence[str]) -> None:
        directory, host, user = self.directory, socket.gethostname().partition(".")[0], os.geteuid()
        places = {
            "ClusterName": self.name,
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": self._port,
            "SlurmUser": user,
            "SlurmdUser": user,
            "StateSaveLocation": f"{directory}/state",
            "SlurmdSpoolDir": f"{directory}/spool.%n",
            "SlurmctldPidFile": f"{directory}/ctld.pid",
            "SlurmdPidFile": f"{directory}/slurmd.%n.pid",
            "SlurmctldLogFile": f"{directory}/ctld.log",
            "SlurmdLogFile": f"{directory}/slurmd.%n.log",
            "TaskProlog": f"{directory}/task-prolog",
        }
        node = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={self._cpus} RealMemory=16000"
        first = self._port + 1
        lines = [
            *(f"{name}={value}" for name, value in {**places, **PARAMETERS, **parameters}.items()),
            f"NodeName=node[1-2] {node} Port=[{first}-{first + 1}] Gres=gpu:a100:2 Feature=a100,nvlink",
            f"NodeName=node3 {node} Port={first + 2} Gres=gpu:h100:2 Feature=h100",
            *PARTITIONS,
            *partitions,
        ]
        # A daemon that starts now must not read half of it.
        new = self.directory / "slurm.conf.new"
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.configuration)

    def _write_prolog(self) -> None:
        """Runs before each task; what it prints becomes the task's environment."""
        prolog = self.directory / "task-prolog"
        directory = shlex.quote(str(self.directory))
        prolog.write_text(
            "#!/bin/sh\n"
            f'echo "export STOKER_GPUS=sim:$(cat {directory}/gpus)@{directory}/machines/$SLURMD_NODENAME"\n'
            f'echo "export {TAG}={directory}/$SLURMD_NODENAME"\n'
            f"cat {directory}/environment.$SLURMD_NODENAME 2>/dev/null || true\n"
        )
        prolog.chmod(0o755)

    def _write_gpus(self) -> None:
        devices = [str(self.directory / "dev" / f"nvidia{index}") for index in range(2)]
        try:
            for device in devices:
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            devices = list(STAND_INS)
        lines = [
            f"NodeName={nodes} Name=gpu Type={model} File={device} Flags=nvidia_gpu_env\n"
            for nodes, model in (("node[1-2]", "a100"), ("node3", "h100"))
            for device in devices
        ]
        (self.directory / "gres.conf").write_text("".join(lines))


def _new_directory() -> tuple[Path, IO[bytes], int]:
    """With its lock, and the first of the ports that are the cluster's by the directory's name.

    Removes those first, with all that runs in them, that test runs have left which were killed.
    """
    place = Path(tempfile.gettempdir())
    for lock in place.glob(f"stoker-slurm-*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as somebodys:
            fcntl.flock(somebodys, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock.parent)
    made = Path(tempfile.mkdtemp(prefix="new-stoker-slurm-", dir=place))
    made.chmod(0o755)
    ours = (made / LOCK).open("wb")
    fcntl.flock(ours, fcntl.LOCK_EX)
    while True:
        port = random.choice(PORTS[:: len(NODES) + 1])
        if all(_is_free(port + offset) for offset in range(len(NODES) + 1)):
            with contextlib.suppress(OSError):
                return made.rename(place / f"stoker-slurm-{port}"), ours, port


def _remove(directory: Path) -> None:
    kill_all(lambda: _tagged_processes(directory, NODES))
    shutil.rmtree(directory, ignore_errors=True)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _tagged_processes(directory: Path, nodes: Sequence[str], exclude: Collection[int] = ()) -> list[int]:
    tags = {f"{TAG}={directory}/{node}".encode() for node in nodes}
    found: set[int] = set()
    fresh = [int(path.name) for path in Path("/proc").glob("[0-9]*") if tags & set(_environment(path))]
    while fresh:
        found.update(fresh)
        fresh = [child for pid in fresh for child in children(pid) if child not in found]
    return sorted(pid for pid in found.difference(exclude) if (seen := read_stat(pid)) and not seen.is_zombie)


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "gone"


def _missing() -> str | None:
    commands = ("slurmctld", "slurmd", "sbatch")
    return next((command for command in commands if shutil.which(command, path=_search_path()) is None), None)


def _search_path() -> str:
    """Debian keeps the daemons where only root looks."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@contextlib.contextmanager
def running_cluster(
    parameters: Mapping[str, object] | None = None, partitions: Sequence[str] = (), cpus: int = 8
) -> Iterator[SlurmCluster]:
    """A cluster for one test, for what `configure` cannot change."""
    cluster = SlurmCluster(parameters, partitions, cpus)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Started when the first test needs it; each of the test runner's processes has one."""
    if command := _missing():
        if os.environ.get("CI"):
            pytest.fail(f"{command} is missing, and under CI nothing is skipped for that")
        pytest.skip(f"{command} (Debian's package slurm-wlm) is missing: `make test` installs it where it may")
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster that Slurm's commands in this test find. Fails a test that leaves a job or a process on it."""
    for name, value in slurm_cluster.environment().items():
        monkeypatch.setenv(name, value)
    yield slurm_cluster
    left = slurm_cluster.reset()
    assert not left, "; ".join(left)


def main() -> None:
    if command := _missing():
        raise SystemExit(f"{command} was not found: install Debian's packages slurm-wlm and slurm-client")
    # As Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), running_cluster() as cluster:
        for name, value in cluster.environment().items():
            print(f"export {name}={shlex.quote(value)}", flush=True)  # noqa: T201
        signal.pause()


if __name__ == "__main__":
    main()
