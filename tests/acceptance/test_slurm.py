"""The queue on a real Slurm cluster as people use it: every verb and option, every outcome, every mistake."""

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import expect

from stoker.queue import Attempt
from tests.support.browser import chromium, screen
from tests.support.command import Finished, stoker_command
from tests.support.feeding import Feeders, write_trainer
from tests.support.http_receiver import Receiver
from tests.support.page_site import page_site
from tests.support.slurm_cluster import NODES, SlurmCluster, running_cluster
from tests.support.waiting import wait_for
from tests.support.work_site import PATIENCE, RunningWorker, WorkSite

# Stops as soon as it has written its checkpoint.
CHECKPOINTS = "trap 'echo checkpoint >> saved; exit 0' TERM; touch began; while :; do sleep 0.05; done"
# Goes on until it is killed.
DEAF = "trap 'echo asked >> saved' TERM; touch began; while :; do sleep 0.05; done"
# Windows of seconds; a job that never used a GPU is judged like any other.
SOON = ("--for", "3s", "--unused-for", "5s", "--cpu-for", "5s", "--idle-after", "0s", "--idle-every", "250ms")

RESUME = ("scontrol", "update", "NodeName=node[1-3]", "State=RESUME")
DELETE = ("scontrol", "delete", "ReservationName=course")


class LoginNode:
    """A user on the login node of a cluster, with a queue in a file."""

    def __init__(self, site: WorkSite, cluster: SlurmCluster) -> None:
        self.site = site
        self.cluster = cluster
        self.directory = site.directory
        site.environment = {"STOKER_ENGINE": "slurm", **cluster.environment()}

    def configure(self, text: str) -> None:
        """Writes the person's stoker.toml."""
        place = Path(os.environ["XDG_CONFIG_HOME"]) / "stoker"
        place.mkdir(parents=True, exist_ok=True)
        (place / "stoker.toml").write_text(text)

    def work(self, *options: str, lease: str = "20s") -> RunningWorker:
        return self.site.work("--lease", lease, "--grace", "3s", *options).ready()

    def type(self, *words: str, code: int = 0) -> str:
        """What `stoker` prints; on an error what it says."""
        done: Finished = self.site.stoker(*words)
        assert done.code == code, f"stoker {shlex.join(words)} ended with {done.code}: {done.out}{done.err}"
        return done.out if code == 0 else done.err

    def type_json(self, *words: str) -> Any:
        return msgspec.json.decode(self.type(*words))

    def submit(self, *words: str) -> str:
        return self.type("submit", "--directory", str(self.directory), *words).strip()

    def in_its_own(self, name: str) -> str:
        """A directory for one job, to run it in."""
        place = self.directory / name
        place.mkdir()
        return str(place)

    def record_of(self, job: str, number: int = 1) -> Path:
        """The directory of an attempt, on the file system that the nodes share."""
        return self.site.home / "attempts" / f"{job}-{number}"

    def attempt(self, job: str) -> Attempt:
        return self.site.last_attempt(job)

    def slurm_job(self, job: str) -> int:
        """The id of the last attempt's Slurm job, once there is one."""

        def known() -> int | None:
            found = re.match(r"Slurm job (\d+)", self.attempt(job).where) if self.site.job(job).attempts else None
            return int(found[1]) if found else None

        return wait_for(known, named=f"the Slurm job of {job}")

    wait_until_in_slurm = slurm_job

    def details(self, job: str) -> dict[str, str]:
        return self.cluster.details(self.slurm_job(job))

    def wait_until(self, job: str, *states: str) -> None:
        self.site.wait_until(job, *states)

    def wait_until_began(self, job: str) -> None:
        wait_for(lambda: self.site.job(job).attempts and not self.attempt(job).pending, named=f"the start of {job}")

    def why(self, job: str) -> str:
        return self.type("why", job).strip()


@pytest.fixture
def login(site: WorkSite, cluster: SlurmCluster) -> LoginNode:
    return LoginNode(site, cluster)


