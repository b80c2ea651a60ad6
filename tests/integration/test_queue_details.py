"""Details of attempts, snoozes, usage of GPUs and notices, on both databases."""

import random
import threading

import pytest

from stoker.errors import BadInputError
from stoker.queue import AttemptDetails, Requests, Snoozed, Store, Usage, View, open_queue
from stoker.queue.model import LONGEST_REPORT
from stoker.queue.store import KEPT_MINUTES, KEPT_SECONDS, MOST_GPUS
from tests.support.either_queue import queue, url
from tests.support.queue_jobs import LONG, moment, start, submit
from tests.support.waiting import wait_for

__all__ = ["queue", "url"]

AWKWARD = "stopped \0 by 'its' \"GPUs\" %s :name 🔥\n# not an SQL -- comment"


def attempts(queue: Store, count: int, worker: str = "w") -> list[str]:
    """Ids of attempts that run."""
    return [start(queue, job, worker) for job in submit(queue, *map(str, range(count)))]


def test_worker_sees_a_snooze_until_the_attempt_has_ended(queue: Store) -> None:
    attempt, other = attempts(queue, 2)
    (elsewhere,) = attempts(queue, 1, "another")
    assert queue.attempts.snooze(attempt, 600.0, "alice")
    assert queue.attempts.snooze(elsewhere, 60.0, "bob")
    requests = queue.attempts.requests([attempt, other])
    assert requests.cancelled == frozenset()
    assert set(requests.snoozed) == {attempt}
    assert requests.snoozed[attempt].by == "alice"
    assert requests.snoozed[attempt].until == queue.attempts.snoozes()[attempt]
    assert 540.0 < requests.snoozed[attempt].seconds <= 600.0
    queue.jobs.cancel([queue.attempts.get(name).job for name in (attempt, other)])  # type: ignore[union-attr]  # they are there
    requests = queue.attempts.requests([attempt, other])
    assert (requests.cancelled, set(requests.snoozed)) == (frozenset({attempt, other}), {attempt})
    assert queue.attempts.finish(attempt, "succeeded", 0)
    assert queue.attempts.finish(other, "succeeded", 0)
    assert queue.attempts.requests([attempt]) == Requests()


def test_later_snooze_replaces_the_earlier_and_zero_ends_it(queue: Store) -> None:
    (attempt,) = attempts(queue, 1)
    assert queue.attempts.snooze(attempt, 600.0, "alice")
    assert queue.attempts.snooze(attempt, 30.0, "bob")
    assert queue.attempts.requests([attempt]).snoozed[attempt].by == "bob"
    assert queue.attempts.snoozes()[attempt] == pytest.approx(queue.clock() + 30.0, abs=25.0)
    assert queue.attempts.snooze(attempt, 0.0, "carol")
    assert queue.attempts.snoozes() == {}
    # The worker has to see that the snooze is over.
    assert queue.attempts.requests([attempt]) == Requests(snoozed={attempt: Snoozed(seconds=0.0, by="carol")})


def test_worker_does_not_see_an_expired_snooze(queue: Store) -> None:
    (attempt,) = attempts(queue, 1)
    assert queue.attempts.snooze(attempt, 0.001, "alice")
    over = queue.clock() + 0.002
    wait_for(lambda: queue.clock() > over, named="the end of the snooze")
    assert (queue.attempts.requests([attempt]), queue.attempts.snoozes()) == (Requests(), {})


def test_only_running_jobs_can_be_snoozed(queue: Store) -> None:
    (attempt,) = attempts(queue, 1)
    assert not queue.attempts.snooze("no such attempt", 60.0, "alice")
    assert queue.attempts.snooze(attempt, 60.0, "alice")
    assert list(queue.attempts.snoozes()) == [attempt]
    assert queue.attempts.finish(attempt, "failed", 1)
    assert queue.attempts.snoozes() == {}
    assert not queue.attempts.snooze(attempt, 60.0, "alice")
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(BadInputError, match="a snooze of"):
            queue.attempts.snooze(attempt, seconds, "alice")


