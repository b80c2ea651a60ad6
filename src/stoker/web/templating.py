"""The Jinja environment, which escapes everything, and the filters and functions of the templates.

Nothing here depends on the current time: a moment becomes a `<time>` element, and a script in the browser shows how
long ago it was. So the HTML of a section changes only when the data does.
"""

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from stoker.errors import BadInputError
from stoker.masking import masked_notify
from stoker.queue.explanation import Why, spoken
from stoker.queue.model import ClusterNode, GpuUse, Job, WorkerGpu
from stoker.rules.registry import conditions, in_words, policies_of
from stoker.status.job_text import command_text, job_label, one_line, slurm_text, when_text, where_text
from stoker.status.machines import cluster_gpus, partitions_of
from stoker.status.model import EndedJob, Machine
from stoker.units import format_memory, format_percent
from stoker.web.reports import fit_of, report_html
from stoker.web.statics import static_url

TimeStyle = Literal["ago", "for", "in", "clock"]
"""`3 h ago`, `3 h`, `in 3 h`, `14:02`."""

_TEMPLATES: Final = Path(__file__).parent / "templates"
_UNKNOWN: Final = "unknown"
_CODE: Final = re.compile(r"`([^`]{1,200})`")
_NOT_IN_AN_ID: Final = re.compile(r"[^A-Za-z0-9_-]")
_LINE_ENDS: Final = "\n\t"
# How the GPUs of a machine are counted, in this order.
_STATES: Final[dict[GpuUse | Literal["kept", "quarantined"], str]] = {
    "job": "with jobs",
    "background": "background",
    "somebody": "others",
    "kept": "reserved",
    "quarantined": "quarantined",
    "free": "free",
    "unknown": "unknown",
}
# Precedes a reason that holds for the whole queue, which the page shows once above it.
_BESIDES: Final = "; besides, "


@cache
def environment() -> Environment:
    """Created once: compiling a template takes longer than rendering it."""
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "bytes": memory,
        "called": job_label,
        "code": code,
        "command": command_text,
        "duration": duration,
        "fit": fit_of,
        "how_they_ended": how_they_ended,
        "line": one_line,
        "notified": lambda entries, for_viewer=False: masked_notify(entries, for_viewer=for_viewer),
        "number": number,
        "percent": percent,
        "report": report_html,
        "script": script,
        "sentence": sentence,
        "slug": slug,
        "time": moment,
    }
    made.globals |= {
        "because": because,
        "cluster_gpus": cluster_gpus,
        "gpu_strip": gpu_strip,
        "filled": filled,
        "hours_text": hours_text,
        "in_use": in_use,
        "partitions": partitions_of,
        "reason": reason,
        "rules": rules,
        "slurm_text": slurm_text,
        "where_text": where_text,
        "when_text": when_text,
        "static": static_url,
        "tally": tally,
        "took": took,
    }
    return made


def rendered(template: str, **context: Any) -> str:
    return environment().get_template(template).render(context)


