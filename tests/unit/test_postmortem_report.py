"""The postmortem report of a run."""

import os
import re
import subprocess
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

import stoker
from stoker.cli import app
from stoker.cli.verbs import edit, run, submit
from stoker.gpus.model import Look, Maybe, Unknown, known
from stoker.logs.terminal import plain_text
from stoker.rules.rule import Verdict
from stoker.runs.postmortem.causes import CAUSES
from stoker.runs.postmortem.facts import RunFacts
from stoker.runs.postmortem.hints import hints, options_of
from stoker.runs.postmortem.outputs import Output, last_outputs, output_tail
from stoker.runs.postmortem.processes import ProcessInfo
from stoker.runs.postmortem.report import brief, render
from stoker.runs.postmortem.stacks import NOT_INSTALLED, NOT_PYTHON, Frame, Stack, Thread, parse_dump
from stoker.runs.postmortem.text import prose
from stoker.runs.record import Spec, Status
from tests.support.deep import examples
from tests.support.looks import GIB, a_gpu, a_look, a_process, a_reading
from tests.support.waiting import wait_for

SITE = "/opt/conda/lib/python3.11/site-packages"
STDLIB = "/opt/conda/lib/python3.11"
QUEUE_GET = f"get {STDLIB}/multiprocessing/queues.py:103"
WORKER_LOOP = f"_worker_loop {SITE}/torch/utils/data/_utils/worker.py:275"
LOADER = f"_next_data {SITE}/torch/utils/data/dataloader.py:1327"
ALL_REDUCE = f"all_reduce {SITE}/torch/distributed/distributed_c10d.py:2501"
TRAIN = "main /home/alice/bert/train.py:30"
# py-spy's stack of a forked multiprocessing child: the frames of its parent are below its own.
FORKED_WORKER = [
    "work /home/alice/bert/worker.py:5",
    f"BaseProcess.run {STDLIB}/multiprocessing/process.py:108",
    f"BaseProcess._bootstrap {STDLIB}/multiprocessing/process.py:314",
    f"Popen._launch {STDLIB}/multiprocessing/popen_fork.py:71",
    f"BaseProcess.start {STDLIB}/multiprocessing/process.py:121",
    TRAIN,
]
ASYNCIO_EVENT = [
    f"EpollSelector.select {STDLIB}/selectors.py:468",
    f"BaseEventLoop._run_once {STDLIB}/asyncio/base_events.py:1884",
    f"BaseEventLoop.run_forever {STDLIB}/asyncio/base_events.py:607",
    f"run {STDLIB}/asyncio/runners.py:190",
    TRAIN,
]
CELL = f"do_execute {SITE}/ipykernel/ipkernel.py:420"
FALSE_HERE = {
    "It is waiting for its threads or child processes to end",
    "It is waiting for the network",
    "It is waiting in a collective operation that other ranks have not joined",
    "It is a notebook or a server that gets no requests",
    "It is waiting for a lock",
    "The main program had finished, but the process did not exit",
}


def a_frame(text: str) -> Frame:
    """From `function /file:line`."""
    function, _, place = text.partition(" ")
    file, _, line = place.rpartition(":")
    return Frame(function, file, int(line))


def a_thread(*frames: str, name: str = "MainThread", status: str = "idle") -> Thread:
    return Thread(name, status, tuple(a_frame(frame) for frame in frames))


def a_stack(pid: int, *frames: str, status: str = "idle") -> Stack:
    return Stack(pid, (a_thread(*frames, status=status),))


def a_process_info(pid: int = 101, parent: int = 1, **changes: Any) -> ProcessInfo:
    process = ProcessInfo(
        pid=pid,
        parent=parent,
        started=77,
        state="S",
        name="python",
        command="/opt/conda/bin/python /home/alice/bert/train.py --lr 1e-4",
        cpu=5000.0,
        threads=1,
        memory=3 * GIB,
        place="futex_do_wait",
        call="futex",
    )
    return msgspec.structs.replace(process, **changes)


def some_facts(**changes: Any) -> RunFacts:
    spec = Spec(
        id="3f9a12bc",
        command=("python", "train.py", "--lr", "1e-4"),
        directory="/home/alice/bert",
        host="node7",
        user="alice",
        boot="",
        supervisor=1,
        supervisor_started=1,
        started=1_790_000_000.0,
        policy={},
        rule="all GPUs below 1% for 30m",
        gpus="job",
        dry_run=False,
    )
    status = Status(
        ended=1_790_007_000.0,
        ending="idle",
        reason="GPU 0 and GPU 1 stayed below 1% for 30m.",
        used=(a_gpu(0).uuid, a_gpu(1).uuid),
    )
    facts = RunFacts(
        spec=spec,
        status=status,
        exit="stopped by SIGTERM after 3s, exit code 124",
        looks=[quiet_look(at) for at in range(0, 1801, 60)],
        window=1800.0,
        below=0.01,
        processes=[a_process_info()],
        stacks=[a_stack(101, TRAIN)],
    )
    if "output" in changes:
        changes["outputs"] = [Output("standard output", "", changes.pop("output"))]
    if changes.get("ending", "idle") == "idle":
        verdict = Verdict("idle", "GPU 0 stayed below 1% for 30m", "act", "its GPUs stayed idle", quiet=True)
        changes = {"verdict": verdict, **changes}
    for field, record in (("spec", spec), ("status", status)):
        names = set(record.__struct_fields__).difference(RunFacts.__struct_fields__).intersection(changes)
        own = {name: changes.pop(name) for name in names}
        changes[field] = msgspec.structs.replace(record, **own)
    return msgspec.structs.replace(facts, **changes)


def quiet_look(at: float, *pids: int) -> Look:
    """Two idle GPUs with these processes on the first."""
    gpus = (a_gpu(0), a_gpu(1))
    processes = tuple(a_process(pid, memory=40 * GIB) for pid in pids)
    readings = (a_reading(gpus[0], span=60.0, processes=processes), a_reading(gpus[1], span=60.0))
    return Look("nvml", float(at), 0.0, gpus, readings)


