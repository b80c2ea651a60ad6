"""`stoker notify` as typed, with the URLs in stoker.toml."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from stoker.queue import Store
from tests.support.command import stoker, stoker_command
from tests.support.http_receiver import Answer, Receiver
from tests.support.queue_jobs import end, submit
from tests.support.waiting import wait_for


def configure(text: str) -> Path:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "stoker" / "stoker.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)  # a file readable by others is reported
    path.write_text(text)
    return path


def hook_url(hook: Receiver) -> str:
    """With more time for an answer than apprise gives by itself: who answers may be held up."""
    return f"json://127.0.0.1:{hook.port}/s3cret?cto=60&rto=60"


def titles(hook: Receiver) -> set[str]:
    return {asked.json()["title"] for asked in hook.asked}


def test_failed_job_is_notified_until_the_verb_is_stopped(queue: Store, tmp_path: Path) -> None:
    with Receiver().listening() as hook:
        configure(f'[notify]\nurls = ["{hook_url(hook)}"]\nlink = "https://gpu-box:7865"\n')
        log = tmp_path / "log"
        with log.open("wb") as out:
            running = subprocess.Popen([stoker_command(), "notify"], stdout=out, stderr=out)
        try:
            (job,) = submit(queue, "train")
            end(queue, job)
            both = {"Stoker: job failed: train", "Stoker: the queue is empty"}
            wait_for(lambda: titles(hook) >= both, named="both messages")
        finally:
            running.send_signal(signal.SIGTERM)
            code = running.wait(timeout=60)
    result = {asked.json()["title"]: asked.json()["message"] for asked in hook.asked}
    assert result["Stoker: job failed: train"].endswith(f"https://gpu-box:7865/jobs/{job}")
    assert code == 0
    said = log.read_text()
    assert re.fullmatch(r"\d\d:\d\d:\d\d notifying 1 URL of: failed, stopped, .*\n", said)


def test_failed_url_of_a_test_message_is_reported_without_secrets() -> None:
    with Receiver().listening() as good, Receiver(Answer(401)).listening() as bad:
        urls = f'["{hook_url(good)}", "{hook_url(bad)}", "nonsense://s3cret"]'
        configure(f"[notify]\nurls = {urls}\n")
        done = stoker("notify", "--test")
        assert len(good.asked) == 1
    assert done.code == 1
    assert done.out == "URL 1 of 3 (json://): sent\n"
    assert re.search(r"stoker: URL 2 of 3: the message by json:// was not delivered.*401", done.err)
    assert "URL 3 of 3 (nonsense://…) is not a URL that apprise understands" in done.err
    assert "s3cret" not in done.out + done.err


def test_test_message_without_a_url_says_where_to_write_one() -> None:
    done = stoker("notify", "--test")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "there is no URL to notify: write urls" in done.err


def test_job_submitted_with_notify_is_reported_by_a_notifier_without_settings(queue: Store, tmp_path: Path) -> None:
    with Receiver().listening() as hook:
        url = hook_url(hook)
        job = stoker("submit", "--notify", f"failed:{url}", "--", "true").out.strip()
        shown = stoker("show", job).out + stoker("show", job, "--json").out + stoker("list", "--json").out
        assert "failed:json://***" in shown
        with (tmp_path / "log").open("wb") as log:
            running = subprocess.Popen([stoker_command(), "notify"], stdout=log, stderr=log)
        try:
            (started,) = [queue.attempts.claim([job], "w", [], 600.0)]
            assert started is not None
            # Also while it runs.
            done = stoker("edit", job, "--notify", f"{url}", "--notify", "done")
            assert (done.code, "give the jobs one with --group" in done.err) == (2, True)
            assert stoker("edit", job, "--notify", url).out == f"true ({job}): edited (notify)\n"
            assert stoker("edit", job, "--priority", "3").code == 1
            assert queue.attempts.finish(started.id, "succeeded", 0, "")
            wait_for(lambda: hook.asked, named="the message")
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(timeout=60)
    (sent,) = [asked.json() for asked in hook.asked]
    assert (sent["title"], sent["type"]) == ("Stoker: job succeeded: true", "success")
    assert "s3cret" not in shown + (tmp_path / "log").read_text()


def test_group_is_marked_by_submit_and_edit_and_shown(queue: Store) -> None:
    jobs = stoker("submit", "--group", "night", "--notify", "done", "--sweep", "seed=1..2", "--", "true").out.split()
    assert queue.groups.get("night").notify == ("done",)
    assert "night: 0 of 2 done; notify: done" in stoker("show", "night").out
    assert stoker("edit", "night", "--notify", "none").code == 0
    assert queue.groups.get("night").notify == queue.jobs.get(jobs[0]).notify == ()
    assert stoker("edit", jobs[0], "--notify", "done", "--notify", "failed").code == 0
    assert queue.groups.get("night").notify == ("done",)
    assert [queue.jobs.get(job).notify for job in jobs] == [("failed", "done"), ("done",)]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("fail", "there is no event 'fail' of a job: did you mean 'failed'?"),
        ("sometimes:json://s3cret", "there is no event 'sometimes' of a job"),
        ("end:s3cret", "this is not a URL: write it like"),
        ("nonsense://s3cret", "this (nonsense://…) is not a URL that apprise understands"),
        ("done", "'done' is the end of a group: give the jobs one with --group, or write end"),
    ],
)
def test_invalid_notification_is_refused_at_submission(queue: Store, entry: str, sentence: str) -> None:
    done = stoker("submit", "--notify", entry, "--", "true")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert sentence in done.err
    assert "s3cret" not in done.err
    assert queue.jobs.find() == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[notify]\nevents = ["fail"]\n',
            r"stoker\.toml: \[notify\] events: there is no event 'fail': use failed, stopped",
        ),
        ('[notify]\nunknown-after = "soon"\n', r"stoker\.toml: \[notify\] unknown-after: 'soon' is not a duration"),
        ('[notify]\nlink = "gpu-box"\n', r"stoker\.toml: \[notify\] link: this is not the URL of the page"),
        ('[notify]\nurl = "json://s3cret"\n', r"stoker\.toml: \[notify\] has no key 'url'"),
        ('[notify]\nurls = "json://s3cret"\n', r"stoker\.toml: \[notify\] urls: expected"),
    ],
)
def test_invalid_settings_are_reported(text: str, sentence: str) -> None:
    configure(text)
    done = stoker("notify")
    assert done.code == 2
    assert re.search(sentence, done.err)
    assert done.err.count("\n") == 1
    assert "s3cret" not in done.err