def page(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """A whole page, also for somebody who is not logged in."""
    user = getattr(request.state, "user", None)
    app_state = getattr(request.app.state, "app_state", None)
    title = app_state.config.title if app_state is not None else "Stoker"
    return HTMLResponse(rendered(template, user=user, site=title, **context), status_code=status)


# Filters


def how_they_ended(jobs: Sequence[EndedJob]) -> str:
    """`its last 15 jobs: 12 succeeded, 3 failed`."""
    counts = Counter("stopped" if one.stopped else one.job.state for one in jobs)
    return f"its last {len(jobs)} jobs: {', '.join(f'{number} {state}' for state, number in counts.items())}"


def memory(amount: int | None) -> str:
    return _UNKNOWN if amount is None else format_memory(amount)


def percent(fraction: float | None) -> str:
    return _UNKNOWN if fraction is None else format_percent(fraction)


def duration(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else spoken(seconds)


def number(amount: float) -> str:
    """`0`, `0.4`, `12`, `1,204`."""
    return f"{amount:.1f}".removesuffix(".0") if amount < 10 else f"{amount:,.0f}"


def moment(at: float | None, style: TimeStyle = "ago") -> Markup:
    """A `<time>` element with the date as its text until a script replaces it."""
    try:
        when = datetime.fromtimestamp(at, UTC) if at is not None else None
    except (ValueError, OverflowError, OSError):
        when = None
    if when is None:
        return escape(_UNKNOWN)
    exact, shown = when.isoformat(timespec="milliseconds"), when.strftime("%Y-%m-%d %H:%M UTC")
    return Markup(f'<time datetime="{exact}" data-tell="{style}">{shown}</time>')  # noqa: S704 - dates and a literal


def code(text: str) -> Markup:
    """Text on one line, with `<code>` for what is in backticks."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(one_line(text)))))  # noqa: S704 - escaped here


def sentence(text: str) -> Markup:
    """The same with a capital first letter, which stored reasons do not have."""
    return code(text[:1].upper() + text[1:])


def script(text: str) -> str:
    """Several lines; invisible characters, such as those that change the direction of text, are made visible."""
    return "".join(
        letter if letter.isprintable() or letter in _LINE_ENDS else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def slug(text: str) -> str:
    """Text that can be part of an element's id."""
    return _NOT_IN_AN_ID.sub("_", text)


# Functions


def reason(job: Job, why: Why) -> str:
    """Why it waits, without the commands for which the page has a button."""
    if why.kind == "held":
        return f"held: {job.reason}" if job.reason not in {"", "held"} else "held until somebody releases it"
    if why.kind == "paused":
        return "the queue is paused"
    if why.kind == "no worker":
        return "no worker is there"
    if why.kind == "workers paused":
        return why.reason.partition(":")[0]
    return why.reason.partition(_BESIDES)[0]


def took(job: Job) -> float | None:
    """The seconds from its start to its end."""
    if job.started is None or job.ended is None or job.ended < job.started:
        return None
    return job.ended - job.started


def because(job: Job) -> str:
    """Why it ended, if its state does not say it all."""
    code = f"exit code {job.exit_code}" if job.exit_code not in {None, 0} else ""
    sentence = job.reason if job.reason not in {"", job.state} else ""
    if not code or code in sentence:
        return sentence
    return f"{sentence} ({code})" if sentence else code


def rules(job: Job) -> str:
    """When a rule stops it."""
    if job.gpus == 0:
        return "none: the job has no GPU"
    try:
        policies = policies_of(job.policy)
    except BadInputError:
        return "unknown to this version of Stoker"
    if not policies:
        return "none"
    return ", ".join([in_words(policies), *conditions(policies)])


def filled(gpu: WorkerGpu) -> float | None:
    """The fraction of its memory that is in use."""
    if gpu.memory_used is None or not gpu.memory_total:
        return None
    return min(1.0, gpu.memory_used / gpu.memory_total)


def hours_text(hours: float) -> str:
    """`0 h`, `12 min`, `3.5 h`, `1,204 h`."""
    minutes = round(hours * 60)
    if minutes < 60:
        return f"{minutes} min" if minutes else "0 h"
    return f"{hours:.1f}".removesuffix(".0") + " h" if hours < 10 else f"{hours:,.0f} h"


def in_use(gpu: WorkerGpu) -> str:
    """`61 of 80 GiB`."""
    if gpu.memory_used is None or not gpu.memory_total:
        return "unknown" if gpu.memory_used is None else format_memory(gpu.memory_used)
    size = 2**30 if gpu.memory_total >= 2**30 else 2**20
    amount = gpu.memory_used / size
    whole = amount >= 10 or amount == 0 or size == 2**20
    return f"{amount:.{0 if whole else 1}f} of {format_memory(gpu.memory_total)}"


def gpu_strip(node: ClusterNode) -> list[str]:
    """What has each of its GPUs: this queue first, as classes of the page's style."""
    others = max(0, node.gpus_allocated - node.own)
    return ["job"] * node.own + ["somebody"] * others + ["free"] * node.gpus_free + ["unknown"] * node.gpus_down


def _counted_as(gpu: WorkerGpu) -> GpuUse | Literal["kept", "quarantined"]:
    if gpu.kept_for:
        return "kept"
    return "quarantined" if gpu.quarantine and gpu.state == "unknown" else gpu.state


def tally(machine: Machine) -> str:
    """`8 GPUs: 6 with jobs, 2 free`."""
    if machine.cluster:
        count = len(machine.nodes)
        return f"Cluster {machine.cluster} · {count} {'node' if count == 1 else 'nodes'}, {cluster_gpus(machine.nodes)}"
    if not machine.gpus:
        return "no GPUs"
    counts = Counter(_counted_as(gpu) for gpu in machine.gpus)
    parts = ", ".join(f"{counts[doing]} {label}" for doing, label in _STATES.items() if counts[doing])
    return f"{len(machine.gpus)} {'GPU' if len(machine.gpus) == 1 else 'GPUs'}: {parts}"
