"""Which GPUs and whose work count for a job: the load of other users neither saves nor stops it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.gpus.model import JobProgress, Look, Maybe, Process, Reading, Unknown, Utilization
from stoker.gpus.processes import OUTSIDE
from stoker.rules.scope import JobScope, MachineScope
from tests.support.looks import a_gpu, a_look, a_process, a_reading

MINE = frozenset({100, 101})
"""The pids of alice's job."""


def processes(*listed: Process) -> tuple[Process, ...]:
    return listed


def mine(share: Maybe[float] = 0.0, pid: int = 100) -> Process:
    return a_process(pid, utilization=share)


def bobs(share: Maybe[float] = 0.0, **changes: Any) -> Process:
    return a_process(**{"pid": 500, "user": "bob", "utilization": share, **changes})


def a_shared_look(utilization: Maybe[float], *listed: Process, more: Sequence[Maybe[float]] = ()) -> Look:
    """GPU 0 at this utilization with these processes, and further GPUs with none."""
    look = a_look(utilization, *more)
    first = msgspec.structs.replace(look.readings[0], processes=listed)
    return msgspec.structs.replace(look, readings=(first, *look.readings[1:]))


def a_job(environment: dict[str, str] | None = None, **changes: Any) -> JobScope:
    return JobScope(environment or {}, "alice", **changes)


def of_job(look: Look) -> Look:
    return msgspec.structs.replace(look, job=JobProgress(pids=tuple(MINE)))


def peaks(scope: JobScope, look: Look) -> dict[str, Maybe[float]]:
    return {activity.label: activity.peak for activity in scope.activities(of_job(look))}


def peak_of_shared(utilization: Maybe[float], *listed: Process) -> Maybe[float]:
    """What counts on a GPU that the job uses."""
    scope = a_job()
    scope.activities(of_job(a_shared_look(0.0, mine())))
    return peaks(scope, a_shared_look(utilization, *listed))["GPU 0"]


# Attribution


@given(st.floats(0.02, 1.0))
def test_load_of_another_user_does_not_count_for_an_idle_job(load: float) -> None:
    assert peak_of_shared(load, mine(0.0), bobs(load)) == 0.0


