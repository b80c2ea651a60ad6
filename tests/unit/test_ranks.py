"""Which rank the others wait for: the patterns of published hangs."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from stoker.gpus.model import DeviceHealth, JobProgress, Look, Unknown, Utilization
from stoker.rules.rule import Verdict
from stoker.runs.postmortem.facts import NodeFacts, RunFacts
from stoker.runs.postmortem.hints import hints
from stoker.runs.postmortem.outputs import first_failed_rank
from stoker.runs.postmortem.processes import RankNumber, read_processes
from stoker.runs.postmortem.ranks import Comparison, Rank, collective_of, compare, compare_ranks, ranks_of
from stoker.runs.postmortem.report import brief, render
from stoker.runs.postmortem.stacks import Stack
from stoker.runs.record import RankProgress, RunProgress
from stoker.step_file import RankSteps
from tests.support.looks import a_gpu, a_process, a_reading
from tests.unit.test_postmortem_report import (
    ALL_REDUCE,
    LOADER,
    SITE,
    STDLIB,
    TRAIN,
    a_process_info,
    a_stack,
    a_thread,
    headings,
    section,
    some_facts,
)

BROADCAST = f"broadcast {SITE}/torch/distributed/distributed_c10d.py:2100"
LOGGED = f"wrapper {SITE}/torch/distributed/c10d_logger.py:83"
BACKWARD = f"backward {SITE}/torch/_tensor.py:581"
FSDP = f"forward {SITE}/torch/distributed/fsdp/fully_sharded_data_parallel.py:849"
NEXT = "__next__ /home/alice/bert/data.py:17"
HOME = "/home/alice/bert"


def ranks(*stacks: Sequence[str] | None, used: Sequence[float | None] = ()) -> list[Rank]:
    """One for each stack; None: its process is gone; an empty one: it is not known."""
    found = []
    for number, frames in enumerate(stacks):
        thread = a_thread(*frames) if frames else None
        share = used[number] if used else None
        found.append(Rank(100 + number, f"GPU {number}", number, frames is None, "", share, thread))
    return found


def compared(found: Sequence[Rank], **options: Any) -> Comparison:
    comparison = compare(found, directory=HOME, **options)
    assert comparison is not None
    return comparison


class TestPatterns:
    def test_one_process_has_no_ranks(self) -> None:
        assert compare(ranks([ALL_REDUCE, TRAIN])) is None

    def test_rank_whose_process_is_gone_is_named_first(self) -> None:
        found = compared(ranks([ALL_REDUCE, TRAIN], [ALL_REDUCE, TRAIN], None))
        assert found.pattern == "gone"
        assert found.suspects == (102,)
        assert found.sentences == (
            "**Rank 2 (GPU 2) is gone**: its process has ended, and the others wait for it.",
            "Ranks 0 and 1 are in `all_reduce`, called in `main (train.py:30)`.",
        )

    def test_rank_in_its_data_loader_keeps_the_others_waiting(self) -> None:
        found = compared(ranks(*[[LOGGED, ALL_REDUCE, TRAIN]] * 3, [LOADER, NEXT, TRAIN], used=[1.0, 1.0, 1.0, 0.0]))
        assert found.pattern == "elsewhere"
        assert found.suspects == (103,)
        assert found.sentences[0] == (
            "**Rank 3 (GPU 3) is not in the collective** that the others wait in, but in `__next__ (data.py:17)` "
            "(it is waiting for data)."
        )
        assert found.sentences[1] == "Ranks 0-2 are in `all_reduce`, called in `main (train.py:30)`."
        assert "Ranks 0-2: 100% used; rank 3 (GPU 3): 0%." in found.sentences[2]

    def test_all_ranks_in_the_same_collective_are_not_blamed(self) -> None:
        found = compared(ranks(*[[ALL_REDUCE, TRAIN]] * 8))
        assert found.pattern == "together"
        assert found.suspects == ()
        assert found.sentences[0] == "All 8 ranks are in `all_reduce`, called in `main (train.py:30)`."
        assert "No rank is missing" in found.sentences[1]

    def test_missing_rank_may_be_on_another_machine(self) -> None:
        found = compared(ranks(*[[ALL_REDUCE, TRAIN]] * 2), total=16)
        assert found.sentences[0].startswith("Both ranks are in `all_reduce`")
        assert "The job has 16 ranks, and 2 of them run here" in found.sentences[1]

    def test_different_collectives_never_complete(self) -> None:
        found = compared(ranks([ALL_REDUCE, TRAIN], [ALL_REDUCE, TRAIN], [BROADCAST, TRAIN]))
        assert found.pattern == "different"
        assert found.sentences == (
            "**The ranks are in different collectives**: these never complete.",
            "Rank 2 (GPU 2): `broadcast`, called in `main (train.py:30)`.",
            "Ranks 0 and 1: `all_reduce`, called in `main (train.py:30)`.",
        )

    def test_same_collective_in_different_lines_is_a_mismatch(self) -> None:
        found = compared(ranks([ALL_REDUCE, TRAIN], [ALL_REDUCE, "validate /home/alice/bert/train.py:90"]))
        assert found.pattern == "different"
        assert "in different lines" in found.sentences[0]

    def test_some_gpus_full_and_others_unused(self) -> None:
        """NCCL #1033: "some GPUs are 100% occupied, while others are 0%". No stacks."""
        found = compared(ranks((), (), (), (), used=[1.0, 0.0, 1.0, 0.0]))
        assert found.pattern == "uneven"
        assert found.suspects == (101, 103)
        assert found.sentences[0] == (
            "Ranks 0 and 2: 100% used; ranks 1 and 3: 0%. **Ranks 1 and 3 have not entered the collective** that the "
            "others wait in, or have left it."
        )

    def test_rank_that_waits_for_its_gpu_is_not_elsewhere(self) -> None:
        """A collective runs on the GPU: the program may be in the next backward pass."""
        found = compared(ranks([ALL_REDUCE, TRAIN], [BACKWARD, TRAIN]))
        assert found.pattern not in {"elsewhere", "different"}
        assert found.suspects == ()

    def test_ranks_in_a_backward_pass_are_at_the_same_line(self) -> None:
        found = compared(ranks([BACKWARD, TRAIN], [BACKWARD, TRAIN]))
        assert found.sentences == ("Both ranks are in `main (train.py:30)`, waiting for its GPU.",)

    def test_gpu_that_failed_is_blamed(self) -> None:
        found = compared([ranks([ALL_REDUCE, TRAIN])[0], Rank(101, "GPU 1", 1, trouble="the GPU is lost")])
        assert found.pattern == "failed"
        assert found.suspects == (101,)
        assert found.sentences[0] == "**The GPU of rank 1 (GPU 1) has failed**: the GPU is lost."

    def test_failed_gpu_explains_a_collective_that_all_are_in(self) -> None:
        found = compared([rank._replace(trouble="XID 79" * (rank.number == 1)) for rank in ranks(*[[ALL_REDUCE]] * 2)])
        assert found.pattern == "failed"
        assert not [sentence for sentence in found.sentences if "No rank is missing" in sentence]

    def test_rank_with_fewer_steps_is_behind(self) -> None:
        found = compared([rank._replace(steps=1040 - (rank.number == 2)) for rank in ranks((), (), (), ())])
        assert found.pattern == "behind"
        assert found.suspects == (102,)
        assert found.sentences == ("**Rank 2 (GPU 2) is behind**: 1039 steps, while the others made 1040.",)

    def test_processes_without_numbers_are_named_by_their_gpus(self) -> None:
        unnumbered = [rank._replace(number=None) for rank in ranks([ALL_REDUCE, TRAIN], [ALL_REDUCE, TRAIN], None)]
        found = compared(unnumbered)
        assert found.sentences[0].startswith("**The process on GPU 2 (pid 102) is gone**")
        assert found.sentences[1].startswith("The processes on GPU 0 and GPU 1 are in `all_reduce`")

    def test_nothing_is_claimed_without_evidence(self) -> None:
        assert compared(ranks((), ())) == Comparison("unclear", ())


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        ([LOGGED, ALL_REDUCE, TRAIN], "all_reduce"),
        ([f"barrier {SITE}/torch/distributed/distributed_c10d.py:4000", TRAIN], "barrier"),
        ([f"allreduce {SITE}/horovod/torch/mpi_ops.py:1", TRAIN], "allreduce"),
        # User code of this name that waits for its peers in some other way.
        ([f"wait {HOME}/comm.py:3", f"all_gather_objects {HOME}/comm.py:9", TRAIN], "all_gather_objects"),
        # A wrapped model computes: the wrapper is around user code.
        ([f"forward {SITE}/torch/nn/modules/linear.py:116", f"forward {HOME}/model.py:8", FSDP, TRAIN], ""),
        ([f"send {HOME}/mail.py:3", TRAIN], ""),
        ([LOADER, TRAIN], ""),
    ],
)
def test_collective_on_a_stack(frames: list[str], name: str) -> None:
    assert collective_of(a_thread(*frames)) == name


