"""Which GPUs background programs may be starting on at this moment: a pure account of what the filler was told.

Whoever takes a GPU back knows only when the filler has answered that nothing will start there any more.
"""


class Grants:
    """What was granted, by number: the grant that the filler goes by, and those that it may not have heard yet."""

    def __init__(self) -> None:
        self._open: dict[int, frozenset[str]] = {}

    @property
    def possible(self) -> frozenset[str]:
        """The GPUs on which a program may start, or have started, without our knowing yet."""
        return frozenset[str]().union(*self._open.values())

    def give(self, gpus: frozenset[str]) -> int:
        """The number of a new grant, which replaces the others once it was heard."""
        number = max(self._open, default=0) + 1
        self._open[number] = gpus
        return number

    def heard(self, number: int) -> None:
        """The filler goes by this one now."""
        self._open = {other: gpus for other, gpus in self._open.items() if other >= number}

    def end(self) -> None:
        """There is no filler any more."""
        self._open.clear()
