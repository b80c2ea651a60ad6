"""Machines: one per home and host over restarts, and unknown GPUs are never idle."""

from stoker.queue.model import View
from stoker.status.machines import machines_of
from tests.support.status_parts import GIB, NOW, attempt, job, worker, worker_gpu


def test_several_starts_in_one_home_are_one_machine_the_newest() -> None:
    old, new = worker("box-1", started=NOW - 900, ago=600), worker("box-2", started=NOW - 60)
    other = worker("home-9", started=NOW - 30)
    assert [machine.worker for machine in machines_of([new, other, old], [], {}, NOW)] == ["box-2", "home-9"]


def test_machine_lost_for_a_day_is_hidden_unless_it_has_jobs() -> None:
    gone = worker(ago=90_000)
    assert machines_of([gone], [], {}, NOW) == ()
    (found,) = machines_of([gone], [attempt(worker="box-0")], {}, NOW)
    assert not found.there


def test_gpu_of_a_lost_worker_is_unknown() -> None:
    view = View(gpus=(worker_gpu(jobs=("0a0a0a0a",)),), left=True)
    (found,) = machines_of([worker(ago=300, view=view)], [], {}, NOW)
    (gpu,) = found.gpus
    assert (found.there, found.left) == (False, True)
    assert (gpu.state, gpu.utilization, gpu.memory_used) == ("unknown", None, None)
    assert (gpu.name, gpu.memory_total, gpu.jobs) == ("A100", 80 * GIB, ("0a0a0a0a",))
    assert gpu.note == "its worker was last seen 5 min ago"


def test_unreadable_and_absent_gpus_are_passed_on() -> None:
    unread = View(gpus=(worker_gpu(state="job", unread_since=NOW - 60),))
    none = View(absent=True, problem="there is no NVIDIA driver")
    first, second = machines_of([worker("a-1", view=unread), worker("b-1", view=none)], [], {}, NOW)
    assert ([(gpu.state, gpu.unread_since) for gpu in first.gpus], first.absent) == ([("job", NOW - 60)], False)
    assert second.absent


def test_gpu_has_its_user() -> None:
    jobs = {
        name: job("running", id=name, submitter=whom) for name, whom in [("a", "alice"), ("b", "bob"), ("c", "bob")]
    }
    gpus = (
        worker_gpu(0, state="job", jobs=("a", "b", "c")),
        worker_gpu(1, state="background", user="folding"),
        worker_gpu(2, state="job", jobs=("unknown",)),
    )
    (found,) = machines_of([worker(view=View(gpus=gpus[::-1]))], [], jobs, NOW)
    assert [gpu.user for gpu in found.gpus] == ["alice, bob", "folding", ""]
