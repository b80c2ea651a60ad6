"""Hides secrets: passwords in URLs, and values that look like secrets by their name or form."""

import re
from collections.abc import Mapping
from typing import Any, Final

MASK: Final = "***"

# Patterns are compiled on first use: short commands need few of them.

# Up to the last `@` before a query, because a password may contain an unescaped one. Lengths are bounded, so long texts
# take linear time.
_IN_ADDRESS: Final = r"(?i)(\b[a-z][a-z0-9+.-]{0,20}://[^/@:?#\s]{0,200}):[^?\s]{0,500}@"
_IN_QUERY: Final = r"(?i)([?&]\w*password=)[^&\s]*"

# `WANDB_API_KEY`, `HF_TOKEN`, `PGPASSWORD`, `SSH_AUTH_SOCK`; not `TOKENIZERS_PARALLELISM`, `AUTHOR` or `PWD`.
_SECRET_NAME: Final = (
    r"secret|passw|passphrase|credential|api_?key|cookie"  # noqa: S105 - a pattern
    r"|(?:key|token)s?$|(?:auth|pass|_pwd|_pat)$"
    r"|(?:^|_)(?:key|token|auth|pass)_"
)
# Tokens of language models are not secrets: `EOS_TOKEN`, `MAX_TOKENS`.
_OF_TEXT: Final = (
    r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|image|special|stop|start|end|next|first|last|new|max|min|num|n|per|total)"
    r"(?:_\w+)?_tokens?$"
)
# Prefixes that services use for their keys.
_SECRET_VALUE: Final = (
    r"\b(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z]{20,}"  # noqa: S105 - a pattern
    r"|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|stk_[\w-]{20,}|eyJ[\w-]{10,999}\.[\w-]{10,2000}\.[\w-]{5,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
# Everything after the scheme of a notification URL may be secret.
_SERVICE: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)\S*")
_VALUE: Final = r"(?:\"[^\"]*\"|'[^']*'|[^\s;&|)\"']+)"
_ASSIGNED: Final = rf"(?<![\w.-])(-{{0,2}}[A-Za-z_][\w.-]*)=({_VALUE})"
_OPTION: Final = rf"(?<!\S)(--?[A-Za-z][\w-]*)(\s+)(?!-)({_VALUE})"
_HEADER: Final = r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}"
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
# Without one of these in lower case, no pattern above matches in a command.
_HINT: Final = (
    r"secret|pass|credential|key|cookie|token|auth|pwd|pat|sk-|gh[pousr]_|hf_|xox|akia|aiza|stk_|eyj|-----begin|bearer"
    r"|basic|://"
)


def without_passwords(text: str) -> str:
    """The text without the passwords in its URLs."""
    if "://" not in text:
        return text
    return re.sub(_IN_QUERY, r"\1…", re.sub(_IN_ADDRESS, r"\1@", text))


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a secret."""
    plain = name.lower().replace("-", "_")
    if re.search(_SECRET_NAME, plain) and not re.search(_OF_TEXT, plain):
        return bool(value)
    return re.search(_SECRET_VALUE, value) is not None or without_passwords(value) != value


def masked_environment(environment: Mapping[str, str], *, all_values: bool = False) -> dict[str, str]:
    """The variables with secrets masked, or with all values masked."""
    return {name: MASK if all_values or is_secret(name, value) else value for name, value in environment.items()}


def masked_command(text: str) -> str:
    """The command with secrets masked: `WANDB_API_KEY=*** python train.py --token ***`."""
    # Most commands have none, and there may be a hundred thousand of them.
    if not re.search(_HINT, text.casefold()):
        return text

    def assigned(found: re.Match[str]) -> str:
        return f"{found[1]}={MASK}" if _is_secret_option(found[1], found[2]) else found[0]

    def of_option(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{MASK}" if _is_secret_option(found[1], found[3]) else found[0]

    text = re.sub(_OPTION, of_option, re.sub(_ASSIGNED, assigned, text))
    return without_passwords(re.sub(_HEADER, rf"\1{MASK}", re.sub(_SECRET_VALUE, MASK, text)))


def _is_secret_option(name: str, value: str) -> bool:
    plain = name.lstrip("-").lower().replace("-", "_").rpartition(".")[2]
    # An option named `key` is rarely a secret.
    return plain not in {"key", "keys"} and is_secret(plain, value) and without_passwords(value) == value


def masked_words(words: "list[str] | tuple[str, ...]") -> list[str]:
    """The same for a command as a list of words."""
    shown: list[str] = []
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
        shown.append(MASK if is_value and _is_secret_option(before, word) else masked_command(word))
    return shown


def masked_actions(actions: "list[str] | tuple[str, ...]") -> list[str]:
    """Actions without their arguments: URLs of notifications are secrets, and words of a command may be."""
    return [f"{action.split()[0]} {MASK}" if len(action.split()) > 1 else action for action in actions]


def masked_notify(entries: "list[str] | tuple[str, ...]", *, for_viewer: bool = False) -> list[str]:
    """Entries of `--notify` without their URLs: `failed:ntfy://***`; for a viewer not even the service."""
    return [_SERVICE.sub(MASK if for_viewer else rf"\1{MASK}", entry) for entry in entries]


def unmasked_notify(
    entries: "list[str] | tuple[str, ...]", earlier: "list[str] | tuple[str, ...]"
) -> "tuple[str, ...] | None":
    """The entries with `***` replaced by their `earlier` URLs; None if ambiguous."""
    hidden: dict[str, list[str]] = {}
    for entry in earlier:
        hidden.setdefault(masked_notify([entry])[0], []).append(entry)
    of_each = {shown: iter(urls) for shown, urls in hidden.items()}
    found: list[str] = []
    for entry in entries:
        if MASK in entry and list(entries).count(entry) != len(hidden.get(entry, ())):
            return None
        found.append(next(of_each[entry]) if MASK in entry else entry)
    return tuple(found)


def masked(value: Any, *, for_viewer: bool = False) -> Any:
    """JSON values with nested jobs, with secrets in environments masked. For viewers, all values of environments and
    secrets in commands are masked; operators see commands unmasked, because they may submit them again.
    """
    if isinstance(value, Mapping):
        # Most fields are numbers and short texts.
        return {
            name: field if type(field) in _PLAIN and name != "command" else _masked_field(name, field, for_viewer)
            for name, field in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked(item, for_viewer=for_viewer) for item in value]
    return value


def _masked_field(name: object, value: Any, for_viewer: bool) -> Any:
    if name == "then" and isinstance(value, list | tuple):
        return masked_actions(value)
    if name == "notify" and isinstance(value, list | tuple):
        return masked_notify(value, for_viewer=for_viewer)
    if name == "environment" and isinstance(value, Mapping):
        return masked_environment(value, all_values=for_viewer)
    if name == "command" and for_viewer:
        if isinstance(value, str):
            return masked_command(value)
        if isinstance(value, list | tuple):
            return masked_words([str(word) for word in value])
    return masked(value, for_viewer=for_viewer)
