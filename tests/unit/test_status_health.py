"""Health: bad issues first, as short messages."""

from typing import Any

import pytest

from stoker.rules.rule import RuleWarning
from stoker.status.health import HealthInputs, assess, without_queue
from stoker.status.model import Health
from tests.support.status_parts import GIB, NOW, attempt, card, ended, machine, running, waiting

BUSY = machine(card(0), card(1))


def judged(**facts: Any) -> Health:
    usual: dict[str, Any] = {"machines": (BUSY,), "counts": {"running": 2, "queued": 1}}
    return assess(HealthInputs(now=NOW, **{**usual, **facts}))


def sentences(**facts: Any) -> list[str]:
    return [point.message for point in judged(**facts).points]


# All is well


@pytest.mark.parametrize(
    ("cards", "headline"),
    [
        ([card(0), card(1)], "All is well: all 2 GPUs are in use"),
        ([card(0)], "All is well: the GPU is in use"),
        ([card(0), card(1, state="background"), card(2, state="free")], "All is well: 2 of 3 GPUs are in use"),
        ([card(0), card(1, state="free")], "All is well: 1 of 2 GPUs is in use"),
        ([card(0, state="somebody", user="alice's python (pid 4242)")], "All is well: the GPU is in use"),
        ([card(0, state="free"), card(1, state="free")], "All is well: 2 GPUs are ready"),
        ([], "All is well"),
    ],
)
def test_good_health_has_the_number_of_used_gpus(cards: list[Any], headline: str) -> None:
    assert judged(machines=(machine(*cards),)) == Health(level="good", headline=headline)


# Bad issues


def test_lost_worker_is_reported_with_its_jobs() -> None:
    gone = machine(card(), worker="other-1", host="other", there=False, seen=NOW - 720)
    health = judged(machines=(gone, BUSY), running=(running(), running(attempt=attempt(worker="other-0"))))
    assert health.level == "bad"
    assert health.headline == "other has been silent for 12 min while 1 job ran there"
    assert health.points[0].host == "other"


def test_lost_worker_without_jobs_is_reported_for_a_day() -> None:
    def gone(ago: float) -> list[str]:
        return sentences(machines=(BUSY, machine(worker="other-1", host="other", there=False, seen=NOW - ago)))

    assert gone(7200) == ["other has been silent for 2 h"]
    assert gone(90_000) == []


def test_lost_worker_with_jobs_is_reported_without_limit() -> None:
    gone = machine(worker="other-1", host="other", there=False, seen=NOW - 90_000)
    runs = (running("silent", attempt=attempt(worker="other-0")), running("silent", attempt=attempt(worker="other-1")))
    assert sentences(machines=(BUSY, gone), running=runs) == ["other has been silent for 25 h while 2 jobs ran there"]


def test_stopped_worker_is_not_reported() -> None:
    assert sentences(machines=(BUSY, machine(worker="o-1", host="other", there=False, left=True, seen=NOW - 90))) == []


def test_waiting_jobs_without_a_worker_are_bad() -> None:
    left = machine(there=False, left=True, seen=NOW - 90)
    assert judged(machines=(left,), counts={"queued": 3}).headline == "3 jobs wait, and no worker is there"
    assert judged(machines=(), counts={"queued": 1}).headline == "1 job waits, and no worker is there"
    assert judged(machines=(), counts={"queued": 1}).level == "bad"


def test_gpus_unreadable_for_minutes_are_bad() -> None:
    def unknown(*ago: float) -> Health:
        cards = [card(index, state="unknown", since=NOW - seconds) for index, seconds in enumerate(ago)]
        return judged(machines=(machine(card(7), *cards),))

    assert unknown(60).level == "good"
    assert unknown(600).level == "bad"
    assert unknown(600).headline == "GPU 0 of gpu-box has been unreadable for 10 min"
    assert unknown(600, 300).headline == "2 GPUs of gpu-box have been unreadable for 5 min"


def test_gpu_out_of_rotation_is_named_once() -> None:
    bad = card(0, state="unknown", unread_since=NOW - 600, quarantine="XID 79: x", quarantined_since=NOW - 600)
    health = judged(machines=(machine(bad, card(1)),))
    assert health == Health(
        level="attention",
        headline="GPU 0 of gpu-box is out of rotation (XID 79: x)",
        points=health.points,
    )
    assert len(health.points) == 1


