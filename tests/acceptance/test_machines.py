"""`stoker machines` over a real sshd: real installations in a home of its own, real workers, PostgreSQL."""

import getpass
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.queue import JobSpec, Store, init_queue
from stoker.remote.wheels import dependency_wheels
from tests.support.attempts import be_there, start, submit
from tests.support.command import Finished, stoker
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.ssh_machine import SshMachine, new_machine, ssh_machine
from tests.support.waiting import wait_for

__all__ = ["ssh_machine"]

# In the address of the queue.
SECRET = PASSWORD.replace(" ", "%20")


class Lab:
    """A queue in PostgreSQL and a machine that is not part of it yet."""

    def __init__(self, url: str, store: Store, directory: Path) -> None:
        self.url = url
        self.store = store
        self.directory = directory

    def machines(self, *words: str) -> Finished:
        return stoker("machines", *words, environment={"STOKER_QUEUE": self.url}, timeout=250.0)

    def add(self, machine: SshMachine, *words: str, offline: bool = True) -> Finished:
        return self.machines("add", machine.host, "--ssh", machine.ssh, *(["--offline"] if offline else []), *words)

    def submit(self, command: str) -> str:
        [job] = self.store.jobs.submit([JobSpec(command=command, directory="/", policy={"idle": False})])
        return job

    def until(self, flag: str) -> str:
        return self.submit(f"until [ -e {self.directory / flag} ]; do sleep 0.05; done")

    def wait_until(self, job: str, state: str) -> None:
        wait_for(lambda: self.store.jobs.get(job).state == state, named=f"that job {job} is {state}")

    def worker(self) -> str:
        [row] = self.machines("--json").json()
        worker: str = row["worker"]
        return worker


@pytest.fixture
def lab(postgres_url: str, tmp_path: Path) -> Iterator[Lab]:
    with init_queue(postgres_url) as store:
        yield Lab(postgres_url, store, tmp_path)


def test_machine_is_added_used_upgraded_drained_and_removed(lab: Lab, ssh_machine: SshMachine) -> None:
    ssh_machine.has_python().has_uv().start()
    added = lab.add(ssh_machine)
    assert added.code == 0, added.err
    lines = added.out.splitlines()
    assert lines[0].startswith("connected to gpu-box: Linux ")
    assert lines[0].endswith(", uv")
    assert lines[1].startswith("installed Stoker ")
    assert lines[-1] == "gpu-box: 2 GPUs, at work"
    assert_secret_is_kept(ssh_machine, added)

    [row] = lab.machines("--json").json()
    assert (row["host"], row["gpus"], row["engine"], row["state"]) == ("gpu-box", 2, "local", "at work")
    assert row["version"] == stoker("--version").out.split()[-1]
    job = lab.until("flag")
    lab.wait_until(job, "running")
    assert re.search(r"gpu-box +2 +local +\S+ +at work +1 ", lab.machines().out)

    again = lab.add(ssh_machine)
    assert again.code == 0, again.err
    assert "found Stoker" in again.out
    assert "the worker was running" in again.out
    assert lab.worker() == row["worker"], "nothing changed, so nothing was restarted"

    changed = lab.add(ssh_machine, "--", "--cpu-jobs", "1")
    assert changed.code == 0, changed.err
    assert "started the worker" in changed.out
    assert lab.worker() != row["worker"]
    assert "work --cpu-jobs 1" in ssh_machine.run("ps axww")

    assert lab.machines("drain", "gpu-box").out.endswith(": drained\n")
    assert lab.machines("--json").json()[0]["state"] == "drained"
    late = lab.machines("drain", "gpu-box", "--wait", "--timeout", "100ms")
    assert late.code == 124
    assert "1 job on gpu-box had not ended after " in late.err
    assert lab.machines("resume", "gpu-box").code == 0

    refused = lab.machines("remove", "gpu-box")
    assert refused.code == 1
    assert f"1 job on gpu-box would lose the worker ({job}): pass --wait" in refused.err
    assert lab.machines("--json").json()[0]["state"] == "at work", "a refusal changes nothing"
    (lab.directory / "flag").touch()
    removed = lab.machines("remove", "gpu-box", "--wait", "--purge")
    assert removed.code == 0, removed.err
    assert removed.out.endswith("gpu-box: removed\n")
    assert lab.store.jobs.get(job).state == "succeeded"
    assert lab.machines("--json").json() == []
    # The helper that reads the GPUs ends by itself.
    wait_for(lambda: "stoker" not in ssh_machine.run("ps axww").replace(str(lab.directory), ""), named="the end of all")
    left = [path for path in ssh_machine.home.rglob("*") if "stoker" in path.name and "/.cache/" not in str(path)]
    assert {path.name for path in left} <= {"stoker", "stoker.toml"}
    assert not list(ssh_machine.home.rglob("*.env"))


