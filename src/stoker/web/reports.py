"""Reports and fits for a page: Markdown as safe HTML without links, and the points of a fit's chart."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup

from stoker.fit.model import Fitted, ProbeOutcome
from stoker.queue.model import LONGEST_REPORT

# Links and HTML.
_OFF: Final = ["autolink", "html_block", "html_inline", "image", "link", "reference"]
# Below the headings of the page.
_LOWER_BY: Final = 2
_CUT: Final = Markup('<p class="note">The report continues in the download.</p>')


# The page is rendered at every change of the job; its report does not change.
@lru_cache(maxsize=32)
def report_html(report: str) -> Markup:
    """Safe HTML: tags, links and images in the report become text."""
    data = report.encode(errors="replace")
    is_cut = len(data) > LONGEST_REPORT
    text = data[:LONGEST_REPORT].rpartition(b"\n")[0].decode(errors="replace") if is_cut else report
    html = Markup(_markdown().render(text))  # noqa: S704 - escaped by the renderer
    return html + _CUT if is_cut else html


@lru_cache(maxsize=1)
def _markdown() -> MarkdownIt:
    made = MarkdownIt("commonmark", {"html": False}).disable(_OFF)
    made.add_render_rule("fence", _block)
    made.add_render_rule("code_block", _block)
    for name in ("heading_open", "heading_close"):
        made.add_render_rule(name, _heading)
    return made


def _block(_self: RendererHTML, tokens: Sequence[Token], index: int, _options: OptionsDict, _env: EnvType) -> str:
    """Focusable, so that a block wider than the page can be scrolled with the keyboard."""
    return f'<pre tabindex="0"><code>{escapeHtml(tokens[index].content)}</code></pre>\n'


def _heading(_self: RendererHTML, tokens: Sequence[Token], index: int, _options: OptionsDict, _env: EnvType) -> str:
    token = tokens[index]
    level = min(6, int(token.tag[1:]) + _LOWER_BY)
    return f"<h{level}>" if token.nesting == 1 else f"</h{level}>\n"


class FitChart(msgspec.Struct, frozen=True):
    """How a batch size was found."""

    found: Fitted
    chart: dict[str, Any]
    """Columns of equal length, with None where nothing is drawn; memory in bytes."""

    @property
    def probes(self) -> list[ProbeOutcome]:
        return sorted(self.found.observations, key=lambda probe: (probe.size, probe.verification))


def fit_of(told: dict[str, Any]) -> FitChart | None:
    """None if there was none, or if another version of Stoker wrote it in an unknown form."""
    try:
        found = msgspec.convert(told, Fitted) if told else None
    except msgspec.ValidationError:
        return None
    if found is None or not (math.isfinite(found.fixed) and math.isfinite(found.slope)):
        return None
    return FitChart(found, _chart(found))


def _chart(found: Fitted) -> dict[str, Any]:
    sizes = sorted({0, found.size, *(probe.size for probe in found.observations)})
    return {
        "sizes": sizes,
        "fits": [_peak(found, size, "fits") for size in sizes],
        "oom": [_peak(found, size, "oom") for size in sizes],
        "line": [found.fixed + found.slope * size for size in sizes],
        "limit": found.limit,
        "chosen": [found.predicted if size == found.size else None for size in sizes],
    }


def _peak(found: Fitted, size: int, outcome: str) -> int | None:
    """The highest peak at this size. A probe that did not fit and has no peak is drawn at the limit."""
    probes = [probe for probe in found.observations if (probe.size, probe.outcome) == (size, outcome)]
    seen = [probe.peak for probe in probes if probe.peak is not None]
    if seen:
        return max(seen)
    return found.limit if probes and outcome == "oom" else None
