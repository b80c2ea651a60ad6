"""What a long-lived verb says: one line each, with the time, as soon as it happens."""

import time

from stoker.streams import OUTPUT, emit


def tell(sentence: str) -> None:
    """People read it in a terminal, in a file, in the journal."""
    emit(OUTPUT, f"{time.strftime('%H:%M:%S')} {sentence}\n")
