"""GPUs out of rotation: what takes one out, what does not, and what brings it back."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engines.local.quarantine import JobEnd, Quarantine, changed, gpu_error, program_of
from stoker.errors import BadInputError
from stoker.gpus.faults import new_faults, standing_faults
from stoker.gpus.model import DeviceHealth, Look, Maybe, Unknown
from stoker.gpus.quarantine import QuarantinedGpu, QuarantineFile, release, take_out
from tests.support.looks import a_gpu, a_reading

WHY = Unknown("not supported")
WELL = DeviceHealth((), 0, False, False)
LOST = "XID 79: the GPU has fallen off the bus"
ECC_ERROR = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
A, B, C = (a_gpu(index).uuid for index in range(3))


def seen(at: float, *healths: Maybe[DeviceHealth]) -> Look:
    gpus = tuple(a_gpu(index) for index in range(len(healths)))
    readings = [
        msgspec.structs.replace(a_reading(gpu, 0.0), health=health) for gpu, health in zip(gpus, healths, strict=True)
    ]
    return Look("test", at, 1000.0 + at, gpus, tuple(readings))


def after(*healths: Maybe[DeviceHealth], entries: dict[str, QuarantinedGpu] | None = None) -> Quarantine:
    """The state after these looks at one GPU."""
    state = Quarantine("this boot")
    state.load(entries or {}, 0.0, 1000.0)
    for at, health in enumerate(healths):
        state.observe(seen(float(at), health))
    return state


def reasons(state: Quarantine) -> list[str]:
    return [entry.reason for entry in state.out_of_rotation.values()]


# Readings


@pytest.mark.parametrize(
    ("healths", "expected"),
    [
        ([WELL, WELL._replace(xids=(79,))], [LOST]),
        ([WELL._replace(xids=(79,))], [LOST]),
        ([WELL, WELL._replace(uncorrected=2)], ["2 uncorrectable memory errors"]),
        ([WELL._replace(needs_reset=True)], ["its memory waits for a reset"]),
        ([WELL._replace(remapping_failed=True)], ["its memory has no spare rows left"]),
        ([WELL, WHY, DeviceHealth((48,), WHY, WHY, WHY)], ["XID 48: an uncorrectable memory error"]),
        ([WELL, WELL._replace(uncorrected=WHY), WELL._replace(uncorrected=1)], ["1 uncorrectable memory error"]),
        # What a program does, what the driver does not report, and errors from before the worker was started.
        ([WELL, WELL._replace(xids=(13, 31, 43))], []),
        ([WHY, DeviceHealth(), DeviceHealth((), WHY, WHY, WHY)], []),
        ([WELL._replace(uncorrected=7), WELL._replace(uncorrected=7)], []),
        # The driver was loaded again.
        ([WELL._replace(uncorrected=7), WELL, WELL], []),
    ],
)
def test_faults_that_need_a_reset_take_a_gpu_out(healths: list[Maybe[DeviceHealth]], expected: list[str]) -> None:
    assert reasons(after(*healths)) == expected


def test_only_the_bad_gpu_is_taken_out_and_stays_out_when_the_fault_is_gone() -> None:
    state = Quarantine("this boot")
    state.observe(seen(0.0, WELL, WELL))
    state.observe(seen(1.0, WELL, WELL._replace(xids=(79,))))
    state.observe(seen(2.0, WELL, WELL))
    entry = state.out_of_rotation[B]
    assert list(state.out_of_rotation) == [B]
    assert (entry.index, entry.since, entry.boot) == (1, 1001.0, "this boot")
    assert state.unwritten == {B: entry}


def test_released_gpu_is_taken_out_again_by_a_new_fault_only() -> None:
    bad = WELL._replace(xids=(79,), needs_reset=True)
    state = after(WELL, bad)
    (entry,) = state.out_of_rotation.values()
    state.unwritten.clear()
    state.load({A: msgspec.structs.replace(entry, released=True)}, 2.0, 1002.0)
    state.observe(seen(3.0, bad))
    assert reasons(state) == []
    state.observe(seen(4.0, bad._replace(xids=(79, 79))))
    assert reasons(state) == [LOST]


def test_fault_that_was_accepted_counts_again_after_a_reset() -> None:
    bad = WELL._replace(needs_reset=True)
    released = QuarantinedGpu(index=0, reason="x", since=1.0, faults=standing_faults(bad), released=True)
    state = after(bad, entries={A: released})
    assert (reasons(state), state.unwritten) == ([], {})
    state.observe(seen(2.0, WELL))
    assert state.unwritten == {A: None}
    state.observe(seen(3.0, bad))
    assert reasons(state) == ["its memory waits for a reset"]


def test_later_worker_knows_the_fault_of_an_earlier_one() -> None:
    entry = QuarantinedGpu(index=0, reason="x", since=900.0, faults=(LOST,))
    state = after(WELL, entries={A: entry})
    assert state.failed_during([A], since=-200.0) == A
    assert state.failed_during([A], since=-50.0) is None, "the job started after the fault"


def test_job_of_a_gpu_that_an_administrator_took_out_has_no_excuse() -> None:
    state = after(WELL, entries={A: QuarantinedGpu(index=0, reason="maintenance", since=1500.0)})
    assert reasons(state) == ["maintenance"]
    assert state.failed_during([A], since=0.0) is None


def test_job_with_a_fault_on_every_gpu_is_not_excused_for_ever() -> None:
    state = after(WELL, WELL._replace(xids=(79,)))
    assert [state.excuse("one", [A], since=0.0) for _ in range(3)] == [A, A, None]
    assert state.excuse("another", [A], since=0.0) == A
    assert state.excuse("later", [A], since=2.0) is None


numbers = st.one_of(st.just(WHY), st.integers(0, 5))
flags = st.one_of(st.just(WHY), st.booleans())
healths = st.one_of(
    st.just(WHY),
    st.builds(DeviceHealth, st.lists(st.sampled_from([13, 79, 48]), max_size=4).map(tuple), numbers, flags, flags),
)


@given(st.lists(healths, max_size=12))
def test_quarantine_never_ends_by_itself(observed: list[Maybe[DeviceHealth]]) -> None:
    state = Quarantine("this boot")
    out: set[str] = set()
    for at, health in enumerate(observed):
        state.observe(seen(float(at), health, WHY))
        assert out <= state.out_of_rotation.keys() <= {A}, "what is unknown takes nothing out"
        out = set(state.out_of_rotation)
        assert state.out_of_rotation == changed({}, state.unwritten)


@given(st.lists(healths, max_size=12))
def test_every_gpu_out_of_rotation_had_a_fault(observed: list[Maybe[DeviceHealth]]) -> None:
    state = after(*observed)
    known = [health for health in observed if isinstance(health, DeviceHealth)]
    counts = [health.uncorrected for health in known if isinstance(health.uncorrected, int)]
    rose = any(later > earlier for earlier, later in itertools.pairwise(counts))
    assert bool(state.out_of_rotation) == (rose or any(map(standing_faults, known)))


def test_repeated_xid_is_new_after_older_ones_were_dropped() -> None:
    before = DeviceHealth((31, 79, 13))
    assert new_faults(before, DeviceHealth((79, 13, 79))) == (LOST,)
    assert new_faults(before, DeviceHealth((79, 13))) == ()
    assert new_faults(before, DeviceHealth(())) == ()


# Jobs


def failed(job: str, program: str, *gpus: str, at: float = 0.0, **changes: Any) -> JobEnd:
    usual: dict[str, Any] = {"lasted": 5.0, "failed": True, "exit_code": 1, "output": ECC_ERROR}
    return JobEnd(job, program, gpus, at, **{**usual, **changes})


def ran(program: str, *gpus: str, at: float = 0.0) -> JobEnd:
    return failed("fine", program, *gpus, at=at, failed=False, exit_code=0, output="")


def judged(*ends: JobEnd) -> Quarantine:
    state = Quarantine("this boot")
    state.observe(seen(0.0, WELL, WELL, WELL))
    for end in ends:
        state.job_ended(end, 1000.0 + end.at)
    return state


def test_two_different_jobs_in_a_row_take_their_gpu_out() -> None:
    state = judged(failed("j1", "alice: a.py", A), failed("j2", "bob: b.py", A, at=60.0))
    (entry,) = state.out_of_rotation.values()
    assert entry.reason == (
        "jobs j1 and j2 failed on it right after their start: CUDA error: uncorrectable ECC error encountered"
    )
    assert state.failed_during([A], since=50.0) == A


def test_gpu_that_both_jobs_had_is_taken_out() -> None:
    state = judged(failed("j1", "a.py", A, B), failed("j2", "b.py", B, C))
    assert list(state.out_of_rotation) == [B]


@pytest.mark.parametrize(
    "ends",
    [
        [failed(f"j{number}", "sweep.py", A, at=float(number)) for number in range(50)],
        [failed("j1", "a.py", A), failed("j2", "b.py", B)],
        [failed("j1", "a.py", A, B), failed("j2", "b.py", A, B)],
        [failed("j1", "a.py", A), ran("c.py", A), failed("j2", "b.py", A)],
        [failed("j1", "a.py", A), failed("j2", "b.py", A, at=4000.0)],
        [failed("j1", "a.py", A), failed("j2", "b.py", A, lasted=61.0)],
        [failed("j1", "a.py", A), failed("j2", "b.py", A, output="ModuleNotFoundError: No module named 'x'\n")],
        [failed("j1", "a.py", A), failed("j2", "b.py", A, exit_code=127)],
        [failed("j1", "a.py", A), failed("j2", "b.py", A, failed=False, exit_code=None)],
        [failed("j1", "a.py"), failed("j2", "b.py")],
    ],
    ids=[
        "one program", "different GPUs", "two GPUs are suspect", "a job ran well between them", "hours apart",
        "later than its start", "no word of a GPU", "wrong command", "cancelled", "no GPU",
    ],
)  # fmt: skip
def test_failures_that_say_nothing_about_a_gpu(ends: list[JobEnd]) -> None:
    assert not judged(*ends).out_of_rotation


def test_broken_driver_does_not_take_out_one_gpu_after_the_other() -> None:
    ends = [failed(f"j{number}", f"{number}.py", (A, A, B, B, C, C)[number], at=float(number)) for number in range(6)]
    assert list(judged(*ends).out_of_rotation) == [A]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sets(st.sampled_from([A, B, C]), min_size=1), st.booleans()), max_size=20
    )
)
def test_failures_of_jobs_take_out_at_most_one_gpu(ends: list[tuple[str, set[str], bool]]) -> None:
    state = judged(
        *(
            ran(program, *gpus, at=float(at)) if well else failed(f"j{at}", program, *gpus, at=float(at))
            for at, (program, gpus, well) in enumerate(ends)
        )
    )
    assert len(state.out_of_rotation) <= 1
    programs = {program for program, _gpus, well in ends if not well}
    assert len(programs) >= 2 or not state.out_of_rotation


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("x\nRuntimeError: CUDA error: unspecified launch failure\n", "CUDA error: unspecified launch failure"),
        ("cudaErrorECCUncorrectable\n", "cudaErrorECCUncorrectable"),
        ("RuntimeError: No CUDA-capable device is detected\n", "No CUDA-capable device"),
        ("HIP error: unknown error\n", "HIP error: unknown error"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", None),
        ("CUDA error: out of memory\n", None),
        ("CUDA error: device-side assert triggered\n", None),
        ("CUDA error: an illegal memory access was encountered\n", None),
        ("cudaErrorIllegalAddress\n", None),
        ("CUDA error: invalid device ordinal\n", None),
        ("CUDA error: no kernel image is available for execution on the device\n", None),
        ("ValueError: bad learning rate\n", None),
    ],
)
def test_only_errors_of_a_gpu_blame_it(output: str, expected: str | None) -> None:
    assert gpu_error(failed("j", "p", A, output=output)) == expected


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py --lr 0.1", "train.py"),
        ("sh -c cd /x && python3 -u /home/a/train.py --lr 0.2", "train.py"),
        ("python -m torch.distributed.run train.py", "train.py"),
        ("python -m package.train --lr 1", "package.train"),
        ("./simulate 3 4", "./simulate"),
        ("", ""),
    ],
)
def test_program_of_a_command(command: str, program: str) -> None:
    assert program_of(command) == program


# The file


@pytest.fixture
def file(tmp_path: Path) -> QuarantineFile:
    return QuarantineFile(tmp_path / "home", "box")


def test_file_is_private_and_read_by_another_process(file: QuarantineFile) -> None:
    assert file.read() == {}
    take_out(file, A, 0, "maintenance", 5.0)
    assert QuarantineFile(file.home, "box").out_of_rotation()[A].reason == "maintenance"
    assert QuarantineFile(file.home, "other").read() == {}
    assert all(path.stat().st_mode & 0o077 == 0 for path in file.home.iterdir())


def test_entries_of_an_earlier_boot_are_gone(file: QuarantineFile) -> None:
    old = QuarantinedGpu(index=0, reason="x", since=1.0, boot="an earlier boot", faults=(LOST,))
    file.update(lambda _: {A: old, B: msgspec.structs.replace(old, boot="")})
    assert list(file.read()) == [B]


@pytest.mark.parametrize("chosen", ["1", B, B[:8], "all"])
def test_release_by_index_uuid_or_all(file: QuarantineFile, chosen: str) -> None:
    take_out(file, B, 1, "x", 1.0)
    if chosen == "all":
        take_out(file, A, 0, "x", 1.0)
    released = release(file, chosen)
    assert 1 in [entry.index for entry in released]
    assert file.read() == {}, "nothing is left to remember of what an administrator took out"


def test_released_fault_is_remembered(file: QuarantineFile) -> None:
    entry = QuarantinedGpu(index=0, reason="x", since=1.0, faults=(LOST,))
    file.update(lambda _: {A: entry})
    release(file, "0")
    assert (file.out_of_rotation(), file.read()[A].released) == ({}, True)
    with pytest.raises(BadInputError):
        release(file, "0")


@pytest.mark.parametrize("chosen", ["3", "", "GPU", "-1", "a b"])
def test_release_of_something_else_is_one_sentence(file: QuarantineFile, chosen: str) -> None:
    take_out(file, A, 0, "x", 1.0)
    take_out(file, B, 1, "x", 1.0)
    with pytest.raises(BadInputError, match="GPU 0"):
        release(file, chosen)
    assert len(file.out_of_rotation()) == 2


def test_damaged_file_holds_nothing(file: QuarantineFile) -> None:
    take_out(file, A, 0, "x", 1.0)
    (file.home / "quarantine-box.json").write_text("{")
    assert file.read() == {}
