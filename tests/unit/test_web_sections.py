"""The sections of the page: what they tell, to whom, and that nothing in a job becomes part of the page."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stoker.web
from stoker.queue.explanation import ReasonKind, Why
from stoker.queue.fields import State
from stoker.queue.model import Attempt, AttemptDetails, GpuUse, Job, WorkerGpu
from stoker.rules.rule import RuleWarning
from stoker.status.detail import AttemptDetail, JobDetail
from stoker.status.model import (
    EndedJob,
    GpuHours,
    Health,
    HealthIssue,
    Machine,
    Progress,
    RunningJob,
    Snapshot,
    WaitingJob,
)
from stoker.web.auth.key_file import Role
from stoker.web.pages.sections import for_page, render, render_job

NOW = 1_800_000_000.0
GIB = 2**30
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> {{ 7 * 7 }} \u202egnp.exe \r\nevent: health"
VOID = {"br", "img", "input", "link", "meta", "path"}


def make_job(name: str = "", state: State = "running", **fields: Any) -> Job:
    usual: dict[str, Any] = {
        "id": "0badcafe",
        "state": state,
        "command": "python train.py",
        "name": name,
        "position": 1.0,
        "submitted": NOW - 9000,
        "started": NOW - 4000,
        "ended": None,
        "not_before": 0.0,
        "retries_left": 0,
        "attempts": 1,
        "attempt": "0badcafe-1",
        "exit_code": None,
        "reason": "",
        "link": "",
        "cancel_requested": None,
        "origin": None,
    }
    return Job(**usual | fields)


def make_attempt(**fields: Any) -> Attempt:
    usual: dict[str, Any] = {
        "id": "0badcafe-1",
        "job": "0badcafe",
        "worker": "w-1",
        "number": 1,
        "gpus": ("GPU-0",),
        "started": NOW - 4000,
        "lease_expires": NOW + 60,
    }
    return Attempt(**usual | fields)


def make_gpu(index: int = 0, doing: GpuUse = "job", **fields: Any) -> WorkerGpu:
    usual: dict[str, Any] = {
        "uuid": f"GPU-{index}",
        "index": index,
        "name": "NVIDIA A100",
        "memory_total": 80 * GIB,
        "memory_used": 61 * GIB,
        "utilization": 0.93,
        "state": doing,
        "user": "",
        "since": NOW - 60,
        "note": "",
        "jobs": (),
    }
    return WorkerGpu(**usual | fields)


def make_machine(*gpus: WorkerGpu, **fields: Any) -> Machine:
    usual: dict[str, Any] = {
        "worker": "w-1",
        "host": "gpu-a",
        "there": True,
        "seen": NOW - 2,
        "started": NOW - 9000,
        "paused": False,
        "problem": None,
        "simulated": False,
        "gpus": gpus,
    }
    return Machine(**usual | fields)


def make_running(job: Job, kind: ReasonKind = "running", **fields: Any) -> RunningJob:
    usual: dict[str, Any] = {
        "job": job,
        "attempt": make_attempt(),
        "host": "gpu-a",
        "gpus": ("0",),
        "why": Why(kind, "", "running since 14:02 (12 min)"),
        "progress": None,
        "last_line": "",
    }
    return RunningJob(**usual | fields)


def make_overview(**fields: Any) -> Snapshot:
    usual: dict[str, Any] = {
        "now": NOW,
        "place": "queue.db",
        "paused": False,
        "counts": {},
        "machines": (),
        "running": (),
        "waiting": (),
        "ended": (),
        "health": Health(level="good", headline="All is well"),
        "hours": GpuHours(since=NOW - 7 * 86400),
    }
    return Snapshot(**usual | fields)


def full_overview(text: str = "vit") -> Snapshot:
    """One of everything, with `text` wherever a job, a program or a machine may put its own."""
    return make_overview(
        counts={"running": 1, "queued": 1, "failed": 1},
        machines=(
            make_machine(
                make_gpu(0, jobs=("0badcafe",), user=text, name=text),
                make_gpu(1, "somebody", user=text),
                make_gpu(2, "unknown", note=text, utilization=None, memory_used=None),
                host=text,
                problem=text,
            ),
        ),
        running=(
            make_running(
                make_job(text, submitter=text),
                host=text,
                gpus=(text,),
                progress=Progress(fraction=0.3, text=text, remaining=60.0),
                last_line=text,
                figures={text: 1.5},
            ),
            make_running(make_job("", id="00000002", command=text), last_line=text),
            make_running(
                make_job(text, id="00000006"),
                why=Why("warned", text, text),
                warning=RuleWarning(rule=text, word=text, reason=text, at=NOW, acts_at=NOW),
            ),
        ),
        waiting=(
            WaitingJob(job=make_job(text, "queued", id="00000003"), why=Why("waits", "", text)),
            WaitingJob(job=make_job(text, "held", id="00000004", reason=text), why=Why("held", "", text)),
        ),
        ended=(
            EndedJob(
                job=make_job(text, "failed", id="00000005", ended=NOW - 60, reason=text, exit_code=1),
                why=Why("ended", "", text),
                stopped="",
            ),
        ),
        health=Health(
            level="bad", headline=text, points=(HealthIssue(level="bad", message=text, job=text, host=text),)
        ),
    )


def full_detail(text: str = "vit") -> JobDetail:
    job = make_job(
        text,
        directory=text,
        command=text,
        tags=(text,),
        environment={text: text},
        submitter=text,
        link=f"javascript:{text}",
        policy={text: text},
        commit=text,
    )
    return JobDetail(
        now=NOW,
        job=job,
        why=Why("running", "", text),
        needs={},
        attempts=(
            AttemptDetail(
                attempt=make_attempt(reason=text, outcome="failed", ended=NOW),
                host=text,
                gpus=(text,),
                details=AttemptDetails(cause="idle", rule="idle", report=text),
                whole_here=True,
            ),
        ),
        progress=Progress(fraction=None, text=text),
        last_lines=(text,),
        figures={text: 1.5},
        snoozed_until=None,
        warning=RuleWarning(rule=text, word=text, reason=text, at=NOW),
    )


class Elements(HTMLParser):
    """Which elements there are, whether each is closed, and what a person reads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.started: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.started.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def tags(self) -> set[str]:
        return {tag for tag, _attributes in self.started}


