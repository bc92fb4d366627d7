"""Random small graphs, contexts of them, and an enumerator that shares no table with the search."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from random import Random

import numpy as np

from parloom.cost.hardware import DataSheets
from parloom.cost.simulate import simulate
from parloom.cost.step import priced
from parloom.cost.walk import Walker
from parloom.errors import LayoutError
from parloom.ir.expected import Prediction
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG, PParameter
from parloom.ir.plan import Decisions, NodeDecision, Optimizer, one_stage
from parloom.ir.text import parse_graph
from parloom.search.choices import Menu
from parloom.search.contexts import ContextSearch
from parloom.search.folding import last_reduced, program_of, reached
from parloom.search.microbatch import microbatch_of
from parloom.search.pinned import NONE, Pinned
from parloom.search.prices import KEPT, PARTS, Known
from parloom.search.request import Request
from parloom.search.step_rows import NUM_ROWS, Passes, step_sums
from parloom.search.storage import Level, StoragePrices, WeightPrice
from parloom.search.storage import StoredWeight as Weight
from parloom.search.work import Work
from tests.property.estimate import Estimate, estimate

ADAM = Optimizer("adamw", 2)
PLENTY = 2**50


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


def added_products(rows: int, columns: int) -> Graph:
    """Two products that are added: their parts may be, before they are summed."""
    shape, square = f"float32[{rows}, {columns}]", f"float32[{columns}, {columns}]"
    return parse_graph(f"""\
graph "Added" training=True

input w0: {square} = parameter("w0", trainable=True)
input w1: {square} = parameter("w1", trainable=True)
input x: {shape} = batch("x")

main main:
    v0: {shape} = linear(x, w0)  # m0
    v1: {shape} = linear(x, w1)  # m1
    v2: {shape} = add(v0, v1)  # m2
    loss: float32[] = sum(v2)
    return loss

loss loss
""")


def every_assignment(rule: Rule, mesh: Mesh) -> Iterator[tuple[tuple[str, tuple[str, ...]], ...]]:
    """All of a rule that is looked at, the order of axes on one factor included."""
    for factors in product((None, *rule.offered), repeat=len(mesh.axes)):
        used: dict[str, list[str]] = {}
        for axis, factor in zip(mesh.names, factors, strict=True):
            if factor is not None:
                used.setdefault(factor, []).append(axis)
        if all(rule.size(f) % mesh.size(tuple(axes)) == 0 for f, axes in used.items()):
            for orders in product(*(permutations(axes) for axes in used.values())):
                yield tuple(zip(used, orders, strict=True))


def context_of(
    graph: Graph,
    cluster: Cluster,
    mesh: Mesh,
    count: int = 1,
    limit: int = PLENTY,
    menus: tuple[Menu, ...] = (),
    pinned: Pinned = NONE,
    quantizes: bool = False,
) -> ContextSearch:
    """The search of `graph` on `mesh` with `count` microbatches."""
    program = microbatch_of(program_of(graph, factorize(graph), pinned), count)
    assert program is not None
    request = Request(
        graph, DataSheets(cluster), ADAM, limit, count, pinned=pinned, quantizes=quantizes
    )
    base = Decisions(one_stage(mesh))
    return ContextSearch(program, mesh, Passes(count), request, base, Known(), Work(), menus)


@dataclass(frozen=True, slots=True)
class Enumerated:
    """A plan that was enumerated: layouts, the storage of each weight, the estimate of its step,
    and the bytes that an estimate counts, in the passes or as weights are updated.
    """

    layouts: Decisions
    stored: tuple[tuple[PParameter, Level], ...]
    step_ps: int
    held_bytes: int

    @property
    def decisions(self) -> Decisions:
        chosen = ((weight.input.target, level) for weight, level in self.stored)
        parameters = (level.decision(target) for target, level in chosen if level.axes)
        return replace(self.layouts, parameters=tuple(parameters))

    def split(self, name: str) -> dict[str, tuple[str, ...]]:
        """The axes of each factor of an operator."""
        (found,) = (node.factors for node in self.layouts.nodes if node.key == name)
        return dict(found)

    def simulated(self, graph: Graph, cluster: Cluster) -> Prediction:
        plan = self.decisions
        return simulate(lower(graph, plan), cluster, plan, ADAM).prediction()


def every_layout(graph: Graph, mesh: Mesh, count: int = 1) -> Iterator[tuple[Decisions, PCG]]:
    """Every layout of every operator, as it is lowered."""
    factored = factorize(graph)
    nodes = list(graph.flat())
    menus = (every_assignment(factored.rule(n.function, n.node), mesh) for n in nodes)
    for chosen in product(*menus):
        keyed = tuple(NodeDecision(n.key, c) for n, c in zip(nodes, chosen, strict=True))
        plan = Decisions(one_stage(mesh), keyed, num_microbatches=count)
        try:
            yield plan, lower(graph, plan, factored=factored)
        except LayoutError:
            continue


def every_plan(graph: Graph, mesh: Mesh, cluster: Cluster, count: int = 1) -> Iterator[Enumerated]:
    """Every layout of every operator with every storage of every weight, each of them lowered and
    walked as a whole; `graph` has no blocks.
    """
    storage = StoragePrices(Walker({}, mesh, cluster), Decisions(one_stage(mesh)), ADAM)
    elements = sum(e.value.spec.num_elements for e in graph.of_kind("parameter"))
    last, trained = last_reduced(graph), reached(graph)
    for plan, pcg in every_layout(graph, mesh, count):
        passes = estimate(pcg, Walker({}, pcg.mesh, cluster), ADAM).passes
        kept = priced(pcg, cluster, plan, ADAM).main.inside_bytes
        options: list[list[tuple[PParameter, Level, WeightPrice]]] = []
        for weight in pcg.parameters:
            value = weight.input.value
            reduce = tuple(axis for axis in weight.reduce if axis in mesh.names)
            one = Weight(
                value.spec, True, False, weight.layout, reduce, elements, elements,
                last=value.name in last, reached=value.name in trained,
            )  # fmt: skip
            levels, parts = storage.options(one)
            options.append([(weight, *some) for some in zip(levels, parts, strict=True)])
        for chosen in product(*options):
            weights = sum((part for _, _, part in chosen[1:]), chosen[0][2])
            stored = tuple((weight, level) for weight, level, _ in chosen)
            step_ps = Estimate(passes, weights, count).step_ps
            yield Enumerated(plan, stored, step_ps, counted_bytes(kept, weights, count))


def counted_bytes(kept: int, weights: WeightPrice, count: int) -> int:
    """What the model counts where activations of so many bytes are kept."""
    rows = np.zeros(NUM_ROWS)
    rows[KEPT], rows[PARTS:] = kept, weights
    return int(step_sums(rows, Passes(count)).held_bytes)


def passes_bytes(kept: int, weights: WeightPrice, count: int) -> int:
    """The same between the passes alone."""
    rows = np.zeros(NUM_ROWS)
    rows[KEPT], rows[PARTS:] = kept, weights
    return int(step_sums(rows, Passes(count)).pass_bytes)


def least_step_ps(plans: list[Enumerated], limit: float = PLENTY) -> int:
    """The least estimate of what holds at most `limit` bytes."""
    return min(plan.step_ps for plan in plans if plan.held_bytes <= limit)
