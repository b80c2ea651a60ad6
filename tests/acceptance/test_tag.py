"""`stoker tag`: tags of jobs in any state."""

from stoker import Queue
from stoker.queue import Store
from tests.support.command import stoker
from tests.support.queue_jobs import end, start, states, submit


def test_failed_jobs_are_tagged_by_a_search_and_retried_by_their_tag(queue: Store) -> None:
    failed, also, well, runs = submit(queue, "failed", "also", "well", "runs")
    end(queue, failed)
    end(queue, also)
    end(queue, well, "succeeded")
    start(queue, runs)
    assert set(stoker("tag", "night", "--match", "state:failed").out.splitlines()) == {
        f"failed ({failed}): tagged night",
        f"also ({also}): tagged night",
    }
    assert stoker("tag", "night", "well", "runs").code == 0
    assert [queue.jobs.get(job).tags for job in (failed, also, well, runs)] == [("night",)] * 4
    assert stoker("tag", "night", "--remove", "also").out == f"also ({also}): without the tag night\n"
    assert stoker("retry", "--state", "failed", "--tag", "night").out == f"failed ({failed}): queued again\n"
    assert states(queue, failed, also, well, runs) == ["queued", "failed", "succeeded", "running"]


def test_group_is_tagged_as_a_whole_and_a_dry_run_tags_nothing(queue: Store) -> None:
    one, two = submit(queue, "one", "two", group="sweep")
    end(queue, one)
    would = stoker("tag", "old", "sweep", "--dry-run").out
    assert would == f"one ({one}): would be tagged old\ntwo ({two}): would be tagged old\n"
    assert queue.jobs.get(two).tags == ()
    with Queue() as python:
        assert set(python.tag("sweep", "old")) == {one, two}
        assert python.tag([one], "old", remove=True) == [one]
    assert [job.id for job in queue.jobs.find(tag="old")] == [two]


def test_jobs_whose_tags_stay_the_same_and_bad_tags_are_reported(queue: Store) -> None:
    (job,) = submit(queue, "job", tags=("night",))
    same = stoker("tag", "night", "job")
    assert (same.code, same.out) == (1, "")
    assert f"job job ({job}) was not tagged night: it has this tag already" in same.err
    other = stoker("tag", "--remove", "day", "job")
    assert (other.code, "it does not have this tag" in other.err) == (1, True)
    bad = stoker("tag", "a\nb", "job")
    assert (bad.code, "one line" in bad.err, queue.jobs.get(job).tags) == (2, True, ("night",))
    assert stoker("tag", "night").code == 2
