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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "there is no URL to notify: write urls"),
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
