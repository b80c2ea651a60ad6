"""The overview of a real queue: what runs, waits and ended, and the same few questions however many jobs there are."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.errors import BadInputError
from stoker.queue import AttemptDetails, JobSpec, Store, Usage, View, WorkerGpu, init_queue
from stoker.queue.driver import Parameters, Row
from stoker.queue.listing import MOST_QUEUED
from stoker.queue.model import ClusterNode, DeferredStart, Failure
from stoker.runs.record import Record, Status
from stoker.status.detail import read_detail
from stoker.status.log_follower import LogFollower, queries_on
from stoker.status.model import MOST_ENDED, MOST_RUNNING, MOST_WAITING, Progress, Snapshot
from stoker.status.snapshot import SnapshotBuilder
from tests.support.queue_jobs import end, start, submit
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

BAR = " 45%|####5     | 45/100 [00:10<00:12,  4.40it/s]"


@pytest.fixture(params=["sqlite", "postgres"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "queue.db")
    with init_queue(url) as store:
        yield store


@pytest.fixture
def here() -> Iterator[Store]:
    """Where it does not matter which database it is."""
    with init_queue() as store:
        yield store


@pytest.fixture
def home() -> Path:
    return Path(os.environ["STOKER_HOME"])


def greet(store: Store, worker: str = "box-1", host: str = "gpu-box", gpus: int = 2) -> None:
    cards = tuple(
        WorkerGpu(uuid=f"{host}-{index}", index=index, name="A100", state="job", since=1.0) for index in range(gpus)
    )
    store.workers.heartbeat(worker, host, View(gpus=cards, simulated=True))


def claim(store: Store, job: str, gpus: list[str], worker: str = "box-1") -> str:
    attempt = store.attempts.claim([job], worker, gpus, 600.0)
    assert attempt is not None
    return attempt.id


def directory(home: Path, job: str, number: int = 1) -> Path:
    place = home / "attempts" / f"{job}-{number}"
    place.mkdir(parents=True)
    return place


def observed(store: Store, home: Path) -> Snapshot:
    return SnapshotBuilder(home).observe(store)


def test_snapshot_has_everything(queue: Store, home: Path) -> None:
    greet(queue)
    local, remote = submit(queue, "local", "remote", submitter="alice")
    first, later, held = *submit(queue, "first", "later"), *submit(queue, "kept", hold=True)
    (bound,) = queue.jobs.submit([JobSpec(command="true", name="bound", after=(first,))])
    (urgent,) = submit(queue, "urgent", priority=5)
    hung, fine = submit(queue, "hung", "fine")
    end(queue, fine, "succeeded")
    stopped = start(queue, hung)
    queue.attempts.finish(stopped, "failed", 124, "it was idle")
    queue.attempts.write_details(stopped, AttemptDetails(cause="idle", rule="idle"))
    claim(queue, local, ["gpu-box-1"])
    (directory(home, local) / "output").write_text(f"begins\n{BAR}\n")
    far = claim(queue, remote, ["gpu-box-0"], "box-0")
    queue.logs.write(far, "words\n\x1b[31mstep 3/10\x1b[0m\nthe last line\n")
    queue.attempts.snooze(far, 600.0, "alice")
    queue.usage.write([Usage(host="gpu-box", gpu="gpu-box-0", minute=int(queue.clock() // 60), seconds={"job": 36.0})])

    seen = observed(queue, home)

    assert seen.counts == {"running": 2, "queued": 4, "held": 1, "succeeded": 1, "failed": 1}
    assert seen.simulated
    runs = {one.job.id: one for one in seen.running}
    assert runs[local].progress == Progress(fraction=0.45, text="45/100 [00:10<00:12, 4.40it/s]", remaining=12.0)
    assert (runs[local].host, runs[local].gpus, runs[local].why.kind) == ("gpu-box", ("1",), "running")
    assert runs[remote].last_line == "the last line"
    assert runs[remote].progress == Progress(fraction=0.3, text="step 3/10")
    assert runs[remote].host == "worker box-0"
    assert runs[remote].snoozed_until == pytest.approx(seen.now + 600, abs=30)
    assert runs[local].snoozed_until is None
    assert [one.job.id for one in seen.waiting] == [urgent, first, later, held, bound]
    kinds = {one.job.id: one.why.kind for one in seen.waiting}
    assert (kinds[urgent], kinds[first], kinds[held], kinds[bound]) == ("next", "waits", "held", "after")
    # They may have ended within the same millisecond.
    assert {one.job.id: one.stopped for one in seen.ended} == {hung: "idle", fine: ""}
    assert [point.job for point in seen.health.points] == [hung]
    assert [gpu.user for gpu in seen.machines[0].gpus] == ["", ""]
    assert seen.hours.jobs == pytest.approx(0.01)
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Snapshot) == seen


def test_number_of_queries_does_not_depend_on_the_number_of_jobs(
    here: Store, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = here._driver.fetch_text

    def counted(sql: str, parameters: Parameters) -> list[Row]:
        asked.append(sql)
        return ask(sql, parameters)

    monkeypatch.setattr(here._driver, "fetch_text", counted)

    def questions() -> int:
        asked.clear()
        observed(here, home)
        return len(asked)

    def more(count: int) -> None:
        ids = submit(here, *(f"job {number}" for number in range(3 * count)))
        for number, name in enumerate(ids[: 2 * count]):
            end(here, name) if number % 2 else start(here, name)
        here.jobs.submit([JobSpec(command="true", after=(name,)) for name in ids[2 * count :]])

    greet(here)
    more(2)
    few = questions()
    more(2 * max(MOST_RUNNING, MOST_WAITING, MOST_ENDED))
    assert questions() == few
    seen = observed(here, home)
    assert (len(seen.running), len(seen.waiting), len(seen.ended)) == (MOST_RUNNING, MOST_WAITING, MOST_ENDED)


def test_recent_change_is_in_the_next_snapshot(here: Store, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that is busy must not make the questions of so small a queue look dear, and so be asked seldom.
    monkeypatch.setattr("stoker.status.snapshot._CHEAP", math.inf)
    observer = SnapshotBuilder(home)
    (name,) = submit(here, "one")
    end(here, name)
    assert observer.observe(here).counts == {"failed": 1}
    here.jobs.retry([name])
    seen = observer.observe(here)
    assert seen.counts == {"queued": 1}
    assert not any("failed" in point.message for point in seen.health.points)


def test_many_queued_jobs_are_counted_once_in_a_while(here: Store, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Counting took long, so it is not repeated soon.
    monkeypatch.setattr("stoker.status.snapshot._CHEAP", 0.0)
    monkeypatch.setattr("stoker.status.snapshot._SHARE", 1e-9)
    here.jobs.submit([JobSpec(command="true")] * (MOST_QUEUED + 2))
    builder = SnapshotBuilder(home)
    assert builder.observe(here).counts == {"queued": MOST_QUEUED + 2}
    here.jobs.submit([JobSpec(command="true"), JobSpec(command="true", hold=True)])
    assert builder.observe(here).counts == {"queued": MOST_QUEUED + 2, "held": 1}


@pytest.mark.parametrize(("share", "counts"), [(1e-9, [1, 2, 3]), (math.inf, [1, 1, 1, 2, 2, 2, 3, 3, 3])])
def test_failures_that_take_long_to_count_are_counted_again_when_there_is_a_new_one(
    here: Store, home: Path, monkeypatch: pytest.MonkeyPatch, share: float, counts: list[int]
) -> None:
    monkeypatch.setattr("stoker.status.snapshot._CHEAP", math.inf)
    monkeypatch.setattr("stoker.status.snapshot._RECOUNT_SHARE", share)
    really, counted = here.jobs.count_failures, list[int]()

    def count(kind: Failure, at: float) -> int:
        counted.append(really(kind, at))
        return counted[-1]

    monkeypatch.setattr(here.jobs, "count_failures", count)
    builder = SnapshotBuilder(home)
    for name in submit(here, "a", "b", "c"):
        end(here, name)
        for _ in range(3):
            builder.observe(here)
    assert counted == counts


def test_stopped_worker_differs_from_a_lost_one(queue: Store, home: Path) -> None:
    greet(queue, "box-1", "left-box")
    greet(queue, "other-1", "lost-box")
    before = queue.clock()
    queue.workers.farewell("box-1")
    queue._driver.fetch_text("UPDATE stoker_workers SET seen = seen - 600 WHERE id = 'other-1'", {})
    seen = observed(queue, home)
    assert {machine.host: (machine.there, machine.left) for machine in seen.machines} == {
        "left-box": (False, True),
        "lost-box": (False, False),
    }
    assert before <= next(machine.seen for machine in seen.machines if machine.left) <= queue.clock()
    assert [(point.level, point.host) for point in seen.health.points if point.host] == [("bad", "lost-box")]
    assert {gpu.state for machine in seen.machines for gpu in machine.gpus} == {"unknown"}


def test_times_of_gpu_states_do_not_depend_on_the_workers_clock(here: Store, home: Path) -> None:
    observer = SnapshotBuilder(home)
    greet(here)
    before = observer.observe(here).now
    behind = WorkerGpu(uuid="gpu-box-0", index=0, name="A100", state="job", since=1.0, unread_since=before - 600)
    here.workers.heartbeat("box-1", "gpu-box", View(gpus=(behind,)))
    ((gpu,),) = (machine.gpus for machine in observer.observe(here).machines)
    assert (gpu.since, gpu.unread_since) == (1.0, before)


def test_unchanged_output_is_not_parsed_again(here: Store, home: Path) -> None:
    greet(here)
    (name,) = submit(here, "one")
    attempt = claim(here, name, [])
    observer = SnapshotBuilder(home)
    here.logs.write(attempt, "step 1/10\n")
    assert observer.observe(here).running[0].last_line == "step 1/10"
    output = directory(home, name) / "output"
    for step in (2, 3):
        output.write_text(f"step {step}/10\n")
        assert observer.observe(here).running[0].last_line == f"step {step}/10"


def test_whole_log_is_read_locally_and_the_tail_elsewhere(here: Store, home: Path, tmp_path: Path) -> None:
    (name,) = submit(here, "one")
    here.logs.write(claim(here, name, []), "the end\n")
    (directory(home, name) / "output").write_text("all\nof it\n")
    (attempt,) = here.attempts.of(name)
    for place, is_here, text in [(home, True, b"all\nof it\n"), (tmp_path, False, b"the end\n")]:
        follower = LogFollower(attempt, place)
        assert follower.read(queries_on(here)).finished == text
        assert follower.source == ("file" if is_here else "tail")
        follower.close()


# One job


def test_detail_has_all_attempts(queue: Store, home: Path, tmp_path: Path) -> None:
    greet(queue)
    (name,) = submit(queue, "one", retries=1, backoff=0.0)
    first = claim(queue, name, ["gpu-box-1"])
    queue.attempts.finish(first, "failed", 124, "it was idle")
    queue.attempts.write_details(first, AttemptDetails(cause="idle", rule="idle", report="# Why", fit={"size": 8}))
    second = claim(queue, name, ["gpu-box-0"])
    queue.logs.write(second, f"{BAR}\n")
    queue.attempts.snooze(second, 600.0, "alice")

    detail = read_detail(queue, name, tmp_path)

    assert (detail.job.id, detail.why.kind) == (name, "running")
    assert [(one.host, one.gpus, one.whole_here) for one in detail.attempts] == [
        ("gpu-box", ("1",), False),
        ("gpu-box", ("0",), False),
    ]
    assert detail.attempts[0].details == AttemptDetails(cause="idle", rule="idle", report="# Why", fit={"size": 8})
    assert detail.attempts[0].stopped == "idle"
    assert detail.last is not None
    assert detail.last.details == AttemptDetails()
    assert detail.progress is not None
    assert detail.progress.remaining == 12.0
    assert detail.snoozed_until == pytest.approx(detail.now + 600, abs=30)


def test_metrics_and_last_lines_are_of_the_last_attempt(queue: Store, home: Path, tmp_path: Path) -> None:
    greet(queue)
    shown, plain = queue.jobs.submit(
        [JobSpec(command="train", metrics=("val_acc", "loss")), JobSpec(command="train", metrics=())]
    )
    assert read_detail(queue, shown, tmp_path).figures == {}
    attempts = [claim(queue, job, []) for job in (shown, plain)]
    for attempt in attempts:
        queue.logs.write(attempt, "loss=9\nval_acc=0.5\n" + "more\n" * 1000 + "loss=nan lr=1\nstep=7 loss=0.25 lr=1\n")
    runs = {one.job.id: one.figures for one in observed(queue, home).running}
    assert runs == {shown: {"val_acc": 0.5, "loss": 0.25}, plain: {}}
    queue.attempts.finish(attempts[1], "failed", 1)
    ended = read_detail(queue, plain, tmp_path)
    assert ended.last_lines == ("more", "more", "loss=nan lr=1", "step=7 loss=0.25 lr=1")
    assert (ended.figures, ended.progress) == ({}, None)
    assert read_detail(queue, shown, tmp_path).figures == {"val_acc": 0.5, "loss": 0.25}


def test_details_missing_in_the_queue_are_read_from_the_local_record(here: Store, home: Path) -> None:
    (name,) = submit(here, "one")
    attempt = claim(here, name, [])
    record = Record(directory(home, name))
    record.write_status(Status(state="ended", ending="idle", rule="idle"))
    record.write_report("# Why\n")
    (record.directory / "output").write_text("words\n")
    (result,) = read_detail(here, name, home).attempts
    assert (result.details.cause, result.details.report, result.whole_here) == ("idle", "# Why\n", True)
    here.attempts.write_details(attempt, AttemptDetails(cause="time limit", report="result"))
    (result,) = read_detail(here, name, home).attempts
    assert (result.details.cause, result.details.report) == ("time limit", "result")


def test_waiting_job_has_a_reason_and_its_dependencies(here: Store, home: Path) -> None:
    greet(here)
    first, second = submit(here, "first", "second")
    (bound,) = here.jobs.submit([JobSpec(command="true", after=(first,))])
    assert read_detail(here, bound, home).needs == {first: "queued"}
    assert read_detail(here, second, home).why.reason == (
        "waits for its turn: 2nd in line, starts in less than a minute"
    )
    assert read_detail(here, second, home).last is None


def test_waiting_jobs_have_their_place_and_start_from_similar_jobs(here: Store, home: Path) -> None:
    alike = here.jobs.submit([JobSpec(command=f"train --seed {seed}") for seed in range(3)])
    for name in alike:
        here.attempts.finish(claim(here, name, []), "succeeded", 0)
    greet(here, gpus=1)
    runs, *wait = here.jobs.submit([JobSpec(command=f"train --seed {seed}") for seed in range(4)])
    claim(here, runs, ["gpu-box-0"])
    # As if each of them had taken ten minutes.
    here._driver.fetch_text("UPDATE stoker_jobs SET started = ended - 600 WHERE state = 'succeeded'", {})
    builder = SnapshotBuilder(home)
    seen = builder.observe(here)
    started = here.jobs.get(runs).started or 0.0
    found = [one.why.forecast for one in seen.waiting]
    assert [one.place for one in found if one is not None] == [1, 2, 3]
    starts = [one.starts for one in found if one is not None]
    assert starts == pytest.approx([started + 600, started + 1200, started + 1800], abs=5)
    assert [one.why.word for one in seen.waiting[1:]] == [
        "2nd in line, in about 20 min",
        "3rd in line, in about 30 min",
    ]
    again = read_detail(here, wait[2], home).why
    assert again.forecast == found[2]
    assert again.reason == "waits for its turn: 3rd in line, starts in about 30 min"
    # Estimates are kept for some seconds, but not when the line changes.
    here.jobs.hold([wait[0]])
    held, *others = builder.observe(here).waiting
    assert held.why.forecast is None
    assert [one.why.forecast for one in others] == found[:2]


def test_unknown_job_is_refused(here: Store, home: Path) -> None:
    with pytest.raises(BadInputError, match="there is no job"):
        read_detail(here, "ffffffff", home)


# With a worker


def test_real_worker_and_its_job_are_in_the_snapshot(site: WorkSite) -> None:
    observer = SnapshotBuilder(site.home)
    name = site.submit(f"echo 'step 3/10'; {site.until('flag')}", gpus=1, name="train", submitter="alice")
    worker = site.work().ready()

    def progress() -> Snapshot | None:
        seen = observer.observe(site.store)
        works = any(gpu.state == "job" for machine in seen.machines for gpu in machine.gpus)
        return seen if works and seen.running and seen.running[0].progress is not None else None

    seen = wait_for(progress, named="that the job says how far it is")
    (machine,) = seen.machines
    assert (machine.there, machine.simulated, len(machine.gpus)) == (True, True, 2)
    assert [gpu.user for gpu in machine.gpus if name in gpu.jobs] == ["alice"]
    assert seen.health.points == () or "nothing to do" in seen.health.headline
    site.create_flag("flag")
    site.wait_until(name, "succeeded")
    assert worker.stop() == 0
    (machine,) = observer.observe(site.store).machines
    assert machine.left


def test_pending_jobs_come_after_those_that_run_and_are_counted_apart(queue: Store, home: Path) -> None:
    queue.workers.heartbeat("login-1", "login", View(cluster="hpc", nodes=(ClusterNode(name="node1", gpus=4),)))
    runs, *waits = submit(queue, "runs", *(f"waits-{number}" for number in range(3)))
    attempts = {}
    for job in (runs, *waits):
        attempt = queue.attempts.claim([job], "login-1", [], 600.0, pending=True)
        assert attempt is not None
        attempts[job] = attempt.id
    queue.attempts.annotate({attempts[runs]: DeferredStart(False, "Slurm job 1 on node1", queue.clock())})
    found = observed(queue, home)
    assert [item.job.name for item in found.running] == ["runs", "waits-2", "waits-1", "waits-0"]
    assert [item.why.kind for item in found.running] == ["running", "pending", "pending", "pending"]
    assert (found.begun, found.pending, found.counts) == (1, 3, {"running": 4})
    assert found.running[0].where == "Slurm job 1 on node1"
    (machine,) = found.machines
    assert (machine.cluster, machine.nodes) == ("hpc", (ClusterNode(name="node1", gpus=4),))
    assert [job.name for job in queue.jobs.find(states=["running"], limit=1)] == ["runs"]