def test_every_option_of_a_job_reaches_slurm(login: LoginNode) -> None:  # noqa: PLR0915 - one cluster for all
    # Defaults of every job are in the settings; an option of the worker wins over them, and one of the job over both.
    login.configure('[work.slurm]\naccount = "speech"\npartition = "spare"\n')
    login.work("--engine", "slurm", "--partition", "main", "--max-pending", "50", "--preemptible-partition", "spare")
    # Both GPUs of node3, so that others wait for them.
    busy = login.submit(
        "--name", "busy", "--gpus", "2", "--gpu-model", "h100", "--time-limit", "10m", "--", "sleep", "600"
    )
    login.wait_until_began(busy)
    sized = login.submit(
        *("--name", "sized", "--gpus", "1", "--gpu-model", "H100", "--cpus", "2", "--ram", "1GiB"),
        *("--time-limit", "5m", "--priority", "-2", "--account", "vision", "--qos", "normal"),
        *("--", "true"),
    )
    asked = login.details(sized)
    assert asked["JobName"] == f"stoker-sized-{sized}"
    assert asked["TresPerNode"] == "gres:gpu:h100:1"
    assert (asked["CPUs/Task"], asked["MinMemoryNode"], asked["Nice"], asked["Account"]) == ("2", "1G", "200", "vision")
    assert (asked["Partition"], asked["Requeue"]) == ("main", "0")
    assert asked["TimeLimit"] == "00:07:00"  # with the grace and a minute to spare, in whole minutes
    login.site.wait_for_why(
        sized, r"waits in Slurm: other jobs use what it asks for; starts about \d+:\d\d; it is Slurm"
    )
    swept = login.submit(
        "--gpus", "2", "--sweep", "lr=1e-3,1e-4", "--", "sh", "-c", "echo {lr} on $CUDA_VISIBLE_DEVICES"
    )
    first, second = swept.split()
    subprocess.run(["git", "init", "-q", "."], cwd=login.directory, check=True)
    (login.directory / "train.py").write_text("print('as committed')\n")
    as_somebody = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    commit = f"git add train.py && git {shlex.join(as_somebody)} commit -qm one"
    subprocess.run(commit, shell=True, cwd=login.directory, check=True)
    pinned = login.submit(
        "--pin", "--gpus", "0", "--env", "NAME=value", "--", "sh", "-c", "cat train.py; echo $NAME $$"
    )
    (login.directory / "train.py").write_text("print('changed since')\n")
    linked = login.submit(
        *("--gpus", "1", "--label", "nvlink", "--constraint", "a100|h100", "--exclude-machine", "node1", "--", "true")
    )
    named = login.submit("--gpus", "0", "--machine", "node3", "--sbatch=--nice=7", "--", "true")
    yielding = login.submit("--preemptible", "--gpus", "1", "--gpu-model", "a100", "--", "true")
    spare = login.submit("--partition", "spare", "--gpus", "0", "--", "true")
    retried = login.submit(
        *("--gpus", "0", "--retries", "1", "--backoff", "1s", "--name", "retried"),
        *("--", "test -e again || { touch again; exit 3; }"),
    )
    after = login.submit("--gpus", "0", "--after", "retried", "--", "echo after all")
    held = login.submit("--gpus", "0", "--hold", "--", "true")
    assert login.why(held).endswith(f"({held}): held: `stoker release {held}` lets it start")
    login.type("release", held)
    login.type("wait", first, second, pinned, linked, named, yielding, spare, after, held)
    assert "1e-3 on 0,1\n" in login.type("logs", first)
    assert (login.details(first)["Account"], login.details(first)["Partition"]) == ("speech", "main")
    assert re.fullmatch(r"print\('as committed'\)\nvalue \d+\n", login.type("logs", pinned))
    assert login.attempt(linked).where.endswith(" on node2")
    assert login.attempt(named).where.endswith(" on node3")
    assert (login.details(yielding)["Requeue"], login.details(yielding)["Partition"]) == ("1", "spare")
    assert login.details(spare)["Partition"] == "spare"
    assert [one.outcome for one in login.site.store.attempts.of(retried)] == ["failed", "succeeded"]
    assert login.type("logs", after) == "after all\n"
    reservation = ("StartTime=now", "Duration=10", f"Users={os.getuid()}", "NodeCnt=1", "Nodes=node2", "Flags=OVERLAP")
    login.cluster.run("scontrol", "create", "reservation", "ReservationName=course", *reservation)
    try:
        reserved = login.submit("--gpus", "0", "--reservation", "course", "--", "true")
        login.type("wait", reserved)
        assert login.details(reserved)["Reservation"] == "course"
    finally:
        # It is in use until Slurm has cleaned up behind the job.
        wait_for(lambda: subprocess.run(DELETE, capture_output=True, check=False).returncode == 0, deadline=PATIENCE)
    login.type("cancel", busy, sized)
    login.wait_until(busy, "cancelled")
    login.wait_until(sized, "cancelled")


