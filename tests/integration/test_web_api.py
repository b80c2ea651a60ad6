"""The HTTP API: what a program or the page sees of the queue, and what it can do to it."""

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from stoker.logs.reader import MAX_TAIL, STEP, attempt_directory
from stoker.queue import AttemptDetails, JobSpec, Store, Usage, View, WorkerGpu
from stoker.queue.code.packing import pack
from tests.support.api_site import ApiSite, Client, job_body, site
from tests.support.code_repository import CodeRepository
from tests.support.http_receiver import Answer, Receiver
from tests.support.queue_jobs import end, start, states, submit

__all__ = ["site"]

V1 = "/api/v1"


@pytest.fixture
def client(site: ApiSite) -> Client:
    return site.client()


def told(answer: Any, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


def problem(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = answer.json()
    assert (found["type"], found["status"]) == ("about:blank", status)
    assert found["title"]
    assert found["detail"]
    return found


def mistakes(answer: Any) -> dict[str, str]:
    return {one.get("pointer") or one["parameter"]: one["detail"] for one in problem(answer, 422)["errors"]}


# Submitting


def test_submit_accepts_all_job_fields(site: ApiSite, client: Client) -> None:
    needed = submit(site.store, "first")[0]
    body = {
        "command": ["python", "train.py", "{id}"], "directory": "/tmp", "name": "train", "tags": ["a", "b c"],
        "gpus": 2, "memory": "20GiB", "share": True, "priority": 3, "after": [needed[:6]], "after_any": ["first"],
        "retries": 2, "backoff": "1m", "time_limit": "2h", "environment": {"A": "1"},
        "preemptible": True, "on_loss": "hold", "hold": True, "batch_size": 8, "idle_for": "10m", "idle_below": "5%",
    }  # fmt: skip
    answer = client.post(f"{V1}/jobs", json=body)
    (job,) = told(answer, 201)["jobs"]
    assert answer.headers["location"] == f"{V1}/jobs/{job['id']}"
    kept = site.store.jobs.get(job["id"])
    assert (kept.command, kept.directory, kept.name) == (("python", "train.py", "{id}"), "/tmp", "train")
    assert (kept.tags, kept.gpus, kept.memory, kept.share, kept.priority) == (("a", "b c"), 2, 20 * 2**30, True, 3)
    assert (kept.after, kept.after_any, kept.retries, kept.backoff) == ((needed,), (needed,), 2, 60.0)
    assert (kept.time_limit, kept.environment, kept.preemptible, kept.on_loss) == (7200.0, {"A": "1"}, True, "hold")
    assert (kept.state, kept.batch_size, kept.policy) == ("held", 8, {"window": 600.0, "below": 0.05})
    assert kept.submitter == "phone"


def test_sweep_submits_one_job_per_combination(site: ApiSite, client: Client) -> None:
    body = job_body(name="s", sweep={"lr": "1e-3,1e-4", "seed": ["1", "2,3"]})
    jobs = told(client.post(f"{V1}/jobs", json=body), 201)["jobs"]
    assert [job["name"] for job in jobs] == [
        "s lr=1e-3 seed=1", "s lr=1e-3 seed=2,3", "s lr=1e-4 seed=1", "s lr=1e-4 seed=2,3",
    ]  # fmt: skip
    assert jobs[1]["command"] == "echo hello --lr=1e-3 --seed=2,3"
    assert site.store.jobs.counts() == {"queued": 4}


def test_again_copies_a_job_with_changes(site: ApiSite, client: Client) -> None:
    asked = job_body(name="old", gpus=3, memory=100, environment={"A": "1"}, idle="off", hold=True, tags=["x"])
    (old,) = told(client.post(f"{V1}/jobs", json=asked), 201)["jobs"]
    body = {"again": old["id"], "name": "new", "memory": None}
    (new,) = told(site.client("operator", "laptop").post(f"{V1}/jobs", json=body), 201)["jobs"]
    assert (new["name"], new["gpus"], new["memory"], new["tags"]) == ("new", 3, None, ["x"])
    assert (new["environment"], new["policy"], new["state"]) == ({"A": "1"}, {"idle": False}, "queued")
    assert (new["command"], new["submitter"]) == ("echo hello", "laptop")


def test_submit_with_fit_finds_the_batch_size_first(client: Client) -> None:
    (job,) = told(client.post(f"{V1}/jobs", json=job_body(fit={"base": 16, "margin": "5%"})), 201)["jobs"]
    assert (job["fit"]["search_options"]["base"], job["fit"]["search_options"]["margin"]) == (16, 0.05)
    (job,) = told(client.post(f"{V1}/jobs", json=job_body(fit=True)), 201)["jobs"]
    assert job["fit"]["retries_oom"] == 2


def test_dry_run_submits_nothing(site: ApiSite, client: Client) -> None:
    answer = told(client.post(f"{V1}/jobs", json=job_body(dry_run=True, sweep={"x": "1..3"})))
    assert [job["command"] for job in answer["rehearsed"]] == [f"echo hello --x={number}" for number in (1, 2, 3)]
    assert answer["jobs"] == []
    assert site.store.jobs.counts() == {}


@pytest.mark.parametrize(
    ("more", "pointer", "sentence"),
    [
        ({"command": ""}, "#/command", "needs a command"),
        ({"command": []}, "#/command", "needs a command"),
        ({"command": "a\0b"}, "#/command", "NUL"),
        ({"command": "train —lr 3 “a b”"}, "#/command", 'train --lr 3 "a b" is probably meant'),
        ({"command": ["train", "–n", "3"]}, "#/command", "train -n 3 is probably meant"),
        ({"command": "x" * 200_000}, "#/command", "too long"),
        ({"directory": "work"}, "#/directory", "absolute path"),
        ({"directory": None}, "#/directory", "absolute path"),
        ({"directory": "/etc/passwd"}, "#/directory", "not a directory"),
        ({"name": "a\nb"}, "#/name", "is not one line"),
        ({"tags": [""]}, "#/tags", "a tag must not be empty"),
        ({"memory": "much"}, "#/memory", "write it like 8GiB"),
        ({"share": True}, "#/memory", "must say how much"),
        ({"gpus": -1}, "#/gpus", "expected int >= 0"),
        ({"gpus": 10**30}, "#/gpus", "expected int <= 2147483647"),
        ({"gpus": 1.5}, "#/gpus", "expected int | null, got float"),
        ({"time_limit": "soon"}, "#/time_limit", "write it like 90s"),
        ({"time_limit": 0}, "#/time_limit", "must be greater than zero"),
        ({"after": ["nobody"]}, "#/after", "there is no job 'nobody'"),
        ({"environment": {"A=B": "1"}}, "#/environment", "cannot be set"),
        ({"environment": {"A": "\0"}}, "#/environment", "cannot be set"),
        ({"command": "train {batch_size}"}, "#/batch_size", "give a batch size"),
        ({"fit": True, "gpus": 0}, "#/fit", "needs a GPU"),
        ({"fit": {"base": 8, "max": 4}}, "#/fit", "use a smaller one"),
        ({"fit": {"margin": "lots"}}, "#/fit", "not a percentage"),
        ({"idle_for": "1s"}, "#/idle_for", "not a single look"),
        ({"idle_below": "200%"}, "#/idle_below", "between 0% and 100%"),
        ({"policy": {"nonsense": 1}}, "#/policy", "no rule has a setting 'nonsense'"),
        ({"sweep": {"lr": "1,,2"}}, "#/sweep", "empty value"),
        ({"sweep": {"id": "1"}}, "#/sweep", "cannot be called"),
        ({"sweep": {"x": "1..100", "y": "1..100"}}, "#/sweep", "10,000 jobs"),
        ({"again": "nobody"}, "#/again", "there is no job"),
        ({"color": "red"}, "#/color", "unknown field"),
        ({"memory": -1}, "#/memory", "expected int >= 0"),
        ({"memory": [1]}, "#/memory", "expected int | str | null, got array"),
        ({"command": ["echo", 1]}, "#/command", "expected str, got int in [1]"),
        ({"environment": {"str": 3}}, "#/environment", "expected str, got int"),
        ({"fit": {"base": 0}}, "#/fit", "--base 0 is out of range"),
        ({"sweep": {"lr": [1]}}, "#/sweep", "expected str, got int"),
    ],
)  # fmt: skip
def test_each_invalid_field_is_reported(
    site: ApiSite, client: Client, more: dict[str, Any], pointer: str, sentence: str
) -> None:
    found = mistakes(client.post(f"{V1}/jobs", json=job_body(**more)))
    assert sentence in found[pointer]
    assert site.store.jobs.counts() == {}


def test_all_invalid_fields_are_reported_at_once(client: Client) -> None:
    found = mistakes(client.post(f"{V1}/jobs", json={"command": "", "memory": "x", "backoff": "y"}))
    assert set(found) == {"#/command", "#/memory", "#/backoff", "#/directory"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"\xff\xfe", 422),
        (b'{"command": "\xff"}', 422),
        (b'{"command": "\\ud800", "directory": "/tmp"}', 422),
        (b'{"command": "x", "directory": "/tmp", "environment": {"\\ud800": "1"}}', 422),
        (b'{"gpus": ' + b"9" * 5000 + b"}", 422),
        (b"[" * 100_000, 422),
        (b'{"gpus": NaN}', 422),
        (b'{"backoff": Infinity}', 422),
        (b"[]", 422),
        (b"null", 422),
        (b"", 422),
        (b'"' + b"x" * (1024 * 1024) + b'"', 413),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else str(value),
)
def test_malformed_body_is_a_problem_and_not_a_crash(client: Client, body: bytes, status: int) -> None:
    problem(client.post(f"{V1}/jobs", content=body, headers={"Content-Type": "application/json"}), status)


def test_code_diff_is_shown_to_operators_only(site: ApiSite, client: Client, tmp_path: Path) -> None:
    code = CodeRepository(tmp_path / "code", {"train.py": "lr = 1\n"})
    code.write({"train.py": "lr = 2\n", "new.py": ""})
    with pack(str(code.path), 2**20) as packed:
        job, plain = site.store.jobs.submit(
            [JobSpec(command="true", snapshot=True, code=packed.code), JobSpec(command="true")], packed.blobs
        )
    answer = client.get(f"{V1}/jobs/{job}/diff")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert answer.text.endswith("-lr = 1\n+lr = 2\nuntracked: new.py\n")
    assert told(client.get(f"{V1}/jobs/{job}"))["code"]["digest"] == packed.code.digest
    assert "has no snapshot" in problem(client.get(f"{V1}/jobs/{plain}/diff"), 404)["detail"]
    problem(site.client("viewer", "guest").get(f"{V1}/jobs/{job}/diff"), 403)


def test_viewers_cannot_submit(site: ApiSite) -> None:
    problem(site.client("viewer", "guest").post(f"{V1}/jobs", json=job_body()), 403)
    assert site.store.jobs.counts() == {}


# Submitting twice


def test_repeated_idempotency_key_returns_the_same_jobs(site: ApiSite, client: Client) -> None:
    body, key = job_body(sweep={"x": "1..3"}), {"Idempotency-Key": "abc"}
    first = client.post(f"{V1}/jobs", json=body, headers=key)
    again = client.post(f"{V1}/jobs", json=dict(reversed(body.items())), headers=key)
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert [job["id"] for job in told(first, 201)["jobs"]] == [job["id"] for job in told(again)["jobs"]]
    assert site.store.jobs.counts() == {"queued": 3}


def test_idempotency_key_belongs_to_one_request_and_token(site: ApiSite, client: Client) -> None:
    key = {"Idempotency-Key": "abc"}
    told(client.post(f"{V1}/jobs", json=job_body(), headers=key), 201)
    assert (
        "another request" in mistakes(client.post(f"{V1}/jobs", json=job_body(gpus=2), headers=key))["Idempotency-Key"]
    )
    told(site.client("operator", "other").post(f"{V1}/jobs", json=job_body(gpus=2), headers=key), 201)
    assert site.store.jobs.counts() == {"queued": 2}


def test_two_servers_share_idempotency_keys(site: ApiSite, client: Client, tmp_path: Path) -> None:
    key = {"Idempotency-Key": "abc"}
    (job,) = told(client.post(f"{V1}/jobs", json=job_body(), headers=key), 201)["jobs"]
    with contextlib.closing(ApiSite(tmp_path)) as other:
        assert told(other.client().post(f"{V1}/jobs", json=job_body(), headers=key))["jobs"][0]["id"] == job["id"]


def test_unprintable_idempotency_key_is_refused(client: Client) -> None:
    assert "Idempotency-Key" in str(
        mistakes(client.post(f"{V1}/jobs", json=job_body(), headers={"Idempotency-Key": "a b"}))
    )


# Listing


def test_new_jobs_do_not_shift_pages(site: ApiSite, client: Client) -> None:
    ids = submit(site.store, *"abcde")
    page = client.get(f"{V1}/jobs", params={"limit": 2})
    seen = [job["name"] for job in told(page)["items"]]
    submit(site.store, "late")
    while told(page)["next"]:
        page = client.get(f"{V1}/jobs", params={"limit": 2, "cursor": told(page)["next"]})
        seen += [job["name"] for job in told(page)["items"]]
    assert seen == list("edcba")
    assert len(ids) == 5


def test_jobs_are_found_by_state_and_tag(site: ApiSite, client: Client) -> None:
    (one,) = submit(site.store, "one", tags=("x",))
    (two,) = submit(site.store, "two", tags=("x",), hold=True)
    (three,) = submit(site.store, "three")
    end(site.store, three)

    def ids(**query: Any) -> list[str]:
        return [job["id"] for job in told(client.get(f"{V1}/jobs", params=query))["items"]]

    assert ids(state=["held", "failed"]) == [three, two]
    assert ids(tag="x") == [two, one]
    assert ids(tag="x", state="queued") == [one]
    assert ids(tag="y") == []
    assert ids(q="state:queued,failed since:1h") == [three, one]
    assert ids(q="name:o", tag="x", sort="name") == [one]
    assert ids(sort="-name") == [two, three, one]
    first = told(client.get(f"{V1}/jobs", params={"sort": "name", "limit": 2}))
    assert ids(sort="name", cursor=first["next"]) == [two]
    assert mistakes(client.get(f"{V1}/jobs", params={"cursor": first["next"]}))


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=201",
        "limit=x",
        "state=gone",
        "cursor=x",
        "cursor=W10",
        "cursor=%00",
        "cursor=WzFlOTk5LDFd",
        "cursor=é",
        "q=colour:red",
        "q=state:done",
        "sort=colour",
    ],
)
def test_invalid_query_names_the_invalid_part(client: Client, query: str) -> None:
    name = query.partition("=")[0]
    assert any(name in where for where in mistakes(client.get(f"{V1}/jobs?{query}")))


