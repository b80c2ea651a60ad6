"""`stoker show` of a job as typed; what it says of runs is in the tests of `stoker run`."""

from pathlib import Path

import msgspec
import pytest

from stoker.fit.model import Fitted, ProbeOutcome
from stoker.queue import AttemptDetails, JobSpec, Store
from tests.support.attempts import be_there, place_of, run, start, submit
from tests.support.command import stoker


def test_metrics_are_shown_with_their_last_values(queue: Store) -> None:
    done = stoker("submit", "--name", "m", "--metric", "loss", "--metric", "val_acc", "--", "train")
    assert done.code == 0, done.err
    job = queue.jobs.get("m").id
    assert "metrics      loss not printed, val_acc not printed\n" in stoker("show", "m").out
    assert queue.logs.write(start(queue, job).id, "step=1 loss=0.5\n")
    assert "metrics      loss 0.5, val_acc not printed\n" in stoker("show", "m").out
    found = stoker("show", "m", "--json").json()
    assert (found["job"]["metrics"], found["figures"]) == (["loss", "val_acc"], {"loss": 0.5})
    refused = stoker("submit", "--metric", "1loss", "--", "train")
    assert refused.code == 2
    assert "'1loss' cannot be a figure of a log: write its name there, like val_loss" in refused.err


def test_job_is_shown_with_its_options_and_attempts(queue: Store) -> None:
    be_there(queue)
    (needed,) = submit(queue, "before")
    run(queue, needed, "succeeded", 0)
    (job,) = queue.jobs.submit(
        [
            JobSpec(
                command=("python", "train.py", "--name=a b", "line\nbreak"),
                directory="/srv/work",
                environment={"A": "1"},
                name="the run",
                tags=("x", "y"),
                gpus=2,
                memory=20 * 2**30,
                share=True,
                priority=5,
                after=(needed,),
                retries=2,
                backoff=0.0,
                time_limit=3600.0,
                commit="c0ffee",
                dirty=True,
            )
        ]
    )
    failed = start(queue, job, "GPU-0", "GPU-1")
    queue.attempts.finish(failed.id, "failed", 1, "out of memory")
    running = start(queue, job, "GPU-1")
    queue.jobs.set_link(running.id, "https://wandb.ai/a/b/runs/c")
    done = stoker("show", "the run")
    assert done.code == 0, done.err
    for words in (
        f"job          the run ({job})\n",
        "command      python train.py '--name=a b' 'line\n             break'\n",
        "directory    /srv/work\n",
        "environment  A=1\n",
        "tags         x, y\n",
        "gpus         2 with 20 GiB each, may share them\n",
        "priority     5\n",
        f"after        {needed}\n",
        "retries      1 of 2 left",
        "time limit   1h\n",
        "commit       c0ffee, with uncommitted changes\n",
        "state        running\n",
        "why          running since ",
        "link         https://wandb.ai/a/b/runs/c\n",
        "  1  on gpu-box GPU 0,1, started ",
        ", failed, exit code 1: out of memory\n",
        "  2  on gpu-box GPU 1, started ",
    ):
        assert words in done.out, words


def test_local_log_and_report_are_shown(queue: Store) -> None:
    (job,) = submit(queue, "a")
    attempt = run(queue, job, "failed", 1)
    place = place_of(attempt)
    assert str(place) not in stoker("show", job).out
    (place / "output").write_text("hello\n")
    (place / "report.md").write_text("# Why it was stopped\n")
    done = stoker("show", job)
    assert f"output       {place / 'output'}\n" in done.out
    assert done.out.endswith("\n# Why it was stopped\n")
    result = stoker("show", job, "--json").json()
    assert (result["log"], result["report"]) == (str(place / "output"), str(place / "report.md"))


def test_report_of_a_remote_job_is_shown(queue: Store) -> None:
    (job,) = submit(queue, "a")
    attempt = run(queue, job, "failed", 1)
    shown = stoker("show", job, "--json").json()
    assert shown["details"] == {"cause": "", "rule": "", "report": "", "fit": {}}
    assert shown["attempts"][0]["host"] is None  # the queue does not know its worker
    queue.attempts.write_details(
        attempt.id, AttemptDetails(cause="idle", rule="idle", report="# Why it was stopped\n\n\x1b[31mred\n")
    )
    done = stoker("show", job)
    assert done.out.endswith("\n# Why it was stopped\n\n\N{REPLACEMENT CHARACTER}[31mred\n")
    result = stoker("show", job, "--json").json()
    assert (result["report"], result["details"]["cause"]) == (None, "idle")
    assert result["details"]["report"].startswith("# Why it was stopped")
    (place_of(attempt) / "report.md").write_text("# From here\n")
    assert stoker("show", job).out.endswith("\n# From here\n")


