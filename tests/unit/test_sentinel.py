"""The sentinel: armed by activity, fires once when activity stops. Also the drop-in Python module."""

import math
import subprocess
import sys
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.dropin import gpu_sentinel
from stoker.dropin.usage import Devices, GpuUsageMeter
from stoker.errors import BadInputError
from stoker.gpus.model import Look, Unknown
from stoker.gpus.prober import Prober
from stoker.rules.sentinel import Sentinel, SentinelState
from tests.support.looks import a_look


class Watched:
    """A sentinel that counts how often it fired."""

    def __init__(self, *, arm: int = 5, kill: int = 4) -> None:
        self.fired = 0
        self.sentinel = Sentinel(
            arm_duration=arm, arm_threshold=0.8, kill_duration=kill, kill_threshold=0.7, kill_fn=self.fire
        )

    def fire(self) -> None:
        self.fired += 1

    def feed(self, *values: float | None) -> SentinelState:
        for value in values:
            self.sentinel.tick(value)
        return self.sentinel.state


def test_sentinel_is_armed_by_enough_activity_in_a_row() -> None:
    watched = Watched(arm=5)
    assert watched.feed(*[0.2] * 10) is SentinelState.IDLE
    assert watched.feed(0.9, 0.9, 0.9, 0.9, 0.2, 0.9, 0.9, 0.9, 0.9) is SentinelState.IDLE
    assert watched.feed(0.9) is SentinelState.ARMED
    assert watched.fired == 0


def test_sentinel_without_activity_never_fires() -> None:
    watched = Watched()
    watched.feed(*[0.0] * 1000)
    assert watched.fired == 0


def test_sentinel_fires_after_enough_inactivity_in_a_row() -> None:
    watched = Watched(arm=1, kill=4)
    watched.feed(0.9, 0.3, 0.3, 0.3, 0.9, 0.3, 0.3, 0.3)
    assert watched.fired == 0
    watched.feed(0.3)
    assert watched.fired == 1


def test_sentinel_fires_once_and_must_be_armed_again() -> None:
    watched = Watched(arm=2, kill=2)
    assert watched.feed(0.9, 0.9, *[0.0] * 50) is SentinelState.IDLE
    assert watched.fired == 1
    watched.feed(0.9, 0.9, 0.0, 0.0, 0.0)
    assert watched.fired == 2


def test_value_at_a_threshold_is_neither_above_nor_below_it() -> None:
    watched = Watched(arm=1, kill=1)
    assert watched.feed(0.8) is SentinelState.IDLE
    assert watched.feed(0.81) is SentinelState.ARMED
    assert watched.feed(0.7) is SentinelState.ARMED
    assert watched.fired == 0


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -math.inf])
def test_unknown_value_neither_arms_nor_fires_and_restarts_the_count(unknown: float | None) -> None:
    watched = Watched(arm=2, kill=2)
    assert watched.feed(0.9, unknown, 0.9) is SentinelState.IDLE
    assert watched.feed(0.9) is SentinelState.ARMED
    assert watched.feed(0.1, unknown, 0.1) is SentinelState.ARMED
    watched.feed(*[unknown] * 20)
    assert watched.fired == 0
    watched.feed(0.1, 0.1)
    assert watched.fired == 1


def test_first_known_value_arms_without_an_arming_time() -> None:
    watched = Watched(arm=0, kill=2)
    assert watched.feed(math.nan) is SentinelState.IDLE
    assert watched.feed(0.0) is SentinelState.ARMED
    watched.feed(0.0, 0.0)
    assert watched.fired == 1


def test_failed_action_is_due_again_after_the_same_time() -> None:
    attempts = 0

    def refuse() -> None:
        nonlocal attempts
        attempts += 1
        raise OSError("not now")

    sentinel = Sentinel(1, 0.8, 3, 0.7, refuse)
    sentinel.tick(0.9)
    for _ in range(2):
        sentinel.tick(0.0)
        sentinel.tick(0.0)
        with pytest.raises(OSError, match="not now"):
            sentinel.tick(0.0)
        assert sentinel.state is SentinelState.ARMED
    assert attempts == 2


@given(
    values=st.lists(st.one_of(st.floats(0, 1), st.just(math.nan)), max_size=60),
    arm=st.integers(1, 4),
    kill=st.integers(1, 4),
)
def test_every_firing_has_its_own_activity_and_then_its_own_inactivity(
    values: list[float], arm: int, kill: int
) -> None:
    watched = Watched(arm=arm, kill=kill)
    since_last = 0
    for place, value in enumerate(values, start=1):
        before = watched.fired
        watched.feed(value)
        if watched.fired == before:
            continue
        assert all(v < 0.7 for v in values[place - kill : place])
        stretch = values[since_last : place - kill]
        assert any(all(v > 0.8 for v in stretch[i : i + arm]) for i in range(len(stretch) - arm + 1))
        since_last = place
    fresh = Watched(arm=arm, kill=kill)
    fresh.feed(*values, math.nan, *[0.9] * arm, *[0.1] * kill)
    assert fresh.fired == watched.fired + 1


