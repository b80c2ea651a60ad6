"""How data becomes HTML: one Jinja environment that escapes everything, and the words that templates have for figures.

Nothing here depends on what time it is. A moment becomes a `<time>` element, and a script in the browser says how long
ago that is: so a section's HTML changes only when what it tells has changed.
"""

import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from stoker.queue.explanation import spoken
from stoker.status.job_text import command_text, job_label, one_line
from stoker.units import format_memory, format_percent
from stoker.web.pages.reports import fit_of, report_html
from stoker.web.statics import static_url

Telling = Literal["ago", "for", "in", "clock"]
"""`3 h ago`, `3 h`, `in 3 h`, `14:02`."""

_TEMPLATES: Final = Path(__file__).parent / "templates"
_UNKNOWN: Final = "unknown"
_CODE: Final = re.compile(r"`([^`]{1,200})`")
_NOT_IN_AN_ID: Final = re.compile(r"[^A-Za-z0-9_-]")
_LINE_ENDS: Final = "\n\t"


@cache
def environment() -> Environment:
    """Made once: templates are compiled when they are first used, which takes longer than rendering them."""
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
        "line": one_line,
        "number": number,
        "percent": percent,
        "report": report_html,
        "script": script,
        "sentence": sentence,
        "slug": slug,
        "time": moment,
    }
    made.globals |= {"static": static_url}
    return made


def rendered(template: str, **context: Any) -> str:
    return environment().get_template(template).render(context)


def page(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """A whole page for whoever asks, also for somebody who has not been let in yet."""
    user = getattr(request.state, "user", None)
    app_state = getattr(request.app.state, "app_state", None)
    title = app_state.config.title if app_state is not None else "Stoker"
    return HTMLResponse(rendered(template, user=user, site=title, **context), status_code=status)


# Filters


def memory(amount: int | None) -> str:
    return _UNKNOWN if amount is None else format_memory(amount)


def percent(fraction: float | None) -> str:
    return _UNKNOWN if fraction is None else format_percent(fraction)


def duration(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else spoken(seconds)


def number(amount: float) -> str:
    """`0`, `0.4`, `12`, `1,204`: as exact as anybody wants to know."""
    return f"{amount:.1f}".removesuffix(".0") if amount < 10 else f"{amount:,.0f}"


def moment(at: float | None, telling: Telling = "ago") -> Markup:
    """A `<time>`; its text, until a script tells it better, is the moment itself."""
    try:
        when = datetime.fromtimestamp(at, UTC) if at is not None else None
    except (ValueError, OverflowError, OSError):
        when = None
    if when is None:
        return escape(_UNKNOWN)
    return Markup('<time datetime="{}" data-tell="{}">{}</time>').format(
        when.isoformat(timespec="milliseconds"), telling, when.strftime("%Y-%m-%d %H:%M UTC")
    )


def code(text: str) -> Markup:
    """A text on one line in which what stands between `backticks` is for a terminal."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(one_line(text)))))  # noqa: S704 - escaped just here


def sentence(text: str) -> Markup:
    """The same with a capital: reasons are kept without one, to be put together."""
    return code(text[:1].upper() + text[1:])


def script(text: str) -> str:
    """Several lines as they are; what is not seen, such as marks that turn the direction of text, is made visible."""
    return "".join(
        letter if letter.isprintable() or letter in _LINE_ENDS else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def slug(text: str) -> str:
    """What can be part of an element's id."""
    return _NOT_IN_AN_ID.sub("_", text)
