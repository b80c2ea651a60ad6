"""The plan of a run: the command, and when to stop it."""

import signal
from typing import Final

import msgspec

from stoker.errors import BadInputError
from stoker.gpus.prober import DEFAULT_DEADLINE
from stoker.rules.registry import policies_of
from stoker.rules.rule import Policy, Stored

# A training needs time to write a checkpoint on SIGTERM.
DEFAULT_GRACE: Final = 30.0
# The exit code of GNU timeout after a timeout.
IDLE_EXIT_CODE: Final = 124
# The job's visible GPUs, narrowed to those that it uses.
OF_THE_JOB: Final = "job"
# Reads no GPU, for a job without GPUs or without rules.
UNWATCHED: Final = "none"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A command and its rules."""

    command: tuple[str, ...]
    policy: Stored = {}
    """The settings of its rules that differ from the defaults."""
    gpus: str = OF_THE_JOB
    """`job` (visible GPUs, narrowed to used ones), `mine` (only used ones), `visible`, `all`, `0,2`, uuids, or `none`
    to watch no GPU."""
    signal_name: str = "TERM"
    grace: float = DEFAULT_GRACE
    max_time: float | None = None
    dry_run: bool = False
    then: tuple[str, ...] = ()
    """Actions of `--then`, after a rule has stopped it."""
    idle_exit_code: int = IDLE_EXIT_CODE
    source: str = "auto"
    deadline: float = DEFAULT_DEADLINE
    directory: str | None = None

    @property
    def policies(self) -> tuple[Policy, ...]:
        return () if self.gpus == UNWATCHED else policies_of(self.policy)

    @property
    def signal_number(self) -> signal.Signals:
        return parse_signal(self.signal_name)


def parse_signal(text: str) -> signal.Signals:
    """Parses `TERM`, `SIGTERM` or `15`."""
    word = text.strip().upper()
    try:
        if word.isdigit():
            return signal.Signals(int(word))
        return signal.Signals[word if word.startswith("SIG") else f"SIG{word}"]
    except (KeyError, ValueError):
        raise BadInputError(f"{text!r} is not a signal: write a name such as TERM or INT") from None