def test_details_are_read_as_written(queue: Store) -> None:
    (attempt,) = attempts(queue, 1)
    assert queue.attempts.details(attempt) is None
    assert not queue.attempts.write_details("no such attempt", AttemptDetails(cause="idle", rule="idle"))
    fit = {"batch_size": 96, "probes": [{"size": 8, "peak": 2**33, "fits": True}], "line": None}
    assert queue.attempts.write_details(attempt, AttemptDetails(cause="idle", rule="idle", report=AWKWARD, fit=fit))
    assert queue.attempts.details(attempt) == AttemptDetails(
        cause="idle", rule="idle", report=AWKWARD.replace("\0", "�"), fit=fit
    )
    assert queue.attempts.write_details(attempt, AttemptDetails(report="x" * (LONGEST_REPORT + 1)))
    found = queue.attempts.details(attempt)
    assert found is not None
    assert found.report == "x" * LONGEST_REPORT


def test_later_details_are_merged_with_earlier_ones(queue: Store) -> None:
    (attempt,) = attempts(queue, 1)
    assert queue.attempts.write_details(attempt, AttemptDetails(fit={"batch_size": 8}))
    assert queue.attempts.causes([attempt]) == {}
    assert queue.attempts.write_details(attempt, AttemptDetails(cause="time limit", report="why"))
    assert queue.attempts.details(attempt) == AttemptDetails(cause="time limit", report="why", fit={"batch_size": 8})


def test_causes_of_several_attempts_are_read_in_one_query(queue: Store) -> None:
    first, second, third = attempts(queue, 3)
    queue.attempts.write_details(first, AttemptDetails(cause="idle", rule="idle"))
    queue.attempts.write_details(second, AttemptDetails(cause="exited"))
    assert queue.attempts.causes([first, second, third, "nobody's"]) == {
        first: AttemptDetails(cause="idle", rule="idle"),
        second: AttemptDetails(cause="exited"),
    }
    assert queue.attempts.causes([]) == {}


def test_rule_stops_have_the_number_of_freed_gpus(queue: Store) -> None:
    ids = []
    for gpus, cause in [(["a", "b"], "idle"), (["c"], "time limit"), (["d"], "idle")]:
        (job,) = submit(queue, "x", gpus=len(gpus))
        attempt = queue.attempts.claim([job], "w", gpus, LONG)
        assert attempt is not None
        queue.attempts.write_details(attempt.id, AttemptDetails(cause=cause, rule=cause if cause == "idle" else ""))
        ids.append(attempt.id)
    assert queue.attempts.rule_stops(0.0) == []  # they have not ended
    queue.attempts.finish(ids[0], "failed", 1)
    between = moment(queue)
    for attempt_id in ids[1:]:
        queue.attempts.finish(attempt_id, "failed", 1)
    assert [gpus for _ended, gpus in queue.attempts.rule_stops(0.0)] == [2, 1]
    ((ended, count),) = queue.attempts.rule_stops(between)
    assert count == 1
    assert between <= ended <= queue.clock()


def test_ends_of_several_logs_are_written_at_once(queue: Store) -> None:
    first, second = attempts(queue, 2)
    queue.logs.write(first, "half of it")
    for attempt in (first, second):
        queue.attempts.finish(attempt, "succeeded", 0)
    queue.logs.write_last({first: "all of it", "gone": "of a job that was cleaned", second: ""})
    assert (queue.logs.read(first), queue.logs.read(second)) == ("all of it", "")
    assert not any(map(queue.logs.is_late, (first, second)))


def test_tails_of_several_logs_are_read_in_one_query(queue: Store) -> None:
    first, second, third = attempts(queue, 3)
    queue.logs.write(first, "an epoch\r100%|█████| 🔥🔥")
    queue.logs.write(second, "short")
    assert queue.logs.tails([first, second, third], 7) == {first: "███| 🔥🔥", second: "short"}
    assert queue.logs.tails([second]) == {second: "short"}
    assert queue.logs.tails([second], 0) == queue.logs.tails([]) == {}