def test_unreadable_gpu_with_a_job_is_bad_and_not_counted_as_used() -> None:
    def unread(ago: float, *others: Any, **of_machine: Any) -> Health:
        return judged(machines=(machine(card(0, unread_since=NOW - ago), *others, **of_machine),))

    assert unread(600).headline == "GPU 0 of gpu-box has been unreadable for 10 min"
    assert unread(600, problem="NVML: driver lost").headline == "gpu-box cannot read its GPUs: NVML: driver lost"
    assert unread(60, card(1)) == Health(level="good", headline="All is well: 1 of 2 GPUs is in use")
    assert unread(60).headline == "All is well so far: no GPU can be read at the moment"
    assert unread(60, card(1, state="free")).headline == "All is well: 1 GPU is ready"


def test_memory_without_a_process_is_bad_while_jobs_wait() -> None:
    def orphaned(**changes: Any) -> Any:
        usual = {"state": "somebody", "user": "", "utilization": 0.0, "memory_used": 12 * GIB, "since": NOW - 600}
        return machine(card(0, **usual | changes))

    health = judged(machines=(orphaned(),))
    assert (health.level, health.points[0].host) == ("bad", "gpu-box")
    assert health.headline == "GPU 0 of gpu-box has 12 GiB in use by no visible process, while 1 job waits"
    health = judged(machines=(orphaned(),), counts={"held": 1})
    assert health.level == "attention"
    assert "GPU 0 of gpu-box has 12 GiB in use by no visible process" in [point.message for point in health.points]
    # Memory is freed a moment late; busy GPUs and visible users are no orphans.
    assert judged(machines=(orphaned(since=NOW - 10),)) == Health(level="good", headline="All is well")
    for seen in ({"utilization": 0.7}, {"user": "alice's python (pid 4242)"}, {"utilization": None}):
        assert judged(machines=(orphaned(**seen),)).headline == "All is well: the GPU is in use"


def test_condition_does_not_last_longer_than_its_worker() -> None:
    for unread in (card(state="unknown", since=NOW - 700), card(unread_since=NOW - 700)):
        assert judged(machines=(machine(unread, card(1), started=NOW - 60),)).level == "good"


def test_machine_without_gpus_is_not_a_fault() -> None:
    none = machine(problem="there is no NVIDIA driver", absent=True, worker="cpu-1", host="cpu-box")
    assert judged(machines=(BUSY, none)) == Health(level="good", headline="All is well: all 2 GPUs are in use")


def test_unreadable_machine_is_reported_with_its_reason() -> None:
    broken = machine(problem="the driver does not answer")
    assert judged(machines=(broken,)).headline == "gpu-box cannot read its GPUs: the driver does not answer"
    assert judged(machines=(machine(problem="it is starting", started=NOW - 5),)).level == "good"


def test_running_job_with_an_expired_lease_is_bad() -> None:
    health = judged(running=(running("silent"),))
    assert health.headline == "train-17 on gpu-box has not been seen for too long"
    assert health.points[0].job == "0a0a0a0a"


def test_unreachable_queue_is_the_first_issue() -> None:
    facts = HealthInputs(now=NOW, machines=(BUSY,), failed=ended().job, failures=1)
    health = without_queue(assess(facts), "the queue at db does not answer")
    assert [point.message for point in health.points] == ["The queue at db does not answer", "train-17 failed"]
    assert health.headline == "1 thing is wrong, 1 more needs attention"


# Attention


def test_one_failure_is_named_and_several_are_counted() -> None:
    one = ended(name="train-3")
    assert sentences(failed=one.job, failures=1) == ["train-3 failed"]
    health = judged(failed=one.job, failures=1200)
    assert health.level == "attention"
    assert health.headline == "1200 jobs failed in the last 24 h, last train-3"
    (point,) = health.points
    assert (point.job, point.failure, point.until) == (None, "failed", one.job.ended), "it leads to the list of them"


def test_stopped_jobs_are_counted_apart_from_failed_ones() -> None:
    hung = ended(stopped="idle", reason="its GPUs stayed idle")
    assert sentences(stopped=hung.job, stops=1, stopped_for="idle") == ["train-17 was stopped: idle"]
    assert sentences(stopped=hung.job, stops=1) == ["train-17 was stopped by a rule"]
    assert sentences(failed=ended(name="train-3").job, failures=1, stopped=hung.job, stops=2) == [
        "train-3 failed",
        "2 jobs were stopped by a rule in the last 24 h, last train-17",
    ]