def test_odd_text_in_a_query_finds_nothing(client: Client) -> None:
    for query in ("tag=%00", "tag=%ed%a0%80", "tag=%ff"):
        assert told(client.get(f"{V1}/jobs?{query}"))["items"] == []


def test_job_is_found_by_its_full_id_only(site: ApiSite, client: Client) -> None:
    (name,) = submit(site.store, "deadbeef")
    assert told(client.get(f"{V1}/jobs/{name}"))["name"] == "deadbeef"
    why = told(client.get(f"{V1}/jobs/{name}/why"))
    assert (why["job"], why["state"], why["why"]["kind"]) == (name, "queued", "no worker")
    assert why["why"]["forecast"] is None
    gpu = WorkerGpu(uuid="GPU-0", index=0, name="A100", state="free")
    site.store.workers.heartbeat("w", "gpu-box", View(gpus=(gpu,)))
    (behind,) = submit(site.store, "behind")
    why = told(client.get(f"{V1}/jobs/{behind}/why"))["why"]
    assert why["forecast"] == {"place": 2, "starts": None, "at_latest": False}
    assert why["reason"] == "waits for its turn: 2nd in line"
    for odd in ("deadbeef", name[:5], "x", "%00", "..%2F..", "%F0%9F%92%A3"):
        problem(client.get(f"{V1}/jobs/{odd}"), 404)