def test_every_verb_works_on_jobs_of_the_cluster(login: LoginNode) -> None:  # noqa: PLR0915 - one cluster for all
    worker = login.work("--max-pending", "2")
    idle = login.submit("--gpus", "1", "--gpu-model", "a100", *SOON, "--for", "5s", "--", "sleep", "600")
    login.wait_until_began(idle)
    login.type("snooze", "1h", idle)
    wait_for((login.record_of(idle) / "snooze.json").exists, named="the snooze on the shared file system")
    snoozed_at = time.monotonic()
    busy = login.submit("--name", "busy", "--gpus", "2", "--gpu-model", "h100", "--", login.site.until("flag"))
    login.wait_until_began(busy)
    assert re.search(rf"^busy +{busy} +running +Slurm job \d+ on node3 ", login.type("list"), re.MULTILINE)
    behind = [
        login.submit("--name", f"behind{n}", "--gpus", "2", "--gpu-model", "h100", "--", "true") for n in range(3)
    ]
    # Two wait in Slurm; the third still waits here, where it can be edited, moved and held.
    login.site.wait_for_why(behind[0], "waits in Slurm: other jobs use what it asks for; it is Slurm job")
    login.site.wait_for_why(behind[1], "waits in Slurm: jobs of higher priority come first; it is Slurm job")
    login.site.wait_for_why(behind[2], "waits until fewer than 2 jobs wait in Slurm")
    assert re.search(rf"^behind0 +{behind[0]} +pending ", login.type("list"), re.MULTILINE)
    assert "2 running, 2 pending, 1 queued; 1 worker" in login.type("list")
    edited = login.type("edit", behind[2], "--gpus", "1", "--gpu-model", "none", "--partition", "spare")
    assert edited == f"behind2 ({behind[2]}): edited (gpus, gpu model, slurm)\n"
    # A pending job is cancelled at once, in Slurm too.
    pending = login.slurm_job(behind[0])
    login.type("cancel", behind[0])
    login.wait_until(behind[0], "cancelled")
    login.cluster.wait_for_state(pending, "CANCELLED")
    login.wait_until(behind[2], "succeeded")
    assert login.details(behind[2])["Partition"] == "spare"
    # What the worker last said of its nodes is some seconds old.
    line = f"cluster {login.cluster.name}  3 nodes, 6 GPUs: 3 allocated (3 by this queue), 3 free"
    wait_for(lambda: line in login.type("top", "--once"), deadline=PATIENCE, named="the end of behind2 on its node")
    (machine,) = [one for one in login.type_json("top", "--json")["machines"] if one["there"]]
    assert machine["cluster"] == login.cluster.name
    nodes = {node["name"]: (node["gpus"], node["own"], node["jobs"]) for node in machine["nodes"]}
    assert (nodes["node1"], nodes["node3"]) == ((2, 1, [idle]), (2, 2, [busy]))
    # A job on a node is followed while it runs.
    talks = login.submit("--gpus", "0", "--name", "talks", "--", f"echo begun; {login.site.until('go')}; echo done")
    login.wait_until_began(talks)
    # One that waits in Slurm at its deadline leaves Slurm, too.
    late = login.submit("--deadline", "+8s", "--gpus", "2", "--gpu-model", "h100", "--", "true")
    late_in_slurm = login.slurm_job(late)
    followed = subprocess.Popen(
        [stoker_command(), "logs", "-f", talks], env={**os.environ, **login.site.environment}, stdout=subprocess.PIPE
    )
    assert followed.stdout is not None
    assert followed.stdout.readline() == b"begun\n"
    login.site.create_flag("go")
    assert (followed.communicate(timeout=PATIENCE)[0], followed.returncode) == (b"done\n", 0)
    # Snoozed, a job is not judged; the end of the snooze is seen within seconds as well.
    wait_for(lambda: time.monotonic() > snoozed_at + 6.0)
    assert login.site.job(idle).state == "running"
    login.type("snooze", "--end", idle)
    login.wait_until(idle, "failed")
    assert "exit code 124: GPU 0 stayed below 1% for " in login.why(idle)
    login.wait_until(late, "failed")
    assert "it did not start by its deadline, 20" in login.why(late)
    login.cluster.wait_for_state(late_in_slurm, "CANCELLED")
    login.site.create_flag("flag")
    login.type("wait", busy, behind[1])
    assert "queued again" in login.type("retry", idle, behind[0])
    login.type("cancel", idle)
    assert "did not succeed" in login.type("wait", idle, behind[0], code=1)
    shown = login.type("show", busy)
    assert re.search(r"1  Slurm job \d+ on node3, from .*, started .*, succeeded, exit code 0", shown)
    assert worker.stop() == 0


