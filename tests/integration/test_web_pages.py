"""The pages behind the gate: what is shown, what a form keeps, and that a double tap submits once."""

import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from stoker.queue.code.archive import CodeSnapshot
from stoker.queue.fields import JobSpec
from stoker.queue.model import AttemptDetails, View, WorkerGpu
from stoker.web import pages, problems, statics
from stoker.web.pages.views import error_page
from tests.support.api_site import ApiSite, Client

PAGE = {"Accept": "text/html"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ApiSite]:
    with closing(ApiSite(tmp_path)) as made:
        made.app.include_router(pages.router)
        made.app.mount("/static", statics.VersionedFiles())
        problems.install(made.app, error_page)
        yield made


def form(**fields: str) -> dict[str, str]:
    return {"command": "echo hello", "directory": "/tmp", "gpus": "1", "idle": "on", "key": "k1"} | fields


def send(client: Client, fields: dict[str, str], *more: tuple[str, str], to: str = "/submit") -> Any:
    body = urlencode([*fields.items(), *more])
    return client.post(to, content=body, headers={**PAGE, "Content-Type": "application/x-www-form-urlencoded"})


def typed(html: str, name: str) -> str:
    """What stands in a field."""
    found = re.search(rf'<input[^>]* name="{name}" value="([^"]*)"', html)
    assert found is not None, f"there is no field {name}"
    return unescape(found[1])


def test_page_of_an_unreported_gpu_names_it(site: ApiSite) -> None:
    gpu = WorkerGpu(uuid="GPU-7f", index=3, name="A100", memory_total=80 * 2**30)
    site.store.workers.heartbeat("w", "gpu-box", View(gpus=(gpu,)))
    site.look()
    client = site.client("viewer", "wall")
    assert "/gpu?host=gpu-box&amp;gpu=GPU-7f" in client.get("/", headers=PAGE).text
    known = client.get("/gpu?host=gpu-box&gpu=GPU-7f", headers=PAGE).text
    assert "GPU 3 on gpu-box" in known
    assert "80 GiB" in known
    gone = client.get("/gpu?" + urlencode({"host": "<b>", "gpu": "GPU&1"}), headers=PAGE).text
    assert "GPU GPU&amp;1 on &lt;b&gt;" in gone
    assert "No machine reports this GPU now." in gone
    assert client.get("/gpu", headers=PAGE).status_code == 404


def test_every_page_works_for_a_viewer_without_actions(site: ApiSite) -> None:
    [name] = site.store.jobs.submit([JobSpec(command="sleep 5", name="vit")])
    site.look()
    client = site.client("viewer", "wall")
    for path in ("/", "/jobs", f"/jobs/{name}"):
        answer = client.get(path, headers=PAGE)
        assert answer.status_code == 200, path
        assert "vit" in answer.text
        assert "hx-post" not in answer.text
        assert 'href="/submit"' not in answer.text
    for path in ("/submit", f"/submit?again={name}"):
        answer = client.get(path, headers=PAGE)
        assert answer.status_code == 403, path
        assert "is read-only" in answer.text
        assert "<textarea" not in answer.text


def test_job_page_names_its_snapshot_and_links_operators_to_the_diff(site: ApiSite) -> None:
    code = CodeSnapshot(digest="0c9f4e21ab37" + 52 * "0", size=2048, files=12, changes=64 * "1", changed=2)
    for digest in code.digests:
        site.store._driver.fetch("insert blob", {"digest": digest, "size": 1})
    (name,) = site.store.jobs.submit([JobSpec(command="true", snapshot=True, code=code)])
    operator, viewer = (
        client.get(f"/jobs/{name}", headers=PAGE).text for client in (site.client(), site.client("viewer", "guest"))
    )
    for text in (operator, viewer):
        assert "<code>0c9f4e21ab37</code>, 12 files, 2 KiB; 2 changed" in text
    assert f'href="/api/v1/jobs/{name}/diff"' in operator
    assert f'href="/api/v1/jobs/{name}/diff"' not in viewer


