"""Serves the page on a socket that listens: the server, and an end that lets every page go."""

import contextlib
import ctypes
import errno
import resource
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from stoker.errors import BadInputError, StokerError
from stoker.streams import warn
from stoker.web.app import create_app, guarded
from stoker.web.app_state import AppState
from stoker.web.auth.keys import Keys
from stoker.web.config import Config
from stoker.web.connection_pool import ConnectionPool
from stoker.web.middleware.limits import PunctualProtocol
from stoker.web.sse.snapshot_cache import SnapshotCache

# A page holds one connection open, and a browser opens a few more while it loads.
_MOST_CONNECTIONS: Final = 1000
_BACKLOG: Final = 512
# Long enough for an answer that is being written; pages that listen are let go at once.
_LAST_ANSWERS: Final = 3
# M_ARENA_MAX of malloc.h.
_ARENAS: Final = -8


class Server(uvicorn.Server):
    """Lets go of the pages that listen before it waits for its connections to end."""

    def __init__(self, config: uvicorn.Config, app_state: AppState, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._house = app_state
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._house.snapshot_cache.stop()
        await super().shutdown(sockets)


def guarded_app(app_state: AppState, log: Callable[[str], None]) -> ASGIApp:
    """What may be connected to."""
    return guarded(create_app(app_state), app_state.config, app_state.keys, log)


def serve(
    config: Config,
    listener: socket.socket,
    log: Callable[[str], None],
    ready: Callable[[int, Keys], None],
) -> None:
    """Serves until a signal ends it. `ready` is told the port and the keys when people can come."""
    _allow_connections()
    _share_memory()
    keys = Keys(config.home)
    port = int(listener.getsockname()[1])
    app_state = AppState(
        config=config, pool=ConnectionPool(config.queue), snapshot_cache=SnapshotCache(config), keys=keys
    )
    settings = uvicorn.Config(
        guarded_app(app_state, log),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        lifespan="on",
        backlog=_BACKLOG,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=_LAST_ANSWERS,
        ssl_certfile=config.cert,
        ssl_keyfile=config.key,
        http=PunctualProtocol,
        ws="none",
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = Server(settings, app_state, lambda: ready(port, keys))
    with listener:
        server.run(sockets=[listener])
    if not server.started:
        raise StokerError(f"the page did not start: {config.home / 'page.log'} has more about it")


def _allow_connections() -> None:
    """Many systems let a process have 1024 descriptors unless it asks for more, and a page takes one or two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * _MOST_CONNECTIONS
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )


def _share_memory() -> None:
    """Has glibc's allocator serve all threads from one place: each would keep what its largest page once took."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such habit
        ctypes.CDLL(None).mallopt(_ARENAS, 1)


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
