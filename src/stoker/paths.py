"""Questions about paths that get an answer also where this user may not look: what nobody can see is not there.

`Path.exists` and its siblings raise PermissionError for a path inside a directory that may not be entered.
"""

import os
from pathlib import Path


def is_there(path: str | Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - see above


def is_directory(path: str | Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - see above
