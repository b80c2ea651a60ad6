"""The progress of real processes: calls of `stoker.step()`, logs, event files, checkpoints, processor time and I/O."""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.gpus.model import JobProgress
from stoker.logs.writer import LogWriter
from stoker.procfs import KeptFiles, Stat, stat
from stoker.runs import progress
from stoker.runs.processes.tree import scan_processes
from stoker.runs.processes.usage import WrittenFile, written_files
from stoker.runs.progress import ProgressTracker
from stoker.step_file import read_steps
from tests.unit.test_log_wandb import HISTORY, STATS, message, written

# Seconds on the clock of the tracker. Less than the time after which files are looked at anyway.
APART = 20.0
EVERY_STEP = "import stoker, stoker.step_file as f; f._EVERY = 0.0; f._MOST_TIME = 1e9"


class TreeOf:
    """The processes of a job, found by descent."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def measured_processes(self, files: KeptFiles) -> list[Stat]:  # noqa: ARG002 - the job's own way
        pids = [*self._pids, *(process.pid for process in scan_processes(self._pids).processes)]
        return [found for pid in pids if (found := stat(pid))]


@pytest.fixture(autouse=True)
def _scan_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every look, however long it takes on a busy machine."""
    monkeypatch.setattr(progress, "_MOST_CPU", 1.0)


class Program:
    """A Python program that runs one line at a time, as it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def run(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


LOOP = "import sys, os\nfor line in sys.stdin:\n    exec(line)\n    os.write(3, b'done\\n')\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a program whose output goes to a file, a terminal's stand-in, or nowhere."""
    with contextlib.ExitStack() as cleanup:

        def started(output: str = os.devnull, **variables: str) -> Program:
            redirect = f'exec 3>&1 >> "{output}" 2>&1; exec "$0" -u -c "$1"'
            process = cleanup.enter_context(
                subprocess.Popen(
                    ["sh", "-c", redirect, sys.executable, LOOP],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=tmp_path,
                    env={**os.environ, **variables},
                )
            )
            cleanup.callback(process.kill)
            program = Program(process)
            program.run("pass")  # its output is redirected from then on
            return program

        yield started


def looks(tracker: ProgressTracker) -> Iterator[JobProgress]:
    """One look after the other, so far apart that every one scans the processes."""
    for number in itertools.count(1):
        yield tracker.observe(number * APART)


def test_steps_of_two_ranks_are_added_and_kept_apart(start: Callable[..., Program], tmp_path: Path) -> None:
    ranks = [start(STOKER_RUN_DIR=str(tmp_path), RANK=str(rank)) for rank in (1, 0)]
    tracker = ProgressTracker(TreeOf(*(rank.pid for rank in ranks)), directory=str(tmp_path))
    for rank in ranks:
        rank.run(EVERY_STEP)
    seen = looks(tracker)
    last = next(seen)
    assert last.trust == "none"
    for _ in range(3):
        ranks[0].run("stoker.step()")
        ranks[1].run("stoker.step(); stoker.step()")
        last = next(seen)
    assert (last.steps, last.trust) == (9, "call")
    shown = tracker.progress(1e9)
    assert shown is not None
    assert (shown.steps, shown.trust, shown.since > 1e9) == (9, "call", True)
    assert [(one.rank, one.steps, one.pid) for one in shown.ranks] == [(0, 6, ranks[1].pid), (1, 3, ranks[0].pid)]
    assert next(seen) == last._replace(cpu=next(seen).cpu, io=next(seen).io)


