"""`stoker watch --slurm` on a real cluster: who is warned, what is cancelled, and what is left alone."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import stoker, stoker_command
from tests.support.mailbox import Mailbox, text_of
from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import wait_for

AGENT = "stoker.engines.slurm.watch.agent"
IDLE = "exec sleep 1000"
# Windows of seconds instead of half an hour.
SHORT = ("--for=4s", "--unused-for=4s", "--after=0", "--every=500ms")
BUSY = f"exec {stoker_command()} sim load --gpu 0 --utilization 90%"


class Watch:
    """A `stoker watch --slurm` that runs beside the test."""

    def __init__(self, home: Path, *options: str) -> None:
        self._log = home / "watch.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [stoker_command(), "watch", "--slurm", *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str, deadline: float = 90.0) -> None:
        with contextlib.suppress(AssertionError):
            wait_for(lambda: text in self.said or self._process.poll() is not None, deadline=deadline, named=text)
        assert text in self.said, f"not said: {text!r}, but: {self.said}"

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("STOKER_CONFIG", str(tmp_path / "stoker.toml"))
    monkeypatch.delenv("STOKER_GPUS", raising=False)
    configure(tmp_path, 'notice = "3s"')
    return tmp_path


def configure(home: Path, *lines: str) -> None:
    path = home / "stoker.toml"
    path.write_text("\n".join(["[slurm-watch]", *lines]) + "\n")
    path.chmod(0o600)


@contextlib.contextmanager
def watching(home: Path, cluster: SlurmCluster, *options: str) -> Iterator[Watch]:
    """Nothing of it is left in the jobs afterwards."""
    watch = Watch(home, *SHORT, *options)
    try:
        yield watch
    finally:
        watch.stop()
        cluster.start_controller()
        wait_for(lambda: not agents(cluster), named="the end of the agents")


def agents(cluster: SlurmCluster, node: str | None = None) -> list[int]:
    found = []
    for pid in cluster.processes(node):
        with contextlib.suppress(OSError):
            if AGENT.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def cancel(cluster: SlurmCluster, *jobs: int) -> None:
    cluster.run("scancel", *map(str, jobs))
    for job in jobs:
        cluster.wait_for_state(job, "CANCELLED")


def is_running(cluster: SlurmCluster, *jobs: int) -> bool:
    return all(cluster.state(job) == "RUNNING" for job in jobs)


def test_idle_job_is_cancelled_after_two_mails_and_others_are_left_alone(cluster: SlurmCluster, home: Path) -> None:
    with Mailbox().open() as mailbox:
        configure(
            home,
            f'owner = "mailto://localhost:{mailbox.port}/?from=stoker@example.org&to={{user}}@example.org"',
            'notice = "3s"',
            "[[slurm-watch.exempt]]",
            'names = ["debug*"]',
        )
        idle = cluster.submit("--nodes=2", "--gres=gpu:1", "--job-name=forgotten", script=IDLE)
        cluster.wait_for_state(idle, "RUNNING")
        kept = cluster.submit("--gres=gpu:1", "--comment=stoker: keep until 2099-01-01", script=IDLE)
        busy = cluster.submit("--gres=gpu:1", script=BUSY)
        exempt = cluster.submit("--gres=gpu:1", "--job-name=debug-7", script=IDLE)
        supervised = cluster.submit("--gres=gpu:1", script=f"exec {stoker_command()} run --for 1h -- sleep 1000")
        others = (kept, busy, exempt, supervised)
        for job in others:
            cluster.wait_for_state(job, "RUNNING")
        with watching(home, cluster, "--stop", "--all-users") as watch:
            cluster.wait_for_state(idle, "CANCELLED")
            watch.wait_for(f"job {idle} (forgotten) of {os.environ.get('USER', 'root')} was cancelled")
            for job, why in ((kept, "its owner keeps it"), (exempt, "it is exempt"), (supervised, "a 'stoker run'")):
                watch.wait_for(f"job {job} (")
                assert any(f"job {job} (" in line and why in line for line in watch.said.splitlines()), watch.said
            assert is_running(cluster, *others)
        comment = cluster.run("scontrol", "-o", "show", "job", str(idle))
        assert "Comment=stoker cancelled it: GPU 0 of node" in comment
        assert "stayed below 1% for 4s" in comment
        cancel(cluster, *others)
        mails = [mail for mail in mailbox.mails if f"job {idle} " in text_of(mail)]
        assert len(mails) == 2
        assert all(f"Slurm job {idle} (forgotten) does not use its GPUs" in str(mail["Subject"]) for mail in mails)
        assert f'scontrol update jobid={idle} comment="stoker: keep until' in text_of(mails[0])
    [row] = stoker("watch", "--slurm", "--table", "--json").json()
    assert (row["jobs"], row["warnings"], row["stops"]) == (5, 2, 1)
    assert row["wasted"] > 0
    assert row["user"] in stoker("watch", "--slurm", "--table").out


def test_dry_run_cancels_and_sends_nothing(cluster: SlurmCluster, home: Path) -> None:
    idle = cluster.submit("--gres=gpu:2", script=IDLE)
    with watching(home, cluster) as watch:
        watch.wait_for("would be warned (2 of 2)")
        watch.wait_for("dry run: would cancel the job now")
        assert is_running(cluster, idle)
    assert watch.stop() == 128 + signal.SIGTERM
    assert is_running(cluster, idle)
    cancel(cluster, idle)


def test_no_job_is_cancelled_while_the_controller_is_unreachable(cluster: SlurmCluster, home: Path) -> None:
    configure(home, 'notice = "10s"')
    idle = cluster.submit("--gres=gpu:1", script=IDLE)
    with watching(home, cluster, "--stop") as watch:
        watch.wait_for("was warned (1 of 2)")
        cluster.stop_controller()
        watch.wait_for("Slurm cannot be asked for its jobs, so nothing is decided")
        # The window, the notice, and the time that the last list is believed are over.
        with contextlib.suppress(AssertionError):
            wait_for(lambda: "cancelled:" in watch.said, deadline=12)
        assert "was cancelled" not in watch.said
        assert watch.said.count("Slurm cannot be asked") == 1
        cluster.start_controller()
        watch.wait_for("Slurm answers again")
        cluster.wait_for_state(idle, "CANCELLED")


def test_job_whose_node_is_silent_is_unknown(cluster: SlurmCluster, home: Path) -> None:
    idle = cluster.submit("--nodes=2", "--gres=gpu:1", script=IDLE)
    with watching(home, cluster, "--stop") as watch:
        wait_for(lambda: len(agents(cluster)) == 2, named="an agent on each node")
        watch.wait_for("was warned (1 of 2)")
        [node] = [node for node in ("node1", "node2", "node3") if agents(cluster, node)][:1]
        for pid in agents(cluster, node):
            os.kill(pid, signal.SIGSTOP)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: "was cancelled" in watch.said, deadline=12)
        assert is_running(cluster, idle)
        for pid in agents(cluster, node):
            os.kill(pid, signal.SIGCONT)
        cluster.wait_for_state(idle, "CANCELLED")


def test_step_that_is_killed_is_reported_and_started_again(cluster: SlurmCluster, home: Path) -> None:
    idle = cluster.submit("--gres=gpu:1", script=IDLE)
    with watching(home, cluster) as watch:
        [first] = wait_for(lambda: agents(cluster), named="an agent")
        os.kill(first, signal.SIGKILL)
        watch.wait_for(f"job {idle} (sbatch) of root is unknown: the step beside the job has ended")
        wait_for(lambda: [pid for pid in agents(cluster) if pid != first], named="another agent")
    assert is_running(cluster, idle)
    cancel(cluster, idle)


def test_agents_end_when_the_watcher_is_killed(cluster: SlurmCluster, home: Path) -> None:
    idle = cluster.submit("--nodes=2", "--gres=gpu:1", script=IDLE)
    watch = Watch(home, *SHORT)
    wait_for(lambda: len(agents(cluster)) == 2, named="an agent on each node")
    watch._process.kill()
    watch.stop()
    wait_for(lambda: not agents(cluster), named="the end of the agents")
    assert is_running(cluster, idle)
    cancel(cluster, idle)


def test_warnings_are_remembered_over_a_restart(cluster: SlurmCluster, home: Path) -> None:
    configure(home, 'notice = "12s"')
    idle = cluster.submit("--gres=gpu:1", script=IDLE)
    with watching(home, cluster, "--stop") as watch:
        watch.wait_for("was warned (1 of 2)")
    with watching(home, cluster, "--stop") as watch:
        cluster.wait_for_state(idle, "CANCELLED")
        watch.wait_for("was cancelled")
    assert watch.said.count("was warned (1 of 2)") == 1
    assert watch.said.count("was warned (2 of 2)") == 1


def is_readable_by_nobody() -> bool:
    try:
        return subprocess.run([sys.executable, "-c", "import stoker"], user="nobody", check=False).returncode == 0
    except PermissionError:
        return False


def test_owner_of_another_account_is_watched_by_root(cluster: SlurmCluster, home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root watches other users' jobs")
    job = cluster.submit(
        "--gres=gpu:1", "--uid=nobody", "--gid=nogroup", "--output=/dev/null", "--chdir=/", script=IDLE
    )
    with watching(home, cluster, "--all-users") as watch:
        # The owner must be able to read Stoker's files, as on a cluster.
        watch.wait_for("nobody would be warned (1 of 2)" if is_readable_by_nobody() else "Permission denied")
        assert is_running(cluster, job)
    cancel(cluster, job)


def test_machine_without_slurm_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    refused = stoker("watch", "--slurm")
    assert refused.code == 2
    assert refused.err == "stoker: there are no Slurm commands here: squeue was not found in PATH\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stop",), "--stop needs --slurm"),
        (("--slurm", "--since", "2d"), "--since needs --slurm --table"),
        (("--slurm", "--then", "shutdown"), "--slurm and --then exclude each other: use --warn or --stop"),
        (("--slurm", "--all-users", "--stop"), "owners cannot be warned: set owner in [slurm-watch] of stoker.toml"),
    ],
)
def test_bad_options_are_refused(home: Path, options: tuple[str, ...], message: str) -> None:
    assert home.exists()
    refused = stoker("watch", *options)
    assert refused.code == 2
    assert message in refused.err


def test_bad_exemption_is_refused(cluster: SlurmCluster, home: Path) -> None:
    assert cluster.configuration.exists()
    configure(home, "[[slurm-watch.exempt]]", 'hours = "9-10"')
    refused = stoker("watch", "--slurm")
    assert refused.code == 2
    assert "[[slurm-watch.exempt]] number 1: '9-10' is not a time of day" in refused.err
