"""Which dim of each batch tensor counts samples, from the factors that operators join.

Dims that a rule gives one factor are one class, through views, blocks and losses. Samples are a
class that no weight has and, if there is one, that no operator mixes with itself, as attention does
positions; of these the one that most batch tensors have, and then the one that comes first: the
batch of `[batch, positions]` and of `[positions, batch]`. A batch of one sample has none.
"""

from collections.abc import Iterator, Mapping
from math import gcd

from parloom.ir.factors import Factored
from parloom.ir.graph import CACHE, Call, Function, Graph, Node
from parloom.ir.ops.cuts import units
from parloom.ir.ops.rule import HALO, OFFSET, RING, WHOLE, Rule

# Operators whose result has the elements of what they read.
SAMPLED = ("batch", CACHE)  # kinds of inputs that have samples
SAME_ELEMENTS = ("_to_copy", "alias", "clone", "detach", "view")
Part = tuple[str, str, int, int]  # function, value, dim, stride within the dim
Uses = list[tuple[Rule, dict[str, list[Part]]]]  # where each factor of a call is


class Classes:
    """Sets of parts of dims, joined one pair at a time."""

    def __init__(self) -> None:
        self._above: dict[Part, Part] = {}
        self._strides: dict[tuple[str, str, int], set[int]] = {}

    def find(self, part: Part) -> Part:
        """The one that stands for the class of `part`."""
        root = part
        while (above := self._above.get(root, root)) != root:
            root = above
        self._above[part] = root
        return root

    def join(self, one: Part, other: Part) -> None:
        """Make one class of the two of these parts."""
        for part in (one, other):
            self._strides.setdefault(part[:3], set()).add(part[3])
        self._above[self.find(one)] = self.find(other)

    def strides(self, function: str, value: str, dim: int) -> frozenset[int]:
        """Where the known parts of a dim begin, as strides within it."""
        return frozenset(self._strides.get((function, value, dim), ()))


def sample_dims(factored: Factored) -> Mapping[str, int]:
    """The dim of samples by the names of the batch tensors and caches that have one; a stage knows
    them.
    """
    graph = factored.graph
    if graph.boundary is not None:
        return graph.boundary.samples
    classes, uses = _classes(factored)
    weights = frozenset(_of_weights(graph, classes))
    return _chosen(graph, classes, weights, weights | frozenset(_mixed(classes, uses)))


def output_dims(factored: Factored) -> Mapping[str, tuple[int, ...]]:
    """The dims of samples by the names of a whole model's outputs: none of what is made of all
    samples together, several of what is made of each with each.
    """
    graph, dims = factored.graph, sample_dims(factored)
    classes, _ = _classes(factored)
    values = {e.target: e.value.name for kind in SAMPLED for e in graph.of_kind(kind)}
    roots = {_outermost(graph, classes, values[name], dim) for name, dim in dims.items()}
    specs = graph.main.specs()
    return {
        name: tuple(
            dim
            for dim in range(len(specs[value].shape))
            if _outermost(graph, classes, value, dim) in roots
        )
        for name, value in graph.outputs
    }


def _classes(factored: Factored) -> tuple[Classes, Uses]:
    """The classes of all dims, and where the factors of each call are."""
    graph = factored.graph
    functions = {f.name: f for f in (graph.main, *graph.functions)}
    uses = [
        (rule, _occurrences(function, item, rule))
        for function in functions.values()
        for item in function.body
        if isinstance(item, Node)
        for rule in (factored.rule(function.name, item),)
    ]
    classes = Classes()
    for _, found in uses:
        for parts in found.values():
            for part in parts:
                classes.join(part, parts[0])
    for function in functions.values():
        for item in function.body:
            if isinstance(item, Call):
                _through_call(classes, function, item, functions[item.function])
    return classes, uses


def num_samples(factored: Factored) -> int:
    """The samples of the batch: the largest number that divides every input's dim of samples."""
    dims = sample_dims(factored)
    entries = factored.graph.of_kind("batch")
    return gcd(*(e.value.spec.shape[dims[e.target]] for e in entries if e.target in dims)) or 1