@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["within-a-tick", "later"])
def test_unchanged_directory_is_not_listed_and_a_new_file_is_found(
    start: Callable[..., Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    program = start(STOKER_RUN_DIR=str(tmp_path))
    program.run(EVERY_STEP)
    tracker = ProgressTracker(TreeOf(program.pid), directory=str(tmp_path))
    seen, listed = looks(tracker), Mock(side_effect=read_steps)
    monkeypatch.setattr(progress, "read_steps", listed)
    time.sleep(pause)
    for _ in range(3):
        next(seen)
    assert listed.call_count == (1 if pause else 3)
    for _ in range(2):
        program.run("stoker.step()")
        next(seen)
    program.run("stoker.step()")
    last = next(seen)
    assert (last.steps, last.trust) == (3, "call")


def test_number_given_to_step_may_begin_anew(start: Callable[..., Program], tmp_path: Path) -> None:
    program = start(STOKER_RUN_DIR=str(tmp_path))
    tracker = ProgressTracker(TreeOf(program.pid), directory=str(tmp_path))
    program.run(EVERY_STEP)
    found: list[int | None] = []
    for number in (1, 2, 1, 2):
        program.run(f"stoker.step({number})")
        found.append(tracker.observe(APART * len(found)).steps)
    assert found == [None, 2, 3, 4]
    shown = tracker.progress(0.0)
    assert shown is not None
    assert [(one.rank, one.steps) for one in shown.ranks] == [(None, 2)]


@pytest.mark.parametrize("mode", ["redirected", "logging"])
def test_steps_in_a_file_that_the_job_writes_are_seen(mode: str, start: Callable[..., Program], tmp_path: Path) -> None:
    program = start("train.txt") if mode == "redirected" else start()
    program.run("log = sys.stdout" if mode == "redirected" else "log = open('train.log', 'a', buffering=1)")
    seen = looks(ProgressTracker(TreeOf(program.pid)))
    last = next(seen)
    for step in range(4):
        program.run(f"print('step {step} loss 1.0', file=log)")
        last = next(seen)
    assert (last.trust, last.steps) == ("log", 3)
    program.run("print('still alive at step 3', file=log)")
    assert next(seen)._replace(cpu=None, io=None) == last._replace(cpu=None, io=None)


def test_files_are_looked_at_when_something_may_have_been_written_and_once_a_minute(
    start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start("train.txt")
    listed: list[float] = []
    tracker = ProgressTracker(TreeOf(program.pid))
    original = written_files

    def counting(*arguments: Any) -> Iterator[WrittenFile]:
        listed.append(at)
        return original(*arguments)

    monkeypatch.setattr(progress, "written_files", counting)
    for at in (0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0, 140.0):
        if at == 80.0:
            program.run("print('a line')")
        tracker.observe(at)
    assert listed == [0.0, 60.0, 80.0, 140.0]


def test_heartbeat_in_a_redirected_file_is_output(start: Callable[..., Program]) -> None:
    program = start("out")
    seen = looks(ProgressTracker(TreeOf(program.pid)))
    last = next(seen)
    for beat in range(3):
        program.run(f"print('heartbeat {beat}')")
        last = next(seen)
    assert (last.trust, last.steps) == ("output", 3)


def test_output_that_goes_nowhere_shows_nothing(start: Callable[..., Program]) -> None:
    program = start()
    tracker = ProgressTracker(TreeOf(program.pid))
    seen = looks(tracker)
    last = next(seen)
    for step in range(4):
        program.run(f"print('step {step}')")
        last = next(seen)
    assert (last.trust, last.steps, last.since) == ("none", None, None)
    assert tracker.progress(0.0) is None


@pytest.mark.parametrize(
    ("name", "trust"),
    [("events.out.tfevents.1.host.2.0", "events"), ("metrics.csv", "events"), ("model.ckpt", "checkpoint")],
)
def test_files_that_grow_show_progress(name: str, trust: str, start: Callable[..., Program], tmp_path: Path) -> None:
    program = start()
    program.run(f"file = open({name!r}, 'ab', buffering=0)")
    seen = looks(ProgressTracker(TreeOf(program.pid)))
    last = next(seen)
    for _ in range(3):
        program.run("file.write(b'a record')")
        last = next(seen)
    assert (last.trust, last.steps) == (trust, 3)
    assert next(seen).steps == 3
    program.run(f"other = open({name!r}, 'rb')")
    assert next(seen).steps == 3


def test_metrics_of_wandb_are_steps_and_samples_of_the_machine_are_none(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    program = start()
    program.run("file = open('run-abc.wandb', 'ab', buffering=0)")
    program.run(f"file.write({written()!r})")
    seen = looks(ProgressTracker(TreeOf(program.pid)))
    last = next(seen)
    for field in [HISTORY, STATS, HISTORY, STATS, HISTORY]:
        record = written(message(field, 100))[7:]
        program.run(f"file.write({record!r})")
        last = next(seen)
    assert (last.trust, last.steps) == ("events", 3)


def test_better_source_takes_over_and_stays(start: Callable[..., Program], tmp_path: Path) -> None:
    program = start("out", STOKER_RUN_DIR=str(tmp_path))
    program.run(EVERY_STEP)
    seen = looks(ProgressTracker(TreeOf(program.pid), directory=str(tmp_path)))
    next(seen)
    trusts = []
    for line in ["print('a')"] * 3 + ["print('step', n)"] * 4 + ["stoker.step()"] * 3 + ["print('step', n)"] * 3:
        program.run(f"n = globals().get('n', 0) + 1; {line}")
        trusts.append(next(seen).trust)
    assert trusts == ["none"] + ["output"] * 4 + ["log"] * 3 + ["call"] * 5


def test_log_of_a_queued_job_is_read_across_rotation(tmp_path: Path) -> None:
    log = tmp_path / "output"
    tracker = ProgressTracker(TreeOf(), log=lambda: str(log))
    seen = looks(tracker)
    assert next(seen).trust == "none"
    log.write_text("step 1\n")
    last = next(seen)
    for step in (2, 3):
        with log.open("a") as file:
            file.write(f"step {step}\n")
        last = next(seen)
    assert (last.trust, last.steps) == ("log", 2)
    log.rename(tmp_path / "output.1")
    log.write_text("step 4")
    assert next(seen).steps == 3
    # The unfinished line is rewritten in place, with the same size.
    log.write_text("step 5")
    assert next(seen).steps == 4


def test_bar_that_keeps_fewer_of_its_states_has_made_no_step(tmp_path: Path) -> None:
    path = tmp_path / "output"
    tracker = ProgressTracker(TreeOf(), log=lambda: str(path))
    seen, clock = looks(tracker), itertools.count()
    log, found, shrunk = LogWriter(path, 2**20, lambda: float(next(clock))), [], 0
    for step in [*range(300), *[299] * 300]:
        before = path.stat().st_size
        log.write(f"\rtrain: {step // 10}%|##| {step}/1000 [00:10<01:00, 5.0it/s, loss=1.5]".encode())
        shrunk += path.stat().st_size < before
        found.append(next(seen).steps or 0)
    log.close()
    assert shrunk >= 2
    assert found[299] == found[-1] > 250


def test_processor_time_of_the_tree_is_measured_with_children_that_ended(start: Callable[..., Program]) -> None:
    program = start()
    tracker = ProgressTracker(TreeOf(program.pid))
    assert tracker.observe(0.0).cpu is None
    burn = "import time; [0 for _ in iter(lambda: time.process_time() < 0.5, False)]"
    program.run(f"import subprocess; subprocess.run([sys.executable, '-c', {burn!r}])")
    # Counted in ticks of 10 ms, which are rounded down.
    assert 0.4 <= (tracker.observe(APART).cpu or 0.0) * APART < 5.0
    assert 0.0 <= (tracker.observe(2 * APART).cpu or 0.0) * APART < 0.1


def test_bytes_that_the_tree_moves_are_measured(start: Callable[..., Program], tmp_path: Path) -> None:
    program = start()
    tracker = ProgressTracker(TreeOf(program.pid))
    tracker.observe(0.0)
    program.run("open('data', 'wb').write(b'0' * 2**22); open('data', 'rb').read()")
    assert (tracker.observe(APART).io or 0.0) * APART == pytest.approx(2 * 2**22, rel=0.1)
    assert (tracker.observe(2 * APART).io or 0.0) * APART < 2**16


def test_processes_that_are_gone_never_give_negative_figures(start: Callable[..., Program]) -> None:
    programs = [start(), start()]
    tracker = ProgressTracker(TreeOf(*(program.pid for program in programs)))
    tracker.observe(0.0)
    programs[1].run("sum(range(10**6)); os.write(1, b'0' * 10**6)")
    tracker.observe(APART)
    programs[1].process.kill()
    programs[1].process.wait()
    found = tracker.observe(2 * APART)
    assert found.cpu is not None
    assert found.cpu >= 0.0
    assert found.io is not None
    assert found.io >= 0.0
    programs[0].process.kill()
    programs[0].process.wait()
    found = tracker.observe(3 * APART)
    assert (found.cpu, found.io) == (None, None)


class Broken:
    def measured_processes(self, files: KeptFiles) -> list[Stat]:  # noqa: ARG002
        raise ZeroDivisionError("a mistake of ours")


def test_failure_is_silent(tmp_path: Path) -> None:
    tracker = ProgressTracker(Broken(), directory=str(tmp_path / "gone"), log=lambda: "/proc/self/mem")
    assert [tracker.observe(at) for at in (1.0, APART)] == [JobProgress()] * 2


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(pieces=st.lists(st.one_of(st.binary(max_size=300), st.sampled_from([b"step 1\n", b"\r", b"1/2 ["])), max_size=8))
def test_any_bytes_can_be_read(pieces: list[bytes], tmp_path: Path) -> None:
    log = tmp_path / "output"
    log.unlink(missing_ok=True)
    (tmp_path / "steps.17").write_bytes(b"".join(pieces)[:200])
    tracker = ProgressTracker(TreeOf(), directory=str(tmp_path), log=lambda: str(log))
    before = 0
    for number, piece in enumerate(pieces):
        with log.open("ab") as file:
            file.write(piece)
        found = tracker.observe(number * APART)
        assert found.steps is None or found.steps >= before
        before = found.steps or before


def test_work_per_look_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "output"
    tracker = ProgressTracker(TreeOf(), log=lambda: str(log))
    with log.open("wb") as file:
        file.truncate(2**34)
        file.seek(0, os.SEEK_END)
        file.write(b"step 1/" * 2**17)
    begun = time.process_time()
    tracker.observe(5.0)
    assert time.process_time() - begun < 1.0
