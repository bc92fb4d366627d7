"""Random plans, and random changes of a plan, inside the space that `auto` searches.

A `Draft` has one layout for all calls of an operator of a block kind, storage by parameter and
recomputation by block call (`docs/space.md`). Nothing here is shared with the search.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from random import Random
from typing import NamedTuple

from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Call, FlatNode, Graph, Node
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
Layouts = Mapping[Kind, Mapping[str, Axes]]
NAMES = ("x", "y", "z", "w")
# How likely an axis spreads from an operator to one that shares a value with it.
SPREADS = (0.0, 0.5, 0.9, 1.0)
# How many block calls change at once, as a share of those of a kind; 0: one.
SHARES = (0.0, 0.25, 0.5, 1.0)


class End(NamedTuple):
    """A value as an operator has it: its result or operand, and the factors of each dim."""

    kind: Kind
    dims: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Draft:
    """A plan that is being changed."""

    mesh: Mesh
    layouts: Layouts
    stored: Mapping[str, ParameterDecision]
    recomputed: Mapping[str, ActivationDecision]
    num_microbatches: int = 1


Change = Callable[["Space", Draft, Random], tuple[str, Draft] | None]
"""A change of a draft with its name; None where there is nothing to change."""


class Space:
    """The plans of a graph on a cluster."""

    def __init__(self, graph: Graph, cluster: Cluster, base: Decisions) -> None:
        self.graph, self.cluster, self.base = graph, cluster, base
        self.factored: Factored = factorize(graph)
        self.counts = legal_microbatches(self.factored).counts
        self.calls: dict[Kind, list[str]] = {}
        self.ends: dict[str, set[End]] = {}
        readers: dict[str, set[tuple[Kind, int]]] = {}
        for flat in graph.flat():
            kind, rule = (flat.function, flat.node.key), self.rule_of(flat)
            self.calls.setdefault(kind, []).append(flat.key)
            values = zip(
                (*flat.operands, *flat.results), (*rule.operands, *rule.results), strict=True
            )
            for name, dims in values:
                self.ends.setdefault(name, set()).add(End(kind, dims))
            for position, name in enumerate(flat.operands):
                readers.setdefault(name, set()).add((kind, position))
        self.kinds = [kind for kind in self.calls if self.factored.rules[kind].shardable]
        weights: dict[object, list[str]] = {}
        for entry in graph.of_kind("parameter"):
            if entry.value.spec.shape:
                read = frozenset(readers.get(entry.value.name, ()))
                weights.setdefault((entry.value.spec, read), []).append(entry.target)
        self.weights = list(weights.values())

    def rule_of(self, flat: FlatNode) -> Rule:
        return self.factored.rule(flat.function, flat.node)

    @cached_property
    def neighbours(self) -> Mapping[Kind, Sequence[tuple[End, End]]]:
        """For each operator the ends of values that it shares with others."""
        found: dict[Kind, dict[tuple[End, End], None]] = {}
        for ends in self.ends.values():
            ordered = sorted(ends)
            for mine in ordered:
                for its in ordered:
                    if mine.kind != its.kind:
                        found.setdefault(mine.kind, {})[mine, its] = None
        return {kind: tuple(pairs) for kind, pairs in found.items()}

    @cached_property
    def blocks(self) -> Mapping[str, list[str]]:
        """The calls, by function, whose activations are free to be kept or recomputed."""
        callers = {f.name for f in self.graph.functions if any(isinstance(i, Call) for i in f.body)}
        found: dict[str, list[str]] = {}
        for item in self.graph.main.body:
            free = isinstance(item, Call) and item.prefix not in self.graph.recomputed_calls
            if isinstance(item, Call) and free and item.function not in callers:
                found.setdefault(item.function, []).append(item.prefix)
        return found

    def draft(self, decisions: Decisions) -> Draft:
        """A plan as it can be changed."""
        known = {node.key: dict(node.factors) for node in decisions.nodes}
        return Draft(
            decisions.mesh,
            {kind: known.get(keys[0], {}) for kind, keys in self.calls.items()},
            {p.name: p for p in decisions.parameters},
            {a.prefix: a for a in decisions.activations},
            decisions.num_microbatches,
        )

    def decisions(self, draft: Draft) -> Decisions:
        """A draft as a plan says it."""
        nodes = (
            NodeDecision(key, tuple(factors.items()))
            for kind, factors in draft.layouts.items()
            for key in self.calls[kind]
        )
        return replace(
            self.base,
            stages=one_stage(draft.mesh),
            nodes=tuple(nodes),
            parameters=tuple(draft.stored.values()),
            activations=tuple(draft.recomputed.values()),
            num_microbatches=draft.num_microbatches,
        )

    def lowered(self, draft: Draft) -> tuple[Draft, PCG]:
        """A draft whose weights are in chunks over axes that their layouts replicate, lowered.

        Raises `LayoutError` where a layout is not legal.
        """
        pcg = lower(self.graph, self.decisions(draft), factored=self.factored)
        stored: dict[str, ParameterDecision] = {}
        for parameter in pcg.parameters:
            found = draft.stored.get(parameter.input.target)
            free = tuple(
                tuple(axis for axis in axes if axis not in parameter.layout.axes)
                for axes in axes_of(found)
            )
            if found is not None and free == axes_of(found):
                stored[found.name] = found
            elif found is not None and any(free):
                stored[found.name] = storage_of(parameter, draft.mesh, free)
        if stored == draft.stored:
            return draft, pcg
        draft = replace(draft, stored=stored)
        return draft, lower(self.graph, self.decisions(draft), factored=self.factored)


# Storage


def storage_of(parameter: PParameter, mesh: Mesh, axes: Sequence[Axes]) -> ParameterDecision:
    """Weight, gradient and optimizer state over `axes`, in chunks of the dim that wastes least."""
    shape = local_shape(parameter.layout, parameter.input.value.spec.shape, mesh)
    count = mesh.size(max(axes, key=len))
    dim = min(range(len(shape)), key=lambda d: ceil(shape[d] / count) / max(shape[d], 1))
    parts = (Storage(some, dim) if some else Storage() for some in axes)
    return ParameterDecision(parameter.input.target, *parts)


def axes_of(decision: ParameterDecision | None) -> tuple[Axes, ...]:
    """The axes of weight, gradient and optimizer state."""
    parts = (decision.weight, decision.gradient, decision.optimizer) if decision else ()
    return tuple(part.axes for part in parts)


def nested(axes: Axes, rng: Random) -> tuple[Axes, Axes, Axes]:
    """All of `axes` for the optimizer state, of these the last ones for the gradient, and of these
    the last ones for the weight; most often all or none. Those of each come first in the next.
    """
    every = range(len(axes) + 1)
    some = (0, len(axes)) if rng.random() < 0.6 else every
    gradient, weight = sorted((rng.choice(some), rng.choice(some)))
    first, second = axes[weight:], axes[gradient:weight]
    return first, (*first, *second), (*first, *second, *axes[:gradient])


def stored_otherwise(space: Space, draft: Draft, rng: Random) -> tuple[str, Draft] | None:
    """Other axes of weight, gradient and state: of one weight, of one kind, or of all."""
    mesh, whole = draft.mesh, rng.random() < 0.25
    kind = rng.choice(space.weights)
    some = rng.choice((kind, kind, rng.sample(kind, 1), [t for k in space.weights for t in k]))
    every = rng.random() < 0.5
    among = tuple(a for a in mesh.names if mesh[a].size > 1 and (every or rng.random() < 0.5))
    chosen = ((), (), ()) if whole else nested(among, rng)
    parameters = {p.input.target: p for p in space.lowered(replace(draft, stored={}))[1].parameters}
    stored = {name: found for name, found in draft.stored.items() if name not in some}
    for name in some:
        parameter = parameters[name]
        axes = [tuple(a for a in part if a not in parameter.layout.axes) for part in chosen]
        if not parameter.input.trainable:
            axes[1:] = [(), ()]
        if any(axes) and parameter.input.value.spec.shape:
            stored[name] = storage_of(parameter, mesh, axes)
    words = f"{some[0]}{f' and {len(some) - 1} more' if some[1:] else ''}"
    parts = " / ".join(",".join(part) or "whole" for part in chosen)
    return f"storage of {words}: {parts}", replace(draft, stored=stored)


# Layouts


def with_axis(
    rule: Rule, factors: Mapping[str, Axes], mesh: Mesh, axis: str, factor: str | None
) -> Mapping[str, Axes] | None:
    """`factors` with `axis` on another factor (None: on none); None where it does not divide."""
    found = {f: tuple(a for a in axes if a != axis) for f, axes in factors.items()}
    if factor is not None:
        on = {*found.get(factor, ()), axis}
        found[factor] = tuple(name for name in mesh.names if name in on)
        if rule.size(factor) % mesh.size(found[factor]):
            return None
    return {f: axes for f, axes in found.items() if axes}


def spread(
    space: Space,
    draft: Draft,
    start: tuple[Kind, str | None],
    axis: str,
    likely: float,
    rng: Random,
) -> dict[Kind, Mapping[str, Axes]]:
    """The layouts with `axis` on a factor of one operator, and on the dims of the values that it
    shares with others on these, as far as it spreads.
    """
    layouts = dict(draft.layouts)
    pending, seen = [start], {start[0]}
    while pending:
        kind, factor = pending.pop(rng.randrange(len(pending)))
        rule = space.factored.rules[kind]
        changed = with_axis(rule, layouts[kind], draft.mesh, axis, factor)
        if changed is None:
            continue
        layouts[kind] = changed
        for mine, its in space.neighbours.get(kind, ()):
            if its.kind in seen or rng.random() >= likely:
                continue
            other = next(
                (there[position]
                 for here, there in zip(mine.dims, its.dims, strict=True)
                 for position, name in enumerate(here)
                 if name == factor and position < len(there)), None)  # fmt: skip
            if other is None or other in space.factored.rules[its.kind].shardable:
                seen.add(its.kind)
                pending.append((its.kind, other))
    return layouts


def relaid(space: Space, draft: Draft, rng: Random) -> tuple[str, Draft] | None:
    """An axis on another factor of an operator, and of those that share values with it."""
    axes = [a.name for a in draft.mesh.axes if a.size > 1]
    if not axes or not space.kinds:
        return None
    kind, axis = rng.choice(space.kinds), rng.choice(axes)
    factor = rng.choice((None, *space.factored.rules[kind].shardable))
    layouts = spread(space, draft, (kind, factor), axis, rng.choice(SPREADS), rng)
    others = [k for k in layouts if layouts[k] != draft.layouts[k] and k != kind]
    if not others and layouts[kind] == draft.layouts[kind]:
        return None
    words = f"layout of {':'.join(kind)}: {axis} on {factor}, with {len(others)} others"
    return words, replace(draft, layouts=layouts)


def exchanged(_: Space, draft: Draft, rng: Random) -> tuple[str, Draft] | None:
    """Two mesh axes in each other's place."""
    if len(draft.mesh.axes) < 2:
        return None
    one, two = rng.sample(draft.mesh.names, 2)
    return f"{one} and {two} exchanged", _renamed(draft, draft.mesh, {one: (two,), two: (one,)})


