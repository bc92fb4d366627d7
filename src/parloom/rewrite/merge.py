"""Products of one operand as one product.

`linear(x, w)` and `linear(x, v)` are the two parts of `linear(x, cat((w, v), 0))`, as queries,
keys and values are, or gate and up; so are convolutions of one geometry, as in branches. The merged
operator reads the user's own weights: neither optimizer nor checkpoints see it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from types import MappingProxyType
from typing import Any

from parloom.ir.graph import Arg, Function, Graph, Node, TensorSpec, iter_refs
from parloom.ir.ops.joined import CONVS, LINEARS
from parloom.rewrite.egraph import Class, EGraph
from parloom.rewrite.rules import Rule, prove, rule
from parloom.rewrite.take import Take, term_of
from parloom.rewrite.terms import Arg as TermArg
from parloom.rewrite.terms import Name, Term, arg_text

JOINED = {"linear": LINEARS, "conv1d": CONVS, "conv2d": CONVS, "conv3d": CONVS}
"""Products, and the operator that several of them are."""


def merges(graph: Graph) -> Iterator[Take]:
    """All products of one operand, once for each kind of block."""
    for function in (*graph.functions, graph.main):
        yield from merges_in(function)


def merges_in(function: Function) -> Iterator[Take]:
    """All products of one operand of a function."""
    for nodes in _alike(function):
        if not _is_late(function, nodes) and not _refusal(function, nodes[0]):
            yield _merged(function, nodes)


def merges_of_fewer(function: Function) -> Iterator[Take]:
    """Of three products of one operand and more all but the last: apart, that one may be split in
    another way, and be computed while the others communicate.
    """
    for nodes in _alike(function):
        few = nodes[:-1]
        if len(few) > 1 and not _is_late(function, few) and not _refusal(function, few[0]):
            yield _merged(function, few)


def merges_of_two(function: Function) -> Iterator[Take]:
    """All pairs of products of one operand, of which each may be merged already."""
    for nodes in _alike(function, (*JOINED, LINEARS, CONVS)):
        for pair in combinations(nodes, 2):
            if not _is_late(function, pair) and not _refusal(function, pair[0]):
                yield _merged(function, pair)


def rule_of(
    op: str,
    kernel: Sequence[int],
    rest: Sequence[TermArg],
    is_biased: bool,
    has_samples: bool = True,
) -> Rule:
    """The rule by which two products of one operand are one, for all extents but a kernel's, and
    for this stride, padding and dilation; of an image alone where it has no samples.
    """
    places = "".join(f", p{at}" for at in range(len(kernel)))
    window = "".join(f", {extent}" for extent in kernel)
    inputs = f"x[{'b, ' * has_samples}k{places}]" if kernel else "x[*, k]"
    inputs += f", w[n, k{window}], v[m, k{window}]" + ", c[n], d[m]" * is_biased
    biases = ("c", "d", "(c, d)") if is_biased else ("None",) * 3
    words = ", ".join(map(arg_text, rest))
    one, other, both = (
        f"{name}(x, {weight}, {bias}{', ' * bool(words)}{words})"
        for name, weight, bias in zip(
            (op, op, JOINED[op]), ("w", "v", "(w, v)"), biases, strict=True
        )
    )
    return rule(f"merge_{op}", inputs, [one, other], [f"{both}[0]", f"{both}[1]"])


@cache
def refusal(
    op: str,
    kernel: tuple[int, ...],
    rest: tuple[TermArg, ...],
    is_biased: bool,
    has_samples: bool = True,
) -> str:
    """Why two products of one operand are not one; empty where both sides have equal normal
    forms.
    """
    return prove(rule_of(op, kernel, rest, is_biased, has_samples))


def _refusal(function: Function, node: Node) -> str:
    x, weight = (function.specs()[name] for name in node.refs[:2])
    rest = tuple(map(term_of, node.args[3:6]))
    kernel, has_samples = weight.shape[2:], len(x.shape) == len(weight.shape)
    return refusal(_single(node, len(kernel)), kernel, rest, bool(_biases(node)), has_samples)


def _single(node: Node, num_dims: int) -> str:
    """The product that a node is, or of which it is several."""
    joined = JOINED.get(node.op, node.op)
    return f"conv{num_dims}d" if joined == CONVS else "linear"


def unite_products(graph: EGraph) -> bool:
    """Unite each result of a merged product with the product that it is, where both are there;
    whether some were not one before.
    """
    alone, joined = dict[object, Class](), list[tuple[Any, Class]]()
    for key, owner in graph.nodes():
        op, args, _ = key
        if op in JOINED and args[6:] in ((), (1,)):
            bias = args[2] if len(args) > 2 else None
            alone[graph.renewed((JOINED[op], args[0], args[1], bias, *args[3:6]))] = owner
        elif op in JOINED.values():
            joined.append((key, owner))
    found = False
    for (op, args, at), owner in joined:
        bias = args[2][at] if len(args) > 2 and args[2] is not None else None
        one = alone.get(graph.renewed((op, args[0], args[1][at], bias, *args[3:])))
        if one is not None and graph.unite(owner, one):
            found = True
    graph.rebuild()
    return found


def unite_pairs(graph: EGraph, rules: Collection[str]) -> bool:
    """Add the merge of each two products of one operand, by rules among `RULES`, and unite it with
    these; whether there were some.
    """
    alike: dict[tuple[Any, ...], dict[Any, tuple[Any, Class]]] = {}
    for (op, args, _), owner in tuple(graph.nodes()):
        if op in JOINED and f"merge_{op}" in rules and args[6:] in ((), (1,)):
            shape = graph.shapes[graph.find(args[1]).number]
            bias = args[2] if len(args) > 2 else None
            key = op, graph.find(args[0]), args[3:6], shape[1:], bias is None
            alike.setdefault(key, {})[graph.find(args[1])] = (args, owner)
    found = False
    for (op, *_), known in alike.items():
        for pair in combinations(known.values(), 2):
            given = {f"i{at}{k}": arg for k, (args, _) in enumerate(pair)
                     for at, arg in enumerate(args[:3]) if isinstance(arg, Class)}  # fmt: skip
            first = pair[0][0]
            call: list[TermArg] = [Name("i00"), (Name("i10"), Name("i11"))]
            if len(first) > 2:
                call += [(Name("i20"), Name("i21")) if "i20" in given else None, *first[3:6]]
            for at, (_, owner) in enumerate(pair):
                made = graph.add(Term(JOINED[op], tuple(call), at), given, {})
                found = graph.unite(made, owner) or found
    graph.rebuild()
    return found


def _alike(function: Function, ops: Collection[str] = JOINED) -> Iterator[list[Node]]:
    """Products of one operand and one geometry, two or more."""
    specs = function.specs()
    alike: dict[object, list[Node]] = {}
    for node in (item for item in function.body if isinstance(item, Node)):
        if node.op in ops and not node.kwargs and _groups(node) == 1:
            known = alike.setdefault(_geometry(node, specs), [])
            if set(_weights(node)).isdisjoint(w for other in known for w in _weights(other)):
                known.append(node)
    for nodes in alike.values():
        is_vector = len(specs[_weights(nodes[0])[0]].shape) < 2
        if len(nodes) > 1 and not is_vector:
            yield nodes


def _geometry(node: Node, specs: Mapping[str, TensorSpec]) -> object:
    """What products that are one have in common."""
    weight, biased = specs[_weights(node)[0]], _bias(node) is not None
    joined, rest = JOINED.get(node.op, node.op), node.args[3:6]
    return joined, node.args[0], rest, weight.shape[1:], weight.dtype, biased


def _is_late(function: Function, nodes: Sequence[Node]) -> bool:
    """Whether one reads what is made after the first of them."""
    at = function.body.index(nodes[0])
    later = {value.name for item in function.body[at:] for value in item.results}
    return bool(later.intersection(name for node in nodes for name in node.refs))


def _merged(function: Function, nodes: Sequence[Node]) -> Take:
    first = nodes[0]
    weights = [Name(name) for node in nodes for name in _weights(node)]
    args: list[TermArg] = [term_of(first.args[0]), tuple(weights)]
    rest = [term_of(arg) for arg in first.args[3:6]]
    if _bias(first) is not None or rest:
        biases = [bias for node in nodes for bias in _biases(node)]
        args += [tuple(map(term_of, biases)) if biases else None, *rest]
    values = tuple(value.name for node in nodes for value in node.results)
    joined = JOINED.get(first.op, first.op)
    op = _single(first, len(function.specs()[weights[0].name].shape) - 2)
    return Take(function.name, values, Term(joined, tuple(args)), (f"merge_{op}",))


RULES = MappingProxyType({f"merge_{op}": joined for op, joined in JOINED.items()})
"""These rewrites, and the operators that they make."""


def _weights(node: Node) -> tuple[str, ...]:
    """The weight of a product, or all of a merged one."""
    return tuple(iter_refs((node.args[1],)))


def _bias(node: Node) -> Arg:
    return node.arg(2, "bias")


def _biases(node: Node) -> tuple[Arg, ...]:
    """One for each weight, or none."""
    bias = _bias(node)
    if isinstance(bias, tuple):
        return bias
    return () if bias is None else (bias,)


def _groups(node: Node) -> Arg:
    """The groups of a convolution."""
    return node.arg(6, "groups", 1)
