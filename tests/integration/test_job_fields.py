"""A field that is added to the table of fields is taken by every verb, the API, the form and the client."""

from collections.abc import Iterator
from typing import Any

import click
import pytest

import stoker
from stoker.cli.options.job import JobVerb, job_options, job_values
from stoker.queue import Store
from stoker.queue.fields import COUNT, FIELDS, FormInput, JobField, check, register, spec_of
from stoker.queue.jobs import edited
from stoker.web.api.bodies import fields_body
from stoker.web.pages import submit as submit_form
from stoker.web.submission import changes_of, jobs_of
from tests.support.queue_jobs import queue, submit

__all__ = ["queue"]


@pytest.fixture(autouse=True)
def nodes() -> Iterator[JobField]:
    register(
        "nodes",
        JobField(
            kind=COUNT,
            help="How many machines it needs.",
            option="--nodes",
            feed_help="Machines for each job.",
            form=FormInput("Machines", numeric=True),
        ),
    )
    yield FIELDS["nodes"]
    del FIELDS["nodes"]


@pytest.mark.parametrize("verb", ["submit", "edit", "feed"])
def test_registered_field_is_an_option_of_the_verbs(verb: JobVerb, nodes: JobField) -> None:
    @click.command()
    @job_options(verb)
    def command(**options: object) -> dict[str, object]:
        return job_values(dict(options))

    values = command.main(["--nodes", "3"], standalone_mode=False)
    assert values["nodes"] == 3
    with pytest.raises(stoker.errors.BadInputError, match="--nodes: 'x' is not a whole number"):
        command.main(["--nodes", "x"], standalone_mode=False)


def test_registered_field_is_stored_and_edited(queue: Store, nodes: JobField) -> None:
    (name,) = queue.jobs.submit([spec_of({"command": "true", "nodes": 2})])
    assert nodes.value(queue.jobs.get(name)) == 2
    assert nodes.value(queue.jobs.edit(name, {"nodes": 5})) == 5
    assert nodes.value(edited(queue.jobs.get(name), {"name": "other"})) == 5
    with pytest.raises(stoker.errors.BadInputError, match="nodes: must be between 0"):
        check(spec_of({"command": "true", "nodes": -1}))


def test_registered_field_is_in_api_bodies(queue: Store, nodes: JobField) -> None:
    for at_submission in (True, False):
        assert fields_body(at_submission=at_submission).model_fields["nodes"].description == nodes.help
    (job,) = jobs_of(queue, {"command": "true", "directory": "/tmp", "nodes": "4"})
    assert nodes.value(job) == 4
    (name,) = submit(queue, "old")
    assert changes_of(queue, {"nodes": 7}, queue.jobs.get(name)) == {"nodes": 7}


def test_registered_field_is_in_the_form(queue: Store, nodes: JobField) -> None:
    assert nodes in [field for row in submit_form.rows(main=False) for field in row]
    form = submit_form.sent(b"command=true&directory=/tmp&nodes=6&idle=on")
    (job,) = jobs_of(queue, submit_form.submission_of(form, None))
    assert nodes.value(job) == 6


def test_registered_field_is_an_option_of_the_client(queue: Store, nodes: JobField) -> None:
    with stoker.Queue() as client:
        options: Any = {"nodes": 8}
        job = client.submit("true", **options)
        assert nodes.value(job) == 8
