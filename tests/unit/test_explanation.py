"""Why a job does not run: every reason has a message, and the decisive one is given."""

import itertools
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from stoker.queue.explanation import (
    MOST_AHEAD,
    NO_NEEDS,
    Estimate,
    Forecast,
    Needs,
    QueueContext,
    Why,
    explain,
    in_short,
    named_text,
    spoken,
)
from stoker.queue.fields import State
from stoker.queue.model import Attempt, Job, KeptGpus, View, Worker, WorkerGpu
from stoker.rules.rule import RuleWarning
from stoker.units import clock_time

NOW = 1_800_000_000.0
GIB = 2**30
NEXT = Forecast(place=1)


def job(state: State = "queued", **fields: Any) -> Job:
    known: dict[str, Any] = {
        "id": "0a0a0a0a", "command": "true", "state": state, "position": 1.0, "submitted": NOW - 60, "started": None,
        "ended": None, "not_before": 0.0, "retries_left": 0, "attempts": 0, "attempt": None, "exit_code": None,
        "reason": "", "link": "", "cancel_requested": None, "origin": None,
    }  # fmt: skip
    return Job(**{**known, **fields})


def worker(host: str = "gpu-box", *, gpus: int = 2, seen: float = 1.0, paused: bool = False, **view: Any) -> Worker:
    cards = tuple(
        WorkerGpu(uuid=f"{host}-{index}", index=index, name="A100", memory_total=80 * GIB) for index in range(gpus)
    )
    return Worker(id=f"w-{host}", host=host, view=View(gpus=cards, **view), started=0.0, seen=NOW - seen, paused=paused)


def around(*workers: Worker, **fields: Any) -> QueueContext:
    return QueueContext(now=NOW, workers=workers, **fields)


def needs(of_the_job: Mapping[str, State], *others: tuple[str, str, State]) -> Needs:
    """What the job waits for, and what others wait for."""
    return Needs([*(("0a0a0a0a", name, state) for name, state in of_the_job.items()), *others])


def attempt(**fields: Any) -> Attempt:
    known: dict[str, Any] = {
        "id": "a", "job": "0a0a0a0a", "worker": "w-gpu-box", "number": 1, "gpus": ("gpu-box-0", "gpu-box-1"),
        "started": NOW - 7500, "lease_expires": NOW + 60,
    }  # fmt: skip
    return Attempt(**{**known, **fields})


# Jobs that do not wait


def test_running_job_has_its_start_time_and_machine() -> None:
    why = explain(job("running", started=NOW - 7500), around(worker(), running={"0a0a0a0a": attempt()}))
    since = clock_time(NOW - 7500, NOW)
    assert why == Why("running", "", f"running since {since} (2 h 5 min) on gpu-box, GPUs 0 and 1")


def test_gpu_missing_from_the_worker_report_is_named_by_uuid() -> None:
    why = explain(job("running", started=NOW), around(running={"0a0a0a0a": attempt(gpus=("GPU-x",))}))
    assert why.reason.endswith("on worker w-gpu-box, GPU GPU-x")


def test_running_job_without_gpus_is_explained() -> None:
    why = explain(job("running", started=NOW, gpus=0), around(worker(), running={"0a0a0a0a": attempt(gpus=())}))
    assert why.reason.endswith("on gpu-box without a GPU")


def test_stopping_job_has_the_time_of_the_request() -> None:
    asked = job("running", started=NOW - 60, cancel_requested=NOW - 5)
    why = explain(asked, around(worker(), running={"0a0a0a0a": attempt()}))
    assert (why.kind, why.word) == ("stopping", "stopping")
    assert "a stop was requested 5 s ago" in why.reason


HANG = RuleWarning(rule="stalled", word="may hang", reason="GPU 0 makes no progress", at=NOW - 60, acts_at=NOW + 720)


@pytest.mark.parametrize(
    ("warning", "sentence"),
    [
        (HANG, "and may hang: GPU 0 makes no progress; it is stopped in 12 min, unless it works or is snoozed"),
        (msgspec.structs.replace(HANG, acts_at=None), "and may hang: GPU 0 makes no progress"),
    ],
)
def test_running_job_that_a_rule_warns_of_says_why(warning: RuleWarning, sentence: str) -> None:
    runs = {"0a0a0a0a": attempt()}
    why = explain(job("running", started=NOW), around(worker(warnings={attempt().id: warning}), running=runs))
    assert (why.kind, why.word) == ("warned", "may hang")
    assert why.reason.endswith(sentence)
    # A worker that is gone says nothing about now.
    silent = worker(seen=500.0, warnings={attempt().id: warning})
    assert explain(job("running", started=NOW), around(silent, running=runs)).kind == "running"


