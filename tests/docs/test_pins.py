"""The page of pins: its command runs, and each pin of its table can be asked of that model."""

import re
from pathlib import Path

import pytest

from parloom import api
from parloom.cost.clusters import load_cluster
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.text import parse_graph
from parloom.search.conflicts import check_pins
from parloom.search.pinned import resolve
from parloom.search.pins import parse_pin
from tests.docs.commands import executed, run
from tests.docs.page import DOCS, blocks_of

PAGE = (DOCS / "reference/pins.md").read_text(encoding="utf-8")
LISTED = re.findall(r"`([^`=\n]+=[^`\n]+)`", PAGE.split("| `NAME=LAYOUT` |")[1].split("\n\n")[0])


def check(graph: Graph, cluster: str, text: str) -> None:
    factored = factorize(graph)
    pinned = resolve([parse_pin(text)], graph, factored)
    check_pins(pinned, factored, load_cluster(cluster))


@pytest.mark.slow
def test_the_command_and_the_table(reader: Path) -> None:
    (block,) = (b for b in blocks_of(PAGE) if b.language == "console")
    short = ["--budget", "100", "--out", "here"]
    assert executed(block.text, lambda words: run([*words, *short])) == block.text
    plan = api.load(Path("here"))
    graph = parse_graph(plan.graph)
    assert len(LISTED) >= 15
    for text in LISTED:
        check(graph, plan.cluster, text)
    for wrong in ("blocks.0.mlp.up=n:y", "head.weight=replicated", "mesh=3x2"):
        with pytest.raises(InputError):
            check(graph, plan.cluster, wrong)
