"""`stoker record` as typed."""

import signal
import subprocess
from pathlib import Path

from stoker.gpus.model import Look, known
from stoker.gpus.recording import RecordingReader
from tests.support.command import stoker, stoker_command
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import wait_for


def test_readings_are_recorded_for_the_given_duration(nvidia: MockMachine, tmp_path: Path) -> None:
    nvidia.gpus[1].utilization = 66
    looks: list[Look] = []
    for attempt in range(3):  # a busy machine may let it miss some beats, but not each time
        path = tmp_path / f"r{attempt}"
        done = stoker("record", str(path), "--every", "50ms", "--for", "500ms")
        assert done.code == 0
        assert "recording 2 GPUs" in done.err
        looks = list(RecordingReader(path))
        if len(looks) >= 8:
            break
    assert 8 <= len(looks) <= 11
    for look in looks:
        assert known(look.readings[1].utilization)
        assert look.readings[1].utilization.peak == 0.66


def test_recording_continues_after_a_kill(nvidia: MockMachine, tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = subprocess.Popen([stoker_command(), "record", str(path), "--every", "20ms"], stderr=subprocess.DEVNULL)
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") > 5)
    recorder.kill()
    recorder.wait()
    before = len(list(RecordingReader(path)))
    assert stoker("record", str(path), "--every", "20ms", "--for", "100ms").code == 0
    reader = RecordingReader(path)
    times = [look.at for look in reader]
    assert len(times) > before
    assert times == sorted(times)


def test_ctrl_c_ends_the_recording_cleanly(nvidia: MockMachine, tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = subprocess.Popen(
        [stoker_command(), "record", str(path), "--every", "20ms"], stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") > 3)
    recorder.send_signal(signal.SIGINT)
    _out, err = recorder.communicate(timeout=60)
    assert recorder.returncode == 0
    assert "recorded" in err


def test_unwritable_file_is_reported(nvidia: MockMachine, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    other = stoker("record", str(tmp_path / "notes.txt"), "--for", "1s")
    assert (other.code, "is not a recording" in other.err) == (2, True)
    assert (tmp_path / "notes.txt").read_text() == "mine\n"
    nowhere = stoker("record", str(tmp_path / "no" / "r"), "--for", "1s")
    assert (nowhere.code, "No such file" in nowhere.err) == (1, True)
    # Another test may be at the same device: there is one recorder at a time.
    tries = iter(lambda: stoker("record", "/dev/full", "--for", "1s"), None)
    full = next(done for done in tries if "another recorder" not in done.err)
    assert (full.code, "No space left" in full.err) == (1, True)
