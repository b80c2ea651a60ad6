"""gpu_mon's INI file: same meaning as in gpu_mon, and mistakes are reported with a remedy."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.fill.config import Background, DailyHours, FillConfig, TerminalRule, WatchedGpus
from stoker.fill.config_files import read_ini
from tests.support.deep import examples
from tests.support.gpu_mon_conf import ONE_FOR_ALL, ONE_FOR_EACH


def written(directory: Path, text: str) -> Path:
    path = directory / "gpu_mon.conf"
    path.write_text(text, encoding="utf-8")
    return path


def read(directory: Path, text: str) -> FillConfig:
    return read_ini(written(directory, text))


def problem_of(directory: Path, text: str) -> str:
    """The reported mistake, without the name of the file."""
    path = written(directory, text)
    with pytest.raises(BadInputError) as caught:
        read_ini(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).replace(str(path), "FILE").removeprefix("FILE: ")


GOOD = "[gpu-all]\ngpus=ALL\n[process-0]\ncmd=true\n"


def miner(name: str, gpus: str) -> Background:
    return Background(name=name, command=("miner-run",), directory="/tmp", gpus=gpus, log="/dev/null")


def test_published_file_for_all_gpus_is_valid(tmp_path: Path) -> None:
    config = read(tmp_path, ONE_FOR_ALL)
    assert config.interval == 10
    assert config.watched == (WatchedGpus(name="gpu-all", gpus="ALL", ignore=("nvidia-smi",)),)
    assert config.programs == (miner("process-all", "ALL"),)
    assert config.terminals == TerminalRule(enabled=True, whitelist=("user1", "user2"), idle_seconds=300)
    assert not config.schedule
    assert config.source == str(tmp_path / "gpu_mon.conf")


def test_published_file_with_a_program_per_gpu_is_valid(tmp_path: Path) -> None:
    config = read(tmp_path, ONE_FOR_EACH)
    assert config.programs == (miner("process-0", "0"), miner("process-1", "1"))
    assert not any(program.each for program in config.programs)


def test_files_of_gpu_mon_get_the_considerate_defaults(tmp_path: Path) -> None:
    (program,) = read(tmp_path, ONE_FOR_ALL).programs
    assert (program.idle_for, program.settle, program.grace, program.backoff) == (60, None, 10, 10)


def test_newer_settings_can_be_written_in_the_ini_file(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
[defaults]
interval_seconds = 5
idle_for = 5m
ignore_shipped = no
[gpu-few]
gpus = 0-3, GPU-51ab
ignore_programs = nvidia-smi, dcgm*
[process-mine]
cmd = sh -c 'echo "$HOME"; run'  --name 'two words'
gpus = 0, 2-3
each = yes
environment = A=1 B='two words'
idle_for = 30
settle = 2m
grace = 20s
backoff = 1m
nice = 19
[process-other]
cmd = run
gpus = 1
[schedule]
hours = 20:00-08:00, 12:00-13:00
days = mon-fri
[schedule-weekend]
days = sat,sun
""",
    )
    assert config.interval == 5
    assert not config.ignore_shipped
    assert config.watched == (WatchedGpus(name="gpu-few", gpus="0-3, GPU-51ab", ignore=("nvidia-smi", "dcgm*")),)
    mine, other = config.programs
    assert mine == Background(
        name="process-mine",
        command=("sh", "-c", 'echo "$HOME"; run', "--name", "two words"),
        gpus="0, 2-3",
        each=True,
        environment={"A": "1", "B": "two words"},
        idle_for=30,
        settle=120,
        grace=20,
        backoff=60,
        nice=19,
    )
    assert (other.idle_for, other.settle) == (300, None)
    weekdays = (0, 1, 2, 3, 4)
    assert config.schedule == (
        DailyHours(1200, 480, weekdays),
        DailyHours(720, 780, weekdays),
        DailyHours(0, 1440, (5, 6)),
    )


def test_spaces_case_and_comments_are_ignored_as_in_gpu_mon(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "# first\r\n  [gpu-all]\r\n  GPUS : aLl\r\n\r\n; more\r\n"
        "[process-0]\r\nCmd = run \r\n   --on\r\n   # not this\r\n   two\r\ngpus =  0 , 1\r\n",
    )
    assert config.programs == (Background(name="process-0", command=("run", "--on", "two"), gpus="0 , 1"),)


def test_keys_may_refer_to_others(tmp_path: Path) -> None:
    text = "[DEFAULT]\nroot=/data\nlog=%(root)s/log\n[gpu-all]\n[process-0]\ncmd=%(root)s/run 50%% +%%F\n"
    config = read(tmp_path, text)
    assert config.programs == (Background(name="process-0", command=("/data/run", "50%", "+%F"), log="/data/log"),)


