"""How busy some GPUs are, as one number: the mean over the devices of their peaks since the last time it was asked."""

import contextlib
import math
import os
import threading
from collections.abc import Sequence

from stoker.gpus.model import Look, known
from stoker.gpus.prober import DEFAULT_DEADLINE, Prober
from stoker.gpus.source import AbsentError


class UsageMeter:
    """A prober for programs that only want the number. It may be shared by threads, and a fork starts its own."""

    def __init__(self, spec: str = "auto", *, deadline: float = DEFAULT_DEADLINE) -> None:
        self._spec = spec
        self._deadline = deadline
        self._begin()
        os.register_at_fork(after_in_child=self._forked)

    def usage(self, device_ids: Sequence[int] | None = None) -> float:
        """A fraction between 0 and 1, or NaN when any of these GPUs is unknown, or none of them is here."""
        with self._one_at_a_time:
            try:
                look = self._prober.look()
            except AbsentError:
                return math.nan
        return mean_usage(look, device_ids)

    def present(self) -> frozenset[int]:
        """The indices of the GPUs that are here. Raises `AbsentError` when none is, with what was tried."""
        with self._one_at_a_time:
            return frozenset(gpu.index for gpu in self._prober.look().gpus)

    def close(self) -> None:
        with self._one_at_a_time:
            self._prober.close()

    def _begin(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._prober = Prober(self._spec, deadline=self._deadline)

    def _forked(self) -> None:
        """The helper belongs to the process that started it, and so do its answers."""
        inherited = self._prober
        idle = self._one_at_a_time.acquire(blocking=False) and inherited.remaining() >= inherited.deadline
        if idle:
            # Only closes this process's ends of the pipes. With a question outstanding it would also signal the
            # helper, which is not ours to end: the pipes then stay open as long as this process lives.
            with contextlib.suppress(OSError):
                inherited.leave()
        self._begin()


def mean_usage(look: Look, device_ids: Sequence[int] | None = None) -> float:
    """The mean over the GPUs with these indices, over all of them when none is named."""
    wanted = set(device_ids or ())
    chosen = [r for gpu, r in zip(look.gpus, look.readings, strict=True) if not wanted or gpu.index in wanted]
    peaks = [reading.utilization.peak if known(reading.utilization) else math.nan for reading in chosen]
    return math.fsum(peaks) / len(peaks) if peaks else math.nan
