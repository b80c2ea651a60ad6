"""Changing a job that waits, and cloning one, on a phone: in taps."""

from pathlib import Path

from playwright.sync_api import Browser, Locator, expect

from stoker.queue import JobSpec, init_queue
from tests.support.attempts import be_there
from tests.support.browser import screen
from tests.support.page_site import page_site

BY_GPU = "waits for a GPU: GPU 0 is used by alice's python (pid 4242), GPU 1 is held by job 0a1b2c3d"


class Finger:
    """Counts taps."""

    def __init__(self) -> None:
        self.taps = 0

    def tap(self, what: Locator) -> None:
        self.taps += 1
        what.click()


def test_learning_rate_of_a_waiting_job_is_changed_in_four_taps(browser: Browser, tmp_path: Path) -> None:
    address = str(tmp_path / "queue.db")
    asked = JobSpec(
        command="python train.py --epochs 90 --lr 1e-3", name="vit", environment={"API_KEY": "s3cret", "SEED": "1"}
    )
    with init_queue(address) as store:
        (job,) = store.jobs.submit([asked])
        be_there(store, waiting={job: BY_GPU})
        with page_site("serve", "--port", "0", "--queue", address) as site, screen(browser, "phone") as shown:
            page, finger = shown.page, Finger()
            page.goto(f"{site.address}/login#{site.token}")
            waiting = page.locator("#section-waiting")
            expect(waiting.get_by_text("Waits for a GPU on gpu-box")).to_be_visible()
            finger.tap(waiting.get_by_role("link", name="vit", exact=True))
            # GPU by GPU only on request.
            expect(page.get_by_text("alice's python")).not_to_be_visible()
            finger.tap(page.get_by_role("link", name="Edit…"))
            shown.look_over("edit-1-form")
            finger.tap(page.get_by_label("Command"))
            page.keyboard.press("Control+End")
            for _letter in "1e-3":
                page.keyboard.press("Backspace")
            page.keyboard.type("3e-4")
            finger.tap(page.get_by_role("button", name="Save"))
            expect(page.locator(".command-text")).to_have_text("python train.py --epochs 90 --lr 3e-4")
            assert finger.taps <= 4
            assert store.jobs.get(job).command == "python train.py --epochs 90 --lr 3e-4"
            assert store.jobs.get(job).environment == asked.environment
            page.get_by_text("GPU by GPU").click()
            expect(page.get_by_text("alice's python")).to_be_visible()
            shown.look_over("edit-2-job")
            # It starts while somebody edits it.
            page.get_by_role("link", name="Edit…").click()
            page.get_by_label("Command").fill("python other.py")
            assert store.attempts.claim([job], "worker-1", (), 600.0) is not None
            with page.expect_console_message(lambda message: "status of 409" in message.text):
                page.get_by_role("button", name="Save").click()
            expect(page.get_by_role("alert")).to_contain_text("The job has started meanwhile without these changes")
            shown.forgive("status of 409")
            page.get_by_role("link", name="Clone…").click()
            expect(page.get_by_label("Variables")).to_have_value("API_KEY=***\nSEED=1")
            page.get_by_label("Variables").fill("API_KEY=***\nSEED=2")
            page.emulate_media(color_scheme="dark")
            shown.look_over("edit-3-clone")
            page.get_by_role("button", name="Submit").click()
            expect(page.locator("#job-title")).to_have_text("vit")
            clone = next(one for one in store.jobs.find() if one.id != job)
            assert clone.environment == {"API_KEY": "s3cret", "SEED": "2"}
