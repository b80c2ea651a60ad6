"""`stoker hold` and `stoker release`: whether a job may start."""

from stoker.queue import Store
from tests.support.command import stoker
from tests.support.queue_jobs import end, start, states, submit


def test_held_job_does_not_start_until_it_is_released(queue: Store) -> None:
    job, other = submit(queue, "a", "b")
    assert stoker("hold", "a").out == f"a ({job}): held\n"
    assert [ready.id for ready in queue.attempts.heads().jobs] == [other]
    assert stoker("release", "a").out == f"a ({job}): released\n"
    assert [ready.id for ready in queue.attempts.heads().jobs] == [job, other]


def test_all_waiting_jobs_are_held_and_all_held_jobs_released(queue: Store) -> None:
    runs, one, two = submit(queue, "runs", "one", "two")
    start(queue, runs)
    assert stoker("hold", "--all").out == f"one ({one}): held\ntwo ({two}): held\n"
    assert states(queue, runs, one, two) == ["running", "held", "held"]
    assert len(stoker("release", "--all", "--json").json()["changed"]) == 2
    assert states(queue, one, two) == ["queued", "queued"]


def test_jobs_that_cannot_be_held_or_released_are_reported_with_the_reason(queue: Store) -> None:
    runs, held, over, waits = submit(queue, "runs", "held", "over", "waits")
    start(queue, runs)
    queue.jobs.hold([held])
    end(queue, over)
    refused = stoker("hold", runs, held, over)
    assert (refused.code, refused.out) == (1, "")
    assert f"job runs ({runs}) was not held: it is running (`stoker cancel` stops it)" in refused.err
    assert f"job held ({held}) was not held: it is held already" in refused.err
    assert f"job over ({over}) was not held: it has already failed" in refused.err
    refused = stoker("release", runs, waits, "--json")
    assert refused.code == 1
    assert [job["why"] for job in refused.json()["unchanged"]] == ["it is not held, it is running", "it is not held"]


def test_dry_run_holds_and_releases_nothing(queue: Store) -> None:
    waits, held = submit(queue, "waits", "held")
    queue.jobs.hold([held])
    assert stoker("hold", "waits", "--dry-run").out == f"waits ({waits}): would be held\n"
    assert stoker("release", "held", "--dry-run").out == f"held ({held}): would be released\n"
    assert states(queue, waits, held) == ["queued", "held"]
