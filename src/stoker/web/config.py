"""Configuration of the page, and the socket it listens on."""

import errno
import ipaddress
import socket
import ssl
import stat
from pathlib import Path
from typing import Final

from stoker.errors import BadInputError
from stoker.settings import Notifications, WebSettings
from stoker.streams import warn

# How long a query may wait for the queue before the page reports that it does not answer.
QUEUE_TIMEOUT: Final = 20.0


class Config(WebSettings, frozen=True, kw_only=True):
    """The settings of the page, with the paths of the queue and the state directory."""

    queue: str | None
    """The queue's address; None for the file in the state directory."""
    home: Path
    """The state directory, with the tokens and the logs of this machine."""
    notify: Notifications | None = Notifications()
    """The settings of notifications; None if none are sent."""

    @property
    def is_encrypted(self) -> bool:
        """Whether browsers use TLS, to this server or to the proxy at the public address."""
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
        """The address for browsers; `port` is the actual port if the configured one is 0."""
        if self.url:
            return self.url.rstrip("/")
        scheme = "https" if self.cert is not None else "http"
        return f"{scheme}://{self._reachable_host()}:{self.port if port is None else port}"

    def _reachable_host(self) -> str:
        """The host for a URL; an address that other machines can reach if the page listens on all interfaces."""
        host = self.host
        if host in {"0.0.0.0", "::"}:  # noqa: S104 - compared with, not bound to
            host = own_address()
        return f"[{host}]" if ":" in host else host


# Small: newer states wait in the server instead of old ones in the buffer of a slow phone.
_SEND_BUFFER: Final = 128 * 1024


def listening_socket(config: Config) -> socket.socket:
    """A bound socket; BadInputError if the address, certificate or key cannot be used."""
    _check_tls(config)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise BadInputError(_bind_error(config, error)) from None
    except OverflowError:
        listener.close()
        raise BadInputError(f"port {config.port} does not exist: choose one up to 65535") from None
    listener.set_inheritable(False)
    return listener


def _bind_error(config: Config, error: OSError) -> str:
    where = f"{config.host}:{config.port}"
    if isinstance(error, socket.gaierror):
        return f"the page cannot listen on {config.host!r}: this machine has no such address"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is already in use, perhaps by another page: choose another --port"
    if error.errno == errno.EACCES:
        return f"the page may not listen on {where}: ports below 1024 are reserved for root; choose another --port"
    return f"the page cannot listen on {where}: {error.strerror}"


def _check_tls(config: Config) -> None:
    if (config.cert is None) != (config.key is None):
        raise BadInputError("--cert and --key must be given together")
    if config.cert is None or config.key is None:
        return
    for path in (config.cert, config.key):
        _check_readable(path)
    # Read access for its group is fine, such as Debian's ssl-cert.
    if config.key.stat().st_mode & stat.S_IROTH:
        warn(f"other users of this machine can read the key {config.key}: run `chmod 600 {config.key}`")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.cert, config.key)
    except (ssl.SSLError, OSError) as error:
        raise BadInputError(
            f"{config.cert} and {config.key} are not a PEM certificate and its key: {getattr(error, 'reason', error)}"
        ) from None


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None


# From the documentation range: connecting a datagram socket sends nothing, it only consults the routing table.
_ANY_ROUTED_ADDRESS: Final = ("192.0.2.1", 9)


def own_address() -> str:
    """The address of the interface with the default route; the host name if there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ANY_ROUTED_ADDRESS)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
