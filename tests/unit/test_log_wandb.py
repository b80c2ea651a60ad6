"""Steps in the file of a run of Weights & Biases."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.logs.wandb import BLOCK, count_steps

HISTORY, OUTPUT, STATS = 2, 4, 7


def message(field: int, size: int, number: int = 0) -> bytes:
    """A protobuf message of this size or a little more, with its number and one field."""
    body = b"x" * size
    return (b"\x08" + varint(number) if number else b"") + bytes([field << 3 | 2]) + varint(len(body)) + body


def varint(number: int) -> bytes:
    found = []
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def written(*messages: bytes) -> bytes:
    """The file with these messages, as LevelDB writes a log."""
    file = bytearray(struct.pack("<4sHB", b":W&B", 0xBEE1, 0))
    for one in messages:
        rest, begun = one, False
        while True:
            room = BLOCK - len(file) % BLOCK
            if room < 7:
                file += bytes(room)
                continue
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = (3 if rest else 4) if begun else (2 if rest else 1)
            file += struct.pack("<IHB", 0, len(part), kind) + part
            begun = True
            if not rest:
                break
    return bytes(file)


@pytest.mark.parametrize("size", [3, 300, BLOCK - 14, BLOCK, 3 * BLOCK])
def test_only_metrics_are_steps(size: int) -> None:
    fields = [HISTORY, STATS, OUTPUT, HISTORY, STATS, HISTORY]
    file = written(*(message(field, size, number * 1000) for number, field in enumerate(fields)))
    assert count_steps(file, 0) == (3, len(file))


@given(
    st.lists(st.tuples(st.sampled_from([HISTORY, STATS]), st.integers(0, 40000)), max_size=12), st.integers(1, 50000)
)
def test_file_that_is_read_in_pieces_has_the_same_steps(kinds: list[tuple[int, int]], piece: int) -> None:
    file = written(*(message(field, size, 5) for field, size in kinds))
    steps, done, size = 0, 0, 0
    while size < len(file):
        size = min(size + piece, len(file))
        more, done = count_steps(file[done:size], done)
        steps += more
    assert steps == sum(field == HISTORY for field, _ in kinds)


def test_reading_may_begin_at_a_block() -> None:
    file = written(*[message(HISTORY, 1000)] * 100)
    skipped, _ = count_steps(file[: 2 * BLOCK], 0)
    later, _ = count_steps(file[2 * BLOCK :], 2 * BLOCK)
    assert 0 <= 100 - skipped - later <= 1


@given(st.binary(max_size=300), st.sampled_from([0, 7, BLOCK, BLOCK - 5]))
def test_any_bytes_can_be_read(data: bytes, offset: int) -> None:
    steps, done = count_steps(data, offset)
    assert steps >= 0
    assert done >= offset