def test_safe_is_another_name_of_idle() -> None:
    assert SentinelState["SAFE"] is SentinelState.IDLE
    assert Watched().sentinel.state is SentinelState.SAFE
    assert {state.name for state in SentinelState} == {"IDLE", "ARMED"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arm_duration": -1}, "arm_duration -1 is negative"),
        ({"kill_duration": 0}, "kill_duration 0 would fire at any value"),
        ({"arm_threshold": math.nan}, "arm_threshold nan is no level"),
        ({"kill_threshold": math.inf}, "kill_threshold inf is no level"),
    ],
)
def test_invalid_thresholds_are_refused(changes: dict[str, float], words: str) -> None:
    given: dict[str, float] = {"arm_duration": 1, "arm_threshold": 0.8, "kill_duration": 1, "kill_threshold": 0.7}
    with pytest.raises(BadInputError, match=words):
        Sentinel(**(given | changes), kill_fn=lambda: None)  # type: ignore[arg-type]  # a common mistake of callers


def test_usage_is_the_mean_over_the_devices() -> None:
    look = a_look(1.0, 0.5, 0.0)
    assert Devices().mean_usage(look) == 0.5
    assert Devices([0, 1]).mean_usage(look) == 0.75
    assert Devices([]).mean_usage(look) == 0.5
    assert Devices([2]).mean_usage(look) == 0.0


def test_missing_devices_do_not_count() -> None:
    assert Devices([0, 1, 2, 3]).mean_usage(a_look(1.0, 0.5)) == 0.75
    assert math.isnan(Devices([7]).mean_usage(a_look(1.0)))
    assert math.isnan(Devices().mean_usage(a_look()))


def test_one_unknown_device_makes_the_usage_unknown() -> None:
    look = a_look(1.0, Unknown("[N/A]"))
    assert math.isnan(Devices().mean_usage(look))
    assert Devices([0]).mean_usage(look) == 1.0


def test_importing_stoker_imports_nothing_else() -> None:
    program = "import sys; before = set(sys.modules); import stoker; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['stoker']"


def renumbered(busy: float) -> Look:
    """After the loss of GPU 0, the former GPU 1 is GPU 0."""
    before = a_look(0.0, busy)
    gpu = msgspec.structs.replace(before.gpus[1], index=0)
    return msgspec.structs.replace(before, gpus=(gpu,), readings=before.readings[1:])


def test_gpus_keep_their_uuids_when_numbers_change() -> None:
    first, second, both = Devices([0]), Devices([1]), Devices()
    for devices in (first, second, both):
        devices.mean_usage(a_look(0.0, 0.9))
    assert second.mean_usage(renumbered(0.9)) == 0.9
    assert second.why_unknown(renumbered(0.9)) is None
    for devices in (first, both):
        assert math.isnan(devices.mean_usage(renumbered(0.0)))
        assert devices.why_unknown(renumbered(0.0)) == "GPU 0 (GPU-00000000) is no longer there"


def test_program_identifies_gpus_by_uuid() -> None:
    looks = [a_look(0.0, 0.9), renumbered(0.9), renumbered(0.9)]

    class Stub:
        def look(self) -> Look:
            return looks.pop(0)

    meter = GpuUsageMeter(lambda: cast("Prober", Stub()))
    assert [meter.usage([1]), meter.usage([1])] == [0.9, 0.9]


def test_gpu_that_appears_late_is_watched() -> None:
    devices = Devices([0, 1])
    assert devices.mean_usage(a_look(0.5)) == 0.5
    assert devices.mean_usage(a_look(0.5, 1.0)) == 0.75
    assert devices.mean_usage(a_look(0.5, 1.0, 0.0)) == 0.75


def test_gap_between_looks_restarts_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [a_look(0.0, at=at) for at in (0.0, 1.0, 2.0, 1000.0, 1001.0, 1002.0, 1003.0)]
    monkeypatch.setattr(gpu_sentinel, "steady_looks", lambda _every: (looks.pop(0) for _ in range(len(looks))))
    assert gpu_sentinel.SentinelWatch(gpu_sentinel.parse(["--arm_duration", "0", "--kill_duration", "3"])).run() == 0
    assert [look.at for look in looks] == [1003.0]  # it fired three looks after the gap


def test_names_of_the_original_module_are_those_of_stoker() -> None:
    import gpu_sentinel as original

    assert original.Sentinel is stoker.Sentinel
    assert original.get_gpu_usage is stoker.get_gpu_usage
    assert original.SentinelState is stoker.SentinelState