def busy_looks() -> list[Look]:
    return [a_look(0.9, 0.9, at=float(at)) for at in range(10)]


def titles(facts: RunFacts) -> list[str]:
    return [hint.title for hint in hints(facts)]


def steps(facts: RunFacts) -> str:
    return "\n".join(step for hint in hints(facts) for step in hint.steps)


def dump_of(*frames: str) -> str:
    """As `py-spy dump` prints them."""
    calls = [re.sub(r"(\S+) (.*)", r"    \1 (\2)", frame) for frame in frames]
    return "\n".join(["Process 101: python", "Python v3.11.2", "", 'Thread 101 (idle): "MainThread"', *calls, ""])


def tokens(markdown: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(markdown)


def headings(markdown: str) -> list[str]:
    parsed = tokens(markdown)
    return [parsed[place + 1].content for place, token in enumerate(parsed) if token.type == "heading_open"]


def blocks(markdown: str) -> list[str]:
    return [token.content for token in tokens(markdown) if token.type == "fence"]


def section(markdown: str, title: str) -> str:
    return markdown.partition(f"## {title}\n")[2].partition("\n## ")[0]


class TestSummary:
    def test_fired_rule_is_the_first_sentence(self) -> None:
        lines = [line for line in render(some_facts()).splitlines() if line]
        assert lines[:3] == [
            "# Stopped: its GPUs stayed idle",
            "**GPU 0 and GPU 1 stayed below 1% for 30m.**",
            "Run `3f9a12bc` on `node7`, after 1h56m: stopped by SIGTERM after 3s, exit code 124.",
        ]

    def test_conclusions_read_as_sentences(self) -> None:
        advice = section(render(some_facts(stacks=[a_stack(101, LOADER, TRAIN)])), "What to do next")
        assert "1. **It is waiting for data.**\n   - " in advice
        assert "2. **Was it idle on purpose?**\n   - " in advice

    def test_advice_comes_before_the_evidence(self) -> None:
        assert headings(render(some_facts()))[:7] == [
            "Stopped: its GPUs stayed idle",
            "What to do next",
            "GPUs",
            "Processes",
            "Stacks",
            "Process 101 (`python`)",
            "Last output",
        ]

    def test_lines_of_a_block_fit_a_phone_in_landscape(self) -> None:
        deep = [f"{'f' * 70}{n} /home/alice/{'x' * 70}.py:{n}" for n in range(40)]
        long = a_process_info(command=f"python {'--option ' * 100}")
        page = render(some_facts(processes=[long], stacks=[a_stack(101, *deep)]))
        assert max(len(line) for block in blocks(page)[:3] for line in block.splitlines()) <= 90

    def test_all_facts_are_included(self) -> None:
        facts = section(render(some_facts(driver="570.86")), "Facts")
        for fact in ("python train.py --lr 1e-4", "/home/alice/bert", "node7", "alice", "570.86", "`nvml`"):
            assert fact in facts
        assert "2026-" in facts

    def test_gpus_are_listed_with_their_memory_and_processes(self) -> None:
        looks = [quiet_look(1.0, 101)]
        gpus = section(render(some_facts(looks=looks)), "GPUs")
        assert "GPU 0: Test GPU, 1.0 GiB of 80 GiB in use, held by alice's python (pid 101)" in gpus

    def test_only_gpus_of_the_verdict_are_listed(self) -> None:
        gpus = section(render(some_facts(judged=(a_gpu(1).uuid,))), "GPUs")
        assert "GPU 1" in gpus
        assert "GPU 0" not in gpus

    def test_work_of_other_users_on_the_same_gpu_is_explained(self) -> None:
        sentence = "including that of others"
        assert sentence in render(some_facts(looks=[*busy_looks(), quiet_look(100.0, 101, 999)]))
        # Work before the window belongs to the run, and idle processes of others are no contradiction.
        assert sentence not in render(some_facts(looks=[*busy_looks(), quiet_look(100.0, 101)]))
        assert sentence not in render(some_facts(looks=[quiet_look(100.0, 101, 999)]))

    @pytest.mark.parametrize(
        ("looks", "expected"),
        [
            ([], "There are no readings."),
            ([a_look(problem=Unknown("the driver did not answer"))], "could not be read: the driver did not answer"),
        ],
    )
    def test_missing_readings_are_reported(self, looks: list[Look], expected: str) -> None:
        assert expected in section(render(some_facts(looks=looks)), "GPUs")

    def test_run_without_processes_has_a_report(self) -> None:
        page = render(some_facts(ending="exited", processes=[], stacks=[], looks=[], exit="exit code 1"))
        assert "No process was left." in page
        assert "No process was left." in page


class TestAdviceFromStacks:
    @pytest.mark.parametrize(
        ("frames", "title"),
        [
            ([f"interaction {STDLIB}/pdb.py:400", TRAIN], "waiting for keyboard input"),
            ([LOADER, TRAIN], "waiting for data"),
            ([ALL_REDUCE, TRAIN], "collective"),
            ([f"init_process_group {SITE}/torch/distributed/distributed_c10d.py:1", TRAIN], "other ranks to join"),
            ([f"get {STDLIB}/queue.py:171", TRAIN], "data from another thread or process"),
            ([f"Connection._recv {STDLIB}/multiprocessing/connection.py:395", TRAIN], "data from another"),
            ([f"readinto {STDLIB}/socket.py:705", f"get {SITE}/requests/api.py:73", TRAIN], "waiting for the network"),
            ([f"_acquire {SITE}/filelock/_unix.py:42", TRAIN], "waiting for a lock file"),
            ([f"wait {SITE}/torch/utils/file_baton.py:42", TRAIN], "waiting for a lock file"),
            ([f"Condition.wait {STDLIB}/threading.py:327", TRAIN], "waiting for an event or condition"),
            ([f"acquire {STDLIB}/threading.py:507", TRAIN], "waiting for a lock"),
            ([f"Popen.wait {STDLIB}/subprocess.py:1264", TRAIN], "a program that it started"),
            ([f"BaseProcess.join {STDLIB}/multiprocessing/process.py:149", TRAIN], "threads or child processes to end"),
            ([f"_shutdown {STDLIB}/threading.py:1553"], "The main program had finished, but the process did not exit"),
            ([f"save {SITE}/torch/serialization.py:850", TRAIN], "checkpoint"),
            ([f"compile_fx {SITE}/torch/_inductor/compile_fx.py:9", TRAIN], "compiling"),
            ([f"select {STDLIB}/selectors.py:468", f"start {SITE}/ipykernel/kernelapp.py:7"], "notebook"),
        ],
    )
    def test_each_kind_of_waiting_has_a_hint(self, frames: list[str], title: str) -> None:
        assert title in titles(some_facts(stacks=[a_stack(101, *frames)]))[0]

    def test_hint_names_the_line_of_user_code(self) -> None:
        assert "`main (train.py:30)` (pid 101)" in steps(some_facts(stacks=[a_stack(101, LOADER, TRAIN)]))

    def test_user_file_named_like_a_library_gives_no_hint(self) -> None:
        own = "wait /home/alice/bert/torch/utils/data/dataloader.py:3"
        assert not [title for title in titles(some_facts(stacks=[a_stack(101, own)])) if "data" in title]

    def test_diverging_rank_is_named(self) -> None:
        stacks = [
            a_stack(101, ALL_REDUCE, TRAIN),
            a_stack(102, ALL_REDUCE, TRAIN),
            a_stack(103, "validate /home/alice/bert/evaluate.py:99", TRAIN),
        ]
        facts = some_facts(processes=[a_process_info(pid) for pid in (101, 102, 103)], stacks=stacks)
        assert "collective" in titles(facts)[0]
        assert "pid 103 is elsewhere**: in `validate (evaluate.py:99)`" in hints(facts)[0].steps[0]
        assert "2 processes: 101 and 102" in steps(facts)

    def test_mutual_waiting_of_loader_and_workers_suggests_a_lost_worker(self) -> None:
        stacks = [a_stack(101, LOADER, TRAIN), *(a_stack(pid, QUEUE_GET, WORKER_LOOP) for pid in (102, 103))]
        assert "All 2 data loader workers wait for work" in steps(some_facts(stacks=stacks))

    def test_workers_inside_the_dataset_are_reported_with_its_line(self) -> None:
        fetch = f"fetch {SITE}/torch/utils/data/_utils/fetch.py:51"
        stacks = [
            a_stack(101, LOADER, TRAIN),
            a_stack(102, "read /home/alice/bert/data.py:7", fetch, WORKER_LOOP),
            a_stack(103, QUEUE_GET, WORKER_LOOP),
        ]
        shown = steps(some_facts(stacks=stacks))
        assert "1 of 2 data loader workers are in the dataset's code" in shown
        assert "`read (data.py:7)` (pid 102)" in shown

    @pytest.mark.parametrize(
        "helper",
        [
            [f"main {STDLIB}/multiprocessing/resource_tracker.py:227", "<module> <string>:1"],
            [QUEUE_GET, f"worker {STDLIB}/multiprocessing/pool.py:114"],
            [f"_invoke_run {SITE}/torch/distributed/elastic/agent/server/api.py:900"],
        ],
    )
    def test_waiting_library_helper_gives_no_hint(self, helper: list[str]) -> None:
        facts = some_facts(stacks=[a_stack(102, *helper), a_stack(101, LOADER, TRAIN)])
        assert titles(facts) == ["It is waiting for data", "Was it idle on purpose?"]

    def test_pool_worker_in_user_code_gives_a_hint(self) -> None:
        frames = [
            f"read {STDLIB}/socket.py:1",
            "fetch /home/alice/x.py:2",
            f"worker {STDLIB}/multiprocessing/pool.py:114",
        ]
        assert titles(some_facts(stacks=[a_stack(101, *frames)]))[0] == "It is waiting for the network"

    @pytest.mark.parametrize(
        ("call", "title"),
        [
            ("clock_nanosleep", "It is sleeping"),
            ("futex", "a lock or for a call"),
            ("recvfrom of a socket", "on a socket"),
        ],
    )
    def test_kernel_state_is_used_when_the_stack_gives_no_hint(self, call: str, title: str) -> None:
        facts = some_facts(processes=[a_process_info(call=call)])
        assert title in titles(facts)[0]
        assert "main (train.py:30)" in steps(facts)

    @pytest.mark.parametrize(
        ("call", "frames"),
        [
            # Library frames around user code do not show what that code waits for.
            pytest.param("clock_nanosleep", FORKED_WORKER, id="a forked worker that sleeps"),
            pytest.param("clock_nanosleep", ["sleep /home/alice/x.py:3", ALL_REDUCE], id="a hook of a collective"),
            pytest.param("clock_nanosleep", ["sleep /home/alice/x.py:3", CELL], id="a cell of a notebook"),
            pytest.param("clock_nanosleep", [TRAIN], id="the program's own sleep"),
            pytest.param("epoll_wait", ASYNCIO_EVENT, id="asyncio.Event"),
            pytest.param("futex", [f"Event.wait {STDLIB}/threading.py:629", TRAIN], id="threading.Event"),
            pytest.param("accept4 of a socket", [f"accept {STDLIB}/socket.py:294", TRAIN], id="a server in user code"),
            pytest.param("recvfrom of a socket", [TRAIN], id="a socket that may be local"),
            pytest.param("poll", [f"finish {SITE}/wandb/sdk/wandb_run.py:9", TRAIN], id="wandb between two runs"),
        ],
    )
    def test_hints_are_limited_to_what_the_stack_shows(self, call: str, frames: list[str]) -> None:
        processes = [a_process_info(call=call), a_process_info(102, call=call)]
        shown = titles(some_facts(processes=processes, stacks=[a_stack(101, *frames)]))
        allowed = {"It is waiting for the network"} if "wandb" in frames[0] else set()
        assert not allowed ^ (set(shown) & FALSE_HERE)

    def test_idle_event_loop_is_reported(self) -> None:
        facts = some_facts(processes=[a_process_info(call="epoll_wait")], stacks=[a_stack(101, *ASYNCIO_EVENT)])
        assert titles(facts)[0] == "Its event loop is idle: every task is waiting"

    def test_forked_worker_is_not_reported_at_its_fork(self) -> None:
        threads = parse_dump(dump_of(*FORKED_WORKER))
        facts = some_facts(processes=[a_process_info(call="clock_nanosleep")], stacks=[Stack(101, threads)])
        assert titles(facts)[0] == "It is sleeping"
        assert "work (worker.py:5)" in steps(facts)
        assert "train.py" not in steps(facts) + section(render(facts), "Stacks")

    def test_healthy_run_at_its_time_limit_is_not_called_hung(self) -> None:
        blocked = a_process_info(state="D", blocked=1, place="io_schedule")
        facts = some_facts(
            ending="time limit", looks=busy_looks(), processes=[blocked], stacks=[a_stack(101, LOADER, TRAIN)]
        )
        assert titles(facts) == ["It needed more time than its limit"]

    def test_run_with_idle_gpus_at_its_time_limit_is_called_hung(self) -> None:
        facts = some_facts(ending="time limit", stacks=[a_stack(101, LOADER, TRAIN)])
        assert titles(facts) == ["It is waiting for data", "It needed more time than its limit"]

    def test_run_with_unreadable_gpus_at_its_time_limit_is_not_called_hung(self) -> None:
        looks = [a_look(Unknown("no answer"))]
        facts = some_facts(ending="time limit", looks=looks, stacks=[a_stack(101, LOADER, TRAIN)])
        assert titles(facts) == ["It needed more time than its limit"]


class TestOtherAdvice:
    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            ({"place": "os_acquire_rwlock_write", "call": "ioctl of /dev/nvidia0"}, "dmesg | grep -i -e xid"),
            ({"place": "rpc_wait_bit_killable"}, "file system that is slow or gone"),
            ({"place": Unknown("not reported")}, "Usually the cause is the GPU driver"),
        ],
    )
    def test_process_blocked_in_the_kernel_comes_first(self, where: dict[str, Any], expected: str) -> None:
        facts = some_facts(processes=[a_process_info(state="D", blocked=1, **where)], stacks=[a_stack(101, LOADER)])
        assert titles(facts)[0] == "It is blocked in the kernel"
        assert expected in hints(facts)[0].steps[1]

    def test_process_that_reads_from_the_terminal_waits_for_input(self) -> None:
        facts = some_facts(processes=[a_process_info(call="read of /dev/pts/3 (its standard input)")])
        assert titles(facts)[0] == "It is waiting for keyboard input"

    @pytest.mark.parametrize("question", ["Overwrite? [y/N] ", "(Pdb) ", "Password:", ">>> "])
    def test_question_in_the_last_line_waits_for_input(self, question: str) -> None:
        facts = some_facts(output=f"epoch 1\n{question}")
        assert titles(facts)[0] == "It is waiting for keyboard input"
        assert question.strip() in steps(facts)

    def test_hint_for_a_paused_process_explains_how_to_resume_it(self) -> None:
        assert "kill -CONT" in steps(some_facts(processes=[a_process_info(state="T")]))

    def test_surviving_processes_come_first(self) -> None:
        facts = some_facts(
            left=["python (pid 105) holds 3 GiB on GPU 0"], processes=[a_process_info(state="D", blocked=1)]
        )
        assert titles(facts)[:2] == ["Not all of it is gone", "It is blocked in the kernel"]
        assert "pid 105" in hints(facts)[0].steps[0]

    def test_run_that_never_used_a_gpu_gets_a_hint(self) -> None:
        assert "It never used a GPU" in titles(some_facts(used=()))

    @pytest.mark.parametrize(
        "changes",
        [
            {"used": ("GPU-00000000",)},
            {"looks": [quiet_look(1.0, 101)]},
            {"looks": [a_look(0.0, note="pids are numbered outside this container")]},
            {"looks": [Look("x", 1.0, 0.0, (a_gpu(),), (a_reading(processes=Unknown("no permission")),))]},
            {"looks": [Look("x", 1.0, 0.0, (a_gpu(),), (a_reading(processes=(a_process(9, started=Unknown("?")),)),))]},
            {"looks": []},
            {"processes": []},
        ],
    )
    def test_run_with_uncertain_gpu_use_gets_no_hint(self, changes: dict[str, Any]) -> None:
        assert "It never used a GPU" not in titles(some_facts(**{"used": (), **changes}))

    def test_memory_held_while_idle_is_summed(self) -> None:
        facts = some_facts(looks=[quiet_look(1.0, 101, 999)])
        assert "It holds GPU memory but computes nothing" in titles(facts)
        assert "It holds 40 GiB on GPU 0:" in steps(facts)

    def test_cpu_work_is_not_called_a_hang(self) -> None:
        facts = some_facts(processes=[a_process_info(state="R")], stacks=[a_stack(101, TRAIN, status="active+gil")])
        assert titles(facts)[0] == "It was working on the CPU, so it may not be hanging"
        assert "snooze" in steps(facts)

    @pytest.mark.parametrize(
        ("output", "title"),
        [
            ("torch.OutOfMemoryError: CUDA out of memory. Tried", "memory ran out"),
            ("OSError: [Errno 28] No space left on device", "full disk"),
            ("DataLoader worker (pid 5) is killed by signal: Bus error.", "shared memory"),
            ("[rank1]:[E] Watchdog caught collective operation timeout", "NCCL"),
            ("NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus", "GPU error"),
            ("Traceback (most recent call last):\n  File\nValueError: nan in `loss`\n", "contains an error"),
        ],
    )
    def test_error_in_the_output_gives_a_hint(self, output: str, title: str) -> None:
        facts = some_facts(output=f"epoch 1\n{output}\nmore", stacks=[], processes=[])
        assert title in titles(facts)[0]
        assert output.splitlines()[-1] in steps(facts)

    @pytest.mark.parametrize(
        ("reason", "expected"),
        [(NOT_INSTALLED, "pip install 'stoker[report]'"), ("no permission to read its memory", "PYTHONFAULTHANDLER=1")],
    )
    def test_missing_stacks_explain_how_to_get_them_next_time(self, reason: str, expected: str) -> None:
        assert expected in steps(some_facts(stacks=[Stack(101, Unknown(reason)), Stack(102, Unknown(NOT_PYTHON))]))

    def test_programs_other_than_python_are_not_missing_stacks(self) -> None:
        facts = some_facts(stacks=[Stack(101, Unknown(NOT_PYTHON))])
        assert "Where it hung in its code is unknown" not in titles(facts)

    def test_kill_from_outside_suggests_lack_of_memory(self) -> None:
        facts = some_facts(ending="exited", exit="ended by SIGKILL, exit code 137", processes=[], stacks=[])
        assert titles(facts) == ["It was killed from outside"]

    def test_number_of_hints_is_limited_and_never_zero(self) -> None:
        everything = some_facts(
            left=["x"],
            processes=[
                a_process_info(state="D", blocked=1),
                a_process_info(102, state="T"),
                a_process_info(103, state="R"),
            ],
            output="CUDA out of memory\n(Pdb) ",
            stacks=[a_stack(101, LOADER), a_stack(102, ALL_REDUCE)],
        )
        assert len(titles(everything)) == 5
        assert titles(some_facts(ending="signal", processes=[], stacks=[], looks=[])) == ["Nothing needs to be done"]


