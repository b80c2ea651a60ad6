"""Login and logout: a device sends a token once and gets a session cookie.

The login link has the token in its fragment, after `#`, which browsers do not send. A script removes it from the
address bar at once and posts it here.
"""

from typing import Final
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, RedirectResponse, Response

from stoker.web.app_state import app_state_of
from stoker.web.auth.authentication import local_path
from stoker.web.auth.requests import (
    client_address,
    client_network,
    cookie_for,
    expired_cookie,
    header,
    html_refusal,
    json_refusal,
    session_cookies,
)
from stoker.web.auth.throttle import FailureThrottle, TooManyFailuresError
from stoker.web.problems import wants_page

router = APIRouter(include_in_schema=False)

# The form has two. Anybody can post here, and each field takes memory.
_MAX_FIELDS: Final = 10
_INVALID: Final = "This token is invalid or has been revoked."


@router.get("/login")
async def form(request: Request, next: str = "/") -> Response:  # noqa: A002 - the name in the address
    # Never a redirect, even for a device that is logged in: browsers would keep the fragment with the token.
    return _page(request, 200, local_path(next), "")


@router.get("/login/session")
async def session() -> Response:
    """For the login page: succeeds if the device is logged in, because the middleware refuses all others."""
    return Response(status_code=204)


@router.post("/login")
async def login(request: Request) -> Response:
    body = (await request.body()).decode(errors="replace")
    try:
        fields = parse_qs(body, max_num_fields=_MAX_FIELDS, errors="replace")
    except ValueError:
        return _refused(request, 400, f"The form has more than {_MAX_FIELDS} fields.", "/")
    token, target = (fields.get(name, [""])[0] for name in ("token", "next"))
    app_state = app_state_of(request)
    throttle: FailureThrottle = request.state.login_throttle
    address = client_network(client_address(request.scope))
    try:
        # No await in between: each of many simultaneous tokens is counted before the next is checked.
        if not app_state.keys.is_valid(token):
            throttle.failed(address)
            return _refused(request, 401, _INVALID, target)
    except TooManyFailuresError as error:
        return _refused(request, 429, f"Too many wrong tokens: try again in {error.seconds} s.", target, error)
    opened = await run_in_threadpool(app_state.keys.log_in, token, header(request.scope, b"user-agent"))
    if opened is None:  # revoked in between
        return _refused(request, 401, _INVALID, target)
    user, secret = opened
    request.state.user = user
    for cookie in session_cookies(request.scope, app_state.config):
        await run_in_threadpool(app_state.keys.log_out, cookie)  # the device's old session
    answer = _continue(request, local_path(target))
    answer.headers["Set-Cookie"] = cookie_for(request.scope, app_state.config, secret)
    return answer


@router.post("/logout")
async def logout(request: Request) -> Response:
    app_state = app_state_of(request)
    for cookie in session_cookies(request.scope, app_state.config):
        await run_in_threadpool(app_state.keys.log_out, cookie)
    answer = RedirectResponse("/login", 303)
    answer.headers["Set-Cookie"] = expired_cookie(request.scope, app_state.config)
    return answer


def _continue(request: Request, target: str) -> Response:
    if wants_page(request.scope):
        return RedirectResponse(target, 303)
    return JSONResponse({"next": target})


def _refused(
    request: Request, status: int, message: str, target: str, throttled: TooManyFailuresError | None = None
) -> Response:
    headers = {} if throttled is None else {"Retry-After": str(throttled.seconds)}
    if not wants_page(request.scope):
        return json_refusal(status, message, headers)
    answer = _page(request, status, local_path(target), message)
    answer.headers.update(headers)
    return answer


def _page(request: Request, status: int, target: str, mistake: str) -> Response:
    config = app_state_of(request).config
    return html_refusal(request.scope, config, "login.html", status, next=target, check=False, mistake=mistake)
