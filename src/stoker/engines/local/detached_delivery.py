"""The way to the queue of a shim without a worker: a forked process that renews the lease or delivers the result.

The database may be slow, away or behind a dead network. That holds up the forked process; the shim goes on watching its
job, its signals and its clock.
"""

import os
import signal
import time
from typing import Final

import msgspec

from stoker.engines.attempt import AttemptResult, lease_clock
from stoker.engines.local.record import LocalAttemptRecord, LocalAttemptSpec
from stoker.errors import StokerError
from stoker.procfs import close_inherited_descriptors

# Longer than the database's own timeouts together; a process that hangs on a dead network disk is not waited for.
PATIENCE: Final = 60.0
# With a short lease there must be time for another try; a busy machine needs this much for one.
_SHORTEST_PATIENCE: Final = 5.0


class Answer(msgspec.Struct, frozen=True):
    """What came back; `problem` when the queue could not be asked."""

    alive: bool = False
    """Whether the attempt still had no outcome."""
    cancel: bool = False
    problem: str | None = None


class DetachedDelivery:
    """One delivery under way."""

    def __init__(
        self, record: LocalAttemptRecord, attempt_spec: LocalAttemptSpec, result: AttemptResult | None
    ) -> None:
        """Delivers the result, or renews the lease while there is none. Raises OSError when it cannot fork now."""
        self.brings_outcome = result is not None
        self.begun = lease_clock()
        answers, sender = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(answers)
            os.close(sender)
            raise
        if self.pid == 0:
            _run(record, attempt_spec, result, sender)
        os.close(sender)
        self._answers = answers
        self._ends = time.monotonic() + min(PATIENCE, max(_SHORTEST_PATIENCE, attempt_spec.lease / 4))

    def fileno(self) -> int:
        return self._answers

    def due(self) -> float:
        """When it is given up, in monotonic seconds."""
        return self._ends

    def give_up(self) -> Answer:
        os.kill(self.pid, signal.SIGKILL)
        return self.answer()

    def answer(self) -> Answer:
        """To be called when `fileno()` is readable."""
        body = bytearray()
        while part := os.read(self._answers, 65536):
            body += part
        os.close(self._answers)
        os.waitpid(self.pid, 0)
        try:
            return msgspec.msgpack.decode(bytes(body), type=Answer)
        except msgspec.DecodeError:
            return Answer(problem="the delivery was interrupted")


def _run(record: LocalAttemptRecord, attempt_spec: LocalAttemptSpec, result: AttemptResult | None, sender: int) -> None:
    """The forked process: never returns."""
    try:
        os.setsid()
        # A worker at the other end of the shim's connections must see the shim's death.
        close_inherited_descriptors([sender])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        answer = _renew(attempt_spec) if result is None else _finish(record, attempt_spec, result)
    except StokerError as error:
        answer = Answer(problem=str(error))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must not go on as the shim
        answer = Answer(problem=f"internal error: {type(error).__name__}: {error}")
    try:
        os.write(sender, msgspec.msgpack.encode(answer))
    finally:
        os._exit(0)


def _renew(attempt_spec: LocalAttemptSpec) -> Answer:
    from stoker.queue import open_queue

    with open_queue(attempt_spec.queue) as store:
        found = store.renew([attempt_spec.attempt], attempt_spec.lease)
    return Answer(alive=attempt_spec.attempt in found, cancel=found.get(attempt_spec.attempt, False))


def _finish(record: LocalAttemptRecord, attempt_spec: LocalAttemptSpec, result: AttemptResult) -> Answer:
    from stoker.engines.delivery import deliver
    from stoker.queue import open_queue

    with open_queue(attempt_spec.queue) as store:
        return Answer(alive=deliver(store, record, attempt_spec, result))
