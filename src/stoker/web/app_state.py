"""What every handler of a request may need, in one place; and who asks."""

import msgspec
from starlette.requests import HTTPConnection

from stoker.web.config import Config
from stoker.web.connection_pool import ConnectionPool
from stoker.web.keys import Keys
from stoker.web.snapshot_cache import SnapshotCache
from stoker.web.user import User


class AppState(msgspec.Struct, frozen=True):
    config: Config
    desk: ConnectionPool
    board: SnapshotCache
    keys: Keys


def house_of(request: HTTPConnection) -> AppState:
    house: AppState = request.app.state.house
    return house


def visitor_of(request: HTTPConnection) -> User:
    """Who asks: the guard has let nobody in without."""
    visitor: User = request.state.visitor
    return visitor
