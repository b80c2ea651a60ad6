"""Placement of jobs on GPUs: scenarios, and properties of every machine and queue."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engines.engine import Reservation
from stoker.engines.local.capacity import (
    SETTLES_WITHIN,
    Allocation,
    GpuOrder,
    GpuState,
    Held,
    MemoryTaken,
    Obstacle,
    PlacementOptions,
    ResourceRequest,
    Stopping,
    TooSmall,
    UnreadableGpu,
    UsedByOthers,
)
from stoker.engines.local.host_capacity import HostSpec, HostTaken, HostTooSmall, NotForThisMachine
from stoker.engines.local.placement import (
    ANY_HOST,
    CannotFit,
    CpuSlotsTaken,
    NoGpusSeen,
    NotEnoughGpus,
    Offer,
    Placements,
)
from stoker.engines.local.placement import (
    place as decide,
)
from stoker.engines.local.waiting_reasons import describe_obstacle, why_waiting
from stoker.gpus.model import LINKS, Link, Maybe, Unknown
from stoker.gpus.sim import Shape as SimShape
from tests.support.deep import examples

GIB = 2**30
NOW = 100_000.0
HOUR = 3600.0
RULES = PlacementOptions()


def a_gpu(
    index: int,
    *,
    total: Maybe[int] = 24 * GIB,
    used: Maybe[int] = 0,
    peak: Maybe[float] = 0.0,
    other_processes: tuple[str, ...] = (),
    problem: str | None = None,
    obstructed_since: float | None = None,
) -> GpuState:
    return GpuState(f"GPU-{index}", index, total, used, peak, other_processes, problem, obstructed_since)


def gpus(count: int) -> list[GpuState]:
    return [a_gpu(index) for index in range(count)]


def a_job(
    name: str,
    count: int = 1,
    *,
    order: int = 0,
    memory: float | None = None,
    shares: bool = False,
    priority: int = 0,
    preemptible: bool = False,
    limit: float | None = None,
    **where: Any,
) -> ResourceRequest:
    asked = None if memory is None else int(memory * GIB)
    request = ResourceRequest(name, count, order, asked, shares, priority, preemptible, limit)
    return msgspec.structs.replace(request, **where)


def running(request: ResourceRequest, *indices: int, since: float = NOW - HOUR, stopping: bool = False) -> Allocation:
    return Allocation(request, tuple(f"GPU-{index}" for index in indices), since, used={}, stopping=stopping)


def placed(decision: Placements) -> dict[str, list[int]]:
    """The indices of the GPUs that each started job was given."""
    return {start.job: [int(uuid.removeprefix("GPU-")) for uuid in start.gpus] for start in decision.start}


def place(
    seen: Sequence[GpuState],
    held: Sequence[Allocation],
    *waiting: ResourceRequest,
    rules: PlacementOptions = RULES,
    now: float = NOW,
    host: HostSpec = ANY_HOST,
) -> Placements:
    return decide(seen, held, waiting, rules, now, host=host)


def obstacles_of(decision: Placements, job: str) -> dict[int, Obstacle]:
    reason = decision.waiting[job]
    assert isinstance(reason, NotEnoughGpus)
    return dict(reason.obstacles)


def offer(reservation: Reservation) -> Offer:
    return Offer(reservation.starts_in, reservation.wanted - len(reservation.ready))


# When a GPU is free


def test_every_free_gpu_takes_the_next_job() -> None:
    jobs = [a_job(name, order=order) for order, name in enumerate("abc")]
    assert placed(place(gpus(2), [], *jobs)) == {"a": [0], "b": [1]}


def test_gpu_of_an_own_job_is_not_free_while_the_job_still_loads() -> None:
    decision = place(gpus(1), [running(a_job("loading"), 0, since=NOW)], a_job("next"))
    assert decision.start == ()
    assert obstacles_of(decision, "next") == {0: Held(("loading",), None, None)}


def test_gpu_with_a_foreign_process_is_not_used() -> None:
    seen = [a_gpu(0, other_processes=("alice's python (pid 4242)",)), a_gpu(1)]
    assert placed(place(seen, [], a_job("a"))) == {"a": [1]}
    decision = place(seen[:1], [], a_job("a", memory=1, shares=True))
    assert obstacles_of(decision, "a") == {0: UsedByOthers(("alice's python (pid 4242)",))}


@pytest.mark.parametrize(
    "gpu",
    [
        a_gpu(0, problem="the driver did not answer"),
        a_gpu(0, total=Unknown("the driver did not answer")),
        a_gpu(0, used=Unknown("the driver did not answer")),
        a_gpu(0, peak=Unknown("the driver did not answer")),
    ],
)
def test_unknown_is_never_free(gpu: GpuState) -> None:
    decision = place([gpu], [], a_job("a", memory=1, shares=True))
    assert decision.start == ()
    assert obstacles_of(decision, "a") == {0: UnreadableGpu("the driver did not answer")}


def test_busy_gpu_without_processes_is_not_free() -> None:
    assert place([a_gpu(0, peak=0.5)], [], a_job("a")).start == ()
    assert placed(place([a_gpu(0, peak=0.49)], [], a_job("a"))) == {"a": [0]}
    assert placed(place([a_gpu(0, peak=0.6)], [], a_job("a"), rules=PlacementOptions(free_below=0.7))) == {"a": [0]}


def test_gpu_is_free_once_its_memory_is_released() -> None:
    left_over = a_gpu(0, used=10 * GIB)
    assert place([left_over], [], a_job("whole")).start == ()
    assert placed(place([left_over], [], a_job("fits", memory=12))) == {"fits": [0]}
    assert place([left_over], [], a_job("too-large", memory=15)).start == ()
    assert placed(place([a_gpu(0, used=300 * 2**20)], [], a_job("whole"))) == {"whole": [0]}


def test_work_of_an_own_job_does_not_prevent_sharing_its_gpu() -> None:
    seen = [a_gpu(0, used=8 * GIB, peak=1.0)]
    first = msgspec.structs.replace(running(a_job("first", memory=8, shares=True), 0), used={"GPU-0": 8 * GIB})
    assert placed(place(seen, [first], a_job("second", memory=8, shares=True))) == {"second": [0]}


# Sharing


def test_sharing_jobs_are_packed_by_memory_and_leave_whole_gpus_free() -> None:
    jobs = [a_job(name, order=order, memory=10, shares=True) for order, name in enumerate("abc")]
    assert placed(place(gpus(4), [], *jobs)) == {"a": [0], "b": [0], "c": [1]}


def test_sharing_job_goes_to_the_gpu_with_least_memory_left() -> None:
    held = [running(a_job("small", memory=4, shares=True), 0), running(a_job("large", memory=16, shares=True), 1)]
    assert placed(place(gpus(3), held, a_job("new", memory=5, shares=True))) == {"new": [1]}


def test_used_memory_counts_when_it_exceeds_the_request() -> None:
    greedy = msgspec.structs.replace(running(a_job("greedy", memory=4, shares=True), 0), used={"GPU-0": 20 * GIB})
    decision = place([a_gpu(0, used=20 * GIB)], [greedy], a_job("next", memory=8, shares=True))
    assert decision.start == ()


def test_all_memory_counts_where_its_owner_is_unknown() -> None:
    unattributed = msgspec.structs.replace(running(a_job("unattributed", memory=4, shares=True), 0), used=None)
    assert place([a_gpu(0, used=20 * GIB)], [unattributed], a_job("next", memory=8, shares=True)).start == ()
    assert placed(place([a_gpu(0, used=3 * GIB)], [unattributed], a_job("next", memory=8, shares=True))) == {
        "next": [0]
    }


def test_sharing_job_without_a_memory_request_takes_the_whole_gpu() -> None:
    jobs = [a_job("a", shares=True), a_job("b", order=1, shares=True), a_job("c", order=2, memory=1, shares=True)]
    assert placed(place(gpus(1), [], *jobs)) == {"a": [0]}


def test_slots_allow_several_jobs_per_gpu_and_spread_them() -> None:
    jobs = [a_job(name, order=order) for order, name in enumerate("abcde")]
    decision = place(gpus(2), [], *jobs, rules=PlacementOptions(slots_per_gpu=2))
    assert placed(decision) == {"a": [0], "b": [1], "c": [0], "d": [1]}


def test_slots_never_exceed_the_memory_of_a_gpu() -> None:
    jobs = [a_job("a", memory=16), a_job("b", order=1, memory=16)]
    assert placed(place(gpus(1), [], *jobs, rules=PlacementOptions(slots_per_gpu=2))) == {"a": [0]}


def test_slots_fill_up_where_the_owner_of_memory_is_unknown() -> None:
    unattributed = msgspec.structs.replace(running(a_job("unattributed"), 0), used=None)
    rules = PlacementOptions(slots_per_gpu=2)
    assert placed(place([a_gpu(0, used=9 * GIB)], [unattributed], a_job("next"), rules=rules)) == {"next": [0]}


def test_job_gets_the_smallest_sufficient_gpu() -> None:
    seen = [a_gpu(0, total=80 * GIB), a_gpu(1, total=24 * GIB), a_gpu(2, total=48 * GIB)]
    jobs = [a_job("small"), a_job("large", order=1, memory=40)]
    assert placed(place(seen, [], *jobs)) == {"small": [1], "large": [2]}


def test_job_gets_only_gpus_of_its_model_and_size() -> None:
    names = {0: "NVIDIA A100-SXM4-40GB", 1: "Tesla T4", 2: "NVIDIA H100 80GB HBM3"}
    sizes = {0: 40, 1: 15, 2: 79.6}  # the driver reports less than the card is sold with
    seen = [
        msgspec.structs.replace(a_gpu(index, total=int(sizes[index] * GIB)), name=name) for index, name in names.items()
    ]
    assert placed(place(seen, [], a_job("any"))) == {"any": [1]}
    assert placed(place(seen, [], a_job("model", gpu_model="h100|a100"))) == {"model": [0]}
    assert placed(place(seen, [], a_job("card", gpu_memory=80 * GIB))) == {"card": [2]}
    assert placed(place(seen, [], a_job("both", 2, gpu_memory=40 * GIB))) == {"both": [0, 2]}
    never = place(seen, [], a_job("b100", gpu_model="b100"), a_job("large", 2, order=1, gpu_memory=80 * GIB)).waiting
    assert why_waiting(never["b100"]) == (
        "can never start on this machine: it asks for a GPU of model b100, and those here are "
        "NVIDIA A100-SXM4-40GB, Tesla T4 and NVIDIA H100 80GB HBM3"
    )
    assert why_waiting(never["large"]) == (
        "can never start on this machine: it asks for 2 GPUs of at least 80.0 GiB, "
        "and only 1 of the 3 here can give that much"
    )
    waits = place(seen, [running(a_job("r"), 2)], a_job("card", gpu_model="h100|t4", gpu_memory=80 * GIB))
    assert why_waiting(waits.waiting["card"]) == (
        "waits for a GPU of model h100 or t4 of at least 80 GiB: GPU 0 is of another model (NVIDIA A100-SXM4-40GB), "
        "GPU 1 has only 15 GiB, GPU 2 is held by job r"
    )


# Links


# The GPUs of a DGX-1: six pairs within each half and four between the halves have NVLink.
CUBE_MESH = {*combinations(range(4), 2), *combinations(range(4, 8), 2), (0, 4), (1, 5), (2, 6), (3, 7)}
PAIRS_ON_SWITCHES = SimShape(8, 24 * GIB, (("nvlink", 2), ("switch", 4))).link


def linked(seen: Sequence[GpuState], link: Callable[[int, int], Link | None]) -> list[GpuState]:
    """These GPUs, connected as `link` says for two indices, the lower first."""
    return [
        msgspec.structs.replace(
            gpu,
            links=tuple(
                (other.uuid, found)
                for other in seen
                if other is not gpu and (found := link(*sorted((gpu.index, other.index)))) is not None
            ),
        )
        for gpu in seen
    ]


def on_pairs(count: int, *held: int) -> list[int]:
    """What a job gets of eight GPUs, two by two on NVLink and four by four on a switch, of which some are held."""
    taken = [running(a_job(f"r{index}"), index) for index in held]
    return placed(place(linked(gpus(8), PAIRS_ON_SWITCHES), taken, a_job("j", count))).get("j", [])


@pytest.mark.parametrize(
    ("count", "held", "got"),
    [
        (2, (), [0, 1]),
        (2, (0,), [2, 3]),
        (2, (0, 2, 4, 6), [1, 3]),  # no pair is left: the same switch
        (2, (0, 2, 3, 5, 6), [4, 7]),
        (2, (1, 2, 3, 5, 6, 7), [0, 4]),
        (3, (), [0, 1, 2]),
        (3, (0, 1), [4, 5, 6]),
        (4, (), [0, 1, 2, 3]),
        (4, (1,), [4, 5, 6, 7]),
        (4, (1, 4), [0, 2, 3, 5]),  # two switches, of which as few pairs as possible cross
        (8, (), [0, 1, 2, 3, 4, 5, 6, 7]),
        (1, (), [0]),
        (1, (3,), [2]),  # its partner is taken already
        (1, (0, 1), [2]),  # a switch that others already use stays in use
        (1, (4, 5, 6), [7]),
    ],
)
def test_job_gets_gpus_with_the_best_links_and_leaves_linked_ones_together(
    count: int, held: tuple[int, ...], got: list[int]
) -> None:
    assert on_pairs(count, *held) == got


def test_all_gpus_of_a_job_have_direct_links_where_not_all_do() -> None:
    seen = linked(gpus(8), lambda one, other: "nvlink" if (one, other) in CUBE_MESH else "system")
    assert placed(place(seen, [running(a_job("r"), 1)], a_job("j", 4))) == {"j": [4, 5, 6, 7]}
    held = [running(a_job("r"), 1), running(a_job("s"), 5)]
    assert placed(place(seen, held, a_job("j", 3))) == {"j": [0, 2, 3]}
    assert placed(place(seen, held, a_job("j"))) == {"j": [0]}, "five have three links each, and each loses as much"


def test_linked_set_is_found_among_many_gpus_with_other_links() -> None:
    """Each of the last four is linked to the others, and to a GPU that comes first and has no other link."""
    together = {*combinations(range(8, 12), 2), (0, 8), (1, 9), (2, 10), (3, 11)}
    seen = linked(gpus(12), lambda one, other: "nvlink" if (one, other) in together else "node")
    assert placed(place(seen, [], a_job("j", 4))) == {"j": [8, 9, 10, 11]}


def test_links_come_before_memory_unless_told_otherwise() -> None:
    sizes = [80, 80, 24, 48]
    seen = linked(
        [a_gpu(index, total=size * GIB) for index, size in enumerate(sizes)],
        lambda one, other: "nvlink" if (one, other) == (0, 1) else "node",
    )
    jobs = [a_job("two", 2), a_job("one", order=1)]
    assert placed(place(seen, [], *jobs)) == {"two": [0, 1], "one": [2]}
    assert placed(place(seen, [], *jobs, rules=PlacementOptions(gpu_order="memory"))) == {"two": [2, 3], "one": [0]}
    assert placed(place(seen, [], *jobs, rules=PlacementOptions(gpu_order="index"))) == {"two": [0, 1], "one": [2]}
    assert placed(
        place(seen, [], a_job("large", 2, gpu_memory=48 * GIB), rules=PlacementOptions(gpu_order="index"))
    ) == {"large": [0, 1]}
    assert placed(place(seen[2:], [], jobs[1], rules=PlacementOptions(gpu_order="index"))) == {"one": [2]}
    assert placed(place(seen[:2] + seen[3:], [], jobs[1])) == {"one": [3]}, "48 GiB, and no NVLink to lose"


def test_jobs_on_linked_gpus_are_preempted() -> None:
    seen = linked(gpus(4), PAIRS_ON_SWITCHES)
    newest_apart = [(0, 10.0), (2, 20.0), (3, 30.0), (1, 40.0)]
    held = [running(a_job(f"p{n}", preemptible=True), n, since=NOW - age) for n, age in newest_apart]
    assert set(place(seen, held, a_job("j", 2)).preempt) == {"p0", "p1"}
    assert set(place(gpus(4), held, a_job("j", 2)).preempt) == {"p0", "p2"}
    # One is enough beside a free GPU: the other of its pair.
    assert place(seen, held[:3], a_job("j", 2)).preempt == ("p0",)
    assert place(gpus(4), held[1:], a_job("j", 2)).preempt == ("p2",)


# The machine


BOX = HostSpec(name="box.example.org", labels=("ib", "nvme"), cpus=8, ram=32 * GIB)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"machine": "box"}, None),
        ({"machine": "BOX.example.org", "labels": ("ib",), "excluded": ("other",)}, None),
        ({"machine": "bo"}, "is not for this machine: it asks for bo"),
        ({"excluded": ("a", "box")}, "is not for this machine: it excludes box.example.org"),
        (
            {"labels": ("ib", "gold", "tin")},
            "is not for this machine: it asks for the labels gold and tin, which this machine does not have",
        ),
        ({"cpus": 9}, "can never start on this machine: it asks for 9 CPUs, and there are only 8"),
        (
            {"ram": 33 * GIB, "cpus": 9},
            (
                "can never start on this machine: it asks for 9 CPUs, and there are only 8; "
                "and for 33 GiB of RAM, and there are only 32 GiB"
            ),
        ),
    ],
)
def test_job_starts_only_on_a_machine_that_it_asks_for(asked: dict[str, Any], why: str | None) -> None:
    for count in (0, 1):
        decision = place(gpus(1), [], a_job("j", count, **asked), host=BOX)
        assert [start.job for start in decision.start] == ([] if why else ["j"])
        assert [why_waiting(reason) for reason in decision.waiting.values()] == ([why] if why else [])


def test_cpus_and_ram_are_promised_once() -> None:
    jobs = [
        a_job("a", cpus=5),
        a_job("b", order=1, cpus=4),
        a_job("c", 0, order=2, ram=GIB),
        a_job("d", order=3, cpus=1),
    ]
    decision = place(gpus(4), [], *jobs, host=BOX)
    assert placed(decision) == {"a": [0], "c": []}
    assert decision.waiting["b"] == HostTaken(cpus=4, cpus_free=3, ram=0, ram_free=31 * GIB)
    # What is free is reserved for the first that waits, unless others end before it starts.
    assert decision.waiting["d"] == HostTaken(cpus=1, cpus_free=3, ram=0, ram_free=31 * GIB, reserved_for="b")
    held = [running(a_job("a", cpus=5, limit=2 * HOUR), 0)]
    short, long = a_job("s", order=2, cpus=3, limit=HOUR), a_job("l", order=3, cpus=4)
    assert placed(place(gpus(4), held, jobs[1], short, host=BOX)) == {"s": [2]}
    # Beside the first one when that starts: 4 of 8 CPUs are left then, 3 now.
    assert placed(place(gpus(4), held, jobs[1], long, host=BOX)) == {}
    assert placed(place(gpus(4), held, jobs[1], a_job("l", order=3, cpus=3), host=BOX)) == {"l": [2]}


def test_preemptible_job_yields_cpus() -> None:
    held = [running(a_job("small", cpus=2, preemptible=True), 0), running(a_job("large", 0, cpus=6, preemptible=True))]
    assert place(gpus(2), held, a_job("normal", cpus=5), host=BOX).preempt == ("large",)
    assert place(gpus(2), held, a_job("normal", cpus=8), host=BOX).preempt in {("small", "large"), ("large", "small")}
    assert place(gpus(2), held, a_job("nothing")).preempt == ()


# Order, and small jobs beside a big one


def test_order_is_priority_then_age() -> None:
    jobs = [a_job("young", order=3), a_job("old", order=1), a_job("urgent", order=9, priority=5)]
    assert list(placed(place(gpus(2), [], *jobs))) == ["urgent", "old"]


def test_gpu_is_reserved_for_a_job_that_needs_two() -> None:
    decision = place(gpus(2), [running(a_job("r"), 1)], a_job("big", 2), a_job("small", order=1))
    assert decision.start == ()
    assert describe_obstacle(obstacles_of(decision, "small")[0]) == "is reserved for job big (2 GPUs, has 1)"


def test_small_job_backfills_when_its_time_limit_ends_before_the_big_job_starts() -> None:
    held = [running(a_job("r", limit=2 * HOUR), 1)]  # an hour of it is over
    big = a_job("big", 2)
    assert placed(place(gpus(2), held, big, a_job("short", order=1, limit=HOUR))) == {"short": [0]}
    assert place(gpus(2), held, big, a_job("long", order=1, limit=HOUR + 1)).start == ()
    assert place(gpus(2), held, big, a_job("endless", order=1)).start == ()


def test_time_limit_allows_no_backfill_when_running_jobs_have_none() -> None:
    decision = place(gpus(2), [running(a_job("r"), 1)], a_job("big", 2), a_job("short", order=1, limit=1.0))
    assert decision.start == ()


def test_small_job_backfills_on_a_gpu_unusable_for_the_big_job() -> None:
    seen = [a_gpu(0, total=80 * GIB), a_gpu(1, total=80 * GIB), a_gpu(2, total=8 * GIB)]
    held = [running(a_job("r"), 0)]
    assert placed(place(seen, held, a_job("big", 2, memory=40), a_job("small", order=1))) == {"small": [2]}


def test_small_sharing_job_backfills_beside_a_reservation() -> None:
    held = [running(a_job("r"), 1)]
    big = a_job("big", 2, memory=10, shares=True)
    assert placed(place(gpus(2), held, big, a_job("fits", order=1, memory=10, shares=True))) == {"fits": [0]}
    assert place(gpus(2), held, big, a_job("does-not", order=1, memory=18, shares=True)).start == ()


def test_reservation_ends_when_it_depends_on_a_gpu_with_a_foreign_process() -> None:
    big, small = a_job("big", 2), a_job("small", order=1)
    alice = ("alice's python (pid 4242)",)
    just_came = [a_gpu(0), a_gpu(1, other_processes=alice, obstructed_since=NOW - 60)]
    stays = [a_gpu(0), a_gpu(1, other_processes=alice, obstructed_since=NOW - 2 * HOUR)]
    assert place(just_came, [], big, small).start == ()
    assert placed(place(stays, [], big, small)) == {"small": [0]}


def test_small_job_does_not_overtake_a_big_one_while_memory_is_released() -> None:
    seen = [a_gpu(0), a_gpu(1, used=20 * GIB, obstructed_since=NOW - 1)]
    assert place(seen, [], a_job("big", 2), a_job("small", order=1)).start == ()


def test_job_that_can_never_fit_blocks_no_other() -> None:
    jobs = [a_job("five", 5), a_job("huge", order=1, memory=100), a_job("small", order=2)]
    decision = place(gpus(2), [], *jobs)
    assert placed(decision) == {"small": [0]}
    assert isinstance(decision.waiting["five"], CannotFit)
    assert isinstance(decision.waiting["huge"], CannotFit)


def test_gpu_of_unknown_size_may_be_large_enough() -> None:
    seen = [a_gpu(0), a_gpu(1, total=Unknown("lost"))]
    decision = place(seen, [], a_job("huge", memory=100))
    assert obstacles_of(decision, "huge") == {0: TooSmall(24 * GIB), 1: UnreadableGpu("lost")}


def test_jobs_without_a_gpu_are_never_blocked_behind_jobs_that_wait_for_one() -> None:
    jobs = [a_job("gpu"), a_job("cpu", 0, order=1), a_job("cpu2", 0, order=2), a_job("cpu3", 0, order=3)]
    decision = place(gpus(1), [running(a_job("r"), 0)], *jobs, rules=PlacementOptions(cpu_jobs=2))
    assert placed(decision) == {"cpu": [], "cpu2": []}
    assert decision.waiting["cpu3"] == CpuSlotsTaken(2)


def test_unreadable_machine_starts_only_jobs_without_a_gpu() -> None:
    decision = decide([], [], [a_job("gpu"), a_job("cpu", 0, order=1)], RULES, NOW, problem="the driver did not answer")
    assert placed(decision) == {"cpu": []}
    assert decision.waiting["gpu"] == NoGpusSeen(1, None, "the driver did not answer")


# Preemption


def test_preemptible_jobs_fill_remaining_gpus_at_any_priority() -> None:
    jobs = [a_job("filler", priority=9, preemptible=True), a_job("normal", order=5)]
    assert placed(place(gpus(1), [], *jobs)) == {"normal": [0]}
    assert placed(place(gpus(2), [], *jobs)) == {"normal": [0], "filler": [1]}


def test_preemptible_jobs_use_gpus_reserved_for_a_big_job() -> None:
    held = [running(a_job("r"), 1)]
    assert placed(place(gpus(2), held, a_job("big", 2), a_job("filler", order=1, preemptible=True))) == {"filler": [0]}


def test_newest_job_is_preempted() -> None:
    held = [
        running(a_job("old", preemptible=True), 0, since=NOW - 9),
        running(a_job("new", preemptible=True), 1, since=NOW - 5),
    ]
    decision = place(gpus(2), held, a_job("normal"))
    assert decision.preempt == ("new",)
    assert obstacles_of(decision, "normal") == {0: Held(("old",), None, None), 1: Stopping(("new",))}


def test_one_victim_on_two_gpus_is_preferred_to_two_victims() -> None:
    held = [
        running(a_job("wide", 2, preemptible=True), 0, 1, since=NOW - HOUR),
        running(a_job("a", preemptible=True), 2, since=NOW - 2),
        running(a_job("b", preemptible=True), 3, since=NOW - 1),
    ]
    assert place(gpus(4), held, a_job("normal", 2)).preempt == ("wide",)


def test_shared_gpu_with_the_fewest_victims_is_cleared() -> None:
    held = [running(a_job(f"s{n}", memory=1, shares=True, preemptible=True), n % 2, since=float(n)) for n in range(40)]
    held += [running(a_job(f"t{n}", memory=1, shares=True, preemptible=True), 2, since=float(n)) for n in range(5)]
    assert sorted(place(gpus(3), held, a_job("normal")).preempt) == ["t0", "t1", "t2", "t3", "t4"]


def test_no_job_is_preempted_for_a_job_that_would_still_not_fit() -> None:
    held = [running(a_job("filler", preemptible=True), 0), running(a_job("normal"), 1)]
    assert place(gpus(2), held, a_job("big", 2)).preempt == ()


def test_job_is_preempted_once_and_no_other_while_it_stops() -> None:
    stopping = running(a_job("a", preemptible=True), 0, stopping=True)
    held = [stopping, running(a_job("b", preemptible=True), 1)]
    assert place(gpus(2), held, a_job("normal")).preempt == ()
    assert place(gpus(2), held, a_job("n1"), a_job("n2", order=1)).preempt == ("b",)


def test_no_other_job_is_preempted_while_memory_is_being_freed() -> None:
    seen = [a_gpu(0, used=20 * GIB), a_gpu(1)]
    held = [running(a_job("b", preemptible=True), 1)]
    assert place(seen, held, a_job("normal")).preempt == ()
    for_long = [a_gpu(0, used=20 * GIB, obstructed_since=NOW - HOUR), a_gpu(1)]
    assert place(for_long, held, a_job("normal")).preempt == ("b",)


def test_gpus_of_a_preempted_job_are_not_taken_by_another_preemptible_job() -> None:
    seen = [a_gpu(0), a_gpu(1)]
    held = [running(a_job("victim", preemptible=True), 0, stopping=True)]
    decision = place(seen, held, a_job("normal", 2), a_job("filler", order=1, preemptible=True))
    assert decision.start == ()
    assert describe_obstacle(obstacles_of(decision, "filler")[1]) == "is reserved for job normal (2 GPUs, has 1)"


def test_preemptible_job_without_a_gpu_is_preempted_for_a_normal_one() -> None:
    held = [
        running(a_job("old", 0, preemptible=True), since=1.0),
        running(a_job("new", 0, preemptible=True), since=2.0),
    ]
    rules = PlacementOptions(cpu_jobs=2)
    assert place([], held, a_job("normal", 0), rules=rules).preempt == ("new",)
    stopping = [held[0], msgspec.structs.replace(held[1], stopping=True)]
    assert place([], stopping, a_job("normal", 0), rules=rules).preempt == ()


# Properties of every machine and queue

NEVER = (CannotFit, HostTooSmall, NotForThisMachine)

TOTALS = [8 * GIB, 24 * GIB, 80 * GIB]


@st.composite
def demands(draw: st.DrawFn) -> dict[str, object]:
    """What a job asks of its machine and of the kind of its GPUs; most ask for little."""
    return {
        "cpus": draw(st.sampled_from([0, 0, 1, 3, 8, 9])),
        "ram": draw(st.sampled_from([0, 0, GIB, 20 * GIB])),
        "machine": draw(st.sampled_from([None, None, None, "box", "other"])),
        "labels": draw(st.sampled_from([(), (), (), ("ib",), ("ib", "gold")])),
        "excluded": draw(st.sampled_from([(), (), (), ("other",), ("box",)])),
        "gpu_model": draw(st.sampled_from([None, None, "a100", "a100|t4"])),
        "gpu_memory": draw(st.sampled_from([None, None, 24 * GIB])),
    }


@st.composite
def requests(
    draw: st.DrawFn, prefix: str, count: int, *, bounded: bool = True, hosts: bool = False
) -> list[ResourceRequest]:
    return [
        a_job(
            f"{prefix}{order}",
            draw(st.sampled_from([0, 1, 1, 1, 2, 2, 3, 4])),
            order=order,
            memory=draw(st.sampled_from([None, 0, 1, 4, 8, 23.5, 30])),
            shares=draw(st.booleans()),
            priority=draw(st.integers(-1, 1)),
            preemptible=draw(st.booleans()),
            limit=draw(st.sampled_from([None, 60.0, HOUR, 5 * HOUR])) if bounded else None,
            **(draw(demands()) if hosts else {}),
        )
        for order in range(draw(st.integers(0, count)))
    ]


@st.composite
def troubled(draw: st.DrawFn, gpu: GpuState, held: Sequence[Allocation]) -> GpuState:
    """The GPU with the memory of its jobs, and possibly foreign use."""
    ours = sum((allocation.used or {}).get(gpu.uuid, 0) for allocation in held)
    gpu = msgspec.structs.replace(gpu, memory_used=ours, peak=draw(st.sampled_from([0.0, 1.0])) if ours else 0.0)
    trouble = draw(st.sampled_from(["none", "none", "none", "foreign", "unreadable", "memory", "busy", "baseline"]))
    since = draw(st.sampled_from([None, NOW - 30, NOW - HOUR]))
    changes: dict[str, dict[str, object]] = {
        "none": {},
        "foreign": {"other_processes": ("alice's python (pid 4242)",), "obstructed_since": since},
        "unreadable": {"memory_used": Unknown("the driver did not answer"), "obstructed_since": since},
        "memory": {"memory_used": ours + 5 * GIB, "obstructed_since": since},
        "busy": {"peak": 0.9, "obstructed_since": since},
        "baseline": {"memory_used": ours + 200 * 2**20},
    }
    return msgspec.structs.replace(gpu, **changes[trouble])


@st.composite
def connected(
    draw: st.DrawFn, seen: Sequence[GpuState], kinds: Sequence[Link | None] = (*LINKS, None)
) -> list[GpuState]:
    """These GPUs with links of any kind between any two; None is not known."""
    links = {pair: draw(st.sampled_from(kinds)) for pair in combinations(range(len(seen)), 2)}
    return linked(seen, lambda one, other: links[one, other])


class World(msgspec.Struct):
    seen: list[GpuState]
    held: list[Allocation]
    waiting: list[ResourceRequest]
    rules: PlacementOptions
    host: HostSpec = ANY_HOST

    def decide(self) -> Placements:
        return decide(self.seen, self.held, self.waiting, self.rules, NOW, host=self.host)


@st.composite
def worlds(draw: st.DrawFn, *, slots: Sequence[int] = (1, 1, 2, 3), bounded: bool = True) -> World:
    """A busy machine: running jobs were placed by earlier decisions, and some have ended."""
    rules = PlacementOptions(
        slots_per_gpu=draw(st.sampled_from(slots)), cpu_jobs=2, gpu_order=draw(st.sampled_from(get_args(GpuOrder)))
    )
    seen = [a_gpu(index, total=draw(st.sampled_from(TOTALS))) for index in range(draw(st.integers(1, 4)))]
    if draw(st.booleans()):
        seen = draw(connected(seen))
    hosts = draw(st.booleans())
    host = BOX if hosts else ANY_HOST
    if hosts:
        names = ["NVIDIA A100-SXM4-80GB", "Tesla T4"]
        seen = [msgspec.structs.replace(gpu, name=draw(st.sampled_from(names))) for gpu in seen]
    earlier = draw(requests("r", 8, bounded=bounded, hosts=hosts))
    by_job = {request.job: request for request in earlier}
    held = [
        Allocation(
            by_job[start.job],
            start.gpus,
            NOW - draw(st.sampled_from([1.0, 50.0, 2 * HOUR])),
            used={uuid: draw(st.sampled_from([0, GIB, 6 * GIB])) for uuid in start.gpus},
            stopping=draw(st.sampled_from([False, False, True])),
        )
        for start in decide(seen, [], earlier, rules, NOW, host=host).start
        if draw(st.booleans())
    ]
    seen = [draw(troubled(gpu, held)) for gpu in seen]
    return World(seen, held, draw(requests("w", 8, bounded=bounded, hosts=hosts)), rules, host)


def after(world: World, decision: Placements, *, leave_out: Iterable[str] = ()) -> World:
    """The world after the decision is carried out."""
    wanted = {request.job: request for request in world.waiting}
    out = set(leave_out)
    new = [Allocation(wanted[s.job], s.gpus, NOW, used={}) for s in decision.start if s.job not in out]
    held = [
        msgspec.structs.replace(allocation, stopping=allocation.stopping or allocation.request.job in decision.preempt)
        for allocation in world.held
    ]
    started = {start.job for start in decision.start}
    return World(world.seen, held + new, [w for w in world.waiting if w.job not in started], world.rules, world.host)


def rank(request: ResourceRequest) -> tuple[bool, int, int]:
    """The documented order: normal jobs first, then priority, then age."""
    return (request.preemptible, -request.priority, request.order)


def on_gpu(world: World, uuid: str) -> list[Allocation]:
    return [allocation for allocation in world.held if uuid in allocation.gpus]


def amount(value: Maybe[int]) -> int:
    assert isinstance(value, int)
    return value


def test_job_waits_for_memory_of_others_on_a_gpu_that_is_promised_to_a_smaller_job() -> None:
    seen = [a_gpu(0, total=8 * GIB, used=5 * GIB), a_gpu(1, used=5 * GIB, obstructed_since=NOW - HOUR)]
    decision = place(seen, [], a_job("small", 2, memory=4), a_job("next", order=1))
    assert obstacles_of(decision, "next")[1] == MemoryTaken(5 * GIB)
    assert "GPU 1 has 5.0 GiB in use by no process that is seen" in why_waiting(decision.waiting["next"])


@settings(deadline=None)
@given(worlds())
def test_every_job_starts_or_has_a_reason_for_waiting(world: World) -> None:
    decision = world.decide()
    started = [start.job for start in decision.start]
    assert sorted([*started, *decision.waiting]) == sorted(request.job for request in world.waiting)
    for reason in decision.waiting.values():
        assert why_waiting(reason).startswith(
            ("waits for ", "can never start on this machine: ", "is not for this machine: ")
        )
        assert "Unknown(" not in why_waiting(reason)


@settings(deadline=None)
@given(worlds())
def test_job_gets_the_requested_number_of_distinct_gpus(world: World) -> None:
    wanted = {request.job: request.gpus for request in world.waiting}
    for start in world.decide().start:
        assert len(set(start.gpus)) == len(start.gpus) == wanted[start.job]


@settings(deadline=None)
@given(worlds())
def test_gpu_with_a_foreign_process_or_unknown_values_is_never_assigned(world: World) -> None:
    bad = {gpu.uuid for gpu in world.seen if gpu.other_processes or isinstance(gpu.memory_used, Unknown)}
    given_out = {uuid for start in world.decide().start for uuid in start.gpus}
    assert not bad & given_out


@settings(deadline=None)
@given(worlds())
def test_assigned_memory_never_exceeds_the_gpu(world: World) -> None:
    decision = world.decide()
    later = after(world, decision)
    for gpu in world.seen:
        if not any(gpu.uuid in start.gpus for start in decision.start):
            continue
        holders = on_gpu(later, gpu.uuid)
        using = {h.request.job: (h.used or {}).get(gpu.uuid, 0) for h in holders}
        reserved = sum(max(h.request.memory or 0, using[h.request.job]) for h in holders)
        nobodys = amount(gpu.memory_used) - sum(using.values())
        alone = len(holders) == 1 and nobodys <= 512 * 2**20  # may have all of a GPU, less what the driver keeps
        assert reserved + (0 if alone else nobodys) <= amount(gpu.memory_total)


@settings(deadline=None)
@given(st.lists(st.floats(0, 9), max_size=20), st.lists(st.floats(0, 7), max_size=5), st.sampled_from([1, 4]))
def test_memory_of_sharing_jobs_never_exceeds_the_gpu(asked: list[float], running_use: list[float], slots: int) -> None:
    seen = [a_gpu(0, total=8 * GIB, used=int(sum(running_use) * GIB)), a_gpu(1, total=8 * GIB, used=GIB)]
    held = [
        msgspec.structs.replace(running(a_job(f"r{n}", memory=1, shares=True), 0), used={"GPU-0": int(use * GIB)})
        for n, use in enumerate(running_use)
    ]
    jobs = [a_job(f"w{n}", order=n, memory=memory, shares=True) for n, memory in enumerate(asked)]
    decision = place(seen, held, *jobs, rules=PlacementOptions(slots_per_gpu=slots))
    on_each = [[asked[int(job[1:])] for job, on in placed(decision).items() if on == [index]] for index in (0, 1)]
    if on_each[0]:
        assert sum(on_each[0]) + sum(max(1.0, use) for use in running_use) <= 8
    assert sum(on_each[1]) <= 7


@settings(deadline=None, max_examples=examples(300))
@given(worlds())
def test_placement_respects_machines_gpus_cpus_and_ram(
    world: World,
) -> None:
    decision = world.decide()
    wanted, by_uuid = {request.job: request for request in world.waiting}, {gpu.uuid: gpu for gpu in world.seen}
    for start in decision.start:
        request = wanted[start.job]
        if world.host is BOX:
            assert request.machine in {None, "box"}
            assert "box" not in request.excluded
            assert set(request.labels) <= {"ib", "nvme"}
        for uuid in start.gpus:
            assert request.gpu_model is None or "A100" in by_uuid[uuid].name or "t4" in request.gpu_model
            assert request.gpu_memory is None or amount(by_uuid[uuid].memory_total) >= request.gpu_memory
    later = after(world, decision)
    assert sum(allocation.request.cpus for allocation in later.held) <= later.host.cpus
    assert sum(allocation.request.ram for allocation in later.held) <= later.host.ram


def distances(seen: Sequence[GpuState], uuids: Iterable[str]) -> list[int]:
    """The links of a set, the slowest first; one that is not known is slower than any."""
    links = {(gpu.uuid, other): LINKS.index(link) for gpu in seen for other, link in gpu.links}
    return sorted((links.get(pair, len(LINKS)) for pair in combinations(uuids, 2)), reverse=True)


@settings(deadline=None, max_examples=examples(100))
@given(st.data(), st.integers(2, 8), st.sampled_from([1, 2]))
def test_no_other_gpus_that_a_job_fits_on_are_better_connected(data: st.DataObject, count: int, slots: int) -> None:
    seen = data.draw(connected([a_gpu(index, total=data.draw(st.sampled_from(TOTALS))) for index in range(count)]))
    held = [running(a_job(f"r{index}"), index) for index in range(count) if data.draw(st.booleans())]
    asked = data.draw(requests("w", 1, bounded=False))
    job = a_job("j", data.draw(st.integers(1, count)), memory=data.draw(st.sampled_from([None, 8, 23.5])))
    rules = PlacementOptions(slots_per_gpu=slots)
    for request in [job, *asked]:
        fitting = [
            gpu for gpu in seen if place([gpu], held, msgspec.structs.replace(request, gpus=1), rules=rules).start
        ]
        started = place(seen, held, request, rules=rules).start
        assert bool(started) is (len(fitting) >= request.gpus)
        for start in started:
            sets = combinations([gpu.uuid for gpu in fitting], request.gpus)
            assert distances(seen, start.gpus) == min(distances(seen, one) for one in sets)


@settings(deadline=None, max_examples=examples(15))
@given(st.data(), st.integers(11, 13), st.integers(4, 6))
def test_slowest_link_is_the_best_possible_on_a_machine_with_many_gpus(
    data: st.DataObject, count: int, wanted: int
) -> None:
    seen = data.draw(connected(gpus(count), ("nvlink", "nvlink", "node")))
    (start,) = place(seen, [], a_job("j", wanted)).start
    slowest = min(distances(seen, one)[0] for one in combinations([gpu.uuid for gpu in seen], wanted))
    assert distances(seen, start.gpus)[0] == slowest


@settings(deadline=None)
@given(worlds())
def test_without_known_links_memory_decides(world: World) -> None:
    world.seen = [msgspec.structs.replace(gpu, links=()) for gpu in world.seen]
    decisions = []
    for order in ("links", "memory"):
        world.rules = msgspec.structs.replace(world.rules, gpu_order=order)
        decisions.append(world.decide())
    assert decisions[0] == decisions[1]


@settings(deadline=None)
@given(worlds())
def test_exclusive_job_is_alone_on_its_gpu_without_slots(world: World) -> None:
    decision = world.decide()
    later = after(world, decision)
    for uuid in {uuid for start in decision.start for uuid in start.gpus}:
        holders = on_gpu(later, uuid)
        if world.rules.slots_per_gpu > 1:
            assert len(holders) <= world.rules.slots_per_gpu
        elif not all(h.request.shares and h.request.memory is not None for h in holders):
            assert len(holders) == 1


@settings(deadline=None)
@given(worlds())
def test_number_of_jobs_without_a_gpu_is_limited(world: World) -> None:
    later = after(world, world.decide())
    assert sum(1 for allocation in later.held if not allocation.gpus) <= world.rules.cpu_jobs


@settings(deadline=None)
@given(worlds())
def test_first_waiting_job_could_not_have_started_in_place_of_later_ones(world: World) -> None:
    decision = world.decide()
    blocked = [
        request for request in sorted(world.waiting, key=rank) if request.job in decision.waiting and request.gpus
    ]
    blocked = [request for request in blocked if not isinstance(decision.waiting[request.job], NEVER)]
    if not blocked:
        return
    first = blocked[0]
    behind = [request.job for request in world.waiting if rank(request) > rank(first)]
    without_them = after(world, decision, leave_out=behind)
    without_them.waiting = [first]
    assert without_them.decide().start == ()


@settings(deadline=None)
@given(worlds(slots=[1], bounded=False))
def test_no_job_starts_on_gpus_that_an_earlier_job_could_use(world: World) -> None:
    """Where no time limit and no sharing makes a job behind another less of a delay to a third."""
    world.waiting = [msgspec.structs.replace(request, shares=False) for request in world.waiting if request.gpus]
    decision = world.decide()
    wanted = {request.job: request for request in world.waiting}
    for start in decision.start:
        before = [
            request
            for request in world.waiting
            if request.job in decision.waiting
            and rank(request) < rank(wanted[start.job])
            and request.preemptible == wanted[start.job].preemptible
        ]
        undone = after(world, decision, leave_out=[start.job])
        undone.seen = [gpu for gpu in undone.seen if gpu.uuid in start.gpus]
        for request in before:
            undone.waiting = [request]
            assert undone.decide().start == ()


@settings(deadline=None)
@given(worlds())
def test_placement_is_idempotent(world: World) -> None:
    decision = world.decide()
    again = after(world, decision).decide()
    assert again.start == ()
    assert again.preempt == ()


@settings(deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_placement_does_not_depend_on_the_order_of_its_input(world: World, chance: random.Random) -> None:
    decision = world.decide()
    for listed in (world.seen, world.held, world.waiting):
        chance.shuffle(listed)
    again = world.decide()
    assert (again.start, sorted(again.preempt)) == (decision.start, sorted(decision.preempt))


def settled(world: World, gone: set[str]) -> World:
    """The world after those jobs ended and their memory is free."""
    held = [allocation for allocation in world.held if allocation.request.job not in gone]
    return World([after_leaving(world, gpu, gone) for gpu in world.seen], held, world.waiting, world.rules, world.host)


def after_leaving(world: World, gpu: GpuState, gone: set[str]) -> GpuState:
    if isinstance(gpu.memory_used, Unknown):
        return gpu
    holders = on_gpu(world, gpu.uuid)
    freed = sum((allocation.used or {}).get(gpu.uuid, 0) for allocation in holders if allocation.request.job in gone)
    still_used = gpu.memory_used - freed
    if all(allocation.request.job in gone for allocation in holders):
        new = gpu.obstructed_since is None or NOW - gpu.obstructed_since <= SETTLES_WITHIN
        peak = 0.0 if holders or new else gpu.peak
        return msgspec.structs.replace(gpu, memory_used=0 if new else still_used, peak=peak)
    return msgspec.structs.replace(gpu, memory_used=still_used)


@settings(deadline=None, max_examples=examples(200))
@given(worlds())
def test_victims_are_preemptible_and_no_more_than_needed(world: World) -> None:
    normal = [request for request in world.waiting if not request.preemptible]
    if not normal:
        return
    world.waiting = normal[:1]
    decision = world.decide()
    stoppable = [h.request.job for h in world.held if h.request.preemptible and not h.stopping]
    stopping = {h.request.job for h in world.held if h.stopping}
    assert set(decision.preempt) <= set(stoppable)
    if not decision.preempt:
        return
    assert [s.job for s in settled(world, stopping | set(decision.preempt)).decide().start] == [normal[0].job]
    for fewer in combinations(stoppable, len(decision.preempt) - 1):
        assert settled(world, stopping | set(fewer)).decide().start == ()


@settings(deadline=None)
@given(worlds())
def test_normal_job_waits_only_if_preemption_does_not_help_or_is_under_way(world: World) -> None:
    world.waiting = [request for request in world.waiting if not request.preemptible and request.gpus][:1]
    decision = world.decide()
    if decision.start or decision.preempt or not world.waiting:
        return
    fillers = {h.request.job for h in world.held if h.request.preemptible}
    stopping = {h.request.job for h in world.held if h.stopping}
    if settled(world, stopping).decide().start:
        return  # it waits for GPUs that are becoming free
    assert settled(world, stopping | fillers).decide().start == ()


class Machine:
    """A simulated worker: jobs end at their time, and decisions are carried out."""

    GRACE = 5.0

    def __init__(self, seen: list[GpuState], rules: PlacementOptions, host: HostSpec = ANY_HOST) -> None:
        self.host = host
        self.seen = seen
        self.rules = rules
        self.now = 0.0
        self.held: list[Allocation] = []
        self.ends: dict[str, float] = {}
        self.keeping: tuple[Reservation, ...] = ()

    def turn(
        self, waiting: Sequence[ResourceRequest], durations: dict[str, float], elsewhere: Mapping[str, Offer] = {}
    ) -> list[str]:
        decision = decide(self.seen, self.held, waiting, self.rules, self.now, elsewhere=elsewhere, host=self.host)
        self.keeping = decision.reservations
        wanted = {request.job: request for request in waiting}
        for start in decision.start:
            self.held.append(Allocation(wanted[start.job], start.gpus, self.now, used={}))
            self.ends[start.job] = self.now + durations[start.job]
        for victim in decision.preempt:
            self.ends[victim] = min(self.ends[victim], self.now + self.GRACE)
            self.held = [
                msgspec.structs.replace(allocation, stopping=True) if allocation.request.job == victim else allocation
                for allocation in self.held
            ]
        return [start.job for start in decision.start]

    def next_end(self) -> float:
        return min((self.ends[allocation.request.job] for allocation in self.held), default=math.inf)

    def until_something_ends(self) -> None:
        self.live_to(self.next_end())

    def live_to(self, now: float) -> None:
        self.now = now
        self.held = [allocation for allocation in self.held if self.ends[allocation.request.job] > self.now]


class SmallJobs:
    """An endless supply of small jobs of every kind."""

    def __init__(self, chance: random.Random, *, sharing: bool, demanding: bool = False) -> None:
        self._demanding = demanding
        self._chance = chance
        self._sharing = sharing
        self._count = 0
        self.durations: dict[str, float] = {}

    def next(self) -> ResourceRequest:
        self._count += 1
        name = f"small{self._count}"
        duration = self._chance.choice([10.0, 60.0, 600.0])
        self.durations[name] = duration
        asked: dict[str, Any] = {}
        if self._demanding:
            asked = {"cpus": self._chance.choice([0, 1, 2, 3]), "ram": self._chance.choice([0, GIB, 9 * GIB])}
        return a_job(
            name,
            self._chance.choice([0, 1]) if self._demanding else 1,
            **asked,
            order=self._count,
            memory=self._chance.choice([2, 6, 11]) if self._sharing else None,
            shares=self._sharing,
            preemptible=self._chance.random() < 0.2,
            limit=self._chance.choice([None, duration, 2 * duration]),
        )


def simulate_until_start(machine: Machine, big: ResourceRequest, small_jobs: SmallJobs, deadline: float) -> None:
    """There are always five small jobs behind the big one, which must start by the deadline."""
    waiting = [big]
    small_jobs.durations[big.job] = 1.0
    while machine.now <= deadline:
        waiting += [small_jobs.next() for _ in range(6 - len(waiting))]
        started = machine.turn(waiting, small_jobs.durations)
        if big.job in started:
            return
        waiting = [request for request in waiting if request.job not in started]
        machine.until_something_ends()
    pytest.fail(f"the big job still waits at {machine.now}, after its deadline of {deadline}")


def a_machine_filled_with(small_jobs: SmallJobs, seen: list[GpuState], host: HostSpec = ANY_HOST) -> Machine:
    machine = Machine(seen, RULES, host)
    for _ in range(3):  # jobs that began at different times
        machine.turn([small_jobs.next() for _ in range(8)], small_jobs.durations)
        machine.until_something_ends()
    machine.turn([small_jobs.next() for _ in range(8)], small_jobs.durations)
    return machine


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(2, 5), st.data(), st.randoms(use_true_random=False))
def test_big_job_starts_after_the_running_jobs_despite_many_small_ones(
    count: int, data: st.DataObject, chance: random.Random
) -> None:
    small_jobs = SmallJobs(chance, sharing=False)
    machine = a_machine_filled_with(small_jobs, data.draw(connected(gpus(count))))
    big = a_job("big", data.draw(st.integers(2, count)), order=-1)
    last = max(h.ends if math.isfinite(h.ends) else machine.ends[h.request.job] for h in machine.held)
    simulate_until_start(machine, big, small_jobs, last + Machine.GRACE)


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(1, 3), st.data(), st.randoms(use_true_random=False))
def test_job_for_whole_gpus_is_not_starved_by_sharing_jobs(
    count: int, data: st.DataObject, chance: random.Random
) -> None:
    small_jobs = SmallJobs(chance, sharing=True)
    machine = a_machine_filled_with(small_jobs, gpus(count))
    big = a_job("big", data.draw(st.integers(1, count)), order=-1)
    # Each GPU holds eleven small ones of 600 s at the most, and is kept empty of new ones once it is the emptiest.
    simulate_until_start(machine, big, small_jobs, machine.now + count * 11 * 1200.0)


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(0, 3), st.data(), st.randoms(use_true_random=False))
def test_job_for_many_cpus_and_much_ram_is_not_starved(count: int, data: st.DataObject, chance: random.Random) -> None:
    small_jobs = SmallJobs(chance, sharing=False, demanding=True)
    machine = a_machine_filled_with(small_jobs, data.draw(connected(gpus(3))), BOX)
    cpus, ram = data.draw(st.sampled_from([(8, 0), (0, 32 * GIB), (7, 30 * GIB), (8, 32 * GIB)]))
    big = a_job("big", count, order=-1, cpus=cpus, ram=ram, labels=("ib",))
    last = max((h.ends if math.isfinite(h.ends) else machine.ends[h.request.job] for h in machine.held), default=0.0)
    simulate_until_start(machine, big, small_jobs, max(machine.now, last) + Machine.GRACE)


class Cluster:
    """Several machines with one queue, which knows the one machine with a reservation for a job."""

    def __init__(self, machines: Sequence[Machine], small_jobs: SmallJobs) -> None:
        self.machines = machines
        self.small_jobs = small_jobs
        self.kept: dict[str, tuple[Machine, float, int]] = {}
        self.now = max(machine.now for machine in machines)
        for machine in machines:
            machine.live_to(self.now)

    def settle(self, waiting: list[ResourceRequest]) -> list[str]:
        """Every machine decides in turn until nothing changes."""
        started: list[str] = []
        for _ in range(20):
            before = len(started), {job: kept[0] for job, kept in self.kept.items()}
            for machine in self.machines:
                left = [request for request in waiting if request.job not in started]
                started += self._turn(machine, left)
            if before == (len(started), {job: kept[0] for job, kept in self.kept.items()}):
                return started
        pytest.fail(f"the machines do not agree: {self.kept}")

    def _turn(self, machine: Machine, waiting: list[ResourceRequest]) -> list[str]:
        elsewhere = {
            job: Offer(max(0.0, at - self.now), missing)
            for job, (reaper_process, at, missing) in self.kept.items()
            if reaper_process is not machine
        }
        started = machine.turn(waiting, self.small_jobs.durations, elsewhere)
        for keeping in machine.keeping:
            if keeping.affects_others or keeping.job in self.kept:
                self.kept[keeping.job] = (machine, self.now + keeping.starts_in, offer(keeping).missing)
        keeps = {keeping.job for keeping in machine.keeping}
        for job, (reaper_process, _at, _missing) in list(self.kept.items()):
            if job in started or (reaper_process is machine and job not in keeps):
                del self.kept[job]
        return started

    def until_something_ends(self) -> None:
        self.now = min(machine.next_end() for machine in self.machines)
        for machine in self.machines:
            machine.live_to(self.now)

    def free(self, machine: Machine) -> set[str]:
        held = {uuid for allocation in machine.held for uuid in allocation.gpus}
        return {gpu.uuid for gpu in machine.seen} - held


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data(), st.randoms(use_true_random=False))
def test_one_machine_reserves_gpus_for_a_big_job_and_the_others_continue(
    counts: list[int], data: st.DataObject, chance: random.Random
) -> None:
    counts = [max(2, counts[0]), *counts[1:]]
    small_jobs = SmallJobs(chance, sharing=False)
    cluster = Cluster([a_machine_filled_with(small_jobs, gpus(count)) for count in counts], small_jobs)
    big = a_job("big", data.draw(st.integers(2, max(counts))), order=-1)
    small_jobs.durations[big.job] = 1.0
    # A reservation may move once for each GPU less that it lacks, and once to a certain start.
    deadline = cluster.now + (big.gpus + 2) * 1200.0
    waiting = [big]
    while cluster.now <= deadline:
        waiting += [small_jobs.next() for _ in range(30 - len(waiting))]
        started = cluster.settle(waiting)
        if big.job in started:
            return
        waiting = [request for request in waiting if request.job not in started]
        keepers = [machine for machine in cluster.machines if any(one.affects_others for one in machine.keeping)]
        felt = [one.job for machine in keepers for one in machine.keeping if one.affects_others]
        assert len(felt) == len(set(felt))
        if any(not request.preemptible for request in waiting if request.gpus == 1):
            for machine in cluster.machines:
                assert cluster.free(machine) <= {uuid for one in machine.keeping for uuid in one.gpus}
                assert not cluster.free(machine) or machine in keepers
        cluster.until_something_ends()
    pytest.fail(f"the big job still waits at {cluster.now}, after its deadline of {deadline}")


def on_two_machines(
    first: Sequence[Allocation], second: Sequence[Allocation], *waiting: ResourceRequest
) -> tuple[Placements, Placements, dict[str, Offer]]:
    """The first decides, then the second, which knows the reservations of the first."""
    one = place(gpus(2), first, *waiting)
    elsewhere = {keeping.job: offer(keeping) for keeping in one.reservations if keeping.affects_others}
    return one, decide(gpus(2), second, waiting, RULES, NOW, elsewhere=elsewhere), elsewhere


def test_job_with_a_reservation_elsewhere_has_none_here() -> None:
    held = [running(a_job("r"), 1)]
    one, other, elsewhere = on_two_machines(held, held, a_job("big", 2), a_job("small", order=1))
    assert one.start == ()
    assert elsewhere == {"big": Offer(math.inf, 1)}
    assert placed(other) == {"small": [0]}
    assert isinstance(other.waiting["big"], NotEnoughGpus)


def test_reservation_moves_to_the_machine_that_can_start_sooner() -> None:
    endless = [running(a_job("r"), 1)]
    limited = [running(a_job("r", limit=2 * HOUR), 0), running(a_job("s", limit=2 * HOUR), 1)]
    _one, other, _elsewhere = on_two_machines(endless, limited, a_job("big", 2))
    assert [(keeping.job, offer(keeping)) for keeping in other.reservations] == [("big", Offer(HOUR, 2))]
    _one, other, _elsewhere = on_two_machines(limited, endless, a_job("big", 2), a_job("small", order=1))
    assert [keeping.job for keeping in other.reservations] == ["big"], "it does not affect others on the first"


def test_second_big_job_gets_a_reservation_on_the_second_machine() -> None:
    held = [running(a_job("r"), 1)]
    one, other, _elsewhere = on_two_machines(held, held, a_job("big", 2), a_job("next", 2, order=1))
    assert [keeping.job for keeping in one.reservations] == ["big"]
    assert [keeping.job for keeping in other.reservations] == ["next"]


def test_jobs_are_preempted_on_one_machine_only() -> None:
    held = [running(a_job("f", preemptible=True), 0), running(a_job("g", preemptible=True), 1)]
    one, other, _elsewhere = on_two_machines(held, held, a_job("normal"))
    assert (len(one.preempt), len(other.preempt)) == (1, 0)


def test_job_starts_where_it_fits_though_another_machine_reserves_gpus_for_it() -> None:
    _one, other, _elsewhere = on_two_machines([running(a_job("r"), 1)], [], a_job("big", 2))
    assert placed(other) == {"big": [0, 1]}


def test_reservation_on_a_full_machine_does_not_affect_others() -> None:
    held = [running(a_job("r"), 0), running(a_job("s"), 1)]
    jobs = [a_job(f"j{order}", order=order) for order in range(5)]
    assert [(keeping.job, keeping.affects_others) for keeping in place(gpus(2), held, *jobs).reservations] == [
        ("j0", False)
    ]


def test_long_queue_is_placed_in_order() -> None:
    queue = [a_job(f"j{order}", 1 + order % 3, order=order, memory=1 + order % 7) for order in range(1000)]
    decision = place(gpus(8), [], *reversed(queue))
    assert list(placed(decision)) == ["j0", "j1", "j2", "j3"]
    assert len(decision.waiting) == 996
