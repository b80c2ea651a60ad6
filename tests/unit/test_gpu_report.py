"""A reading as text and as JSON."""

import msgspec
import pytest

from stoker.gpus.model import DeviceHealth, Look, Maybe, Pipes, Reading, Unknown, Utilization
from stoker.gpus.report import faults_of, gpus_of, look_as_json, look_as_line, state_of
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


@pytest.mark.parametrize(
    ("health", "faults"),
    [
        (Unknown("not supported by this GPU"), []),
        (DeviceHealth((), 0, needs_reset=False, remapping_failed=False), []),
        (DeviceHealth((31, 31, 999), Unknown("no ECC")), ["XID 31: a memory fault of a program", "XID 999"]),
        (DeviceHealth((79,)), ["XID 79: the GPU has fallen off the bus", "needs a reset"]),
        (DeviceHealth((), 1, needs_reset=True), ["1 uncorrectable memory error", "needs a reset"]),
        (
            DeviceHealth((), 2, needs_reset=False, remapping_failed=True),
            ["2 uncorrectable memory errors", "has no spare memory rows left: replace it"],
        ),
    ],
)
def test_faults_are_described_in_words(health: Maybe[DeviceHealth], faults: list[str]) -> None:
    assert faults_of(msgspec.structs.replace(a_reading(), health=health)) == faults


def test_json_has_activity_clock_and_health() -> None:
    reading = msgspec.structs.replace(
        a_reading(),
        memory_activity=Utilization(0.4, 0.3, 6),
        sm_clock=1410.0,
        throttling=("power cap",),
        health=DeviceHealth((31,), 0, needs_reset=Unknown("too old"), remapping_failed=False),
        pipes=Pipes(0.9, 0.8, 0.1, 0.2, 5.0, Unknown("no NVLink")),
    )
    (entry,) = gpus_of(Look("test", 1.0, 1.0, (a_gpu(),), (reading,)))
    assert (entry["memory_activity"], entry["memory_activity_peak"]) == (0.3, 0.4)
    assert (entry["sm_clock_mhz"], entry["throttling"]) == (1410.0, ("power cap",))
    assert entry["health"] == {"xids": (31,), "uncorrected": 0, "needs_reset": None, "remapping_failed": False}
    assert entry["faults"] == ["XID 31: a memory fault of a program"]
    assert (entry["pipes"]["pcie"], entry["pipes"]["nvlink"]) == (5.0, None)
    assert not {"memory_activity", "sm_clock_mhz", "throttling", "health"} & entry["unknown"].keys()


def test_json_can_be_parsed_and_a_line_is_one_line() -> None:
    reading = a_reading(processes=(a_process(name='py"th\non', user=Unknown("elsewhere")),))
    look = Look("test", 1.0, 1_790_000_000.123, (a_gpu(),), (reading,))
    (entry,) = msgspec.json.decode(look_as_json(look))
    assert entry["processes"][0] == {
        "pid": 4242, "name": 'py"th\non', "user": None, "memory": 8 * GIB, "utilization": 0.5, "memory_activity": None,
        "started": 77,
    }  # fmt: skip
    line = look_as_line(look)
    assert b"\n" not in line
    assert msgspec.json.decode(line)["gpus"] == [entry]
