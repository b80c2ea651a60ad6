"""The configuration as `[fill]` in `stoker.toml`."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, overload

from stoker.fill.config import FillConfig
from stoker.fill.file_text import file_text
from stoker.fill.mistakes import Mistake, Mistakes, nearest
from stoker.fill.sections import DEFAULTS, Reading, Section, Sections, Written, assemble

_AT_LINE: Final = re.compile(r"at line ([0-9]+)")

Keys = tuple[str | int, ...]

# What is under [fill] beside plain values.
_TABLES: Final = ("program", "watch", "terminals", "schedule")
# What the file is called by where it has no names of its own: the same names as in an INI file.
_EVERYTHING, _TERMINALS, _SCHEDULE, _ALL_GPUS = "defaults", "tty", "schedule", "gpu-all"


def read(table: Mapping[str, Any], path: str | Path) -> FillConfig:
    """The configuration in this table, which stands in that file; `Mistakes` when there is anything wrong with it."""
    return parse(table, path).result()


@overload
def read_file(path: str | Path) -> FillConfig: ...
@overload
def read_file(path: str | Path, *, must_have: bool) -> FillConfig | None: ...
def read_file(path: str | Path, *, must_have: bool = True) -> FillConfig | None:
    """The same from the file itself; None when it has no [fill] and need not have one."""
    file = Path(path).expanduser()
    try:
        content = tomllib.loads(file_text(file))
    except tomllib.TOMLDecodeError as error:
        at = _AT_LINE.search(str(error))
        where = f"{file}:{at[1]}" if at else str(file)
        sentence = f"this is not TOML: {str(error).partition(' (at ')[0]}: mend that first"
        raise Mistakes([Mistake(where, sentence)]) from None
    if "fill" not in content and not must_have:
        return None
    if not isinstance(content.get("fill"), dict):
        raise Mistakes([Mistake(f"{file}:1", "there is no [fill] in this file: write it, with [[fill.program]] below")])
    return read(content["fill"], file)


def parse(table: Mapping[str, Any], path: str | Path) -> Reading:
    """What could be understood of this table, and all that is wrong with it."""
    return _Table(table, path).reading()


class _Table:
    """`[fill]`, and the lines that its keys are in."""

    def __init__(self, table: Mapping[str, Any], path: str | Path) -> None:
        self._table = table
        file = Path(path).expanduser()
        self._source = str(file)
        self._lines = _lines_of(file)
        self._mistakes: list[Mistake] = []

    def reading(self) -> Reading:
        plain = {key: value for key, value in self._table.items() if key not in (*_TABLES, "ignore")}
        self._refuse_unknown(plain)
        known = {key: value for key, value in plain.items() if key in DEFAULTS or key == "interval_seconds"}
        programs = self._named("program")
        watched = self._watched()
        self._refuse_same_names([*programs, *watched])
        terminals = self._tables("terminals", _TERMINALS)
        file = Sections(
            source=self._source,
            defaults=Section(_EVERYTHING, "[fill]", self._line(()), self._entries(known, ())),
            watched=watched,
            programs=programs,
            terminals=terminals[0] if terminals else None,
            schedule=self._tables("schedule", _SCHEDULE),
            how_to_add_a_program="add [[fill.program]] with name = and command =",
        )
        return assemble(file, self._mistakes)

    def _refuse_unknown(self, plain: Mapping[str, Any]) -> None:
        for key in plain:
            if key not in DEFAULTS and key != "interval_seconds":
                usable = (*DEFAULTS, *_TABLES, "ignore")
                near = nearest(key, usable)
                instead = f"did you mean {near!r}?" if near else f"it takes {', '.join(sorted(usable))}"
                self._blame((key,), f"[fill] has no key {key!r}: {instead}")

    def _refuse_same_names(self, sections: list[Section]) -> None:
        taken = {_EVERYTHING, _TERMINALS, _SCHEDULE}
        for section in sections:
            if section.name in taken:
                where = f"{self._source}:{section.line}"
                sentence = f"{section.title}: the name {section.name!r} is taken already: choose another"
                self._mistakes.append(Mistake(where, sentence))
            taken.add(section.name)

    def _watched(self) -> list[Section]:
        """The GPUs to watch: all, unless the file names some. `ignore` of the whole counts for each of them."""
        common = self._entries({"ignore": self._table["ignore"]} if "ignore" in self._table else {}, ())
        named = self._named("watch")
        if not named:
            return [Section(_ALL_GPUS, "[fill]", self._line(()), common)]
        return [section._replace(entries=_with_common(section.entries, common)) for section in named]

    def _named(self, kind: str) -> list[Section]:
        """The tables of an array, each with a name."""
        sections = []
        for keys, table in self._each(kind):
            name = table.get("name")
            if not isinstance(name, str) or not name.strip():
                self._blame((*keys, "name"), f"[[fill.{kind}]] has no name: add name = and a word that you know it by")
                name = f"{kind}-{keys[-1]}"
            rest = {key: value for key, value in table.items() if key != "name"}
            title = f"[[fill.{kind}]] {name.strip()}"
            sections.append(Section(name.strip(), title, self._line(keys), self._entries(rest, keys)))
        return sections

    def _tables(self, kind: str, name: str) -> list[Section]:
        """The table, or the tables of the array, without names."""
        return [
            Section(name, f"[fill.{kind}]", self._line(keys), self._entries(table, keys))
            for keys, table in self._each(kind)
        ]

    def _each(self, kind: str) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
        if kind not in self._table:
            return
        value = self._table[kind]
        if isinstance(value, dict):
            yield (kind,), value
        elif isinstance(value, list) and all(isinstance(each, dict) for each in value) and kind != "terminals":
            yield from (((kind, number), each) for number, each in enumerate(value))
        else:
            header = "[fill.terminals]" if kind == "terminals" else f"[[fill.{kind}]]"
            self._blame((kind,), f"[fill] {kind}: {value!r} is no table: write it as {header} and keys below it")

    def _entries(self, table: Mapping[str, Any], keys: Keys) -> dict[str, Written]:
        return {key: Written(value, self._line((*keys, key))) for key, value in table.items()}

    def _line(self, keys: Keys) -> int:
        """The line of this key; where it has none of its own, as inside {…}, that of what it is in."""
        while keys and keys not in self._lines:
            keys = keys[:-1]
        return self._lines.get(keys, 1)

    def _blame(self, keys: Keys, sentence: str) -> None:
        self._mistakes.append(Mistake(f"{self._source}:{self._line(keys)}", sentence))


def _with_common(entries: Mapping[str, Written], common: Mapping[str, Written]) -> dict[str, Written]:
    own, of_all = entries.get("ignore"), common.get("ignore")
    if own and of_all and isinstance(own.value, list) and isinstance(of_all.value, list):
        return {**entries, "ignore": Written([*own.value, *of_all.value], own.line)}
    return {**common, **entries}


class _Statement(NamedTuple):
    line: int
    is_header: bool
    content: Mapping[str, Any]


def _lines_of(path: Path) -> dict[Keys, int]:
    """By the keys that lead there below [fill], the line in which each begins."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    lines: dict[Keys, int] = {}
    counts: dict[Keys, int] = {}
    under: Keys = ()
    for line, is_header, content in _statements(text):
        keys = _path(content)
        if is_header:
            under = _header_path(keys, counts, repeated=_ends_in_list(content))
            lines.setdefault(under, line)
        else:
            for depth in range(1, len(keys) + 1):
                lines.setdefault((*under, *keys[:depth]), line)
    return {keys[1:]: line for keys, line in lines.items() if keys[:1] == ("fill",)}


