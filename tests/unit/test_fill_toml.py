"""`[fill]` in stoker.toml: the same as the INI file can say, with the line of every mistake."""

import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.fill import ini, toml
from stoker.fill.config import FillConfig, TerminalRule, WatchedGpus
from stoker.fill.mistakes import Mistakes
from stoker.fill.sections import DEFAULTS
from stoker.fill.sections import PROGRAM as PROGRAM_KEYS
from tests.support.deep import examples
from tests.support.gpu_mon_conf import ONE_FOR_ALL


def written(directory: Path, text: str) -> Path:
    path = directory / "stoker.toml"
    path.write_text(text, encoding="utf-8")
    return path


def read(directory: Path, text: str) -> FillConfig:
    path = written(directory, text)
    return toml.read(tomllib.loads(text)["fill"], path)


def mistakes(directory: Path, text: str) -> list[tuple[str, str]]:
    with pytest.raises(Mistakes) as caught:
        read(directory, text)
    path = directory / "stoker.toml"
    return [(mistake.where.removeprefix(f"{path}:"), mistake.sentence) for mistake in caught.value.mistakes]


def without_places(config: FillConfig) -> FillConfig:
    return msgspec.structs.replace(config, source="", lines={})


def test_the_published_ini_file_and_the_same_in_toml_are_equal(tmp_path: Path) -> None:
    old = tmp_path / "gpu_mon.conf"
    old.write_text(ONE_FOR_ALL)
    new = read(
        tmp_path,
        """
[fill]
interval = 10
ignore = ["nvidia-smi"]
terminals = { whitelist = ["user1", "user2"], idle = "5m" }
[[fill.program]]
name = "process-all"
command = "miner-run"
directory = "/tmp"
gpus = "all"
log = "/dev/null"
""",
    )
    assert without_places(new) == without_places(ini.read(old))


def test_everything_that_can_be_said_is_equal_in_both(tmp_path: Path) -> None:
    old = tmp_path / "gpu_mon.conf"
    old.write_text("""
[defaults]
interval_seconds=500ms
grace=20s
ignore_shipped=false
[gpu-a]
gpus=0,1
ignore_programs=Xorg,dcgm*
[gpu-b]
gpus=2-3
[process-a]
cmd=python -c 'print("two words")'
gpus=0,1
each=true
environment=A=1 B='x y'
idle_for=2m
settle=5m
backoff=30s
nice=10
ionice=idle
mps_priority=1
mps_thread_percentage=30
preempt=checkpoint
checkpoint_timeout=30s
[process-b]
cmd=run
gpus=GPU-51000000
[schedule]
hours=20:00-08:00
days=mon-fri
[schedule-2]
days=weekend
[tty]
enabled=no
""")
    new = read(
        tmp_path,
        """
[fill]
interval = "500ms"
grace = 20
ignore_shipped = false
schedule = [
  { hours = "20:00-08:00", days = "mon-fri" },
  { days = ["sat", "sun"] },
]
[fill.terminals]
enabled = false
[[fill.watch]]
name = "gpu-a"
gpus = [0, 1]
ignore = ["Xorg", "dcgm*"]
[[fill.watch]]
name = "gpu-b"
gpus = "2-3"
[[fill.program]]
name = "process-a"
command = ["python", "-c", 'print("two words")']
gpus = [0, "1"]
each = true
idle_for = "2m"
settle = "5m"
backoff = 30.0
nice = 10
ionice = "idle"
mps_priority = 1
mps_thread_percentage = "30%"
preempt = "checkpoint"
checkpoint_timeout = "30s"
[fill.program.environment]
A = 1
B = "x y"
[[fill.program]]
name = "process-b"
command = "run"
gpus = "GPU-51000000"
""",
    )
    assert without_places(new) == without_places(ini.read(old))


def test_without_a_word_on_watching_all_gpus_are_watched(tmp_path: Path) -> None:
    config = read(tmp_path, '[fill]\nprogram = [{name = "a", command = "run"}]\n')
    assert config.watched == (WatchedGpus(name="gpu-all", gpus="all"),)
    assert config.terminals == TerminalRule(enabled=False)


def test_programs_ignored_everywhere_are_ignored_on_every_watched_gpu(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        '[fill]\nignore=["a"]\n[[fill.watch]]\nname="x"\nignore=["b"]\n[[fill.watch]]\nname="y"\n'
        '[[fill.program]]\nname="p"\ncommand="run"\n',
    )
    assert [each.ignore for each in config.watched] == [("b", "a"), ("a",)]


