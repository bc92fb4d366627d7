"""Composition: the rule of an operator that is a program of others.

What all parts of the program can split alike, the whole can. Factors of neighboring parts that lie
on one dim of a value are one factor of the whole; an axis on it shards every part that has it, and
no value between the parts ever moves. That rules out factors that some part needs whole, and those
whose partial sums would have to be added up before the end. The whole routes what one part routes
and another routes back.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from parloom.ir.graph import Function, Node
from parloom.ir.ops.cuts import KnownCuts, NodeCuts
from parloom.ir.ops.opdef import OpDef
from parloom.ir.ops.rule import LOCAL, OFFSET, WHOLE, Dims, Rule, Site

Member = tuple[int, str]  # position of a part, factor of its rule
Known = Mapping[str, OpDef]
T = TypeVar("T")


def parts_of(program: Function, known: Known) -> list[tuple[Node, Site, Rule]]:
    """The program's operators with their rules, cut into the finest factors that all know."""
    specs = program.specs()
    nodes = [item for item in program.body if isinstance(item, Node)]
    sites = [Site(node, tuple(specs[name] for name in node.refs)) for node in nodes]
    rules = [known[site.node.op].rule(site) for site in sites]
    cuts = [NodeCuts("", node, rule) for node, rule in zip(nodes, rules, strict=True)]
    known_cuts = KnownCuts()
    known_cuts.settle([own.carry for own in (*cuts, *reversed(cuts))])
    refined = [own.refined(known_cuts) for own in cuts]
    return [*zip(nodes, sites, refined, strict=True)]


def compose(program: Function, known: Known) -> Rule:
    """The rule of `program`: what can be split is `local`, the rest whole."""
    parts = parts_of(program, known)
    joined = _Joined(parts)
    late = _late(program, known)
    for position, (node, _, rule) in enumerate(parts):
        joined.check(position, node, rule, late)
    names = joined.names()
    dims = [
        *((v.name, len(v.spec.shape)) for v in program.inputs),
        *((name, len(program.specs()[name].shape)) for name in program.outputs),
    ]
    tensors: list[Dims] = [
        tuple(tuple(names[joined.root(m)] for m in joined.dims[name, d]) for d in range(rank))
        for name, rank in dims
    ]
    kinds = {names[r]: WHOLE if r in joined.whole() else LOCAL for r in names}
    sizes = {names[r]: joined.size(r) for r in names}
    used = [*dict.fromkeys(f for of_tensor in tensors for dim in of_tensor for f in dim)]
    count = len(program.inputs)
    return Rule(
        tuple((f, sizes[f]) for f in used),
        tuple(tensors[:count]),
        tuple(tensors[count:]),
        tuple((f, kinds[f]) for f in used),
        routes=tuple((names[one], names[other]) for one, other in joined.routes()),
    )


class _Joined:
    """Factors of the parts, joined where they lie on the same dim of a value."""

    def __init__(self, parts: list[tuple[Node, Site, Rule]]) -> None:
        self.rules = [rule for _, _, rule in parts]
        self.parent: dict[Member, Member] = {}
        self.dims: dict[tuple[str, int], tuple[Member, ...]] = {}
        self.blocked: set[Member] = set()
        for position, (node, _, rule) in enumerate(parts):
            self.parent |= {(position, f): (position, f) for f, _ in rule.sizes}
            for name, of_tensor in _tensors(node, rule):
                for dim, factors in enumerate(of_tensor):
                    self.join(name, dim, tuple((position, f) for f in factors))

    def join(self, name: str, dim: int, members: tuple[Member, ...]) -> None:
        """Note that `members` lie on a dim, where others may lie already."""
        first = self.dims.setdefault((name, dim), members)
        if [self.size(m) for m in first] == [self.size(m) for m in members]:
            for one, other in zip(first, members, strict=True):
                self.parent[self.root(other)] = self.root(one)
        else:  # two parts cut the dim in ways that do not fit
            self.blocked.update(first, members)

    def root(self, member: Member) -> Member:
        while self.parent[member] != member:
            member = self.parent[member]
        return member

    def size(self, member: Member) -> int:
        return self.rules[member[0]].size(member[1])

    def check(self, position: int, node: Node, rule: Rule, late: set[str]) -> None:
        """Block what one part cannot split in place."""
        roots: dict[str, Member] = {f: self.root((position, f)) for f, _ in rule.sizes}
        self.blocked.update(
            roots[f] for f, _ in rule.sizes if rule.kind(f) not in ("plain", OFFSET)
        )
        every = list(roots.values())
        self.blocked.update(r for r in every if every.count(r) > 1)
        for value, of_result in zip(node.results, rule.results, strict=True):
            have = {roots[f] for dim in of_result for f in dim}
            if value.name not in late or rule.reduction != "sum":
                self.blocked.update(r for r in every if r not in have)

    def whole(self) -> set[Member]:
        """Roots of the factors that cannot be split."""
        return {self.root(m) for m in self.blocked}

    def routes(self) -> Iterator[tuple[Member, Member]]:
        """Roots of the pairs of factors that one part routes and another routes back."""
        found = dict.fromkeys(
            (self.root((position, one)), self.root((position, other)))
            for position, rule in enumerate(self.rules)
            for one, other in rule.routes
        )
        there = [pair for pair in found if pair[::-1] in found and not self.whole() & {*pair}]
        return (pair for at, pair in enumerate(there) if pair[::-1] not in there[:at])

    def names(self) -> dict[Member, str]:
        """A name for every joined factor: that of the last part that has it, where it is free.

        The program's first part comes before those in its middle.
        """
        wishes: dict[Member, list[str]] = {}
        last = len(self.rules) - 1
        for position in dict.fromkeys((last, 0, *reversed(range(last)))):
            for factor, _ in self.rules[position].sizes:
                wishes.setdefault(self.root((position, factor)), []).append(factor)
        found: dict[Member, str] = {}
        for root, wished in wishes.items():
            taken = set(found.values())
            spare = (f"{wished[0]}_{i}_" for i in range(2, len(wishes) + 2))
            found[root] = next(n for n in (*wished, *spare) if n not in taken)
        return found


def _tensors(node: Node, rule: Rule) -> Iterator[tuple[str, Dims]]:
    yield from zip(node.refs, rule.operands, strict=True)
    yield from zip((v.name for v in node.results), rule.results, strict=True)


def _late(program: Function, known: Known) -> set[str]:
    """Values whose partial sums reach the end of the program as they are."""
    late = set(program.outputs)
    for item in reversed(program.body):
        assert isinstance(item, Node)
        carried = known[item.op].linear == "carried" and all(v.name in late for v in item.results)
        readers = [n for n in program.body if isinstance(n, Node) and item.refs[0] in n.refs]
        if carried and readers == [item] and item.refs.count(item.refs[0]) == 1:
            late.add(item.refs[0])
    return late