def _statements(text: str) -> Iterator[_Statement]:
    """Headers and keys one by one: as many lines as it takes until they are TOML by themselves."""
    lines = text.replace("\r\n", "\n").split("\n")
    first = 0
    for last in range(len(lines)):
        try:
            content = tomllib.loads("\n".join(lines[first : last + 1]))
        except tomllib.TOMLDecodeError:
            continue
        if content:
            yield _Statement(first + 1, lines[first].lstrip().startswith("["), content)
        first = last + 1


def _path(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys down to the value of a statement: a table with more than one key, or none, is a value."""
    keys: list[str] = []
    value: Any = content
    while isinstance(value, dict) and len(value) == 1:
        key, value = next(iter(value.items()))
        keys.append(key)
        if isinstance(value, list):
            break
    return tuple(keys)


def _ends_in_list(content: Any) -> bool:
    while isinstance(content, dict) and content:
        content = next(iter(content.values()))
    return isinstance(content, list)


def _header_path(keys: tuple[str, ...], counts: dict[Keys, int], *, repeated: bool) -> Keys:
    """The header's keys, with the number of the table wherever it is one of an array."""
    found: Keys = ()
    for number, key in enumerate(keys):
        found = (*found, key)
        if repeated and number == len(keys) - 1:
            counts[found] = counts.get(found, -1) + 1
        if found in counts:
            found = (*found, counts[found])
    return found
