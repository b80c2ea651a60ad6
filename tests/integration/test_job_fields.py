"""A field in the table of fields is taken by every verb, the API, the form and the client."""

import click
import msgspec
import pytest

import stoker
from stoker.cli.options.job import JobVerb, job_options, job_values
from stoker.client import Options
from stoker.queue import Store
from stoker.queue.fields import FIELDS, check, editable, spec_of
from stoker.queue.jobs import edited
from stoker.web.api.bodies import IdleFields, job_body
from stoker.web.pages import submit as submit_form
from stoker.web.submission import changes_of, jobs_of, settable
from tests.support.queue_jobs import queue, submit

__all__ = ["queue"]


@pytest.mark.parametrize("verb", ["submit", "edit", "feed"])
def test_fields_are_options_of_the_verbs(verb: JobVerb) -> None:
    @click.command()
    @job_options(verb)
    def command(**options: object) -> dict[str, object]:
        return job_values(dict(options))

    taken = {name for name, field in FIELDS.items() if field.option and (verb != "feed" or field.feed_help)}
    values = command.main(["--retries", "3"], standalone_mode=False)
    assert values.keys() == (taken & set(editable()) if verb == "edit" else taken)
    assert values["retries"] == 3
    with pytest.raises(stoker.errors.BadInputError, match="--retries: 'x' is not a whole number"):
        command.main(["--retries", "x"], standalone_mode=False)


def test_fields_are_stored_and_edited(queue: Store) -> None:
    retries = FIELDS["retries"]
    (name,) = queue.jobs.submit([spec_of({"command": "true", "retries": 2})])
    assert retries.value(queue.jobs.get(name)) == 2
    assert retries.value(queue.jobs.edit(name, {"retries": 5})) == 5
    assert retries.value(edited(queue.jobs.get(name), {"name": "other"})) == 5
    with pytest.raises(stoker.errors.BadInputError, match="retries: must be between 0"):
        check(spec_of({"command": "true", "retries": -1}))


def test_fields_are_in_api_bodies(queue: Store) -> None:
    for at_submission in (True, False):
        schema = msgspec.json.schema(job_body("Body", IdleFields, at_submission=at_submission))
        found = schema["$defs"]["Body"]["properties"]
        for name in settable(at_submission=at_submission):
            assert name == "fit" or found[name]["description"] == FIELDS[name].help
    (job,) = jobs_of(queue, {"command": "true", "directory": "/tmp", "retries": "4"})
    assert job.retries == 4
    (name,) = submit(queue, "old")
    assert changes_of(queue, {"retries": 7}, queue.jobs.get(name)) == {"retries": 7}


def test_fields_are_in_the_form(queue: Store) -> None:
    shown = [field.name for main in (True, False) for row in submit_form.rows(main=main) for field in row]
    flags = {name for name, field in FIELDS.items() if field.kind.name == "flag"}
    assert set(shown) >= {name for name, field in FIELDS.items() if field.form is not None} - flags
    form = submit_form.sent(b"command=true&directory=/tmp&retries=6&idle=on")
    (job,) = jobs_of(queue, submit_form.submission_of(form, None))
    assert job.retries == 6


def test_entries_of_a_mapping_are_options_and_inputs(queue: Store) -> None:
    @click.command()
    @job_options("submit")
    def command(**options: object) -> dict[str, object]:
        return job_values(dict(options))

    words = ["--partition", "gpu", "--sbatch=--nice=1", "--sbatch", "--exclude=node3"]
    expected = {"partition": "gpu", "sbatch": ["--nice=1", "--exclude=node3"]}
    assert command.main(words, standalone_mode=False)["slurm"] == expected
    body = b"command=true&directory=/tmp&slurm_partition=gpu&slurm_sbatch=--nice%3D1+--exclude%3Dnode3"
    (spec,) = jobs_of(queue, submit_form.submission_of(submit_form.sent(body), None))
    assert spec.slurm == expected
    (name,) = queue.jobs.submit([spec])
    filled = submit_form.like(queue.jobs.get(name), "key")
    assert (filled.texts["slurm_partition"], filled.texts["slurm_sbatch"]) == ("gpu", "--nice=1 --exclude=node3")
    assert "slurm" not in submit_form.submission_of(filled, filled)
    emptied = msgspec.structs.replace(filled, texts={**filled.texts, "slurm_sbatch": ""})
    (again,) = jobs_of(queue, submit_form.submission_of(emptied, filled))
    assert again.slurm == {"partition": "gpu"}


def test_fields_are_kept_when_a_job_is_retried(queue: Store) -> None:
    asked = {"gpu_model": "a100", "cpus": 8, "ram": 2**36, "slurm": {"partition": "gpu", "sbatch": ["--nice=1"]}}
    (name,) = queue.jobs.submit([spec_of({"command": "true", **asked})])
    queue.jobs.cancel([name])
    assert queue.jobs.retry([name]) == [name]
    found = queue.jobs.get(name)
    assert {field: getattr(found, field) for field in asked} == asked


def test_fields_are_options_of_the_client(queue: Store) -> None:
    taken = {name for name in FIELDS if name in editable() or name == "hold"} - {"command"}
    assert Options.__annotations__.keys() == taken | {"bare_environment", "allow_dirty"}
    with stoker.Queue() as client:
        assert client.submit("true", retries=8).retries == 8
        job = client.submit("true", ram="64GiB", gpu_model="a100", slurm={"partition": "gpu", "sbatch": ["--nice=1"]})
        assert (job.ram, job.gpu_model, job.slurm) == (2**36, "a100", {"partition": "gpu", "sbatch": ["--nice=1"]})
        with pytest.raises(stoker.errors.BadInputError, match="no 'partitions': did you mean 'partition'"):
            client.submit("true", slurm={"partitions": "gpu"})
