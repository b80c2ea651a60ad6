"""`stoker retry`: what ended runs again."""

from stoker import Queue
from stoker.queue import Store
from tests.support.command import stoker
from tests.support.queue_jobs import end, start, states, submit


def test_ended_job_of_any_outcome_is_queued_again(queue: Store) -> None:
    failed, well, unwanted = submit(queue, "failed", "well", "unwanted")
    end(queue, failed)
    end(queue, well, "succeeded")
    queue.jobs.cancel([unwanted])
    done = stoker("retry", failed, well, unwanted)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == f"failed ({failed}): queued again"
    assert states(queue, failed, well, unwanted) == ["queued"] * 3


def test_tag_selects_unsuccessful_jobs_only(queue: Store) -> None:
    failed, well, waits = submit(queue, "failed", "well", "waits", tags=("sweep",))
    end(queue, failed)
    end(queue, well, "succeeded")
    assert stoker("retry", "--tag", "sweep").out == f"failed ({failed}): queued again\n"
    assert states(queue, failed, well, waits) == ["queued", "succeeded", "queued"]
    assert stoker("retry", "--tag", "sweep", "--state", "succeeded").out == f"well ({well}): queued again\n"


def test_sweep_is_selected_by_name(queue: Store) -> None:
    stoker("submit", "--name", "bert", "--sweep", "seed=1..3", "--", "true")
    other, near = submit(queue, "other", "bertha seed=1")
    first, second, third = (queue.jobs.get(f"bert seed={number}").id for number in (1, 2, 3))
    assert stoker("cancel", "bert").out.count(": cancelled\n") == 3
    assert states(queue, other, near) == ["queued", "queued"]
    stoker("retry", "bert")
    end(queue, first, "succeeded")
    end(queue, second)
    # What went well is not repeated.
    assert stoker("retry", "bert").out == f"bert seed=2 ({second}): queued again\n"
    stoker("edit", "bert", "--priority", "5")
    assert [queue.jobs.get(job).priority for job in (first, second, third)] == [0, 5, 5]
    last = stoker("submit", "--after", "bert", "--", "true").out.strip()
    assert set(queue.jobs.get(last).after) == {first, second, third}
    queue.jobs.cancel([second, third])
    assert "2 of 3 jobs did not succeed" in stoker("wait", "bert").err
    with Queue() as python:
        assert set(python.submit("true", after="bert").after) == {first, second, third}
        assert [job.state for job in python.wait(["bert"])] == ["succeeded", "cancelled", "cancelled"]
        assert python.retry("bert") == [second, third]
        assert set(python.cancel("bert").cancelled) == {second, third}
        listed = (("list",), ("show", "bert"), ("why", "bert"), ("list", "--group", "bert"))
        shown = [stoker(*words).out for words in listed]
        assert ["bert: 3 of 3 done, 2 cancelled" in text for text in shown] == [True, True, True, False]
        assert [text.count("\nbert seed=") for text in shown] == [0, 3, 0, 3]
        assert stoker("edit", "--at-most", "2", "bert").out == "bert: at most 2 at once\n"
        assert python.group("bert").at_most == 2
    assert "only groups have a cap" in stoker("edit", "--at-most", "2", other).err
    assert "only groups have a cap" in stoker("submit", "--at-most", "2", "--", "true").err
    assert "looks like the id" in stoker("submit", "--group", "deadbeef", "--", "true").err
    for verb in ("hold", "logs", "diff"):
        done = stoker(verb, "bert")
        assert done.code != 0
        assert ("has no job that is queued" if verb == "hold" else "is a group of 3 jobs") in done.err


def test_jobs_that_have_not_ended_are_reported_and_unchanged(queue: Store) -> None:
    runs, waits, held = submit(queue, "runs", "waits", "held")
    start(queue, runs)
    queue.jobs.hold([held])
    done = stoker("retry", runs, waits, held)
    assert (done.code, done.out) == (1, "")
    assert [line.split(": ", 2)[2] for line in done.err.splitlines()] == [
        "it is running",
        "it waits in the queue already",
        "it is held (`stoker release` lets it start)",
    ]


def test_job_waiting_for_its_retry_starts_at_once(queue: Store) -> None:
    (job,) = submit(queue, "a", retries=3, backoff=3000.0)
    end(queue, job)
    assert not queue.attempts.heads().jobs
    assert stoker("retry", job).code == 0
    assert [ready.id for ready in queue.attempts.heads().jobs] == [job]


def test_search_selects_jobs(queue: Store) -> None:
    a, b, c = submit(queue, "resnet-a", "resnet-b", "bert", tags=("night",))
    for job in (a, c):
        end(queue, job)
    done = stoker("retry", "--match", "name:resnet since:1h", "--dry-run")
    assert (done.code, done.out) == (0, f"resnet-a ({a}): would be queued again\n")
    assert stoker("retry", "--match", "since:1h", "--state", "failed", "--tag", "night").code == 0
    assert states(queue, a, b, c) == ["queued", "queued", "queued"]
    done = stoker("retry", "--match", "resnet")
    assert (done.code, done.err) == (1, "stoker: no job matches 'resnet'\n")
    for bad in (["--match", " "], ["--match", "x", "--all"], ["--match", "x", a], ["--match", "colour:red"]):
        done = stoker("retry", *bad)
        assert (done.code, len(done.err.splitlines())) == (2, 1), bad


def test_dry_run_queues_nothing(queue: Store) -> None:
    (job,) = submit(queue, "a")
    end(queue, job)
    assert stoker("retry", "--all", "--dry-run").out == f"a ({job}): would be queued again\n"
    assert states(queue, job) == ["failed"]
