"""One name explained: layouts, terms that add up, and the next best ways with their causes."""

import json
from dataclasses import replace

import pytest

from parloom.comparators.baselines import data_parallel, fsdp, megatron
from parloom.cost.clusters import load_cluster
from parloom.cost.shares import runs, shares
from parloom.cost.simulate import simulate
from parloom.cost.timeline import Timeline
from parloom.ir.graph import Graph
from parloom.ir.pcg import PCG
from parloom.ir.plan import ActivationDecision, Decisions, NodeDecision, ParameterDecision, Storage
from parloom.report.case import Case
from parloom.report.edges import bound_of, own_ps, prices
from parloom.report.explain import Document
from parloom.report.explain_name import name_explained
from parloom.report.name_screen import name_screen, sentence, way_words
from parloom.report.names import Names
from tests.unit.explained import ADAM, case_of
from tests.unit.graphs import stack
from tests.unit.test_explain import screen

CLUSTER = load_cluster("2x2xcpu")
GRAPH = stack(2)


def play(pcg: PCG, plan: Decisions) -> Timeline:
    return simulate(pcg, CLUSTER, plan, ADAM)


def tensor_parallel(count: int = 1) -> Decisions:
    plans = megatron(GRAPH, CLUSTER, count)
    return next(plan for plan in plans if plan.mesh["tensor"].size == 2)


def explained(case: Case, name: str) -> Document:
    document = name_explained(case, Names(case.pcg.graph).find(name), play)
    assert json.loads(json.dumps(document)) == document
    assert name.partition("/")[0] in screen(name_screen(document, "plan.json")) or "/" in name
    return document


def check_ways(case: Case, document: Document) -> None:
    """Runners-up are in order, and their causes add up to the difference exactly."""
    rows = document["runners_up"]
    steps = [row["step_s"] for row in rows]
    assert steps == sorted(steps)
    for row in rows:
        assert sum(cause["difference_ps"] for cause in row["causes"]) == row["difference_ps"]
        assert row["difference_ps"] == round((row["step_s"] - case.timeline.step_s) * 1e12)
        assert row["peak_bytes"] == case.timeline.peak_bytes + row["difference_bytes"]
        if row["difference_ps"]:
            sign = 1 if row["difference_ps"] > 0 else -1
            most = max(sign * cause["difference_ps"] for cause in row["causes"])
            assert sign * row["why"]["difference_ps"] == most > 0
            assert sentence(row).startswith("slower: " if sign > 0 else "faster: ")


def test_an_operator() -> None:
    case = case_of(GRAPH, CLUSTER, tensor_parallel())
    found = explained(case, "blocks.1.down")
    assert found["name"] == "blocks.1.down:linear#0"
    assert found["splits"] == {"data": "samples", "tensor": "input features"}
    assert found["alike"] == ["blocks.0.down:linear#0", "blocks.1.down:linear#0"]
    (made,) = found["results"]
    assert made["partial"] == [["tensor", "sum"]]
    assert made["grid"]["devices"] == [["0,1"], ["2,3"]]
    active, weight = found["operands"]
    assert active["grid"]["devices"] == [["0", "1"], ["2", "3"]]
    assert weight["from"] == "parameter blocks.1.down.weight"
    (own,) = (one for one in found["weights"] if one["name"] == "blocks.1.down.weight")
    assert own["stored"] == explained(case, "blocks.1.down.weight")["stored"]
    terms = {term["what"]: term for term in found["terms"]}
    assert terms["computing"]["forward_s"] > 0
    memory = terms["its memory traffic"]
    assert memory["bytes"] == 4 * (64 * 64 + 64 * 32 + 64 * 32)
    assert 0 < memory["forward_s"] < terms["computing"]["forward_s"]
    assert terms["to blocks.1:add#0: reduce (all_reduce)"]["axes"] == ["tensor"]
    assert terms["reduce the gradient: all_reduce"]["level"] == CLUSTER.levels[1].name
    check_ways(case, found)
    # The sum over `tensor` is what the plan pays here, and what replication does without.
    other = next(r for r in found["runners_up"] if r["splits"] == {"data": "samples"})
    assert any(
        cause["transfer"] == "activations all_reduce" and cause["difference_ps"] < 0
        for cause in other["causes"]
    )
    assert way_words(other) == "data: samples"


def test_a_faster_way_is_pointed_out() -> None:
    """One operator alone is split the wrong way round."""
    (plan,) = data_parallel(GRAPH, CLUSTER)
    wrong = NodeDecision("head:linear#0", (("k", ("data",)),))
    nodes = tuple(node for node in plan.nodes if node.key != wrong.key)
    case = case_of(GRAPH, CLUSTER, replace(plan, nodes=(*nodes, wrong)))
    found = explained(case, "head")
    assert found["runners_up"][0]["difference_ps"] < 0
    assert "faster than the plan's own way" in screen(name_screen(found, "plan.json"))
    kept = explained(case_of(GRAPH, CLUSTER, plan), "head")
    assert kept["runners_up"][0]["difference_ps"] > 0
    assert "faster than the plan's own way" not in screen(name_screen(kept, "plan.json"))


