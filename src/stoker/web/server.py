"""Serves the page on a socket that listens: the server, and an end that lets every page go."""

import contextlib
import ctypes
import resource
import socket
from collections.abc import Callable
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from stoker.errors import StokerError
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
