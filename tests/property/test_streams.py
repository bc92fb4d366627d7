"""What no step of a context undercuts, against plans of the space."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from random import Random

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from parloom.comparators.baselines import random_plan
from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.errors import LayoutError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.plan import ActivationDecision, Decisions
from parloom.search.contexts import ContextSearch
from parloom.search.meshes import logical_meshes
from parloom.search.step_rows import ShadowPrices
from parloom.search.stream_bound import least_step_ps, stream_prices
from tests.examples import examples
from tests.property.searched import ADAM, context_of, random_graph
from tests.unit.test_simulate import model

EIGHT, SLOW = load_cluster("2x4xH100"), load_cluster("4x2xRTX4090")


def random_plans(graph: Graph, mesh: Mesh, count: int, rng: Random) -> Iterator[Decisions]:
    """Layouts and storage drawn from all that there are; calls of one kind are laid out alike, and
    recompute some of their values.
    """
    factored, calls = factorize(graph), {flat.prefix for flat in graph.flat() if flat.prefix}
    first = {(flat.function, flat.node.key): flat.key for flat in reversed(tuple(graph.flat()))}
    like = {flat.key: first[flat.function, flat.node.key] for flat in graph.flat()}
    keys = list(dict.fromkeys(flat.node.key for flat in graph.flat() if flat.prefix))
    for _ in range(4):
        try:
            plan = random_plan(graph, factored, mesh, rng.randrange(10**6), count)
        except LayoutError:
            continue
        if calls:
            drawn = {node.key: node for node in plan.nodes}
            alike = (replace(drawn[like[key]], key=key) for key in drawn)
            plan = replace(plan, nodes=tuple(alike), parameters=())
        yield plan
        some = rng.sample(sorted(calls), rng.randrange(len(calls) + 1))
        again = (
            ActivationDecision(c, "recompute", tuple(k for k in keys if rng.random() < 0.5))
            for c in some
        )
        yield replace(plan, activations=tuple(again))


def good_plans(context: ContextSearch) -> Iterator[Decisions]:
    """What the search finds at several prices of memory."""
    for byte_ps in (0.0, 1.0, 100.0):
        context.duals = ShadowPrices(0.3, 0.3, 0.3, byte_ps)
        column = context.columns.prove(context.duals)
        candidate = context.compose([column.values]) if column else None
        if candidate:
            yield context.judge(candidate).decisions


@examples(10)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 2))
@example(7, True, 1)  # with a weight that nothing reads
def test_no_plan_of_the_space_is_below_the_bound(seed: int, slow: bool, count: int) -> None:
    rng = Random(seed)
    cluster = SLOW if slow else EIGHT
    graph = model(3) if seed % 3 == 0 else random_graph(rng, num_operators=4)
    mesh = rng.choice(list(logical_meshes(cluster)))
    context = context_of(graph, cluster, mesh, count)
    bound, tried = least_step_ps(context), 0
    assert bound > 0
    for plan in (*good_plans(context), *random_plans(graph, mesh, count, rng)):
        try:
            pcg = lower(graph, plan)
        except LayoutError:
            continue
        tried += 1
        played = simulate(pcg, cluster, plan, ADAM)
        assert bound <= played.step_ps * (1 + 1e-9)
    assert tried > 2


def test_links_bound_where_they_are_slow() -> None:
    """Negative control: computing alone says less, and thrice the bound is too much."""
    graph = random_graph(Random(1), num_operators=5)
    best, bounds = inf, []
    for mesh in logical_meshes(SLOW):
        context = context_of(graph, SLOW, mesh)
        bounds.append(least_step_ps(context))
        computing, _ = context.columns.minimum(stream_prices(np.array([1.0, 0, 0]), 1), 1e-3)
        assert bounds[-1] > 1.05 * computing
        best = min(best, *(simulate(lower(graph, p), SLOW, p, ADAM).step_ps
                           for p in good_plans(context)))  # fmt: skip
    assert min(bounds) <= best < 3 * min(bounds)


def test_what_is_enough_is_not_improved() -> None:
    context = context_of(random_graph(Random(1), 5), SLOW, next(iter(logical_meshes(SLOW))))
    assert least_step_ps(context, 0.0) < least_step_ps(context)
