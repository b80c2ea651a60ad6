"""Which commands can be started at all: what no kernel would take is refused before it waits for a GPU all night."""

from typing import Final

from stoker.errors import BadInputError
from stoker.placeholders import mentioned

Command = str | tuple[str, ...]

# Linux gives a program no single word that is longer, its closing NUL included; the text for a shell is one word.
LONGEST_WORD: Final = 128 * 1024 - 1
# Half of what Linux gives a program at the usual stack limit: the other half is for its environment.
LONGEST_COMMAND: Final = 1024 * 1024


def check_command(command: Command) -> None:
    """Refuses a command that could never be started."""
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
    if whole > LONGEST_COMMAND:
        raise BadInputError(
            f"a command of {whole:,} bytes is too long: at most {LONGEST_COMMAND:,} can be started, so put it into a "
            "script and submit that"
        )


def wants_batch_size(command: Command) -> bool:
    """Whether it has a placeholder that only the job's batch size can fill."""
    words = (command,) if isinstance(command, str) else command
    return any(mentioned(word, ("batch_size",)) for word in words)


def _size(word: str) -> int:
    if "\0" in word:
        raise BadInputError("a command cannot hold the character NUL: no program could be given it")
    try:
        return len(word.encode())
    except UnicodeEncodeError:
        raise BadInputError(f"a command must be text in UTF-8, and this is not: {word[:60]!a}") from None
