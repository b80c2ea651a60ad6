"""A job on one line of a terminal or a page."""

import re
import shlex
from collections.abc import Mapping
from typing import Final

from stoker.masking import masked_command
from stoker.queue.commands import shell_text
from stoker.queue.model import Job
from stoker.schedule import moment_text

# Wider than any terminal; a command may be a script of a hundred kilobytes.
_LONGEST: Final = 500
# A command as a name: the program, and the last arguments, which differ most often.
_SHORT_COMMAND: Final = 60
_SHORT_END: Final = 20
# `/home/me/.venv/bin/python`, at the beginning of a command.
_PROGRAM_PATH: Final = re.compile(r"^/[^\s'\"]*/(?=[^\s'\"/])")


def command_text(job: Job) -> str:
    """The command as typed, with secrets masked."""
    return masked_command(whole_command(job))


def whole_command(job: Job) -> str:
    """The command as typed."""
    return shell_text(job.command)


def one_line(text: str) -> str:
    """Line ends become spaces; other unprintable characters are replaced."""
    shown = text[:_LONGEST]
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else _stand_in(letter) for letter in shown)
    return shown if len(text) <= _LONGEST else shown + "…"


def slurm_text(job: Job) -> str:
    """Its requests to Slurm: `partition gpu, --exclude=node3`."""
    named = [f"{key} {value}" for key, value in job.slurm.items() if isinstance(value, str)]
    further = [shlex.quote(option) for value in job.slurm.values() if not isinstance(value, str) for option in value]
    return ", ".join([*named, *further])


def where_text(job: Job) -> str:
    """Its requests to its machine: `gpu-box, label ib, not on old-box`."""
    chosen = [job.machine] if job.machine is not None else []
    chosen += [f"label {label}" for label in job.labels]
    return ", ".join([*chosen, *(f"not on {name}" for name in job.exclude_machines)])


def when_text(job: Job) -> dict[str, str]:
    """Its times: begin, recurrence and deadline."""
    return {
        "begin": "" if job.begin is None else moment_text(job.begin),
        "every": job.every or "",
        "deadline": "" if job.deadline is None else moment_text(job.deadline),
    }


def figures_text(figures: Mapping[str, float | None]) -> str:
    """`loss 0.1234, val_acc 0.91`."""
    return ", ".join(f"{name} {'nan' if value is None else format(value, '.4g')}" for name, value in figures.items())


def job_label(job: Job) -> str:
    """Its name, or a short form of its command, on one line."""
    return one_line(job.name) or short_command(job)


def job_title(job: Job) -> str:
    """Its name or short command, and its id: `train (3f9ede8c)`."""
    return f"{job_label(job)} ({job.id})"


def short_command(job: Job) -> str:
    """`python train.py --config configs/large.y … --lr 1e-3`."""
    text = _PROGRAM_PATH.sub("", one_line(command_text(job)).strip())
    if len(text) <= _SHORT_COMMAND:
        return text
    return f"{text[: _SHORT_COMMAND - _SHORT_END - 3].rstrip()} … {text[-_SHORT_END:].lstrip()}"


def quoted_label(job: Job, longest: int) -> str:
    """A short label, in quotes if it has several words."""
    name = short_label(job, longest)
    return f"“{name}”" if " " in name else name


def short_label(job: Job, longest: int) -> str:
    name = job_label(job)
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _stand_in(letter: str) -> str:
    return " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"
