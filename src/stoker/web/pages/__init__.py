"""The pages: the overview, the jobs, one job, and the form for submitting."""

from fastapi import APIRouter

from stoker.web.pages import submit, views

router = APIRouter(include_in_schema=False)
for _part in (views, submit):
    router.include_router(_part.router)
