"""What the page is told when it starts: where the queue is, where it listens, by which names it is called."""

import ipaddress
from pathlib import Path
from typing import Final

import msgspec

# S-T-O-K on the keys of a telephone.
DEFAULT_PORT: Final = 7865
LOOPBACK: Final = "127.0.0.1"
# A page that shows nothing for longer is better told that the queue does not answer.
PATIENCE: Final = 20.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    queue: str | None
    """The queue's address; None for the file in the state directory."""
    home: Path
    """The state directory: where the keys are, and the outputs of what ran on this machine."""
    host: str = LOOPBACK
    port: int = DEFAULT_PORT
    cert: Path | None = None
    key: Path | None = None
    names: tuple[str, ...] = ()
    """By which names, besides its own, this machine is called in a browser's address bar."""
    url: str = ""
    """The public address, for links; empty when it is the one that is listened on."""
    title: str = "Stoker"

    @property
    def is_encrypted(self) -> bool:
        """Whether browsers come by TLS: to us, or to the proxy at the public address."""
        return self.cert is not None or self.url.startswith("https://")

    @property
    def is_private(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def address(self, port: int | None = None) -> str:
        """Where a browser finds the page; `port` is the real one when any free one was asked for."""
        if self.url:
            return self.url.rstrip("/")
        scheme = "https" if self.cert is not None else "http"
        return f"{scheme}://{self._reachable_host()}:{self.port if port is None else port}"

    def _reachable_host(self) -> str:
        """A name that leads here from elsewhere when everything is listened on, as a browser writes it."""
        host = self.host
        if host in {"0.0.0.0", "::"}:  # noqa: S104 - compared with, not bound to
            from stoker.web.server import own_address

            host = own_address()
        return f"[{host}]" if ":" in host else host
