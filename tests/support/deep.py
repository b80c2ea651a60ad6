"""Whether the tests take their time: `make test DEEP=1`."""

import os
from typing import Final

# More examples of what holds for all input, and every command in a new process.
DEEP: Final = bool(os.environ.get("STOKER_TESTS_DEEP"))


def examples(number: int) -> int:
    """How many examples of a property are tried: a third of `number`, and all of them when there is time."""
    return number if DEEP else max(10, number // 3)
