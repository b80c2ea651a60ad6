"""Recordings: round trips, and reading of damaged files."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import DeviceHealth, JobProgress, Look, Maybe, Pipes, Reading, Unknown, Utilization
from stoker.gpus.recording import RecordingReader, RecordingWriter
from tests.support.looks import a_gpu, a_look, a_process


def write(path: Path, *looks: Look) -> None:
    writer = RecordingWriter(path)
    for look in looks:
        writer.append(look)
    writer.close()


def maybe(values: st.SearchStrategy[float]) -> st.SearchStrategy[Maybe[float]]:
    return st.one_of(values, st.builds(Unknown, st.text(min_size=1)))


WATTS = st.floats(0, 900).map(lambda value: round(value, 1))
SHARES = st.floats(0, 1).map(lambda value: round(value, 4))
# Bytes per second are as good as watts here: a float that a recording can hold.
READINGS = st.builds(
    Reading,
    uuid=st.just(a_gpu().uuid),
    span=st.floats(0, 60).map(lambda value: round(value, 3)),
    utilization=st.one_of(
        st.builds(Utilization, SHARES, SHARES, st.integers(1, 100)), st.builds(Unknown, st.text(min_size=1))
    ),
    memory_used=st.one_of(st.integers(0, 2**40), st.builds(Unknown, st.text(min_size=1))),
    memory_total=st.integers(1, 2**40),
    power=maybe(WATTS),
    power_limit=maybe(WATTS),
    energy=maybe(WATTS),
    temperature=maybe(st.integers(0, 100).map(float)),
    processes=st.one_of(
        st.lists(st.builds(a_process, st.integers(1, 99999)), max_size=3).map(tuple),
        st.builds(Unknown, st.text(min_size=1)),
    ),
    pipes=st.one_of(
        st.builds(Pipes, SHARES, SHARES, SHARES, SHARES, WATTS, WATTS), st.builds(Unknown, st.text(min_size=1))
    ),
    memory_activity=st.one_of(
        st.builds(Utilization, SHARES, SHARES, st.integers(1, 100)), st.builds(Unknown, st.text(min_size=1))
    ),
    sm_clock=st.integers(0, 3000).map(float),
    throttling=st.lists(st.sampled_from(["idle", "power cap"]), max_size=2).map(tuple),
    health=st.builds(
        DeviceHealth, st.lists(st.integers(1, 200), max_size=3).map(tuple), *[st.integers(0, 9)], *[st.booleans()] * 2
    ),
)


@given(st.lists(READINGS, min_size=1, max_size=6))
def test_every_field_survives_a_round_trip(tmp_path_factory: pytest.TempPathFactory, readings: list[Reading]) -> None:
    path = tmp_path_factory.mktemp("recording") / "file"
    looks = [
        Look("test", 100.0 + place, 1000.0 + place, (a_gpu(),), (reading,)) for place, reading in enumerate(readings)
    ]
    write(path, *looks)
    assert list(RecordingReader(path)) == looks


def test_problem_and_note_survive_a_round_trip(tmp_path: Path) -> None:
    look = a_look(Unknown("lost"), problem=Unknown("the driver did not answer in 5 s"), note="pids of the host")
    write(tmp_path / "r", look)
    assert list(RecordingReader(tmp_path / "r")) == [look]


def test_truncated_line_is_skipped_and_later_sessions_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, a_look(0.1, at=1, wall=1), a_look(0.2, at=2, wall=2))
    whole = path.read_bytes()
    for cut in range(len(whole.splitlines(keepends=True)[0]) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        write(path, a_look(0.3, at=3, wall=3), a_look(0.4, at=4, wall=4))
        reader = RecordingReader(path)
        peaks = [look.readings[0].utilization for look in reader]
        assert peaks[-2:] == [Utilization(0.3, 0.3, 6), Utilization(0.4, 0.4, 6)]
        assert peaks[:-2] == [Utilization(0.1, 0.1, 6), Utilization(0.2, 0.2, 6)][: len(peaks) - 2]
        assert len(peaks) + reader.damaged >= 3


def test_unchanged_cells_after_a_damaged_line_are_unknown_not_stale(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, *(a_look(0.5, at=at, wall=at) for at in (1, 2, 3)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b'[2,"garbage\n' + lines[3])
    reader = RecordingReader(path)
    *_, last = reader
    assert reader.damaged == 1
    assert isinstance(last.readings[0].utilization, Unknown)


def test_time_continues_across_a_reboot(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, a_look(0.1, at=5000, wall=1000.0))
    write(path, a_look(0.1, at=3, wall=1600.0), a_look(0.1, at=8, wall=1605.0))
    assert [look.at for look in RecordingReader(path)] == [5000, 5600, 5605]


def test_time_never_runs_backwards_when_the_clock_was_set_back(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, a_look(0.1, at=5000, wall=1000.0))
    write(path, a_look(0.1, at=3, wall=400.0))
    assert [look.at for look in RecordingReader(path)] == [5000, 5000]


def test_idle_machine_costs_few_bytes_per_look(tmp_path: Path) -> None:
    path = tmp_path / "r"
    looks = [a_look(*[0.0] * 8, at=place, wall=place) for place in range(1001)]
    write(path, *looks)
    assert path.stat().st_size / 1000 < 450


def test_progress_of_the_job_survives_a_round_trip_and_a_reboot(tmp_path: Path) -> None:
    path = tmp_path / "r"
    before = JobProgress(7, 4990.0, "log", 1.5, 2048.0, (41, 42))
    write(path, msgspec.structs.replace(a_look(0.1, at=5000, wall=1000.0), job=before))
    write(path, msgspec.structs.replace(a_look(0.1, at=13, wall=1600.0), job=JobProgress(9, 3.0, "call")))
    first, second = RecordingReader(path)
    assert first.job == before
    assert second.job == JobProgress(9, 5590.0, "call")


def test_format_1_is_still_read(tmp_path: Path) -> None:
    (tmp_path / "r").write_text(
        '{"format":"stoker readings","version":1,"host":"box","boot":"b","source":"nvml",'
        '"gpus":[["GPU-1",0,"A100","nvidia",0,85899345920,"0000:01:00.0",null]]}\n'
        "[1000.0,5.0,[[5.0,[1.0,0.9,30],1024,85899345920,300.0,400.0,12.0,60.0,"
        '[[41,7,"python","alice",1024,0.9]],"only reported by Hopper and newer GPUs"]]]\n'
        "[1005.0,10.0,[[null,[0.0,0.0,30],null,null,60.0,null,13.0,null,null,null]]]\n"
    )
    reader = RecordingReader(tmp_path / "r")
    busy, idle = (look.readings[0] for look in reader)
    assert reader.damaged == 0
    assert busy.utilization == Utilization(1.0, 0.9, 30)
    assert (idle.power, idle.power_limit, idle.utilization) == (60.0, 400.0, Utilization(0.0, 0.0, 30))
    assert idle.memory_activity == busy.health == Unknown("not recorded")


def test_unknown_fields_of_a_later_version_2_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "r", a_look(0.25))
    text = (tmp_path / "r").read_text().replace('"fields":["span"', '"fields":["humidity","span"')
    (tmp_path / "r").write_text(text.replace("[[", "[[0.5,", 2).replace("[[0.5,", "[[", 1))
    (look,) = RecordingReader(tmp_path / "r")
    assert look.readings == a_look(0.25).readings


def test_second_writer_is_refused(tmp_path: Path) -> None:
    first = RecordingWriter(tmp_path / "r")
    with pytest.raises(StokerError, match="another recorder"):
        RecordingWriter(tmp_path / "r")
    first.close()


def test_file_of_another_format_is_not_modified(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(BadInputError, match="not a recording"):
        RecordingWriter(tmp_path / "thesis.tex")
    with pytest.raises(BadInputError, match="not a recording"):
        list(RecordingReader(tmp_path / "thesis.tex"))
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_newer_format_is_refused_with_a_remedy(tmp_path: Path) -> None:
    write(tmp_path / "r", a_look(0.1))
    text = (tmp_path / "r").read_text().replace('"version":2', '"version":3')
    (tmp_path / "r").write_text(text)
    with pytest.raises(BadInputError, match="upgrade"):
        list(RecordingReader(tmp_path / "r"))


def test_missing_file_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        list(RecordingReader(tmp_path / "none"))


def test_full_disk_is_one_message() -> None:
    writer = RecordingWriter(Path("/dev/full"))
    with pytest.raises(StokerError, match="cannot be continued: No space left"):
        writer.append(a_look(0.1))
    writer.close()


def test_change_of_the_gpu_list_starts_a_new_session(tmp_path: Path) -> None:
    two = a_look(0.1, 0.2, at=1, wall=1)
    one = msgspec.structs.replace(two, at=2.0, wall=2.0, gpus=two.gpus[:1], readings=two.readings[:1])
    write(tmp_path / "r", two, one)
    assert [len(look.gpus) for look in RecordingReader(tmp_path / "r")] == [2, 1]
