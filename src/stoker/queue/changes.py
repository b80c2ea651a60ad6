"""What wakes a worker at once when another process has changed the queue."""

from typing import Protocol


class ChangeListener(Protocol):
    """May wake for nothing and in rare cases be late, so every user also polls slowly.

    Changes by the store that created it do not count. Only that store's thread uses it, and closes it before the store.
    """

    def fileno(self) -> int:
        """Readable when something may have changed; -1 while it cannot listen."""

    def poll(self) -> bool:
        """Whether something may have changed since the last call. Never raises; reconnects a lost listener."""

    def close(self) -> None: ...
