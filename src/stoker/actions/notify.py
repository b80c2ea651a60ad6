"""The action `notify`, and messages through apprise. URLs are secrets: only their scheme is shown."""

import logging
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Literal

from stoker.actions.action import Action, ActionError, Facts
from stoker.errors import BadInputError

if TYPE_CHECKING:
    from apprise import Apprise

# Apprise gives up a connection after seconds, but resolving a name can take longer.
_PATIENCE: Final = 60.0


class Notify(Action):
    """Sends verdicts, warnings, and reports of readings that stay unknown."""

    patience = _PATIENCE
    affects = "nothing"
    sends_messages = True

    def __init__(self, url: str) -> None:
        self._channel = AppriseChannel(url)

    def describe(self) -> str:
        return f"notify by {self._channel.scheme}"

    def prepare(self) -> tuple[str, ...]:
        self._channel.prepare("--then: the URL of 'notify'")
        return ()

    def act(self, facts: Facts) -> None:
        self._channel.send(
            f"{facts.host}: {facts.cause or facts.kind}", f"{facts.reason} (rule: {facts.rule}).", "warning"
        )

    def send_message(self, host: str, text: str) -> None:
        self._channel.send(f"{host}: Stoker", f"{text}.", "warning")


_SHORTEST_SECRET: Final = 3


# Apprise sends from its own threads, which inherit this context: each channel keeps only its own warnings.
_SENDER: ContextVar[object] = ContextVar("sender", default=None)


class _Complaints(logging.Handler):
    """Keeps what apprise logs as a warning or worse while this channel sends."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._sentences: list[str] = []

    def begin(self) -> None:
        self._sentences.clear()
        _SENDER.set(self)

    def emit(self, record: logging.LogRecord) -> None:
        if _SENDER.get() is self:
            self._sentences.append(record.getMessage())

    def said(self) -> list[str]:
        return [sentence.strip().rstrip(".") for sentence in self._sentences]


Tone = Literal["info", "success", "warning", "failure"]
"""Apprise's types of messages."""


class AppriseChannel:
    """One URL for messages; used by one thread at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        scheme, separator, rest = url.partition("://")
        self.scheme: Final = f"{scheme}://" if separator and scheme.isalnum() else "a URL"
        """The only part of the URL that is shown."""
        self._secrets = [word for word in re.split(r"[^A-Za-z0-9]+", rest) if len(word) >= _SHORTEST_SECRET]
        self._complaints = _Complaints()
        self._apprise: Apprise | None = None

    def __repr__(self) -> str:
        return f"<AppriseChannel {self.scheme}>"

    def prepare(self, where: str) -> None:
        """Raises for an invalid URL. `where` is its setting, for the error message."""
        try:
            import apprise
        except ImportError:
            raise ActionError(
                "notify needs the apprise package, which is not installed: pip install 'stoker[notify]'"
            ) from None
        # Apprise's log messages may contain the URL, so they are not passed on.
        logger = logging.getLogger("apprise")
        logger.propagate = False
        logger.addHandler(self._complaints)
        target = apprise.Apprise()
        if not target.add(self._url):
            raise BadInputError(
                f"{where} ({self.scheme}…) is not a URL that apprise understands: see its list of services for the "
                "right form"
            )
        self._apprise = target

    def send(self, title: str, body: str, tone: Tone = "info") -> None:
        """Sends plain text; apprise escapes markup. Services show the tone as a colour or an icon."""
        if self._apprise is None:
            raise ActionError(f"the message by {self.scheme} was not sent: it was not prepared")
        self._complaints.begin()
        if not self._apprise.notify(body=body, title=title, body_format="text", notify_type=tone):
            raise ActionError(f"the message by {self.scheme} was not delivered{self._why()}")

    def close(self) -> None:
        logging.getLogger("apprise").removeHandler(self._complaints)

    def _why(self) -> str:
        """Apprise's last warning without any part of the URL."""
        shown = [one for one in self._complaints.said() if one and not any(word in one for word in self._secrets)]
        return f": {shown[-1]}" if shown else ""
