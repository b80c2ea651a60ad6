"""`stoker clone` as typed: the same job again with changes, and its environment and code."""

from pathlib import Path

import pytest

import stoker as stoker_package
from stoker.errors import BadInputError
from stoker.queue import JobSpec, Store
from tests.support.attempts import run, submit
from tests.support.command import stoker

VARIABLES = {"WANDB_API_KEY": "s3cret", "SEED": "1"}


def test_clone_has_everything_of_the_job_but_the_changes(queue: Store) -> None:
    (needed,) = submit(queue, "needed")
    asked = JobSpec(
        command=("python", "train.py", "--lr", "1e-3"), name="vit", tags=("a",), gpus=2, environment=VARIABLES,
        policy={"below": 0.05}, after=(needed,), slurm={"partition": "gpu"}, retries=2, time_limit=60.0,
    )  # fmt: skip
    (job,) = queue.jobs.submit([asked])
    queue.jobs.cancel([job])
    done = stoker("clone", "vit", "--gpus", "1", "--env", "SEED=2", "--", "python", "train.py", "--lr", "3e-4")
    assert (done.code, done.err) == (0, "")
    clone = queue.jobs.get(done.out.strip())
    assert (clone.id != job, clone.state, clone.retries_left, clone.origin) == (True, "queued", 2, None)
    assert (clone.command, clone.gpus) == (("python", "train.py", "--lr", "3e-4"), 1)
    assert clone.environment == VARIABLES | {"SEED": "2"}
    for field in ("name", "tags", "policy", "after", "slurm", "retries", "time_limit", "directory"):
        assert getattr(clone, field) == getattr(asked, field), field
    assert queue.jobs.get(job).command == asked.command, "the job itself stays as it is"
    # Secrets are never printed.
    (shown,) = stoker("clone", job, "--hold", "--json").json()
    assert (shown["state"], shown["environment"]) == ("held", {"WANDB_API_KEY": "***", "SEED": "1"})


def test_sweep_is_cloned_by_its_name_and_a_dry_run_submits_nothing(queue: Store) -> None:
    for number in (1, 2):
        (one,) = submit(queue, f"train --seed={number}", name=f"bert seed={number}", group="bert")
        run(queue, one, "failed", 1)
    before = len(queue.jobs.find())
    assert stoker("clone", "bert", "--dry-run").out == "train --seed=1\ntrain --seed=2\n"
    assert len(queue.jobs.find()) == before
    ids = stoker("clone", "bert", "--priority", "3").out.split()
    assert [(queue.jobs.get(name).name, queue.jobs.get(name).priority) for name in ids] == [
        ("bert seed=1", 3), ("bert seed=2", 3),
    ]  # fmt: skip


def test_cap_and_notifications_of_a_group_stay_with_the_group(queue: Store) -> None:
    url = "json://127.0.0.1:9"
    night = ("--group", "night", "--at-most", "2", "--notify", f"done:{url}")
    job = stoker("submit", *night, "--notify", f"failed:{url}", "--", "true").out.strip()
    (other,) = submit(queue, "true", group="day")
    alone = stoker("clone", "--group", "none", job)
    assert (alone.code, alone.err) == (0, "")
    assert stoker("edit", "--group", "day", job).code == 0
    found = [queue.jobs.get(name) for name in (alone.out.strip(), job, other)]
    assert [(one.group, one.at_most) for one in found] == [("", None), ("day", None), ("day", None)]
    assert [one.notify for one in found] == [(f"failed:{url}",), (f"failed:{url}",), ()]


def test_python_client_clones_with_changes(queue: Store) -> None:
    (job,) = submit(queue, "train", name="vit", environment=VARIABLES, memory=2**30)
    with stoker_package.Queue() as client:
        clone = client.clone("vit", command="train --lr 3e-4", memory="2GiB")
        assert (clone.command, clone.memory, clone.environment) == ("train --lr 3e-4", 2**31, VARIABLES)
        with pytest.raises(BadInputError, match="no such option"):
            client.clone(job, learning_rate=3)


def test_invalid_clones_are_refused_in_one_sentence(queue: Store, tmp_path: Path) -> None:
    (job,) = queue.jobs.submit([JobSpec(command="train", name="vit", pin=True, commit="0" * 40)])
    for words, sentence in {
        ("nobody",): "there is no job 'nobody'",
        ("vit", "--"): "there is no command after --",
        ("vit", "--gpus", "-1"): "--gpus: must be between",
        ("vit", "--no-env", "A"): f"job {job} does not set it",
        ("vit", "--directory", str(tmp_path)): "--no-pin lets its clone run in another directory",
    }.items():
        done = stoker("clone", *words)
        assert (done.code, len(done.err.splitlines()), sentence in done.err) == (2, 1, True), done.err
    assert len(queue.jobs.find()) == 1
