"""Horizontal fusion: independent calls of one operator as one call of it.

Calls that differ in some operands only are the parts of one call of these operands one after the
other, along a factor of the operator's sharding rule: `linear(x, w)` and `linear(y, w)` of
`linear(cat((x, y), 0), w)`, the heads of queries and keys, towers with the same weights. What is
joined may be results of such calls, so that whole chains become one.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from parloom.ir.graph import Arg, Call, Function, Graph, Node, Ref, TensorSpec
from parloom.ir.ops import OPS
from parloom.ir.ops.rule import HALO, Site
from parloom.ir.ops.rule import Rule as Sharding
from parloom.rewrite.bodies import GROUPS, KERNELS, PLACES, SHAPES, from_last, takes_part
from parloom.rewrite.merge import JOINED
from parloom.rewrite.rules import Rule, prove
from parloom.rewrite.take import Take
from parloom.rewrite.terms import CAT, SPLIT, Extent, Input, Name, Size, Term, calls_in
from parloom.rewrite.terms import Arg as TermArg

ALONG = "_along_"
MOST_DIMS = 64  # that torch gives a tensor
# Factors of sharding rules beside `d0`, `d1`, ...: along which calls may be one.
FACTORS: Mapping[str, Sequence[str]] = {
    "linear": "n", "mm": "mn", "bmm": "bmn", "matmul": "mn", "mv": "m", "addmm": "mn",
    "addmv": "m", "addr": "mn", "addbmm": "mn", "baddbmm": "bmn", "embedding": "e",
    "chunk": "c", "split_with_sizes": "c",
    "view": tuple(f"f{i}" for i in range(MOST_DIMS)),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "gmn"),
    **{f"{kind}_pool{n}d": "cn" for kind in ("max", "avg") for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": ("c", "n", "s0", "s1", "s2")[: 2 + n] for n in (1, 2, 3)},
}  # fmt: skip
# Operators whose rules have no `d0`, `d1`, ...
NO_DIMS = FACTORS.keys() - {
    "linear", "matmul", "embedding", "chunk", "split_with_sizes",
}  # fmt: skip
# What is joined already, or never: of several results, of lists of tensors, or of no floats.
_APART = """
cat stack einsum dot parloom.linears parloom.convs eq ne lt le gt ge __and__
__or__ __xor__ bitwise_and bitwise_or bitwise_xor __lshift__ __rshift__ bitwise_left_shift
bitwise_right_shift gcd lcm logical_not logical_and logical_or logical_xor bitwise_not isnan
isinf isfinite isneginf isposinf signbit isclose frexp
"""
APART = frozenset(_APART.split())


@dataclass(frozen=True, slots=True)
class Along:
    """The dims, counted from the last, that a factor is of operands and of the result of calls
    along which they are joined; None for an operand that they share.
    """

    factor: str
    operands: tuple[int | None, ...]
    result: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls whose operands, at `places` among the arguments, have the same sizes in terms of
    factors, and are told the same ones.
    """

    op: str
    args: tuple[TermArg, ...]
    places: tuple[int, ...]
    operands: tuple[tuple[Size, ...], ...]
    result: tuple[Size, ...]

    def rule(self, along: Along) -> Rule:
        """The rule by which two calls are the parts of one, for all extents but a kernel's."""
        inputs, sides = list[Input](), ((0,), (1,), (0, 1))
        calls = [[_told(arg, along.factor, halves) for arg in self.args] for halves in sides]
        for index, (place, dim) in enumerate(zip(self.places, along.operands, strict=True)):
            halves = (0,) if dim is None else (0, 1)
            names = [f"x{index}_{half}" for half in halves]
            for half, name in zip(halves, names, strict=True):
                sizes = (_size(own, along.factor, half) for own in self.operands[index])
                inputs.append(Input(name, tuple(sizes), self._below(index, along)))
            own = (Name(names[0]), Name(names[-1]), _cat(names, dim) if dim else Name(names[0]))
            for call, arg in zip(calls, own, strict=True):
                call[place] = arg
        one, other, both = (Term(self.op, tuple(call)) for call in calls)
        whole = self.result[along.result]
        extents = tuple(Extent(_size(whole, along.factor, half)) for half in (0, 1))
        parts = tuple(Term(SPLIT, (both, extents, along.result), half) for half in (0, 1))
        return Rule(name_of(self.op, along.factor), tuple(inputs), (one, other), parts)

    def _below(self, index: int, along: Along) -> Size | None:
        """Of numbers of rows the number of these."""
        is_places = PLACES.get(self.op) == index
        return _size(self.operands[0][0], along.factor, 0) if is_places else None


@cache
def refusal(kind: Kind, along: Along) -> str:
    """Why calls are not one along a factor; empty where both sides have equal normal forms."""
    return prove(kind.rule(along))