def read(html: str) -> str:
    return " ".join(Elements(html).text.split())


def all_sections(text: str, role: Role) -> dict[str, str]:
    return render(full_overview(text), role) | render_job(full_detail(text), role)


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_job_text_is_escaped_in_sections(role: Role) -> None:
    plain, hostile = all_sections("vit", role), all_sections(HOSTILE, role)
    for name, html in hostile.items():
        page = Elements(html)
        assert page.open == [], f"{name} is not closed"
        assert page.tags() <= Elements(plain[name]).tags() | {"code", "p", "pre"}, name
        for tag, attributes in page.started:
            assert not any(attribute.startswith("on") or attribute == "style" for attribute in attributes), (name, tag)
            assert not (attributes.get("href") or "").startswith("javascript:"), name
        # Marks that turn the direction of text would reach beyond what they are in.
        assert "\u202e" not in page.text or name == "report", name
        assert "49" not in page.text, f"{name} computes what a job says"


def test_text_without_spaces_is_cut() -> None:
    for name, html in all_sections("A" * 10_000, "operator").items():
        if name not in {"spec", "report"}:
            assert max(map(len, re.findall("A+", Elements(html).text)), default=0) < 1000, name


def test_element_ids_are_safe_selectors() -> None:
    worker = 'w"] *, [x="'
    snapshot = make_overview(machines=(make_machine(make_gpu(), worker=worker),))
    sections = for_page(snapshot, "operator", render(snapshot, "operator"))
    ids = [attributes["id"] for _tag, attributes in Elements(sections["machines"]).started if "id" in attributes]
    assert len(ids) > 2
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", found or "") for found in ids)


def test_viewer_sees_all_sections_without_buttons() -> None:
    watched, steered = all_sections("vit", "viewer"), all_sections("vit", "operator")
    for name in ("running", "waiting", "ended", "machine-w-1", "summary"):
        assert "hx-post" in steered[name], name
    for name, html in watched.items():
        assert "hx-post" not in html, name
        assert "/submit" not in html, name
        assert "data-grip" not in html, name
    assert "vit" in read(watched["running"])


