"""Pins that cannot be held: each one against the meshes, a plan against them, and all together."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod

from parloom.errors import InputError, nearest
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Graph
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.ir.stages import stage_items
from parloom.rewrite.pad import PADS
from parloom.rewrite.rewrites import paddings_of, rewritten, takes_of
from parloom.search.choices import assignments
from parloom.search.meshes import MAX_AXES, NAMES, logical_meshes
from parloom.search.pinned import WHOLE_PLAN, Pinned, Subjects, allows_stored
from parloom.search.pins import KEEP, PARTS, WHOLE, Kind, Pin, Term

Feasible = Callable[[Sequence[Pin]], bool]


def check_pins(pinned: Pinned, factored: Factored, cluster: Cluster) -> None:
    """Raise `InputError` for a pin that by itself no plan on the meshes that are searched can hold
    (where pins name a mesh, on that).
    """
    _check_stages(pinned, len(stage_items(factored.graph)))
    meshes = check_axes(pinned, cluster)
    for found in pinned.subjects if meshes else ():
        if found.pin.kind not in WHOLE_PLAN:
            _check_divides(found, factored, meshes)


def _check_stages(pinned: Pinned, num_items: int) -> None:
    """A model of so many items can have as many stages as pins ask for."""
    found = [pin.text for pin in pinned.pins if pin.kind is Kind.STAGES]
    if found and not any(map(pinned.allows_stages, range(1, num_items + 1))):
        raise InputError(
            f"{' and '.join(found)}: no plan has so many; the model has {num_items} items"
            " (operators and blocks), of which a stage has one or more"
        )


def check_axes(pinned: Pinned, cluster: Cluster) -> tuple[Mesh, ...]:
    """Raise `InputError` for a pin on meshes or axes that `cluster` does not have, whatever the
    model; the meshes that pins leave.
    """
    for pin in pinned.pins:
        if pin.kind is Kind.MESH and not any(map(pin.allows_mesh, nameable(cluster, pinned))):
            there = "; ".join(map(sizes_of, logical_meshes(cluster)))
            raise InputError(f"{pin.text}: no such mesh; of one and two axes there are: {there}")
    meshes = tuple(filter(pinned.allows_mesh, nameable(cluster, pinned)))
    for pin in pinned.pins if meshes else ():
        for term in pin.terms if pin.kind in (Kind.LAYOUT, Kind.STORAGE) else ():
            _check_where(pin, term, meshes)
    return meshes


def sizes_of(mesh: Mesh) -> str:
    """A mesh as a pin may name it."""
    return ",".join(f"{axis.name}:{axis.size}" for axis in mesh.axes)


def nameable(cluster: Cluster, pinned: Pinned) -> Iterator[Mesh]:
    """The logical meshes of `cluster` of one and two axes; with more where pins name a mesh."""
    return logical_meshes(cluster, len(NAMES) if pinned.names_mesh else MAX_AXES)


def meshes_of(cluster: Cluster, pinned: Pinned, factored: Factored) -> Iterator[Mesh]:
    """The meshes that are searched, of those on which pins leave every operator a choice."""
    for mesh in nameable(cluster, pinned):
        if pinned.allows_mesh(mesh) and all(
            any(map(allowed, assignments(factored.rules[place], mesh)))
            for place in pinned.operators
            if (allowed := pinned.allowed(place, factored.rules[place], mesh)) is not None
        ):
            yield mesh


def _check_where(pin: Pin, term: Term, meshes: Sequence[Mesh]) -> None:
    """The axis, or the number of devices, of some mesh."""
    where = term.where
    if where.isdigit():
        sizes = {
            prod(axis.size for axis in some)
            for mesh in meshes
            for count in range(1, len(mesh.axes) + 1)
            for some in combinations(mesh.axes, count)
        }
        if int(where) not in sizes:
            some = ", ".join(map(str, sorted(sizes)))
            raise InputError(f"{pin.text}: no axes make {where} devices; there are: {some}")
        return
    names = list(dict.fromkeys(name for mesh in meshes for name in mesh.names))
    if where not in (WHOLE, PARTS, *names):
        raise InputError(
            f"{pin.text}: no axis {where!r}{nearest(where, names)}; or a number of devices"
        )


def _check_divides(found: Subjects, factored: Factored, meshes: Sequence[Mesh]) -> None:
    """Each operator that it names can do as it says on some mesh."""
    pin = found.pin
    for (function, key), name in found.operators:
        rule = factored.rules[function, key]
        if any(
            pin.allows_operator(rule, chosen, mesh)
            for mesh in meshes
            for chosen in assignments(rule, mesh)
        ):
            continue
        reasons = dict.fromkeys(r for mesh in meshes for r in _reasons(pin, rule, mesh))
        raise InputError(f"{pin.text}: {name} cannot: {'; '.join(list(reasons)[:4])}")


def _reasons(pin: Pin, rule: Rule, mesh: Mesh) -> Iterator[str]:
    """Why a pin does not divide on a mesh, with the numbers."""
    for term in pin.terms:
        if term.where in mesh.names:
            size, what = mesh[term.where].size, f"axis {term.where} has"
        elif term.where.isdigit():
            size, what = int(term.where), "it is to be over"
        elif term.where in (WHOLE, PARTS):
            size, what = min(axis.size for axis in mesh.axes), "the smallest axis has"
        else:
            continue
        factors = ", ".join(
            f"{factor} is {rule.size(factor)}"
            + ("" if factor in rule.shardable else " and never split")
            for factor in term.factors(rule)
            if factor not in rule.sums
        )
        yield f"{factors}, {what} {size} device{'s' if size > 1 else ''} ({sizes_of(mesh)})"


def broken(pinned: Pinned, graph: Graph, decisions: Decisions) -> str | None:
    """The first pin that a plan of `graph` does not hold, and where; None where it holds all."""
    if not pinned.pins:
        return None
    found = _broken_whole(pinned, decisions)
    if found is not None:
        return found
    recomputed = {a.prefix: a.policy for a in decisions.activations}
    for own in pinned.subjects:
        for block in own.blocks:
            if recomputed.get(block, KEEP) != own.pin.policy:
                return f"{own.pin.text}: {block} is {recomputed.get(block, KEEP)}"
    if not pinned.operators and not pinned.parameters:
        return None
    # Rewrites may make other functions, and leave the names of operators as they are.
    pins = {f.key: pinned.operators.get((f.function, f.node.key), ()) for f in graph.flat()}
    lowered = lower_stages(rewritten(graph, decisions.rewrites), decisions)
    for index, pcg in enumerate(lowered.pcgs):
        others = {name for name, own in lowered.cut.shared.items() if own[0] != index}
        found = _broken_operator(pins, pcg) or _broken_storage(pinned, pcg, others)
        if found is not None:
            return found
    return None


def _broken_whole(pinned: Pinned, decisions: Decisions) -> str | None:
    """The first pin on all of a plan that it does not hold."""
    rules = [rule for take in takes_of(decisions.rewrites) for rule in take.rules]
    rules += [PADS] if paddings_of(decisions.rewrites) else []
    for pin in pinned.pins:
        if pin.kind is Kind.REWRITE and pin.is_about(rules) == pin.forbidden:
            return f"{pin.text}: the plan has {'' if pin.forbidden else 'no '}such rewrite"
        if pin.kind is Kind.STAGES and not pin.allows_stages(len(decisions.stages)):
            count = len(decisions.stages)
            return f"{pin.text}: the plan has {count} stage{'s' * (count != 1)}"
        for stage in decisions.stages:
            if pin.kind is Kind.MESH and not pin.allows_mesh(stage.mesh):
                return f"{pin.text}: the mesh is {sizes_of(stage.mesh)}"
    return None


def _broken_operator(pins: Mapping[str, Sequence[Pin]], pcg: PCG) -> str | None:
    """`pins` are those of each operator of the whole graph, by its key."""
    factored = factorize(pcg.graph)
    known = {node.key: dict(node.factors) for node in pcg.decisions.nodes}
    for flat in pcg.graph.flat():
        chosen = known.get(flat.key, {})
        for pin in pins.get(flat.key, ()):
            rule = factored.rule(flat.function, flat.node)
            if not pin.allows_operator(rule, chosen, pcg.decisions.mesh):
                split = ", ".join(f"{f}:{a}" for f, axes in chosen.items() for a in axes)
                return f"{pin.text}: {flat.key} is {split or 'replicated'}"
    return None


def _broken_storage(pinned: Pinned, pcg: PCG, others: Collection[str]) -> str | None:
    """`others` are parameters that another stage stores."""
    for parameter in pcg.parameters:
        name = parameter.input.target
        for pin in () if name in others else pinned.parameters.get(name, ()):
            if not allows_stored([pin], parameter.layout, parameter.decision, pcg.mesh):
                return f"{pin.text}: {name} is stored otherwise"
    return None


def smallest_conflict(pins: Sequence[Pin], feasible: Feasible) -> tuple[Pin, ...]:
    """Pins that cannot be held together, while without any one of them the others can (deletion
    filter: Chinneck and Dravnieks, ORSA Journal on Computing 3, 1991); `pins` are not feasible.
    """
    needed = list(pins)
    for pin in pins:
        without = [other for other in needed if other is not pin]
        if not feasible(without):
            needed = without
    return tuple(needed)
