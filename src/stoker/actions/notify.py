"""The action `notify`: a message to people by an apprise URL, which is a secret and is never shown."""

import logging
import re
from typing import TYPE_CHECKING, Final

from stoker.actions.action import Action, ActionError, Facts, Messenger
from stoker.errors import BadInputError

if TYPE_CHECKING:
    from apprise import Apprise

# Apprise gives up a connection after seconds, but a name that does not resolve can take longer.
_PATIENCE: Final = 60.0
_SHORTEST_SECRET: Final = 3


class _Complaints(logging.Handler):
    """Keeps what was logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


class Notify(Action, Messenger):
    """Tells people that GPUs are idle; also beforehand, and when readings stay unknown."""

    patience = _PATIENCE

    def __init__(self, url: str) -> None:
        self._url = url
        scheme, separator, rest = url.partition("://")
        self._scheme = f"{scheme}://" if separator and scheme.isalnum() else "a URL"
        self._secrets = [word for word in re.split(r"[^A-Za-z0-9]+", rest) if len(word) >= _SHORTEST_SECRET]
        self._complaints = _Complaints()
        self._apprise: Apprise | None = None

    def describe(self) -> str:
        return f"notify by {self._scheme}"

    def prepare(self) -> tuple[str, ...]:
        try:
            import apprise
        except ImportError:
            raise ActionError(
                "notify needs the apprise package, which is not installed: pip install 'stoker[notify]'"
            ) from None
        # What apprise logs may hold the URL: nothing of it goes further than to us.
        logger = logging.getLogger("apprise")
        logger.propagate = False
        logger.addHandler(self._complaints)
        target = apprise.Apprise()
        if not target.add(self._url):
            raise BadInputError(
                f"--then: the URL of 'notify' ({self._scheme}…) is not one that apprise understands: see its list of "
                "services for the right form"
            )
        self._apprise = target
        return ()

    def act(self, facts: Facts) -> None:
        self._send(f"{facts.host}: GPUs are idle", f"{facts.reason} (rule: {facts.rule}).")

    def tell(self, host: str, sentence: str) -> None:
        self._send(f"{host}: Stoker", f"{sentence}.")

    def _send(self, title: str, body: str) -> None:
        if self._apprise is None:
            raise ActionError(f"the message by {self._scheme} was not sent: it was never prepared")
        self._complaints.sentences.clear()
        if not self._apprise.notify(body=body, title=title):
            raise ActionError(f"the message by {self._scheme} was not delivered{self._why()}")

    def _why(self) -> str:
        """The last complaint of apprise that holds no piece of the URL."""
        said = [one.strip().rstrip(".") for one in self._complaints.sentences]
        shown = [one for one in said if one and not any(secret in one for secret in self._secrets)]
        return f": {shown[-1]}" if shown else ""
