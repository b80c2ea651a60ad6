"""What NVML and nvidia-smi report in the same codes."""

import functools
from typing import Final

_THROTTLING: Final = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}


@functools.lru_cache(maxsize=64)
def throttle_reasons(mask: int) -> tuple[str, ...]:
    """What holds the clocks down, in words."""
    words = tuple(word for bit, word in _THROTTLING.items() if mask & bit)
    return (*words, "another reason") if mask & ~sum(_THROTTLING) else words