class TestAdvisedOptions:
    """An advised option exists for the verb that started the job, with the advised meaning."""

    STALLED = ("stalled", "stalled_window")
    PARAMETERS: ClassVar = {
        None: (run.run_command, {"after", "window", "max_time", "dry_run", "signal_name", *STALLED}),
        "j7": (submit.submit_command, {"after", "window", "time_limit", "idle", *STALLED}),
    }
    OF_OTHER_PROGRAMS: ClassVar = {"--shm-size", "--ipc", "--cap-add"}

    def advice(self, job: str | None) -> Iterator[str]:
        """Everything that a report may advise."""
        for cause in CAUSES:
            yield from (step.format(delay=options_of(some_facts(job=job)).delay) for step in cause.steps)
        for ending in ("idle", "time limit"):
            active = a_stack(101, TRAIN, status="active")
            for stacks in ([active], [Stack(101, Unknown("no permission to read its memory"))]):
                yield steps(some_facts(job=job, ending=ending, used=(), stacks=stacks))
        yield steps(some_facts(job=job, verdict=Verdict("stalled", "", "act", quiet=True, hang=True)))

    @pytest.mark.parametrize("job", [None, "j7"])
    def test_every_advised_option_exists_with_its_documented_meaning(self, job: str | None) -> None:
        command, documented = self.PARAMETERS[job]
        parameters = {
            option: str(parameter.name).removeprefix("field_")
            for parameter in command.params
            for option in parameter.opts
        }
        advised = set(re.findall(r"(?<![\w-])--[a-z-]+", "\n".join(self.advice(job)))) - self.OF_OTHER_PROGRAMS
        assert {parameters.get(option, f"no option {option}") for option in advised} == documented

    def test_every_advised_command_exists(self) -> None:
        for file in (*Path(stoker.__file__).parent.rglob("*.py"), *Path(stoker.__file__).parent.rglob("*.html")):
            for verb, rest in re.findall(r"`stoker ([a-z]+)([^`\n]*)`", file.read_text()):
                command = app.stoker.get_command(click.Context(app.stoker), verb)
                assert command is not None, (file, verb)
                commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
                parameters = [each for one in commands for each in one.get_params(click.Context(one))]
                options = (option for each in parameters for option in (*each.opts, *each.secondary_opts))
                known = {*options, "--help"}
                advised = re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest.partition(" -- ")[0])
                assert set(advised) <= known, (file, verb)

    def test_queued_job_is_changed_by_edit_and_queued_again(self) -> None:
        shown = steps(some_facts(job="j7", ending="time limit"))
        assert "`stoker edit j7 --time-limit 24h`, then `stoker retry j7`." in shown
        parameters = {option: parameter.name for parameter in edit.edit_command.params for option in parameter.opts}
        assert (parameters["--time-limit"], parameters["--for"]) == ("field_time_limit", "window")


