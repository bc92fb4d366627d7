"""Products of one operand as one product.

`linear(x, w)` and `linear(x, v)` are the two parts of `linear(x, cat((w, v), 0))`, as queries,
keys and values are, or gate and up; so are convolutions of one geometry, as in branches. The merged
operator reads the user's own weights: neither optimizer nor checkpoints see it.
"""

from collections.abc import Iterator, Mapping, Sequence

from parloom.ir.graph import Arg, Function, Graph, Node, Ref, TensorSpec
from parloom.ir.ops.joined import CONVS, LINEARS
from parloom.rewrite.take import Take, term_of
from parloom.rewrite.terms import Arg as TermArg
from parloom.rewrite.terms import Term

JOINED = {"linear": LINEARS, "conv1d": CONVS, "conv2d": CONVS, "conv3d": CONVS}
"""Products, and the operator that several of them are."""


def merges(graph: Graph) -> Iterator[Take]:
    """All products of one operand, once for each kind of block."""
    for function in (*graph.functions, graph.main):
        specs = function.specs()
        alike: dict[object, list[Node]] = {}
        for node in (item for item in function.body if isinstance(item, Node)):
            if node.op in JOINED and not node.kwargs and _groups(node) == 1:
                known = alike.setdefault(_geometry(node, specs), [])
                if node.args[1] not in [other.args[1] for other in known]:
                    known.append(node)
        for nodes in alike.values():
            is_vector = len(specs[_name(nodes[0].args[1])].shape) < 2
            if len(nodes) > 1 and not is_vector and not _is_late(function, nodes):
                yield _merged(function, nodes)


def _geometry(node: Node, specs: Mapping[str, TensorSpec]) -> object:
    """What products that are one have in common."""
    weight, biased = specs[_name(node.args[1])], _bias(node) is not None
    return node.op, node.args[0], node.args[3:], weight.shape[1:], weight.dtype, biased


def _is_late(function: Function, nodes: Sequence[Node]) -> bool:
    """Whether one reads what is made after the first of them."""
    at = function.body.index(nodes[0])
    later = {value.name for item in function.body[at:] for value in item.results}
    return bool(later.intersection(name for node in nodes for name in node.refs))


def _merged(function: Function, nodes: Sequence[Node]) -> Take:
    first, biases = nodes[0], [_bias(node) for node in nodes]
    args: list[TermArg] = [term_of(first.args[0]), tuple(term_of(node.args[1]) for node in nodes)]
    rest = [term_of(arg) for arg in first.args[3:6]]
    if biases[0] is not None or rest:
        args += [None if biases[0] is None else tuple(map(term_of, biases)), *rest]
    values = tuple(node.results[0].name for node in nodes)
    return Take(function.name, values, Term(JOINED[first.op], tuple(args)), (_rule(first.op),))


def _rule(op: str) -> str:
    return f"merge_{op}"


RULES = tuple(map(_rule, JOINED))
"""The names of these rewrites."""


def _bias(node: Node) -> Arg:
    return node.arg(2, "bias")


def _groups(node: Node) -> Arg:
    """The groups of a convolution."""
    return node.arg(6, "groups", 1)


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name
