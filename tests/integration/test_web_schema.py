"""Every operation of the API against its own description: whatever is sent, it keeps to what it says of itself."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from msgspec.structs import replace
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.responses import Response

from stoker.queue import AttemptDetails, JobSpec, Usage, View, WorkerGpu
from stoker.queue.code.archive import CodeSnapshot, Packer
from tests.support.api_site import ApiSite

# Enough that each field meets empty, huge and odd values, and few enough that all of it takes seconds.
EXAMPLES: Final = 10
RUNNING: Final = "00000001"
QUEUED: Final = "00000002"
HELD: Final = "00000003"
FAILED: Final = "00000004"
JOBS: Final = (RUNNING, QUEUED, HELD, FAILED)
# Where nothing listens.
NOBODY: Final = "json://127.0.0.1:9"
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiSite]:
    """With one of everything in it, so that questions are answered with more than that there is none."""
    directory: Path = tmp_path_factory.mktemp("schema")
    with contextlib.closing(ApiSite(directory)) as made:
        furnish(made)
        yield made


def furnish(site: ApiSite) -> None:
    gpu = WorkerGpu(uuid="GPU-0", index=0, name="A100", utilization=0.0, memory_used=1, state="free", since=1.0)
    site.store.workers.heartbeat("box-1", "gpu-box", View(gpus=(gpu,)))
    with Packer() as files, Packer() as changes:
        changes.write(b"\0-lr = 1\n+lr = 2\n")
        blobs = [files.blob(), changes.blob()]
    code = CodeSnapshot(digest=blobs[0].digest, changes=blobs[1].digest, size=1, files=1)
    asked = JobSpec(command="true", policy={"idle": False}, code=code, group="night")
    site.store.jobs.submit([replace(asked, id=name, name=f"job {name}") for name in JOBS], blobs)
    for blob in blobs:
        blob.file.close()
    attempt = site.store.attempts.claim([RUNNING], "box-1", ["GPU-0"], 600.0)
    assert attempt is not None
    site.store.logs.write(attempt.id, "50%|#####     | 5/10 [00:05<00:05]\n")
    site.store.attempts.write_details(
        attempt.id, AttemptDetails(cause="idle", rule="idle", report="# Idle\n", fit={"size": 8})
    )
    minute = int(site.store.clock() // 60)
    site.store.usage.write([Usage(host="gpu-box", gpu="GPU-0", minute=minute, seconds={"free": 1.0})])
    site.look()


def put_right(site: ApiSite) -> None:
    """Whatever was done to the jobs: one runs, one is queued, one is held, and one has failed.

    And the board looks again: after half a minute it would say that the queue does not answer."""
    site.store.jobs.retry(JOBS[1:])
    site.store.jobs.release(JOBS[1:])
    site.store.jobs.hold([HELD])
    attempt = site.store.attempts.claim([FAILED], "box-1", [], 600.0)
    if attempt is not None:
        site.store.attempts.finish(attempt.id, "failed", 1)
    for one in site.store.notices.urls():
        site.store.notices.remove_url(one.id)
    site.store.notices.add_url(NOBODY, "nobody", ["failed"])
    if not any(token.role == "viewer" for token in site.keys.tokens()):
        site.keys.add("screen", "viewer")
    site.look()


def conversations(site: ApiSite, operation: Any) -> set[int]:
    """Sends what the description allows, and what it does not, and holds the answers to it; their statuses."""
    return _talk(site, operation, GenerationMode.POSITIVE) | _talk(site, operation, GenerationMode.NEGATIVE)


def _talk(site: ApiSite, operation: Any, mode: GenerationMode) -> set[int]:
    statuses: set[int] = set()
    put_right(site)

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def talk(case: Any, data: st.DataObject) -> None:
        if mode is GenerationMode.POSITIVE:
            make_it_real(site, case, data)
        answer = case.call_and_validate(headers=site.bearer(), checks=CHECKS)
        statuses.add(answer.status_code)

    talk()
    return statuses


def make_it_real(site: ApiSite, case: Any, data: st.DataObject) -> None:
    """Names something that is there: nobody guesses an id or a directory."""
    operation = case.operation.definition.raw["operationId"]
    # Only an ended job can be retried, and only once.
    jobs = st.just(FAILED) if operation == "retry_job" else st.sampled_from(JOBS)
    if operation == "move_job":
        jobs = st.sampled_from((HELD, RUNNING))
    there = {"job": jobs, "worker": st.just("box-1"), "number": st.just(1), "group": st.just("night")}
    there["url"] = st.sampled_from([*(one.id for one in site.store.notices.urls()), "gone"])
    there["token"] = st.sampled_from([one.id for one in site.keys.tokens()])
    for name, values in there.items():
        if name in (case.path_parameters or {}):
            case.path_parameters[name] = data.draw(values)
    if operation in {"cancel_group", "retry_group", "hold_group", "release_group"}:
        case.body = data.draw(st.sampled_from([{}, {"jobs": None}, {"jobs": [FAILED]}]))
    if operation == "change_jobs":
        bodies = [{"action": "retry", "q": "state:failed"}, {"action": "tag", "tag": "t", "jobs": [QUEUED]}, case.body]
        case.body = data.draw(st.sampled_from(bodies))
    if operation in {"add_url", "change_url"}:
        events = data.draw(st.sampled_from([[], ["failed"], ["fail"]]))
        case.body = {"events": events} | ({"url": f"{NOBODY}/1"} if operation == "add_url" else {})
    if operation == "move_job":
        case.body = data.draw(st.sampled_from([{"place": "up"}, {"before": QUEUED}, {"after": "00000000"}]))
    if operation in {"submit_jobs", "change_job"} and isinstance(case.body, dict):
        # Of forty fields some are always odd: with few of them, some requests are right.
        kept = data.draw(st.sets(st.sampled_from(sorted(case.body) or ["name"]), max_size=2))
        case.body = {name: value for name, value in case.body.items() if name in kept}
    if operation == "submit_jobs":
        case.body = {"directory": "/tmp", "command": "true"} | case.body


def operations(site: ApiSite) -> list[Any]:
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", site.secured, headers=site.bearer())
    loaded = list(schema.get_all_operations())
    assert all(isinstance(found, Ok) for found in loaded)
    return [found.ok() for found in loaded if isinstance(found, Ok)]


def test_every_operation_matches_its_description(site: ApiSite) -> None:
    found = operations(site)
    assert len(found) == 48
    statuses = {operation.definition.raw["operationId"]: conversations(site, operation) for operation in found}
    assert set().union(*statuses.values()) >= {200, 201, 404, 409, 422}
    # Nothing was so odd that it was only ever refused.
    assert [name for name, seen in statuses.items() if not seen & {200, 201}] == []


def crash() -> dict[str, int]:
    return {"number": 1 // 0}


def answer_500() -> Response:
    return Response(status_code=500)


@pytest.mark.parametrize(("handler", "told"), [(crash, ZeroDivisionError), (answer_500, FailureGroup)])
def test_schema_test_detects_a_crash(tmp_path: Path, handler: Callable[[], Any], told: type[BaseException]) -> None:
    with contextlib.closing(ApiSite(tmp_path)) as broken:
        broken.app.add_api_route(
            "/api/v1/broken", handler, operation_id="broken", responses={500: {"description": "Even when described."}}
        )
        (operation,) = [one for one in operations(broken) if one.path == "/api/v1/broken"]
        with pytest.raises(told):
            conversations(broken, operation)