def test_worker_with_an_expired_lease_may_be_gone() -> None:
    why = explain(job("running", started=NOW), around(running={"0a0a0a0a": attempt(lease_expires=NOW - 30)}))
    assert (why.kind, why.word) == ("silent", "no heartbeat")
    assert "let its lease end 30 s ago" in why.reason


@pytest.mark.parametrize(
    ("state", "fields", "sentence"),
    [
        ("succeeded", {"exit_code": 0}, "succeeded 1 h ago after 10 min"),
        ("failed", {"exit_code": 3}, "failed 1 h ago after 10 min with exit code 3"),
        (
            "failed",
            {"exit_code": 1, "reason": "idle for 20m"},
            "failed 1 h ago after 10 min with exit code 1: idle for 20m",
        ),
        ("cancelled", {"started": None}, "cancelled 1 h ago"),
        ("cancelled", {"started": None, "reason": "cancelled"}, "cancelled 1 h ago"),
    ],
)
def test_ended_job_has_its_end_time_duration_and_outcome(state: State, fields: dict[str, Any], sentence: str) -> None:
    ended = job(state, **{"started": NOW - 4200, "ended": NOW - 3600, **fields})
    assert explain(ended, around()) == Why("ended", "", sentence)


# Jobs that wait for a time or another job


def test_held_job_explains_how_to_release_it() -> None:
    why = explain(job("held", reason="held"), around())
    assert why == Why("held", "", "held: `stoker release 0a0a0a0a` lets it start")


def test_job_held_after_its_loss_has_that_reason() -> None:
    why = explain(job("held", reason="its worker did not renew its lease in time", on_loss="hold"), around())
    assert why.word == "lost"
    assert why.reason.startswith("held because its worker did not renew its lease in time: ")


def test_retry_has_its_delay_and_the_failure_before() -> None:
    why = explain(job(not_before=NOW + 19.2, attempts=2, exit_code=3), around(worker()))
    sentence = "waits until its retry in 20 s, after attempt 2 ended with exit code 3"
    assert why == Why("retry", "retry in 20 s", sentence, forecast=NEXT)
    preempted = job(attempts=1, exit_code=143, reason="made room for another job")
    why = explain(preempted, around(worker()))
    assert why.reason.endswith("; attempt 1 ended with exit code 143: made room for another job")


def test_dependent_job_names_its_dependencies_and_their_states() -> None:
    why = explain(job(), around(worker()), needs({"1b1b1b1b": "running"}))
    assert why == Why("after", "after 1b1b1b1b", "waits for job 1b1b1b1b (running)", forecast=NEXT)
    why = explain(job(), around(worker()), needs({"1b1b1b1b": "running", "2c2c2c2c": "held"}))
    assert (why.word, why.reason) == (
        "after 1b1b1b1b and 1 more",
        "waits for jobs 1b1b1b1b (running) and 2c2c2c2c (held)",
    )


def test_long_list_of_dependencies_is_cut() -> None:
    why = explain(job(), around(worker()), needs({f"{number}" * 8: "queued" for number in range(1, 10)}))
    assert why.reason.endswith("and 6 others")


@pytest.mark.parametrize(("state", "became"), [("failed", "which failed"), ("cancelled", "which was cancelled")])
def test_job_with_a_failed_dependency_can_never_start(state: State, became: str) -> None:
    why = explain(job(), around(worker()), needs({"1b1b1b1b": state, "2c2c2c2c": "running"}))
    assert why.kind == "never"
    assert why.reason == (
        f"can never start: it comes after 1b1b1b1b, {became}; `stoker retry 1b1b1b1b` tries that again, "
        "`stoker cancel 0a0a0a0a` gives this one up"
    )


@pytest.mark.parametrize(("state", "became"), [("failed", "which failed"), ("cancelled", "which was cancelled")])
def test_job_with_a_failed_indirect_dependency_can_never_start(state: State, became: str) -> None:
    known = needs({"1b1b1b1b": "queued", "3d3d3d3d": "running"}, ("1b1b1b1b", "2c2c2c2c", state))
    why = explain(job(), around(worker()), known)
    assert (why.kind, why.word) == ("never", f"after 2c2c2c2c, {state}")
    assert why.reason == (
        f"can never start: it comes after 1b1b1b1b, which comes after 2c2c2c2c, {became}; "
        "`stoker retry 2c2c2c2c` tries that again, `stoker cancel 0a0a0a0a` gives this one up"
    )


