"""Products of one operand as one product.

`linear(x, w)` and `linear(x, v)` are the two parts of `linear(x, cat((w, v), 0))`, as queries,
keys and values are, or gate and up; so are convolutions of one geometry, as in branches. The merged
operator reads the user's own weights: neither optimizer nor checkpoints see it. As text, in a plan,
with the keys of its decisions: `merge layers.0.q:linear#0 layers.0.k:linear#0`; in a repeated block
it holds for all of them.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from parloom.errors import InputError
from parloom.ir.graph import Arg, Function, Graph, Node, Ref, Value, numbered
from parloom.ir.ops.joined import CONVS, LINEARS

MERGE = re.compile(r"merge ([^ ]+(?: [^ ]+)+)")
JOINED = {"linear": LINEARS, "conv1d": CONVS, "conv2d": CONVS, "conv3d": CONVS}
"""Products, and the operator that several of them are."""


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
            if node.op in JOINED and not node.kwargs:
                spec = node.results[0].spec
                kind = node.op, node.args[0], node.args[3:], spec.dtype, len(node.refs)
                known = alike.setdefault(kind, [])
                if node.args[1] not in [other.args[1] for other in known]:
                    known.append(node)
        for nodes in alike.values():
            if len(nodes) > 1 and product_of(function, nodes) is not None:
                yield Merge(tuple(first[function.name, node.key] for node in nodes))


def merged(graph: Graph, found: Sequence[Merge]) -> Graph:
    """`graph` with one operator in the place of several, all at once; raises `InputError` where
    they are none such, or in two merges.
    """
    places = [place_of(graph, merge) for merge in found]
    counts = Counter((name, key) for name, keys in places for key in keys)
    twice = next((key for (_, key), number in counts.items() if number > 1), None)
    if twice is not None:
        raise InputError(f"two merges of {graph.name} have the operator {twice}")
    made = {
        function.name: _replaced(function, [keys for name, keys in places if name == function.name])
        for function in (*graph.functions, graph.main)
    }
    functions = tuple(made[function.name] for function in graph.functions)
    return replace(graph, main=made[graph.main.name], functions=functions)


def place_of(graph: Graph, merge: Merge) -> tuple[str, tuple[str, ...]]:
    """The block kind of a merge, and the keys of its operators there; raises `InputError`."""
    found = {flat.key: flat for flat in graph.flat() if flat.key in merge.keys}
    calls = {(flat.function, flat.prefix) for flat in found.values()}
    keys = tuple(found[key].node.key for key in merge.keys if key in found)
    if len(calls) == 1 and len(keys) == len(merge.keys):
        ((name, _),) = calls
        function = graph.by_name.get(name, graph.main)
        if product_of(function, nodes_of(function, keys)) is not None:
            return name, keys
    raise InputError(f"the rewrite '{merge}' does not apply to {graph.name}")


def nodes_of(function: Function, keys: Collection[str]) -> list[Node]:
    """The operators of a function with these keys, in its order."""
    return [item for item in function.body if isinstance(item, Node) and item.key in keys]


def _replaced(function: Function, groups: Sequence[tuple[str, ...]]) -> Function:
    """The function with one product for each group, where its first operator is."""
    instead: dict[str, list[Node]] = {}
    for keys in groups:
        nodes = nodes_of(function, keys)
        made = product_of(function, nodes)
        assert made is not None, "it was looked at"
        instead |= {node.key: [] for node in nodes} | {nodes[0].key: [made]}
    if not instead:
        return function
    body = [
        new
        for item in function.body
        for new in (instead.get(item.key, [item]) if isinstance(item, Node) else [item])
    ]
    return replace(function, body=numbered(tuple(body)))


def product_of(function: Function, nodes: Sequence[Node]) -> Node | None:
    """One operator with the results of all; None where they are no products of one operand, or read
    what comes after the first of them.
    """
    specs = function.specs()
    first = nodes[0]
    if any(_settings(node) != _settings(first) for node in nodes) or first.op not in JOINED:
        return None
    weights, biases = [node.args[1] for node in nodes], [_bias(node) for node in nodes]
    if len({bias is None for bias in biases}) > 1 or len(set(weights)) < len(weights):
        return None
    shapes = [specs[_name(weight)].shape for weight in weights]
    if len({shape[1:] for shape in shapes}) > 1 or len(shapes[0]) < 2 or _groups(first) != 1:
        return None
    at = function.body.index(first)
    later = {value.name for item in function.body[at:] for value in item.results}
    if later.intersection(name for node in nodes for name in node.refs):
        return None
    results = tuple(Value(node.results[0].name, node.results[0].spec) for node in nodes)
    given: tuple[Arg, ...] = (first.args[0], tuple(weights))
    rest = first.args[3:6]
    if biases[0] is not None or rest:
        given = (*given, None if biases[0] is None else tuple(biases), *rest)
    return Node(JOINED[first.op], given, (), results, _path(nodes), 0, first.source)


def _settings(node: Node) -> object:
    """What products that are one have in common."""
    return node.op, node.args[0], node.args[3:], node.kwargs == ()


def _groups(node: Node) -> Arg:
    """The groups of a convolution."""
    return node.arg(6, "groups", 1)


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
