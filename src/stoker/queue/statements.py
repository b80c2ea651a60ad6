"""The queue's SQL: kept in `.sql` files under `-- name --` headers, read once and translated to a dialect."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

_HEADER = re.compile(r"^-- (.+) --$", re.MULTILINE)
_MACRO = re.compile(r"\{(\w+)(?: (\w+))?\}")


@functools.cache
def sections(file: str) -> Mapping[str, str]:
    """The text under each header. Read once: an upgrade may put another file there while this program runs."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    _preamble, *parts = _HEADER.split(text)
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


def translated(statements: Mapping[str, str], macros: Mapping[str, str]) -> dict[str, str]:
    """Each `{macro}` and `{macro argument}` written out; a macro may use others."""

    def written_out(text: str) -> str:
        return _MACRO.sub(lambda found: written_out(macros[found[1]].replace("$", found[2] or "")), text)

    return {name: written_out(text) for name, text in statements.items()}


def script(text: str) -> list[str]:
    """The single statements of a schema."""
    return [statement.strip() for statement in re.split(r";\s*(?:\n|$)", text) if statement.strip()]
