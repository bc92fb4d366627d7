"""Every view of any report in a browser: drawn, without a request or an error, by keyboard, too.

    pytest tests/web --report FILE [--report FILE]

drives given files; without it, a small report, a pipeline, stages that branch, and two plans.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="the browser is driven by playwright")
from playwright.sync_api import Browser

from tests.web.driven import CHROMIUM, SCHEMES, VIEWS, Seen, is_drawn

if CHROMIUM is None:
    pytest.skip("no chromium on this machine", allow_module_level=True)

MOST_BYTES = 5_000_000
# Of each list of choices so many are tried.
MOST_CHOICES = 6


@pytest.fixture
def seen(any_report: Path, browser: Browser) -> Iterator[Seen]:
    found = Seen(browser, any_report)
    yield found
    found.page.close()


@pytest.mark.sample(2)
def test_it_is_one_small_file(
    any_report: Path, seen: Seen, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    size = any_report.stat().st_size
    assert size < MOST_BYTES
    if request.config.getoption("--report"):
        with capsys.disabled():
            print(f"\n{any_report.name}: {size / 1e6:.2f} MB, open in {seen.opened_s:.2f} s")


@pytest.mark.sample(4)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_view_is_drawn_without_a_fault(seen: Seen, scheme: str) -> None:
    seen.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    for view in VIEWS:
        assert seen.page.locator(f"section#{view} h2").count() == 1, view
        assert seen.page.locator(f"header a[href='#{view}']").count() == 1
    charts = seen.page.locator(".chart").all()
    assert len(charts) >= 4
    titles = [chart.locator("xpath=..//details/summary").inner_text() for chart in charts]
    for chart, title in zip(charts, titles, strict=True):
        assert title == f"{chart.get_attribute('aria-label')}: data as a table"
    for width in (1280, 480):
        seen.page.set_viewport_size({"width": width, "height": 900})
        seen.page.wait_for_timeout(300)
        for chart in charts:
            assert is_drawn(chart), chart.get_attribute("aria-label")
    assert seen.faults == []


@pytest.mark.sample(2)
def test_what_a_pointer_is_over_is_told_without_a_fault(seen: Seen) -> None:
    for chart in seen.page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        assert box is not None
        for column in range(1, 12):
            for row in range(1, 8):
                x, y = box["width"] * column / 12, box["height"] * row / 8
                seen.page.mouse.move(box["x"] + x, box["y"] + y)
    assert seen.faults == []


@pytest.mark.sample(2)
def test_every_choice_is_drawn_without_a_fault(seen: Seen) -> None:
    for chosen in seen.page.locator("section select").all():
        chart = chosen.locator("xpath=ancestor::div[contains(@class, 'plan')]").locator(".chart")
        for index in range(min(MOST_CHOICES, chosen.locator("option").count())):
            chosen.select_option(index=index)
            assert is_drawn(chart.first)
    assert seen.faults == []


@pytest.mark.sample(2)
def test_nothing_is_wider_than_the_page(seen: Seen) -> None:
    """Also on a phone: what is wider scrolls in a box of its own."""
    for width in (1280, 480):
        seen.page.set_viewport_size({"width": width, "height": 900})
        seen.page.wait_for_timeout(300)
        wide = seen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width


@pytest.mark.sample(2)
def test_every_chart_has_its_data_as_a_table_by_keyboard(seen: Seen) -> None:
    figures = seen.page.locator("figure").all()
    assert len(figures) == seen.page.locator(".chart").count()
    for figure in figures:
        summary = figure.locator("summary")
        summary.focus()
        seen.page.keyboard.press("Enter")
        assert figure.locator("table tbody tr").count() > 0
        assert figure.locator("table").first.is_visible()


@pytest.mark.sample(2)
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


@pytest.mark.sample(2)
def test_nothing_serious_for_those_who_do_not_see_it(seen: Seen) -> None:
    seen.page.evaluate("document.querySelectorAll('details').forEach(one => (one.open = true))")
    assert seen.serious() == []


def test_without_javascript_there_is_a_summary(browser: Browser, any_report: Path) -> None:
    found = Seen(browser, any_report, javascript=False)
    for title in ("What was decided", "Where the step goes", "Memory at the peak", "Assumed"):
        assert found.page.get_by_text(title).first.is_visible(), title
    assert found.page.locator("figure").count() == 0
    assert found.faults == []
    found.page.close()


@pytest.mark.sample(2)
def test_nothing_serious_in_the_summary(browser: Browser, any_report: Path) -> None:
    """As it stays where the page's program ends: axe-core itself needs JavaScript."""
    found = Seen(browser, any_report, before="delete globalThis.DecompressionStream")
    assert "DecompressionStream" in (found.page.get_by_role("alert").text_content() or "")
    assert found.page.get_by_text("Memory at the peak").first.is_visible()
    assert found.serious() == []
    assert found.faults == []
    found.page.close()
