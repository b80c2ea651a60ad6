"""`stoker edit`: what jobs ask for is changed, by options, by a text or in an editor."""

import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stoker.queue import Job, JobSpec, Store
from tests.support.command import stoker, stoker_command
from tests.support.queue_jobs import end, start, submit


def edited(queue: Store, *words: str) -> Job:
    done = stoker("edit", "a", *words)
    assert (done.code, done.err) == (0, ""), done.err
    return queue.jobs.get(done.out.split("(")[1].split(")")[0])


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--name", "b"], "name", "b"),
        (["--command", "echo 'it''s' \n two"], "command", "echo 'it''s' \n two"),
        (["--", "python", "x.py", "--name", "a b"], "command", ("python", "x.py", "--name", "a b")),
        (["--", "python x.py | tee log"], "command", "python x.py | tee log"),
        (["--tag", "x", "--tag", "y"], "tags", ("x", "y")),
        (["--tag", "none"], "tags", ()),
        (["--metric", "val_loss", "--metric", "acc@1"], "metrics", ("val_loss", "acc@1")),
        (["--gpus", "0"], "gpus", 0),
        (["--memory", "20GiB"], "memory", 20 * 2**30),
        (["--memory", "none"], "memory", None),
        (["--share"], "share", True),
        (["--batch-size", "64"], "batch_size", 64),
        (["--priority", "-7"], "priority", -7),
        (["--after-any", "other"], "after_any", "other"),
        (["--after", "none"], "after", ()),
        (["--retries", "4"], "retries", 4),
        (["--backoff", "0s"], "backoff", 0.0),
        (["--time-limit", "1h30m"], "time_limit", 5400.0),
        (["--time-limit", "none"], "time_limit", None),
        (["--no-preemptible"], "preemptible", False),
        (["--on-loss", "hold"], "on_loss", "hold"),
        (["--gpu-model", "h100|A100"], "gpu_model", "h100|A100"),
        (["--cpus", "16"], "cpus", 16),
        (["--begin", "2030-01-31T22:00Z"], "begin", 1896127200.0),
        (["--deadline", "2030-01-31T22:00Z"], "deadline", 1896127200.0),
        (["--retry-on", "oom, exit:75"], "retry_on", ("oom", "exit:75")),
        (["--requeue-at-limit"], "requeue_at_limit", True),
        (["--gpu-memory", "40GiB"], "gpu_memory", 40 * 2**30),
        (["--machine", "box"], "machine", "box"),
        (["--label", "ib", "--label", "nvme"], "labels", ("ib", "nvme")),
        (["--exclude-machine", "none"], "exclude_machines", ()),
        (["--ram", "none"], "ram", None),
        (["--partition", "none", "--account", "lab"], "slurm", {"sbatch": ["--nice=5"], "account": "lab"}),
        (["--sbatch", "--nice=9"], "slurm", {"partition": "gpu", "sbatch": ["--nice=9"]}),
        (["--sbatch", "none"], "slurm", {"partition": "gpu"}),
        (["--env", "B=2=3", "--no-env", "A"], "environment", {"B": "2=3"}),
        (["--directory", "/"], "directory", "/"),
        (["--for", "10m"], "policy", {"window": 600.0, "below": 0.3}),
        (["--below", "25%", "--idle-after", "1h"], "policy", {"below": 0.25, "after": 3600.0}),
        (["--idle", "off"], "policy", {"idle": False}),
    ],
)
def test_option_changes_only_its_field(
    queue: Store, words: list[str], field: str, value: object, tmp_path: Path
) -> None:
    (other,) = submit(queue, "other")
    queue.jobs.submit(
        [
            JobSpec(
                command=("echo", "a"),
                name="a",
                tags=("t",),
                memory=2**30,
                time_limit=60.0,
                after=(other,),
                preemptible=True,
                exclude_machines=("old",),
                retries=2,
                environment={"A": "1"},
                directory=str(tmp_path),
                policy={"below": 0.3},
                ram=2**36,
                slurm={"partition": "gpu", "sbatch": ["--nice=5"]},
            )
        ]
    )
    before = queue.jobs.get("a")
    after = edited(queue, *words)
    expected = (other,) if value == "other" else value
    assert getattr(after, field) == expected
    changed = {name for name in Job.__struct_fields__ if getattr(before, name) != getattr(after, name)}
    assert changed - {"retries_left", "not_before"} == {field}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a", "--"], "there is no command after --"),
        (["a", "--command", "x", "--", "y"], "in --command and after --"),
        (["--", "a"], "which jobs?"),
        (["a", "--", "train", "—lr", "3"], "train --lr 3 is probably meant"),
    ],
)
def test_invalid_command_after_dashes_is_refused(queue: Store, words: list[str], says: str) -> None:
    submit(queue, "a")
    done = stoker("edit", *words)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert says in done.err
    assert queue.jobs.get("a").command == "echo a"


