"""The pages: the overview, the jobs, one job, and the form that submits."""

from fastapi import APIRouter

from stoker.web.pages import job_list, submit, views

router = APIRouter(include_in_schema=False)
for _part in (views, job_list, submit):
    router.include_router(_part.router)
