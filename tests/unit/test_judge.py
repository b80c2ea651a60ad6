"""Log messages of a judge: each change once."""

from collections.abc import Iterable, Iterator

from stoker.gpus.model import Maybe, Unknown, Utilization
from stoker.rules.idle import IdlePolicy
from stoker.rules.judge import Judge, LogMessage
from stoker.rules.rule import Activity, Observation
from stoker.rules.stalled import StalledPolicy
from tests.support.looks import a_reading

POLICY = IdlePolicy(unused_for=0, window=1800, after=0, every=100, warn_at=0.5)
LOST = Unknown("the GPU is lost")


class Watching:
    """A judge that looks every 100 seconds."""

    def __init__(self, policy: IdlePolicy = POLICY, intention: str = "exit", *, dry_run: bool = False) -> None:
        self.judge = Judge([policy], 0.0, intention, dry_run=dry_run)
        self.at = 0.0

    def look(self, *peaks: Maybe[float], problem: str | None = None) -> tuple[LogMessage, ...]:
        self.at += 100.0
        activities = [Activity(f"GPU-{n}", f"GPU {n}", 100.0, peak) for n, peak in enumerate(peaks)]
        return self.judge.observe(Observation(self.at, activities, problem)).messages

    def texts(self, *peaks: Maybe[float]) -> list[str]:
        """The new messages at each of these looks at one GPU."""
        return list(texts(message for peak in peaks for message in self.look(peak)))


def texts(messages: Iterable[LogMessage]) -> Iterator[str]:
    return (message.text for message in messages)


def test_warning_is_logged_once_with_the_action_and_its_time() -> None:
    watching = Watching(intention="shut this machine down")
    assert watching.texts(0.8, *[0.0] * 8) == []
    assert watching.texts(0.0) == [
        "GPU 0 stayed below 1% for 15m of 30m; in 15m, unless that changes: shut this machine down"
    ]
    assert watching.texts(*[0.0] * 8) == []


def test_every_idle_period_is_warned_of_and_its_end_is_logged() -> None:
    watching = Watching()
    assert len(watching.texts(*[0.0] * 10)) == 1
    assert watching.texts(0.8, 0.8) == ["the warning is over: GPU 0 was at 80%"]
    assert len(watching.texts(*[0.0] * 12)) == 1


def test_disabled_warning_is_not_logged() -> None:
    assert (
        Watching(IdlePolicy(unused_for=0, window=1800, after=0, every=100, warn_at=None)).texts(*[0.0] * 12, 0.8) == []
    )


def test_reason_is_logged_once_when_the_rule_fires() -> None:
    assert Watching().texts(*[0.0] * 20)[1:] == ["GPU 0 stayed below 1% for 30m"]


def test_dry_run_logs_its_action_once_per_idle_period() -> None:
    watching = Watching(dry_run=True)
    assert watching.texts(*[0.0] * 20)[1:] == ["GPU 0 stayed below 1% for 30m; dry run: would exit now"]
    assert len(watching.texts(0.8, *[0.0] * 18)) == 3


def test_use_after_an_action_rearms_the_rule_and_its_warning() -> None:
    watching = Watching()
    watching.texts(*[0.0] * 18)
    watching.judge.rearm(watching.at)
    assert watching.texts(0.8) == ["armed: GPUs have been active"]
    assert len(watching.texts(*[0.0] * 10)) == 1


def test_warnings_and_unknown_readings_are_notified() -> None:
    watching = Watching()
    watching.texts(*[0.0] * 8)
    assert [message.urgent for message in watching.look(0.0)] == [True]
    assert [message.urgent for message in watching.look(0.8)] == [False]
    watching.texts(LOST, LOST, LOST)
    assert [message.urgent for message in watching.look(LOST)] == [True]


def test_unknown_readings_are_logged_once_after_five_minutes() -> None:
    watching = Watching()
    for _look in range(3):
        # One busy GPU decides the rule; lost GPUs are reported nevertheless.
        assert watching.look(0.9, LOST, LOST) == ()
    assert list(texts(watching.look(0.9, LOST, LOST))) == [
        "GPU 1, GPU 2 could not be read for 5m: the GPU is lost; what is unknown never counts against a job"
    ]
    assert watching.look(0.9, LOST, LOST) == ()
    assert list(texts(watching.look(0.9, 0.9, 0.9))) == ["GPU 1, GPU 2 can be read again"]


def test_machine_without_any_reading_is_logged_with_its_reason() -> None:
    watching = Watching()
    found = [message for _look in range(4) for message in watching.look(problem="the driver does not answer")]
    assert list(texts(found)) == [
        "the GPUs could not be read for 5m: the driver does not answer; what is unknown never counts against a job"
    ]


def test_reason_of_an_unreadable_machine_is_that_of_the_verdict() -> None:
    verdict = Judge([POLICY], 0.0, "exit").observe(Observation(1.0, [], "the driver does not answer")).verdict
    assert (verdict.kind, verdict.reason, verdict.rule) == ("unknown", "the driver does not answer", "idle")


def test_arming_is_logged_once() -> None:
    watching = Watching(IdlePolicy(unused_for=0, window=1800, after=0, every=100, arm_above=0.8))
    assert watching.texts(0.1, LOST, 0.1) == []
    assert watching.texts(0.9, 0.0, 0.9) == ["armed: GPUs have been active"]


def spinning(at: float, *, works: bool = False) -> Observation:
    """One GPU that is fully used; its memory is read and written only while it works."""
    memory = 0.4 if works else 0.0
    reading = a_reading(utilization=1.0, span=100.0, memory_activity=Utilization(memory, memory, 6))
    return Observation(at, [Activity(reading.uuid, "GPU 0", 100.0, 1.0, reading)])


def test_warning_of_a_rule_that_never_acts_is_logged_once_with_advice() -> None:
    judge = Judge([StalledPolicy(window=1000, every=100)], 0.0, "stop the job")
    for at in range(0, 1000, 100):
        judge.observe(spinning(at, works=True))
    judgements = [judge.observe(spinning(at)) for at in range(1000, 9000, 100)]
    [message] = texts(message for judgement in judgements for message in judgement.messages)
    assert message == (
        "GPU 0 has been fully used without doing work for 16m40s; the job may hang, but its steps cannot be seen: "
        "call stoker.step() in its loop, or stop such jobs with --stalled-unseen-for 2h"
    )
    assert judgements[-1].warned is not None
    assert judgements[-1].warned.hang
    assert judgements[-1].acts_in is None


def test_warning_outlasts_a_pause_of_the_window() -> None:
    judge = Judge([StalledPolicy(window=1000, unseen_for=10_000, every=100)], 0.0, "stop the job")
    for at in range(0, 1000, 100):
        judge.observe(spinning(at, works=True))
    shown = [judge.observe(spinning(at, works=at == 7000)) for at in range(1000, 9000, 100)]
    assert len(list(texts(message for judgement in shown for message in judgement.messages))) == 1


def test_warning_that_holds_is_part_of_every_judgement() -> None:
    watching = Watching()
    judged = [
        watching.judge.observe(Observation(at, [Activity("GPU-0", "GPU 0", 100.0, peak)]))
        for at, peak in (*((100.0 * look, 0.0) for look in range(1, 15)), (1500.0, 0.8))
    ]
    warned = [judgement.warned.reason if judgement.warned else "" for judgement in judged]
    assert warned == [""] * 8 + ["GPU 0 stayed below 1% for 15m of 30m"] * 6 + [""]
    assert [judgement.acts_in for judgement in judged[8:]] == [900, 800, 700, 600, 500, 400, None]