def test_groups_times_and_the_other_verbs_hold_on_the_cluster(login: LoginNode) -> None:  # noqa: PLR0915 - one cluster for all
    login.work("--max-pending", "5")
    lines = login.directory / "lines"
    lines.write_text("".join(f"echo line {number}; {login.site.until('flag')}\n" for number in range(3)))
    on_cpus = ("--gpus", "0")
    first, second, third = login.submit(
        *on_cpus, "--from", str(lines), "--group", "night", "--at-most", "1", "--tag", "short"
    ).split()
    login.wait_until_began(first)
    # What the group does not let run is not in Slurm either.
    login.site.wait_for_why(second, "its group night already runs 1 of at most 1")
    assert login.cluster.active_jobs() == [login.slurm_job(first)]
    login.type("hold", third)
    login.type("edit", "--at-most", "2", "night")
    login.wait_until_began(second)
    assert "late" in login.type("tag", "late", third)
    login.type("tag", "--remove", "short", third)
    assert [job["id"] for job in login.type_json("list", "--tag", "late", "--json")] == [third]
    copied = login.type("clone", third, "--name", "copy", "--group", "none", "--", "echo a clone").strip()
    login.type("wait", copied)
    assert login.type("logs", "copy") == "a clone\n"
    assert "2 running" in login.type("why", "night")
    login.site.create_flag("flag")
    login.type("wait", first, second)
    assert login.site.job(third).state == "held"
    login.type("release", third)
    login.type("wait", "night")
    # Nothing of a paused queue, and nothing before its time, is in Slurm.
    login.type("pause")
    last, before = login.submit(*on_cpus, "--", "true"), login.submit(*on_cpus, "--", "true")
    assert "paused" in login.why(last)
    login.type("move", "before", last, before)
    later = login.submit(*on_cpus, "--begin", "+5s", "--", "date +%s")
    login.type("resume")
    login.type("wait", last, before)
    assert login.slurm_job(before) < login.slurm_job(last)
    login.type("wait", later)
    assert int(login.type("logs", later)) >= int(login.site.job(later).begin or math.inf)
    # Other ends, and what follows from them.
    unlike = login.submit(*on_cpus, "--retries", "2", "--backoff", "1s", "--retry-on", "exit:75", "--", "exit 3")
    after = login.submit(*on_cpus, "--after-any", unlike, "--", "echo after all")
    login.type("wait", after)
    assert [one.exit_code for one in login.site.store.attempts.of(unlike)] == [3]
    sized = login.submit(
        *(*on_cpus, "--batch-size", "32", "--metric", "loss"),
        *("--", "for step in 1 2 3; do echo step=$step loss=0.$step size={batch_size}; done"),
    )
    with Receiver().listening() as hook:
        url = f"failed:json://127.0.0.1:{hook.port}?cto=60&rto=60"
        acted = login.submit(
            *SOON, "--gpus", "1", "--then", f"exec touch {login.directory}/acted", "--notify", url, "--", "sleep 600"
        )
        login.type("wait", sized, acted, code=1)
        notifier = subprocess.Popen([stoker_command(), "notify"], env={**os.environ, **login.site.environment})
        wait_for(lambda: hook.asked, named="the message")
        notifier.send_signal(signal.SIGTERM)
        notifier.wait()
    assert (login.directory / "acted").exists(), "the action ran on the node"
    assert "size=32" in login.type("logs", sized)
    assert "loss 0.3" in login.type("show", sized)
    (machine,) = login.type_json("machines", "--json")
    assert machine["engine"] == "slurm"
    assert "deleted" in login.type("clean", "--older-than", "0s")
    assert login.type_json("list", "--all", "--json") == []


