"""Steps in `run-ID.wandb`, the file of a run of Weights & Biases. Pure.

The file also contains samples of the machine and output, which continue while a training hangs: only records of metrics
are steps. It is a LevelDB log of protobuf messages: blocks of 32 KiB with records, which have a header of seven bytes
and never cross the end of a block.
"""

from typing import Final

BLOCK: Final = 32768
_HEADER: Final = 7
"""That of a record, and also that of the file."""
# Types of a whole record, and of the first part of a longer one.
_FULL: Final = 1
_FIRST: Final = 2
_TYPES: Final = range(1, 5)
# Protobuf: the number of the message is field 1, a varint, and may be missing. A record of metrics is field 2.
_NUMBER: Final = 0x08
_HISTORY: Final = 0x12
_LONGEST_START: Final = 12


def count_steps(data: bytes, offset: int) -> tuple[int, int]:
    """The number of metrics records in the data at this offset of the file, and the offset of the first incomplete
    record. The offset is 0, one returned by this function, or the beginning of a block.
    """
    steps, at = 0, offset or _HEADER
    end = offset + len(data)
    while True:
        if BLOCK - at % BLOCK < _HEADER:
            at += BLOCK - at % BLOCK  # filled with zeros
        head = at - offset
        length, kind = int.from_bytes(data[head + 4 : head + 6], "little"), int.from_bytes(data[head + 6 : head + 7])
        if at + _HEADER + length > end or kind not in _TYPES:
            return steps, at
        if kind in {_FULL, _FIRST}:
            steps += _is_history(data[head + _HEADER : head + _HEADER + min(length, _LONGEST_START)])
        at += _HEADER + length


def _is_history(message: bytes) -> bool:
    at = 0
    if message[:1] == bytes([_NUMBER]):
        at = 1
        while at < len(message) and message[at] & 0x80:
            at += 1
        at += 1
    return message[at : at + 1] == bytes([_HISTORY])
