"""From the sections of either file format to the configuration, with every mistake on the way."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from stoker.errors import BadInputError
from stoker.fill import values
from stoker.fill.config import Background, FillConfig, TerminalRule, WatchedGpus
from stoker.fill.mistakes import Mistake, Mistakes, in_order, nearest
from stoker.fill.schedule import EVERY_DAY, WHOLE_DAY, DailyHours, Schedule

Convert = Callable[[object], Any]

# Other users' work is looked for ten times a second at the most: each scan reads all of /proc.
_SHORTEST_INTERVAL: Final = 0.1
# A shorter pause would not be one: most programs take longer to fail.
_SHORTEST_BACKOFF: Final = 1.0

_MANNERS: Final[Mapping[str, Convert]] = {
    "idle_for": values.duration(),
    "settle": values.duration(),
    "grace": values.duration(),
    "backoff": values.duration(_SHORTEST_BACKOFF),
    # Background work may only step back.
    "nice": values.whole(0, 19),
    "ionice": values.ionice,
    "mps_priority": values.whole(0, 1),
    "mps_thread_percentage": values.percentage,
    "preempt": values.one_of("stop", "checkpoint"),
    "checkpoint_timeout": values.duration(_SHORTEST_INTERVAL),
}
"""Keys of one program that may also be set for all of them."""

DEFAULTS: Final[Mapping[str, Convert]] = {
    "interval": values.duration(_SHORTEST_INTERVAL),
    "ignore_shipped": values.boolean,
    **_MANNERS,
}
PROGRAM: Final[Mapping[str, Convert]] = {
    "command": values.command,
    "directory": values.path,
    "gpus": values.gpus,
    "each": values.boolean,
    "log": values.path,
    "environment": values.environment,
    **_MANNERS,
}
WATCHED: Final[Mapping[str, Convert]] = {"gpus": values.gpus, "ignore": values.names}
TERMINALS: Final[Mapping[str, Convert]] = {
    "enabled": values.boolean,
    "whitelist": values.names,
    "idle_seconds": values.duration(),
}
SCHEDULE: Final[Mapping[str, Convert]] = {"hours": values.hours, "days": values.days}

_ALIASES: Final = {
    "interval_seconds": "interval",
    "ignore_programs": "ignore",
    "cmd": "command",
    "dir": "directory",
    "idle": "idle_seconds",
    "env": "environment",
}
"""Names that gpu_mon's file has for the same, and short ones."""

_TRAILING_COMMENT: Final = re.compile(r"\s[;#]")


def own_name(key: str) -> str:
    """The name that the configuration has for this key."""
    return _ALIASES.get(key, key)


class Written(NamedTuple):
    """A value as it stands in the file."""

    value: object
    line: int


class Section(NamedTuple):
    """Keys that belong together."""

    name: str
    title: str
    """What sentences call it: `[process-0]`."""
    line: int
    entries: Mapping[str, Written]


class Sections(NamedTuple):
    """A whole file, sorted."""

    source: str
    defaults: Section
    watched: Sequence[Section]
    programs: Sequence[Section]
    terminals: Section | None
    schedule: Sequence[Section]
    how_to_add_a_program: str


class Reading(NamedTuple):
    """What could be understood, and what could not."""

    config: FillConfig
    mistakes: Sequence[Mistake]

    def result(self) -> FillConfig:
        """The configuration, if there is nothing wrong with it."""
        if self.mistakes:
            raise Mistakes(self.mistakes, self.config)
        return self.config


def assemble(file: Sections, mistakes: Sequence[Mistake] = ()) -> Reading:
    """The configuration; what is wrong is left out of it, so that the rest can be looked at too."""
    desk = _Desk(file.source, list(mistakes))
    common = desk.take(file.defaults, DEFAULTS)
    manners = {key: common.pop(key) for key in _MANNERS if key in common}
    programs = [desk.program(section, manners) for section in file.programs]
    if not file.programs:
        desk.blame(file.defaults.line, f"there is no program to run: {file.how_to_add_a_program}")
    config = FillConfig(
        **common,
        watched=tuple(WatchedGpus(name=each.name, **desk.take(each, WATCHED)) for each in file.watched),
        programs=tuple(program for program in programs if program),
        terminals=desk.terminals(file.terminals),
        schedule=desk.schedule(file.schedule),
        source=file.source,
        lines=_lines(file),
    )
    return Reading(config, in_order(desk.mistakes))


def _lines(file: Sections) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    rare = [file.terminals] if file.terminals else []
    for section in (file.defaults, *file.watched, *file.programs, *rare, *file.schedule):
        keys = {own_name(key): written.line for key, written in section.entries.items()}
        found.setdefault(section.name, {"": section.line}).update(keys)
    return found


class _Desk:
    """Takes sections in, and notes what is wrong with them."""

    def __init__(self, source: str, mistakes: list[Mistake]) -> None:
        self.mistakes = mistakes
        self._source = source

    def blame(self, line: int, sentence: str) -> None:
        self.mistakes.append(Mistake(f"{self._source}:{line}", sentence))

    def take(self, section: Section, known: Mapping[str, Convert]) -> dict[str, Any]:
        """The section's values by their own names, without those that are wrong."""
        taken: dict[str, Any] = {}
        written_as: dict[str, str] = {}
        for key, (value, line) in section.entries.items():
            name = own_name(key)
            if name not in known:
                self.blame(line, f"{section.title} has no key {key!r}: {_instead(key, known)}")
            elif name in written_as:
                self.blame(line, f"{section.title} {key}: {written_as[name]} says the same already: remove one of them")
            else:
                written_as[name] = key
                try:
                    taken[name] = known[name](value)
                except BadInputError as error:
                    hint = _comment_hint(value)
                    self.blame(line, f"{section.title} {key}: {error}{hint}")
        return taken

    def program(self, section: Section, manners: Mapping[str, Any]) -> Background | None:
        taken = self.take(section, PROGRAM)
        if "command" in taken:
            return msgspec.convert({**manners, **taken, "name": section.name}, Background)
        if not {"command", "cmd"} & section.entries.keys():
            self.blame(section.line, f"{section.title} has no command: add cmd = and the program that is to run")
        return None

    def terminals(self, section: Section | None) -> TerminalRule:
        # Who writes of terminals wants them to count.
        return TerminalRule(**{"enabled": True, **self.take(section, TERMINALS)}) if section else TerminalRule()

    def schedule(self, sections: Sequence[Section]) -> Schedule | None:
        hours: list[DailyHours] = []
        for section in sections:
            taken = self.take(section, SCHEDULE)
            if not section.entries:
                self.blame(section.line, f"{section.title} has no hours: add hours = 20:00-08:00")
            days = taken.get("days", EVERY_DAY)
            hours += [DailyHours(each.begin, each.end, days) for each in taken.get("hours", (WHOLE_DAY,))]
        return Schedule(tuple(hours)) if sections else None


def _instead(key: str, known: Mapping[str, Convert]) -> str:
    usable = [*known, *(alias for alias, name in _ALIASES.items() if name in known)]
    near = nearest(key, usable)
    return f"did you mean {near!r}?" if near else f"it takes {', '.join(sorted(known))}"


def _comment_hint(value: object) -> str:
    if isinstance(value, str) and _TRAILING_COMMENT.search(value):
        return "; a comment needs a line of its own"
    return ""
