"""The program on the other machine, whose Python reads this file from standard input and executes it.

It needs only Python 3.11. Requests and answers are lines of JSON. Secrets and files come in requests, never in
arguments, which every user of the machine can read. It exits when its input closes.
"""

import base64
import contextlib
import getpass
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

# Prefix of every answer, because start-up files of a shell may print other lines.
MARK: Final = "@stoker "
# Seconds. Enough for a slow package index; a hung one must not block the caller for ever.
_INSTALL_WITHIN: Final = 900.0
_QUEUE_WITHIN: Final = 60.0
_SERVICE_WITHIN: Final = 60.0
# A worker stops within a second or two, unless its database hangs.
_STOPS_WITHIN: Final = 30.0
# Maximum output of a failed command that is passed on.
_MOST_LINES: Final = 6
_LONGEST: Final = 600
# Marks a complete environment.
_READY: Final = "ready"
_DRAWING: Final = re.compile(r"[×╰─▶│├]")


class _StepError(Exception):
    """A step failed; the message comes from the machine."""


def facts() -> dict[str, Any]:
    """Facts for decisions: platform, Python, tools, directories and disk space."""
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share") / "stoker"
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return {
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "home": str(home),
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "uv": _uv(),
        "data": str(data),
        "config": str(config),
        "free": _free(data),
        "systemd": _systemctl("show", "--property=Version").returncode == 0,
    }


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _uv() -> str:
    """Logins over ssh often have a short PATH, so this adds the directory of uv's installer."""
    usual = (str(Path.home() / place) for place in (".local/bin", ".cargo/bin"))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *usual])
    return shutil.which("uv", path=path) or ""


def is_installed(venv: str) -> bool:
    """Whether this environment is complete and its Python exists. It is not run: on a busy machine that may fail, and a
    running worker must not lose its files."""
    return (Path(venv) / _READY).exists() and os.access(f"{venv}/bin/python", os.X_OK)


def install(venv: str, wheel: str, wheels: Mapping[str, str], extras: str, offline: bool, uv: str) -> None:
    """Installs Stoker in a new virtual environment from the sent wheels; marks it when complete, else deletes it."""
    place = Path(venv)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = place.with_name(f"{place.name}.wheels")
    try:
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir(mode=0o700)
        for name, content in wheels.items():
            (files / Path(name).name).write_bytes(base64.b64decode(content))
        _install(place, files, f"{files}/{wheel}[{extras}]", offline, uv)
        (place / _READY).touch()
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(files, ignore_errors=True)


def _install(place: Path, files: Path, wanted: str, offline: bool, uv: str) -> None:
    sources = ["--no-index", "--find-links", str(files)] if offline else []
    python = str(place / "bin/python")
    if uv:
        _checked([uv, "venv", "--quiet", "--no-config", "--python", sys.executable, str(place)])
        quiet = ["--quiet", *(["--offline", "--no-config"] if offline else [])]
        _checked([uv, "pip", "install", *quiet, "--python", python, *sources, wanted])
    else:
        _checked([sys.executable, "-m", "venv", str(place)])
        _checked([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *sources, wanted])


