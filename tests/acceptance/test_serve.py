"""`stoker serve` as typed."""

import contextlib
import logging
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from stoker.cli.verbs.serve import PrivateLog, delayed_interrupts
from stoker.queue import JobSpec, Store, open_queue
from tests.support.command import stoker
from tests.support.page_site import page_site
from tests.support.waiting import wait_for

# In seconds, for answers of a server that may be held up.
PATIENCE = 60.0


def test_link_logs_a_device_in_permanently(tmp_path: Path) -> None:
    with page_site("serve", "--port", "0") as site, httpx.Client(base_url=site.address, timeout=PATIENCE) as browser:
        assert browser.get("/", headers={"Accept": "text/html"}).status_code == 401
        entered = browser.post("/login", data={"token": site.token}, headers={"Origin": site.address})
        assert entered.status_code in {200, 204, 303}
        shown = browser.get("/")
        assert shown.status_code == 200
        assert "Stoker" in shown.text
        assert site.token not in "".join(str(cookie.value) for cookie in browser.cookies.jar)
    with page_site("serve", "--port", "0") as again:
        assert again.token == site.token


def test_server_listens_on_loopback_by_default() -> None:
    with page_site("serve", "--port", "0") as site:
        assert site.address.startswith("http://127.0.0.1:")
        site.hear("Only this machine can reach it")
        port = int(site.address.rpartition(":")[2])
        # Its own alone: at another address of this machine, others may have the same port.
        own = psutil.Process(site.process.pid).net_connections("tcp")
        assert [one.laddr for one in own if one.status == psutil.CONN_LISTEN] == [("127.0.0.1", port)]


def test_qr_code_is_printed_when_the_address_is_reachable(tmp_path: Path) -> None:
    """Not into a file: there the link is enough."""
    with page_site("serve", "--port", "0", "--url", "https://stoker.example.org") as site:
        assert site.address == "https://stoker.example.org"


def test_job_submitted_elsewhere_is_on_the_page_within_a_second(tmp_path: Path) -> None:
    with page_site("serve", "--port", "0") as site, site.client() as client, client.stream("GET", "/live") as live:
        lines = live.iter_lines()
        for line in lines:
            if line == "event: waiting":
                break
        with open_queue(None) as store:
            # A machine that is busy may hold up one of them or two.
            assert any(_seconds_until_shown(store, f"from-elsewhere-{number}", lines) < 1.0 for number in range(5))


def _seconds_until_shown(store: Store, name: str, lines: Iterator[str]) -> float:
    begun = time.monotonic()
    store.jobs.submit([JobSpec(command="true", name=name)])
    assert next(line for line in lines if name in line)
    return time.monotonic() - begun


def test_server_supports_tls(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )  # fmt: skip
    key.chmod(0o644)
    trusting = ssl.create_default_context(cafile=str(cert))
    with page_site("serve", "--port", "0", "--cert", str(cert), "--key", str(key)) as site:
        assert site.address.startswith("https://")
        result = f"stoker: other users of this machine can read the key {key}: run `chmod 600 {key}`\n"
        assert site.said.count(result) == 1
        with httpx.Client(base_url=site.address, verify=trusting, timeout=PATIENCE) as client:
            wait_for(lambda: client.get("/healthz").status_code == 200)
            entered = client.post("/login", data={"token": site.token}, headers={"Origin": site.address})
        assert "Secure" in entered.headers["Set-Cookie"]
        assert entered.headers["Set-Cookie"].startswith("__Host-")


def test_server_waits_for_an_unreachable_queue_and_reports_it(tmp_path: Path) -> None:
    with page_site("serve", "--port", "0") as site, site.client() as client:
        wait_for(lambda: client.get("/healthz").status_code == 200)
        queue = next((tmp_path / "stoker-home").glob("*.db"))
        queue.rename(queue.with_suffix(".away"))
        wait_for(lambda: client.get("/api/v1/jobs").status_code == 503)
        queue.with_suffix(".away").rename(queue)
        wait_for(lambda: client.get("/api/v1/jobs").status_code == 200)


