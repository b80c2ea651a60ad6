"""How messages between the prober and its helper begin and end: one byte asks for a look, a framed answer follows."""

import struct
from typing import Final

ASK: Final = b"l"
HEADER: Final = struct.Struct("=I")


def frame(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body
