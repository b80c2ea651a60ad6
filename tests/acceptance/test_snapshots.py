"""What every verb prints, kept in tests/snapshots: its help, a table, JSON and a typical error.

`make snapshots` rewrites the files; a change of wording is then one diff to review.
"""

import getpass
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from stoker.cli.app import VERBS
from stoker.cli.app import stoker as root_command
from stoker.queue import Store, init_queue
from tests.support.attempts import be_there, run, start, submit
from tests.support.code_repository import CodeRepository
from tests.support.command import stoker
from tests.support.queue_jobs import moment

SNAPSHOTS: Final = Path(__file__).parents[1] / "snapshots"

# The verbs without an entry print nothing but their help and errors here: they run until stopped.
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "clone": ("clone next --priority 5 --dry-run", "clone nothing"),
    "cancel": ("cancel --dry-run --all", "cancel --tag vision --json", "cancel done", "cancel nothing", "cancel"),
    "clean": ("clean --dry-run --older-than 0s", "clean --json --older-than 0s", "clean", "clean --older-than soon"),
    "completion": ("completion tcsh",),
    "diff": ("diff changed", "diff changed other", "diff changed --json", "diff changed changed", "diff next"),
    "doctor": ("doctor --hang-test --for 1s",),
    "edit": ("edit next --priority 5", "edit next --gpus 2 --json", "edit baseline --gpus 2", "edit next"),
    "feed": ("feed file jobs.txt --once", "feed file missing.txt --once", "feed sheet abc --credentials missing.json"),
    "fill": ("fill status", "fill status --json", "fill --check"),
    "fit": ("fit", "fit --margin much -- python train.py"),
    "gpus": ("gpus", "gpus --json", "gpus --explain --gpus 1", "gpus --gpus 7", "gpus --json --watch"),
    "hold": ("hold next", "hold baseline --json", "hold next later done"),
    "list": ("list", "list --json --state failed", "list --state failed", "list --state lost"),
    "logs": ("logs broken", "logs broken --json", "logs next", "logs broken --attempt 7"),
    "machines": (
        "machines",
        "machines --json",
        "machines drain gpu-box",
        "machines drain gpu-box --dry-run --json",
        "machines resume gpu-box",
        "machines remove gpu-box --dry-run --purge",
        "machines drain other",
        "machines add user@gpu-box",
    ),
    "move": ("move first later", "move after later next --json", "move before", "move first baseline"),
    "notify": ("notify --test",),
    "pause": ("pause --dry-run", "pause", "pause", "pause --worker gpu-box --json", "pause --worker other"),
    "queue": ("queue init", "queue init --json", "queue check", "queue check --json", "queue check --queue /nowhere/q"),
    "record": ("record readings --every 100ms --for 250ms", "record", "record . --for 1s"),
    "release": ("release later", "release later next --json"),
    "replay": ("replay trace", "replay trace --json", "replay trace --gpus mine", "replay missing"),
    "resume": ("resume", "resume --worker gpu-box --json"),
    "retry": ("retry broken", "retry done baseline --json", "retry --all"),
    "run": ("run -- true", "run", "run --grace soon -- true", "run -- no-such-program"),
    "runs": ("runs", "runs --json"),
    "serve": ("serve --port 70000", "serve --url nowhere"),
    "show": ("show broken", "show next --json", "show", "show nothing"),
    "sim": ("sim status", "sim status --json", "sim fault lost --gpu 1", "sim fault --clear", "sim fault smoke"),
    "snooze": ("snooze 30m baseline", "snooze --end baseline", "snooze", "snooze 30m next"),
    "submit": (
        "submit --name quick -- python train.py",
        "submit --json --gpus 2 --memory 8GiB -- python train.py",
        "submit --dry-run --sweep lr=1e-3,1e-4 -- 'python train.py --lr {lr}'",
        "submit",
        "submit --share -- python train.py",
    ),
    "tag": ("tag night next", "tag night next", "tag --remove night next --dry-run --json"),
    "tokens": (
        "tokens",
        "tokens add --viewer --name anna --url http://gpu-box",
        "tokens link anna --json",
        "tokens",
        "tokens --json",
        "tokens revoke anna",
        "tokens revoke bob",
    ),
    "top": ("top --once", "top --json --queue empty.db", "top"),
    "up": ("up --demo --queue q.db",),
    "wait": ("wait done", "wait broken --json", "wait next --timeout 100ms", "wait"),
    "watch": ("watch", "watch --then dance", "watch --then exit --below 150%"),
    "why": ("why next", "why broken --json", "why nothing"),
    "work": ("work --lease 1s", "work --engine abacus"),
}

