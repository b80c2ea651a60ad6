"""Descriptions of the NVIDIA driver's codes."""

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


# XIDs that matter to owners of machines and jobs, from NVIDIA's catalogue.
_XIDS: Final = {
    13: "an exception in a program's kernel",
    31: "a memory fault of a program",
    43: "a program was stopped",
    45: "a program was removed",
    48: "an uncorrectable memory error",
    62: "the GPU's microcontroller halted",
    63: "a memory row is to be remapped",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's firmware does not answer",
    120: "the GPU's firmware failed",
}
# After these XIDs a GPU is unusable until a reset or a reboot.
RESET_XIDS: Final = frozenset({48, 62, 64, 79, 95, 119, 120})


def describe_xid(xid: int) -> str:
    return f"XID {xid}: {_XIDS[xid]}" if xid in _XIDS else f"XID {xid}"


@functools.lru_cache(maxsize=64)
def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Descriptions of throttling reasons."""
    words = tuple(word for bit, word in _THROTTLING.items() if mask & bit)
    return (*words, "another reason") if mask & ~sum(_THROTTLING) else words
