"""Slurm's reason codes and states in sentences."""

import time

import pytest

from stoker.engines.slurm.reasons import pending_reason, why_pending

NOW = time.mktime((2026, 11, 18, 12, 0, 0, 0, 0, -1))

# Those of Slurm 20.11 to 24.11, and older spellings of some.
_CODES = """
Prolog Priority Dependency Resources PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive
JobHeldAdmin JobHeldUser BeginTime Licenses AssociationJobLimit AssociationResourceLimit AssociationTimeLimit
Reservation ReqNodeNotAvail FrontEndDown SchedDefer NodeDown BadConstraints SystemFailure JobLaunchFailure
NonZeroExitCode RaisedSignal TimeLimit InactiveLimit InvalidAccount InvalidQOS QOSUsageThreshold QOSJobLimit
QOSResourceLimit QOSTimeLimit Cleaning QOSNotAllowed AccountNotAllowed DependencyNeverSatisfied
QOSGrpCpuLimit QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpJobsLimit QOSGrpMemLimit QOSGrpNodeLimit
QOSGrpSubmitJobsLimit QOSGrpWallLimit QOSMaxCpuPerJobLimit QOSMaxCpuMinutesPerJobLimit QOSMaxNodePerJobLimit
QOSMaxWallDurationPerJobLimit QOSMaxCpuPerUserLimit QOSMaxJobsPerUserLimit QOSMaxNodePerUserLimit
QOSMaxSubmitJobPerUserLimit QOSMinCpuNotSatisfied
AssocGrpCpuLimit AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpJobsLimit AssocGrpMemLimit
AssocGrpNodeLimit AssocGrpSubmitJobsLimit AssocGrpWallLimit AssocMaxJobsLimit AssocMaxCpuPerJobLimit
AssocMaxCpuMinutesPerJobLimit AssocMaxNodePerJobLimit AssocMaxWallDurationPerJobLimit AssocMaxSubmitJobLimit
JobHoldMaxRequeue JobArrayTaskLimit BurstBufferResources BurstBufferStageIn BurstBufferOperation PowerNotAvail
PowerReserved
AssocGrpUnknown AssocGrpUnknownMinutes AssocGrpUnknownRunMinutes AssocMaxUnknownPerJob AssocMaxUnknownPerNode
AssocMaxUnknownMinutesPerJob AssocMaxCpuPerNode AssocGrpMemMinutes AssocGrpMemRunMinutes AssocMaxMemPerJob
AssocMaxMemPerNode AssocMaxMemMinutesPerJob AssocGrpNodeMinutes AssocGrpNodeRunMinutes AssocMaxNodeMinutesPerJob
AssocGrpEnergy AssocGrpEnergyMinutes AssocGrpEnergyRunMinutes AssocMaxEnergyPerJob AssocMaxEnergyPerNode
AssocMaxEnergyMinutesPerJob AssocGrpGRES AssocGrpGRESMinutes AssocGrpGRESRunMinutes AssocMaxGRESPerJob
AssocMaxGRESPerNode AssocMaxGRESMinutesPerJob AssocGrpLicense AssocGrpLicenseMinutes AssocGrpLicenseRunMinutes
AssocMaxLicensePerJob AssocMaxLicenseMinutesPerJob AssocGrpBB AssocGrpBBMinutes AssocGrpBBRunMinutes
AssocMaxBBPerJob AssocMaxBBPerNode AssocMaxBBMinutesPerJob
QOSGrpUnknown QOSGrpUnknownMinutes QOSGrpUnknownRunMinutes QOSMaxUnknownPerJob QOSMaxUnknownPerNode
QOSMaxUnknownPerUser QOSMaxUnknownMinutesPerJob QOSMinUnknown QOSMaxCpuPerNode QOSGrpMemoryMinutes
QOSGrpMemoryRunMinutes QOSMaxMemoryPerJob QOSMaxMemoryPerNode QOSMaxMemoryPerUser QOSMaxMemoryMinutesPerJob
QOSMinMemory QOSGrpNodeMinutes QOSGrpNodeRunMinutes QOSMaxNodeMinutesPerJob QOSMinNode QOSGrpEnergy
QOSGrpEnergyMinutes QOSGrpEnergyRunMinutes QOSMaxEnergyPerJob QOSMaxEnergyPerNode QOSMaxEnergyPerUser
QOSMaxEnergyMinutesPerJob QOSMinEnergy QOSGrpGRES QOSGrpGRESMinutes QOSGrpGRESRunMinutes QOSMaxGRESPerJob
QOSMaxGRESPerNode QOSMaxGRESPerUser QOSMaxGRESMinutesPerJob QOSMinGRES QOSGrpLicense QOSGrpLicenseMinutes
QOSGrpLicenseRunMinutes QOSMaxLicensePerJob QOSMaxLicensePerUser QOSMaxLicenseMinutesPerJob QOSMinLicense QOSGrpBB
QOSGrpBBMinutes QOSGrpBBRunMinutes QOSMaxBBPerJob QOSMaxBBPerNode QOSMaxBBPerUser QOSMinBB DeadLine
MaxBBPerAccount MaxCpuPerAccount MaxEnergyPerAccount MaxGRESPerAccount MaxNodePerAccount MaxLicensePerAccount
MaxMemoryPerAccount MaxUnknownPerAccount MaxJobsPerAccount MaxSubmitJobsPerAccount PartitionConfig AccountingPolicy
FedJobLock OutOfMemory MaxMemPerLimit AssocGrpBilling AssocGrpBillingMinutes AssocGrpBillingRunMinutes
AssocMaxBillingPerJob AssocMaxBillingPerNode AssocMaxBillingMinutesPerJob QOSGrpBilling QOSGrpBillingMinutes
QOSGrpBillingRunMinutes QOSMaxBillingPerJob QOSMaxBillingPerNode QOSMaxBillingPerUser QOSMaxBillingMinutesPerJob
MaxBillingPerAccount QOSMinBilling ReservationDeleted ReservationInvalid Constraints
QOSGrpCPUMinsLimit QOSGrpMemoryLimit QOSGrpNodesLimit QOSMaxCpusPerJobLimit QOSMaxNodesPerJobLimit
"""
CODES = _CODES.split()

