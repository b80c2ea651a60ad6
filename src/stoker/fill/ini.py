"""The configuration as gpu_mon's INI file: what Python's configparser made of it, with the line of every key."""

import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from stoker.fill.config import FillConfig
from stoker.fill.file_text import file_text
from stoker.fill.mistakes import Mistake, nearest
from stoker.fill.sections import (
    DEFAULTS,
    PROGRAM,
    SCHEDULE,
    TERMINALS,
    WATCHED,
    Reading,
    Section,
    Sections,
    Written,
    assemble,
    own_name,
)

_HEADER: Final = re.compile(r"\[(.+)\]")
_OPTION: Final = re.compile(r"(.*?)\s*[=:]\s*(.*)", re.DOTALL)
_REFERENCE: Final = re.compile(r"%(?:%|\(([^)]+)\)s)")
# configparser gives up at the same depth.
_DEEPEST_REFERENCE: Final = 10
# Values in this section count in every other one, as with any configparser file.
_EVERYWHERE: Final = "DEFAULT"
_TAKES: Final = {"defaults": DEFAULTS, "gpu": WATCHED, "process": PROGRAM, "tty": TERMINALS, "schedule": SCHEDULE}
_KINDS: Final = {"defaults": "[defaults]", "gpu": "[gpu-all]", "process": "[process-0]", "tty": "[tty]",
                 "schedule": "[schedule]"}  # fmt: skip


def read(path: str | Path) -> FillConfig:
    """The configuration in this file; `Mistakes` when there is anything wrong with it."""
    return parse(path).result()


def parse(path: str | Path) -> Reading:
    """What could be understood of this file, and all that is wrong with it."""
    file = Path(path).expanduser()
    source = str(file)
    mistakes: list[Mistake] = []
    raw = _sorted_out(_statements(file_text(file)), source, mistakes)
    if not raw:
        nothing = Mistake(f"{source}:1", "there is nothing in this file: write [gpu-all], [process-0] and their keys")
        return Reading(FillConfig(source=source), mistakes or [nothing])
    sections = [_section(each, raw, source, mistakes) for each in raw.values() if each.name != _EVERYWHERE]
    return assemble(_file(sections, source, mistakes), mistakes)


class _Statement(NamedTuple):
    """A header, a key with its value, or (without a key) a line that is neither."""

    line: int
    header: str | None
    key: str
    value: str


def _statements(text: str) -> Iterator[_Statement]:
    """As configparser divides a file: a line that is further in than its key goes on with the key's value."""
    open_key: _Statement | None = None
    more: list[str] = []
    indent = 0
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        content = line.strip()
        if content.startswith(("#", ";")):
            continue
        depth = len(line) - len(line.lstrip())
        if not content or (open_key and depth > indent):
            more.append(content)
            continue
        if open_key:
            yield open_key._replace(value="\n".join([open_key.value, *more]).rstrip())
        open_key, more, indent = None, [], depth
        statement = _statement(number, content)
        if statement.key:
            open_key = statement
        else:
            yield statement
    if open_key:
        yield open_key._replace(value="\n".join([open_key.value, *more]).rstrip())


def _statement(number: int, content: str) -> _Statement:
    if header := _HEADER.match(content):
        return _Statement(number, header[1], "", "")
    option = _OPTION.fullmatch(content)
    return _Statement(number, None, option[1].lower(), option[2]) if option else _Statement(number, None, "", content)


class _Raw(NamedTuple):
    """A section before references in it are filled in."""

    name: str
    line: int
    entries: dict[str, Written]


def _sorted_out(statements: Iterator[_Statement], source: str, mistakes: list[Mistake]) -> dict[str, _Raw]:
    """The statements by section; what is said twice counts as it was said first."""
    raw: dict[str, _Raw] = {}
    section: _Raw | None = None

    def blame(line: int, sentence: str) -> None:
        mistakes.append(Mistake(f"{source}:{line}", sentence))

    for line, header, key, value in statements:
        if header is not None:
            if header in raw:
                where = raw[header].line
                blame(line, f"[{header}] is there already, in line {where}: give one of them another name")
                section = _Raw(header, line, {})
            else:
                section = raw[header] = _Raw(header, line, {})
        elif not key:
            blame(line, f"{value!r} is neither a [section] nor key = value: put # before it if it is a comment")
        elif section is None:
            blame(line, f"{key!r} is in no section: write a [section] above it")
        elif key in section.entries:
            where = section.entries[key].line
            blame(line, f"[{section.name}] has {key!r} already, in line {where}: remove one of them")
        else:
            section.entries[key] = Written(value, line)
    return raw


def _section(raw: _Raw, everything: Mapping[str, _Raw], source: str, mistakes: list[Mistake]) -> Section:
    """The section with its references filled in, and with what counts everywhere."""
    common = everything[_EVERYWHERE].entries if _EVERYWHERE in everything else {}
    visible = {**common, **raw.entries}
    known = _TAKES.get(_kind(raw.name) or "", {})
    filled: dict[str, Written] = {}
    for key, (value, line) in visible.items():
        if key not in raw.entries and own_name(key) not in known:
            continue
        try:
            filled[key] = Written(_filled(str(value), visible), line)
        except LookupError as error:
            sentence = f"[{raw.name}] {key}: {error.args[0]}: write %% for a percent sign"
            mistakes.append(Mistake(f"{source}:{line}", sentence))
    return Section(raw.name, f"[{raw.name}]", raw.line, filled)


def _filled(value: str, visible: Mapping[str, Written], depth: int = 0) -> str:
    """The value with `%(key)s` replaced by that key's value, and `%%` by a percent sign."""
    if depth > _DEEPEST_REFERENCE:
        raise LookupError("its references go round in a circle")

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "%"
        if name.lower() not in visible:
            raise LookupError(f"{match[0]} refers to a key that is not there")
        return _filled(str(visible[name.lower()].value), visible, depth + 1)

    return _REFERENCE.sub(replace, value)


def _file(sections: list[Section], source: str, mistakes: list[Mistake]) -> Sections:
    """The sections by what they are, as gpu_mon knew them: by how their names begin."""
    kinds: dict[str, list[Section]] = {kind: [] for kind in _KINDS}
    for section in sections:
        kind = _kind(section.name)
        if kind:
            kinds[kind].append(section)
        else:
            word = section.name.partition("-")[0]
            near = nearest(word, _KINDS)
            instead = f"did you mean {_KINDS[near]}?" if near else f"use {', '.join(_KINDS.values())}"
            mistakes.append(Mistake(f"{source}:{section.line}", f"{section.title} is no section: {instead}"))
    if not kinds["gpu"]:
        sentence = "no GPU is watched: add a section [gpu-all] with gpus = ALL"
        mistakes.append(Mistake(f"{source}:{sections[0].line if sections else 1}", sentence))
    nowhere = Section("defaults", "[defaults]", 1, {})
    return Sections(
        source=source,
        defaults=kinds["defaults"][0] if kinds["defaults"] else nowhere,
        watched=kinds["gpu"],
        programs=kinds["process"],
        terminals=kinds["tty"][0] if kinds["tty"] else None,
        schedule=kinds["schedule"],
        how_to_add_a_program="add a section [process-0] with cmd = and gpus =",
    )


def _kind(name: str) -> str | None:
    if name in ("defaults", "tty"):
        return name
    return next((kind for kind in ("gpu", "process", "schedule") if name.startswith(kind)), None)
