"""The text of a configuration file, or a sentence that says why there is none."""

from pathlib import Path

from stoker.fill.mistakes import Mistake, Mistakes


def file_text(path: Path) -> str:
    """What is in this file, which must be UTF-8."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Mistakes([Mistake(str(path), "this file does not exist: write it, or name another")]) from None
    except OSError as error:
        sentence = f"this file cannot be read ({error.strerror}): mend that, or name another"
        raise Mistakes([Mistake(str(path), sentence)]) from None
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise Mistakes([Mistake(f"{path}:{line}", "this is not UTF-8: save the file as UTF-8")]) from None