@dataclass(frozen=True, slots=True)
class Group:
    """Independent calls that are one along a factor."""

    nodes: tuple[Node, ...]
    kind: Kind
    along: Along

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(node.results[0].name for node in self.nodes)


def fusions(graph: Graph, function: Function) -> Iterator[Take]:
    """Calls of a function that may be one, with all of those that make their operands."""
    found = _Fusions(function, flowing(graph)[function.name])
    every = (own for group in found.groups() for own in (group, *found.of_one_history(group)))
    groups = [group for group in every if not is_joined(group)]
    chains = [(group, found.call(group, deep=True)) for group in groups]
    inner = {call for _, chain in chains for arg in chain.args for call in calls_in(arg)}
    yield from (found.parts(group, call) for group, call in chains if call not in inner)
    for node in found.nodes:
        if node.op == CAT and not node.kwargs:
            call = found.joined(*found.parts_of(node))
            if isinstance(call, Term) and any(map(computes, calls_in(call))):
                values = (node.results[0].name,)
                yield Take(function.name, values, call, found.rules_of(call))


def is_joined(group: Group) -> bool:
    """Whether products of one operand, which read their weights where they lie."""
    return group.nodes[0].op in JOINED and group.along.operands[0] is None


def computes(call: Term) -> bool:
    """Whether a call does more than to move elements."""
    return call.op != CAT and not OPS[call.op].view


def flowing(graph: Graph) -> Mapping[str, Collection[str]]:
    """The values of each function through which gradients flow to parameters: what is joined is
    alike in that, so that each form of a value has a gradient or none has.
    """
    return reached(graph, {entry.value.name for entry in graph.inputs if entry.trainable})


def reached(graph: Graph, names: Collection[str]) -> Mapping[str, Collection[str]]:
    """The values of each function that are made of some inputs of a graph, among others."""
    found = defaultdict[str, set[str]](set)

    def visit(function: Function, given: Collection[str]) -> bool:
        """Whether some output is."""
        own = found[function.name]
        own.update(given)
        for item in function.body:
            names = item.refs if isinstance(item, Node) else item.args
            flows = not own.isdisjoint(names)
            if isinstance(item, Call):
                inner = graph.by_name[item.function]
                pairs = zip(inner.inputs, item.args, strict=True)
                flows = visit(inner, {value.name for value, arg in pairs if arg in own})
            own.update(value.name for value in item.results if flows)
        return not own.isdisjoint(function.outputs)

    visit(graph.main, names)
    return found