def test_every_outcome_is_the_right_one_here_and_in_slurm(login: LoginNode) -> None:  # noqa: PLR0915 - one cluster for all
    # A job that exits with 0 at SIGTERM may end long before its supervisor gets the signal.
    for node in NODES:
        login.cluster.stop_node(node)
        login.cluster.start_node(node, slow_kill=20)
    login.cluster.configure(["PartitionName=brief Nodes=ALL MaxTime=1 DefaultTime=1 State=UP"])
    login.cluster.wait_until_ready()
    worker = login.work("--preemptible-partition", "spare")

    def checkpointing(name: str, *options: str, command: str = CHECKPOINTS) -> str:
        place = login.in_its_own(name)
        return login.type("submit", "--name", name, "--directory", place, *options, "--", command).strip()

    def saves(job: str) -> int:
        saved = login.directory / login.site.job(job).name / "saved"
        return len(saved.read_text().splitlines()) if saved.exists() else 0

    # Slurm looks at its time limits every half minute: these go on while the others are tried.
    limited = checkpointing("limited", "--gpus", "0", "--partition", "brief")
    resumed = checkpointing(
        *("resumed", "--gpus", "0", "--partition", "brief", "--requeue-at-limit"),
        command=f"if [ -e saved ]; then echo resumed; exit 0; fi; echo begun; {CHECKPOINTS}",
    )
    idle = login.submit("--gpus", "1", "--gpu-model", "a100", *SOON, "--", "sleep", "600")
    stalled = login.submit(
        *("--gpus", "2", "--gpu-model", "a100", *SOON, "--stalled-for", "3s", "--", stoker_command()),
        *("sim", "train", "--step", "40ms", "--hang-after", "120", "--hang", "livelock", "--report-steps"),
    )
    timed = checkpointing("timed", "--gpus", "0", "--time-limit", "3s")
    cancelled = checkpointing("cancelled", "--gpus", "0")
    scancelled = checkpointing("scancelled", "--gpus", "0")
    spread = checkpointing("spread", "--gpus", "0", "--nodes", "2", command=CHECKPOINTS.replace("exit 0", "exit 1"))
    deaf = checkpointing("deaf", "--gpus", "0", command=DEAF)
    yielding = checkpointing("yielding", "--preemptible", "--gpus", "2", "--gpu-model", "h100")
    failing = login.submit("--gpus", "0", "--", "exit 7")
    for job in (cancelled, scancelled, spread, deaf, yielding):
        began = login.directory / login.site.job(job).name / "began"
        wait_for(began.exists, named=f"the start of {job}")
        # The end of a short job is not held up to see whether it was signalled.
        wait_for(lambda: time.time() > began.stat().st_mtime + 2.5)  # noqa: B023
    login.type("cancel", cancelled)
    login.cluster.run("scancel", *(str(login.slurm_job(job)) for job in (scancelled, spread, deaf)))
    # A job of a higher partition takes the place of the preemptible one, which starts again as the same attempt.
    urgent = login.submit("--gpus", "2", "--gpu-model", "h100", "--", "sleep", "1")
    login.wait_until(urgent, "succeeded")
    wait_for(lambda: "Slurm started the job again on node3" in login.type("logs", yielding), named="the second start")
    login.wait_until_began(yielding)
    again = login.attempt(yielding)
    before = saves(yielding)
    assert (before, again.number, again.outcome) == (1, 1, None)
    assert login.cluster.details(login.slurm_job(yielding))["Restarts"] == "1"
    login.type("cancel", yielding)
    login.type("wait", "--all", "--timeout", "100s", code=1)
    expected = {
        idle: ("failed", 124, "GPU 0 stayed below 1% for ", "FAILED", "124:0"),
        stalled: ("failed", 124, "the job made no step for", "FAILED", "124:0"),
        timed: ("failed", 124, "It had run for 3s, which was its time limit", "FAILED", "124:0"),
        limited: ("failed", 124, "It had run for as long as Slurm allows", "FAILED", "124:0"),
        cancelled: ("cancelled", None, "", "CANCELLED", None),
        scancelled: ("cancelled", None, "it was cancelled in Slurm", "CANCELLED", None),
        spread: ("cancelled", None, "it was cancelled in Slurm", "CANCELLED", None),
        deaf: ("cancelled", None, "it was cancelled in Slurm", "CANCELLED", None),
        yielding: ("cancelled", None, "", "CANCELLED", None),
        failing: ("failed", 7, "", "FAILED", "7:0"),
        urgent: ("succeeded", 0, "", "COMPLETED", "0:0"),
    }
    for job, (outcome, code, reason, state, slurm_code) in expected.items():
        attempt, shown = login.attempt(job), login.type("show", job)
        assert (attempt.outcome, attempt.exit_code, attempt.number) == (outcome, code, 1), shown
        assert reason in attempt.reason, shown
        in_slurm = login.cluster.wait_for_state(login.slurm_job(job), "FAILED", "CANCELLED", "COMPLETED", "TIMEOUT")
        assert in_slurm == state, shown
        assert slurm_code in (None, login.details(job)["ExitCode"]), shown
    assert [(one.outcome, one.reason) for one in login.site.store.attempts.of(resumed)] == [
        ("requeued", "It had run for as long as Slurm allows"),
        ("succeeded", ""),
    ]
    assert login.type("logs", resumed) == "resumed\n"
    for job in (idle, stalled, timed, limited):
        report = (login.record_of(job) / "report.md").read_text()
        assert report.startswith("# Stopped: "), report
        assert login.attempt(job).reason in report
        details = login.site.store.attempts.details(login.attempt(job).id)
        assert details is not None
        assert details.report == report
    for job in (timed, limited, resumed, cancelled, scancelled, deaf):
        assert saves(job) == 1, f"{login.site.job(job).name} was asked to end {saves(job)} times"
    # Also where Slurm has signalled all processes itself.
    assert saves(yielding) == before + 1
    wait_for(lambda: not login.cluster.processes(), named="that no process is left on any node")
    for node in NODES:
        login.cluster.stop_node(node)
    # What the page calls GPU-hours.
    assert worker.stop() == 0
    assert login.site.store.usage.totals(0)["job"] > 3.0
    assert sorted(gpus for _ended, gpus in login.site.store.attempts.rule_stops(0.0)) == [1, 2]