def distributed(
    *pids: int, gone: Sequence[int] = (), numbers: Sequence[int | None] | None = None, **changes: Any
) -> RunFacts:
    """A hang of one process per GPU; those that are gone were on their GPUs in all looks but the last."""
    gpus = tuple(a_gpu(index) for index in range(len(pids)))
    looks = []
    for at in range(4):
        here = [pid for pid in pids if pid not in gone or at < 3]
        readings = tuple(
            a_reading(gpu, 1.0 if pid in here else 0.0, processes=(a_process(pid),) if pid in here else ())
            for gpu, pid in zip(gpus, pids, strict=True)
        )
        looks.append(Look("nvml", float(at), 0.0, gpus, readings, job=JobProgress(pids=tuple(here))))
    numbered = range(len(pids)) if numbers is None else numbers
    processes = [
        a_process_info(pid, rank=None if number is None else RankNumber(number, number, len(pids)))
        for pid, number in zip(pids, numbered, strict=True)
        if pid not in gone
    ]
    verdict = Verdict(
        "stalled",
        "GPU 0 has been fully used without doing work for 1h",
        "act",
        cause="it hangs: its GPUs are fully used without doing work",
        quiet=True,
        hang=True,
        evidence=(
            "GPU 0: 100% used, 112 W of 700 W (480 W while it worked)",
            "no step for 1h5m; the longest pause before was 12s (seen by step counts in its log)",
        ),
    )
    stacks = [a_stack(pid, ALL_REDUCE, TRAIN, status="active") for pid in pids if pid not in gone]
    return some_facts(
        **{"looks": looks, "processes": processes, "stacks": stacks, "verdict": verdict, "used": (), **changes}
    )


