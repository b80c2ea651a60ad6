"""Finds the batch size of a job on its GPUs before the job runs."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stoker.engines.attempt import AttemptRecord, BatchSizeFit, lease_clock
from stoker.errors import StokerError
from stoker.fit.model import argv, smaller
from stoker.gpus.prober import Prober
from stoker.logs.reader import read_tail
from stoker.logs.writer import LogWriter
from stoker.paths import private_directory
from stoker.queue.commands import Command
from stoker.runs.plan import Plan
from stoker.runs.record import Status
from stoker.units import format_duration, format_memory

# A job that fails silently in its first minutes has most likely met a larger batch than its probes.
_FIRST_MINUTES: Final = 600.0
_RESTARTED: Final = ", and is started again with a batch of "
# Tracebacks of other ranks follow the out-of-memory message.
_OOM_WITHIN: Final = 256 * 1024


class FittedRun:
    """The runs of a fitted job. When it runs out of memory, it is restarted with a smaller batch."""

    def __init__(self, fit: BatchSizeFit, record: AttemptRecord, log_limit: int) -> None:
        self._fit = fit
        self.probed: Command = fit.command
        """The command of the probes."""
        self._record = record
        self.outputs = [record.output]
        """The job's logs. The log of the machine that failed first comes first."""
        self._log_limit = log_limit
        self._home = record.directory.parent.parent
        self._retries = fit.spec.retries_oom
        self._size = 0
        self._started_at = 0.0
        self._kills: int | None = None
        """The count of OOM kills when the run started."""
        self._ran_out = False
        self._failure = ""
        self._smaller_because = ""
        self.gives_up = False

    @property
    def description(self) -> str:
        """The batch size, and why it is smaller than the probes found."""
        return ", ".join(filter(None, [f"batch size {self._size}", self._smaller_because]))

    def find(
        self,
        plan: Plan,
        gpus: tuple[str, ...],
        environment: Mapping[str, str],
        prober: Prober,
        check: Callable[[], None],
    ) -> None:
        """Finds the batch size by probes, or in the cache. `check` raises to stop the job."""
        # Imported here to keep shims small: few jobs are fitted.
        from stoker.fit.cache import FitCache, key_of, learned
        from stoker.fit.fitter import FitRequest, Fitter

        fit, spec = self._fit, self._fit.spec
        probes = self._record.directory / "probes"
        private_directory(probes)
        request = FitRequest(
            command=self.probed,
            search_options=spec.search_options,
            overrides=spec.overrides,
            limits=spec.limits,
            rate=spec.rate,
            environment=environment,
            directory=plan.directory,
            gpus=gpus,
            outputs=probes,
            name=f"{fit.job}-probe" if fit.number == 1 else f"{fit.job}-{fit.number}-probe",
            most_memory=fit.most_memory,
        )
        fitter = Fitter(request, prober, self._log, check)
        self._key = key_of(self.probed, plan.directory or "/", fitter.gpus[0], spec.search_options, spec.overrides)
        cached = FitCache(self._home).find(self._key)
        is_young = spec.reuse is not None and cached is not None and cached.at >= time.time() - spec.reuse
        if cached is not None and is_young and cached.fitted.predicted <= fitter.limit():
            self._log(f"a batch of {cached.fitted.size} was found before, and is taken")
            self._fitted = cached.fitted
        else:
            search_options = learned(cached, spec.search_options)
            if search_options != spec.search_options:
                self._log(
                    f"a larger batch than {search_options.most} ran out of memory in a real run before: none is tried"
                )
                request = msgspec.structs.replace(request, search_options=search_options)
                fitter = Fitter(request, prober, self._log, check)
            self._fitted = fitted = fitter.fit()
            self._log(
                f"a batch of {fitted.size} takes {format_memory(fitted.predicted)} of {format_memory(fitted.limit)}"
            )
            self._cache(None)
        self._write_fit()

    def run(self, plan: Plan, environment: dict[str, str], run: Callable[[Plan, dict[str, str]], bool]) -> None:
        """Runs the job at the size found, then at smaller ones. `run` returns True if another run can follow."""
        from stoker.fit.oom import host_kills

        spec = self._fit.spec
        size: int | None = self._fitted.size
        while size is not None:
            self._size, self._ran_out = size, False
            self._started_at, self._kills = lease_clock(), host_kills()
            command = argv(spec.overrides.real(self._fit.command, size, self._fitted.accumulate, self._fit.job))
            may_follow = run(
                msgspec.structs.replace(plan, command=command),
                spec.overrides.environment(environment, size) | {"STOKER_BATCH_SIZE": str(size)},
            )
            size = smaller(size, spec.search_options) if self._ran_out and may_follow else None
            if size is not None:
                self._restart_with(size)

    def _restart_with(self, size: int) -> None:
        failed = self._size
        self._smaller_because = f"as it {self._failure} with {failed}"
        self._log(f"it {self._failure}{_RESTARTED}{size}")
        lasted = format_duration(round(lease_clock() - self._started_at))
        again = f"a batch of {failed} {self._failure} after {lasted}, and was started again smaller"
        note = "; ".join(filter(None, [self._fitted.note, again]))
        effective = self._fit.spec.search_options.effective
        accumulate = None if effective is None else -(-effective // size)
        self._fitted = msgspec.structs.replace(self._fitted, size=size, accumulate=accumulate, note=note)
        self._write_fit()
        # The next job like this one starts smaller.
        self._cache(failed)

    def restarts_after(self, status: Status) -> bool:
        """True if the run ended out of memory and a smaller one follows."""
        if self.gives_up or self._retries <= 0 or not self._is_out_of_memory(status):
            return False
        self._ran_out = True
        self._retries -= 1
        return True

    def _is_out_of_memory(self, status: Status) -> bool:
        if status.ending != "exited" or not status.exit_code:
            return False
        from stoker.fit.oom import host_kills, is_out_of_memory, is_silent, was_killed

        # Only the last run's output counts.
        output = read_tail(self.outputs[0], _OOM_WITHIN).rpartition(_RESTARTED)[2]
        # Smaller probes succeeded, so a library's vague error is about the size.
        if is_out_of_memory(output, status.exit_code, smaller_ran=True) is not None:
            self._failure = "ran out of memory"
            return True
        self._failure = "probably ran out of memory"
        if was_killed(status.exit_code):
            kills = host_kills()
            return kills is not None and self._kills is not None and kills > self._kills
        # The probes succeeded, but validation and long sequences come later: an early silent failure is memory.
        return lease_clock() - self._started_at < _FIRST_MINUTES and is_silent(output)

    def _cache(self, ran_out: int | None) -> None:
        """Caches the answer for similar jobs. `ran_out`: the size at which a real run ran out of memory, if any."""
        from stoker.fit.cache import FitCache

        try:
            FitCache(self._home).keep(self._key, self._fitted, ran_out)
        except StokerError as error:
            self._log(f"the answer is not cached: {error}")

    def _write_fit(self) -> None:
        with contextlib.suppress(OSError):
            # Only people read it: a full disk does not stop the job.
            self._record.write_fit(self._fitted)

    def _log(self, message: str) -> None:
        """Writes to the job's output, which has no other writer between two runs."""
        for output in self.outputs:
            log = LogWriter(output, self._log_limit)
            log.write(f"stoker: {message}\n".encode(errors="replace"))
            log.close()
