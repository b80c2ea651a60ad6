"""`/notifications`: URLs and their events, from the settings and from the page. For operators."""

import asyncio
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Path
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from stoker.actions.subscription import LONGEST, check_url, parse_subscription
from stoker.errors import BadInputError, InvalidFieldsError, StokerError
from stoker.masking import masked_notify
from stoker.notifications.senders import send_test
from stoker.queue.field_kinds import Label, Written
from stoker.queue.model import NotifyUrl
from stoker.queue.store import Store
from stoker.settings import EVENTS, USUAL_EVENTS
from stoker.web.answers import Done, answer, carry_out
from stoker.web.api.bodies import body_of
from stoker.web.api.openapi import operation
from stoker.web.app_state import AppState, app_state_of, must_operate
from stoker.web.problems import ConflictError, NotFoundError

router = APIRouter(tags=["notifications"])

UrlId = Annotated[str, Path(min_length=1, max_length=40, description="The id of a URL that was added.")]
# Apprise gives up a connection after seconds; a name that does not resolve can take longer.
_TEST_WITHIN: Final = 60.0
_MOST_URLS: Final = 50


class AddedUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A URL that was added on the page or by the API."""

    id: str
    name: str
    url: str
    """The URL without secrets: `ntfy://***`."""
    events: list[str]
    added: float


class NotificationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """URLs without secrets: `ntfy://***`."""

    sent: bool
    """False in the demo, which sends nothing."""
    urls: list[str]
    """Those of `[notify]` in stoker.toml."""
    events: list[str]
    """Their events."""
    added: list[AddedUrl]
    known_events: list[str]


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a test message."""

    url: str
    error: str | None
    """Why it was not delivered; null on success."""


