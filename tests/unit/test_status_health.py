"""Is everything all right? What is wrong is told first, in sentences for a phone; what is usual is no news."""

from typing import Any

import pytest

from stoker.status.health import HealthInputs, assess, without_queue
from stoker.status.model import Health
from tests.support.status_parts import GIB, NOW, attempt, card, ended, machine, running, waiting

BUSY = machine(card(0), card(1))


def judged(**facts: Any) -> Health:
    usual: dict[str, Any] = {"machines": (BUSY,), "counts": {"running": 2, "queued": 1}}
    return assess(HealthInputs(now=NOW, **{**usual, **facts}))


def sentences(**facts: Any) -> list[str]:
    return [point.sentence for point in judged(**facts).points]


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
def test_when_nothing_is_the_matter_it_says_what_the_gpus_do(cards: list[Any], headline: str) -> None:
    assert judged(machines=(machine(*cards),)) == Health(level="good", headline=headline)


# What is wrong


def test_a_worker_that_is_silent_without_a_goodbye_is_missed_with_what_it_ran() -> None:
    gone = machine(card(), worker="other-1", host="other", there=False, seen=NOW - 720)
    health = judged(machines=(gone, BUSY), running=(running(), running(attempt=attempt(worker="other-0"))))
    assert health.level == "bad"
    assert health.headline == "other has been silent for 12 min while 1 job ran there"
    assert health.points[0].host == "other"


def test_a_silent_worker_without_jobs_is_missed_for_a_day() -> None:
    def gone(ago: float) -> list[str]:
        return sentences(machines=(BUSY, machine(worker="other-1", host="other", there=False, seen=NOW - ago)))

    assert gone(7200) == ["other has been silent for 2 h"]
    assert gone(90_000) == []


def test_a_silent_worker_that_holds_jobs_is_missed_however_long() -> None:
    gone = machine(worker="other-1", host="other", there=False, seen=NOW - 90_000)
    runs = (running("silent", attempt=attempt(worker="other-0")), running("silent", attempt=attempt(worker="other-1")))
    assert sentences(machines=(BUSY, gone), running=runs) == ["other has been silent for 25 h while 2 jobs ran there"]


def test_a_worker_that_said_goodbye_is_not_missed() -> None:
    assert sentences(machines=(BUSY, machine(worker="o-1", host="other", there=False, left=True, seen=NOW - 90))) == []


def test_jobs_that_wait_without_any_worker_are_wrong() -> None:
    left = machine(there=False, left=True, seen=NOW - 90)
    assert judged(machines=(left,), counts={"queued": 3}).headline == "3 jobs wait, and no worker is there"
    assert judged(machines=(), counts={"queued": 1}).headline == "1 job waits, and no worker is there"
    assert judged(machines=(), counts={"queued": 1}).level == "bad"


def test_gpus_that_cannot_be_read_for_minutes_are_wrong_and_not_before() -> None:
    def unknown(*ago: float) -> Health:
        cards = [card(index, state="unknown", since=NOW - seconds) for index, seconds in enumerate(ago)]
        return judged(machines=(machine(card(7), *cards),))

    assert unknown(60).level == "good"
    assert unknown(600).level == "bad"
    assert unknown(600).headline == "GPU 0 of gpu-box has been unreadable for 10 min"
    assert unknown(600, 300).headline == "2 GPUs of gpu-box have been unreadable for 5 min"


def test_a_gpu_that_a_job_holds_and_nobody_can_read_is_wrong_and_does_not_count_as_working() -> None:
    def unread(ago: float, *others: Any, **of_machine: Any) -> Health:
        return judged(machines=(machine(card(0, unread_since=NOW - ago), *others, **of_machine),))

    assert unread(600).headline == "GPU 0 of gpu-box has been unreadable for 10 min"
    assert unread(600, problem="NVML: driver lost").headline == "gpu-box cannot read its GPUs: NVML: driver lost"
    assert unread(60, card(1)) == Health(level="good", headline="All is well: 1 of 2 GPUs is in use")
    assert unread(60).headline == "All is well so far: no GPU can be read at the moment"
    assert unread(60, card(1, state="free")).headline == "All is well: 1 GPU is ready"


def test_memory_that_nobody_holds_is_wrong_while_jobs_wait_and_worth_a_look_otherwise() -> None:
    def orphaned(**changes: Any) -> Any:
        usual = {"state": "somebody", "user": "", "utilization": 0.0, "memory_used": 12 * GIB, "since": NOW - 600}
        return machine(card(0, **usual | changes))

    health = judged(machines=(orphaned(),))
    assert (health.level, health.points[0].host) == ("bad", "gpu-box")
    assert health.headline == "GPU 0 of gpu-box has 12 GiB in use by no visible process, while 1 job waits"
    health = judged(machines=(orphaned(),), counts={"held": 1})
    assert health.level == "attention"
    assert "GPU 0 of gpu-box has 12 GiB in use by no visible process" in [point.sentence for point in health.points]
    # Memory comes back a moment late; what works is somebody's, and who is seen is nobody's orphan.
    assert judged(machines=(orphaned(since=NOW - 10),)) == Health(level="good", headline="All is well")
    for seen in ({"utilization": 0.7}, {"user": "alice's python (pid 4242)"}, {"utilization": None}):
        assert judged(machines=(orphaned(**seen),)).headline == "All is well: the GPU is in use"


def test_what_lasts_is_not_told_of_before_the_worker_was_there_to_see_it() -> None:
    for unread in (card(state="unknown", since=NOW - 700), card(unread_since=NOW - 700)):
        assert judged(machines=(machine(unread, card(1), started=NOW - 60),)).level == "good"


