"""Methods that choose the form of a model before its layouts: forms that are known, and plans that
read their rewrites again.
"""

from dataclasses import replace

import pytest

from parloom.candidates import ALGEBRA, candidates
from parloom.comparators import tensat
from parloom.comparators.fixed_form import FixedForm, work_ps
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph, Node
from parloom.ir.plan import Optimizer
from parloom.ir.text import parse_graph, print_graph
from parloom.rewrite.rewrites import derived, rewritten, takes_of
from parloom.search.pinned import resolve
from parloom.search.pins import parse_pin
from parloom.search.request import AUTO, Request
from parloom.search.rewritten import with_takes
from tests.unit.graphs import graph, node, perceptron

WIDE, NARROW = 128, 16
SGD = Optimizer("sgd", 0)


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-graphs of a tenth of the size."""
    monkeypatch.setattr(tensat, "CALLS", 120)
    monkeypatch.setattr(tensat, "ROUNDS", 4)


def request_of(made: Graph, spec: str = "2xV100", method: str = AUTO) -> Request:
    cluster = load_cluster(spec)
    limit = cluster.device.memory_bytes
    return Request(made, DataSheets(cluster), SGD, limit, method=method)


def gated(batch: int = 8192) -> Graph:
    """Two products of one operand, as gate and up."""
    wide, narrow = (batch, WIDE), (batch, NARROW)
    return graph(
        {"first": (WIDE, WIDE), "gate": (NARROW, WIDE), "up": (NARROW, WIDE), "last": (2, NARROW)},
        {"x": (wide, "float32")},
        node("linear", "x", "first", to="b", shape=wide, path="first"),
        node("tanh", "b", to="a", shape=wide, path="first"),
        node("linear", "a", "gate", to="g", shape=narrow, path="gate"),
        node("linear", "a", "up", to="u", shape=narrow, path="up"),
        node("mul", "g", "u", to="m", shape=narrow, path="down"),
        node("relu", "m", to="h", shape=narrow, path="down.act"),
        node("linear", "h", "last", to="y", shape=(batch, 2), path="down.last"),
        node("sum", "y", to="loss", shape=()),
    )


def summed(batch: int = 1024) -> Graph:
    """The sum of two products with one weight, of two functions of the batch."""
    return graph(
        {"first": (WIDE, WIDE), "w": (WIDE, WIDE)},
        {"x": ((batch, WIDE), "float32")},
        node("linear", "x", "first", to="a", shape=(batch, WIDE), path="first"),
        node("tanh", "a", to="b", shape=(batch, WIDE)),
        node("linear", "a", "w", to="c", shape=(batch, WIDE), path="one"),
        node("linear", "b", "w", to="d", shape=(batch, WIDE), path="other"),
        node("add", "c", "d", to="e", shape=(batch, WIDE)),
        node("sum", "e", to="loss", shape=()),
    )


def ops(made: Graph) -> list[str]:
    return sorted(flat.node.op for flat in made.flat())


@pytest.mark.parametrize("method", ALGEBRA)
def test_products_of_one_operand_are_one(method: str) -> None:
    asked = request_of(gated(), method=method)
    texts = ALGEBRA[method](asked, lambda text: None)
    assert [take.call.op for take in takes_of(texts)] == ["parloom.linears"]
    assert takes_of(texts)[0].rules == ("merge_linear",)
    assert work_ps(asked, texts) < work_ps(asked, ())


@pytest.mark.parametrize("method", ALGEBRA)
def test_products_with_one_weight_are_one(method: str) -> None:
    asked = request_of(summed(), method=method)
    texts = ALGEBRA[method](asked, lambda text: None)
    assert ops(derived(asked.graph, texts)) == ["add", "linear", "linear", "sum", "tanh"]
    assert work_ps(asked, texts) < work_ps(asked, ())


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ALGEBRA)
def test_what_has_one_form_stays(method: str) -> None:
    """And the plan is that of `auto`."""
    asked = request_of(perceptron(64), method=method)
    assert ALGEBRA[method](asked, lambda text: None) == ()
    found = candidates(asked, lambda text: None)
    alone = candidates(replace(asked, method=AUTO), lambda text: None)
    assert [p.decisions for p in found.found] == [p.decisions for p in alone.found]
    assert {p.method for p in found.found} == {method}
    assert all(p.name.startswith(method) for p in found.found)
    assert found.bound_s is found.solver_gap is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ALGEBRA)
@pytest.mark.parametrize("made", [gated(), summed()], ids=["gated", "summed"])
def test_plans_are_of_the_graph_that_was_asked_about(method: str, made: Graph) -> None:
    asked = request_of(made, method=method)
    found = candidates(asked, lambda text: None).found
    texts = ALGEBRA[method](asked, lambda text: None)
    assert texts
    for plan in found:
        assert plan.decisions.rewrites[: len(texts)] == texts
        again = parse_graph(print_graph(made))
        derived(again, plan.decisions.rewrites)
        assert replace(asked, graph=again).predict(plan.decisions) == plan.prediction


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ALGEBRA)
def test_pins_on_rewrites_hold(method: str) -> None:
    made = gated()
    for text, forbidden in (("rewrite=merge_linear", False), ("rewrite=*", True)):
        pins = [parse_pin(text, forbidden=forbidden)]
        asked = request_of(made, method=method)
        asked = replace(asked, pinned=resolve(pins, made, factorize(made)))
        found = candidates(asked, lambda text: None).found
        assert found
        assert all(bool(takes_of(plan.decisions.rewrites)) != forbidden for plan in found)


def test_a_form_that_does_not_follow_is_refused() -> None:
    asked = request_of(gated())
    with pytest.raises(InputError, match="does not follow"):
        FixedForm(asked, ["take h in main by merge_linear: relu(g)"])


def test_rewrites_apply_in_their_order() -> None:
    """A block of what was rewritten before, and the other way around."""
    made = gated()
    (take,) = (str(own) for own in with_takes(request_of(made)).takes)
    first = rewritten(made, [take, "block down"])
    assert len(first.functions) == 1
    assert "parloom.linears" in [item.op for item in first.main.body if isinstance(item, Node)]
    assert derived(made, [take, "block down"]) == first
    assert rewritten(made, ["block down", take]) == first
    inner = "take h in main by merge_linear: gelu(m)"
    (block,) = rewritten(made, [inner, "block down"]).functions
    assert [item.op for item in block.body if isinstance(item, Node)] == ["mul", "gelu", "linear"]
    with pytest.raises(InputError, match="no operator of main makes"):
        rewritten(made, ["block down", inner])
