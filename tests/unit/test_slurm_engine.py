"""Which jobs the Slurm engine ends in Slurm."""

from types import SimpleNamespace
from typing import Any

import pytest

from stoker.engines.slurm.answers import SlurmJob
from stoker.engines.slurm.cluster import Cluster
from stoker.engines.slurm.engine import SlurmEngine, _on_nodes

LEASE = 600.0


def slurm_job(number: int, state: str = "RUNNING") -> SlurmJob:
    return SlurmJob(
        id=number, state=state, reason="", comment="", name="", nodes="", node_count=1, partition="", user="",
        submitted=None, start=None, end=None, time_limit=None, gres="",
    )  # fmt: skip


def engine(jobs: dict[str, SlurmJob], **attempts: int) -> SlurmEngine:
    """It knows these attempts by their Slurm jobs; `jobs` is what Slurm lists."""
    found: Any = object.__new__(SlurmEngine)
    found._options = SimpleNamespace(lease=LEASE)
    found._has_found_all = True
    found._jobs = jobs
    found._attempts = {name: SimpleNamespace(id=name, slurm_job=job) for name, job in attempts.items()}
    found._to_cancel = {}
    found._cancelling, found._problem_logged, found._ended = None, False, {}
    found._strays = {}
    found._forgotten = ["over"]
    return found  # type: ignore[no-any-return]


def test_job_of_an_attempt_that_is_over_is_ended_at_once_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine({"over": slurm_job(7, "PENDING"), "known": slurm_job(8, "PENDING")}, known=8)
    monkeypatch.setattr("stoker.engines.slurm.engine.time.monotonic", lambda: 1000.0)
    found._cancel_strays()
    assert found._to_cancel == {7: "over"}


def test_job_of_an_earlier_worker_whose_directory_is_seen_late_is_not_ended_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = engine({"unseen": slurm_job(7, "PENDING")})
    monkeypatch.setattr("stoker.engines.slurm.engine.time.monotonic", lambda: 1000.0)
    found._cancel_strays()
    assert found._to_cancel == {}


def test_job_whose_end_slurm_does_not_notice_is_ended_after_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine({"over": slurm_job(9), "ends": slurm_job(10, "COMPLETING"), "ended": slurm_job(11, "FAILED")})
    seen = []
    for moment in (1000.0, 1000.0 + LEASE - 1, 1000.0 + LEASE):
        monkeypatch.setattr("stoker.engines.slurm.engine.time.monotonic", lambda moment=moment: moment)
        found._cancel_strays()
        seen.append(set(found._to_cancel))
    assert seen == [set(), set(), {9}]


def test_nodes_are_asked_for_soon_after_a_job_began_or_ended_and_rarely_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    now = 0.0
    never = SimpleNamespace(has_ended=lambda: False, fileno=lambda: -1, due=lambda: 0.0)

    def nodes() -> Any:
        asked.append(now)
        return never

    monkeypatch.setattr("stoker.engines.slurm.cluster.client.nodes", nodes)
    monkeypatch.setattr("stoker.engines.slurm.cluster.time.monotonic", lambda: now)
    cluster: Any = object.__new__(Cluster)
    cluster.nodes, cluster.config, cluster._asking = (), SimpleNamespace(), {}
    cluster._ask_at = cluster._asked_at = 0.0
    for second in range(120):
        now = float(second)
        if second in {31, 50, 51, 52}:
            cluster.ask_soon()
        cluster.step()
        cluster._asking = {}
    assert asked == [0.0, 30.0, 38.0, 50.0, 58.0, 88.0, 118.0]
    waits, runs = {"a": slurm_job(1, "PENDING")}, {"a": slurm_job(1), "b": slurm_job(2, "PENDING")}
    assert _on_nodes({}) == _on_nodes(waits) != _on_nodes(runs)


def test_job_of_another_attempt_with_the_same_id_is_never_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that was killed has forgotten which ids it gave away, and scancel may have to wait for it."""
    ended: list[int] = []
    monkeypatch.setattr("stoker.engines.slurm.engine.client.scancel", ended.extend)
    found = engine({}, old=7, other=9)
    for attempt in found._attempts.values():
        found._end_in_slurm(attempt)
    found._attempts["new"] = SimpleNamespace(id="new", slurm_job=7)  # type: ignore[assignment]
    found._cancel()
    assert ended == [9]