def test_long_path_to_a_failed_dependency_is_cut() -> None:
    names = [f"{number}" * 8 for number in range(1, 9)]
    steps: list[tuple[str, str, State]] = [(one, other, "queued") for one, other in itertools.pairwise(names)]
    why = explain(job(), around(worker()), needs({names[0]: "held"}, *steps, (names[-1], "2c2c2c2c", "failed")))
    assert "33333333, which comes after 5 others, the last of them after 2c2c2c2c, which failed; " in why.reason


def test_job_with_runnable_dependencies_waits() -> None:
    known = needs({"1b1b1b1b": "queued"}, ("1b1b1b1b", "2c2c2c2c", "running"), ("3d3d3d3d", "4e4e4e4e", "failed"))
    assert explain(job(), around(worker()), known).reason == "waits for job 1b1b1b1b (queued)"


def test_further_obstacles_are_included() -> None:
    why = explain(job(not_before=NOW + 20), around(worker(), paused=True))
    assert (why.kind, why.word) == ("retry", "retry in 20 s")
    assert why.reason.endswith("; besides, the queue is paused: `stoker resume` lets jobs start")


# Jobs that wait for the queue or a worker


def test_paused_queue_is_the_reason_even_without_workers() -> None:
    assert explain(job(), around(paused=True)).kind == "paused"


def test_queue_without_workers_explains_how_to_start_one() -> None:
    assert explain(job(), around()) == Why(
        "no worker", "", "no worker is there, and none ever was: `stoker work` starts one"
    )


def test_lost_workers_are_reported_with_the_machine_last_seen() -> None:
    why = explain(job(), around(worker("old", seen=86400), worker("gpu-box", seen=7200)))
    assert why.kind == "no worker"
    assert "the last was seen 2 h ago, on gpu-box" in why.reason


def test_worker_with_a_few_missed_heartbeats_is_not_lost() -> None:
    assert explain(job(), around(worker(seen=59))).kind == "next"
    assert explain(job(), around(worker(seen=61))).kind == "no worker"


def test_paused_workers_explain_how_to_resume_them() -> None:
    one = explain(job(), around(worker(paused=True), worker("gone", seen=9999)))
    assert one.reason == ("the worker on gpu-box is paused: `stoker resume --worker gpu-box` lets jobs start there")
    both = explain(job(), around(worker(paused=True), worker("b", paused=True)))
    assert (both.kind, both.reason[:43]) == ("workers paused", "all workers (on b and gpu-box) are paused: ")


# Jobs that wait for GPUs


def test_reasons_of_all_workers_are_short_first_and_whole_in_the_details() -> None:
    said = "waits for 2 GPUs: GPU 0 is used by alice's python (pid 4242)"
    there = around(
        worker("gpu-box", waiting={"0a0a0a0a": said}),
        worker("paused", paused=True),
        worker("blind", problem="the driver does not answer"),
        worker("silent"),
    )
    why = explain(job(gpus=2), there, ahead=3)
    assert why == Why(
        "waits",
        "4th in line",
        "waits for 2 GPUs on gpu-box; on paused: the worker is paused; on blind: the driver does not answer"
        "; 4th in line",
        (f"on gpu-box: {said}", "on paused: the worker is paused", "on blind: the driver does not answer"),
        Forecast(place=4),
    )


def test_short_reason_joins_machines_and_leaves_out_those_that_never_can() -> None:
    waits, never = "waits for 4 GPUs: GPUs 0 and 1 are free", "can never start on this machine: it asks for 4 GPUs"
    hosts = [f"m{number}" for number in range(4)]
    assert (
        in_short([("a", waits), ("b", never), ("c", "waits for 4 GPUs: GPU 2 is free")])
        == "waits for 4 GPUs on a and c"
    )
    assert in_short([(host, waits) for host in hosts]) == "waits for 4 GPUs on 4 machines"
    assert in_short([("a", never), ("b", "")]) == f"on a: {never}"
    blind = "waits for a GPU: the GPUs of this machine cannot be read (no driver)"
    assert in_short([("a", blind)]) == f"on a: {blind}"
    # A detail that says no more than the reason is left out.
    why = explain(job(), around(worker(waiting={"0a0a0a0a": blind})))
    assert why == Why("waits", "", f"on gpu-box: {blind}", forecast=NEXT)


def test_names_come_before_ids_except_in_commands_to_copy() -> None:
    names = {"1b1b1b1b": "train lr=1e-3", "2c2c2c2c": "eval"}
    text = "waits for jobs 1b1b1b1b (running) and 3d3d3d3d (queued); `stoker retry 1b1b1b1b` tries 2c2c2c2c again"
    assert named_text(text, names) == (
        "waits for jobs train lr=1e-3 (1b1b1b1b, running) and 3d3d3d3d (queued); "
        "`stoker retry 1b1b1b1b` tries eval (2c2c2c2c) again"
    )
    assert named_text("GPU-1b1b1b1b and a1b1b1b1b stay", names) == "GPU-1b1b1b1b and a1b1b1b1b stay"


