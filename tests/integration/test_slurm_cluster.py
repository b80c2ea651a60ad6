"""The tests' own Slurm cluster: its GPUs, preemption, and the return to its first state."""

import signal

from tests.support.slurm_cluster import NODES, SlurmCluster
from tests.support.waiting import wait_for


def test_every_node_has_two_simulated_gpus(cluster: SlurmCluster) -> None:
    script = 'echo "$CUDA_VISIBLE_DEVICES $STOKER_GPUS"'
    jobs = [cluster.submit(f"--nodelist={node}", "--gres=gpu:2", script=script) for node in NODES]
    for job, node in zip(jobs, NODES, strict=True):
        cluster.wait_for_state(job, "COMPLETED")
        assert cluster.output(job) == f"0,1 sim:2@{cluster.machine(node)}\n"


def test_leftovers_are_reported_and_removed(cluster: SlurmCluster) -> None:
    job = cluster.submit("--job-name=left-behind", script="(setsid sleep 1000 &); exec sleep 1000")
    wait_for(lambda: len(cluster.processes("node1")) == 3)
    left = cluster.reset(patience=0.5)
    assert left[0] == f"Slurm job {job} (left-behind) is RUNNING (None) on [node1]"
    assert left[1].endswith("(sleep 1000) runs on")
    assert cluster.processes() == []


def test_daemons_and_parameters_are_back_after_a_reset(cluster: SlurmCluster) -> None:
    cluster.configure(MinJobAge=2, partitions=["PartitionName=short Nodes=node1 MaxTime=1"])
    assert "short" in cluster.run("sinfo")
    cluster.stop_controller(signal.SIGKILL)
    cluster.crash_node("node1")
    cluster.stop_node("node2")
    cluster.freeze_node("node3")
    assert cluster.reset() == []
    assert "short" not in cluster.run("sinfo")
    job = cluster.submit("--nodes=3", script="true")
    cluster.wait_for_state(job, "COMPLETED")