# Meshes


def _renamed(draft: Draft, mesh: Mesh, names: Mapping[str, Axes]) -> Draft:
    """`draft` on `mesh`, where each axis of its own is what `names` says; others stay."""

    def axes(some: Axes) -> Axes:
        return tuple(dict.fromkeys(new for old in some for new in names.get(old, (old,))))

    def ordered(some: Axes) -> Axes:
        return tuple(name for name in mesh.names if name in axes(some))

    layouts = {k: {f: ordered(a) for f, a in some.items()} for k, some in draft.layouts.items()}
    stored = {
        name: ParameterDecision(
            name, *(replace(s, axes=axes(s.axes)) for s in (d.weight, d.gradient, d.optimizer))
        )
        for name, d in draft.stored.items()
    }
    return replace(draft, mesh=mesh, layouts=layouts, stored=stored)


def divided(space: Space, draft: Draft) -> Draft:
    """`draft` without what does not divide, or is on two factors, of its layouts."""
    layouts: dict[Kind, Mapping[str, Axes]] = {}
    for kind, factors in draft.layouts.items():
        rule, found = space.factored.rules[kind], dict[str, Axes]()
        for axis in draft.mesh.names:
            on = next((f for f, axes in factors.items() if axis in axes), None)
            found = dict(with_axis(rule, found, draft.mesh, axis, on) or found)
        layouts[kind] = found
    return replace(draft, layouts=layouts)