TEXTS = [
    "launch failed requeued held",
    "job requeued in held state",
    "user env retrieval failed requeued held",
    "Reserved for maintenance",
    "Requested nodes are busy",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
]

BEGINNINGS = ("waits in Slurm: ", "waits in Slurm until ", "is held in Slurm: ", "cannot start in Slurm: ")


@pytest.mark.parametrize("code", [*CODES, *TEXTS])
def test_every_known_code_is_a_sentence_after_it(code: str) -> None:
    sentence = why_pending(code, None, NOW, "main")
    assert sentence.startswith(BEGINNINGS)
    assert code not in sentence, "the code itself is not part of a known reason"
    assert not sentence.endswith((".", " ", ":"))
    assert "{" not in sentence


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("Priority", "waits in Slurm: jobs of higher priority come first"),
        ("Resources", "waits in Slurm: other jobs use what it asks for"),
        ("PartitionTimeLimit", "cannot start in Slurm: it asks for more time than partition main allows"),
        ("JobHeldAdmin", "is held in Slurm: an administrator has to release it"),
        ("QOSMaxJobsPerUserLimit", "waits in Slurm: its user runs as many jobs as its QOS allows for one user"),
        ("QOSMaxGRESPerUser", "waits in Slurm: its user has all the GPUs that its QOS allows for one user"),
        ("MaxGRESPerAccount", "waits in Slurm: its account has all the GPUs that its QOS allows for one account"),
        ("AssocGrpJobsLimit", "waits in Slurm: its account runs as many jobs as it may"),
        (
            "AssocGrpGRES",
            "waits in Slurm: the running jobs of its account have all the GPUs that they may have together",
        ),
        ("AssocGrpGRESMinutes", "waits in Slurm: its account has used up its GPU minutes"),
        (
            "AssocMaxWallDurationPerJobLimit",
            "cannot start in Slurm: it asks for more time than its account allows for one job",
        ),
        (
            "AssocMaxSubmitJobLimit",
            "waits in Slurm: its user has as many jobs in Slurm as its account allows for one user",
        ),
        ("QOSMinGRES", "cannot start in Slurm: it asks for fewer GPUs than its QOS requires"),
        ("QOSMinMemory", "cannot start in Slurm: it asks for less memory than its QOS requires"),
        ("QOSMaxCpuPerNode", "cannot start in Slurm: it asks for more CPUs than its QOS allows on one node"),
    ],
)
def test_examples(code: str, sentence: str) -> None:
    assert why_pending(code, None, NOW, "main") == sentence


