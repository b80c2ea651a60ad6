"""Two machines on one database: jobs of a machine that is disconnected for longer than its lease."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.engines.local.record import LocalAttemptRecord
from stoker.procfs import read_stat
from stoker.queue import init_queue
from tests.support.job_journal import JobJournal
from tests.support.network_link import NetworkLink, has_namespaces, namespaced, relayed
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite


@pytest.fixture(params=["relay", "namespace"])
def link(request: pytest.FixtureRequest, postgres_server: PostgresServer) -> Iterator[NetworkLink]:
    if request.param == "namespace" and not has_namespaces():
        pytest.skip("network namespaces are for root, and for machines with iproute2")
    connect = relayed if request.param == "relay" else namespaced
    with connect(postgres_server.directory / ".s.PGSQL.5432") as link:
        yield link


@pytest.fixture
def site(tmp_path: Path, postgres_url: str) -> Iterator[WorkSite]:
    with init_queue(postgres_url) as store, contextlib.closing(WorkSite(tmp_path, store, queue=postgres_url)) as site:
        yield site


def test_disconnected_machine_stops_its_jobs_before_another_starts_them(
    site: WorkSite, link: NetworkLink, postgres_url: str, tmp_path: Path
) -> None:
    database = postgres_url.split("?", maxsplit=1)[0].rsplit("/", maxsplit=1)[1]
    far_url = f"postgresql://stoker:{PASSWORD.replace(' ', '%20')}@{link.host}:{link.port}/{database}"
    lease = ("--lease", "6s", "--grace", "1s")
    long, short = JobJournal(tmp_path / "long"), JobJournal(tmp_path / "short")
    jobs = [site.submit(long.command(200, deaf=True)), site.submit(short.command(200))]
    far_home = tmp_path / "far"
    far = site.work(*lease, home=far_home, environment={"STOKER_QUEUE": far_url}, prefix=link.prefix)
    wait_for(lambda: long.has_started() and short.has_started(), named="the start of both jobs")
    near = site.work(*lease, home=tmp_path / "near").ready()

    link.cut()
    short.let_end()  # a success that the queue cannot hear of
    wait_for(lambda: long.has_started(2) and short.has_started(2), named="the second attempts")
    assert _cpu_seconds(far_home / "attempts" / f"{jobs[0]}-1") < 0.7, "waiting costs nothing"
    long.let_end()
    for job in jobs:
        site.wait_until(job, "succeeded")
    link.restore()
    for job in jobs:
        far.wait_until_it_says(f"{job}: .*too late: the queue had given the job up")
    assert near.stop() == far.stop() == 0

    first_of_long, second_of_long = site.store.attempts.of(jobs[0])
    last_sign = max(entry.wall_time for entry in long.entries() if entry.attempt == 1)
    assert last_sign < first_of_long.lease_expires < second_of_long.started < time.time()
    assert (long.overlaps(), short.overlaps()) == ([], [])
    for job, journal in zip(jobs, (long, short), strict=True):
        assert journal.attempts() == [1, 2]
        assert [attempt.outcome for attempt in site.store.attempts.of(job)] == ["lost", "succeeded"]
    wait_for(lambda: not site.processes(), named="the end of everything")


def _cpu_seconds(attempt: Path) -> float:
    """What its shim has used, which waits for the queue and for its lease."""
    attempt_spec = LocalAttemptRecord(attempt).attempt_spec()
    assert attempt_spec is not None
    stat = read_stat(f"/proc/{attempt_spec.processes.shim.pid}/stat")
    return stat.cpu_ticks / os.sysconf("SC_CLK_TCK")
