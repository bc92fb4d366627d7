"""Parallel operators (Unity, OSDI'22, section 3) as operators of terms, at any degree.

A parallel tensor of rank `r` is an array of `2 r` dims: over how many devices each of its dims is
spread, then the dims of the piece that one device has. Its first dim is the replica dim (Unity's
dim 0): copies and partial sums of the whole tensor lie there. Along each dim, the value of a
parallel tensor is its pieces one after the other: chunks, outermost first.

- `partition(x, d, k)` cuts each piece into `k` chunks, on as many devices;
- `combine(x, d, k)` is its inverse;
- `replicate(x, d, k)` puts `k` copies one after the other, each on devices of its own;
- `reduce(x, d, k)` sums `k` chunks of the value: over devices where the dim is on several, within
  the piece where it is not.

Any other operator computes on the pieces of each device. That elementwise operators, `cat` and
`split_with_sizes` do so follows from arrays: they count dims from the last. `parallel.linear` says
where the devices of its operands meet (`rewrite/generation/factor_rules.py` derives it from its
factors).
"""

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from parloom.ir.ops import OPS
from parloom.ir.ops.algebra import Algebra, Size
from parloom.ir.ops.exact import Exact, Given, Results, names_of
from parloom.rewrite.symbolic import NotExpressed

LINEAR = "parallel.linear"
PARTITION, COMBINE, REPLICATE, REDUCE = "partition", "combine", "replicate", "reduce"


def partition(algebra: Algebra[Any], given: Given) -> Results:
    """Pieces of dim `d` in `k` chunks: `partition(x, d, k)`."""
    x, d, k = given.args
    sizes = list(algebra.dims(x))
    rank = len(sizes) // 2
    apart = algebra.apart(x, rank + d, k)
    moved = _moved(algebra, apart, rank + d, d + 1)
    sizes[rank + d] = algebra.dims(apart)[rank + d + 1]
    sizes[d] = product_of(sizes[d], k)
    return (algebra.reshape(moved, sizes),)


def combine(algebra: Algebra[Any], given: Given) -> Results:
    """The pieces of each `k` neighbors along dim `d` as one: `combine(x, d, k)`."""
    x, d, k = given.args
    sizes = list(algebra.dims(x))
    rank = len(sizes) // 2
    rest = quotient(sizes[d], k)
    apart = algebra.apart(x, d, rest)
    moved = _moved(algebra, apart, d + 1, rank + d)
    sizes[d], sizes[rank + d] = rest, product_of(k, sizes[rank + d])
    return (algebra.reshape(moved, sizes),)


def replicate(algebra: Algebra[Any], given: Given) -> Results:
    """`k` copies one after the other along dim `d`: `replicate(x, d, k)`."""
    x, d, k = given.args
    sizes, names = list(algebra.dims(x)), names_of(algebra, x)
    to = [*names[:d], "k", *names[d:]]
    copies = algebra.product([names, ["k"]], to, [x, algebra.fill(Fraction(1), [k])])
    sizes[d] = product_of(k, sizes[d])
    return (algebra.reshape(copies, sizes),)


def reduce(algebra: Algebra[Any], given: Given) -> Results:
    """The sum of the `k` chunks of dim `d`: `reduce(x, d, k)`."""
    x, d, k = given.args
    sizes = algebra.dims(x)
    at = d + len(sizes) // 2 if sizes[d] == algebra.one else d
    apart = algebra.apart(x, at, k)
    names = names_of(algebra, apart)
    return (algebra.product([names], [*names[:at], *names[at + 1 :]], [apart]),)


def parallel_linear(algebra: Algebra[Any], given: Given) -> Results:
    """A linear layer on pieces: `x[r, b, k]`, `w[q, n, k]`, both with the devices before.

    Devices of the factors `b`, `n`, `k` meet: copies of `x` (its replica dim) are for as many parts
    of `n`, copies of `w` for as many parts of `b`, and parts of `k` make partial sums in the
    replica dim of the result. Copies within a piece are for parts within it, likewise.
    """
    x, weight = given.args
    of_x, of_weight = algebra.dims(x), algebra.dims(weight)
    if len(of_x) != 6 or len(of_weight) != 6:
        raise NotExpressed("a linear layer of tensors that are not of rank three")
    devices = (of_x[0], of_x[1], of_x[2]), (of_weight[1], of_weight[0], of_weight[2])
    if devices[0] != devices[1]:
        raise NotExpressed(f"{LINEAR} of pieces on {of_x[:3]} and {of_weight[:3]}")
    one = algebra.apart(x, 4, of_weight[3])
    other = algebra.apart(weight, 4, of_x[3])
    made = algebra.product(
        [["N", "B", "K", "n", "b", "i", "k"], ["B", "N", "K", "b", "n", "o", "k"]],
        ["K", "B", "N", "b", "i", "n", "o"],
        [one, other],
    )
    shape = [of_x[2], of_x[1], of_x[0], algebra.one, of_x[4], of_weight[4]]
    return (algebra.reshape(made, shape),)


PARALLEL: Mapping[str, Exact] = MappingProxyType(
    {
        PARTITION: partition,
        COMBINE: combine,
        REPLICATE: replicate,
        REDUCE: reduce,
        LINEAR: parallel_linear,
    }
)


def computes_of(op: str) -> Exact | None:
    """The function of an operator of terms, parallel ones among them; None where it is unknown."""
    if op in PARALLEL:
        return PARALLEL[op]
    return OPS[op].computes if op in OPS else None


def product_of(one: Size, other: Size) -> Size:
    """The product of two sizes: of numbers, or of dims, block by block."""
    if isinstance(one, int):
        return one * other
    return tuple((*a, *b) for a in one for b in other)


def quotient(size: Size, k: Size) -> Size:
    """A size without its innermost factor `k`; raises `NotExpressed`."""
    if isinstance(size, int):
        if size % k:
            raise NotExpressed(f"{size} is no multiple of {k}")
        return size // k
    if size == k:
        return ((),)
    if len(k) == 1 and all(block[len(block) - len(k[0]) :] == k[0] for block in size):
        return tuple(block[: len(block) - len(k[0])] for block in size)
    raise NotExpressed(f"{size} is no multiple of {k}")


def _moved(algebra: Algebra[Any], x: Any, dim: int, to: int) -> Any:
    """A dim in another place."""
    names = names_of(algebra, x)
    order = [name for name in names if name != names[dim]]
    order.insert(to, names[dim])
    return algebra.product([names], order, [x])
