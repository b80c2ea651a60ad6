"""Content that jobs refer to, deduplicated, stored in rows of limited size, and deleted with the last such job."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from stoker.errors import BadInputError, StokerError
from stoker.queue.code.archive import Blob, Unpacker
from stoker.queue.driver import Driver, Parameters
from stoker.queue.fields import JobSpec
from stoker.queue.table import Table, json_text

# The size of a row: client and server never hold more of a blob in memory.
_CHUNK: Final = 2**20
# The number of blobs deleted per transaction.
_MOST_FORGOTTEN: Final = 20


class Blobs(Table):
    """Content by its digest."""

    def read(self, digest: str) -> Unpacker:
        """A reader of the stored content. Reading raises StokerError if the content was deleted."""
        return Unpacker(digest, self.chunks(digest))

    def chunks(self, digest: str) -> Iterator[bytes]:
        """The compressed content, row by row."""
        number = 0
        while rows := self._driver.fetch("blob chunk", {"digest": digest, "number": number}):
            yield bytes(rows[0][0])
            number += 1
        if number == 0:
            raise StokerError(
                f"the snapshot {digest[:12]} is not in the queue {self._driver.place} any more: submit the job again"
            )

    def forget_unused(self) -> tuple[int, int]:
        """Deletes unreferenced blobs. Returns their number and size."""
        count = size = 0
        while some := self._driver.transaction(self._forget_some):
            count, size = count + len(some), size + sum(some)
        return count, size

    def _forget_some(self) -> list[int]:
        # After this lock, the second statement sees all jobs submitted before it.
        rows = self._driver.fetch("lock unused blobs", {"most": _MOST_FORGOTTEN})
        if not rows:
            return []
        which: Parameters = {"digests": json_text([digest for (digest,) in rows])}
        return [int(size) for (size,) in self._driver.fetch("delete unused blobs", which)]


def write_blobs(driver: Driver, blobs: Iterable[Blob]) -> None:
    """Writes blobs in the transaction that submits their jobs. Existing ones are not sent again."""
    for blob in blobs:
        if driver.fetch("insert blob", {"digest": blob.digest, "size": blob.size}):
            blob.file.seek(0)
            for number, data in enumerate(iter(lambda file=blob.file: file.read(_CHUNK), b"")):  # type: ignore[misc]
                driver.fetch("insert blob chunk", {"digest": blob.digest, "number": number, "data": data})


def refer_to_blobs(driver: Driver, jobs: Sequence[tuple[str, JobSpec]]) -> None:
    """Records that these jobs, by id, use their blobs, which keeps the blobs as long as the jobs."""
    uses = [{"job": name, "digest": digest} for name, job in jobs if job.code for digest in job.code.digests]
    if not uses:
        return
    wanted = sorted({use["digest"] for use in uses})
    known = {digest for (digest,) in driver.fetch("known blobs", {"digests": json_text(wanted)})}
    if missing := [digest for digest in wanted if digest not in known]:
        raise BadInputError(
            f"the snapshot {missing[0][:12]} is not in the queue {driver.place} any more: submit from the code again"
        )
    driver.many("refer to blob", uses)
