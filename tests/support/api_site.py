"""The API behind its authentication, without a network: a queue, and clients that are logged in."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from stoker.queue import Store, init_queue
from stoker.status.snapshot import SnapshotBuilder
from stoker.web import api, metrics, problems
from stoker.web.api import openapi
from stoker.web.app import health, with_middleware
from stoker.web.app_state import AppState
from stoker.web.auth.key_file import Role
from stoker.web.auth.keys import Keys
from stoker.web.config import Config


class Client:
    """Asks as a program does that has a token."""

    def __init__(self, app: ASGIApp, headers: dict[str, str] | None = None) -> None:
        self._app = app
        self._headers = headers or {}

    def request(self, method: str, path: str, *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
                return await client.request(method, path, headers=self._headers | (headers or {}), **more)

        return asyncio.run(asked())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.request("POST", path, **more)

    def patch(self, path: str, **more: Any) -> httpx.Response:
        return self.request("PATCH", path, **more)


class ApiSite:
    """The snapshot cache has been filled once, and is refreshed on request."""

    def __init__(self, directory: Path, app: FastAPI | None = None) -> None:
        self.queue = str(directory / "queue.db")
        self.store: Store = init_queue(self.queue)
        self.config = Config(queue=self.queue, home=directory / "home", names=("testserver",))
        self.keys = Keys(self.config.home)
        self.app = app or new_app()
        self.app_state = self.app.state.app_state = AppState(self.config, self.keys)
        self.snapshot_cache, self.pool = self.app_state.snapshot_cache, self.app_state.pool
        self.secured = with_middleware(self.app, self.config, self.keys, lambda _line: None)
        self.look()

    def look(self) -> None:
        self.snapshot_cache._take(SnapshotBuilder(self.config.home).observe(self.store), None)

    def bearer(self, role: Role = "operator", name: str = "phone") -> dict[str, str]:
        known = next((token for token in self.keys.tokens() if token.name == name), None)
        token = known or self.keys.add(name, role)
        return {"Authorization": f"Bearer {token.secret}"}

    def client(self, role: Role = "operator", name: str = "phone") -> Client:
        return Client(self.secured, self.bearer(role, name))

    def close(self) -> None:
        asyncio.run(self.app_state.close())
        self.store.close()


def new_app() -> FastAPI:
    app = FastAPI(title="Stoker", openapi_url="/api/openapi.json", docs_url=None, redoc_url=None, lifespan=_nothing)
    problems.install(app)
    openapi.install(app)
    for part in (api, metrics):
        app.include_router(part.router)
    app.include_router(health)
    return app


@contextlib.asynccontextmanager
async def _nothing(_app: FastAPI) -> AsyncIterator[None]:
    yield


@functools.cache
def _shared_app() -> FastAPI:
    """Made once: that takes longer than most of the tests."""
    return new_app()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ApiSite]:
    with contextlib.closing(ApiSite(tmp_path, _shared_app())) as made:
        yield made


def job_body(**more: Any) -> dict[str, Any]:
    return {"command": "echo hello", "directory": "/tmp", **more}
