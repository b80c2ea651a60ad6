"""The plan of a run: the command, and when it is stopped."""

import signal
from typing import Final

import msgspec

from stoker.errors import BadInputError
from stoker.gpus.prober import DEFAULT_DEADLINE
from stoker.rules.registry import policies_of
from stoker.rules.rule import Policy, Stored

# A training needs time to write a checkpoint on SIGTERM.
DEFAULT_GRACE: Final = 30.0
# The code of GNU timeout for a command whose time was over.
IDLE_EXIT_CODE: Final = 124
# The GPUs that the job sees, narrowed to those that it uses.
OF_THE_JOB: Final = "job"
# No GPU is looked at: for a job that has none, or that is never to be stopped for idleness.
UNWATCHED: Final = "none"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One command and the rule it runs under."""

    command: tuple[str, ...]
    policy: Stored = {}
    """The settings of the rules that it is judged by, as far as they are not the defaults."""
    gpus: str = OF_THE_JOB
    """`job` (those it sees, narrowed to those it uses), `mine` (only those it uses), `visible`, `all`, `0,2`, uuids,
    or `none`: it is not watched."""
    signal_name: str = "TERM"
    grace: float = DEFAULT_GRACE
    max_time: float | None = None
    dry_run: bool = False
    then: tuple[str, ...] = ()
    """Actions after a rule has stopped it, as `--then` takes them."""
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
    """`TERM`, `SIGTERM` or `15`."""
    word = text.strip().upper()
    try:
        if word.isdigit():
            return signal.Signals(int(word))
        return signal.Signals[word if word.startswith("SIG") else f"SIG{word}"]
    except (KeyError, ValueError):
        raise BadInputError(f"{text!r} is not a signal: write a name such as TERM or INT") from None
