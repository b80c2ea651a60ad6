"""A short way to the queue for an attendant whose worker is gone: a forked process that says or asks one thing.

The database may be slow, away or behind a dead network. Whatever happens there happens to the errand; the attendant
goes on hearing its job, its signals and its clock.
"""

import os
import signal
import time
from typing import Final

import msgspec

from stoker.engines.local.attempt_spec import AttemptRecord, AttemptSpec, now
from stoker.engines.local.messages import AttemptResult
from stoker.errors import StokerError
from stoker.procfs import close_inherited_descriptors

# Longer than the database's own timeouts together; a process that hangs on a dead network disk is not waited for.
PATIENCE: Final = 60.0
# With a short lease there must be time for another; a machine that is busy needs that much for one.
_SHORTEST_PATIENCE: Final = 5.0


class Answer(msgspec.Struct, frozen=True):
    """What came back; `problem` when the queue could not be asked."""

    alive: bool = False
    """Whether the attempt still had no outcome."""
    cancel: bool = False
    problem: str | None = None


class DetachedDelivery:
    """One that is under way."""

    def __init__(self, record: AttemptRecord, attempt_spec: AttemptSpec, over: AttemptResult | None) -> None:
        """Renews the lease, or brings the outcome when there is one. Raises OSError when there can be none now."""
        self.brings_outcome = over is not None
        self.begun = now()
        answers, told = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(answers)
            os.close(told)
            raise
        if self.pid == 0:
            _run(record, attempt_spec, over, told)
        os.close(told)
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
            return Answer(problem="the way to the queue was cut short")


def _run(record: AttemptRecord, attempt_spec: AttemptSpec, over: AttemptResult | None, told: int) -> None:
    """The errand's own process: never returns."""
    try:
        os.setsid()
        # The worker must see the death of the shim, not that of this process.
        close_inherited_descriptors([told])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        answer = _renew(attempt_spec) if over is None else _finish(record, attempt_spec, over)
    except StokerError as error:
        answer = Answer(problem=str(error))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must not go on as the attendant
        answer = Answer(problem=f"internal error: {type(error).__name__}: {error}")
    try:
        os.write(told, msgspec.msgpack.encode(answer))
    finally:
        os._exit(0)


def _renew(attempt_spec: AttemptSpec) -> Answer:
    from stoker.queue import open_queue

    with open_queue(attempt_spec.queue) as store:
        found = store.renew([attempt_spec.attempt], attempt_spec.lease)
    return Answer(alive=attempt_spec.attempt in found, cancel=found.get(attempt_spec.attempt, False))


def _finish(record: AttemptRecord, attempt_spec: AttemptSpec, over: AttemptResult) -> Answer:
    from stoker.engines.delivery import deliver
    from stoker.queue import open_queue

    with open_queue(attempt_spec.queue) as store:
        alive = deliver(store, record, attempt_spec, over)
    return Answer(alive=alive)
