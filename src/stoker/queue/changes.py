"""The bell that rings when somebody else has changed the queue: what wakes a worker at once."""

from typing import Protocol


class ChangeListener(Protocol):
    """It may ring for nothing, and in rare cases be late: behind it there is always a slow poll.

    What the store that gave the bell changes itself is not told. Only the store's thread uses it, and closes it first.
    """

    def fileno(self) -> int:
        """Readable when something may have changed; -1 while it cannot listen."""

    def heard(self) -> bool:
        """Whether something may have changed since the last call. It never raises, and mends what could not listen."""

    def close(self) -> None: ...