def test_job_whose_start_a_crashed_controller_has_forgotten_is_started_again(login: LoginNode) -> None:
    login.work(lease="10s")
    login.cluster.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    job = login.submit("--gpus", "0", "--", f"touch began; {login.site.until('flag')}")
    login.wait_until_in_slurm(job)
    # The state that it saves while the job waits is what it knows after the crash.
    login.cluster.stop_controller()
    state, kept = login.cluster.directory / "state", login.directory / "state"
    shutil.copytree(state, kept)
    login.cluster.start_controller()
    began = login.directory / "began"
    wait_for(began.exists, named="the start of the job")
    wait_for(lambda: time.time() > began.stat().st_mtime + 4.0)
    login.cluster.stop_controller(signal.SIGKILL)
    shutil.rmtree(state)
    shutil.copytree(kept, state)
    login.cluster.start_controller()
    # What runs there is killed, and Slurm starts the job again; or that comes too soon for the node, which refuses it:
    # then the job is cancelled, though by nobody, and the node is drained.
    attempts = login.site.store.attempts.of
    log = login.record_of(job) / "output"
    wait_for(
        lambda: len(attempts(job)) == 2 or b"Slurm started the job again on node" in log.read_bytes(),
        deadline=PATIENCE,
        named="the second start",
    )
    login.site.create_flag("flag")
    login.wait_until(job, "succeeded")
    assert [one.outcome for one in attempts(job)] in (["succeeded"], ["lost", "succeeded"])
    subprocess.run(RESUME, capture_output=True, check=False)


def test_batch_job_with_stoker_run_ends_by_itself_without_a_queue(cluster: SlurmCluster) -> None:
    command = shlex.join(
        (stoker_command(), "run", "--for", "1s", "--after", "0", "--every", "200ms", "--", "sleep", "600")
    )
    idle = cluster.submit("--gres=gpu:1", "--export=ALL", script=f"exec {command}")
    assert cluster.wait_for_state(idle, "FAILED", "COMPLETED", "CANCELLED") == "FAILED"
    assert cluster.details(idle)["ExitCode"] == "124:0"
    assert re.search(r"stoker: run \w+: GPU 0 stayed below 1% for 1\S*s.*; exit code 124", cluster.output(idle))


# Bad input: one sentence, an exit code, and nothing that is half submitted.


REFUSED = {
    ("--partition", "gpu"): "slurm: the cluster has no partition 'gpu': choose among main, spare",
    ("--gpus", "3"): "gpus: no node of the cluster has 3 GPUs (at most 2)",
    ("--gpu-model", "v100"): "gpu_model: no node of the cluster has GPUs of type v100 (but a100, h100)",
    ("--gpu-model", "a100|h100"): "gpu_model: Slurm takes one type of GPU, by its name on the cluster, such as a100",
    ("--cpus", "9"): "cpus: no node of the cluster has 9 CPUs (at most 8)",
    ("--ram", "1TiB"): "ram: no node of the cluster has 1.0 TiB of RAM (at most 16 GiB)",
    ("--share", "--memory", "1GiB"): "share: Slurm gives whole GPUs to jobs, so a job there cannot share one",
    ("--memory", "1GiB"): "memory: Slurm does not know the memory of GPUs: choose a GPU model instead",
    ("--gpu-memory", "40GiB"): "gpu_memory: Slurm does not know the memory of GPUs: choose a GPU model or a label",
    ("--machine", "node9"): "machine: this queue has no machine node9: there are node1, node2 and node3",
    ("--label", "ib"): "labels: no machine of this queue has the label ib: there are a100, h100 and nvlink",
    ("--machine", "node3", "--label", "nvlink"): "labels: no node of the cluster is left by what it asks and excludes",
    ("--sbatch=--wrap=x",): "--sbatch: '--wrap=x' cannot be given to sbatch: Stoker sets --wrap itself",
}


