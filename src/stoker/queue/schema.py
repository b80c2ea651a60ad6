"""The versions of the queue's tables, and how one becomes the next."""

from typing import Final

from stoker.queue.statements import script, sections

VERSION: Final = 7
# The oldest version of Stoker that may open a queue of this one. A worker that is not upgraded yet must be able to
# bring outcomes and to renew leases, or its jobs would be stopped: what it need not know of is no reason to refuse it.
OLDEST: Final = 1
# Before, there was one number for both.
FIRST_WITH_STEPS: Final = 2


def steps(file: str, since: int) -> list[str]:
    """The statements that bring a queue of version `since` up to date; 0 is an empty place."""
    versions = {int(number): text for number, text in sections(file).items()}
    return [statement for number in sorted(versions) if number > since for statement in script(versions[number])]
