"""Shared by the request handlers: configuration, keys, connections to the queue, and caches."""

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from stoker.web.auth.key_file import User
from stoker.web.auth.keys import Keys
from stoker.web.config import Config
from stoker.web.pool import ConnectionPool
from stoker.web.sse.log_channels import LogChannels
from stoker.web.sse.notices import NoticeFeed
from stoker.web.sse.section_cache import SectionCache
from stoker.web.sse.snapshot_cache import SnapshotCache


class AppState:
    def __init__(self, config: Config, keys: Keys) -> None:
        self.config = config
        self.keys = keys
        self.pool = ConnectionPool(config.queue)
        self.snapshot_cache = SnapshotCache(config)
        self.section_cache = SectionCache()
        self.log_channels = LogChannels(config.home, self.pool)
        self.notice_feed = NoticeFeed(config)

    async def close(self) -> None:
        self.notice_feed.stop()
        self.snapshot_cache.stop()
        await self.log_channels.close()
        self.pool.close()


def app_state_of(request: HTTPConnection) -> AppState:
    app_state: AppState = request.app.state.app_state
    return app_state


def must_operate(request: HTTPConnection) -> None:
    """Refuses viewers if even reading needs an operator."""
    user = user_of(request)
    if not user.operates:
        raise HTTPException(403, f"the token {user.name!r} is read-only: this is shown to operators")


def user_of(request: HTTPConnection) -> User:
    """The authenticated user; the middleware admits no request without one."""
    user: User = request.state.user
    return user