def cut_axis(_: Space, draft: Draft, rng: Random) -> tuple[str, Draft] | None:
    """One axis as two."""
    axes = [axis for axis in draft.mesh.axes if len(axis.primes) > 1]
    if not axes or len(draft.mesh.axes) == len(NAMES):
        return None
    axis = rng.choice(axes)
    cut = rng.randrange(1, len(axis.primes))
    position = draft.mesh.names.index(axis.name)
    parts = (
        *(a.primes for a in draft.mesh.axes[:position]), axis.primes[:cut], axis.primes[cut:],
        *(a.primes for a in draft.mesh.axes[position + 1 :]),
    )  # fmt: skip
    mesh = Mesh(tuple(map(MeshAxis, NAMES, parts)))
    names: dict[str, Axes]
    names = {name: (NAMES[i + (i > position)],) for i, name in enumerate(draft.mesh.names)}
    names[axis.name] = NAMES[position : position + 2]
    return f"{axis.name} cut into {mesh.axes[position].size} x {mesh.axes[position + 1].size}", (
        _renamed(draft, mesh, names)
    )


def joined_axes(space: Space, draft: Draft, rng: Random) -> tuple[str, Draft] | None:
    """Two neighbouring axes as one."""
    axes = draft.mesh.axes
    if len(axes) < 2:
        return None
    first = rng.randrange(len(axes) - 1)
    parts = [axis.primes for axis in axes]
    parts[first : first + 2] = [parts[first] + parts[first + 1]]
    mesh = Mesh(tuple(map(MeshAxis, NAMES, parts)))
    names = {name: (NAMES[i - (i > first)],) for i, name in enumerate(draft.mesh.names)}
    words = f"{axes[first].name} and {axes[first + 1].name} joined"
    return words, divided(space, _renamed(draft, mesh, names))