def test_what_an_operator_is_bound_by() -> None:
    def bound(graph: Graph, key: str) -> str:
        (plan,) = data_parallel(graph, CLUSTER)
        flats = {flat.key: flat for flat in graph.flat()}
        return bound_of(case_of(graph, CLUSTER, plan), flats[key])

    assert bound(GRAPH, ":view#0").startswith("nothing")
    assert bound(GRAPH, "blocks.0:relu#0") == "launching kernels"
    big = stack(1, batch=4096, width=256)
    assert bound(big, "blocks.0:relu#0") == "memory"
    assert bound(big, "blocks.0.up:linear#0") == "arithmetic"


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [1, 2])
def test_all_names_of_all_plans(count: int) -> None:
    plans = [tensor_parallel(count), *fsdp(GRAPH, CLUSTER, count)]
    for plan in plans:
        again = replace(plan, activations=(ActivationDecision("blocks.0", "recompute"),))
        case = case_of(GRAPH, CLUSTER, again)
        for name in (
            "blocks.0", "main", "blocks.0.up", ":cross_entropy_loss#0", "tokens:embedding#0",
            "blocks.0.up.weight", "ids", "logits", "block/wide", ":view",
        ):  # fmt: skip
            document = explained(case, name)
            if "runners_up" in document:
                check_ways(case, document)


def test_own_terms_add_up_to_what_is_computed_and_moved() -> None:
    plan = tensor_parallel(2)
    again = replace(plan, activations=(ActivationDecision("blocks.0", "recompute"),))
    case = case_of(GRAPH, CLUSTER, again)
    keys = [flat.key for flat in GRAPH.flat()]
    times = runs(case.pcg)
    found = shares(case.pcg, case.priced.walker)
    whole = sum(times[name].ps(s) for name, items in found.items() for s in items if s.key)
    assert own_ps(case, keys) == whole
    each = 0.0
    for flat in GRAPH.flat():
        each += sum(p.step_s for p in prices(case, flat) if not p.what.startswith("to "))
    assert each == pytest.approx(whole / 1e12)


def test_a_parameter() -> None:
    (plan,) = fsdp(GRAPH, CLUSTER)
    case = case_of(GRAPH, CLUSTER, plan)
    found = explained(case, "blocks.1.up.weight")
    assert found["alike"] == ["blocks.0.up.weight", "blocks.1.up.weight"]
    assert found["partial_gradient"] == ["data"]
    assert found["grid"]["rows"] == ["all of it"]
    weight = found["stored"]["weight"]
    assert weight["words"] == "in parts over data (dim 0)"
    assert weight["bytes"] == 128 * 32 * 4 // 4
    assert weight["grid"]["rows"] == ["0:32", "32:64", "64:96", "96:128"]
    assert [reader["name"] for reader in found["readers"]] == ["blocks.1.up:linear#0"]
    assert found["ways"] == found["ways_tried"] == 3
    check_ways(case, found)
    assert {way_words(row) for row in found["runners_up"]} == {
        "weight, gradient, optimizer as computed",
        "gradient, optimizer in parts over data (dim 0); weight as computed",
        "optimizer in parts over data (dim 0); weight, gradient as computed",
    }


def test_parameters_that_are_stored_apart_are_not_changed_together() -> None:
    (plan,) = data_parallel(GRAPH, CLUSTER)
    parts = Storage(("data",))
    own = ParameterDecision("blocks.1.up.weight", Storage(), parts, parts)
    case = case_of(GRAPH, CLUSTER, replace(plan, parameters=(own,)))
    assert explained(case, "blocks.1.up.weight")["alike"] == ["blocks.1.up.weight"]
    assert explained(case, "blocks.0.up.weight")["alike"] == ["blocks.0.up.weight"]


def test_what_does_not_fit_is_said_and_the_first_that_fits_is_found() -> None:
    """A device a byte smaller than the second best way needs."""
    case = case_of(GRAPH, CLUSTER, tensor_parallel())
    before = explained(case, "head:linear#0")["runners_up"]
    assert all(row["fits"] for row in before)
    small = replace(CLUSTER.device, memory_bytes=min(r["peak_bytes"] for r in before) - 1)
    cluster = replace(CLUSTER, device=small)
    found = explained(case_of(GRAPH, cluster, tensor_parallel()), "head:linear#0")
    assert not any(row["fits"] for row in found["runners_up"])
    fitting = found["first_that_fits"]
    assert fitting is None or fitting["fits"]


def test_a_tensor_and_a_module() -> None:
    case = case_of(GRAPH, CLUSTER, tensor_parallel(2))
    wide = explained(case, "blocks.1/wide")
    assert wide["tensor"]["name"] == "blocks.1/wide"
    assert wide["tensor"]["layout"] == "[2/micro·2/data·4, 8, 2/tensor·64]"
    ids = explained(case, "ids")
    assert (ids["is"], ids["layout"]) == ("batch", "[2/micro·2/data·4, 8]")
    assert [reader["layout"] for reader in ids["readers"]] == ["[2/micro·2/data·4, 8]"]
    block = explained(case, "blocks.1")
    assert [row["name"] for row in block["operators"]] == [
        f"blocks.1{key}" for key in (".norm:mul#0", ".up:linear#0", ":relu#0",
                                     ".down:linear#0", ":add#0")
    ]  # fmt: skip
    assert [row["name"] for row in block["inputs"]] == [
        f"blocks.1.{name}.weight" for name in ("norm", "up", "down")
    ]
