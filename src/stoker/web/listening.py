"""Where the page listens. Apart from the server, so that a mistake is told before anything large is imported."""

import errno
import socket
import ssl
import stat
from pathlib import Path
from typing import Final

from stoker.errors import BadInputError
from stoker.streams import warn
from stoker.web.config import Config

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