_LENGTH: Final = r"(?:\d+(?:\.\d+)?(?:ms|[dhms]))+"
# What differs from run to run, in this order.
MASKS: Final[tuple[tuple[str, str], ...]] = (
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
    (r"login#[\w-]+", "login#SECRET"),
    (r"\b1[6-9]\d{8}(\.\d+)?\b", "TIME"),
    (r'("\w+": )\d+\.\d{3,}', r"\1NUMBER"),
    (r'("(?:started|position|silent|seen|seconds|looks|utilization_samples)": )[\d.]+', r"\1NUMBER"),
    (r"\b[0-9a-f]{16,}\b", "HASH"),
    (r"\b[0-9a-f]{8}\b", "ID"),
    (r'("id": )"[0-9a-f]{6}"', r'\1"ID"'),
    (r"\b[0-9a-f]{6} \(anna\)", "ID (anna)"),
    (r"(?m)^(anna.* viewer +)[0-9a-f]{6}", r"\1ID"),
    (r'("containment": )".*"', r'\1"HOW"'),
    (r"(?m)^(contained by +).*", r"\1HOW"),
    (r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d( UTC)?", "TIME"),
    (r"\b\d\d-\d\d \d\d:\d\d\b", "TIME"),
    (r"\b\d\d:\d\d(:\d\d)?\b", "CLOCK"),
    (r"\b\d+ (?:s|min)\b", "LENGTH"),
    (rf"\b(lasted|for|every|last) {_LENGTH}\b", r"\1 LENGTH"),
    (rf"(\s){_LENGTH}(?=\s)", r"\1LENGTH"),
    (rf"\({_LENGTH}\)", "(LENGTH)"),
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Simulated GPUs, a recording and a queue with one job in each state; a worker that is alive."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_GPUS", f"sim:2@{tmp_path / 'gpus'}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TZ", "UTC")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "jobs.txt").write_text("# two jobs\npython train.py --lr 1\npython train.py --lr 2\n")
    with init_queue() as store:
        be_there(store)
        names = ("baseline", "done", "broken", "next", "later")
        jobs = {name: submit(store, "python train.py", name=name, tags=("vision",), directory="/")[0] for name in names}
        start(store, jobs["baseline"], "GPU-0")
        run(store, jobs["done"], "succeeded", 0)
        moment(store)
        run(store, jobs["broken"], "failed", 1, "it ended with code 1")
        store.jobs.hold([jobs["later"]])
        yield store


@pytest.mark.parametrize("verb", VERBS)
def test_command_output_equals_its_snapshot(
    verb: str,
    site: Store,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if verb in ("runs", "show"):
        assert stoker("run", "--", "true").code == 0
    if verb == "replay":
        assert stoker("record", "trace", "--every", "100ms", "--for", "250ms").code == 0
    if verb == "diff":
        code = CodeRepository(tmp_path / "code", {"train.py": "lr = 1\n"})
        code.write({"train.py": "lr = 2\n", "new.py": ""})
        for name in ("changed", "other"):
            assert stoker("submit", "--snapshot", "--directory", str(code.path), "--name", name, "true").code == 0
            code.write({"train.py": "lr = 3\n"})
    texts = [_help(words) for words in _commands_of(verb)]
    texts += [_typed(line, tmp_path) for line in COMMANDS.get(verb, ())]
    assert_same("\n".join(texts), SNAPSHOTS / f"{verb}.txt", update=request.config.getoption("--update-snapshots"))


def test_general_help_equals_its_snapshot(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = "\n".join([_help([]), _typed("dance", tmp_path), _typed("list --al", tmp_path)])
    assert_same(text, SNAPSHOTS / "stoker.txt", update=request.config.getoption("--update-snapshots"))


def test_every_snapshot_belongs_to_a_command() -> None:
    assert {path.stem for path in SNAPSHOTS.glob("*")} == {"stoker", *VERBS}


def assert_same(text: str, path: Path, *, update: bool) -> None:
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text == known, f"{path.name} differs: `make snapshots` rewrites it"


def _commands_of(verb: str) -> Iterator[list[str]]:
    """The words of a verb and of the verbs below it."""
    yield [verb]
    command = root_command.get_command(click.Context(root_command), verb)
    if isinstance(command, click.Group):
        yield from ([verb, name] for name in command.commands)


def _help(words: list[str]) -> str:
    return f"$ stoker {' '.join([*words, '--help'])}\n{stoker(*words, '--help').out}"


def _typed(line: str, directory: Path) -> str:
    done = stoker(*shlex.split(line))
    out = _masked(done.out)
    if "--json" not in line:
        # A table's columns are as wide as what was masked in them.
        out = re.sub(r"(?<=\S) {2,}", "  ", out)
    errors = "".join(f"! {each}\n" for each in done.err.splitlines())
    # Messages have no times, but ids.
    errors = re.sub(r"\b[0-9a-f]{8}\b", "ID", re.sub(r"recorded \d+", "recorded N", errors))
    code = f"[exit code {done.code}]\n" if done.code else ""
    return f"$ stoker {line}\n{out}{errors}{code}".replace(str(directory), "DIR")


def _masked(text: str) -> str:
    user, host = re.escape(getpass.getuser()), re.escape(socket.gethostname())
    own = (
        (rf'("(?:user|submitter)": )"{user}"', r'\1"USER"'),
        (rf'("host": )"{host}"', r'\1"HOST"'),
        (rf"\bby {user} on {host}$", "by USER on HOST"),
    )
    for pattern, instead in (*own, *MASKS):
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text
