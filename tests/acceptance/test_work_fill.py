"""`stoker work --fill`: background programs on the GPUs that no job needs, and whom they step aside for."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.attempt_processes import processes_of, record_of
from tests.support.fill_site import FillSite, alive
from tests.support.waiting import wait_for
from tests.support.work_site import PATIENCE, RunningWorker, WorkSite

# Until it is asked to end, which it notes; what it was given as well, once it can be asked.
MINER = """\
trap 'echo "term $$" >> "$JOURNAL"; exit 0' TERM
echo "start $$ $CUDA_VISIBLE_DEVICES" >> "$JOURNAL"
sleep 1000 & wait $!
"""


class FilledSite:
    """A work site whose worker fills its two simulated GPUs, one program on each."""

    def __init__(self, site: WorkSite) -> None:
        self.site = site
        self._journal = site.directory / "journal"
        self._config = site.directory / "fill.conf"
        self.program(MINER)
        site.environment |= {"JOURNAL": str(self._journal), "STOKER_ROOT": str(self._root())}
        self.configure("each = yes")

    def _root(self) -> Path:
        """A machine without terminals."""
        root = self.site.directory / "root"
        root.mkdir()
        (root / "proc").symlink_to("/proc")
        return root

    def program(self, script: str) -> None:
        path = self.site.directory / "miner-run"
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)

    def configure(self, keys: str, defaults: str = "") -> None:
        self._config.write_text(
            f"[defaults]\nidle_for = 0\n{defaults}\n[gpu-all]\ngpus = all\n"
            f"[process-0]\ncmd = {self.site.directory}/miner-run\n{keys}\n"
        )

    def work(self, *options: str) -> RunningWorker:
        return self.site.work("--fill", str(self._config), "--grace", "2s", *options)

    def noted(self, word: str) -> list[list[str]]:
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        return [line.split()[1:] for line in lines if line.startswith(word)]

    def miners(self, count: int) -> dict[str, int]:
        """Pids of the programs by their GPUs, once that number has started."""
        wait_for(lambda: len(self.noted("start")) >= count, deadline=PATIENCE, named=f"{count} background programs")
        assert len(self.noted("start")) == count
        return {given: int(pid) for pid, given in self.noted("start")}

    def wait_until_reported(self) -> None:
        """The worker knows of it, too: a job that comes in the moment of its start would be given the GPU beside it."""
        wait_for(
            lambda: any(
                gpu.state == "background" for worker in self.site.store.workers.all() for gpu in worker.view.gpus
            ),
            deadline=PATIENCE,
            named="a background program that the worker knows of",
        )

    def asked_to_end(self) -> set[int]:
        return {int(pid) for (pid,) in self.noted("term")}

    def wait_for_end(self, pid: int) -> None:
        wait_for(lambda: not alive(pid), deadline=PATIENCE, named=f"the end of {pid}")

    def slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = self.site.stoker("fill", "status", "--json").json()["status"]["slots"]
        return slots


@pytest.fixture
def filled(site: WorkSite) -> Iterator[FilledSite]:
    with contextlib.closing(site):
        yield FilledSite(site)


def test_unused_gpus_are_filled(filled: FilledSite) -> None:
    site = filled.site
    worker = filled.work()
    assert set(filled.miners(2)) == {site.uuid(0), site.uuid(1)}
    worker.wait_until_it_says("process-0 on GPU 1: started")

    def result() -> list[tuple[str, str, tuple[str, ...]]]:
        return [(gpu.state, gpu.user, gpu.jobs) for one in site.store.workers.all() for gpu in one.view.gpus]

    wait_for(
        lambda: result() == [("background", "process-0", ())] * 2,
        deadline=PATIENCE,
        named="what the GPUs are filled with",
    )
    status = site.stoker("fill", "status", "--json").json()
    assert status["running"] is True
    assert status["status"]["owner"] == "stoker work"


@pytest.mark.parametrize("preemptible", [False, True], ids=["normal", "preemptible"])
def test_background_program_stops_for_any_job(filled: FilledSite, preemptible: bool) -> None:
    site = filled.site
    filled.work()
    miners = filled.miners(2)
    job = site.submit(site.until("flag"), gpus=1, preemptible=preemptible)
    site.wait_until(job, "running")
    (given,) = site.last_attempt(job).gpus
    # Before the job was started its GPU was empty, and the other one was nobody's business.
    assert not alive(miners[given])
    assert filled.asked_to_end() == {miners[given]}
    (other,) = set(miners.values()) - {miners[given]}
    assert alive(other)
    by_gpu = {slot["gpus"][0]: slot for slot in filled.slots()}
    assert by_gpu[given]["why"] == "needed by the queue"
    assert by_gpu[given]["preemptions"] == 1
    assert site.stoker("list", "--json").code == 0
    site.create_flag("flag")
    site.wait_until(job, "succeeded")


def test_background_program_leaves_a_gpu_that_fails(filled: FilledSite) -> None:
    site = filled.site
    filled.work()
    miners = filled.miners(2)
    assert site.stoker("sim", "fault", "xid", "79", "--gpu", "0").code == 0
    filled.wait_for_end(miners[site.uuid(0)])
    assert alive(miners[site.uuid(1)])
    assert "out of rotation (XID 79" in filled.slots()[0]["why"]


def test_two_gpu_job_gets_both_gpus(filled: FilledSite) -> None:
    site = filled.site
    filled.configure("gpus = all")
    filled.work()
    (miner,) = filled.miners(1).values()
    job = site.submit("true", gpus=2)
    site.wait_until(job, "succeeded")
    assert filled.asked_to_end() == {miner}


def test_normal_jobs_precede_preemptible_jobs_and_background_programs(filled: FilledSite) -> None:
    site = filled.site
    filled.configure("gpus = 0")
    filled.work("--gpus", "0")
    filled.miners(1)
    low = site.submit(site.until("low"), gpus=1, preemptible=True)
    site.wait_until(low, "running")
    high = site.submit(site.until("high"), gpus=1)
    site.wait_until(high, "running")
    assert site.job(low).state == "queued"
    assert len(filled.noted("start")) == 1
    site.create_flag("high")
    site.create_flag("low")
    site.wait_until(high, "succeeded")
    site.wait_until(low, "succeeded")


def test_job_waiting_for_a_background_program_to_stop_has_that_reason(filled: FilledSite) -> None:
    site = filled.site
    filled.configure("gpus = all\ngrace = 10m")
    filled.program("trap '' TERM\n" + MINER.replace("trap '", ": '").replace("sleep 1000 & wait $!", "exec sleep 1000"))
    filled.work()
    (pid,) = filled.miners(1).values()
    filled.wait_until_reported()
    job = site.submit("true", gpus=1)
    why = site.wait_for_why(job, "GPUs? 0.*background")
    assert "used by" not in why
    assert alive(pid)
    assert job in site.stoker("list").out
    os.kill(pid, signal.SIGKILL)
    site.wait_until(job, "succeeded")


def test_background_program_restarts_after_the_job(filled: FilledSite) -> None:
    site = filled.site
    filled.configure("gpus = 0")
    filled.work("--gpus", "0")
    filled.miners(1)
    job = site.submit("true", gpus=1)
    site.wait_until(job, "succeeded")
    # Between two starts lies a minute: that it will come is as good as its coming.
    promise = "it was started a moment ago: tried again in [0-9]+s"
    wait_for(
        lambda: re.search(promise, filled.slots()[0]["why"]) or len(filled.noted("start")) > 1,
        deadline=PATIENCE,
        named="the way back",
    )


def test_other_user_on_the_gpu_stops_the_background_program(filled: FilledSite) -> None:
    site = filled.site
    filled.configure("each = yes", defaults="interval = 0.2s")
    filled.work()
    miners = filled.miners(2)
    foreigner = site.foreigner("--gpu", "1")
    filled.wait_for_end(miners[site.uuid(1)])
    assert filled.asked_to_end() == {miners[site.uuid(1)]}
    wait_for(lambda: f"(pid {foreigner.pid})" in filled.slots()[1]["why"], named="the reason")


def test_background_programs_end_with_the_worker_and_jobs_do_not(filled: FilledSite) -> None:
    site = filled.site
    worker = filled.work()
    filled.miners(2)
    job = site.submit(site.until("flag"), gpus=1)
    site.wait_until(job, "running")
    wait_for(lambda: processes_of(record_of(site, job)), deadline=PATIENCE, named="the job's own process")
    assert worker.stop() == 0
    assert not any(map(alive, filled.miners(2).values()))
    assert processes_of(record_of(site, job))
    assert site.stoker("fill", "status").code == 1
    site.create_flag("flag")


def test_killed_worker_leaves_jobs_running_but_no_background_program(filled: FilledSite) -> None:
    site = filled.site
    worker = filled.work()
    miners = filled.miners(2)
    job = site.submit(site.until("flag"), gpus=1)
    site.wait_until(job, "running")
    wait_for(lambda: processes_of(record_of(site, job)), deadline=PATIENCE, named="the job's own process")
    worker.kill()
    for miner in miners.values():
        filled.wait_for_end(miner)
    # Asked, not killed: they had their grace.
    assert filled.asked_to_end() == set(miners.values())
    assert processes_of(record_of(site, job))
    # The next one finds the job, and fills what is left.
    filled.work()
    again = filled.miners(3)
    (given,) = site.last_attempt(job).gpus
    assert alive(again[next(uuid for uuid in (site.uuid(0), site.uuid(1)) if uuid != given)])
    site.create_flag("flag")
    site.wait_until(job, "succeeded")


def test_filler_of_a_killed_worker_owns_the_gpus_until_its_programs_end(filled: FilledSite) -> None:
    site = filled.site
    flag = site.directory / "may-end"
    filled.program(MINER.replace("exit 0", f'until [ -e "{flag}" ]; do sleep 0.05; done; exit 0'))
    filled.configure("gpus = all\ngrace = 1m")
    worker = filled.work()
    (first,) = filled.miners(1).values()
    worker.kill()
    wait_for(lambda: filled.asked_to_end() == {first}, deadline=PATIENCE)
    second = filled.work()
    assert site.stoker("fill", "--config", str(site.directory / "fill.conf")).code == 1
    assert alive(first)
    flag.touch()
    second.ready()
    filled.miners(2)


def test_killed_filler_affects_only_background_programs(filled: FilledSite) -> None:
    site = filled.site
    worker = filled.work()
    miners = filled.miners(2)
    filler = site.stoker("fill", "status", "--json").json()["status"]["pid"]
    os.kill(filler, signal.SIGKILL)
    for miner in miners.values():
        filled.wait_for_end(miner)
    worker.wait_until_it_says(
        "the background filler has ended: idle GPUs stay idle until the next `stoker work --fill`"
    )
    job = site.submit("true", gpus=2)
    site.wait_until(job, "succeeded")
    assert worker.stop() == 0


def test_reader_of_the_gpus_does_not_count_as_a_user(filling: FillSite) -> None:
    """Not even with a driver whose library keeps the nodes open, and without the list that is shipped."""
    filling.environment["MOCK_NVML_NODES"] = ":".join(map(str, filling.nodes))
    config = filling.config("cmd = miner-run", defaults="ignore_shipped = no")
    filling.work("--fill", config)
    (miner,) = filling.wait_for_start()
    other_user = filling.open_node(1)
    filling.wait_for_end(miner)
    filling.wait_for_why(f"pid {other_user.pid}")


def test_configuration_errors_are_reported_before_the_start(filled: FilledSite) -> None:
    site = filled.site
    filled.configure("gpus = 7\nlog = /not/there")
    done = site.stoker("work", "--fill", str(site.directory / "fill.conf"))
    assert done.code == 2
    assert "fill.conf: process-0 gpus: there is no GPU 7 here" in done.err
    assert "fill.conf: process-0: /not/there cannot be written" in done.err
    assert done.out == ""


def test_fill_beside_another_filler_is_refused(filled: FilledSite) -> None:
    site = filled.site
    worker = filled.work()
    filled.miners(2)
    done = site.stoker("fill", "--config", str(site.directory / "fill.conf"))
    assert done.code == 1
    assert f"the GPUs here are being filled already (pid {worker.process.pid})" in done.err
    # Nor from another home, by either of them.
    site.environment["STOKER_HOME"] = str(site.directory / "another-home")
    for verb in (("fill", "--config"), ("work", "--fill")):
        done = site.stoker(*verb, str(site.directory / "fill.conf"))
        assert done.code == 1
        assert re.fullmatch(
            rf"stoker: GPU 0 is being filled already by \w+ \(pid {worker.process.pid}\): .*\n", done.err
        )