def test_resources_of_pages_exist_and_are_local(site: ApiSite) -> None:
    [name] = site.store.jobs.submit([JobSpec(command="sleep 5")])
    client = site.client()
    for path in ("/", "/jobs", f"/jobs/{name}", "/submit", "/jobs/nobody"):
        html = client.get(path, headers=PAGE).text
        named = re.findall(r'(?:src|<link[^>]* href)="([^"]+)"', html)
        assert len(named) > 5
        for address in named:
            assert address.startswith("/"), address
            assert client.get(unescape(address)).status_code == 200, address
        assert not re.search(r"<style|style=|<script(?![^>]* src=)| on[a-z]+=", html), "the policy would refuse it"


def test_icons_of_the_manifest_exist(site: ApiSite) -> None:
    client = site.client()
    manifest = client.get("/manifest.webmanifest")
    assert manifest.headers["content-type"] == "application/manifest+json"
    told = manifest.json()
    assert told["display"] == "standalone"
    for icon in told["icons"]:
        assert client.get(icon["src"]).headers["content-type"] == icon["type"]
    assert client.get("/favicon.ico").status_code == 200


def test_submitted_form_creates_a_job_and_redirects_to_it(site: ApiSite) -> None:
    answer = send(site.client(), form(name="vit", tags="a, b", memory="20GiB", time_limit="2h", hold="on"))
    assert answer.status_code == 303
    job = site.store.jobs.get(answer.headers["location"].removeprefix("/jobs/"))
    assert (job.command, job.name, job.tags, job.memory, job.time_limit, job.state, job.submitter) == (
        "echo hello", "vit", ("a", "b"), 20 * 2**30, 7200.0, "held", "phone",
    )  # fmt: skip
    assert job.policy == {}


def test_unticked_box_turns_the_idle_rule_off(site: ApiSite) -> None:
    fields = form()
    del fields["idle"]
    answer = send(site.client(), fields)
    assert site.store.jobs.get(answer.headers["location"].removeprefix("/jobs/")).policy == {"idle": False}


def test_double_tap_submits_once_and_a_changed_form_submits_again(site: ApiSite) -> None:
    client = site.client()
    first, second = send(client, form()), send(client, form())
    assert first.headers["location"] == second.headers["location"]
    third = send(client, form(command="echo other"))
    assert third.headers["location"] != first.headers["location"]
    assert len(site.store.jobs.find()) == 2


def test_form_errors_are_shown_at_their_fields_and_input_is_kept(site: ApiSite) -> None:
    fields = form(command="echo {lr} <b>", directory="here", memory="much", name='a"b')
    answer = send(site.client(), fields, ("sweep_name", "lr"), ("sweep_values", "1,2"))
    assert answer.status_code == 422
    assert set(re.findall(r'id="mistake-(\w+)"', answer.text)) == {"directory", "memory"}
    assert re.search(r'name="memory"[^>]*aria-invalid="true"', answer.text)
    for field in ("directory", "memory", "name", "key"):
        assert typed(answer.text, field) == fields[field]
    assert "echo {lr} &lt;b&gt;</textarea>" in answer.text
    assert (typed(answer.text, "sweep_name"), typed(answer.text, "sweep_values")) == ("lr", "1,2")
    assert site.store.jobs.find() == []


def test_form_with_a_sweep_creates_one_job_per_combination(site: ApiSite) -> None:
    rows = [("sweep_name", "lr"), ("sweep_values", "1e-3,1e-4"), ("sweep_name", "seed"), ("sweep_values", "1..3")]
    answer = send(site.client(), form(command="train {lr} {seed}"), *rows)
    assert answer.headers["location"] == "/jobs?made=6"
    assert len({job.command for job in site.store.jobs.find()}) == 6
    assert "6 jobs were submitted" in site.client().get(answer.headers["location"], headers=PAGE).text


