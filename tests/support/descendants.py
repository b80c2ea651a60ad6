"""The living processes below another."""

from collections.abc import Collection

from stoker.procfs import Identity
from stoker.runs.processes.tree import scan_processes


def descendants(of: int, exclude: Collection[int] = frozenset()) -> list[Identity]:
    return scan_processes([of], exclude).processes
