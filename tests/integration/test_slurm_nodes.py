"""Jobs over several nodes of a Slurm cluster: one shim per node, judged, stopped and explained together."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from stoker.engines.slurm.record import NodeRecord, SlurmAttemptRecord
from stoker.procfs import identify, is_alive
from stoker.runs.processes.tree import children
from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import wait_for
from tests.support.work_site import PATIENCE, RunningWorker, WorkSite

FAST = ("--lease", "10s", "--grace", "1s")


class NodesSite:
    """A worker for a cluster, and jobs over two of its nodes."""

    def __init__(self, site: WorkSite, cluster: SlurmCluster) -> None:
        self.site = site
        self.cluster = cluster
        site.environment |= cluster.environment()
        del site.environment["STOKER_GPUS"]
        site.environment["STOKER_ENGINE"] = "slurm"

    def work(self, *arguments: str) -> RunningWorker:
        return self.site.work(*(arguments or FAST))

    def submit(self, command: str, **asked: object) -> str:
        return self.site.submit(command, **({"nodes": 2, "retries": 0} | asked))

    def submit_as_typed(self, *words: str) -> str:
        """Over two nodes with two GPUs each."""
        where = ("--directory", str(self.site.directory), "--bare-env")
        done = self.site.stoker("submit", "--nodes", "2", "--gpus", "2", *where, *words)
        assert done.code == 0, done.err
        return done.out.strip()

    def record(self, job: str, rank: int = 0, number: int = 1) -> SlurmAttemptRecord:
        record = SlurmAttemptRecord(self.site.home / "attempts" / f"{job}-{number}")
        return record if rank == 0 else NodeRecord(record.directory, rank)

    def output(self, job: str, rank: int = 0, number: int = 1) -> str:
        path = self.record(job, rank, number).output
        return path.read_text() if path.exists() else ""

    def wait_for_output(self, job: str, text: str, *ranks: int, number: int = 1) -> None:
        for rank in ranks or (0, 1):
            wait_for(lambda: text in self.output(job, rank, number), named=f"{text!r} of node {rank}")  # noqa: B023

    def processes(self, job: str, node: str, name: str) -> list[int]:
        """The supervising processes of this name on the node."""
        found = []
        for pid in self.cluster.processes(node):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if job in command and Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    found.append(pid)
        return found

    def end(self, job: str, *states: str) -> tuple[str | None, int | None, str]:
        """The last attempt's outcome, exit code and reason, once the job has ended and nothing of it runs."""
        self.site.wait_until(job, *(states or ("succeeded", "failed", "cancelled", "lost")))
        wait_for(lambda: not self.cluster.processes(), deadline=PATIENCE, named="that nothing is left on any node")
        wait_for(lambda: not self.cluster.active_jobs(), deadline=PATIENCE, named="the end in Slurm")
        last = self.site.last_attempt(job)
        return last.outcome, last.exit_code, last.reason


@pytest.fixture
def nodes(site: WorkSite, cluster: SlurmCluster) -> NodesSite:
    return NodesSite(site, cluster)


SHOW = (
    'echo "args {nodes} {node_rank} {master_addr} {master_port} {{nodes}}"; '
    'echo "env $STOKER_NODES $STOKER_NODE_RANK $MASTER_ADDR $MASTER_PORT $SLURM_NTASKS $SLURM_PROCID '
    '$SLURM_JOB_NODELIST $CUDA_VISIBLE_DEVICES"'
)
LISTEN = """python3 -c "import socket, sys
server = socket.create_server(('', int(sys.argv[1])))
print(server.accept()[0].recv(9).decode())" """
CONNECT = """until python3 -c "import socket, sys
socket.create_connection(sys.argv[1:]).send(b'hello')" {master_addr} {master_port} 2> /dev/null; do sleep 0.1; done"""
# Runs until it is stopped, and says by what.
SLEEP = 'trap "echo got TERM; exit 0" TERM; echo "begun on $SLURMD_NODENAME"; while :; do sleep 0.1; done'


def only_on(rank: int, command: str, others: str = SLEEP) -> str:
    return f"if [ $STOKER_NODE_RANK = {rank} ]; then {command}; else {others}; fi"


