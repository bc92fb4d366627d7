"""Reads by position: an index that takes every element of a dim in order.

Attention masks are often written as functions of (batch, head, query, key) numbers, so that
`mask[batch, key]` becomes an index with two ranges. As an index it would need the whole batch on
every rank and in every microbatch; as a view it is sharded as the mask is. Where only some of the
indices are ranges, as in `x[arange(n), last]`, the call is `parloom.index_each`, which looks up a
row in each sample, and writing there `parloom.put_each`.
"""

from collections.abc import Mapping
from dataclasses import replace

from parloom.ir.graph import Graph, Node, Ref, TensorSpec, numbered
from parloom.ir.layout import Shape

SAME = ("_to_copy", "clone", "alias", "detach")
RESHAPED = ("unsqueeze", "view", "squeeze")
Ranges = dict[str, int]  # value that counts 0, 1, .. along a dim -> number of dims after that one


def with_views_for_ranges(graph: Graph) -> Graph:
    """The flat graph with `view` instead of `index` where every index is a whole range.

    And with `parloom.index_each` and `parloom.put_each` where some of them are.
    """
    specs = graph.main.specs()
    ranges: Ranges = {}
    body = []
    for item in graph.main.body:
        if isinstance(item, Node):
            after = _counts(item, ranges, specs)
            if after is not None:
                ranges[item.results[0].name] = after
            elif item.op == "index" and _in_order(item, ranges, specs):
                args = (item.args[0], item.results[0].spec.shape)
                item = replace(item, op="view", args=args, kwargs=())
            elif item.op in ("index", "_unsafe_index", "index_put"):
                item = _by_sample(item, ranges, specs)
        body.append(item)
    return replace(graph, main=replace(graph.main, body=numbered(tuple(body))))


def _counts(node: Node, ranges: Ranges, specs: Mapping[str, TensorSpec]) -> int | None:
    """Number of dims after the one along which the one result of `node` counts from 0.

    None where it does not, or where it is not the same along all other dims.
    """
    made = [value.spec for value in node.results]
    if len(made) != 1 or "int" not in made[0].dtype:
        return None
    shape = made[0].shape
    if node.op == "arange":
        numbers = node.args if len(node.args) != 1 else (0, *node.args)
        return 0 if numbers in ((0, shape[0]), (0, shape[0], 1)) else None
    refs = node.refs
    if len(refs) != 1 or refs[0] not in ranges:
        return None
    given, after = specs[refs[0]].shape, ranges[refs[0]]
    size = given[len(given) - 1 - after]
    if node.op in SAME or (node.op == "add" and node.args[1] == 0):
        return after
    if node.op == "expand":
        return after if shape[len(shape) - 1 - after] == size else None
    if node.op in RESHAPED and specs[refs[0]].num_elements == size and size in shape:
        return len(shape) - 1 - shape.index(size)
    return None


def _in_order(node: Node, ranges: Ranges, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether an index reads all elements of all the dims that it names, in their order."""
    source, indices = node.args[0], node.args[1]
    if not isinstance(source, Ref) or not isinstance(indices, tuple):
        return False
    names = [index.name for index in indices if isinstance(index, Ref)]
    if len(names) != len(indices) or not ranges.keys() >= set(names):
        return False
    shape, result = specs[source.name].shape, node.results[0].spec.shape
    rank = len(result) - (len(shape) - len(names))  # dims that the indices make
    at = -1
    for size, name in zip(shape, names, strict=False):
        given = specs[name]
        if given.num_elements != size:
            return False
        if size > 1:  # the dim along which this index counts must come after the last one's
            dim = rank - len(given.shape) + given.shape.index(size)
            if dim <= at:
                return False
            at = dim
    return node.results[0].spec.num_elements == specs[source.name].num_elements


def _by_sample(node: Node, ranges: Ranges, specs: Mapping[str, TensorSpec]) -> Node:
    """The call by sample where some, but not all indices are ranges along dims of their own."""
    source, indices = node.args[0], node.args[1]
    if not isinstance(source, Ref) or not isinstance(indices, tuple):
        return node
    shape = specs[source.name].shape
    each: dict[int, int] = {}  # dim -> number of index dims after the one that it is read along
    for dim, index in enumerate(indices):
        if not isinstance(index, Ref) or index.name not in ranges or shape[dim] == 1:
            continue
        after, given = ranges[index.name], specs[index.name].shape
        if given[len(given) - 1 - after] == shape[dim] and after not in each.values():
            each[dim] = after
    left = tuple(None if d in each else index for d, index in enumerate(indices))
    whole = [specs[index.name].shape for index in indices if isinstance(index, Ref)]
    others = [specs[index.name] for index in left if isinstance(index, Ref)]
    made = [spec.shape for spec in others]
    made += [(shape[d], *(1,) * after) for d, after in each.items()]
    indexed = others and all(spec.dtype.startswith("int") for spec in others)
    if not each or not indexed or _broadcast(whole) != _broadcast(made):
        return node
    pairs = tuple(each.items())
    if node.op != "index_put":
        return replace(node, op="parloom.index_each", args=(source, left, pairs))
    values, accumulate = node.args[2], node.arg(3, "accumulate", False)
    return replace(
        node, op="parloom.put_each", args=(source, left, pairs, values, accumulate), kwargs=()
    )


def _broadcast(shapes: list[Shape]) -> Shape:
    """The shape that shapes are broadcast to."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))
