"""Every view of a report in a browser: drawn, without a request or an error, by keyboard, too."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

pytest.importorskip("playwright", reason="the browser is driven by playwright")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from parloom.comparators.baselines import data_parallel, fsdp, megatron
from parloom.notebook import Report
from parloom.report.page.html import page
from parloom.report.page.sides import Side
from tests.dist.test_explain_pipelines import case_of as pipeline_of
from tests.unit.explained import case_of
from tests.unit.graphs import stack
from tests.unit.pages import CLUSTER, document_of, side_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no chromium on this machine", allow_module_level=True)

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

GRAPH = stack(3)
ROW = {"cluster": "C", "name": "p", "peak_bytes": 2**30, "mfu": 0.4, "reason": None}
FRONT = {
    "work": {"unit": "token"},
    "prices": [
        {"device": "d", "price_per_hour": 2.1, "price_source": "given", "price_date": "today"}
    ],
    "rows": [
        ROW
        | {"devices": f"{n} of C", "num_devices": n, "step_s": 1 / n, "pareto": n != 2}
        | {"cost": {"usd": 9.0 + n, "days": 8 / n, "usd_per_step": 1e-6 * n}}
        for n in (1, 2, 4)
    ],
}
REPORTS = ("one", "pipeline", "two")
VIEWS = ("decided", "model", "devices", "step", "memory", "traffic", "why")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of a plan of one stage, of a pipeline, and of two plans."""
    found = tmp_path_factory.mktemp("reports")
    (data,), (zero,) = data_parallel(GRAPH, CLUSTER), fsdp(GRAPH, CLUSTER)
    tensor = next(p for p in megatron(GRAPH, CLUSTER) if p.mesh["tensor"].size == 4)
    others = {"fsdp": case_of(GRAPH, CLUSTER, zero, "fsdp")}
    pipeline = pipeline_of("dlrm", seed=3)
    sides = {
        "one": [replace(side_of(GRAPH, tensor, others), front=FRONT)],
        "pipeline": [Side("pipeline.json", pipeline, lambda *_: pipeline.timeline, {})],
        "two": [side_of(GRAPH, tensor), side_of(GRAPH, data, path="other.json")],
    }
    for name, own in sides.items():
        (found / f"{name}.html").write_text(page(document_of(*own)), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    """A browser that starts when the reports are written: what plans them may fork."""
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


class Seen:
    """An open report, with all that went wrong on it."""

    def __init__(self, browser: Browser, path: Path, **context: object) -> None:
        self.page: Page = browser.new_page(**context)  # type: ignore[arg-type]
        self.faults: list[str] = []
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._requested)
        self.page.goto(path.as_uri())

    def _requested(self, request: object) -> None:
        url = str(getattr(request, "url", ""))
        if not url.startswith("file:"):
            self.faults.append(f"request {url}")


@pytest.fixture(params=REPORTS)
def seen(request: pytest.FixtureRequest, browser: Browser, folder: Path) -> Iterator[Seen]:
    found = Seen(browser, folder / f"{request.param}.html")
    found.page.wait_for_selector("figure canvas")
    yield found
    found.page.close()


def test_every_view_is_drawn_without_a_fault(seen: Seen) -> None:
    for view in VIEWS:
        assert seen.page.locator(f"section#{view} h2").count() == 1, view
        assert seen.page.locator(f"header a[href='#{view}']").count() == 1
    charts = seen.page.locator(".chart").all()
    assert len(charts) >= 4
    for chart in charts:
        assert _is_drawn(chart), chart.get_attribute("aria-label")
    seen.page.set_viewport_size({"width": 700, "height": 900})
    seen.page.emulate_media(color_scheme="dark")
    seen.page.wait_for_timeout(300)
    assert seen.faults == []


def _is_drawn(chart: object) -> bool:
    """Whether a canvas has points of some color."""
    script = """element => {
        const canvas = element.querySelector('canvas');
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return data.some(value => value > 0);
    }"""
    return bool(chart.evaluate(script))  # type: ignore[attr-defined]


