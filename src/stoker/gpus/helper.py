"""The helper process, which alone calls the driver: it may block or die there, the prober does not.

One byte on standard input asks for a look; a framed reply follows on standard output.
"""

import contextlib
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import StokerError
from stoker.gpus.model import Gpu, Look, SourceChoice, Unknown
from stoker.gpus.source import AbsentError, Source, open_source
from stoker.procfs import close_inherited_descriptors

NAME: Final = "stoker-gpus"
REQUESTS: Final = 0
REPLIES: Final = 1
_NO_GPUS: Final[tuple[Gpu, ...]] = ()


ASK: Final = b"l"
HEADER: Final = struct.Struct("=I")


def frame(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


class HelperReply(msgspec.Struct, frozen=True, array_like=True):
    """The reply to one request. `look.gpus` is empty when `same_gpus`: they seldom change."""

    look: Look | None
    same_gpus: bool = False
    absent: str | None = None
    """Why there is no source to look with."""
    choices: tuple[SourceChoice, ...] = ()
    """With the first look: why this source was taken and others were left."""


def main() -> None:
    """The helper as a program."""
    _name, spec, root = sys.argv
    serve(spec, root)


def serve(spec: str, root: str) -> None:
    """Answers requests on standard input until the prober closes it."""
    # Ctrl-C at a terminal is for the program in the foreground; the helper ends with its prober.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A search for users of the GPUs must recognize this process as none.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    close_inherited_descriptors()
    reader = _Reader(spec, Path(root))
    encode = msgspec.msgpack.Encoder().encode
    try:
        while os.read(REQUESTS, 1) == ASK:
            _write(frame(encode(reader.answer())))
    except BrokenPipeError:
        pass  # the prober is gone
    finally:
        reader.close()


def _write(message: bytes) -> None:
    view = memoryview(message)
    while view:
        view = view[os.write(REPLIES, view) :]


class _Reader:
    """Opens the source at the first request, so that a driver that blocks then is guarded too."""

    def __init__(self, spec: str, root: Path) -> None:
        self._spec = spec
        self._root = root
        self._source: Source | None = None
        self._sent: tuple[Gpu, ...] | None = None

    def answer(self) -> HelperReply:
        choices: tuple[SourceChoice, ...] = ()
        try:
            if self._source is None:
                self._source, choices = open_source(self._spec, self._root)
            look = self._source.look()
        except AbsentError as absent:
            return HelperReply(None, absent=str(absent))
        except StokerError as error:
            look = self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - any failure must become an unknown look, not the end of the helper
            look = self._failed(f"Stoker's reader failed: {type(error).__name__}: {error}")
        if not look.gpus:
            return HelperReply(look, choices=choices)
        if look.gpus == self._sent and not choices:
            return HelperReply(msgspec.structs.replace(look, gpus=_NO_GPUS), same_gpus=True)
        self._sent = look.gpus
        return HelperReply(look, choices=choices)

    def _failed(self, reason: str) -> Look:
        name = self._source.name if self._source else self._spec
        return Look(name, time.monotonic(), time.time(), (), (), problem=Unknown(reason))

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
