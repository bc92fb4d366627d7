"""Which parallelism each mesh axis of a plan is, by what it splits, whatever its name."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from parloom.comparators import configuration
from parloom.comparators.tensor_parallel import LOOKUPS, TENSOR
from parloom.cost.kernels import ATTENTION, PRODUCTS
from parloom.ir.factors import factorize
from parloom.ir.layout import Layout, Shape, digits
from parloom.ir.mesh import Mesh
from parloom.ir.ops.experts import NAME as EXPERTS
from parloom.ir.pcg import PCG
from parloom.report.naming import POSITIONS, SAMPLES, Names, named_ways
from parloom.search.spread import unfold

DATA, CONTEXT, COPY = configuration.DATA, configuration.CONTEXT, configuration.COPY
WEIGHED = frozenset({*PRODUCTS, *LOOKUPS, ATTENTION, EXPERTS})
"""Operators that say what an axis is for; the others follow them."""
OF_CONFIGURATIONS: Mapping[str, str] = MappingProxyType(
    {
        configuration.REPLICA: DATA,
        configuration.EXPERT: DATA,
        DATA: DATA,
        CONTEXT: CONTEXT,
        COPY: COPY,
        TENSOR: TENSOR,
    }
)
"""The roles of the axes of a configuration's mesh, by their names."""

Roles = Mapping[str, str]
"""The role of each axis of a mesh; an axis that splits no product is a `COPY`."""
Digits = tuple[tuple[str, int], ...]
"""Of a dim, outermost first: role and size; local ones have the role ""."""


@dataclass(frozen=True, slots=True)
class Splits:
    """What the axes of a stage do: their roles, the experts' axes, whether the tensor-parallel ones
    split positions between products, and whether context-parallel ones go around a ring.
    """

    roles: Roles
    experts: tuple[str, ...] = ()
    sequence: bool = False
    ring: bool = False


def splits_of(pcg: PCG, names: Names) -> Splits:
    """What the axes of one stage do; `names` are those of the whole program's factors."""
    mesh = pcg.decisions.mesh
    roles = _roles(pcg, names)
    program = unfold(pcg.graph, factorize(pcg.graph), mesh)
    decided = {node.key: dict(node.factors) for node in pcg.decisions.nodes}
    experts: tuple[str, ...] = ()
    ring = False
    between: Counter[bool] = Counter()
    for index, (flat, rule) in enumerate(zip(program.nodes, program.rules, strict=True)):
        factors = decided.get(flat.key, {})
        for factor in configuration.experts_of(program, index):
            experts = max(experts, factors.get(factor, ()), key=mesh.size)
        if flat.node.op == ATTENTION:
            ring |= any(
                roles[a] == CONTEXT for _, keys in rule.routes for a in factors.get(keys, ())
            )
        own = names[flat.key]
        positions = [factor for factor, what in own.items() if what == POSITIONS]
        if flat.node.op not in WEIGHED and positions and flat.node.results[0].spec.is_float:
            on = {what for f, what in own.items() for a in factors.get(f, ()) if roles[a] == TENSOR}
            if on <= {POSITIONS}:
                between[bool(on)] += 1
    return Splits(roles, experts, between[True] > between[False], ring)


def _roles(pcg: PCG, names: Names) -> Roles:
    votes: dict[str, Counter[str]] = {axis.name: Counter() for axis in pcg.decisions.mesh.axes}
    for flat, axis, what in named_ways(pcg.graph, pcg.decisions, names):
        if flat.node.op in WEIGHED:
            votes[axis][{SAMPLES: DATA, POSITIONS: CONTEXT}.get(what, TENSOR)] += 1
    return {
        axis: max((DATA, CONTEXT, TENSOR), key=found.__getitem__) if found else COPY
        for axis, found in votes.items()
    }


def degree(roles: Roles, role: str, mesh: Mesh) -> int:
    """Over how many ranks the axes of a role go."""
    return mesh.size(tuple(axis for axis, own in roles.items() if own == role))


def merged(axes: tuple[str, ...], roles: Roles, mesh: Mesh) -> Digits:
    """Axes as roles and sizes: those of one role that follow each other are one."""
    found: list[tuple[str, int]] = []
    for axis in axes:
        role, size = roles[axis], mesh[axis].size
        if found and found[-1][0] == role:
            found[-1] = role, found[-1][1] * size
        elif size > 1:
            found.append((role, size))
    return tuple(found)


def dims_of(layout: Layout, shape: Shape, roles: Roles, mesh: Mesh) -> tuple[Digits, ...]:
    """The dims of a tensor as digits with roles."""
    dims = []
    for dim, size in enumerate(shape):
        found: list[tuple[str, int]] = []
        for digit in digits(layout, dim, size, mesh):
            role, own = ("", digit) if isinstance(digit, int) else (roles[digit], mesh[digit].size)
            if role and found and found[-1][0] == role:
                found[-1] = role, found[-1][1] * own
            elif own != 1:
                found.append((role, own))
        dims.append(tuple(found))
    return tuple(dims)


def dims_text(dims: tuple[Digits, ...]) -> str:
    """`[4/tensor·12, 16]`, as layouts are written elsewhere."""
    parts = (
        "·".join(f"{size}/{role}" if role else str(size) for role, size in dim) or "1"
        for dim in dims
    )
    return f"[{', '.join(parts)}]"


def links(roles: Roles, mesh: Mesh) -> Mapping[str, frozenset[tuple[int, int]]]:
    """By role, the (stride, size) of the ranks that its axes go over: which ones are neighbors."""
    found: dict[str, frozenset[tuple[int, int]]] = {}
    for axis, role in roles.items():
        own = {(p.stride, p.size) for p in mesh[axis].primes if p.size > 1}
        found[role] = found.get(role, frozenset()) | own
    return {role: own for role, own in found.items() if prod(size for _, size in own) > 1}
