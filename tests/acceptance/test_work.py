"""`stoker work` as its users see it: which job starts when and on which GPUs, and the messages."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.queue import JobSpec, init_queue
from tests.support.command import stoker_command
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import wait_for
from tests.support.work_site import PATIENCE, WorkSite

GIB = 2**30
DRIVER_NOT_LOADED = 9
# The worker asks a queue that does not ring 5 s after it did so last: what starts within this was rung for.
WELL_BEFORE_THE_SLOW_POLL = 2.0
# A busy machine may be too slow once. Without the change listener nothing wakes the worker in time.
TRIES = 5


def ran_in_order(site: WorkSite) -> list[str]:
    return (site.directory / "order").read_text().split()


def test_jobs_run_by_priority_then_age(site: WorkSite) -> None:
    for name, priority in [("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)]:
        site.submit(f"echo {name} >> order", priority=priority)
    site.work_until_empty("--cpu-jobs", "1")
    assert ran_in_order(site) == ["c", "e", "a", "b", "d"]


def test_each_free_gpu_runs_the_next_job(site: WorkSite) -> None:
    jobs = [site.submit(site.until("flag"), gpus=1) for _ in range(3)]
    site.work()
    for job in jobs[:2]:
        site.wait_until(job, "running")
    assert {site.last_attempt(job).gpus for job in jobs[:2]} == {(site.uuid(0),), (site.uuid(1),)}
    held = f"GPU 0 is held by job {jobs[0]}, GPU 1 is held by job {jobs[1]}"
    site.wait_for_why(jobs[2], f"waits for a GPU.*{held}")
    site.create_flag("flag")
    site.wait_until(jobs[2], "succeeded")


def test_job_sees_its_gpus_by_uuid_and_a_job_without_gpus_sees_none(site: WorkSite) -> None:
    show = 'echo "[$CUDA_VISIBLE_DEVICES]"'
    one, two, none = (site.submit(show, gpus=gpus) for gpus in (1, 2, 0))
    site.work_until_empty()
    assert site.output(one).read_text() == f"[{site.uuid(0)}]\n"
    assert site.output(two).read_text() == f"[{site.uuid(0)},{site.uuid(1)}]\n"
    assert site.output(none).read_text() == "[]\n"


def test_two_gpu_job_is_not_starved_by_smaller_jobs(site: WorkSite) -> None:
    first = site.submit(site.until("first"), gpus=1)
    large = site.submit(site.until("large"), gpus=2)
    small = site.submit("true", gpus=1)
    site.work()
    site.wait_until(first, "running")
    kept = f"reserved for job {large} \\(2 GPUs, has 1\\)"
    site.wait_for_why(small, f"GPU 1 is {kept}")
    site.wait_for_why(large, r"GPUs are kept for it on \S+ \(2 GPUs, has 1: GPU 1\)")
    wait_for(lambda: re.search(f"nobody; {kept}", site.stoker("gpus").out), named="the same in `stoker gpus`")
    assert re.search(f"{large} +queued, has 1 of 2 GPUs", site.stoker("list").out)
    assert re.search(f" 1 .* {kept}, ", site.stoker("top", "--once").out)
    site.create_flag("first")
    site.wait_until(large, "running")
    assert site.job(small).state == "queued"
    wait_for(lambda: "kept" not in site.stoker("gpus").out, named="the same in `stoker gpus`")
    site.create_flag("large")
    site.wait_until(small, "succeeded")


def test_gpus_are_reserved_on_one_machine_and_the_other_continues(site: WorkSite, tmp_path: Path) -> None:
    site.environment["STOKER_QUEUE"] = str(site.home / "queue.db")
    for machine in ("one", "two"):
        site.work(home=tmp_path / machine, environment={"STOKER_SIM_DIR": str(tmp_path / machine / "sim")})
    jobs = [site.submit(site.until(f"flag{number}"), gpus=1) for number in range(4)]
    for job in jobs:
        site.wait_until(job, "running")
    large = site.submit("true", gpus=2)
    on: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        on.setdefault(site.last_attempt(job).worker, []).append(number)
    assert sorted(map(len, on.values())) == [2, 2]
    for first, _second in on.values():
        site.create_flag(f"flag{first}")
    site.wait_for_why(large, "GPUs are kept for it on .*2 GPUs, has 1")
    small = [site.submit("true", gpus=1) for _ in range(3)]
    for job in small:
        site.wait_until(job, "succeeded")
    kept = site.job(large).kept
    assert kept is not None
    assert {site.last_attempt(job).worker for job in small} == set(on) - {kept.worker}
    site.create_flag(f"flag{on[kept.worker][1]}")
    site.wait_until(large, "succeeded")
    assert site.last_attempt(large).worker == kept.worker
    assert site.job(large).kept is None


def test_small_job_backfills_where_it_delays_no_other(site: WorkSite) -> None:
    first = site.submit(site.until("first"), gpus=1, time_limit=600.0)
    large = site.submit("true", gpus=2)
    short = site.submit("true", gpus=1, time_limit=60.0)
    endless = site.submit("true", gpus=1, time_limit=1200.0)
    site.work()
    site.wait_until(short, "succeeded")
    assert [site.job(job).state for job in (first, large, endless)] == ["running", "queued", "queued"]
    site.wait_for_why(large, "frees in at most (10|9) min")


class TestFree:
    def test_gpu_with_a_foreign_process_is_not_used_until_it_ends(self, site: WorkSite) -> None:
        foreigner = site.foreigner("--gpu", "0", "--utilization", "0%")
        site.work("--gpus", "0")
        job = site.submit("true", gpus=1)
        site.wait_for_why(job, rf"waits for a GPU: GPU 0 is used by \w+'s \S+ \(pid {foreigner.pid}\)")
        foreigner.kill()
        site.wait_until(job, "succeeded")

    def test_only_the_named_gpus_are_used(self, site: WorkSite) -> None:
        jobs = [site.submit(site.until("flag"), gpus=1) for _ in range(2)]
        site.work("--gpus", "1")
        site.wait_until(jobs[0], "running")
        why = site.wait_for_why(jobs[1], "GPU 1 is held by")
        assert "GPU 0" not in why
        assert site.last_attempt(jobs[0]).gpus == (site.uuid(1),)
        assert not site.store.attempts.of(jobs[1])

    @pytest.mark.parametrize(("options", "starts"), [((), True), (("--free-below", "20%"), False)])
    def test_gpu_busier_than_free_below_counts_as_in_use(
        self, site: WorkSite, options: tuple[str, ...], starts: bool
    ) -> None:
        # A desktop is no foreigner, so that only its work can speak for it.
        desktop = _desktop(site, utilization=0.3)
        try:
            job = site.submit("true", gpus=1)
            site.work("--gpus", "0", *options)
            if starts:
                site.wait_until(job, "succeeded")
            else:
                site.wait_for_why(job, r"GPU 0 is 30% busy \(free below 20%\)")
                assert not site.store.attempts.of(job)
        finally:
            desktop.kill()
            desktop.wait()

    def test_jobs_wait_while_the_driver_hangs_and_start_afterwards(self, site: WorkSite) -> None:
        site.stoker("sim", "fault", "hang")
        site.work("--deadline", "0.5s")
        job, other = site.submit("true", gpus=1), site.submit("true")
        why = site.wait_for_why(job, "cannot be read|did not answer|hang")
        site.wait_until(other, "succeeded")
        assert not site.store.attempts.of(job), why
        site.stoker("sim", "fault", "--clear")
        site.wait_until(job, "succeeded")

    def test_lost_gpu_is_not_used_and_the_other_is(self, site: WorkSite) -> None:
        site.stoker("sim", "fault", "lost", "--gpu", "0")
        jobs = [site.submit(site.until("flag"), gpus=1) for _ in range(2)]
        site.work()
        site.wait_until(jobs[0], "running")
        assert site.last_attempt(jobs[0]).gpus == (site.uuid(1),)
        site.wait_for_why(jobs[1], r"GPU 0 is out of rotation \(XID 79: the GPU has fallen off the bus\)")

    def test_machine_without_gpus_runs_jobs_that_need_none(self, site: WorkSite) -> None:
        worker = site.work("--source", "nvml")
        job, needy = site.submit("true"), site.submit("true", gpus=1)
        site.wait_until(job, "succeeded")
        worker.wait_until_it_says("libnvidia-ml.so.1 is not installed .*: only jobs without a GPU are run")
        unread = r"the GPUs of this machine cannot be read \(the library libnvidia-ml.so.1 is not installed"
        site.wait_for_why(needy, f"waits for a GPU.*{unread}")

    def test_no_job_starts_on_gpus_that_became_unreadable(self, site: WorkSite) -> None:
        first = site.submit(site.until("flag"), gpus=2)
        site.work()
        site.wait_until(first, "running")
        site.stoker("sim", "fault", "absent")
        second = site.submit("true", gpus=1)
        site.wait_for_why(second, "cannot be read")
        site.create_flag("flag")
        site.wait_until(first, "succeeded")
        site.wait_for_why(second, "cannot be read")
        assert not site.store.attempts.of(second)
        site.stoker("sim", "fault", "--clear")
        site.wait_until(second, "succeeded")

    def test_no_job_starts_after_the_driver_is_unloaded(self, site: WorkSite, nvidia: MockMachine) -> None:
        first = site.submit(site.until("flag"), gpus=2)
        worker = site.work("--source", "nvml")
        site.wait_until(first, "running")
        nvidia.fault("nvmlInitWithFlags", code=DRIVER_NOT_LOADED)
        os.kill(_reader_of(worker.process.pid), signal.SIGKILL)
        second = site.submit("true", gpus=1)
        site.wait_for_why(second, "the NVIDIA driver is not loaded")
        site.create_flag("flag")
        site.wait_until(first, "succeeded")
        site.wait_for_why(second, "the NVIDIA driver is not loaded")
        assert not site.store.attempts.of(second)


def _reader_of(worker: int) -> int:
    """The worker's helper that reads the GPUs."""
    found = [int(pid) for pid in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()]
    (reader,) = [pid for pid in found if Path(f"/proc/{pid}/comm").read_text() != "stoker-forksrv\n"]
    return reader


