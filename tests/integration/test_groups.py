"""Groups: one name for several jobs, and a cap on how many of them run at once that no worker can exceed."""

import threading
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.queue import JobSpec, Store, open_queue
from stoker.queue.attempts import Claimed, ClaimRequest
from stoker.queue.groups import UNNAMED
from stoker.status.forecast import why
from tests.support.deep import examples
from tests.support.either_queue import queue, url

__all__ = ["queue", "url"]

LONG = 600.0


def specs(number: int, **fields: object) -> list[JobSpec]:
    return [JobSpec(command="true", **fields) for _ in range(number)]  # type: ignore[arg-type]


def claim(store: Store, worker: str = "w") -> Claimed | None:
    """The first job that may start, as a worker finds it."""
    for job in store.attempts.heads(worker).jobs:
        if found := store.attempts.take_head(ClaimRequest(shape=job.shape, worker=worker, lease=LONG)):
            return found
    return None


def claim_all(store: Store) -> list[Claimed]:
    found = []
    while one := claim(store):
        found.append(one)
    return found


def test_group_is_selected_by_name_and_an_unnamed_one_gets_a_name(queue: Store) -> None:
    sweep = queue.jobs.submit(specs(3), new_group=UNNAMED)
    other = queue.jobs.submit(specs(2), new_group=UNNAMED)
    bert = queue.jobs.submit(specs(2), new_group="bert")
    again = queue.jobs.submit(specs(1), new_group="bert")
    assert [job.id for job in queue.jobs.members("sweep-1")] == sweep
    assert [job.id for job in queue.jobs.named("sweep-2")] == other
    assert queue.jobs.ids_of(["bert", "bert-2"]) == (*bert, *again)
    with pytest.raises(BadInputError, match=r"'bert' is a group of 2 jobs: write the id or name of one"):
        queue.jobs.get("bert")
    assert queue.jobs.get("bert-2").id == again[0]
    queue.jobs.cancel(sweep[:1])
    run = claim(queue)
    assert run is not None
    queue.attempts.finish(run.attempt.id, "failed", 1)
    group = queue.groups.get("sweep-1")
    assert (group.total, group.ended, group.is_done) == (3, 2, False)
    assert group.progress == "2 of 3 done, 1 failed, 1 cancelled"
    assert {one.name for one in queue.groups.newest()} == {"bert-2", "bert", "sweep-1", "sweep-2"}
    assert queue.groups.several(["nothing"]) == {}
    # A job joins and leaves a group by an edit; a name that a job outside has, too, is not guessed at.
    (single,) = queue.jobs.submit(specs(1, name="bert"))
    with pytest.raises(BadInputError, match=rf"'bert' is the name of job {single} and of a group of 2 jobs: write"):
        queue.jobs.named("bert")
    assert [job.id for job in queue.jobs.named("group:bert")] == bert
    queue.jobs.edit(single, {"group": "bert"})
    assert len(queue.jobs.named("bert")) == 3
    queue.jobs.edit(single, {"group": ""})
    assert queue.groups.get("bert").total == 2


def test_claim_never_exceeds_the_cap_and_does_not_delay_other_groups(queue: Store) -> None:
    capped = queue.jobs.submit(specs(30, group="g", at_most=4))
    free = queue.jobs.submit(specs(3))
    assert {job.at_most for job in queue.jobs.members("g")} == {4}
    started = claim_all(queue)
    assert [one.job.id for one in started] == [*capped[:4], *free]
    assert queue.attempts.claim(capped[5:], "w", [], LONG) is None
    # A worker is not even offered them, so that it makes no place for them.
    assert queue.attempts.heads("w").jobs == ()
    waits = why(queue, queue.jobs.get(capped[4]))
    assert (waits.kind, waits.reason.partition(";")[0]) == ("full", "its group g already runs 4 of at most 4")

    assert queue.attempts.complete(started[0].attempt.id, "succeeded", 0).frees_jobs
    offered = queue.attempts.heads("w")
    assert ([job.id for job in offered.jobs], offered.more) == ([capped[4]], frozenset())
    assert len(claim_all(queue)) == 1
    # What runs goes on when the cap gets smaller, and nothing starts before fewer than that run.
    assert queue.groups.cap("g", 2)
    for one in started[1:3]:
        queue.attempts.finish(one.attempt.id, "failed", 1)
        assert claim_all(queue) == []
    queue.attempts.finish(started[3].attempt.id, "lost")
    assert len(claim_all(queue)) == 1
    # Without a cap all may start, and a cap given by an edit of one of them holds for all again.
    queue.groups.cap("g", None)
    assert len(claim_all(queue)) == 25
    assert queue.check() == []
    queue.jobs.edit(capped[1], {"at_most": 1})
    assert queue.groups.get("g").at_most == 1
    queue.jobs.retry(capped[:2])
    assert claim_all(queue) == []
    assert not queue.groups.cap("nothing", 1)
    assert queue.check() == []


