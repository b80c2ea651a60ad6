"""Reports and fits on a page: readable, and escaped."""

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.fit.model import Fitted, ProbeOutcome
from stoker.queue.explanation import Why
from stoker.queue.model import LONGEST_REPORT, Attempt, AttemptDetails, Job
from stoker.runs.postmortem.text import block
from stoker.status.detail import AttemptDetail, JobDetail
from stoker.web.reports import fit_of, report_html
from stoker.web.templating import rendered
from tests.support.deep import examples

EVIL = "<script>alert(1)</script>"
HARMLESS = {"p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "pre", "code", "strong", "em", "blockquote", "hr", "br"}
GIB = 2**30


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements(html: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = _Elements()
    parser.feed(html)
    parser.close()
    return parser.found


def test_report_is_rendered_as_written() -> None:
    html = report_html(f"# Stopped\n\n**It hung.**\n\n## Facts\n\n- run: `r1`\n\n{block('a < b')}")
    assert "<h3>Stopped</h3>" in html  # below the headings of the page
    assert "<h4>Facts</h4>" in html
    assert "<strong>It hung.</strong>" in html
    assert "<li>run: <code>r1</code></li>" in html
    assert '<pre tabindex="0"><code>a &lt; b\n</code></pre>' in html


@pytest.mark.parametrize(
    "hostile",
    [
        EVIL,
        f"text {EVIL} text",
        f"```{EVIL}\n{EVIL}\n```",
        f"    {EVIL}",
        f"`{EVIL}`",
        "[click](javascript:alert(1))",
        "![x](http://elsewhere.example/pixel.png)",
        "<http://elsewhere.example>",
        "[a]: http://elsewhere.example\n\n[a]",
        '<img src=x onerror="alert(1)">',
        "<!-- a comment -->",
        f"# {EVIL}\n- {EVIL}\n\n> {EVIL}",
    ],
)
def test_report_has_no_scripts_or_links(hostile: str) -> None:
    found = elements(report_html(hostile))
    assert {tag for tag, _ in found} <= HARMLESS
    assert {name for _, attributes in found for name in attributes} <= {"tabindex"}


@given(st.text(alphabet="<>&\"'`[]()!#*_-+=~:/\\ \n\tabhref1.script", max_size=120))
@settings(max_examples=examples(200))
def test_report_with_any_text_has_only_allowed_elements(text: str) -> None:
    found = elements(report_html(text))
    assert {tag for tag, _ in found} <= HARMLESS
    assert {name for _, attributes in found for name in attributes} <= {"tabindex", "start"}


def test_too_long_report_is_cut_at_a_line_with_a_note() -> None:
    line = "é" * 1000 + "\n"
    html = report_html(line * 500)
    assert "continues in the download" in html
    assert html.count("é" * 1000) == LONGEST_REPORT // len(line.encode())
    assert len(html) < LONGEST_REPORT
    assert "download" not in report_html("short")


FITTED = Fitted(
    size=24,
    fixed=2.0 * GIB,
    slope=0.5 * GIB,
    predicted=14 * GIB,
    limit=16 * GIB,
    observations=(
        ProbeOutcome(size=32, outcome="oom"),
        ProbeOutcome(size=8, outcome="fits", peak=6 * GIB, seconds=3.0, rate=120.0),
        ProbeOutcome(size=16, outcome="fits", peak=10 * GIB),
        ProbeOutcome(size=24, outcome="fits", peak=14 * GIB, verification=True),
    ),
    note=f"note {EVIL}",
)


def stored(fitted: Fitted) -> dict[str, object]:
    """As stored in the queue."""
    import msgspec

    found: dict[str, object] = msgspec.json.decode(msgspec.json.encode(fitted))
    return found


def test_fit_is_rendered_as_related_columns() -> None:
    fit = fit_of(stored(FITTED))
    assert fit is not None
    assert fit.chart == {
        "sizes": [0, 8, 16, 24, 32],
        "fits": [None, 6 * GIB, 10 * GIB, 14 * GIB, None],
        "oom": [None, None, None, None, 16 * GIB],
        "line": [2.0 * GIB, 6.0 * GIB, 10.0 * GIB, 14.0 * GIB, 18.0 * GIB],
        "limit": 16 * GIB,
        "chosen": [None, None, None, 14 * GIB, None],
    }
    assert [probe.size for probe in fit.probes] == [8, 16, 24, 32]


@pytest.mark.parametrize("fit", [{}, {"size": "many"}, {"size": 8}, stored(FITTED) | {"fixed": float("nan")}])
def test_invalid_fit_is_left_out(fit: dict[str, object]) -> None:
    assert fit_of(fit) is None


def detail(*details: AttemptDetails) -> JobDetail:
    job = Job(
        id="0123abcd", command="train", state="failed", position=1.0, submitted=1.0, started=2.0, ended=3.0,
        not_before=0.0, retries_left=0, attempts=len(details), attempt="a", exit_code=1, reason="", link="",
        cancel_requested=None, origin=None,
    )  # fmt: skip
    attempts = tuple(
        AttemptDetail(
            attempt=Attempt(
                id=f"a{number}", job=job.id, worker="w", number=number, gpus=(), started=2.0, lease_expires=9.0,
                ended=3.0, outcome="failed", reason=f"it hung {EVIL}",
            ),
            host=f'"{EVIL}', gpus=(), details=details, whole_here=True,
        )
        for number, details in enumerate(details, 1)
    )  # fmt: skip
    return JobDetail(
        now=4.0, job=job, why=Why("ended", "", "it failed"), needs={}, attempts=attempts, progress=None, last_lines=(),
        figures={},
        snoozed_until=None, warning=None,
    )  # fmt: skip


def test_page_has_the_reason_the_report_and_the_fit_with_a_table() -> None:
    shown = detail(AttemptDetails(), AttemptDetails(report=f"# {EVIL}\n\nwhy", fit=stored(FITTED)))
    report = rendered("job_report.html", detail=shown)
    fit = rendered("job_fit.html", detail=shown)
    log = rendered("job_log.html", detail=shown, sections={})
    for part in (report, fit, log):
        assert "<script" not in part
        assert "style=" not in part
    assert "it hung &lt;script&gt;" in report
    assert report.index("it hung") < report.index("<details")
    assert "/jobs/0123abcd/attempts/2/report" in report
    assert re.findall(r'<th scope="row">(\d+)</th>', fit) == ["8", "16", "24", "32"]
    (data,) = [attributes["data-fit"] for _, attributes in elements(fit) if "data-fit" in attributes]
    assert json.loads(data or "")["limit"] == 16 * GIB
    assert re.findall(r'<option value="(\d)"', log) == ["1", "2"]
    assert 'href="/api/v1/jobs/0123abcd/attempts/2/log"' in log


def test_log_of_a_job_that_has_not_started_is_pending() -> None:
    log = rendered("job_log.html", detail=detail(), sections={"waits": "The job has not started yet"})
    assert "The job has not started yet" in log
    assert "href" not in log
    assert not rendered("job_report.html", detail=detail()).strip()
    assert not rendered("job_fit.html", detail=detail(AttemptDetails())).strip()
