"""The page of a job that runs a snapshot of its code, on a phone."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from stoker.queue import JobSpec, init_queue
from stoker.queue.code.packing import pack
from tests.support.browser import screen
from tests.support.code_repository import CodeRepository
from tests.support.page_site import page_site


def test_code_of_a_job_and_what_differs_is_shown_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    code = CodeRepository(tmp_path / "code", {"train.py": "lr = 1\n"})
    code.write({"train.py": "lr = 2\n", "new.py": "print(1)\n"})
    address = str(tmp_path / "queue.db")
    with init_queue(address) as store, pack(str(code.path), 2**20) as packed:
        asked = JobSpec(command="python train.py", directory=str(code.path), snapshot=True, code=packed.code)
        (job,) = store.jobs.submit([asked], packed.blobs)
    with page_site("serve", "--port", "0", "--queue", address) as site, screen(browser, "phone") as shown:
        page = shown.page
        page.goto(f"{site.address}/login#{site.token}")
        expect(page.locator("#section-health")).to_be_visible()
        page.goto(f"{site.address}/jobs/{job}")
        fact = page.locator(".job-spec").get_by_text("2 files, 16 B; 1 changed, 1 untracked")
        expect(fact).to_be_visible()
        fact.scroll_into_view_if_needed()
        shown.look_over("code-1-job")
        page.get_by_role("link", name="What differs").click()
        expect(page.get_by_text("+lr = 2")).to_be_visible()
        expect(page.get_by_text("untracked: new.py")).to_be_visible()