def test_every_chart_has_its_data_as_a_table_by_keyboard(seen: Seen) -> None:
    for figure in seen.page.locator("figure").all():
        summary = figure.locator("summary")
        summary.focus()
        seen.page.keyboard.press("Enter")
        assert figure.locator("table tbody tr").count() > 0
        assert figure.locator("table").first.is_visible()


def test_a_card_opens_and_closes_by_keyboard(seen: Seen) -> None:
    seen.page.locator("section#model figure summary").first.focus()
    seen.page.keyboard.press("Enter")
    name = seen.page.locator("section#model button.link").first
    name.focus()
    seen.page.keyboard.press("Enter")
    card = seen.page.locator("aside.card")
    assert card.is_visible()
    assert (name.text_content() or "") in (card.locator("h2").text_content() or "")
    assert card.get_by_text("What one call costs").count() == 1
    seen.page.keyboard.press("Escape")
    assert not card.is_visible()
    assert seen.faults == []


def test_a_parameter_is_found_by_a_part_of_its_name(browser: Browser, folder: Path) -> None:
    seen = Seen(browser, folder / "one.html")
    finder = seen.page.get_by_role("searchbox").first
    finder.fill("head.w")
    found = seen.page.locator(".found button")
    assert found.all_text_contents() == ["head.weight"]
    found.first.focus()
    seen.page.keyboard.press("Enter")
    card = seen.page.locator("aside.card")
    assert card.locator("h2").text_content() == "head.weight"
    assert card.get_by_text("How it is stored, and how much of it on each device").count() == 1
    finder.fill("no such name")
    assert "no operator or parameter" in (seen.page.locator(".found").text_content() or "")
    assert seen.faults == []
    seen.page.close()


def test_nothing_serious_for_those_who_do_not_see_it(seen: Seen) -> None:
    seen.page.evaluate("document.querySelectorAll('details').forEach(one => (one.open = true))")
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        seen.page.emulate_media(color_scheme=scheme)
        found = Axe().run(seen.page).response["violations"]
        serious = [v for v in found if v["impact"] in ("serious", "critical")]
        assert [(v["id"], v["nodes"][0]["html"]) for v in serious] == []


def test_a_planted_request_is_blocked(browser: Browser, folder: Path, tmp_path: Path) -> None:
    """The policy of the page holds: neither another script nor a request of the page's own runs."""
    text = (folder / "one.html").read_text(encoding="utf-8")
    planted = "<script>document.title='planted'; fetch('https://example.org/')</script></body>"
    path = tmp_path / "planted.html"
    path.write_text(text.replace("</body>", planted), encoding="utf-8")
    found = Seen(browser, path)
    found.page.wait_for_selector("figure canvas")
    assert found.page.title() != "planted"
    blocked = "() => fetch('https://example.org/').then(() => 'sent', () => 'blocked')"
    assert found.page.evaluate(blocked) == "blocked"
    assert any("Content Security Policy" in fault for fault in found.faults)
    found.page.close()


def test_in_a_notebook_it_is_drawn_in_a_frame(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    """Sandboxed, as the text of a frame of another page, without a request or an error."""
    document = document_of(side_of(GRAPH, next(data_parallel(GRAPH, CLUSTER))))
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html>{Report(document)._repr_html_()}", encoding="utf-8")
    found = Seen(browser, path)
    frame = found.page.frame_locator("iframe")
    frame.locator("figure canvas").first.wait_for()
    assert found.faults == []
    found.page.close()


@pytest.mark.parametrize("name", REPORTS)
def test_without_javascript_there_is_a_summary(browser: Browser, folder: Path, name: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    shown = context.new_page()
    shown.goto((folder / f"{name}.html").as_uri())
    assert shown.get_by_text("What was decided").first.is_visible()
    assert shown.get_by_text("Memory at the peak").first.is_visible()
    context.close()


def test_a_browser_that_cannot_unpack_says_so(browser: Browser, folder: Path) -> None:
    shown = browser.new_page()
    shown.add_init_script("delete globalThis.DecompressionStream")
    shown.goto((folder / "one.html").as_uri())
    fault = shown.get_by_role("alert")
    fault.wait_for()
    assert "DecompressionStream" in (fault.text_content() or "")
    assert shown.get_by_text("Memory at the peak").first.is_visible()
    shown.close()
