"""A real Chromium at the size of a phone or a desk, and what every screen must be: quiet, fitting, tappable."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, expect, sync_playwright

from tests.support.deep import DEEP

ROOT: Final = Path(__file__).parents[2]
# Of `make test DEEP=1`, kept after the run to be looked at; never committed.
SCREENSHOTS: Final = ROOT / ".cache" / "screenshots"
CHROMIUM: Final = "/usr/bin/chromium"
ARGUMENTS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES: Final = {"phone": (390, 844), "desk": (1440, 900)}
# Milliseconds, also on a machine that is busy: of all that the browser is asked to do or expected to show.
PATIENCE: Final = 60_000
# What fingers hit: the recommendation of the platforms.
SMALLEST_TARGET: Final = 44
USUAL_LETTERS: Final = 16
# What makes the page scroll sideways, or is cut off at its edge; what scrolls by itself may hold more.
_TOO_WIDE: Final = """
() => {
  const root = document.documentElement, found = [];
  const cut = one => {  // what ends in an ellipsis inside the screen
    const box = one.parentElement?.closest('.last-line');
    return box && box.getBoundingClientRect().right <= root.clientWidth + 1;
  };
  if (root.scrollWidth > root.clientWidth) found.push(`the page: ${root.scrollWidth} px`);
  for (const one of document.querySelectorAll('main *, header *')) {
    if (!one.checkVisibility() || one.closest('.chips, .log-screen, .unseen, .fit-table, pre') || cut(one)) continue;
    const right = Math.round(one.getBoundingClientRect().right);
    if (right > root.clientWidth + 1) found.push(`${one.outerHTML.slice(0, 100)}: ${right} px`);
  }
  for (const one of document.querySelectorAll('button, .button, summary, .chips a')) {
    if (!one.checkVisibility() || !one.textContent.trim() || one.closest('.filter')) continue;
    if (one.scrollHeight > one.clientHeight + 1) found.push(`letters outside ${one.outerHTML.slice(0, 100)}`);
  }
  return found.slice(0, 5);
}
"""
_AXE: Final = "axe_playwright_python", "axe.min.js"
# Of what can be pressed and is seen: how far from its middle a finger still hits it, or the label that belongs to it.
# What it covers may be larger than its letters.
_SMALL_TARGETS: Final = """
(least) => {
  const reach = (one, x, y) => {
    let far = 0;
    for (let step = 1; step <= least / 2; step += 1) {
      const hit = document.elementFromPoint(one.x + x * step, one.y + y * step);
      if (!hit || !(one.parts.some(part => part.contains(hit) || hit.contains(part) && hit.matches('label')))) break;
      far = step;
    }
    return far;
  };
  const small = [], modal = document.querySelector('dialog:modal');
  const pressed = 'a[href], button, input:not([type=hidden]), select, textarea, summary';
  for (const what of (modal ?? document).querySelectorAll(pressed)) {
    if (!what.checkVisibility({visibilityProperty: true, opacityProperty: true}) || what.closest('[inert]')) continue;
    what.scrollIntoView({block: 'center', behavior: 'instant'});
    const box = (what.labels?.[0]?.contains(what) ? what.labels[0] : what).getClientRects()[0];
    if (!box || box.width <= 1 || what.matches('p a, .prose a')) continue;
    const one = {x: box.x + box.width / 2, y: box.y + box.height / 2, parts: [what, ...(what.labels ?? [])]};
    const width = Math.max(box.width, reach(one, 1, 0) + reach(one, -1, 0));
    const height = Math.max(box.height, reach(one, 0, 1) + reach(one, 0, -1));
    if (width < least - 1 || height < least - 1) small.push({what: what.outerHTML.slice(0, 120), width, height});
  }
  window.scrollTo(0, 0);
  return small;
}
"""


class Screen:
    """One browser window, with everything that it complained of."""

    def __init__(self, page: Page, size: str) -> None:
        self.page = page
        self.size = size
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        """Requests that went to another machine: there must be none."""
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", self._refuse)

    def watch_requests(self, address: str) -> None:
        self.page.on(
            "request",
            lambda request: None if request.url.startswith((address, "data:")) else self.elsewhere.append(request.url),
        )

    def _refuse(self, dialog: Dialog) -> None:
        """The page asks by its own means: this is somebody's script."""
        self.complaints.append(f"{dialog.type}: {dialog.message}")
        dialog.dismiss()

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def forgive(self, part: str) -> None:
        """What the browser noted of an answer that was meant to be no success."""
        self.complaints = [complaint for complaint in self.complaints if part not in complaint]

    def look_over(self, name: str) -> None:
        """Checks what every screen must be."""
        self.page.wait_for_function("() => document.documentElement !== null && document.readyState === 'complete'")
        self._keep_picture(name)
        assert self.complaints == [], f"{name}: {self.complaints}"
        assert self.elsewhere == [], f"{name}: {self.elsewhere}"
        width = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert width <= 0, f"{name} is {width} px wider than the screen"
        self._enlarge(name)
        if self.size == "phone":
            small = self.page.evaluate(_SMALL_TARGETS, SMALLEST_TARGET)
            assert small == [], f"{name} has targets that are too small: {small}"
        violations = self.accessibility()
        assert violations == [], f"{name}: {violations}"

    def _keep_picture(self, name: str) -> None:
        """Not in every run: without a GPU it takes the browser longer than all the rest of a screen."""
        if DEEP:
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=SCREENSHOTS / f"{self.size}-{name}.png")

    def _enlarge(self, name: str) -> None:
        """With letters twice as large as usual, as a reader may set it in the browser, everything still fits."""
        # A menu that was just opened chooses its direction by the letters of now.
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        session = self.page.context.new_cdp_session(self.page)
        try:
            session.send("Page.setFontSizes", {"fontSizes": {"standard": 2 * USUAL_LETTERS, "fixed": 26}})
            self.page.wait_for_function(
                "size => getComputedStyle(document.documentElement).fontSize === size", arg=f"{2 * USUAL_LETTERS}px"
            )
            self._keep_picture(f"{name}-large")
            wide = self.page.evaluate(_TOO_WIDE)
            assert wide == [], f"{name} with large letters does not fit: {wide}"
        finally:
            session.send("Page.setFontSizes", {"fontSizes": {"standard": USUAL_LETTERS, "fixed": 13}})
            session.detach()

    def accessibility(self) -> list[str]:
        """What axe-core finds wrong, once animations are over: a colour that fades in has little contrast."""
        self.page.evaluate("Promise.all(document.getAnimations().map((one) => one.finished.catch(() => null)))")
        self.page.evaluate(resources.files(_AXE[0]).joinpath(_AXE[1]).read_text(encoding="utf-8"))
        found: dict[str, Any] = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']}: {one['help']} ({one['nodes'][0]['html'][:160]}: {one['nodes'][0]['failureSummary'][:300]})"
            for one in found["violations"]
        ]


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS], timeout=2 * PATIENCE)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def screen(browser: Browser, size: str, **options: Any) -> Iterator[Screen]:
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, has_touch=size == "phone", is_mobile=size == "phone", **options
    )
    context.set_default_timeout(PATIENCE)
    try:
        yield Screen(context.new_page(), size)
    finally:
        context.close()