def test_every_node_runs_the_command_with_its_own_values(nodes: NodesSite) -> None:
    job = nodes.submit(SHOW, gpus=2)
    # They meet. Then the first node ends at once, the second later: the job goes on, and is stopped by neither.
    longer = nodes.submit(only_on(0, f"{LISTEN} {{master_port}}", f"{CONNECT}; sleep 1; echo last"), gpus=2)
    nodes.work()
    assert nodes.site.wait_until(job, "succeeded", "failed").state == "succeeded"
    found = re.search(r"args 2 0 (\S+) (\d+) \{nodes\}", nodes.output(job))
    assert found is not None
    address, port = found.groups()
    for rank in (0, 1):
        assert f"args 2 {rank} {address} {port} {{nodes}}" in nodes.output(job, rank)
        assert f"env 2 {rank} {address} {port} 2 {rank} node[1-2] 0,1" in nodes.output(job, rank)
    assert nodes.end(longer)[0] == "succeeded"
    assert (nodes.output(longer), nodes.output(longer, 1)) == ("hello\n", "last\n")


# The last words of torchrun.
RANK_DIED = """
Root Cause (first observed failure):
[0]:
  time      : 2030-01-31_13:32:44
  host      : localhost
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 29766)  (SIGKILL)
  error_file: <N/A>
"""


def test_failure_cancel_and_time_limit_stop_every_node(nodes: NodesSite) -> None:
    (nodes.site.directory / "died").write_text(RANK_DIED)
    limited, cancelled = nodes.submit(SLEEP, time_limit=5.0), nodes.submit(SLEEP)
    first = nodes.submit(only_on(0, f"{nodes.site.until('go')}; exit 3"))
    failing = [first, nodes.submit(only_on(1, f"{nodes.site.until('go')}; cat died; exit 3"))]
    nodes.work()
    for rank, job in enumerate(failing):
        nodes.wait_for_output(job, "begun on", 1 - rank)
    nodes.wait_for_output(cancelled, "begun on")
    nodes.site.store.jobs.cancel([cancelled])
    nodes.site.create_flag("go")
    for rank, job in enumerate(failing):
        nodes.site.wait_until(job, "failed")
        last = nodes.site.last_attempt(job)
        who = "; rank 3 failed first, by SIGKILL" if rank else ""
        assert (last.exit_code, last.reason) == (3, f"the command on node{rank + 1} ended with code 3{who}")
        assert "got TERM" in nodes.output(job, 1 - rank)
    assert nodes.site.wait_until(cancelled, "cancelled", "failed").state == "cancelled"
    outcome, code, reason = nodes.end(limited)
    assert (outcome, code, reason) == ("failed", 124, "It had run for 5s, which was its time limit")
    for job in (limited, cancelled):
        for rank in (0, 1):
            assert "got TERM" in nodes.output(job, rank)


# Deaths

SHIM, REAPER = "stoker-shim", "stoker-reaper"
# Who is killed, and what the reason of the outcome says.
DEATHS = {
    "leader": ("node1", SHIM, "Stoker itself was killed"),
    "follower": ("node2", SHIM, "stopped on node2: Stoker itself was killed"),
    "srun": ("node1", "srun", "Slurm ended the part of the job on node2: srun was ended by signal 9"),
    "reaper": ("node2", REAPER, "stopped on node2: The reaper of the job was killed"),
}


def test_death_of_a_supervisor_or_a_node_ends_the_attempt_once_and_leaves_nothing(nodes: NodesSite) -> None:
    jobs = {who: nodes.submit(SLEEP, on_loss="hold") for who in (*DEATHS, "frozen leader")}
    elsewhere = {"sbatch": ["--nodelist=node1,node3"]}
    crashed = jobs["crash"] = nodes.submit(SLEEP, on_loss="hold", slurm=elsewhere)
    nodes.work()
    for job in jobs.values():
        nodes.wait_for_output(job, "begun on")
    for who, (node, name, _reason) in DEATHS.items():
        os.kill(nodes.processes(jobs[who], node, name)[0], signal.SIGKILL)
    nodes.cluster.crash_node("node3")
    # A leader that is silent: the other node stops by itself before anybody may start another attempt.
    frozen = jobs["frozen leader"]
    for name in (SHIM, REAPER):
        os.kill(nodes.processes(frozen, "node1", name)[0], signal.SIGSTOP)
    wait_for(lambda: nodes.record(frozen, 1).status().state == "ended", deadline=PATIENCE, named="the other's stop")
    stopped = nodes.record(frozen, 1).status()
    assert (stopped.ending, stopped.left) == ("lease", ())
    for job in jobs.values():
        nodes.site.wait_until(job, "held")
        assert [attempt.outcome for attempt in nodes.site.store.attempts.of(job)] == ["lost"]
    lost = nodes.site.store.attempts.of(frozen)[0].ended
    assert lost is not None
    assert stopped.ended is not None
    assert stopped.ended < lost + time.time() - nodes.site.store.clock(), "before another attempt could start"
    for who, (_node, _name, reason) in DEATHS.items():
        assert reason in nodes.site.store.attempts.of(jobs[who])[0].reason
    assert "node3" in nodes.site.store.attempts.of(crashed)[0].reason
    assert "got TERM" in nodes.output(crashed)
    nodes.cluster.start_node("node3")
    nodes.end(frozen, "held")


