"""The HTTP API, version 1: everything the page does, as JSON, described by OpenAPI."""

from typing import Final

from fastapi import APIRouter, Depends, Security
from fastapi.security import HTTPBearer

from stoker.web.answers import known_parameters
from stoker.web.api import attempts, bulk, groups, job_actions, jobs, notifications, queue, tokens
from stoker.web.api.openapi import problem_responses

# Only for the description: the middleware has already authenticated the request.
_TOKEN: Final = HTTPBearer(auto_error=False, scheme_name="token", description="A token of `stoker tokens`.")

router = APIRouter(
    prefix="/api/v1",
    dependencies=[Security(_TOKEN), Depends(known_parameters)],
    responses=problem_responses(400, 401, 403, 422, 429, 503),
)
for part in (jobs, bulk, job_actions, groups, attempts, queue, notifications, tokens):
    router.include_router(part.router)