class TestProcesses:
    def test_children_are_listed_below_their_parents_with_their_usage(self) -> None:
        processes = [
            a_process_info(101),
            a_process_info(103, 102, command="sleep 5", name="sleep", state="D", cpu=2.0, memory=2 * 2**20),
            a_process_info(102, 101, command=Unknown("it has none"), name="worker"),
        ]
        rows = blocks(render(some_facts(processes=processes)))[1].splitlines()
        assert rows[1].split() == ["101", "S", "1h23m", "3.0G", "python", "train.py", "--lr", "1e-4"]
        assert [
            row[row.index(word) - 2 : row.index(word)]
            for row, word in zip(rows[2:], ("[worker]", "sleep"), strict=True)
        ] == [
            "└ ",
            "└ ",
        ]
        assert rows[3].index("sleep") > rows[2].index("[worker]")
        assert rows[3].split()[:4] == ["103", "D", "2s", "2M"]

    def test_parents_in_a_cycle_are_each_listed_once(self) -> None:
        processes = [a_process_info(101, 102), a_process_info(102, 101), a_process_info(103, 103)]
        rows = blocks(render(some_facts(processes=processes)))[1].splitlines()
        assert sorted(row.split()[0] for row in rows[1:]) == ["101", "102", "103"]

    def test_long_list_of_processes_is_cut_and_counted(self) -> None:
        processes = [a_process_info(101), *(a_process_info(pid, 101) for pid in range(200, 1200))]
        rows = blocks(render(some_facts(processes=processes)))[1].splitlines()
        assert len(rows) < 50
        assert rows[-1] == "… and 961 more"