class _Fusions:
    def __init__(self, function: Function, flowing: Collection[str]) -> None:
        self.function, self.specs, self.flowing = function, function.specs(), flowing
        self.nodes = [item for item in function.body if isinstance(item, Node)]
        self.makers = {v.name: node for node in self.nodes for v in node.results}
        self.rules = {id(node): sharding(node, self.specs) for node in self.nodes}
        self.alongs = {
            id(node): tuple(_joinable(node, rule, self.specs)) if rule else ()
            for node, rule in zip(self.nodes, self.rules.values(), strict=True)
        }
        self._names: dict[Term, str] = {}
        self._known: dict[tuple[tuple[str, ...], int], TermArg] = {}

    def groups(self) -> Iterator[Group]:
        """Calls that are alike and of which none reads what comes of another one."""
        alike = defaultdict[tuple[Kind, Along, object], list[Node]](list)
        for node in self.nodes:
            for kind, along in self.alongs[id(node)] if not OPS[node.op].view else ():
                alike[kind, along, self._likeness(node, kind, along)].append(node)
        for (kind, along, _), nodes in alike.items():
            for same in self._levels(nodes) if len(nodes) > 1 else ():
                if len(same) > 1 and not refusal(kind, along):
                    yield Group(tuple(same), kind, along)

    def of_one_history(self, group: Group) -> Iterator[Group]:
        """Those of a group that read results of calls which are one, too."""
        alike: list[list[Node]] = []
        for node in group.nodes:
            for own in alike:
                if self._is_chain(replace(group, nodes=(own[0], node))):
                    own.append(node)
                    break
            else:
                alike.append([node])
        for own in alike if len(alike) > 1 else ():
            if len(own) > 1:
                yield replace(group, nodes=tuple(own))

    def _is_chain(self, group: Group) -> bool:
        return self.call(group, deep=True) != self.call(group, deep=False)

    def parts(self, group: Group, call: Term) -> Take:
        """The values of a group as the parts of a call."""
        dim = group.along.result
        sizes = tuple(self.specs[name].shape[dim] for name in group.values)
        split = Term(SPLIT, (call, sizes, dim))
        return Take(self.function.name, group.values, split, self.rules_of(call))

    def rules_of(self, call: Term) -> tuple[str, ...]:
        """The rules by which a call is of what it joins."""
        return tuple(sorted({self._names[own] for own in calls_in(call) if own in self._names}))

    def parts_of(self, node: Node) -> tuple[tuple[str, ...], int]:
        """What a call of `cat` joins, and along which dim, counted from the last."""
        dim = node.arg(1, "dim", 0)
        assert isinstance(dim, int)
        return node.refs, dim if dim < 0 else dim - len(node.results[0].spec.shape)

    def call(self, group: Group, deep: bool) -> Term:
        """The call that a group is; `deep` with those that make what it joins."""
        first, args = group.nodes[0], list[TermArg]()
        dims = iter(group.along.operands)
        for position, arg in enumerate(first.args):
            dim = next(dims) if isinstance(arg, Ref) else None
            own = [node.args[position] for node in group.nodes]
            if dim is not None:
                names = tuple(map(_name, own))
                args.append(self.joined(names, dim) if deep else _cat(names, dim))
            elif isinstance(arg, Ref):
                args.append(Name(arg.name))
            else:
                arg = _summed(own, group.kind.args[position], group.along.factor)
                args.append(from_last(first, position, arg, self.specs))
        found = Term(first.op, tuple(args))
        self._names[found] = name_of(first.op, group.along.factor)
        return found

    def joined(self, names: tuple[str, ...], dim: int) -> TermArg:
        """Values one after the other along a dim."""
        key = names, dim
        if key not in self._known:
            whole, group = self._whole(names, dim), self._group(names, dim)
            self._known[key] = (
                Name(whole) if whole else self.call(group, True) if group else _cat(names, dim)
            )
        return self._known[key]

    def _whole(self, names: tuple[str, ...], dim: int) -> str:
        """The value of which these are all parts along a dim; empty where there is none."""
        maker = self.makers.get(names[0])
        if maker is None or maker.op != SPLIT or tuple(v.name for v in maker.results) != names:
            return ""
        along, rank = maker.arg(2, "dim", 0), len(maker.results[0].spec.shape)
        return maker.refs[0] if along in (dim, dim + rank) else ""

    def _group(self, names: tuple[str, ...], dim: int) -> Group | None:
        """The calls that make values, where they are one."""
        nodes = [self.makers[name] for name in names if name in self.makers]
        if len({id(node) for node in nodes}) < len(names):
            return None
        for own in self.alongs[id(nodes[0])]:
            likeness = self._likeness(nodes[0], *own)
            if own[1].result == dim and all(
                own in self.alongs[id(node)] and self._likeness(node, *own) == likeness
                for node in nodes[1:]
            ):
                return None if refusal(*own) else Group(tuple(nodes), *own)
        return None

    def _likeness(self, node: Node, kind: Kind, along: Along) -> object:
        """What calls have in common that are one: of a dim along which they are joined, what is
        behind the factor.
        """
        rule = self.rules[id(node)]
        assert rule is not None
        found, dims, extent = list[object](), iter(along.operands), rule.size(along.factor)
        for arg, told in zip(node.args, kind.args, strict=True):
            dim = next(dims) if isinstance(arg, Ref) else None
            if isinstance(arg, Ref) and dim is not None:
                spec = self.specs[arg.name]
                shape = list(spec.shape)
                shape[dim] = -(shape[dim] // extent)
                found.append((tuple(shape), spec.dtype, arg.name in self.flowing))
            else:
                found.append(_fixed(arg, told, along.factor, extent))
        return tuple(found)

    def _levels(self, nodes: Sequence[Node]) -> Iterator[list[Node]]:
        """Calls by how many of them one after the other they come of."""
        alike, depth = set(map(id, nodes)), dict[str, int]()
        levels = defaultdict[int, list[Node]](list)
        for item in self.function.body:
            refs = item.refs if isinstance(item, Node) else item.args
            at = max((depth.get(name, 0) for name in refs), default=0)
            if id(item) in alike:
                assert isinstance(item, Node)
                levels[at].append(item)
                at += 1
            depth |= {value.name: at for value in item.results}
        yield from levels.values()


def joinable(node: Node, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[Kind, Along]]:
    """The factors along which calls like this one may be one, as far as each operand and the result
    has a factor as a dim, or as the outermost one of it, or not at all.
    """
    rule = sharding(node, specs)
    return _joinable(node, rule, specs) if rule else iter(())


def sharding(node: Node, specs: Mapping[str, TensorSpec]) -> Sharding | None:
    """The rule of a call by which it may be joined; None where it takes no part."""
    direct = sum(isinstance(arg, Ref) for arg in node.args)
    if not takes_part(node, specs) or len(node.results) > 1 or direct != len(node.refs):
        return None
    return OPS[node.op].rule(Site(node, tuple(specs[name] for name in node.refs)))


def _joinable(
    node: Node, rule: Sharding, specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[Kind, Along]]:
    kind = _kind(node, rule, specs)
    if kind is None:
        return
    for factor in rule.shardable:
        dims = [_dim(factor, own) for own in (*rule.operands, rule.results[0])]
        result = dims.pop()
        if rule.kind(factor) == "plain" and result and 0 not in dims and any(dims):
            yield kind, Along(factor, tuple(dims), result)


def _kind(node: Node, rule: Sharding, specs: Mapping[str, TensorSpec]) -> Kind | None:
    """The kind of a call; None where it is told another shape than that of its result."""
    places = tuple(i for i, arg in enumerate(node.args) if isinstance(arg, Ref))
    operands = [[_extent(rule, dim) for dim in own] for own in rule.operands]
    result = tuple(_extent(rule, dim) for dim in rule.results[0])
    if (kernel := KERNELS.get(node.op)) is not None:  # windows have numbers of places
        operands[kernel][2:] = [((),) * extent for extent in specs[node.refs[kernel]].shape[2:]]
    args: list[TermArg] = [
        from_last(node, i, None if i in places else arg, specs) for i, arg in enumerate(node.args)
    ]
    if (at := SHAPES.get(node.op)) is not None:
        if node.args[at] != node.results[0].spec.shape:
            return None
        args[at] = tuple(map(Extent, result))
    if (at := GROUPS.get(node.op)) is not None and "g" in rule.shardable:
        args[at] = Extent((("g",),))
    return Kind(node.op, tuple(args), places, tuple(map(tuple, operands)), result)


def _extent(rule: Sharding, dim: tuple[str, ...]) -> Size:
    """The size of a dim in terms of its factors; of one that windows move along, as it is."""
    return (("".join(dim),),) if any(rule.kind(factor) == HALO for factor in dim) else (dim,)


def _size(size: Size, joined: str, half: int) -> Size:
    """A size where each of two calls has its own extent of the factor that is joined."""
    return tuple(tuple(f"{n}_{half}" if n == joined else n for n in block) for block in size)


# What calls are told of sizes: where these have the factor that is joined, they add up.


def _told(arg: TermArg, factor: str, halves: Sequence[int]) -> TermArg:
    """An argument of one of two calls, or of both as one."""
    if isinstance(arg, tuple):
        return tuple(_told(own, factor, halves) for own in arg)
    if not isinstance(arg, Extent):
        return arg
    own = halves if _has(arg, factor) else halves[:1]
    return Extent(tuple(block for half in own for block in _size(arg.size, factor, half)))


def _summed(args: Sequence[Arg], told: TermArg, factor: str) -> Arg:
    """The argument of calls as one."""
    if isinstance(told, Extent) and _has(told, factor):
        return sum(arg for arg in args if isinstance(arg, int))
    if not isinstance(told, tuple):
        return args[0]
    rows = [arg for arg in args if isinstance(arg, tuple)]
    return tuple(_summed(own, one, factor) for *own, one in zip(*rows, told, strict=True))


def _fixed(arg: Arg, told: TermArg, factor: str, extent: int) -> object:
    """What calls have in common of an argument."""
    if isinstance(told, tuple) and isinstance(arg, tuple):
        return tuple(_fixed(own, one, factor, extent) for own, one in zip(arg, told, strict=True))
    if isinstance(told, Extent) and _has(told, factor):
        assert isinstance(arg, int)
        return -(arg // extent)
    return arg


def _has(told: Extent, factor: str) -> bool:
    return any(factor in block for block in told.size)


def name_of(op: str, factor: str) -> str:
    """The name of the rule by which calls of an operator are one along a factor."""
    return f"{op.replace('.', '_')}{ALONG}{factor}"


@cache
def fusion_names() -> Mapping[str, None]:
    """The names of all such rules: of each operator that may be joined, along each factor that its
    sharding rule may have.
    """
    dims = tuple(f"d{i}" for i in range(MOST_DIMS))
    return {
        name_of(op, factor): None
        for op, own in OPS.items()
        if own.computes is not None and not own.random and op not in APART
        for factor in (*FACTORS.get(op, ()), *(dims if op not in NO_DIMS else ()))
    }


def is_fusion(name: str) -> bool:
    """Whether this is the name of such a rule."""
    return name in fusion_names()


def _dim(factor: str, dims: tuple[tuple[str, ...], ...]) -> int | None:
    """The dim, counted from the last, that a factor is the outermost one of; 0 where it is an inner
    one.
    """
    found = [index for index, factors in enumerate(dims) if factor in factors]
    if not found:
        return None
    return found[0] - len(dims) if len(found) == 1 and dims[found[0]][0] == factor else 0


def _cat(names: Sequence[str], dim: int) -> TermArg:
    return Term(CAT, (tuple(map(Name, names)), dim))


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name