def test_cleaning_deletes_details_and_snoozes(queue: Store) -> None:
    (attempt,) = attempts(queue, 1)
    queue.attempts.write_details(attempt, AttemptDetails(cause="idle", rule="idle"))
    queue.attempts.snooze(attempt, 60.0, "alice")
    queue.attempts.finish(attempt, "failed", 1)
    assert queue.jobs.clean(-1.0) == 1
    assert queue.attempts.details(attempt) is None
    for table in ("attempt_details", "snoozes"):
        sql = f"SELECT count(*) FROM stoker_{table}"
        assert queue._driver.fetch_text(sql, {}) == [(0,)]


def usage(minute: int, host: str = "h", gpu: str = "g", **more: float) -> Usage:
    return Usage(host=host, gpu=gpu, minute=minute, seconds={"job": more.get("job", 60.0)})


def test_newer_usage_of_a_minute_counts_if_it_covers_as_much_time(queue: Store) -> None:
    now = int(queue.clock() // 60)
    whole = Usage(
        host="h",
        gpu="g",
        minute=now,
        seconds={"job": 12.5, "background": 20.0, "somebody": 7.5, "free": 5.0, "unknown": 15.0},
        utilization=0.25,
        memory=80 * 2**30,
        power=312.5,
    )
    queue.usage.write([usage(now, job=10.0)])
    queue.usage.write([whole])
    assert queue.usage.read(now) == [whole]
    corrected = usage(now, job=60.0)
    queue.usage.write([corrected])
    assert queue.usage.read(now) == [corrected]
    # A worker that started within the minute has seen less of it than the worker before had reported.
    queue.usage.write([usage(now, job=4.0)])
    assert queue.usage.read(now) == [corrected]
    # Nothing is not zero.
    bare = Usage(host="h", gpu="another", minute=now, seconds={})
    queue.usage.write([bare])
    assert queue.usage.read(now, "h", "another") == [bare]
    queue.usage.write([])


def test_usage_is_selected_by_time_machine_and_gpu(queue: Store) -> None:
    now = int(queue.clock() // 60)
    rows = [usage(now - back, host, gpu) for host in ("B", "a") for gpu in ("g1", "g2") for back in (2, 1, 0)]
    queue.usage.write(list(reversed(rows)))
    assert queue.usage.read(0) == rows
    assert queue.usage.read(now - 1) == [row for row in rows if row.minute >= now - 1]
    assert queue.usage.read(now, "a") == [usage(now, "a", "g1"), usage(now, "a", "g2")]
    # The jobs of a cluster have so many that they are read at once.
    many = [usage(now, "cluster", f"g{number:04}") for number in range(MOST_GPUS + 1)]
    queue.usage.write(many)
    assert queue.usage.read(now, "cluster") == many
    assert queue.usage.read(now - 1, "B", "g2") == [usage(now - 1, "B", "g2"), usage(now, "B", "g2")]
    assert queue.usage.read(now + 1) == queue.usage.read(0, "nowhere") == []


@pytest.mark.parametrize("step", [2, 7, 60])
def test_usage_of_several_minutes_is_mean_and_peak_of_what_is_known(queue: Store, step: int) -> None:
    chance = random.Random(step)
    first = int(queue.clock() // 60) - 600

    def some(value: float) -> float | None:
        return chance.choice((None, 0.0, 0.1, value))

    rows = {
        minute: Usage(
            host="h",
            gpu="g",
            minute=minute,
            seconds={"job": 20.0, "free": 30.0},
            utilization=some(chance.random()),
            memory=chance.choice((None, 0, chance.randrange(2**40))),
            power=some(300 * chance.random()),
        )
        for minute in range(first, first + 600)
        # Whole hours without a reading among them.
        if chance.random() < 0.7 and minute // 60 % 3
    }
    queue.usage.write([*rows.values(), usage(first + 1, gpu="another"), usage(first + 1, "elsewhere")])
    found = queue.usage.read(first, "h", "g", until_minute=first + 500, step=step)
    by_point: dict[int, list[Usage]] = {}
    for minute, row in rows.items():
        if minute < first + 500:
            by_point.setdefault(minute // step * step, []).append(row)
    assert [point.minute for point in found] == list(by_point)
    for point in found:
        covered = by_point[point.minute]
        assert point.seconds == {"job": 20.0 * len(covered), "free": 30.0 * len(covered)}
        for name in ("utilization", "memory", "power"):
            known = [getattr(row, name) for row in covered if getattr(row, name) is not None]
            mean, peak = getattr(point, name), getattr(point, f"{name}_peak")
            if not known:
                assert mean is None
                assert peak is None
                continue
            assert peak == max(known)
            assert min(known) <= mean <= peak
            assert mean == pytest.approx(sum(known) / len(known), abs=0.5 if name == "memory" else 1e-9)


def test_attempts_of_a_machine_are_found_by_its_workers(queue: Store) -> None:
    for worker, host in (("w1", "box"), ("w2", "box"), ("other", "elsewhere")):
        queue.workers.heartbeat(worker, host, View())
    first, second, third = submit(queue, "a", "b", "c")
    start(queue, first, "w1")
    before = moment(queue)
    start(queue, second, "w2")
    start(queue, third, "other")
    assert sorted(queue.workers.of_host("box")) == ["w1", "w2"]
    workers = queue.workers.of_host("box")
    assert [one.job for one in queue.attempts.of_workers(workers, 0.0, 10)] == [second, first]
    assert [one.job for one in queue.attempts.of_workers(workers, before, 10)] == [second]
    assert queue.attempts.of_workers(queue.workers.of_host("nowhere"), 0.0, 10) == []


def test_usage_is_summed_over_all_machines(queue: Store) -> None:
    now = int(queue.clock() // 60)
    nothing = {"job": 0.0, "background": 0.0, "somebody": 0.0, "free": 0.0, "unknown": 0.0}
    assert queue.usage.totals(0) == nothing
    queue.usage.write([usage(now, "a"), usage(now, "b", job=30.0), usage(now - 1, "b")])
    queue.usage.write([Usage(host="c", gpu="g", minute=now, seconds={"free": 59.5, "unknown": 0.5})])
    assert queue.usage.totals(now) == nothing | {"job": 90.0, "free": 59.5, "unknown": 0.5}
    assert queue.usage.totals(now - 1)["job"] == 150.0


def test_usage_older_than_a_month_is_deleted(queue: Store, url: str) -> None:
    now = int(queue.clock() // 60)
    queue.usage.write([usage(now - KEPT_MINUTES - 5, gpu="old")])
    queue.usage.write([usage(now - KEPT_MINUTES + 5, gpu="kept")])
    with open_queue(url) as other:
        other.usage.write([usage(now, gpu="new")])
    assert [row.gpu for row in queue.usage.read(0)] == ["kept", "new"]


def test_notice_is_claimed_by_one_process(queue: Store, url: str) -> None:
    result: list[bool] = []
    together = threading.Barrier(4)

    def note() -> None:
        with open_queue(url) as other:
            together.wait(30.0)
            result.append(other.notices.note_once("failed 3f9ede8c"))

    threads = [threading.Thread(target=note) for _ in range(4)]
    for teller in threads:
        teller.start()
    for teller in threads:
        teller.join(60.0)
    assert sorted(result) == [False, False, False, True]
    assert queue.notices.note_once("another")
    assert queue.notices.forget_note("failed 3f9ede8c")
    assert queue.notices.note_once("failed 3f9ede8c")
    assert not queue.notices.forget_note("never noted")


def test_old_notices_are_deleted(queue: Store, url: str) -> None:
    assert queue.notices.note_once("long ago")
    assert queue.notices.note_once("lately")
    for key, days in (("long ago", 1.0), ("lately", -1.0)):
        queue._driver.fetch_text(
            f"UPDATE stoker_notices SET sent = sent - {KEPT_SECONDS + days * 86400} WHERE name = '{key}'",
            {},
        )
    with open_queue(url) as other:
        assert not other.notices.note_once("lately")
        assert other.notices.note_once("long ago")
