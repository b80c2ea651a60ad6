"""How a job is written on one line of a terminal or a page, whatever is in its command."""

import shlex
from typing import Final

from stoker.masking import masked_command
from stoker.queue.model import Job

# More than any terminal is wide; a command may be a script of a hundred kilobytes.
_LONGEST: Final = 500


def command_text(job: Job) -> str:
    """The command as a person would type it, without the secrets in it."""
    return masked_command(whole_command(job))


def whole_command(job: Job) -> str:
    """The command as a person would type it."""
    return job.command if isinstance(job.command, str) else shlex.join(job.command)


def one_line(text: str) -> str:
    """Without what would break a table or talk to the terminal: line ends become spaces, the rest is replaced."""
    shown = "".join(letter if letter.isprintable() else _stand_in(letter) for letter in text[:_LONGEST])
    return shown if len(text) <= _LONGEST else shown + "…"


def job_label(job: Job) -> str:
    """Its name, or else its command, on one line."""
    return one_line(job.name or command_text(job))


def quoted_label(job: Job, longest: int) -> str:
    """The same, cut, and in quotes where it is more than one word: then it is seen where it ends."""
    name = short_label(job, longest)
    return f"“{name}”" if " " in name else name


def short_label(job: Job, longest: int) -> str:
    name = job_label(job)
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _stand_in(letter: str) -> str:
    return " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"
