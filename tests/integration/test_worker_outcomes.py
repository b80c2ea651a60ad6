"""Outcomes of jobs: retries, time limits, idle stops, and commands that cannot start."""

import contextlib
import time
from itertools import pairwise
from pathlib import Path

import pytest

from stoker.queue import Job, Store
from stoker.runs.record import Record
from tests.support.either_queue import queue, url
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

__all__ = ["queue", "url"]

IDLE_AT_ONCE = {"every": 0.2, "window": 1.0, "after": 0.0}


def outcomes(site: WorkSite, job: str) -> list[tuple[str | None, int | None]]:
    return [(attempt.outcome, attempt.exit_code) for attempt in site.store.attempts.of(job)]


def record(site: WorkSite, job: str) -> Record:
    return Record(site.output(job).parent)


def test_failed_job_is_retried_after_its_backoff_and_then_fails(site: WorkSite) -> None:
    job = site.submit("echo attempt $STOKER_ATTEMPT; exit 3", retries=2, backoff=0.2)
    site.work_until_empty()
    found = site.job(job)
    assert (found.state, found.exit_code, found.retries_left) == ("failed", 3, 0)
    assert outcomes(site, job) == [("failed", 3)] * 3
    assert [site.output(job, number).read_text() for number in (1, 2, 3)] == [f"attempt {n}\n" for n in (1, 2, 3)]
    first, second, third = site.store.attempts.of(job)
    assert first.ended is not None
    assert second.ended is not None
    assert second.started - first.ended >= 0.2
    assert third.started - second.ended >= 0.4


def test_unreadable_jobs_fail_with_a_reason_and_the_worker_continues(tmp_path: Path, queue: Store, url: str) -> None:
    with contextlib.closing(WorkSite(tmp_path, queue, queue=url)) as site:
        first, second, third = (site.submit("true", gpus=0) for _ in range(3))
        for job in (first, third):
            queue._driver.fetch_text(f"UPDATE stoker_jobs SET spec = '{{' WHERE id = '{job}'", {})
        site.work_until_empty()
        assert [site.job(job).state for job in (first, second, third)] == ["failed", "succeeded", "failed"]
        assert [site.job(job).exit_code for job in (first, third)] == [125, 125]
        assert all("cannot be read" in site.job(job).reason for job in (first, third))
        listed = site.stoker("list", "--all")
        assert listed.code == 0, listed
        assert first in listed.out


def test_job_that_succeeds_on_its_second_attempt_has_succeeded(site: WorkSite) -> None:
    job = site.submit("[ $STOKER_ATTEMPT = 2 ]", retries=5, backoff=0.0)
    site.work_until_empty()
    assert site.job(job).state == "succeeded"
    assert outcomes(site, job) == [("failed", 1), ("succeeded", 0)]


def test_job_is_stopped_at_its_time_limit(site: WorkSite) -> None:
    job = site.submit("exec sleep 600", time_limit=0.5)
    site.work_until_empty()
    found = site.job(job)
    assert (found.state, found.exit_code) == ("failed", 124)
    assert found.reason == "It had run for 0.5s, which was its time limit"
    pid = record(site, job).status().job
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()


def test_hung_job_is_stopped_and_its_report_is_kept(site: WorkSite) -> None:
    command = "echo loss 0.3; echo warned >&2; exec stoker sim load --phase idle"
    hung = site.submit(command, gpus=1, policy=IDLE_AT_ONCE)
    site.work("--gpus", "0")
    found = site.wait_until(hung, "failed")
    assert found.exit_code == 124
    assert "idle" in found.reason or "below 1%" in found.reason, found.reason
    site.wait_until(site.submit("true", gpus=1), "succeeded")
    shown = site.stoker("show", hung).out
    report = site.output(hung).with_name("report.md").read_text()
    assert found.reason in shown
    assert "sim load" in report
    assert report.splitlines()[0] in shown
    assert "Captured output:\n\n```text\nloss 0.3\nwarned\n" in report
    assert f"`stoker edit {hung} --for 2h`, then `stoker retry {hung}`" in report


