"""`--then`: what is done after a rule has stopped a run or a queued job."""

from pathlib import Path

import pytest

from tests.support.command import stoker
from tests.support.http_receiver import Receiver
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

SOON = ("--for", "300ms", "--every", "100ms", "--after", "0")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GPUS", "sim:1")
    monkeypatch.setenv("STOKER_SIM_DIR", str(tmp_path / "sim"))


@pytest.mark.usefixtures("machine")
def test_run_acts_in_order_after_the_stop_and_keeps_its_exit_code(tmp_path: Path) -> None:
    first = f"exec 'echo $STOKER_EVENT $STOKER_RULE > {tmp_path}/first'"
    done = stoker("run", *SOON, "--then", first, "--then", "exec", "exit 3", "--", "sleep", "60")
    assert done.code == 124
    assert (tmp_path / "first").read_text() == "idle all GPUs below 1% for 0.3s\n"
    assert "the command of exec ended with code 3" in done.err


@pytest.mark.usefixtures("machine")
def test_warning_of_a_run_is_sent_before_its_stop() -> None:
    with Receiver().listening() as receiver:
        notify = f"notify json://127.0.0.1:{receiver.port}/s3cret"
        window = ("--for", "6s", "--every", "200ms", "--after", "0", "--warn-at", "5%")
        done = stoker("run", *window, "--then", notify, "--", "sleep", "60")
        messages = [asked.json()["message"] for asked in receiver.asked]
    assert done.code == 124
    assert "s3cret" not in done.err
    warning, stop = messages
    assert "unless it works or is snoozed: stop the job" in warning
    assert stop.startswith("GPU 0 stayed below 1% for 6s")


@pytest.mark.usefixtures("machine")
def test_actions_do_not_run_when_the_command_ends_by_itself(tmp_path: Path) -> None:
    assert stoker("run", *SOON, "--then", f"exec 'touch {tmp_path}/acted'", "--", "true").code == 0
    assert stoker("run", *SOON, "--dry-run", "--then", f"exec 'touch {tmp_path}/acted'", "--", "sleep", "1").code == 0
    assert not (tmp_path / "acted").exists()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("action", "reason"),
    [("fly", "'fly' is not an action: use 'stop PID'"), ("exec 'no-such-program'", "there is no no-such-program here")],
)
def test_invalid_action_is_refused_before_the_start(tmp_path: Path, action: str, reason: str) -> None:
    done = stoker("run", "--then", action, "--", "touch", f"{tmp_path}/started")
    assert (done.code, reason in done.err) == (125, True), done.err
    assert not (tmp_path / "started").exists()


def test_actions_run_after_a_rule_stops_a_queued_job(site: WorkSite, tmp_path: Path) -> None:
    done = site.stoker(
        "submit", "--for", "300ms", "--idle-every", "100ms", "--idle-after", "0",
        "--then", "exec", f"echo $STOKER_EVENT > {tmp_path}/acted", "--", "sleep", "600",
    )  # fmt: skip
    assert done.code == 0, done.err
    (job,) = site.store.jobs.find()
    assert job.then == (f"exec echo $STOKER_EVENT > {tmp_path}/acted",)
    site.work()
    site.wait_until(job.id, "failed")
    wait_for(lambda: (tmp_path / "acted").exists() and (tmp_path / "acted").read_text() == "idle\n", named="the action")


def test_actions_of_a_job_are_edited_and_never_shown_with_their_arguments(site: WorkSite) -> None:
    site.stoker("submit", "--then", "notify json://host/s3cret", "--then", "shutdown", "--", "true")
    (job,) = site.store.jobs.find()
    assert "notify" in site.stoker("show", job.id).out
    assert "s3cret" not in site.stoker("show", job.id).out + site.stoker("list", "--json").out
    assert site.stoker("edit", job.id, "--then", "none").code == 0
    assert site.store.jobs.get(job.id).then == ()
    assert "'fly' is not an action" in site.stoker("submit", "--then", "fly", "--", "true").err