def num_tokens(factored: Factored) -> int | None:
    """The tokens of the batch: the elements of its largest tensor of integers, samples by
    positions, that `embedding` looks up; None where there is none.
    """
    graph, dims = factored.graph, sample_dims(factored)
    found: list[int] = []
    came = {
        e.value.name: e.value.spec.num_elements
        for e in graph.of_kind("batch")
        if e.target in dims and "int" in e.value.spec.dtype and len(e.value.spec.shape) == 2
    }
    for flat in graph.flat():
        values = [came[name] for name in flat.operands if name in came]
        if values and flat.node.op in SAME_ELEMENTS:
            came |= dict.fromkeys(flat.results, values[0])
        elif values and flat.node.op == "embedding":
            found += values
    return max(found, default=None)


def _chosen(
    graph: Graph, classes: Classes, weights: frozenset[Part], other: frozenset[Part]
) -> Mapping[str, int]:
    """The dims of one class, if possible none of `other`, and of those that meet it in pairs."""
    entries = {e.target: e.value for kind in SAMPLED for e in graph.of_kind(kind)}
    candidates: dict[Part, dict[str, int]] = {}
    for name, value in entries.items():
        for dim in range(len(value.spec.shape)):
            root = _outermost(graph, classes, value.name, dim)
            if root is not None and root not in weights:
                candidates.setdefault(root, {}).setdefault(name, dim)
    if not candidates:
        return {}
    root = min(
        candidates,
        key=lambda r: (r in other, -len(candidates[r]), sum(candidates[r].values())),
    )
    chosen = candidates[root]
    # Where dim 0 has one element, as in a batch of one image, that one is the sample.
    if all(dim and entries[name].spec.shape[0] == 1 for name, dim in chosen.items()):
        return {}
    first, at = next(iter(chosen.items()))
    for name, value in entries.items():
        # Pairs that only meet in a product, as images and their captions.
        like = value.spec.shape[at : at + 1] == entries[first].spec.shape[at : at + 1]
        if name not in chosen and like:
            mine = _outermost(graph, classes, value.name, at)
            if mine is not None and mine not in weights:
                chosen[name] = at
    return chosen


def _outermost(graph: Graph, classes: Classes, value: str, dim: int) -> Part | None:
    """The class of the outermost part of an input's dim, if an operator reads it."""
    strides = classes.strides(graph.main.name, value, dim)
    return classes.find((graph.main.name, value, dim, max(strides))) if strides else None


def _occurrences(function: Function, node: Node, rule: Rule) -> dict[str, list[Part]]:
    """Where each factor of a call is."""
    values = [*zip(node.refs, rule.operands, strict=True)]
    values += [(v.name, dims) for v, dims in zip(node.results, rule.results, strict=True)]
    found: dict[str, list[Part]] = {}
    for name, dims in values:
        for dim, factors in enumerate(dims):
            for factor, unit in units(rule, factors):
                found.setdefault(factor, []).append((function.name, name, dim, unit))
    return found


def _through_call(classes: Classes, function: Function, call: Call, callee: Function) -> None:
    actual = (*call.args, *(v.name for v in call.results))
    formal = (*(v.name for v in callee.inputs), *callee.outputs)
    specs = callee.specs()
    for outer, inner in zip(actual, formal, strict=True):
        for dim in range(len(specs[inner].shape)):
            keys = (function.name, outer, dim), (callee.name, inner, dim)
            for stride in frozenset().union(*(classes.strides(*key) for key in keys)):
                classes.join((*keys[0], stride), (*keys[1], stride))


def _mixed(classes: Classes, uses: Uses) -> Iterator[Part]:
    """Classes that are two factors of one call, or whose places in their dim count."""
    for rule, found in uses:
        roots = {factor: classes.find(parts[0]) for factor, parts in found.items()}
        for factor, root in roots.items():
            looked_at = rule.kind(factor) in (HALO, OFFSET, RING, WHOLE)
            if looked_at or list(roots.values()).count(root) > 1:
                yield root


def _of_weights(graph: Graph, classes: Classes) -> Iterator[Part]:
    """Classes that a parameter, a buffer or a constant has."""
    for entry in graph.inputs:
        if entry.kind not in SAMPLED:
            for dim in range(len(entry.value.spec.shape)):
                for stride in classes.strides(graph.main.name, entry.value.name, dim):
                    yield classes.find((graph.main.name, entry.value.name, dim, stride))
