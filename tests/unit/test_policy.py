"""Policies: validation, description and storage."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.rules.idle import IdlePolicy
from stoker.rules.registry import changed, policies_of, stored_form
from stoker.rules.stalled import StalledPolicy


def test_defaults_are_valid() -> None:
    IdlePolicy().check()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"below": 0.0}, "--below 0% would never or always be idle"),
        ({"below": -0.1}, "--below -10% would"),
        ({"below": 1.01}, "--below 101% would"),
        ({"below": float("nan")}, "--below"),
        ({"every": 0.0}, "greater than zero"),
        ({"window": 0.0}, "greater than zero"),
        ({"window": -60.0}, "greater than zero"),
        ({"window": 1.0, "every": 10.0}, "--for 1s is shorter than --every 10s"),
        ({"after": -1.0}, "cannot be negative"),
        ({"arm_above": 0.5, "arm_for": -1.0}, "cannot be negative"),
        ({"arm_above": 0.0}, "--arm-above 0% is not a level of activity"),
        ({"arm_above": 1.5}, "--arm-above 150% is not a level of activity"),
        ({"arm_for": 10.0}, "--arm-for needs --arm-above"),
        ({"warn_at": 0.0}, "--warn-at must be between"),
        ({"warn_at": 1.0}, "--warn-at must be between"),
        ({"require": 0}, "--require must be all, any or a number"),
        ({"require": -2}, "--require must be all, any or a number"),
        ({"window": float("inf")}, "finite durations"),
        ({"window": float("nan")}, "finite durations"),
        ({"every": float("nan")}, "finite durations"),
        ({"after": float("inf")}, "finite durations"),
        ({"arm_above": 0.5, "arm_for": float("nan")}, "finite durations"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence) as caught:
        msgspec.structs.replace(IdlePolicy(), **changes).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"below": 1.0},
        {"below": 0.001},
        {"window": 5.0},
        {"after": 0.0},
        {"warn_at": None},
        {"arm_above": 1.0},
        {"arm_above": 0.5, "arm_for": 300.0},
        {"require": "any"},
        {"require": 1},
    ],
)
def test_limits_are_valid(changes: dict[str, Any]) -> None:
    msgspec.structs.replace(IdlePolicy(), **changes).check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "all GPUs below 1% for 30m"),
        ({"require": "any", "below": 0.2}, "any GPU below 20% for 30m"),
        ({"require": 1, "window": 90.0}, "at least 1 GPU below 1% for 1m30s"),
        ({"require": 4, "window": 7200.0}, "at least 4 GPUs below 1% for 2h"),
    ],
)
def test_policy_describes_itself(changes: dict[str, Any], words: str) -> None:
    assert msgspec.structs.replace(IdlePolicy(), **changes).in_words() == words


@given(st.floats(0.01, 1000))
def test_three_missing_looks_are_a_gap_and_a_slow_look_is_not(every: float) -> None:
    gap = IdlePolicy(every=every).longest_gap
    assert every + 5.0 < gap < 4 * every + 10.0


def test_stored_policy_is_loaded_unchanged() -> None:
    policy = IdlePolicy(require=2, arm_above=0.5, arm_for=60.0, warn_at=None, cpu_for=7200.0)
    assert policies_of(msgspec.json.decode(msgspec.json.encode(stored_form([policy], whole=True)))) == (policy,)


def test_job_keeps_only_what_differs_from_the_defaults() -> None:
    stalled = StalledPolicy()
    assert stored_form([IdlePolicy(), stalled]) == {}
    assert stored_form([IdlePolicy(window=60.0), stalled]) == {"window": 60.0}
    assert stored_form([IdlePolicy(), StalledPolicy(window=60.0)]) == {"stalled_window": 60.0}
    assert stored_form([IdlePolicy()]) == {"stalled": False}
    assert stored_form([]) == {"idle": False, "stalled": False}
    assert policies_of({"idle": False}) == policies_of({"idle": "off"}) == (stalled,)
    assert policies_of({"idle": False, "stalled": False}) == ()


def test_changed_setting_enables_its_rule() -> None:
    assert changed({"idle": False}, {"window": 60.0}) == {"window": 60.0}
    assert changed({"window": 60.0}, {"idle": "off"}) == {"idle": False}
    assert changed({"window": 60.0}, {"every": 2.0}) == {"window": 60.0, "every": 2.0}


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ({"windows": 3}, "no rule has a setting 'windows': there are every, warn_at, idle, below"),
        ({"window": "x"}, "the settings of the rule 'idle' are not valid: "),
        ({"idle": "maybe"}, "idle: 'maybe' is neither on nor off"),
    ],
)
def test_unknown_stored_settings_are_refused(stored: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInputError, match=reason):
        policies_of(stored)
