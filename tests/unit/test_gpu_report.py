"""A reading as text and as JSON."""

import msgspec
import pytest

from stoker.gpus.model import Look, Reading, Unknown, Utilization
from stoker.gpus.report import gpus_of, look_as_json, look_as_line, state_of
from tests.support.looks import GIB, a_gpu, a_look, a_process, a_reading


def test_burst_between_looks_is_busy_even_when_the_mean_is_zero() -> None:
    reading = a_reading(utilization=0.0)
    reading = msgspec.structs.replace(reading, utilization=Utilization(0.9, 0.004, 30))
    assert state_of(reading) == ("busy", "utilization 0.4%, peak 90% over the last 1s")


def test_zero_is_idle_and_lists_memory_holders() -> None:
    state, reason = state_of(a_reading(processes=(a_process(), a_process(4243))))
    assert state == "idle"
    assert reason == "nothing ran on it in the last 1s; 8.0 GiB held by alice's python (pid 4242) and 1 more"


@pytest.mark.parametrize("utilization", [Unknown("the GPU is lost")])
def test_unknown_is_never_idle(utilization: Unknown) -> None:
    assert state_of(a_reading(utilization=utilization)) == ("unknown", "the GPU is lost")


def test_zero_stays_zero_and_unknown_is_null_with_its_reason() -> None:
    reading = a_reading(memory_used=0, power=Unknown("not supported by this GPU"))
    (entry,) = gpus_of(Look("test", 1.0, 1.0, (a_gpu(),), (reading,)))
    assert entry["memory_used"] == 0
    assert entry["utilization"] == 0
    assert entry["power_watts"] is None
    assert entry["unknown"]["power_watts"] == "not supported by this GPU"


def test_unreadable_machine_is_one_unknown_entry_not_an_empty_list() -> None:
    look = Look("nvml", 1.0, 1.0, (), (), problem=Unknown("versions differ"))
    (entry,) = gpus_of(look)
    assert (entry["state"], entry["reason"], entry["uuid"], entry["index"]) == (
        "unknown",
        "versions differ",
        None,
        None,
    )


def test_unknown_processes_are_null_and_none_is_an_empty_list() -> None:
    look = a_look(0.0, 0.0)
    readings = (look.readings[0], Reading.unknown("GPU-1", "lost"))
    first, second = gpus_of(msgspec.structs.replace(look, readings=readings))
    assert first["processes"] == []
    assert second["processes"] is None


def test_json_can_be_parsed_and_a_line_is_one_line() -> None:
    reading = a_reading(processes=(a_process(name='py"th\non', user=Unknown("elsewhere")),))
    look = Look("test", 1.0, 1_790_000_000.123, (a_gpu(),), (reading,))
    (entry,) = msgspec.json.decode(look_as_json(look))
    assert entry["processes"][0] == {
        "pid": 4242, "name": 'py"th\non', "user": None, "memory": 8 * GIB, "utilization": 0.5, "started": 77,
    }  # fmt: skip
    line = look_as_line(look)
    assert b"\n" not in line
    assert msgspec.json.decode(line)["gpus"] == [entry]
