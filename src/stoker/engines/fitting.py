"""The first phase of a job that asked for it: finding the batch size on the GPUs that it got."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import StokerError
from stoker.fit.model import Fitted
from stoker.fit.overrides import Command, argv
from stoker.fit.spec import FitSpec
from stoker.gpus.prober import Prober
from stoker.paths import private_directory
from stoker.runs.plan import Plan
from stoker.units import format_memory

if TYPE_CHECKING:
    from stoker.fit.cache import Key


class BatchSizeFit(msgspec.Struct, frozen=True, kw_only=True):
    """What an attendant needs to fit a job: kept in its assignment."""

    wish: FitSpec
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
        """Probes, unless a remembered answer will do; and what that is remembered by.

        `check` raises when somebody wants it all to end.
        """
        # Only few jobs are fitted, and every attendant would carry it.
        from stoker.fit.cache import FitCache, key_of, learned
        from stoker.fit.fitter import FitRequest, Fitter

        private_directory(place)
        wish = self.wish
        request = FitRequest(
            command=self.command,
            terms=wish.terms,
            overrides=wish.overrides,
            limits=wish.limits,
            rate=wish.rate,
            environment=environment,
            directory=plan.directory,
            gpus=gpus,
            outputs=place,
            name=f"{self.job}-probe" if self.number == 1 else f"{self.job}-{self.number}-probe",
            most_memory=self.most_memory,
        )
        fitter = Fitter(request, prober, tell, check)
        key = key_of(self.command, plan.directory or "/", fitter.gpus[0], wish.terms, wish.overrides)
        remembered = FitCache(home).recall(key)
        is_young = wish.reuse is not None and remembered is not None and remembered.at >= time.time() - wish.reuse
        if remembered is not None and is_young and remembered.fitted.predicted <= fitter.limit():
            tell(f"a batch of {remembered.fitted.size} was found before, and is taken")
            return remembered.fitted, key
        terms = learned(remembered, wish.terms)
        if terms != wish.terms:
            tell(f"a larger batch than {terms.most} ran out of memory in a real run before: none is tried")
            fitter = Fitter(msgspec.structs.replace(request, terms=terms), prober, tell, check)
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
            tell(f"the answer is not remembered: {error}")

    def plan_at(self, plan: Plan, size: int, accumulate: int | None) -> Plan:
        """The real run at this size."""
        return msgspec.structs.replace(
            plan, command=argv(self.wish.overrides.real(self.command, size, accumulate, self.job))
        )

    def accumulate_at(self, size: int) -> int | None:
        """Steps that make up the effective batch, at a size that was not the answer."""
        effective = self.wish.terms.effective
        return None if effective is None else -(-effective // size)

    def environment_at(self, environment: Mapping[str, str], size: int) -> dict[str, str]:
        return self.wish.overrides.environment(environment, size) | {"STOKER_BATCH_SIZE": str(size)}
