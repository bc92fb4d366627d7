"""Products of one operand as one product.

`linear(x, w)` and `linear(x, v)` are the two parts of `linear(x, cat((w, v), 0))`, as queries,
keys and values are, or gate and up. The merged operator reads the user's own weights: neither
optimizer nor checkpoints see it. As text, in a plan, with the keys of its decisions: `merge
layers.0.q:linear#0 layers.0.k:linear#0`; in a repeated block it holds for all of them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from parloom.ir.graph import Arg, Function, Graph, Node, Ref, Value, numbered
from parloom.ir.ops.matmul import LINEARS

MERGE = re.compile(r"merge ([^ ]+(?: [^ ]+)+)")
LINEAR = "linear"


@dataclass(frozen=True, slots=True)
class Merge:
    """The operators with these keys."""

    keys: tuple[str, ...]

    def __str__(self) -> str:
        return f"merge {' '.join(self.keys)}"


def parse_merge(text: str) -> Merge | None:
    """The inverse of `str`; None for another rewrite."""
    found = MERGE.fullmatch(text)
    return None if found is None else Merge(tuple(found[1].split(" ")))


def merges(graph: Graph) -> Iterator[Merge]:
    """All products of one operand, once for each kind of block."""
    first: dict[tuple[str, str], str] = {}
    for flat in graph.flat():
        first.setdefault((flat.function, flat.node.key), flat.key)
    for function in (*graph.functions, graph.main):
        alike: dict[object, list[Node]] = {}
        for node in (item for item in function.body if isinstance(item, Node)):
            if node.op == LINEAR and not node.kwargs:
                spec = node.results[0].spec
                kind = node.args[0], spec.dtype, spec.shape[:-1], len(node.refs)
                known = alike.setdefault(kind, [])
                if node.args[1] not in [other.args[1] for other in known]:
                    known.append(node)
        for nodes in alike.values():
            if len(nodes) > 1 and _merged(function, nodes) is not None:
                yield Merge(tuple(first[function.name, node.key] for node in nodes))


def merged(graph: Graph, merge: Merge) -> Graph | None:
    """`graph` with one operator in the place of several; None where they are none such."""
    found = {flat.key: flat for flat in graph.flat() if flat.key in merge.keys}
    calls = {(flat.function, flat.prefix) for flat in found.values()}
    if len(found) < len(merge.keys) or len(calls) != 1:
        return None
    ((name, _),) = calls
    function = next(own for own in (*graph.functions, graph.main) if own.name == name)
    wanted = {found[key].node.key for key in merge.keys}
    nodes = [item for item in function.body if isinstance(item, Node) and item.key in wanted]
    made = _merged(function, nodes) if len(nodes) == len(merge.keys) else None
    if made is None:
        return None
    if function is graph.main:
        return replace(graph, main=made)
    return replace(graph, functions=tuple(made if f is function else f for f in graph.functions))


def _merged(function: Function, nodes: Sequence[Node]) -> Function | None:
    """The function with products as one, where the first of them is; None where they are no
    products of one operand, or read what comes later.
    """
    specs = function.specs()
    first, *others = nodes
    if any(node.op != LINEAR or node.kwargs or node.args[0] != first.args[0] for node in nodes):
        return None
    weights, biases = [node.args[1] for node in nodes], [_bias(node) for node in nodes]
    if len({bias is None for bias in biases}) > 1 or len(set(weights)) < len(weights):
        return None
    if any(len(specs[_name(weight)].shape) != 2 for weight in weights):
        return None
    at = function.body.index(first)
    later = {value.name for item in function.body[at:] for value in item.results}
    if later.intersection(name for node in nodes for name in node.refs):
        return None
    results = tuple(Value(node.results[0].name, node.results[0].spec) for node in nodes)
    given: tuple[Arg, ...] = (first.args[0], tuple(weights))
    if biases[0] is not None:
        given = (*given, tuple(biases))
    node = Node(LINEARS, given, (), results, _path(nodes), 0, first.source)
    gone = {id(own) for own in others}
    body = [node if item is first else item for item in function.body if id(item) not in gone]
    return replace(function, body=numbered(tuple(body)))


def _bias(node: Node) -> Arg:
    return node.arg(2, "bias")


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name


def _path(nodes: Sequence[Node]) -> str:
    """The module that has all of them."""
    paths = [node.path.split(".") for node in nodes]
    common = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in common)
