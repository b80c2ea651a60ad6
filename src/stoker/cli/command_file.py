"""A file of commands, as `stoker submit --from` takes it: one for the shell per line."""

from typing import Final

from stoker.errors import BadInputError
from stoker.queue.commands import Command, check_command

# A list of commands is written by people and scripts; what is longer was named by mistake, such as a device.
LONGEST_FILE: Final = 64 * 1024 * 1024


def commands_in(file: str) -> list[Command]:
    """The commands of the file, or of standard input for `-`; blank lines and comments are skipped."""
    called = "standard input" if file == "-" else file
    commands: list[Command] = []
    for number, line in enumerate(_text(file, called).split("\n"), 1):
        written = line.strip()
        if not written or written.startswith("#"):
            continue
        try:
            check_command(written)
        except BadInputError as error:
            raise BadInputError(f"line {number} of {called}: {error}") from None
        commands.append(written)
    if not commands:
        raise BadInputError(f"there is no command in {called}: one per line is meant")
    return commands


def _text(file: str, called: str) -> str:
    try:
        with open(0 if file == "-" else file, "rb", closefd=file != "-") as stream:
            data = stream.read(LONGEST_FILE + 1)
    except OSError as error:
        raise BadInputError(f"{called} cannot be read: {error.strerror}") from None
    if len(data) > LONGEST_FILE:
        raise BadInputError(f"{called} is longer than {LONGEST_FILE:,} bytes: that is no list of commands")
    try:
        # Some editors put a mark before the first letter that is no part of the command.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"line {line} of {called} is not text in UTF-8") from None
