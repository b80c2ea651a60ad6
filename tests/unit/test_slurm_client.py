"""What the answers of Slurm's commands mean, in the formats of Slurm 20.11 to 24.11."""

import secrets
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engines.slurm.answers import JOB_FIELDS, SEPARATOR_LENGTH, failure, parse_duration
from stoker.engines.slurm.client import (
    SlurmClosed,
    SlurmFull,
    SlurmJob,
    SlurmProblem,
    SlurmRefusal,
    gpus_in,
    parse_config,
    parse_fields,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_version,
    submitted_id,
)
from stoker.errors import StokerError

SEPARATOR = "0123456789abcdef0123"
RUNNING = {
    "A": "42", "T": "RUNNING", "r": "None", "S": "1794988945", "e": "1794992545", "l": "1:00:00", "b": "gres:gpu:2",
    "D": "2", "N": "node[1-2]", "P": "main", "u": "ada", "V": "1794988900", "j": "train", "k": "stoker:k:a1",
}  # fmt: skip


def answer(*jobs: Mapping[str, str], separator: str = SEPARATOR) -> str:
    """As squeue prints it."""
    return "".join("".join(separator + job[field] for field in JOB_FIELDS) + "\n" for job in jobs)


def test_job() -> None:
    assert parse_jobs(answer(RUNNING)) == [
        SlurmJob(
            id=42, state="RUNNING", reason="", comment="stoker:k:a1", name="train", nodes="node[1-2]", node_count=2,
            partition="main", user="ada", submitted=1794988900.0, start=1794988945.0, end=1794992545.0,
            time_limit=3600.0, gres="gres:gpu:2",
        )
    ]  # fmt: skip


def test_pending_job_has_no_times_and_no_nodes() -> None:
    pending = RUNNING | {"T": "PENDING", "r": "Priority", "S": "N/A", "e": "N/A", "l": "UNLIMITED", "N": "", "b": "N/A"}
    (job,) = parse_jobs(answer(pending | {"k": "(null)"}))
    assert (job.reason, job.start, job.end, job.time_limit, job.nodes, job.gres, job.comment) == (
        "Priority", None, None, None, "", "", "",
    )  # fmt: skip


