"""`stoker watch --slurm`, the pure parts: jobs, exemptions, warnings, usage, and what agents send."""

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engines.slurm.answers import expand_hosts
from stoker.engines.slurm.step import CHUNK, Reassembly, frames
from stoker.engines.slurm.watch.agent import JobProcesses
from stoker.engines.slurm.watch.jobs import (
    _FIELDS,
    ClusterJob,
    Exemptions,
    kept_until,
    parse_jobs,
    squeue_command,
)
from stoker.engines.slurm.watch.notices import (
    REMEMBERED_FOR,
    TRY_AGAIN_AFTER,
    Notice,
    NoticeStep,
    OwnerNotices,
    warning_text,
)
from stoker.engines.slurm.watch.usage import KEPT_DAYS, DailyUsage, last_monday, table_text, usage_rows
from stoker.errors import BadInputError
from stoker.rules.judge import Judgement
from stoker.rules.rule import Verdict
from stoker.settings import Exemption, SlurmWatch
from tests.support.deep import examples

NOON = time.mktime((2026, 11, 18, 12, 0, 0, 0, 0, -1))  # a Wednesday
NOTICE = 900.0


def a_job(**changes: Any) -> ClusterJob:
    return msgspec.structs.replace(
        ClusterJob(id=7, user="alice", name="train", partition="gpu", nodes=("n1",), gpus=2, started=NOON), **changes
    )


# The list of jobs


def a_line(**values: str) -> str:
    usual = {
        "JobID": "7",
        "UserName": "alice",
        "Partition": "gpu",
        "NumNodes": "2",
        "NumTasks": "4",
        "StartTime": "1794989101",
        "BatchFlag": "1",
        "tres-per-node": "gres:gpu:2",
        "NodeList": "n[1-2]",
        "Name": "train",
    }
    found = {**usual, **{name.replace("_", "-"): value for name, value in values.items()}}
    return b"".join(found.get(name, "N/A").encode()[:width].ljust(width) for name, width in _FIELDS).decode() + "\n"


def test_job_is_read_with_all_its_gpus() -> None:
    [job] = parse_jobs(a_line(Comment="a note", Account="lab", QOS="high"))
    assert job == ClusterJob(
        id=7,
        user="alice",
        name="train",
        partition="gpu",
        account="lab",
        qos="high",
        comment="a note",
        nodes=("n1", "n2"),
        gpus=4,
        started=1794989101.0,
        interactive=False,
    )
    assert job.key == "7@1794989101"


@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ({"tres_alloc": "cpu=4,gres/gpu=3,node=2"}, 3),
        ({"tres_alloc": "gres/gpu=3,gres/gpu:a100=3"}, 3),
        ({"tres_alloc": "gres/gpu:a100=3"}, 3),
        ({"tres_per_node": "gres:gpu"}, 2),
        ({"tres_per_node": "gres/gpu:a100:4"}, 8),
        ({"tres_per_node": "gres:gpu:h100:1(S:0)"}, 2),
        ({"tres_per_node": "N/A", "tres_per_job": "gres:gpu:5"}, 5),
        ({"tres_per_node": "N/A", "tres_per_task": "gres:gpu:1"}, 4),
    ],
)
def test_gpus_are_counted_for_every_form_of_request(fields: dict[str, str], gpus: int) -> None:
    assert parse_jobs(a_line(**fields))[0].gpus == gpus


def test_jobs_without_gpus_are_left_out() -> None:
    assert parse_jobs(a_line(tres_per_node="N/A") + a_line(tres_per_node="gres:nic:2") + "\n") == []


def test_name_cannot_pose_as_another_field() -> None:
    [job] = parse_jobs(a_line(Name="x" * 300, Comment="UserName=root|ü" * 20))
    assert (job.user, job.name) == ("alice", "x" * 200)


def test_interactive_job_is_known() -> None:
    assert parse_jobs(a_line(BatchFlag="0"))[0].interactive


def test_answer_that_is_no_list_is_refused() -> None:
    with pytest.raises(ValueError, match="a line of 5 bytes"):
        parse_jobs("hello\n")


def test_jobs_are_asked_for_by_user_or_all() -> None:
    assert "--user=alice" in squeue_command("alice")
    assert not [word for word in squeue_command(None) if word.startswith("--user")]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("gpu1", ("gpu1",)),
        ("gpu[08-10]", ("gpu08", "gpu09", "gpu10")),
        ("a[1,3-4],b", ("a1", "a3", "a4", "b")),
        ("r[1-2]n[1-2]x", ("r1n1x", "r1n2x", "r2n1x", "r2n2x")),
    ],
)
def test_hostlist_is_expanded(text: str, names: tuple[str, ...]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize("text", ["a[x]", "a[1-999999999]"])
def test_hostlist_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"hostlist|too long"):
        expand_hosts(text)


