"""`stoker why` as typed: one sentence."""

from stoker.queue import Store
from tests.support.attempts import be_there, run, start, submit
from tests.support.command import stoker


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
    assert "3 other jobs come first" in why(jobs[-1])


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
