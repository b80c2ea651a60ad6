"""Whatever fails on a cluster: every job comes to one outcome, its own, one attempt at a time, and nothing is left.

`make chaos CLUSTER=1` does more of it. `CHAOS_SEED` sets the seed, which is printed with a failure.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import pytest

from stoker.queue import init_queue
from tests.support.chaos_slurm import SLURM_KINDS, SLURM_LONG, SlurmChaosRun, slurm_extent
from tests.support.slurm_cluster import SlurmCluster
from tests.support.work_site import WorkSite

# On a machine that does much else; alone it takes a fraction of that.
pytestmark = pytest.mark.timeout(600)

# What takes as long as a lease, or lets the worker pause, takes longer than all the others together.
SLOW: Final = SLURM_LONG | {"kill step", "kill controller", "kill slurmstepd", "sleep", "no inodes", "sbatch fails"}


def test_random_faults_on_a_cluster_lose_no_job(tmp_path: Path, cluster: SlurmCluster) -> None:
    url = str(tmp_path / "queue.db")
    seed = int(os.environ.get("CHAOS_SEED") or 7)
    extent = slurm_extent(12, 0.4, frozenset(SLURM_KINDS) - SLOW, mounts=False, longest_job=2.0)
    with contextlib.ExitStack() as place:
        store = place.enter_context(init_queue(url))
        site = place.enter_context(contextlib.closing(WorkSite(tmp_path, store, queue=url)))
        chaos = place.enter_context(contextlib.closing(SlurmChaosRun(site, url, extent, seed, cluster)))
        chaos.run()
        assert chaos.findings() == []
