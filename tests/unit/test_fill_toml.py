"""`[fill]` in stoker.toml is equivalent to the INI file."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.fill.config import Background, FillConfig, TerminalRule, WatchedGpus
from stoker.fill.config_files import config_of_table, read_ini, read_toml
from tests.support.deep import examples
from tests.support.gpu_mon_conf import ONE_FOR_ALL


def written(directory: Path, text: str) -> Path:
    path = directory / "stoker.toml"
    path.write_text(text, encoding="utf-8")
    return path


def read(directory: Path, text: str) -> FillConfig:
    return read_toml(written(directory, text))


def problem_of(directory: Path, text: str) -> str:
    path = written(directory, text)
    with pytest.raises(BadInputError) as caught:
        read_toml(path)
    return str(caught.value).removeprefix(f"{path}: ")


def without_source(config: FillConfig) -> FillConfig:
    return msgspec.structs.replace(config, source="")


def test_published_ini_file_and_the_same_in_toml_are_equal(tmp_path: Path) -> None:
    old = tmp_path / "gpu_mon.conf"
    old.write_text(ONE_FOR_ALL)
    new = read(
        tmp_path,
        """
[fill]
interval = 10
ignore = ["nvidia-smi"]
terminals = { whitelist = ["user1", "user2"], idle = "5m" }
[[fill.watch]]
name = "gpu-all"
gpus = "ALL"
[[fill.program]]
name = "process-all"
command = "miner-run"
directory = "/tmp"
gpus = "ALL"
log = "/dev/null"
""",
    )
    assert without_source(new) == without_source(read_ini(old))


def test_all_settings_are_equal_in_both_formats(tmp_path: Path) -> None:
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
[fill.program.environment]
A = 1
B = "x y"
[[fill.program]]
name = "process-b"
command = "run"
gpus = "GPU-51000000"
""",
    )
    assert without_source(new) == without_source(read_ini(old))


def test_all_gpus_are_watched_by_default(tmp_path: Path) -> None:
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
    ("text", "problem"),
    [
        ("[fill]\n", "there is no program to run: add a section with its command"),
        ("[fill]\nintervall = 3\n" + PROGRAM, "[fill] has no key 'intervall': did you mean 'interval'?"),
        ("[fill]\nprograms = 3\n" + PROGRAM, "[fill] has no key 'programs': did you mean 'program'?"),
        (
            "[fill]\ninterval = true\n" + PROGRAM,
            "[fill] interval: expected `float`, got `bool`",
        ),
        ("[fill]\ninterval = -1\n" + PROGRAM, "[fill] interval: expected `float` >= 0.1"),
        (
            "[fill]\ninterval = inf\n" + PROGRAM,
            "[fill] interval: expected `float` <= 1000000000.0",
        ),
        (
            '# a\n[gpus]\nnice = "x"\n\n' + PROGRAM + '\nnice = """\nlow"""\n',
            "[[fill.program]] mine nice: expected `int | null`, got `str`",
        ),
        (
            PROGRAM + '[[fill.program]]\nname = "other"\ncommand = [\n  "run",\n  "gpus = 3",\n]\ngpu = 1\n',
            "[[fill.program]] other has no key 'gpu': did you mean 'gpus'?",
        ),
        ("[[fill.program]]\n" + 'command = "run"\n', "[[fill.program]] has no name: add name ="),
        (
            PROGRAM + "\n[fill.program.environment]\n'1A' = 'x'\n",
            "[[fill.program]] mine environment: expected `str` matching regex '^[A-Za-z_][A-Za-z0-9_]*$'",
        ),
        (
            "[fill]\nterminals = 3\n" + PROGRAM,
            "[fill] terminals: expected `object | null`, got `int`",
        ),
        (
            "[[fill.terminals]]\n[[fill.terminals]]\n" + PROGRAM,
            "[fill] terminals: expected `object | null`, got `array`",
        ),
        (
            '[fill]\nschedule = [\n  { hours = "8-9" },\n]\n' + PROGRAM,
            "[fill.schedule] hours: '8-9' is not a time of day: write them like 20:00-08:00",
        ),
        (
            '[fill.schedule]\ndays = "someday"\n' + PROGRAM,
            "[fill.schedule] days: 'someday' does not name days: write them like mon-fri, sat,sun or daily",
        ),
    ],
)
def test_mistake_is_reported_with_its_section_and_a_remedy(tmp_path: Path, text: str, problem: str) -> None:
    assert problem_of(tmp_path, text) == problem


def test_file_without_the_table_is_reported(tmp_path: Path) -> None:
    missing = "there is no [fill] in this file: write it, with [[fill.program]] below"
    assert problem_of(tmp_path, "[run]\n") == missing


def test_invalid_toml_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"stoker\.toml: this is not TOML: .+ \(at line 2"):
        read(tmp_path, "[fill]\ninterval = \n")


PLAIN = st.sampled_from([None, True, -1, 0.5, 10**30, float("nan"), "", "0", "all", "1s", "x", "\0", "mon"])
ANYTHING = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(st.sampled_from(["name", "hours"]), PLAIN)
PROGRAMS = st.dictionaries(st.sampled_from(["name", *Background.__struct_fields__]), ANYTHING, max_size=4)
TABLES = st.dictionaries(
    st.sampled_from(["ignore", "terminals", "schedule", "watch", "program", "interval", "nice", "grace"]),
    ANYTHING | PROGRAMS | st.lists(PROGRAMS, max_size=2),
    max_size=4,
)


@settings(max_examples=examples(100), deadline=None)
@given(TABLES)
def test_any_table_is_valid_or_reported(table: dict[str, object]) -> None:
    programs: tuple[Background, ...] = ()
    problem = ""
    try:
        programs = config_of_table(table, "/nowhere/stoker.toml").programs
    except BadInputError as error:
        problem = str(error)
    assert bool(programs) != problem.startswith("/nowhere/stoker.toml: ")
