"""What the factors of operators are called, and what mesh axes split, in words."""

from collections import Counter
from collections.abc import Iterator, Mapping

from parloom.ir.factors import factorize
from parloom.ir.graph import FlatNode, Graph, TensorSpec
from parloom.ir.ops import Rule
from parloom.ir.ops.rule import RING, Dims
from parloom.ir.plan import Decisions, NodeDecision

SAMPLES, OUTPUTS, INPUTS = "samples", "output features", "input features"
ENTRIES, HEADS, POSITIONS = "entries of tables", "heads", "positions"
UNNAMED = "dim "
ATTENTION = "scaled_dot_product_attention"
IMAGE_DIMS = 4  # samples, channels, height, width
LOOKUPS = frozenset({"embedding", "parloom.embedding_bag"})

Names = Mapping[str, Mapping[str, str]]
"""What the factors of operators are called, by the operators' keys."""


def ways_of(
    graph: Graph, decisions: Decisions, names: Names | None = None
) -> Mapping[str, Counter[str]]:
    """Per mesh axis: what it splits, in words, with the number of operators; `graph` and `names` as
    in `named_ways`.
    """
    ways: dict[str, Counter[str]] = {axis.name: Counter() for axis in decisions.mesh.axes}
    for _, axis, what in named_ways(graph, decisions, names):
        ways[axis][what] += 1
    return ways


def named_ways(
    graph: Graph, decisions: Decisions, names: Names | None = None
) -> Iterator[tuple[FlatNode, str, str]]:
    """Operator, axis, and what the axis splits of it in words, in the order of the program `graph`,
    which is rewritten as `decisions` say; a stage of it has the `names` of the whole one.
    """
    factored = factorize(graph)
    decided = {node.key: node for node in decisions.nodes}
    names = names or names_of(graph)
    for flat in graph.flat():
        rule = factored.rule(flat.function, flat.node)
        for axis, what in split_words(rule, decided.get(flat.key), names[flat.key]):
            yield flat, axis, what


def split_words(
    rule: Rule, node: NodeDecision | None, names: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Each axis and what it splits of an operator whose factors have these `names`."""
    for factor, axes in node.factors if node else ():
        if rule.kind(factor) != RING:  # keys go around the axes of queries
            for axis in axes:
                yield axis, names[factor]


def names_of(graph: Graph) -> Names:
    """What the factors of all operators are called."""
    factored, naming = factorize(graph), Naming(graph)
    return {f.key: naming.names(f, factored.rule(f.function, f.node)) for f in graph.flat()}


class Naming:
    """Names the factors of one operator after the other, in the order of the program.

    What the dims of batch tensors and the features that a weight makes are called goes with the
    values that are made of them, wherever a view puts them.
    """

    def __init__(self, graph: Graph) -> None:
        self.parameters = {i.value.name for i in graph.of_kind("parameter")}
        # By value and dim, what the digits between two units are called.
        self.known: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
        batch = [i.value for i in graph.of_kind("batch") if i.value.spec.shape]
        tokens = Counter(v.spec.shape[1] for v in batch if _is_tokens(v.spec))
        for value in batch:
            shape = value.spec.shape
            names = {0: SAMPLES} if shape[0] == batch[0].spec.shape[0] else {}
            if _is_tokens(value.spec) and tokens[shape[1]] > 1:  # as labels have, too
                names[1] = POSITIONS
            if len(shape) == IMAGE_DIMS and value.spec.is_float:
                names |= {2: "height", 3: "width"}
            for dim, name in names.items():
                self.known[value.name, dim] = [(1, shape[dim], name)]

    def names(self, flat: FlatNode, rule: Rule) -> Mapping[str, str]:
        """What each factor of an operator is called."""
        carried: dict[str, str] = {}
        of_parameter: set[str] = set()
        for name, dims in zip(flat.operands, rule.operands, strict=True):
            for dim, factor, unit in _digits(rule, dims):
                if name in self.parameters:
                    of_parameter.add(factor)
                top = unit * rule.size(factor)
                for low, high, what in self.known.get((name, dim), ()):
                    if low < top <= high:  # axes take the outermost digits first
                        carried.setdefault(factor, what)
        made = {factor: dim for dims in rule.results[:1] for dim, factor, _ in _digits(rule, dims)}
        found = {
            factor: self._name(flat, factor, made.get(factor), carried, of_parameter)
            for factor, _ in rule.sizes
        } | dict.fromkeys(rule.sums, "partial sums")
        for name, dims in zip(flat.results, rule.results, strict=True):
            for dim, factor, unit in _digits(rule, dims):
                what = found[factor] if factor in made else carried.get(factor, "")
                if what and not what.startswith(UNNAMED):
                    digit = unit, unit * rule.size(factor), what
                    self.known.setdefault((name, dim), []).append(digit)
        return found

    def _name(
        self, flat: FlatNode, factor: str, dim: int | None, carried: Mapping[str, str],
        of_parameter: set[str],
    ) -> str:  # fmt: skip
        if factor in of_parameter and dim is None:
            return ENTRIES if flat.node.op in LOOKUPS else INPUTS
        heads = len(flat.node.results[0].spec.shape) - 3
        if flat.node.op == ATTENTION and dim is not None and dim == heads > 0:
            return HEADS
        if factor in carried or factor in of_parameter:
            return carried.get(factor, OUTPUTS)
        return "a summed dim" if dim is None else f"{UNNAMED}{dim} of the result"


def _is_tokens(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and not spec.is_float


def _digits(rule: Rule, dims: Dims) -> Iterator[tuple[int, str, int]]:
    """Dim, factor and unit of every digit of a tensor."""
    for dim, factors in enumerate(dims):
        unit = 1
        for factor in reversed(factors):
            yield dim, factor, unit
            unit *= rule.size(factor)
