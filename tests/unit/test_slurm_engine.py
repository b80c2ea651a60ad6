"""Which jobs the Slurm engine starts and ends in Slurm."""

from types import SimpleNamespace
from typing import Any

import pytest

from stoker.engines.attempt import AttemptResult
from stoker.engines.slurm.answers import SlurmClosed, SlurmJob
from stoker.engines.slurm.cluster import Cluster
from stoker.engines.slurm.engine import SlurmEngine, SlurmEngineOptions, _on_nodes
from stoker.queue.model import ReadyJob

LEASE = 600.0


def slurm_job(number: int, state: str = "RUNNING") -> SlurmJob:
    return SlurmJob(
        id=number, state=state, reason="", comment="", name="", nodes="", node_count=1, partition="", user="",
        submitted=None, start=None, end=None, time_limit=None, gres="",
    )  # fmt: skip


def engine(jobs: dict[str, SlurmJob], **attempts: int) -> SlurmEngine:
    """It knows these attempts by their Slurm jobs; `jobs` is what Slurm lists."""
    found: Any = object.__new__(SlurmEngine)
    found._options = SimpleNamespace(lease=LEASE, labels=())
    found._has_found_all = True
    found._jobs = jobs
    found._attempts = {name: SimpleNamespace(id=name, slurm_job=job) for name, job in attempts.items()}
    found._to_cancel = {}
    found._cancelling, found._problem_logged, found._ended = None, False, {}
    found._strays = {}
    found._forgotten = ["over"]
    return found  # type: ignore[no-any-return]


def ready_job(name: str, **slurm: str) -> ReadyJob:
    return ReadyJob(id=name, command=("true",), gpus=0, slurm=slurm, shape=name, position=0.0, submitted=0.0)


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


def test_job_for_a_closed_partition_waits_and_is_tried_again_while_others_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("stoker.engines.slurm.engine.time.monotonic", lambda: now)
    found: Any = engine({})
    found._own = SlurmEngineOptions(partition="main")
    found._problem, found._full_until, found._closed, found._to_submit = None, 0.0, {}, {}
    found._cluster = SimpleNamespace(why_never=lambda *_: None)
    results: list[AttemptResult] = []
    closed = SimpleNamespace(destination=("spare", None), refused=results.append)
    found._attempts = {"refused": closed}

    def refuse() -> str:
        raise SlurmClosed("the partition takes no new jobs")

    found._submitting = {"refused": SimpleNamespace(has_ended=lambda: True, result=refuse)}
    found._take_submissions()
    assert [(one.outcome, one.cause) for one in results] == [("requeued", "start")], "no trouble of the machine"
    found._attempts = {}
    jobs = [ready_job("a", partition="spare"), ready_job("b"), ready_job("c", partition="spare", reservation="course")]
    decided = found.decide(jobs, 0.0)
    assert [start.job for start in decided.start] == ["b", "c"]
    assert found._waiting == {"a": "waits until Slurm takes jobs there again: the partition takes no new jobs"}
    now += 120.0
    assert [start.job for start in found.decide(jobs, 0.0).start] == ["a", "b", "c"]


def test_jobs_reach_a_partition_one_after_the_other_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = engine({})
    found._attempts = {
        name: SimpleNamespace(
            id=name,
            result=None,
            destination=("spare" if name == "spare" else None, None),
            needs_code=name == "b",
            spec=SimpleNamespace(code="code"),
            record=SimpleNamespace(directory="."),
        )
        for name in ("a", "b", "spare", "c")
    }
    found._to_submit = {name: [name] for name in found._attempts}
    found._submitting, found._fetching, found._options = {}, {}, SimpleNamespace(queue="/nowhere/queue.db")
    submitted: list[str] = []

    def run_sbatch(attempt: Any, words: list[str]) -> None:
        submitted.extend(words)
        found._submitting[attempt.id] = None

    fetched = SimpleNamespace(has_ended=lambda: True, result=lambda: "")
    monkeypatch.setattr(found, "_run_sbatch", run_sbatch)
    monkeypatch.setattr("stoker.engines.slurm.engine.fetch_command", lambda *_: ([], {}))
    monkeypatch.setattr("stoker.engines.slurm.engine.Running", lambda *_, **__: fetched)
    # The snapshot of `b` arrives after `a` and `spare` are in Slurm; `c` waits for its turn.
    for ended, expected in (("", "a spare"), ("spare", ""), ("a", ""), ("code", "b"), ("b", "c"), ("c", "")):
        if ended == "code":
            found._take_snapshots()
        found._submitting.pop(ended, None)
        submitted.clear()
        found._submit()
        assert submitted == expected.split(), ended
    assert found._to_submit == {}


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
    assert asked == [0.0, 30.0, 42.0, 54.0, 84.0, 114.0]
    waits, runs = {"a": slurm_job(1, "PENDING")}, {"a": slurm_job(1), "b": slurm_job(2, "PENDING")}
    assert _on_nodes({}) == _on_nodes(waits) != _on_nodes(runs)


def test_slurm_is_asked_later_the_more_jobs_it_lists_also_after_a_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.engines.slurm.engine.time.monotonic", lambda: 1000.0)
    asked = []
    for count in (0, 500, 100_000):
        found: Any = engine({str(number): slurm_job(number) for number in range(count)})
        found._asked_at, found._ask_at = 1000.0, 2000.0
        submitted = SimpleNamespace(has_ended=lambda: True, result=lambda: "7\n")
        found._submitting = {"new": submitted}
        found._attempts = {"new": SimpleNamespace(result=None, submitted_as=lambda _: None)}
        found._take_submissions()
        asked.append(found._ask_at - 1000.0)
    assert asked == [4.0, 6.5, 20.0]


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
