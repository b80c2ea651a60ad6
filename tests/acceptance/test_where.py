"""Where and when a job runs, as its options say: on one worker that offers 4 CPUs, 8 GiB and two labels."""

import json
import re

from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite


def submitted(site: WorkSite, *words: str) -> str:
    done = site.stoker("submit", "--directory", str(site.directory), *words)
    assert done.code == 0, done.err
    return done.out.strip()


def the_machine(site: WorkSite) -> dict[str, object]:
    def found() -> dict[str, object] | None:
        rows = json.loads(site.stoker("machines", "--json").out or "[]")
        return rows[0] if rows else None

    return wait_for(found, named="the worker in `stoker machines`")


def test_job_runs_only_where_it_fits_and_was_sent(site: WorkSite) -> None:
    site.work("--label", "ib,nvme", "--cpus", "4", "--ram", "8GiB")
    machine = the_machine(site)
    host = str(machine["host"])
    assert machine["labels"] == ["ib", "nvme"]
    assert "ib, nvme" in site.stoker("machines").out
    here = ("--machine", host, "--label", "ib", "--gpu-model", "simulated|a100", "--gpu-memory", "24GiB")
    first = submitted(site, *here, "--cpus", "3", "--ram", "6GiB", "--", site.until("first"))
    site.wait_until(first, "running")
    shown = site.stoker("show", first).out
    assert re.search(rf"where +{re.escape(host)}, label ib\n", shown)
    assert "simulated or a100, of at least 24 GiB" in shown
    second = submitted(site, "--cpus", "2", "--gpus", "0", "--", "true")
    third = submitted(site, "--cpus", "1", "--", "true")
    fourth = submitted(site, "--ram", "3GiB", "--gpus", "0", "--", "true")
    fifth = submitted(site, "--ram", "1GiB", "--gpus", "0", "--", "true")
    site.wait_for_why(second, "waits for 2 CPUs: 1 of this machine are not promised to running jobs")
    site.wait_for_why(third, f"waits for 1 CPU: job {second} comes first, and what is free is reserved for it")
    site.wait_for_why(fourth, "waits for 3.0 GiB of RAM: 2.0 GiB of this machine are not promised to running jobs")
    site.wait_until(fifth, "succeeded")
    asked: dict[tuple[str, ...], str] = {
        ("--gpu-model", "a100"): "can never start on this machine: it asks for a GPU of model a100, and those here are",
        ("--gpu-memory", "40GiB"): "it asks for a GPU of at least 40 GiB, and the largest has 24 GiB",
        ("--exclude-machine", host): f"is not for this machine: it excludes {host}",
    }
    for words, why in asked.items():
        site.wait_for_why(submitted(site, *words, "--", "true"), re.escape(why))
    refused: dict[tuple[str, ...], str] = {
        ("--cpus", "5"): "cpus: no machine of this queue has 5 CPUs (at most 4)",
        ("--ram", "9GiB"): "ram: no machine of this queue has 9.0 GiB of RAM (at most 8.0 GiB)",
        ("--machine", "nowhere"): f"machine: this queue has no machine nowhere: there are {host}",
        ("--exclude-machine", "nowhere"): "exclude_machines: this queue has no machine nowhere",
        ("--label", "gold"): "labels: no machine of this queue has the label gold: there are ib and nvme",
        ("--label", "a b"): "'a b' cannot be a label of a machine: write it like ib",
        ("--gpus", "0", "--gpu-memory", "1GiB"): "gpu_memory: a job without a GPU cannot choose its memory",
    }
    for words, why in refused.items():
        done = site.stoker("submit", *words, "--", "true")
        assert (done.code, why in done.err) == (2, True), done.err
    site.create_flag("first")
    for job in (second, third, fourth):
        site.wait_until(job, "succeeded")


def test_job_gets_linked_gpus_unless_the_worker_chooses_by_index(site: WorkSite) -> None:
    site.environment["STOKER_GPUS"] = "sim:4,nvlink=2"
    assert site.stoker("gpus", "--topology").out.splitlines()[1:3] == [
        "  0  -       nvlink  system  system",
        "  1  nvlink  -       system  system",
    ]
    links = json.loads(site.stoker("gpus", "--json").out)[3]["links"]
    assert links == {site.uuid(0): "system", site.uuid(1): "system", site.uuid(2): "nvlink"}

    def got(run: str) -> list[tuple[str, ...]]:
        """The GPUs of one job, of one for two GPUs, and of another one, which start in this order."""
        found = []
        for count in ("1", "2", "1"):
            job = submitted(site, "--gpus", count, "--", site.until(run))
            site.wait_until(job, "running")
            found.append(site.last_attempt(job).gpus)
        site.create_flag(run)
        wait_for(lambda: not site.store.jobs.find(("running",)), named="the end of the jobs")
        return found

    zero, one, two, three = map(site.uuid, range(4))
    worker = site.work()
    assert got("by-links") == [(zero,), (two, three), (one,)]
    worker.stop()
    (site.directory / "stoker.toml").write_text('[work.local]\ngpu-order = "index"\n')
    site.work(environment={"STOKER_CONFIG": str(site.directory / "stoker.toml")})
    assert got("by-index") == [(zero,), (one, two), (three,)]


