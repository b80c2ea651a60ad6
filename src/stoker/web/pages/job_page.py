"""The page of one job: what was asked for, what became of it, and what it says."""

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from stoker.errors import BadInputError
from stoker.status import detail
from stoker.web.app_state import house_of, visitor_of
from stoker.web.pages.sections import render_job, trusted
from stoker.web.problems import NotFoundError
from stoker.web.templating import page

router = APIRouter()


@router.get("/jobs/{job}")
async def job_page(request: Request, job: str) -> Response:
    house = house_of(request)
    try:
        found = await house.desk.ask(lambda store: detail.read_detail(store, job, house.config.home))
    except BadInputError as error:
        raise NotFoundError(str(error)) from None
    if found.job.id != job:
        # A name or the beginning of an id led here: one job has one address.
        return RedirectResponse(f"/jobs/{found.job.id}", 307)
    return page(
        request,
        "job.html",
        detail=found,
        sections=trusted(render_job(found, visitor_of(request).role)),
        here="job",
        live=f"/live/jobs/{found.job.id}",
        now=found.now,
    )
