"""What a long-lived verb says: one line each, with the time, as soon as it happens."""

import contextlib
import os
import time


def tell(sentence: str) -> None:
    """People read it in a terminal, in a file, in the journal."""
    line = f"{time.strftime('%H:%M:%S')} {sentence}\n".encode(errors="backslashreplace")
    # A terminal that is gone, a disk that is full or a reader that left is no reason not to go on.
    with contextlib.suppress(OSError):
        os.write(1, line)
