"""Screens as static HTML: escaped, without script or style, with all that the terminal shows."""

import re
from html.parser import HTMLParser

import pytest
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from parloom.comparators.baselines import fsdp, megatron
from parloom.cost.clusters import load_cluster
from parloom.report.bars import bars
from parloom.report.clusters import cluster_screen
from parloom.report.explain import plan_explained
from parloom.report.explain_screen import plan_explained_screen
from parloom.report.grid import mesh_grid
from parloom.report.output import rendered
from parloom.report.sharding import drawings, sharding_screen
from parloom.report.static_html import static_html
from parloom.report.versus import versus, versus_screen
from tests.unit.explained import case_of
from tests.unit.graphs import stack
from tests.unit.pages import CLUSTER

# What GitHub keeps of a notebook's outputs.
KEPT = {"div", "p", "strong", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"}


class Tags(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_names_are_escaped() -> None:
    table = Table()
    table.add_column("<b>")
    table.add_row("<script>alert(1)</script>")
    found = Tags(static_html(Group(Text("a <i> & b"), table, *_lists())))
    assert set(found.tags) <= KEPT
    assert {"a <i> & b", "<b>", "<script>alert(1)</script>"} <= set(found.texts)


def test_lines_that_belong_together_are_one_list() -> None:
    found = Tags(static_html(Group(*_lists())))
    assert (found.tags.count("ul"), found.tags.count("li")) == (2, 3)


def test_bars_and_numbers() -> None:
    text = static_html(bars([("weights", 0.5, "1 GiB"), ("buffers", 0.0, "0 B")], 32))
    assert "█" * 12 in text
    assert "█" * 13 not in text
    assert text.count('align="right"') == 2


def test_what_is_neither_line_nor_table_is_refused() -> None:
    with pytest.raises(TypeError, match="no Panel"):
        static_html(Panel("text"))


def screens() -> dict[str, RenderableType]:
    graph = stack(3)
    zero = case_of(graph, CLUSTER, next(fsdp(graph, CLUSTER)), "fsdp")
    tensor = next(p for p in megatron(graph, CLUSTER) if p.mesh["tensor"].size == 4)
    case = case_of(graph, CLUSTER, tensor, "megatron")
    return {
        "cluster": cluster_screen(load_cluster("2x8xH100"), ("a guess",)),
        "explained": plan_explained_screen(plan_explained(case), mesh_grid(case.mesh), (), "PLAN"),
        "versus": versus_screen(versus(case, zero, "fsdp")),
        "sharding": sharding_screen(drawings(case, "head")),
    }


SCREENS = screens()


@pytest.mark.parametrize("name", SCREENS)
def test_every_word_of_a_screen_is_there(name: str) -> None:
    screen = SCREENS[name]
    found = Tags(static_html(screen))
    assert set(found.tags) <= KEPT
    assert set(found.attributes) <= {"scope", "align"}
    words = set(re.findall(r"[\w.%]+", rendered(screen, 500)))
    assert words <= set(re.findall(r"[\w.%]+", " ".join(found.texts)))


def _lists() -> list[Text]:
    return [Text("  one"), Text("  two"), Text(""), Text("between"), Text("  three")]