def test_signal_ends_the_server_despite_open_event_streams() -> None:
    with page_site("serve", "--port", "0") as site, site.client() as client, client.stream("GET", "/live") as live:
        assert live.status_code == 200
        assert site.end() == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "70000"], "70000"),
        (["--host", "192.0.2.7"], "cannot listen on 192.0.2.7"),
        (["--host", "no such host"], "no such address"),
        (["--cert", "missing.pem"], "--cert and --key must be given together"),
        (["--cert", "missing.pem", "--key", "missing.pem"], "cannot read missing.pem"),
        (["--cert", "pyproject.toml", "--key", "pyproject.toml"], "not a PEM certificate"),
        (["--url", "stoker.example.org"], "write it like https://"),
        (["--url", "https:///"], "write it like https://"),
        (["--url", "https://x.example/stoker"], "below a path of another site"),
        (["--queue", "postgresql://nobody@127.0.0.1:1/none"], "127.0.0.1"),
    ],
)
def test_invalid_input_is_reported_and_nothing_listens(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = stoker("serve", *arguments)
    assert not (tmp_path / "stoker-home" / "queue.db").exists()
    assert done.code != 0
    assert sentence in done.err
    assert done.err.count("\n") <= 3
    assert "Traceback" not in done.err


def test_port_in_use_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = stoker("serve", "--port", str(taken.getsockname()[1]))
    assert done.code != 0
    assert "choose another --port" in done.err


def test_listen_address_can_come_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "stoker.toml"
    config.write_text('[web]\nport = 0\nurl = "https://stoker.example.org/"\n')
    with page_site("--config", str(config), "serve") as site:
        assert site.address == "https://stoker.example.org"
    for line, sentence in (
        ("prot = 0", "'prot'"),
        ('queue = "x.db"', "[web] has no key 'queue'"),
        ('home = "x"', "'home'"),
    ):
        config.write_text(f"[web]\n{line}\n")
        done = stoker("--config", str(config), "serve", "--port", "0")
        assert done.code != 0
        assert sentence in done.err


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `pip install stoker`, without the extra."""
    program = "import sys; sys.modules['fastapi'] = None; from stoker.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", "--port", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install 'stoker[web]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_rotated_log_is_private(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    before = os.umask(0o022)
    try:
        log = PrivateLog(path, "%(message)s", size=20)
        for number in range(4):
            log.handle(logging.makeLogRecord({"msg": f"a line that is long {number}"}))
        log.close()
    finally:
        os.umask(before)
    assert {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.glob("access.log*")} == dict.fromkeys(
        ["access.log", "access.log.1", "access.log.2"], 0o600
    )


def test_log_on_a_full_disk_prints_nothing_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    log = PrivateLog(Path("/dev/full"), "%(message)s")
    log.handle(logging.makeLogRecord({"msg": "a line"}))
    with contextlib.suppress(OSError):  # what could not be written cannot be written now either
        log.close()
    assert capfd.readouterr() == ("", "")


def test_invalid_requests_print_nothing_on_the_terminal(tmp_path: Path) -> None:
    with page_site("serve", "--port", "0") as site:
        host, _, port = site.address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as stranger:
            stranger.sendall(b"\x1b[31mGARBAGE\r\n\r\n")
            assert b"400" in stranger.recv(4096)
        assert site.end() == 0
        assert not any("Invalid" in line or "GARBAGE" in line for line in site.said)
    assert "Invalid HTTP request" in (tmp_path / "stoker-home" / "page.log").read_text()


def test_interrupt_during_the_import_of_the_server_takes_effect_after_it() -> None:
    imported: list[str] = []

    def load() -> None:
        with delayed_interrupts():
            signal.raise_signal(signal.SIGINT)
            imported.append("server")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert imported
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