class TestRanksOfARun:
    def test_each_process_on_a_gpu_is_a_rank(self) -> None:
        found = ranks_of(distributed(101, 102))
        assert [(rank.pid, rank.gpu, rank.number, rank.utilization) for rank in found] == [
            (101, "GPU 0", 0, 1.0),
            (102, "GPU 1", 1, 1.0),
        ]

    def test_missing_number_is_that_of_the_process_that_is_gone(self) -> None:
        found = ranks_of(distributed(101, 102, 103, 104, gone=[103]))
        assert [(rank.number, rank.is_gone) for rank in found] == [(0, False), (1, False), (2, True), (3, False)]

    def test_numbers_count_from_the_first_of_this_machine(self) -> None:
        facts = distributed(101, 102, gone=[101])
        second = msgspec.structs.replace(facts.processes[0], rank=RankNumber(9, 1, 16))
        found = ranks_of(msgspec.structs.replace(facts, processes=[second]))
        assert [rank.number for rank in found] == [8, 9]

    def test_ranks_of_all_machines_are_compared(self) -> None:
        """Pids of different machines may be the same."""
        first = msgspec.structs.replace(distributed(101, 102), node="a")
        second = distributed(101, 102, gone=[102])
        here = [msgspec.structs.replace(second.processes[0], rank=RankNumber(2, 0, 4))]
        second = msgspec.structs.replace(second, processes=here, node="b")
        found = compare_ranks(msgspec.structs.replace(first, others=[NodeFacts("b", second), NodeFacts("c")]))
        assert found is not None
        assert (found.pattern, found.suspects) == ("gone", (102,))
        assert found.sentences[0].startswith("**Rank 3 (GPU 1 of b) is gone**")
        assert (found.suspects_on("a"), found.suspects_on("b")) == ((), (102,))
        assert any(sentence.startswith("Ranks 0-2 are in ") for sentence in found.sentences)

    def test_numbers_of_machines_that_count_by_themselves_are_not_used(self) -> None:
        first, second = (msgspec.structs.replace(distributed(101, 102), node=node) for node in "ab")
        found = compare_ranks(msgspec.structs.replace(first, others=[NodeFacts("b", second)]))
        assert found is not None
        assert found.sentences[0].startswith("All 4 ranks are in ")

    @pytest.mark.parametrize("numbers", [[0, 0], [0, None], [None, None]])
    def test_numbers_that_are_not_unique_are_not_used(self, numbers: list[int | None]) -> None:
        """Slurm's number is inherited by everything that one task starts."""
        assert [rank.number for rank in ranks_of(distributed(101, 102, numbers=numbers))] == [None, None]

    def test_rank_of_an_ended_process_is_read_from_its_step_file(self) -> None:
        steps = [RankSteps(number, pid, 70, 3.0) for number, pid in enumerate((101, 102, 103))]
        facts = distributed(101, 102, 103, gone=[101], numbers=[None, None, None], steps=steps)
        assert [(rank.number, rank.is_gone) for rank in ranks_of(facts)] == [(0, True), (1, False), (2, False)]

    @pytest.mark.parametrize(("made", "pattern"), [(4, "behind"), (5, "together")])
    def test_rank_with_fewer_steps_is_behind(self, made: int, pattern: str) -> None:
        steps = [RankSteps(number, pid, 5 if number else made, 3.0) for number, pid in enumerate((101, 102, 103))]
        found = compare_ranks(distributed(101, 102, 103, steps=steps))
        assert found is not None
        assert found.pattern == pattern

    def test_steps_that_are_reported_now_and_then_are_not_compared(self) -> None:
        many = 7000 * 100  # a hundred a second
        steps = [RankSteps(number, pid, many - 60 * (not number), 3.0) for number, pid in enumerate((101, 102, 103))]
        found = compare_ranks(distributed(101, 102, 103, steps=steps))
        assert found is not None
        assert found.pattern == "together"

    def test_restarted_process_takes_the_place_of_the_one_before(self) -> None:
        facts = distributed(101, 102)
        gpus = facts.looks[0].gpus
        before = Look(
            "nvml",
            -1.0,
            0.0,
            gpus,
            tuple(a_reading(gpu, 1.0, processes=(a_process(pid),)) for gpu, pid in zip(gpus, (91, 92), strict=True)),
            job=JobProgress(pids=(91, 92)),
        )
        found = ranks_of(msgspec.structs.replace(facts, looks=[before, before, *facts.looks]))
        assert [(rank.pid, rank.is_gone) for rank in found] == [(101, False), (102, False)]

    def test_steps_that_a_process_reported_are_those_of_its_rank(self) -> None:
        facts = distributed(101, 102)
        reported = RankProgress(rank=1, pid=102, steps=1040, since=5.0)
        progress = RunProgress(steps=1040, since=5.0, trust="call", ranks=(reported,))
        status = msgspec.structs.replace(facts.status, progress=progress)
        found = ranks_of(msgspec.structs.replace(facts, status=status))
        assert [(rank.pid, rank.steps) for rank in found] == [(101, None), (102, 1040)]

    def test_process_of_another_user_is_no_rank(self) -> None:
        facts = distributed(101, 102)
        shared = [
            msgspec.structs.replace(
                look,
                readings=(
                    look.readings[0],
                    msgspec.structs.replace(look.readings[1], processes=(a_process(102), a_process(999))),
                ),
            )
            for look in facts.looks
        ]
        assert [rank.pid for rank in ranks_of(msgspec.structs.replace(facts, looks=shared))] == [101, 102]

    @pytest.mark.parametrize(
        ("changes", "trouble"),
        [
            ({"utilization": Unknown("the GPU is lost")}, "the GPU is lost"),
            ({"health": DeviceHealth((31, 79))}, "the driver reported XID 79"),
            ({"health": DeviceHealth((31,))}, ""),
        ],
    )
    def test_failed_gpu_of_a_rank_is_noticed(self, changes: dict[str, Any], trouble: str) -> None:
        facts = distributed(101, 102)
        last = facts.looks[-1]
        failed = msgspec.structs.replace(last.readings[1], **changes)
        looks = [*facts.looks[:-1], msgspec.structs.replace(last, readings=(last.readings[0], failed))]
        assert ranks_of(msgspec.structs.replace(facts, looks=looks))[1].trouble == trouble