class TestStacks:
    def test_processes_with_the_same_stack_are_grouped(self) -> None:
        processes = [a_process_info(pid) for pid in (101, 102, 103)]
        stacks = [a_stack(pid, LOADER, TRAIN) for pid in (101, 102, 103)]
        shown = section(render(some_facts(processes=processes, stacks=stacks)), "Stacks")
        assert "### 3 processes (`python`): 101, 102 and 103" in shown
        assert shown.count("dataloader.py") == 1

    def test_user_calls_are_marked_and_startup_frames_are_left_out(self) -> None:
        start = [f"BaseProcess._bootstrap {STDLIB}/multiprocessing/process.py:314", "<module> <string>:1"]
        shown = blocks(render(some_facts(stacks=[a_stack(101, QUEUE_GET, TRAIN, *start)])))[2]
        assert shown.splitlines() == [
            "MainThread (idle)",
            "  get (multiprocessing/queues.py:103)",
            "> main (train.py:30)",
        ]

    def test_user_call_deep_below_a_library_is_not_cut(self) -> None:
        frames = [*(f"f{n} {SITE}/torch/x.py:{n}" for n in range(40)), TRAIN]
        shown = blocks(render(some_facts(stacks=[a_stack(101, *frames)])))[2].splitlines()
        assert shown[-2:] == ["  … 28 more", "> main (train.py:30)"]
        assert len(shown) < 20

    def test_omitted_frames_of_an_endless_recursion_are_counted(self) -> None:
        thread = Thread("MainThread", "idle", tuple(a_frame(f"f {SITE}/x.py:{n}") for n in range(60)), cut=940)
        shown = blocks(render(some_facts(stacks=[Stack(101, (thread,))])))[2].splitlines()
        assert shown[-1] == "  … 988 more"

    def test_threads_with_the_same_stack_are_grouped_and_the_main_thread_comes_first(self) -> None:
        pool = [a_thread(f"get {STDLIB}/queue.py:1", name=f"pool-{n}") for n in range(8)]
        busy = a_thread("crunch /home/alice/bert/x.py:1", name="cruncher", status="active")
        shown = blocks(render(some_facts(stacks=[Stack(101, (a_thread(TRAIN), *pool, busy))])))[2].splitlines()
        assert [line for line in shown if not line.startswith((" ", ">"))] == [
            "MainThread (idle)",
            "cruncher (active)",
            "8 threads: pool-0, pool-1 and 6 more",
        ]

    def test_helper_processes_come_last(self) -> None:
        tracker = a_stack(102, f"main {STDLIB}/multiprocessing/resource_tracker.py:227")
        page = render(some_facts(processes=[], stacks=[tracker, a_stack(101, LOADER, TRAIN)]))
        assert headings(page)[5:7] == ["Process 101", "Process 102"]

    def test_processes_without_a_stack_have_a_reason_and_a_state(self) -> None:
        processes = [
            a_process_info(101),
            a_process_info(104, 101, name="sleep", call="clock_nanosleep", place="hrtimer_nanosleep"),
        ]
        stacks = [a_stack(101, TRAIN), Stack(104, Unknown(NOT_PYTHON))]
        shown = section(render(some_facts(processes=processes, stacks=stacks)), "Stacks")
        assert "- 104 (`sleep`): sleeping in clock_nanosleep (hrtimer_nanosleep); not a Python process" in shown

    def test_output_of_py_spy_is_parsed(self) -> None:
        printed = (
            'Process 7: python -c import time\nThread 1 (idle): "no thread"\n'
            "Python v3.11.7 (/usr/bin/python3.11)\n\n"
            'Thread 8 (active+gil): "feeder (1)"\n    run (/home/a b/(x).py:12)\n'
            'Thread 7 (idle): "MainThread"\n    <lambda> (train.py:3)\n    <module> (train.py:9)\n'
            "Thread 0x7F (idle)\n"
        )
        main, feeder, nameless = parse_dump(printed)
        assert (main.name, [frame.line for frame in main.frames]) == ("MainThread", [3, 9])
        assert (feeder.name, feeder.status) == ("feeder (1)", "active+gil")
        assert feeder.frames == (Frame("run", "/home/a b/(x).py", 12),)
        assert (nameless.name, nameless.frames) == ("", ())