def test_edit_that_no_worker_could_run_is_refused(queue: Store) -> None:
    submit(queue, "a")
    done = stoker("edit", "a", "--nodes", "2")
    assert (done.code, done.err) == (
        2,
        "stoker: nodes: a job over several machines needs a worker with --engine slurm\n",
    )
    assert queue.jobs.get("a").nodes == 1


def test_several_jobs_are_edited_all_or_none(queue: Store) -> None:
    submit(queue, "a", "b", tags=("t",))
    assert len(stoker("edit", "--tagged", "t", "--gpus", "2").out.splitlines()) == 2
    assert [job.gpus for job in queue.jobs.find()] == [2, 2]
    a = queue.jobs.get("a").id
    # b may come after a; that a comes after itself is a mistake, so neither is changed.
    refused = stoker("edit", "a", "b", "--after", a)
    assert (refused.code, "would wait for itself" in refused.err) == (2, True)
    assert [job.after for job in queue.jobs.find()] == [(), ()]


def test_running_job_is_not_edited_and_ended_job_is_edited_for_a_retry(queue: Store) -> None:
    runs, over = submit(queue, "runs", "over")
    start(queue, runs)
    end(queue, over)
    done = stoker("edit", "runs", "over", "--memory", "4GiB")
    assert (done.code, done.out) == (0, f"over ({over}): edited (memory)\n")
    assert done.err == f"stoker: job runs ({runs}) was not edited: it is running; it can be edited after it has ended\n"
    assert (queue.jobs.get("runs").memory, queue.jobs.get("over").memory) == (None, 4 * 2**30)


def test_edit_without_effect_is_reported(queue: Store) -> None:
    (job,) = submit(queue, "a", gpus=2)
    done = stoker("edit", "a", "--gpus", "2", "--json")
    assert done.code == 1
    assert done.json()["unchanged"] == [{"id": job, "name": "a", "why": "it already has these values"}]


def test_dry_run_edits_nothing(queue: Store) -> None:
    (job,) = submit(queue, "a")
    assert stoker("edit", "a", "--gpus", "3", "--dry-run").out == f"a ({job}): would be edited (gpus)\n"
    assert queue.jobs.get("a").gpus == 1


def test_edit_without_options_or_terminal_is_refused(queue: Store) -> None:
    submit(queue, "a")
    done = stoker("edit", "a")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "nothing to change:" in done.err


# In an editor


def in_terminal(editor: Path, *words: str) -> tuple[int, str]:
    """`stoker edit` where there is a terminal: its code, and what is on the screen."""
    master, slave = pty.openpty()
    environment = {**os.environ, "EDITOR": f"{sys.executable} {editor}", "TMPDIR": str(editor.parent)}
    environment.pop("VISUAL", None)
    with subprocess.Popen(
        [stoker_command(), "edit", *words], stdin=slave, stdout=slave, stderr=slave, env=environment
    ) as process:
        os.close(slave)
        screen = b""
        try:
            while data := os.read(master, 65536):
                screen += data
        except OSError:
            pass  # the other end was closed: that is how a terminal says so
        os.close(master)
        code = process.wait(timeout=60)
    assert b"Traceback" not in screen
    return code, screen.decode().replace("\r\n", "\n")


def an_editor(tmp_path: Path, change: str) -> Path:
    """A program that applies a Python expression on `text` to the file, and remembers what it saw."""
    path = tmp_path / "editor.py"
    path.write_text(
        "import sys, pathlib\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "text = file.read_text()\n"
        f"pathlib.Path({str(tmp_path / 'seen')!r}).write_text(text)\n"
        f"file.write_text({change})\n"
    )
    return path


