"""Which signals a GPU offers, and what is lost without them."""

from typing import Any

import msgspec
import pytest

from stoker.gpus.model import DeviceHealth, Pipes, Unknown, Utilization
from stoker.rules.signals import GpuSignals, signals_of
from tests.support.looks import a_gpu, a_look, a_process, a_reading

NOT_SUPPORTED = Unknown("not supported by this GPU")
WHOLE: dict[str, Any] = {"memory_activity": Utilization(0.2, 0.2, 6), "health": DeviceHealth(), "pipes": NOT_SUPPORTED}


def of(**changes: Any) -> GpuSignals:
    reading = msgspec.structs.replace(a_reading(a_gpu(), 0.5), **{**WHOLE, **changes})
    (found,) = signals_of(a_look(0.5, readings=(reading,)))
    return found


def words(found: GpuSignals) -> dict[str, str]:
    return {one.name: one.words for one in found.signals}


def test_gpu_with_all_that_rules_need_has_no_weakness() -> None:
    found = of(processes=(a_process(),))
    assert found.weaknesses == ()
    assert words(found) == {
        "utilization": "6 samples",
        "memory activity": "yes",
        "GPM": "not supported by this GPU",
        "power": "yes",
        "faults": "yes",
        "processes": "yes",
        "shares of processes": "yes",
    }


def test_shares_cannot_be_told_without_a_process() -> None:
    found = of(processes=())
    assert words(found)["shares of processes"] == "no process is there to tell by"
    assert found.weaknesses == ()


def test_gpm_takes_the_place_of_memory_activity() -> None:
    assert of(memory_activity=NOT_SUPPORTED, pipes=Pipes(0.1, 0.1, 0.1, 0.1)).weaknesses == ()


@pytest.mark.parametrize(
    ("changes", "weakness"),
    [
        ({"utilization": NOT_SUPPORTED}, "utilization is unknown (not supported by this GPU): no rule ever acts on it"),
        ({"utilization": Utilization(0.1, 0.1, 1)}, "one sample per look: a short burst of work can be missed"),
        ({"memory_activity": NOT_SUPPORTED}, "memory activity is not reported: hangs are told by power only"),
        (
            {"memory_activity": NOT_SUPPORTED, "power": NOT_SUPPORTED},
            "memory activity is not reported: hangs cannot be told from work",
        ),
        ({"health": NOT_SUPPORTED}, "faults are not reported"),
        ({"processes": NOT_SUPPORTED}, "processes are not listed"),
        ({"processes": (a_process(utilization=NOT_SUPPORTED),)}, "the share of each process is not reported"),
    ],
)
def test_missing_signal_weakens_judgement(changes: dict[str, Any], weakness: str) -> None:
    (found,) = of(**changes).weaknesses
    assert found.startswith(weakness)


def test_counter_of_all_the_time_is_named() -> None:
    assert words(of(utilization=Utilization(0.1, 0.1, 0)))["utilization"] == "a counter of all the time"
