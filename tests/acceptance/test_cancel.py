"""`stoker cancel`, and what it shares with the other commands that change jobs: selection and messages."""

import pytest

from stoker.queue import JobSpec, Store, init_queue
from tests.support.command import stoker
from tests.support.deep import DEEP
from tests.support.queue_jobs import end, start, states, submit


def test_waiting_job_is_cancelled_by_id_name_or_id_prefix(queue: Store) -> None:
    by_id, by_name, by_prefix, other = submit(queue, "a", "the-name", "c", "d")
    done = stoker("cancel", by_id, "the-name", by_prefix[:7])
    assert done.code == 0, done.err
    assert done.out == f"a ({by_id}): cancelled\nthe-name ({by_name}): cancelled\nc ({by_prefix}): cancelled\n"
    assert states(queue, by_id, by_name, by_prefix, other) == ["cancelled"] * 3 + ["queued"]


def test_running_job_is_stopped(queue: Store) -> None:
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    done = stoker("cancel", job)
    assert (done.code, done.out) == (0, f"a ({job}): asked to stop\n")
    assert queue.attempts.renew([attempt], 60.0) == {attempt: True}


def test_jobs_that_cannot_be_cancelled_are_reported_with_the_reason(queue: Store) -> None:
    over, waiting = submit(queue, "over", "waiting")
    end(queue, over, "succeeded")
    both = stoker("cancel", over, waiting)
    assert (both.code, both.out) == (0, f"waiting ({waiting}): cancelled\n")
    assert both.err == f"stoker: job over ({over}) was not cancelled: it has already succeeded\n"
    none = stoker("cancel", over, waiting)
    assert (none.code, none.out, none.err.count("\n")) == (1, "", 2)


def test_json_has_changed_and_unchanged_jobs_with_reasons(queue: Store) -> None:
    over, waiting = submit(queue, "over", "waiting")
    end(queue, over)
    done = stoker("cancel", over, waiting, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json() == {
        "verb": "cancel",
        "queue": queue.place,
        "dry_run": False,
        "changed": [{"id": waiting, "name": "waiting", "what": "cancelled"}],
        "unchanged": [{"id": over, "name": "over", "why": "it has already failed"}],
    }


def test_dry_run_reports_and_changes_nothing(queue: Store) -> None:
    runs, waits, over = submit(queue, "runs", "waits", "over")
    attempt = start(queue, runs)
    end(queue, over)
    done = stoker("cancel", runs, waits, over, "--dry-run")
    assert (done.code, done.out) == (
        0,
        f"runs ({runs}): would be asked to stop\nwaits ({waits}): would be cancelled\n",
    )
    assert "would not be cancelled: it has already failed" in done.err
    assert states(queue, runs, waits) == ["running", "queued"]
    assert queue.attempts.renew([attempt], 60.0) == {attempt: False}


def test_jobs_are_selected_by_tag_state_or_all(queue: Store) -> None:
    (plain,) = submit(queue, "plain")
    one, two = submit(queue, "one", "two", tags=("sweep",))
    (over,) = submit(queue, "over", tags=("sweep",))
    end(queue, over)
    held, free = submit(queue, "held", "free")
    queue.jobs.hold([held])
    tagged = stoker("cancel", "--tag", "sweep")
    # A tag does not select ended jobs: a line for each would be noise.
    assert (tagged.code, tagged.err) == (0, "")
    assert states(queue, one, two, over, plain) == ["cancelled", "cancelled", "failed", "queued"]
    assert stoker("cancel", "--state", "held").out == f"held ({held}): cancelled\n"
    assert {job["id"] for job in stoker("cancel", "--all", "--json").json()["changed"]} == {plain, free}


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ([], 2, "which jobs? Write their ids or names"),
        (["a", "--all"], 2, "not both"),
        (["--all", "--tag", "x"], 2, "--all means every job"),
        (["--tag", "nobody-has-it"], 1, "there is no queued, held or running job with the tag 'nobody-has-it'"),
        (["--state", "failed"], 1, "there is no failed job"),
        (["--state", "broken"], 2, "'broken' is not one of"),
    ],
)
def test_empty_or_contradictory_selection_is_refused(queue: Store, words: list[str], code: int, sentence: str) -> None:
    (job,) = submit(queue, "a")
    done = stoker("cancel", *words)
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1)
    assert sentence in done.err
    assert states(queue, job) == ["queued"]


def test_one_unknown_job_leaves_the_others_unchanged(queue: Store) -> None:
    (job,) = submit(queue, "a")
    assert stoker("cancel", job, "nobody").code == 2
    assert states(queue, job) == ["queued"]


def test_job_named_twice_is_reported_once(queue: Store) -> None:
    (job,) = submit(queue, "a")
    assert stoker("cancel", job, "a", job[:6]).out == f"a ({job}): cancelled\n"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_thousands_of_jobs_are_selected_by_tag(kind: str, request: pytest.FixtureRequest) -> None:
    url = str(request.getfixturevalue("postgres_url")) if kind == "postgres" else None
    many = 3000 if url is None or DEEP else 1001
    with init_queue(url) as store:
        store.jobs.submit([JobSpec(command=f"echo {number}", tags=("sweep",)) for number in range(many)])
        where = ["--queue", url] if url else []
        for verb in (["hold"], ["release"], ["move", "first"], ["move", "up"], ["cancel"], ["retry"]):
            done = stoker(*verb, "--tag", "sweep", *where)
            assert (done.code, done.out.count("\n"), done.err) == (0, many, ""), verb
        assert stoker("edit", "--tagged", "sweep", "--priority", "4", *where).out.count("\n") == many
        assert store.jobs.counts() == {"queued": many}
        assert store.jobs.find(limit=1)[0].priority == 4
        assert stoker("cancel", "--all", *where).code == 0
        for rehearsal in (["--dry-run"], []):
            done = stoker("clean", "--older-than", "0s", "--json", *rehearsal, *where)
            assert (done.json()["deleted"], done.json()["kept"]) == (many, 0)
        assert store.jobs.counts() == {}
