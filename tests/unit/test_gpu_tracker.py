"""The tracker of a worker: who uses each GPU, and since when."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from stoker.engines.local.capacity import Allocation, PlacementOptions, ResourceRequest
from stoker.engines.local.gpu_tracker import GpuTracker
from stoker.engines.local.placement import place
from stoker.errors import BadInputError
from stoker.gpus.model import Gpu, Look, Maybe, Process, Reading, Unknown
from tests.support.looks import GIB, a_gpu, a_look, a_process, a_reading

UUID = a_gpu(0).uuid
OURS = a_process(100, user="bob", memory=20 * GIB)
ALICE = a_process(4242)
OUTSIDE = a_process(7, started=Unknown("numbered outside"), name=Unknown("x"), user=Unknown("x"))


def look(
    at: float, *processes: Process, peak: Maybe[float] = 0.0, used: Maybe[int] = 0, span: float = 1.0, **changes: Any
) -> Look:
    """A look at a machine with one GPU with this much used memory."""
    reading = a_reading(a_gpu(0), peak, span=span, memory_used=used, processes=processes)
    return looked(at, {a_gpu(0): msgspec.structs.replace(reading, **changes)})


def looked(at: float, readings: Mapping[Gpu, Reading]) -> Look:
    return Look("test", at, 0.0, tuple(readings), tuple(readings.values()))


class World:
    """A machine whose process 100 belongs to job a, and 101 to job b."""

    def __init__(self, chosen: str = "all") -> None:
        self.machine = GpuTracker(chosen)
        self.holders: dict[str, set[str]] = {}
        self.owners = {100: "a", 101: "b"}
        self.now = 0.0

    def see(self, look: Look) -> "World":
        self.now = look.at
        self.machine.observe(look, self.owners.get, self.holders)
        return self

    def hold(self, *jobs: str) -> "World":
        self.holders = {UUID: set(jobs)}
        return self

    def end(self, at: float) -> "World":
        """All our jobs ended: their processes are no longer known."""
        self.now = at
        self.holders, self.owners = {}, {}
        self.machine.ended(UUID, at)
        return self

    @property
    def gpu(self) -> Any:
        (gpu,) = self.machine.gpus
        return gpu

    @property
    def note(self) -> str:
        return self.machine.worker_gpus(self.holders, 0.0)[0].note

    def is_free(self) -> bool:
        """Whether a job that requests one GPU starts."""
        assert not self.holders
        return bool(place(self.machine.gpus, [], [ResourceRequest("new", 1, 1)], PlacementOptions(), self.now).start)

    def is_waited_for(self) -> bool:
        """Whether it is expected to be free soon, so that no job is preempted elsewhere."""
        other = msgspec.structs.replace(self.gpu, uuid="other", index=1, peak=0.0, memory_used=0, other_processes=())
        victim = Allocation(ResourceRequest("victim", 1, 0, preemptible=True), ("other",), 0.0, used={})
        decision = place([self.gpu, other], [victim], [ResourceRequest("new", 1, 1)], PlacementOptions(), self.now)
        return not decision.start and not decision.preempt


class TestSelection:
    def test_all_or_selected_gpus_are_tracked(self) -> None:
        assert [gpu.index for gpu in World().see(a_look(0.0, 0.0, 0.0)).machine.gpus] == [0, 1, 2]
        chosen = World("2,0").see(a_look(0.0, 0.0, 0.0)).machine
        assert [gpu.index for gpu in chosen.gpus] == [2, 0]
        assert list(chosen.known) == [a_gpu(2).uuid, a_gpu(0).uuid]
        assert len(chosen.present) == 3

    def test_invalid_selection_of_gpus_is_refused_at_the_first_readable_look(self) -> None:
        world = World("5")
        world.see(a_look(problem=Unknown("the driver hangs")))
        with pytest.raises(BadInputError, match="there is no GPU 5 here"):
            world.see(a_look(0.0))

    def test_machine_has_only_a_problem_before_its_first_readable_look(self) -> None:
        world = World()
        assert (world.machine.gpus, world.machine.problem) == ([], "it has not been looked at yet")
        world.see(a_look(0.0, problem=Unknown("the driver hangs")))
        assert (world.machine.gpus, world.machine.problem) == ([], "the driver hangs")
        world.see(a_look(0.0))
        assert (len(world.machine.gpus), world.machine.problem) == (1, None)

    def test_late_driver_is_waited_for(self) -> None:
        world = World().see(a_look())
        assert world.machine.gpus == []
        assert len(world.see(a_look(0.0, 0.0)).machine.gpus) == 2

    def test_vanished_gpu_is_unreadable_and_the_others_keep_their_indices(self) -> None:
        world = World().see(a_look(0.0, 0.0, at=1.0))
        left = a_gpu(0, uuid=a_gpu(1).uuid)
        world.see(looked(2.0, {left: a_reading(left)}))
        gone, there = world.machine.gpus
        assert gone.problem == "the driver does not list it any more"
        assert (gone.index, gone.obstructed_since, gone.memory_total) == (0, 2.0, 80 * GIB)
        assert (there.index, there.problem, there.obstructed_since) == (1, None, None)
        assert world.machine.known[there.uuid] == left
        decision = place(world.machine.gpus, [], [ResourceRequest("new", 2, 1)], PlacementOptions(), 2.0)
        assert not decision.start
        assert world.note == "cannot be read (the driver does not list it any more)"

    def test_returned_gpu_is_free_again(self) -> None:
        world = World().see(look(1.0)).see(looked(2.0, {})).see(look(3.0))
        assert world.is_free()
        assert world.gpu.obstructed_since is None


class TestUser:
    def test_empty_gpu_is_free(self) -> None:
        world = World().see(look(1.0))
        assert world.is_free()
        assert (world.gpu.obstructed_since, world.note) == (None, "")

    def test_process_of_another_user_is_described_and_makes_the_gpu_unavailable(self) -> None:
        world = World().see(look(1.0, ALICE))
        assert world.gpu.other_processes == ("alice's python (pid 4242)",)
        assert not world.is_free()
        assert world.note == "is used by alice's python (pid 4242)"

    def test_pid_of_another_namespace_counts_as_foreign_on_a_gpu_without_our_job(self) -> None:
        world = World()
        world.owners[7] = "a"
        assert world.see(look(1.0, OUTSIDE)).gpu.other_processes == ("process (pid 7)",)

    def test_pid_of_another_namespace_counts_as_the_job_that_holds_the_gpu(self) -> None:
        world = World().hold("a").see(look(1.0, OUTSIDE, used=30 * GIB))
        assert world.gpu.other_processes == ()
        assert world.machine.used == {"a": None}
        assert world.gpu.obstructed_since is None

    def test_gpu_with_unknown_processes_is_not_free(self) -> None:
        world = World().see(look(1.0, processes=Unknown("not permitted")))
        assert world.gpu.problem == "its processes are not known: not permitted"
        assert not world.is_free()
        assert world.hold("a").see(look(2.0, processes=Unknown("not permitted"))).machine.used == {"a": None}

    def test_unreadable_machine_is_not_free(self) -> None:
        world = World().see(look(1.0))
        world.see(msgspec.structs.replace(look(2.0), problem=Unknown("the driver hangs")))
        assert (world.machine.problem, world.gpu.problem) == ("the driver hangs", "the driver hangs")
        assert not world.is_free()
        assert world.see(look(3.0)).is_free()

    def test_gpu_with_unknown_utilization_or_memory_is_not_free(self) -> None:
        assert not World().see(look(1.0, peak=Unknown("not reported"))).is_free()
        assert not World().see(look(1.0, used=Unknown("not reported"))).is_free()

    def test_foreign_process_beside_an_own_job_is_seen_during_and_after_it(self) -> None:
        world = World().hold("a").see(look(1.0, OURS))
        assert (world.gpu.other_processes, world.gpu.obstructed_since) == ((), None)
        world.see(look(2.0, OURS, ALICE))
        assert (world.gpu.other_processes, world.gpu.obstructed_since) == (("alice's python (pid 4242)",), 2.0)
        assert world.note == "is used by alice's python (pid 4242)"
        world.end(2.5).see(look(3.0, ALICE))
        assert (world.gpu.other_processes, world.gpu.obstructed_since) == (("alice's python (pid 4242)",), 2.0)

    def test_own_job_on_an_unassigned_gpu_makes_it_unavailable(self) -> None:
        world = World().hold("b").see(look(1.0, OURS))
        assert world.gpu.other_processes == ("bob's python (pid 100) of job a",)
        assert world.machine.used == {"b": {UUID: 0}}

    @pytest.mark.parametrize("name", ["Xorg", "gnome-shell"])
    def test_display_server_is_not_a_user_but_its_memory_counts(self, name: str) -> None:
        screen = a_process(1, name=name, user="root", memory=0)
        assert World().see(look(1.0, screen, used=GIB // 2)).is_free()
        assert not World().see(look(1.0, screen, used=10 * GIB)).is_free()


class TestJobMemory:
    def test_memory_of_all_processes_of_a_job_is_added_up_for_each_gpu(self) -> None:
        one, two = a_gpu(0), a_gpu(1)
        world = World()
        world.holders = {one.uuid: {"a", "b"}, two.uuid: {"a"}}
        world.owners[102] = "a"
        world.see(
            looked(
                1.0,
                {
                    one: a_reading(one, processes=(OURS, a_process(102, memory=GIB), a_process(101, memory=2 * GIB))),
                    two: a_reading(two, processes=(OURS,)),
                },
            )
        )
        assert world.machine.used == {
            "a": {one.uuid: 21 * GIB, two.uuid: 20 * GIB},
            "b": {one.uuid: 2 * GIB},
        }

    def test_job_not_on_its_gpu_yet_uses_no_memory(self) -> None:
        assert World().hold("a").see(look(1.0)).machine.used == {"a": {UUID: 0}}

    def test_unknown_memory_is_not_guessed(self) -> None:
        unattributed = a_process(102, memory=Unknown("not reported"))
        world = World().hold("a")
        world.owners[102] = "a"
        assert world.see(look(1.0, unattributed, OURS)).machine.used == {"a": None}
        assert world.see(look(2.0, OURS, unattributed)).machine.used == {"a": None}

    def test_memory_unknown_on_one_gpu_is_unknown_for_the_job(self) -> None:
        one, two = a_gpu(0), a_gpu(1)
        world = World()
        world.holders = {one.uuid: {"a"}, two.uuid: {"a"}}
        readings = [a_reading(one, processes=Unknown("not reported")), a_reading(two, processes=(OURS,))]
        world.see(looked(1.0, dict(zip((one, two), readings, strict=True))))
        assert world.machine.used == {"a": None}


class TestAfterAJob:
    def test_unfreed_memory_is_waited_for_a_while(self) -> None:
        world = World().hold("a").see(look(1.0, OURS, peak=0.9, used=20 * GIB)).end(1.5)
        world.see(look(2.0, used=15 * GIB))
        assert not world.is_free()
        assert world.gpu.obstructed_since == 2.0
        assert world.note == "has just been freed and is settling"
        assert world.is_waited_for()
        world.see(look(63.0, used=15 * GIB))
        assert world.gpu.obstructed_since == 2.0
        assert world.note == "has 15 GiB in use by no process that is seen"
        assert not world.is_waited_for()
        assert world.see(look(64.0)).is_free()
        assert world.gpu.obstructed_since is None

    def test_freed_gpu_is_expected_to_be_free_but_is_not_before_the_next_look(self) -> None:
        world = World().hold("a").see(look(1.0, OURS, peak=0.9, used=20 * GIB)).end(1.5)
        assert not world.is_free()
        assert world.is_waited_for()

    def test_activity_of_an_own_ended_job_is_not_foreign(self) -> None:
        world = World().hold("a").see(look(1.0, OURS, peak=0.9)).end(3.5)
        # From 1 to 6: our job used half of that time.
        world.see(look(6.0, peak=0.9, span=5.0))
        assert not world.is_free()
        assert world.is_waited_for()
        assert (world.gpu.obstructed_since, world.note) == (None, "has just been freed and is settling")
        assert world.see(look(11.0, span=5.0)).is_free()

    def test_activity_after_the_end_of_an_own_job_is_foreign(self) -> None:
        world = World().hold("a").see(look(1.0, OURS, peak=0.9)).end(3.5)
        world.see(look(6.0, peak=0.9, span=5.0)).see(look(11.0, peak=0.8, span=5.0))
        assert not world.is_free()
        assert world.gpu.obstructed_since == 11.0
        assert world.note == "is 80% busy (free below 50%) with no process seen there"
        world.see(look(80.0, peak=0.8, span=5.0))
        assert not world.is_waited_for()

    def test_gpu_with_little_activity_is_free_at_the_first_look(self) -> None:
        world = World().hold("a").see(look(1.0, OURS)).end(3.5)
        assert world.see(look(6.0, peak=0.3, span=5.0)).is_free()

    def test_processes_in_a_look_from_before_the_end_are_not_foreign(self) -> None:
        world = World().hold("a").see(look(1.0)).end(2.5)
        world.see(look(2.0, OURS))
        assert world.gpu.other_processes == ()
        assert not world.is_free()
        assert world.is_waited_for()

    def test_ended_process_still_listed_by_the_driver_delays_the_gpu(self) -> None:
        ghost = a_process(100, started=Unknown("it is not here"), user=Unknown("x"))
        world = World().hold("a").see(look(1.0, OURS)).end(1.5).see(look(2.0, ghost))
        assert world.gpu.other_processes == ()
        assert not world.is_free()
        assert world.is_waited_for()
        assert world.see(look(3.0, ghost)).gpu.other_processes == ("python (pid 100)",)

    def test_earlier_foreign_process_is_not_a_leftover(self) -> None:
        world = World().hold("a").see(look(1.0, OURS, ALICE)).end(2.5).see(look(2.0, OURS, ALICE))
        assert world.gpu.other_processes == ("alice's python (pid 4242)",)

    def test_immediate_foreign_process_is_seen(self) -> None:
        world = World().hold("a").see(look(1.0, OURS)).end(1.5).see(look(2.0, ALICE))
        assert world.gpu.other_processes == ("alice's python (pid 4242)",)

    def test_end_of_one_job_does_not_affect_another_on_the_gpu(self) -> None:
        world = World().hold("a", "b").see(look(1.0, OURS, peak=0.9))
        world.machine.ended(UUID, 1.5)
        world.hold("b").see(look(2.0, a_process(101, memory=3 * GIB), peak=0.9, used=3 * GIB))
        assert (world.gpu.obstructed_since, world.machine.used) == (None, {"b": {UUID: 3 * GIB}})


class TestObstructedSince:
    def test_obstruction_counts_from_the_first_of_consecutive_looks(self) -> None:
        world = World().see(look(1.0, ALICE)).see(look(2.0, processes=Unknown("not reported")))
        world.see(look(3.0, a_process(5)))
        assert world.gpu.obstructed_since == 1.0
        assert world.see(look(4.0)).gpu.obstructed_since is None
        assert world.see(look(5.0, ALICE)).gpu.obstructed_since == 5.0

    def test_work_without_a_process_counts_as_obstruction(self) -> None:
        world = World().see(look(1.0, peak=0.9)).see(look(2.0, peak=0.9))
        assert world.gpu.obstructed_since == 1.0

    def test_own_work_and_memory_are_not_obstruction(self) -> None:
        assert World().hold("a").see(look(1.0, OURS, peak=1.0, used=20 * GIB)).gpu.obstructed_since is None

    def test_unexplained_memory_beside_an_own_job_is_obstruction(self) -> None:
        world = World().hold("a").see(look(1.0, OURS, used=50 * GIB))
        assert world.gpu.obstructed_since == 1.0
        assert world.note == "has 30 GiB in use by no process that is seen"


def test_report_has_the_last_look_and_the_current_holders() -> None:
    world = World().see(look(1.0, peak=0.2, used=3 * GIB))
    (reported,) = world.machine.worker_gpus({UUID: {"b", "a"}}, 0.0)
    assert (reported.uuid, reported.index, reported.name) == (UUID, 0, "Test GPU")
    assert (reported.memory_total, reported.memory_used, reported.utilization) == (80 * GIB, 3 * GIB, 0.2)
    assert reported.jobs == ("a", "b")
    world.see(looked(2.0, {}))
    (reported,) = world.machine.worker_gpus({}, 0.0)
    assert (reported.memory_total, reported.memory_used, reported.utilization, reported.jobs) == (
        80 * GIB,
        None,
        None,
        (),
    )