def test_missing_log_means_the_console_and_terminals_count_only_if_configured(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD)
    assert config.programs[0].log is read(tmp_path, GOOD + "log=\n").programs[0].log is None
    assert not config.terminals.enabled
    assert read(tmp_path, GOOD + "[tty]\nwhitelist=\n").terminals == TerminalRule(enabled=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[gpu-all]\ngpus=ALL\n", "there is no program to run: add a section with its command"),
        ("\n[process-0]\ncmd=true\n", "no GPU is watched: add a section [gpu-all] with gpus = ALL"),
        (
            GOOD + "[defaults]\ninterval_seconds=often\n",
            "[defaults] interval_seconds: 'often' is not a duration: write it like 90s, 5m or 1h30m",
        ),
        (
            GOOD + "[defaults]\ninterval_seconds=0\n",
            "[defaults] interval: expected `float` >= 0.1",
        ),
        (GOOD + "[tty]\nenabled=perhaps\n", "[tty] enabled: 'perhaps' is neither yes nor no"),
        (GOOD + "nice=-5\n", "[process-0] nice: expected `int` >= 0"),
        (GOOD + "nice=low\n", "[process-0] nice: expected `int | null`, got `str`"),
        (
            GOOD + "environment=CUDA_VISIBLE_DEVICES=0\n",
            (
                "[process-0] environment: CUDA_VISIBLE_DEVICES is set by Stoker: "
                "use gpus to say which ones the program may use"
            ),
        ),
        (
            "[gpu-all]\n[process-0]\ncmd=echo 'open\n",
            '[process-0] cmd: "echo \'open" has a quote that is not closed: close it, or write \\ before it',
        ),
        ("[gpu-all]\n[process-0]\ndir=/tmp\n", "[process-0] has no command: add command ="),
        (GOOD + "lgo=/dev/null\n", "[process-0] has no key 'lgo': did you mean 'log'?"),
        (
            GOOD + "CMD=false\n",
            "While reading from 'FILE' [line 5]: option 'cmd' in section 'process-0' already exists",
        ),
        (GOOD + "[tty]\nwhite_list=me\n", "[tty] has no key 'white_list': did you mean 'whitelist'?"),
        (GOOD + "[tty]\nxyz=me\n", "[tty] has no key 'xyz': use enabled, whitelist, idle_seconds, idle"),
        (
            GOOD + "[TTY]\n",
            "[TTY] is not a section: use [defaults], [gpu-…], [process-…], [tty] or [schedule-…]",
        ),
        (
            GOOD + "[process-0]\ncmd=false\n",
            "While reading from 'FILE' [line 5]: section 'process-0' already exists",
        ),
        ("gpus=1\n" + GOOD, r"File contains no section headers. file: 'FILE', line: 1 'gpus=1\n'"),
        (GOOD + "what is this\n", r"Source contains parsing errors: 'FILE' [line 5]: 'what is this\n'"),
        (
            GOOD + "dir=%(nowhere)s\n",
            (
                "Bad value substitution: option 'dir' in section 'process-0' contains an interpolation key 'nowhere' "
                "which is not a valid option name. Raw value: '%(nowhere)s'"
            ),
        ),
        (GOOD + "dir=20%\n", "'%' must be followed by '%' or '(', found: '%'"),
        (
            GOOD + "[schedule]\nhours=20-8\n",
            "[schedule] hours: '20-8' is not a time of day: write them like 20:00-08:00",
        ),
        (
            GOOD + "[schedule]\nhours=20:00-08:00\ndays=someday\n",
            "[schedule] days: 'someday' does not name days: write them like mon-fri, sat,sun or daily",
        ),
        (GOOD + "[schedule]\n", "[schedule] has no hours: add hours = 20:00-08:00"),
    ],
)
def test_mistake_is_reported_with_its_section_and_a_remedy(tmp_path: Path, text: str, problem: str) -> None:
    assert problem_of(tmp_path, text) == problem


@pytest.mark.parametrize("text", ["", "; only a comment\n"])
def test_empty_file_lacks_gpus(tmp_path: Path, text: str) -> None:
    assert problem_of(tmp_path, text).startswith("no GPU is watched")


def test_non_utf8_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "gpu_mon.conf"
    path.write_bytes(b"[gpu-all]\n; caf\xe9\n")
    with pytest.raises(BadInputError) as caught:
        read_ini(path)
    assert str(caught.value) == f"{path}: this file is not UTF-8: save it as UTF-8"


def test_missing_or_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as missing:
        read_ini(tmp_path / "nowhere.conf")
    assert str(missing.value) == f"{tmp_path}/nowhere.conf: this file cannot be read: No such file or directory"
    with pytest.raises(BadInputError) as unreadable:
        read_ini(tmp_path)
    assert str(unreadable.value) == f"{tmp_path}: this file cannot be read: Is a directory"


WORDS = st.sampled_from(
    [
        "[gpu-a]",
        "[process-a]",
        "[schedule]",
        "[tty]",
        "[DEFAULT]",
        "gpus",
        "cmd",
        "nice",
        "days",
        "hours",
        "%(cmd)s",
        "%",
    ]
)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        WORDS | st.sampled_from("=:\n\n ,-0'") | st.text(st.characters(codec="utf-8"), max_size=3), max_size=25
    ).map("".join)
)
def test_any_text_is_valid_or_reported(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.conf"
    path.write_text(text, encoding="utf-8")
    programs: tuple[Background, ...] = ()
    problem = ""
    try:
        programs = read_ini(path).programs
    except BadInputError as error:
        problem = str(error)
    assert bool(programs) != problem.startswith(f"{path}: ")