def test_job_with_a_reservation_has_its_machine_and_gpu_count() -> None:
    kept = KeptGpus(worker="w-gpu-box", gpus=("gpu-box-1",))
    here, other = worker(waiting={"0a0a0a0a": "waits for 2 GPUs: GPU 1 is free"}), worker("other")
    assert explain(job(gpus=2, kept=kept), around(here, other)) == Why(
        "waits",
        "has 1 of 2 GPUs",
        "GPUs are kept for it on gpu-box (2 GPUs, has 1: GPU 1)",
        ("on gpu-box: waits for 2 GPUs: GPU 1 is free",),
        NEXT,
    )


def test_job_with_more_gpus_than_any_worker_is_explained() -> None:
    why = explain(job(gpus=9), around(worker(gpus=2), worker("big", gpus=4), worker("gone", gpus=16, seen=999)))
    assert (why.kind, why.word) == ("too large", "too large")
    assert "it asks for 9 GPUs, and no worker has more than 4 (big); " in why.reason
    assert "`stoker edit 0a0a0a0a` asks for less" in why.reason


def test_workers_without_gpus_are_explained() -> None:
    assert "it asks for a GPU, and no worker has any" in explain(job(gpus=1), around(worker(gpus=0))).reason


def test_job_with_more_memory_than_any_gpu_is_explained() -> None:
    why = explain(job(gpus=1, memory=100 * GIB), around(worker()))
    assert "it asks for a GPU with 100 GiB, and the largest anywhere has 80 GiB" in why.reason


def test_job_with_more_large_gpus_than_any_worker_is_explained() -> None:
    small = msgspec.structs.replace(worker().view.gpus[1], memory_total=8 * GIB)
    mixed = msgspec.structs.replace(worker(), view=View(gpus=(worker().view.gpus[0], small)))
    why = explain(job(gpus=2, memory=20 * GIB), around(mixed))
    assert "2 GPUs with 20 GiB, and no worker has that many of this size" in why.reason
    unknown = msgspec.structs.replace(small, memory_total=None)
    mixed = msgspec.structs.replace(worker(), view=View(gpus=(worker().view.gpus[0], unknown)))
    assert explain(job(gpus=2, memory=20 * GIB), around(mixed)).kind == "next"


def test_worker_with_unreadable_gpus_may_have_enough() -> None:
    why = explain(job(gpus=9), around(worker(gpus=0, problem="the driver does not answer")))
    assert why.kind == "next"
    assert why.reason.endswith("it is next; on gpu-box: the driver does not answer")


def test_worker_without_gpus_says_where_it_looked_and_hides_no_other_worker() -> None:
    wanted = job(gpus=3)
    bare = worker("cpu-box", gpus=0, absent=True, waiting={wanted.id: "waits for 3 GPUs: no driver is loaded"})
    assert explain(wanted, around(bare)).reason == "on cpu-box: waits for 3 GPUs: no driver is loaded"
    assert "no worker has more than 2 (gpu-box)" in explain(wanted, around(bare, worker())).reason


def test_job_without_gpus_is_never_too_large() -> None:
    assert explain(job(gpus=0), around(worker(gpus=0))).kind == "next"


@pytest.mark.parametrize(
    ("ahead", "words"),
    [(1, "2nd in line"), (7, "8th in line"), (MOST_AHEAD, f"at least {MOST_AHEAD} other jobs come first")],
)
def test_job_behind_older_jobs_has_its_place(ahead: int, words: str) -> None:
    why = explain(job(), around(worker()), ahead=ahead)
    assert (why.kind, why.reason) == ("waits", f"waits for its turn: {words}")
    assert why.forecast == (Forecast(place=ahead + 1) if ahead < MOST_AHEAD else None)
    assert why.word == (words if ahead < MOST_AHEAD else "")


