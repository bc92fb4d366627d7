"""Stripes of positions: a cut that changes no value, and what plans by hand make of it."""

from dataclasses import replace

import pytest

from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import plan, program
from parloom.cost.clusters import load_cluster
from parloom.cost.step import priced
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.layout import digits
from parloom.ir.mesh import part_of
from parloom.ir.pcg import Movement
from parloom.ir.plan import Decisions
from parloom.ir.repeat import repeated
from parloom.ir.text import parse_graph, print_graph
from parloom.report.naming import named_ways
from parloom.rewrite.rewrites import parse_rewrite, rewritten
from parloom.rewrite.stripes import Stripe
from parloom.search.stripes import with_stripes
from tests.unit.graphs import graph, node, stack

STRIPES = ("stripe ids 1 4", "stripe labels 1 4")


def test_text_and_back() -> None:
    assert parse_rewrite("stripe ids 1 4") == Stripe("ids", 1, 4)
    assert str(Stripe("ids", 1, 4)) == "stripe ids 1 4"


@pytest.mark.parametrize(
    "text", ["stripe ids 1 3", "stripe ids 2 4", "stripe other 1 4", "stripe ids 1 0"]
)
def test_what_does_not_apply_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="does not apply"):
        rewritten(stack(1), (text,))


def test_the_cut_reaches_every_operator() -> None:
    made = rewritten(stack(1), STRIPES)
    assert parse_graph(print_graph(made)) == made
    rules = factorize(made).rules
    assert rules["block", "up:linear#0"].size_of["d11"] == 4
    assert rules["main", ":cross_entropy_loss#0"].size_of["n2"] == 4
    plain = factorize(stack(1)).rules
    assert "d11" not in plain["block", "up:linear#0"].size_of


def test_a_rank_has_every_fourth_position_and_nothing_moves() -> None:
    chosen = Configuration(context=4, microbatch=16, striped=True)
    found = program(stack(2), chosen, load_cluster("4xA100"))
    (pcg,), (part,) = found.lowered, found.parts
    assert part.decisions.rewrites == STRIPES
    ids = next(v for v in pcg.main.inputs if v.name == "ids")
    assert digits(ids.layout, 1, 8, pcg.mesh) == (2, "context")
    bodies = (pcg.main.body, *(f.body for f in pcg.functions))
    assert not [
        i for body in bodies for i in body if isinstance(i, Movement) and i.result.spec.shape
    ]
    chunks = program(stack(2), Configuration(context=4, microbatch=16), load_cluster("4xA100"))
    ids = next(v for v in chunks.lowered[0].main.inputs if v.name == "ids")
    assert digits(ids.layout, 1, 8, pcg.mesh) == ("context", 2)


@pytest.mark.parametrize("striped", [False, True])
def test_the_stages_of_a_pipeline_give_all_memory_back(striped: bool) -> None:
    """The view of what another stage sends is no memory of its own."""
    chosen = Configuration(pipeline=3, context=2, microbatch=8, num_microbatches=2, striped=striped)
    cluster = load_cluster("6xA100")
    found = program(repeated(stack(2), 3), chosen, cluster)
    for part, pcg in zip(found.parts, found.lowered, strict=True):
        main = priced(pcg, part_of(cluster, 2), part.decisions).main
        assert main.forward.net_bytes > 0
        assert main.forward.net_bytes + main.backward.net_bytes == 0


def attention(batch: int = 2, seq: int = 16) -> Graph:
    """Queries, keys and values of ids, causal attention, and its sum."""
    shape, heads = (batch, seq, 8), (batch, seq, 2, 4)
    turned = (batch, 2, seq, 4)
    made = [
        item
        for name in "qkv"
        for item in (
            node("linear", "x", f"w{name}", to=f"{name}0", shape=shape, path=name),
            node("view", f"{name}0", heads, to=f"{name}1", shape=heads, path=name),
            node("transpose", f"{name}1", 1, 2, to=name, shape=turned, path=name),
        )
    ]
    return graph(
        {"tokens": (32, 8), **{f"w{name}": (8, 8) for name in "qkv"}},
        {"ids": ((batch, seq), "int64")},
        node("embedding", "tokens", "ids", to="x", shape=shape, path="tokens"),
        *made,
        node("scaled_dot_product_attention", "q", "k", "v", None, 0.0, True, to="y", shape=turned),
        node("mul", "y", "y", to="square", shape=turned),
        node("sum", "square", to="loss", shape=()),
    )


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
def test_stripes_of_a_plan_with_chunks_are_those_of_a_plan_by_hand(ring: bool, tensor: int) -> None:
    made, cluster = attention(), load_cluster(f"{4 * tensor}xA100")
    chosen = Configuration(tensor, context=4, microbatch=2, ring=ring)
    (chunks,), (stripes,) = (
        plan(made, replace(chosen, striped=striped), cluster) for striped in (False, True)
    )
    found = with_stripes(made, chunks.decisions)
    assert found is not None
    assert found.rewrites == ("stripe ids 1 4",) == stripes.decisions.rewrites
    assert chosen_by_key(found) == chosen_by_key(stripes.decisions)
    assert chosen_by_key(found) != chosen_by_key(chunks.decisions)
    assert with_stripes(made, found) is None


def chosen_by_key(decisions: Decisions) -> dict[str, dict[str, tuple[str, ...]]]:
    return {node.key: dict(node.factors) for node in decisions.nodes}


def test_plans_without_chunks_of_queries_have_no_stripes() -> None:
    made, cluster = attention(), load_cluster("2xA100")
    for chosen in (Configuration(2, microbatch=2), Configuration(data=2)):
        (part,) = plan(made, chosen, cluster)
        assert with_stripes(made, part.decisions) is None
    (part,) = plan(stack(1), Configuration(context=2, microbatch=16), cluster)
    assert with_stripes(stack(1), part.decisions) is None


def test_a_ring_is_one_split_of_an_attention_in_words() -> None:
    made, cluster = attention(), load_cluster("4xA100")
    chosen = Configuration(context=4, microbatch=2, ring=True, striped=True)
    (part,) = plan(made, chosen, cluster)
    found = rewritten(made, part.decisions.rewrites)
    ways = [(flat.key, axis) for flat, axis, _ in named_ways(found, part.decisions)]
    assert (":scaled_dot_product_attention#0", "context") in ways
    assert len(ways) == len(set(ways))