# Steering


def undone(client: Client, done: Any) -> Any:
    """What the answer says how to take it back, done."""
    undo = done["undo"]
    return told(client.request(undo["method"], undo["path"], json=undo["body"]))


@pytest.mark.parametrize(("verb", "became", "word"), [("cancel", "cancelled", "cancelled"), ("hold", "held", "held")])
def test_changes_of_a_waiting_job_can_be_undone(
    site: ApiSite, client: Client, verb: str, became: str, word: str
) -> None:
    (name,) = submit(site.store, "train")
    done = told(client.post(f"{V1}/jobs/{name}/{verb}"))
    assert (done["changed"], done["message"]) == (True, f"train ({name}): {word}")
    assert states(site.store, name) == [became]
    undone(client, done)
    assert states(site.store, name) == ["queued"]


def test_undo_of_cancel_holds_a_held_job_again(site: ApiSite, client: Client) -> None:
    (name,) = submit(site.store, "train", hold=True)
    undone(client, told(client.post(f"{V1}/jobs/{name}/cancel")))
    assert states(site.store, name) == ["held"]
    assert site.store.jobs.get(name).ended is None
    undone(client, told(client.post(f"{V1}/jobs/{name}/release")))
    assert states(site.store, name) == ["held"]


def test_cancel_of_a_running_job_cannot_be_undone(site: ApiSite, client: Client) -> None:
    (name,) = submit(site.store, "train")
    start(site.store, name)
    done = told(client.post(f"{V1}/jobs/{name}/cancel"))
    assert (done["message"], done["undo"]) == (f"train ({name}): asked to stop", None)
    assert site.store.jobs.get(name).cancel_requested is not None


def test_failed_job_is_retried(site: ApiSite, client: Client) -> None:
    (name,) = submit(site.store, "train")
    end(site.store, name)
    done = told(client.post(f"{V1}/jobs/{name}/retry"))
    assert states(site.store, name) == ["queued"]
    undone(client, done)
    assert states(site.store, name) == ["cancelled"]


@pytest.mark.parametrize(
    ("state", "verb", "sentence"),
    [
        ("running", "hold", "was not held: it is running (`stoker cancel` stops it)"),
        ("running", "release", "was not released: it is not held, it is running"),
        ("running", "retry", "was not queued again: it is running"),
        ("queued", "release", "was not released: it is not held"),
        ("queued", "retry", "was not queued again: it waits in the queue already"),
        ("failed", "cancel", "was not cancelled: it has already failed"),
        ("failed", "hold", "was not held: it has already failed"),
    ],
)
def test_inapplicable_change_is_a_conflict_with_the_message_of_the_command_line(
    site: ApiSite, client: Client, state: str, verb: str, sentence: str
) -> None:
    (name,) = submit(site.store, "train")
    if state == "running":
        start(site.store, name)
    elif state == "failed":
        end(site.store, name)
    found = problem(client.post(f"{V1}/jobs/{name}/{verb}"), 409)
    assert found["detail"] == f"job train ({name}) {sentence}"
    assert states(site.store, name) == [state]