def write(files: Mapping[str, tuple[str, int]]) -> None:
    """Writes these files with their modes from the first byte."""
    for name, (text, mode) in files.items():
        path = Path(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        fresh.chmod(mode)
        fresh.replace(path)


def check_queue(venv: str, environment: Mapping[str, str]) -> bool:
    """Whether the installed Stoker can use the queue from here."""
    _checked([f"{venv}/bin/stoker", "queue", "check"], _QUEUE_WITHIN, environment)
    return True


def linger() -> bool:
    """Whether services of this user continue without a login; enables lingering if users may do so."""
    if not _lingers():
        _run(["loginctl", "--no-ask-password", "enable-linger"], _SERVICE_WITHIN)
    return _lingers()


def _lingers() -> bool:
    shown = _run(["loginctl", "show-user", getpass.getuser(), "--property=Linger"], _SERVICE_WITHIN)
    return shown.stdout.strip() == "Linger=yes" or Path("/var/lib/systemd/linger", getpass.getuser()).exists()


def start(unit: str, launcher: str, pid_file: str, log: str, files: Mapping[str, tuple[str, int]]) -> bool:
    """Writes these files, and starts the worker by its unit or launcher; returns False if it was running. A worker
    started with other files is restarted; its jobs continue.
    """
    write(files)
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    if _started_with(pid_file)[2] == digest and status(unit, pid_file, log)["running"]:
        return False
    _stop_detached(pid_file)
    process = "- -"
    if unit:
        for words in (("daemon-reload",), ("enable", "--quiet", Path(unit).name), ("restart", Path(unit).name)):
            _service(*words)
    else:
        process = _start_detached(launcher, log)
    write({pid_file: (f"{process} {digest}\n", 0o600)})
    return True


def _start_detached(launcher: str, log: str) -> str:
    Path(log).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        worker = subprocess.Popen(
            [launcher],
            cwd=Path.home(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # it outlives this connection
        )
    finally:
        os.close(output)
    _children.append(worker)
    return f"{worker.pid} {_started(worker.pid) or '-'}"


def status(unit: str, pid_file: str, log: str) -> dict[str, Any]:
    """Whether the worker runs, and its last output."""
    for child in _children:
        child.poll()
    if unit:
        name = Path(unit).name
        running = _systemctl("is-active", "--quiet", name).returncode == 0
        said = _run(["journalctl", "--user", "--unit", name, "--lines", "3", "--output", "cat"], _SERVICE_WITHIN).stdout
    else:
        running = _worker_pid(pid_file) is not None
        said = ""
        with contextlib.suppress(OSError):
            said = Path(log).read_bytes()[-4000:].decode(errors="replace")
    return {"running": running, "said": _said(said, 1)}


def stop(unit: str, pid_file: str) -> bool:
    """Ends the worker permanently, but not its jobs; returns whether there was one."""
    has_unit = Path(unit).exists()
    if has_unit:
        _service("disable", "--quiet", "--now", Path(unit).name)
    return _stop_detached(pid_file) or has_unit


def remove(paths: Sequence[str]) -> list[str]:
    """Deletes files; returns those that existed."""
    found = [name for name in paths if os.path.lexists(name)]
    for name in found:
        Path(name).unlink()
    if any(name.endswith(".service") for name in found):
        _systemctl("daemon-reload")
    return found


def purge(venvs: str, users: Sequence[str]) -> list[str]:
    """Deletes the environments that no file of these patterns names, because another machine with this home may use
    one."""
    texts = [path.read_text(encoding="utf-8") for pattern in users for path in Path("/").glob(pattern.lstrip("/"))]
    unused = [str(path) for path in sorted(Path(venvs).glob("*")) if not any(f"{path}/" in text for text in texts)]
    for name in unused:
        shutil.rmtree(name)
    return unused


# Processes

_children: Final[list["subprocess.Popen[bytes]"]] = []


def _run(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    variables = {**os.environ, **(environment or {})}
    runtime = f"/run/user/{os.getuid()}"
    if "XDG_RUNTIME_DIR" not in variables and Path(runtime).is_dir():
        variables["XDG_RUNTIME_DIR"] = runtime  # where systemctl finds the systemd user instance
    try:
        return subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: not found")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{Path(command[0]).name} took longer than {seconds:g} s")


def _checked(
    command: Sequence[str], seconds: float = _INSTALL_WITHIN, environment: Mapping[str, str] | None = None
) -> None:
    done = _run(command, seconds, environment)
    if done.returncode:
        raise _StepError(_said(done.stderr) or _said(done.stdout) or f"{command[0]} ended with code {done.returncode}")


def _systemctl(*words: str) -> "subprocess.CompletedProcess[str]":
    return _run(["systemctl", "--user", *words], _SERVICE_WITHIN)


def _service(*words: str) -> None:
    done = _systemctl(*words)
    if done.returncode:
        raise _StepError(_said(done.stderr) or f"systemctl --user {' '.join(words)} ended with code {done.returncode}")


def _said(text: str, most: int = _MOST_LINES) -> str:
    """The end of a program's output on one line, from its first error on: causes may follow."""
    lines = [cleaned for line in text.splitlines() if (cleaned := " ".join(_DRAWING.sub(" ", line).split()))]
    first = next((number for number, line in enumerate(lines) if line.lower().startswith(("error:", "stoker:"))), 0)
    return " ".join(lines[first:][-most:])[-_LONGEST:]


def _started(pid: int) -> str:
    """Its start in clock ticks since boot, which with the pid identifies a process for ever. Empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _started_with(pid_file: str) -> tuple[str, str, str]:
    """Pid and start of the worker, `-` if systemd started it, and the digest of the files it was started with."""
    try:
        pid, started, digest = Path(pid_file).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return "-", "-", ""
    return pid, started, digest


def _worker_pid(pid_file: str) -> int | None:
    """The pid of the worker started without systemd, while it lives."""
    pid, started, _ = _started_with(pid_file)
    return int(pid) if pid.isdigit() and _started(int(pid)) == started else None


def _stop_detached(pid_file: str) -> bool:
    if (pid := _worker_pid(pid_file)) is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    ends = time.monotonic() + _STOPS_WITHIN
    while _worker_pid(pid_file) == pid:
        if time.monotonic() > ends:
            raise _StepError(f"the worker (pid {pid}) did not end within {_STOPS_WITHIN:g} s of SIGTERM")
        time.sleep(0.02)
        for child in _children:
            child.poll()
    return True


HANDLERS: Final[dict[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (facts, is_installed, install, check_queue, linger, start, status, stop, remove, purge)
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # nothing else may print between the answers
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            answer = {"answer": HANDLERS[request.pop("do")](**request)}
        except _StepError as error:
            answer = {"failed": str(error)}
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            answer = {"failed": f"{error.strerror or error}{where}"}
        answers.write(f"{MARK}{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
