"""systemd: readiness, status and watchdog over its socket, and the text of a unit."""

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Final

# The share of the watchdog interval recommended by sd_watchdog_enabled(3).
_PING_SHARE: Final = 0.5
_PLAIN_WORD: Final = re.compile(r"[A-Za-z0-9_@:,./=+-]+")
# Long enough for a look, its deadline and a busy machine; short enough to replace a stuck watcher soon.
UNIT_WATCHDOG: Final = 60
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


class ServiceManager:
    """The systemd that started this process, if any. Messages that cannot be sent are dropped."""

    def __init__(self, environment: Mapping[str, str], *, pid: int | None = None) -> None:
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        meant = environment.get("WATCHDOG_PID")
        asked = environment.get("WATCHDOG_USEC", "")
        mine = meant is None or meant == str(pid or os.getpid())
        interval = int(asked) / 1e6 if asked.isascii() and asked.isdigit() and mine else 0.0
        self._every: float | None = interval * _PING_SHARE if interval > 0 and self._address else None
        self._next_ping: float | None = None
        self._status = ""

    def ready(self, status: str) -> None:
        self._status = status
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """The status line of `systemctl status`; sent when it changes."""
        if status != self._status:
            self._status = status
            self._send(f"STATUS={_one_line(status)}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def keep_alive(self, now: float) -> float | None:
        """Sends a watchdog ping if one is due. Returns when to call again; None without a watchdog."""
        if self._every is None:
            return None
        if self._next_ping is None or now >= self._next_ping:
            self._send("WATCHDOG=1")
            self._next_ping = now + self._every
        return self._next_ping

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
            # A service manager that does not read must not block the watcher.
            there.setblocking(False)
            there.sendto(message.encode("utf-8", errors="replace"), self._address)


def unit_text(description: str, command: Sequence[str], environment: Mapping[str, str], idle_code: int) -> str:
    """A service that runs this command, for /etc/systemd/system."""
    variables = "".join(f"Environment={_literal(f'{name}={value}')}\n" for name, value in environment.items())
    codes = " ".join(dict.fromkeys(str(code) for code in (idle_code, 143) if code))
    return f"""[Unit]
Description={_one_line(description).replace("%", "%%")}
After=nvidia-persistenced.service

[Service]
Type=notify
ExecStart={" ".join(quoted(word) for word in command)}
{variables}WatchdogSec={UNIT_WATCHDOG}
Restart=on-failure
RestartSec=10
# {idle_code}: it has acted; 143: it was asked to end. Neither is a failure.
SuccessExitStatus={codes}
# 2: an error in the command line, which a restart does not fix.
RestartPreventExitStatus=2

[Install]
WantedBy=multi-user.target
"""


def quoted(word: str) -> str:
    """Quotes one word of a command line for systemd: no specifiers, no variables, no splitting."""
    return _literal(word).replace("$", "$$")


def _literal(word: str) -> str:
    if _PLAIN_WORD.fullmatch(word):
        return word
    return '"' + "".join(_ESCAPES.get(letter, letter) for letter in word) + '"'


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _address(text: str) -> str | None:
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else None
