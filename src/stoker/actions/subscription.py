"""Requests for messages about a job, as written with `--notify`: when, and to which URL."""

import functools
import re
from typing import Final, Literal, NamedTuple, get_args

from stoker.errors import BadInputError, did_you_mean

When = Literal["end", "failed", "succeeded", "stopped", "warned", "done"]
WHENS: Final[tuple[When, ...]] = get_args(When)
OF_GROUP: Final = "done"
"""The word for the end of all jobs of a group."""
# Longer than any service's URL.
LONGEST: Final = 2000
_ENTRY: Final = re.compile(r"(?:([A-Za-z-]+):(?!//))?(.+)", re.DOTALL)
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")


class Subscription(NamedTuple):
    """One request. Without a URL, the message goes to the URLs of `[notify]` and of the page."""

    when: When
    url: str = ""

    def __str__(self) -> str:
        return f"{self.when}:{self.url}" if self.url else self.when


@functools.lru_cache(maxsize=1024)
def parse_subscription(text: str) -> Subscription:
    """Parses `failed`, `failed:ntfy://…` or `ntfy://…`, which means the end. Errors contain no part of a URL."""
    if not (found := _ENTRY.fullmatch(text.strip())) or len(text) > LONGEST:
        raise BadInputError(f"must have 1 to {LONGEST} characters")
    before, rest = found.groups()
    when, url = (before or "end", rest) if "://" in rest or before is not None else (rest, "")
    if when not in WHENS:
        raise BadInputError(f"there is no event {when[:40]!r} of a job: {did_you_mean(when, WHENS)}")
    if url and not (_URL.fullmatch(url) and url.isprintable()):
        raise BadInputError("this is not a URL: write it like ntfy://ntfy.example.org/gpus or failed:ntfy://…")
    return Subscription(when, url)


@functools.lru_cache(maxsize=1024)
def check_url(url: str) -> None:
    """Raises for a URL that apprise does not accept, if apprise is installed here; otherwise the sender checks it."""
    from importlib.util import find_spec

    if find_spec("apprise") is None:
        return
    from stoker.actions.notify import AppriseChannel

    channel = AppriseChannel(url)
    try:
        channel.prepare("this")
    finally:
        channel.close()
