"""A person's editor, opened on a job; nothing that they wrote is lost."""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.edit_text import written
from stoker.errors import BadInputError, StokerError

if TYPE_CHECKING:
    from stoker.queue import Job


def edited_text(job: "Job") -> str:
    """What is in the text after the editor was closed."""
    path = _file(job, written(job))
    try:
        _open(path)
        text = text_of(str(path))
    except StokerError as error:
        if path.read_bytes() == written(job).encode():
            path.unlink()
            raise
        raise StokerError(f"{error}; nothing was changed, and your text is in {path}") from None
    path.unlink()
    return text


def kept(job: "Job", text: str) -> str:
    """Where the text was put, for the person to mend it."""
    return str(_file(job, text))


def text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadInputError(f"{file} is not text in UTF-8") from None
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror}") from None


def _file(job: "Job", text: str) -> Path:
    number, name = tempfile.mkstemp(prefix=f"stoker-{job.id}-", suffix=".toml")
    with os.fdopen(number, "w", encoding="utf-8") as stream:
        stream.write(text)
    return Path(name)


def _open(path: Path) -> None:
    chosen = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        ended = subprocess.run([*shlex.split(chosen), str(path)], check=False)
    except (OSError, ValueError):
        raise StokerError(f"the editor {chosen!r} cannot be started: set EDITOR to one that is there") from None
    if ended.returncode != 0:
        raise StokerError(f"the editor {chosen!r} ended with code {ended.returncode}")