def assert_secret_is_kept(machine: SshMachine, added: Finished) -> None:
    """Only the file for the worker has the password, and only its owner can read that."""
    environment = machine.home / ".config/stoker/worker-gpu-box.env"
    assert SECRET in environment.read_text()
    assert environment.stat().st_mode & 0o777 == 0o600
    written = [path for path in machine.home.rglob("*") if path.is_file() and "/venvs/" not in str(path)]
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == [environment]
    assert SECRET not in machine.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert SECRET not in added.out + added.err


def test_pip_installs_from_the_index_of_the_machine(lab: Lab, ssh_machine: SshMachine) -> None:
    wheels = lab.directory / "index"
    wheels.mkdir()
    for wheel in dependency_wheels(["postgres", "report"]):
        (wheels / wheel.name).write_bytes(wheel.content)
    ssh_machine.environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_NO_CACHE_DIR": "1"}
    ssh_machine.has_python().start()
    added = lab.add(ssh_machine, offline=False)
    assert added.code == 0, added.err
    assert added.out.splitlines()[0].endswith(", pip")
    assert added.out.endswith("gpu-box: 2 GPUs, at work\n")
    job = lab.until("flag")
    lab.wait_until(job, "running")
    stopped = lab.machines("remove", "gpu-box", "--now")
    assert stopped.code == 0, stopped.err
    (lab.directory / "flag").touch()
    lab.wait_until(job, "succeeded")  # its supervisor delivers the outcome