def test_job_that_the_cluster_cannot_run_is_refused(login: LoginNode) -> None:
    assert "no partition 'gpu': choose among main, spare\n" in login.type("work", "--partition", "gpu", code=2)
    assert "no partition 'gpu'" in login.type("up", "--port", "0", "--partition", "gpu", code=2)
    mistakes = {
        '[work.slurm]\npartition = "gpu"\n': "the cluster has no partition 'gpu': choose among main, spare",
        '[work.slurm]\npartion = "main"\n': "[work.slurm] has no key 'partion': did you mean 'partition'?",
        "[work.slurm]\nmax-pending = 0\n": "[work.slurm] max-pending: 0 is not between 1 and 10000",
        '[work.slrm]\npartition = "main"\n': "[work] has no 'slrm': did you mean 'slurm'?",
    }
    for text, sentence in mistakes.items():
        login.configure(text)
        assert login.type("work", code=2).endswith(f"{sentence}\n")
    login.configure("")
    worker = login.work()
    wait_for(lambda: login.type_json("top", "--json")["machines"][0]["nodes"], named="the nodes of the cluster")
    for options, sentence in REFUSED.items():
        assert login.type("submit", *options, "--", "true", code=2) == f"stoker: {sentence}\n"
    assert login.type_json("list", "--json") == []
    # What only Slurm knows is refused by Slurm, and the job says so.
    login.cluster.configure(EnforcePartLimits="ALL")
    login.cluster.run("scontrol", "update", "PartitionName=spare", "MaxTime=5")
    refused = {
        ("--constraint", "infiniband"): "no node has the features that the constraint names",
        ("--reservation", "course"): "Slurm has no such reservation",
        (
            "--partition",
            "spare",
            "--time-limit",
            "1h",
        ): "the time limit is missing, or longer than the partition allows",
    }
    # They would be refused again, so they do not wait for a retry.
    always = ("--gpus", "0", "--retries", "3", "--backoff", "1h")
    jobs = {login.submit(*always, *options, "--", "true"): sentence for options, sentence in refused.items()}
    login.type("wait", "--timeout", "60s", *jobs, code=1)
    for job, sentence in jobs.items():
        assert f"with exit code 125: Slurm refuses the job: {sentence} (" in login.why(job)
    in_slurm = login.cluster.run("squeue", "--noheader", "--states=all", "--format=%j")
    assert not [job for job in jobs if job in in_slurm]
    login.cluster.run("scontrol", "update", "PartitionName=spare", "MaxTime=UNLIMITED", "State=DRAIN")
    # What is closed for a while is waited for; jobs for elsewhere go on.
    waits = [login.submit("--gpus", "0", "--partition", "spare", "--", "true") for _ in range(3)]
    for job in waits:
        login.site.wait_for_why(
            job, "waits until Slurm takes jobs there again: the partition takes no new jobs, it is dr"
        )
    login.type("edit", *waits, "--partition", "main")
    login.type("wait", *waits, login.submit("--gpus", "0", "--", "true"))
    login.cluster.run("scontrol", "update", "PartitionName=spare", "State=UP")
    assert worker.stop() == 0


def test_unreachable_cluster_or_unshared_directory_is_reported(login: LoginNode) -> None:
    # A directory can be hidden from a node by root alone.
    is_root = os.geteuid() == 0
    if is_root:
        login.cluster.stop_node("node3")
        login.cluster.start_node("node3", hidden=login.site.home)
    login.cluster.configure(MessageTimeout=3)  # a command tries that long to reach the controller
    login.work()
    unseen = login.submit("--gpus", "0", "--sbatch=--nodelist=node3", "--", "true")
    login.wait_until_in_slurm(unseen)
    # A controller that is away: the job waits here, and reaches Slurm once.
    login.cluster.stop_controller()
    away = login.submit("--gpus", "0", "--sbatch=--exclude=node3", "--", "true")
    login.site.wait_for_why(away, r"waits until Slurm answers again: \w+: Unable to contact slurm controller")
    login.cluster.start_controller()
    login.wait_until(away, "succeeded")
    assert {one.outcome for one in login.site.store.attempts.of(away)} <= {"requeued", "succeeded"}
    if is_root:
        place = login.record_of(unseen)
        sentence = f"Stoker did not run on the node: it printed nothing, as when the node does not see {place}"
        wait_for(lambda: sentence in login.type("show", unseen), named="the reason")
        login.cluster.stop_node("node3")
        login.type("cancel", unseen)
    login.type("wait", unseen, code=1 if is_root else 0)


def test_machine_without_a_usable_slurm_is_refused(site: WorkSite, tmp_path: Path) -> None:
    place = tmp_path / "bin"
    place.mkdir()
    site.environment |= {"PATH": str(place), "STOKER_ENGINE": "slurm"}
    for verb in (("work",), ("up", "--port", "0")):
        done = site.stoker(*verb)
        assert (done.code, done.err) == (2, "stoker: there are no Slurm commands here: sbatch was not found in PATH\n")
    sbatch = place / "sbatch"
    sbatch.write_text("#!/bin/sh\necho slurm 19.05.3-2\n")
    sbatch.chmod(0o755)
    done = site.stoker("work")
    assert (done.code, done.err) == (2, "stoker: Slurm 19.05.3-2 is too old: Stoker needs Slurm 20.11 or newer\n")
    # Nothing that has to do with Slurm is needed to look at the queue.
    assert site.stoker("list").code == 0


