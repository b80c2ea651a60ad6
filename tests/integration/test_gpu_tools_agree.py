"""nvitop, gpustat and `stoker gpus --json` read the same mock machine and say the same."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.support.command import stoker
from tests.support.mock_nvml import MockMachine

GIB = 2**30
MIB = 2**20

NVITOP = """
import json
from nvitop import Device
print(json.dumps([
    {
        "index": d.index, "uuid": d.uuid(), "name": d.name(),
        "utilization": d.gpu_utilization(), "memory_used": d.memory_used(), "memory_total": d.memory_total(),
        "power": d.power_usage(), "temperature": d.temperature(),
        "processes": sorted([p.pid, p.name(), p.username(), p.gpu_memory()] for p in d.processes().values()),
    }
    for d in Device.all()
]))
"""

GPUSTAT = """
import json
from gpustat import new_query
print(json.dumps([
    {
        "index": g.index, "uuid": g.uuid, "name": g.name,
        "utilization": g.utilization, "memory_used": g.memory_used, "memory_total": g.memory_total,
        "power": g.power_draw, "temperature": g.temperature,
        "processes": sorted([p["pid"], p["command"], p["username"], p["gpu_memory_usage"]] for p in g.processes),
    }
    for g in new_query().gpus
]))
"""


@pytest.fixture
def busy(nvidia: MockMachine) -> Iterator[MockMachine]:
    """Two GPUs with different values everywhere, and real processes on them."""
    sleepers = [subprocess.Popen(["sleep", "120"]) for _ in range(3)]
    for place, gpu in enumerate(nvidia.gpus):
        gpu.utilization = 37 + 24 * place
        gpu.memory_used = (20 + place) * GIB
        gpu.temperature = 51 + place
        gpu.power_mw = 351_000 + 1000 * place
    nvidia.gpus[0].add_process(sleepers[0].pid, memory=8 * GIB, sm=30)
    nvidia.gpus[1].add_process(sleepers[1].pid, memory=9 * GIB, sm=40)
    nvidia.gpus[1].add_process(sleepers[2].pid, memory=512 * MIB, kind="graphics")
    yield nvidia
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.wait()


def peer(program: str) -> list[dict[str, Any]]:
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, env=os.environ
    )
    found: list[dict[str, Any]] = msgspec.json.decode(out.stdout)
    return found


def in_words_of(gpu: dict[str, Any], *, memory_unit: int, power_unit: float) -> dict[str, Any]:
    """One of our entries in a peer's units."""
    return {
        "index": gpu["index"],
        "uuid": gpu["uuid"],
        "name": gpu["name"],
        "utilization": round(gpu["utilization"] * 100),
        "memory_used": gpu["memory_used"] // memory_unit,
        "memory_total": gpu["memory_total"] // memory_unit,
        "power": round(gpu["power_watts"] / power_unit),
        "temperature": gpu["temperature_celsius"],
        "processes": sorted([p["pid"], p["name"], p["user"], p["memory"] // memory_unit] for p in gpu["processes"]),
    }


@pytest.mark.parametrize(
    ("program", "memory_unit", "power_unit"), [(NVITOP, 1, 0.001), (GPUSTAT, MIB, 1.0)], ids=["nvitop", "gpustat"]
)
def test_other_tools_report_the_same_values(
    busy: MockMachine, program: str, memory_unit: int, power_unit: float
) -> None:
    look = stoker("gpus", "--json", "--deadline", "60s").json()
    ours = [in_words_of(gpu, memory_unit=memory_unit, power_unit=power_unit) for gpu in look]
    assert ours == peer(program)
    assert [len(gpu["processes"]) for gpu in ours] == [1, 2]
