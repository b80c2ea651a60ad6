"""Options of a fit by name: those of `[fit.NAME]` in stoker.toml, and one that is shipped."""

from collections.abc import Mapping
from typing import Any, Final

from stoker.errors import BadInputError

# The words are those of nanoGPT's own configuration, which refuses any that it does not know. It evaluates before its
# first step, so that a probe of a few steps has seen validation too, and writes its first checkpoint long after them.
SHIPPED: Final[Mapping[str, Mapping[str, Any]]] = {
    "nanogpt": {
        "batch-arg": "--batch_size={}",
        "probe-args": "--max_iters=30 --log_interval=1 --eval_iters=2 --wandb_log=False",
    },
}


def find_preset(name: str, own: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """What a preset sets, by the names that the options have on the command line, without the dashes."""
    preset = own.get(name, SHIPPED.get(name))
    if preset is None:
        there = ", ".join(sorted({*own, *SHIPPED}))
        raise BadInputError(f"there is no preset {name!r}: write [fit.{name}] into stoker.toml, or use one of {there}")
    return preset
