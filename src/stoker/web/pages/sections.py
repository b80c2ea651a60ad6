"""The sections of the pages as HTML for a role, for the first load and for updates."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup

from stoker.status.detail import JobDetail
from stoker.status.job_columns import JobRow, columns_of
from stoker.status.job_text import job_label
from stoker.status.model import EndedJob, Machine, Snapshot
from stoker.web.answers import Page
from stoker.web.auth.key_file import Role
from stoker.web.templating import rendered, slug

JOB: Final = ("summary", "spec", "report", "fit", "waits")
OVERVIEW: Final = ("health", "machines", "groups", "running", "waiting", "ended", "hours")
# With more GPUs than this, they are shown as rows and their machines are folded.
_MOST_CARDS: Final = 16
# The worst come first.
_MOST_POINTS: Final = 8


def render(snapshot: Snapshot, role: Role) -> dict[str, str]:
    """The sections of the overview by their names; a machine's is `machine-` and its worker's id."""
    context = _context(snapshot, role)
    sections = {name: rendered(f"{name}.html", parts={}, **context).strip() for name in OVERVIEW}
    return sections | {
        name_of(machine): rendered("machine.html", machine=machine, **context).strip() for machine in snapshot.machines
    }


def for_page(snapshot: Snapshot, role: Role, rendered_before: Mapping[str, str]) -> dict[str, Markup]:
    """The same for a new page, with the machines within their section."""
    sections = trusted(rendered_before)
    machines = rendered("machines.html", parts=sections, **_context(snapshot, role))
    return sections | trusted({"machines": machines})


def name_of(machine: Machine) -> str:
    return f"machine-{slug(machine.worker)}"


def _context(snapshot: Snapshot, role: Role) -> dict[str, Any]:
    own = sum(len(machine.gpus) for machine in snapshot.machines)
    gpus = own + sum(node.gpus for machine in snapshot.machines for node in machine.nodes)
    jobs = [*(item.job for item in snapshot.running), *(item.job for item in snapshot.waiting)]
    return {
        "snapshot": snapshot,
        "acts": role == "operator",
        "names": {job.id: job_label(job) for job in jobs},
        "groups": [(slug(group.name), group) for group in snapshot.groups],
        "ended": _by_group(snapshot.ended),
        "folded": {group.name for group in snapshot.groups},
        "machines": [name_of(machine) for machine in snapshot.machines],
        "gpu_count": gpus,
        "crowded": own > _MOST_CARDS,
        "most_points": _MOST_POINTS,
    }


def _by_group(jobs: Sequence[EndedJob]) -> list[tuple[str, list[EndedJob]]]:
    """Jobs of a group are one row, in the place of the newest; each other job is by itself."""
    rows: dict[str, tuple[str, list[EndedJob]]] = {}
    for one in jobs:
        # Ids of jobs are no names of groups: those have a prefix here.
        key = f"group:{one.job.group}" if one.job.group else one.job.id
        rows.setdefault(key, (one.job.group or "", []))[1].append(one)
    return list(rows.values())


def render_job(detail: JobDetail, role: Role) -> dict[str, str]:
    """The sections of a job's page by their names."""
    context = {"detail": detail, "acts": role == "operator"}
    return {name: rendered(f"job_{name}.html", **context).strip() for name in JOB}


def render_list(
    found: Page,
    older: str | None,
    newest: str | None,
    role: Role,
    q: str = "",
    heads: Mapping[str, tuple[str, str]] = {},
    named: bool = False,
) -> dict[str, str]:
    """The section of a list of jobs, with links to older and to the newest jobs, and of heads to other orders.

    `named`: bulk actions apply to the shown jobs, not to all matches.
    """
    context = {
        "rows": [JobRow(job=job) for job in found.items],
        "columns": columns_of("page"),
        "older": older,
        "newest": newest,
        "q": q,
        "heads": heads,
        "named": named,
        "cut": found.cut,
        "acts": role == "operator",
    }
    return {"list": rendered("job_list.html", **context).strip()}


def trusted(sections: Mapping[str, str]) -> dict[str, Markup]:
    """Sections as safe HTML: they were escaped when they were rendered."""
    return {name: Markup(html) for name, html in sections.items()}  # noqa: S704 - rendered by the templates above
