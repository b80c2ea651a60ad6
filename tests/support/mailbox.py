"""A mail server on loopback that keeps what it is sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import default
from socket import socket
from typing import Any

from aiosmtpd.controller import Controller


class Mailbox:
    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: ARG002, N802 - aiosmtpd's name
        self.mails.append(BytesParser(policy=default).parsebytes(envelope.content))
        return "250 OK"

    @contextmanager
    def open(self) -> Iterator["Mailbox"]:
        controller = Controller(self, hostname="127.0.0.1", port=self.port)
        controller.start()
        try:
            yield self
        finally:
            controller.stop()


def text_of(mail: EmailMessage) -> str:
    """What a person reads in it."""
    part = mail.get_body(("plain", "html"))
    assert part is not None
    return str(part.get_content())
