"""The HTTP server of the page."""

import contextlib
import ctypes
import resource
import socket
from collections.abc import Callable
from typing import Final

import uvicorn

from stoker.errors import StokerError
from stoker.queue import prepare_types
from stoker.web.app import create_app, with_middleware
from stoker.web.app_state import AppState
from stoker.web.auth.keys import Keys
from stoker.web.config import Config
from stoker.web.middleware.limits import DeadlineProtocol

# A page holds one connection open, and a browser opens a few more while it loads.
_MAX_CONNECTIONS: Final = 1000
_BACKLOG: Final = 512
# For responses that are being sent; event streams end at once.
_SHUTDOWN_TIMEOUT: Final = 3
# From malloc.h.
_M_ARENA_MAX: Final = -8


class Server(uvicorn.Server):
    """Ends the event streams before it waits for its connections."""

    def __init__(self, config: uvicorn.Config, app_state: AppState, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._app_state = app_state
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app_state.snapshot_cache.stop()
        await super().shutdown(sockets)


def serve(
    config: Config,
    listener: socket.socket,
    log: Callable[[str], None],
    ready: Callable[[int, Keys], None],
) -> None:
    """Serves until a signal. Calls `ready` with the port and the keys once it accepts connections."""
    _allow_connections()
    _limit_arenas()
    prepare_types()
    keys = Keys(config.home)
    port = int(listener.getsockname()[1])
    app_state = AppState(config, keys)
    settings = uvicorn.Config(
        with_middleware(create_app(app_state), config, keys, log),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        lifespan="on",
        backlog=_BACKLOG,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
        ssl_certfile=config.cert,
        ssl_keyfile=config.key,
        http=DeadlineProtocol,
        ws="none",
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = Server(settings, app_state, lambda: ready(port, keys))
    with listener:
        server.run(sockets=[listener])
    if not server.started:
        raise StokerError(f"the page did not start: {config.home / 'page.log'} has details")


def _allow_connections() -> None:
    """Raises the limit of file descriptors, which is 1024 on many systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * _MAX_CONNECTIONS
    if soft < needed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
            )


def _limit_arenas() -> None:
    """One malloc arena for all threads: each arena keeps the memory of its largest response."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
