"""How busy some GPUs are, as one number: the mean over the devices of their peaks since the look before."""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Collection
from typing import Final

from stoker.gpus.model import Gpu, Look, Reading, known
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError

# Longer than a look takes, shorter than a person waits for a program that is done.
_CLOSING: Final = 0.5


def mean_usage(look: Look, device_ids: Collection[int] | None = None) -> float:
    """A fraction of 1, over the GPUs with these indices, or over all when none is named. NaN when it is not known."""
    peaks = [r.utilization.peak if known(r.utilization) else math.nan for r in _chosen(look, device_ids)]
    return math.fsum(peaks) / len(peaks) if peaks else math.nan


def why_unknown(look: Look, device_ids: Collection[int] | None = None) -> str | None:
    """Why `mean_usage` is NaN, as part of a sentence; None when it is not."""
    chosen = _chosen(look, device_ids)
    if look.problem is not None:
        return look.problem.reason
    if not chosen:
        return "there is no such GPU here" if look.gpus else "there is no GPU here"
    return next((r.utilization.reason for r in chosen if not known(r.utilization)), None)


def chosen_gpus(look: Look, device_ids: Collection[int] | None = None) -> list[Gpu]:
    """The GPUs with these indices that are here, or all when none is named."""
    return [gpu for gpu in look.gpus if not device_ids or gpu.index in device_ids]


def _chosen(look: Look, device_ids: Collection[int] | None) -> list[Reading]:
    uuids = {gpu.uuid for gpu in chosen_gpus(look, device_ids)}
    return [reading for reading in look.readings if reading.uuid in uuids]


class UsageMeter:
    """A prober for programs that only want the number. It may be shared by threads, and a fork starts its own."""

    def __init__(self, open_prober: Callable[[], Prober]) -> None:
        """`open_prober` is called when the number is wanted for the first time, and again in a forked process."""
        self._open_prober = open_prober
        self._prober: Prober | None = None
        self._one_at_a_time = threading.Lock()
        os.register_at_fork(after_in_child=self._forked)

    def usage(self, device_ids: Collection[int] | None = None) -> float:
        """What `mean_usage` says now, and NaN where there is no GPU at all."""
        with self._one_at_a_time:
            if self._prober is None:
                self._prober = self._open_prober()
            try:
                look = self._prober.look()
            except AbsentError:
                return math.nan
        return mean_usage(look, device_ids)

    def close(self) -> None:
        """Says goodbye to the helper, unless another thread is asking it: it then goes when this process does."""
        if self._one_at_a_time.acquire(timeout=_CLOSING):
            try:
                if self._prober is not None:
                    self._prober.close()
            finally:
                self._one_at_a_time.release()

    def _forked(self) -> None:
        """The helper belongs to the process that started it, and so do its answers."""
        inherited, self._prober = self._prober, None
        nobody_asks = self._one_at_a_time.acquire(blocking=False)
        self._one_at_a_time = threading.Lock()
        if inherited is None or not nobody_asks or inherited.remaining() < inherited.deadline:
            # With a question outstanding, a goodbye would also signal the helper, which is not ours to end. The pipes
            # to it then stay open as long as this process lives.
            return
        with contextlib.suppress(OSError):
            inherited.leave()
