"""Keeps passwords out of the list of processes, which every user of a machine can read."""

import os
import re
from pathlib import Path
from typing import Final

from stoker.masking import without_passwords

_NOTIFY: Final = re.compile(r"(\bnotify\s+[\w+.-]+://)\S+")


def hide_passwords(arguments: list[str]) -> bool:
    """Takes passwords out of the command line that `ps` shows of this process and its forks; False when it cannot.

    `arguments` stay as they are. What follows `--` is the user's own command, and is left to it.
    """
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    secret = {os.fsencode(word): os.fsencode(hidden) for word in own if (hidden := _hidden(word)) != word}
    if not secret:
        return True
    try:
        shown = Path("/proc/self/cmdline").read_bytes()
        # What follows the name of the program, which may hold anything: fields 48 and 49 of proc_pid_stat(5).
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        if start <= 0 or end - start != len(shown):
            return False
        _overwrite(start, b"\0".join(secret.get(word, word) for word in shown.split(b"\0")).ljust(len(shown), b"\0"))
        now = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError, IndexError, ImportError):
        return False
    return not any(word in now for word in secret)


def _hidden(word: str) -> str:
    """Of where `--then 'notify URL'` goes, every part may be a secret."""
    return without_passwords(_NOTIFY.sub(r"\1…", word))


def _overwrite(start: int, shown: bytes) -> None:
    import ctypes

    # The kernel shows this part of the process's own memory.
    ctypes.memmove(start, shown, len(shown))
