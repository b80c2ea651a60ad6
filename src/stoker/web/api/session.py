"""`GET /session`: who one is."""

from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.web.api.described import described
from stoker.web.app_state import user_of
from stoker.web.pagination import answer

router = APIRouter(tags=["session"])


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks."""

    role: Literal["viewer", "operator"]
    """A viewer may look, an operator may also change things."""
    name: str
    """Of the token."""


@router.get(
    "/session",
    operation_id="get_session",
    summary="Who one is",
    response_model=described(SessionInfo),
    response_description="The role and the name of the token.",
)
async def session(request: Request) -> Response:
    """Whose token the request came with, and what it allows."""
    user = user_of(request)
    return answer(SessionInfo(role=user.role, name=user.name))
