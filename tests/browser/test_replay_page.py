"""The page of `stoker replay --html`, in a browser and without a server."""

from pathlib import Path

from playwright.sync_api import Browser

from stoker.cli.tables.replay_page import Timeline, page_of
from stoker.rules.idle import IdlePolicy
from stoker.rules.replay import replay
from stoker.rules.scope import MachineScope
from tests.support.looks import a_look


def test_charts_are_drawn_and_can_be_enlarged(browser: Browser, tmp_path: Path) -> None:
    looks = [
        a_look(0.9 if at < 600 else 0.0, 0.0, at=float(at), wall=float(at), span=60.0) for at in range(0, 3600, 60)
    ]
    timeline = Timeline(190.0)
    policy = IdlePolicy(below=0.1, window=600.0, after=0.0, every=60.0)
    found = replay(timeline.following(looks), [policy], MachineScope("all", {}))
    file = tmp_path / "page.html"
    file.write_text(page_of(found, timeline, "trace"), encoding="utf-8")
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(file.as_uri())
    assert page.locator(".plot canvas").count() == 3
    before = page.locator("canvas").first.evaluate("canvas => canvas.toDataURL()")
    box = page.locator(".u-over").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 20, steps=4)
    page.mouse.up()
    page.wait_for_function(
        "before => document.querySelector('canvas').toDataURL() !== before", arg=before, timeout=10_000
    )
    assert errors == []
    page.close()
