"""The page of a report: its sums, names that are no markup, and the program that was built."""

import base64
import gzip
import hashlib
import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from parloom.choose import Choice
from parloom.comparators.baselines import fsdp, megatron
from parloom.cost.timeline import Slice
from parloom.cost.utilization import model_flops
from parloom.ir.expected import Prediction
from parloom.ir.graph import Graph, Node
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, NodeDecision
from parloom.report.alternatives import alternatives_table
from parloom.report.output import rendered
from parloom.report.page.document import Document
from parloom.report.page.html import ASSETS, page
from parloom.report.page.network import _neighbors, _shifted
from parloom.report.page.parts import MOST_NODES, in_parts
from parloom.report.page.steps import _fewer
from parloom.search.request import ScoredPlan
from tests.unit.explained import case_of
from tests.unit.graphs import perceptron, stack
from tests.unit.pages import CLUSTER, document_of, side_of

GRAPH = stack(3)
WEB = Path(__file__).parents[2] / "web"


def tensor_parallel(graph: Graph = GRAPH) -> Decisions:
    return next(p for p in megatron(graph, CLUSTER) if p.mesh["tensor"].size == 4)


@pytest.fixture(scope="module")
def document() -> Document:
    (other,) = fsdp(GRAPH, CLUSTER)
    others = {"fsdp": case_of(GRAPH, CLUSTER, other, "fsdp")}
    return document_of(side_of(GRAPH, tensor_parallel(), others))


