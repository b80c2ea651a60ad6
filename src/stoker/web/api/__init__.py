"""The HTTP API, version 1: everything the page does, as JSON, described by OpenAPI."""

from typing import Final

from fastapi import APIRouter, Depends, Security
from fastapi.security import HTTPBearer

from stoker.web.api import attempts, gpus, jobs, queue, session, status, steering, workers
from stoker.web.pagination import known_parameters, problems_listed

PREFIX: Final = "/api/v1"

# Only described here: the guard has looked at the token before anything comes this far.
_TOKEN: Final = HTTPBearer(auto_error=False, scheme_name="token", description="A token of `stoker tokens`.")

router = APIRouter(
    prefix=PREFIX,
    dependencies=[Security(_TOKEN), Depends(known_parameters)],
    responses=problems_listed(400, 401, 403, 422, 429, 503),
)
for part in (status, jobs, steering, attempts, workers, queue, gpus, session):
    router.include_router(part.router)