def test_clone_form_is_filled_from_the_job_and_keeps_unchanged_values(site: ApiSite) -> None:
    earlier = JobSpec(
        command=("python", "train.py", "a b"),
        directory="/tmp",
        environment={"API_KEY": "s3cret"},
        name="vit",
        tags=("x", "y"),
        gpus=2,
        memory=20 * 2**30,
        backoff=77.0,
        time_limit=5400.0,
        policy={"window": 600.0, "below": 0.05, "require": "any"},
        preemptible=True,
    )
    [name] = site.store.jobs.submit([earlier])
    client = site.client()
    shown = client.get(f"/submit?again={name}", headers=PAGE).text
    assert "s3cret" not in shown
    assert "API_KEY=***</textarea>" in shown
    fields = {
        field: typed(shown, field)
        for field in (
            "directory", "name", "tags", "gpus", "memory", "priority", "time_limit", "retries", "batch_size", "after",
            "idle_for", "idle_below", "idle_after", "again", "key",
        )
    }  # fmt: skip
    assert fields["time_limit"] == "1h30m"
    assert fields["idle_for"] == "10m"
    fields |= {"command": "python train.py 'a b'", "preemptible": "on", "idle": "on", "gpus": "4"}
    answer = send(client, fields | {"environment": "API_KEY=***"})
    job = site.store.jobs.get(answer.headers["location"].removeprefix("/jobs/"))
    assert job.id != name
    assert job.gpus == 4
    for field in ("command", "environment", "name", "tags", "memory", "backoff", "time_limit", "policy", "preemptible"):
        assert getattr(job, field) == getattr(earlier, field), field


def sent_as_shown(html: str) -> dict[str, str]:
    """What a browser sends when nothing was touched."""
    areas = re.findall(r'<textarea[^>]* name="(\w+)"[^>]*>\n(.*?)</textarea>', html, re.DOTALL)
    inputs = re.findall(r'<input type="(?:text|hidden)"[^>]* name="(\w+)" value="([^"]*)"', html)
    boxes = re.findall(r'<input type="checkbox" name="(\w+)" value="on" checked', html)
    return {name: unescape(value) for name, value in [*areas, *inputs]} | dict.fromkeys(boxes, "on")


def test_edit_form_changes_only_differences_and_keeps_secrets(site: ApiSite) -> None:
    variables = {"API_KEY": "s3cret", "SEED": "1", "TEXT": "two\nlines"}
    asked = JobSpec(
        command=("python", "train.py", "--lr", "1e-3"), name="vit", environment=variables, backoff=77.0,
        policy={"below": 0.05, "require": "any"}, slurm={"partition": "gpu"}, preemptible=True,
    )  # fmt: skip
    [name] = site.store.jobs.submit([asked])
    client, address = site.client(), f"/jobs/{name}/edit"
    shown = client.get(address, headers=PAGE).text
    assert "s3cret" not in shown
    assert 'name="hold"' not in shown, "only what can be edited"
    fields = sent_as_shown(shown)
    assert send(client, fields, to=address).status_code == 303
    assert site.store.jobs.get(name).command == asked.command, "untouched, it stays words"
    fields["command"] = "python train.py --lr 3e-4"
    fields["environment"] = fields["environment"].replace("SEED=1", "SEED=2")
    refused = send(client, fields | {"gpus": "many"}, to=address)
    assert refused.status_code == 422
    assert "Nothing was saved" in refused.text
    assert send(client, fields, to=address).headers["location"] == f"/jobs/{name}"
    job = site.store.jobs.get(name)
    assert (job.command, job.environment) == ("python train.py --lr 3e-4", variables | {"SEED": "2"})
    for field in ("name", "backoff", "policy", "slurm", "preemptible", "state"):
        assert getattr(job, field) == (getattr(asked, field) if field != "state" else "queued"), field
    # Somebody else was faster, and then it has started.
    assert "somebody else has changed the job" in send(client, fields, to=address).text.lower()
    fields = sent_as_shown(client.get(address, headers=PAGE).text) | {"priority": "5"}
    assert site.store.attempts.claim([name], "w1", (), 60.0) is not None
    late = send(client, fields, to=address)
    assert (late.status_code, "has started meanwhile without these changes" in late.text) == (409, True)
    assert site.store.jobs.get(name).priority == 0
    assert site.client("viewer", "wall").get(address, headers=PAGE).status_code == 403
    assert client.get("/jobs/00000000/edit", headers=PAGE).status_code == 404


