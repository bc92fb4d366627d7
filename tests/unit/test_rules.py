"""Rules from text: proved, refused, and their counterexamples."""

import pytest

from parloom.errors import InputError
from parloom.rewrite.rewrites import PROOF, TWICE, proof_words
from parloom.rewrite.rules import (
    Rule,
    counterexample,
    difference,
    only_moves,
    prove,
    rule,
    with_lead,
    with_room,
)
from parloom.rewrite.terms import parse_inputs, parse_term

XW = "x[*, k], w0[n0, k], w1[n1, k]"
TRUE = {
    "merge linear": (
        XW,
        ["linear(x, w0)", "linear(x, w1)"],
        [f"split_with_sizes(linear(x, cat((w0, w1), 0)), (n0, n1), -1)[{i}]" for i in (0, 1)],
    ),
    "merge linear with bias": (
        f"{XW}, b0[n0], b1[n1]",
        ["linear(x, w0, b0)", "linear(x, w1, b1)"],
        [
            "split_with_sizes(linear(x, cat((w0, w1), 0), cat((b0, b1), 0)),"
            f" (n0, n1), -1)[{i}]"
            for i in (0, 1)
        ],
    ),
    "linear of a sum": (
        "x[*, k], y[*, k], w[n, k]",
        ["linear(add(x, y), w)"],
        ["add(linear(x, w), linear(y, w))"],
    ),
    "linear of parts": (
        "x[*, k0], y[*, k1], w0[n, k0], w1[n, k1]",
        ["add(linear(x, w0), linear(y, w1))"],
        ["linear(cat((x, y), -1), cat((w0, w1), 1))"],
    ),
    "low rank": (
        "x[*, k], a[r, k], b[n, r]",
        ["linear(linear(x, a), b)"],
        ["linear(x, mm(b, a))"],
    ),
    "scaled linear": ("x[*, k], w[n, k]", ["mul(linear(x, w), 0.5)"], ["linear(mul(x, 0.5), w)"]),
    "scaled outputs": (
        "x[*, k], w[n, k], s[n]",
        ["mul(linear(x, w), s)"],
        ["linear(x, mul(w, unsqueeze(s, -1)))"],
    ),
    "function of parts": (
        "x[*, a], y[*, b]",
        ["cat((gelu(x), gelu(y)), -1)"],
        ["gelu(cat((x, y), -1))"],
    ),
    "function with an argument": (
        "x[*, a], y[*, b]",
        ["cat((leaky_relu(x, 0.2), leaky_relu(y, 0.2)), -1)"],
        ["leaky_relu(cat((x, y), -1), 0.2)"],
    ),
    "looked up rows": (
        "t[v, k], at[*] < v, w[n, k]",
        ["linear(embedding(t, at), w)"],
        ["embedding(linear(t, w), at)"],
    ),
    "softmax of samples": (
        "x[a, k], y[b, k]",
        ["softmax(cat((x, y), 0), -1)"],
        ["cat((softmax(x, -1), softmax(y, -1)), 0)"],
    ),
    "mean of a linear": (
        "x[b, s, k], w[n, k]",
        ["mean(linear(x, w), (1,))"],
        ["linear(mean(x, (1,)), w)"],
    ),
    "heads": (
        "x[b, s, k], w[h * d, k]",
        ["transpose(view(linear(x, w), (b, s, h, d)), 1, 2)"],
        ["einsum('bsk,hdk->bhsd', x, view(w, (h, d, k)))"],
    ),
    "norm of parts": (
        "x[a, k], y[b, k], w[k], c[k]",
        ["layer_norm(cat((x, y), 0), (k,), w, c, 1e-05)"],
        ["cat((layer_norm(x, (k,), w, c, 1e-05), layer_norm(y, (k,), w, c, 1e-05)), 0)"],
    ),
    "a convolution of one place": (
        "x[b, c, p], w[o, c, 1]",
        ["conv1d(x, w)"],
        ["transpose(linear(transpose(x, 1, 2), view(w, (o, c))), 1, 2)"],
    ),
    "channels side by side": (
        "x[b, c, p], y[b, d, p], w[o, c, 1], v[o, d, 1]",
        ["add(conv1d(x, w), conv1d(y, v))"],
        ["conv1d(cat((x, y), 1), cat((w, v), 1))"],
    ),
    "kernels side by side": (
        "x[b, c, p], w[o, c, 1], v[n, c, 1]",
        ["conv1d(x, w)"],
        ["split_with_sizes(conv1d(x, cat((w, v), 0)), (o, n), 1)[0]"],
    ),
    "groups of channels": (
        "x[b, c, p], y[b, c, p], w[o, c, 1], v[o, c, 1]",
        ["cat((conv1d(x, w), conv1d(y, v)), 1)"],
        ["conv1d(cat((x, y), 1), cat((w, v), 0), None, 1, 0, 1, 2)"],
    ),
    "windows of channels": (
        "x[b, c, p], y[b, d, p]",
        ["max_pool1d(cat((x, y), 1), 2)"],
        ["cat((max_pool1d(x, 2), max_pool1d(y, 2)), 1)"],
    ),
    "means of windows are kernels": (
        "x[b, c, p], w[o, c, 1]",
        ["conv1d(avg_pool1d(x, 2), w)"],
        ["avg_pool1d(conv1d(x, w), 2)"],
    ),
    "halves beside each other": (
        "x[*, k], y[*, k]",
        ["chunk(cat((x, y), -1), 2, -1)[1]"],
        ["y"],
    ),
    "a stack of parts": (
        "x[a, k], y[a, k], w[n, k]",
        ["linear(stack((x, y), 0), w)"],
        ["stack((linear(x, w), linear(y, w)), 0)"],
    ),
    "minus minus": ("x[*, k]", ["neg(neg(x))"], ["x"]),
    "less than nothing": ("x[*, k], y[*, k]", ["sub(x, y)"], ["add(x, neg(y))"]),
}  # fmt: skip
FALSE = {
    "parts in another order": (
        XW,
        ["linear(x, w0)", "linear(x, w1)"],
        [f"split_with_sizes(linear(x, cat((w1, w0), 0)), (n1, n0), -1)[{i}]" for i in (0, 1)],
    ),
    "one bias for two": (
        "x[*, k], w0[n, k], w1[n, k], b[n]",
        ["add(linear(x, w0, b), linear(x, w1, b))"],
        ["linear(x, add(w0, w1), b)"],
    ),
    "true of squares": (
        "x[n, n], y[n, n]", ["mm(x, y)"], ["mm(y, x)"],
    ),
    "true of another function": ("x[*, k]", ["gelu(x)"], ["relu(x)"]),
    "true of another argument": ("x[*, k]", ["leaky_relu(x, 0.2)"], ["leaky_relu(x, 0.1)"]),
    "function of a sum": ("x[*, k], y[*, k]", ["relu(add(x, y))"], ["add(relu(x), relu(y))"]),
    "softmax of parts": (
        "x[*, a], y[*, b]",
        ["softmax(cat((x, y), -1), -1)"],
        ["cat((softmax(x, -1), softmax(y, -1)), -1)"],
    ),
    "mean of unequal parts": (
        "x[a, k], y[b, k]",
        ["mean(cat((x, y), 0), (0,))"],
        ["mul(add(mean(x, (0,)), mean(y, (0,))), 0.5)"],
    ),
    "heads and their widths": (
        "x[b, s, h * d]",
        ["transpose(view(x, (b, s, h, d)), 2, 3)"],
        ["view(x, (b, s, d, h))"],
    ),
    "a scale before a function": ("x[*, k]", ["gelu(mul(x, 2))"], ["mul(gelu(x), 2)"]),
    "a norm scaled before": (
        "x[*, k], w[k]",
        ["layer_norm(mul(x, 2), (k,), w, None, 1e-05)"],
        ["mul(layer_norm(x, (k,), w, None, 1e-05), 2)"],
    ),
    "groups of other channels": (
        "x[b, c, p], y[b, c, p], w[o, c, 1], v[o, c, 1]",
        ["cat((conv1d(x, w), conv1d(y, v)), 1)"],
        ["conv1d(cat((x, y), 1), cat((v, w), 0), None, 1, 0, 1, 2)"],
    ),
    "norms with another eps": (
        "x[*, k]",
        ["layer_norm(x, (k,), None, None, 1e-05)"],
        ["layer_norm(x, (k,), None, None, 1e-06)"],
    ),
}  # fmt: skip


