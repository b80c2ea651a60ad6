"""gpu_mon's INI file: same meaning as in gpu_mon, and all mistakes are reported at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.fill.config import Background, DailyHours, FillConfig, Schedule, TerminalRule, WatchedGpus
from stoker.fill.config_files import FillConfigError, read_ini
from tests.support.deep import examples
from tests.support.gpu_mon_conf import ONE_FOR_ALL, ONE_FOR_EACH


def written(directory: Path, text: str) -> Path:
    path = directory / "gpu_mon.conf"
    path.write_text(text, encoding="utf-8")
    return path


def read(directory: Path, text: str) -> FillConfig:
    return read_ini(written(directory, text))


def problems(directory: Path, text: str) -> list[str]:
    """The reported mistakes, without the name of the file."""
    path = written(directory, text)
    with pytest.raises(FillConfigError) as caught:
        read_ini(path)
    assert str(caught.value).splitlines() == list(caught.value.problems)
    assert all(problem.startswith(str(path)) for problem in caught.value.problems)
    return [problem.removeprefix(str(path)).lstrip(": ") for problem in caught.value.problems]


GOOD = "[gpu-all]\ngpus=ALL\n[process-0]\ncmd=true\n"


def miner(name: str, gpus: tuple[str, ...] | None) -> Background:
    return Background(name=name, command=("miner-run",), directory="/tmp", gpus=gpus or "all", log="/dev/null")


def test_published_file_for_all_gpus_is_valid(tmp_path: Path) -> None:
    config = read(tmp_path, ONE_FOR_ALL)
    assert config.interval == 10
    assert config.watched == (WatchedGpus(name="gpu-all", gpus="all", ignore=("nvidia-smi",)),)
    assert config.programs == (miner("process-all", None),)
    assert config.terminals == TerminalRule(enabled=True, whitelist=("user1", "user2"), idle_seconds=300)
    assert config.schedule is None
    assert config.source == str(tmp_path / "gpu_mon.conf")


def test_published_file_with_a_program_per_gpu_is_valid(tmp_path: Path) -> None:
    config = read(tmp_path, ONE_FOR_EACH)
    assert config.programs == (miner("process-0", ("0",)), miner("process-1", ("1",)))
    assert not any(program.each for program in config.programs)


def test_files_of_gpu_mon_get_the_considerate_defaults(tmp_path: Path) -> None:
    (program,) = read(tmp_path, ONE_FOR_ALL).programs
    assert (program.idle_for, program.idle_after_visitor, program.grace, program.backoff) == (60, 60, 10, 10)
    assert program.preempt == "stop"


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
ionice = best-effort:7
mps_priority = 1
mps_thread_percentage = 20%
preempt = checkpoint
checkpoint_timeout = 15s
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
    assert config.watched == (WatchedGpus(name="gpu-few", gpus=("0-3", "GPU-51ab"), ignore=("nvidia-smi", "dcgm*")),)
    mine, other = config.programs
    assert mine == Background(
        name="process-mine",
        command=("sh", "-c", 'echo "$HOME"; run', "--name", "two words"),
        gpus=("0", "2-3"),
        each=True,
        environment={"A": "1", "B": "two words"},
        idle_for=30,
        settle=120,
        grace=20,
        backoff=60,
        nice=19,
        ionice="best-effort:7",
        mps_priority=1,
        mps_thread_percentage=20,
        preempt="checkpoint",
        checkpoint_timeout=15,
    )
    assert mine.mps_environment == {"CUDA_MPS_CLIENT_PRIORITY": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"}
    assert (other.idle_for, other.idle_after_visitor) == (300, 300)
    weekdays = (0, 1, 2, 3, 4)
    assert config.schedule == Schedule(
        (DailyHours(1200, 480, weekdays), DailyHours(720, 780, weekdays), DailyHours(0, 1440, (5, 6)))
    )


def test_spaces_case_and_comments_are_ignored_as_in_gpu_mon(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "# first\r\n  [gpu-all]\r\n  GPUS : aLl\r\n\r\n; more\r\n"
        "[process-0]\r\nCmd = run \r\n   --on\r\n   # not this\r\n   two\r\ngpus =  0 , 1\r\n",
    )
    assert config.programs == (Background(name="process-0", command=("run", "--on", "two"), gpus=("0", "1")),)


def test_keys_may_refer_to_others_and_percent_signs_stay(tmp_path: Path) -> None:
    text = "[DEFAULT]\nroot=/data\nlog=%(root)s/log\n[gpu-all]\n[process-0]\ncmd=%(root)s/run 50%% +%F\n"
    config = read(tmp_path, text)
    assert config.programs == (Background(name="process-0", command=("/data/run", "50%", "+%F"), log="/data/log"),)


def test_missing_log_means_the_console_and_terminals_count_only_if_configured(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD)
    assert config.programs[0].log is None
    assert not config.terminals.enabled
    assert read(tmp_path, GOOD + "[tty]\nwhitelist=\n").terminals == TerminalRule(enabled=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[gpu-all]\ngpus=ALL\n", "there is no program to run: add a section [process-0] with cmd = and gpus ="),
        ("\n[process-0]\ncmd=true\n", "no GPU is watched: add a section [gpu-all] with gpus = ALL"),
        (
            GOOD + "[defaults]\ninterval_seconds=often\n",
            "[defaults] interval_seconds: 'often' is not a duration: write it like 90s, 5m or 1h30m",
        ),
        (
            GOOD + "[defaults]\ninterval_seconds=0\n",
            "[defaults] interval_seconds: '0' is too short: write 0.1s or more",
        ),
        (GOOD + "[tty]\nenabled=perhaps\n", "[tty] enabled: 'perhaps' is not valid: write true or false"),
        (GOOD + "gpus=one\n", "[process-0] gpus: 'one' is not a GPU: write all, 0, 0,2, 0-3 or a uuid"),
        (
            GOOD + "gpus=0 ; the first\n",
            (
                "[process-0] gpus: '0 ; the first' is not a GPU: write all, 0, 0,2, 0-3 or a uuid; "
                "put a comment on a separate line"
            ),
        ),
        (GOOD + "gpus=3-1\n", "[process-0] gpus: '3-1' runs backwards: write 1-3"),
        (GOOD + "gpus=\n", "[process-0] gpus: no GPU is named: write all, 0, 0,2, 0-3 or a uuid"),
        (GOOD + "nice=-5\n", "[process-0] nice: '-5' is not valid: write a whole number from 0 to 19"),
        (GOOD + "nice=low\n", "[process-0] nice: 'low' is not valid: write a whole number from 0 to 19"),
        (GOOD + "preempt=pause\n", "[process-0] preempt: 'pause' is not valid: write stop or checkpoint"),
        (
            GOOD + "ionice=slow\n",
            "[process-0] ionice: 'slow' is not valid: write idle, or best-effort:N with N from 0 (first) to 7 (last)",
        ),
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
        ("[gpu-all]\n[process-0]\ndir=/tmp\n", "[process-0] has no command: add cmd = and the program to run"),
        (GOOD + "log=\n", "[process-0] log: '' is not a path: write one, or remove the line"),
        (GOOD + "lgo=/dev/null\n", "[process-0] has no key 'lgo': did you mean 'log'?"),
        (GOOD + "command=false\n", "[process-0] command: the same is written twice: remove one of them"),
        (GOOD + "CMD=false\n", "5: [process-0] has 'cmd' already: remove one of them"),
        (GOOD + "[tty]\nwhite_list=me\n", "[tty] has no key 'white_list': did you mean 'whitelist'?"),
        (GOOD + "[tty]\nxyz=me\n", "[tty] has no key 'xyz': it takes enabled, idle_seconds, whitelist"),
        (GOOD + "[proces-1]\n", "[proces-1] is not a section: did you mean [process-0]?"),
        (GOOD + "[TTY]\n", "[TTY] is not a section: did you mean [tty]?"),
        (GOOD + "[zzz]\n", "[zzz] is not a section: use [defaults], [gpu-all], [process-0], [tty], [schedule]"),
        (GOOD + "[process-0]\ncmd=false\n", "5: [process-0] is there already: give one of them another name"),
        ("gpus=1\n" + GOOD, "1: there is no [section] above this line"),
        (GOOD + "what is this\n", "5: this is neither a [section] nor key = value: write # before a comment"),
        (
            GOOD + "dir=%(nowhere)s\n",
            "[process-0] dir: %(nowhere)s refers to a key that is not there: write %% for a percent sign",
        ),
        (GOOD + "dir=%(dir)s\n", "[process-0] dir: its references form a circle: write %% for a percent sign"),
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
    assert problems(tmp_path, text) == [problem]


@pytest.mark.parametrize("text", ["", "; only a comment\n"])
def test_empty_file_lacks_gpus_and_programs(tmp_path: Path, text: str) -> None:
    assert [problem.partition(":")[0] for problem in problems(tmp_path, text)] == [
        "no GPU is watched",
        "there is no program to run",
    ]


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = "[defaults]\ninterval=x\n[gpus]\ngpu=0\n[process-0]\nnice=99\ncmd=\n[ttx]\n"
    assert [problem.partition(" ")[0] for problem in problems(tmp_path, text)] == [
        *("[ttx]", "[defaults]", "[process-0]", "[process-0]", "[gpus]"),
    ]


def test_valid_part_is_returned_with_the_mistakes(tmp_path: Path) -> None:
    with pytest.raises(FillConfigError) as caught:
        read(tmp_path, GOOD + "nice=99\n")
    assert caught.value.valid_part is not None
    assert caught.value.valid_part.programs == (Background(name="process-0", command=("true",)),)


def test_non_utf8_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "gpu_mon.conf"
    path.write_bytes(b"[gpu-all]\n; caf\xe9\n")
    with pytest.raises(FillConfigError) as caught:
        read_ini(path)
    assert str(caught.value) == f"{path}: this file is not UTF-8: save it as UTF-8"


def test_missing_or_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FillConfigError) as missing:
        read_ini(tmp_path / "nowhere.conf")
    assert str(missing.value) == f"{tmp_path}/nowhere.conf: this file does not exist: write it, or name another"
    with pytest.raises(FillConfigError) as unreadable:
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
    reported: tuple[str, ...] = ()
    programs: tuple[Background, ...] = ()
    try:
        programs = read_ini(path).programs
    except FillConfigError as error:
        reported = error.problems
    assert all(problem.startswith(str(path)) for problem in reported)
    assert bool(reported) != bool(programs)