def unpacked(text: str) -> Document:
    """The document of a page, as a browser reads it."""
    (packed,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    found: Document = json.loads(gzip.decompress(base64.b64decode(json.loads(packed)["gzip"])))
    return found


def test_a_page_has_all_of_its_document(document: Document) -> None:
    text = page(document)
    assert unpacked(text) == json.loads(json.dumps(document))
    assert len(text) < 2_000_000


def test_times_add_up(document: Document) -> None:
    (plan,) = document["plans"]
    step_ps = plan["steps"]["step_ps"]
    assert sum(cause["ps"] for cause in plan["causes"]) == step_ps
    (other,) = plan["why_not"]
    assert sum(cause["difference_ps"] for cause in other["causes"]) == other["difference_ps"]
    assert sum(row["difference_bytes"] for row in other["memory"]) == (
        other["versus"]["peak_bytes"] - other["plan"]["peak_bytes"]
    )
    for process in plan["memory"]["processes"]:
        assert sum(process["at_peak"].values()) == process["peak_bytes"]
        together = map(sum, zip(*process["lines"], strict=True))
        assert max(together) == process["peak_bytes"]
    nodes = [(own, node) for own in plan["graph"]["functions"] for node in own["nodes"]]
    flat = sum(n["own_s"] + n["moving_s"] for _, n in nodes if "function" not in n)
    assert flat <= step_ps / 1e12
    alone = [n for own, n in nodes if own["name"] == "main" and "function" not in n]
    for node in alone:
        share = (node["own_s"] + node["moving_s"]) * 1e12 / step_ps
        assert node["share"] == pytest.approx(share)
    for process in plan["steps"]["processes"]:
        for track in process["tracks"]:
            for start, length, name, kind in track["slices"]:
                assert 0 <= start <= start + length <= step_ps
                assert max(name, kind) < len(plan["steps"]["words"])


def test_large_tensors_of_the_peak_are_there(document: Document) -> None:
    """No more of a component than is held then: gradients are not there in forward passes."""
    for plan in (
        *document["plans"],
        *document_of(side_of(GRAPH, next(fsdp(GRAPH, CLUSTER))))["plans"],
    ):
        for process in plan["memory"]["processes"]:
            assert process["largest"]
            for held in process["largest"]:
                assert 0 < held["bytes"] <= process["at_peak"][held["component"]]


def test_one_alternative_is_the_plan() -> None:
    """Of those with its step and its peak the first, which the choice puts there."""
    side = side_of(GRAPH, tensor_parallel())
    found = Prediction(1.0, 8)
    scored = [
        ScoredPlan(side.plan.decisions, replace(found, step_s=step_s), "auto", name)
        for name, step_s in (("auto (x=2)", 1.0), ("other", 2.0), ("auto (x=4)", 1.0))
    ]
    for best in scored:
        chosen = Choice(best, tuple(scored), lambda _: True).recorded(side.plan)
        assert chosen.name == best.name
        assert sorted(other.name for other in chosen.alternatives) == sorted(s.name for s in scored)
        text = rendered(alternatives_table(chosen), 100)
        (row,) = [line for line in text.split("\n") if "this plan" in line]
        assert best.name in row


def test_every_operator_has_a_card(document: Document) -> None:
    (plan,) = document["plans"]
    wanted = {
        f"{own['name']}|{node['key']}"
        for own in plan["graph"]["functions"]
        for node in own["nodes"]
        if "function" not in node
    }
    cards = {id: card for id, card in plan["cards"].items() if card["kind"] == "operator"}
    assert wanted <= cards.keys()
    assert any(card["runners_up"] for card in cards.values())
    names = [name for card in cards.values() for name in card["alike"]]
    assert sorted(names) == sorted(flat.key for flat in GRAPH.flat())
    took = {f"{own['name']}|{node['key']}": node["own_s"] + node["moving_s"]
            for own in plan["graph"]["functions"] for node in own["nodes"]}  # fmt: skip
    for id in wanted:
        place, key = id.split("|")
        alike = [c["alike_s"] for i, c in cards.items() if i.startswith(f"{place}|")
                 and all(name.endswith(key) for name in c["alike"])]  # fmt: skip
        assert sum(alike) >= took[id] * (1 - 1e-9)


def test_calls_that_are_split_otherwise_have_a_card_of_their_own() -> None:
    plan = tensor_parallel()
    whole = NodeDecision("blocks.2.up:linear#0", (("d0", ("data",)),))
    others = (node for node in plan.nodes if node.key != whole.key)
    (page_,) = document_of(side_of(GRAPH, replace(plan, nodes=(*others, whole))))["plans"]
    first, other = page_["cards"]["block|up:linear#0"], page_["cards"]["block|blocks.2.up:linear#0"]
    assert first["alike"] == ["blocks.0.up:linear#0", "blocks.1.up:linear#0"]
    assert other["alike"] == ["blocks.2.up:linear#0"]
    assert first["splits"] != other["splits"]


def test_every_parameter_is_in_one_card(document: Document) -> None:
    (plan,) = document["plans"]
    cards = [card for card in plan["cards"].values() if card["kind"] == "parameter"]
    names = sorted(name for card in cards for name in card["alike"])
    assert names == sorted(entry.target for entry in GRAPH.of_kind("parameter"))
    assert len(cards) < len(names)  # those of one block kind are together
    assert all(card["stored"]["weight"]["bytes"] > 0 for card in cards)


@pytest.mark.parametrize("count", [401, 3000, 50_000])
def test_a_large_function_is_drawn_in_parts(count: int) -> None:
    nodes = [
        {"key": f":add#{i}", "module": f"layers.{i // 3}.up" if i % 3 else "", "shape": "f"}
        | {"own_s": 2.0, "moving_s": 1.0, "share": 0.5}
        for i in range(count)
    ]
    edges = [[i, j] for i in range(count) for j in (i + 1, i + 7) if j < count]
    whole = {"name": "main", "place": "main", "calls": 1, "nodes": nodes, "edges": edges}
    drawn = {own["name"]: own for own in in_parts(whole)}
    assert next(iter(drawn)) == "main"
    assert all(len(own["nodes"]) <= MOST_NODES for own in drawn.values())
    assert {own["place"] for own in drawn.values()} == {"main"}

    def inside(name: str) -> list[dict[str, Any]]:
        """All operators of a function, in order."""
        parts = (
            [n] if "function" not in n else inside(n["function"]) for n in drawn[name]["nodes"]
        )
        return [node for part in parts for node in part]

    assert inside("main") == nodes
    for own in drawn.values():
        for node in own["nodes"]:
            if "function" in node:
                assert node["own_s"] == 2.0 * len(inside(node["function"]))
        assert all(source < target < len(own["nodes"]) for source, target in own["edges"])
    inner = sum(len(own["edges"]) for own in drawn.values())
    assert 0 < inner <= len(edges)
    small = whole | {"nodes": nodes[:400], "edges": []}
    assert in_parts(small) == [small]


def test_edges_go_to_nodes_of_their_block(document: Document) -> None:
    (plan,) = document["plans"]
    main, block = plan["graph"]["functions"]
    assert (main["name"], block["calls"]) == ("main", 3)
    for own in (main, block):
        ends = {end for edge in own["edges"] for end in edge}
        assert ends <= set(range(len(own["nodes"])))
    assert any(node.get("function") == block["name"] for node in main["nodes"])


def test_names_are_no_markup() -> None:
    name = "<img src=x onerror=alert(1)></script><b>&quot;"
    body = tuple(
        replace(item, source=name) if isinstance(item, Node) else item for item in GRAPH.main.body
    )
    graph = replace(GRAPH, main=replace(GRAPH.main, body=body))
    side = side_of(graph, tensor_parallel(graph), path=name)
    spec = replace(side.plan.source, spec=name)
    step = replace(side.step, plan=replace(side.plan, source=spec))
    text = page(document_of(replace(side, step=step)))
    assert "<img" not in text
    assert unpacked(text)["plans"][0]["model"] == name
    assert "&lt;img src=x" in text  # in the summary without JavaScript


def test_nothing_but_the_program_may_run(document: Document) -> None:
    text = page(document)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == 1
    assert f"'sha256-{digest}'" in policy
    assert not re.search(r'(?:src|href)="(?!#)', text.replace(scripts[0], ""))


def test_traffic_is_what_collectives_send(document: Document) -> None:
    (plan,) = document["plans"]
    network = plan["network"]
    levels = {level["name"] for level in network["levels"]}
    sent = sum(row["bytes"] for row in network["collectives"] if row["level"] in levels)
    matrix = network["traffic"]["bytes"]
    assert len(matrix) == 8
    assert sum(map(sum, matrix)) == pytest.approx(8 * sent, rel=1e-3)
    assert all(row[index] == 0 for index, row in enumerate(matrix))


@pytest.mark.parametrize("most", [1, 7, 100, 1000])
def test_of_many_slices_neighbors_are_one(most: int) -> None:
    rng = random.Random(most)
    parts, now = list[Slice](), 0
    for index in range(500):
        now += rng.choice([0, 0, 5, 1000])
        parts.append(
            Slice(0, "compute", f"op{index}", rng.choice("ab"), now, now + rng.randint(1, 99))
        )
        now = parts[-1].end_ps
    fewer = _fewer(parts, most)
    assert len(fewer) <= max(most, 1)
    assert len(fewer) >= min(most, 500) // 8
    assert (fewer[0].start_ps, fewer[-1].end_ps) == (parts[0].start_ps, parts[-1].end_ps)
    assert all(one.end_ps <= other.start_ps for one, other in pairwise(fewer))
    if most >= 500:
        assert list(fewer) == parts


@pytest.mark.parametrize(
    ("total", "levels", "size"),
    [(8, [8], 1), (64, [8, 8], 1), (72, [8, 9], 2), (1024, [8, 128], 16), (16384, [8, 2048], 256)],
)
def test_rows_of_traffic_are_neighbors(total: int, levels: list[int], size: int) -> None:
    assert _neighbors(total, levels) == size


@pytest.mark.parametrize("names", [("data",), ("tensor",), ("data", "tensor")])
def test_rings_go_around_the_devices_of_an_axis(names: tuple[str, ...]) -> None:
    mesh: Mesh = tensor_parallel().mesh
    others = [axis.name for axis in mesh.axes if axis.name not in names]
    ranks, seen = list(range(mesh.num_ranks)), set[int]()
    at = 0
    for _ in range(mesh.size(names)):
        seen.add(at)
        there = int(_shifted(mesh, names, 1)[at])
        assert all(mesh[o].coordinate(there) == mesh[o].coordinate(at) for o in others)
        at = there
    assert at == 0
    assert len(seen) == mesh.size(names)
    assert sorted(_shifted(mesh, names, 1)) == ranks


def test_model_flops_are_three_times_those_of_products() -> None:
    products = sum(
        2 * spec.num_elements * weight.shape[1]
        for flat in GRAPH.flat()
        if flat.node.op == "linear"
        for spec in (flat.node.results[0].spec,)
        for weight in (GRAPH.by_name.get(flat.function, GRAPH.main).specs()[flat.node.refs[1]],)
    )
    assert 3 * products <= model_flops(GRAPH) < 3.5 * products


def test_gradients_that_nothing_needs_are_no_flops_of_the_model() -> None:
    """x [8, 6] -> up [8, 12] -> down [8, 4]: the first product has no gradient of its input."""
    up, down = 2 * 8 * 6 * 12, 2 * 8 * 12 * 4
    for frozen, products in (
        ((), 2 * up + 3 * down),
        (("up", "up_bias"), up + 2 * down),
        (("down",), 2 * up + 2 * down),
        (("up", "up_bias", "down"), up + down),
    ):
        graph = perceptron()
        inputs = [replace(i, trainable=i.value.name not in frozen) for i in graph.inputs]
        found = model_flops(replace(graph, inputs=tuple(inputs)))
        assert products <= found < products * 1.2


def test_the_program_was_built_from_these_sources() -> None:
    """`npm run build` in web/ writes it; its first line has the hash of what it was built from."""
    digest = hashlib.sha256()
    sources = sorted(p for p in (WEB / "src").rglob("*") if p.is_file())
    first = ("package.json", "package-lock.json", "build.mjs")
    for file in (*(WEB / name for name in first), *sources):
        digest.update(file.read_bytes())
    built = ASSETS.joinpath("report.js").read_text(encoding="utf-8").partition("\n")[0]
    assert built == f"// sources {digest.hexdigest()}"
    style = ASSETS.joinpath("report.css").read_text(encoding="utf-8")
    assert style == (WEB / "src/report.css").read_text(encoding="utf-8")
