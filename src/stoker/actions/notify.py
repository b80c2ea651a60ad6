"""The action `notify`: a message to people by an apprise URL, which is a secret and is never shown."""

from typing import Final

from stoker.actions.action import Action, Facts, Messenger
from stoker.actions.messages import Channel

# Apprise gives up a connection after seconds, but a name that does not resolve can take longer.
_PATIENCE: Final = 60.0


class Notify(Action, Messenger):
    """Tells people that GPUs are idle; also beforehand, and when readings stay unknown."""

    patience = _PATIENCE

    def __init__(self, url: str) -> None:
        self._channel = Channel(url)

    def describe(self) -> str:
        return f"notify by {self._channel.scheme}"

    def prepare(self) -> tuple[str, ...]:
        self._channel.prepare("--then: the URL of 'notify'")
        return ()

    def act(self, facts: Facts) -> None:
        self._channel.send(
            f"{facts.host}: {facts.cause or facts.kind}", f"{facts.reason} (rule: {facts.rule}).", "warning"
        )

    def tell(self, host: str, sentence: str) -> None:
        self._channel.send(f"{host}: Stoker", f"{sentence}.", "warning")