def test_busy_job_is_left_alone_under_the_same_rule(site: WorkSite) -> None:
    # It is judged once it has begun to work, however long that takes.
    command = f"stoker sim load --memory 1GiB & {site.until('flag')}"
    job = site.submit(command, gpus=1, policy=IDLE_AT_ONCE | {"arm_above": 0.5})
    site.work()
    wait_for(lambda: record(site, job).status().verdict == "busy", named="that it is seen to work")
    time.sleep(1.5 * IDLE_AT_ONCE["window"])
    site.create_flag("flag")
    assert site.wait_until(job, "succeeded", "failed").state == "succeeded"


@pytest.mark.parametrize(
    ("asked", "code", "sentence"),
    [
        ({"command": ("no-such-command", "x")}, 127, "cannot run 'no-such-command': there is no such command"),
        ({"command": "no-such-command"}, 127, ""),
        ({"command": ("/etc/passwd",)}, 126, "cannot run '/etc/passwd': it may not be executed"),
        ({"command": "true", "directory": "/no/such/place"}, 125, "the directory to run it in cannot be entered"),
        ({"command": "true", "pin": True, "commit": "0" * 40}, 125, "no snapshot of"),
        ({"command": "true", "gpus": 1, "policy": {"strange": 1}}, 125, "the policy of job"),
        ({"command": "kill -9 $$"}, 137, "it died of SIGKILL"),
    ],
)
def test_job_that_cannot_start_fails_with_a_reason_and_the_next_job_runs(
    site: WorkSite, asked: dict[str, object], code: int, sentence: str
) -> None:
    job = site.submit(**asked)  # type: ignore[arg-type]  # by name
    after = site.submit("true")
    site.work_until_empty()
    found: Job = site.job(job)
    assert (found.state, found.exit_code) == ("failed", code)
    assert sentence in found.reason
    assert site.job(after).state == "succeeded"


def test_leftovers_of_a_job_are_stopped_before_the_next_gets_its_gpu(site: WorkSite) -> None:
    first = site.submit("stoker sim load --for 600s & sleep 1", gpus=1)
    second = site.submit("true", gpus=1)
    site.work_until_empty("--gpus", "0")
    assert [site.job(job).state for job in (first, second)] == ["succeeded", "succeeded"]
    assert "left 1 process(es) behind: they are stopped" in site.output(first).read_text()


def test_job_after_a_killed_one_runs_normally(site: WorkSite) -> None:
    """The processes that look after jobs are used again."""
    for _ in range(4):
        site.submit("trap '' TERM; while :; do sleep 0.02; done", time_limit=0.3)
    jobs = [site.submit(("true",)) for _ in range(4)] + [site.submit(("no-such-command",))]
    site.work_until_empty("--grace", "0.2s", "--cpu-jobs", "1")
    assert [site.job(job).exit_code for job in jobs] == [0, 0, 0, 0, 127]


def test_gpu_of_an_ended_job_is_free_at_once(site: WorkSite) -> None:
    """Memory that comes back with the end of a process is not waited for longer than that takes."""
    jobs = [site.submit("exec stoker sim load --memory 20GiB --for 0.3s", gpus=1) for _ in range(3)]
    site.work_until_empty("--gpus", "0")
    assert [site.job(job).state for job in jobs] == ["succeeded"] * 3
    # One of the two changes: the machine may have been busy during the other.
    changes = [site.last_attempt(after).started - (site.job(job).ended or 0.0) for job, after in pairwise(jobs)]
    assert min(changes) < 5.0


def test_reason_of_a_preempted_job_names_the_preemption(site: WorkSite) -> None:
    site.work("--gpus", "0")
    filler = site.submit(site.until("flag"), gpus=1, preemptible=True)
    site.wait_until(filler, "running")
    site.wait_until(site.submit(site.until("flag"), gpus=1), "running")
    assert wait_for(lambda: site.store.attempts.of(filler)[0].reason) == "It was preempted by another job"
