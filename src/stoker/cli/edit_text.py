"""A job as the text that a person edits, and what they changed in it: TOML, with sizes and times as people write."""

import tomllib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from stoker.errors import BadInputError
from stoker.units import format_duration, format_memory, parse_duration, parse_memory

if TYPE_CHECKING:
    from stoker.queue import Job, JobSpec

# What was the case when it was submitted is no wish that could be changed. How a job is fitted is a nested matter that
# `submit --fit-with` understands; whoever wants another size sets batch_size.
FACTS: Final = ("commit", "dirty", "fit", "submitter")
DURATIONS: Final = ("backoff", "time_limit")
OFF: Final = "off"
"""What stands for no value in a policy: TOML has none."""
EXAMPLES: Final = {"memory": '"20GiB"', "time_limit": '"12h"', "batch_size": "64"}


def written(job: "Job") -> str:
    """The text: what has no value stands there as a comment with an example."""
    lines = [f"# Job {job.id}, {job.state}. A line that is taken out goes back to its default."]
    tables = []
    for field in editable():
        value = getattr(job, field)
        if isinstance(value, dict):
            tables += ["", f"[{field}]", *(f"{_string(key)} = {_scalar(each)}" for key, each in value.items())]
        elif value is None:
            lines.append(f"# {field} = {EXAMPLES.get(field, '...')}")
        else:
            lines.append(f"{field} = {_in_units(field, value)}")
    return "\n".join([*lines, *tables]) + "\n"


def changes_in(text: str, job: "Job") -> dict[str, object]:
    """The fields that the text gives another value than the job has."""
    asked = _understood(text)
    return {field: getattr(asked, field) for field in editable() if getattr(asked, field) != getattr(job, field)}


def editable() -> list[str]:
    from stoker.queue import JobSpec

    return [field for field in JobSpec.__struct_fields__ if field not in FACTS]


def _understood(text: str) -> "JobSpec":
    from stoker.queue import JobSpec

    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"that is not TOML: {error}") from None
    if unknown := set(values) - set(editable()):
        raise BadInputError(f"a job has no {min(unknown)!r} that could be edited")
    try:
        return msgspec.convert({field: _plain(field, value) for field, value in values.items()}, JobSpec)
    except msgspec.ValidationError as error:
        raise BadInputError(_in_words(error)) from None


def _in_words(error: msgspec.ValidationError) -> str:
    """`Expected `int`, got `str` - at `$.gpus`` as a person would say it."""
    said, _, where = str(error).replace("`", "").partition(" - at $.")
    if "required field" in said:
        return "a job needs a command: none was given"
    return f"{where}: {said[:1].lower()}{said[1:]}" if where else said


def _plain(field: str, value: object) -> object:
    """Bytes and seconds, where they were written with a unit."""
    if field == "policy" and isinstance(value, dict):
        return {key: None if each == OFF else each for key, each in value.items()}
    if not isinstance(value, str) or field not in {"memory", *DURATIONS}:
        return value
    try:
        return parse_memory(value) if field == "memory" else parse_duration(value)
    except BadInputError as error:
        raise BadInputError(f"{field}: {error}") from None


def _in_units(field: str, value: Any) -> str:
    """With its unit where that says exactly the same."""
    if field == "memory":
        readable = format_memory(value).replace(" ", "")
        return _string(readable if parse_memory(readable) == value else f"{value}B")
    if field in DURATIONS:
        readable = format_duration(value)
        return _string(readable) if parse_duration(readable) == value else repr(float(value))
    if field == "command" and isinstance(value, str) and "\n" in value:
        return _several_lines(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_string, value))}]"
    return _scalar(value)


def _scalar(value: str | float | bool | None) -> str:
    match value:
        case str():
            return _string(value)
        case bool():
            return "true" if value else "false"
        case None:
            return _string(OFF)
    return repr(value)


def _several_lines(text: str) -> str:
    """As it is, between the quotes in which TOML leaves everything alone; if it holds these, in one line."""
    odd = any((ord(letter) < 32 and letter not in "\n\t") or ord(letter) == 127 for letter in text)
    return _string(text) if odd or "'''" in text or text.endswith("'") else f"'''\n{text}'''"


def _string(text: str) -> str:
    """JSON's way to write a string is also TOML's, but for the one character that JSON does not escape."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")
