"""Slurm's commands on a real cluster."""

import os
import select
import signal
import threading
import time
from pathlib import Path

import pytest

from stoker.engines.slurm import client
from stoker.engines.slurm.client import Running, SlurmProblem, SlurmRefusal
from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import wait_for

ODD = "stoker:k:a1 |,;\x1f\t\"'ü%j\\n\nsecond line"


def submit(cluster: SlurmCluster, *options: str, script: str = "exec sleep 100") -> int:
    words = ["--parsable", f"--output={cluster.directory}/output.%j", *options]
    return client.submitted_id(client.sbatch(words, f"#!/bin/sh\n{script}\n").result())


def test_jobs_with_odd_names_and_comments_are_listed(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    before = time.time()
    job = submit(cluster, f"--comment={ODD}", "--job-name=a | b\nc", "--gres=gpu:2", "--time=10")
    held = submit(cluster, "--hold", "--comment=stoker:k:a2")
    cluster.wait_for_state(job, "RUNNING")
    for command in (client.own_jobs(), client.all_jobs()):
        found = {one.id: one for one in client.parse_jobs(command.result())}
        assert (found[job].state, found[job].comment, found[job].name) == ("RUNNING", ODD, "a | b\nc")
        assert (found[job].nodes, found[job].partition, client.gpus_in(found[job].gres)) == ("node1", "main", 2)
        assert before - 1 <= (found[job].start or 0.0) <= time.time()
        assert found[job].time_limit == 600.0
        assert (found[held].state, found[held].reason, found[held].start) == ("PENDING", "JobHeldUser", None)
    assert "IDX:0-1" in client.parse_fields(client.job_details(job).result())["GRES"]
    client.scancel([job, held]).result()
    cluster.wait_for_state(job, "CANCELLED")
    # One that has ended, and one that never was, are no mistake.
    client.scancel([job, 999_999]).result()
    states = {one.id: one.state for one in client.parse_jobs(client.own_jobs().result())}
    assert states[job] == states[held] == "CANCELLED"


def test_comment_of_a_running_job_can_be_changed(cluster: SlurmCluster) -> None:
    job = submit(cluster, "--comment=before")
    cluster.wait_for_state(job, "RUNNING")
    client.set_comment(job, "idle for 30 minutes").result()
    (comment,) = [one.comment for one in client.parse_jobs(client.own_jobs().result()) if one.id == job]
    assert comment == "idle for 30 minutes"
    client.scancel([job]).result()
    cluster.wait_for_state(job, "CANCELLED")


def test_nodes_partitions_and_settings(cluster: SlurmCluster) -> None:
    cluster.run("scontrol", "update", "node=node2", "state=drain", "reason=a bad fan")
    job = submit(cluster, "--gres=gpu:1")
    cluster.wait_for_state(job, "RUNNING")
    node1, node2, node3 = client.parse_nodes(client.nodes().result())
    assert (node1.state, node1.available, node1.gpus, node1.gpus_allocated) == ("mixed", True, 2, 1)
    assert (node2.state, node2.available, node2.reason, node2.gpus_allocated) == ("drained", False, "a bad fan", 0)
    assert (node3.gpu_model, node3.partitions, node3.cpus) == ("h100", ("main", "spare"), 8)
    main, spare = client.parse_partitions(client.partitions().result())
    assert (main.name, main.default, main.up, main.nodes) == ("main", True, True, "node[1-3]")
    assert (spare.name, spare.default) == ("spare", False)
    assert client.parse_config(client.config().result()).kill_wait == 5.0
    assert client.parse_version(client.version().result()) >= (20, 11)
    cluster.run("scontrol", "update", "node=node2", "state=resume")
    client.scancel([job]).result()
    cluster.wait_for_state(job, "CANCELLED")


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--partition=nope", "Slurm has no such partition as 'nope'"),
        ("--gres=gpu:9", "no node of the partition has the GPUs, CPUs and memory that the job asks for"),
        ("--gres=gpu:rtx:1", "no node of the partition has the GPUs"),
        ("--mem=999G", "no node of the partition has the GPUs, CPUs and memory"),
        ("--constraint=nope", "no node has the features that the constraint names"),
        ("--reservation=nope", "Slurm has no such reservation"),
        ("--time=soon", "Invalid --time specification"),
        ("--no-such-option", "unrecognized option '--no-such-option'"),
    ],
)
def test_impossible_jobs_are_refused(cluster: SlurmCluster, option: str, sentence: str) -> None:
    with pytest.raises(SlurmRefusal) as refusal:
        submit(cluster, option)
    assert sentence in refusal.value.sentence


def test_partition_limits_are_refused_where_slurm_enforces_them(cluster: SlurmCluster) -> None:
    cluster.configure(
        EnforcePartLimits="ALL",
        partitions=[
            "PartitionName=physics Nodes=ALL AllowAccounts=physics",
            "PartitionName=short Nodes=ALL MaxTime=1",
        ],
    )
    for options, sentence in (
        (("--partition=physics", "--account=biology"), "this user may not use that account"),
        (("--partition=short", "--time=10"), "the time limit is missing, or longer than the partition allows"),
        (("--cpus-per-task=99",), "no node has as many CPUs as the job asks for"),
        (("--nodes=9",), "the partition does not allow this number of nodes"),
    ):
        with pytest.raises(SlurmRefusal) as refusal:
            submit(cluster, *options)
        assert sentence in refusal.value.sentence


def test_unreachable_controller_is_reported_by_every_command(cluster: SlurmCluster) -> None:
    cluster.configure(MessageTimeout=2)  # after which they give up
    cluster.stop_controller()
    commands = [
        client.own_jobs(),
        client.nodes(),
        client.partitions(),
        client.config(),
        client.sbatch(["--parsable"], "#!/bin/sh\n"),
        client.scancel([1]),
    ]
    for command in commands:
        with pytest.raises(SlurmProblem, match="Unable to contact slurm controller"):
            command.result()


def test_command_that_does_not_end_is_killed_at_its_deadline(cluster: SlurmCluster) -> None:
    cluster.freeze_controller()
    started = time.monotonic()
    command = Running(["squeue"], deadline=0.5)
    assert started + 0.5 <= command.due() <= time.monotonic() + 0.5
    assert not command.has_ended()
    with pytest.raises(SlurmProblem, match=r"squeue did not end within 0\.5 s"):
        command.result()


def test_descriptor_is_readable_when_the_command_has_ended(cluster: SlurmCluster) -> None:
    cluster.freeze_controller()
    command = client.own_jobs()
    assert select.select([command], [], [], 0.1)[0] == []
    cluster.start_controller()
    assert select.select([command], [], [], 30)[0] == [command]
    wait_for(command.has_ended)
    client.parse_jobs(command.result())


def test_killed_command_leaves_no_processes(cluster: SlurmCluster) -> None:
    cluster.freeze_controller()
    before = set(Path("/proc/self/fd").iterdir())
    commands = [client.own_jobs() for _ in range(3)]
    for command in commands:
        command.kill()
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_missing_commands_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = client.sbatch([], "")
    assert select.select([command], [], [], 0)[0] == [command]
    assert command.has_ended()
    with pytest.raises(SlurmProblem, match=r"^there are no Slurm commands here: sbatch was not found in PATH$"):
        command.result()


def test_end_that_is_not_known_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(SlurmProblem, match="it is not known how squeue ended"):
            client.own_jobs().result()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_killed_command_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\necho part\nkill -9 $$\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SlurmProblem, match="squeue was ended by signal 9"):
        client.own_jobs().result()
