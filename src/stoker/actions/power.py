"""The actions `shutdown` and `reboot`: through systemd where it runs, else by `shutdown`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from stoker.actions.action import Action, ActionError, Facts
from stoker.procfs import user_name
from stoker.program import find_program, run_program

What = Literal["shutdown", "reboot"]

# logind and sudo answer within milliseconds; a silent bus must not delay the start.
_ASK_TIMEOUT: Final = 10.0
# `systemctl poweroff` returns when the job is queued, `shutdown` when init has the request.
_ACT_TIMEOUT: Final = 60.0
# Names of process 1 on machines that can shut themselves down. In a container, process 1 is an ordinary program.
_INITS: Final = frozenset(
    {"systemd", "init", "openrc-init", "runit", "runit-init", "s6-svscan", "s6-linux-init", "dinit", "busybox"}
)
_VERB: Final = {"shutdown": "poweroff", "reboot": "reboot"}
_SHUTDOWN_WORDS: Final = {"shutdown": ("-h", "now"), "reboot": ("-r", "now")}
_MAY: Final = {"shutdown": "CanPowerOff", "reboot": "CanReboot"}
_IN_WORDS: Final = {"shutdown": "shut this machine down", "reboot": "reboot this machine"}
_HAPPENING: Final = {"shutdown": "shutting down", "reboot": "rebooting"}


class Power(Action):
    """Shuts down or reboots the machine. Permission is checked at the start."""

    patience = _ACT_TIMEOUT + 5.0
    affects = "machine"

    def __init__(self, what: What, environment: Mapping[str, str], *, user: int | None = None) -> None:
        """`user`: the user id whose permission is checked; the effective one of this process."""
        self._what = what
        self._environment = environment
        self._root = Path(environment.get("STOKER_ROOT", "/"))
        self._user = os.geteuid() if user is None else user
        self._command: tuple[str, ...] = ()

    def describe(self) -> str:
        by = f" by `{' '.join((Path(self._command[0]).name, *self._command[1:]))}`" if self._command else ""
        return _IN_WORDS[self._what] + by

    def prepare(self) -> tuple[str, ...]:
        plain = self._plain_command()
        self._command = plain if self._user == 0 or self._logind_allows() else self._by_sudo(plain)
        container = container_sign(self._root)
        if container is None:
            return ()
        warning = (
            f"this looks like a container ({container}): {_HAPPENING[self._what]} from inside ends the container at "
            "the most, not the machine that is paid for; a machine that only its cloud can end needs 'exec' with the "
            "cloud's own command"
        )
        return (warning,)

    def act(self, facts: Facts) -> None:  # noqa: ARG002 - init takes no reason
        done = run_program(self._command, self._environment, _ACT_TIMEOUT)
        if done.code != 0:
            raise ActionError(f"'{' '.join(self._command)}' failed: {done.complaint}")

    def _plain_command(self) -> tuple[str, ...]:
        if self._has_systemd() and (systemctl := self._find("systemctl")):
            return (systemctl, _VERB[self._what])
        if shutdown := self._find("shutdown"):
            return (shutdown, *_SHUTDOWN_WORDS[self._what])
        # Alpine and other small systems have no `shutdown`.
        if small := self._find(_VERB[self._what]):
            return (small,)
        raise ActionError(
            f"nothing here can {_IN_WORDS[self._what]}: neither systemctl nor shutdown nor {_VERB[self._what]} is on "
            "PATH; install one, or use 'exec' with the command that does it here"
        )

    def _has_systemd(self) -> bool:
        """Like sd_booted(3): systemd creates this directory if it is process 1."""
        return (self._root / "run/systemd/system").is_dir()

    def _logind_allows(self) -> bool:
        """Whether polkit allows this action without a password ("challenge" would ask for one)."""
        busctl = self._find("busctl")
        if not self._has_systemd() or busctl is None or self._find("systemctl") is None:
            return False
        manager = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
        asked = run_program((busctl, "call", *manager, _MAY[self._what]), self._environment, _ASK_TIMEOUT)
        return asked.code == 0 and asked.out.split() == ["s", '"yes"']

    def _by_sudo(self, plain: tuple[str, ...]) -> tuple[str, ...]:
        sudo = self._find("sudo")
        why = "sudo is not installed"
        if sudo is not None:
            # -k ignores cached credentials, which will have expired by then.
            asked = run_program((sudo, "-n", "-k", "-l", *plain), self._environment, _ASK_TIMEOUT)
            if asked.code == 0:
                return (sudo, "-n", *plain)
            why = f"sudo says: {asked.complaint}"
        user = user_name(os.geteuid())
        raise ActionError(
            f"{user} may not {_IN_WORDS[self._what]} without a password ({why}): run as root, or let root add "
            f"the line '{user} ALL=(root) NOPASSWD: {' '.join(plain)}' to sudoers"
        )

    def _find(self, name: str) -> str | None:
        return find_program(name, self._environment, str(self._root))


def container_sign(root: Path) -> str | None:
    """Evidence that this is a container; empty if there is none."""
    for file in (".dockerenv", "run/.containerenv"):
        if (root / file).exists():
            return f"there is a /{file}"
    try:
        first = (root / "proc/1/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None  # hidden from other users
    return None if first in _INITS else f"process 1 is {first!r}, which is not an init"
