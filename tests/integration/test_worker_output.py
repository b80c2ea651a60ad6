"""What a worker keeps of what its jobs print: in a file per attempt, and the end of it in the queue."""

import pytest

from stoker.runs.record import Record
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

KIB = 1024


def kept(site: WorkSite, job: str) -> str:
    """What the queue has of its last attempt."""
    return site.store.logs.read(site.last_attempt(job).id)


def test_both_streams_are_stored_in_order_with_final_progress_bars(site: WorkSite) -> None:
    job = site.submit(r"printf 'begin\n'; printf ' 1%%\r 50%%\r100%%\n' >&2; printf 'end\n'")
    site.work_until_empty()
    assert site.output(job).read_text() == "begin\n100%\nend\n"
    assert kept(site, job) == "begin\n100%\nend\n"
    assert site.stoker("logs", job).out == "begin\n100%\nend\n"


def test_log_size_is_limited(site: WorkSite) -> None:
    job = site.submit("seq 1 100000")
    site.work_until_empty("--log-limit", "40KiB")
    newer = site.output(job)
    older = newer.with_name("output.1")
    assert newer.stat().st_size + older.stat().st_size <= 40 * KIB
    assert newer.read_text().endswith("99999\n100000\n")
    numbers = (older.read_text() + newer.read_text()).split()
    assert numbers == [str(number) for number in range(int(numbers[0]), 100001)]
    assert kept(site, job).endswith("99999\n100000\n")
    assert len(kept(site, job)) <= 40 * KIB


def test_queue_has_the_log_tail_while_the_job_runs(site: WorkSite) -> None:
    job = site.submit(f"echo so far; {site.until('flag')}; echo the rest")
    site.work()
    site.wait_until(job, "running")
    wait_for(lambda: kept(site, job) == "so far\n", named="the output in the queue")
    site.create_flag("flag")
    site.wait_until(job, "succeeded")
    wait_for(lambda: kept(site, job) == "so far\nthe rest\n", named="the rest of it")


def test_link_in_the_output_is_stored(site: WorkSite) -> None:
    wandb = "https://wandb.ai/team/project/runs/abc123"
    first = site.submit(f"echo 'wandb: ⭐ View project at https://wandb.ai/team/project'; echo 'wandb: 🚀 at {wandb}'")
    other = site.submit("echo 'View run: http://tracker.local/run/7'; echo 'View run: http://tracker.local/run/8'")
    none = site.submit("echo https://example.org/")
    site.work_until_empty()
    assert [site.job(job).link for job in (first, other, none)] == [wandb, "http://tracker.local/run/7", ""]
    assert wandb in site.stoker("show", first).out


def test_output_of_a_python_job_is_not_buffered(site: WorkSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    job = site.submit(("python3", "-c", "import time; print('begun'); time.sleep(600)"))
    site.work()
    wait_for(
        lambda: site.output(job).exists() and site.output(job).read_text() == "begun\n",
        named="what it printed",
    )
    assert site.job(job).state == "running"


def test_invalid_utf8_is_stored(site: WorkSite) -> None:
    job = site.submit(r"printf 'a\377\0b\n'")
    site.work_until_empty()
    assert site.output(job).read_bytes() == b"a\xff\0b\n"
    assert kept(site, job).startswith("a\ufffd")
    assert site.job(job).state == "succeeded"


def test_each_attempt_has_a_separate_log(site: WorkSite) -> None:
    job = site.submit("echo $STOKER_ATTEMPT; [ $STOKER_ATTEMPT = 2 ]", retries=1, backoff=0.0)
    site.work_until_empty()
    assert site.stoker("logs", job).out == "2\n"
    assert site.stoker("logs", job, "--attempt", "1").out == "1\n"


def test_logs_follow_a_job_to_its_end(site: WorkSite) -> None:
    site.work()
    job = site.submit("echo one; sleep 0.5; echo two")
    assert site.stoker("logs", "-f", job).out == "one\ntwo\n"


def test_steps_in_the_log_of_a_job_are_in_its_record(site: WorkSite) -> None:
    job = site.submit(
        "for n in $(seq 3000); do echo step $n; [ -e flag ] && exit; sleep 0.05; done", gpus=1, policy={"every": 0.1}
    )
    site.work()
    site.wait_until(job, "running")
    record = Record(site.output(job).parent)
    wait_for(lambda: (found := record.status().progress) is not None and found.trust == "log", named="steps")
    site.create_flag("flag")
    site.wait_until(job, "succeeded")