def test_batch_size_search_is_shown(queue: Store) -> None:
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    assert "fit  " not in stoker("show", job).out
    fitted = Fitted(
        size=96,
        accumulate=2,
        fixed=2.0**30,
        slope=2.0**29,
        predicted=49 * 2**30,
        limit=50 * 2**30,
        observations=(
            ProbeOutcome(size=8, outcome="fits", peak=5 * 2**30),
            ProbeOutcome(size=128, outcome="oom"),
            ProbeOutcome(size=96, outcome="fits"),
        ),
        note="96 is not faster than 64",
    )
    queue.attempts.write_details(attempt.id, AttemptDetails(fit=msgspec.to_builtins(fitted)))
    done = stoker("show", job)
    assert "fit          batch size 96, 2 steps of accumulation, about 49 GiB of 50 GiB\n" in done.out
    assert "             tried 8 (5.0 GiB), 128 (out of memory), 96 (fits)\n" in done.out
    assert "             96 is not faster than 64\n" in done.out
    assert stoker("show", job, "--json").json()["details"]["fit"]["size"] == 96
    queue.attempts.write_details(attempt.id, AttemptDetails(fit={"of": "a later version"}))
    assert stoker("show", job).code == 0


def test_submitter_is_shown(queue: Store) -> None:
    (job,) = submit(queue, "a", submitter="alice", origin="sheet row 7")
    assert ", by alice, from sheet row 7\n" in stoker("show", job).out
    assert stoker("show", job, "--json").json()["job"]["submitter"] == "alice"
    assert [one["submitter"] for one in stoker("list", "--json").json()] == ["alice"]


def test_waiting_job_has_a_reason(queue: Store) -> None:
    (job,) = submit(queue, "a")
    assert "why          no worker is there, and none ever was" in stoker("show", job[:7]).out


def test_json_has_the_job_its_attempts_and_the_reason(queue: Store) -> None:
    be_there(queue)
    (job,) = submit(queue, "a")
    run(queue, job, "failed", 3)
    result = stoker("show", job, "--json").json()
    assert (result["job"]["id"], result["job"]["state"], result["job"]["command"]) == (job, "failed", "a")
    assert [(one["number"], one["host"], one["outcome"], one["exit_code"]) for one in result["attempts"]] == [
        (1, "gpu-box", "failed", 3)
    ]
    assert result["why"]["kind"] == "ended"


def test_terminal_escapes_of_a_job_are_not_printed(queue: Store) -> None:
    (job,) = submit(queue, "echo \x1b]0;title\x07")
    assert "\x1b" not in stoker("show", job).out


# Runs beside jobs


@pytest.fixture
def a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a run that has ended."""
    monkeypatch.setenv("STOKER_GPUS", f"sim:1x8GiB@{tmp_path}/machine")
    assert stoker("run", "--", "true").code == 0
    return str(stoker("show", "--json").json()["id"])


def test_run_is_shown_even_if_the_queue_is_unusable(a_run: str, tmp_path: Path) -> None:
    (tmp_path / "not-a-queue").write_text("something else")
    for url in ("", str(tmp_path / "not-a-queue"), "postgresql://nobody@127.0.0.1:1/nowhere"):
        for text in (a_run, a_run[:6]):
            done = stoker("show", text, environment={"STOKER_QUEUE": url})
            assert (done.code, done.out.splitlines()[0]) == (0, f"run          {a_run}")
        assert stoker("show", environment={"STOKER_QUEUE": url}).out.startswith(f"run          {a_run}\n")


def test_job_and_run_are_distinguished(a_run: str, queue: Store) -> None:
    (job,) = submit(queue, "a", name="n")
    assert stoker("show", "n").out.startswith(f"job          n ({job})")
    assert stoker("show", a_run).out.startswith(f"run          {a_run}\n")
    assert stoker("show").out.startswith(f"run          {a_run}\n")


def test_unknown_id_is_refused(queue: Store) -> None:
    done = stoker("show", "nobody")
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert "there is no job 'nobody'" in done.err
    assert "there is no run 'nobody' here" in done.err


def test_unknown_run_reports_an_unreachable_queue() -> None:
    done = stoker("show", "nobody", environment={"STOKER_QUEUE": "postgresql://nobody@127.0.0.1:1/nowhere"})
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "cannot be reached" in done.err


def test_secrets_are_masked_and_the_job_keeps_them(queue: Store) -> None:
    environment = {"WANDB_API_KEY": "hunter2", "A": "1"}
    (job,) = queue.jobs.submit(
        [JobSpec(command="HF_TOKEN=hunter2 python x.py", directory="/tmp", environment=environment)]
    )
    for words in (("show", job), ("list",), ("show", job, "--json"), ("list", "--json"), ("top", "--json")):
        result = stoker(*words).out
        assert job in result
        # A program may want to submit the command again as it is.
        assert result.count("hunter2") == ("--json" in words)
    assert "environment  WANDB_API_KEY=*** A=1\n" in stoker("show", job).out
    assert stoker("edit", job, "--env", "A=2").code == 0
    assert queue.jobs.get(job).environment == {"WANDB_API_KEY": "hunter2", "A": "2"}
