"""Which processes on the GPUs are the job's, and what its supervisor asks to see of the others."""

from typing import cast

from stoker.gpus.model import Gpu, Holder, Look, Maybe, Process, Reading, Unknown
from stoker.gpus.prober import Prober
from stoker.runs.gpu_holders import GpuHolders

_WHY = Unknown("not in this test")


class _Job:
    """Owns these pids, and counts how often it was asked."""

    def __init__(self, *pids: int) -> None:
        self.pids = set(pids)
        self.asked: list[int] = []

    def owns(self, pid: int) -> bool:
        self.asked.append(pid)
        return pid in self.pids


class _Narrowed:
    """Keeps what a prober was asked for."""

    def __init__(self) -> None:
        self.wanted: frozenset[str] = frozenset()
        self.passed_over: frozenset[Holder] = frozenset()

    def narrow(self, wanted: frozenset[str], passed_over: frozenset[Holder]) -> None:
        self.wanted, self.passed_over = wanted, passed_over


def _look(at: float, *processes: tuple[Maybe[int], ...]) -> Look:
    """A GPU for each tuple of start times; pids are 10 for the first process of the first GPU, 11 for the second, …"""
    gpus = tuple(Gpu(f"GPU-{n}", n, "H100", "nvidia", n, 1, f"{n}") for n in range(len(processes)))
    readings = tuple(
        Reading(
            gpu.uuid,
            5.0,
            *(_WHY,) * 7,
            tuple(
                Process(10 * (gpu.index + 1) + place, started, "python", "ada", 1, 0.5)
                for place, started in enumerate(starts)
            ),
            _WHY,
        )
        for gpu, starts in zip(gpus, processes, strict=True)
    )
    return Look("sim", at, at, gpus, readings)


def _narrow(holders: GpuHolders, next_look: float) -> _Narrowed:
    narrowed = _Narrowed()
    holders._gpus = set()
    holders.narrow(cast("Prober", narrowed), {"GPU-0"}, next_look)
    return narrowed


def test_processes_of_the_job_are_found_on_every_gpu() -> None:
    job = _Job(10, 20)
    holders = GpuHolders(job)
    assert holders.own_pids(_look(0.0, (1,), (1, 1), (1,))) == (10, 20)
    assert _narrow(holders, 5.0).passed_over == {(21, 1), (30, 1)}


def test_processes_are_asked_about_once_and_foreign_ones_again_ever_more_seldom() -> None:
    job = _Job(10)
    holders = GpuHolders(job)
    for look in range(200):
        at = 5.0 * look
        assert holders.own_pids(_look(at, (1,), (1,))) == (10,)
        _narrow(holders, at + 5.0)
    assert job.asked.count(10) == 1
    assert 3 <= job.asked.count(20) <= 7


def test_foreign_process_omitted_from_looks_is_queried_again_when_it_returns() -> None:
    job = _Job(10)
    holders = GpuHolders(job)
    holders.own_pids(_look(0.0, (1,), (1,)))
    assert (20, 1) in _narrow(holders, 5.0).passed_over
    assert (20, 1) not in _narrow(holders, 31.0).passed_over
    job.pids.add(20)  # it could not be read before
    assert holders.own_pids(_look(31.0, (1,), (1,))) == (10, 20)
    assert not _narrow(holders, 36.0).passed_over


def test_foreign_process_that_is_gone_is_forgotten() -> None:
    holders = GpuHolders(_Job(10))
    holders.own_pids(_look(0.0, (1,), (1,)))
    _narrow(holders, 31.0)  # the look at 31 s shows it if it is there
    holders.own_pids(_look(31.0, (1,)))
    assert not _narrow(holders, 36.0).passed_over


def test_new_process_with_a_reused_pid_is_asked_about() -> None:
    job = _Job()
    holders = GpuHolders(job)
    assert holders.own_pids(_look(0.0, (), (1,))) == ()
    job.pids.add(20)
    assert holders.own_pids(_look(5.0, (), (2,))) == (20,)


def test_process_of_another_namespace_is_nobodys() -> None:
    job = _Job(10)
    assert GpuHolders(job).own_pids(_look(0.0, (Unknown("of another namespace"),))) == ()
    assert not job.asked
