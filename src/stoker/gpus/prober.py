"""Reads GPUs through a helper process, each look with a deadline.

A call into a sick driver can block for minutes in an uninterruptible sleep. It then blocks the helper; the prober
returns an unknown look after the deadline, starts no second helper, sends no second request, and recovers when the
driver answers.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable
from typing import Final

import msgspec

from stoker.gpus.helper import ASK, HEADER, HelperReply
from stoker.gpus.model import Gpu, Look, Reading, SourceChoice, Unknown
from stoker.gpus.source import AbsentError, check_spec
from stoker.gpus.spawn import Helper, spawned

# How long a helper may take to end by itself before SIGTERM. Never SIGKILL: drivers have been seen to freeze after a
# client was killed during a call.
_GOODBYE: Final = 0.5
_CHUNK: Final = 1 << 18


class HelperProcess:
    """The helper and the pipes to it; nothing here blocks. `death` is None while it lives, then how it ended."""

    def __init__(self, helper: Helper) -> None:
        self.death: str | None = None
        self._helper = helper
        self._received = bytearray()
        os.set_blocking(helper.replies, False)

    @property
    def pid(self) -> int:
        return self._helper.pid

    def fileno(self) -> int:
        return self._helper.replies

    def ask(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # a dead helper is noticed when its reply is read
            os.write(self._helper.requests, ASK)

    def receive(self) -> bytes | None:
        """A complete message, or None; notices the helper's death."""
        while self.death is None:
            try:
                piece = os.read(self._helper.replies, _CHUNK)
            except BlockingIOError:
                return None
            if not piece:
                self._reap()
                return None
            if not self._received and len(piece) == HEADER.size + HEADER.unpack_from(piece)[0]:
                return piece[HEADER.size :]
            self._received += piece
            if (message := self._assembled()) is not None:
                return message
        return None

    def _assembled(self) -> bytes | None:
        """The message that came in several pieces, once it is complete."""
        if len(self._received) < HEADER.size:
            return None
        ends = HEADER.size + HEADER.unpack_from(self._received)[0]
        if len(self._received) < ends:
            return None
        message = bytes(memoryview(self._received)[HEADER.size : ends])
        self._received.clear()
        return message

    def _reap(self) -> None:
        self.release()
        self.death = "ended"
        if not self.reaped_within(_GOODBYE):
            self.death = "is stuck in the driver on its way out"

    def reaped_within(self, seconds: float) -> bool:
        """Whether the helper ended within this time; it is then reaped and `death` is set."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # out of descriptors: tried again later
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(seconds * 1000):
                return False
            # By pidfd: a process that reaps all its children may have taken this one already.
            ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        except ChildProcessError:
            return True
        finally:
            os.close(descriptor)
        self.death = _how(ended)
        return True

    def release(self) -> None:
        """Closes the pipes: a helper that is not blocked then ends."""
        os.close(self._helper.requests)
        os.close(self._helper.replies)

    def dismiss(self, *, busy: bool) -> None:
        """Ends the helper. A busy one may be blocked in the driver: it gets SIGTERM at once and is then left alone."""
        self.release()
        if self.reaped_within(0.0 if busy else _GOODBYE):
            return
        import signal

        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.reaped_within(_GOODBYE)


def _how(ended: os.waitid_result | None) -> str:
    if ended is None or ended.si_code == os.CLD_EXITED:
        return f"ended with code {ended.si_status if ended else '?'}"
    import signal

    return f"was killed by {signal.Signals(ended.si_status).name}"


# Longer than a healthy driver takes (a cold NVML initialisation without persistence mode: up to 2 s).
DEFAULT_DEADLINE: Final = 5.0
# A helper that dies at once is not started again faster than this.
_RESTART_EVERY: Final = 1.0


class Prober:
    """Looks at this machine's GPUs. `look()` waits; `ask()`, `fileno()` and `answer()` serve an event loop.

    There is at most one helper process and one outstanding request. Not for use from several threads.
    """

    def __init__(
        self,
        spec: str = "auto",
        *,
        deadline: float = DEFAULT_DEADLINE,
        root: str | None = None,
        start: Callable[[str, str], Helper] = spawned,
        early: Helper | None = None,
    ) -> None:
        """`early` is a helper that was started beforehand; it is used if it reads the same source."""
        check_spec(spec)
        self.spec = spec
        self.deadline = deadline
        self.choices: tuple[SourceChoice, ...] = ()
        self._root = root or os.environ.get("STOKER_ROOT", "/")
        self._source = spec
        self._gpus: tuple[Gpu, ...] = ()
        self._decode = msgspec.msgpack.Decoder(HelperReply).decode
        self._poll = select.poll()
        self._helper: HelperProcess | None = None
        self._started_at: float | None = None
        self._asked_at: float | None = None
        self._timed_out = False
        self._start = start
        if early is not None and early.spec == spec:
            self._use(early)

    @property
    def helper(self) -> int | None:
        """The pid of the helper process while there is one."""
        return self._helper.pid if self._helper is not None else None

    def look(self) -> Look:
        """One look, within the deadline. Raises `AbsentError` when there is nothing to look at here."""
        self.ask()
        while (look := self.answer()) is None:
            self._poll.poll(max(self.remaining(), 0) * 1000)
        return look

    def ask(self) -> None:
        """Asks for a look, unless one is outstanding already. Never blocks."""
        if self._timed_out:
            self._discard_late_answer()
        if self._asked_at is not None:
            return
        helper = self._living_helper()
        if helper is not None:
            helper.ask()
            self._asked_at = time.monotonic()

    def fileno(self) -> int:
        """Readable when an answer may have come; -1 while there is no helper."""
        return self._helper.fileno() if self._helper and self._helper.death is None else -1

    def remaining(self) -> float:
        """Seconds until the outstanding look is given up."""
        return self.deadline if self._asked_at is None else self._asked_at + self.deadline - time.monotonic()

    def answer(self) -> Look | None:
        """The requested look; unknown after its deadline, None before. Never blocks."""
        helper = self._helper
        if helper is None:
            return self._unknown("the helper that reads the GPUs could not be started")
        message = helper.receive() if helper.death is None else None
        if message is not None:
            self._asked_at = None
            return self._decoded(message)
        if helper.death is not None:
            self._asked_at = None
            return self._unknown(f"the helper that reads the GPUs {helper.death}; it is started again")
        if self._asked_at is None or self.remaining() > 0:
            return None
        if self._timed_out:
            return self._unknown(f"the driver has not answered for {time.monotonic() - self._asked_at:.0f} s")
        self._timed_out = True
        return self._unknown(f"the driver did not answer in {self.deadline:g} s")

    def close(self) -> None:
        """Ends the helper. One that is blocked in the driver ends by itself later."""
        if self._helper is not None and self._helper.death is None:
            self._helper.dismiss(busy=self._asked_at is not None)
        self._helper = None
        self._asked_at = None

    def leave(self) -> None:
        """Ends the helper without waiting for it: for a program that is about to end."""
        if self._asked_at is None and self._helper is not None:
            self._helper.release()
            self._helper = None
        self.close()

    def __enter__(self) -> "Prober":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _living_helper(self) -> HelperProcess | None:
        helper = self._helper
        if helper is not None and helper.death is None:
            return helper
        now = time.monotonic()
        too_soon = self._started_at is not None and now - self._started_at < _RESTART_EVERY
        if too_soon or (helper is not None and not helper.reaped_within(0.0)):
            return None
        self._started_at = now
        try:
            return self._use(self._start(self.spec, self._root))
        except OSError:
            return None

    def _use(self, helper: Helper) -> HelperProcess:
        self._helper = HelperProcess(helper)
        self._poll = select.poll()
        self._poll.register(self._helper.fileno(), select.POLLIN)
        return self._helper

    def _discard_late_answer(self) -> None:
        """Discards a reply that came after its deadline: its time was already reported as unknown."""
        message = self._helper.receive() if self._helper and self._helper.death is None else None
        if message is not None or (self._helper and self._helper.death is not None):
            self._asked_at = None
            self._timed_out = False
        if message is not None:
            try:
                self._decoded(message)
            except AbsentError:
                return

    def _decoded(self, message: bytes) -> Look:
        answer = self._decode(message)
        if answer.absent is not None or answer.look is None:
            raise AbsentError(answer.absent or "the helper that reads the GPUs found nothing")
        if answer.choices:
            self.choices = answer.choices
        look = answer.look
        self._source = look.source
        if answer.same_gpus:
            return msgspec.structs.replace(look, gpus=self._gpus)
        if look.problem and not look.gpus:
            return self._unknown(look.problem.reason)
        self._gpus = look.gpus
        return look

    def _unknown(self, reason: str) -> Look:
        readings = tuple(Reading.unknown(gpu.uuid, reason) for gpu in self._gpus)
        return Look(self._source, time.monotonic(), time.time(), self._gpus, readings, problem=Unknown(reason))


# The driver buffers sixteen seconds of samples: looks further apart would miss some.
LONGEST_WAIT: Final = 10.0
# At least this fraction of the interval lies between the end of one look and the next.
_LEAST_SHARE: Final = 0.5


class Sampler:
    """Looks at a steady interval. An event loop polls `fileno()` until `due()` and then calls `step()`."""

    def __init__(self, prober: Prober, every: float, *, first: float = 0.0) -> None:
        """`first` is how long to wait before the first look."""
        self._prober = prober
        self._every = min(every, LONGEST_WAIT)
        self._next = time.monotonic() + first
        self._asked = False

    def fileno(self) -> int:
        """Readable when a look may have come; -1 while none is asked for."""
        return self._prober.fileno() if self._asked else -1

    def due(self) -> float:
        """When to call `step()` at the latest."""
        return time.monotonic() + self._prober.remaining() if self._asked else self._next

    def no_later_than(self, at: float | None) -> None:
        """Moves the next look forward to `at`, when a decision is due."""
        if at is not None and not self._asked:
            self._next = min(self._next, max(at, time.monotonic()))

    def postpone(self, seconds: float) -> None:
        """Delays the next look."""
        self._next = time.monotonic() + seconds

    def step(self) -> Look | None:
        """A look that has come, or None. Raises `AbsentError` when there is nothing to look at."""
        if not self._asked:
            if time.monotonic() < self._next:
                return None
            self._prober.ask()
            self._asked = True
        try:
            look = self._prober.answer()
        except Exception:
            self._over()
            raise
        if look is not None:
            self._over()
        return look

    def _over(self) -> None:
        """Schedules the next look one interval after this one was due, or after now if this one was late.

        Missed looks are not made up for: rules that count looks would count one that covers no time.
        """
        self._asked = False
        now = time.monotonic()
        planned = self._next + self._every
        self._next = planned if planned - now >= self._every * _LEAST_SHARE else now + self._every
