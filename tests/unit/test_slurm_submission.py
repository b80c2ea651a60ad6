"""The arguments of `sbatch` for a job."""

import shlex
import subprocess
import sys
from typing import Any

import pytest

from stoker.engines.slurm import check
from stoker.engines.slurm.submission import (
    SubmissionOptions,
    WhereItRuns,
    arguments,
    attempt_of,
    comment_of,
    partition_of,
    script,
    shim_command,
)
from stoker.errors import InvalidFieldsError
from stoker.queue import Job, JobSpec
from stoker.queue.model import ClusterNode, View


def words(options: SubmissionOptions | None = None, where: WhereItRuns | None = None, **fields: Any) -> list[str]:
    given: dict[str, Any] = {"command": "true", "id": "0123abcd", "state": "queued", "position": 0.0, "submitted": 0.0}
    job = Job(
        **(given | fields),
        started=None, ended=None, not_before=0.0, retries_left=0, attempts=0, attempt=None, exit_code=None, reason="",
        link="", cancel_requested=None,
    )  # fmt: skip
    return arguments(job, options or SubmissionOptions(), "stoker:key:a1", "/shared/at 100%", 30.0, "", where)


def test_fields_of_a_job_become_options() -> None:
    found = words(gpus=2, gpu_model="a100", cpus=8, ram=3 * 2**30 + 1, time_limit=3600.0, name="my run!")
    for word in (
        "--gres=gpu:a100:2", "--cpus-per-task=8", "--mem=3073M", "--job-name=stoker-my-run-0123abcd", "--no-requeue",
        "--comment=stoker:key:a1", "--output=/shared/at 100%%/slurm.out", "--nice=0",
        "--time=62",  # the limit, the grace and a minute to spare, in whole minutes
        "--signal=B:USR2@60",
    ):  # fmt: skip
        assert word in found


def test_job_without_gpus_or_limits_asks_for_neither() -> None:
    assert not [word for word in words(gpus=0) if word.startswith(("--gres", "--time", "--mem", "--partition"))]


def test_choice_of_machines_becomes_options() -> None:
    where = WhereItRuns(nodes=("n1.hpc", "n2.hpc", "n3.hpc"), labels=("lab",))
    options = SubmissionOptions(constraint="a|b")
    found = words(options, where, machine="n1", exclude_machines=("n2", "desk", "n3.hpc"), labels=("ib", "lab"))
    assert {"--nodelist=n1.hpc", "--exclude=n2.hpc,n3.hpc", "--constraint=(a|b)&ib"} <= set(found)
    assert "--constraint=ib&nvme" in words(labels=("ib", "nvme"))
    assert not [word for word in words(None, where, labels=("lab",)) if word.startswith(("--constraint", "--excl"))]


def test_lower_priority_is_nicer_and_a_higher_one_is_not_refused() -> None:
    assert "--nice=300" in words(priority=-3)
    assert "--nice=0" in words(priority=3)


def test_jobs_own_options_override_those_of_the_worker() -> None:
    options = SubmissionOptions(partition="main", account="lab", preemptible_partition="spare", sbatch=("--exclusive",))
    assert {"--partition=main", "--account=lab", "--exclusive"} <= set(words(options))
    assert {"--partition=spare", "--requeue"} <= set(words(options, preemptible=True))
    own = words(options, slurm={"partition": "long", "sbatch": ["--mail-type=END", "--licenses=a b"]})
    assert "--partition=long" in own
    assert own[-3:] == ["--exclusive", "--mail-type=END", "--licenses=a b"]
    assert partition_of(JobSpec(command="true", preemptible=True), options) == "spare"
    assert partition_of(JobSpec(command="true"), SubmissionOptions()) is None


def test_comment_leads_back_to_the_attempt() -> None:
    assert attempt_of(comment_of("key", "a1"), "key") == "a1"
    assert attempt_of(comment_of("key", "a1"), "other") is None
    assert attempt_of("", "key") is None


def test_script_becomes_the_shim() -> None:
    first, command = script("/opt/my python", "/a b/c").splitlines()
    assert first == "#!/bin/sh"
    called, python, *options, program, directory = shlex.split(command)
    assert (called, python, options, directory) == ("exec", "/opt/my python", ["-S", "-P", "-c"], "/a b/c")
    assert "stoker.engines.slurm.shim" in program


