"""`stoker why` as typed: one sentence."""

import re

import pytest

from stoker.queue import Store
from stoker.queue.explanation import Forecast
from stoker.status.forecast import why as why_of
from tests.support.attempts import be_there, run, start, submit
from tests.support.command import stoker
from tests.support.work_site import WorkSite


def why(job: str) -> str:
    done = stoker("why", job)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1
    return done.out.strip()


def test_job_waiting_for_gpus_has_the_reason_of_its_worker(queue: Store) -> None:
    (job,) = submit(queue, "train", gpus=2)
    said = "waits for 2 GPUs with 20 GiB: GPU 0 is used by alice's python (pid 4242), GPU 1 frees in at most 3 h"
    be_there(queue, waiting={job: said})
    assert why(job) == f"train ({job}): waits for 2 GPUs with 20 GiB on gpu-box"
    assert why(job[:6]) == why(job)
    # GPU by GPU only on request.
    assert stoker("why", job, "-v").out.splitlines() == [why(job), f"on gpu-box: {said}"]
    assert stoker("why", job, "--json").json()["why"]["details"] == [f"on gpu-box: {said}"]


def test_reason_changes_with_the_job_state(queue: Store) -> None:
    first, second, third = submit(queue, "a", "b", "/opt/venv/bin/python third.py", name="")
    queue.jobs.edit(second, {"name": "later", "after": (first,)})
    queue.jobs.edit(third, {"after_any": (second,)})
    # A job without a name is called by its command, others by their names.
    assert why(third).startswith(f"python third.py ({third}): waits for job later ({second}, queued)")
    assert "no worker is there, and none ever was" in why(first)
    queue.pause()
    assert "the queue is paused" in why(first)
    queue.pause(False)
    be_there(queue)
    assert "it is next" in why(first)
    assert f"waits for job {first} (queued)" in why("later")
    attempt = start(queue, first, "GPU-0")
    assert "on gpu-box, GPU 0" in why(first)
    queue.attempts.finish(attempt.id, "failed", 1, "out of memory")
    assert "with exit code 1: out of memory" in why(first)
    assert f"can never start: it comes after {first}, which failed" in why("later")
    queue.jobs.hold([second])
    assert f"`stoker release {second}`" in why("later")


def test_job_behind_others_has_their_number(queue: Store) -> None:
    jobs = submit(queue, *"abcd")
    be_there(queue)
    assert "4th in line" in why(jobs[-1])


def test_more_gpus_than_any_machine_has_are_reported(queue: Store) -> None:
    (job,) = submit(queue, "a", gpus=64)
    be_there(queue, gpus=2)
    assert "it asks for 64 GPUs, and no worker has more than 2 (gpu-box)" in why(job)


def test_json_has_the_kind_of_the_reason(queue: Store) -> None:
    (job,) = submit(queue, "a")
    run(queue, job, "succeeded", 0)
    result = stoker("why", job, "--json").json()
    assert (result["job"], result["state"], result["why"]["kind"]) == (job, "succeeded", "ended")


def test_unknown_job_and_ambiguous_prefix_are_refused(queue: Store) -> None:
    submit(queue, *("x" * 40))
    shared = next(letter for letter in "0123456789abcdef" if len(stoker_jobs(queue, letter)) > 1)
    for text, words in (("nobody", "there is no job 'nobody'"), (shared, "fits several jobs")):
        done = stoker("why", text)
        assert (done.code, len(done.err.splitlines())) == (2, 1)
        assert words in done.err


def stoker_jobs(queue: Store, prefix: str) -> list[str]:
    return [job.id for job in queue.jobs.find() if job.id.startswith(prefix)]


def test_forecast_is_near_the_truth(site: WorkSite) -> None:
    """Two GPUs and jobs of three seconds, of which it is not known at first how long they take."""

    def submitted(count: int) -> list[str]:
        return [site.submit(f"sleep 3 # --seed {seed}", name=f"n{seed}", gpus=1) for seed in range(count)]

    def forecast(job: str) -> Forecast | None:
        return why_of(site.store, site.job(job)).forecast

    site.work().ready()
    *known, other = submitted(3)
    for job in known:
        site.wait_until(job, "running")
    assert forecast(other) == Forecast(place=1)
    site.store.jobs.cancel([other])
    for job in known:
        site.wait_until(job, "succeeded")
    site.store.pause()
    jobs = submitted(5)
    assert forecast(jobs[4]) is None  # while the queue is paused nobody knows
    site.store.pause(False)
    for job in jobs[:2]:
        site.wait_until(job, "running")
    found = [forecast(job) for job in jobs[2:]]
    assert [one and one.place for one in found] == [1, 2, 3]
    said, listed = why_of(site.store, site.job(jobs[4])), site.stoker("list").out
    site.wait_until(jobs[4], "running", "succeeded")
    started = [site.job(job).started or 0.0 for job in jobs[2:]]
    assert [one.starts if one is not None else None for one in found] == pytest.approx(started, abs=2.0)
    # By the time that it is listed the line may be shorter.
    for text in (said.word, said.reason, listed):
        assert re.search(r"(next|2nd|3rd) in line, (starts )?in less than a minute", text), text
