"""A rule that is registered from outside works everywhere: `run`, `watch`, queued jobs, `replay`, report and page."""

import contextlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stoker.gpus.recording import RecordingWriter
from tests.support.command import stoker
from tests.support.looks import a_look
from tests.support.page_site import PageSite
from tests.support.work_site import WorkSite

# Acts on GPUs whose memory stays full, whatever they compute.
RULE = """
import sys
from stoker.cli import main
from stoker.rules.registry import RuleType, register
from stoker.rules.rule import Option, Policy, Rule, Verdict
from stoker.units import format_duration, parse_length

class FullPolicy(Policy, frozen=True, kw_only=True):
    window: float = 3600.0
    def in_words(self):
        return f"memory in use for {format_duration(self.window)}"

class FullRule(Rule):
    def __init__(self, policy, begun, look_takes):
        self._policy, self._since = policy, None

    def observe(self, observation):
        full = [a.uuid for a in observation.activities if a.reading is not None and a.reading.memory_used > 0]
        if not full:
            self._since = None
            return Verdict("busy", "no memory is in use")
        self._since = observation.at if self._since is None else self._since
        held = observation.at - self._since
        if held < self._policy.window:
            return Verdict("waiting", "memory is in use", since=self._since, progress=held / self._policy.window)
        return Verdict("full", "the memory stayed in use", "act", "its memory stayed in use", since=self._since,
                       progress=1.0, gpus=tuple(full))

    def due(self):
        return None if self._since is None else self._since + self._policy.window

    def snooze(self, until):
        self._since = None

    def rearm(self, at):
        self._since = None

option = Option("--full-for", "window", "duration", parse_length, "DURATION", "How long", format_duration)
register(RuleType("full", FullPolicy, FullRule, (option,)))
"""
PROGRAM = f"{RULE}\nsys.argv = sys.argv[1:]\nsys.exit(main())"
LOAD = ("stoker", "sim", "load", "--gpu", "0", "--memory", "1GiB", "--utilization", "90%")
SOON = ("--full-for", "400ms", "--every", "100ms")


def with_rule(*arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    """Runs `stoker` where the rule is registered."""
    command = [sys.executable, "-c", PROGRAM, "stoker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GPUS", "sim:2x8GiB")
    monkeypatch.setenv("STOKER_SIM_DIR", str(tmp_path / "sim"))


def test_run_is_stopped_and_its_report_names_the_cause() -> None:
    done = with_rule("run", *SOON, "--grace", "1s", "--", *LOAD)
    assert done.returncode == 124, done.stderr
    assert "the memory stayed in use" in done.stderr
    (run,) = stoker("runs", "--json").json()
    assert (run["ending"], run["stopped_by"], run["verdict"]) == ("full", "full", "full")
    assert run["rule"] == "all GPUs below 1% for 30m; or hung at full utilization for 1h; or memory in use for 0.4s"
    shown = stoker("show", run["id"]).out
    assert "stopped, full" in shown
    assert "# Stopped: its memory stayed in use" in shown


def test_watch_acts_on_the_registered_rule() -> None:
    with subprocess.Popen(LOAD, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdout is not None
        assert "busy 90%" in load.stdout.readline()
        done = with_rule("watch", *SOON, "--gpus", "0", "--then", "exec 'echo $STOKER_EVENT: $STOKER_REASON'")
        load.kill()
    assert (done.returncode, done.stdout) == (124, "full: the memory stayed in use\n"), done.stderr


def test_replay_shows_when_the_registered_rule_would_have_acted(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with contextlib.closing(RecordingWriter(trace)) as writer:
        for minute in range(9):
            writer.append(a_look(0.9, at=60.0 * minute, span=60.0))
    answer = msgspec.json.decode(with_rule("replay", str(trace), "--full-for", "5m", "--json").stdout)
    assert [(firing["verdict"], firing["reason"]) for firing in answer["firings"]] == [
        ("full", "the memory stayed in use")
    ]


def test_queued_job_is_stopped_and_shown_without_the_rule_installed(site: WorkSite) -> None:
    job = site.submit(" ".join(LOAD), gpus=1, policy={"full_window": 0.4, "every": 0.1})
    site.work(prefix=(sys.executable, "-c", PROGRAM))
    found = site.wait_until(job, "failed")
    assert (found.exit_code, found.reason) == (124, "the memory stayed in use")
    assert "# Stopped: its memory stayed in use" in site.stoker("show", job).out
    page = PageSite("serve", "--port", "0", environment=site.environment)
    try:
        with page.client() as client:
            for path in ("/", f"/jobs/{job}"):
                text = client.get(path, headers={"Accept": "text/html"}).text
                assert "stopped: full" in text
                assert "the memory stayed in use" in text
    finally:
        page.end()
