"""Placeholders in commands: `{lr}` stands for a value, `{{lr}}` for `{lr}` itself; other braces are left alone."""

import re
from collections.abc import Collection, Mapping


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with the values in it, in one pass: a value that looks like a placeholder stays as it is."""
    return _either_form(values).sub(lambda found: values[found[2]] if found[2] else f"{{{found[1]}}}", text)


def mentioned(text: str, names: Collection[str]) -> set[str]:
    """Those of the names that the text has a placeholder for."""
    return {plain for _doubled, plain in _either_form(names).findall(text) if plain}


def _either_form(names: Collection[str]) -> re.Pattern[str]:
    either = "|".join(map(re.escape, names)) or "(?!)"
    return re.compile(rf"\{{\{{({either})\}}\}}|\{{({either})\}}")