def order(site: ApiSite) -> list[str]:
    return [job.name for job in site.store.jobs.find(["queued", "held"], order="queue")]


@pytest.mark.parametrize(
    ("who", "where", "after"),
    [
        ("c", {"place": "first"}, "cab"),
        ("a", {"place": "last"}, "bca"),
        ("b", {"place": "up"}, "bac"),
        ("a", {"before": "c"}, "bac"),
        ("a", {"after": "c"}, "bca"),
        ("c", {"before": "a"}, "cab"),
    ],
)
def test_move_can_be_undone(site: ApiSite, client: Client, who: str, where: dict[str, str], after: str) -> None:
    ids = dict(zip("abc", submit(site.store, *"abc"), strict=True))
    body = {key: ids.get(value, value) for key, value in where.items()}
    done = told(client.post(f"{V1}/jobs/{ids[who]}/move", json=body))
    assert "".join(order(site)) == after
    undone(client, done)
    assert "".join(order(site)) == "abc"


def test_move_can_be_undone_in_a_long_queue(site: ApiSite, client: Client) -> None:
    *_others, before, last = site.store.jobs.submit([JobSpec(command="wait")] * 10_002)
    done = told(client.post(f"{V1}/jobs/{last}/move", json={"place": "first"}))
    assert site.store.jobs.in_line(1)[0].id == last
    undone(client, done)
    assert site.store.jobs.neighbours(site.store.jobs.get(last)) == (before, None)


def test_undo_of_move_restores_the_priority(site: ApiSite, client: Client) -> None:
    (low,) = submit(site.store, "low")
    (high,) = submit(site.store, "high", priority=5)
    done = told(client.post(f"{V1}/jobs/{low}/move", json={"before": high}))
    assert (order(site), site.store.jobs.get(low).priority) == (["low", "high"], 5)
    undone(client, done)
    assert (order(site), site.store.jobs.get(low).priority) == (["high", "low"], 0)


def test_invalid_move_is_reported(site: ApiSite, client: Client) -> None:
    waits, runs = submit(site.store, "waits", "runs")
    start(site.store, runs)
    assert "it is running" in problem(client.post(f"{V1}/jobs/{runs}/move", json={"place": "up"}), 409)["detail"]
    assert runs in problem(client.post(f"{V1}/jobs/{waits}/move", json={"before": runs}), 409)["detail"]
    assert "#/before" in mistakes(client.post(f"{V1}/jobs/{waits}/move", json={"before": "00000000"}))
    assert "exactly one of place" in str(mistakes(client.post(f"{V1}/jobs/{waits}/move", json={})))
    mistakes(client.post(f"{V1}/jobs/{waits}/move", json={"place": "up", "before": runs}))


def test_edit_can_be_undone(site: ApiSite, client: Client) -> None:
    (name,) = site.store.jobs.submit(
        [JobSpec(command="true", name="old", policy={"every": 2.0}, environment={"A": "1"})]
    )
    before = site.store.jobs.get(name)
    body = {"name": "new", "memory": "1GiB", "idle": "off", "environment": {"B": "2"}, "priority": 4, "fit": True}
    done = told(client.patch(f"{V1}/jobs/{name}", json=body))
    after = site.store.jobs.get(name)
    assert (after.name, after.memory, after.policy) == ("new", 2**30, {"idle": False, "every": 2.0})
    assert (after.environment, after.priority, bool(after.fit)) == ({"B": "2"}, 4, True)
    assert done["message"].startswith(f"old ({name}): edited (environment, name, memory")
    undone(client, done)
    assert site.store.jobs.get(name) == before
    assert told(client.patch(f"{V1}/jobs/{name}", json={"name": "old"})) == {
        "changed": False, "message": f"old ({name}): nothing differs", "undo": None,
    }  # fmt: skip


def test_invalid_edit_is_reported(site: ApiSite, client: Client) -> None:
    first, second = submit(site.store, "first", "second")
    told(client.patch(f"{V1}/jobs/{second}", json={"after": [first]}))
    circle = problem(client.patch(f"{V1}/jobs/{first}", json={"after": ["second"]}), 409)
    assert "would wait for itself" in circle["detail"]
    assert "#/memory" in mistakes(client.patch(f"{V1}/jobs/{first}", json={"memory": "x"}))
    assert "#/hold" in mistakes(client.patch(f"{V1}/jobs/{first}", json={"hold": True}))
    start(site.store, first)
    assert "edit it when it has ended" in problem(client.patch(f"{V1}/jobs/{first}", json={"name": "x"}), 409)["detail"]


def test_running_job_is_snoozed(site: ApiSite, client: Client) -> None:
    runs, waits = submit(site.store, "runs", "waits")
    attempt = start(site.store, runs)
    done = told(client.post(f"{V1}/jobs/{runs}/snooze", json={"seconds": "30m"}))
    assert done["message"] == f"runs ({runs}): snoozed for 30m"
    assert site.store.attempts.snoozes()[attempt] - site.store.clock() == pytest.approx(1800, abs=20)
    undone(client, done)
    assert site.store.attempts.snoozes() == {}
    assert "not running" in problem(client.post(f"{V1}/jobs/{waits}/snooze", json={"seconds": 60}), 409)["detail"]
    assert "#/seconds" in mistakes(client.post(f"{V1}/jobs/{runs}/snooze", json={"seconds": "long"}))


def test_queue_and_worker_are_paused_and_resumed(site: ApiSite, client: Client) -> None:
    site.store.workers.heartbeat("box-1", "gpu-box", View())
    done = told(client.post(f"{V1}/queue/pause"))
    assert (done["message"], site.store.paused()) == ("the queue is paused", True)
    again = told(client.post(f"{V1}/queue/pause"))
    assert (again["changed"], again["undo"]) == (False, None)
    assert "it is paused already" in again["message"]
    undone(client, done)
    assert not site.store.paused()
    done = told(client.post(f"{V1}/workers/box-1/pause"))
    (worker,) = told(client.get(f"{V1}/workers"))["items"]
    assert (worker["worker"]["paused"], worker["is_there"]) == (True, True)
    undone(client, done)
    assert not site.store.workers.all()[0].paused
    problem(client.post(f"{V1}/workers/nobody/pause"), 404)


@pytest.mark.parametrize("verb", ["cancel", "hold", "retry", "release", "move", "snooze"])
def test_viewers_cannot_change_jobs(site: ApiSite, verb: str) -> None:
    (name,) = submit(site.store, "train")
    problem(site.client("viewer", "guest").post(f"{V1}/jobs/{name}/{verb}", json={}), 403)
    assert states(site.store, name) == ["queued"]


