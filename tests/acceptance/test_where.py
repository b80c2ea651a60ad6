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