class TestOutput:
    @pytest.mark.parametrize(
        ("written", "shown"),
        [
            ("\x1b[1;32mgreen\x1b[0m", "green"),
            ("\x1b]0;title\x07text", "text"),
            ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
            ("\x9b31mred", "\ufffd31mred"),
            (" 10%|#  |\r 50%|## |\r100%|###|", "100%|###|"),
            ("100%|###|\r\n", "100%|###|\n"),
            ("spin |\b/\b-", "spin -"),
            ("a\x00b\x07c\x7f", "abc"),
            ("a\tb", "a       b"),
            ("caf\u00e9 \u2713", "caf\u00e9 \u2713"),
            ("evil\u202etxt", "evil\ufffdtxt"),
            ("broken \x1b[31", "broken "),
            ("half \udce9", "half ?"),
            ("1\n\n\n\n\n2", "1\n\n2"),
        ],
    )
    def test_terminal_control_sequences_are_removed(self, written: str, shown: str) -> None:
        assert plain_text(written).rstrip() == shown.rstrip()

    def test_fence_in_the_output_does_not_end_the_block(self) -> None:
        page = render(some_facts(output="before\n````\n# not a heading\n~~~\nafter"))
        assert blocks(page)[-1] == "before\n````\n# not a heading\n~~~\nafter\n"
        assert headings(page)[-1] == "Facts"

    @pytest.mark.parametrize(
        ("output", "expected"),
        [
            (
                Unknown("it went to a terminal, so it is not kept"),
                "Not available: standard output; it went to a terminal",
            ),
            (" \n", "It wrote nothing: standard output is empty."),
        ],
    )
    def test_missing_output_is_reported(self, output: Maybe[str], expected: str) -> None:
        assert expected in section(render(some_facts(output=output)), "Last output")