def shifted(space: Space, draft: Draft, rng: Random) -> tuple[str, Draft] | None:
    """Two neighbouring axes of other sizes."""
    axes = list(draft.mesh.axes)
    if len(axes) < 2:
        return None
    first = rng.randrange(len(axes) - 1)
    one, two = axes[first : first + 2]
    primes = one.primes + two.primes
    cut = rng.randrange(1, len(primes))
    axes[first : first + 2] = [
        replace(one, primes=primes[:cut]), replace(two, primes=primes[cut:])
    ]  # fmt: skip
    words = f"{one.name} and {two.name} of sizes {axes[first].size} and {axes[first + 1].size}"
    return words, divided(space, replace(draft, mesh=Mesh(tuple(axes))))


# Activations and microbatches


def remade(space: Space, draft: Draft, rng: Random) -> tuple[str, Draft] | None:
    """Some calls of a block keep all, recompute all, or change one value or redistribution."""
    if not space.blocks:
        return None
    function = rng.choice(list(space.blocks))
    calls = space.blocks[function]
    share = rng.choice(SHARES)
    count = max(1, int(share * len(calls)))
    start = rng.choice((0, rng.randrange(len(calls) - count + 1)))
    some = calls[start : start + count]
    block = space.graph.by_name[function]
    operators = [item.key for item in block.body if isinstance(item, Node)]
    inputs = [value.name for value in block.inputs]
    how = rng.choice(("keep", "whole", "value", "value", "value", "move", "move"))
    name = rng.choice(operators if how == "value" else (*operators, *inputs))
    recomputed = {p: a for p, a in draft.recomputed.items() if p not in some}
    for prefix in some:
        own = draft.recomputed.get(prefix, ActivationDecision(prefix, "recompute"))
        values, moves = set(own.values), set(own.moves)
        if how in ("value", "move"):
            (values if how == "value" else moves).symmetric_difference_update({name})
        listed = replace(own, values=tuple(values), moves=tuple(moves))
        if how == "whole":
            recomputed[prefix] = ActivationDecision(prefix, "recompute")
        elif how != "keep" and listed.lists:
            recomputed[prefix] = listed
    what = how if how in ("keep", "whole") else f"{how} {name}"
    words = f"recomputation of {some[0]}{f' and {count - 1} more' if count > 1 else ''}: {what}"
    return words, replace(draft, recomputed=recomputed)


