"""Open files that a forked process has no use for."""

import contextlib
import os
from collections.abc import Iterable


def close_all_but(own: Iterable[int]) -> None:
    """Lets go of everything else, standard input, output and error excepted: what others wait for can then end."""
    kept = {0, 1, 2, *own}
    # Listed, not counted through: in containers the limit of open files can be a thousand million.
    with os.scandir("/proc/self/fd") as entries:
        opened = {int(entry.name) for entry in entries}
    for descriptor in opened - kept:
        with contextlib.suppress(OSError):
            os.close(descriptor)  # One was that of the listing.