def test_start_and_jobs_ahead_are_part_of_the_sentence() -> None:
    sentence = why_pending("Priority", NOW + 2.5 * 3600, NOW, ahead=12)
    assert sentence == "waits in Slurm: 12 jobs of higher priority come first; starts about 14:30"
    assert why_pending("Priority", None, NOW, ahead=1) == "waits in Slurm: 1 job of higher priority comes first"
    assert why_pending("Priority", NOW - 1, NOW) == "waits in Slurm: jobs of higher priority come first"
    assert why_pending("", NOW + 3600, NOW) == "waits in Slurm's queue; starts about 13:00"
    tomorrow = why_pending("Resources", NOW + 86400, NOW)
    assert tomorrow == "waits in Slurm: other jobs use what it asks for; starts about 2026-11-19 12:00"
    # Behind a job without a time limit, which Slurm counts as one of a year.
    assert why_pending("Resources", NOW + 365 * 86400, NOW) == "waits in Slurm: other jobs use what it asks for"


def test_job_with_a_start_time_waits_until_then() -> None:
    assert why_pending("BeginTime", NOW + 1800, NOW) == "waits in Slurm until it may start at 12:30"
    assert why_pending("BeginTime", None, NOW) == "waits in Slurm until it may start"


@pytest.mark.parametrize("code", ["", "None", "(None)", "(null)", "N/A"])
def test_no_reason_is_the_queue_itself(code: str) -> None:
    assert why_pending(code) == "waits in Slurm's queue"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("ReqNodeNotAvail, UnavailableNodes:node[1-2]", "nodes that it needs are not available: node[1-2]"),
        ("(ReqNodeNotAvail, UnavailableNodes:node7)", "nodes that it needs are not available: node7"),
        ("ReqNodeNotAvail, UnavailableNodes:", "nodes that it needs are not available"),
        ("ReqNodeNotAvail, Reserved for maintenance", "its nodes are reserved for maintenance"),
        ("ReqNodeNotAvail, May be reserved for other job", "nodes that it needs may be reserved for another job"),
        ("ReqNodeNotAvail(Unavailable:node3)", "nodes that it needs are not available: node3"),
    ],
)
def test_nodes_that_are_not_available_are_named(code: str, text: str) -> None:
    assert pending_reason(code).text == text


def test_text_is_understood_as_scontrol_writes_it() -> None:
    assert why_pending("launch_failed_requeued_held") == why_pending("launch failed requeued held")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("QueuedForNewThing", "queued for new thing (QueuedForNewThing)"),
        ("GPUQuotaReached", "GPU quota reached (GPUQuotaReached)"),
        ("213", "code 213"),
        ("Some plugin has refused it", "Some plugin has refused it"),
    ],
)
def test_unknown_code_is_spelled_out(code: str, text: str) -> None:
    assert why_pending(code) == f"waits in Slurm: {text}"
    assert pending_reason(code).outlook == "waits"


def test_jobs_that_can_never_start() -> None:
    never = {code for code in CODES if pending_reason(code).outlook == "never"}
    assert {"DependencyNeverSatisfied", "BadConstraints", "PartitionTimeLimit", "QOSMaxGRESPerJob"} <= never
    by_themselves = {"Priority", "Resources", "Dependency", "BeginTime", "QOSMaxGRESPerUser", "AssocGrpCpuLimit"}
    by_others = {"JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "PartitionDown", "PartitionNodeLimit", "NodeDown"}
    assert not never & (by_themselves | by_others)
