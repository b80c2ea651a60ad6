"""`stoker up`: page, worker and queue in one command."""

import os
import re
import signal
from pathlib import Path

import pytest

from stoker.procfs import is_alive
from stoker.queue import init_queue, open_queue
from tests.support.command import stoker
from tests.support.descendants import descendants
from tests.support.page_site import page_site
from tests.support.waiting import wait_for


def test_job_submitted_on_the_page_runs(tmp_path: Path) -> None:
    with page_site("up", "--port", "0", STOKER_GPUS=f"sim:1@{tmp_path}/gpus") as site, site.client() as client:
        made = client.post("/api/v1/jobs", json={"command": "echo hello from GPU", "directory": str(tmp_path)})
        assert made.status_code == 201, made.text
        job = made.json()["jobs"][0]["id"]
        wait_for(lambda: client.get(f"/api/v1/jobs/{job}").json()["state"] == "succeeded")
        assert "hello from GPU" in client.get(f"/api/v1/jobs/{job}/attempts/1/log").text
        log = tmp_path / "stoker-home" / "work.log"
        wait_for(lambda: f"{job}: started on GPU 0" in log.read_text(), named="the worker's word on the start")
        assert log.stat().st_mode & 0o777 == 0o600
        worker = descendants(site.process.pid)
        assert worker
        assert site.end() == 0
    wait_for(lambda: not any(map(is_alive, worker)), named="the end of the worker")


def test_machine_without_gpus_gets_a_labelled_demo_that_leaves_nothing(tmp_path: Path) -> None:
    # The demo ignores the notification settings, so an invalid URL does not matter.
    config = tmp_path / "stoker.toml"
    config.write_text('[notify]\nurls = ["nonsense://"]\n')
    settings = {"STOKER_ROOT": str(tmp_path / "no-gpus"), "STOKER_CONFIG": str(config)}
    with page_site("up", "--port", "0", **settings) as site, site.client() as client:
        assert any("simulated" in line for line in site.said)
        wait_for(lambda: len(_running(client.get("/api/v1/status").json())) >= 3, named="jobs at work")
        wait_for(lambda: "These GPUs are simulated" in client.get("/").text, named="the notice of simulated GPUs")
        site.process.send_signal(signal.SIGINT)
        assert site.process.wait(60) == 0
    home = tmp_path / "stoker-home" / "demo"
    with open_queue(str(home / "queue.db")) as store:
        assert store.attempts.running() == []
    wait_for(lambda: not _mentioning(str(home)), named="the end of its last process")


def test_database_password_is_used_and_never_shown(tmp_path: Path, postgres_url: str) -> None:
    init_queue(postgres_url).close()
    password = re.search(r":([^:@]+)@", postgres_url)
    assert password is not None
    # There is no state directory yet.
    gpus = f"sim:1@{tmp_path}/gpus"
    with page_site("up", "--port", "0", "--queue", postgres_url, STOKER_GPUS=gpus) as site, site.client() as client:
        wait_for(lambda: client.get("/api/v1/workers").json()["items"], named="the worker")
        ids = [site.process.pid, *(one.pid for one in descendants(site.process.pid))]
        shown = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in ids]
        assert len(ids) >= 3
        assert "--queue postgresql://" in shown[0]
        assert not [line for line in shown if password[1] in line]
        assert site.end() == 0


def test_demo_on_a_queue_with_real_jobs_is_refused(tmp_path: Path) -> None:
    done = stoker("up", "--demo", "--port", "0", "--queue", str(tmp_path / "queue.db"))
    assert done.code == 2
    assert done.err == "stoker: --demo uses a separate queue: leave out --demo, or --queue\n"


@pytest.mark.parametrize("where", ["environment", "file"])
def test_explicit_queue_never_starts_a_demo(tmp_path: Path, where: str) -> None:
    queue = "postgresql://nobody@127.0.0.1:1/none"
    config = tmp_path / "stoker.toml"
    config.write_text(f'queue = "{queue}"\n' if where == "file" else "")
    environment = {"STOKER_ROOT": str(tmp_path / "no-gpus"), "STOKER_CONFIG": str(config)}
    if where == "environment":
        environment["STOKER_QUEUE"] = queue
    done = stoker("up", "--port", "0", environment=environment)
    assert done.code != 0
    assert "simulated" not in done.out
    assert "127.0.0.1" in done.err


def _running(snapshot: dict[str, list[object]]) -> list[object]:
    return snapshot.get("running", [])  # there is none before the queue was read for the first time


def _mentioning(text: str) -> list[str]:
    """The processes whose environment or command has this in it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.name != str(os.getpid()) and text.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found
