"""What the second proof is made of: functions of tensors, their shapes, and equations.

`dim(a, -1)` is a size of a tensor, zero where it has no such dim. An equation has a condition under
which it holds: parts meet only where they were put together at the same place. The solver makes
both sides even where the condition is not known, or what is matched is no tensor at all. So two
things hold of every equation, and are tested: both sides have equal shapes by what is said of
shapes alone, and where one side is a tensor, so is the other one.
"""

from collections.abc import Mapping
from typing import Any

import z3

DIMS = (-1, -2, -3)
# Of sizes: those in front of the third one are the third one of sums over others.
EVERY_DIM = (*DIMS, -4, -5)

T, INT, REAL = z3.DeclareSort("Tensor"), z3.IntSort(), z3.RealSort()
# Of matrices and rows of matrices: the last two dims are multiplied, the first ones are the rows'.
FUNCTIONS: Mapping[str, Any] = {
    name: z3.Function(name, *sorts)
    for name, sorts in {
        "dim": (T, INT, INT),
        "mm": (T, T, T),
        "bmm": (T, T, T),  # of each pair in two batches
        "t": (T, T),
        "add": (T, T, T),
        "mul": (T, T, T),
        "add_row": (T, T, T),  # a row to each row
        "mul_row": (T, T, T),
        "mul_column": (T, T, T),  # each row by a number
        "scale": (REAL, T, T),
        "cat": (INT, T, T, T),
        "cut": (INT, T, INT, INT, T),  # along a dim, from a place to another
        "f": (INT, T, T),  # a function of elements, by its number
        "rows": (INT, INT, T, T),  # a function along a dim, by its number
        "total": (INT, T, T),  # a sum over a dim, which is gone
        "look": (T, T, T),  # rows of a table
        "conv": (INT, T, T, T),  # over the last dim, by its number; 0 moves by one place
        "sums": (INT, T, T, T),  # of any windows times kernels, by their number
        "flat": (T, T),  # the elements as one row
        "add_channel": (T, T, T),  # a number to each element of a channel, which are dim 1
        "mul_channel": (T, T, T),
        "mul_kernel": (T, T, T),  # what makes each output, by a number
        "pool": (INT, T, T),  # means of windows of the last dim, by their number
        "inverse": (INT, REAL),  # of a size
        "width": (INT, INT, INT, INT),  # how many windows of a size there are, by their number
        # Read by `halos`: windows of the last dim that reach so many places further, zeros of three
        # sizes, a mirrored last dim, and so many copies of its place.
        "near": (INT, INT, T, T, T),
        "zeros": (INT, INT, INT, T),
        "mirror": (T, T),
        "again": (INT, T, T),
    }.items()
}
VARIABLES: Mapping[str, Any] = {
    **{name: z3.Const(name, T) for name in "abcdv"},
    **{name: z3.Int(name) for name in ("i", "j", "s", "e")},
    **{name: z3.Real(name) for name in ("q", "r")},
}