def test_jobs_that_cannot_start_are_reported() -> None:
    assert sentences(waiting=(waiting("never"),)) == ["train-17 can never start"]
    assert sentences(waiting=(waiting("never"), waiting("never"))) == ["train-17 and 1 other job can never start"]
    assert sentences(waiting=(waiting("too large"),)) == ["train-17 asks for more than any machine has"]


def test_only_jobs_held_by_stoker_are_reported() -> None:
    lost = waiting("held", reason="its worker was not seen in time")
    assert sentences(waiting=(lost,)) == ["train-17 is held: lost with its machine"]
    assert sentences(waiting=(lost, lost, lost)) == ["train-17 and 2 other jobs are held: lost with their machine"]
    assert sentences(waiting=(waiting("held", reason="held"), waiting("held"))) == []


def test_pause_is_reported_while_jobs_wait() -> None:
    assert sentences(paused=True, counts={"queued": 2}) == ["The queue is paused while 2 jobs wait"]
    assert sentences(paused=True, counts={"running": 2}) == []
    assert sentences(machines=(machine(card(), paused=True),)) == ["gpu-box is paused while 1 job waits"]


def test_job_that_waits_despite_free_gpus_is_reported() -> None:
    room = machine(card(0), card(1, state="free"), card(2, state="free"))
    kept = machine(card(0), card(1, state="free", kept_for="0b0b0b0b"), card(2, state="free", kept_for="0b0b0b0b"))
    assert sentences(machines=(kept,), waiting=(waiting(gpus=2),)) == [], "they are kept for another job"
    assert sentences(machines=(room,), waiting=(waiting(gpus=2),)) == [
        "train-17 waits though 2 GPUs are free on gpu-box"
    ]
    for asked in ({"gpus": 3}, {"gpus": 1, "memory": 100 * GIB}, {"gpus": 0}, {"submitted": NOW - 5}):
        assert sentences(machines=(room,), waiting=(waiting(**asked),)) == [], asked
    assert sentences(machines=(machine(card(1, state="free", since=NOW - 5)),), waiting=(waiting(),)) == []
    assert sentences(machines=(room,), waiting=(waiting("after"),)) == []


def test_free_gpus_of_an_empty_queue_are_reported() -> None:
    three = machine(*(card(index, state="free") for index in range(3)))
    health = judged(machines=(three,), counts={"succeeded": 4})
    assert (health.level, health.headline) == ("attention", "The queue is empty: 3 GPUs have nothing to do")
    one = machine(card(0), card(1, state="free"))
    assert sentences(machines=(one,), counts={"held": 2}) == ["Only held jobs are left: 1 GPU has nothing to do"]
    assert sentences(machines=(machine(card(state="free", since=NOW - 1)),), counts={}) == []


def test_unreadable_gpu_is_never_called_free() -> None:
    for unread in (card(state="unknown", since=NOW - 60), card(state="free", unread_since=NOW - 60)):
        assert sentences(machines=(machine(unread),), counts={}) == []


def test_empty_queue_without_workers_suggests_starting_one() -> None:
    health = judged(machines=(), counts={})
    assert (health.level, health.headline) == ("attention", "No worker is there: `stoker work` starts one")


# All together


def test_bad_issues_come_first() -> None:
    gone = machine(worker="o-1", host="other", there=False, seen=NOW - 720)
    health = judged(machines=(BUSY, gone), failed=ended().job, failures=1, waiting=(waiting("never"),))
    assert [point.level for point in health.points] == ["bad", "attention", "attention"]
    assert health.headline == "1 thing is wrong, 2 more need attention"
    assert judged(failed=ended().job, failures=1, waiting=(waiting("never"),)).headline == "2 things need attention"


def test_name_with_spaces_is_quoted() -> None:
    large = waiting("too large", name="wants eight GPUs")
    assert sentences(waiting=(large,)) == ["“wants eight GPUs” asks for more than any machine has"]


def test_long_name_is_cut_and_cannot_break_the_line() -> None:
    (sentence,) = sentences(failed=ended(name="a\nb" + "x" * 100).job, failures=1)
    assert len(sentence) < 60
    assert "\n" not in sentence


def test_job_that_a_rule_warns_of_needs_attention() -> None:
    hang = RuleWarning(rule="stalled", word="may hang", reason="GPU 0 makes no progress", at=NOW)
    health = judged(running=(running("warned", name="bert", warning=hang),))
    assert (health.level, health.headline) == ("attention", "bert on gpu-box may hang")
    assert health.points[0].job is not None
