"""Coming in and leaving: a token is shown once per device, and a cookie stands for it from then on.

The link that lets a device in has the token behind a `#`: what stands there, a browser sends to nobody. A script takes
it out of the address at once, and posts it here.
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
    cookie_for,
    cookies_named,
    header,
    neighbourhood,
    no_cookie,
    refusal_in_json,
    refusal_page,
)
from stoker.web.auth.throttle import FailureThrottle, TooManyFailuresError
from stoker.web.problems import wants_page

router = APIRouter(include_in_schema=False)

# The form has two. Strangers send here what they like, and each field costs something.
_MOST_FIELDS: Final = 10
_NOT_RIGHT: Final = "This token is not right, or it has been revoked."


@router.get("/login")
async def form(request: Request, next: str = "/") -> Response:  # noqa: A002 - the name in the address
    # Never a redirect, not even for who is in already: it would take what stands behind the `#` along.
    return _page(request, 200, local_path(next), "")


@router.get("/login/session")
async def session() -> Response:
    """Whether this device has been let in: the guard lets nobody else come this far."""
    return Response(status_code=204)


@router.post("/login")
async def login(request: Request) -> Response:
    body = (await request.body()).decode(errors="replace")
    try:
        fields = parse_qs(body, max_num_fields=_MOST_FIELDS, errors="replace")
    except ValueError:
        return _refused(request, 400, f"The form has more than {_MOST_FIELDS} fields.", "/")
    token, wanted = (fields.get(name, [""])[0] for name in ("token", "next"))
    app_state = app_state_of(request)
    patience: FailureThrottle = request.state.patience
    address = neighbourhood(client_address(request.scope))
    try:
        # Nothing is awaited between these: of a hundred tokens that come at once, each is counted before the next.
        if not app_state.keys.recognizes(token):
            patience.failed(address)
            return _refused(request, 401, _NOT_RIGHT, wanted)
    except TooManyFailuresError as error:
        return _refused(
            request, 429, f"There were too many wrong tokens: try again in {error.seconds} s.", wanted, error
        )
    entered = await run_in_threadpool(app_state.keys.enter, token, header(request.scope, b"user-agent"))
    if entered is None:  # revoked within this moment
        return _refused(request, 401, _NOT_RIGHT, wanted)
    user, secret = entered
    request.state.user = user
    for cookie in cookies_named(request.scope, app_state.config):
        await run_in_threadpool(app_state.keys.leave, cookie)  # the device's old session, which nobody needs any more
    answer = _led_on(request, local_path(wanted))
    answer.headers["Set-Cookie"] = cookie_for(request.scope, app_state.config, secret)
    return answer


@router.post("/logout")
async def logout(request: Request) -> Response:
    app_state = app_state_of(request)
    for cookie in cookies_named(request.scope, app_state.config):
        await run_in_threadpool(app_state.keys.leave, cookie)
    answer = RedirectResponse("/login", 303)
    answer.headers["Set-Cookie"] = no_cookie(request.scope, app_state.config)
    return answer


def _led_on(request: Request, wanted: str) -> Response:
    if wants_page(request.scope):
        return RedirectResponse(wanted, 303)
    return JSONResponse({"next": wanted})


def _refused(
    request: Request, status: int, sentence: str, wanted: str, waiting: TooManyFailuresError | None = None
) -> Response:
    headers = {} if waiting is None else {"Retry-After": str(waiting.seconds)}
    if not wants_page(request.scope):
        return refusal_in_json(status, sentence, headers)
    answer = _page(request, status, local_path(wanted), sentence)
    answer.headers.update(headers)
    return answer


def _page(request: Request, status: int, wanted: str, mistake: str) -> Response:
    config = app_state_of(request).config
    return refusal_page(request.scope, config, "login.html", status, wanted=wanted, check=False, mistake=mistake)
