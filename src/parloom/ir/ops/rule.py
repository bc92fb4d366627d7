"""Sharding rules: einsum-like over named factors.

`b s k, n k -> b s n` says all there is to know about how a linear layer may be split: an axis on a
factor shards every operand and result that has it; a result that lacks it is *partial*; an operand
that lacks it is replicated and its gradient is partial, or, where it is added (`+`) to a partial
result, the same on all ranks. SOAP is a reading of the rule: samples are
`b`, parameters `n`, reductions `k`, attributes spatial factors. The degree rules of FlexFlow and
Unity's operators are instances.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from parloom.errors import LayoutError
from parloom.ir.graph import Arg, Node, Ref, TensorSpec
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import Mesh

Dims = tuple[tuple[str, ...], ...]
Assignment = Mapping[str, tuple[str, ...]]

WHOLE = "whole"  # never sharded
OFFSET = "offset"  # sharded; the local code needs the global index of its elements
LOCAL = "local"  # sharded by expanding the operator into simpler ones
HALO = "halo"  # sharded after an exchange of border rows with the neighbors
RING = "ring"  # its blocks go around the axes that are on the first factor of its route, too
SUMS = "sums"  # the kind and the name of the factor over whose axes all are partial sums


@dataclass(frozen=True, slots=True)
class Site:
    """An operator call with the global specs of its tensors, as the entries of `OPS` see it."""

    node: Node
    operands: tuple[TensorSpec, ...]

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        return tuple(v.spec for v in self.node.results)

    def arg(self, position: int, name: str = "", default: Arg = None) -> Arg:
        return self.node.arg(position, name, default)

    def operand(self, arg: Arg) -> int | None:
        """Index among `operands` of a tensor argument; None if the argument is no tensor."""
        return self.node.refs.index(arg.name) if isinstance(arg, Ref) else None

    def spec(self, arg: Arg) -> TensorSpec:
        """Spec of a tensor argument."""
        index = self.operand(arg)
        if index is None:
            raise LayoutError(f"{self.node.key}: argument {arg!r} is no tensor")
        return self.operands[index]

    def integer(self, position: int, name: str = "", default: int = 0) -> int:
        """An integer argument."""
        value = self.arg(position, name, default)
        if not isinstance(value, int):
            raise LayoutError(f"{self.node.key}: {name} must be an integer, got {value!r}")
        return value

    def integers(self, position: int, name: str = "", default: Arg = ()) -> tuple[int, ...]:
        """An argument that is one integer or a list of them."""
        value = self.arg(position, name, default)
        values = value if isinstance(value, tuple) else (value,)
        return tuple(v for v in values if isinstance(v, int))

    def dim(self, position: int, rank: int, default: int = -1, name: str = "dim") -> int:
        """A dim argument, made non-negative for a tensor with `rank` dims."""
        return self.integer(position, name, default) % max(rank, 1)


@dataclass(frozen=True)
class Rule:
    """Factors of every operand's and result's dims.

    `operands` follow `node.refs` (an operand named twice stands twice); a dim's factors are listed
    outermost first, a dim of size 1 has none. `kinds` names the factors that are not plain;
    `reduction` is how results combine over a factor that they lack.

    `added` are the operands that are added to results: where these are partial sums, such an
    operand counts once, on the first rank, and its gradient is that of the sum, the same on all.

    `routes` are pairs of factors that an axis may be on at once: the operator then moves what it
    reads from the ranks that the first one says to those that the second one says. Of tensors that
    have both factors, the axis shards operands on the first and results on the second.

    Of a `linear` operator an axis may be on `SUMS`, the factor of no tensor and of any size: parts
    of the sums that operands are then make parts of results. Where it `adds` several sums, that may
    send less.
    """

    sizes: tuple[tuple[str, int], ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kinds: tuple[tuple[str, str], ...] = ()
    reduction: str = "sum"
    routes: tuple[tuple[str, str], ...] = ()
    linear: bool = False
    adds: bool = False
    added: tuple[int, ...] = ()

    @cached_property
    def size_of(self) -> Mapping[str, int]:
        """Sizes by factor. That of partial sums has none: 0, which every number of devices divides,
        and which stays 0.
        """
        return dict(self.sizes) | dict.fromkeys(self.sums, 0)

    @cached_property
    def kind_of(self) -> Mapping[str, str]:
        return dict(self.kinds) | dict.fromkeys(self.sums, SUMS)

    def size(self, factor: str) -> int:
        return self.size_of[factor]

    def kind(self, factor: str) -> str:
        return self.kind_of.get(factor, "plain")

    @cached_property
    def shardable(self) -> tuple[str, ...]:
        """Factors that an axis may be put on."""
        whole = {f for f, kind in self.kinds if kind == WHOLE}
        return tuple(f for f, size in self.sizes if f not in whole and size > 1)

    @cached_property
    def places(self) -> tuple[tuple[str, ...], ...]:
        """The factors that one axis may be on, sorted by name: none, one, or both of a route."""
        single = [f for f in self.shardable if self.kind(f) != RING]
        routes = (tuple(sorted(pair)) for pair in self.routes if {*pair} <= {*self.shardable})
        return ((), *((f,) for f in single), *routes, *([self.sums] if self.adds else []))

    @cached_property
    def assignable(self) -> tuple[str, ...]:
        """Factors that an axis may be put on, that of partial sums among them."""
        return (*self.shardable, *self.sums)

    @property
    def offered(self) -> tuple[str, ...]:
        """Factors that a search puts axes on."""
        return (*self.shardable, *(self.sums if self.adds else ()))

    @property
    def sums(self) -> tuple[str, ...]:
        """The factor of partial sums, where there is one."""
        return (SUMS,) if self.linear else ()

    def split_axes(self, assignment: Assignment) -> tuple[str, ...]:
        """The axes of an assignment that split the work, sorted by name."""
        return tuple(
            sorted({a for f, axes in assignment.items() if f not in self.sums for a in axes})
        )

    def summed_axes(self, assignment: Assignment) -> tuple[str, ...]:
        """The axes over which operands are partial sums."""
        return tuple(a for f in self.sums for a in assignment.get(f, ()))

    def routed(self, assignment: Assignment, mesh: Mesh) -> tuple[str, ...]:
        """The axes over which the operator moves rows: those on both factors of a route."""
        found = {
            axis
            for one, other in self.routes
            for axis in assignment.get(one, ())
            if axis in assignment.get(other, ())
        }
        return tuple(a for a in mesh.names if a in found)

    def travel(self, dims: Dims) -> bool:
        """Whether a tensor of these dims has both factors of a route: routed axes move it."""
        have = {f for dim in dims for f in dim}
        return any(have.issuperset(pair) for pair in self.routes)

    def check(self, assignment: Assignment, mesh: Mesh, where: str) -> None:
        """Raise `LayoutError` unless `assignment` is legal for this rule."""
        used: list[str] = []
        routed = self.routed(assignment, mesh)
        for factor, axes in assignment.items():
            if factor not in self.assignable:
                names = ", ".join(self.assignable) or "none"
                raise LayoutError(
                    f"{where}: factor {factor!r} cannot be sharded; there is: {names}"
                )
            used += axes
            if self.size(factor) % mesh.size(axes):
                over = " * ".join("microbatches" if mesh[a].steps else a for a in axes)
                raise LayoutError(
                    f"{where}: factor {factor!r} of size {self.size(factor)} does not divide by"
                    f" {over} = {mesh.size(axes)}"
                )
        if len({*used}) + len(routed) != len(used):
            raise LayoutError(f"{where}: an axis is assigned twice: {used}")
        for factor, axes in assignment.items():
            if self.kind(factor) == RING and not {*axes} <= {*routed}:
                raise LayoutError(
                    f"{where}: axes {', '.join(axes)} on factor {factor!r} must be on"
                    f" {' or '.join(one for one, other in self.routes if other == factor)}, too"
                )

    def operand_layout(self, index: int, assignment: Assignment, mesh: Mesh) -> Layout:
        """The layout that operand `index` must have."""
        partial = tuple((axis, "sum") for axis in self.summed_axes(assignment))
        return Layout(_shards(self, self.operands[index], assignment, mesh, 0), partial)

    def result_layout(self, index: int, assignment: Assignment, mesh: Mesh) -> Layout:
        """The layout that result `index` comes out with."""
        dims = self.results[index]
        partial = tuple((axis, self.reduction) for axis in _missing(dims, assignment))
        return Layout(_shards(self, dims, assignment, mesh, 1), partial)

    def varying(self, index: int, assignment: Assignment) -> tuple[str, ...]:
        """Axes over which the gradient of operand `index` leaves the operator partial."""
        same = {*self.summed_axes(assignment), *self.counts_once(index, assignment)}
        return tuple(a for a in _missing(self.operands[index], assignment) if a not in same)

    def counts_once(self, index: int, assignment: Assignment) -> tuple[str, ...]:
        """Axes over which results are partial sums to which operand `index` is added."""
        if index not in self.added:
            return ()
        have = {f for dims in (*self.results, self.operands[index]) for dim in dims for f in dim}
        return tuple(a for f, axes in assignment.items() if f not in have for a in axes)

    def split(self, parts: Mapping[str, tuple[int, ...]]) -> "Rule":
        """The rule with factors cut into parts (outermost first), named `n0`, `n1`, ..."""
        names = {f: tuple(f"{f}{i}" for i in range(len(p))) for f, p in parts.items() if len(p) > 1}
        if not names:
            return self
        sizes: list[tuple[str, int]] = []
        for factor, size in self.sizes:
            if factor in names:
                sizes += zip(names[factor], parts[factor], strict=True)
            else:
                sizes.append((factor, size))

        def rename(dims: Dims) -> Dims:
            return tuple(tuple(n for f in dim for n in names.get(f, (f,))) for dim in dims)

        return Rule(
            tuple(sizes),
            tuple(rename(d) for d in self.operands),
            tuple(rename(d) for d in self.results),
            tuple((n, kind) for f, kind in self.kinds for n in names.get(f, (f,))),
            self.reduction,
            tuple(pair for route in self.routes for pair in self._split_route(route, parts, names)),
            self.linear,
            self.adds,
            self.added,
        )

    def _split_route(
        self,
        route: tuple[str, str],
        parts: Mapping[str, tuple[int, ...]],
        names: Mapping[str, tuple[str, ...]],
    ) -> Iterator[tuple[str, str]]:
        """The routes between the parts of two factors: of each with each.

        Blocks that go around (`RING`) stay like those that they meet where both are cut alike.
        """
        one, other = (names.get(factor, (factor,)) for factor in route)
        sizes, like = (parts.get(factor, (self.size(factor),)) for factor in route)
        if self.kind(route[1]) == RING and sizes == like:
            return zip(one, other, strict=True)
        return product(one, other)


def _missing(dims: Dims, assignment: Assignment) -> tuple[str, ...]:
    """The axes in use that shard no dim of a tensor."""
    have = {f for dim in dims for f in dim}
    there = {a for f, axes in assignment.items() if f in have for a in axes}
    every = (a for axes in assignment.values() for a in axes)
    return tuple(dict.fromkeys(a for a in every if a not in there))


def _shards(
    rule: Rule, dims: Dims, assignment: Assignment, mesh: Mesh, side: int
) -> tuple[Shard, ...]:
    """The shards of a tensor; if it has both factors of a route, `side` says which one counts."""
    shards: list[Shard] = []
    left_out = _left_out(rule, dims, assignment, side) if rule.routes else frozenset()
    for dim, factors in enumerate(dims):
        if assignment.keys().isdisjoint(factors):
            continue
        unit = 1
        for factor in reversed(factors):
            size = rule.size(factor)
            axes = assignment.get(factor, ())
            stride = unit * size // mesh.size(axes)
            for axis in reversed(axes):
                if (factor, axis) not in left_out:
                    shards.append(Shard(axis, dim, stride))
                stride *= mesh[axis].size
            unit *= size
    return tuple(shards)


def _left_out(
    rule: Rule, dims: Dims, assignment: Assignment, side: int
) -> frozenset[tuple[str, str]]:
    """Factors of a tensor, each with a routed axis that shards another of its factors."""
    have = {f for dim in dims for f in dim}
    return frozenset(
        (pair[1 - side], axis)
        for pair in rule.routes
        if have.issuperset(pair)
        for axis in assignment.get(pair[0], ())
        if axis in assignment.get(pair[1], ())
    )


def build(
    operands: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
    site: Site,
    kinds: Mapping[str, str] | None = None,
    reduction: str = "sum",
    added: tuple[int, ...] = (),
) -> Rule:
    """A rule with one factor per dim; sizes come from the specs.

    A dim named `1`, or of size 1 where the factor is larger elsewhere, has no factor (broadcast).
    """
    sizes: dict[str, int] = {}
    pairs = [
        *zip(operands, site.operands, strict=True),
        *zip(results, site.results, strict=True),
    ]
    for names, spec in pairs:
        if len(names) != len(spec.shape):
            raise LayoutError(f"{site.node.key}: rule {names} does not match shape {spec.shape}")
        for name, size in zip(names, spec.shape, strict=True):
            if name != "1":
                sizes[name] = max(sizes.get(name, 0), size)

    def dims(names: Sequence[str], spec: TensorSpec) -> Dims:
        found: list[tuple[str, ...]] = []
        for name, size in zip(names, spec.shape, strict=True):
            found.append(() if name == "1" or size != sizes[name] or size == 1 else (name,))
        return tuple(found)

    return Rule(
        tuple(sizes.items()),
        tuple(dims(n, s) for n, s in zip(operands, site.operands, strict=True)),
        tuple(dims(n, s) for n, s in zip(results, site.results, strict=True)),
        tuple((f, k) for f, k in (kinds or {}).items() if f in sizes),
        reduction,
        added=added,
    )


def products(
    sizes: Mapping[str, int],
    operands: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
    kinds: Mapping[str, str] | None = None,
    added: tuple[int, ...] = (),
) -> Rule:
    """A rule whose dims are products, as text: `["n", "g q", ""]`, outermost factor first.

    Factors of size 1 are left out.
    """

    def dims(names: Sequence[str]) -> Dims:
        return tuple(tuple(n for n in dim.split() if sizes[n] != 1) for dim in names)

    left, right = tuple(map(dims, operands)), tuple(map(dims, results))
    used = {n for tensor in (*left, *right) for dim in tensor for n in dim}
    return Rule(
        tuple((n, size) for n, size in sizes.items() if n in used),
        left,
        right,
        tuple((n, kind) for n, kind in (kinds or {}).items() if n in used),
        added=added,
    )


def einsum(text: str, **kinds: str) -> Callable[[Site], Rule]:
    """A rule from text, e.g. `... k, n k, + n -> ... n`, where the third operand is added.

    `...` stands for the leading dims of the first operand that has it, named d0, d1, ...; trailing
    operands that a call does not give are dropped.
    """
    left, right = text.split("->")
    operand_names = [part.replace("+", "").split() for part in left.split(",")]
    added = tuple(i for i, part in enumerate(left.split(",")) if "+" in part)
    result_names = [part.split() for part in right.split(",")]

    def rule(site: Site) -> Rule:
        given = operand_names[: len(site.operands)]
        lead = 0
        for names, spec in zip(given, site.operands, strict=True):
            if "..." in names:
                lead = max(lead, len(spec.shape) - len(names) + 1)

        def expand(names: list[str]) -> list[str]:
            if "..." not in names:
                return names
            at = names.index("...")
            return [*names[:at], *(f"d{i}" for i in range(lead)), *names[at + 1 :]]

        return build(
            [expand(n) for n in given],
            [expand(n) for n in result_names],
            site,
            kinds or None,
            added=added,
        )

    return rule


def broadcast(site: Site) -> Rule:
    """Elementwise with broadcasting: factors d0, d1, ... are the dims of the result."""
    rank = len(site.results[0].shape)
    names = [f"d{i}" for i in range(rank)]
    operands = [names[rank - len(spec.shape) :] for spec in site.operands]
    return build(operands, [names] * len(site.results), site)


def opaque(site: Site) -> Rule:
    """Nothing can be sharded: every dim is a whole factor of its own."""
    return along(site, frozenset(), shared=False)


def along(site: Site, whole: frozenset[int], *, shared: bool = True) -> Rule:
    """Operands and results of one shape, elementwise except along the dims in `whole`."""
    counter = 0
    kinds: dict[str, str] = {}

    def names(spec: TensorSpec) -> list[str]:
        nonlocal counter
        found = []
        for dim in range(len(spec.shape)):
            if shared and dim not in whole:
                found.append(f"d{dim}")
            else:
                found.append(f"w{counter}")
                kinds[f"w{counter}"] = WHOLE
                counter += 1
        return found

    return build([names(s) for s in site.operands], [names(s) for s in site.results], site, kinds)


def contraction_flops(site: Site, rule: Rule) -> float:
    """2 x the size of the iteration space: multiply-adds of an einsum."""
    return 2.0 * prod(size for _, size in rule.sizes)


def elementwise_flops(site: Site, rule: Rule) -> float:
    """One operation per element of the largest tensor."""
    return float(max(s.num_elements for s in (*site.operands, *site.results)))


def no_flops(site: Site, rule: Rule) -> float:
    """Movement of data or views only."""
    return 0.0
