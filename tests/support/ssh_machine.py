"""Another machine behind a real sshd on loopback: its own name, processes, home and PATH, in private namespaces."""

import contextlib
import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.scripts import REPOSITORY
from tests.support.waiting import wait_for

SSHD = Path("/usr/sbin/sshd")
# What a machine has besides what a test puts there.
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


class SshMachine:
    """A machine that the current user can log in to by `ssh -F CONFIG gpu-box`."""

    def __init__(self, directory: Path, host: str = "gpu-box", home: Path | None = None) -> None:
        self.directory = directory / f"machine-{host}"
        self.host = host
        self.home = home or self.directory / "home"
        self.programs = self.directory / "bin"
        """First in its PATH."""
        for place in (self.home, self.programs):
            place.mkdir(parents=True, exist_ok=True)
        self.config = self.directory / "ssh_config"
        self.environment: dict[str, str] = {}
        """For its logins."""
        self.known_hosts = self.directory / "known_hosts"
        self.key = self.directory / "client_key"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        for key in (self.key, self.directory / "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))

    @property
    def ssh(self) -> str:
        """For `--ssh`."""
        return f"ssh -F {shlex.quote(str(self.config))}"

    def program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def has_python(self) -> "SshMachine":
        """The Python of these tests as its own."""
        (self.programs / "python3").symlink_to(Path(sys.executable).resolve())
        return self

    def has_uv(self) -> "SshMachine":
        """Where uv's installer puts it, which is not in the PATH of a login over ssh."""
        found = REPOSITORY / ".tools/bin/uv"
        program = found if found.exists() else Path(shutil.which("uv") or "")
        place = self.home / ".local/bin"
        place.mkdir(parents=True, exist_ok=True)
        if not (place / "uv").exists():
            (place / "uv").symlink_to(program)
        return self

    def has_settings(self, text: str) -> "SshMachine":
        place = self.home / ".config/stoker/stoker.toml"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return self

    def start(self, *mounts: Sequence[str], path: str | None = None) -> "SshMachine":
        """`mounts`: arguments of mount that change what only this machine sees."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        host_key = self.directory / "host_key"
        variables = {"HOME": str(self.home), "PATH": path or f"{self.programs}:{SYSTEM_PATH}", **self.environment}
        (self.directory / "authorized_keys").write_bytes(self.key.with_suffix(".pub").read_bytes())
        (self.directory / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1:{self.port}\nHostKey {host_key}\nPidFile none\nStrictModes no\nUsePAM no\n"
            f"AuthorizedKeysFile {self.directory / 'authorized_keys'}\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPrintMotd no\n"
            f"SetEnv {' '.join(shlex.quote(f'{name}={value}') for name, value in variables.items())}\n"
        )
        self.config.write_text(
            f"Host {self.host}\n  HostName 127.0.0.1\n  Port {self.port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {self.key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )
        self.trust(host_key.with_suffix(".pub").read_text())
        # sshd wants a directory below /run, and the machine must not see a systemd that runs here.
        inside = ["mount -t tmpfs none /run", "mkdir -m 755 /run/sshd", f"hostname {self.host}"]
        inside += [shlex.join(["mount", *mount]) for mount in mounts]
        inside.append(f"exec {SSHD} -D -e -f {shlex.quote(str(self.directory / 'sshd_config'))}")
        with (self.directory / "sshd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("sh", "-e", "-c", "; ".join(inside)),
                ],
                env={name: value for name, value in os.environ.items() if not name.startswith("STOKER_")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(self._answers, named=f"sshd's start (see {self.directory / 'sshd.log'})")
        return self

    def trust(self, public_key: str) -> None:
        kind, key, *_ = public_key.split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def run(self, command: str) -> str:
        """What a command prints there."""
        return _run(*shlex.split(self.ssh), "-o", "BatchMode=yes", self.host, command)

    def close(self) -> None:
        """Nothing of the machine survives: its first process takes all others with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=60)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "sshd.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
            return True
        return False


def _run(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
    return done.stdout


@contextlib.contextmanager
def new_machine(directory: Path, home: Path | None = None) -> Iterator[SshMachine]:
    """Two simulated GPUs and no systemd. Not started: a test says what else it has."""
    if "CI" not in os.environ and (os.geteuid() != 0 or not SSHD.exists()):
        pytest.skip("a machine in namespaces needs root and Debian's package openssh-server")
    machine = SshMachine(directory, home=home).has_settings('gpus = "sim:2"\ndeadline = "60s"\n')
    with contextlib.closing(machine):
        yield machine


@pytest.fixture
def ssh_machine(tmp_path: Path) -> Iterator[SshMachine]:
    """A machine with a home of its own."""
    with new_machine(tmp_path) as machine:
        yield machine
