"""The data model of a fit: request, outcome of a probe, and answer."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.queue.commands import Command, filled, mentioned
from stoker.settings import OptionTable


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The requirements of a batch size."""

    base: int = 8
    """The first size to try: the training's default."""
    multiple: int = 8
    """The answer is a multiple of this, or a power of two if this is too large."""
    most: int = 4096
    margin: float = 0.10
    """The fraction of the memory that stays free."""
    per_gpu: int = 1
    """The number of such runs per GPU."""
    effective: int | None = None
    """The effective batch size, reached by gradient accumulation."""
    prefer: Literal["largest", "fastest"] = "largest"

    def check(self) -> None:
        for what, number in (("--base", self.base), ("--multiple", self.multiple), ("--max", self.most)):
            if not 1 <= number < 2**31:
                raise BadInputError(f"{what} {number} is out of range: use one or more")
        if self.base > self.most:
            raise BadInputError(f"--base {self.base} is above --max {self.most}: use a smaller one")
        if not 0 <= self.margin < 1:
            raise BadInputError("--margin must be at least 0% and below 100%")
        if self.per_gpu < 1:
            raise BadInputError("--per-gpu must be one or more")
        if self.effective is not None and self.effective < 1:
            raise BadInputError("--effective must be one or more")


class ProbeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The end conditions of a probe."""

    seconds: float = 120.0
    """The time limit."""
    flat_for: float = 20.0
    """Ends after this long without growth of memory, if the output shows no steps."""
    until: str | None = None
    """Ends only if the output matches this regular expression."""

    def pattern(self) -> re.Pattern[str] | None:
        if self.until is None:
            return None
        try:
            return re.compile(self.until)
        except re.error as error:
            raise BadInputError(f"--probe-until {self.until!r} is not a regular expression: {error}") from None


class Capacity(NamedTuple):
    """Bytes of memory for all runs on a GPU."""

    free: int
    """The memory that other processes leave free."""
    card: int
    """The GPU's memory, of which each of several runs gets an equal share."""

    def share(self, search_options: SearchOptions) -> float:
        """The limit of one run, before the margin."""
        return min(self.free, self.card / search_options.per_gpu)

    def limit(self, search_options: SearchOptions) -> int:
        return int(self.share(search_options) * (1 - search_options.margin))


class ProbeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run at one size."""

    size: int
    outcome: Literal["fits", "oom"]
    peak: int | None = None
    """Bytes used by the run's processes on their fullest GPU; None if unknown."""
    seconds: float = 0.0
    rate: float | None = None
    """Examples per second, if the output reports them."""
    settled: bool = True
    """The memory stopped growing, or the program exited by itself."""
    verification: bool = False
    suspected: bool = False
    """It failed, probably for lack of memory, but without a message."""