def made(name: str, given: tuple[str, list[str], list[str]]) -> Rule:
    return rule(name, *given)


@pytest.mark.parametrize("name", TRUE)
def test_true_rules_are_proved_and_have_no_counterexample(name: str) -> None:
    found = made(name, TRUE[name])
    assert prove(found) == ""
    assert [counterexample(found, seed) for seed in range(10)] == [""] * 10


@pytest.mark.parametrize("name", FALSE)
def test_wrong_rules_are_refused_and_have_one(name: str) -> None:
    found = made(name, FALSE[name])
    assert prove(found)
    assert any(counterexample(found, seed) for seed in range(10))


@pytest.mark.parametrize("name", [*TRUE, *FALSE])
def test_text_is_read_as_it_is_written(name: str) -> None:
    inputs, left, right = (TRUE | FALSE)[name]
    declared = parse_inputs(inputs)
    assert ", ".join(map(str, declared)) == inputs
    for text in (*left, *right):
        assert str(parse_term(text, declared)) == text


@pytest.mark.parametrize(
    ("inputs", "term", "said"),
    [
        ("x[k", "x", "'x[k' is no input"),
        ("x[k - 1]", "x", "'k - 1' is no size"),
        ("x[(a + b) * c]", "x", "is no size"),
        ("x[k]", "relu(x", "cannot be read"),
        ("x[k]", "relu(lambda: 0)", "is no argument of a term"),
        ("x[k]", "3", "'3' is no term"),
    ],
)
def test_text_that_is_no_rule_is_told(inputs: str, term: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        parse_term(term, parse_inputs(inputs))
    assert said in str(error.value)


def test_an_operator_that_says_nothing_is_told() -> None:
    with pytest.raises(InputError, match="sort says not what it computes"):
        prove(rule("sorted", "x[k]", ["sort(x)"], ["x"]))
    with pytest.raises(InputError, match="2 outputs on the left, 1 on the right"):
        rule("uneven", "x[k]", ["x", "x"], ["x"])


LED = {
    "sum of products": ("x[b, k], y[b, k], w[n, k]", "linear(add(x, y), w)",
                        "add(linear(x, w), linear(y, w))", "x[*, k], y[*, k], w[n, k]"),
    "mean of rows": ("x[b, s, k], w[n, k]", "linear(mean(x, (-2,)), w)",
                     "mean(linear(x, w), (-2,))", "x[*, s, k], w[n, k]"),
    "rows put together": ("x[b, k], y[b, k]", "gelu(cat((x, y), -1))",
                          "cat((gelu(x), gelu(y)), -1)", "x[*, k], y[*, k]"),
}  # fmt: skip


@pytest.mark.parametrize("name", LED)
def test_rules_hold_for_any_dims_in_front(name: str) -> None:
    inputs, left, right, general = LED[name]
    found = with_lead(rule(name, inputs, [left], [right]))
    assert found is not None
    assert ", ".join(map(str, found.inputs)) == general
    assert not any(counterexample(found, seed) for seed in range(20))
    assert with_lead(found) is None


@pytest.mark.parametrize(
    ("inputs", "left", "right"),
    [
        ("x[b, k]", "sum(x, (0,))", "sum(x, (-2,))"),  # a dim counted from the first
        ("x[b, b]", "sum(x, (-1,))", "sum(x, (-1,))"),  # the size is another one, too
        ("x[a, b, c, k]", "split_with_sizes(x, (a,), 0)[0]", "x"),  # it is told
        ("x[b, k], w[k, n]", "mm(x, w)", "mm(x, w)"),  # of matrices alone
    ],
)
def test_rules_that_hold_for_their_rank_alone(inputs: str, left: str, right: str) -> None:
    own = rule("own", inputs, [left], [right])
    assert prove(own) == ""
    assert with_lead(own) is None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_merged_products_are_the_products(count: int, biased: bool) -> None:
    """`explain` says that merges are proved as rules are."""
    numbers = range(count)
    weights, biases = ", ".join(f"w{i}" for i in numbers), ", ".join(f"b{i}" for i in numbers)
    inputs = ["x[*, k]", *(f"w{i}[n{i}, k]" for i in numbers)]
    inputs += [f"b{i}[n{i}]" for i in numbers] if biased else []
    left = [f"linear(x, w{i}{f', b{i}' * biased})" for i in numbers]
    right = [f"parloom.linears(x, ({weights}){f', ({biases})' * biased})[{i}]" for i in numbers]
    assert prove(rule("merge", ", ".join(inputs), left, right)) == ""
    assert prove(rule("merge", ", ".join(inputs), left, right[::-1]))


def test_drawn_shapes_have_room_for_windows() -> None:
    """Images are as large as kernels of 13 places, so that both sides are compared."""
    kernel = " + ".join("1" * 13)
    inputs = f"x[b, c, p], w[n, c, {kernel}]"
    found = rule("own", inputs, ["mul(conv1d(x, w), 0.5)"], ["conv1d(x, mul(w, 0.5))"])
    assert with_room(found, {"b": 1, "c": 2, "p": 1, "n": 1}) == {"b": 1, "c": 2, "p": 13, "n": 1}
    assert [counterexample(found, seed) for seed in range(5)] == [""] * 5
    wrong = rule("wrong", inputs, ["mul(conv1d(x, w), 0.5)"], ["conv1d(x, mul(w, 0.25))"])
    assert all(counterexample(wrong, seed) for seed in range(5))
    assert not only_moves(wrong)


def test_windows_that_fit_on_one_side_only_are_told() -> None:
    inputs = "x[b, c, p], w[n, c, 1 + 1 + 1]"
    assert "no shapes fit" in difference(
        rule("own", inputs, ["conv1d(x, w)"], ["conv1d(x, w)"]),
        {"b": 2, "c": 3, "p": 2, "n": 4},
        1,
        0,
    )


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (["linear_add_954517"], f"{PROOF}; {TWICE}"),
        (["merge_linear"], f"{PROOF}, found as the rewrite was made; there is no second proof"),
        (
            ["mul_linear_069230_0p5", "linear_add_954517"],
            f"{PROOF}; {TWICE}: mul_linear_069230_0p5 (as mul_linear_069230), linear_add_954517",
        ),
        (
            ["linear_add_954517", "fold_scale", "linear_along_d0"],
            f"{PROOF}; {TWICE}: linear_add_954517; no second proof of fold_scale, linear_along_d0",
        ),
    ],
)
def test_it_is_said_which_proofs_rules_have(rules: list[str], said: str) -> None:
    assert proof_words(rules) == said
