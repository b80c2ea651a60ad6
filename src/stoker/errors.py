"""Errors for people: one sentence with what is wrong, where, and what to do."""

from collections.abc import Collection, Mapping


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Advice about an unknown name."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)}"


class StokerError(Exception):
    """Shown unchanged without a traceback; `exit_code` becomes the command's."""

    exit_code = 1

    def __init__(self, sentence: str, *, exit_code: int | None = None) -> None:
        super().__init__(sentence)
        if exit_code is not None:
            self.exit_code = exit_code


class BadInputError(StokerError):
    """Invalid input on the command line, in a request or in a file."""

    exit_code = 2


class InvalidFieldsError(BadInputError):
    """Invalid fields of a job, a form or a request, with a message for each; the name "" means the whole."""

    def __init__(self, mistakes: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {message}" if field else message for field, message in mistakes.items()))
        self.mistakes = dict(mistakes)


class QueueAwayError(StokerError):
    """The database temporarily does not answer. The operation may or may not have taken effect."""
