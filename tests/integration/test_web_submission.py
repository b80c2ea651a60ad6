"""What people type into the form becomes the jobs that they mean."""

from pathlib import Path
from typing import Any

import pytest

from stoker.errors import InvalidFieldsError
from stoker.queue import Store
from stoker.web.submission import jobs_of
from tests.support.queue_jobs import queue, submit

__all__ = ["queue"]

# Every field of the form as a browser sends it when nobody has touched it.
UNTOUCHED = dict.fromkeys(
    ("name", "tags", "gpus", "memory", "priority", "after", "after_any", "retries", "backoff", "time_limit",
     "environment", "batch_size", "idle_for", "idle_below", "idle_after", "sweep", "on_loss"), "",
) | dict.fromkeys(("share", "preemptible", "hold", "fit"), "off")  # fmt: skip


def typed(**fields: str) -> dict[str, Any]:
    return {**UNTOUCHED, "command": "echo hi", "directory": "/tmp", **fields}


def test_untouched_form_uses_the_defaults(queue: Store) -> None:
    (job,) = jobs_of(queue, typed(), "phone")
    (usual,) = jobs_of(queue, {"command": "echo hi", "directory": "/tmp"}, "phone")
    assert job == usual
    assert (job.gpus, job.backoff, job.environment, job.policy, job.submitter) == (1, 30.0, {}, {}, "phone")


def test_form_text_is_parsed_per_field(queue: Store, tmp_path: Path) -> None:
    needed, another = submit(queue, "a", "b", group="sweep")
    (job,) = jobs_of(
        queue,
        typed(
            command=" python train.py \n", directory=str(tmp_path), tags="a, b  c", gpus=" 2 ", memory="20GiB",
            share="on", priority="-3", after="sweep", retries="1", backoff="1m", time_limit="1h30m",
            environment="A=1\r\nB=x=y\n",
            gpu_model="A100 | h100", cpus="8", ram="64GiB",
            idle="on", idle_for="10m", idle_below="5%", hold="on", on_loss="hold",
        ),
    )  # fmt: skip
    assert (job.command, job.directory, job.tags) == ("python train.py", str(tmp_path), ("a", "b", "c"))
    assert (job.gpus, job.memory, job.share, job.priority, job.after) == (2, 20 * 2**30, True, -3, (needed, another))
    assert (job.retries, job.backoff, job.time_limit) == (1, 60.0, 5400.0)
    assert (job.environment, job.policy) == ({"A": "1", "B": "x=y"}, {"window": 600.0, "below": 0.05})
    assert (job.gpu_model, job.cpus, job.ram, job.nodes) == ("A100|h100", 8, 64 * 2**30, 1)
    assert (job.hold, job.on_loss) == (True, "hold")


def test_one_line_of_the_sweep_is_one_parameter(queue: Store) -> None:
    jobs = jobs_of(queue, typed(sweep="lr=1e-3,1e-4\n\nseed=1..2\n"))
    assert [job.command for job in jobs] == [
        f"echo hi --lr={rate} --seed={seed}" for rate in ("1e-3", "1e-4") for seed in (1, 2)
    ]


def test_clone_copies_omitted_fields_and_clears_emptied_ones(queue: Store) -> None:
    (old,) = submit(
        queue, "old", directory="/tmp", memory=5, time_limit=9.0, policy={"idle": False}, environment={"A": "1"}
    )
    (job,) = jobs_of(queue, {"again": old, "memory": "", "idle_for": "20m", "idle": "on"})
    assert (job.memory, job.time_limit, job.environment) == (None, 9.0, {"A": "1"})
    assert job.policy == {"window": 1200.0}
    (same,) = jobs_of(queue, {"again": old})
    assert same.policy == {"idle": False}


@pytest.mark.parametrize(
    ("field", "text", "sentence"),
    [
        ("gpus", "two", "not a whole number"),
        ("gpus", "٣", "not a whole number"),
        ("priority", "9" * 19, "must be between"),
        ("share", "perhaps", "neither on nor off"),
        ("memory", "9" * 25, "not a whole number"),
        ("time_limit", "99999d", "between zero and ten years"),
        ("environment", "A", "write NAME=VALUE"),
        ("directory", "~/project", "absolute path"),
        ("gpu_model", "a100|[x]", "is not the name of a GPU"),
        ("nodes", "0", "must be between 1 and 1024"),
        ("ram", "much", "not an amount of memory"),
        ("idle_for", "soon", "not a duration"),
        ("idle", "maybe", "neither on nor off"),
        ("on_loss", "cry", "not one of retry, hold"),
        ("sweep", "lr", "is not a sweep"),
        ("name", "x" * 201, "at most 200 letters"),
        ("command", "\ud800", "UTF-8"),
        ("name", "\ud800", "UTF-8"),
    ],
)
def test_invalid_value_is_reported_at_its_field(queue: Store, field: str, text: str, sentence: str) -> None:
    with pytest.raises(InvalidFieldsError) as told:
        jobs_of(queue, typed(**{field: text}))
    assert list(told.value.mistakes) == [field]
    assert sentence in told.value.mistakes[field]