class TestOutputTail:
    def test_last_lines_of_a_file_are_quoted(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("".join(f"line {n}\n" for n in range(100)))
        assert output_tail(log, lines=3) == "line 97\nline 98\nline 99"
        assert output_tail(str(log), lines=1) == "line 99"

    def test_only_the_end_of_a_huge_file_is_read(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        with log.open("wb") as file:
            file.truncate(10 * 2**40)  # ten tebibytes, sparse
            file.seek(0, os.SEEK_END)
            file.write(b"\nthe end\n")
        tail = output_tail(log)
        assert known(tail)
        assert tail.endswith("the end")
        assert len(tail) < 1000

    def test_unterminated_line_is_cut(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("x" * 10**6)
        tail = output_tail(tmp_path / "log")
        assert known(tail)
        assert 100 < len(tail) < 1000

    def test_part_of_a_line_is_not_shown_as_a_line(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("x" * 100_000 + "\n" + "y" * 10 + "\n")
        assert output_tail(tmp_path / "log") == "y" * 10

    def test_write_only_descriptor_keeps_its_offset(self, tmp_path: Path) -> None:
        descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(descriptor, b"one\ntwo\n")
            assert output_tail(f"/proc/self/fd/{descriptor}") == "one\ntwo"
            os.write(descriptor, b"three\n")
            assert (tmp_path / "log").read_text() == "one\ntwo\nthree\n"
        finally:
            os.close(descriptor)

    def test_undecodable_bytes_are_tolerated(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_bytes(b"caf\xe9\x00\n\x1b[31mred\x1b[0m\n")
        assert output_tail(tmp_path / "log") == "caf\ufffd\nred"

    def test_pipe_and_terminal_are_named(self) -> None:
        reader, writer = os.pipe()
        ours, theirs = os.openpty()
        try:
            assert output_tail(f"/proc/self/fd/{writer}") == Unknown("it went to a pipe, so it is not kept")
            assert output_tail(f"/proc/self/fd/{theirs}") == Unknown("it went to a terminal, so it is not kept")
            assert output_tail("/dev/null") == Unknown("it went to /dev/null, so it is not kept")
        finally:
            for descriptor in (reader, writer, ours, theirs):
                os.close(descriptor)

    def test_missing_file_and_closed_descriptor_are_reported(self, tmp_path: Path) -> None:
        for nowhere in (tmp_path / "none", "/proc/self/fd/9999"):
            tail = output_tail(nowhere)
            assert isinstance(tail, Unknown)
            assert "no such file" in tail.reason

    def test_empty_file_is_empty_not_unknown(self, tmp_path: Path) -> None:
        (tmp_path / "log").touch()
        assert output_tail(tmp_path / "log") == ""


class TestOutputFiles:
    """Real processes, as the supervisor finds them before a stop."""

    @pytest.fixture
    def started(self, tmp_path: Path) -> Iterator[Callable[[str], int]]:
        processes: list[subprocess.Popen[bytes]] = []

        def start(command: str) -> int:
            line = ["/bin/sh", "-c", command]
            process = subprocess.Popen(
                line, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            processes.append(process)
            wait_for(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text())
            return process.pid

        yield start
        for process in processes:
            process.communicate(b"\n")

    def test_output_to_two_files_is_listed_by_name(self, started: Callable[[str], int], tmp_path: Path) -> None:
        error = "Traceback (most recent call last):\n  File\nValueError: nan"
        pid = started(f"exec >out 2>err; printf '{error}' >&2; echo >ready; read wait")
        facts = some_facts(outputs=last_outputs([pid]), stacks=[], processes=[])
        output = section(render(facts), "Last output")
        assert f"Standard error (`{tmp_path}/err`):\n\n```text\nTraceback (most" in output
        assert f"Empty: standard output (`{tmp_path}/out`)." in output
        assert titles(facts)[0] == "Its last output contains an error"
        assert "`ValueError: nan`" in steps(facts)

    def test_files_of_processes_started_by_a_shell_are_found(
        self, started: Callable[[str], int], tmp_path: Path
    ) -> None:
        shell = started("sh -c 'echo loss 0.3; echo $$ >ready; read wait' >out 2>&1 <&0; true")
        child = int((tmp_path / "ready").read_text())
        (output,) = [each for each in last_outputs([shell, child]) if each.file]
        assert (output.name, output.text) == ("standard output and standard error", "loss 0.3")

    def test_captured_output_of_a_queued_job_is_quoted(self, started: Callable[[str], int], tmp_path: Path) -> None:
        pid = started("echo >ready; read wait")
        (tmp_path / "output.1").write_text("epoch 1\n")
        (tmp_path / "output").write_text("CUDA out of memory\nstoker: idle for 15m\n")
        facts = some_facts(job="j7", outputs=last_outputs([pid], tmp_path / "output"), stacks=[], processes=[])
        assert blocks(render(facts))[-1] == "epoch 1\nCUDA out of memory\nstoker: idle for 15m\n"
        assert "memory ran out" in titles(facts)[0]

    def test_supervisor_messages_give_no_hint(self) -> None:
        output = "stoker: it ran out of memory, and is started again\nOverwrite? [y/N] stoker: GPU 0 is idle\n"
        assert titles(some_facts(output=output))[0] == "It is waiting for keyboard input"
        assert "Its output reports that memory ran out" not in titles(some_facts(output=output))

    def test_supervisor_messages_are_not_output_of_the_job(self) -> None:
        page = render(some_facts(output="stoker: GPU 0 is idle; the job is stopped in 5m\n"))
        assert "It wrote nothing: standard output is empty." in section(page, "Last output")

    def test_results_after_an_error_are_not_called_complete(self) -> None:
        stacks = [a_stack(101, f"_shutdown {STDLIB}/threading.py:1553")]
        assert "results are probably complete" in steps(some_facts(stacks=stacks, output="epoch 9\n"))
        failed = some_facts(stacks=stacks, output="Traceback (most recent call last):\n  File\nKeyError: 3\n")
        assert titles(failed)[0] == "The main program had finished, but the process did not exit"
        assert "results are probably complete" not in steps(failed)

    def test_pipe_is_named_with_its_streams(self, started: Callable[[str], int]) -> None:
        page = render(some_facts(outputs=last_outputs([started("echo >ready; read wait")])))
        expected = "Not available: standard output and standard error; it went to a pipe, so it is not kept."
        assert expected in section(page, "Last output")


class TestBrief:
    def test_summary_has_the_outcome_reason_and_path_of_the_report(self) -> None:
        facts = some_facts(stacks=[a_stack(101, LOADER, TRAIN)])
        assert brief(facts, "/home/alice/.local/state/stoker/runs/3f9a12bc/report.md").splitlines() == [
            "stoker: run 3f9a12bc: GPU 0 and GPU 1 stayed below 1% for 30m; stopped by SIGTERM after 3s, exit code 124",
            "  it was in main (train.py:30)",
            "  hint: It is waiting for data",
            "  hint: Was it idle on purpose?",
            "  report: /home/alice/.local/state/stoker/runs/3f9a12bc/report.md",
        ]

    def test_summary_stays_short(self) -> None:
        stacks = [a_stack(pid, f"f{pid} /home/alice/{'x' * 300}.py:{pid}") for pid in range(100, 200)]
        facts = some_facts(stacks=stacks, left=["y" * 500] * 50, reason="z" * 500, exit="w" * 500)
        lines = brief(facts, "/a/report.md").splitlines()
        assert len(lines) <= 8
        assert max(map(len, lines)) <= 170
        assert "left behind: yyy" in "\n".join(lines)
        assert lines[-1] == "  report: /a/report.md"


nasty = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="`~#*_-<>[]()!|\\&;:\x1b\r\n\t\x00\x9b\u2028ab1. ", max_size=40),
    st.sampled_from(
        ["```", "~~~\n# x", "<script>alert(1)</script>", "[a](javascript:b)", "\x1b[2J", "| a |\n|---|", "&lt;"]
    ),
)
frames = st.builds(Frame, nasty, nasty, st.integers(0, 10**6))
threads = st.builds(Thread, nasty, nasty, st.lists(frames, max_size=4).map(tuple), st.integers(0, 5))
maybe = st.one_of(nasty, nasty.map(Unknown))
some_processes = st.builds(
    a_process_info,
    st.integers(1, 6),
    st.integers(1, 6),
    state=st.one_of(st.sampled_from("RSDTZ"), nasty),
    name=nasty,
    command=maybe,
    blocked=st.integers(0, 2),
    place=maybe,
    call=maybe,
)
some_stacks = st.builds(
    Stack, st.integers(1, 6), st.one_of(nasty.map(Unknown), st.lists(threads, max_size=3).map(tuple))
)
any_facts = st.builds(
    some_facts,
    id=nasty,
    command=st.lists(nasty, max_size=3).map(tuple),
    directory=nasty,
    host=nasty,
    user=nasty,
    started=st.floats(allow_nan=False, allow_infinity=False),
    ended=st.floats(0, 2e9),
    ending=st.sampled_from(["idle", "time limit", "signal", "exited", "could not start", "supervisor killed"]),
    reason=nasty,
    rule=nasty,
    exit=nasty,
    looks=st.lists(
        st.one_of(
            st.builds(lambda why: a_look(problem=Unknown(why)), nasty),
            st.builds(lambda why, note: a_look(0.0, Unknown(why), note=note), nasty, st.none() | nasty),
            st.builds(
                lambda who, name: Look(
                    name, 1.0, 0.0, (a_gpu(name=name),), (a_reading(processes=(a_process(2, name=who, user=who),)),)
                ),
                nasty,
                nasty,
            ),
        ),
        max_size=3,
    ),
    processes=st.lists(some_processes, max_size=4),
    stacks=st.lists(some_stacks, max_size=4),
    output=maybe,
    driver=maybe,
    left=st.lists(nasty, max_size=3),
)
SECTIONS = ["What to do next", "GPUs", "Processes", "Stacks", "Last output", "Facts"]


def is_harmless(text: str) -> bool:
    """Whether it has no terminal controls or direction marks, and can be encoded."""
    text.encode()
    marks = re.compile("[\u2028-\u202e\u2066-\u2069]")
    return not marks.search(text) and all(unicodedata.category(letter) != "Cc" or letter == "\n" for letter in text)


@settings(max_examples=examples(150), deadline=None)
@given(any_facts)
def test_any_text_leaves_a_valid_page(facts: RunFacts) -> None:
    page = render(facts)
    assert is_harmless(page)
    parsed = tokens(page)
    kinds = {token.type for token in parsed} | {child.type for token in parsed for child in token.children or ()}
    assert not kinds & {
        "html_block",
        "html_inline",
        "link_open",
        "image",
        "table_open",
        "code_block",
        "hr",
        "blockquote_open",
    }
    levels = {"h1": 0, "h2": 0, "h3": 0}
    for token in parsed:
        if token.type == "heading_open":
            levels[token.tag] += 1
    assert (levels["h1"], levels["h2"]) == (1, len(SECTIONS))
    assert [title for title in headings(page) if title in SECTIONS] == SECTIONS
    # An open fence would swallow the end of the page.
    assert any(token.type == "inline" and token.content.startswith("stoker: ") for token in parsed)
    shown = brief(facts, "/a/report.md")
    assert is_harmless(shown)
    assert len(shown.splitlines()) <= 8


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("570.86.15 on node_7", "570.86.15 on node_7"),
        ("1. x", r"1\. x"),
        ("12) x", r"12\) x"),
        ("# x", r"\# x"),
        ("- x", r"\- x"),
        ("*a* `b` <c> [d](e)", r"\*a\* \`b\` \<c\> \[d\](e)"),
        ("__init__ in a_b", r"\_\_init\_\_ in a_b"),
        ("two\nlines", "two lines"),
    ],
)
def test_only_markup_is_escaped(text: str, written: str) -> None:
    assert prose(text) == written
    assert tokens(written)[1].content == written  # one paragraph, nothing else
