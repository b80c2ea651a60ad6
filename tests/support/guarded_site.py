"""A page that does nothing, behind the gate: for requests without a network, and for a real server."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp

from stoker.web import statics
from stoker.web.app import with_middleware
from stoker.web.app_state import AppState, user_of
from stoker.web.auth import login
from stoker.web.auth.keys import Keys
from stoker.web.config import Config
from stoker.web.middleware.limits import DeadlineProtocol
from tests.support.waiting import wait_for


class Site(NamedTuple):
    app: ASGIApp
    config: Config
    keys: Keys
    log: list[str]
    done: list[str]
    """What it was made to do."""

    def ask(self, method: str, path: str, *, base: str = "http://localhost:7865", **more: Any) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=("192.0.2.7", 4000))
            async with httpx.AsyncClient(transport=transport, base_url=base) as client:
                return await client.request(method, path, **more)

        return asyncio.run(asked())

    def login(self, role: str = "operator", **more: Any) -> dict[str, str]:
        """The headers of a device that was let in."""
        token = next((token for token in self.keys.tokens() if token.role == role), None) or self.keys.add(
            role, "viewer" if role == "viewer" else "operator"
        )
        answer = self.ask("POST", "/login", data={"token": token.secret}, **more)
        assert answer.status_code == 200, answer.text
        return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}

    def bearer(self, role: str = "operator") -> dict[str, str]:
        token = self.keys.add(f"{role} of a program", "viewer" if role == "viewer" else "operator")
        return {"Authorization": f"Bearer {token.secret}"}


def site_of(config: Config) -> Site:
    keys, log, done = Keys(config.home), list[str](), list[str]()
    app = FastAPI()
    app.state.app_state = AppState(config, keys)
    app.include_router(login.router)

    @app.get("/")
    async def overview(request: Request) -> HTMLResponse:
        return HTMLResponse(f"hello {user_of(request).name}")

    @app.api_route("/api/v1/jobs", methods=["GET", "POST"])
    async def jobs(request: Request) -> PlainTextResponse:
        if request.method == "POST":
            done.append((await request.body()).decode(errors="replace"))
        return PlainTextResponse("done")

    @app.get("/form")
    async def form() -> HTMLResponse:
        return HTMLResponse('<form method="post" action="/api/v1/jobs"><button>Submit</button></form>')

    @app.get("/healthz")
    async def health() -> PlainTextResponse:
        return PlainTextResponse("well")

    @app.get("/static/thing.css")
    async def thing() -> PlainTextResponse:
        return PlainTextResponse("", headers={"Cache-Control": "public, max-age=60"})

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("on purpose")

    @app.get("/live")
    async def live() -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            while True:
                yield "data: news\n\n"
                await asyncio.sleep(0.02)

        return StreamingResponse(events(), media_type="text/event-stream")

    app.mount("/static", statics.VersionedFiles())
    return Site(with_middleware(app, config, keys, log.append), config, keys, log, done)


@contextlib.contextmanager
def served(app: ASGIApp, host: str = "127.0.0.1", **deadlines: float) -> Iterator[int]:
    """On a free port of this machine, until the block ends."""
    protocol = type("Protocol", (DeadlineProtocol,), deadlines)
    listener = socket.create_server((host, 0))
    server = uvicorn.Server(
        uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, loop="asyncio")
    )
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_for(lambda: server.started, named="the server")
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        listener.close()
