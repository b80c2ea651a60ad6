"""`stoker list` as typed: what runs, what waits in its order, what ended last, and what keeps jobs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stoker import Queue
from stoker.queue import Store, init_queue
from tests.support.attempts import be_there, run, start, submit
from tests.support.command import stoker, stoker_command
from tests.support.terminal import terminal


@pytest.fixture(params=["sqlite", "postgres"])
def queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "postgres":
        monkeypatch.setenv("STOKER_QUEUE", request.getfixturevalue("postgres_url"))
    with init_queue() as opened:
        yield opened


def listed(*arguments: str) -> list[str]:
    """The ids in the order of the table."""
    done = stoker("list", *arguments)
    assert done.code == 0, done.err
    return [
        word for line in done.out.splitlines()[1:] for word in line.split()[1:2] if re.fullmatch("[0-9a-f]{8}", word)
    ]


def row(out: str, job: str) -> str:
    return next(line for line in out.splitlines() if f"  {job}  " in line)


def test_jobs_are_ordered_running_then_waiting_then_newest_ended(queue: Store) -> None:
    ended, *others = submit(queue, "old", "first", "second", "third", "held")
    first, second, third, held = others
    run(queue, ended, "succeeded", 0)
    start(queue, second)
    queue.jobs.move([third], "first")
    queue.jobs.hold([held])
    assert listed() == [second, third, first, held, ended]


def test_line_has_state_reason_gpus_time_and_exit_code(queue: Store) -> None:
    running, retried, failed, after, large = submit(queue, "a", "b", "c", "d", "e", retries=1, backoff=600.0)
    be_there(queue, gpus=2)
    start(queue, running, "GPU-1")
    run(queue, retried, "failed", 3)
    queue.jobs.edit(failed, {"retries": 0, "name": "the run"})
    run(queue, failed, "failed", 7)
    queue._driver.fetch_text("UPDATE stoker_jobs SET started = ended - 90 WHERE name = 'the run'", {})
    queue.jobs.edit(after, {"after": (running,), "memory": 20 * 2**30, "gpus": 2})
    queue.jobs.edit(large, {"gpus": 9})
    done = stoker("list")
    assert row(done.out, running).split()[:4] == ["a", running, "running", "gpu-box:1"]
    assert "queued, retry in " in row(done.out, retried)
    assert f"queued, after {running}" in row(done.out, after)
    assert "2 x 20 GiB" in row(done.out, after)
    assert "queued, too large" in row(done.out, large)
    # Names come before ids.
    assert row(done.out, failed).startswith(f"the run  {failed}  failed")
    assert row(done.out, failed).split()[-2:] == ["1m30s", "7"]
    assert done.out.splitlines()[-1] == "1 running, 3 queued, 1 failed; 1 worker, on gpu-box"


def test_last_line_reports_missing_workers_and_a_paused_queue(queue: Store) -> None:
    submit(queue, "a")
    queue.pause()
    last = stoker("list").out.splitlines()[-1]
    assert last == (
        "1 queued; no worker is running: `stoker work` starts one; "
        "the queue is paused: `stoker resume` starts jobs again"
    )


def test_only_the_newest_ended_jobs_are_shown_and_the_rest_counted(queue: Store) -> None:
    jobs = submit(queue, *(["x"] * 30))
    for job in jobs[:8]:
        run(queue, job, "succeeded", 0)
    done = stoker("list")
    assert [job for job in listed() if job in jobs[:8]] == jobs[:8][:-6:-1]
    assert "(5 more: --all shows them)" in done.out
    assert len(listed("--all")) == 30
    assert len(listed("--limit", "2")) == 4
    assert listed("--state", "succeeded", "--limit", "3") == jobs[7:4:-1]


def test_metrics_are_a_column_where_jobs_have_some(queue: Store) -> None:
    shown, silent, plain = [
        submit(queue, "train", metrics=metrics)[0] for metrics in (("loss", "val_acc"), ("loss",), ())
    ]
    for job, said in ((shown, "val_acc=0.91\nstep=1 loss=0.123456\n"), (silent, "nothing\n"), (plain, "loss=3\n")):
        assert queue.logs.write(start(queue, job).id, said)
    done = stoker("list")
    assert row(done.out, shown).endswith("  loss 0.1235, val_acc 0.91")
    assert "metrics" in done.out.splitlines()[0]
    assert "loss" not in row(done.out, silent) + row(done.out, plain)
    figures = {one["id"]: one["figures"] for one in stoker("list", "--json").json()}
    assert figures == {shown: {"loss": 0.123456, "val_acc": 0.91}, silent: {}, plain: {}}
    queue.jobs.cancel([shown])
    assert "metrics" not in stoker("list", "--state", "queued").out


def test_jobs_are_filtered_by_state_and_tag(queue: Store) -> None:
    tagged, other = submit(queue, "a", tags=("x",)) + submit(queue, "b", tags=("y",))
    held = submit(queue, "c", tags=("x",), hold=True)[0]
    assert listed("--tag", "x") == [tagged, held]
    assert listed("--tag", "x", "--state", "held") == [held]
    assert listed("--state", "held", "--state", "queued") == [tagged, other, held]
    assert "no jobs match" in stoker("list", "--tag", "nobody").out


def test_json_lists_jobs_with_their_reasons(queue: Store) -> None:
    (job,) = submit(queue, "echo 'a' \"b\" \n🔥", name="n")
    (result,) = stoker("list", "--json").json()
    assert (result["id"], result["command"], result["state"]) == (job, "echo 'a' \"b\" \n🔥", "queued")
    assert result["why"]["kind"] == "no worker"
    assert result["why"]["reason"].startswith("no worker is there")


def test_json_has_the_place_in_line(queue: Store) -> None:
    submit(queue, "a", "b", "c")
    be_there(queue)
    result = stoker("list", "--json").json()
    assert [job["why"]["forecast"]["place"] for job in result] == [1, 2, 3]
    with Queue() as python:
        assert [python.why(job["id"]).forecast.place for job in result] == [1, 2, 3]  # type: ignore[union-attr]  # it waits
    # A search does not change the place.
    (found,) = stoker("list", "--json", f"id:{result[2]['id']}").json()
    assert found["why"]["forecast"]["place"] == 3


def test_empty_queue_explains_how_to_submit(queue: Store) -> None:
    assert stoker("list").out.startswith("no jobs yet: `stoker submit -- COMMAND` makes one\n")
    assert stoker("list", "--json").json() == []


def test_command_text_is_escaped_in_the_table(queue: Store) -> None:
    (job,) = submit(queue, "one\ntwo\t\x1b[31mred [bold]x[/bold] 🔥")
    done = stoker("list")
    assert "one two �[31mred [bold]x[/bold] 🔥" in row(done.out, job)
    assert "\x1b" not in done.out


LONG = "python train.py " + "--option /data/configs/experiment.yaml " * 8


@pytest.mark.parametrize("queue", ["sqlite"], indirect=True)
@pytest.mark.parametrize("verb", ["list", "runs"])
def test_narrow_terminal_keeps_ids_and_states_and_a_pipe_keeps_everything(
    queue: Store, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # the terminal's own width counts
    if verb == "list":
        runs, waits = submit(queue, LONG, LONG, gpus=1)
        queue.jobs.edit(waits, {"after": (runs,)})
        start(queue, runs, "GPU-0")
        whole = [f"  {runs}  running", f"  {waits}  queued, after {runs}"]
    else:
        assert stoker("run", "--", "sh", "-c", f"exit 3; {LONG}").code == 3
        whole = [f"{stoker('runs', '--json').json()[0]['id']}  ", "  ended     3  "]
    with terminal([stoker_command(), verb], columns=60) as shown:
        assert shown.code() == 0
    assert [part for part in whole if part not in shown.text] == [], shown.text
    assert max(len(line) for line in shown.text.splitlines() if "…" in line) <= 60
    piped = stoker(verb).out
    # In the place of a name a command is short everywhere.
    short = "python train.py --option /data/config … figs/experiment.yaml"
    assert (short if verb == "list" else LONG.rstrip()) in piped
    assert not set(piped.replace(short, "")) & set("…█│┃━─")


def test_invalid_input_is_refused_in_one_sentence(queue: Store) -> None:
    for arguments in (["--state", "nonsense"], ["--limit", "0"], ["--queue", "nonsense://"]):
        done = stoker("list", *arguments)
        assert (done.code, len(done.err.splitlines())) == (2, 1)


def test_search_lists_what_matches(queue: Store) -> None:
    a, b, c = submit(queue, "lr=1e-3", "lr=1e-2", "bert")
    queue.jobs.edit(a, {"tags": ("night",)})
    run(queue, b, "failed", 1)
    assert listed("lr=", "state:failed,queued", "since:2d") == [b, a]
    assert listed("lr=0.001", "--tag", "night") == [a]
    assert listed("--sort", "-submitted") == [a, b, c]
    assert "more match: --all shows them" in stoker("list", "since:1d", "--limit", "2").out
    assert stoker("list", "nothing").out == "no jobs match\n"
    for bad in (["colour:red"], ['"open'], ["--sort", "colour"], ["state:failed", "--state", "held"]):
        done = stoker("list", *bad)
        assert (done.code, len(done.err.splitlines())) == (2, 1), bad


def test_missing_queue_explains_how_to_create_one() -> None:
    done = stoker("list")
    assert (done.code, done.out) == (1, "")
    assert "the first `stoker submit` creates it" in done.err


@pytest.mark.parametrize("verb", [["list"], ["list", "--all", "--json"], ["submit", "true"], ["gpus"]], ids=" ".join)
def test_short_command_in_a_pipe_loads_no_module_that_it_does_not_use(verb: list[str]) -> None:
    """Each of these costs more than the command itself."""
    with init_queue() as store:
        submit(store, "a job")
    program = (
        "import sys; from stoker.cli.app import run; run(sys.argv[1:]);"
        "heavy = {'rich.console', 'asyncio', 'psycopg', 'fastapi', 'apprise', 'psutil'};"
        "print(*heavy & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *verb],
        env={**os.environ, "STOKER_GPUS": "sim:2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.strip() == ""
