"""One connection to another machine by the system's `ssh`, with the user's own configuration, agent and known hosts."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from stoker.errors import BadInputError, StokerError
from stoker.remote import far_side

DEFAULT_SSH: Final = "ssh"
# After the user's options: ssh uses the first value of an option, so users can override these.
_OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", "RemoteCommand=none", "-o", "ConnectTimeout=20"),
    # Detects a lost machine within a minute.
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)
_NO_PYTHON: Final = "@stoker-no-python"
# For any login shell: one line without single quotes, backslashes and exclamation marks. The program itself follows on
# standard input. Its arguments are the Pythons to try.
FIND_PYTHON: Final = (
    'for p in "$@"; do f=$(command -v "$p") || continue; '
    'if "$f" -c "import sys; sys.exit(sys.version_info < (3, 11))" </dev/null >/dev/null 2>&1; then '
    'exec "$f" -I -u -c "import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"; fi; '
    'seen="$seen $("$f" -V 2>&1 </dev/null | head -n 1) ($f),"; done; '
    'u=$(command -v uv || command -v "$HOME/.local/bin/uv") && '
    'f=$("$u" python find ">=3.11" 2>/dev/null </dev/null) && '
    'exec "$f" -I -u -c "import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"; '
    f'echo "{_NO_PYTHON}$seen"'
)
_PYTHONS: Final = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")
_OLDEST_PYTHON: Final = "3.11"
_LAST_LINES: Final = 3


class RemoteError(StokerError):
    """A step failed on the other machine; the message comes from there."""


class RemoteMachine:
    """The far side of one connection. Requests are answered in order."""

    def __init__(self, destination: str, ssh: str = DEFAULT_SSH, python: str | None = None) -> None:
        """`destination` as for ssh; `ssh` may contain options. Raises StokerError, also when the connection is lost
        later."""
        self.destination = destination
        self._command = [*ssh_words(ssh), *_OPTIONS, "--", checked_destination(destination)]
        wanted = shlex.join([python] if python else _PYTHONS)
        self._command.append(f"exec sh -c '{FIND_PYTHON}' stoker {wanted}")
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise BadInputError(f"{self._command[0]} cannot be run: {error.strerror}") from None
        self._errors: list[str] = []
        # Otherwise a machine with much output would block.
        self._reader = threading.Thread(target=self._read_errors, name="ssh errors", daemon=True)
        self._reader.start()
        self._other: list[str] = []
        self._python = python
        program = Path(far_side.__file__).read_bytes()
        self._send(f"{len(program)}\n".encode() + program)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, do: str, **request: Any) -> Any:
        """Calls a function of the far side. Raises RemoteError with the machine's message."""
        self._send(json.dumps({"do": do, **request}).encode() + b"\n")
        answer = self._answer()
        if isinstance(answer, dict) and "failed" in answer:
            raise RemoteError(str(answer["failed"]))
        if not isinstance(answer, dict) or "answer" not in answer:
            raise StokerError(
                f"{self.destination} answered something that is not understood: is it the machine you mean?"
            )
        return answer["answer"]

    def close(self) -> None:
        """The far side ends with its input."""
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        assert self._process.stdout is not None  # noqa: S101
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10.0)
        self._process.stdout.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            # The reason is in its output.
            self._answer()
            raise self._lost() from None

    def _answer(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 - asked for above
        for raw in self._process.stdout:
            line = printable(raw.decode(errors="replace").rstrip("\n"))
            if line.startswith(far_side.MARK):
                with contextlib.suppress(json.JSONDecodeError):
                    return printable(json.loads(line.removeprefix(far_side.MARK)))
                return None
            if line.startswith(_NO_PYTHON):
                raise no_python(self.destination, line.removeprefix(_NO_PYTHON).strip(" ,"), self._python)
            self._other.append(line)
        raise self._lost()

    def _lost(self) -> StokerError:
        code = self._process.wait()
        self._reader.join(10.0)
        said = [line for line in (*self._other, *self._errors) if line.strip()]
        return connection_error(self.destination, code, said)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - asked for above
        with self._process.stderr as lines:
            for line in lines:
                self._errors.append(printable(line.decode(errors="replace").strip()))


def printable(value: Any) -> Any:
    """Removes control characters: output of another machine must not move the cursor of this terminal."""
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else " " for letter in value)
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value


def ssh_words(ssh: str) -> list[str]:
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise BadInputError(f"--ssh: {ssh!r} cannot be split into words: {error}") from None
    if not words:
        raise BadInputError("--ssh: the command is empty: write it like 'ssh -p 2222'")
    return [os.path.expanduser(words[0]), *words[1:]]  # noqa: PTH111 - a program's name, not a path


def checked_destination(destination: str) -> str:
    if not destination or destination.startswith("-") or re.search(r"\s", destination):
        raise BadInputError(f"{destination!r} is not a machine: write it as for ssh, user@host")
    return destination


def no_python(destination: str, found: str, wanted: str | None) -> StokerError:
    """Why no Python on that machine is usable."""
    if found:
        return StokerError(
            f"{destination} has {found}, and Stoker needs Python {_OLDEST_PYTHON} or newer: install one there "
            "(`uv python install`, or the system's packages), or name one by --python"
        )
    what = f"no {wanted}" if wanted else "no python3"
    return StokerError(
        f"there is {what} on {destination}: install Python {_OLDEST_PYTHON} or newer there, or name one by --python"
    )


def connection_error(destination: str, code: int, said: Sequence[str]) -> StokerError:
    """One sentence from the output of ssh or the login shell."""
    text = "\n".join(said)
    login = f"ssh {destination}"
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text:
        return StokerError(
            f"the host key of {destination} is not the one in known_hosts: it was reinstalled, or somebody intercepts "
            "the connection; compare the key, remove the old one by `ssh-keygen -R`, and confirm the new one by "
            f"`{login}`"
        )
    if "Host key verification failed" in text:
        return StokerError(
            f"the host key of {destination} is not known here: run `{login}` once, compare the key and confirm it"
        )
    if "Permission denied" in text and code == 255:
        return StokerError(
            f"{destination} wants a password or another key: `ssh-copy-id {destination}` installs your key there, "
            "`ssh-add` unlocks one; with --ssh 'ssh -o BatchMode=no' ssh may ask for a password"
        )
    lines = [line for line in said if not line.startswith(("Warning:", "**"))]
    reason = " ".join(lines[-_LAST_LINES:]) or f"ssh ended with code {code}"
    if code == 255:
        return StokerError(f"{destination} cannot be reached: {reason}; `{login}` must work first")
    return StokerError(f"the login on {destination} ended: {reason}; `{login} true` must work first")