def test_shim_starts_without_what_only_some_jobs_need() -> None:
    """Each job pays for it on its node."""
    python, *options, program, directory = shim_command(sys.executable, "/nowhere")
    loaded = program.replace("main()", "print(*sys.modules)")
    done = subprocess.run([python, *options, loaded, directory], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "stoker.runs.supervisor" in modules
    rare = ("site", "typing_extensions", "subprocess", "shutil", "hashlib", "stoker.queue.driver", "stoker.masking")
    assert not modules.intersection(rare)
    # What a report, an action or a driver needs is found all the same.
    rest = program.replace("main()", "import typing_extensions, subprocess, pynvml, stoker.runs.postmortem.report")
    subprocess.run([python, *options, rest, directory], check=True)


@pytest.mark.parametrize(
    ("field", "value"), [("share", True), ("memory", 2**30), ("gpu_memory", 2**30), ("gpu_model", "a100|h100")]
)
def test_unsupported_job_is_refused_by_the_cluster(field: str, value: object) -> None:
    fields: dict[str, Any] = {"command": "true", field: value}
    with pytest.raises(InvalidFieldsError, match=field):
        check(JobSpec(**fields))


A100 = ClusterNode(
    name="a", partitions=("main", "spare"), gpus=4, gpu_model="a100", cpus=64, memory=512 * 2**30, features=("ib",)
)
H100 = ClusterNode(name="h", partitions=("new",), gpus=8, gpu_model="h100", cpus=32, memory=256 * 2**30)


@pytest.mark.parametrize(
    ("asked", "field", "sentence"),
    [
        ({"gpus": 9}, "gpus", "no node of the cluster has 9 GPUs (at most 8)"),
        ({"gpus": 8, "slurm": {"partition": "main"}}, "gpus", "no node of partition main has 8 GPUs (at most 4)"),
        (
            {"slurm": {"partition": "mian"}},
            "slurm",
            "the cluster has no partition 'mian': choose among main, new, spare",
        ),
        ({"slurm": {"partition": "new,mian"}}, "slurm", "the cluster has no partition 'mian'"),
        ({"gpu_model": "v100"}, "gpu_model", "no node of the cluster has GPUs of type v100 (but a100, h100)"),
        ({"gpu_model": "h100", "slurm": {"partition": "spare"}}, "gpu_model", "no node of partition spare has GPUs"),
        ({"cpus": 65}, "cpus", "no node of the cluster has 65 CPUs (at most 64)"),
        ({"ram": 2**40}, "ram", "no node of the cluster has 1.0 TiB of RAM (at most 512 GiB)"),
        ({"machine": "x"}, "machine", "no node of the cluster is called x"),
        ({"labels": ("ib", "x")}, "labels", "no node of the cluster has the feature x"),
        ({"machine": "h", "labels": ("ib",)}, "labels", "no node of the cluster is left by what it asks and excludes"),
        ({"exclude_machines": ("a", "h")}, "exclude_machines", "no node of the cluster is left"),
        ({"machine": "h", "cpus": 33}, "cpus", "no node of the cluster has 33 CPUs (at most 32)"),
        ({"labels": ("ib",), "nodes": 2}, "nodes", "only 1 node has what it needs on each"),
        ({"nodes": 3}, "nodes", "it asks for 3 nodes, but in the cluster only 2 nodes have what it needs on each"),
        ({"nodes": 2, "gpus": 5}, "nodes", "it asks for 2 nodes, but in the cluster only 1 node has"),
        ({"nodes": 2, "cpus": 40}, "nodes", "it asks for 2 nodes"),
        ({"nodes": 2, "gpu_model": "a100"}, "nodes", "it asks for 2 nodes"),
    ],
)
def test_job_that_no_node_can_run_is_refused_where_the_nodes_are_known(
    asked: dict[str, Any], field: str, sentence: str
) -> None:
    job = JobSpec(command="true", **asked)
    with pytest.raises(InvalidFieldsError) as refused:
        check(job, View(engine="slurm", cluster="hpc", nodes=(A100, H100)))
    assert list(refused.value.mistakes) == [field]
    assert sentence in str(refused.value)
    # Without a worker that reports its nodes, or while none are known, nothing is concluded.
    check(job)
    check(job, View(engine="slurm", cluster="hpc"))


@pytest.mark.parametrize(
    "asked",
    [
        {"gpus": 8},
        {"nodes": 2, "gpus": 4, "cpus": 32},
        {"gpus": 4, "slurm": {"partition": "main,spare"}},
        {"gpu_model": "H100"},
        {"machine": "a", "labels": ("ib",), "exclude_machines": ("h", "other")},
        {"gpus": 0, "gpu_model": "v100"},
        {"slurm": {"partition": "new", "account": "anything"}},
    ],
)
def test_job_that_some_node_can_run_is_admitted(asked: dict[str, Any]) -> None:
    check(JobSpec(command="true", **asked), View(engine="slurm", cluster="hpc", nodes=(A100, H100)))
