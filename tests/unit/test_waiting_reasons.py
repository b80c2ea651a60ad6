"""Messages on why a job waits."""

import pytest

from stoker.engines.engine import Reservation
from stoker.engines.local.capacity import (
    Busy,
    Free,
    Held,
    MemoryTaken,
    Obstacle,
    Stopping,
    TooSmall,
    UnreadableGpu,
    UsedByOthers,
)
from stoker.engines.local.placement import CannotFit, CpuSlotsTaken, NoGpusSeen, NotEnoughGpus
from stoker.engines.local.waiting_reasons import why_waiting

GIB = 2**30
HOUR = 3600.0


def asks(gpus: int, memory: int | None = None) -> tuple[int, int | None]:
    return gpus, memory


def test_reason_is_the_example_of_the_manual() -> None:
    reason = NotEnoughGpus(
        *asks(2, 20 * GIB),
        ((0, UsedByOthers(("alice's python (pid 4242)",))), (1, Held(("deadbeef",), 3 * HOUR, None))),
    )
    assert why_waiting(reason) == (
        "waits for 2 GPUs with 20 GiB: GPU 0 is used by alice's python (pid 4242), GPU 1 frees in at most 3 h"
    )


@pytest.mark.parametrize(
    ("obstacle", "said"),
    [
        (UsedByOthers(("bob's a (pid 1)", "eve's b (pid 2)")), "GPU 3 is used by bob's a (pid 1) and eve's b (pid 2)"),
        (UnreadableGpu("the driver did not answer"), "GPU 3 cannot be read (the driver did not answer)"),
        (TooSmall(8 * GIB), "GPU 3 has only 8.0 GiB"),
        (Busy(0.8, 0.5), "GPU 3 is 80% busy (free below 50%) with no process seen there"),
        (MemoryTaken(12 * GIB), "GPU 3 has 12 GiB in use by no process that is seen"),
        (Held(("deadbeef",), None, None), "GPU 3 is held by job deadbeef"),
        (Held(("a", "b", "c", "d", "e"), None, None), "GPU 3 is held by jobs a, b, c and 2 others"),
        (Held(("deadbeef",), None, 2 * GIB), "GPU 3 has 2.0 GiB left beside job deadbeef"),
        (Held(("a", "b"), 600.0, 0), "GPU 3 has 0 B left beside jobs a and b, more in at most 10 min"),
        (Stopping(("deadbeef",)), "GPU 3 is being freed (job deadbeef is stopping)"),
        (Reservation("deadbeef", 2, ("a", "b"), ("a",), 0.0), "GPU 3 is reserved for job deadbeef (2 GPUs, has 1)"),
        (Free(), "GPU 3 is free"),
    ],
)
def test_every_obstacle_has_a_description(obstacle: Obstacle, said: str) -> None:
    assert why_waiting(NotEnoughGpus(*asks(1), ((3, obstacle),))) == f"waits for a GPU: {said}"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (11.7, "12.0 GiB: GPU 0 has 11.7 GiB left"),
        (11.97, "12.00 GiB: GPU 0 has 11.97 GiB left"),
        (11.4, "12 GiB: GPU 0 has 11 GiB left"),
        (0.5, "12 GiB: GPU 0 has 512 MiB left"),
    ],
)
def test_rounded_memory_sizes_still_differ(left: float, said: str) -> None:
    beside = NotEnoughGpus(*asks(1, 12 * GIB), ((0, Held(("a",), None, int(left * GIB))),))
    assert why_waiting(beside) == f"waits for a GPU with {said} beside job a"
    small = why_waiting(NotEnoughGpus(*asks(1, 12 * GIB), ((0, TooSmall(int(left * GIB))),)))
    assert small == f"waits for a GPU with {said.replace('has', 'has only').removesuffix(' left')}"


def test_gpus_with_the_same_obstacle_are_named_together() -> None:
    held = Held(("deadbeef",), None, None)
    reason = NotEnoughGpus(*asks(4), ((0, held), (1, Free()), (2, held), (3, held)))
    assert why_waiting(reason) == "waits for 4 GPUs: GPUs 0, 2 and 3 are held by job deadbeef, GPU 1 is free"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "1 s"),
        (44.2, "45 s"),
        (91.0, "2 min"),
        (3541.0, "1 h"),
        (4800.0, "1 h 20 min"),
        (3 * HOUR + 0.5, "3 h 1 min"),
        (72 * HOUR, "3 days"),
        (72 * HOUR + 1, "4 days"),
    ],
)
def test_remaining_time_is_rounded_up(seconds: float, said: str) -> None:
    reason = NotEnoughGpus(*asks(1), ((0, Held(("deadbeef",), seconds, None)),))
    assert why_waiting(reason).endswith(f"GPU 0 frees in at most {said}")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (CannotFit(*asks(4), 2, 2, 24 * GIB), "it asks for 4 GPUs, and there are only 2"),
        (CannotFit(*asks(1), 0, 0, 0), "it asks for a GPU, and there is none"),
        (CannotFit(*asks(1, 80 * GIB), 2, 0, 24 * GIB), "asks for a GPU with 80 GiB, and the largest can give 24 GiB"),
        (CannotFit(*asks(2, 40 * GIB), 4, 1, 48 * GIB), "and only 1 of the 4 here can give that much"),
        (CannotFit(*asks(1, 24 * GIB), 1, 0, 24 * GIB - 12 * 2**20), "24.00 GiB, and the largest can give 23.99 GiB"),
        (CpuSlotsTaken(0), "it takes no jobs without a GPU"),
    ],
)
def test_job_that_can_never_start_here_has_the_missing_resource(reason: CannotFit | CpuSlotsTaken, said: str) -> None:
    sentence = why_waiting(reason)
    assert sentence.startswith("can never start on this machine: ")
    assert sentence.endswith(said)


def test_unreadable_machine_is_reported() -> None:
    assert why_waiting(NoGpusSeen(*asks(2), "the driver did not answer")) == (
        "waits for 2 GPUs: the GPUs of this machine cannot be read (the driver did not answer)"
    )


def test_job_without_a_gpu_waits_for_a_cpu_slot() -> None:
    assert why_waiting(CpuSlotsTaken(1)) == (
        "waits for another job without a GPU to end: 1 is running, the limit of this machine"
    )
    assert "4 are running" in why_waiting(CpuSlotsTaken(4))
