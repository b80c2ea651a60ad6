"""Memory of a probe: attribution, and whether it still grows."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from stoker.fit.fitter import FitRequest, Fitter
from stoker.fit.measurements import BLOCK, MemoryTracker, Plateau
from stoker.fit.model import SearchOptions
from stoker.gpus.model import Gpu, Look, Maybe, Process, Reading, Unknown, Utilization
from stoker.gpus.prober import Prober

GIB = 2**30
NOT_REPORTED = Unknown("not reported")
OURS, THEIRS = 100, 200


def process(pid: int, memory: Maybe[int] = GIB, started: Maybe[int] = 5, name: str = "python") -> Process:
    return Process(pid, started, name, "alice", memory, NOT_REPORTED)


def look(used: Maybe[int], *processes: Process, listed: bool = True, busy: float = 0.5) -> Look:
    there: Maybe[tuple[Process, ...]] = processes if listed else NOT_REPORTED
    work = Utilization(busy, busy, 1)
    reading = Reading(
        "GPU-a", 0.1, work, used, 24 * GIB, NOT_REPORTED, NOT_REPORTED, NOT_REPORTED, NOT_REPORTED, there, NOT_REPORTED
    )
    gpu = Gpu("GPU-a", 0, "card", "nvidia", 0, 24 * GIB, NOT_REPORTED)
    return Look("test", 0.0, 0.0, (gpu,), (reading,))


def watch(used_before: Maybe[int] = 2 * GIB) -> MemoryTracker:
    return MemoryTracker(look(used_before), ["GPU-a"], lambda pid: pid == OURS)


def test_only_the_probes_own_processes_count_and_the_peak_stays() -> None:
    seen = watch()
    assert seen.see(look(12 * GIB, process(OURS, 3 * GIB), process(THEIRS, 9 * GIB))) is None
    seen.see(look(10 * GIB, process(OURS, GIB), process(THEIRS, 9 * GIB)))
    assert (seen.peak, seen.pids, seen.note) == (3 * GIB, {OURS}, "")


def test_foreign_process_is_not_use_by_the_probe() -> None:
    seen = watch()
    seen.see(look(9 * GIB, process(THEIRS, 9 * GIB)))
    assert (seen.peak, seen.peaks) == (0, {})


@pytest.mark.parametrize(
    "seen_now",
    [
        look(5 * GIB, process(OURS, NOT_REPORTED)),
        look(5 * GIB, process(THEIRS, started=NOT_REPORTED)),
        look(5 * GIB, process(THEIRS, name="nvidia-cuda-mps-server")),
        look(5 * GIB, listed=False),
    ],
    ids=["memory not reported", "pid of another namespace", "behind MPS", "no list"],
)
def test_memory_without_attribution_is_the_difference_with_a_note(seen_now: Look) -> None:
    seen = watch(used_before=2 * GIB)
    seen.see(seen_now)
    assert seen.peak == 3 * GIB
    assert "the driver does not report memory per process" in seen.note


def test_small_increase_on_the_gpu_is_not_use_by_the_probe() -> None:
    seen = watch(used_before=2 * GIB)
    seen.see(look(2 * GIB + BLOCK, listed=False))
    assert seen.peak == 0


def test_unreadable_memory_has_its_reason() -> None:
    assert watch().see(look(Unknown("GPU is lost"), listed=False)) == "GPU is lost"


def plateau(*, steps: int, seconds: float, **changes: Any) -> bool:
    """Whether memory constant at 1 GiB over these steps and seconds has settled, with a flat time of 20 s."""
    flat = Plateau(20.0)
    flat.see(0.0, changes.get("first", GIB), 0, changes.get("works", True))
    flat.see(seconds, changes.get("last", GIB), steps, changes.get("works", True))
    return flat.reached(seconds, steps)


def test_memory_has_settled_after_five_steps_and_a_second() -> None:
    assert plateau(steps=5, seconds=1.0)
    assert not plateau(steps=4, seconds=30.0)
    assert not plateau(steps=500, seconds=0.9)


def test_program_without_steps_is_watched_for_the_flat_time() -> None:
    assert plateau(steps=0, seconds=20.0)
    assert not plateau(steps=0, seconds=19.9)


def test_program_with_rare_steps_is_watched_for_a_limited_time() -> None:
    assert plateau(steps=1, seconds=60.0)


def test_program_that_still_loads_data_has_not_settled() -> None:
    assert not plateau(steps=0, seconds=60.0, works=False)


def test_growth_of_one_block_or_one_percent_is_ignored() -> None:
    assert plateau(steps=5, seconds=1.0, last=GIB + BLOCK)
    assert not plateau(steps=5, seconds=1.0, last=GIB + BLOCK + GIB // 50)


def test_program_without_gpu_memory_has_not_settled() -> None:
    assert not plateau(steps=9, seconds=90.0, first=0, last=0)


def test_slow_growth_is_growth() -> None:
    flat = Plateau(20.0)
    for second in range(100):
        flat.see(float(second), GIB + second * 5 * 2**20, 0, True)
        assert not flat.reached(float(second), 0)


def test_half_of_a_gpu_is_half_of_its_total_memory(tmp_path: Path) -> None:
    request = FitRequest(
        command=("train", "--batch_size", "{batch_size}"),
        search_options=SearchOptions(per_gpu=2, margin=0.0),
        environment={},
        gpus=("GPU-a",),
        outputs=tmp_path,
    )
    seen = look(8 * GIB)  # the first of the two has started
    with patch.object(Fitter, "_look", return_value=seen), patch.object(Fitter, "_settled", return_value=seen):
        assert Fitter(request, Mock(spec=Prober), lambda _: None).limit() == 12 * GIB
