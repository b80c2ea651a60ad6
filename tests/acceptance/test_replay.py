"""`stoker replay` as typed."""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker.gpus.model import Maybe, Unknown
from stoker.gpus.recording import RecordingWriter
from tests.corpus import Trace, corpus
from tests.corpus.__main__ import file_name, write_corpus
from tests.support.command import stoker, stoker_command
from tests.support.looks import a_look
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import wait_for

# Tuesday, 2026-11-10, 00:00 UTC.
MIDNIGHT = 1_794_268_800.0
MINUTE = 60.0


def record(
    path: Path, *stretches: tuple[int, Sequence[Maybe[float]]], every: float = MINUTE, begun: float = MIDNIGHT
) -> Path:
    """A recording of phases: a number of samples and the state of each GPU. A negative number is a gap."""
    writer = RecordingWriter(path)
    at = 0.0
    for count, levels in stretches:
        for _ in range(count):
            writer.append(a_look(*levels, at=1000.0 + at, wall=begun + at, span=every))
            at += every
        at -= min(count, 0) * every
    writer.close()
    return path


@pytest.fixture
def night(tmp_path: Path) -> Path:
    """Two GPUs: an hour of work, five hours of nothing, and another hour of work."""
    return record(tmp_path / "night.readings", (60, [0.9, 0.8]), (300, [0.0, 0.0]), (60, [0.9, 0.8]))


def test_replay_shows_when_the_rule_would_have_fired_and_the_time_saved(night: Path) -> None:
    done = stoker("replay", str(night), environment={"TZ": "UTC"})
    assert done.code == 0
    assert done.err == ""
    assert done.out == (
        f"{night}: 2 GPUs, a look every 1m\n"
        "Tue 2026-11-10 00:00:00 to Tue 2026-11-10 06:59:00 UTC (6h59m)\n"
        "Rule: all GPUs below 1% for 30m; or hung at full utilization for 1h\n"
        "\n"
        "  1. Tue 2026-11-10 01:29:00  idle: GPU 0 and GPU 1 stayed below 1% for 30m\n"
        "     warned 15m before; idle for another 4h30m, then used again; 9 GPU-hours saved\n"
        "\n"
        "The rules would have fired once and saved 9 of the 10.0 idle GPU-hours, out of 14.0 recorded.\n"
        "No stop would have hit work that came back: never did the same process go on, and never were the GPUs used "
        "again within 10m.\n"
    )


def test_times_are_in_the_local_time_zone(night: Path) -> None:
    done = stoker("replay", str(night), environment={"TZ": "Asia/Tokyo"})
    assert "  1. Tue 2026-11-10 10:29:00  idle: GPU 0" in done.out
    assert "15:59:00 JST (6h59m)" in done.out


def test_different_rule_gives_a_different_result(night: Path) -> None:
    assert "would not have fired; 10.0 of 14.0 GPU-hours were idle" in stoker("replay", str(night), "--for", "6h").out
    late = stoker("replay", str(night), "--after", "4h", environment={"TZ": "UTC"})
    assert "04:30:00  idle: GPU 0 and GPU 1" in late.out
    often = stoker("replay", str(night), "--below", "85%", "--gpus", "1", "--for", "1h", environment={"TZ": "UTC"})
    assert "01:00:00  idle: GPU 1 stayed below 85% for 1h" in often.out
    armed = stoker("replay", str(night), "--arm-above", "95%")
    assert "would not have fired" in armed.out
    assert "armed once a GPU was at 95% or more" in armed.out


def test_json_has_the_whole_result(night: Path) -> None:
    answer = stoker("replay", str(night), "--json", "--require", "any").json()
    assert answer["policy"]["require"] == "any"
    assert answer["policy"]["after"] == 0.0
    assert answer["policy"]["every"] == 60.0
    assert [gpu["index"] for gpu in answer["gpus"]] == [0, 1]
    assert (answer["looks"], answer["damaged_lines"], answer["seconds"]) == (420, 0, 419 * MINUTE)
    assert (answer["from"], answer["to"]) == (MIDNIGHT, MIDNIGHT + 419 * MINUTE)
    assert answer["firings"] == [
        {
            "time": MIDNIGHT + 89 * MINUTE,
            "rule": "idle",
            "verdict": "idle",
            "reason": "GPU 0 and GPU 1 stayed below 1% for 30m",
            "gpus": [gpu["uuid"] for gpu in answer["gpus"]],
            "working": [],
            "idle_before": 30 * MINUTE,
            "idle_after": 270 * MINUTE,
            "used_again": True,
            "used_again_by": None,
            "same_process": None,
            "hit_work": False,
            "saved_gpu_hours": 9.0,
        }
    ]
    assert answer["firings_that_hit_work"] == 0
    assert answer["warnings"] == [
        {
            "time": MIDNIGHT + 74 * MINUTE,
            "rule": "idle",
            "reason": "GPU 0 and GPU 1 stayed below 1% for 15m of 30m",
            "fired": True,
        }
    ]
    assert answer["gpu_hours"] == {"recorded": 13.9667, "idle": 10.0, "unknown": 0.0, "saved": 9.0, "hung": 0.0}
    assert (answer["unknown"], answer["gaps"]) == ([], [])


