"""A report whose content is known, in a browser: names, frames, and what is not to happen."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="the browser is driven by playwright")
from playwright.sync_api import Browser

from parloom.comparators.baselines import data_parallel
from parloom.cost.units import format_bytes, format_seconds
from parloom.notebook import Report
from parloom.report.page.html import page
from parloom.report.page.parts import in_parts
from tests.unit.pages import CLUSTER, document_of, side_of
from tests.web.conftest import GRAPH
from tests.web.driven import CHROMIUM, Seen

if CHROMIUM is None:
    pytest.skip("no chromium on this machine", allow_module_level=True)


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


def test_stages_that_branch_say_what_they_read(browser: Browser, folder: Path) -> None:
    seen = Seen(browser, folder / "branches.html")
    rows = seen.page.locator("section#changes tbody tr")
    assert [(row.locator("td").last.text_content()) for row in rows.all()] == [
        *["the batch alone"] * 3,
        "0, 1, 2",
    ]
    assert "busy for 0.0%" not in (seen.page.locator(".topology").text_content() or "")
    key = seen.page.locator("section#step .key li").all_text_contents()
    assert {"forward pass", "backward pass"} <= set(key)
    seen.page.close()


def test_rewrites_say_what_they_save_or_why_they_stay(browser: Browser, folder: Path) -> None:
    seen = Seen(browser, folder / "rewrites.html")
    section = seen.page.locator("section#changes")
    said = "".join(section.locator("p").all_text_contents()).replace("\N{NO-BREAK SPACE}", " ")
    assert "Against the plan without it: 184 us less a step, 1.5 MiB more at the peak." in said
    assert "It cannot be undone alone: stage 0 has no items" in said
    table = section.locator("table", has_text="at its peak")
    assert table.locator("tbody tr").count() == 2
    assert section.locator("pre").count() == 2
    assert "null" not in (section.text_content() or "")
    assert seen.faults == []
    assert seen.serious() == []
    seen.page.close()


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return document_of(side_of(GRAPH, next(data_parallel(GRAPH, CLUSTER))))


def test_numbers_are_as_on_the_command_line(
    small: dict[str, Any], browser: Browser, tmp_path: Path
) -> None:
    """To the last digit, of numbers in the middle between two, too."""
    document = deepcopy(small)
    sizes = [24832, 2688, 41216, 0, 1023, 999 << 20, 3 << 30, 2560, 104857, 102.5 * 2**10]
    times = [24.25e-6, 2.5e-3, 0.125, 9.996e-4, 123.5e-6, 124.5e-6, 0.841e-12, 1e-10, 99.96, 1.0]
    document["plans"][0]["alternatives"] = [
        {"name": "a", "step_s": s, "peak_bytes": int(b), "fits": True, "is_plan": False}
        for s, b in zip(times, sizes, strict=True)
    ]
    path = tmp_path / "numbers.html"
    path.write_text(page(document), encoding="utf-8")
    seen = Seen(browser, path)
    table = seen.page.locator("section#why table", has_text="Other plans")
    rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    cells = [[text.replace("\N{NO-BREAK SPACE}", " ") for text in row] for row in rows]
    assert [own[0] for own in cells] == [format_seconds(s) for s in times]
    assert [own[2] for own in cells] == [format_bytes(int(b)) for b in sizes]
    assert seen.faults == []
    seen.page.close()


def test_long_numbers_stay_in_their_boxes_on_a_phone(
    small: dict[str, Any], browser: Browser, tmp_path: Path
) -> None:
    document = deepcopy(small)
    document["plans"][0]["summary"] |= {"price_per_step": 1.234e-10, "price_per_hour": 1.0}
    path = tmp_path / "phone.html"
    path.write_text(page(document), encoding="utf-8")
    seen = Seen(browser, path)
    for width in (1280, 480, 420, 360):
        seen.page.set_viewport_size({"width": width, "height": 900})
        outside = (
            "() => [...document.querySelectorAll('.fact strong, .fact span')].filter("
            "own => own.scrollWidth > own.clientWidth && own.clientWidth).length"
        )
        assert seen.page.evaluate(outside) == 0
        wide = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        seen.page.wait_for_function(f"() => ({wide})() <= 0", timeout=5000)  # charts follow late
    seen.page.close()


def test_thousands_of_operators_open_at_once(
    small: dict[str, Any], browser: Browser, tmp_path: Path
) -> None:
    """In parts; an operator that is selected is shown in its own."""
    document = deepcopy(small)
    plan = document["plans"][0]
    main = plan["graph"]["functions"][0]
    nodes = [dict(main["nodes"][0], key=f":add#{i}", module=f"layers.{i}") for i in range(3000)]
    edges = [[i, j] for i in range(3000) for j in (i + 1, i + 3) if j < 3000]
    plan["graph"]["functions"] = in_parts(main | {"nodes": nodes, "edges": edges})
    plan["cards"]["main|:add#900"] = next(iter(plan["cards"].values()))
    path = tmp_path / "large.html"
    path.write_text(page(document), encoding="utf-8")
    seen = Seen(browser, path)
    assert seen.opened_s < 60  # in one piece it takes minutes
    section = seen.page.locator("section#model")
    left = sum(len(own["nodes"]) for own in plan["graph"]["functions"]) - 1000
    assert f"{left} others take less" in (section.locator("caption").first.text_content() or "")
    seen.page.evaluate("document.querySelectorAll('details').forEach(own => { own.open = true; })")
    section.get_by_role("button", name=":add#900", exact=True).click()
    assert seen.page.locator("aside.card").is_visible()
    block = section.get_by_label("block")
    assert block.locator("option").count() == len(plan["graph"]["functions"])
    shown = plan["graph"]["functions"][int(block.input_value())]
    assert ":add#900" in [node["key"] for node in shown["nodes"]]
    assert seen.faults == []
    seen.page.close()


def test_a_planted_request_is_blocked(browser: Browser, folder: Path, tmp_path: Path) -> None:
    """The policy of the page holds: neither another script nor a request of the page's own runs."""
    text = (folder / "one.html").read_text(encoding="utf-8")
    planted = "<script>document.title='planted'; fetch('https://example.org/')</script></body>"
    path = tmp_path / "planted.html"
    path.write_text(text.replace("</body>", planted), encoding="utf-8")
    found = Seen(browser, path)
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