PROGRAM = '[[fill.program]]\nname = "mine"\ncommand = "run"\n'


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("[fill]\n", "1", "there is no program to run: add [[fill.program]] with name = and command ="),
        (
            "[fill]\nintervall = 3\n" + PROGRAM,
            "2",
            "[fill] has no key 'intervall': did you mean 'interval'?",
        ),
        ("[fill]\nprograms = 3\n" + PROGRAM, "2", "[fill] has no key 'programs': did you mean 'program'?"),
        (
            "[fill]\ninterval = true\n" + PROGRAM,
            "2",
            "[fill] interval: True is not a duration: write it like 90s, 5m or 1h30m",
        ),
        ("[fill]\ninterval = -1\n" + PROGRAM, "2", "[fill] interval: -1 is too short: write 0.1s or more"),
        (
            "[fill]\ninterval = inf\n" + PROGRAM,
            "2",
            "[fill] interval: inf is not a duration: write it like 90s, 5m or 1h30m",
        ),
        (
            '# a\n[gpus]\nnice = "x"\n\n' + PROGRAM + '\nnice = """\nlow"""\n',
            "9",
            "[[fill.program]] mine nice: 'low' is not a whole number: write one from 0 to 19",
        ),
        (
            PROGRAM + '[[fill.program]]\nname = "other"\ncommand = [\n  "run",\n  "gpus = 3",\n]\ngpu = 1\n',
            "10",
            "[[fill.program]] other has no key 'gpu': did you mean 'gpus'?",
        ),
        (
            PROGRAM + "gpus = [0.5]\n",
            "4",
            "[[fill.program]] mine gpus: 0.5 is no GPU: write all, 0, 0,2, 0-3 or a uuid",
        ),
        (
            "[[fill.program]]\n" + 'command = "run"\n',
            "1",
            "[[fill.program]] has no name: add name = and a word that you know it by",
        ),
        (
            PROGRAM + PROGRAM,
            "4",
            "[[fill.program]] mine: the name 'mine' is taken already: choose another",
        ),
        (
            PROGRAM + "\n[fill.program.environment]\n'1A' = 'x'\n",
            "5",
            "[[fill.program]] mine environment: '1A' cannot be a variable's name: use letters, digits and _",
        ),
        (
            "[fill]\nterminals = 3\n" + PROGRAM,
            "2",
            "[fill] terminals: 3 is no table: write it as [fill.terminals] and keys below it",
        ),
        (
            "[[fill.terminals]]\n[[fill.terminals]]\n" + PROGRAM,
            "1",
            "[fill] terminals: [{}, {}] is no table: write it as [fill.terminals] and keys below it",
        ),
        (
            '[fill]\nschedule = [\n  { hours = "8-9" },\n]\n' + PROGRAM,
            "2",
            "[fill.schedule] hours: '8-9' are no hours: write them like 20:00-08:00",
        ),
        (
            '[fill.schedule]\ndays = "someday"\n' + PROGRAM,
            "2",
            "[fill.schedule] days: 'someday' are no days: write them like mon-fri, sat,sun or daily",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line_and_a_remedy(tmp_path: Path, text: str, line: str, sentence: str) -> None:
    assert mistakes(tmp_path, text) == [(line, sentence)]


def test_the_file_itself_can_be_read_with_or_without_the_table(tmp_path: Path) -> None:
    path = written(tmp_path, "[run]\n")
    assert toml.read_file(path, must_have=False) is None
    with pytest.raises(Mistakes, match=r"stoker\.toml:1: there is no \[fill\] in this file: write it"):
        toml.read_file(path)
    assert toml.read_file(written(tmp_path, PROGRAM)).programs[0].name == "mine"


def test_a_file_that_is_not_toml_says_in_which_line(tmp_path: Path) -> None:
    with pytest.raises(Mistakes, match=r"stoker\.toml:2: this is not TOML: .+: mend that first"):
        toml.read_file(written(tmp_path, "[fill]\ninterval = \n"))


PLAIN = st.sampled_from([None, True, -1, 0.5, 10**30, float("nan"), "", "0", "all", "1s", "x", "\0", "mon"])
ANYTHING = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(st.sampled_from(["name", "hours"]), PLAIN)
PROGRAMS = st.dictionaries(st.sampled_from(["name", *PROGRAM_KEYS]), ANYTHING, max_size=4)
TABLES = st.dictionaries(
    st.sampled_from(["ignore", "terminals", "schedule", "watch", "program", *DEFAULTS]),
    ANYTHING | PROGRAMS | st.lists(PROGRAMS, max_size=2),
    max_size=4,
)


@settings(max_examples=examples(100), deadline=None)
@given(TABLES)
def test_whatever_the_table_says_there_are_only_sentences(table: dict[str, object]) -> None:
    reading = toml.parse(table, "/nowhere/stoker.toml")
    assert reading.config.programs or reading.mistakes
    assert all(mistake.sentence for mistake in reading.mistakes)