def test_success_on_the_first_node_does_not_count_when_its_supervisor_is_killed_before_the_others_end(
    nodes: NodesSite,
) -> None:
    job = nodes.submit(only_on(0, "echo begun on the first"), on_loss="hold")
    nodes.work()
    nodes.wait_for_output(job, "begun on")
    (reaper,) = nodes.processes(job, "node1", REAPER)
    wait_for(lambda: not children(reaper), named="the end of the command on the first node")
    (shim,) = nodes.processes(job, "node1", SHIM)
    os.kill(shim, signal.SIGKILL)
    outcome, _code, reason = nodes.end(job, "held", "succeeded")
    assert (outcome, reason) == ("lost", "its supervisor was killed before the job had ended on all nodes")


def test_next_job_on_a_node_kills_unsupervised_processes_of_an_earlier_job(
    nodes: NodesSite,
) -> None:
    here = {"nodes": 1, "slurm": {"sbatch": ["--nodelist=node1"]}}
    steps = shlex.quote(f"touch stepping; {nodes.site.until('go')}")
    step = f"srun --overlap sh -c {steps}; echo step ended with $?"
    orphaned, stepping = nodes.submit(SLEEP, on_loss="hold", **here), nodes.submit(step, **here)
    nodes.work()
    nodes.wait_for_output(orphaned, "begun on", 0)
    slurm_job = nodes.record(orphaned).owner().slurm_job  # type: ignore[union-attr]
    # The reaper before its parent: the kernel continues a stopped process when its parent ends.
    supervising = [nodes.processes(orphaned, "node1", name)[0] for name in (REAPER, SHIM)]
    for pid in nodes.cluster.processes("node1"):
        with contextlib.suppress(OSError):  # it has ended since
            if f"slurmstepd: [{slurm_job}.batch]" in Path(f"/proc/{pid}/cmdline").read_text():
                supervising.append(pid)
    assert len(supervising) == 3
    left = [who for who in map(identify, children(supervising[0])) if who is not None]
    assert left
    wait_for((nodes.site.directory / "stepping").exists, named="the step")
    for how in (signal.SIGSTOP, signal.SIGKILL):
        for pid in supervising:
            os.kill(pid, how)
    nodes.site.wait_until(orphaned, "held")
    assert all(map(is_alive, left))
    nodes.site.wait_until(nodes.submit("true", **here), "succeeded")
    assert not any(map(is_alive, left))
    nodes.site.create_flag("go")
    assert nodes.end(stepping)[0] == "succeeded"
    assert nodes.output(stepping) == "step ended with 0\n", "a step of another job is left alone"


def test_preempted_job_saves_its_state_on_all_nodes_and_is_the_same_attempt_later(nodes: NodesSite) -> None:
    """Slurm signals the steps first, and after the grace time the batch script; then it starts the job again."""
    low = "PartitionName=low Nodes=ALL PriorityTier=1 State=UP GraceTime=4 PreemptMode=REQUEUE"
    nodes.cluster.configure(partitions=[low])
    again = f"echo start $SLURM_RESTART_COUNT; [ -z $SLURM_RESTART_COUNT ] || exit 0; {SLEEP}"
    job = nodes.submit(again, preemptible=True, gpus=2, slurm={"partition": "low"})
    nodes.work()
    nodes.wait_for_output(job, "begun on")
    other = nodes.cluster.submit("--nodes=3", "--gres=gpu:2", "--partition=main", script="true")
    nodes.cluster.wait_for_state(other, "COMPLETED")
    assert nodes.end(job)[:2] == ("succeeded", 0)
    assert len(nodes.site.store.attempts.of(job)) == 1
    for rank in (0, 1):
        assert nodes.output(job, rank).count("begun on") == 1
        assert nodes.output(job, rank).index("got TERM") < nodes.output(job, rank).index("start 1")


# Judgement

TRAIN = "stoker sim train --ranks 2 --step 40ms"
RULE = ("--idle-every", "250ms", "--idle-after", "0s", "--for", "3s", "--unused-for", "3s", "--stalled-for", "3s")


