"""What normal forms prove for all shapes, and what they refuse."""

from collections.abc import Callable
from fractions import Fraction

import pytest

from parloom.ir.ops.algebra import Window
from parloom.rewrite.symbolic import Dim, NormalForms, Symbolic, dim, places, tensor

G = NormalForms()
Pair = tuple[Symbolic, Symbolic]


def matrix(name: str, rows: str, columns: str) -> Symbolic:
    return tensor(name, dim(rows), dim(columns))


A, B, B2 = matrix("A", "m", "k"), matrix("B", "k", "n"), matrix("B2", "k", "n")
C, D = matrix("C", "k", "p"), matrix("D", "n", "q")
Q, R, X0 = matrix("Q", "n", "n"), matrix("R", "n", "n"), matrix("X0", "m", "n")
A1, A2 = matrix("A1", "m", "k1"), matrix("A2", "m", "k2")
B1, B3 = matrix("B1", "k1", "n"), matrix("B3", "k2", "n")
S, S2 = matrix("S", "m", "k"), matrix("S2", "m2", "k")
ROW, COLUMN = tensor("row", dim("n")), tensor("column", dim("m"), ((),))
TABLE, AT = matrix("table", "v", "k"), matrix("at", "b", "s")
X, Y = (tensor(name, dim("b"), dim(name), dim("w")) for name in "xy")
X2 = tensor("x2", dim("b2"), dim("x"), dim("w"))
K, K2 = (tensor(name, dim("o"), dim(c), places(3)) for name, c in (("K", "x"), ("K2", "x")))
L, M = tensor("L", dim("o"), dim("y"), places(3)), tensor("M", dim("o2"), dim("x"), places(3))
P, EVEN = (tensor(name, dim("o"), dim("x"), places(n)) for name, n in (("P", 1), ("even", 2)))
WIDE = tensor("wide", dim("b"), dim("s"), dim("e"))
W, W2 = tensor("W", dim("h d"), dim("e")), tensor("W2", dim("h d"), dim("e"))


def mm(a: Symbolic, b: Symbolic) -> Symbolic:
    return G.product([["m", "k"], ["k", "n"]], ["m", "n"], [a, b])


def t(a: Symbolic) -> Symbolic:
    return G.product([["0", "1"]], ["1", "0"], [a])


def times(a: Symbolic, b: Symbolic) -> Symbolic:
    rank = max(len(a.shape), len(b.shape))
    names = [str(i) for i in range(rank)]
    own = [names[rank - len(part.shape) :] for part in (a, b)]
    return G.product(own, names, [a, b])


def total(a: Symbolic, at: int) -> Symbolic:
    names = [str(i) for i in range(len(a.shape))]
    return G.product([names], [n for i, n in enumerate(names) if i != at], [a])


def f(a: Symbolic) -> Symbolic:
    return G.opaque("f", a)


