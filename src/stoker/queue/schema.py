"""The versions of the queue's tables, and how one becomes the next."""

from typing import Final

from stoker.queue.statements import script, sections

VERSION: Final = 2


def steps(file: str, since: int) -> list[str]:
    """The statements that bring a queue of version `since` up to date; 0 is an empty place."""
    versions = {int(number): text for number, text in sections(file).items()}
    return [statement for number in sorted(versions) if number > since for statement in script(versions[number])]