def test_dead_rank_of_one_node_is_a_stall_of_the_whole_job(nodes: NodesSite) -> None:
    command = f"{TRAIN} --hang rank-dead --hang-after 100"
    done = nodes.site.directory / "then"
    then = f"exec 'echo $STOKER_RULE > {done}'"
    job = nodes.submit_as_typed("--then", then, *RULE, "--", "sh", "-c", command)
    nodes.work()
    outcome, code, reason = nodes.end(job)
    assert (outcome, code) == ("failed", 124)
    assert "GPU 0 of node1, GPU 1 of node1 and GPU 0 of node2 have been fully used without doing work" in reason
    report = nodes.record(job).report.read_text()
    assert "**Rank 3 (GPU 1 of node2) is gone**: its process has ended, and the others wait for it." in report
    assert "Ranks 0-2 are in `all_reduce`" in report
    for node in ("node1", "node2"):
        part = report.partition(f"## Stacks of {node}\n")[2].partition("\n## ")[0]
        assert "> all_reduce (" in part, f"the stacks of {node}"
    wait_for(done.exists, named="the action")


# With PyTorch, where that is installed: all ranks of both nodes meet, and add up their numbers in each step.
TORCH = """
    import os
    import signal
    import sys
    import time

    import torch.distributed
    from stoker.gpus.sim import SimulatedProcess
    from stoker.gpus.sim.load import spin

    how, steps = sys.argv[1], 40 if sys.argv[1] == "trains" else 100_000
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    gpu = SimulatedProcess.attach(int(os.environ["LOCAL_RANK"]))
    gpu.hold(2 * 2**30)
    gpu.work(0.93)
    for step in range(1, steps + 1):
        value = torch.tensor([rank + 1.0])
        torch.distributed.all_reduce(value)
        if rank == 0:
            print(f"step {step}/{steps} sum={value.item():g}", flush=True)
        time.sleep(0.04)
        if step == 80 and how == "hangs":
            gpu.play((spin(),))
            while rank == 3:
                pass
        if step == 20 and how == "dies" and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.destroy_process_group()
"""
TORCHRUN = (
    *("torchrun", "--nnodes", "{nodes}", "--node-rank", "{node_rank}", "--nproc-per-node", "{gpus}"),
    *("--master-addr", "{master_addr}", "--master-port", "{master_port}", "train.py"),
)


@pytest.mark.timeout(400)  # it takes PyTorch seconds to be imported, in six processes of each job
def test_torchrun_over_two_nodes_trains_and_a_rank_that_dies_or_hangs_ends_all(nodes: NodesSite) -> None:
    how_to = Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md"
    assert f"stoker submit --nodes 2 --gpus 2 -- {' '.join(TORCHRUN)}\n" in how_to.read_text()
    pytest.importorskip("torch")
    (nodes.site.directory / "train.py").write_text(textwrap.dedent(TORCH))
    rule = (*RULE, "--unused-for", "60s")  # until the ranks have met
    trains, dies, hangs = (
        nodes.submit_as_typed("--retries", "0", *rule, "--", *TORCHRUN, how) for how in ("trains", "dies", "hangs")
    )
    nodes.work()
    # Four ranks, which are 1, 2, 3 and 4 to the sum.
    assert nodes.site.wait_until(trains, "succeeded", "failed").state == "succeeded", nodes.output(trains)
    assert nodes.output(trains).endswith("step 40/40 sum=10\n")
    nodes.site.wait_until(dies, "failed")
    last = nodes.site.last_attempt(dies)
    assert last.exit_code == 1
    assert re.fullmatch(r"the command on node[12] ended with code 1; rank 3 failed first, by SIGKILL", last.reason)
    outcome, code, reason = nodes.end(hangs)
    assert (outcome, code) == ("failed", 124)
    assert "GPU 1 of node2 have been fully used without doing work" in reason
    report = nodes.record(hangs).report.read_text()
    assert "Rank 3 (GPU 1 of node2)" in report
    assert "all_reduce" in report
    assert f"- command: `{' '.join(TORCHRUN)} hangs`".replace("{gpus}", "2") in report


def test_idle_node_is_judged_as_the_rule_requires(nodes: NodesSite) -> None:
    half_busy = only_on(0, "stoker sim load", "sleep 1000")
    whole, part = (
        nodes.submit_as_typed("--gpus", "1", *RULE, "--require", how, "--", "sh", "-c", half_busy)
        for how in ("all", "any")
    )
    nodes.work()
    nodes.site.wait_until(part, "failed")
    last = nodes.site.last_attempt(part)
    assert (last.exit_code, last.outcome) == (124, "failed")
    assert re.search(r"GPU \d of node2 stayed below 1% for 3", last.reason)
    assert nodes.site.job(whole).state == "running"
    nodes.site.store.jobs.cancel([whole])
    assert nodes.end(whole)[0] == "cancelled"