# Shapes: what each size of a call is, from the last.
SHAPES = (
    ("mm(a, b)", ("dim(b, -1)", "dim(a, -2)", "dim(a, -3)", "dim(a, -4)", "dim(a, -5)")),
    ("bmm(a, b)", ("dim(b, -1)", "dim(a, -2)", "dim(a, -3)", "dim(a, -4)", "dim(a, -5)")),
    ("t(a)", ("dim(a, -2)", "dim(a, -1)", "dim(a, -3)", "dim(a, -4)", "dim(a, -5)")),
    *(
        (call, ("dim(a, -1)", "dim(a, -2)", "dim(a, -3)", "dim(a, -4)", "dim(a, -5)"))
        for call in (
            "add(a, b)", "mul(a, b)", "add_row(a, v)", "mul_row(a, v)", "mul_column(a, v)",
            "scale(q, a)", "f(i, a)", "rows(i, j, a)", "add_channel(a, v)", "mul_channel(a, v)",
            "mul_kernel(a, v)",
        )
    ),
    ("conv(i, a, b)", ("width(i, dim(a, -1), dim(b, -1))", "dim(b, -3)", "dim(a, -3)")),
    ("pool(i, a)", ("width(i, dim(a, -1), 0)", "dim(a, -2)", "dim(a, -3)")),
    ("look(a, b)", ("dim(a, -1)", "dim(b, -1)", "dim(b, -2)", "dim(b, -3)", "dim(b, -4)")),
    ("total(-1, a)", ("dim(a, -2)", "dim(a, -3)", "dim(a, -4)", "dim(a, -5)")),
    ("total(-2, a)", ("dim(a, -1)", "dim(a, -3)", "dim(a, -4)", "dim(a, -5)")),
    ("total(-3, a)", ("dim(a, -1)", "dim(a, -2)", "dim(a, -4)", "dim(a, -5)")),
)  # fmt: skip
# Equations. Those of a part of the results have to say what the whole needs: that sums of dims are
# alike, or windows as many, says not that these were.
EQUATIONS = """
width(0, s, 1) == s
mm(mm(a, b), c) == mm(a, mm(b, c))
mm(a, add(b, c)) == add(mm(a, b), mm(a, c))
mm(add(a, b), c) == add(mm(a, c), mm(b, c))
mm(scale(q, a), b) == scale(q, mm(a, b))
mm(a, scale(q, b)) == scale(q, mm(a, b))
mul_row(mm(a, b), v) == mm(a, mul_row(b, v))
mul_column(mm(a, b), v) == mm(mul_column(a, v), b)
mm(a, cat(-1, b, c)) == cat(-1, mm(a, b), mm(a, c))
mm(cat(-2, a, b), c) == cat(-2, mm(a, c), mm(b, c))
mm(cat(-3, a, b), c) == cat(-3, mm(a, c), mm(b, c))
mm(cat(-1, a, b), cat(-2, c, d)) == add(mm(a, c), mm(b, d)) if dim(a, -1) == dim(c, -2)
mm(look(a, b), c) == look(mm(a, c), b)
mm(total(-2, a), b) == total(-2, mm(a, b))
mm(total(-3, a), b) == total(-3, mm(a, b))
bmm(bmm(a, b), c) == bmm(a, bmm(b, c)) if And(dim(a, -3) == dim(b, -3), dim(b, -3) == dim(c, -3))
mm(bmm(a, b), c) == bmm(a, mm(b, c)) if dim(a, -3) == dim(b, -3)
bmm(a, add(b, c)) == add(bmm(a, b), bmm(a, c)) if dim(a, -3) == dim(b, -3)
bmm(add(a, b), c) == add(bmm(a, c), bmm(b, c)) if dim(a, -3) == dim(c, -3)
bmm(scale(q, a), b) == scale(q, bmm(a, b))
bmm(a, scale(q, b)) == scale(q, bmm(a, b))
bmm(a, cat(-1, b, c)) == cat(-1, bmm(a, b), bmm(a, c)) if dim(a, -3) == dim(b, -3)
bmm(cat(-2, a, b), c) == cat(-2, bmm(a, c), bmm(b, c)) if dim(a, -3) == dim(c, -3)
bmm(cat(-3, a, b), cat(-3, c, d)) == cat(-3, bmm(a, c), bmm(b, d)) if And(dim(a, -3) == dim(c, -3), dim(b, -3) == dim(d, -3), dim(a, -1) == dim(b, -1))
bmm(cat(-1, a, b), cat(-2, c, d)) == add(bmm(a, c), bmm(b, d)) if And(dim(a, -1) == dim(c, -2), dim(a, -3) == dim(c, -3))
t(bmm(a, b)) == bmm(t(b), t(a)) if dim(a, -3) == dim(b, -3)
t(t(a)) == a
t(mm(a, b)) == mm(t(b), t(a)) if And(matrix(a), matrix(b))
t(add(a, b)) == add(t(a), t(b))
t(mul(a, b)) == mul(t(a), t(b))
t(scale(q, a)) == scale(q, t(a))
t(mul_row(a, v)) == mul_column(t(a), v)
t(mul_column(a, v)) == mul_row(t(a), v)
t(f(i, a)) == f(i, t(a))
t(rows(i, -1, a)) == rows(i, -2, t(a))
t(rows(i, -2, a)) == rows(i, -1, t(a))
t(cat(-1, a, b)) == cat(-2, t(a), t(b))
t(cat(-2, a, b)) == cat(-1, t(a), t(b))
t(cat(-3, a, b)) == cat(-3, t(a), t(b))
add(a, b) == add(b, a) if alike(a, b)
add(a, add(b, c)) == add(add(a, b), c)
mul(a, b) == mul(b, a) if alike(a, b)
mul(a, mul(b, c)) == mul(mul(a, b), c)
mul(a, add(b, c)) == add(mul(a, b), mul(a, c))
scale(q, add(a, b)) == add(scale(q, a), scale(q, b))
scale(q, mul(a, b)) == mul(scale(q, a), b)
scale(q, scale(r, a)) == scale(q * r, a)
add(scale(q, a), scale(r, a)) == scale(q + r, a)
add(a, a) == scale(2, a)
scale(1, a) == a
add(a, add_row(b, v)) == add_row(add(a, b), v)
mul_row(add(a, b), v) == add(mul_row(a, v), mul_row(b, v))
mul_row(mul_row(a, v), c) == mul_row(a, mul(v, c))
add_row(add_row(a, v), c) == add_row(a, add(v, c))
mul(a, mul_row(b, v)) == mul_row(mul(a, b), v)
scale(q, mul_row(a, v)) == mul_row(scale(q, a), v)
scale(q, mul_row(a, v)) == mul_row(a, scale(q, v))
scale(q, add_row(a, v)) == add_row(scale(q, a), scale(q, v))
mul_row(add_row(a, v), c) == add_row(mul_row(a, c), mul(v, c))
mul_row(a, add(v, c)) == add(mul_row(a, v), mul_row(a, c))
add_row(cat(-1, a, b), cat(-1, v, c)) == cat(-1, add_row(a, v), add_row(b, c)) if dim(a, -1) == dim(v, -1)
mul_row(cat(-1, a, b), cat(-1, v, c)) == cat(-1, mul_row(a, v), mul_row(b, c)) if dim(a, -1) == dim(v, -1)
add_row(cat(-2, a, b), v) == cat(-2, add_row(a, v), add_row(b, v))
mul_row(cat(-2, a, b), v) == cat(-2, mul_row(a, v), mul_row(b, v))
total(-1, add(a, b)) == add(total(-1, a), total(-1, b)) if dim(a, -1) == dim(b, -1)
total(-2, add(a, b)) == add(total(-2, a), total(-2, b)) if dim(a, -2) == dim(b, -2)
total(-3, add(a, b)) == add(total(-3, a), total(-3, b)) if dim(a, -3) == dim(b, -3)
total(-1, cat(-1, a, b)) == add(total(-1, a), total(-1, b))
total(-2, cat(-2, a, b)) == add(total(-2, a), total(-2, b))
total(-3, cat(-3, a, b)) == add(total(-3, a), total(-3, b))
total(-1, cat(-3, a, b)) == cat(-2, total(-1, a), total(-1, b)) if dim(a, -1) == dim(b, -1)
total(-2, cat(-3, a, b)) == cat(-2, total(-2, a), total(-2, b)) if dim(a, -2) == dim(b, -2)
total(-3, cat(-1, a, b)) == cat(-1, total(-3, a), total(-3, b)) if dim(a, -3) == dim(b, -3)
total(-3, cat(-2, a, b)) == cat(-2, total(-3, a), total(-3, b)) if dim(a, -3) == dim(b, -3)
total(-2, cat(-1, a, b)) == cat(-1, total(-2, a), total(-2, b)) if dim(a, -2) == dim(b, -2)
total(-1, cat(-2, a, b)) == cat(-1, total(-1, a), total(-1, b)) if dim(a, -1) == dim(b, -1)
total(-1, t(a)) == total(-2, a)
total(-2, t(a)) == total(-1, a)
total(j, scale(q, a)) == scale(q, total(j, a))
conv(i, add(a, b), c) == add(conv(i, a, c), conv(i, b, c)) if dim(a, -1) == dim(b, -1)
conv(i, a, add(b, c)) == add(conv(i, a, b), conv(i, a, c)) if dim(b, -1) == dim(c, -1)
conv(i, scale(q, a), b) == scale(q, conv(i, a, b))
conv(i, a, scale(q, b)) == scale(q, conv(i, a, b))
conv(i, a, cat(-3, b, c)) == cat(-2, conv(i, a, b), conv(i, a, c)) if dim(b, -1) == dim(c, -1)
conv(i, cat(-3, a, b), c) == cat(-3, conv(i, a, c), conv(i, b, c)) if dim(a, -1) == dim(b, -1)
conv(i, cat(-2, a, b), cat(-2, c, d)) == add(conv(i, a, c), conv(i, b, d)) if And(dim(a, -2) == dim(c, -2), dim(a, -1) == dim(b, -1), dim(c, -1) == dim(d, -1))
conv(0, cat(-1, a, b), c) == cat(-1, conv(0, a, c), conv(0, b, c)) if dim(c, -1) == 1
conv(0, cat(-1, a, b), cat(-1, c, d)) == add(conv(0, a, c), conv(0, b, d)) if And(dim(a, -1) == dim(c, -1), dim(b, -1) == dim(d, -1))
conv(0, a, cat(-1, c, d)) == add(conv(0, cut(-1, a, 0, dim(a, -1) - dim(d, -1)), c), conv(0, cut(-1, a, dim(c, -1), dim(a, -1)), d))
conv(i, a, mul_kernel(b, v)) == mul_channel(conv(i, a, b), v)
sums(i, a, mul_kernel(b, v)) == mul_channel(sums(i, a, b), v)
mul_channel(mul_channel(a, v), c) == mul_channel(a, mul(v, c))
add_channel(add_channel(a, v), c) == add_channel(a, add(v, c))
mul_channel(add_channel(a, v), c) == add_channel(mul_channel(a, c), mul(v, c))
pool(i, add(a, b)) == add(pool(i, a), pool(i, b)) if dim(a, -1) == dim(b, -1)
pool(i, scale(q, a)) == scale(q, pool(i, a))
pool(i, cat(-2, a, b)) == cat(-2, pool(i, a), pool(i, b)) if dim(a, -1) == dim(b, -1)
pool(i, cat(-3, a, b)) == cat(-3, pool(i, a), pool(i, b)) if dim(a, -1) == dim(b, -1)
pool(i, conv(0, a, b)) == conv(0, pool(i, a), b) if dim(b, -1) == 1
look(add(a, c), b) == add(look(a, b), look(c, b)) if dim(a, -2) == dim(c, -2)
look(scale(q, a), b) == scale(q, look(a, b))
look(f(i, a), b) == f(i, look(a, b))
look(rows(i, -1, a), b) == rows(i, -1, look(a, b))
look(cat(-1, a, c), b) == cat(-1, look(a, b), look(c, b)) if dim(a, -2) == dim(c, -2)
look(a, cat(-1, b, c)) == cat(-2, look(a, b), look(a, c))
""".strip().splitlines()  # noqa: E501
# Those of each dim `k`, and of each other dim `o`.
OF_EACH_DIM = """
cat(k, a, cat(k, b, c)) == cat(k, cat(k, a, b), c)
cut(k, cat(k, a, b), s, e) == cut(k, a, s, e) if e <= dim(a, k)
cut(k, cat(k, a, b), s, e) == cut(k, b, s - dim(a, k), e - dim(a, k)) if And(s >= dim(a, k), dim(a, k) >= 1, beside(k, a, b))
cut(k, a, s, e) == a if And(s == 0, e == dim(a, k))
cat(k, f(i, a), f(i, b)) == f(i, cat(k, a, b))
cat(k, scale(q, a), scale(q, b)) == scale(q, cat(k, a, b))
cat(k, add(a, c), add(b, d)) == add(cat(k, a, b), cat(k, c, d)) if dim(a, k) == dim(c, k)
cat(k, mul(a, c), mul(b, d)) == mul(cat(k, a, b), cat(k, c, d)) if dim(a, k) == dim(c, k)
""".strip().splitlines()  # noqa: E501
OF_TWO_DIMS = """
cat(k, cat(o, a, b), cat(o, c, d)) == cat(o, cat(k, a, c), cat(k, b, d)) if And(dim(a, o) == dim(c, o), dim(a, k) == dim(b, k))
rows(i, k, cat(o, a, b)) == cat(o, rows(i, k, a), rows(i, k, b))
""".strip().splitlines()  # noqa: E501


# What conditions say, besides.


def alike(one: Any, other: Any) -> Any:
    """Of one shape."""
    return beside(0, one, other)


def beside(k: int, one: Any, other: Any) -> Any:
    """Of one shape but for dim `k`."""
    dim = FUNCTIONS["dim"]
    return z3.And(*(dim(one, o) == dim(other, o) for o in DIMS if o != k))


def matrix(one: Any) -> Any:
    """Of no more than two dims."""
    return FUNCTIONS["dim"](one, -3) == 0


CONDITIONS: Mapping[str, Any] = {
    "And": z3.And, "alike": alike, "beside": beside, "matrix": matrix,
}  # fmt: skip