def test_rank_is_read_from_the_environment() -> None:
    environment = {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "SECRET": "hunter2"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE) as child:
        [process] = read_processes([child.pid])
        child.kill()
    assert process.rank == RankNumber(9, 1, None)
    assert "hunter2" not in repr(process)


def test_collective_of_user_code_is_named_with_the_line_that_calls_it() -> None:
    frames = [f"wait_for_peers {HOME}/comm.py:3", f"all_reduce {HOME}/comm.py:9", TRAIN]
    assert compared(ranks(frames, frames)).sentences[0].endswith("`all_reduce`, called in `main (train.py:30)`.")


class TestReport:
    def test_evidence_comes_right_after_the_verdict(self) -> None:
        report = render(distributed(101, 102, gone=[102]))
        assert headings(report)[:3] == [
            "Stopped: it hangs: its GPUs are fully used without doing work",
            "Why this is a hang",
            "What to do next",
        ]
        assert section(report, "Why this is a hang").strip().splitlines() == [
            "- GPU 0: 100% used, 112 W of 700 W (480 W while it worked).",
            "- No step for 1h5m; the longest pause before was 12s (seen by step counts in its log).",
            "- **Rank 1 (GPU 1) is gone**: its process has ended, and the others wait for it.",
            "- Rank 0 (GPU 0) is in `all_reduce`, called in `main (train.py:30)`.",
        ]

    def test_advice_follows_from_what_the_ranks_do(self) -> None:
        titles = [hint.title for hint in hints(distributed(101, 102, gone=[102]))]
        assert titles == ["A rank is gone, and the others wait for it forever", "Was it working all the same?"]
        titles = [hint.title for hint in hints(distributed(101, 102))]
        assert titles == ["A collective does not complete", "Was it working all the same?"]

    def test_launcher_is_not_said_to_wait_for_its_ranks(self) -> None:
        waits = a_stack(100, f"Popen.wait {STDLIB}/subprocess.py:1264", "launch /home/alice/bert/launch.py:9")
        facts = distributed(101, 102)
        facts = msgspec.structs.replace(
            facts, processes=[a_process_info(100), *facts.processes], stacks=[waits, *facts.stacks]
        )
        assert [hint.title for hint in hints(facts)] == [
            "A collective does not complete",
            "Was it working all the same?",
        ]
        assert section(render(facts), "Stacks").strip().startswith("### 2 processes (`python`): 101 and 102")

    def test_summary_on_a_terminal_names_the_rank(self) -> None:
        assert "\n  Rank 1 (GPU 1) is gone: its process has ended" in brief(distributed(101, 102, gone=[102]))

    def test_stack_of_the_suspect_is_shown_first(self) -> None:
        stacks = [a_stack(101, ALL_REDUCE, TRAIN), a_stack(102, NEXT, TRAIN)]
        report = render(distributed(101, 102, stacks=stacks))
        assert "**Rank 1 (GPU 1) is not in the collective**" in section(report, "Why this is a hang")
        assert section(report, "Stacks").strip().startswith("### Process 102")

    def test_hang_of_unknown_stacks_has_a_report(self) -> None:
        stacks = [Stack(pid, Unknown("py-spy could not read it in time")) for pid in (101, 102)]
        assert "No step for 1h5m" in render(distributed(101, 102, stacks=stacks))

    def test_spinning_ranks_are_not_said_to_work_on_the_cpu(self) -> None:
        running = [a_process_info(pid, state="R") for pid in (101, 102)]
        assert not [hint for hint in hints(distributed(101, 102, processes=running)) if "CPU" in hint.title]

    def test_evidence_of_an_idle_verdict_is_shown(self) -> None:
        verdict = Verdict("idle", "GPU 0 stayed below 1% for 30m", "act", quiet=True, evidence=("it used 0.1 cores",))
        report = render(some_facts(verdict=verdict))
        assert section(report, "Why this counts as idle").strip() == "- It used 0.1 cores."

    def test_ranks_of_an_idle_job_are_compared(self) -> None:
        looks = [
            msgspec.structs.replace(
                look,
                readings=tuple(
                    msgspec.structs.replace(reading, utilization=Utilization(0.0, 0.0, 6)) for reading in look.readings
                ),
            )
            for look in distributed(101, 102).looks
        ]
        verdict = Verdict("idle", "GPU 0 and GPU 1 stayed below 1% for 30m", "act", quiet=True)
        waits = a_stack(100, f"Popen.wait {STDLIB}/subprocess.py:1264", "launch /home/alice/bert/launch.py:9")
        stacks = [waits, *(a_stack(pid, LOADER, NEXT, TRAIN) for pid in (101, 102))]
        facts = distributed(101, 102, looks=looks, verdict=verdict, stacks=stacks)
        assert section(render(facts), "Its ranks").strip() == "- Both ranks are in `__next__ (data.py:17)`."
        assert hints(facts)[0].title == "It is waiting for data"

    def test_verdict_without_evidence_has_no_such_section(self) -> None:
        assert "Why this" not in render(some_facts())