def counted(space: Space, draft: Draft, rng: Random) -> tuple[str, Draft] | None:
    """Another number of microbatches, most often one of the nearest."""
    others = [count for count in space.counts if count != draft.num_microbatches]
    if not others:
        return None
    near = sorted(
        others, key=lambda n: max(n, draft.num_microbatches) / min(n, draft.num_microbatches)
    )
    count = rng.choice(rng.choice((near[:2], others)))
    return f"{count} microbatches", replace(draft, num_microbatches=count)


CHANGES: tuple[tuple[Change, int], ...] = (
    (relaid, 8), (stored_otherwise, 5), (remade, 5), (counted, 2), (cut_axis, 1), (joined_axes, 1),
    (shifted, 1), (exchanged, 1),
)  # fmt: skip


def mutated(space: Space, draft: Draft, rng: Random) -> tuple[str, Draft]:
    """`draft` with one to three changes, and their names.

    Raises `LayoutError` where one is not legal.
    """
    changes, weights = zip(*CHANGES, strict=True)
    names: list[str] = []
    for change in rng.choices(changes, weights, k=rng.choice((1, 1, 1, 1, 2, 2, 3))):
        found = change(space, draft, rng)
        if found is not None:
            names.append(found[0])
            draft = found[1]
    return "; ".join(names), draft


def random_draft(space: Space, rng: Random) -> Draft:
    """A random plan: each axis is spread from operators until it has reached all of them."""
    primes = tuple(reversed(space.cluster.prime_axes()))
    number = rng.randrange(1, min(len(primes), len(NAMES)) + 1)
    cuts = sorted(rng.sample(range(1, len(primes)), number - 1))
    ends = zip((0, *cuts), (*cuts, len(primes)), strict=True)
    mesh = Mesh(tuple(MeshAxis(n, primes[a:b]) for n, (a, b) in zip(NAMES, ends, strict=False)))
    draft = Draft(mesh, {kind: {} for kind in space.calls}, {}, {}, rng.choice(space.counts))
    for axis in mesh.names:
        left = list(space.kinds)
        likely = rng.choice(SPREADS)
        while left:
            kind = rng.choice(left)
            factor = rng.choice((None, *space.factored.rules[kind].shardable))
            layouts = spread(space, draft, (kind, factor), axis, likely, rng)
            left = [k for k in left if k != kind and layouts[k] == draft.layouts[k]]
            draft = replace(draft, layouts=layouts)
    for change in (stored_otherwise, stored_otherwise, remade, remade):
        found = change(space, draft, rng)
        draft = found[1] if found and rng.random() < 0.5 else draft
    return draft