def test_silent_node_is_unknown_and_never_idle(nodes: NodesSite) -> None:
    job = nodes.submit_as_typed(*RULE, "--", "sh", "-c", SLEEP)
    nodes.work()
    nodes.wait_for_output(job, "begun on")
    (follower,) = nodes.processes(job, "node2", SHIM)
    os.kill(follower, signal.SIGSTOP)
    status = nodes.record(job).status
    wait_for(lambda: "nothing was received" in status().verdict_reason, deadline=PATIENCE, named="an unknown node")
    assert (status().state, status().verdict) == ("running", "unknown")
    # Longer than the window: all GPUs were idle meanwhile, and half of them were not seen.
    looks = len(nodes.record(job).readings.read_bytes())
    wait_for(lambda: len(nodes.record(job).readings.read_bytes()) > 2 * looks, deadline=PATIENCE, named="more looks")
    assert nodes.site.job(job).state == "running"
    assert nodes.site.stoker("snooze", "1h", job).code == 0
    wait_for(lambda: nodes.record(job).snooze(), named="the snooze on the first node")
    os.kill(follower, signal.SIGCONT)
    wait_for(lambda: "snoozed" in status().verdict_reason, deadline=PATIENCE, named="the snooze of all nodes")
    assert nodes.site.stoker("snooze", "--end", job).code == 0
    assert nodes.end(job)[:2] == ("failed", 124)
    assert "idle" in nodes.record(job).status().verdict


# Logs


def test_log_of_each_node_is_shown_by_itself_or_with_its_name(nodes: NodesSite) -> None:
    job = nodes.submit(f"echo output {{node_rank}}; {nodes.site.until('go')}; echo more {{node_rank}}")
    nodes.work()
    nodes.wait_for_output(job, "output")
    nodes.site.wait_for_why(job, r"running since .* on node1 and node2")

    def logs(*options: str) -> str:
        done = nodes.site.stoker("logs", job, *options)
        assert done.code == 0, done.err
        return done.out

    assert (logs(), logs("--node", "1"), logs("--node", "node2")) == ("output 0\n", *["output 1\n"] * 2)
    assert nodes.site.stoker("logs", job, "--node", "3").err == (
        f"stoker: job {job} has no node '3': choose 0 (node1) and 1 (node2), or all\n"
    )
    nodes.site.create_flag("go")
    followed = logs("--node", "all", "-f").splitlines()
    assert [line for line in followed if line.startswith("node1: ")] == ["node1: output 0", "node1: more 0"]
    assert [line for line in followed if line.startswith("node2: ")] == ["node2: output 1", "node2: more 1"]
    assert logs("--node", "all", "-n", "1") == "node1: more 0\nnode2: more 1\n"
    assert nodes.end(job)[0] == "succeeded"


def test_snapshot_and_batch_size_are_found_once_for_all_nodes(nodes: NodesSite) -> None:
    place = nodes.site.directory
    (place / "version").write_text("committed\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run(("git", "-c", "user.name=a", "-c", "user.email=a@b", *words), cwd=place, check=True)
    (place / "version").write_text("changed\n")
    # A probe is a job on one node, and finds 2. On two nodes the second runs out of memory with more than 1.
    train = "stoker sim train --epochs 1 --steps 60 --step 20ms --memory 2GiB --per-example 6GiB --batch-size"
    fails = 'echo "torch.cuda.OutOfMemoryError: CUDA out of memory."; exit 1'
    command = (
        "cat version; echo nodes {nodes} size {batch_size}; "
        f"[ {{nodes}}{{node_rank}}{{batch_size}} != 212 ] || {{ {fails}; }}; {train} {{batch_size}}"
    )
    job = nodes.submit_as_typed("--pin", "--allow-dirty", "--fit", "--fit-with", "--max 8", "--", "sh", "-c", command)
    nodes.work()
    outcome, code, reason = nodes.end(job)
    assert (outcome, code, reason) == ("succeeded", 0, "batch size 1, as it ran out of memory with 2")
    for rank in (0, 1):
        log = nodes.output(job, rank)
        restart = log.index("stoker: it ran out of memory, and is started again with a batch of 1\n")
        assert log.index("committed\nnodes 2 size 2\n") < restart < log.index("committed\nnodes 2 size 1\n")
    probes = [path.read_text() for path in nodes.record(job).directory.glob("probes/*")]
    assert any("nodes 1 size 2" in text for text in probes)
    assert not any("nodes 2" in text for text in probes)
    assert not list(nodes.record(job).directory.glob("code*")), "the snapshot is removed"
