"""What a person is told while GPUs are watched: each change once."""

from stoker.actions.news import Newsroom
from stoker.gpus.model import Maybe, Unknown
from stoker.rules.policy import Policy
from stoker.rules.verdict import Activity, Verdict

POLICY = Policy(window=1800, warn_at=0.5)


def gpu(index: int, peak: Maybe[float] = 0.0) -> Activity:
    return Activity(f"GPU-{index}", f"GPU {index}", 5.0, peak)


def idle_for(seconds: float) -> Verdict:
    return Verdict(
        "idle" if seconds >= POLICY.window else "waiting",
        f"GPU 0 stayed below 1% for {seconds:.0f}s",
        seconds,
        seconds / POLICY.window,
    )


BUSY = Verdict("busy", "GPU 0 was at 80%")


def sentences(room: Newsroom, *verdicts: Verdict) -> list[str]:
    return [news.sentence for verdict in verdicts for news in room.hear(verdict, [gpu(0)])]


def test_the_warning_comes_once_and_says_what_will_happen_and_when() -> None:
    room = Newsroom(POLICY, "shut this machine down")
    assert sentences(room, BUSY, idle_for(10), idle_for(895)) == []
    assert sentences(room, idle_for(900)) == [
        "GPU 0 stayed below 1% for 900s; unless that changes, in 15m: shut this machine down"
    ]
    assert sentences(room, idle_for(905), idle_for(1700), idle_for(1800)) == []


def test_every_idle_stretch_is_warned_of_and_its_end_is_told() -> None:
    room = Newsroom(POLICY, "exit")
    assert len(sentences(room, idle_for(1000))) == 1
    assert sentences(room, BUSY, BUSY) == ["the warning is over: GPU 0 was at 80%"]
    assert len(sentences(room, idle_for(10), idle_for(1000), idle_for(1100))) == 1


def test_no_warning_where_none_is_wanted() -> None:
    room = Newsroom(Policy(window=1800, warn_at=None), "exit")
    assert sentences(room, idle_for(1000), BUSY) == []


def test_after_acting_it_is_told_when_the_gpus_are_used_again_and_the_next_stretch_is_warned_of() -> None:
    room = Newsroom(POLICY, "exit")
    sentences(room, idle_for(1000))
    room.start_over()
    assert sentences(room, BUSY) == ["armed: GPUs have been active"]
    assert len(sentences(room, idle_for(1000))) == 1


def test_warnings_and_unknown_readings_are_worth_a_message() -> None:
    room = Newsroom(POLICY, "exit", unknown_patience=300)
    assert [news.urgent for news in room.hear(idle_for(1000), [gpu(0)])] == [True]
    assert [news.urgent for news in room.hear(BUSY, [gpu(0)])] == [False]
    lost = Unknown("the GPU is lost")
    told = room.hear(Verdict("unknown", "GPU 1 is unknown", unknown_for=300), [gpu(0), gpu(1, lost)])
    assert [news.urgent for news in told] == [True]


def test_readings_that_stay_unknown_are_told_once_after_five_minutes() -> None:
    room = Newsroom(POLICY, "exit")
    activities = [gpu(0, 0.9), gpu(1, Unknown("the GPU is lost")), gpu(2, Unknown("the GPU is lost"))]

    def heard(unknown_for: float) -> list[str]:
        # One busy GPU is enough for the policy to be sure, and the lost ones are still news.
        return [n.sentence for n in room.hear(Verdict("busy", "GPU 0 was at 90%", unknown_for=unknown_for), activities)]

    assert heard(5) == heard(299) == []
    assert heard(300) == [
        "GPU 1, GPU 2 could not be read for 5m: the GPU is lost; what is unknown never counts as idle"
    ]
    assert heard(305) == heard(3600) == []
    assert heard(0) == ["GPU 1, GPU 2 can be read again"]
    assert len(heard(400)) == 1


def test_a_machine_without_any_reading_is_told_with_its_reason() -> None:
    room = Newsroom(POLICY, "exit")
    verdict = Verdict("unknown", "the driver has not answered for 300 s", unknown_for=300)
    assert [news.sentence for news in room.hear(verdict, [])] == [
        "the GPUs could not be read for 5m: the driver has not answered for 300 s; what is unknown never counts as idle"
    ]


def test_arming_is_told_once() -> None:
    room = Newsroom(POLICY, "exit")
    arming = Verdict("arming", "not armed: no GPU has been at 80% or more yet")
    unknown = Verdict("unknown", "GPU 0 is unknown: the GPU is lost")
    assert sentences(room, arming, unknown, arming) == []
    assert sentences(room, BUSY, idle_for(5), BUSY) == ["armed: GPUs have been active"]
