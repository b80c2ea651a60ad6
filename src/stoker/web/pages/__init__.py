"""The pages that people look at: the overview, the jobs, one job, and the form that submits."""

from fastapi import APIRouter

from stoker.web.pages import files, front, job_list, job_page, submit_page

router = APIRouter(include_in_schema=False)
for _part in (files, front, job_list, job_page, submit_page):
    router.include_router(_part.router)