def test_html_does_not_change_with_time() -> None:
    snapshot, later = full_overview(), NOW + 3600
    moved = msgspec.structs.replace(
        snapshot,
        now=later,
        hours=GpuHours(since=later - 7 * 86400),
        running=tuple(
            msgspec.structs.replace(item, why=Why(item.why.kind, "", "running since 14:02 (72 min)"))
            for item in snapshot.running
        ),
        ended=tuple(
            msgspec.structs.replace(item, why=Why("ended", "", "failed 61 min ago")) for item in snapshot.ended
        ),
    )
    assert render(moved, "operator") == render(snapshot, "operator")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("no worker", "no worker is there (the last was seen {} ago, on gpu-a): `stoker work` starts one"),
        ("retry", "waits until its retry in {}, after this: exit code 1"),
        ("after", "waits for job 0000000a (running); besides, no worker is there (the last was seen {} ago)"),
    ],
)
def test_durations_are_removed_from_reasons(kind: ReasonKind, sentence: str) -> None:
    def shown(length: str) -> str:
        job = make_job("vit", "queued", not_before=NOW + 44)
        waiting = WaitingJob(job=job, why=Why(kind, "", sentence.format(length)))
        return render(make_overview(waiting=(waiting,)), "viewer")["waiting"]

    assert shown("20 s") == shown("21 s")


def test_waiting_retry_shows_time_and_reason() -> None:
    job = make_job("vit", "queued", not_before=NOW + 44, reason="exit code 1")
    html = render(make_overview(waiting=(WaitingJob(job=job, why=Why("retry", "", "")),)), "viewer")["waiting"]
    assert re.search(r'Next attempt <time datetime="2027-01-15T08:00:44[^"]*" data-tell="in">', html)
    assert "exit code 1" in read(html)


def test_simulated_gpus_are_marked() -> None:
    told = "These GPUs are simulated: nothing here is real hardware."
    real, simulated = (make_overview(machines=(make_machine(simulated=so),)) for so in (False, True))
    assert told in read(render(simulated, "viewer")["health"])
    assert told not in read(render(real, "viewer")["health"])


def test_single_issue_is_shown_once() -> None:
    health = Health(
        level="attention", headline="vit failed", points=(HealthIssue(level="attention", message="vit failed"),)
    )
    assert read(render(make_overview(health=health), "viewer")["health"]).count("vit failed") == 1


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        (make_gpu(state="job", jobs=("0badcafe",), user="alice"), "job vit for alice"),
        (make_gpu(state="background", user="folding"), "background folding"),
        (make_gpu(state="somebody", user="bob's python (pid 4242)"), "in use bob's python (pid 4242)"),
        (make_gpu(state="free"), "free Nothing runs here"),
        (
            make_gpu(state="free", kept_for="0badcafe", note="is reserved for job 0badcafe (2 GPUs, has 1)"),
            "reserved Reserved for vit (2 GPUs, has 1)",
        ),
        (make_gpu(state="unknown", note="the driver hangs"), "unknown the driver hangs"),
        (
            make_gpu(state="unknown", quarantine="XID 79: x", quarantined_since=0.0),
            "quarantined XID 79: x · since 1970",
        ),
        (make_gpu(state="job", jobs=("0badcafe",), quarantine="XID 79: x", quarantined_since=0.0), "quarantined vit"),
    ],
)
def test_gpu_shows_its_state_and_user_in_words(gpu: WorkerGpu, told: str) -> None:
    snapshot = make_overview(machines=(make_machine(gpu),), running=(make_running(make_job("vit")),))
    assert told in read(render(snapshot, "viewer")["machine-w-1"])


def test_unknown_value_is_not_shown_as_zero() -> None:
    gpu = make_gpu(state="unknown", utilization=None, memory_used=None)
    html = render(make_overview(machines=(make_machine(gpu),)), "viewer")["machine-w-1"]
    assert "Use unknown" in read(html).replace("Use", "Use ").replace("  ", " ")
    assert "<progress" not in html
    idle = render(make_overview(machines=(make_machine(make_gpu(utilization=0.0, memory_used=0)),)), "viewer")
    assert idle["machine-w-1"].count("<progress") == 2
    assert "0 of 80 GiB" in read(idle["machine-w-1"])