class NextProbe(NamedTuple):
    """The size to run next."""

    size: int
    verification: bool
    """This size is the answer unless this run shows otherwise."""


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer with its basis."""

    size: int
    accumulate: int | None = None
    """The number of gradient accumulation steps for the effective batch."""
    fixed: float
    slope: float
    """memory = fixed + slope × size, in bytes."""
    predicted: int
    limit: int
    """The limit in bytes."""
    observations: tuple[ProbeOutcome, ...] = ()
    note: str = ""
    """Remarks: a larger size is not faster, a flag is ignored."""


class NothingFitsError(StokerError):
    """Not even a batch of one fits."""


class ProbeFailedError(StokerError):
    """A probe failed for a reason other than memory."""


DEFAULT_ARGUMENT: Final = "--batch_size={}"
_PLACES: Final = ("batch_size", "accumulate")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """The ways to pass a batch size to a command, and options of probes."""

    argument: str | None = None
    """`--batch_size={}`: appended with the size in the braces; None for this default if the size has no other way."""
    variable: str | None = None
    """The environment variable for the size."""
    probe_arguments: str = ""
    """Appended last to the command of probes, so that they take precedence."""

    def check(self, command: Command, effective: int | None) -> None:
        """Raises BadInputError if the size would not reach the command."""
        ways = [
            name
            for name, is_there in (
                ("--batch-arg", self.argument is not None),
                ("--batch-env", self.variable is not None),
                ("{batch_size} in the command", "batch_size" in _mentioned(command)),
            )
            if is_there
        ]
        if len(ways) > 1:
            raise BadInputError(f"the size would go in twice, by {ways[0]} and by {ways[1]}: leave one of them out")
        if self.argument is not None and "{}" not in self.argument and "batch_size" not in _mentioned(self.argument):
            raise BadInputError(
                f"--batch-arg {self.argument!r} has no {{}} for the size: write it like --batch_size={{}}"
            )
        if self.variable is not None and not _VARIABLE.fullmatch(self.variable):
            raise BadInputError(
                f"--batch-env {self.variable!r} is not the name of a variable: write it like BATCH_SIZE"
            )
        for option, text in (("--batch-arg", self.argument or ""), ("--probe-args", self.probe_arguments)):
            _words(option, text)
        texts = (command, self.argument or "", self.probe_arguments)
        if effective is None and any("accumulate" in _mentioned(text) for text in texts):
            raise BadInputError("{accumulate} needs --effective, the effective batch size")

    def real(self, command: Command, size: int, accumulate: int | None, name: str | None = None) -> Command:
        """The command at this size; `name` replaces `{id}`."""
        fill = _filler(size, accumulate, name)
        appended: list[str] = []
        if self.variable is None and "batch_size" not in _mentioned(command):
            argument = (self.argument or DEFAULT_ARGUMENT).replace("{}", str(size))
            appended = [fill(word) for word in _words("--batch-arg", argument)]
        return _with(_mapped(fill, command), appended)

    def probe(self, command: Command, size: int, accumulate: int | None, name: str | None = None) -> Command:
        """The command of a probe at this size."""
        fill = _filler(size, accumulate, name)
        more = [fill(word) for word in _words("--probe-args", self.probe_arguments)]
        return _with(self.real(command, size, accumulate, name), more)

    def environment(self, environment: Mapping[str, str], size: int) -> dict[str, str]:
        """The environment at this size."""
        return {**environment, **({} if self.variable is None else {self.variable: str(size)})}


def argv(command: Command) -> tuple[str, ...]:
    """The words to execute."""
    return ("/bin/sh", "-c", command) if isinstance(command, str) else command


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInputError(f"{option} {text!r} cannot be split into words: {str(error).lower()}") from None


def _with(command: Command, words: list[str]) -> Command:
    if isinstance(command, str):
        return " ".join([command.rstrip(), *map(shlex.quote, words)])
    return (*command, *words)


def _mapped(fill: Callable[[str], str], command: Command) -> Command:
    return fill(command) if isinstance(command, str) else tuple(map(fill, command))


def _filler(size: int, accumulate: int | None, name: str | None) -> Callable[[str], str]:
    values = {"batch_size": str(size), "accumulate": str(accumulate)} | ({} if name is None else {"id": name})
    return lambda text: filled(text, values)


def _mentioned(command: Command) -> set[str]:
    words = (command,) if isinstance(command, str) else command
    return {name for word in words for name in mentioned(word, _PLACES)}


# After running out of memory in a real run, the size shrinks by this factor, to the next multiple.
_SMALLER = 0.8


class FitSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to find the batch size of a queued job, and what to do if it runs out of memory anyway."""

    search_options: SearchOptions = SearchOptions()
    overrides: Overrides = Overrides()
    limits: ProbeOptions = ProbeOptions()
    rate: str | None = None
    reuse: float | None = None
    """The maximum age of a cached answer in seconds."""
    retries_oom: int = 2
    """The number of restarts with a smaller size after running out of memory."""


def fit_fields(spec: FitSpec, commands: Sequence[Command], batch_size: int | None, gpus: int) -> dict[str, Any]:
    """The field `fit` of jobs with these commands and values. Raises BadInputError for jobs that cannot be fitted."""
    if batch_size is not None:
        raise BadInputError("--batch-size and --fit exclude each other: leave one of them out")
    if gpus == 0:
        raise BadInputError("--fit needs a GPU, and the job asks for none")
    spec.search_options.check()
    spec.limits.pattern()
    for command in commands:
        spec.overrides.check(command, spec.search_options.effective)
    fields: dict[str, Any] = msgspec.to_builtins(spec)
    return fields


def smaller(size: int, search_options: SearchOptions) -> int | None:
    """The next smaller size after running out of memory; None below one."""
    wanted = int(size * _SMALLER)
    rounded = wanted // search_options.multiple * search_options.multiple
    if rounded:
        return rounded
    return size // 2 or None


# nanoGPT's own configuration keys, since it refuses unknown ones. It evaluates before its first step, so that a short
# probe includes validation, and writes its first checkpoint much later.
SHIPPED: Final[Mapping[str, OptionTable]] = {
    "nanogpt": {
        "batch-arg": "--batch_size={}",
        "probe-args": "--max_iters=30 --log_interval=1 --eval_iters=2 --wandb_log=False",
    },
}


def find_preset(name: str, own: Mapping[str, OptionTable]) -> OptionTable:
    """The options of a preset, by their names without dashes."""
    preset = own.get(name, SHIPPED.get(name))
    if preset is None:
        there = ", ".join(sorted({*own, *SHIPPED}))
        raise BadInputError(f"there is no preset {name!r}: write [fit.{name}] into stoker.toml, or use one of {there}")
    return preset
