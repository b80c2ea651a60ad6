"""What the helper answers when it is asked for a look."""

import msgspec

from stoker.gpus.model import Choice, Look


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one ask. `look.gpus` is empty when `same_gpus`: they seldom change and need not travel."""

    look: Look | None
    same_gpus: bool = False
    absent: str | None = None
    """Why there is no source to look with."""
    choices: tuple[Choice, ...] = ()
    """With the first look of a source: why it was taken, and others left."""
