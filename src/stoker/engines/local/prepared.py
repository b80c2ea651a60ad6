"""An attempt that is prepared before it is claimed: while a job runs, a shim gets ready for the next one.

Nothing of it can start, and no later worker finds it: its directory gets its name, and the shim learns of the claim,
when the queue has given the job to this worker. Until then shim and reaper hold what they were sent, and both end with
the connection to the worker.
"""

import operator
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from stoker.engines.local.attempts import LocalAttempt
from stoker.engines.local.record import AttemptClaimed, LocalAttemptRecord, LocalAttemptSpec, ShimChannel
from stoker.gpus.model import Gpu
from stoker.paths import remove_tree
from stoker.queue import Attempt, Job, JobSpec
from stoker.runs.processes.reaper_process import FAST_START

_asked: Final = operator.attrgetter(*JobSpec.__struct_fields__)
# `attempt.json` says when the attempt began: it is not written again for less than this.
_SAME_TIME: Final = 1.0


class PreparedAttempt:
    """What a shim has, and on disk the directory under another name."""

    def __init__(
        self,
        job: Job,
        attempt_spec: LocalAttemptSpec,
        record: LocalAttemptRecord,
        directory: Path,
        channel: ShimChannel,
        gpus: Sequence[Gpu],
        present: Sequence[Gpu],
    ) -> None:
        """`record`: of the directory as it will be called; `gpus`, `present`: those of the job and of the machine."""
        self._job = job
        self.spec = attempt_spec
        self._record = record
        self._directory = directory
        # As text: between two jobs, pathlib takes as long as the system call.
        self._names = str(directory), str(record.directory)
        self.channel = channel
        self._gpus = tuple(gpus)
        self._present = tuple(present)

    def is_for(self, job: Job, attempt: Attempt, gpus: Sequence[Gpu], present: Sequence[Gpu]) -> bool:
        """Whether what was claimed is exactly what was prepared: the job may have been edited or run meanwhile."""
        spec = self.spec
        return (
            (spec.attempt, spec.job, spec.number, spec.gpus) == (attempt.id, job.id, attempt.number, attempt.gpus)
            and (not gpus or (self._gpus, self._present) == (tuple(gpus), tuple(present)))
            and _asked(self._job) == _asked(job)
        )

    def begin(self, claimed_at: float) -> LocalAttempt | None:
        """Starts the attempt, which was claimed. None when that is not possible; nothing of it runs then."""
        prepared, now = self.spec, time.time()
        spec = replace(prepared, lease_until=claimed_at + prepared.lease, started=now)
        try:
            if not prepared.started <= now < prepared.started + _SAME_TIME:
                LocalAttemptRecord(self._directory).write_attempt(spec)
            self._give_name()
        except OSError:
            return None
        is_ordered = self.channel.can_order_start()
        if not self.channel.send(AttemptClaimed(spec.lease_until, is_ordered)):
            remove_tree(self._record.directory, ignore_errors=True)
            return None
        if is_ordered:
            deadline = spec.reaper_deadline(spec.lease_until)
            self.channel.order_start(FAST_START.pack(bytes.fromhex(spec.attempt), deadline))
        return LocalAttempt(self._record, spec, self.channel)

    def _give_name(self) -> None:
        try:
            os.rename(*self._names)  # noqa: PTH104
        except OSError:
            # Of another queue, or of one that was created again; or its parent was deleted.
            remove_tree(self._record.directory, ignore_errors=True)
            os.rename(*self._names)  # noqa: PTH104

    def discard(self) -> None:
        """The shim ends when its connection does."""
        self.channel.close()
        remove_tree(self._directory, ignore_errors=True)
