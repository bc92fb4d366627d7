"""The rewrites of a plan in a small copy of its model: each is found there again, or is told of.

Paddings are of the copy's vocabulary, stripes over the ranks of its mesh. A value is computed in
another way where the copy has the same values, with its own sizes, if that follows from the same
rules there.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from math import lcm

from parloom.errors import InputError
from parloom.execute.shrink_stages import SmallStages
from parloom.execute.stacks import Stacks
from parloom.ir.factors import Factored
from parloom.ir.graph import FlatNode, Function, Graph
from parloom.rewrite.horizontal import fusions
from parloom.rewrite.pad import Padding
from parloom.rewrite.rewrites import derived, parse_rewrite, rewritten
from parloom.rewrite.stripes import Stripe
from parloom.rewrite.take import NONE, Take
from parloom.rewrite.terms import Arg, Term, calls_in, names_in

# Where operators are told sizes.
SIZED: Mapping[str, Sequence[int]] = {
    "split_with_sizes": (1,), "view": (1,), "expand": (1,), "narrow": (2, 3), "slice": (2, 3),
}  # fmt: skip
# Choices of sizes that are tried for one rewrite, and values of it that are named.
MOST_SIZES, NAMED = 32, 3


@dataclass
class SmallRewrites:
    """The rewrites of a plan whose rewritten graph is that of `factored`, as those of `graph`, a
    small copy of `whole`: those `kept`, and in words those `lost`.
    """

    rewrites: Sequence[str]
    whole: Graph
    graph: Graph
    stacks: Stacks
    stages: SmallStages
    factored: Factored
    nodes: Mapping[str, FlatNode]
    divisors: Mapping[int, int]
    kept: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def find(self) -> None:
        """Fill both lists."""
        for text in self.rewrites:
            found = parse_rewrite(text)
            if isinstance(found, Stripe):
                self.kept.append(str(replace(found, ranks=self._ranks(found))))
            elif isinstance(found, Padding):
                self._pad(found)
            elif isinstance(found, Take):
                self._take(found)
            elif (module := self.stacks.small_path(found)) is not None:
                self.kept.append(f"block {module}")

    def _pad(self, padding: Padding) -> None:
        name = self.stacks.small_path(padding.name)
        shapes = {i.target: i.value.spec.shape for i in self.graph.of_kind("parameter")}
        if name is not None and shapes.get(name):
            size, unit = shapes[name][0], lcm(2, self.divisors.get(padding.padded, 1))
            self.kept.append(str(Padding(name, size, (size // unit + 1) * unit)))
        elif name is not None:
            self.lost.append(_said(str(padding), "the copy has no such parameter"))

    def _take(self, take: Take) -> None:
        values = [name for _, name in take.taken]
        more = ", ..." if len(values) > NAMED else ""
        where = f"of {', '.join(values[:NAMED])}{more} in {take.function}"
        what = f"{', '.join(take.rules)} {where}"
        try:
            found = self._same(take)
        except InputError as error:
            self.lost.append(_said(what, str(error)))
            return
        if found is None:
            self.lost.append(_said(what, "with no sizes of the copy it follows from its rules"))
        else:
            self.kept.append(str(found))

    def _same(self, take: Take) -> Take | None:
        """The same rewrite in the copy; None where it does not follow with any sizes. Raises
        `InputError` that says why it cannot be made.
        """
        before = rewritten(self.graph, [t for t in self.kept if not t.startswith("take ")])
        function = _function(before, take.function)
        known = {NONE, *function.specs()} if function else set[str]()
        missing = {*names_in(take.call), *take.values} - known
        if function is None or missing:
            raise InputError(f"the copy has no value {min(missing)}")
        if not any(call.op in SIZED for call in calls_in(take.call)):
            rewritten(self.graph, [*self.kept, str(take)])
            return take
        resized = islice(self._resized(take, function), MOST_SIZES)
        for found in chain(_fused(take, before, function), resized):
            try:
                derived(before, [str(found)])
                rewritten(self.graph, [*self.kept, str(found)])
            except InputError:
                continue
            return found
        return None

    def _resized(self, take: Take, function: Function) -> Iterator[Take]:
        """The rewrite with sizes of the copy: those of the same dims of the values that it names,
        or of other ones of the function.
        """
        big = _function(self.whole, take.function)
        before, after = big.specs() if big else {}, function.specs()
        names = [*names_in(take.call), *take.values]
        choices = defaultdict[int, dict[int, None]](dict)
        for name in (*names, *after):
            if name in before and name in after:
                shapes = before[name].shape, after[name].shape
                if len(shapes[0]) == len(shapes[1]):
                    for size, own in zip(*shapes, strict=True):
                        choices[size].setdefault(own)
        told = list(dict.fromkeys(_told(take.call)))
        every = (choices.get(size) or {size: None} for size in told)
        for sizes in product(*every):
            known = dict(zip(told, sizes, strict=True))
            call = _with_sizes(take.call, known)
            assert isinstance(call, Term)
            yield replace(take, call=call)

    def _ranks(self, stripe: Stripe) -> int:
        """Over how many ranks of the small mesh the axes go that have stripes."""
        decided = {node.key: node.factors for node in self.stages.decisions.nodes}
        for key, flat in self.nodes.items():
            if flat.node.op == "view" and not flat.node.path:
                rule = self.factored.rule(flat.function, flat.node)
                for factor, axes in decided.get(key, ()):
                    if rule.size(factor) == stripe.ranks == self.stages.planned_size(key, axes):
                        return self.stages.size(key, axes)
        return stripe.ranks


def _said(what: str, why: str) -> str:
    return f"not proved in the copy: rewrite {what}: {why}"


def _function(graph: Graph, name: str) -> Function | None:
    return next((own for own in (*graph.functions, graph.main) if own.name == name), None)


def _fused(take: Take, graph: Graph, function: Function) -> Iterator[Take]:
    """The fusions of the same values by the same rules."""
    for found in fusions(graph, function):
        if (found.values, found.rules) == (take.values, take.rules):
            yield found


def _told(arg: Arg) -> Iterator[int]:
    """The sizes that operators of a term are told."""
    for call in calls_in(arg):
        for at in SIZED.get(call.op, ()):
            given = call.args[at] if at < len(call.args) else None
            for size in given if isinstance(given, tuple) else (given,):
                if isinstance(size, int):
                    yield size


def _with_sizes(arg: Arg, sizes: Mapping[int, int], is_size: bool = False) -> Arg:
    """A term whose operators are told other sizes."""
    if isinstance(arg, tuple):
        return tuple(_with_sizes(own, sizes, is_size) for own in arg)
    if isinstance(arg, int):
        return sizes.get(arg, arg) if is_size else arg
    if not isinstance(arg, Term):
        return arg
    told = SIZED.get(arg.op, ())
    args = (_with_sizes(own, sizes, at in told) for at, own in enumerate(arg.args))
    return Term(arg.op, tuple(args), arg.result)
