"""A request to submit that may be sent again: the same key gives the same jobs, on whichever server.

Each job's origin, which is unique in the queue, is made of the key, of who sent it and of what was asked for. Two
servers, or one that was restarted in between, so agree without a memory of their own.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from stoker.errors import BadInputError
from stoker.queue.model import Job, NewJob
from stoker.queue.store import Store
from stoker.web.problems import ConflictError, ParameterError

HEADER: Final = "Idempotency-Key"
REPLAYED: Final = "Idempotent-Replayed"
# Enough to tell any two apart, and short enough that origins can be read.
_DIGITS: Final = 24


class Submitted(NamedTuple):
    jobs: list[Job]
    is_replay: bool


def submit_once(
    store: Store, key: str | None, sender: str, asked: bytes, make: Callable[[], Sequence[NewJob]]
) -> Submitted:
    """Submits what `make` gives, unless the same sender has done so with this key. `asked` is what was asked for."""
    if key is None:
        return Submitted(_found(store, store.submit(make())), is_replay=False)
    prefix = f"web:{_digest(f'{len(sender)}:{sender}{key}'.encode(errors='replace'))}:"
    origin = f"{prefix}{_digest(asked)}:"
    if earlier := store.by_origin(prefix):
        if not all((job.origin or "").startswith(origin) for job in earlier):
            raise ParameterError(HEADER, "this key was used for another request: take a new one for each submission")
        return Submitted(earlier, is_replay=True)
    # Numbered so that they sort in their order.
    jobs = [replace(job, origin=f"{origin}{number:06d}") for number, job in enumerate(make())]
    return Submitted(_found(store, store.submit(jobs)), is_replay=False)


def _found(store: Store, ids: Sequence[str]) -> list[Job]:
    try:
        return [store.job(name) for name in ids]
    except BadInputError:
        raise ConflictError("the jobs of this submission have been forgotten since (`stoker clean`)") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