def test_no_jobs_is_an_answer() -> None:
    assert parse_jobs("") == []


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5))
def test_any_name_and_comment_is_read_as_it_is(texts: list[tuple[str, str]]) -> None:
    jobs = [RUNNING | {"A": str(number), "j": name, "k": f"x{comment}"} for number, (name, comment) in enumerate(texts)]
    parsed = parse_jobs(answer(*jobs, separator=secrets.token_hex(SEPARATOR_LENGTH // 2)))
    assert [(job.id, job.name, job.comment) for job in parsed] == [
        (number, name, f"x{comment}") for number, (name, comment) in enumerate(texts)
    ]


@given(st.data())
def test_part_of_a_job_is_a_problem(data: st.DataObject) -> None:
    first, both = answer(RUNNING), answer(RUNNING, RUNNING | {"A": "43"})
    part = both[: data.draw(st.integers(1, len(both) - 1).filter(lambda length: length != len(first)))]
    with pytest.raises(SlurmProblem, match="cannot be read"):
        parse_jobs(part)


@pytest.mark.parametrize("text", ["slurm_load_jobs error: something new\n", "\n", answer({**RUNNING, "A": "x"})])
def test_other_output_is_a_problem(text: str) -> None:
    with pytest.raises(SlurmProblem, match="squeue's answer cannot be read"):
        parse_jobs(text)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gres:gpu:2", 2),  # 20.11, 22.05
        ("gres/gpu:a100:2", 2),  # 23.11, 24.11
        ("gres:gpu", 1),
        ("gpu:a100:4(S:0-1),gpu:v100:2(S:0,2),nvme:1", 6),
        ("gpu:a100:3(IDX:0,2-3)", 3),
        ("gpu:a100:0(IDX:N/A)", 0),
        ("gpu:a100_3g.20gb:7", 7),
        ("shard:8", 0),
        ("(null)", 0),
        ("", 0),
    ],
)
def test_gpus_in_generic_resources(gres: str, gpus: int) -> None:
    assert gpus_in(gres) == gpus


NODE_22_05 = (
    "NodeName=node1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=3 CPUEfctv=8 CPUTot=8 CPULoad=0.00"
    " AvailableFeatures=a100,nvlink ActiveFeatures=a100,nvlink Gres=gpu:a100:2(S:0-1) GresDrain=N/A"
    " GresUsed=gpu:a100:1(IDX:0) NodeAddr=127.0.0.1 NodeHostName=vm Port=14977 Version=22.05.8"
    " OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=16000 AllocMem=100 FreeMem=23504 Sockets=8 Boards=1"
    " State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main,spare "
    " BootTime=1794973928 SlurmdStartTime=1794988944 LastBusyTime=1794988944"
    " CfgTRES=cpu=8,mem=16000M,billing=8 AllocTRES=cpu=1,mem=100M CapWatts=n/a{reason}\n"
)
NODE_20_11 = (
    "NodeName=gpu7 Arch=x86_64 CoresPerSocket=16 CPUAlloc=0 CPUTot=32 CPULoad=0.01 AvailableFeatures=(null)"
    " ActiveFeatures=(null) Gres=gpu:8 GresDrain=N/A GresUsed=gpu:0 NodeAddr=gpu7 NodeHostName=gpu7 Version=20.11.9"
    " OS=Linux 3.10.0-1160.el7.x86_64 #1 SMP  RealMemory=191000 AllocMem=0 FreeMem=180000 Sockets=2 Boards=1"
    " State=DOWN* ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=gpu "
    " BootTime=None SlurmdStartTime=None CfgTRES=cpu=32,mem=191000M,billing=32,gres/gpu=8 AllocTRES= CapWatts=n/a"
    " CurrentWatts=0 AveWatts=0 Reason=Not responding [slurm@1794988945]\n"
)
NODE_24_11 = (
    "NodeName=cpu1 Arch=x86_64 CoresPerSocket=16 CPUAlloc=32 CPUEfctv=32 CPUTot=32 CPULoad=31.9"
    " AvailableFeatures=(null) ActiveFeatures=(null) Gres=(null) GresDrain=N/A GresUsed=(null) NodeAddr=cpu1"
    " NodeHostName=cpu1 Version=24.11.3 OS=Linux 5.14.0-503.el9.x86_64 #1 SMP PREEMPT_DYNAMIC"
    " RealMemory=191000 AllocMem=191000 FreeMem=1000 Sockets=2 Boards=1 State=ALLOCATED+RESERVED ThreadsPerCore=1"
    " TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=cpu BootTime=1794973928 SlurmdStartTime=1794988944"
    " LastBusyTime=1794988944 ResumeAfterTime=None CfgTRES=cpu=32,mem=191000M,billing=32"
    " AllocTRES=cpu=32,mem=191000M ReservationName=course\n"
)


def test_nodes_of_three_versions() -> None:
    new, old, newest = parse_nodes(NODE_22_05.format(state="MIXED", reason="") + NODE_20_11 + NODE_24_11)
    assert (new.name, new.state, new.available, new.reason) == ("node1", "mixed", True, "")
    assert (new.gpus, new.gpus_allocated, new.gpu_model) == (2, 1, "a100")
    assert (new.cpus, new.cpus_allocated, new.memory) == (8, 3, 16000 * 2**20)
    assert (new.partitions, new.features) == (("main", "spare"), ("a100", "nvlink"))
    assert (old.name, old.state, old.available, old.reason) == ("gpu7", "down", False, "Not responding")
    assert (old.gpus, old.gpus_allocated, old.gpu_model, old.features) == (8, 0, "", ())
    assert (newest.name, newest.state, newest.available, newest.gpus) == ("cpu1", "allocated", True, 0)


@pytest.mark.parametrize(
    ("text", "state", "available"),
    [
        ("IDLE", "idle", True),
        ("IDLE+PLANNED", "idle", True),
        ("IDLE+CLOUD+POWERED_DOWN", "idle", True),
        ("IDLE~", "idle", True),
        ("MIXED+COMPLETING", "mixed", True),
        ("IDLE+DRAIN", "drained", False),
        ("MIXED+DRAIN", "draining", False),
        ("IDLE*", "not responding", False),
        ("IDLE+NOT_RESPONDING", "not responding", False),
        ("MIXED*+DRAIN", "draining", False),
        ("IDLE+MAINTENANCE", "maintenance", False),
        ("DOWN", "down", False),
        ("DOWN+DRAIN", "down", False),
        ("DOWN*+DRAIN+INVALID_REG", "down", False),
        ("UNKNOWN", "unknown", False),
    ],
)
def test_node_state(text: str, state: str, available: bool) -> None:
    (node,) = parse_nodes(NODE_22_05.format(state=text, reason=""))
    assert (node.state, node.available) == (state, available)


@pytest.mark.parametrize("reason", ["bad fan", "bad State=UP fan [x] y", "two\nlines NodeName=x", "gres/gpu count < 8"])
def test_reason_of_a_drained_node(reason: str) -> None:
    text = NODE_22_05.format(state="IDLE+DRAIN", reason=f" Reason={reason} [root@1794988945]")
    first, second = parse_nodes(text + NODE_20_11)
    assert (first.reason, first.state, second.name) == (reason, "drained", "gpu7")


def test_partitions() -> None:
    form = "PartitionName={} Default={} MaxTime={} Nodes={} State={}\n"
    main, other = parse_partitions(
        form.format("main", "YES", "UNLIMITED", "node[1-3]", "UP")
        + form.format("off", "NO", "2-00:00:00", "(null)", "DOWN")
    )
    assert (main.name, main.default, main.up, main.max_time, main.nodes) == ("main", True, True, None, "node[1-3]")
    assert (other.default, other.up, other.max_time, other.nodes) == (False, False, 2 * 86400.0, "")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30:00", 1800.0), ("1:00:00", 3600.0), ("365-00:00:00", 365 * 86400.0), ("UNLIMITED", None), ("N/A", None)],
)
def test_duration(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_details_of_a_job() -> None:
    fields = parse_fields(
        "JobId=7 JobName=a b UserId=ada(1) JobState=RUNNING GRES=gpu:2(IDX:0-1) Comment=x JobState=NO\n"
    )
    assert fields["JobName"] == "a b"
    assert (fields["JobState"], fields["GRES"]) == ("RUNNING", "gpu:2(IDX:0-1)")


def test_config() -> None:
    text = "Configuration data as of 1\nClusterName             = test\nKillWait                = 5 sec\n"
    text += "MinJobAge               = 300 sec\nPreemptMode             = REQUEUE\nSLURM_VERSION           = 22.05.8\n"
    found = parse_config(text)
    assert (found.cluster, found.kill_wait) == ("test", 5.0)
    with pytest.raises(SlurmProblem, match="cannot be read"):
        parse_config("nothing of it\n")


@pytest.mark.parametrize(
    ("text", "version"),
    [("slurm 20.11.9\n", (20, 11)), ("slurm-wlm 22.05.8\n", (22, 5)), ("slurm 24.11.3-2\n", (24, 11))],
)
def test_version(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_old_version_is_refused() -> None:
    with pytest.raises(StokerError, match=r"Slurm 19\.05\.5 is too old: Stoker needs Slurm 20\.11 or newer"):
        parse_version("slurm-wlm 19.05.5\n")
    with pytest.raises(SlurmProblem, match="printed no version"):
        parse_version("")


@pytest.mark.parametrize("text", ["12\n", "12;cluster\n", "a message of the site\n12\n"])
def test_submitted_id(text: str) -> None:
    assert submitted_id(text) == 12


@pytest.mark.parametrize("text", ["", "Submitted batch job 12\n"])
def test_answer_without_an_id_is_a_problem(text: str) -> None:
    with pytest.raises(SlurmProblem, match="no job id"):
        submitted_id(text)


@pytest.mark.parametrize(
    ("errors", "sentence"),
    [
        (
            (
                "sbatch: error: invalid partition specified: nope\n"
                "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
            ),
            "Slurm has no such partition as 'nope' (Invalid partition name specified)",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
            "no node of the partition has the GPUs, CPUs and memory that the job asks for",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
            "this user may not use that account, or not in that partition",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification\n", "may not use that QOS"),
        (
            (
                "sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: Batch job submission failed: Job violates"
                " accounting/QOS policy (job submit limit, user's size and/or time limits)\n"
            ),
            "the job is over a limit of the account or QOS",
        ),
        ("sbatch: error: Batch job submission failed: Requested reservation is invalid\n", "no such reservation"),
        ("sbatch: error: Invalid --time specification\n", "Slurm refuses the job: Invalid --time specification"),
        ("sbatch: unrecognized option '--nonsense'\n", "unrecognized option '--nonsense'"),
        (
            "sbatch: error: Please name a project.\nsbatch: error: Batch job submission failed: Unspecified error\n",
            "Slurm refuses the job: Please name a project.; Unspecified error",
        ),
    ],
)
def test_refusals_of_a_job(errors: str, sentence: str) -> None:
    found = failure("sbatch", 1, errors)
    assert isinstance(found, SlurmRefusal)
    assert sentence in found.sentence


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        ("AssocMaxSubmitJobLimit", "its user has as many jobs in Slurm as its account allows for one user"),
        ("QOSMaxSubmitJobPerUserLimit", "its user has as many jobs in Slurm as its QOS allows for one user"),
        ("AssocGrpSubmitJobsLimit", "its account has as many jobs in Slurm as it may"),
    ],
)
def test_limit_of_submitted_jobs_is_no_refusal_of_the_job(limit: str, sentence: str) -> None:
    rest = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    found = failure("sbatch", 1, f"sbatch: error: {limit}\nsbatch: error: Batch job submission failed: {rest}\n")
    assert isinstance(found, SlurmFull)
    assert str(found) == sentence


@pytest.mark.parametrize(
    ("complaint", "sentence"),
    [
        (
            "Required partition not available (inactive or drain)",
            "the partition takes no new jobs, it is drained or inactive",
        ),
        ("Requested reservation not usable now", "the reservation cannot be used now"),
        ("System submissions disabled", "an administrator has stopped submissions for now"),
    ],
)
def test_partition_or_reservation_that_is_closed_is_no_refusal_of_the_job(complaint: str, sentence: str) -> None:
    found = failure("sbatch", 1, f"sbatch: error: Batch job submission failed: {complaint}\n")
    assert isinstance(found, SlurmClosed)
    assert str(found) == sentence


@pytest.mark.parametrize(
    "complaint",
    [
        "Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation",
        "Slurm backup controller in standby mode",
        "Zero Bytes were transmitted or received",
        "Protocol authentication error",
        "Slurm temporarily unable to accept job, sleeping and retrying",
        "Resource temporarily unavailable",
        "I/O error writing script/environment to file",
        "Unable to contact slurm controller (shutdown failure)",
        "Transport endpoint connection refused",
    ],
)
@pytest.mark.parametrize("command", ["sbatch", "squeue", "scancel"])
def test_controller_that_did_not_decide_is_a_problem(command: str, complaint: str) -> None:
    errors = f"{command}: error: Batch job submission failed: {complaint}\n"
    found = failure(command, 1, errors)
    assert isinstance(found, SlurmProblem)
    assert complaint in str(found)


def test_complaints_of_queries_are_problems() -> None:
    assert isinstance(failure("squeue", 1, "slurm_load_jobs error: Something new\n"), SlurmProblem)
    assert isinstance(failure("squeue", 1, ""), SlurmProblem)
    unknown = failure("scontrol", 1, "slurm_load_jobs error: Invalid job id specified\n")
    assert isinstance(unknown, SlurmRefusal)
