"""Which values are made again in which calls, under limits that force a choice, against
enumeration: on one device nothing else is chosen. Of equal calls the weights of the first may be
frozen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.step import priced
from parloom.cost.walk import Walker
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.plan import ActivationDecision, Decisions, one_stage
from parloom.ir.text import parse_graph
from parloom.search.contexts import ContextSearch
from parloom.search.meshes import logical_meshes
from parloom.search.step_rows import ShadowPrices
from tests.examples import examples
from tests.property.estimate import estimate
from tests.property.searched import ADAM, context_of, counted_bytes, passes_bytes

ONE = load_cluster("1xH100")
(MESH,) = logical_meshes(ONE)
DEPTH = 2


def blocks(rng: Random, *, frozen: bool) -> Graph:
    """x -> calls of a block of four operators -> sum."""
    rows, kinds = rng.choice((1024, 8192)), rng.choices(("relu", "tanh", "gelu"), k=2)
    shape, square = f"float32[{rows}, 256]", "float32[256, 256]"
    inputs = "".join(
        f'input {name}{i}: {square} = parameter("{i}.{name}", trainable={i > 0 or not frozen})\n'
        for i in range(DEPTH)
        for name in ("u", "d")
    )
    calls = "".join(
        f'    h{i + 1}: {shape} = block["{i}"](h{i}, u{i}, d{i})\n' for i in range(DEPTH)
    )
    arguments = {"relu": "", "tanh": "", "gelu": ', "none"'}
    return parse_graph(
        f'graph "Blocks" training=True\n\n{inputs}input h0: {shape} = batch("x")\n\n'
        f"def block(\n    hidden: {shape},\n    u: {square},\n    d: {square},\n):\n"
        f"    wide: {shape} = linear(hidden, u)  # up\n"
        f"    one: {shape} = {kinds[0]}(wide{arguments[kinds[0]]})  # one\n"
        f"    two: {shape} = {kinds[1]}(one{arguments[kinds[1]]})  # two\n"
        f"    out: {shape} = linear(two, d)  # down\n    return out\n\n"
        f"main main:\n{calls}    loss: float32[] = sum(h{DEPTH})\n    return loss\n\nloss loss\n"
    )


@dataclass(frozen=True, slots=True)
class Remade:
    """What one choice for each call costs."""

    decisions: Decisions
    step_ps: int
    held_bytes: int


def every_choice(graph: Graph, count: int) -> Iterator[Remade]:
    """Every set of values of every call, or the whole call, lowered and walked."""
    keys = [flat.node.key for flat in graph.flat() if flat.prefix == "0"][
        :-1
    ]  # what leaves a block is kept
    sets = [some for n in range(len(keys) + 1) for some in combinations(keys, n)]
    most = kept_bytes(graph, plan_of((), count))
    freed = {some: most - kept_bytes(graph, plan_of((some,), count)) for some in (None, *sets)}
    (batch,) = graph.of_kind("batch")
    leaving = batch.value.spec.shape[0] * batch.value.spec.shape[1] * 4
    for chosen in product((None, *sets), repeat=DEPTH):
        plan = plan_of(chosen, count)
        pcg = lower(graph, plan)
        found = estimate(pcg, Walker(pcg.by_name, pcg.mesh, ONE), ADAM)
        held = counted_bytes(kept_bytes(graph, plan), found.weights, count)
        # As the last call that recomputes runs backward: what those keep, and what it makes again.
        again = [freed[some] for some in chosen if some != ()]
        if again:
            kept = sum(freed[None] + leaving - some for some in again) + max(again)
            held = max(held, passes_bytes(kept, found.weights, count))
        yield Remade(plan, found.step_ps, held)


def plan_of(chosen: Sequence[tuple[str, ...] | None], count: int) -> Decisions:
    """What the first calls recompute: values, or all."""
    again = (
        ActivationDecision(str(call), "recompute", some or ())
        for call, some in enumerate(chosen)
        if some != ()
    )
    return Decisions(one_stage(MESH), activations=tuple(again), num_microbatches=count)


def kept_bytes(graph: Graph, plan: Decisions) -> int:
    """What is kept between the passes."""
    return priced(lower(graph, plan), ONE, plan, ADAM).main.inside_bytes


def cheapest(every: list[Remade], limit: float) -> int:
    return min(found.step_ps for found in every if found.held_bytes <= limit)


def searched(graph: Graph, count: int, limit: float) -> ContextSearch:
    context = context_of(graph, ONE, MESH, count)
    context.limit = limit
    context.run(ShadowPrices())
    return context


@examples(4)
@given(st.integers(0, 10**6), st.integers(1, 2), st.floats(0.0, 1.0), st.booleans())
def test_no_choice_within_a_limit_is_below_the_bound(
    seed: int, count: int, share: float, frozen: bool
) -> None:
    graph = blocks(Random(seed), frozen=frozen)
    every = list(every_choice(graph, count))
    low, high = min(e.held_bytes for e in every), max(e.held_bytes for e in every)
    limit = low + share * (high - low)
    least = cheapest(every, limit)
    context = searched(graph, count, limit)
    assert context.columns.bound_ps(limit) <= least * (1 + 1e-6)
    best = next(context.candidates()).sums.step_ps
    assert best <= least * 1.02


def test_memory_is_what_makes_calls_recompute() -> None:
    """Negative control: the bound under a limit is no bound without one."""
    graph = blocks(Random(1), frozen=False)
    every = list(every_choice(graph, 1))
    low, high = min(e.held_bytes for e in every), max(e.held_bytes for e in every)
    tight = searched(graph, 1, low).columns.bound_ps(low)
    assert cheapest(every, high) * 1.01 < tight <= cheapest(every, low)