# Attempts


def test_log_is_whole_on_its_machine_and_its_tail_elsewhere(site: ApiSite, client: Client) -> None:
    (name,) = submit(site.store, "train")
    start(site.store, name)
    (attempt,) = site.store.attempts.of(name)
    site.store.logs.write(attempt.id, "the end\n")
    path = f"{V1}/jobs/{name}/attempts/1/log"
    answer = client.get(path)
    assert (answer.text, answer.headers["stoker-log"]) == ("the end\n", "end")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    place = attempt_directory(site.config.home, attempt)
    place.mkdir(parents=True)
    (place / "output").write_bytes(b"one\n<script>\nthree \xff")
    answer = client.get(path)
    assert (answer.text, answer.headers["stoker-log"]) == ("one\n<script>\nthree \N{REPLACEMENT CHARACTER}", "whole")
    assert client.get(path, params={"lines": 2}).text == "<script>\nthree \N{REPLACEMENT CHARACTER}"
    assert told(client.get(f"{V1}/jobs/{name}/attempts"))["items"][0]["is_here"]


def test_long_log_is_streamed_in_bounded_memory(site: ApiSite, client: Client) -> None:
    (name,) = submit(site.store, "train")
    start(site.store, name)
    place = attempt_directory(site.config.home, site.store.attempts.of(name)[0])
    place.mkdir(parents=True)
    line = "ä" * 499 + "\n"
    size = len(line.encode())
    (place / "output.1").write_text(line * (8 * 2**20 // size))
    (place / "output").write_text(line * (4 * 2**20 // size) + "last\nwords")
    path = f"{V1}/jobs/{name}/attempts/1/log"
    most = _most_memory(lambda: client.get(path, params={"lines": 3}))
    answer = client.get(path, params={"lines": 3})
    assert (answer.text, answer.headers["stoker-log"]) == (f"{line}last\nwords", "whole")
    # Twice, for a moment: in pieces, and put together.
    assert most < 2.5 * MAX_TAIL
    many = client.get(path, params={"lines": 10**9}).text
    assert MAX_TAIL <= len(many.encode()) < MAX_TAIL + 2 * STEP
    assert many.startswith(line)
    assert many.endswith(f"{line}last\nwords")
    pieces = list[int]()
    assert _sent(site, path, pieces) == line * (8 * 2**20 // size) + line * (4 * 2**20 // size) + "last\nwords"
    assert max(pieces) <= 2 * STEP


def _most_memory(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _sent(site: ApiSite, path: str, pieces: list[int]) -> str:
    """The text of the answer; `pieces` gets the sizes of what it came in."""
    client = site.client()
    inner = client._app

    async def weighing(scope: Scope, receive: Receive, send: Send) -> None:
        async def weighed(message: Message) -> None:
            pieces.append(len(message.get("body", b"")))
            await send(message)

        await inner(scope, receive, weighed)

    client._app = weighing
    return client.get(path).text


@pytest.mark.parametrize("trick", ["link", "of another"])
def test_log_file_of_another_attempt_is_not_sent(site: ApiSite, client: Client, tmp_path: Path, trick: str) -> None:
    (name,) = submit(site.store, "train")
    attempt = start(site.store, name)
    site.store.logs.write(attempt, "one\nthe end\n")
    place = attempt_directory(site.config.home, site.store.attempts.of(name)[0])
    place.mkdir(parents=True)
    secret = tmp_path / "secret" if trick == "link" else place / "output"
    secret.write_text("secret\n")
    if trick == "link":
        (place / "output").symlink_to(secret)
    else:
        (place / "attempt.json").write_text(json.dumps({"attempt": "f" * 32}))
    for wanted, text in (({}, "one\nthe end\n"), ({"lines": 1}, "the end\n")):
        answer = client.get(f"{V1}/jobs/{name}/attempts/1/log", params=wanted)
        assert (answer.text, answer.headers["stoker-log"]) == (text, "end")
    assert not told(client.get(f"{V1}/jobs/{name}/attempts"))["items"][0]["is_here"]


def test_report_and_fit_of_an_attempt_are_returned(site: ApiSite, client: Client) -> None:
    (name,) = submit(site.store, "train")
    path = f"{V1}/jobs/{name}/attempts"
    assert "it has not started yet" in problem(client.get(f"{path}/1/report"), 404)["detail"]
    attempt = start(site.store, name)
    problem(client.get(f"{path}/1/report"), 404)
    problem(client.get(f"{path}/1/fit"), 404)
    site.store.attempts.write_details(
        attempt, AttemptDetails(cause="idle", rule="idle", report="# Idle\n", fit={"size": 64})
    )
    report = client.get(f"{path}/1/report")
    assert (report.text, report.headers["content-type"]) == ("# Idle\n", "text/markdown; charset=utf-8")
    assert told(client.get(f"{path}/1/fit")) == {"fit": {"size": 64}}
    assert told(client.get(path))["items"][0]["cause"] == "idle"
    for odd in ("0", "-1", "x", "9" * 30, "1.5", "..%2f..%2fetc"):
        assert client.get(f"{path}/{odd}/log").status_code in {404, 422}


# GPUs, and the rest


def test_gpu_history_has_gaps_without_readings(site: ApiSite, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    now = site.store.clock()
    monkeypatch.setattr(Store, "clock", lambda _store: now)  # no minute ends in between
    minute = int(now // 60)
    row = Usage(host="h", gpu="GPU-0", minute=minute, seconds={"job": 60.0}, utilization=0.0, memory=5)
    site.store.usage.write([row])
    history = told(client.get(f"{V1}/history", params={"minutes": 3, "host": "h"}))
    assert [len(history["times"]), len(history["gpus"])] == [3, 1]
    # Zero is a value, and nobody looked before.
    assert history["gpus"][0]["utilization"] == [None, None, 0.0]
    assert told(client.get(f"{V1}/history", params={"host": "another"}))["gpus"] == []
    assert told(client.get(f"{V1}/usage"))["seconds"]["job"] == 60.0


def test_week_of_a_gpu_has_means_peaks_and_jobs(site: ApiSite, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    now = site.store.clock() // 1020 * 1020 + 1019  # the last point is of 17 whole minutes
    monkeypatch.setattr(Store, "clock", lambda _store: now)
    site.store.workers.heartbeat("w1", "gpu-box", View())
    train, other = submit(site.store, "train", "other")
    attempt = site.store.attempts.claim([train], "w1", ["GPU-0", "GPU-1"], 600.0)
    assert attempt is not None
    site.store.attempts.claim([other], "w1", ["GPU-1"], 600.0)
    last = int(now // 60)
    site.store.usage.write(
        [
            Usage(host="gpu-box", gpu="GPU-0", minute=last - back, seconds={"job": 60.0}, utilization=use, power=watts)
            for back, use, watts in ((0, 1.0, 300.0), (1, 0.5, None), (5000, 0.0, 20.0))
        ]
    )
    week = {"host": "gpu-box", "gpu": "GPU-0", "minutes": 10_080, "points": 600}
    history = told(client.get(f"{V1}/history", params=week))
    assert (history["step"], len(history["times"])) == (17, 593)
    (series,) = history["gpus"]
    known = [(point, value) for point, value in enumerate(series["utilization"]) if value is not None]
    assert [value for _, value in known] == [0.0, 0.75]
    assert known[-1][0] == 592
    assert (series["utilization_peak"][-1], series["power"][-1], series["power_peak"][-1]) == (1.0, 300.0, 300.0)
    (span,) = history["jobs"]
    assert (span["job"], span["name"], span["attempt"], span["ended"]) == (train, "train", 1, None)
    # A day has its minutes as before.
    assert len(told(client.get(f"{V1}/history", params={"minutes": 1440}))["times"]) == 1440
    assert "host" in mistakes(client.get(f"{V1}/history", params={"minutes": 1441}))["minutes"]
    assert "minutes" in mistakes(client.get(f"{V1}/history", params=week | {"minutes": 10_081}))


def test_history_of_a_job_covers_its_gpus_during_its_attempts(site: ApiSite, client: Client) -> None:
    store = site.store
    store.workers.heartbeat("w1", "gpu-box", View())
    (job,) = submit(store, "train", gpus=2)
    assert told(client.get(f"{V1}/jobs/{job}/history"))["gpus"] == []
    attempt = store.attempts.claim([job], "w1", ["GPU-0", "GPU-1"], 600.0)
    assert attempt is not None
    minute = int(attempt.started // 60)
    rows = [
        Usage(host="gpu-box", gpu=gpu, minute=minute + shift, seconds={"job": 60.0}, utilization=0.5, memory=7)
        for gpu in ("GPU-0", "GPU-1", "GPU-2")
        for shift in (-2, -1, 0, 2)
    ]
    store.usage.write(rows)
    assert store.attempts.finish(attempt.id, "failed", 1)
    ended = store.attempts.of(job)[0].ended
    assert ended is not None
    history = told(client.get(f"{V1}/jobs/{job}/history"))
    assert history["times"] == [at * 60 for at in range(minute, int(ended // 60) + 1)]
    assert [(one["gpu"], one["utilization"][0], one["memory"][0]) for one in history["gpus"]] == [
        ("GPU-0", 0.5, 7),
        ("GPU-1", 0.5, 7),
    ]
    (span,) = history["jobs"]
    assert (span["attempt"], span["outcome"], span["started"], span["ended"]) == (1, "failed", attempt.started, ended)
    problem(client.get(f"{V1}/jobs/00000000/history"), 404)


def test_status_is_the_cached_snapshot(site: ApiSite, client: Client) -> None:
    gpu = WorkerGpu(uuid="GPU-0", index=0, name="A100", utilization=0.5, state="free")
    site.store.workers.heartbeat("box-1", "gpu-box", View(gpus=(gpu,)))
    submit(site.store, "train")
    site.look()
    snapshot = told(client.get(f"{V1}/status"))
    assert snapshot["machines"][0]["gpus"][0]["utilization"] == 0.5
    assert snapshot["waiting"][0]["job"]["name"] == "train"
    assert snapshot["health"]["level"] in {"good", "attention", "bad"}


def test_session_returns_name_and_role(site: ApiSite) -> None:
    assert told(site.client("viewer", "guest").get(f"{V1}/session")) == {"role": "viewer", "name": "guest"}
    assert told(site.client().get(f"{V1}/session")) == {"role": "operator", "name": "phone"}


def test_unknown_path_is_a_problem(site: ApiSite, client: Client) -> None:
    problem(client.get("/api/nothing"), 404)
    problem(client.get("/api/v1/nothing", headers={"Accept": "text/html"}), 404)
    answer = client.request("DELETE", f"{V1}/queue/pause")
    assert (problem(answer, 405)["title"], answer.headers["allow"]) == ("Method Not Allowed", "POST")
    problem(site.client().get(f"{V1}/jobs", headers={"Authorization": "Bearer stk_wrong"}), 401)


def test_unreachable_queue_is_503_with_retry_after(site: ApiSite, client: Client) -> None:
    Path(site.queue).rename(Path(site.queue).with_name("elsewhere"))
    answer = client.get(f"{V1}/jobs")
    assert "there is no queue" in problem(answer, 503)["detail"]
    assert int(answer.headers["retry-after"]) > 0
    site.snapshot_cache._take(None, "the queue is away")
    assert problem(client.get(f"{V1}/status"), 503)["detail"] == "the queue is away"


def test_openapi_description_is_complete_and_needs_a_token(site: ApiSite, client: Client) -> None:
    problem(Client(site.secured).get("/api/openapi.json"), 401)
    description = told(client.get("/api/openapi.json"))
    operations = [one for path in description["paths"].values() for one in path.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names) == 48
    for one in operations:
        assert one["summary"], one
        assert one["description"], one
        assert one["tags"], one
        assert {"401", "403", "503"} <= one["responses"].keys()
    assert description["components"]["schemas"]["WorkerGpu"]["properties"]["uuid"]
    described = description["components"]["schemas"]["Job"]["properties"]["memory"]
    assert described["description"] == "Memory that it uses on each GPU, like 20GiB; others may share the rest."
    assert "HTTPValidationError" not in json.dumps(description)


# Secrets

SECRETS = {"WANDB_API_KEY": "hunter2-of-wandb", "DATABASE": "postgresql://me:hunter2-of-the-database@db/x"}


def with_secrets(site: ApiSite) -> str:
    command = "HF_TOKEN=hunter2-in-the-command python train.py"
    environment = {**SECRETS, "OMP_NUM_THREADS": "value-of-no-secret"}
    notify = ("end:json://hunter2-of-the-job", "done:json://hunter2-of-the-group")
    asked = JobSpec(command=command, directory="/tmp", environment=environment, retries=1, group="g", notify=notify)
    (name,) = site.store.jobs.submit([asked])
    site.store.notices.add_url("json://hunter2-of-the-page", "phone", ["failed"])
    return name


@pytest.mark.parametrize("state", ["queued", "running", "succeeded"])
def test_no_response_contains_a_secret(site: ApiSite, state: str) -> None:
    job = with_secrets(site)
    if state != "queued":
        attempt = start(site.store, job)
        if state == "succeeded":
            assert site.store.attempts.finish(attempt, "succeeded", 0)
    site.look()
    paths = [
        path.format(job=job, number=1, worker="w", machine="m", gpu="0", digest="x", group="g")
        for path, verbs in site.app.openapi()["paths"].items()
        if "get" in verbs
    ]
    assert len(paths) > 10
    for role in ("viewer", "operator"):
        client = site.client(role, role)
        told_all = "".join(client.get(path).text for path in paths)
        # An operator may want to submit the command again as it is.
        assert told_all.replace("hunter2-in-the-command", "" if role == "operator" else "shown").count("hunter2") == 0
        assert "hunter2-in-the-command" not in told_all or role == "operator"
        assert ("value-of-no-secret" in told_all) == (role == "operator")
    assert told(site.client().get(f"{V1}/jobs/{job}"))["environment"]["WANDB_API_KEY"] == "***"


def test_edit_and_clone_keep_masked_secrets(site: ApiSite, client: Client) -> None:
    job = with_secrets(site)
    shown = told(client.get(f"{V1}/jobs/{job}"))["environment"]
    done = told(client.patch(f"{V1}/jobs/{job}", json={"environment": shown | {"OMP_NUM_THREADS": "4"}}))
    assert site.store.jobs.get(job).environment == {**SECRETS, "OMP_NUM_THREADS": "4"}
    undo = done["undo"]
    told(client.patch(undo["path"], json=undo["body"]))
    assert site.store.jobs.get(job).environment == {**SECRETS, "OMP_NUM_THREADS": "value-of-no-secret"}
    (copy,) = told(client.post(f"{V1}/jobs", json={"again": job, "environment": shown}), 201)["jobs"]
    assert site.store.jobs.get(copy["id"]).environment == site.store.jobs.get(job).environment
    # A secret that was replaced is in no answer, so this cannot be taken back by one.
    done = told(client.patch(f"{V1}/jobs/{job}", json={"environment": {"WANDB_API_KEY": "another"}}))
    assert (done["undo"], site.store.jobs.get(job).environment) == (None, {"WANDB_API_KEY": "another"})


def test_mask_without_a_stored_value_is_refused(client: Client) -> None:
    found = mistakes(client.post(f"{V1}/jobs", json=job_body(environment={"HF_TOKEN": "***"})))
    assert "write the value of HF_TOKEN" in found["#/environment"]


def test_hidden_notification_urls_stay_when_a_running_job_or_its_group_is_edited(site: ApiSite, client: Client) -> None:
    job = with_secrets(site)
    before = site.store.jobs.get(job).notify
    start(site.store, job)
    shown = told(client.get(f"{V1}/jobs/{job}"))["notify"]
    assert shown == ["end:json://***", "done:json://***"]
    assert told(site.client("viewer", "v").get(f"{V1}/jobs/{job}"))["notify"] == ["end:***", "done:***"]
    done = told(client.patch(f"{V1}/jobs/{job}", json={"notify": [*shown, "failed"]}))
    assert set(site.store.jobs.get(job).notify) == {*before, "failed"}
    told(client.patch(done["undo"]["path"], json=done["undo"]["body"]))
    assert site.store.jobs.get(job).notify == before
    # A URL that was removed is in no answer.
    assert told(client.patch(f"{V1}/jobs/{job}", json={"notify": shown[1:]}))["undo"] is None
    assert "hidden URL" in mistakes(client.patch(f"{V1}/jobs/{job}", json={"notify": shown}))["#/notify"]
    group = f"{V1}/groups/g"
    done = told(client.patch(group, json={"notify": ["done:json://***", "done"]}))
    assert site.store.groups.get("g").notify == (before[1], "done")
    told(client.patch(done["undo"]["path"], json=done["undo"]["body"]))
    assert told(client.get(group))["notify"] == ["done:json://***"]
    assert "is an event of a job" in mistakes(client.patch(group, json={"notify": ["failed"]}))["#/notify"]
    assert told(client.patch(group, json={}))["changed"] is False
    assert told(client.patch(group, json={"at_most": 3, "notify": []}))["changed"]
    assert (site.store.groups.get("g").at_most, site.store.groups.get("g").notify) == (3, ())


# Many at once


def test_one_action_for_many_jobs_and_one_undo(site: ApiSite, client: Client) -> None:
    store = site.store
    jobs = submit(store, *(f"night-{number}" for number in range(92)), tags=("night",))
    other, held = submit(store, "other", "held")
    store.jobs.hold([held])

    def act(**body: Any) -> Any:
        return told(client.post(f"{V1}/jobs/bulk", json=body))

    def undo(done: Any) -> Any:
        return told(client.request(done["undo"]["method"], done["undo"]["path"], json=done["undo"]["body"]))

    for job in jobs:
        end(store, job)
    rehearsed = act(action="retry", q="state:failed since:1d", dry_run=True)
    assert (rehearsed["changed"], rehearsed["message"], rehearsed["undo"]) == (
        92,
        "92 jobs would be queued again",
        None,
    )
    assert states(store, *jobs[:2]) == ["failed", "failed"]
    done = act(action="retry", q="tag:night")
    assert (done["changed"], set(states(store, *jobs))) == (92, {"queued"})
    assert undo(done)["message"] == "92 jobs cancelled"
    # Of those that waited, held ones are held again.
    done = act(action="cancel", jobs=[other, held, jobs[0], "00000000", "nonsense"])
    assert done["message"] == "2 jobs cancelled, 1 left as they are"
    assert done["unchanged"] == [f"night-0 ({jobs[0]}): it is already cancelled"]
    assert undo(done)["message"] == "1 job queued again, 1 job held again"
    assert states(store, other, held) == ["queued", "held"]
    before = [job.position for job in map(store.jobs.get, (other, held))]
    done = act(action="move", jobs=[held], place="first")
    assert store.jobs.get(held).position < before[0]
    assert undo(done)["changed"] == 1
    assert [job.position for job in map(store.jobs.get, (other, held))] == before
    done = act(action="tag", tag="best", q="night-1")
    assert (done["changed"], len(store.jobs.find(tag="best"))) == (11, 11)
    assert act(action="tag", tag="best", q="night-1")["undo"] is None
    assert (undo(done)["changed"], store.jobs.find(tag="best")) == (11, [])
    done = act(action="hold", q="name:other")
    assert (undo(done)["message"], states(store, other)) == ("1 job released", ["queued"])
    running = submit(store, "running")
    start(store, running[0])
    done = act(action="cancel", jobs=running)
    assert (done["message"], done["undo"]) == ("1 job asked to stop", None)
    assert act(action="hold", q="nothing here")["message"] == "No job was changed: none matches"


@pytest.mark.parametrize(
    "body",
    [
        {"action": "cancel"},
        {"action": "cancel", "q": "x", "jobs": []},
        {"action": "burn", "q": "x"},
        {"action": "tag", "q": "x"},
        {"action": "hold", "q": "x", "tag": "t"},
        {"action": "move", "q": "x"},
        {"action": "hold", "q": "x", "place": "first"},
        {"action": "hold", "held": []},
        {"action": "hold", "q": "colour:red"},
        {"action": "tag", "q": "x", "tag": "a\nb"},
    ],
)
def test_invalid_bulk_action_changes_nothing(site: ApiSite, client: Client, body: Any) -> None:
    (job,) = submit(site.store, "x")
    assert mistakes(client.post(f"{V1}/jobs/bulk", json=body))
    assert site.store.jobs.get(job).state == "queued"


# Who gets messages, and who sees the page


def test_operator_adds_a_url_tests_it_chooses_events_and_removes_it(site: ApiSite, client: Client) -> None:
    with Receiver().listening() as hook:
        url = f"json://127.0.0.1:{hook.port}/hunter2?cto=60&rto=60"
        added = client.post(
            f"{V1}/notifications", json={"url": url, "name": "my phone", "events": ["stopped", "failed"]}
        )
        assert told(added)["message"] == "my phone: gets failed, stopped"
        (one,) = told(client.get(f"{V1}/notifications"))["added"]
        assert (one["name"], one["url"], one["events"]) == ("my phone", "json://***", ["failed", "stopped"])
        assert told(client.post(f"{V1}/notifications/test")) == {
            "message": "A test message was sent",
            "results": [{"url": "json://***", "error": None}],
        }
        assert hook.asked[0].json()["title"] == "Stoker: a test"
    assert "already" in problem(client.post(f"{V1}/notifications", json={"url": url}), 409)["detail"]
    path = f"{V1}/notifications/{one['id']}"
    assert told(client.patch(path, json={"events": ["succeeded"]}))["changed"]
    assert [found.events for found in site.store.notices.urls()] == [("succeeded",)]
    assert told(client.request("DELETE", path))["message"] == "my phone: removed"
    assert site.store.notices.urls() == []
    problem(client.request("DELETE", path), 404)
    assert "add one first" in problem(client.post(f"{V1}/notifications/test"), 409)["detail"]


@pytest.mark.parametrize(
    ("body", "field", "sentence"),
    [
        ({"url": "hunter2"}, "#/url", "this is not a URL"),
        ({"url": "nonsense://hunter2"}, "#/url", "(nonsense://…) is not a URL that apprise understands"),
        ({"url": "json://hunter2", "events": ["fail"]}, "#/events", "there is no event 'fail'"),
        ({"events": []}, "#/url", "required"),
    ],
)
def test_invalid_url_for_messages_is_refused_without_showing_it(
    client: Client, body: dict[str, Any], field: str, sentence: str
) -> None:
    answer = client.post(f"{V1}/notifications", json=body)
    assert sentence in mistakes(answer)[field]
    assert "hunter2" not in answer.text


def test_failed_test_message_says_why_without_the_url(client: Client) -> None:
    with Receiver(Answer(401)).listening() as hook:
        told(client.post(f"{V1}/notifications", json={"url": f"json://127.0.0.1:{hook.port}/hunter2"}))
        answer = told(client.post(f"{V1}/notifications/test"))
    assert answer["message"].startswith("0 of 1 test messages were sent: the message by json:// was not delivered")
    assert "hunter2" not in str(answer)


def test_viewer_links_are_made_shown_and_revoked(site: ApiSite, client: Client) -> None:
    site.keys.remember_address("https://gpu-box:7865")
    made = told(client.post(f"{V1}/tokens", json={"name": "lab screen"}))
    secret = made["link"].removeprefix("https://gpu-box:7865/login#")
    assert (made["role"], made["name"]) == ("viewer", "lab screen")
    assert len(made["qr"]) == len(made["qr"][0]) > 20
    viewer = Client(site.secured, {"Authorization": f"Bearer {secret}"})
    assert told(viewer.get(f"{V1}/session"))["role"] == "viewer"
    assert told(client.post(f"{V1}/tokens/{made['id']}/link"))["link"] == made["link"]
    listed = client.get(f"{V1}/tokens")
    assert {one["name"]: one["role"] for one in told(listed)["items"]} == {"phone": "operator", "lab screen": "viewer"}
    assert secret not in listed.text
    assert told(client.post(f"{V1}/tokens", json={}))["name"] == "viewer"
    assert "already a token" in mistakes(client.post(f"{V1}/tokens", json={"name": "viewer"}))["#/name"]
    assert told(client.request("DELETE", f"{V1}/tokens/{made['id']}"))["message"].startswith("lab screen: revoked")
    assert viewer.get(f"{V1}/session").status_code == 401


def test_operators_tokens_are_neither_shown_nor_revoked_by_the_page(site: ApiSite, client: Client) -> None:
    (own,) = [token for token in site.keys.tokens() if token.role == "operator"]
    for method, path in (("POST", f"{own.id}/link"), ("DELETE", own.id)):
        answer = client.request(method, f"{V1}/tokens/{path}")
        assert "is an operator" in problem(answer, 409)["detail"]
        assert own.secret not in answer.text
    problem(client.post(f"{V1}/tokens/ffffff/link"), 404)
    assert site.keys.tokens() == (own,)


@pytest.mark.parametrize("path", ["notifications", "tokens"])
def test_viewers_neither_see_nor_change_messages_and_links(site: ApiSite, path: str) -> None:
    viewer = site.client("viewer", "screen")
    problem(viewer.get(f"{V1}/{path}"), 403)
    body = {"url": "json://x"} if path == "notifications" else {"name": "x"}
    problem(viewer.post(f"{V1}/{path}", json=body), 403)
    assert site.store.notices.urls() == []