SYSTEMCTL = """#!/bin/sh
# Runs units as systemd would, as far as these tests look.
echo "$@" >> STATE/calls
shift  # --user
unit=$HOME/.config/systemd/user/stoker-worker-gpu-box.service
case $1 in
  is-active) [ -e STATE/main ] && kill -0 $(cat STATE/main) ;;
  restart)
    set -a; . $(sed -n 's/^EnvironmentFile=//p' $unit); set +a
    setsid $(sed -n 's/^ExecStart=//p' $unit) >STATE/journal 2>&1 </dev/null & echo $! >STATE/main ;;
  disable)
    pid=$(cat STATE/main); kill $pid
    for _ in $(seq 200); do grep -qs '^State:.[^ZX]' /proc/$pid/status || break; sleep 0.05; done ;;
esac
"""
LOGINCTL = """#!/bin/sh
case $* in
  *enable-linger*) touch STATE/lingers ;;
  *show-user*) [ -e STATE/lingers ] && echo Linger=yes || echo Linger=no ;;
esac
"""


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that several machines have: the second of them finds Stoker there."""
    return tmp_path_factory.mktemp("shared-home")


@pytest.fixture
def sharing_machine(tmp_path: Path, shared_home: Path) -> Iterator[SshMachine]:
    with new_machine(tmp_path, home=shared_home) as machine:
        yield machine.has_python().has_uv()


def test_worker_is_a_systemd_unit_where_the_user_has_an_instance(lab: Lab, sharing_machine: SshMachine) -> None:
    machine, state = sharing_machine, sharing_machine.directory
    machine.program("systemctl", SYSTEMCTL.replace("STATE", str(state)))
    machine.program("loginctl", "#!/bin/sh\necho Linger=no\n")
    machine.start()
    refused = lab.add(machine)
    assert refused.code == 1
    assert "would end with your last login on gpu-box: run `sudo loginctl enable-linger" in refused.err
    assert "restart" not in (state / "calls").read_text()

    machine.program("loginctl", LOGINCTL.replace("STATE", str(state)))
    added = lab.add(machine, "--", "--grace", "5s")
    assert added.code == 0, added.err
    assert "found Stoker" in added.out
    assert "started the worker by systemd, as stoker-worker-gpu-box.service" in added.out
    assert added.out.endswith("gpu-box: 2 GPUs, at work\n")
    unit = "stoker-worker-gpu-box.service"
    enabled = f"--user daemon-reload\n--user enable --quiet {unit}\n--user restart {unit}\n"
    assert enabled in (state / "calls").read_text()
    text = (machine.home / ".config/systemd/user" / unit).read_text()
    assert re.search(r"^ExecStart=\S+/bin/stoker work --grace 5s$", text, re.MULTILINE)
    assert SECRET not in text

    removed = lab.machines("remove", "gpu-box")
    assert removed.code == 0, removed.err
    assert f"--user disable --quiet --now {unit}\n" in (state / "calls").read_text()
    assert not list((machine.home / ".config/systemd/user").iterdir())
    assert list((machine.home / ".local/share/stoker/venvs").iterdir()), "kept without --purge"
    view = lab.store.workers.all()[-1].view
    assert (view.left, view.removed) == (True, True)


def test_queue_that_the_machine_cannot_reach_is_reported(
    lab: Lab, sharing_machine: SshMachine, postgres_server: PostgresServer
) -> None:
    sharing_machine.start(("-t", "tmpfs", "none", str(postgres_server.directory)))
    done = lab.add(sharing_machine)
    assert done.code == 1
    assert "gpu-box cannot use the queue: the queue postgresql://stoker@/" in done.err
    assert "its address names this machine itself: pass --queue with an address that is valid on both" in done.err
    assert SECRET not in done.err
    assert not list(sharing_machine.home.rglob("*.env"))
    assert lab.machines("--json").json() == []


def test_worker_that_cannot_start_says_why(lab: Lab, sharing_machine: SshMachine) -> None:
    sharing_machine.start()
    done = lab.add(sharing_machine, "--", "--gpus", "0,9")
    assert done.code == 1
    assert re.search(r"the worker on gpu-box ended right after its start: .*9", done.err), done.err
    assert lab.machines("remove", f"{getpass.getuser()}@{sharing_machine.host}", "--ssh", sharing_machine.ssh).code == 0


class TestConnection:
    def test_host_key_that_is_not_known(self, lab: Lab, ssh_machine: SshMachine) -> None:
        ssh_machine.start()
        ssh_machine.known_hosts.unlink()
        self.refused(lab, ssh_machine, "the host key of gpu-box is not known here: run `ssh gpu-box` once")

    def test_host_key_that_has_changed(self, lab: Lab, ssh_machine: SshMachine) -> None:
        ssh_machine.start()
        ssh_machine.trust(ssh_machine.key.with_suffix(".pub").read_text())
        self.refused(lab, ssh_machine, "the host key of gpu-box is not the one in known_hosts")

    def test_login_that_needs_a_password(self, lab: Lab, ssh_machine: SshMachine) -> None:
        ssh_machine.start()
        ssh_machine.key.unlink()
        self.refused(lab, ssh_machine, "gpu-box wants a password or another key: `ssh-copy-id gpu-box`")

    def test_machine_that_does_not_answer(self, lab: Lab, ssh_machine: SshMachine) -> None:
        ssh_machine.start()
        ssh_machine.close()
        self.refused(lab, ssh_machine, "gpu-box cannot be reached: ", "Connection refused; `ssh gpu-box` must work")

    def test_machine_without_python(self, lab: Lab, ssh_machine: SshMachine) -> None:
        for name in ("sh", "head"):
            (ssh_machine.programs / name).symlink_to(str(shutil.which(name)))
        ssh_machine.start(path=str(ssh_machine.programs))
        self.refused(lab, ssh_machine, "there is no python3 on gpu-box: install Python 3.11 or newer there")

    def test_machine_with_an_old_python(self, lab: Lab, ssh_machine: SshMachine) -> None:
        for name in ("sh", "head"):
            (ssh_machine.programs / name).symlink_to(str(shutil.which(name)))
        old = '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2\nexit 1\n'
        ssh_machine.program("python3", old)
        ssh_machine.start(path=str(ssh_machine.programs))
        self.refused(lab, ssh_machine, "gpu-box has Python 3.9.2 (", "), and Stoker needs Python 3.11 or newer")

    def test_machine_without_space(self, lab: Lab, ssh_machine: SshMachine) -> None:
        ssh_machine.has_python().start(("-t", "tmpfs", "-o", "size=8m", "none", str(ssh_machine.home)))
        self.refused(lab, ssh_machine, "gpu-box has 8 MiB free for ", "Stoker needs 150 MiB, so free some space")

    def test_disk_that_fills_up_during_the_installation(self, lab: Lab, ssh_machine: SshMachine) -> None:
        """A quota is not seen beforehand. The wheels have room, what is in them has not."""
        ssh_machine.has_python().has_uv()
        small = str(ssh_machine.home / ".local/share/stoker/venvs")
        Path(small).mkdir(parents=True)
        ssh_machine.start(("-t", "tmpfs", "-o", "size=20m", "none", small))
        self.refused(lab, ssh_machine, "cannot install Stoker on gpu-box: ", "; free some space there, and repeat this")
        assert ssh_machine.run(f"ls {small}") == "", "what a failure leaves is deleted"

    def test_index_that_cannot_be_reached(self, lab: Lab, ssh_machine: SshMachine) -> None:
        ssh_machine.environment = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(lab.directory / "empty")}
        ssh_machine.has_python().has_uv().start()
        done = lab.add(ssh_machine, offline=False)
        assert done.code == 1
        assert "--offline sends the packages of this installation" in done.err

    def test_login_shell_that_prints_something(self, lab: Lab, ssh_machine: SshMachine) -> None:
        """As with `echo` in a start-up file: it is not taken for an answer."""
        ssh_machine.program("sh", '#!/bin/sh\necho "Welcome!"\nexec /bin/sh "$@"\n')
        ssh_machine.start(path=f"{ssh_machine.programs}:/nowhere")
        self.refused(lab, ssh_machine, "there is no python3 on gpu-box")

    def refused(self, lab: Lab, machine: SshMachine, *parts: str) -> None:
        done = lab.add(machine)
        assert done.code == 1, done.err
        assert len(done.err.splitlines()) == 1, done.err
        assert all(part in done.err for part in parts), done.err


def test_queue_in_a_file_is_refused(tmp_path: Path) -> None:
    init_queue().close()
    done = stoker("machines", "add", "gpu-box")
    assert done.code == 2
    assert "queue.db is a file, which other machines cannot share" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("add", "-oProxyCommand=true"), "No such option"),
        (("add", "two words"), "'two words' is not a machine: write it as for ssh, user@host"),
        (("add", "gpu-box", "--ssh", "'"), '--ssh: "\'" cannot be split into words'),
        (("add", "gpu-box", "--ssh", "no-such-ssh"), "no-such-ssh cannot be run: No such file or directory"),
        (("add", "gpu-box", "--", "--cpu-job", "1"), "No such option '--cpu-job'"),
        (("add", "gpu-box", "--", "--queue=q.db"), "--queue cannot be given to the worker"),
        (("add", "gpu-box", "--", "--until-empty"), "--until-empty cannot be given to the worker"),
        (("drain", "nowhere"), "there is no worker 'nowhere' in postgresql://"),
        (("resume", "nowhere"), "there is no worker 'nowhere' in postgresql://"),
        (("remove", "nowhere"), "there is no worker 'nowhere' in postgresql://"),
        (("drain", "gpu-box", "--timeout", "1s"), "--timeout needs --wait"),
        (("remove", "gpu-box", "--now", "--purge"), "--now and --purge exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_one_sentence(lab: Lab, words: tuple[str, ...], message: str) -> None:
    done = lab.machines(*words)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_dry_run_prints_the_steps_and_connects_to_nothing(lab: Lab) -> None:
    done = lab.machines("add", "gpu-box", "--ssh", "false", "--dry-run", "--", "--grace", "5s")
    assert done.code == 0, done.err
    assert "would start `stoker work --grace 5s` as a systemd user unit" in done.out
    assert SECRET not in done.out


def test_machine_that_is_gone_for_good_is_removed_without_a_connection(lab: Lab) -> None:
    be_there(lab.store)
    [row] = lab.machines("--json").json()
    done = lab.machines("remove", row["host"], "--gone")
    assert done.code == 0, done.err
    assert lab.machines("--json").json() == []
    be_there(lab.store)
    assert lab.machines("--json").json()[0]["state"] == "drained", "a worker that still runs is not hidden"


def test_jobs_are_listed_with_the_machine_that_runs_them(lab: Lab) -> None:
    be_there(lab.store)
    [job] = submit(lab.store, "true", directory="/")
    start(lab.store, job, "GPU-0")
    [row] = lab.machines("--json").json()
    assert row["jobs"] == [job]