def test_limits_of_the_cluster_are_waited_for_and_overuse_of_memory_is_a_failure(site: WorkSite) -> None:
    parameters = {
        "MaxJobCount": 4,
        "MinJobAge": 2,
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherParams": "OverMemoryKill",
        "JobAcctGatherFrequency": 1,
    }
    with running_cluster(parameters) as cluster:
        login = LoginNode(site, cluster)
        login.work(lease="10s")
        greedy = "x = bytearray(900 * 2**20); import time; time.sleep(600)"
        large = login.submit("--gpus", "0", "--ram", "300MiB", "--", sys.executable, "-c", greedy)
        login.wait_until_began(large)
        small = [login.submit("--gpus", "0", "--ram", "300MiB", "--", login.site.until("flag")) for _ in range(3)]
        waits = wait_for(lambda: [job for job in small if "takes more jobs" in login.why(job)], named="a job too many")
        assert "waits until Slurm takes more jobs: the cluster has as many jobs as it may" in login.why(waits[0])
        login.site.create_flag("flag")
        login.wait_until(large, "failed")
        why = "with exit code 137: Slurm killed it: it used more RAM than it had asked for"
        assert login.why(large).endswith(why)
        assert [one.outcome for one in site.store.attempts.of(large)] == ["failed"]
        for job in small:
            login.wait_until(job, "succeeded")
        wait_for(lambda: not cluster.processes(), named="that no process is left on any node")


def test_queue_from_a_text_file_to_the_finished_list_and_the_phone(login: LoginNode) -> None:
    """The walk-through that the queue grew from, with nothing but a login node."""
    login.cluster.simulate("2x24GiB")
    trainer = write_trainer(login.directory, waits_for=login.directory / "go")
    lines, finished = login.directory / "gpu_queue.txt", login.directory / "finished.txt"
    lines.write_text(f"{trainer} --lr 1e-3\n")
    options = ("--partition", "main", "--max-pending", "5", "--lease", "20s", "--grace", "3s")
    feeders = Feeders(login.directory)
    with (
        page_site("up", "--port", "0", "--engine", "slurm", *options, **login.site.environment) as site,
        contextlib.closing(feeders),
        chromium() as browser,
        screen(browser, "phone") as shown,
    ):
        assert not [line for line in site.said if "simulated" in line], "it is no demo"
        page = shown.page
        page.goto(f"{site.address}/login#{site.token}")
        expect(page.get_by_text(f"Cluster {login.cluster.name} · 3 nodes, 6 GPUs: 0 allocated, 6 free")).to_be_visible()
        feeders.start(
            *("file", str(lines), "--finished", str(finished), "--append", "--version={id}"),
            *("--fit-with", "--flat-for 500ms --probe-args '--max_tokens=1000000 --wandb_log=False'"),
            environment=login.site.environment,
        )
        expect(page.locator("#section-running").get_by_text(re.compile(r"Slurm job \d+ on node1"))).to_be_visible()
        login.site.create_flag("go")
        wait_for(lambda: finished.exists() and finished.read_text(), named="the finished list")
        assert finished.read_text() == f"{trainer} --lr 1e-3\n"
        (job,) = login.site.store.jobs.find()
        assert f"trains: --lr 1e-3 --version={job.id} --batch_size=200\n" in login.type("logs", job.id)
        page.goto(f"{site.address}/jobs/{job.id}")
        expect(page.get_by_text("succeeded", exact=True).first).to_be_visible()
        expect(page.get_by_text("batch size 200").first).to_be_visible()
        expect(page.get_by_text(login.attempt(job.id).where).first).to_be_visible()
        expect(page.get_by_text(f"--version={job.id} --batch_size=200").first).to_be_visible()
        shown.look_over("slurm-1-finished")
        # From the phone: a job for a node, and its end.
        page.goto(f"{site.address}/submit")
        page.get_by_label("Command").fill("sleep 600")
        page.get_by_label("Directory").fill(str(login.directory))
        page.get_by_label("Name", exact=True).first.fill("from the phone")
        page.get_by_role("button", name="Submit").click()
        page.goto(site.address)
        expect(page.locator("#section-running").get_by_text(re.compile(r"Slurm job \d+ on node1"))).to_be_visible()
        expect(page.get_by_text("1 allocated (1 by this queue), 5 free")).to_be_visible()
        shown.look_over("slurm-2-running")
        (second,) = login.site.store.jobs.find(states=["running"])
        page.locator(f"#running-{second.id}").get_by_role("button", name="Cancel").click()
        page.get_by_role("dialog").get_by_role("button", name=re.compile("^(Stop|Cancel) the job")).click()
        login.wait_until(second.id, "cancelled")
        login.cluster.wait_for_state(login.slurm_job(second.id), "CANCELLED")
        assert site.end() == 0
