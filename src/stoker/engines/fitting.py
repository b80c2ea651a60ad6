"""The first phase of a job that asked for it: finding the batch size on the GPUs that it got."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import StokerError
from stoker.fit.model import Command, FitSpec, Fitted, argv
from stoker.gpus.prober import Prober
from stoker.paths import private_directory
from stoker.runs.plan import Plan
from stoker.units import format_memory

if TYPE_CHECKING:
    from stoker.fit.cache import Key


class BatchSizeFit(msgspec.Struct, frozen=True, kw_only=True):
    """What an attendant needs to fit a job: fit_fields in its assignment."""

    spec: FitSpec
    command: Command
    """As the job has it, with places for the size and the id or without."""
    job: str
    number: int
    """Which attempt it is: its probes have ids that no other attempt's had."""
    most_memory: int | None = None
    """Bytes that it may take on each GPU, where it shares them."""

    def find(
        self,
        plan: Plan,
        gpus: tuple[str, ...],
        environment: Mapping[str, str],
        place: Path,
        home: Path,
        prober: Prober,
        tell: Callable[[str], None],
        check: Callable[[], None],
    ) -> "tuple[Fitted, Key]":
        """Probes, unless a cached answer will do; and what that is cached by.

        `check` raises when somebody wants it all to end.
        """
        # Only few jobs are fitted, and every attendant would carry it.
        from stoker.fit.cache import FitCache, key_of, learned
        from stoker.fit.fitter import FitRequest, Fitter

        private_directory(place)
        spec = self.spec
        request = FitRequest(
            command=self.command,
            search_options=spec.search_options,
            overrides=spec.overrides,
            limits=spec.limits,
            rate=spec.rate,
            environment=environment,
            directory=plan.directory,
            gpus=gpus,
            outputs=place,
            name=f"{self.job}-probe" if self.number == 1 else f"{self.job}-{self.number}-probe",
            most_memory=self.most_memory,
        )
        fitter = Fitter(request, prober, tell, check)
        key = key_of(self.command, plan.directory or "/", fitter.gpus[0], spec.search_options, spec.overrides)
        cached = FitCache(home).find(key)
        is_young = spec.reuse is not None and cached is not None and cached.at >= time.time() - spec.reuse
        if cached is not None and is_young and cached.fitted.predicted <= fitter.limit():
            tell(f"a batch of {cached.fitted.size} was found before, and is taken")
            return cached.fitted, key
        search_options = learned(cached, spec.search_options)
        if search_options != spec.search_options:
            tell(f"a larger batch than {search_options.most} ran out of memory in a real run before: none is tried")
            fitter = Fitter(msgspec.structs.replace(request, search_options=search_options), prober, tell, check)
        fitted = fitter.fit()
        tell(f"a batch of {fitted.size} takes {format_memory(fitted.predicted)} of {format_memory(fitted.limit)}")
        self.remember(home, key, fitted, None, tell)
        return fitted, key

    def remember(
        self, home: Path, key: "Key", fitted: Fitted, ran_out: int | None, tell: Callable[[str], None]
    ) -> None:
        """Also with which size the real run ran out of memory, if it did."""
        from stoker.fit.cache import FitCache

        try:
            FitCache(home).keep(key, fitted, ran_out)
        except StokerError as error:
            tell(f"the answer is not cached: {error}")

    def plan_at(self, plan: Plan, size: int, accumulate: int | None) -> Plan:
        """The real run at this size."""
        return msgspec.structs.replace(
            plan, command=argv(self.spec.overrides.real(self.command, size, accumulate, self.job))
        )

    def accumulate_at(self, size: int) -> int | None:
        """Steps that make up the effective batch, at a size that was not the answer."""
        effective = self.spec.search_options.effective
        return None if effective is None else -(-effective // size)

    def environment_at(self, environment: Mapping[str, str], size: int) -> dict[str, str]:
        return self.spec.overrides.environment(environment, size) | {"STOKER_BATCH_SIZE": str(size)}
