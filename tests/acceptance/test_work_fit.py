"""Jobs whose batch size is found first: `stoker submit --fit`, and a text file from its line to the finished list."""

from pathlib import Path

import pytest

from stoker.queue import WorkerGpu
from tests.support.feeding import Feeders, write_trainer
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

QUICKLY = "--flat-for 500ms"


@pytest.fixture
def trainer(site: WorkSite) -> Path:
    site.environment["STOKER_GPUS"] = "sim:1x24GiB"
    return write_trainer(site.directory)


def submitted(site: WorkSite, *words: str) -> str:
    done = site.stoker("submit", "--directory", str(site.directory), *words)
    assert done.code == 0, done.err
    return done.out.strip()


def seen_memory(site: WorkSite) -> WorkerGpu | None:
    """The GPU as the worker reports it, once it is in use."""
    gpus = [gpu for worker in site.store.workers.all() for gpu in worker.view.gpus if (gpu.memory_used or 0) > 2**30]
    return gpus[0] if gpus else None


def output_of(site: WorkSite, job: str) -> str:
    return site.stoker("logs", job).out


def test_size_is_found_on_the_assigned_gpu_and_used_for_the_run(site: WorkSite, trainer: Path) -> None:
    job = submitted(
        site, "--fit-with", f"{QUICKLY} --probe-args --wandb_log=False", "--", str(trainer), "--id={id}", "--as={{id}}"
    )
    site.work_until_empty()
    assert site.job(job).state == "succeeded"
    assert site.job(job).reason == "batch size 200"
    found = site.store.attempts.details(site.last_attempt(job).id)
    assert found is not None
    assert found.fit["size"] == 200
    assert [probe["outcome"] for probe in found.fit["observations"]].count("fits") >= 2
    (real,) = [line for line in output_of(site, job).splitlines() if line.startswith("trains: ")]
    assert real == f"trains: --id={job} --as={{id}} --batch_size=200"
    probes = sorted(path.name for path in (site.home / "attempts" / f"{job}-1" / "probes").iterdir())
    assert any("wandb_log=False" in path.read_text() for path in (site.home / f"attempts/{job}-1/probes").iterdir())
    assert len(probes) <= 3
    # What a probe saves under its id is never what the real run goes on from.
    printed = [path.read_text() for path in (site.home / f"attempts/{job}-1/probes").iterdir()]
    result = {line for text in printed for line in text.splitlines() if line.startswith("tracks: ")}
    assert result == {f"tracks: {job}-probe{number} in , disabled, probe 1" for number in range(1, len(printed) + 1)}
    ids = {word for text in printed for word in text.split() if word.startswith("--id=")}
    assert ids == {f"--id={job}-probe{number}" for number in range(1, len(printed) + 1)}
    assert f"tracks: {job} in {job}, online, probe no\n" in output_of(site, job)


def test_shared_job_is_fitted_to_its_requested_memory(site: WorkSite, trainer: Path) -> None:
    job = submitted(site, "--share", "--memory", "6GiB", "--fit-with", QUICKLY, "--", str(trainer))
    site.work_until_empty()
    assert site.job(job).reason == "batch size 32"


def test_size_placeholder_is_replaced_in_shell_commands(site: WorkSite, trainer: Path) -> None:
    job = submitted(
        site, "--fit-with", QUICKLY, f"echo first; {trainer} --batch_size={{batch_size}} --note '{{{{batch_size}}}}'"
    )
    site.work_until_empty()
    assert "trains: --batch_size=200 --note {batch_size}\n" in output_of(site, job)


def test_run_that_is_out_of_memory_is_restarted_with_a_smaller_size(site: WorkSite, trainer: Path) -> None:
    job = submitted(site, "--fit-with", QUICKLY, "--env", "MORE=40", "--", str(trainer))
    site.work_until_empty()
    sentence = "batch size 160, as it ran out of memory with 200"
    assert (site.job(job).state, site.job(job).reason) == ("succeeded", sentence)
    assert "a batch of 200 ran out of memory after" in site.stoker("show", job).out
    output = output_of(site, job)
    assert "stoker: it ran out of memory, and is started again with a batch of 160\n" in output
    assert output.count("trains: ") == 2
    again = submitted(site, "--fit-with", QUICKLY, "--env", "MORE=40", "--", str(trainer))
    site.work_until_empty()
    assert site.job(again).reason == "batch size 160", "the next one like it begins there"