# Who is left alone


def why(job: ClusterJob, *exempt: Exemption, wall: float = NOON, **changes: Any) -> str | None:
    return Exemptions(SlurmWatch(exempt=exempt, **changes)).why(job, wall)


@pytest.mark.parametrize(
    "exemption",
    [
        Exemption(users=("bob", "al*")),
        Exemption(partitions=("gpu",)),
        Exemption(names=("tr??n",)),
        Exemption(accounts=("lab",)),
        Exemption(qos=("high",)),
        Exemption(hours="11:00-13:00"),
        Exemption(days="wed"),
        Exemption(users=("alice",), hours="11:00-13:00", days="mon-fri"),
    ],
)
def test_job_is_exempt(exemption: Exemption) -> None:
    assert why(a_job(account="lab", qos="high"), exemption) == "it is exempt"


@pytest.mark.parametrize(
    "exemption",
    [
        Exemption(users=("bob",)),
        Exemption(users=("alice",), partitions=("cpu",)),
        Exemption(hours="13:00-14:00"),
        Exemption(users=("alice",), days="sat,sun"),
    ],
)
def test_job_is_exempt_only_if_all_of_it_applies(exemption: Exemption) -> None:
    assert why(a_job(), exemption) is None


def test_reason_of_an_exemption_is_shown() -> None:
    assert why(a_job(), Exemption(users=("alice",), reason="deadline")) == "it is exempt: deadline"


def test_owner_keeps_a_job_by_its_comment() -> None:
    job = a_job(comment="stoker: keep until 2026-11-18 12:30")
    assert why(job) == "its owner keeps it until 2026-11-18 12:30"
    assert why(job, wall=NOON + 1801) is None
    assert why(job, owners_may_keep=False) is None


def test_day_without_a_time_is_kept_to_its_end() -> None:
    until = kept_until("stoker: keep until 2026-11-18")
    assert until == NOON + 12 * 3600


@pytest.mark.parametrize("comment", ["", "keep until 2026-11-18", "stoker: keep until 2026-13-45", "stoker: keep"])
def test_other_comments_keep_nothing(comment: str) -> None:
    assert kept_until(comment) is None


def test_jobs_of_the_queue_are_left_to_it() -> None:
    assert why(a_job(comment="stoker:1a2b3c")) == "Stoker's queue supervises it"


