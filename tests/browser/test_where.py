"""The form's inputs for where and when a job runs, on a phone."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from stoker.queue import init_queue
from stoker.queue.model import View
from tests.support.browser import screen
from tests.support.page_site import page_site

GIB = 2**30
FILLED = {
    "GPU model": "a100 | h100",
    "Memory of the card": "40GiB",
    "Machine": "gpu-box",
    "Labels": "ib, nvme",
    "Not on": "old-box",
    "CPUs": "8",
    "RAM": "64GiB",
    "Begin": "+2h",
    "Every": "0 3 * * * UTC",
    "Retries": "2",
    "Retry on": "exit:75, oom",
    "Time limit": "24h",
}


@pytest.mark.parametrize("scheme", ["dark"])
def test_every_choice_of_place_and_time_is_made_on_a_phone(browser: Browser, tmp_path: Path, scheme: str) -> None:
    address = str(tmp_path / "queue.db")
    with init_queue(address) as store:
        for number, host in enumerate(("gpu-box", "old-box")):
            view = View(labels=("ib", "nvme"), cpus=32, cpus_taken=8, ram=128 * GIB, ram_taken=64 * GIB)
            store.workers.heartbeat(f"w{number}-1", host, view)
        with (
            page_site("serve", "--port", "0", "--queue", address) as site,
            screen(browser, "phone", color_scheme=scheme) as shown,
        ):
            page = shown.page
            page.goto(f"{site.address}/login#{site.token}")
            machines = page.locator("#section-machines")
            expect(machines.get_by_text("ib", exact=True).first).to_be_visible()
            expect(
                machines.get_by_text("8 of 32 CPUs, 64 GiB of 128 GiB of RAM promised to jobs").first
            ).to_be_visible()
            page.goto(f"{site.address}/submit")
            page.get_by_label("Command").fill("python train.py")
            page.get_by_text("More", exact=True).click()
            for label, text in FILLED.items():
                page.get_by_label(label, exact=True).fill(text)
            page.get_by_label("At the time limit, stop it and put it back into the queue").check()
            page.get_by_label("Deadline", exact=True).fill("+1h")
            page.get_by_role("button", name="Submit").click()
            expect(page.get_by_text("The deadline is before the job may begin")).to_be_visible()
            shown.forgive("422")
            page.get_by_label("Deadline", exact=True).fill("")
            page.get_by_label("Every", exact=True).scroll_into_view_if_needed()
            shown.look_over("where-1-form")
            page.get_by_role("button", name="Submit").click()
            facts = page.locator(".job-spec")
            expect(facts.get_by_text("gpu-box, label ib, label nvme, not on old-box")).to_be_visible()
            expect(facts.get_by_text("2 of 2 left, on exit:75, oom")).to_be_visible()
            expect(facts.get_by_text("0 3 * * * UTC")).to_be_visible()
            shown.look_over("where-2-job")
        (job,) = store.jobs.find(("queued",))
        assert (job.gpu_model, job.gpu_memory, job.machine) == ("a100|h100", 40 * GIB, "gpu-box")
        assert (job.labels, job.exclude_machines) == (("ib", "nvme"), ("old-box",))
        assert (job.cpus, job.ram, job.every, job.retry_on) == (8, 64 * GIB, "0 3 * * * UTC", ("exit:75", "oom"))
        assert job.requeue_at_limit
        assert job.begin is not None
        assert 0 < job.begin - store.clock() <= 7201.0, "moments are whole seconds, rounded up"