def test_unknown_or_missing_readings_are_reported_and_never_fire(tmp_path: Path) -> None:
    lost = Unknown("the GPU is lost")
    trace = record(tmp_path / "r", (20, [0.0]), (15, [lost]), (20, [0.0]), (-90, []), (20, [0.0]))
    done = stoker("replay", str(trace), environment={"TZ": "UTC"})
    assert "would not have fired" in done.out
    assert "Unknown for 15m from Tue 2026-11-10 00:19:00: GPU 0: the GPU is lost." in done.out
    assert "Not recorded for 1h31m from Tue 2026-11-10 00:54:00." in done.out
    answer = stoker("replay", str(trace), "--json").json()
    assert [(gap["seconds"], gap["reason"]) for gap in answer["gaps"]] == [(91 * MINUTE, "nothing was recorded")]
    assert [stretch["reason"] for stretch in answer["unknown"]] == ["GPU 0: the GPU is lost"]


def test_damaged_lines_are_reported_and_the_rest_is_used(night: Path) -> None:
    lines = night.read_bytes().splitlines(keepends=True)
    # Not the first of its kind: what is the same as in a damaged line is unknown until it is written out again.
    night.write_bytes(b"".join([*lines[:-1], lines[-1][:20], b"\n"]))
    done = stoker("replay", str(night))
    assert done.code == 0
    assert f"stoker: 1 damaged line in {night} skipped" in done.err
    assert "would have fired once" in done.out


def test_recording_interval_does_not_count_as_a_gap(tmp_path: Path) -> None:
    slow = record(tmp_path / "slow", (60, [0.0]), every=300.0)
    assert "a look every 5m" in (done := stoker("replay", str(slow))).out
    assert "would have fired once" in done.out
    # Frequent at first, then rare: those are gaps unless an option says otherwise.
    writer = RecordingWriter(tmp_path / "slower")
    for place in range(50):
        at = place * 10.0 if place < 30 else 290.0 + (place - 29) * 600.0
        writer.append(a_look(0.0, at=at, wall=MIDNIGHT + at, span=10.0))
    writer.close()
    assert "in 20 stretches" in (strict := stoker("replay", str(tmp_path / "slower"))).out
    assert "would not have fired" in strict.out
    lenient = stoker("replay", str(tmp_path / "slower"), "--every", "10m")
    assert "would have fired once" in lenient.out
    assert "Not recorded" not in lenient.out


def test_page_is_self_contained(night: Path, tmp_path: Path) -> None:
    page = tmp_path / "night.html"
    done = stoker("replay", str(night), "--html", str(page))
    assert done.code == 0
    assert f"stoker: wrote {page}" in done.err
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "GPU 0 and GPU 1 stayed below 1% for 30m." in text
    assert "default-src 'none'" in text
    assert "new uPlot(" in text


