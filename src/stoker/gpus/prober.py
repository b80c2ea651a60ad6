"""Reads GPUs through a private or shared helper process, with a deadline for each look.

A call into a sick driver can block for minutes in uninterruptible sleep, but it blocks only the helper. After the
deadline the prober returns an unknown look. It starts no second helper, sends no second request, and recovers when the
driver answers.
"""

import contextlib
import os
import select
import time
from typing import Final, NamedTuple

import msgspec

from stoker.gpus.helper import HEADER, REQUEST, HelperReply
from stoker.gpus.model import Gpu, Holder, Look, Reading, SourceChoice, Unknown
from stoker.gpus.sharing import Sharing, shared_helper, started_here
from stoker.gpus.source import AbsentError, check_spec
from stoker.gpus.spawn import Helper, Start, private_helper, spawned

# How long a helper may take to end by itself before SIGTERM. Never SIGKILL: drivers have been seen to freeze after a
# client was killed during a call.
_GOODBYE: Final = 0.5
_CHUNK: Final = 1 << 16
_MOST_REQUESTS: Final = 1 << 32


class _ReceivedLook(Look, frozen=True, array_like=True):
    """A look with undecoded readings, since most supervisors need those of few GPUs."""

    readings: tuple[msgspec.Raw, ...]  # type: ignore[assignment]


class _ReceivedReply(HelperReply, frozen=True, array_like=True):
    """A reply with undecoded holders, which rarely change."""

    look: _ReceivedLook | None
    holders: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


# Made once, and shared by the processes that are forked from this one.
_DECODER: Final = msgspec.msgpack.Decoder(_ReceivedReply)
_READING: Final = msgspec.msgpack.Decoder(Reading)
_HOLDERS: Final = msgspec.msgpack.Decoder(tuple[tuple[Holder, ...], ...])


class _Selection(NamedTuple):
    """The GPUs of a narrowed look, valid for an unchanged list of GPUs and processes."""

    holders: bytes
    places: tuple[int, ...]
    gpus: tuple[Gpu, ...]


