"""What a worker reports about its machine and jobs, and the requests that it takes from the queue."""

import time

from stoker.queue import Worker
from stoker.queue.model import AttemptDetails, GpuUse, WorkerGpu
from stoker.runs.record import Record
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

IDLE_SOON = {"every": 0.2, "window": 1.0, "after": 0.0}
HANGS = "exec stoker sim load --phase idle"


def worker(site: WorkSite) -> Worker | None:
    return next(iter(site.store.workers.all()), None)


def gpu_that_is(site: WorkSite, doing: GpuUse, index: int = 0) -> WorkerGpu:
    """What the worker says of this GPU, once it does that."""

    def said() -> WorkerGpu | None:
        found = worker(site)
        gpus = found.view.gpus if found is not None else ()
        return next((gpu for gpu in gpus if gpu.index == index and gpu.state == doing), None)

    return wait_for(said, named=f"GPU {index} being reported as {doing}")


def details(site: WorkSite, job: str) -> AttemptDetails:
    attempt = site.last_attempt(job).id
    return wait_for(lambda: site.store.attempts.details(attempt), named="what was found")


def test_gpu_states_are_reported_on_change_and_summed_as_usage(site: WorkSite) -> None:
    begun = time.time()
    alice = site.foreigner("--gpu", "1")
    # A late sample never makes a GPU unknown.
    working = site.work(environment={"STOKER_DEADLINE": "60s"})
    free = gpu_that_is(site, "free")
    there = worker(site)
    assert there is not None
    assert there.view.simulated
    assert f"(pid {alice.pid})" in gpu_that_is(site, "somebody", 1).user
    job = site.submit(site.until("flag"), gpus=1)
    held = gpu_that_is(site, "job")
    assert held.jobs == (job,)
    assert free.since is not None
    assert held.since is not None
    assert begun <= free.since <= held.since <= time.time()
    site.create_flag("flag")
    site.wait_until(job, "succeeded")
    again = gpu_that_is(site, "free")
    assert again.since is not None
    assert again.since >= held.since
    assert working.stop() == 0
    rows = site.store.usage.read(int(begun // 60))
    total: dict[str, dict[GpuUse, float]] = {}
    for row in rows:
        for doing, seconds in row.seconds.items():
            spent = total.setdefault(row.gpu, {})
            spent[doing] = spent.get(doing, 0.0) + seconds
    assert set(total[site.uuid(1)]) == {"somebody"}
    assert total[site.uuid(0)]["job"] > 0
    assert all(sum(spent.values()) <= time.time() - begun for spent in total.values())
    assert {row.host for row in rows} == {there.host}
    assert all(row.power is not None and row.power > 0 for row in rows)


def test_snooze_through_the_queue_keeps_an_idle_job_running(site: WorkSite) -> None:
    site.work("--grace", "2s")
    # It is judged once it has worked, and hangs once the flag file exists, which is after its snooze has arrived.
    works_first = f"stoker sim load & {site.until('flag')}; kill $!; {HANGS}"
    spared = site.submit(works_first, gpus=1, policy=IDLE_SOON | {"arm_above": 0.5})
    record = Record(site.output(spared).parent)
    wait_for(lambda: record.status().verdict == "busy", named="that it is seen to work")
    assert site.store.attempts.snooze(site.last_attempt(spared).id, 600.0, "alice")
    wait_for(lambda: record.status().verdict_reason.startswith("snoozed"), named="the snooze")
    site.create_flag("flag")
    # By the time that this more patient one is stopped, the first would have been for long.
    stopped = site.submit(HANGS, gpus=1, policy=IDLE_SOON | {"window": 2.0})
    site.wait_until(stopped, "failed")
    assert details(site, stopped).cause == "idle"
    assert site.job(spared).state == "running"
    assert site.store.attempts.snooze(site.last_attempt(spared).id, 0.0, "alice")
    assert site.wait_until(spared, "failed").exit_code == 124


def test_report_of_a_hung_job_is_stored_in_the_queue(site: WorkSite) -> None:
    hung = site.submit(HANGS, gpus=1, policy=IDLE_SOON)
    fine = site.submit("true")
    site.work_until_empty()
    found = details(site, hung)
    assert found.cause == "idle"
    assert found.report == site.output(hung).with_name("report.md").read_text()
    assert site.store.attempts.details(site.last_attempt(fine).id) is None


def test_job_that_ends_without_a_worker_delivers_its_details(site: WorkSite) -> None:
    job = site.submit("exec sleep 600", time_limit=1.5)
    working = site.work()
    working.wait_until_it_says(f"{job}: started")
    working.kill()
    site.wait_until(job, "failed")
    assert details(site, job).cause == "time limit"
