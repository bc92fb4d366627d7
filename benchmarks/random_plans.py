"""Random plans of the space that `auto` searches (`docs/explanation/search.md`).

All calls of an operator of a block kind have one layout; weights that are alike are stored alike,
and block calls side by side recompute alike. Nothing here is shared with the search.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from random import Random
from typing import NamedTuple

from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Call, Graph, Node
from parloom.ir.layout import local_shape
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh, MeshAxis
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG, PParameter
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    ParameterDecision,
    Storage,
    one_stage,
)

Axes = tuple[str, ...]
Kind = tuple[str, str]
"""An operator of a block kind: the function's name and the operator's key in it."""
Factors = Mapping[str, Axes]
NAMES = ("x", "y", "z", "w")
# How likely an axis spreads from an operator to one that shares a value with it.
SPREADS = (0.0, 0.5, 0.9, 1.0)
# How many calls of a block recompute, as a share of all; 0: one.
SHARES = (0.0, 0.25, 0.5, 1.0)


class End(NamedTuple):
    """A value as an operator has it: its result or operand, and the factors of each dim."""

    kind: Kind
    dims: tuple[tuple[str, ...], ...]


class RandomPlans:
    """Random plans of a graph on a cluster; `base` says what holds for all of them."""

    def __init__(self, graph: Graph, cluster: Cluster, base: Decisions, rng: Random) -> None:
        self.graph, self.cluster, self.base, self.rng = graph, cluster, base, rng
        self.factored: Factored = factorize(graph)
        self.counts = legal_microbatches(self.factored).counts
        self.calls: dict[Kind, list[str]] = {}
        ends: dict[str, set[End]] = {}
        readers: dict[str, set[tuple[Kind, int]]] = {}
        for flat in graph.flat():
            rule = self.factored.rule(flat.function, flat.node)
            kind = flat.function, flat.node.key
            self.calls.setdefault(kind, []).append(flat.key)
            values = (*flat.operands, *flat.results)
            for name, dims in zip(values, (*rule.operands, *rule.results), strict=True):
                ends.setdefault(name, set()).add(End(kind, dims))
            for position, name in enumerate(flat.operands):
                readers.setdefault(name, set()).add((kind, position))
        self.kinds = [kind for kind in self.calls if self.factored.rules[kind].shardable]
        self.neighbors: dict[Kind, dict[tuple[End, End], None]] = {}
        for shared in map(sorted, ends.values()):
            for mine in shared:
                pairs = ((mine, its) for its in shared if its.kind != mine.kind)
                self.neighbors.setdefault(mine.kind, {}).update(dict.fromkeys(pairs))
        alike: dict[object, list[str]] = {}
        for entry in graph.of_kind("parameter"):
            read = frozenset(readers.get(entry.value.name, ()))
            alike.setdefault((entry.value.spec, read), []).append(entry.target)
        self.weights = list(alike.values())
        self.blocks = list(_blocks(graph).values())

    def drawn(self) -> tuple[Decisions, PCG]:
        """A plan and what it is lowered to.

        Raises `LayoutError` where it is not legal.
        """
        mesh = self._mesh()
        layouts = self._layouts(mesh)
        nodes = (
            NodeDecision(key, tuple(factors.items()))
            for kind, factors in layouts.items()
            for key in self.calls[kind]
        )
        whole = replace(
            self.base,
            stages=one_stage(mesh),
            nodes=tuple(nodes),
            activations=self._recomputed(),
            num_microbatches=self.rng.choice(self.counts),
        )
        pcg = lower(self.graph, whole, factored=self.factored)
        stored = self._stored(pcg, mesh)
        if not stored:
            return whole, pcg
        decisions = replace(whole, parameters=stored)
        return decisions, lower(self.graph, decisions, factored=self.factored)

    def _mesh(self) -> Mesh:
        primes = tuple(reversed(self.cluster.prime_axes()))
        number = self.rng.randrange(1, min(len(primes), len(NAMES)) + 1)
        cuts = sorted(self.rng.sample(range(1, len(primes)), number - 1))
        ends = zip((0, *cuts), (*cuts, len(primes)), strict=True)
        axes = (MeshAxis(n, primes[a:b]) for n, (a, b) in zip(NAMES, ends, strict=False))
        return Mesh(tuple(axes))

    def _layouts(self, mesh: Mesh) -> Mapping[Kind, Factors]:
        """Each axis is spread from operators until it was at all of them."""
        layouts: dict[Kind, Factors] = {kind: {} for kind in self.calls}
        for axis in mesh.names:
            left, likely = list(self.kinds), self.rng.choice(SPREADS)
            while left:
                kind = self.rng.choice(left)
                factor = self.rng.choice((None, *self.factored.rules[kind].shardable))
                changed = self._spread(layouts, mesh, (kind, factor), axis, likely)
                left = [k for k in left if k != kind and changed[k] == layouts[k]]
                layouts = changed
        return layouts

    def _spread(
        self,
        layouts: Mapping[Kind, Factors],
        mesh: Mesh,
        start: tuple[Kind, str | None],
        axis: str,
        likely: float,
    ) -> dict[Kind, Factors]:
        """`layouts` with `axis` on a factor of one operator, and on the dims of the values that it
        shares with others, as far as it spreads.
        """
        rng, found = self.rng, dict(layouts)
        pending, seen = [start], {start[0]}
        while pending:
            kind, factor = pending.pop(rng.randrange(len(pending)))
            changed = with_axis(self.factored.rules[kind], found[kind], mesh, axis, factor)
            if changed is None:
                continue
            found[kind] = changed
            for mine, its in self.neighbors.get(kind, ()):
                if its.kind in seen or rng.random() >= likely:
                    continue
                other = next(_opposite(mine, its, factor), None)
                if other is None or other in self.factored.rules[its.kind].shardable:
                    seen.add(its.kind)
                    pending.append((its.kind, other))
        return found

    def _stored(self, pcg: PCG, mesh: Mesh) -> tuple[ParameterDecision, ...]:
        """Storage of some weights over axes that replicate them."""
        parameters = {p.input.target: p for p in pcg.parameters}
        found: dict[str, ParameterDecision] = {}
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            alike = self.rng.choice(self.weights)
            every = [target for targets in self.weights for target in targets]
            targets = self.rng.choice((alike, alike, self.rng.sample(alike, 1), every))
            parts = nested(mesh.names, self.rng)
            for target in targets:
                parameter = parameters[target]
                free = [tuple(a for a in p if a not in parameter.layout.axes) for p in parts]
                if not parameter.input.trainable:
                    free[1:] = [(), ()]
                found.pop(target, None)
                if any(free) and parameter.input.value.spec.shape:
                    found[target] = stored_over(parameter, mesh, free)
        return tuple(found.values())

    def _recomputed(self) -> tuple[ActivationDecision, ...]:
        """Recomputation of some calls of a block: of all that they make, or of some of it."""
        rng, found = self.rng, dict[str, ActivationDecision]()
        for _ in range(rng.choice((0, 1, 1, 2)) if self.blocks else 0):
            calls, operators, inputs = rng.choice(self.blocks)
            count = max(1, int(rng.choice(SHARES) * len(calls)))
            start = rng.choice((0, rng.randrange(len(calls) - count + 1)))
            some = ActivationDecision("", "recompute")
            if rng.random() < 0.75:
                values = rng.sample(operators, rng.randrange(1, len(operators) + 1))
                moves = rng.sample((*operators, *inputs), rng.randrange(3))
                some = replace(some, values=tuple(values), moves=tuple(moves))
            for prefix in calls[start : start + count]:
                found[prefix] = replace(some, prefix=prefix)
        return tuple(found.values())


def _blocks(graph: Graph) -> dict[str, tuple[list[str], list[str], list[str]]]:
    """By function, the calls whose activations are free to be kept or recomputed, its operators and
    its inputs.
    """
    callers = {f.name for f in graph.functions if any(isinstance(i, Call) for i in f.body)}
    found: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for item in graph.main.body:
        if not isinstance(item, Call) or item.prefix in graph.recomputed_calls:
            continue
        if item.function not in callers:
            block = graph.by_name[item.function]
            operators = [node.key for node in block.body if isinstance(node, Node)]
            names = [value.name for value in block.inputs]
            found.setdefault(item.function, ([], operators, names))[0].append(item.prefix)
    return found


def stored_over(parameter: PParameter, mesh: Mesh, axes: Sequence[Axes]) -> ParameterDecision:
    """Weight, gradient and optimizer state over `axes`, in chunks of the dim that wastes least."""
    shape = local_shape(parameter.layout, parameter.input.value.spec.shape, mesh)
    count = mesh.size(max(axes, key=len))
    dim = min(range(len(shape)), key=lambda d: ceil(shape[d] / count) / max(shape[d], 1))
    parts = (Storage(some, dim) if some else Storage() for some in axes)
    return ParameterDecision(parameter.input.target, *parts)


def nested(names: Axes, rng: Random) -> tuple[Axes, Axes, Axes]:
    """Some axes for the optimizer state, of these the last ones for the gradient, and of these the
    last ones for the weight; most often all or none. Those of each come first in the next.
    """
    whole = rng.random() < 0.5
    axes = tuple(axis for axis in names if whole or rng.random() < 0.5)
    some = (0, len(axes)) if rng.random() < 0.6 else range(len(axes) + 1)
    gradient, weight = sorted((rng.choice(some), rng.choice(some)))
    first, second = axes[weight:], axes[gradient:weight]
    return first, (*first, *second), (*first, *second, *axes[:gradient])


def with_axis(
    rule: Rule, factors: Factors, mesh: Mesh, axis: str, factor: str | None
) -> Factors | None:
    """`factors` with `axis` on another factor (None: on none); None where it does not divide."""
    found = {f: tuple(a for a in axes if a != axis) for f, axes in factors.items()}
    if factor is not None:
        on = {*found.get(factor, ()), axis}
        found[factor] = tuple(name for name in mesh.names if name in on)
        if rule.size(factor) % mesh.size(found[factor]):
            return None
    return {f: axes for f, axes in found.items() if axes}


def _opposite(mine: End, its: End, factor: str | None) -> Iterator[str]:
    """Factors of the other end of a value that lie where `factor` does on this one."""
    for here, there in zip(mine.dims, its.dims, strict=True):
        for position, name in enumerate(here):
            if name == factor and position < len(there):
                yield there[position]
