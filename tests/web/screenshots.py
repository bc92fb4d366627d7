"""Pictures of a report for the documentation: `make screenshots` writes docs/assets/report-*.png.

Look at each before it is committed. Colors are reduced to a palette: together they are small.
"""

import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page

from tests.web.driven import Seen, chromium

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
COLORS, WIDTH = 255, 1060
Scheme = Literal["light", "dark"]
Shoot = Callable[[Page], bytes]
# Plans whose pages are shown: one of all devices, and one whose stages branch.
PLANS = {
    "gpt": "zoo:gpt --cluster 2x4xH100 --devices 8 --batch 64",
    "mmt": "zoo:mmt --cluster 1x4xV100 --method graphpipe",
}


def view(name: str) -> Shoot:
    return lambda page: page.locator(f"section#{name}").screenshot()


def top(page: Page) -> bytes:
    """What one sees first."""
    page.evaluate("scrollTo(0, 0)")
    return page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": 640})


def card(page: Page) -> bytes:
    """A block of the model with an operator's card beside it."""
    page.set_viewport_size({"width": 1240, "height": 760})
    page.get_by_label("block").select_option(index=1)
    page.get_by_role("searchbox").fill("blocks.0.down")
    page.locator(".found button", has_text="linear").first.click()
    page.locator("section#model").evaluate("element => scrollTo(0, element.offsetTop - 8)")
    return page.screenshot()


SHOTS: tuple[tuple[str, str, Scheme, Shoot], ...] = (
    ("decided", "gpt", "light", top),
    ("operator", "gpt", "dark", card),
    ("traffic", "gpt", "light", view("traffic")),
    ("why", "gpt", "light", view("why")),
    ("step", "mmt", "dark", view("step")),
    ("memory", "mmt", "light", view("memory")),
)


def written(name: str, folder: Path) -> Path:
    """The report of a plan, as the commands make it."""
    plan, page = folder / name, folder / f"{name}.html"
    for words in (f"plan {PLANS[name]} --out {plan}", f"report {plan} --out {page}"):
        subprocess.run([sys.executable, "-m", "parloom", *words.split()], check=True)
    return page


def shoot(browser: Browser, page: Path, scheme: Scheme, take: Shoot) -> Image.Image:
    """A picture in few colors."""
    seen = Seen(browser, page)
    seen.page.set_viewport_size({"width": WIDTH, "height": 900})
    seen.page.emulate_media(color_scheme=scheme)
    seen.page.wait_for_timeout(300)
    taken = Image.open(BytesIO(take(seen.page)))
    assert seen.faults == []
    seen.page.close()
    return taken.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)


def main() -> int:
    """Write all pictures, and say how large they are."""
    ASSETS.mkdir(exist_ok=True)
    with chromium() as browser, TemporaryDirectory() as place:
        pages = {name: written(name, Path(place)) for name in PLANS}
        for name, plan, scheme, take in SHOTS:
            path = ASSETS / f"report-{name}.png"
            shoot(browser, pages[plan], scheme, take).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
