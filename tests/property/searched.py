"""Random small graphs, and an enumerator that shares nothing with the search but the prices."""

from collections.abc import Callable, Iterator
from itertools import permutations, product
from math import isinf
from random import Random

import numpy as np

from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Rule
from parloom.ir.pcg import PParameter
from parloom.ir.plan import Decisions, NodeDecision, Optimizer
from parloom.ir.text import parse_graph
from parloom.search.domains import cost_of
from parloom.search.estimate import Estimate, estimate
from parloom.search.layouts import LayoutProblem, Totals
from parloom.search.master import multipliers
from parloom.search.program import last_reduced
from parloom.search.storage import WEIGHT_PARTS, Level, StoragePrices, Stored, WeightPrice
from parloom.search.sums import Worth

ADAM = Optimizer("adamw", 2)


def random_graph(
    rng: Random,
    num_operators: int = 3,
    rows: tuple[int, ...] = (512, 1024),
    columns: tuple[int, ...] = (512, 1024),
) -> Graph:
    """Products, sums and elementwise operators on values made before; weights may be shared."""
    num_rows, num_columns = rng.choice(rows), rng.choice(columns)
    shape = f"float32[{num_rows}, {num_columns}]"
    values, weights, body = ["x"], list[str](), list[str]()
    for index in range(num_operators):
        kind = "linear" if index == 0 else rng.choice(("linear", "relu", "add", "tanh"))
        operand = rng.choice(values)
        if kind == "linear":
            if not weights or rng.random() > 0.25:
                weights.append(f"w{len(weights)}")
            call = f"linear({operand}, {rng.choice(weights)})"
        elif kind == "add":
            call = f"add({operand}, {rng.choice(values)})"
        else:
            call = f"{kind}({operand})"
        values.append(f"v{index}")
        body.append(f"    v{index}: {shape} = {call}  # m{index}\n")
    square = f"float32[{num_columns}, {num_columns}]"
    inputs = [f'input {w}: {square} = parameter("{w}", trainable=True)\n' for w in weights]
    return parse_graph(
        f'graph "Random" training=True\n\n{"".join(inputs)}input x: {shape} = batch("x")\n\n'
        f"main main:\n{''.join(body)}    loss: float32[] = sum({values[-1]})\n    return loss\n\n"
        "loss loss\n"
    )


def every_assignment(rule: Rule, mesh: Mesh) -> Iterator[tuple[tuple[str, tuple[str, ...]], ...]]:
    """All that a rule allows, the order of axes on one factor included."""
    for factors in product((None, *rule.shardable), repeat=len(mesh.axes)):
        used: dict[str, list[str]] = {}
        for axis, factor in zip(mesh.names, factors, strict=True):
            if factor is not None:
                used.setdefault(factor, []).append(axis)
        if all(rule.size(f) % mesh.size(tuple(axes)) == 0 for f, axes in used.items()):
            for orders in product(*(permutations(axes) for axes in used.values())):
                yield tuple(zip(used, orders, strict=True))


def anything(*_: object) -> bool:
    """No restriction."""
    return True


def every_plan(problem: LayoutProblem) -> list[tuple[Totals, Totals]]:
    """What passes and weights cost under every layout with every storage of its weights, without
    recomputation.
    """
    factors = problem.factors(multipliers(Worth()))
    every = []
    for values in product(*map(range, problem.sizes)):
        if isinf(cost_of(factors, values)):
            continue
        passes = problem.passes(values)
        options = [
            list(problem.storage.options(problem.stored(index, values))[1])
            for index, weight in enumerate(problem.program.weights)
            for _ in weight.targets
        ]
        for chosen in product(*options):
            total = sum(chosen, np.zeros(WEIGHT_PARTS, dtype=np.int64))
            every.append((passes, total))
    return every


def least_step_ps(
    graph: Graph,
    mesh: Mesh,
    walker: Walker,
    may_split: Callable[[str, dict[str, tuple[str, ...]]], bool] = anything,
    may_store: Callable[[PParameter, Level], bool] = anything,
) -> int | None:
    """The least estimate over every layout of every operator and every storage of every weight,
    those that may be; None where there are none.
    """
    factored = factorize(graph)
    nodes = list(graph.flat())
    menus = [
        [
            chosen
            for chosen in every_assignment(factored.rule(n.function, n.node), mesh)
            if may_split(n.key, dict(chosen))
        ]
        for n in nodes
    ]
    storage = StoragePrices(walker, Decisions(mesh), ADAM)
    elements = sum(e.value.spec.num_elements for e in graph.of_kind("parameter"))
    last = last_reduced(graph)
    least: int | None = None
    for chosen in product(*menus):
        keyed = tuple(NodeDecision(n.key, c) for n, c in zip(nodes, chosen, strict=True))
        pcg = lower(graph, Decisions(mesh, keyed), factored=factored)
        passes = estimate(pcg, walker, ADAM).passes
        options: list[list[WeightPrice]] = []
        for weight in pcg.parameters:
            spec = weight.input.value.spec
            late = weight.input.value.name in last
            stored = Stored(
                spec, True, False, weight.layout, weight.reduce, elements, elements, last=late
            )
            every, prices = storage.options(stored)
            options.append(
                [p for level, p in zip(every, prices, strict=True) if may_store(weight, level)]
            )
        for levels in product(*options):
            step_ps = Estimate(passes, sum(levels[1:], levels[0])).step_ps
            least = step_ps if least is None else min(least, step_ps)
    return least
