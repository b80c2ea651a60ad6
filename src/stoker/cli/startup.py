"""Runs before the command line is imported: hides passwords, and starts the helper of `stoker gpus`.

The helper loads the driver's library while this process loads its own modules, which halves the wait. So this module
imports next to nothing.
"""

import os

from stoker.gpus.sharing import shared_helper
from stoker.gpus.spawn import Helper, forked, private_helper
from stoker.settings_path import config_path


def helper_for(arguments: list[str]) -> Helper | None:
    """A helper for `stoker gpus` if its source is known; None leaves it to the prober. Not for `--watch` and
    `--follow`, which run long: a forked helper shares their memory.
    """
    others = ("--source", "-h", "--help", "--watch", "--follow")
    if arguments[:1] != ["gpus"] or any(word.startswith(others) for word in arguments):
        return None
    spec = os.environ.get("STOKER_GPUS") or "auto"
    if ":" in spec or os.access(config_path(os.environ), os.F_OK):
        return None
    try:
        root = os.environ.get("STOKER_ROOT", "/")
        return shared_helper(spec, root, forked, "join") or private_helper(spec, root, forked)
    except OSError:
        return None


def hide_passwords(arguments: list[str]) -> bool:
    """Removes passwords from this process's command line as shown by `ps`; returns False on failure. The user's command
    after `--` stays unchanged.
    """
    from pathlib import Path

    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    secret = {
        os.fsencode(word): os.fsencode(hidden)
        for before, word in zip(["", *own], own, strict=False)
        if (hidden := _hidden(word, before)) != word
    }
    if not secret:
        return True
    try:
        shown = Path("/proc/self/cmdline").read_bytes()
        # Fields 48 and 49 of proc_pid_stat(5), after the program's name, which may contain any character.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        if start <= 0 or end - start != len(shown):
            return False
        _overwrite(start, b"\0".join(secret.get(word, word) for word in shown.split(b"\0")).ljust(len(shown), b"\0"))
        now = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError, IndexError, ImportError):
        return False
    return not any(word in now for word in secret)


def _hidden(word: str, before: str) -> str:
    """Any part of the URL in `--then 'notify URL'` and in `--notify URL` may be a secret."""
    import re

    from stoker.masking import masked_notify, without_passwords

    if before == "--notify" or word.startswith("--notify="):
        return masked_notify([word])[0]
    return without_passwords(re.sub(r"(\bnotify\s+[\w+.-]+://)\S+", r"\1…", word))


def _overwrite(start: int, shown: bytes) -> None:
    import ctypes

    # The kernel shows this part of the process's own memory.
    ctypes.memmove(start, shown, len(shown))
