"""How a job's batch size was found, for people."""

from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.fit.model import Fitted, ProbeOutcome
from stoker.units import format_memory


def fit_words(fit: Mapping[str, Any]) -> str:
    """A few lines from what the queue keeps of it; nothing when that is nothing, or of a Stoker that knows more."""
    try:
        fitted = msgspec.convert(fit, Fitted)
    except msgspec.ValidationError:
        return ""
    steps = "" if fitted.accumulate is None else f", {fitted.accumulate} steps of accumulation"
    found = f"batch size {fitted.size}{steps}, about {format_memory(fitted.predicted)} of {format_memory(fitted.limit)}"
    probes = ", ".join(map(_probe, fitted.observations))
    return "\n".join([found, *([f"tried {probes}"] if probes else []), *([fitted.note] if fitted.note else [])])


def _probe(seen: ProbeOutcome) -> str:
    """`96 (61 GiB)`, `128 (out of memory)`."""
    if seen.outcome == "oom":
        return f"{seen.size} (out of memory)"
    return f"{seen.size} ({'it fits' if seen.peak is None else format_memory(seen.peak)})"
