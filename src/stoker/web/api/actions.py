"""Operations that change something: how they are declared, carried out and answered."""

from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.queue.store import Store
from stoker.web.answers import Done, answer, problems_listed
from stoker.web.api.described import described
from stoker.web.app_state import app_state_of

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


def action(
    router: APIRouter, path: str, tag: str, summary: str, *problems: int, method: Literal["POST", "PATCH"] = "POST"
) -> Callable[[Handler], Handler]:
    """Declares a handler that answers with `Done`. `problems`: the statuses that it may answer with besides."""

    def decorate(handler: Handler) -> Handler:
        router.add_api_route(
            path,
            handler,
            methods=[method],
            tags=[tag],
            operation_id=handler.__name__,
            summary=summary,
            response_model=described(Done),
            response_description="What was done, and how to undo it.",
            responses=problems_listed(*problems),
        )
        return handler

    return decorate


async def carry_out(request: Request, work: Callable[[Store], Done]) -> Response:
    """Changes the queue and lets every page see that at once."""
    app_state = app_state_of(request)
    done = await app_state.pool.run(work)
    app_state.snapshot_cache.refresh()
    return answer(done)