@given(st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_idle_process_of_another_user_does_not_count_against_a_busy_job(own: float, others: float) -> None:
    peak = peak_of_shared(max(own, others), mine(own), bobs(others))
    assert not isinstance(peak, Unknown)
    assert peak >= own


def test_process_that_follows_the_job_on_a_gpu_does_not_count() -> None:
    assert peak_of_shared(0.9, bobs(0.9)) == 0.0


def test_users_other_job_does_not_count_once_this_one_was_seen() -> None:
    other_job = a_process(700, utilization=0.8)
    assert peak_of_shared(0.8, mine(0.0), other_job) == 0.0


def test_all_processes_of_the_job_count_together() -> None:
    peak = peak_of_shared(0.9, mine(0.2), mine(0.3, pid=101), bobs(0.4))
    assert peak == 0.9  # half of the time in the mean: in some sample it may have been all of it


def test_mean_share_counts_as_its_highest_possible_peak() -> None:
    """Six samples with a mean of 2%: one of them may have been 12%, none more."""
    look = a_shared_look(0.5, mine(0.02), bobs(0.48))
    scope = a_job()
    assert peaks(scope, look)["GPU 0"] == pytest.approx(0.12)


def test_device_utilization_counts_where_the_job_is_alone() -> None:
    assert peak_of_shared(0.07, mine(0.0)) == 0.07


@pytest.mark.parametrize(
    "listed",
    [
        processes(mine(Unknown("not supported by this GPU")), bobs(0.5)),
        processes(mine(Unknown("not supported by this GPU")), bobs(Unknown("not supported by this GPU"))),
        # The driver attributes the work to no listed process.
        processes(mine(0.0), bobs(0.0)),
        # A process that lived between two looks did the rest.
        processes(mine(0.0), bobs(0.1)),
        processes(bobs(0.1)),
    ],
)
def test_unattributed_work_on_a_shared_gpu_is_unknown(listed: tuple[Process, ...]) -> None:
    assert peak_of_shared(0.5, *listed) == Unknown(
        "it is shared with bob's python (pid 500) and the driver does not report utilization per process"
    )


def test_another_process_of_unknown_share_may_have_done_the_rest() -> None:
    assert peak_of_shared(0.5, mine(0.0), bobs(Unknown("the driver reported 255 %, which is impossible"))) == 0.0


def test_rounding_of_shares_is_tolerated() -> None:
    """A desktop that flickers below one percent, which the driver rounds to nothing."""
    assert peak_of_shared(0.02, mine(0.0), bobs(0.0, name="Xorg")) == 0.0


def test_unused_shared_gpu_is_idle_without_shares() -> None:
    assert peak_of_shared(0.0, mine(Unknown("?")), bobs(Unknown("?"))) == 0.0


def test_unknown_device_stays_unknown() -> None:
    assert peak_of_shared(Unknown("lost"), mine(0.0), bobs(0.5)) == Unknown("lost")


def test_device_counts_where_processes_are_hidden() -> None:
    scope = a_job()
    scope.activities(of_job(a_shared_look(0.0, mine())))
    look = a_look(0.4)
    hidden = msgspec.structs.replace(look.readings[0], processes=Unknown("no permission"))
    assert peaks(scope, msgspec.structs.replace(look, readings=(hidden,))) == {"GPU 0": 0.4}


def test_device_counts_behind_an_mps_server() -> None:
    """It runs the work of its clients: the share is attributed to the server for every client."""
    server = a_process(50, user="root", name="nvidia-cuda-mps-server", utilization=0.9)
    assert peak_of_shared(0.9, mine(0.0), server) == 0.9


# Pids of another namespace


def stranger(pid: int, share: Maybe[float] = 0.5) -> Process:
    why = Unknown(OUTSIDE)
    return a_process(pid, started=why, name=why, user=why, utilization=share)


def test_pids_of_another_namespace_may_be_the_jobs_so_the_device_counts() -> None:
    assert peaks(a_job(), a_shared_look(0.6, stranger(4000), bobs(0.6))) == {"GPU 0": 0.6}


def test_pid_of_another_namespace_never_matches() -> None:
    """Attributed to the job, it would narrow the scope to a GPU that the job does not use."""
    scope = a_job()
    look = a_shared_look(0.6, stranger(100), more=(0.9,))
    assert peaks(scope, look) == {"GPU 0": 0.6, "GPU 1": 0.9}
    assert scope.used == set()


# A job not seen on any GPU yet


@pytest.mark.parametrize("user", ["alice", "root", "1001", Unknown("gone")])
def test_work_of_a_daemon_counts_before_the_job_was_seen(user: Maybe[str]) -> None:
    daemons = a_process(900, user=user, utilization=0.7)
    assert peaks(a_job(), a_shared_look(0.7, daemons)) == {"GPU 0": 0.7}
    assert peaks(a_job(), a_shared_look(0.9, daemons, bobs(0.2))) == {"GPU 0": 0.9}


def test_work_of_another_user_never_counts() -> None:
    assert peaks(a_job(), a_shared_look(0.7, bobs(0.7))) == {"GPU 0": 0.0}


def test_work_of_root_does_not_count_after_the_job_was_seen() -> None:
    desktop = a_process(900, user="root", name="Xorg", utilization=0.3)
    assert peak_of_shared(0.3, mine(0.0), desktop) == 0.0


def test_only_used_gpus_means_none_before_the_job_was_seen() -> None:
    scope = a_job(only_used=True)
    assert peaks(scope, a_look(0.0, 0.0)) == {}
    assert peaks(scope, a_shared_look(0.3, mine(0.3), more=(0.0,))) == {"GPU 0": 0.3}


# Which GPUs


def test_job_is_judged_by_its_visible_gpus() -> None:
    scope = a_job({"CUDA_VISIBLE_DEVICES": "1"})
    assert peaks(scope, a_look(0.9, 0.2, 0.9)) == {"GPU 1": 0.2}
    assert peaks(a_job(), a_look(0.9, 0.2)) == {"GPU 0": 0.9, "GPU 1": 0.2}
    assert peaks(a_job({"CUDA_VISIBLE_DEVICES": ""}), a_look(0.9)) == {}


def test_scope_narrows_to_used_gpus_for_good() -> None:
    scope = a_job({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert peaks(scope, a_shared_look(0.0, more=(0.8, 0.8))) == {"GPU 0": 0.0, "GPU 1": 0.8}
    assert peaks(scope, a_shared_look(0.0, mine(), more=(0.8, 0.8))) == {"GPU 0": 0.0}
    assert peaks(scope, a_shared_look(0.0, more=(0.8, 0.8))) == {"GPU 0": 0.0}
    assert scope.used == {a_gpu(0).uuid}


def test_gpu_used_later_by_the_job_counts_from_then_on() -> None:
    scope = a_job()
    scope.activities(of_job(a_shared_look(0.0, mine(), more=(0.0,))))
    look = a_look(0.0, 0.5)
    taken = msgspec.structs.replace(look.readings[1], processes=(mine(0.5),))
    grown = msgspec.structs.replace(look, readings=(look.readings[0], taken))
    assert peaks(scope, grown) == {"GPU 0": 0.0, "GPU 1": 0.5}


def _held_by_the_job() -> Reading:
    return msgspec.structs.replace(a_reading(a_gpu(1), 0.0), processes=(mine(),))


def test_lost_gpu_of_the_job_is_unknown_and_keeps_its_name() -> None:
    gone = Unknown("the driver does not list it any more")
    used = a_job()
    used.activities(of_job(a_shared_look(0.0, mine(), more=(0.0,))))
    # Without the first GPU, the driver renumbers the second.
    left = Look("test", 101.0, 0.0, (a_gpu(0, uuid=a_gpu(1).uuid),), (a_reading(a_gpu(1), 0.0),))
    assert peaks(used, left) == {"GPU 0": gone}
    both = a_look(0.0, 0.0)
    used.activities(of_job(msgspec.structs.replace(both, readings=(both.readings[0], _held_by_the_job()))))
    assert peaks(used, left) == {"GPU 0": gone, "GPU 1": 0.0}
    seen = a_job()
    seen.activities(of_job(a_look(0.0, 0.0)))
    assert peaks(seen, left) == {"GPU 0": gone, "GPU 1": 0.0}


def test_gpus_of_an_unreadable_machine_are_unknown_with_its_reason() -> None:
    why = Unknown("the driver did not answer in 5 s")
    blind = Look("test", 100.0, 0.0, (), (), problem=why)
    scope = a_job()
    assert peaks(scope, blind) == {}
    short_list = msgspec.structs.replace(a_look(why), problem=why)
    assert peaks(scope, short_list) == {"GPU 0": why}
    assert peaks(scope, a_look(0.0, 0.0)) == {"GPU 0": 0.0, "GPU 1": 0.0}
    assert peaks(scope, blind) == {"GPU 0": why, "GPU 1": why}


# The scope of the whole machine


def machine_peaks(scope: MachineScope, look: Look) -> dict[str, Maybe[float]]:
    return {activity.label: activity.peak for activity in scope.activities(look)}


@pytest.mark.parametrize(
    ("chosen", "labels"),
    [
        ("all", ["GPU 0", "GPU 1", "GPU 2"]),
        ("0,2", ["GPU 0", "GPU 2"]),
        (a_gpu(1).uuid, ["GPU 1"]),
        ("visible", ["GPU 2", "GPU 0"]),
    ],
)
def test_selected_gpus_are_the_scope(chosen: str, labels: list[str]) -> None:
    scope = MachineScope(chosen, {"CUDA_VISIBLE_DEVICES": "2,0"})
    assert sorted(machine_peaks(scope, a_look(0.1, 0.2, 0.3))) == sorted(labels)
    assert [f"GPU {gpu.index}" for gpu in scope.gpus(a_look(0.1, 0.2, 0.3))] == labels


def test_whole_device_counts_in_the_machine_scope() -> None:
    scope = MachineScope("all", {})
    assert machine_peaks(scope, a_shared_look(0.5, mine(0.0), bobs(0.5))) == {"GPU 0": 0.5}


def test_reading_covers_its_span() -> None:
    look = msgspec.structs.replace(a_look(0.5), readings=(a_reading(a_gpu(), 0.5, span=7.5),))
    assert MachineScope("all", {}).activities(look)[0].span == 7.5
    assert a_job().activities(of_job(look))[0].span == 7.5


def test_peak_counts_not_the_mean() -> None:
    burst = msgspec.structs.replace(a_reading(a_gpu()), utilization=Utilization(0.9, 0.01, 100))
    look = msgspec.structs.replace(a_look(0.0), readings=(burst,))
    assert machine_peaks(MachineScope("all", {}), look) == {"GPU 0": 0.9}


def test_missing_gpu_is_refused_at_the_first_look() -> None:
    with pytest.raises(BadInputError, match="there is no GPU 7 here"):
        MachineScope("7", {}).activities(a_look(0.0))


def test_unreadable_machine_is_not_an_invalid_choice() -> None:
    why = Unknown("the driver did not answer in 5 s")
    scope = MachineScope("0,1", {})
    assert scope.activities(Look("test", 1.0, 0.0, (), (), problem=why)) == []
    listed = msgspec.structs.replace(a_look(why, why), problem=why)
    assert machine_peaks(scope, listed) == {"GPU 0": why, "GPU 1": why}
    assert machine_peaks(scope, a_look(0.0, 0.3)) == {"GPU 0": 0.0, "GPU 1": 0.3}


@pytest.mark.parametrize("chosen", ["all", "0,1", "visible"])
def test_lost_selected_gpu_is_unknown(chosen: str) -> None:
    """Left out, "all GPUs are idle" would be true of the others while the job works on the lost one."""
    scope = MachineScope(chosen, {})
    scope.activities(a_look(0.5, 0.0))
    left = Look("test", 101.0, 0.0, (a_gpu(0, uuid=a_gpu(1).uuid),), (a_reading(a_gpu(1), 0.0),))
    assert machine_peaks(scope, left) == {
        "GPU 0": Unknown("the driver does not list it any more"),
        "GPU 1": 0.0,
    }


def test_added_gpu_belongs_to_all_but_not_to_a_typed_choice() -> None:
    everything, typed = MachineScope("all", {}), MachineScope("0", {})
    for scope in (everything, typed):
        scope.activities(a_look(0.0))
    assert machine_peaks(everything, a_look(0.0, 0.6)) == {"GPU 0": 0.0, "GPU 1": 0.6}
    assert machine_peaks(typed, a_look(0.0, 0.6)) == {"GPU 0": 0.0}


def test_recording_keeps_the_gpus_that_the_job_sees_or_uses() -> None:
    scope = a_job({"CUDA_VISIBLE_DEVICES": "1"})
    look = a_look(0.1, 0.2, 0.3)
    scope.observe(look)
    first = scope.recorded(look)
    assert [(gpu.index, one.uuid) for gpu, one in zip(first.gpus, first.readings, strict=True)] == [
        (1, look.gpus[1].uuid)
    ]
    assert scope.recorded(look).gpus is first.gpus
    # One that it uses although it was not given it is a reason to look closer, and what the rule judges.
    used = of_job(a_shared_look(0.5, mine(0.5), more=(0.2, 0.3)))
    scope.observe(used)
    assert [gpu.index for gpu in scope.recorded(used).gpus] == [0, 1]


def test_recording_of_a_job_that_sees_all_gpus_has_all() -> None:
    scope, look = a_job(), a_look(0.1, 0.2)
    scope.observe(look)
    assert scope.recorded(look) is look
