"""Families of programs that candidates for rules are enumerated in.

Inputs are few and typed, so that most operators fit few of them. What differs in names only is the
same rule, so a family needs no more inputs of a shape than a program of so many calls can read.
"""

from parloom.rewrite.generate import (
    Family,
    Operator,
    along,
    of_matrices,
    plain,
    splits,
    sums,
    with_a_row,
)

LINEAR = Operator("linear", 2, plain())
BIASED = Operator("linear", 3, with_a_row)
ADD, MUL = (Operator(name, 2, plain(), commutes=True) for name in ("add", "mul"))
# Numbers that rules are of: that half of twice a value is the value is true of one only.
HALF, FACTOR = 0.5, 0.3
SCALE, TIMES = (Operator("mul", 1, plain(number)) for number in (HALF, FACTOR))
SHARE = Operator("div", 1, plain(FACTOR))
FUNCTION = Operator("gelu", 1, plain())
CAT = Operator("cat", 2, along(together=True), moves=True)
SPLIT = Operator("split_with_sizes", 1, splits, moves=True, results=2)
TURN = Operator("t", 1, of_matrices)
PRODUCT, ANY_PRODUCT = (Operator(name, 2, plain()) for name in ("mm", "matmul"))
SOFTMAX = Operator("softmax", 1, along())
SUM, MEAN = (Operator(name, 1, sums) for name in ("sum", "mean"))
LOOK = Operator("embedding", 2, plain(), looks=True)
# As captured programs have them.
CONVOLUTION = Operator("conv1d", 2, plain())
POOL = Operator("avg_pool1d", 1, plain((2,), (2,)))

FAMILIES = (
    Family(
        "dense",
        "x[b, k], y[b, k], z[b, k], w[n, k], v[m, k], u[r, n]",
        (LINEAR, ADD, SCALE, FUNCTION, CAT, SPLIT),
        3,
    ),
    Family(
        "towers",
        "x[b, k], y[b, j], w[n, k], v[n, j]",
        (LINEAR, ADD, CAT),
        3,
    ),
    Family(
        "vectors",
        "x[b, k], y[b, k], w[n, k], v[m, k], c[n], d[m]",
        (LINEAR, ADD, CAT, SPLIT),
        3,
    ),
    Family(
        "products",
        "x[b, k], y[b, k], p[k, n], q[k, n], o[n, m]",
        (PRODUCT, TURN, ADD, CAT, SPLIT),
        3,
    ),
    Family(
        "matrices",
        "x[b, k], p[k, n], q[n, m], w[n, k], v[m, n]",
        (ANY_PRODUCT, PRODUCT, LINEAR, TURN),
        2,
    ),
    Family(
        "batches", "x[a, b, k], p[k, n], q[n, m], w[n, k], v[m, n]", (ANY_PRODUCT, LINEAR, TURN), 2
    ),
    Family(
        "elements", "x[b, k], y[b, k], z[b, k], s[k]", (ADD, MUL, SCALE, FUNCTION, CAT, SPLIT), 3
    ),
    Family(
        "reductions",
        "x[b, s, k], y[b, s, k], w[n, k]",
        (SUM, MEAN, ADD, SCALE, LINEAR, CAT, SOFTMAX),
        3,
    ),
    Family("rows", "x[a, k], y[b, k], z[a, k]", (SOFTMAX, CAT, SPLIT, TURN, ADD), 3),
    Family(
        "tables",
        "t[v, k], u[v, k], a[b] < v, c[d] < v, w[n, k]",
        (LOOK, LINEAR, ADD, SCALE, CAT, SPLIT, FUNCTION),
        3,
    ),
    Family(
        "convolutions",
        "x[b, c, p], y[b, c, p], w[o, c, 1], v[o, c, 1], u[n, c, 1]",
        (CONVOLUTION, ADD, SCALE, FUNCTION, CAT, SPLIT, POOL),
        3,
    ),
    Family("factors", "x[b, k], w[n, k], p[k, j]", (LINEAR, PRODUCT, TIMES), 3),
    Family(
        "biases",
        "x[b, k], y[b, k], w[n, k], v[n, k], c[n]",
        (LINEAR, BIASED, ADD, TIMES),
        3,
    ),
    Family(
        "pairs",
        "x[a, b, k], y[a, k, c], v[a, k, c], z[a, c, n], w[n, c]",
        (ANY_PRODUCT, LINEAR, ADD, TIMES),
        3,
    ),
    Family("shares", "x[a, b, k], y[a, k, c], w[n, k]", (ANY_PRODUCT, LINEAR, SHARE), 2),
)