@pytest.mark.parametrize(
    ("exemption", "message"),
    [
        (Exemption(), "number 1 exempts every job"),
        (Exemption(reason="x"), "number 1 exempts every job"),
        (Exemption(hours="9-10"), "number 1: '9-10' is not a time of day"),
        (Exemption(days="someday"), "number 1: 'someday' does not name days"),
    ],
)
def test_bad_exemption_is_refused(exemption: Exemption, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        Exemptions(SlurmWatch(exempt=(exemption,)))


# Warnings and stops

WAITING = Judgement(Verdict("waiting", "idle for a while"), ())
BUSY = Judgement(Verdict("busy", "GPU 0 was at 90%"), ())
FIRED = Judgement(Verdict("idle", "GPU 0 stayed idle", "act"), ())
UNKNOWN = Judgement(Verdict("unknown", "GPU 0 is unknown"), ())


def late(acts_in: float | None) -> Judgement:
    return Judgement(Verdict("waiting", "idle"), (), warned=Verdict("waiting", "idle"), acts_in=acts_in)


def notices(found: dict[str, Notice] | None = None, now: float = 0.0) -> OwnerNotices:
    return OwnerNotices(NOTICE, found or {}, now)


def test_owner_is_warned_twice_before_the_stop() -> None:
    known = notices()
    assert known.decide("7", WAITING, 0.0) is None
    first = known.decide("7", late(1800.0), 10.0)
    assert first == NoticeStep("warn", 1, 1810.0)
    known.warned("7", first, 10.0)
    assert known.decide("7", late(1000.0), 810.0) is None
    second = known.decide("7", late(900.0), 910.0)
    assert second == NoticeStep("warn", 2, 1810.0)
    known.warned("7", second, 910.0)
    assert known.decide("7", late(1.0), 1809.0) is None
    assert known.decide("7", FIRED, 1810.0) == NoticeStep("stop")


def test_stop_waits_for_the_notice() -> None:
    known = notices()
    known.warned("7", known.decide("7", FIRED, 0.0) or NoticeStep("stop"), 0.0)
    assert known.decide("7", FIRED, 100.0) == NoticeStep("warn", 2, NOTICE)
    known.warned("7", NoticeStep("warn", 2, NOTICE), 100.0)
    assert known.decide("7", FIRED, NOTICE - 1) is None
    assert known.decide("7", FIRED, NOTICE) == NoticeStep("stop")


def test_use_of_the_gpus_starts_over() -> None:
    known = notices({"7": Notice(first=0.0, second=1.0, stop_at=NOTICE)})
    assert known.decide("7", BUSY, 5000.0) is None
    step = known.decide("7", FIRED, 6000.0)
    assert step is not None
    assert (step.kind, step.number) == ("warn", 1)


def test_unknown_readings_neither_warn_nor_stop() -> None:
    known = notices({"7": Notice(first=0.0, second=1.0, stop_at=NOTICE)})
    assert known.decide("7", UNKNOWN, 5000.0) is None
    assert known.all()


def test_job_that_may_only_hang_is_warned_of_once() -> None:
    known = notices()
    assert known.decide("7", late(None), 0.0) == NoticeStep("warn", 1, None)
    known.warned("7", NoticeStep("warn", 1, None), 0.0)
    assert known.decide("7", late(None), 1e5) is None


def test_warning_that_failed_is_tried_again() -> None:
    known = notices()
    assert known.decide("7", FIRED, 0.0)
    known.begin("7", 0.0)
    assert known.decide("7", FIRED, TRY_AGAIN_AFTER - 1) is None
    assert known.decide("7", FIRED, TRY_AGAIN_AFTER)


def test_warnings_survive_a_restart_for_a_day() -> None:
    found = {"7": Notice(first=0.0, second=10.0, stop_at=NOTICE)}
    assert notices(found, REMEMBERED_FOR).decide("7", FIRED, REMEMBERED_FOR) == NoticeStep("stop")
    assert notices(found, REMEMBERED_FOR + 11).all() == {}


def test_jobs_that_have_ended_are_forgotten() -> None:
    known = notices({"7": Notice(first=0.0, stop_at=None), "8": Notice(first=0.0, stop_at=None)})
    known.keep_only({"8"})
    assert known.all().keys() == {"8"}


JUDGEMENTS = st.sampled_from([WAITING, BUSY, FIRED, FIRED, FIRED, UNKNOWN, late(600.0), late(10.0), late(None)])


@given(st.lists(st.tuples(JUDGEMENTS, st.integers(1, 1200), st.booleans()), max_size=60))
@settings(max_examples=examples(300))
def test_no_job_is_stopped_without_two_warnings_in_time(events: list[tuple[Judgement, int, bool]]) -> None:
    """Warnings that are not delivered, restarts and use of the GPUs in between change nothing about that."""
    known, now = notices(), 0.0
    delivered: list[float] = []
    for judgement, passed, works in events:
        now += passed
        if passed % 7 == 0:
            known = notices(known.all(), now)
        if judgement is BUSY:
            delivered = []
        step = known.decide("7", judgement, now)
        if step is None:
            continue
        known.begin("7", now)
        if step.kind == "warn" and works:
            known.warned("7", step, now)
            delivered.append(now)
        elif step.kind == "stop":
            assert judgement is FIRED
            assert len(delivered) >= 2
            assert now - delivered[-2] >= NOTICE
            assert now - delivered[-1] >= NOTICE / 2


def test_warning_says_when_why_and_how_to_keep_the_job() -> None:
    title, text = warning_text(a_job(), NoticeStep("warn", 1, NOON + 900), "GPU 0 stayed idle", NOON, stops=True)
    assert title == "Slurm job 7 (train) does not use its GPUs and is cancelled at 12:15"
    assert text.splitlines() == [
        "job 7 (train) of alice on n1: GPU 0 stayed idle.",
        "It is cancelled at 12:15 (in 15m) if it does not use them before. To keep it:",
        '  scontrol update jobid=7 comment="stoker: keep until 2026-11-19"',
    ]


def test_warning_without_a_stop_announces_none() -> None:
    for step, stops in ((NoticeStep("warn", 1, NOON), False), (NoticeStep("warn", 1, None), True)):
        title, text = warning_text(a_job(), step, "GPU 0 stayed idle", NOON, stops=stops)
        assert "is cancelled" not in title + text


# Usage


def test_usage_is_added_up_over_days_and_restarts(tmp_path: Path) -> None:
    for day in range(2):
        wall = NOON + day * 86400
        usage = DailyUsage(tmp_path, wall)
        usage.allocate(wall, "alice", 7, 3600.0)
        usage.observe(wall, "alice", 1800.0, 900.0)
        usage.save(wall)
        again = DailyUsage(tmp_path, wall)
        again.count(wall, "alice", warnings=1, stops=day)
        again.allocate(wall, "bob", 8, 7200.0)
        again.save(wall)
    alice, bob = usage_rows(tmp_path, NOON - 86400, NOON + 86400)
    assert (alice.user, alice.jobs, alice.gpu_hours, alice.watched_gpu_hours) == ("alice", 1, 2.0, 1.0)
    assert (alice.idle_gpu_hours, alice.wasted, alice.warnings, alice.stops) == (0.5, 0.5, 2, 1)
    assert (bob.user, bob.gpu_hours, bob.wasted) == ("bob", 4.0, None)
    assert [row.gpu_hours for row in usage_rows(tmp_path, NOON + 86400, NOON + 86400)] == [1.0, 2.0]
    assert table_text([alice, bob]).splitlines()[2].split() == ["bob", "1", "4.0", "0.0", "0.0", "unknown", "0", "0"]


def test_day_ends_while_the_watcher_runs(tmp_path: Path) -> None:
    usage = DailyUsage(tmp_path, NOON)
    usage.allocate(NOON, "alice", 7, 3600.0)
    usage.allocate(NOON + 86400, "alice", 7, 3600.0)
    usage.save(NOON + 86400)
    assert len(list(tmp_path.iterdir())) == 2


def test_old_days_are_removed_and_damaged_ones_count_nothing(tmp_path: Path) -> None:
    usage = DailyUsage(tmp_path, NOON)
    usage.allocate(NOON, "alice", 7, 3600.0)
    usage.save(NOON)
    late_day = NOON + (KEPT_DAYS + 1) * 86400
    DailyUsage(tmp_path, late_day).save(late_day)
    assert len(list(tmp_path.iterdir())) == 1
    next(tmp_path.iterdir()).write_text("{")
    assert usage_rows(tmp_path, 0.0, late_day) == []


def test_week_ends_on_monday_morning() -> None:
    monday = time.mktime((2026, 11, 16, 8, 0, 0, 0, 0, -1))
    assert last_monday(NOON) == monday
    assert last_monday(monday) == monday
    assert last_monday(monday - 1) == monday - 7 * 86400


# What agents send


def test_messages_of_several_nodes_may_be_mixed_line_by_line() -> None:
    messages = [(node, f"{node} ü".encode() * 500) for node in ("n1", "n2")]
    lines = [list(frames(*message)) for message in messages]
    assert min(map(len, lines)) > 2
    assert max(len(line) for each in lines for line in each) < CHUNK + 100
    together = Reassembly()
    mixed = [line for pair in zip(*lines, strict=False) for line in pair]
    rest = [line for each in lines for line in each[len(mixed) // 2 :]]
    assert [found for line in (*mixed, b"print prolog\n", *rest) if (found := together.add(line))] == messages


@given(st.binary(max_size=200))
def test_line_that_is_no_message_is_passed_over(content: bytes) -> None:
    together = Reassembly()
    assert together.add(content.replace(b"stoker-look", b"")) is None
    assert together.add(b"stoker-look . n1 {" + (rest := content.replace(b"\n", b""))) == ("n1", b"{" + rest)


# Processes of a job


def test_job_of_the_same_number_in_another_cluster_of_the_machine_is_not_meant() -> None:
    seen = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "alpha", "SLURM_STEP_ID": "3"}
    others = [
        {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "alpha", "SLURM_STEP_ID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "beta", "SLURM_STEP_ID": "0", "STOKER_RUN": "1"},
        {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "alpha", "SLURM_STEP_ID": "0", "STOKER_RUN": "1"},
        seen,
    ]
    pids: list[int] = []
    with contextlib.ExitStack() as running:
        for variables in others:
            process = subprocess.Popen(["sleep", "60"], env={**os.environ, **variables})
            running.callback(process.wait)
            running.callback(process.kill)
            pids.append(process.pid)
        members, supervised = JobProcesses(seen).scan()
    assert [who.pid for who in members] == pids[:1]
    assert not supervised
