"""The proof by Z3: what it proves, and what it refuses."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("z3")

import z3

from parloom.ir.ops.algebra import Window
from parloom.rewrite.generation.axioms import (
    axioms,
    every_equation,
    of_shapes,
    parts,
    prove_by_axioms,
)
from parloom.rewrite.generation.equations import DIMS, FUNCTIONS, VARIABLES
from parloom.rewrite.modular import PRIME, Ints, Numbers
from parloom.rewrite.rules import prove, rule
from parloom.rewrite.symbolic import NotExpressed
from tests.unit.test_rules import FALSE, TRUE, made

READ = [
    "merge linear", "merge linear with bias", "linear of a sum", "linear of parts", "low rank",
    "scaled linear", "scaled outputs", "function of parts", "function with an argument",
    "looked up rows", "softmax of samples", "minus minus", "less than nothing",
]  # fmt: skip
REFUSED = [
    "parts in another order", "true of squares", "true of another function",
    "true of another argument", "function of a sum", "softmax of parts",
    "a scale before a function",
]  # fmt: skip
# Of what has no shape, or two, or is repeated along dims, the solver is not asked.
NOT_READ = {
    "parts in another order", "true of equal parts only", "a scale of rows of parts",
    "parts that do not meet", "a sum of a row that is repeated",
    "a sum with a number that is repeated", "a bias of images without a batch",
}  # fmt: skip
WRONG = {
    "functions scale": ("x[*, k]", ["relu(mul(x, 2))"], ["mul(relu(x), 2)"]),
    "products commute with functions": ("x[b, k], w[n, k]", ["relu(linear(x, w))"],
                                        ["linear(relu(x), w)"]),
    "a transposed factor": ("x[n, n], y[n, n]", ["mm(t(x), y)"], ["mm(x, y)"]),
    "one part for the other": ("x[a, k], y[a, k]",
                               ["split_with_sizes(cat((x, y), 0), (a, a), 0)[0]"], ["y"]),
    "sums over other dims": ("x[n, n]", ["sum(x, (-1,))"], ["sum(x, (-2,))"]),
    "rows and columns": ("x[n, n]", ["softmax(x, -1)"], ["softmax(x, -2)"]),
    "another bias": ("x[b, k], w[n, k], p[n], q[n]", ["linear(x, w, p)"], ["linear(x, w, q)"]),
    "twice is once": ("x[b, k]", ["add(x, x)"], ["x"]),
    "a square": ("x[b, k]", ["mul(x, x)"], ["x"]),
    "a function of a function": ("x[b, k]", ["relu(relu(x))"], ["relu(x)"]),
    "scaled twice": ("x[b, k]", ["mul(mul(x, 2), 3)"], ["mul(x, 5)"]),
    "a table of other rows": ("t[v, k], p[b] < v, q[b] < v", ["embedding(t, p)"],
                              ["embedding(t, q)"]),
    "pairs in another order": ("x[a, n, n], y[a, n, n]", ["matmul(x, y)"], ["matmul(y, x)"]),
    "other pairs": ("x[a, n, n], y[a, n, n]", ["matmul(cat((x, y), -3), cat((y, x), -3))"],
                    ["cat((matmul(x, y), matmul(x, y)), -3)"]),
    "parts along another dim": ("x[n, n], y[n, n]", ["mm(cat((x, y), 0), y)"],
                                ["cat((mm(x, y), mm(x, y)), 0)"]),
    # True where the matrix is square, or both parts are of one size.
    "true of squares only": ("x[a, b]", ["mean(sum(x, (-1,)), (-1,))"],
                             ["mean(sum(x, (-2,)), (-1,))"]),
    "true of equal parts only": ("x[b, k], y[b, j]",
                                 ["split_with_sizes(cat((x, y), -1), (j, k), -1)[0]"], ["x"]),
    "a mean of two parts": ("x[a, k], y[b, k]", ["mean(cat((x, y), -2), (-2,))"],
                            ["mul(add(mean(x, (-2,)), mean(y, (-2,))), 0.5)"]),
    "a scale of rows of parts": ("x[b, k], y[b, j], p[j], q[k]",
                                 ["mul(cat((x, y), -1), cat((p, q), -1))"],
                                 ["cat((mul(x, p), mul(y, q)), -1)"]),
    # True of relu, of a minus sign, and of a function of rows.
    "true of another function only": ("x[*, k]", ["gelu(gelu(x))"], ["gelu(x)"]),
    "true of linear functions only": ("x[*, k], y[*, k]", ["gelu(add(x, y))"],
                                      ["add(gelu(x), gelu(y))"]),
    "true of rows only": ("x[a, k], y[b, k]", ["softmax(cat((x, y), -2), -2)"],
                          ["cat((softmax(x, -2), softmax(y, -2)), -2)"]),
    "a bias twice": ("x[*, k], y[*, k], w[n, k], p[n]", ["linear(add(x, y), w, p)"],
                     ["add(linear(x, w, p), linear(y, w, p))"]),
    # Two batches through one weight are of any two sizes.
    "parts of batches in another order": (
        "x[s, b, k], y[r, b, k], w[n, k]",
        ["sum(split_with_sizes(cat((transpose(linear(x, w), -1, -2),"
         " transpose(linear(y, w), -1, -2)), -3), (r, s), -3)[0], (-3,))"],
        ["sum(transpose(linear(x, w), -1, -2), (-3,))"],
    ),
    "sums that are not beside each other": (
        "x[a, k], y[b, k], z[b, k], w[a, k]",
        ["add(cat((x, y), 0), cat((z, w), 0))",
         "sum(split_with_sizes(cat((x, y), 0), (b, a), 0)[0], (0,))"],
        ["add(cat((z, w), 0), cat((x, y), 0))", "sum(x, (0,))"],
    ),
    "a sum of a row that is repeated": ("x[b, k], s[1, k]", ["sum(add(x, s), (-2,))"],
                                        ["add(sum(x, (-2,)), sum(s, (-2,)))"]),
    "a sum with a number that is repeated": (
        "x[b, k], s[1]", ["sum(add(x, s), (-1,))"], ["add(sum(x, (-1,)), s)"],
    ),
    "a bias of images without a batch": (
        "x[c, o, p], w[o, c, 1, 1], s[o, 1]", ["add(conv2d(x, w), s)"],
        ["conv2d(x, w, view(s, (o,)))"],
    ),
    "a function of a function, one factor transposed": (
        "x[b, n], y[n, n], z[n, n]", ["relu(linear(relu(linear(x, y)), z))"],
        ["relu(linear(relu(linear(x, t(y))), z))"],
    ),
    "a product of sums": ("x[*, k], y[*, k]", ["mul(add(x, y), add(x, y))"],
                          ["add(mul(x, x), mul(y, y))"]),
    # With no sizes in the axioms this is proved (both sides are sums of two products), though
    # where `a` ends and `c` begins differs.
    "parts that do not meet": ("a[m, k], b[m, j], c[i, n], d[l, n]",
                               ["mm(cat((a, b), -1), cat((c, d), -2))"],
                               ["add(mm(a, c), mm(b, d))"]),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_true_rules_are_proved(name: str) -> None:
    assert prove_by_axioms(made(name, TRUE[name])) == ""


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_rules_are_refused(name: str) -> None:
    reason = prove_by_axioms(made(name, FALSE[name]))
    assert reason.startswith("no axioms" if name in NOT_READ else "Z3 says")


@pytest.mark.parametrize("name", WRONG)
def test_other_wrong_rules_are_refused_by_both_proofs(name: str) -> None:
    found = made(name, WRONG[name])
    reason = prove_by_axioms(found)
    assert reason.startswith("no axioms" if name in NOT_READ else "Z3 says")
    assert prove(found)


def test_no_shape_is_said_of_what_has_another_rank() -> None:
    """As the critic found it: with two shapes."""
    parts = "transpose(linear(x, w), -1, -2), transpose(linear(y, w), -1, -2)"
    found = rule("batches", "x[s, b, k], y[r, b, k], w[n, k]",
                 [f"split_with_sizes(cat(({parts}), -3), (r, s), -3)[0]"],
                 ["transpose(linear(x, w), -1, -2)"])  # fmt: skip
    assert prove_by_axioms(found)
    assert prove(found)


def test_what_is_read_depends_on_no_number_of_dims_in_front() -> None:
    found = rule("first", "x[*, k]", ["softmax(x, 0)"], ["softmax(x, 0)"])
    assert "how many dims are in front" in prove_by_axioms(found)


def test_parts_meet_where_their_sizes_say_so() -> None:
    """The control of the last of these: with `k` rows of `c` it is proved."""
    meets = "a[m, k], b[m, j], c[k, n], d[j, n]"
    assert prove_by_axioms(made("meet", (meets, *WRONG["parts that do not meet"][1:]))) == ""
    assert prove(made("meet", (meets, *WRONG["parts that do not meet"][1:]))) == ""


@pytest.mark.parametrize(
    ("name", "inputs", "left", "by_axioms"),
    [
        ("true of squares only", "x[n, n]", "mean(sum(x, (-1,)), (-1,))", False),
        ("true of equal parts only", "x[b, k], y[b, k]",
         "split_with_sizes(cat((x, y), -1), (k, k), -1)[0]", True),
        ("a scale of rows of parts", "x[b, k], y[b, j], p[k], q[j]",
         "mul(cat((x, y), -1), cat((p, q), -1))", True),
    ],
)  # fmt: skip
def test_rules_that_lack_a_condition_are_proved_with_it(
    name: str, inputs: str, left: str, by_axioms: bool
) -> None:
    found = made(name, (inputs, [left], WRONG[name][2]))
    assert prove(found) == ""
    assert (prove_by_axioms(found) == "") == by_axioms  # no axiom is of sums of sums


def test_each_proof_alone_refuses_twenty_wrong_rules() -> None:
    """All that the tests above and `test_rules` give them."""
    assert len(FALSE) + len(WRONG) >= 30
    assert len(REFUSED) + len(WRONG) >= 25


def test_what_no_axiom_speaks_of_is_refused() -> None:
    assert prove_by_axioms(rule("heads", *TRUE["heads"])).startswith("no axioms: ")
    other = rule("other", "x[a, b]", ["view(x, (b, a))"], ["t(x)"])
    assert prove_by_axioms(other) == "no axioms: view"
    of_batch = ["batch_norm(x, None, None, m, m, True, 0.1, 1e-05)"]
    normed = rule("normed", "x[b, k], m[k]", of_batch, of_batch)
    reason = prove_by_axioms(normed)
    assert reason.startswith("no axioms: ")
    assert reason.endswith("statistics of the batch")
    turned = rule("turned", "x[a, b, c]", ["transpose(x, 0, 2)"], ["permute(x, (2, 1, 0))"])
    assert prove_by_axioms(turned) == "no axioms: transpose of other dims"
    assert len(axioms()) > 100


NUMBERS = Numbers()


def _cat(k: int, a: Ints, b: Ints) -> Ints:
    return NUMBERS.concat([a, b], k)


def _cut(k: int, a: Ints, s: int, e: int) -> Ints:
    if not 0 <= s < e <= a.shape[k]:
        raise ValueError("no such place")
    return np.take(a, range(s, e), axis=k)


def _mm(a: Ints, b: Ints) -> Ints:
    lead = [f"l{i}" for i in range(a.ndim - 1)]
    if b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError("no product")
    return NUMBERS.product([[*lead, "k"], ["k", "n"]], [*lead, "n"], [a, b])


def _bmm(a: Ints, b: Ints) -> Ints:
    if a.ndim < 3 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError("no products")
    lead = [f"l{i}" for i in range(a.ndim - 2)]
    return NUMBERS.product([[*lead, "m", "k"], [*lead, "k", "n"]], [*lead, "m", "n"], [a, b])


def _pair(a: Ints, b: Ints, made: Ints) -> Ints:
    if a.shape != b.shape:
        raise ValueError("other shapes")
    return made % PRIME


def _row(a: Ints, v: Ints, made: Ints) -> Ints:
    if v.ndim != 1 or v.shape[0] != a.shape[-1]:
        raise ValueError("no row")
    return made % PRIME


def _column(a: Ints, v: Ints) -> Ints:
    if v.ndim != 1 or a.ndim < 2 or len(v) != a.shape[-2]:
        raise ValueError("no column")
    return a * v[:, None] % PRIME


def _turned(a: Ints) -> Ints:
    if a.ndim < 2:
        raise ValueError("no matrix")
    return np.swapaxes(a, -1, -2)


def _look(a: Ints, b: Ints) -> Ints:
    if a.ndim != 2:
        raise ValueError("no table")
    found: Ints = a[b % len(a)]
    return found


def _conv(i: int, a: Ints, b: Ints) -> Ints:
    if a.ndim != 3 or b.ndim != 3 or a.shape[1] != b.shape[1] or a.shape[2] < b.shape[2]:
        raise ValueError("no convolution")
    moved = NUMBERS.windows(a, 2, Window(b.shape[2], 1 + i % 2))
    return NUMBERS.product([["b", "c", "p", "r"], ["o", "c", "r"]], ["b", "o", "p"], [moved, b])


def _channel(a: Ints, v: Ints, dim: int, made: Callable[[Ints, Ints], Ints]) -> Ints:
    if v.ndim != 1 or a.ndim < 3 or len(v) != a.shape[dim]:
        raise ValueError("no channels")
    return made(a, v.reshape(-1, *[1] * (a.ndim - dim - 1))) % PRIME


def _pool(i: int, a: Ints) -> Ints:
    if a.ndim != 3 or a.shape[2] < 1 + i % 2:
        raise ValueError("no windows")
    found: Ints = NUMBERS.windows(a, 2, Window(1 + i % 2)).sum(axis=3) % PRIME
    return found


def _dim(a: Ints, k: int) -> int:
    return a.shape[k] if -k <= a.ndim else 0


READING = {
    "dim": _dim,
    "width": lambda i, s, k: (s - k) // (1 + i % 2) + 1,
    "mm": _mm,
    "bmm": _bmm,
    "t": _turned,
    "add": lambda a, b: _pair(a, b, a + b),
    "mul": lambda a, b: _pair(a, b, a * b),
    "add_row": lambda a, v: _row(a, v, a + v),
    "mul_row": lambda a, v: _row(a, v, a * v),
    "mul_column": _column,
    "scale": lambda q, a: a * q % PRIME,
    "cat": _cat,
    "cut": _cut,
    "f": lambda i, a: NUMBERS.opaque(f"f{i}", a),
    "rows": lambda i, k, a: NUMBERS.rows(f"g{i}", a, k),
    "total": lambda k, a: a.sum(axis=k) % PRIME,
    "look": _look,
    "conv": _conv,
    "sums": _conv,
    "add_channel": lambda a, v: _channel(a, v, 1, np.add),
    "mul_channel": lambda a, v: _channel(a, v, 1, np.multiply),
    "mul_kernel": lambda a, v: _channel(a, v, 0, np.multiply),
    "pool": _pool,
    "And": lambda *own: all(own),
    "alike": lambda a, b: a.shape == b.shape,
    "beside": lambda k, a, b: all(_dim(a, o) == _dim(b, o) for o in DIMS if o != k),
    "matrix": lambda a: a.ndim <= 2,
}


def side(text: str, values: dict[str, Any]) -> Any:
    """What a side is; None where it is no tensor."""
    try:
        return np.asarray(eval(text, READING, values))
    except (ValueError, IndexError, np.exceptions.AxisError, NotExpressed):
        return None


def holds(line: str, dims: Mapping[str, int], rng: np.random.Generator) -> bool | None:
    """Whether an axiom holds for tensors that are drawn, and whether what Z3 makes of either side
    is a tensor where that one is; None where neither is, or the condition does not hold.
    """
    values: dict[str, Any] = dict(dims)
    like = rng.integers(1, 4, rng.integers(1, 4))
    for name in "abcdv":
        shape = [int(rng.integers(1, 4)) if rng.random() < 0.2 else int(n) for n in like]
        if rng.random() < 0.3 or name == "v":
            shape = shape[int(rng.integers(0, len(shape))) :]
        values[name] = rng.integers(0, PRIME, shape)
    values |= {name: int(rng.integers(0, 6)) for name in "ijseqr"}
    values["j"] = -1 - values["j"] % 2
    equation, _, condition = line.partition(" if ")
    if condition and not side(condition, values):
        return None
    texts = equation.split(" == ")
    used = [set(re.findall(r"\b[a-z]\b", text)) for text in texts]
    made = [side(text, values) for text in texts]
    for one, other, own, names in zip(made, made[::-1], used, used[::-1], strict=True):
        if one is not None and other is None and own >= names:
            return False
    one, other = made
    if one is None or other is None:
        return None
    return one.shape == other.shape and bool((one == other).all())


EVERY = list(every_equation())


@pytest.mark.sample(85)
@pytest.mark.parametrize(("line", "dims"), EVERY, ids=lambda own: str(own)[:40])
def test_axioms_hold_in_numbers(line: str, dims: dict[str, int]) -> None:
    rng, fits = np.random.default_rng(0), 0
    for _ in range(4000):
        found = holds(line, dims, rng)
        assert found is not False
        fits += found is True
        if fits == 8:
            return
    assert fits, "no shapes were drawn that fit"


@pytest.mark.parametrize(
    "line",
    [
        "mm(a, b) == mm(b, a)",
        "f(i, add(a, b)) == add(f(i, a), f(i, b))",
        "t(a) == a",
        # A batch of matrices has another rank than one.
        "t(mm(a, b)) == mm(t(b), t(a))",
        # What is beside each other as sums was not beside each other.
        "total(-1, add(a, b)) == add(total(-1, a), total(-1, b))",
        "cat(-1, cat(-2, a, b), cat(-2, c, d)) == cat(-2, cat(-1, a, c), cat(-1, b, d))"
        " if dim(a, -2) == dim(c, -2)",
    ],
)
def test_a_wrong_axiom_would_be_seen(line: str) -> None:
    rng = np.random.default_rng(0)
    assert any(holds(line, {}, rng) is False for _ in range(4000))


def shapes_differ(line: str, dims: Mapping[str, int]) -> Any:
    """What Z3 says of an equation whose sides have two shapes, by what is said of shapes alone."""
    left, right, condition = parts(line, dims)
    solver, (s, e) = z3.Solver(), (VARIABLES["s"], VARIABLES["e"])
    solver.set("auto_config", False)
    solver.set("smt.mbqi", False)
    solver.set("rlimit", 1_000_000)
    width, dim = FUNCTIONS["width"], FUNCTIONS["dim"]
    at_each = width(0, s, e)
    solver.add(*of_shapes(), z3.ForAll([s, e], at_each == s - e + 1, patterns=[at_each]))
    if condition is not None:
        solver.add(condition)
    solver.add(z3.Or(*(dim(left, k) != dim(right, k) for k in DIMS)))
    return solver.check()


@pytest.mark.parametrize("j", DIMS)
def test_no_axiom_says_more_of_shapes_than_the_shapes_do(j: int) -> None:
    """Or sizes would be equal of what is no tensor, and then of all that has these sizes."""
    for line, dims in EVERY:
        of_any = "total(j" in line
        if (of_any or j == DIMS[0]) and not line.startswith(("width", "sums")):
            own = {**dims, "j": j} if of_any else dims
            assert shapes_differ(line, own) == z3.unsat, line


@pytest.mark.parametrize("line", ["add(a, b) == add(b, a)", "t(mm(a, b)) == mm(t(b), t(a))"])
def test_an_axiom_that_says_more_would_be_seen(line: str) -> None:
    assert shapes_differ(line, {}) != z3.unsat


def test_work_is_limited() -> None:
    assert prove_by_axioms(made("low rank", TRUE["low rank"]), rlimit=10) == "Z3 says unknown"
