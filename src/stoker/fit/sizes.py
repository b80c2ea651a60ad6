"""The batch sizes that may be answered: multiples of one number, and powers of two where not even that number fits."""

from typing import Final, NamedTuple

from stoker.fit.model import SearchOptions

# Of all ways to make up the effective batch, those with more steps than four times the fewest would waste the GPU.
STEPS: Final = 4


class Split(NamedTuple):
    """An effective batch, made up of some steps."""

    size: int
    accumulate: int


class Sizes:
    """What may be answered under some terms, smallest 1."""

    def __init__(self, terms: SearchOptions) -> None:
        self._multiple = terms.multiple
        self._effective = terms.effective
        most = terms.most
        if terms.effective is not None:
            # More in one step than the experiment wants in all is of no use.
            most = min(most, self.up(terms.effective))
        self.largest = self.down(most)

    def down(self, size: float) -> int:
        """The largest that is not above `size`; 0 below one."""
        if size >= self._multiple:
            return int(size) // self._multiple * self._multiple
        return 1 << int(size).bit_length() - 1 if size >= 1 else 0

    def up(self, size: int) -> int:
        """The smallest that is not below `size`."""
        power = 1 << (size - 1).bit_length()
        return power if power < self._multiple else -(-size // self._multiple) * self._multiple

    def split(self, size: int) -> Split | None:
        """How batches of at most `size` make up the effective batch; None where none was asked for.

        The product is never below what the experiment wants, and as near to it as can be: a batch that divides it
        is taken even where a larger one fits, unless that takes more than four times the fewest steps. Of two
        that are equally near, the one with fewer steps.
        """
        if self._effective is None:
            return None
        fewest = -(-self._effective // size)
        splits = [Split(self.up(-(-self._effective // steps)), steps) for steps in range(fewest, STEPS * fewest + 1)]
        possible = [split for split in splits if split.size <= size]
        return min(possible, key=lambda split: (split.size * split.accumulate, split.accumulate))
