"""`stoker work` and `stoker gpus` when a GPU fails: its job starts elsewhere, and nothing else starts there."""

import json
import re

import pytest

from tests.support.work_site import WorkSite

LOST = "XID 79: the GPU has fallen off the bus"


def on_gpu_0(site: WorkSite, what: str) -> str:
    """A command that does this on GPU 0, and succeeds elsewhere."""
    return f'if [ "$CUDA_VISIBLE_DEVICES" = {site.uuid(0)} ]; then {what}; fi; echo done'


def break_gpu(site: WorkSite, *fault: str) -> None:
    assert site.stoker("sim", "fault", *fault, "--gpu", "0").code == 0


def outcomes(site: WorkSite, job: str) -> list[str | None]:
    return [attempt.outcome for attempt in site.store.attempts.of(job)]


def quarantines(site: WorkSite) -> list[str | None]:
    found = json.loads(site.stoker("gpus", "--json").out)
    return [gpu["quarantine"] and gpu["quarantine"]["reason"] for gpu in found]


def test_job_on_a_gpu_that_falls_off_the_bus_finishes_on_another(site: WorkSite) -> None:
    job = site.submit(on_gpu_0(site, f"{site.until('broken')}; exit 1"), gpus=1, retries=2)
    worker = site.work()
    site.wait_until(job, "running")
    assert site.last_attempt(job).gpus == (site.uuid(0),)
    break_gpu(site, "lost")
    site.create_flag("broken")
    assert site.wait_until(job, "succeeded", "failed").state == "succeeded"
    assert outcomes(site, job) == ["requeued", "succeeded"]
    assert site.job(job).retries_left == 2
    assert site.last_attempt(job).gpus == (site.uuid(1),)
    assert f"failed ({LOST})" in site.stoker("show", job).out
    worker.wait_until_it_says(f"GPU 0 is out of rotation .{LOST}.: `stoker gpus --release 0` brings it back")
    assert "quarantined since" in site.stoker("gpus").out
    assert quarantines(site) == [LOST, None]

    both = site.submit("true", gpus=2)
    site.wait_for_why(both, f"GPU 0 is out of rotation .{LOST}.")
    # The fault is gone, which proves nothing; a restart of the worker changes nothing either.
    assert site.stoker("sim", "fault", "--clear").code == 0
    worker.stop()
    site.work().wait_until_it_says("GPU 0 is out of rotation")
    site.wait_for_why(both, "GPU 0 is out of rotation")

    released = site.stoker("gpus", "--release", "0")
    assert released.out == f"GPU 0 is in rotation again; it was out of it because of: {LOST}\n"
    site.wait_until(both, "succeeded")
    assert quarantines(site) == [None, None]


@pytest.mark.parametrize("fault", [("xid", "48"), ("ecc", "3")])
def test_gpu_with_memory_errors_gets_no_more_jobs(site: WorkSite, fault: tuple[str, str]) -> None:
    job = site.submit(on_gpu_0(site, f"{site.until('broken')}; exit 1"), gpus=1)
    site.work()
    site.wait_until(job, "running")
    break_gpu(site, *fault)
    site.create_flag("broken")
    site.wait_until(job, "succeeded", "failed")
    assert outcomes(site, job) == ["requeued", "succeeded"]
    later = site.submit("true", gpus=1)
    site.wait_until(later, "succeeded")
    assert site.last_attempt(later).gpus == (site.uuid(1),)


def test_job_that_fails_on_gpus_in_good_health_fails(site: WorkSite) -> None:
    jobs = [site.submit(f"echo CUDA error: unknown error {seed}; exit 1", gpus=1) for seed in range(4)]
    site.work_until_empty()
    assert [site.job(job).state for job in jobs] == ["failed"] * 4
    assert quarantines(site) == [None, None]


def test_gpu_that_fails_two_different_jobs_at_their_start_is_taken_out(site: WorkSite) -> None:
    for name in ("first", "second"):
        failure = "echo 'RuntimeError: CUDA error: unspecified launch failure'; exit 1"
        (site.directory / f"{name}.sh").write_text(on_gpu_0(site, failure))
    first = site.submit("sh first.sh", gpus=1)
    site.work()
    site.wait_until(first, "failed")
    second = site.submit("sh second.sh", gpus=1)
    site.wait_until(second, "succeeded", "failed")
    assert outcomes(site, second) == ["requeued", "succeeded"]
    assert quarantines(site) == [
        f"jobs {first} and {second} failed on it right after their start: CUDA error: unspecified launch failure",
        None,
    ]


def test_administrator_takes_a_gpu_out_and_back(site: WorkSite) -> None:
    taken = site.stoker("gpus", "--quarantine", "0", "--reason", "its fan rattles")
    assert taken.out == "GPU 0 is out of rotation: 'stoker gpus --release 0' brings it back\n"
    assert quarantines(site) == ["its fan rattles", None]
    job = site.submit("true", gpus=1)
    site.work_until_empty()
    assert site.last_attempt(job).gpus == (site.uuid(1),)
    assert site.stoker("gpus", "--release", site.uuid(0)).code == 0
    assert site.stoker("gpus", "--release", "all").out == "no GPU was out of rotation\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--release", "3"], "GPU 3 is not out of rotation; none is, by /.*stoker-home$"),
        (["--release", "x", "--json"], "--release and --quarantine cannot be combined with options that show GPUs"),
        (["--release", "0", "--quarantine", "0"], "--release and --quarantine exclude each other"),
        (["--reason", "x"], "--reason needs --quarantine"),
        (["--quarantine", "7"], "there is no GPU 7"),
        (["--quarantine", "0", "--reason", " "], "--reason must not be empty"),
    ],
)
def test_bad_input_is_one_sentence(site: WorkSite, arguments: list[str], message: str) -> None:
    done = site.stoker("gpus", *arguments)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert re.search(message, done.err)