def test_lost_machine_looks_different_from_a_live_one() -> None:
    gone = make_machine(make_gpu(state="unknown", note="its worker was last seen 3 min ago"), there=False)
    told = read(render(make_overview(machines=(gone,)), "operator")["machine-w-1"])
    assert "not seen" in told
    assert "Pause" not in told
    left = read(render(make_overview(machines=(msgspec.structs.replace(gone, left=True),)), "viewer")["machine-w-1"])
    assert "stopped" in left
    assert "not seen" not in left


def test_many_gpus_are_folded_and_machines_are_sent_separately() -> None:
    def fleet(utilization: float) -> Snapshot:
        machines = [
            make_machine(*(make_gpu(index) for index in range(8)), worker=f"w-{number}") for number in range(24)
        ]
        changed = make_machine(*(make_gpu(index, utilization=utilization) for index in range(8)), worker="w-24")
        return make_overview(machines=(*machines, changed))

    before, after = render(fleet(0.1), "operator"), render(fleet(0.2), "operator")
    assert [name for name in before if before[name] != after[name]] == ["machine-w-24"]
    summary = Elements(before["machine-w-24"]).started[0]
    assert summary[0] == "details"
    assert "open" not in summary[1]
    assert "open" in Elements(render(full_overview(), "viewer")["machine-w-1"]).started[0][1]


def test_first_page_contains_every_machine_in_order() -> None:
    snapshot = full_overview("vit")
    sections = for_page(snapshot, "viewer", render(snapshot, "viewer"))
    assert "GPU 0" in read(sections["machines"])
    assert "GPU 0" not in read(render(full_overview("vit"), "viewer")["machines"])


def test_waiting_job_can_be_moved_beside_its_neighbours() -> None:
    jobs = [make_job(name, "queued", id=f"0000000{name}") for name in "123"]
    waiting = tuple(WaitingJob(job=job, why=Why("waits", "", "waits")) for job in jobs)
    html = render(make_overview(waiting=waiting), "operator")["waiting"]
    moves = {
        (attributes["hx-post"], attributes.get("hx-vals"))
        for _tag, attributes in Elements(html).started
        if (attributes.get("hx-post") or "").endswith("/00000002/move")
    }
    path = "/api/v1/jobs/00000002/move"
    assert (path, '{"before": "00000001"}') in moves
    assert (path, '{"after": "00000003"}') in moves


@pytest.mark.parametrize(("state", "asks"), [("running", True), ("held", True), ("queued", False)])
def test_cancel_asks_for_confirmation_if_it_cannot_be_undone(state: State, asks: bool) -> None:
    detail = msgspec.structs.replace(full_detail(), job=make_job("vit", state), why=Why("waits", "", "waits"))
    buttons = [
        attributes
        for _tag, attributes in Elements(render_job(detail, "operator")["summary"]).started
        if (attributes.get("hx-post") or "").endswith("/cancel")
    ]
    assert [("hx-confirm" in attributes) for attributes in buttons] == [asks]


def test_idle_stop_is_shown_as_idle_stop() -> None:
    job = make_job("vit", "failed", ended=NOW - 60, reason="its GPUs stayed idle")
    ended = EndedJob(job=job, why=Why("ended", "", ""), stopped="idle")
    told = read(render(make_overview(ended=(ended,)), "viewer")["ended"])
    assert "stopped: idle" in told
    assert "its GPUs stayed idle" in told


@pytest.mark.parametrize(("hours", "told"), [(0.0, "0 h"), (0.2, "12 min"), (3.5, "3.5 h"), (1204.2, "1,204 h")])
def test_gpu_hours_are_rounded_sensibly(hours: float, told: str) -> None:
    html = render(make_overview(hours=GpuHours(since=NOW - 7 * 86400, jobs=hours)), "viewer")["hours"]
    assert f"Over the last 7 days Jobs{told}" in read(html).replace("Jobs ", "Jobs")


