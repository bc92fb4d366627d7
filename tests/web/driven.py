"""A report that is open in Debian's Chromium, with all that goes wrong on it."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# No sandbox for root; no requests of its own; containers may have little shared memory and no GPU.
FLAGS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-sync",
    "--no-first-run",
]
VIEWS = ("decided", "model", "devices", "step", "memory", "traffic", "why")
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
# Whether a canvas has points of some color.
DRAWN = """element => {
    const canvas = element.querySelector('canvas');
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    return data.some(value => value > 0);
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium; RuntimeError where it is not installed."""
    if CHROMIUM is None:
        raise RuntimeError("no chromium on PATH. Try: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Seen:
    """An open report; `opened_s` is what it took until all of its charts were drawn.

    `before` runs before the page's own program.
    """

    def __init__(
        self, browser: Browser, path: Path, *, javascript: bool = True, before: str = ""
    ) -> None:
        self.page: Page = browser.new_page(java_script_enabled=javascript)
        self.page.add_init_script(before or "{}")
        self.faults: list[str] = []
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._requested)
        begun = time.monotonic()
        self.page.goto(path.as_uri())
        if javascript and not before:
            self.page.locator("figure canvas, iframe").last.wait_for()
        self.opened_s = time.monotonic() - begun

    def _requested(self, request: object) -> None:
        url = str(getattr(request, "url", ""))
        if not url.startswith("file:"):
            self.faults.append(f"request {url}")

    def serious(self) -> list[tuple[str, str, str]]:
        """What axe-core finds of serious faults, in both color schemes: which, where, in which."""
        found: list[tuple[str, str, str]] = []
        for scheme in SCHEMES:
            self.page.emulate_media(color_scheme=scheme)
            for fault in Axe().run(self.page).response["violations"]:
                if fault["impact"] in {"serious", "critical"}:
                    found.append((fault["id"], fault["nodes"][0]["html"], scheme))
        return found


def is_drawn(chart: Locator) -> bool:
    return bool(chart.evaluate(DRAWN))