def test_jobs_are_listed_page_by_page_by_state_and_by_tag(site: ApiSite) -> None:
    site.store.jobs.submit(
        [JobSpec(command="true", name=f"job-{number:02d}", tags=(f"t{number % 2}",)) for number in range(60)]
    )
    site.store.jobs.hold([site.store.jobs.find()[0].id])
    client = site.client()
    first = client.get("/jobs", headers=PAGE).text
    older = re.search(r'href="([^"]+)">Older', first)
    assert older is not None
    second = client.get(unescape(older[1]), headers=PAGE).text
    names = [re.findall(r"job-\d\d", html) for html in (first, second)]
    assert [len(set(found)) for found in names] == [50, 10]
    assert len(set(names[0] + names[1])) == 60
    assert len(set(re.findall(r"job-\d\d", client.get("/jobs?state=held", headers=PAGE).text))) == 1
    assert len(set(re.findall(r"job-\d\d", client.get("/jobs?tag=t1", headers=PAGE).text))) == 30
    assert "No jobs match" in client.get("/jobs?tag=none", headers=PAGE).text


def ended(site: ApiSite, name: str, rule: str = "") -> str:
    """A job that failed, by itself or because a rule stopped it."""
    [job] = site.store.jobs.submit([JobSpec(command="true", name=name)])
    attempt = site.store.attempts.claim([job], "w", [], 60.0)
    assert attempt is not None
    site.store.attempts.write_details(attempt.id, AttemptDetails(cause=rule, rule=rule))
    site.store.attempts.finish(attempt.id, "failed", 1)
    return job


def test_failures_link_to_their_list_until_dismissed(site: ApiSite) -> None:
    client = site.client()
    for number in range(70):
        ended(site, f"broken-{number:02d}")
    ended(site, "hung-1", "idle")
    ended(site, "hung-2", "idle")
    site.look()
    front = client.get("/", headers=PAGE).text
    assert "70 jobs failed in the last 24 h, last broken-69" in front
    for kind, named, count in (("failed", "broken", 70), ("stopped", "hung", 2)):
        assert f'href="/jobs?unseen={kind}"' in front
        rows = re.findall(r'<tr id="row-.*?</a>', client.get(f"/jobs?unseen={kind}", headers=PAGE).text, re.DOTALL)
        assert len(rows) == count
        assert all(named in row for row in rows)
    point = next(point for point in client.get("/api/v1/status").json()["health"]["points"] if point["failure"])
    ended(site, "broken-70")
    seen = {"failure": point["failure"], "until": point["until"]}
    done = client.post("/api/v1/status/dismiss", json=seen).json()
    site.look()
    front = client.get("/", headers=PAGE).text
    assert "70 jobs" not in front
    assert "broken-70 failed" in front, "it came after what was dismissed"
    assert "2 jobs were stopped by a rule in the last 24 h" in front
    assert site.client("viewer", "wall").post("/api/v1/status/dismiss", json=seen).status_code == 403
    client.post(done["undo"]["path"], json=done["undo"]["body"])
    site.look()
    assert "71 jobs failed" in client.get("/", headers=PAGE).text


def test_missing_job_is_an_error_page_with_a_link_back(site: ApiSite) -> None:
    answer = site.client().get("/jobs/deadbeef", headers=PAGE)
    assert answer.status_code == 404
    assert 'href="/"' in answer.text
    assert "deadbeef" in answer.text


def test_only_content_addressed_files_are_cached_for_ever(site: ApiSite) -> None:
    client = site.client()
    address = statics.static_url("app.css")
    assert "immutable" in client.get(address).headers["cache-control"]
    for other in ("/static/app.css", "/static/app.css?v=0123"):
        assert client.get(other).headers["cache-control"] == "no-cache"
    tag = client.get(address).headers["etag"]
    assert client.get(address, headers={"If-None-Match": tag}).status_code == 304
    assert client.get(address).text == (Path(statics.__file__).parent / "static" / "app.css").read_text()


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/"])
def test_request_path_never_escapes_the_static_files(site: ApiSite, path: str) -> None:
    assert site.client().get(path).status_code == 404