class Names(HTMLParser):
    """What each button and link is called by who cannot see it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.shown: dict[str, str] = {}
        """What is written on each, by its name."""
        self._label = self._text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"button", "a"}:
            self._label, self._text = dict(attrs).get("aria-label") or "", ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag in {"button", "a"}:
            text = " ".join(self._text.split())
            self.found.append(self._label or text)
            self.shown[self.found[-1]] = text


def test_labels_of_buttons_and_links_name_their_job_or_machine() -> None:
    jobs = [make_job(f"train-{number}", id=f"0000000{number}") for number in range(8)]
    points = (
        HealthIssue(level="attention", message="92 jobs failed", failure="failed", until=NOW),
        HealthIssue(level="attention", message="3 jobs idle", failure="stopped", until=NOW),
    )
    snapshot = make_overview(
        machines=[make_machine(make_gpu(), worker=f"w-{host}", host=host) for host in ("one", "two")],
        running=[make_running(job, snoozed_until=NOW + 60) for job in jobs[:2]],
        waiting=[
            WaitingJob(job=msgspec.structs.replace(job, state=state), why=Why("waits", "", "waits"))
            for job, state in zip(jobs[2:6], ("queued", "queued", "held", "held"), strict=True)
        ],
        ended=[
            EndedJob(job=msgspec.structs.replace(job, state="failed"), why=Why("ended", "", ""), stopped="")
            for job in jobs[6:]
        ],
        health=Health(level="attention", headline="2 things need attention", points=points),
    )
    names = Names("".join(render(snapshot, "operator").values()))
    twice = {name for name in names.found if names.found.count(name) > 1}
    assert twice <= {job.name for job in jobs}, "the same job's page"
    for word in (
        "Cancel…",
        "Log of",
        "Retry",
        "Hold",
        "Release",
        "Move down",
        "Snooze 2 h",
        "End snooze",
        "Clone…",
    ):
        assert any(name.startswith(word) and "train-" in name for name in names.found), word
    assert {"Pause this machine one", "Dismiss 92 jobs failed", "Dismiss 3 jobs idle"} <= set(names.found)
    for name, shown in names.shown.items():
        assert name.startswith(shown), "who speaks to the page says what is written there"


def test_fragment_links_to_a_job_page_have_targets() -> None:
    html = "".join(render(full_overview(), "operator").values())
    places = set(re.findall(r'href="/jobs/[^"#]+#([^"]+)"', html))
    log = (Path(stoker.web.__file__).parent / "templates" / "job_log.html").read_text()
    assert places
    assert all(f'id="{place}"' in log for place in places)


def test_link_of_a_job_must_be_a_web_address() -> None:
    def links(link: str) -> list[str | None]:
        detail = msgspec.structs.replace(full_detail(), job=make_job("vit", link=link))
        return [
            attributes.get("href")
            for tag, attributes in Elements(render_job(detail, "viewer")["summary"]).started
            if tag == "a"
        ]

    assert links("https://wandb.ai/run/1") == ["https://wandb.ai/run/1"]
    assert links("javascript:alert(1)") == []


def test_values_of_variables_are_not_shown() -> None:
    detail = msgspec.structs.replace(full_detail(), job=make_job("vit", environment={"API_KEY": "s3cret"}))
    told = render_job(detail, "viewer")["spec"]
    assert "API_KEY" in told
    assert "s3cret" not in told


@pytest.mark.parametrize("acts_at", [NOW + 600, None])
def test_warned_job_shows_reason_and_time_of_the_stop(acts_at: float | None) -> None:
    hang = RuleWarning(rule="stalled", word="may hang", reason="GPU 0 spins", at=NOW - 60, acts_at=acts_at)
    why = Why("warned", "may hang", "running, and may hang")
    runs = make_running(make_job(), why=why, warning=hang)
    overview = render(make_overview(running=(runs,)), "viewer")["running"]
    page = render_job(msgspec.structs.replace(full_detail(), why=why, warning=hang), "viewer")["summary"]
    for shown in (overview, page):
        assert '<span class="pill attention">may hang</span>' in shown
        assert re.search(r"Warned [-0-9: ]+ UTC: GPU 0 spins\.", read(shown))
        stop = re.search(r"It is stopped [-0-9: ]+ UTC, unless it works or is snoozed\.", read(shown))
        assert (stop is not None) == (acts_at is not None)
