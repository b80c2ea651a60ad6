"""A mail server on loopback that keeps what it is sent."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import default
from socket import create_server
from typing import Any

from aiosmtpd.controller import Controller

# Seconds that it may take to listen, also on a machine that is busy.
PATIENCE = 60.0


class _Listening(Controller):
    """Binds its port at once: a port that was only found free may be taken before it is used."""

    def __init__(self, mailbox: "Mailbox") -> None:
        self._socket = create_server(("127.0.0.1", 0))
        port = int(self._socket.getsockname()[1])
        super().__init__(mailbox, hostname="127.0.0.1", port=port, ready_timeout=PATIENCE)

    def _create_server(self) -> Coroutine[Any, Any, asyncio.AbstractServer]:
        return self.loop.create_server(self._factory_invoker, sock=self._socket)


class Mailbox:
    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        self.port = 0
        """Once it is open."""

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: ARG002, N802 - aiosmtpd's name
        self.mails.append(BytesParser(policy=default).parsebytes(envelope.content))
        return "250 OK"

    @contextmanager
    def open(self) -> Iterator["Mailbox"]:
        controller = _Listening(self)
        self.port = controller.port
        controller.start()
        try:
            yield self
        finally:
            controller.stop()


def text_of(mail: EmailMessage) -> str:
    """The text of the message."""
    part = mail.get_body(("plain", "html"))
    assert part is not None
    return str(part.get_content())