def test_group_is_done_when_its_last_job_has_ended(queue: Store) -> None:
    ids = queue.jobs.submit([*specs(2, group="g"), *specs(1, group="single")])
    queue.jobs.cancel(ids[1:])
    assert queue.groups.done_since(0.0) == []
    queue.jobs.cancel(ids[:1])
    ((group, ended),) = queue.groups.done_since(0.0)
    assert (group.name, group.counts) == ("g", {"cancelled": 2})
    assert queue.groups.done_since(ended + 1) == []


def test_jobs_that_wait_in_the_queue_of_a_cluster_count(queue: Store) -> None:
    queue.jobs.submit(specs(3, group="g", at_most=1))
    ((shape,),) = {(job.shape,) for job in queue.attempts.heads("w").jobs}
    pending = ClaimRequest(shape=shape, worker="w", lease=LONG, pending=True)
    assert queue.attempts.take_head(pending) is not None
    assert queue.attempts.take_head(pending) is None


def test_group_without_jobs_is_deleted(queue: Store) -> None:
    (job,) = queue.jobs.submit(specs(1, group="old", at_most=1))
    queue.jobs.cancel([job])
    queue._driver.fetch_text("UPDATE stoker_groups SET submitted = submitted - 3600", {})
    queue._driver.fetch_text("UPDATE stoker_jobs SET ended = ended - 3600", {})
    assert queue.jobs.clean(0.0) == 1
    assert queue._driver.fetch_text("SELECT count(*) FROM stoker_groups", {}) == [(0,)]


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_operations_never_exceed_a_cap_and_starve_no_group(queue: Store, data: st.DataObject) -> None:
    """Claims are refused exactly when the group of the job is full, however jobs end, move and change groups."""
    queue.jobs.cancel([job.id for job in queue.jobs.find(states=["queued", "held"], limit=1000)])
    running = {one.id: one for one in queue.attempts.running()}
    for name in running:
        queue.attempts.finish(name, "cancelled")
    running.clear()
    for name in ("a", "b"):
        queue.groups.cap(name, None)  # those of the example before
    caps: dict[str, int | None] = {}
    for _ in range(data.draw(st.integers(3, 15), "steps")):
        step = data.draw(st.sampled_from(["submit", "claim", "claim", "finish", "cap", "hold", "move group"]), "step")
        group = data.draw(st.sampled_from(["a", "b", ""]), "group")
        waiting = queue.jobs.find(states=["queued"], limit=1000)
        if step == "submit":
            cap = data.draw(st.sampled_from([None, 1, 2, 3]), "cap") if group else None
            gpus = data.draw(st.integers(0, 2), "gpus")
            queue.jobs.submit(specs(data.draw(st.integers(1, 4), "jobs"), group=group, at_most=cap, gpus=gpus))
            if group:
                caps[group] = cap if cap is not None else caps.get(group)
        elif step == "claim":
            before = Counter(job.group for job in queue.jobs.find(states=["running"], limit=1000))
            started = claim(queue)
            full = {name for name, cap in caps.items() if cap is not None and before[name] >= cap}
            able = [job for job in waiting if job.group not in full]
            assert (started is None) == (not able)
            if started is not None:
                assert started.job.id in {job.id for job in able}
                running[started.attempt.id] = started.attempt
        elif step == "finish" and running:
            name = data.draw(st.sampled_from(sorted(running)), "which")
            queue.attempts.finish(name, data.draw(st.sampled_from(["succeeded", "failed", "preempted", "lost"]), "how"))
            del running[name]
        elif step == "cap" and group in caps:
            caps[group] = data.draw(st.sampled_from([None, 1, 2]), "cap")
            assert queue.groups.cap(group, caps[group])
        elif step == "hold" and waiting:
            queue.jobs.hold([waiting[0].id])
        elif step == "move group" and waiting and (not group or group in caps):
            queue.jobs.edit(waiting[-1].id, {"group": group, "at_most": caps.get(group)})
    assert queue.check() == []


def test_many_workers_at_once_never_exceed_the_cap(queue: Store, url: str) -> None:
    """Each worker claims, looks how many run, and ends its job; the cap is changed meanwhile."""
    ids = queue.jobs.submit(specs(60, group="g", at_most=3, gpus=0))
    seen: list[int] = []
    done: list[str] = []
    failures: list[Exception] = []

    def work(number: int) -> None:
        try:
            with open_queue(url) as store:
                while len(done) < len(ids):
                    if (mine := claim(store, f"w{number}")) is None:
                        continue
                    seen.append(store.groups.get("g").counts["running"])
                    assert store.attempts.finish(mine.attempt.id, "succeeded", 0)
                    done.append(mine.job.id)
        except Exception as error:  # noqa: BLE001 - reported below
            failures.append(error)
            done.extend(ids)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for cap in (2, 3, 1, 3):
        assert queue.groups.cap("g", cap)
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert sorted(done) == sorted(ids)
    assert max(seen) <= 3
    assert queue.check() == []