@pytest.mark.parametrize(
    ("waits", "known", "estimate", "word", "reason"),
    [
        (
            {},
            NO_NEEDS,
            Estimate(NOW + 2400),
            "3rd in line, in about 40 min",
            "waits for its turn: 3rd in line, starts in about 40 min",
        ),
        (
            {"0a0a0a0a": "waits for 1 GPU: GPU 0 is held by job 1b1b1b1b"},
            NO_NEEDS,
            Estimate(NOW + 2400, True),
            "3rd in line, in about 40 min at the latest",
            "waits for 1 GPU on gpu-box; 3rd in line, starts in about 40 min at the latest",
        ),
        (
            {},
            needs({"1b1b1b1b": "running"}),
            Estimate(NOW + 300),
            "after 1b1b1b1b, in about 5 min",
            "waits for job 1b1b1b1b (running); starts in about 5 min",
        ),
    ],
)
def test_estimated_start_is_shown_with_the_place(
    waits: dict[str, str], known: Needs, estimate: Estimate, word: str, reason: str
) -> None:
    why = explain(job(), around(worker(waiting=waits)), known, 2, estimate)
    assert (why.word, why.reason) == (word, reason)
    assert why.forecast == Forecast(place=3, starts=round(estimate.at), at_latest=estimate.at_latest)


def test_job_that_begins_later_tells_its_start_only_if_that_is_later_still() -> None:
    waits = job(not_before=NOW + 600, begin=NOW + 600)
    assert "starts" not in explain(waits, around(worker()), estimate=Estimate(NOW + 600)).reason
    assert explain(waits, around(worker()), estimate=Estimate(NOW + 2400)).reason.endswith("; starts in about 40 min")


@pytest.mark.parametrize("kept_back", [{"paused": True}, {"workers": ()}])
def test_job_that_nothing_starts_has_no_place(kept_back: dict[str, object]) -> None:
    found = explain(job(), msgspec.structs.replace(around(worker()), **kept_back), estimate=Estimate(NOW + 60))
    assert (found.forecast, "in line" in found.reason) == (None, False)
    never = explain(job(), around(worker(waiting={"0a0a0a0a": "can never start here: too few GPUs"})))
    assert (never.forecast, never.word) == (None, "")


def test_job_not_examined_by_a_worker_yet_is_next() -> None:
    assert explain(job(), around(worker())).reason == "waits for a worker to look at it: it is next"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),
        (20.4, "20 s"),
        (90, "90 s"),
        (91, "2 min"),
        (3600, "1 h"),
        (4800, "1 h 20 min"),
        (200_000, "2 days"),
    ],
)
def test_duration_is_written_in_words(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


def test_minimum_duration_is_rounded_up() -> None:
    assert spoken(19.1, up=True) == "20 s"
    assert spoken(121, up=True) == "3 min"


def test_time_on_another_day_has_its_date() -> None:
    assert len(clock_time(NOW, NOW)) == len("14:02")
    assert clock_time(NOW - 5 * 86400, NOW).startswith(time.strftime("%Y-", time.localtime(NOW - 5 * 86400)))


# Jobs on a cluster


def test_pending_job_gives_the_reason_of_its_cluster() -> None:
    pending = attempt(worker="w-login", gpus=(), pending=True, where="Slurm job 4711")
    login = worker("login", gpus=0, waiting={"0a0a0a0a": "waits in Slurm: jobs of higher priority come first"})
    why = explain(job("running"), around(login, running={"0a0a0a0a": pending}))
    assert why == Why("pending", "", "waits in Slurm: jobs of higher priority come first; it is Slurm job 4711")


@pytest.mark.parametrize("seen", [1.0, 500.0])
def test_pending_job_without_a_reason_waits_in_its_cluster(seen: float) -> None:
    reasons = {} if seen == 1.0 else {"0a0a0a0a": "a reason that is old"}
    login = worker("login", gpus=0, seen=seen, waiting=reasons)
    running = {"0a0a0a0a": attempt(worker="w-login", gpus=(), pending=True)}
    assert explain(job("running"), around(login, running=running)).reason == "waits in the queue of its cluster"


def test_pending_job_that_is_cancelled_is_stopping() -> None:
    pending = {"0a0a0a0a": attempt(worker="w-login", gpus=(), pending=True)}
    why = explain(job("running", cancel_requested=NOW - 5), around(running=pending))
    assert (why.kind, why.reason) == (
        "stopping",
        "waits in the queue of its cluster, and a stop was requested 5 s ago",
    )


def test_job_that_runs_on_a_cluster_says_where() -> None:
    there = attempt(worker="w-login", gpus=(), where="Slurm job 4711 on node1")
    why = explain(job("running", started=NOW - 60), around(worker("login"), running={"0a0a0a0a": there}))
    assert why.reason == f"running since {clock_time(NOW - 60, NOW)} (60 s) as Slurm job 4711 on node1"


def test_job_is_not_too_large_where_a_cluster_decides() -> None:
    why = explain(job(gpus=16), around(worker("login", gpus=0, cluster="hpc")))
    assert why.kind == "next"
