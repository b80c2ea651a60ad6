"""`/history` and `/usage`: what the GPUs did, minute by minute for charts, and in all."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from stoker.queue.model import GpuUse
from stoker.queue.store import Store
from stoker.status.usage import History, usage_history
from stoker.web.answers import answer, tagged
from stoker.web.api.described import described
from stoker.web.app_state import app_state_of

router = APIRouter(tags=["gpus"])

# As long as the queue remembers.
_MOST_HOURS: Final = 31 * 24


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time since then, by what the GPUs did."""

    since: float
    """Seconds since the epoch."""
    seconds: dict[GpuUse, float]
    """Seconds of one GPU. Time in which nobody looked is in none of them."""


@router.get(
    "/history",
    operation_id="get_history",
    summary="What each GPU did, minute by minute",
    response_model=described(History),
    response_description="Arrays of one length, with null where nobody looked.",
    responses={
        200: {"headers": {"ETag": {"description": "Of this answer, for If-None-Match.", "schema": {"type": "string"}}}},
        304: {"description": "It is as it was."},
    },
)
async def get_history(
    request: Request,
    host: Annotated[str | None, Query(max_length=300, description="Only the GPUs of this machine.")] = None,
    gpu: Annotated[str | None, Query(max_length=100, description="Only the GPU with this uuid.")] = None,
    minutes: Annotated[int, Query(ge=1, le=1440, description="How far back.")] = 60,
) -> Response:
    """Utilization, memory and what it was for, as a chart wants them; by If-None-Match only when they changed."""

    def history(store: Store) -> History:
        now = store.clock()
        return usage_history(store.usage.read(int(now // 60) - minutes + 1, host, gpu), now, minutes)

    return tagged(request, await app_state_of(request).pool.run(history))


@router.get(
    "/usage",
    operation_id="get_usage",
    summary="GPU time by what it was for",
    response_model=described(UsageTotals),
    response_description="Seconds of one GPU.",
)
async def get_usage(
    request: Request,
    hours: Annotated[int, Query(ge=1, le=_MOST_HOURS, description="How far back.")] = 24,
) -> Response:
    """For jobs, for background work, for somebody else, and for nothing."""

    def usage(store: Store) -> UsageTotals:
        first = int(store.clock() // 60) - hours * 60
        return UsageTotals(since=first * 60.0, seconds=store.usage.totals(first))

    return answer(await app_state_of(request).pool.run(usage))