class HelperProcess:
    """The helper and the connection to it. Nothing blocks. `death` describes its end; None while it lives."""

    def __init__(self, helper: Helper) -> None:
        self.death: str | None = None
        self.pid = helper.pid
        self.is_shared = helper.is_shared
        self.has_replied = False
        self._connection = helper.connection
        self._received = bytearray()
        self._request = 0
        os.set_blocking(self._connection, False)

    def fileno(self) -> int:
        return self._connection

    def ask(self, due: float, not_before: float) -> None:
        """Requests a look at a time, replacing an earlier request."""
        self._request = (self._request + 1) % _MOST_REQUESTS
        # The death of a helper shows when its reply is read. A suspended helper reads no requests.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            os.write(self._connection, REQUEST.pack(self._request, due, not_before))

    def receive(self) -> bytes | memoryview | None:
        """A complete message, if any. Detects the helper's death."""
        while self.death is None:
            try:
                piece = os.read(self._connection, _CHUNK)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                piece = b""
            if not piece:
                self._reap()
                return None
            self.has_replied = True
            if not self._received and (whole := self._whole(piece)) is not None:
                return whole
            self._received += piece
            if (message := self._assembled()) is not None:
                return message
        return None

    def _whole(self, piece: bytes) -> memoryview | None:
        """The reply to the last request, if the piece is exactly that, as usual."""
        if len(piece) <= HEADER.size or HEADER.unpack_from(piece) != (len(piece) - HEADER.size, self._request):
            return None
        return memoryview(piece)[HEADER.size :]

    def _assembled(self) -> bytes | None:
        """The reply to the last request, once complete. Replies to earlier requests are dropped."""
        while len(self._received) >= HEADER.size:
            length, request = HEADER.unpack_from(self._received)
            ends = HEADER.size + length
            if len(self._received) < ends:
                return None
            message = bytes(self._received[HEADER.size : ends])
            del self._received[:ends]
            if request == self._request:
                return message
        return None

    def _reap(self) -> None:
        self.release()
        self.death = "ended"
        if self.is_shared and self.pid not in started_here():
            return  # another process started the helper
        if not self.reaped_within(_GOODBYE):
            self.death = "is stuck in the driver on its way out"

    def reaped_within(self, seconds: float) -> bool:
        """True if the helper ends within this time. It is then reaped, and `death` is set."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # out of descriptors; retried later
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
        """Closes the connection. The helper then ends, unless it is blocked or has other clients."""
        os.close(self._connection)

    def dismiss(self, *, busy: bool) -> None:
        """Ends the helper. A busy one may be blocked in the driver, so it gets SIGTERM at once and is left alone."""
        self.release()
        if self.is_shared or self.reaped_within(0.0 if busy else _GOODBYE):
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
# A helper that has replied within this time is there.
_JUST_NOW: Final = 0.05
# A helper that dies at once is not started again faster than this.
_RESTART_EVERY: Final = 1.0


class Prober:
    """Takes looks at this machine's GPUs. `look()` blocks; `ask()`, `fileno()` and `answer()` serve an event loop.

    There is at most one helper process and one outstanding request. Not thread-safe.
    """

    def __init__(
        self,
        spec: str = "auto",
        *,
        deadline: float = DEFAULT_DEADLINE,
        root: str | None = None,
        start: Start = spawned,
        sharing: Sharing = "no",
        early: Helper | None = None,
    ) -> None:
        """`early`: a helper started in advance, used if it reads the same source."""
        check_spec(spec)
        self.spec = spec
        self.deadline = deadline
        self.choices: tuple[SourceChoice, ...] = ()
        self._root = root or os.environ.get("STOKER_ROOT", "/")
        self._source = spec
        self._gpus: tuple[Gpu, ...] = ()
        self._wanted: frozenset[str] | None = None
        self._passed_over: frozenset[Holder] = frozenset()
        self._selection: _Selection | None = None
        self._poll = select.poll()
        self._helper: HelperProcess | None = None
        self._started_at: float | None = None
        self._asked_at: float | None = None
        self._replied_at = 0.0
        self._timed_out = False
        self._start = start
        self._sharing = sharing
        self._has_tried_again = False
        if early is not None and early.spec == spec:
            self._use(early)

    @property
    def helper(self) -> int | None:
        """The pid of the helper process, if any."""
        return self._helper.pid if self._helper is not None else None

    @property
    def children(self) -> tuple[int, ...]:
        """The helpers that are children of this process."""
        own = self._helper
        return started_here() if own is None or own.is_shared else (own.pid, *started_here())

    def look(self) -> Look:
        """Takes a look within the deadline. Raises `AbsentError` without GPUs."""
        self.ask()
        while (look := self.answer()) is None:
            self._poll.poll(max(self.remaining(), 0) * 1000)
        return look

    def narrow(self, wanted: frozenset[str], passed_over: frozenset[Holder]) -> None:
        """Limits looks to these GPUs, and those with a process that is not passed over.

        On a machine with many GPUs and jobs, each supervisor then decodes only its own readings.
        """
        self._wanted, self._passed_over, self._selection = wanted, passed_over, None

    @property
    def asked_for(self) -> float | None:
        """The time of the outstanding or planned look."""
        return self._asked_at

    def ask(self, max_age: float = 0.0, at: float = 0.0) -> None:
        """Requests a look, unless one is outstanding. Never blocks.

        `at`: the time of the look, or now if that is past; it replaces a planned one. `max_age`: its allowed age then.
        """
        if self._timed_out:
            self._discard_late_answer()
        now = time.monotonic()
        if self._asked_at is not None and self._asked_at <= now:
            return
        self._asked_at = None
        helper = self._living_helper()
        if helper is not None:
            self._asked_at = max(at, now)
            helper.ask(self._asked_at, self._asked_at - max_age)

    def fileno(self) -> int:
        """A descriptor that becomes readable when an answer may have arrived; -1 without a helper."""
        return self._helper.fileno() if self._helper and self._helper.death is None else -1

    def remaining(self) -> float:
        """Seconds until the outstanding look times out."""
        return self.deadline if self._asked_at is None else self._asked_at + self.deadline - time.monotonic()

    def answer(self) -> Look | None:
        """The requested look; unknown after its deadline, None before. Never blocks."""
        helper = self._helper
        if helper is None:
            return self._unknown("the helper that reads the GPUs could not be started")
        message = helper.receive() if helper.death is None else None
        if message is not None:
            self._asked_at = None
            self._has_tried_again = False
            self._replied_at = time.monotonic()
            return self._decoded(message)
        if helper.death is not None:
            was_due = self._asked_at is None or self._asked_at <= time.monotonic()
            self._asked_at = None
            return self._try_again(helper) if was_due else None
        if self._asked_at is None or self.remaining() > 0:
            return None
        if self._timed_out:
            return self._unknown(f"the driver has not answered for {time.monotonic() - self._asked_at:.0f} s")
        self._timed_out = True
        return self._unknown(f"the driver did not answer in {self.deadline:g} s")

    def _try_again(self, helper: HelperProcess) -> Look | None:
        if helper.is_shared and not helper.has_replied and not self._has_tried_again:
            # The helper ended for lack of clients just as this one connected.
            self._has_tried_again = True
            self.ask()
            return None
        return self._unknown(f"the helper that reads the GPUs {helper.death}; it is started again")

    def close(self) -> None:
        """Ends the helper. If it is blocked in the driver, it ends later by itself."""
        if self._helper is not None and self._helper.death is None:
            self._helper.dismiss(busy=self._is_busy())
        self._helper = None
        self._asked_at = None

    def leave(self) -> None:
        """Ends the helper without waiting, for a program that is about to exit."""
        if not self._is_busy() and self._helper is not None and self._helper.death is None:
            self._helper.release()
            self._helper = None
        self.close()

    def _is_busy(self) -> bool:
        return self._asked_at is not None and self._asked_at <= time.monotonic()

    def __enter__(self) -> "Prober":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _living_helper(self) -> HelperProcess | None:
        helper = self._helper
        now = time.monotonic()
        if helper is not None and helper.is_shared and helper.death is None and now - self._replied_at > _JUST_NOW:
            helper.receive()  # detects its end since the last look, so that the next look is not lost
        if helper is not None and helper.death is None:
            return helper
        too_soon = self._started_at is not None and now - self._started_at < _RESTART_EVERY
        sharing = "join" if too_soon and self._sharing == "start" else self._sharing
        if (shared := shared_helper(self.spec, self._root, self._start, sharing)) is not None:
            if shared.pid in started_here():
                self._started_at = now
            return self._use(shared)
        if too_soon or (helper is not None and not helper.is_shared and not helper.reaped_within(0.0)):
            return None
        self._started_at = now
        try:
            return self._use(private_helper(self.spec, self._root, self._start))
        except OSError:
            return None

    def _use(self, helper: Helper) -> HelperProcess:
        self._helper = HelperProcess(helper)
        self._poll = select.poll()
        self._poll.register(self._helper.fileno(), select.POLLIN)
        return self._helper

    def _discard_late_answer(self) -> None:
        """Discards a reply after its deadline, whose time was already reported as unknown."""
        message = self._helper.receive() if self._helper and self._helper.death is None else None
        if message is not None or (self._helper and self._helper.death is not None):
            self._asked_at = None
            self._timed_out = False
        if message is not None:
            try:
                self._decoded(message)
            except AbsentError:
                return

    def _decoded(self, message: bytes | memoryview) -> Look:
        answer = _DECODER.decode(message)
        if answer.absent is not None or answer.look is None:
            raise AbsentError(answer.absent or "the helper that reads the GPUs found nothing")
        if answer.choices:
            self.choices = answer.choices
        look = answer.look
        self._source = look.source
        if not answer.same_gpus:
            if look.problem and not look.gpus:
                return self._unknown(look.problem.reason)
            self._gpus, self._selection = look.gpus, None
        gpus, found = self._gpus, look.readings
        if self._wanted is not None:
            _holders, places, gpus = self._selected(self._wanted, bytes(answer.holders))
            found = tuple([found[place] for place in places])
        readings = tuple([_READING.decode(reading) for reading in found])
        return Look(look.source, look.at, look.wall, gpus, readings, look.problem, look.note)

    def _selected(self, wanted: frozenset[str], holders: bytes) -> _Selection:
        if self._selection is None or self._selection.holders != holders:
            on_gpus = _HOLDERS.decode(holders)
            places = [
                place
                for place, (gpu, on_gpu) in enumerate(zip(self._gpus, on_gpus, strict=True))
                if gpu.uuid in wanted or not self._passed_over.issuperset(on_gpu)
            ]
            gpus = tuple([self._gpus[place] for place in places])
            # The same object while it is equal: comparing it is then cheap.
            if self._selection is not None and self._selection.gpus == gpus:
                gpus = self._selection.gpus
            self._selection = _Selection(holders, tuple(places), gpus)
        return self._selection

    def _unknown(self, reason: str) -> Look:
        readings = tuple(Reading.unknown(gpu.uuid, reason) for gpu in self._gpus)
        return Look(self._source, time.monotonic(), time.time(), self._gpus, readings, problem=Unknown(reason))


# The driver buffers sixteen seconds of samples: looks further apart would miss some.
LONGEST_WAIT: Final = 10.0
# The shortest pause between the end of a look and the next, as a share of the interval.
_LEAST_SHARE: Final = 0.5
# The allowed age of a shared look, as a share of the interval and in seconds.
_OLDEST_SHARE: Final = 0.1
_OLDEST: Final = 0.5


class Sampler:
    """Takes looks at a steady interval. An event loop polls `fileno()` until `due()` and then calls `step()`."""

    def __init__(self, prober: Prober, every: float, *, first: float = 0.0, aligned: bool = False) -> None:
        """`first`: the delay of the first look.

        `aligned`: takes looks at multiples of the interval on the clock, and accepts slightly older ones, so that all
        aligned clients of a shared helper share its readings.
        """
        self._prober = prober
        self._every = min(every, LONGEST_WAIT)
        self._next = time.monotonic() + first
        self._asked = False
        self._aligned = aligned
        self._max_age = min(self._every * _OLDEST_SHARE, _OLDEST) if aligned else 0.0
        self._is_decision_due = False

    def fileno(self) -> int:
        """A descriptor that becomes readable when a look may have arrived; -1 without a request."""
        return self._prober.fileno() if self._asked else -1

    def due(self) -> float:
        """The latest time to call `step()`."""
        return time.monotonic() + self._prober.remaining() if self._is_asked() else self._next

    def no_later_than(self, at: float | None) -> None:
        """Advances the next look to `at`, when a decision is due."""
        now = time.monotonic()
        if at is not None and at < self._next and (not self._is_asked() or now < self._next):
            self._next = max(at, now)
            self._is_decision_due = True
            self._plan()

    def postpone(self, seconds: float) -> None:
        """Delays the next look."""
        self._next = time.monotonic() + seconds
        self._plan()

    def step(self) -> Look | None:
        """A new look, if any. Raises `AbsentError` without GPUs."""
        if not self._is_asked():
            if time.monotonic() < self._next:
                return None
            self._prober.ask(0.0 if self._is_decision_due else self._max_age)
            self._asked = True
        try:
            look = self._prober.answer()
        except Exception:
            self._over()
            raise
        if look is not None:
            self._over()
        return look

    def _is_asked(self) -> bool:
        """True if this look is requested. False if the helper has ended, or the prober took another look."""
        self._asked = self._asked and self._prober.asked_for is not None
        return self._asked

    def _plan(self) -> None:
        """Requests the next look in advance, which saves a wake-up of this process."""
        if self._aligned:
            self._prober.ask(0.0 if self._is_decision_due else self._max_age, self._next)
            # A driver that has not answered for long still has an earlier request.
            self._asked = self._prober.asked_for == self._next

    def _over(self) -> None:
        """Schedules the next look one interval after this one was due, or after now if this one was late.

        Missed looks are not made up for, since rules that count looks would count one that covers no time.
        """
        self._asked = self._is_decision_due = False
        now = time.monotonic()
        planned = self._next + self._every
        if self._aligned:
            planned -= planned % self._every
            if planned - now < self._every * _LEAST_SHARE:
                planned += self._every
        self._next = planned if planned - now >= self._every * _LEAST_SHARE else now + self._every
        self._plan()
