"""What the page is told when it starts: where the queue is, where it listens, by which names it is called."""

import errno
import ipaddress
import socket
import ssl
import stat
from pathlib import Path
from typing import Final

from stoker.errors import BadInputError
from stoker.settings import WebSettings
from stoker.streams import warn

# A page that shows nothing for longer is better told that the queue does not answer.
PATIENCE: Final = 20.0


class Config(WebSettings, frozen=True, kw_only=True):
    """The settings of the page, with the place of the queue and of the state directory."""

    queue: str | None
    """The queue's address; None for the file in the state directory."""
    home: Path
    """The state directory: where the keys are, and the outputs of what ran on this machine."""

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
            from stoker.web.config import own_address

            host = own_address()
        return f"[{host}]" if ":" in host else host


_SEND_BUFFER: Final = 128 * 1024


def listening_socket(config: Config) -> socket.socket:
    """Listens where it was told, or says why it cannot; also why it could not speak TLS there."""
    _check_tls(config)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # What lies in a buffer on its way to a slow phone is old when it arrives: newer states wait with us instead.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise BadInputError(_why_not(config, error)) from None
    except OverflowError:
        listener.close()
        raise BadInputError(f"there is no port {config.port}: choose one up to 65535") from None
    listener.set_inheritable(False)
    return listener


def _why_not(config: Config, error: OSError) -> str:
    where = f"{config.host}:{config.port}"
    if isinstance(error, socket.gaierror):
        return f"the page cannot listen on {config.host!r}: this machine has no such address"
    if error.errno == errno.EADDRINUSE:
        return f"something listens on {where} already, perhaps another page: choose another --port"
    if error.errno == errno.EACCES:
        return f"the page may not listen on {where}: ports below 1024 are for root; choose another --port"
    return f"the page cannot listen on {where}: {error.strerror}"


def _check_tls(config: Config) -> None:
    """Refuses what a server could not start with."""
    if (config.cert is None) != (config.key is None):
        raise BadInputError("--cert and --key go together: give both, or neither")
    if config.cert is None or config.key is None:
        return
    for path in (config.cert, config.key):
        _must_be_readable(path)
    # Its group may be one of servers, such as Debian's ssl-cert.
    if config.key.stat().st_mode & stat.S_IROTH:
        warn(f"other users of this machine can read the key {config.key}: run `chmod 600 {config.key}`")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.cert, config.key)
    except (ssl.SSLError, OSError) as error:
        raise BadInputError(
            f"{config.cert} and {config.key} are no certificate with its key, in PEM: {getattr(error, 'reason', error)}"
        ) from None


def _must_be_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}") from None


# Of the range for documentation: a connected datagram socket sends nothing, it only asks the routing table.
_ELSEWHERE: Final = ("192.0.2.1", 9)


def own_address() -> str:
    """The address of the interface that leads out; the host's name when there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