def test_new_recording_can_be_replayed(nvidia: MockMachine, tmp_path: Path) -> None:
    trace = tmp_path / "r"
    recorder = subprocess.Popen([stoker_command(), "record", str(trace), "--every", "20ms"], stderr=subprocess.DEVNULL)
    # However long they take, these are more than enough for the window.
    wait_for(lambda: trace.exists() and trace.read_bytes().count(b"\n") > 20)
    recorder.send_signal(signal.SIGINT)
    assert recorder.wait(timeout=60) == 0
    done = stoker("replay", str(trace), "--for", "200ms", "--json")
    assert [firing["reason"] for firing in done.json()["firings"]] == ["GPU 0 and GPU 1 stayed below 1% for 0.2s"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "which recording?"),
        (("missing",), "the recording missing cannot be read: No such file"),
        ((".",), "the recording . cannot be read: Is a directory"),
        (("notes.txt",), "notes.txt is not a recording of readings"),
        (("empty",), "empty is not a recording of readings"),
        (("begun",), "begun holds no readings yet"),
        (("night", "--gpus", "7"), "in night, there is no GPU 7 here: this machine has 0, 1"),
        (("night", "--gpus", "mine"), "--gpus mine needs a running job"),
        (("night", "--gpus", "visible"), "--gpus visible needs a running job"),
        (("night", "--for", "10s"), "--for 10s is shorter than --every 1m"),
        (("night", "--for", "0s"), "must be greater than zero"),
        (("night", "--for", "5m", "--every", "10m"), "--for 5m is shorter than --every 10m"),
        (("night", "--below", "0%"), "--below 0% would never or always be idle"),
        (("night", "--below", "120%"), "out of range"),
        (("night", "--require", "0"), "all, any or a number"),
        (("night", "--arm-for", "5m"), "--arm-for needs --arm-above"),
        (("night", "--html", "night"), "--html night is the recording itself"),
    ],
)
def test_invalid_input_is_reported(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    night = record(Path("night"), (3, [0.0, 0.0]))
    before = night.read_bytes()
    Path("begun").write_bytes(before.splitlines(keepends=True)[0])
    Path("notes.txt").write_text("mine\n")
    Path("empty").write_text("")
    done = stoker("replay", *arguments)
    assert done.code == 2
    assert sentence in done.err
    assert done.out == ""
    assert night.read_bytes() == before


def a_trace_of(name: str) -> Trace:
    """One that lists the processes of the job and shows its steps."""
    return next(
        trace
        for trace in corpus()
        if trace.of.name == name and trace.setting.listing == "shares" and trace.setting.trust in {"call", "log"}
    )


def test_hang_of_a_recorded_run_is_found_by_the_stalled_rule(tmp_path: Path) -> None:
    trace = a_trace_of("hang-on-hopper")
    write_corpus(tmp_path, (trace,))
    path = tmp_path / file_name(trace)
    done = stoker("replay", str(path))
    assert "  stalled: GPU 0" in done.out
    assert "and the job made no step for" in done.out
    assert "it hung for another" in done.out
    (firing,) = stoker("replay", str(path), "--json").json()["firings"]
    assert (firing["rule"], firing["verdict"], firing["used_again"], firing["working"]) == (
        "stalled",
        "stalled",
        False,
        [],
    )
    assert firing["saved_gpu_hours"] > 1
    quiet = stoker("replay", str(path), "--stalled", "off").out
    assert "The rule would not have fired" in quiet
    page = tmp_path / "page.html"
    assert stoker("replay", str(path), "--html", str(page)).code == 0
    assert '"hung":true' in page.read_text()
    assert "Stalled: GPU 0" in page.read_text()


def test_healthy_run_is_left_alone(tmp_path: Path) -> None:
    trace = a_trace_of("cpu-evaluation")
    write_corpus(tmp_path, (trace,))
    answer = stoker("replay", str(tmp_path / file_name(trace)), "--json").json()
    assert answer["firings"] == []
    # Without what the job showed of its progress it looks idle.
    assert stoker("replay", str(tmp_path / file_name(trace)), "--json", "--cpu-for", "30m").json()["firings"]


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """One recording each of a healthy, an idle and two stalled jobs."""
    names = ("steady-training", "forgotten-notebook", "hang-on-hopper", "hang-unseen")
    found = tuple(next(trace for trace in corpus() if trace.of.name == name) for name in names)
    write_corpus(tmp_path / "corpus", found)
    return tmp_path / "corpus"


def test_corpus_is_scored(labelled: Path) -> None:
    done = stoker("replay", "--corpus", str(labelled), "--by-class")
    assert (done.code, done.err) == (0, "")
    assert f"{labelled}: 4 recordings" in done.out
    assert "healthy killed" in done.out
    assert "healthy  steady-training     1 traces, 0 killed wrongly" in done.out
    answer = stoker("replay", "--corpus", str(labelled), "--json").json()
    assert answer["score"]["healthy_killed"] == 0
    assert (answer["score"]["stalled"], answer["score"]["stalled_missed"]) == (2, 1)
    assert len(answer["outcomes"]) == 4
    assert {one["class"]: one["score"]["stalled_missed"] for one in answer["classes"]} == {
        "steady-training": 0,
        "forgotten-notebook": 0,
        "hang-on-hopper": 0,
        "hang-unseen": 1,
    }
    harsh = stoker("replay", "--corpus", str(labelled), "--json", "--stalled-unseen-for", "30m").json()
    assert harsh["score"]["stalled_missed"] == 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read corpus/corpus.json"),
        ("[", "corpus/corpus.json is not a list of labelled recordings"),
        ('[{"id": "a", "file": "a", "label": "odd", "begun": 0, "every": 1}]', "Invalid enum value 'odd'"),
        ("[]", "corpus/corpus.json names no recording"),
        ('[{"id": "a", "file": "a", "label": "idle", "begun": 0, "every": 1}]', "corpus/a"),
    ],
)
def test_invalid_corpus_is_reported(
    content: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    if content is not None:
        Path("corpus/corpus.json").write_text(content)
    done = stoker("replay", "--corpus", "corpus")
    assert done.code != 0
    assert sentence in done.err
    assert (done.out, done.err.count("\n")) == ("", 1)


def test_corpus_and_a_single_recording_exclude_each_other(night: Path) -> None:
    done = stoker("replay", str(night), "--corpus", str(night.parent))
    assert (done.code, "leave out TRACE" in done.err) == (2, True)
    assert stoker("replay").code == 2


def test_unwritable_page_is_reported(night: Path, tmp_path: Path) -> None:
    nowhere = stoker("replay", str(night), "--html", str(tmp_path / "no" / "page.html"))
    assert (nowhere.code, nowhere.err.count("\n")) == (1, 1)
    assert "cannot write to" in nowhere.err
    full = stoker("replay", str(night), "--html", "/dev/full")
    assert (full.code, "No space left" in full.err) == (1, True)