def left(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("stoker-*.toml"))


def test_changes_made_in_the_editor_are_applied(queue: Store, tmp_path: Path) -> None:
    queue.jobs.submit(
        [
            JobSpec(
                command="echo 'one'\necho \"two\" \\ 🔥",
                name="a",
                tags=("x",),
                memory=3 * 2**30,
                environment={"A": "1"},
            )
        ]
    )
    before = queue.jobs.get("a")
    code, screen = in_terminal(an_editor(tmp_path, "text"), "a")
    assert (code, "it already has these values" in screen) == (1, True)
    seen = tomllib.loads((tmp_path / "seen").read_text())
    assert (seen["command"], seen["memory"], seen["environment"]) == (before.command, "3.0GiB", {"A": "1"})
    editor = an_editor(
        tmp_path,
        """text.replace('gpus = 1', 'gpus = 4').replace('"3.0GiB"', '"20GiB"')"""
        """.replace('[environment]', '[environment]\\nB = "2"')""",
    )
    code, screen = in_terminal(editor, "a")
    assert (code, screen) == (0, f"a ({before.id}): edited (environment, gpus, memory)\n")
    after = queue.jobs.get("a")
    assert (after.gpus, after.memory, after.environment) == (4, 20 * 2**30, {"A": "1", "B": "2"})
    assert (after.command, after.tags) == (before.command, before.tags)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("text + 'gpus = '", "this is not TOML"),
        ("text.replace('gpus = 1', 'gpus = \"many\"')", "gpus: expected int, got str"),
        ("text.replace('gpus = 1', 'gpus = -1')", "gpus: must be between 0"),
        ("text.replace('gpus = 1', 'gpsu = 1')", "a job has no field 'gpsu' to edit"),
        ("'gpus = 1'", "a job needs a command"),
        ("text.replace('gpus = 1', 'memory = \"much\"')", "memory: 'much' is not an amount of memory"),
        ("text.replace('after = []', 'after = [\"12345678\"]')", "there is no such job"),
        ("text.replace('[policy]', '[policy]\\nnonsense = 1')", "no rule has a setting 'nonsense'"),
        ("text + 'partitoin = \"gpu\"'", "Slurm's options have no 'partitoin': did you mean 'partition'?"),
    ],
)
def test_invalid_editor_text_is_reported_and_kept(queue: Store, tmp_path: Path, change: str, sentence: str) -> None:
    submit(queue, "a")
    before = queue.jobs.get("a")
    code, screen = in_terminal(an_editor(tmp_path, change), "a")
    assert (code, screen.count("\n")) == (2, 1), screen
    assert sentence in screen
    assert queue.jobs.get("a") == before
    (kept,) = left(tmp_path)
    assert str(kept) in screen
    # Once corrected, the kept text is accepted.
    kept.write_text((tmp_path / "seen").read_text().replace("gpus = 1", "gpus = 2"))
    assert stoker("edit", "a", "--from", str(kept)).code == 0
    assert queue.jobs.get("a").gpus == 2


def test_failing_editor_changes_nothing(queue: Store, tmp_path: Path) -> None:
    submit(queue, "a")
    editor = tmp_path / "editor.py"
    editor.write_text("import sys; sys.exit(3)")
    code, screen = in_terminal(editor, "a")
    assert (code, "Editing failed" in screen, left(tmp_path)) == (1, True, [])
    editor.write_text("import sys; open(sys.argv[1], 'a').write('# mine'); sys.exit(3)")
    code, screen = in_terminal(editor, "a")
    (kept,) = left(tmp_path)
    assert (code, str(kept) in screen) == (1, True)
    assert kept.read_text().endswith("# mine")


def test_running_job_is_not_opened_in_the_editor(queue: Store, tmp_path: Path) -> None:
    (job,) = submit(queue, "a")
    start(queue, job)
    code, screen = in_terminal(an_editor(tmp_path, "text"), "a")
    assert (code, "it is running" in screen, (tmp_path / "seen").exists()) == (1, True, False)
