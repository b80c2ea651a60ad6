"""What many jobs ask of Slurm's controller; `python -m bench slurm` measures more of them."""

import re
import time

from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

JOBS = 40
PENDING = 30
SUBMISSION = "REQUEST_SUBMIT_BATCH_JOB"
QUESTIONS = ("REQUEST_JOB_INFO", "REQUEST_JOB_INFO_SINGLE", "REQUEST_JOB_USER_INFO", "REQUEST_NODE_INFO")


def requests(cluster: SlurmCluster) -> dict[str, int]:
    """How many requests of each kind the controller has got."""
    found = re.findall(r"(REQUEST_\w+)\s+\(\s*\d+\)\s+count:(\d+)", cluster.run("sdiag"))
    return {kind: int(count) for kind, count in found}


def test_many_jobs_cost_one_submission_each_and_one_query_every_few_seconds(
    cluster: SlurmCluster, site: WorkSite
) -> None:
    site.environment |= cluster.environment()
    del site.environment["STOKER_GPUS"]
    cluster.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    jobs = [site.submit("true", gpus=0) for _ in range(JOBS)]
    before, begun = requests(cluster), time.monotonic()

    def new(*kinds: str) -> int:
        now = requests(cluster)
        return sum(now.get(kind, 0) - before.get(kind, 0) for kind in kinds)

    site.work("--engine", "slurm", "--max-pending", str(PENDING))
    wait_for(lambda: new(SUBMISSION) >= PENDING, named="the submission of all jobs that may wait in Slurm")
    site.wait_for_why(jobs[-1], f"fewer than {PENDING} jobs wait in Slurm")
    assert new(SUBMISSION) == PENDING
    cluster.run("scontrol", "update", "PartitionName=main", "State=UP")
    wait_for(lambda: all(site.job(job).state == "succeeded" for job in jobs), named="the end of all jobs")
    assert new(SUBMISSION) == JOBS
    # One for all jobs every two seconds or more rarely, and one for the nodes a minute; two at the worker's start.
    assert new(*QUESTIONS) <= (time.monotonic() - begun) * (1 / 2 + 1 / 60) + 2
