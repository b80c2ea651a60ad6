"""The page of a queue whose worker gives its jobs to a cluster, on a phone."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from stoker.paths import private_directory, state_home
from stoker.queue import JobSpec, Store, init_queue
from stoker.queue.model import ClusterNode, DeferredStart, View
from tests.support.browser import screen
from tests.support.page_site import PageSite, page_site

GIB = 2**30
NODES = 40


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    with init_queue(postgres_url) as opened:
        yield opened


@pytest.fixture
def site(postgres_url: str) -> Iterator[PageSite]:
    with page_site("serve", "--port", "0", "--queue", postgres_url) as started:
        yield started


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cluster_of_forty_nodes_fits_a_phone(browser: Browser, store: Store, site: PageSite, scheme: str) -> None:
    running, pending = _jobs_on_a_cluster(store)
    directory = state_home() / "attempts" / f"{running}-1"
    for place, node in ((directory, "n0"), (directory / "node1", "n1")):
        private_directory(place)
        (place / "output").write_text(f"printed on {node}\n")
    (directory / "nodes.json").write_text('{"names": ["n0", "n1"]}')
    with screen(browser, "phone", color_scheme=scheme) as shown:
        page = shown.page
        page.goto(f"{site.address}/login#{site.token}")
        machine = page.locator("#section-machines")
        expect(machine.get_by_text("Cluster hpc · 40 nodes, 160 GPUs: 96 allocated (6 by this queue)")).to_be_visible()
        expect(machine.get_by_text("gpu-batch", exact=True).first).to_be_visible()
        expect(machine.get_by_role("link", name="vit-large")).to_have_count(2)
        expect(page.locator("#section-running").get_by_text("Slurm job 4710 on node[0-1]")).to_be_visible()
        waits = "Waits in Slurm: 12 jobs of higher priority come first; starts about 14:30; it is Slurm job 4711"
        expect(page.locator("#section-running").get_by_text(waits)).to_be_visible()
        expect(page.locator("#section-health").get_by_text("1 pending")).to_be_visible()
        expect(page.locator("#section-health").get_by_text("1 running")).to_be_visible()
        shown.look_over(f"cluster-1-overview-{scheme}")
        machine.get_by_text("38 other nodes").click()
        expect(machine.get_by_text("fan failed, ticket 4242").first).to_be_visible()
        machine.get_by_text("fan failed, ticket 4242").first.scroll_into_view_if_needed()
        shown.look_over(f"cluster-2-nodes-{scheme}")
        page.goto(f"{site.address}/jobs/{pending}")
        expect(page.get_by_text("pending", exact=True).first).to_be_visible()
        expect(page.get_by_text(waits)).to_be_visible()
        shown.look_over(f"cluster-3-pending-{scheme}")
        page.goto(f"{site.address}/jobs/{running}")
        expect(page.get_by_text("Slurm job 4710 on node[0-1]").first).to_be_visible()
        expect(page.get_by_role("log")).to_have_text("printed on n0")
        page.get_by_label("Node").select_option("n1")
        expect(page.get_by_role("log")).to_have_text("printed on n1")
        expect(page.get_by_role("link", name="Download")).to_have_attribute("href", re.compile(r"/log\?node=1$"))
        shown.look_over(f"cluster-4-log-{scheme}")
        page.goto(f"{site.address}/jobs?state=running")
        expect(page.locator(f"#row-{pending}").get_by_text("pending", exact=True)).to_be_visible()
        shown.look_over(f"cluster-5-list-{scheme}")


def _jobs_on_a_cluster(store: Store) -> tuple[str, str]:
    running, pending = store.jobs.submit(
        [
            JobSpec(command="torchrun train.py", name="vit-large", gpus=3, nodes=2),
            JobSpec(command="python train.py --seed 2", name="a run with quite a long name that has to wait", gpus=4),
        ]
    )
    attempts = {}
    for job in (running, pending):
        attempt = store.attempts.claim([job], "login1-1", [], 600.0, pending=True)
        assert attempt is not None
        attempts[job] = attempt.id
    store.attempts.annotate(
        {
            attempts[running]: DeferredStart(False, "Slurm job 4710 on node[0-1]", store.clock()),
            attempts[pending]: DeferredStart(True, "Slurm job 4711"),
        }
    )
    waits = {pending: "waits in Slurm: 12 jobs of higher priority come first; starts about 14:30"}
    nodes = tuple(_node(number, running) for number in range(NODES))
    store.workers.heartbeat("login1-1", "login1", View(cluster="hpc", nodes=nodes, waiting=waits))
    return running, pending


def _node(number: int, running: str) -> ClusterNode:
    ours, down = number < 2, number >= NODES - 3
    return ClusterNode(
        name=f"node{number}",
        partitions=("gpu-batch",) if number % 2 else ("gpu-batch", "gpu-spare-preemptible"),
        state="drained" if down else "mixed",
        available=not down,
        reason="fan failed, ticket 4242" if down else "",
        gpus=4,
        gpus_allocated=0 if down else 4 if number % 4 == 0 or ours else 2,
        own=3 if ours else 0,
        gpu_model="a100-sxm4-80gb",
        cpus=64,
        cpus_allocated=32,
        memory=512 * GIB,
        jobs=(running,) if ours else (),
    )
