"""State of each GPU as a worker reports it: state, user, and since when."""

from typing import Any

import msgspec
import pytest

from stoker.engines.engine import Reservation
from stoker.engines.local.capacity import BACKGROUND
from stoker.engines.local.gpu_tracker import GpuTracker
from stoker.gpus.model import DeviceHealth, Look, Maybe, Process, Unknown, Utilization
from stoker.queue.model import GpuUse, WorkerGpu
from tests.support.looks import GIB, a_gpu, a_look, a_process, a_reading

UUID = a_gpu(0).uuid
NOON = 1_740_000_000.0
OURS = a_process(100, user="bob")
ALICE = a_process(4242)
BOB = a_process(4343, user="bob")


def look(*processes: Process, peak: Maybe[float] = 0.0, used: Maybe[int] = 0, at: float = 1.0, **changes: Any) -> Look:
    """A look at a machine with one GPU."""
    reading = a_reading(a_gpu(0), peak, memory_used=used, processes=processes)
    return Look("test", at, NOON + at, (a_gpu(0),), (msgspec.structs.replace(reading, **changes),))


def reported(seen: Look, *holders: str, ended: float | None = None) -> WorkerGpu:
    """The reported GPU after one look, held by these jobs; process 100 belongs to job a."""
    machine = GpuTracker("all")
    machine.observe(a_look(0.0, at=-1.0), lambda _pid: None, {})
    if ended is not None:
        machine.ended(UUID, ended)
    ours = {UUID: set(holders)} if holders else {}
    machine.observe(seen, {100: "a"}.get, ours)
    return machine.worker_gpus(ours, NOON)[0]


@pytest.mark.parametrize(
    ("seen", "holders", "doing", "whom"),
    [
        (look(), (), "free", ""),
        (look(OURS, peak=1.0), ("a",), "job", ""),
        (look(OURS, ALICE, peak=1.0), ("a",), "job", ""),
        (look(processes=Unknown("not reported")), ("a", "b"), "job", ""),
        (look(peak=1.0), (BACKGROUND,), "background", ""),
        (look(ALICE), (), "somebody", "alice's python (pid 4242)"),
        (look(ALICE, BOB), (), "somebody", "alice's python (pid 4242) and bob's python (pid 4343)"),
        (look(peak=0.9), (), "somebody", ""),
        (look(used=30 * GIB), (), "somebody", ""),
        (look(processes=Unknown("not reported")), (), "unknown", ""),
        (look(peak=Unknown("not reported")), (), "unknown", ""),
        (look(used=Unknown("not reported")), (), "unknown", ""),
        (a_look(problem=Unknown("the driver hangs")), (), "unknown", ""),
        (a_look(), (), "unknown", ""),
    ],
)
def test_state_and_user_of_a_gpu(seen: Look, holders: tuple[str, ...], doing: GpuUse, whom: str) -> None:
    gpu = reported(seen, *holders)
    assert (gpu.state, gpu.user) == (doing, whom)
    assert gpu.jobs == tuple(holder for holder in holders if holder != BACKGROUND)


def test_leftovers_of_a_job_do_not_count_as_another_user() -> None:
    gpu = reported(look(peak=0.9, used=30 * GIB, at=5.0), ended=4.9)
    assert (gpu.state, gpu.note) == ("free", "has just been freed and is settling")
    assert reported(look(peak=0.9, used=30 * GIB, at=9.0), ended=4.9).state == "somebody"


def test_gpu_assigned_since_the_last_look_belongs_to_the_job() -> None:
    machine = GpuTracker("all")
    machine.observe(look(), lambda _pid: None, {})
    assert machine.worker_gpus({}, NOON)[0].state == "free"
    assert machine.worker_gpus({UUID: {"a"}}, NOON)[0].state == "job"


def test_activity_clock_and_errors_of_a_gpu_are_reported() -> None:
    seen = look()
    reading = msgspec.structs.replace(
        seen.readings[0], memory_activity=Utilization(0.5, 0.25, 6), sm_clock=1410.0, health=DeviceHealth((31,))
    )
    gpu = reported(msgspec.structs.replace(seen, readings=(reading,)))
    assert (gpu.memory_activity, gpu.sm_clock, gpu.xids) == (0.25, 1410.0, (31,))
    unknown = reported(seen)
    assert (unknown.memory_activity, unknown.sm_clock, unknown.xids) == (None, None, ())


def test_unreadable_since_is_reported_with_and_without_a_holder() -> None:
    machine = GpuTracker("all")

    def unread_since(seen: Look, *holders: str) -> float | None:
        ours = {UUID: set(holders)} if holders else {}
        machine.observe(seen, {100: "a"}.get, ours)
        return machine.worker_gpus(ours, NOON)[0].unread_since

    assert unread_since(look(at=1.0)) is None
    assert unread_since(look(at=2.0, processes=Unknown("not reported")), "a") == NOON + 2.0
    assert unread_since(look(at=3.0, processes=Unknown("not reported")), "a") == NOON + 2.0
    assert unread_since(look(at=4.0, processes=Unknown("another reason"))) == NOON + 2.0
    assert unread_since(look(at=5.0)) is None
    assert unread_since(look(at=6.0, processes=Unknown("not reported"))) == NOON + 6.0


def test_simulated_gpus_are_reported_as_simulated() -> None:
    machine = GpuTracker("all")

    def is_simulated(seen: Look) -> bool:
        machine.observe(seen, lambda _pid: None, {})
        return machine.simulated

    assert not is_simulated(a_look(0.0))
    assert is_simulated(a_look(0.0, source="sim"))
    assert is_simulated(a_look(source="", problem=Unknown("the driver hangs")))


def test_since_is_kept_while_state_user_and_jobs_stay_the_same() -> None:
    machine = GpuTracker("all")

    def since(wall: float, seen: Look, *holders: str, program: str = "") -> float | None:
        ours = {UUID: set(holders)} if holders else {}
        machine.observe(seen, {100: "a"}.get, ours)
        return machine.worker_gpus(ours, wall, {UUID: program})[0].since

    assert since(1.0, look(ALICE)) == 1.0
    assert since(2.0, look(ALICE, peak=0.7)) == 1.0
    assert since(3.0, look(BOB)) == 3.0
    assert since(4.0, look(processes=Unknown("not reported"))) == 4.0
    assert since(5.0, look(OURS), "a") == 5.0
    assert since(6.0, look(OURS, peak=1.0), "a") == 5.0
    assert since(7.0, look(OURS), "b") == 7.0
    assert since(8.0, look(), BACKGROUND, program="folding") == 8.0
    assert since(9.0, look(), BACKGROUND, program="folding") == 8.0
    assert since(10.0, look(), BACKGROUND, program="mining") == 10.0
    assert since(5.0, look(BOB)) == 5.0


def test_reservation_is_reported_of_a_free_gpu_only() -> None:
    machine = GpuTracker("all")
    reserved = {UUID: Reservation("big", 2, (UUID, "another"), (UUID,), 60.0)}
    machine.observe(look(), lambda _pid: None, {})
    gpu = machine.worker_gpus({}, NOON, reserved=reserved)[0]
    assert (gpu.state, gpu.kept_for, gpu.note) == ("free", "big", "is reserved for job big (2 GPUs, has 1)")
    gpu = machine.worker_gpus({UUID: {"a"}}, NOON, reserved=reserved)[0]
    assert (gpu.state, gpu.kept_for) == ("job", "")
