"""A job as editable text: every job survives the round trip."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cli.verbs.edit import changes_in, written
from stoker.errors import BadInputError
from stoker.queue import Job
from stoker.queue.jobs import edited

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
WORD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    return Job(
        command=draw(TEXT | st.lists(TEXT, min_size=1, max_size=3).map(tuple)),
        directory=draw(TEXT),
        environment=draw(st.dictionaries(WORD, TEXT, max_size=3)),
        name=draw(TEXT),
        submitter=draw(TEXT),
        tags=tuple(draw(st.lists(WORD, max_size=3))),
        memory=draw(st.none() | st.integers(0, 2**45)),
        backoff=draw(st.floats(0, 3e8)),
        time_limit=draw(st.none() | st.floats(0.001, 3e8)),
        priority=draw(st.integers(-(2**31), 2**31)),
        share=draw(st.booleans()),
        policy=draw(st.sampled_from([{}, {"idle": False}, {"warn_at": None, "window": 600.0, "require": "any"}])),
        id="12345678",
        state="queued",
        position=1.0,
        submitted=0.0,
        started=None,
        ended=None,
        not_before=0.0,
        retries_left=0,
        attempts=0,
        attempt=None,
        exit_code=None,
        reason="",
        link="",
        cancel_requested=None,
        origin=None,
    )


@given(jobs())
def test_unchanged_text_changes_nothing(job: Job) -> None:
    assert changes_in(written(job), job) == {}


@given(jobs())
def test_submitter_cannot_be_edited(job: Job) -> None:
    assert "submitter" not in tomllib.loads(written(job))
    with pytest.raises(BadInputError, match="no field 'submitter' to edit"):
        changes_in('submitter = "mallory"\n' + written(job), job)
    with pytest.raises(BadInputError, match="no field 'submitter' to edit"):
        edited(job, {"submitter": "mallory"})
