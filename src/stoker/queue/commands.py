"""Commands of jobs: validation, placeholders, and similarity."""

import functools
import re
import shlex
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from stoker.errors import BadInputError

Command = str | tuple[str, ...]

# Linux's limit for one argument without its NUL; text for a shell is one argument.
LONGEST_WORD: Final = 128 * 1024 - 1
# Half of Linux's limit with the usual stack size; the other half is for the environment.
LONGEST_COMMAND: Final = 1024 * 1024
_LONGEST_SHOWN: Final = 200

_QUOTES: Final = str.maketrans(dict.fromkeys("“”„‟″", '"') | dict.fromkeys("‘’‚‛′", "'"))
_DASHES: Final = "‐‑‒–—―−"
# A dash that starts an option: `—lr`, `–n`.
_DASH: Final = rf"(?:(?<=\s)|^)[{_DASHES}]+-*(?=(?P<name>[A-Za-z][\w-]*))"
# A single quote inside a word is an apostrophe.
_TYPOGRAPHY: Final = rf"(?m){_DASH}|[“”„‟]|(?:(?<=[\s=])|^)[‘’‚‛]"
# Shell quotes and comments.
_QUOTED: Final = r"""(?ms)\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?:(?<=\s)|^)\#[^\n]*"""


def check_command(command: Command) -> None:
    """Refuses a command that can never start."""
    words = (command,) if isinstance(command, str) else command
    if not words or not words[0].strip():
        raise BadInputError("a job needs a command: this one is empty")
    whole = 0
    for word in words:
        size = _size(word)
        if size > LONGEST_WORD:
            raise BadInputError(
                f"a command of {size:,} bytes in one word is too long: Linux starts no program with more than "
                f"{LONGEST_WORD:,}, so put it into a script and submit that"
            )
        whole += size + 1
    _refuse_typography(command)
    if whole > LONGEST_COMMAND:
        raise BadInputError(
            f"a command of {whole:,} bytes is too long: at most {LONGEST_COMMAND:,} can be started, so put it into a "
            "script and submit that"
        )


def _refuse_typography(command: Command) -> None:
    """Refuses typographic dashes and quotes, which phone keyboards substitute for `--` and `"`.

    Between straight quotes they are ordinary text.
    """
    if isinstance(command, str):
        bare = _unquoted(command)
    else:
        # A word with a space was typed between straight quotes.
        bare = "\n".join(word for word in command if not any(map(str.isspace, word)))
    if bare.isascii() or not (found := re.search(_TYPOGRAPHY, bare)):
        return
    meant = _straight(command if isinstance(command, str) else " ".join(command))
    meant = meant if len(meant) <= _LONGEST_SHOWN else f"{meant[: _LONGEST_SHOWN - 1]}…"
    raise BadInputError(
        f"the command has {found[0][:1]} in it, as a phone's keyboard writes it: {meant} is probably meant "
        "(in text for the shell, what stands between straight quotes is taken as it is)"
    )


def _unquoted(text: str) -> str:
    """The text outside quotes and here-documents."""
    return re.sub(_QUOTED, "", text.partition("<<")[0])


def _straight(text: str) -> str:
    """The text with straight quotes and plain hyphens."""
    text = re.sub(f"(?m){_DASH}", lambda found: "--" if len(found["name"]) > 1 else "-", text)
    return text.translate(_QUOTES)


def shell_text(command: Command) -> str:
    """The command as typed in a shell."""
    return command if isinstance(command, str) else " ".join(map(_quoted, command))


# A list of a hundred thousand jobs has few different words.
_quoted: Final = functools.lru_cache(4096)(shlex.quote)


# Options with these names affect how long a program runs.
_LENGTH: Final = r"(?i)epoch|step|iter|durat|time|hour|minute|second|token|sample|limit"
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_LONGEST_COMPARED: Final = 2000


@functools.lru_cache(4096)
def pattern_of(command: Command, gpus: int) -> str:
    """A pattern shared by commands that probably take equally long: they differ only in numbers in option values.

    `train.py --lr 1e-3 --out run1` matches `train.py --lr 1e-4 --out run2`; `--epochs 10` does not match `--epochs 20`.
    """
    words = shell_text(command)[:_LONGEST_COMPARED].split()
    text = " ".join((str(gpus), *_without_values(words))).encode(errors="replace")
    # Nothing secret, and these load faster than hashlib.
    return f"{zlib.crc32(text):08x}{zlib.adler32(text):08x}"


def _without_values(words: Sequence[str]) -> Iterator[str]:
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-") and not _NUMBER.match(word, 1)
        if equals and not re.search(_LENGTH, name):
            yield f"{name}={_NUMBER.sub('0', value)}"
        elif option and not is_option and not re.search(_LENGTH, option):
            yield _NUMBER.sub("0", word)
        else:
            yield word
        option = word if is_option and not equals else ""


def wants_batch_size(command: Command) -> bool:
    """True if the command has a placeholder for the batch size."""
    words = (command,) if isinstance(command, str) else command
    return any(mentioned(word, ("batch_size",)) for word in words)


def _size(word: str) -> int:
    if "\0" in word:
        raise BadInputError("a command cannot contain the character NUL")
    try:
        return len(word.encode())
    except UnicodeEncodeError:
        raise BadInputError(f"a command must be text in UTF-8, and this is not: {word[:60]!a}") from None


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders replaced. Placeholders in values are not replaced again."""
    if "{" not in text:
        return text
    return _either_form(values).sub(lambda found: values[found[2]] if found[2] else f"{{{found[1]}}}", text)


def mentioned(text: str, names: Collection[str]) -> set[str]:
    """The names with a placeholder in the text."""
    if "{" not in text:
        return set()
    return {plain for _doubled, plain in _either_form(names).findall(text) if plain}


def _either_form(names: Collection[str]) -> re.Pattern[str]:
    either = "|".join(map(re.escape, names)) or "(?!)"
    return re.compile(rf"\{{\{{({either})\}}\}}|\{{({either})\}}")