def test_a_machine_without_any_gpu_is_no_fault() -> None:
    none = machine(problem="there is no NVIDIA driver", absent=True, worker="cpu-1", host="cpu-box")
    assert judged(machines=(BUSY, none)) == Health(level="good", headline="All is well: all 2 GPUs are in use")


def test_a_machine_that_cannot_be_read_says_why() -> None:
    broken = machine(problem="the driver does not answer")
    assert judged(machines=(broken,)).headline == "gpu-box cannot read its GPUs: the driver does not answer"
    assert judged(machines=(machine(problem="it is starting", started=NOW - 5),)).level == "good"


def test_a_running_job_whose_lease_has_ended_is_wrong_though_its_worker_is_there() -> None:
    health = judged(running=(running("silent"),))
    assert health.headline == "train-17 on gpu-box has not been seen for too long"
    assert health.points[0].job == "0a0a0a0a"


def test_a_queue_that_is_away_is_told_first_and_keeps_the_rest() -> None:
    facts = HealthInputs(now=NOW, machines=(BUSY,), failed=(ended(),), failures=1)
    health = without_queue(assess(facts), "the queue at db does not answer")
    assert [point.sentence for point in health.points] == ["The queue at db does not answer", "train-17 failed"]
    assert health.headline == "1 thing is wrong, 1 more needs you"


# What somebody should look at


def test_one_failure_is_named_and_several_are_counted() -> None:
    one, two = ended(name="train-3"), ended(name="train-2", id="0b0b0b0b")
    assert sentences(failed=(one,), failures=1) == ["train-3 failed"]
    health = judged(failed=(one, two), failures=1200)
    assert health.level == "attention"
    assert health.headline == "1200 jobs failed in the last 24 h, last train-3"
    (point,) = health.points
    assert (point.job, point.failure, point.until) == (None, "failed", one.job.ended), "it leads to the list of them"


def test_jobs_that_hung_are_told_apart_from_those_that_failed() -> None:
    hung = ended(stopped="idle", reason="its GPUs stayed idle")
    assert sentences(stopped=(hung,), stops=1) == ["train-17 was stopped: its GPUs stayed idle"]
    assert sentences(failed=(ended(name="train-3"),), failures=1, stopped=(hung,), stops=2) == [
        "train-3 failed",
        "2 jobs were stopped by a rule in the last 24 h, last train-17",
    ]


def test_jobs_that_cannot_start_are_told() -> None:
    assert sentences(waiting=(waiting("never"),)) == ["train-17 can never start"]
    assert sentences(waiting=(waiting("never"), waiting("never"))) == ["train-17 and 1 other job can never start"]
    assert sentences(waiting=(waiting("too large"),)) == ["train-17 asks for more than any machine has"]


def test_a_job_that_stoker_holds_is_told_and_one_that_a_person_holds_is_not() -> None:
    lost = waiting("held", reason="its worker was not heard of in time")
    assert sentences(waiting=(lost,)) == ["train-17 is held: lost with its machine"]
    assert sentences(waiting=(lost, lost, lost)) == ["train-17 and 2 other jobs are held: lost with their machine"]
    assert sentences(waiting=(waiting("held", reason="held"), waiting("held"))) == []


def test_a_pause_is_told_while_jobs_wait() -> None:
    assert sentences(paused=True, counts={"queued": 2}) == ["The queue is paused while 2 jobs wait"]
    assert sentences(paused=True, counts={"running": 2}) == []
    assert sentences(machines=(machine(card(), paused=True),)) == ["gpu-box is paused while 1 job waits"]


def test_a_job_that_waits_though_there_is_room_for_it_is_told() -> None:
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


def test_gpus_without_work_in_an_empty_queue_are_told_kindly() -> None:
    three = machine(*(card(index, state="free") for index in range(3)))
    health = judged(machines=(three,), counts={"succeeded": 4})
    assert (health.level, health.headline) == ("attention", "The queue is empty: 3 GPUs have nothing to do")
    one = machine(card(0), card(1, state="free"))
    assert sentences(machines=(one,), counts={"held": 2}) == ["Only held jobs are left: 1 GPU has nothing to do"]
    assert sentences(machines=(machine(card(state="free", since=NOW - 1)),), counts={}) == []


def test_a_gpu_that_cannot_be_read_is_never_called_free() -> None:
    for unread in (card(state="unknown", since=NOW - 60), card(state="free", unread_since=NOW - 60)):
        assert sentences(machines=(machine(unread),), counts={}) == []


def test_no_worker_and_nothing_to_do_asks_for_one() -> None:
    health = judged(machines=(), counts={})
    assert (health.level, health.headline) == ("attention", "No worker is there: `stoker work` starts one")


# All together


def test_what_is_wrong_comes_before_what_needs_a_look() -> None:
    gone = machine(worker="o-1", host="other", there=False, seen=NOW - 720)
    health = judged(machines=(BUSY, gone), failed=(ended(),), failures=1, waiting=(waiting("never"),))
    assert [point.level for point in health.points] == ["bad", "attention", "attention"]
    assert health.headline == "1 thing is wrong, 2 more need you"
    assert judged(failed=(ended(),), failures=1, waiting=(waiting("never"),)).headline == "2 things need you"


def test_a_name_of_several_words_is_quoted() -> None:
    large = waiting("too large", name="wants eight GPUs")
    assert sentences(waiting=(large,)) == ["“wants eight GPUs” asks for more than any machine has"]


def test_a_long_name_is_cut_and_cannot_break_the_line() -> None:
    (sentence,) = sentences(failed=(ended(name="a\nb" + "x" * 100),), failures=1)
    assert len(sentence) < 60
    assert "\n" not in sentence