def _desktop(site: WorkSite, utilization: float) -> "subprocess.Popen[bytes]":
    script = (
        "from stoker.runs.processes.syscalls import set_name\n"
        "from stoker.gpus.sim import SimulatedProcess\n"
        "import time\n"
        "set_name('Xorg')\n"
        "gpu = SimulatedProcess.attach(gpu=0)\n"
        "gpu.allocate(2**20)\n"
        f"gpu.work(utilization={utilization})\n"
        "print('there', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, **site.environment}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"there\n"
    return process


class TestSharing:
    def test_jobs_share_a_gpu_within_its_memory(self, site: WorkSite) -> None:
        """They use nothing yet: a job that is still loading holds what it asked for."""
        jobs = [site.submit(site.until(f"flag{n}"), gpus=1, share=True, memory=10 * GIB) for n in range(3)]
        site.work("--gpus", "0")
        for job in jobs[:2]:
            site.wait_until(job, "running")
        site.wait_for_why(jobs[2], f"GPU 0 has 3.5 GiB left beside jobs {jobs[0]} and {jobs[1]}")
        site.create_flag("flag0")
        site.wait_until(jobs[2], "running")
        assert site.job(jobs[1]).state == "running"

    def test_memory_above_the_request_counts_as_used(self, site: WorkSite) -> None:
        greedy = site.submit("exec stoker sim load --memory 16GiB --for 600s", gpus=1, share=True, memory=4 * GIB)
        site.work("--gpus", "0")
        second = site.submit("true", gpus=1, share=True, memory=20 * GIB)
        site.wait_for_why(second, f"GPU 0 has 7.5 GiB left beside job {greedy}")

    def test_job_without_sharing_has_its_gpu_exclusively(self, site: WorkSite) -> None:
        alone = site.submit(site.until("flag"), gpus=1)
        sharing = site.submit("true", gpus=1, share=True, memory=GIB)
        site.work("--gpus", "0")
        site.wait_until(alone, "running")
        site.wait_for_why(sharing, f"GPU 0 is held by job {alone}")

    def test_slots_per_gpu_limits_the_jobs_on_one_gpu(self, site: WorkSite) -> None:
        jobs = [site.submit(site.until(f"flag{n}"), gpus=1) for n in range(3)]
        site.work("--gpus", "0", "--slots-per-gpu", "2")
        for job in jobs[:2]:
            site.wait_until(job, "running")
        site.wait_for_why(jobs[2], "waits for a GPU: GPU 0")
        assert site.job(jobs[2]).state == "queued"
        site.create_flag("flag1")
        site.wait_until(jobs[2], "running")


class TestPreemption:
    # Says that it was asked to end, and how far it was.
    POLITE = "trap 'echo asked >> asked; exit 0' TERM; touch started-{id}; while :; do sleep 0.05; done"

    def test_newest_preemptible_job_is_preempted_and_requeued(self, site: WorkSite) -> None:
        site.work()
        older = self.start(site)
        newer = self.start(site)
        normal = site.submit(site.until("flag"), gpus=1)
        site.wait_until(normal, "running")
        assert site.last_attempt(normal).gpus == site.store.attempts.of(newer)[0].gpus
        assert (site.directory / "asked").read_text() == "asked\n"
        back = site.job(newer)
        assert (back.state, back.retries_left, back.exit_code) == ("queued", 1, None)
        assert [attempt.outcome for attempt in site.store.attempts.of(newer)] == ["preempted"]
        assert site.job(older).state == "running"
        site.create_flag("flag")
        site.wait_until(newer, "running")
        assert site.last_attempt(newer).number == 2

    def test_no_more_jobs_are_preempted_than_needed(self, site: WorkSite) -> None:
        site.work()
        jobs = [self.start(site), self.start(site)]
        site.submit(site.until("flag"), gpus=0)
        large = site.submit("true", gpus=2)
        site.wait_until(large, "succeeded")
        for job in jobs:
            site.wait_until(job, "running")
        assert [len(site.store.attempts.of(job)) for job in jobs] == [2, 2]
        # One of them is in nobody's way: its GPU is free already.
        site.store.jobs.cancel([jobs[0]])
        site.wait_until(jobs[0], "cancelled")
        site.wait_until(site.submit("true", gpus=1), "succeeded")
        assert len(site.store.attempts.of(jobs[1])) == 2

    def test_job_that_ignores_the_stop_is_killed_after_the_grace(self, site: WorkSite) -> None:
        site.work("--gpus", "0", "--grace", "0.5s")
        stubborn = self.start(site, "trap '' TERM; touch started-{id}; while :; do sleep 0.05; done")
        site.wait_until(site.submit("true", gpus=1), "succeeded")
        assert site.store.attempts.of(stubborn)[0].outcome == "preempted"

    def start(self, site: WorkSite, command: str = POLITE) -> str:
        job = site.submit(command, gpus=1, preemptible=True, retries=1)
        wait_for((site.directory / f"started-{job}").exists, deadline=PATIENCE, named=f"the start of {job}")
        return job


class TestSteering:
    def test_cancelled_job_is_stopped_with_everything_it_started(self, site: WorkSite) -> None:
        # One child in a separate session, and one orphan.
        job = site.submit("setsid sleep 4242 & (sleep 4343 &) ; echo $$ > pid; sleep 4444")
        site.work("--grace", "1s")
        wait_for((site.directory / "pid").exists, deadline=PATIENCE)
        site.stoker("cancel", job)
        found = site.wait_until(job, "cancelled")
        assert "sleep" not in site.processes().values()
        assert found.exit_code is None
        assert site.stoker("wait", job).code != 0

    def test_held_job_starts_when_it_is_released(self, site: WorkSite) -> None:
        site.work()

        def starts_when_released() -> float:
            job = site.submit("true", hold=True)
            site.wait_until(site.submit("true"), "succeeded")
            assert site.job(job).state == "held"
            # Not by the command, which takes long to start on a busy machine: by then a poll may be due.
            assert site.store.jobs.release([job]) == [job]
            return _until_started(site, job)

        _was_rung_for(starts_when_released)

    @pytest.mark.parametrize("whom", ["queue", "worker"])
    def test_paused_queue_or_worker_starts_nothing_and_running_jobs_continue(self, site: WorkSite, whom: str) -> None:
        site.work()
        flags = iter(range(TRIES))

        def starts_when_resumed() -> float:
            flag = f"flag{next(flags)}"
            running = site.submit(site.until(flag))
            site.wait_until(running, "running")
            (worker,) = wait_for(site.store.workers.all)
            options = () if whom == "queue" else ("--worker", worker.host)
            assert site.stoker("pause", *options).code == 0
            job = site.submit("true")
            site.wait_for_why(job, "paused")
            site.create_flag(flag)
            site.wait_until(running, "succeeded")
            assert site.job(job).state == "queued"
            if whom == "queue":
                site.store.pause(False)
            else:
                assert site.store.workers.pause(worker.id, False)
            return _until_started(site, job)

        _was_rung_for(starts_when_resumed)

    def test_jobs_wait_for_their_dependencies(self, site: WorkSite) -> None:
        good, bad = site.submit("sleep 0.3; echo good >> order"), site.submit("sleep 0.3; exit 3")
        after_good = site.submit("echo after >> order", after=(good,))
        after_bad = site.submit("echo never >> order", after=(bad,))
        in_any_case = site.submit("echo any >> order", after_any=(bad, after_good))
        site.work_until_empty()
        assert ran_in_order(site) == ["good", "after", "any"]
        assert site.job(in_any_case).state == "succeeded"
        assert f"can never start: it comes after {bad}, which failed" in site.stoker("why", after_bad).out


class TestTheWorkerItself:
    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (("--lease", "1s"), "a lease of 1s leaves no time to stop a job with a grace of 30s before it ends"),
            (("--lease", "soon"), "soon"),
            (("--gpus", "7"), "there is no GPU 7 here: this machine has 0, 1"),
            (("--gpus", "x"), "x"),
            (("--free-below", "200%"), "200%"),
            (("--slots-per-gpu", "0"), "0"),
            (("--log-limit", "lots"), "lots"),
            (("--source", "sim:x"), "sim:x"),
        ],
    )
    def test_invalid_options_are_refused(self, site: WorkSite, options: tuple[str, ...], sentence: str) -> None:
        done = site.stoker("work", *options)
        assert done.code == 2
        assert sentence in done.err
        assert len(done.err.strip().splitlines()) == 1
        wait_for(lambda: not site.processes(), deadline=PATIENCE, named="the end of its processes")

    @pytest.mark.parametrize("grace", ["0.1s", "30s", "10m"])
    def test_suggested_lease_is_accepted(self, site: WorkSite, grace: str) -> None:
        refused = site.stoker("work", "--lease", "1s", "--grace", grace)
        suggested = re.search(r"use at least (\S+)", refused.err)
        assert suggested is not None, refused.err
        site.work_until_empty("--lease", suggested[1], "--grace", grace)

    def test_second_worker_in_the_same_home_is_refused(self, site: WorkSite) -> None:
        first = site.work().ready()
        done = site.stoker("work")
        assert done.code == 1
        assert f"another worker (pid {first.process.pid}) runs in" in done.err

    def test_until_empty_ends_and_leaves_no_process(self, site: WorkSite) -> None:
        jobs = [site.submit("true", gpus=number % 2) for number in range(8)]
        never = site.submit("true", gpus=3)
        done = site.work_until_empty()
        wait_for(lambda: not site.processes(), deadline=PATIENCE, named=f"the end of {site.processes()}")
        assert {site.job(job).state for job in jobs} == {"succeeded"}
        assert site.job(never).state == "queued"
        assert "nothing is left that could start here" in done.out

    def test_ctrl_c_ends_the_worker_but_not_its_jobs_and_the_next_worker_adopts_them(self, site: WorkSite) -> None:
        job = site.submit(f"{site.until('flag')}; exit 7")
        worker = site.work()
        site.wait_until(job, "running")
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(timeout=PATIENCE) == 0
        assert "1 job continues: the next `stoker work` here finds it again" in worker.said
        site.work().wait_until_it_says("found 1 job that an earlier worker had started")
        site.create_flag("flag")
        assert site.wait_until(job, "failed").exit_code == 7
        assert len(site.store.attempts.of(job)) == 1

    def test_jobs_for_larger_machines_do_not_block_later_jobs(self, site: WorkSite) -> None:
        large = [JobSpec(command="true", gpus=4) for _ in range(450)]
        site.store.jobs.submit(large)
        jobs = [site.submit("true", gpus=gpus) for gpus in (0, 1)]
        site.work_until_empty()
        assert [site.job(job).state for job in jobs] == ["succeeded", "succeeded"]

    def test_many_jobs_waiting_for_gpus_do_not_block_a_cpu_job(self, site: WorkSite) -> None:
        holder = site.submit(site.until("flag"), gpus=2)
        site.work()
        site.wait_until(holder, "running")
        site.store.jobs.submit([JobSpec(command="true", gpus=1) for _ in range(450)])
        site.wait_until(site.submit("true"), "succeeded")
        assert site.job(holder).state == "running"

    def test_worker_works_when_its_output_cannot_be_read(self, site: WorkSite) -> None:
        job = site.submit("echo 🚀")
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [stoker_command(), "work", "--until-empty"],
                env={**os.environ, **site.environment, "PYTHONIOENCODING": "ascii"},
                stdout=full,
                timeout=60,
                check=False,
            )
        assert done.returncode == 0
        assert site.job(job).state == "succeeded"

    def test_file_without_a_queue_is_refused(self, site: WorkSite) -> None:
        (site.directory / "notes.txt").write_text("not a queue " * 100)
        done = site.stoker("work", "--queue", str(site.directory / "notes.txt"))
        assert done.code in {1, 2}
        assert "notes.txt" in done.err
        assert len(done.err.strip().splitlines()) == 1
        wait_for(lambda: not site.processes(), deadline=PATIENCE, named="the end of its processes")

    def test_worker_uses_little_cpu_while_jobs_wait(self, site: WorkSite) -> None:
        site.foreigner("--gpu", "0")
        site.foreigner("--gpu", "1")
        job = site.submit("true", gpus=1)
        worker = site.work()
        site.wait_for_why(job, "used by")
        used, begun = _cpu_seconds(worker.process.pid), time.monotonic()
        wait_for(lambda: time.monotonic() > begun + 2.0)
        used = _cpu_seconds(worker.process.pid) - used
        assert used < 0.25 * (time.monotonic() - begun)

    @pytest.mark.parametrize("gpus", [0, 1])
    def test_submit_wakes_the_worker_on_sqlite(self, site: WorkSite, gpus: int) -> None:
        site.work()
        _starts_at_once(site, gpus)

    @pytest.mark.parametrize("gpus", [0, 1])
    def test_submit_wakes_the_worker_on_postgres(self, tmp_path: Path, postgres_url: str, gpus: int) -> None:
        with (
            init_queue(postgres_url) as store,
            contextlib.closing(WorkSite(tmp_path, store, queue=postgres_url)) as site,
        ):
            site.work()
            _starts_at_once(site, gpus)

    def test_two_machines_share_one_queue(self, tmp_path: Path, postgres_url: str) -> None:
        with (
            init_queue(postgres_url) as store,
            contextlib.closing(WorkSite(tmp_path, store, queue=postgres_url)) as site,
        ):
            for number in (0, 1):
                machine = {"STOKER_SIM_DIR": str(tmp_path / f"sim-{number}")}
                site.work("--gpus", "0", home=tmp_path / f"home-{number}", environment=machine)
            jobs = [site.submit(site.until("flag"), gpus=1) for _ in range(3)]
            wait_for(lambda: len(store.attempts.running()) == 2, deadline=PATIENCE)
            assert len({attempt.worker for attempt in store.attempts.running()}) == 2
            site.create_flag("flag")
            for job in jobs:
                site.wait_until(job, "succeeded")
            assert [len(store.attempts.of(job)) for job in jobs] == [1, 1, 1]


def _starts_at_once(site: WorkSite, gpus: int) -> None:
    site.wait_until(site.submit("true"), "succeeded")

    def starts() -> float:
        job = site.wait_until(site.submit("true", gpus=gpus), "succeeded")
        assert job.started is not None
        return job.started - job.submitted

    # Twice: a poll that happened to be due can explain one of them.
    for _ in range(2):
        _was_rung_for(starts)


def _until_started(site: WorkSite, job: str) -> float:
    """How much later than now it starts, by the queue's own clock."""
    now = site.store.clock()
    started = site.wait_until(job, "succeeded").started
    assert started is not None
    return started - now


def _was_rung_for(starts: Callable[[], float]) -> None:
    """`starts` has something started, and says how many seconds that took."""
    taken: list[float] = []
    while len(taken) < TRIES and not any(one < WELL_BEFORE_THE_SLOW_POLL for one in taken):
        taken.append(starts())
    assert min(taken) < WELL_BEFORE_THE_SLOW_POLL, taken


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
