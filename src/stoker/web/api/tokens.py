"""`/tokens`: read-only links for other people, as `stoker tokens` makes them. For operators."""

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import BadInputError, InvalidFieldsError
from stoker.queue.field_kinds import Label
from stoker.web.answers import Done, answer
from stoker.web.api.bodies import body_of
from stoker.web.api.openapi import operation
from stoker.web.app_state import AppState, app_state_of, must_operate
from stoker.web.auth.key_file import Role, Token
from stoker.web.auth.keys import Keys, last_seen
from stoker.web.problems import ConflictError, NotFoundError
from stoker.web.qr import qr_rows

router = APIRouter(tags=["tokens"])

TokenId = Annotated[str, Path(min_length=1, max_length=40, description="The id of a token.")]


class ShownToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret."""

    id: str
    name: str
    role: Role
    created: float
    seen: float | None
    """When it was last used; null if never."""
    devices: int
    """How many are logged in with it."""


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    items: list[ShownToken]


class TokenLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link to log in with."""

    id: str
    name: str
    role: Role
    link: str
    qr: list[str]
    """The link as a QR code: rows of 0 and 1."""
    message: str


class TokenBody(msgspec.Struct, kw_only=True):
    name: Annotated[Label, Meta(description="For the list and the access log; one is made up if it is left out.")] = ""


def shown_tokens(keys: Keys) -> list[ShownToken]:
    """All tokens, the oldest first."""
    sessions = keys.sessions()
    of_each = {token.id: [one for one in sessions if one.token == token.id] for token in keys.tokens()}
    return [
        ShownToken(
            id=token.id,
            name=token.name,
            role=token.role,
            created=token.created,
            seen=last_seen(token, of_each.get(token.id, [])),
            devices=len(of_each.get(token.id, [])),
        )
        for token in keys.tokens()
    ]


@operation(router, "GET", "/tokens", TokenList)
async def list_tokens(request: Request) -> Response:
    """List the tokens for the page, without their secrets."""
    must_operate(request)
    return answer(TokenList(items=await asyncio.to_thread(shown_tokens, app_state_of(request).keys)))


@operation(router, "POST", "/tokens", TokenLink, 409, 413, body=TokenBody)
async def add_viewer(request: Request) -> Response:
    """Make a link for a viewer, who can read everything and change nothing."""
    name, app_state = (await body_of(request, TokenBody)).get("name", "").strip(), app_state_of(request)
    keys = app_state.keys
    try:
        token = await asyncio.to_thread(lambda: keys.add(name or keys.free_name("viewer"), "viewer"))
    except BadInputError as error:
        raise InvalidFieldsError({"name": str(error)}) from None
    return _link(request, app_state, token, f"{token.name}: the link is ready")


@operation(router, "POST", "/tokens/{token}/link", TokenLink, 404, 409)
async def get_link(request: Request, token: TokenId) -> Response:
    """Show the link of a viewer again."""
    app_state = app_state_of(request)
    found = await asyncio.to_thread(_viewer, app_state.keys, token)
    return _link(request, app_state, found, f"{found.name}: this is the link")


@operation(router, "DELETE", "/tokens/{token}", Done, 404, 409)
async def revoke_viewer(request: Request, token: TokenId) -> Response:
    """Revoke the link of a viewer, and log out its devices."""
    keys = app_state_of(request).keys

    def revoke() -> Done:
        found, devices = keys.revoke(_viewer(keys, token).id)
        return Done(changed=True, message=f"{found.name}: revoked, {devices} device{'s' * (devices != 1)} logged out")

    return answer(await asyncio.to_thread(revoke))


def _viewer(keys: Keys, name: str) -> Token:
    """The viewer's token with this id. Operators' tokens stay on the page's machine: they run commands."""
    found = next((token for token in keys.tokens() if token.id == name), None)
    if found is None:
        raise NotFoundError(f"there is no token {name[:40]!a}")
    if found.role != "viewer":
        raise ConflictError(f"{found.name} is an operator: `stoker tokens` on the page's machine changes that token")
    return found


def _link(request: Request, app_state: AppState, token: Token, message: str) -> Response:
    address = app_state.keys.address() or str(request.base_url).rstrip("/")
    link = f"{address}/login#{token.secret}"
    rows = qr_rows(link)
    return answer(TokenLink(id=token.id, name=token.name, role=token.role, link=link, qr=rows, message=message))
