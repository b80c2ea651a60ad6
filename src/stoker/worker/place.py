"""Whether a directory has the output of an attempt, and of no other one."""

import stat
from pathlib import Path

import msgspec


class _Assigned(msgspec.Struct):
    attempt: str


def is_output_of(directory: Path, attempt: str) -> bool:
    """A link is not followed: what it leads to need not be the output of anything.

    Names of attempts are unique in one queue only, so a directory that says it is of another one is left alone too.
    """
    if not stat.S_ISDIR(_kind(directory)):
        return False
    kinds = [_kind(directory / name) for name in ("output", "output.1")]
    if not any(kinds) or not all(stat.S_ISREG(kind) for kind in kinds if kind):
        return False
    return _owner(directory) in {None, attempt}


def _kind(path: Path) -> int:
    """What kind of file it is; 0 when there is none."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _owner(directory: Path) -> str | None:
    """The id of the attempt that it is of, if it says so."""
    for name in ("attempt.json", "delivered.json"):
        try:
            return msgspec.json.decode((directory / name).read_bytes(), type=_Assigned).attempt
        except (OSError, msgspec.DecodeError):
            continue
    return None
