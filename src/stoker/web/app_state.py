"""What every handler of a request may need, in one place; and who asks."""

import msgspec
from starlette.requests import HTTPConnection

from stoker.web.auth.keys import Keys
from stoker.web.auth.user import User
from stoker.web.config import Config
from stoker.web.connection_pool import ConnectionPool
from stoker.web.sse.snapshot_cache import SnapshotCache


class AppState(msgspec.Struct, frozen=True):
    config: Config
    pool: ConnectionPool
    snapshot_cache: SnapshotCache
    keys: Keys


def app_state_of(request: HTTPConnection) -> AppState:
    app_state: AppState = request.app.state.app_state
    return app_state


def user_of(request: HTTPConnection) -> User:
    """Who asks: the guard has let nobody in without."""
    user: User = request.state.user
    return user