class TestResults(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    results: list[TestResult]


Events = Annotated[
    list[Written], Meta(max_length=len(EVENTS) * 2, description=f"What is sent to it: {', '.join(EVENTS)}.")
]


class UrlBody(msgspec.Struct, kw_only=True):
    url: Annotated[str, Meta(max_length=LONGEST, description="An apprise URL.", examples=["ntfy://ntfy.sh/my-topic"])]
    name: Annotated[Label, Meta(description="A name for people, because the URL is not shown.")] = ""
    events: Events = msgspec.field(default_factory=lambda: list(USUAL_EVENTS))


class EventsBody(msgspec.Struct, kw_only=True):
    events: Events


def settings_of(app_state: AppState, added: list[NotifyUrl]) -> NotificationSettings:
    """URLs and their events, without secrets."""
    wanted = app_state.config.notify
    return NotificationSettings(
        sent=wanted is not None,
        urls=masked_notify(wanted.urls) if wanted else [],
        events=list(wanted.events) if wanted else [],
        added=[
            AddedUrl(
                id=one.id, name=one.name, url=masked_notify([one.url])[0], events=list(one.events), added=one.added
            )
            for one in added
        ],
        known_events=list(EVENTS),
    )


@operation(router, "GET", "/notifications", NotificationSettings)
async def get_notifications(request: Request) -> Response:
    """List URLs and their events: those of stoker.toml, and those that were added here."""
    must_operate(request)
    app_state = app_state_of(request)
    return answer(settings_of(app_state, await app_state.pool.run(lambda store: store.notices.urls())))


@operation(router, "POST", "/notifications", Done, 409, 413, body=UrlBody)
async def add_url(request: Request) -> Response:
    """Add a URL to those of stoker.toml."""
    body = await body_of(request, UrlBody)
    wanted = app_state_of(request).config.notify
    if wanted is None:
        raise ConflictError("the demo sends no messages")
    url, name = body["url"].strip(), body.get("name", "").strip()
    events = _checked_events(body.get("events", USUAL_EVENTS))
    # Importing apprise takes a moment.
    await asyncio.to_thread(_check_url, url)
    if url in wanted.urls:
        raise ConflictError("this URL is in stoker.toml already: change its events there")

    def add(store: Store) -> Done:
        if len(store.notices.urls()) >= _MOST_URLS:
            raise ConflictError(f"there are {_MOST_URLS} URLs already: remove one first")
        if store.notices.add_url(url, name, events) is None:
            raise ConflictError("this URL was added already: change its events")
        return Done(changed=True, message=f"{name or masked_notify([url])[0]}: gets {', '.join(events) or 'nothing'}")

    return await carry_out(request, add)


@operation(router, "PATCH", "/notifications/{url}", Done, 404, 413, body=EventsBody)
async def change_url(request: Request, url: UrlId) -> Response:
    """Change the events of an added URL."""
    events = _checked_events((await body_of(request, EventsBody))["events"])

    def change(store: Store) -> Done:
        one = _found(store, url)
        store.notices.set_events(one.id, events)
        called = one.name or masked_notify([one.url])[0]
        changed = events != one.events
        return Done(changed=changed, message=f"{called}: gets {', '.join(events) or 'nothing'}")

    return await carry_out(request, change)


@operation(router, "DELETE", "/notifications/{url}", Done, 404)
async def remove_url(request: Request, url: UrlId) -> Response:
    """Remove an added URL."""

    def remove(store: Store) -> Done:
        one = _found(store, url)
        return Done(
            changed=store.notices.remove_url(one.id), message=f"{one.name or masked_notify([one.url])[0]}: removed"
        )

    return await carry_out(request, remove)


@operation(router, "POST", "/notifications/test", TestResults, 409)
async def test_urls(request: Request) -> Response:
    """Send a test message to every URL, as `stoker notify --test` does."""
    app_state = app_state_of(request)
    wanted = app_state.config.notify
    if wanted is None:
        raise ConflictError("the demo sends no messages")
    added = await app_state.pool.run(lambda store: store.notices.urls())
    urls = [*wanted.urls, *(one.url for one in added if one.url not in wanted.urls)]
    if not urls:
        raise ConflictError("there is no URL to send a test message to: add one first")
    link = wanted.link or app_state.keys.address()
    results = await asyncio.gather(*(_tested(url, link) for url in urls))
    failed = [one for one in results if one.error is not None]
    message = (
        f"{len(results) - len(failed)} of {len(results)} test messages were sent: {failed[0].error}"
        if failed
        else f"{'A test message was' if len(results) == 1 else f'{len(results)} test messages were'} sent"
    )
    return answer(TestResults(message=message, results=results))


async def _tested(url: str, link: str) -> TestResult:
    shown = masked_notify([url])[0]
    try:
        async with asyncio.timeout(_TEST_WITHIN):
            await asyncio.to_thread(send_test, url, link, "this")
    except StokerError as error:
        return TestResult(url=shown, error=str(error))
    except TimeoutError:
        return TestResult(url=shown, error=f"no answer within {_TEST_WITHIN:.0f} s")
    except Exception as error:  # noqa: BLE001 - a bug in a service's plugin, whose message may contain the URL
        return TestResult(url=shown, error=f"the message was not sent ({type(error).__name__})")
    return TestResult(url=shown, error=None)


def _check_url(url: str) -> None:
    try:
        if "://" not in url or parse_subscription(f"end:{url}").url != url:
            raise BadInputError("this is not a URL: write it like ntfy://ntfy.example.org/gpus")
        check_url(url)
    except StokerError as error:
        raise InvalidFieldsError({"url": str(error)}) from None


def _checked_events(events: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [event for event in events if event not in EVENTS]:
        raise InvalidFieldsError({"events": f"there is no event {unknown[0]!r}: use {', '.join(EVENTS)}"})
    return tuple(event for event in EVENTS if event in events)


def _found(store: Store, name: str) -> NotifyUrl:
    for one in store.notices.urls():
        if one.id == name:
            return one
    raise NotFoundError(f"there is no URL {name[:40]!a} that was added")
