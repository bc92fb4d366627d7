"""Views: they split, merge, reorder and drop factors, never compute."""

from itertools import pairwise
from math import prod

from parloom.ir.ops import exact, exact_moves
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.rule import WHOLE, Dims, Rule, Site, broadcast, build, no_flops

Shape = tuple[int, ...]


def view_factors(
    source: Shape, target: Shape
) -> tuple[tuple[tuple[str, int], ...], Dims, Dims, set[str]]:
    """Common factors of two shapes of equal size: sizes, dims of each side, whole factors.

    Dims are grouped where the running products meet; inside a group the cuts of both sides must
    divide one another, otherwise its dims become whole factors of their own.
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    left: list[tuple[str, ...]] = [()] * len(source)
    right: list[tuple[str, ...]] = [()] * len(target)
    for a, b in _groups(source, target):
        cuts = sorted({1, *_strides(source, a), *_strides(target, b)})
        total = prod(source[d] for d in a)
        cuts = [c for c in cuts if c < total]
        chain = [*cuts, total]
        if total and all(y % x == 0 for x, y in pairwise(chain)):
            names = {}
            for low, high in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
                names[low] = f"f{len(sizes)}"
                sizes[names[low]] = high // low
            for shape, dims, out in ((source, a, left), (target, b, right)):
                for dim, low in zip(dims, _strides(shape, dims), strict=True):
                    out[dim] = tuple(n for c, n in names.items() if low <= c < low * shape[dim])
        else:
            for shape, dims, out in ((source, a, left), (target, b, right)):
                for dim in dims:
                    if shape[dim] != 1:
                        name = f"f{len(sizes)}"
                        sizes[name] = shape[dim]
                        whole.add(name)
                        out[dim] = (name,)
    return tuple(sizes.items()), tuple(left), tuple(right), whole


def _groups(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    if 0 in source:  # empty tensors have nothing to shard
        return [([*range(len(source))], [*range(len(target))])]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        a, b = [], []
        left = right = 1
        if i < len(source):
            a.append(i)
            left *= source[i]
            i += 1
        if j < len(target):
            b.append(j)
            right *= target[j]
            j += 1
        while left != right:
            if (left < right and i < len(source)) or j >= len(target):
                a.append(i)
                left *= source[i]
                i += 1
            else:
                b.append(j)
                right *= target[j]
                j += 1
        groups.append((a, b))
    return groups


def _strides(shape: Shape, dims: list[int]) -> list[int]:
    return [prod(shape[d] for d in dims[k + 1 :]) for k in range(len(dims))]


def _view_rule(site: Site) -> Rule:
    sizes, left, right, whole = view_factors(site.operands[0].shape, site.results[0].shape)
    return Rule(sizes, (left,), (right,), tuple((f, WHOLE) for f in sorted(whole)))


def _view(e: Emission) -> str:
    return f"{e.arg(0)}.reshape({e.code(e.result_shape())})"


def _permuted(order: list[int], site: Site) -> Rule:
    names = [f"d{i}" for i in range(len(order))]
    return build([names], [[names[i] for i in order]], site)


def _transpose_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    order = list(range(rank))
    a, b = site.dim(1, rank), site.dim(2, rank)
    order[a], order[b] = order[b], order[a]
    return _permuted(order, site)


def _permute_rule(site: Site) -> Rule:
    rank = len(site.operands[0].shape)
    return _permuted([d % rank for d in site.integers(1)], site)


def _t_rule(site: Site) -> Rule:
    return _permuted(list(reversed(range(len(site.operands[0].shape)))), site)


def _unsqueeze_rule(site: Site) -> Rule:
    rank = len(site.results[0].shape)
    at = site.dim(1, rank)
    names = [f"d{i}" for i in range(rank)]
    return build([names[:at] + names[at + 1 :]], [names], site)


def _squeezed(site: Site) -> tuple[int, ...]:
    """The dims that go: of global size 1, whatever their local size is."""
    shape = site.operands[0].shape
    dims = site.integers(1) if len(site.node.args) > 1 else range(len(shape))
    return tuple(sorted({d % len(shape) for d in dims if shape[d] == 1}))


def _squeeze_rule(site: Site) -> Rule:
    gone = _squeezed(site)
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    return build([names], [[n for i, n in enumerate(names) if i not in gone]], site)


def _squeeze(e: Emission) -> str:
    return f"{e.arg(0)}.squeeze({e.code(_squeezed(e.site))})"


def _expand(e: Emission) -> str:
    return f"{e.arg(0)}.expand({e.code(e.result_shape())})"


EITHER = "parloom.either"
"""One of several equal values: `either(x, y)`, of which the search takes one (`rewrite.forms`)."""

OPS: tuple[OpDef, ...] = (
    OpDef(EITHER, broadcast, lambda e: e.arg(0), no_flops, view=True, exact=exact.same),
    OpDef("view", _view_rule, _view, no_flops, view=True, linear="first", exact=exact_moves.view),
    OpDef("transpose", _transpose_rule, ".transpose", no_flops, view=True, linear="first",
          exact=exact_moves.transpose),
    OpDef("permute", _permute_rule, ".permute", no_flops, view=True, linear="first",
          exact=exact_moves.permute),
    OpDef("t", _t_rule, ".t", no_flops, view=True, linear="first", exact=exact_moves.swap),
    OpDef("unsqueeze", _unsqueeze_rule, ".unsqueeze", no_flops, view=True, linear="first",
          exact=exact_moves.unsqueeze),
    OpDef("squeeze", _squeeze_rule, _squeeze, no_flops, view=True, linear="first",
          exact=exact_moves.squeeze),
    OpDef("expand", broadcast, _expand, no_flops, view=True, linear="first",
          exact=exact_moves.expand),
    OpDef("alias", broadcast, lambda e: e.arg(0), no_flops, view=True, linear="first",
          exact=exact.same),
)  # fmt: skip
