"""The helper that reads GPUs, started before this process has imported what it needs itself.

Half of what a person waits for after `stoker gpus` is the helper loading the driver's library, the other half is the
command line loading its own: done side by side, they wait once. So this module imports next to nothing.
"""

import os
import re
from pathlib import Path
from typing import Final

from stoker.gpus.spawn import Helper, spawned
from stoker.masking import without_passwords
from stoker.settings_path import config_path


def helper_for(arguments: list[str]) -> Helper | None:
    """A helper for `stoker gpus` when it is plain which source it will ask; None leaves it to the prober.

    Not for `--watch` and `--follow`: they stay, so a helper that shares their memory serves them better.
    """
    others = ("--source", "-h", "--help", "--watch", "--follow")
    if arguments[:1] != ["gpus"] or any(word.startswith(others) for word in arguments):
        return None
    spec = os.environ.get("STOKER_GPUS") or "auto"
    if ":" in spec or os.access(config_path(os.environ), os.F_OK):
        return None
    try:
        return spawned(spec, os.environ.get("STOKER_ROOT", "/"))
    except OSError:
        return None


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