def test_run_that_fails_early_without_output_is_restarted_with_a_smaller_size(site: WorkSite, trainer: Path) -> None:
    trainer.write_text(trainer.read_text().replace("lasts=0.1s; fi", "lasts=0.1s; [ $size -le 180 ] || exit 1; fi"))
    job = submitted(site, "--fit-with", QUICKLY, "--", str(trainer))
    site.work_until_empty()
    assert site.job(job).reason == "batch size 160, as it probably ran out of memory with 200"


def test_out_of_memory_without_retries_is_a_failure(site: WorkSite, trainer: Path) -> None:
    job = submitted(site, "--fit-with", QUICKLY, "--retries-oom", "0", "--env", "MORE=40", "--", str(trainer))
    site.work_until_empty()
    assert site.job(job).state == "failed"
    assert output_of(site, job).count("trains: ") == 1


def test_probe_that_fails_for_another_reason_fails_the_job_with_it(site: WorkSite, trainer: Path) -> None:
    job = submitted(site, "--fit-with", QUICKLY, "--", "sh", "-c", "echo the data is missing; exit 3")
    site.work_until_empty()
    assert site.job(job).state == "failed"
    assert "the probe at batch size 8 failed with code 3" in site.job(job).reason
    assert "the data is missing" in site.job(job).reason


def test_job_can_be_cancelled_during_the_size_search(site: WorkSite, trainer: Path) -> None:
    job = submitted(site, "--fit-with", "--flat-for 1m", "--", str(trainer))
    worker = site.work()
    wait_for(lambda: "batch size 8: trying" in output_of(site, job), named="the first probe")
    gpu = wait_for(lambda: seen_memory(site), named="its memory")
    assert (gpu.state, gpu.note) == ("job", ""), "a probe is the job's own, and no stranger"
    assert site.stoker("cancel", job).code == 0
    site.wait_until(job, "cancelled")
    assert worker.stop() == 0


def test_job_is_adopted_during_the_size_search(site: WorkSite, trainer: Path) -> None:
    job = submitted(site, "--fit-with", "--flat-for 1500ms", "--", str(trainer))
    worker = site.work()
    wait_for(lambda: "batch size 8: trying" in output_of(site, job), named="the first probe")
    worker.kill()
    site.work_until_empty()
    assert (site.job(job).state, site.job(job).attempts) == ("succeeded", 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--fit-with", "--margin lots"), "--margin"),
        (("--fit-with", "--wrong"), "--fit-with: No such option"),
        (("--fit-with", "'"), "cannot be split into words"),
        (("--fit-with", "more words"), "takes options of `stoker fit`: 'more' is not one"),
        (("--fit", "--batch-size", "8"), "leave one of them out"),
        (("--fit", "--gpus", "0"), "needs a GPU"),
    ],
)
def test_job_that_cannot_be_fitted_is_refused_at_submit(site: WorkSite, words: tuple[str, ...], sentence: str) -> None:
    done = site.stoker("submit", *words, "--", "true")
    assert done.code == 2
    assert sentence in done.err
    assert site.store.jobs.find() == []


def test_line_of_a_file_is_fitted_run_and_listed_as_finished(site: WorkSite, trainer: Path) -> None:
    queue, finished = site.directory / "gpu_queue.txt", site.directory / "finished.txt"
    queue.write_text(f"{trainer} --lr 1e-3\n")
    worker = site.work()
    feeders = Feeders(site.directory)
    feeder = feeders.start(
        *("file", str(queue), "--finished", str(finished), "--append", "--version={id}"),
        *("--fit-with", f"{QUICKLY} --probe-args '--max_tokens=1000000 --wandb_log=False'"),
    )
    wait_for(lambda: finished.exists() and finished.read_text(), named="the finished list")
    assert finished.read_text() == f"{trainer} --lr 1e-3\n"
    (job,) = site.store.jobs.find()
    assert f"trains: --lr 1e-3 --version={job.id} --batch_size=200\n" in output_of(site, job.id)
    feeder.end()
    feeders.close()
    assert worker.stop() == 0