FAILURE = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : {time}
  host      : gpu17
  rank      : 9 (local_rank: 1)
  exitcode  : -15 (pid: 4)  (SIGTERM)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : {time}
  host      : gpu17
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 3)  (SIGKILL)
  error_file: <N/A>
============================================================
"""


def said_by_torchrun(rank: int, code: int, time: str = "2030-01-31_13:32:44") -> str:
    return FAILURE.format(rank=rank, code=code, time=time)


def test_rank_that_failed_first_is_named_by_what_torchrun_printed() -> None:
    assert first_failed_rank(["Traceback: ", ""]) == ""
    assert first_failed_rank(["", said_by_torchrun(3, -9)]) == "rank 3 failed first, by SIGKILL"
    # Its peers see that their connection is gone, and end within the same second.
    both = [said_by_torchrun(0, 1), said_by_torchrun(3, -9)]
    assert first_failed_rank(both) == first_failed_rank(both[::-1]) == "rank 3 failed first, by SIGKILL"
    aborted = said_by_torchrun(0, -6)
    assert first_failed_rank([aborted, said_by_torchrun(2, 7)]) == "rank 2 failed first, with code 7"
    earlier = said_by_torchrun(1, 1, "2030-01-31_13:32:43")
    assert first_failed_rank([said_by_torchrun(3, -9), earlier]) == "rank 1 failed first, with code 1"
    # A job that was started again has the words of its earlier run above.
    assert first_failed_rank([earlier + said_by_torchrun(3, -9)]) == "rank 3 failed first, by SIGKILL"