def conv(x: Symbolic, w: Symbolic, by: Window | None = None) -> Symbolic:
    size = len(w.shape[2])
    moved = G.windows(x, 2, by or Window(size, 1, size // 2, size // 2))
    return G.product([["b", "c", "w", "r"], ["o", "c", "r"]], ["b", "o", "w"], [moved, w])


def kernel(w: Symbolic, *at: int | None) -> Symbolic:
    """These places of a kernel, zeros where there is none."""
    parts = G.split(w, 2, [places(1)] * len(w.shape[2]))
    return G.concat([parts[i] if i is not None else zeros(P) for i in at], 2)


def statistics(x: Symbolic) -> Symbolic:
    """A function of all samples and places, for each channel apart."""
    (b, c, w), names = x.shape, ["b", "c", "w"]
    turned = G.product([names], ["c", "b", "w"], [x])
    merged = tuple((*one, *other) for one in b for other in w)
    found = G.reshape(G.rows("g", G.reshape(turned, [c, merged]), 1), [c, b, w])
    return G.product([["c", "b", "w"]], names, [found])


def linear(x: Symbolic, w: Symbolic) -> Symbolic:
    return G.product([["b", "s", "e"], ["n", "e"]], ["b", "s", "n"], [x, w])


def heads(x: Symbolic) -> Symbolic:
    return G.reshape(x, [dim("b"), dim("s"), dim("h"), dim("d")])


def first(x: Symbolic, at: int, size: Dim, other: Dim) -> Symbolic:
    return G.split(x, at, [size, other])[0]


def zeros(like: Symbolic) -> Symbolic:
    return G.fill(Fraction(0), like.shape)


TRUE: dict[str, Callable[[], Pair]] = {
    "products associate": lambda: (mm(mm(A, B), D), mm(A, mm(B, D))),
    "products distribute": lambda: (mm(A, G.add(B, B2)), G.add(mm(A, B), mm(A, B2))),
    "sums commute": lambda: (G.add(B, B2), G.add(B2, B)),
    "a product transposed": lambda: (t(mm(A, B)), mm(t(B), t(A))),
    "a symmetric product": lambda: (mm(t(Q), Q), t(mm(t(Q), Q))),
    "products side by side": lambda: (
        G.concat([mm(A, B), mm(A, C)], 1), mm(A, G.concat([B, C], 1)),
    ),
    "the first of two products": lambda: (
        mm(A, B), first(mm(A, G.concat([B, C], 1)), 1, dim("n"), dim("p")),
    ),
    "a sum of products": lambda: (
        G.add(mm(A1, B1), mm(A2, B3)), mm(G.concat([A1, A2], 1), G.concat([B1, B3], 0)),
    ),
    "a function of parts": lambda: (
        f(G.concat([A1, A2], 1)), G.concat([f(A1), f(A2)], 1),
    ),
    "rows below each other": lambda: (
        G.rows("g", G.concat([S, S2], 0), 1),
        G.concat([G.rows("g", S, 1), G.rows("g", S2, 1)], 0),
    ),
    "columns of a transposed": lambda: (t(G.rows("g", A, 1)), G.rows("g", t(A), 0)),
    "rows of rows": lambda: (
        t(G.rows("g", G.rows("h", A, 1), 0)), G.rows("g", G.rows("h", t(A), 0), 1),
    ),
    "scaled columns": lambda: (times(mm(A, B), ROW), mm(A, times(B, ROW))),
    "scaled rows": lambda: (times(mm(A, B), COLUMN), mm(times(A, COLUMN), B)),
    "a scaled product": lambda: (
        G.scale(mm(A, B), Fraction(1, 3)), mm(G.scale(A, Fraction(1, 3)), B),
    ),
    "a sum of columns": lambda: (total(mm(A, B), 0), G.product(
        [["k"], ["k", "n"]], ["n"], [total(A, 0), B]),
    ),
    "the mean of a constant": lambda: (
        G.divide(total(G.fill(Fraction(2), [dim("m"), dim("k")]), 1), dim("k")),
        G.fill(Fraction(2), [dim("m")]),
    ),
    "a product of looked up rows": lambda: (
        G.product([["b", "s", "k"], ["k", "n"]], ["b", "s", "n"], [G.lookup(TABLE, AT), B]),
        G.lookup(mm(TABLE, B), AT),
    ),
    "kernels side by side": lambda: (
        G.concat([conv(X, K), conv(X, M)], 1), conv(X, G.concat([K, M], 0)),
    ),
    "channels side by side": lambda: (
        G.add(conv(X, K), conv(Y, L)), conv(G.concat([X, Y], 1), G.concat([K, L], 1)),
    ),
    "sums of kernels": lambda: (G.add(conv(X, K), conv(X, K2)), conv(X, G.add(K, K2))),
    "an enlarged kernel": lambda: (
        conv(X, P), conv(X, G.concat([zeros(P), P, zeros(P)], 2)),
    ),
    "places of a kernel apart": lambda: (
        conv(X, K, Window(3, 1, 2, 2, 2)), conv(X, kernel(K, 0, None, 1, None, 2)),
    ),
    "the odd zero behind": lambda: (
        conv(X, EVEN, Window(2, 1, 0, 1)), conv(X, kernel(EVEN, None, 0, 1)),
    ),
    "statistics of channels": lambda: (
        statistics(G.concat([X, Y], 1)), G.concat([statistics(X), statistics(Y)], 1),
    ),
    "heads of a product": lambda: (
        heads(linear(WIDE, W)),
        G.product(
            [["b", "s", "e"], ["h", "d", "e"]], ["b", "s", "h", "d"],
            [WIDE, G.reshape(W, [dim("h"), dim("d"), dim("e")])],
        ),
    ),
    "there and back": lambda: (
        G.reshape(heads(linear(WIDE, W)), [dim("b"), dim("s"), dim("h d")]), linear(WIDE, W),
    ),
    "sums in functions of sums in functions": lambda: (
        f(mm(f(mm(mm(X0, Q), R)), R)), f(mm(f(mm(X0, mm(Q, R))), R)),
    ),
    "dims of one element": lambda: (
        G.reshape(G.reshape(A, [((),), dim("m"), ((),), dim("k"), ((),)]), A.shape), A,
    ),
}  # fmt: skip

FALSE: dict[str, Callable[[], Pair]] = {
    "products commute": lambda: (mm(Q, R), mm(R, Q)),
    "true of symmetric ones": lambda: (mm(t(Q), R), mm(Q, R)),
    "parts in another order": lambda: (
        mm(G.concat([Q, R], 1), G.concat([Q, R], 0)), mm(G.concat([R, Q], 1), G.concat([Q, R], 0)),
    ),
    "the other of two products": lambda: (
        mm(Q, R), G.split(mm(Q, G.concat([Q, R], 1)), 1, [dim("n"), dim("n")])[0],
    ),
    "functions add": lambda: (f(G.add(B, B2)), G.add(f(B), f(B2))),
    "functions scale": lambda: (f(G.scale(B, Fraction(2))), G.scale(f(B), Fraction(2))),
    "true of another function": lambda: (f(B), G.opaque("g", B)),
    "true of idempotent ones": lambda: (f(f(B)), f(B)),
    "functions of zero": lambda: (f(zeros(B)), zeros(B)),
    "a function before a product": lambda: (f(mm(A, B)), mm(A, f(B))),
    "arguments in another order": lambda: (G.opaque("f", B, B2), G.opaque("f", B2, B)),
    "rows beside each other": lambda: (
        G.rows("g", G.concat([A1, A2], 1), 1),
        G.concat([G.rows("g", A1, 1), G.rows("g", A2, 1)], 1),
    ),
    "rows and columns": lambda: (G.rows("g", Q, 0), G.rows("g", Q, 1)),
    # What a sum inside is over has the number of the outer sum until it is renamed.
    "a function of a function, one factor transposed": lambda: (
        f(mm(f(mm(X0, Q)), R)), f(mm(f(mm(X0, t(Q))), R)),
    ),
    "rows of functions of functions, one factor transposed": lambda: (
        G.rows("g", f(mm(f(mm(X0, Q)), R)), 1), G.rows("g", f(mm(f(mm(X0, t(Q))), R)), 1),
    ),
    "three functions deep, one factor transposed": lambda: (
        f(mm(f(mm(f(mm(X0, Q)), R)), Q)), f(mm(f(mm(f(mm(X0, t(Q))), R)), Q)),
    ),
    "rows of other lengths": lambda: (
        total(G.rows("g", G.fill(Fraction(1), [dim("n"), dim("k")]), 1), 1),
        total(G.rows("g", G.fill(Fraction(1), [dim("n"), dim("m")]), 1), 1),
    ),
    "rows of rows in another order": lambda: (
        G.rows("g", G.rows("g", Q, 0), 1), G.rows("g", G.rows("g", Q, 1), 0),
    ),
    "columns scaled before": lambda: (times(mm(Q, R), ROW), mm(times(Q, ROW), R)),
    "the mean of another dim": lambda: (
        G.divide(total(G.fill(Fraction(2), [dim("m"), dim("k")]), 1), dim("m")),
        G.fill(Fraction(2), [dim("m")]),
    ),
    "sums over other dims": lambda: (total(Q, 0), total(Q, 1)),
    "an enlarged kernel off its place": lambda: (
        conv(X, P), conv(X, G.concat([P, zeros(P), zeros(P)], 2)),
    ),
    "a function inside of a window": lambda: (
        f(G.windows(X, 2, Window(3, 1, 1, 1))), G.windows(f(X), 2, Window(3, 1, 1, 1)),
    ),
    "kernels turned around": lambda: (
        conv(X, K), conv(X, G.concat(G.split(K, 2, [places(1)] * 3)[::-1], 2)),
    ),
    "places of a kernel apart and beside each other": lambda: (
        conv(X, K, Window(3, 1, 2, 2, 2)), conv(X, kernel(K, None, 0, 1, 2, None)),
    ),
    "the odd zero before": lambda: (
        conv(X, EVEN, Window(2, 1, 0, 1)), conv(X, kernel(EVEN, 0, 1, None)),
    ),
    "places beyond the last": lambda: (
        G.windows(G.fill(Fraction(1), X.shape), 2, Window(1, 1, 0, 1)),
        G.fill(Fraction(1), G.windows(X, 2, Window(1, 1, 0, 1)).shape),
    ),
    "statistics of samples": lambda: (
        statistics(G.concat([X, X2], 0)), G.concat([statistics(X), statistics(X2)], 0),
    ),
    "heads and their width": lambda: (
        G.product([["b", "s", "h", "d"]], ["b", "s", "d", "h"], [heads(linear(WIDE, W))]),
        G.reshape(linear(WIDE, W), [dim("b"), dim("s"), dim("h"), dim("d")]),
    ),
    "one factor for another": lambda: (linear(WIDE, W), linear(WIDE, W2)),
    "other rows of a table": lambda: (
        G.lookup(TABLE, AT), G.lookup(TABLE, matrix("other", "b", "s")),
    ),
    "twice what is once": lambda: (G.add(B, B), B),
    "a square": lambda: (times(B, B), B),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUE)
def test_what_is_true_for_all_shapes_is_proved(name: str) -> None:
    left, right = TRUE[name]()
    assert left.form == right.form


@pytest.mark.parametrize("name", FALSE)
def test_what_is_false_for_some_shapes_or_functions_is_refused(name: str) -> None:
    left, right = FALSE[name]()
    assert left.form != right.form
