"""The keys of `stoker top`: what a terminal sends, as names."""

import re
from typing import Final

HELP: Final = (
    ("↑ ↓  j k", "select a job; PgUp, PgDn, g and G go further"),
    ("Enter", "what is known of it: why, its attempts, its last lines"),
    ("l", "follow its log; q returns"),
    ("c", "cancel it; asks once when it runs"),
    ("r", "let it run again"),
    ("h", "hold it, or release it"),
    ("u  d", "move it up or down among those that wait"),
    ("s", "leave it alone for 30 minutes, however idle it is"),
    ("p", "pause the queue, or let it go on"),
    ("a", "show only your own jobs, or all"),
    ("q", "leave"),
)

_NAMED: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
    "k": "up",
    "j": "down",
    "g": "home",
    "G": "end",
}
_ONE_KEY: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|\x1b(?![\[O])|[^\x1b]", re.DOTALL)
_BEGUN: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")


class Keys:
    """Puts together what arrives in pieces."""

    def __init__(self) -> None:
        self._rest = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the beginning of a key is there, which may also be the key Escape."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        text = self._rest + data.decode(errors="ignore")
        begun = _BEGUN.search(text)
        self._rest = begun[0] if begun else ""
        return _names(text[: len(text) - len(self._rest)])

    def settle(self) -> list[str]:
        """Nothing followed: it was Escape."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest else []


def _names(text: str) -> list[str]:
    return [_NAMED.get(key, key) for key in _ONE_KEY.findall(text)]