def test_job_begins_recurs_and_fails_by_the_clock(site: WorkSite) -> None:
    site.work("--grace", "2s")
    none = ("--gpus", "0")
    later = submitted(site, *none, "--begin", "+2h", "--", "true")
    nightly = submitted(site, *none, "--name", "nightly", "--every", "0 3 * * * UTC", "--", "true")
    late = submitted(site, *none, "--hold", "--deadline", "+4s", "--", "true")
    site.wait_until(late, "failed")
    assert "it did not start by its deadline, 20" in site.stoker("why", late).out
    site.wait_for_why(later, r"begins at (\S+ )?\d\d:\d\d, in 2 h")
    assert re.search(rf"{later} +queued, begins (\S+ )?\d\d:\d\d ", site.stoker("list").out)
    assert re.search(rf"{nightly} +queued, next (\S+ )?\d\d:\d\d ", site.stoker("list").out)
    assert "every        0 3 * * * UTC\n" in site.stoker("show", nightly).out
    assert site.stoker("edit", later, "--begin", "none").code == 0
    site.wait_until(later, "succeeded")
    assert site.stoker("retry", nightly).code == 0
    site.wait_until(nightly, "succeeded")

    def next_run() -> str | None:
        return next((job.id for job in site.store.jobs.find(("queued",)) if job.name == "nightly"), None)

    following = wait_for(next_run, named="the next run")
    assert site.stoker("cancel", following).code == 0
    site.wait_until(following, "cancelled")
    refused: dict[tuple[str, ...], str] = {
        ("--begin", "tomorrow"): "'tomorrow' is not a time: write it like 22:00, +2h or '2026-11-19 22:00'",
        ("--every", "0 3 * *"): "'0 3 * *' does not say when: write it like '0 3 * * *'",
        ("--every", "0 3 30 2 *"): "'0 3 30 2 *' never happens",
        ("--begin", "+2h", "--deadline", "+1h"): "deadline: the deadline is before the job may begin",
        ("--deadline", "2026-01-01 8:00"): "deadline: 2026-01-01 08:00:00",
        ("--retry-on", "ooom", "--retries", "1"): "'ooom' is not an end of a job: choose among exit, oom, time-limit",
        ("--retry-on", "oom"): "retry_on: a job without retries is not tried again: add --retries",
    }
    for words, why in refused.items():
        done = site.stoker("submit", *words, "--", "true")
        assert (done.code, why in done.err) == (2, True), done.err


def test_ends_decide_on_retries_and_a_time_limit_on_the_next_attempt(site: WorkSite) -> None:
    site.work("--grace", "2s")
    retried = ("--gpus", "0", "--retries", "5", "--backoff", "0s", "--retry-on", "exit:75,oom")
    coded = submitted(site, *retried, "--", "test -e coded && exit 3; touch coded; exit 75")
    memory = submitted(
        site, *retried, "--", "test -e memory && exit 0; touch memory; echo CUDA error: out of memory >&2; exit 1"
    )
    limited = submitted(
        *(site, "--gpus", "0", "--time-limit", "1s", "--requeue-at-limit", "--"),
        "test -e limited && exit 0; touch limited; echo epoch 1; trap 'echo checkpoint; exit 0' TERM; sleep 60 & wait",
    )
    stopped = submitted(site, *retried, "--time-limit", "1s", "--", "sleep 60")
    for job, state, outcomes in (
        (coded, "failed", ["failed", "failed"]),
        (memory, "succeeded", ["failed", "succeeded"]),
        (limited, "succeeded", ["requeued", "succeeded"]),
        (stopped, "failed", ["failed"]),
    ):
        site.wait_until(job, state)
        assert [attempt.outcome for attempt in site.store.attempts.of(job)] == outcomes
    assert (site.job(coded).exit_code, site.job(coded).retries_left) == (3, 4)
    assert site.output(limited).read_text().startswith("epoch 1\ncheckpoint\n")
    assert site.job(limited).retries_left == 0
    assert "requeued" in site.stoker("show", limited).out


def test_sweep_runs_within_its_cap_and_is_one_thing(site: WorkSite) -> None:
    site.work()
    words = ("--gpus", "0", "--group", "night", "--at-most", "1", "--sweep", "n=1..4")
    jobs = submitted(site, *words, "--", f": {{n}}; {site.until('go')}; test {{n}} != 3").split()

    def are_running(count: int) -> bool:
        return site.store.groups.get("night").counts.get("running") == count

    wait_for(lambda: are_running(1), named="the first job")
    site.wait_for_why(jobs[3], "its group night already runs 1 of at most 1")
    assert "night: 0 of 4 done, 1 running" in site.stoker("list").out
    assert site.stoker("edit", "night", "--at-most", "3").code == 0
    wait_for(lambda: are_running(3), named="three at once")
    site.wait_for_why(jobs[3], "its group night already runs 3 of at most 3")
    site.create_flag("go")
    assert site.stoker("wait", "night").code == 1
    assert "4 of 4 done, 1 failed" in site.stoker("why", "night").out
    assert "night: 4 of 4 done, 1 failed" in site.stoker("list").out
    # One action for all, addressed by its name.
    assert site.stoker("retry", "night").out.count("queued again") == 1
    site.wait_until(jobs[2], "failed")
    assert site.stoker("tag", "redo", "night").out.count("tagged redo") == 4
    assert json.loads(site.stoker("list", "tag:redo state:failed", "--json").out)[0]["id"] == jobs[2]
