"""What a policy says of the readings so far: one of five words, and the reason in words."""

from typing import Literal, NamedTuple

from stoker.gpus.model import Maybe

Word = Literal["waiting", "arming", "busy", "idle", "unknown"]


class Activity(NamedTuple):
    """How busy one GPU was, as far as it counts for the policy, in the stretch of time before a look."""

    uuid: str
    label: str
    """What a person calls it: `GPU 0`."""
    span: float
    """Seconds before the look that this speaks for."""
    peak: Maybe[float]


class Verdict(NamedTuple):
    """`idle` means that the rule is fulfilled and its actions are due; every other word means that they are not."""

    word: Word
    reason: str
    idle_for: float = 0.0
    """Seconds for which as many GPUs as required have been idle, the window that counts included."""
    progress: float = 0.0
    """`idle_for` as a share of the window, 1 at the most."""
    unknown_for: float = 0.0
    """Seconds for which the policy could not tell because readings were unknown."""
